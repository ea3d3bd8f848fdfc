"use strict";
// The coloured cells of a page of limitformer check: correlations at the slider's depth, heads by block.

const data = JSON.parse(document.getElementById("data").textContent);
const UNKNOWN = -128;
const SIGNED = [[0, 114, 178], [255, 255, 255], [213, 94, 0]]; // correlation −1, 0, 1
const UPWARDS = [[247, 251, 255], [107, 174, 214], [8, 48, 107]]; // least to most
const GREY = "#8888";

const css = (colour) => `rgb(${colour.map(Math.round).join(",")})`;

/** The colour at t in [0, 1] between the first and the last of several. */
function mixed(colours, t) {
  const place = Math.min(Math.max(t, 0), 1) * (colours.length - 1);
  const k = Math.min(Math.floor(place), colours.length - 2);
  return css(colours[k].map((from, i) => from + (place - k) * (colours[k + 1][i] - from)));
}

function element(name, parent, text = "") {
  const made = document.createElement(name);
  made.textContent = text;
  parent.append(made);
  return made;
}

/** A figure with a title, a canvas, its colours and a line that says what a cell holds. */
class Grid {
  constructor(parent, title, colours, ends) {
    this.figure = element("figure", parent);
    const caption = element("figcaption", this.figure);
    element("strong", caption, title);
    this.note = element("span", caption);
    this.canvas = element("canvas", this.figure);
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.legend(colours, ends);
    this.said = element("output", this.figure);
    this.colours = colours;
    this.at = [0, 0];
    this.canvas.addEventListener("pointermove", (event) => this.pointed(event));
    this.canvas.addEventListener("pointerdown", (event) => this.pointed(event));
    this.canvas.addEventListener("keydown", (event) => this.moved(event));
    addEventListener("resize", () => this.draw());
  }

  legend(colours, ends) {
    const bar = element("div", this.figure);
    bar.className = "colours";
    element("span", bar, ends[0]);
    element("i", bar).style.background = `linear-gradient(to right, ${colours.map(css).join(",")})`;
    element("span", bar, ends[1]);
  }

  /** view: {rows, columns, part(row, column) in [0, 1] or null, say(row, column), words, label} */
  show(view) {
    this.view = view;
    this.canvas.setAttribute("aria-label", view.label);
    this.draw();
  }

