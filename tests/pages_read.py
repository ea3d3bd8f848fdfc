"""Pages of reports, as tests read them: their tags and texts, and in a browser without a network."""

from contextlib import contextmanager
from html.parser import HTMLParser

CONTRAST = """() => {
  const light = (text) => {
    const parts = text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (each) => {
    const colour = getComputedStyle(each).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? behind(each.parentElement) : colour;
  };
  const found = {};
  for (const each of document.querySelectorAll("h1, p, .kind, .card h3, dt, dd, td, th, figcaption span, svg text")) {
    const style = getComputedStyle(each);
    const ink = each.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const [a, b] = [light(ink), light(behind(each))];
    found[`${each.tagName} ${ink}`] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
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
        """All text, joined."""
        return " ".join(" ".join(self.text).split())

    def count(self, name):
        return sum(tag == name for tag, _ in self.tags)


def intruders(text, scripts=2):
    """Return what a page must not hold: more scripts than these, pictures, handlers, addresses."""
    seen = PageParser(text)
    result = ["script"] * (seen.count("script") - scripts) + ["img"] * seen.count("img") + ["b"] * seen.count("b")
    for tag, attributes in seen.tags:
        result += [f"{tag} {name}" for name in attributes if name.startswith("on")]
        places = [attributes.get(name) or "" for name in ("src", "href", "action", "data")]
        result += [f"{tag} {place}" for place in places if place and place != "data:,"]
    return result


@contextmanager
def opened(browser, text, folder, width=1280, scheme="light"):
    """Open the page at a width; `.troubles` collects console messages and requests."""
    place = folder / "check.html"
    place.write_text(text, encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    tab = context.new_page()
    tab.troubles = []
    tab.on("console", lambda message: tab.troubles.append(message.text))
    tab.on("pageerror", lambda error: tab.troubles.append(str(error)))
    tab.on("request", lambda request: tab.troubles.append(request.url) if request.url != place.as_uri() else None)
    tab.goto(place.as_uri())
    yield tab
    context.close()
