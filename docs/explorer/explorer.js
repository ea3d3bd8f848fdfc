"use strict";
// The explorer: one cell of a grid that was computed before, as curves and words.
//
// The page holds its numbers as JSON; what is in them says limitformer/figures/explorer/parts.py. Nothing is computed or
// interpolated here: a slider steps from one computed value to the next. What is chosen stands in the address's hash.

const data = JSON.parse(document.getElementById("explorer-data").textContent);
const root = document.getElementById("explorer");
const chosen = {}; // axis → index of its value
const turn = { yaw: 30, tilt: 20 }; // of the sphere, in degrees
const redraws = []; // what follows a choice

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [340, 226, 46, 10, 24, 36];
const TICKS = 5;

// Elements

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const html = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

// The grid

const axisOf = (name) => data.axes.find((axis) => axis.name === name);
const valueOf = (name) => axisOf(name).values[chosen[name]];
const isShown = ({ only = {} }) => Object.entries(only).every(([name, value]) => valueOf(name) === value);
const textOf = (axis, k) => (axis.texts ? axis.texts[k] : say(axis.values[k]));

function cellOf({ by, cells }) {
  return cells[by.reduce((index, name) => index * axisOf(name).values.length + chosen[name], 0)];
}

function say(value) {
  if (value === null) return "–";
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  const text = size >= 1e5 || (size > 0 && size < 1e-3) ? value.toExponential() : String(value);
  return text.replace("e+", "e").replace("-", "−");
}

// The address: what is chosen, so that a view can be sent to somebody

function writeAddress() {
  const pairs = data.axes.filter(isShown).map(({ name }) => [name, valueOf(name)]);
  if (data.sphere) pairs.push(["turn", `${turn.yaw},${turn.tilt}`]);
  history.replaceState(null, "", `#${new URLSearchParams(pairs)}`);
}

function readAddress() {
  const found = new URLSearchParams(location.hash.slice(1));
  for (const { name, values, start } of data.axes) {
    const index = values.findIndex((value) => String(value) === found.get(name));
    chosen[name] = index >= 0 ? index : chosen[name] ?? start;
  }
  const angles = (found.get("turn") ?? "").split(",").map(Number);
  if (angles.length === 2 && angles.every(Number.isFinite)) [turn.yaw, turn.tilt] = angles;
}

function redraw() {
  for (const each of redraws) each();
}

// Controls

function controls(groups) {
  const sets = groups.map((group) => {
    const inner = data.axes.filter((axis) => axis.group === group).map(control);
    return html("fieldset", {}, html("legend", {}, group), ...inner);
  });
  return html("form", { "aria-label": groups.join(", ") }, ...sets);
}

function control(axis) {
  const id = `axis-${axis.name}`;
  const said = html("output", { for: id });
  const input = axis.kind === "choice" ? list(axis, id) : slider(axis, id);
  const label = html("label", { for: id }, `${axis.label} `, ...(axis.kind === "choice" ? [] : [said]));
  const whole = html("div", { class: "control" }, label, input);
  input.addEventListener("input", () => {
    chosen[axis.name] = Number(input.value);
    writeAddress();
    redraw();
  });
  redraws.push(() => {
    whole.hidden = !isShown(axis);
    input.value = chosen[axis.name];
    said.textContent = textOf(axis, chosen[axis.name]);
    input.setAttribute("aria-valuetext", said.textContent);
  });
  return whole;
}

const slider = (axis, id) => html("input", { type: "range", id, min: 0, max: axis.values.length - 1, step: 1 });
const list = (axis, id) =>
  html("select", { id }, ...axis.values.map((_, k) => html("option", { value: k }, textOf(axis, k))));

// Scales

function scaleOf(low, high, log, start, end) {
  const by = log ? Math.log : (x) => x;
  const place = (x) => start + ((by(x) - by(low)) / (by(high) - by(low))) * (end - start);
  return { low, high, log, place: (x) => place(Math.min(Math.max(x, low), high)) };
}

/** Whole decades of what spans much, so that a picture's scale seldom moves; else from 0. */
function limits(plot, columns) {
  if (plot.range) return plot.range;
  const known = columns.flat().filter((x) => x !== null && (!plot.log || x > 0));
  if (!known.length) return plot.log ? [1, 10] : [0, 1];
  const [low, high] = [Math.min(...known), Math.max(...known)];
  if (!plot.log) return [Math.min(0, low), high * 1.05 || 1];
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  return [10 ** first, 10 ** Math.max(last, first + 1)];
}

function ticks({ low, high, log }) {
  if (!log) return multiples(low, high);
  const [first, last] = [Math.round(Math.log10(low)), Math.round(Math.log10(high))];
  const step = Math.max(1, Math.ceil((last - first) / TICKS));
  const powers = Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, k) => 10 ** (first + k * step));
  return powers.length > 2 ? powers : powers.flatMap((x) => [x, 2 * x, 5 * x]).filter((x) => x <= high);
}

