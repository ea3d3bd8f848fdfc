"""Pages of reports, as tests read them: their tags and texts, and in a browser without a network."""

import html
import re
from contextlib import contextmanager
from html.parser import HTMLParser

# Ratios of contrast of all texts that a selector finds, by their elements and colours.
CONTRAST = """(selector) => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const light = (c) => c.slice(0, 3).reduce((sum, v, k) => {
    v /= 255;
    return sum + [0.2126, 0.7152, 0.0722][k] * (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] > 250) return Array.from(colour);
    }
    return [255, 255, 255];
  };
  const usual = "h1, p, .kind, .card h3, dt, dd, td, th, figcaption span, svg text";
  const found = {};
  for (const node of document.querySelectorAll(selector || usual)) {
    const own = Array.from(node.childNodes).some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.getClientRects().length || node.closest("button, .headerlink, [hidden]")) continue;
    const style = getComputedStyle(node), ink = node.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const back = behind(node), colour = rgba(ink), a = colour[3] / 255;
    const front = [0, 1, 2].map((k) => a * colour[k] + (1 - a) * back[k]);
    const [high, low] = [light(front), light(back)].sort((x, y) => y - x), key = `${node.tagName} ${ink}`;
    found[key] = Math.min(found[key] ?? 21, (high + 0.05) / (low + 0.05));
  }
  return found;
}"""


class PageParser(HTMLParser):
    """A parser that collects tags with attributes, and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.scripts, self.inside = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside.append(tag)

    def handle_endtag(self, tag):
        if tag in self.inside:
            while self.inside.pop() != tag:
                pass

    def handle_data(self, data):
        (self.scripts if self.inside[-1:] == ["script"] else self.text).append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())

    def count(self, name):
        return sum(tag == name for tag, _ in self.tags)


def figure_of(text, title):
    """Return the first figure with a title."""
    start = text.index(f"<strong>{title}</strong>")
    return text[start : text.index("</figure>", start)]


def table_of(text):
    """Return the first table as text, by row; the head is the first."""
    rows = re.findall("<tr>(.*?)</tr>", text[text.index("<table>") : text.index("</table>")])
    return [[html.unescape(each) for each in re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def intruders(text):
    """Return what a page must not hold: scripts, pictures, handlers, addresses, torn attributes."""
    seen = PageParser(text)
    result = [tag for tag, _ in seen.tags if tag in ("script", "img", "b")]
    for tag, attributes in seen.tags:
        result += [
            f"{tag} {name}" for name in attributes if name.startswith("on") or not re.fullmatch("[a-z0-9:-]+", name)
        ]
        places = [attributes.get(name) or "" for name in ("src", "href", "xlink:href", "action", "data")]
        inside = ("data:,", "#", "data:image/png;base64,")  # places of the page, and Matplotlib's images
        result += [f"{tag} {place}" for place in places if place and not place.startswith(inside)]
    return result


@contextmanager
def opened(browser, text, folder, width=1280, scheme="light", view="", **options):
    """Open the page at a width, with the address's end `view`; `.troubles` collects console messages and requests."""
    place = folder / "check.html"
    place.write_text(text, encoding="utf-8")
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True, **options
    )
    tab = context.new_page()
    tab.troubles = []

    def request(one):
        if not one.url.startswith(place.as_uri()):
            tab.troubles.append(one.url)

    tab.on("console", lambda message: tab.troubles.append(message.text))
    tab.on("pageerror", lambda error: tab.troubles.append(str(error)))
    tab.on("request", request)
    tab.goto(place.as_uri() + view)
    yield tab
    context.close()
