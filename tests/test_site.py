"""The documentation as a site: it builds strictly, loads nothing from other hosts, and lists every public name.

`LIMITFORMER_SCREENSHOTS=folder` keeps pictures of some pages at two widths. Without a Chromium the tests of the
browser are skipped.
"""

import functools
import html
import http.server
import importlib
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest
from docs.tools import command_line, explorer, hooks, notebooks, sentences

from chromium import launched
from pages_read import CONTRAST

ROOT = Path(__file__).resolve().parents[1]
API = sorted((ROOT / "docs/api").glob("*.md"))
ENTRY = re.compile(r"^::: (limitformer\S*)$", re.MULTILINE)
DOORS = (
    *(
        "limitformer",
        "limitformer.nn",
        "limitformer.hf",
        "limitformer.weightless",
        "limitformer.checking",
        "limitformer.designing",
    ),
    *("limitformer_papers", "limitformer_papers.training"),
)
EXPLORER = ("explorer/covariance", "explorer/sphere", "explorer/stock")
# They come first in both lists: pytest opens a page once for the tests that have it at one place of theirs.
CONTRASTED = ("theory", "gallery", "api/simulate", "check", "explorer/sphere")
SEEN = (*CONTRASTED, "index", "start-engineer", "notebooks", "known-limits", *sorted({*EXPLORER} - {*CONTRASTED}))
WIDTHS = (1280, 390)
READ = ".md-content :not(svg .name), .md-header__title, .md-tabs__link, .md-nav__link"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site once. A warning fails the build (with `--quiet` MkDocs would not count warnings)."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


# Entries of public names.


def entries():
    return [name for page in API for name in ENTRY.findall(page.read_text(encoding="utf-8"))]


def object_of(name):
    """The object of this dotted name; its modules are imported."""
    package, *parts = name.split(".")
    found = importlib.import_module(package)
    for part in parts:
        if not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


def public_names():
    """Yield (module, name) of all objects that the public doors export."""
    for where in DOORS:
        door = importlib.import_module(where)
        for name in getattr(door, "__all__", None) or getattr(door, "_HOMES", None) or vars(door):
            if not name.startswith("_") and name != "TYPE_CHECKING" and not inspect.ismodule(getattr(door, name)):
                yield where, name


def test_every_public_name_has_an_entry():
    documented = [object_of(name) for name in entries()]
    left_out = {"package_version"}  # `__version__` is what it gives
    missing = [
        f"{where}.{name}"
        for where, name in public_names()
        if name not in left_out and not any(object_of(f"{where}.{name}") is each for each in documented)
    ]
    assert missing == []


def test_api_entries_are_unique():
    assert len(set(entries())) == len(entries())


def test_api_entries_have_docstrings():
    objects = {name: object_of(name) for name in entries()}
    called = [name for name, found in objects.items() if inspect.isclass(found) or inspect.isroutine(found)]
    assert [name for name in called if not inspect.getdoc(objects[name])] == []


def test_api_entries_show_functions_named_like_their_files(site):
    """`limitformer.limit` is a function in a file of the same name."""
    for page in API:
        built = (site / page.relative_to(ROOT / "docs").with_suffix(".html")).read_text(encoding="utf-8")
        for name in ENTRY.findall(page.read_text(encoding="utf-8")):
            assert f'<h2 id="{name}" class="doc doc-heading">' in built, name
            kind = re.search(rf'href="#{re.escape(name)}".*?doc-symbol-toc doc-symbol-(\w+)', built, re.DOTALL)
            assert (kind[1] == "module") == inspect.ismodule(object_of(name)), name


def test_command_line_page_is_up_to_date():
    """If this fails, run python docs/tools/command_line.py."""
    assert command_line.PAGE.read_text(encoding="utf-8") == command_line.page()


# Pages.


LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "use": "href"}