function multiples(low, high) {
  const power = 10 ** Math.floor(Math.log10((high - low) / TICKS));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= (high - low) / TICKS);
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, k) => Number(((first + k) * step).toPrecision(12)));
}

// Plots

const text = (x, y, label, anchor) => svg("text", { x, y, "text-anchor": anchor }, label);

function path(points, kind, end = "") {
  const places = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`);
  return svg("path", { class: kind, d: `M${places.join("L")}${end}` });
}

/** Points in runs without a gap. */
function runs(points) {
  const found = [[]];
  for (const point of points) {
    if (point) found.at(-1).push(point);
    else found.push([]);
  }
  return found.filter((run) => run.length);
}

class Plot {
  constructor(plot) {
    this.plot = plot;
    this.pointed = null; // the place that a pointer or a key has asked for
    this.drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0 });
    this.said = html("output", { class: "said" });
    this.numbers = html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Numbers: ${plot.title}` });
    const opened = html("details", {}, html("summary", {}, "numbers"), this.numbers);
    opened.addEventListener("toggle", () => this.table());
    const caption = html("figcaption", {}, html("strong", {}, plot.title), " ", this.legend());
    this.figure = html("figure", {}, caption, this.drawing, this.said, opened);
    this.opened = opened;
    this.listen();
    redraws.push(() => this.draw());
  }

  legend() {
    const { band, curves } = this.plot;
    const kinds = [...curves.map(({ kind, label }) => [`line ${kind}`, label]), ...(band ? [["band", band.label]] : [])];
    const swatch = (kind) => svg("svg", { class: "swatch", viewBox: "0 0 24 10", "aria-hidden": "true" },
      kind === "band" ? svg("rect", { class: kind, width: 24, height: 10 }) : svg("path", { class: kind, d: "M0,5L24,5" }));
    return html("span", { class: "legend" }, ...kinds.map(([kind, label]) => html("span", {}, swatch(kind), ` ${label}`)));
  }

  listen() {
    this.drawing.addEventListener("pointermove", (event) => {
      const box = this.drawing.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * WIDTH;
      const gaps = this.xs.map((x) => Math.abs(this.x.place(x) - at));
      this.point(gaps.indexOf(Math.min(...gaps)));
    });
    this.drawing.addEventListener("pointerleave", () => this.point(null));
    this.drawing.addEventListener("blur", () => this.point(null));
    this.drawing.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.point(Math.min(Math.max((this.at ?? (step > 0 ? -1 : this.xs.length)) + step, 0), this.xs.length - 1));
    });
  }

  point(index) {
    this.pointed = index;
    this.draw();
  }

  draw() {
    this.figure.hidden = !isShown(this.plot);
    if (this.figure.hidden) return;
    const { plot } = this;
    this.columns = cellOf(plot);
    this.xs = plot.at ?? this.columns[0].map((_, k) => k + (plot.first ?? 0));
    this.x = scaleOf(this.xs[0], this.xs.at(-1), false, LEFT + 4, WIDTH - RIGHT - 4);
    this.y = scaleOf(...limits(plot, this.columns), plot.log, HEIGHT - BOTTOM, TOP);
    const marked = plot.marker ? this.xs.indexOf(valueOf(plot.marker)) : -1;
    this.at = this.pointed ?? (marked >= 0 ? marked : null);
    this.drawing.replaceChildren(...this.axes(), ...this.band(), ...plot.curves.flatMap((each) => this.curve(each)),
      ...this.marks());
    this.words();
    if (this.opened.open) this.table();
  }

  axes() {
    const rows = ticks(this.y).map((tick) => [this.y.place(tick), tick]);
    const lines = rows.map(([y]) => svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
    const labels = rows.map(([y, tick]) => text(LEFT - 5, y + 4, say(Number(tick.toPrecision(6))), "end"));
    const whole = (x) => this.plot.at || Number.isInteger(x);
    const below = ticks(this.x).filter(whole).map((x) => text(this.x.place(x), HEIGHT - BOTTOM + 15, say(x), "middle"));
    const names = [text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, this.plot.x, "middle"), text(2, 12, this.plot.y, "start")];
    return [...lines, ...labels, ...below, ...names];
  }

  points(column) {
    return this.columns[column].map((y, k) => (y === null ? null : [this.x.place(this.xs[k]), this.y.place(y)]));
  }

  band() {
    if (!this.plot.band) return [];
    const [low, high] = [this.points(this.plot.band.low), this.points(this.plot.band.high)];
    const both = low.map((point, k) => point && high[k] && [point, high[k]]);
    const around = (run) => [...run.map(([a]) => a), ...run.map(([, b]) => b).reverse()];
    return runs(both).map((run) => path(around(run), "band", "Z"));
  }

  curve({ kind, column }) {
    return runs(this.points(column)).map((run) => path(run, `line ${kind}`));
  }

  /** A line and dots where the curves are read off. */
  marks() {
    if (this.at === null) return [];
    const x = this.x.place(this.xs[this.at]);
    const dots = this.plot.curves.filter(({ column }) => this.columns[column][this.at] !== null).map(({ kind, column }) =>
      svg("circle", { class: kind, cx: x, cy: this.y.place(this.columns[column][this.at]), r: 4 }));
    return [svg("line", { class: "mark", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }), ...dots];
  }

  words() {
    const first = this.at ?? 0;
    const places = this.at === null ? [first, this.xs.length - 1] : [first];
    const told = places.map((k) => `${this.plot.x} ${say(this.xs[k])}: ${this.values(k)}`).join("; ");
    this.said.textContent = told;
    this.drawing.setAttribute("aria-label", `${this.plot.title} by ${this.plot.x}. At ${told}`);
  }

  values(k) {
    const { band, curves } = this.plot;
    const known = curves.filter(({ column }) => this.columns[column][k] !== null);
    const lines = known.map(({ label, column }) => `${label} ${say(this.columns[column][k])}`);
    const edges = band && this.columns[band.low][k] !== null ? [band.low, band.high].map((c) => say(this.columns[c][k])) : [];
    return [...lines, ...(edges.length ? [`${band.label} ${edges.join(" to ")}`] : [])].join(", ") || "none";
  }

  table() {
    if (!this.opened.open) return;
    const { band, curves, x } = this.plot;
    const shown = [...curves, ...(band ? [{ label: "low", column: band.low }, { label: "high", column: band.high }] : [])];
    const head = [x, ...shown.map(({ label }) => label)].map((each) => html("th", { scope: "col" }, each));
    const rows = this.xs.map((at, k) => [at, ...shown.map(({ column }) => this.columns[column][k])]);
    const body = rows.map((row) => html("tr", {}, ...row.map((each) => html("td", {}, say(each)))));
    this.numbers.replaceChildren(html("table", {}, html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...body)));
  }
}