  draw() {
    const { rows, columns, words } = this.view;
    const room = this.figure.clientWidth;
    const tall = words ? room : 320;
    const fits = words && words.length && Math.floor((room - 80) / columns) >= 12;
    this.margin = fits ? 80 : 0;
    this.wide = Math.min(words ? 40 : 48, (room - this.margin) / columns);
    this.high = words ? this.wide : Math.min(20, Math.max(tall / rows, 2));
    const [width, height] = [this.margin + this.wide * columns, this.margin + this.high * rows];
    const dense = devicePixelRatio || 1;
    [this.canvas.width, this.canvas.height] = [Math.round(width * dense), Math.round(height * dense)];
    this.canvas.style.width = `${width}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(dense, dense);
    for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) this.cell(pen, row, column);
    if (fits) this.names(pen, words);
  }

  cell(pen, row, column) {
    const part = this.view.part(row, column);
    pen.fillStyle = part === null ? GREY : mixed(this.colours, part);
    pen.fillRect(this.margin + column * this.wide, this.margin + row * this.high, this.wide + 0.5, this.high + 0.5);
  }

  names(pen, words) {
    pen.fillStyle = getComputedStyle(this.figure).color;
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    words.forEach((word, k) => {
      const short = word.length > 10 ? `${word.slice(0, 9)}…` : word;
      const middle = this.margin + (k + 0.5) * this.wide;
      pen.textAlign = "right";
      pen.fillText(short, this.margin - 4, middle, this.margin - 6);
      pen.save();
      pen.translate(middle, this.margin - 4);
      pen.rotate(-Math.PI / 2);
      pen.textAlign = "left";
      pen.fillText(short, 0, 0, this.margin - 6);
      pen.restore();
    });
  }

  pointed(event) {
    const scale = (this.margin + this.wide * this.view.columns) / this.canvas.clientWidth;
    const place = (offset, size) => Math.floor((offset * scale - this.margin) / size);
    this.point(place(event.offsetY, this.high), place(event.offsetX, this.wide));
  }

  moved(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.point(this.at[0] + steps[event.key][0], this.at[1] + steps[event.key][1]);
  }

  point(row, column) {
    if (row < 0 || column < 0 || row >= this.view.rows || column >= this.view.columns) return;
    this.at = [row, column];
    this.said.textContent = this.view.say(row, column);
  }
}

/** Hundredths of the lower triangle, row by row. */
const unpacked = (text) => Int8Array.from(atob(text), (letter) => letter.charCodeAt(0));

function viewOfMatrix(matrix, depth) {
  const cells = unpacked(matrix.rows[depth]);
  const at = (a, b) => cells[a >= b ? (a * (a + 1)) / 2 + b : (b * (b + 1)) / 2 + a];
  const name = (k) => (matrix.words.length ? `${matrix.words[k]} (${matrix.tokens[k]})` : `token ${matrix.tokens[k]}`);
  const told = (value) => (value === UNKNOWN ? "unknown" : (value / 100).toFixed(2));
  const count = matrix.tokens.length;
  const pairs = [];
  for (let a = 0; a < count; a++) for (let b = 0; b < a; b++) if (at(a, b) !== UNKNOWN) pairs.push(at(a, b) / 100);
  const mean = pairs.reduce((sum, value) => sum + value, 0) / pairs.length;
  return {
    rows: count,
    columns: count,
    part: (a, b) => (at(a, b) === UNKNOWN ? null : (at(a, b) / 100 + 1) / 2),
    say: (a, b) => `${name(a)}, ${name(b)}: ${told(at(a, b))}`,
    words: matrix.words,
    label: `Correlations of ${count} tokens at layer ${matrix.layers[depth]} of ${matrix.network}, mean ${mean.toFixed(2)}`,
  };
}

function matrices() {
  const slider = document.getElementById("depth");
  const parent = document.getElementById("matrices");
  const stops = Math.max(...data.matrices.map((matrix) => matrix.layers.length));
  const drawn = data.matrices.map((matrix) => {
    const grid = new Grid(parent, matrix.network, SIGNED, ["−1", "1"]);
    const left = matrix.of > matrix.tokens.length ? ` ${matrix.tokens.length} of ${matrix.of} tokens.` : "";
    return { matrix, grid, left };
  });
  const show = () => {
    const part = stops > 1 ? slider.value / (stops - 1) : 0;
    for (const { matrix, grid, left } of drawn) {
      const depth = Math.round(part * (matrix.layers.length - 1));
      grid.note.textContent = ` layer ${matrix.layers[depth]} of ${matrix.layers.at(-1)}.${left}`;
      grid.show(viewOfMatrix(matrix, depth));
    }
    const said = drawn[0].grid.note.textContent.trim();
    document.getElementById("depth-said").textContent = said;
    slider.setAttribute("aria-valuetext", said);
  };
  slider.max = stops - 1;
  slider.value = stops - 1;
  slider.addEventListener("input", show);
  show();
}

function heads() {
  const parent = document.getElementById("heads");
  for (const { title, network, blocks, cells } of data.heads) {
    const known = cells.flat().filter((value) => value !== null);
    if (!known.length) continue;
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const wide = low > 0 && high > 100 * low; // as on the axes of curves, where small things count too
    const place = wide ? Math.log : (value) => value;
    const grid = new Grid(parent, title, UPWARDS, [String(low), String(high)]);
    const range = `blocks ${blocks[0]} to ${blocks.at(-1)}, ${cells.length} heads`;
    grid.note.textContent = ` ${network}: ${range}${wide ? ", colours by the logarithm" : ""}`;
    grid.show({
      rows: cells.length,
      columns: blocks.length,
      part: (row, column) => {
        const value = cells[row][column];
        if (value === null) return null;
        return high > low ? (place(value) - place(low)) / (place(high) - place(low)) : 0.5;
      },
      say: (row, column) => `block ${blocks[column]}, head ${row + 1}: ${cells[row][column] ?? "unknown"}`,
      label: `${title} of ${network}, ${cells.length} heads in ${blocks.length} blocks, from ${low} to ${high}`,
    });
  }
}

function gradients() {
  const select = document.getElementById("kind");
  if (!select) return;
  const show = () => {
    for (const each of document.querySelectorAll("[data-choice]")) each.hidden = each.dataset.choice !== select.value;
  };
  select.addEventListener("input", show);
  show();
}

matrices();
if (document.getElementById("heads")) heads();
gradients();