class Page(HTMLParser):
    """The files that a page loads, and its pictures."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.pictures = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag in LOADS and attributes.get("rel") not in ("next", "prev", "canonical"):
            self.loads.append(attributes.get(LOADS[tag]) or "")
        if tag == "img":
            self.pictures.append((attributes.get("src"), attributes.get("alt")))


def pages(site):
    return {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}


def test_pages_load_only_files_of_the_site(site):
    for path, text in pages(site).items():
        assert not [address for address in Page(text).loads if re.match(r"(?:[a-z]+:)?//", address)], path
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", styles)


def test_pictures_have_a_description(site):
    found = [picture for text in pages(site).values() for picture in Page(text).pictures]
    assert len(found) > 40
    assert [source for source, description in found if not description or len(description) < 15] == []


def test_pages_have_title_headings_and_language(site):
    """The page has a language, its own title, one main heading, no skipped level, and can be enlarged."""
    titles = []
    for path, text in pages(site).items():
        if path.name == "404.html":
            continue
        levels = [int(level) for level in re.findall(r"<h([1-6])\b", text)]
        assert levels.count(1) == 1, path
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), (path, levels)
        assert '<html lang="en"' in text, path
        assert 'name="viewport"' in text, path
        assert "user-scalable=no" not in text, path
        titles += re.findall(r"<title>(.+?)</title>", text)
    assert len(set(titles)) == len(titles) > 40


def test_links_have_a_name(site):
    """A link has text, a picture's description or a label for screen readers."""
    for path, text in pages(site).items():
        for attributes, inside in re.findall(r"<a\b([^>]*)>(.*?)</a>", text, re.DOTALL):
            named = re.search(r'(?:title|aria-label|alt)="[^"]+"', attributes + inside)
            assert named or re.sub(r"<[^>]+>", "", inside).strip() or " id=" in attributes, (path, attributes)


def test_formulas_become_mathml_completely(site):
    texts = {path.relative_to(site).as_posix(): text for path, text in pages(site).items()}
    displayed = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8").count("\n$$\n") // 2
    assert (
        texts["theory.html"].count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block"') == displayed > 10
    )
    assert [name for name, text in texts.items() if "arithmatex" in text] == []
    for text in texts.values():
        for formula in re.findall(r"<math.*?</math>", text, re.DOTALL):
            assert not re.search(r"[\\&](?![#\w]+;)", formula), formula


def test_unreadable_formula_fails_the_build():
    with pytest.raises(ValueError, match="No such command"):
        hooks.FORMULA.sub(hooks.mathml, r'<span class="arithmatex">\(\nosuchcommand x\)</span>')


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("V_αβ P_αβ", "{*V*<sub>*α**β*</sub>} {*P*<sub>*α**β*</sub>}"),
        ("S₂^αν, x^(−1/(2γ²))", "{*S*₂<sup>*α**ν*</sup>}, {*x*<sup>−1/(2*γ*²)</sup>}"),
        ("∫_{−1}^b f(s)", "{∫<sub>−1</sub><sup>*b*</sup>} {*f*(*s*)}"),
        ("(S^{d−1})^N.", "{(*S*<sup>*d*−1</sup>)<sup>*N*</sup>}."),
        ("A_ℓX_ℓ, W_kj^pre", "{*A*<sub>*ℓ*</sub>*X*<sub>*ℓ*</sub>}, {*W*<sub>*k**j*</sub><sup>pre</sup>}"),
        ("width n = 200 (if γ² &lt; ½).", "width {*n* = 200} (if {*γ*² &lt; ½})."),
        ("mean |ρ| is a log N", "mean {|*ρ*|} is a {log *N*}"),
        ("e^{r(u − u_to)} at a = 1", "{*e*<sup>*r*(*u* − *u*<sub>*t**o*</sub>)</sup>} at {*a* = 1}"),
        ("X̃_ℓ and KS", "{*X̃*<sub>*ℓ*</sub>} and KS"),
        ("Rᵀ(ȳ + Nᵢ)", "{*R*<sup>*T*</sup>(*y\u0304* + *N*<sub>*i*</sub>)}"),
        ("early_stop, glm4v_moe and hy_v4_vl", "early_stop, glm4v_moe and hy_v4_vl"),
        ("Command R, Appendix B", "Command R, Appendix B"),
        ("3 s, w/o a norm: 0.4 ± 0.1 at 10⁶, (a), (b)", "3 s, w/o a norm: 0.4 ± 0.1 at 10⁶, (a), (b)"),
        ("<code>a_b</code><math>x_y</math>", "<code>a_b</code><math>x_y</math>"),
        ('<a href="V_1">', '<a href="V_1">'),
    ],
)
def test_formulas_in_sentences(written, shown):
    """Braces stand for the formula's element, and stars for that of a letter in italics."""
    expected = re.sub(r"\*(.+?)\*", r"<i>\1</i>", shown).replace("{", '<span class="math">').replace("}", "</span>")
    assert sentences.in_text(written) == expected