// Facts in words

function facts() {
  const listed = html("dl", { class: "facts", "aria-live": "polite" });
  redraws.push(() => {
    const known = data.facts.filter((fact) => isShown(fact) && cellOf(fact) !== null);
    const worded = (found) => (Array.isArray(found) ? found : [found]).map((each) => html("dd", {}, say(each)));
    listed.replaceChildren(...known.flatMap((fact) => [html("dt", {}, fact.label), ...worded(cellOf(fact))]));
  });
  return listed;
}

function about() {
  const { limitformer_version: version, seed, samples, command } = data.about;
  const rows = { samples, seed, version, "made by": command };
  const pairs = Object.entries(rows).flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, String(value))]);
  const links = root.dataset.alone ? [html("p", {}, html("a", { href: root.dataset.alone, download: "" }, "This page as one file"),
    ", which works without a network; ", html("a", { href: `${data.page}.json`, download: "" }, "its numbers"), ".")] : [];
  return html("div", { class: "about" }, html("dl", {}, ...pairs), ...links);
}

// The sphere

const [ROUND, SIDE] = [150, 340];
const TRAIL = 0.4; // of the time before, drawn strongly; what is older is faint
const KEYS = { ArrowLeft: ["yaw", -10], ArrowRight: ["yaw", 10], ArrowUp: ["tilt", 10], ArrowDown: ["tilt", -10] };

class Sphere {
  constructor({ group, times, sets }) {
    Object.assign(this, { times, sets });
    this.drawing = svg("svg", { class: "sphere", viewBox: `0 0 ${SIDE} ${SIDE}`, role: "img", tabindex: 0 });
    this.said = html("output", { class: "said" });
    const hint = html("span", { class: "legend" }, "Turn it by dragging, or by the arrow keys. Rings: the start.");
    const caption = html("figcaption", {}, html("strong", {}, "Trajectories, dim 3"), " ", hint);
    this.figure = html("figure", { class: "ball" }, caption, this.drawing, this.said, controls([group]));
    this.listen();
    redraws.push(() => this.draw());
  }

  listen() {
    this.drawing.addEventListener("pointerdown", (event) => this.drawing.setPointerCapture(event.pointerId));
    this.drawing.addEventListener("pointermove", (event) => {
      if (this.drawing.hasPointerCapture(event.pointerId)) this.turned(event.movementX / 2, event.movementY / 2);
    });
    this.drawing.addEventListener("keydown", (event) => {
      const [angle, size] = KEYS[event.key] ?? [];
      if (!angle) return;
      event.preventDefault();
      this.turned(...(angle === "yaw" ? [size, 0] : [0, size]));
    });
  }

  turned(yaw, tilt) {
    turn.yaw = Math.round(turn.yaw + yaw + 540) % 360 - 180;
    turn.tilt = Math.round(Math.min(Math.max(turn.tilt + tilt, -90), 90));
    writeAddress();
    this.draw();
  }

  /** On the screen: right, down, and towards whom it faces. */
  seen([x, y, z]) {
    const [a, b] = [(turn.yaw * Math.PI) / 180, (turn.tilt * Math.PI) / 180];
    const [across, deep] = [x * Math.cos(a) - y * Math.sin(a), x * Math.sin(a) + y * Math.cos(a)];
    const [up, near] = [z * Math.cos(b) + deep * Math.sin(b), z * Math.sin(b) - deep * Math.cos(b)];
    return [SIDE / 2 + ROUND * across, SIDE / 2 - ROUND * up, near];
  }

  draw() {
    const found = this.sets.find(isShown);
    const flat = cellOf(found);
    const tokens = valueOf("tokens");
    const at = (time, token) => [0, 1, 2].map((k) => flat[3 * (tokens * time + token) + k] / 1000);
    const every = Array.from({ length: tokens }, (_, token) => this.times.map((_, time) => at(time, token)));
    const now = chosen.time;
    const outline = svg("circle", { class: "outline", cx: SIDE / 2, cy: SIDE / 2, r: ROUND });
    const placed = every.map((each, token) => this.token(each.slice(0, now + 1), token));
    const back = placed.filter(({ near }) => near < 0).flatMap(({ marks }) => marks);
    const front = placed.filter(({ near }) => near >= 0).flatMap(({ marks }) => marks);
    this.drawing.replaceChildren(...back, outline, ...graticule().flatMap((each) => this.line(each, "grid")),
      ...placed.flatMap(({ lines }) => lines), ...front);
    this.words(every.map((each) => each[now]));
  }

  /** A line in parts: before the sphere, and behind it. */
  line(points, kind) {
    const all = points.map((point) => this.seen(point));
    const parts = [(near) => near >= 0, (near) => near < 0].map((side) => runs(all.map((each, k) =>
      (side(each[2]) || (k && side(all[k - 1][2])) ? each : null))));
    const drawn = (run, where) => path(run, `${kind} ${where}`);
    return [...parts[1].map((run) => drawn(run, "behind")), ...parts[0].map((run) => drawn(run, "before"))];
  }

  token(points, token) {
    const recent = this.times.filter((time) => time <= TRAIL + 1e-9).length;
    const cut = Math.max(0, points.length - recent);
    const kind = `path token${token}`;
    const lines = [...(cut ? this.line(points.slice(0, cut + 1), `${kind} old`) : []), ...this.line(points.slice(cut), kind)];
    const [first, last] = [this.seen(points[0]), this.seen(points.at(-1))];
    const side = last[2] < 0 ? "behind" : "before";
    const ring = svg("circle", { class: `ring token${token} ${first[2] < 0 ? "behind" : "before"}`, cx: first[0], cy: first[1], r: 5 });
    const dot = svg("circle", { class: `dot token${token} ${side}`, cx: last[0], cy: last[1], r: 8 });
    const name = svg("text", { class: `name ${side}`, x: last[0], y: last[1] + 4, "text-anchor": "middle" }, String(token + 1));
    return { lines: [...lines, ring], marks: [dot, name], near: last[2] };
  }

  words(points) {
    const overlap = (a, b) => a.reduce((sum, x, k) => sum + x * b[k], 0).toFixed(2).replace("-", "−");
    const others = points.slice(1).map((point, k) => `${k + 2}: ${overlap(points[0], point)}`);
    this.said.textContent = `time ${say(valueOf("time"))}, overlap of token 1 with ${others.join(", ")}`;
    this.drawing.setAttribute("aria-label", `Tokens on the sphere at ${this.said.textContent}; turned by ${turn.yaw}° and ${turn.tilt}°`);
  }
}

/** The equator and two meridians. */
function graticule() {
  const round = Array.from({ length: 73 }, (_, k) => (k * 5 * Math.PI) / 180);
  const circle = (place) => round.map((angle) => place(Math.cos(angle), Math.sin(angle)));
  return [circle((c, s) => [c, s, 0]), circle((c, s) => [c, 0, s]), circle((c, s) => [0, c, s])];
}

// All of it

readAddress();
const figures = [...(data.sphere ? [new Sphere(data.sphere)] : []), ...data.plots.map((plot) => new Plot(plot))];
const groups = [...new Set(data.axes.map((axis) => axis.group))].filter((group) => group !== data.sphere?.group);
root.replaceChildren(controls(groups), facts(), html("div", { class: "plots" }, ...figures.map(({ figure }) => figure)), about());
redraw();
addEventListener("hashchange", () => {
  readAddress();
  redraw();
});