def test_formulas_in_sentences_keep_their_characters(site):
    """Readers search and copy the letters of the source, not those of the font's italics."""
    text = (site / "theory.html").read_text(encoding="utf-8")
    formulas = re.findall(r'<span class="math">(.*?)</span>', text)
    assert len(formulas) > 200
    assert not any("\U0001d400" <= letter <= "\U0001d7ff" for each in formulas for letter in each)


def test_tables_are_named_regions(site):
    for path, text in pages(site).items():
        found = re.findall(r'<div class="table" tabindex="0" role="region" aria-label="([^"]+)"><table>', text)
        assert len(found) == text.count("<table>"), path
        assert len(set(found)) == len(found), path


def test_second_table_of_a_head_has_another_name():
    table = "<table><tr><th>claim</th></tr></table>"
    content = hooks.with_regions(f'<h2 id="n">Numbers<a class="headerlink"></a></h2>{table}{table}')
    regions = re.findall(r'<div class="table" tabindex="0" role="region" aria-label="([^"]+)">', content)
    assert regions == ["Numbers: claim", "Numbers: claim (2)"]


@pytest.mark.parametrize("name", EXPLORER)
def test_source_of_the_explorer_describes_the_page(name):
    source = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    assert "<code>make site</code>" in source
    assert f"out/site/{name}.html" in source
    assert "<script" not in source  # shown as text there
    assert "<link" not in source


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_pages_with_their_output(site, path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [each for cell in cells for each in cell.get("outputs", [])]
    page = (site / "examples" / f"{path.stem}.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub("<[^>]+>", "", page))
    printed = [line.strip() for each in outputs for line in each.get("text", []) if line.strip()]
    assert printed
    assert [line for line in printed if line not in text] == []
    pictures = [each for each in outputs if "image/png" in each.get("data", {})]
    assert len(list((site / "examples").glob(f"{path.stem}-*.png"))) == len(pictures)
    assert page.count(f'src="{path.stem}-') == len(pictures)
    assert notebooks.page_of(path)[0].startswith("# ")


def test_links_to_sections_name_them(site):
    page = (site / "which-learning-rate.html").read_text(encoding="utf-8")
    assert 'aria-label="Link to Steps of an optimiser"' in page
    names = re.findall(r'class="formula"[^>]*aria-label="([^"]+)"', page)
    assert len(set(names)) == len(names) > 2


def test_pictures_open_large(site):
    page = (site / "figures/st-fig1.html").read_text(encoding="utf-8")
    assert re.search(r'<a class="large wide" href="st-fig1.png"><img [^>]*src="st-fig1.png"', page)
    cards = (site / "gallery.html").read_text(encoding="utf-8")
    assert 'class="large"' not in cards  # there a picture leads to its page


def test_font_of_formulas_has_their_characters(site):
    """A character that `math.woff` lacks would come from another typeface."""
    from fontTools.ttLib import TTFont

    known = TTFont(ROOT / "docs/assets/math.woff").getBestCmap()
    pages = [page.read_text(encoding="utf-8") for page in site.rglob("*.html")]
    formulas = re.findall("<math.*?</math>", "".join(pages), re.DOTALL)
    formulas += re.findall('<span class="math">(.*?)</span>', "".join(pages))
    used = set(html.unescape("".join(re.sub("<[^>]+>", "", formula) for formula in formulas)))
    assert len(used) > 100
    assert sorted(used - {"\n"} - set(map(chr, known))) == []


# In a browser.


@pytest.fixture(scope="module")
def browser():
    with launched() as found:
        yield found


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(site):
    """Serve the site to this machine and return its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def begun(browser, address):
    """Start to open a page. `.troubles` lists requests to other hosts, failed requests and script errors."""

    def begin(name, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        page.name, page.troubles = name, []
        page.on(
            "request", lambda each: each.url.startswith((address, "data:", "blob:")) or page.troubles.append(each.url)
        )
        page.on("response", lambda each: each.status < 400 or page.troubles.append(f"{each.status} {each.url}"))
        page.on("pageerror", lambda error: page.troubles.append(str(error)))
        page.goto(f"{address}/{name}.html", wait_until="commit")
        return page

    return begin


@pytest.fixture
def opened(begun):
    """Open a page and wait until it has been quiet for half a second."""
    contexts = []

    def open_(name, **look):
        page = begun(name, **look)
        contexts.append(page.context)
        page.wait_for_load_state("networkidle")
        return page

    yield open_
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def looks(begun, request):
    """Open pages together and return {(width, scheme): page}."""
    shown = [(width, "light") for width in WIDTHS] + [(1280, "dark")] * (request.param in CONTRASTED)
    pages = {look: begun(request.param, *look) for look in shown}
    for page in pages.values():
        page.wait_for_load_state("networkidle")
    yield pages
    for page in pages.values():
        page.context.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("looks", SEEN, indirect=True)
def test_pages_load_nothing_from_other_hosts_and_fit_their_width(looks, width):
    page = looks[width, "light"]
    if folder := os.environ.get("LIMITFORMER_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"site-{page.name.replace('/', '-')}-{width}.png")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.troubles == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("looks", CONTRASTED, indirect=True)
def test_text_has_enough_contrast(looks, scheme):
    """WCAG 2 (level AA) requires a contrast of 4.5 for text."""
    ratios = looks[1280, scheme].evaluate(CONTRAST, READ)
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


def test_keyboard_reaches_content_search_and_wide_formulas(opened):
    page = opened("theory", width=390)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.classList.contains('md-skip')")
    for _ in range(1000):  # the page's script listens to keys some time after the page is there
        page.keyboard.press("/")
        if searching := page.evaluate("document.activeElement.className.includes('md-search__input')"):
            break
        page.wait_for_timeout(100)
    assert searching
    wide = "[...document.querySelectorAll('.formula')].filter((each) => each.scrollWidth > each.clientWidth)"
    assert page.evaluate(f"{wide}.length") > 5
    assert page.evaluate(f"{wide}.every((each) => each.tabIndex === 0)")


PHONE = """() => {
  const sticks = (each) => {
    for (let at = each.parentElement; at; at = at.parentElement) {
      if (at.matches(".md-content")) return each.getBoundingClientRect().right > innerWidth + 1;
      if (getComputedStyle(at).overflowX !== "visible") return false;
    }
  };
  const all = [...document.querySelectorAll(".md-content *")];
  const scrolling = all.filter((each) => /auto|scroll/.test(getComputedStyle(each).overflowX)
    && each.clientWidth && each.scrollWidth > each.clientWidth + 1);
  return {
    sticking: all.filter(sticks).map((each) => each.outerHTML.slice(0, 80)),
    scrolling: scrolling.length,
    mute: scrolling.filter((each) => each.tabIndex < 0 && !each.querySelector("a, button, input")).length,
  };
}"""


@pytest.mark.parametrize("name", ["check", "figures/st-fig1", "architectures"])
def test_phone_cuts_nothing_off_and_scrolls_by_keyboard(opened, name):
    page = opened(name, width=390)
    seen = page.evaluate(PHONE)
    assert (seen["sticking"], seen["mute"]) == ([], 0)
    assert seen["scrolling"] > 0
    page.add_style_tag(content=".md-typeset .table, .md-typeset a.wide { overflow: visible !important; }")
    assert page.evaluate(PHONE)["sticking"]  # the wrong twin


def test_formulas_in_sentences_have_the_typeface_of_displayed_ones(opened):
    page = opened("theory")
    family = "getComputedStyle(document.querySelector('{}')).fontFamily"
    inline, displayed = page.evaluate(family.format("span.math i")), page.evaluate(family.format(".formula math"))
    assert inline == displayed
    assert inline.startswith('"limitformer math"')
    assert page.evaluate("CSS.supports('text-transform', 'math-auto')")


def test_site_has_each_explorer_as_one_file(opened, site):
    """The page links to the file, which equals the output of `docs/tools/explorer.py`."""
    for name in EXPLORER:
        page = opened(name)
        (link,) = page.locator(".about a[href$='-alone.html']").evaluate_all("all => all.map((one) => one.href)")
        file = site / "explorer" / link.rpartition("/")[2]
        assert file.read_text(encoding="utf-8") == explorer.single_file(name.partition("/")[2])


def test_search_finds_a_name(opened):
    page = opened("index")
    page.keyboard.press("/")
    page.keyboard.type("equicorrelated")
    page.wait_for_selector(".md-search-result__link")
    assert "equicorrelated" in page.inner_text(".md-search-result__list")
    assert page.troubles == []


def test_code_can_be_copied(opened):
    page = opened("start-engineer")
    assert page.locator(".highlight pre .k, .highlight pre .kn").count() > 0
    assert page.locator("button[data-clipboard-target], .md-code__button, .md-clipboard").count() > 3
