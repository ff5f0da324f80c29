"""The built book as its reader meets it: in a browser, with the network off."""

import functools
import http.server
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from bs4 import BeautifulSoup
from matplotlib.image import imread
from playwright.sync_api import Browser, Page
from pypdf import PdfReader
from pypdfium2 import PdfDocument
from test_book import build

from agentrl.notebook import _INK, COLORS
from tools import cover
from tools.export import ROOT
from tools.pdf import NEEDS, contents, find_browser, find_places, open_browser, write_pdf

PAGES = [name for _, names in contents() for name in names]
CHAPTERS = [name for name in PAGES if name.startswith("chapters/")]
Pages = dict[str, BeautifulSoup]


@pytest.fixture(scope="module")
def html(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("book")
    done = build(ROOT, output)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return output / "_build" / "html"


@pytest.fixture(scope="module")
def pages(html) -> Pages:
    files = [*(f"{name}.html" for name in PAGES), "genindex.html", "search.html"]
    return {file: BeautifulSoup((html / file).read_text("utf-8"), "html.parser") for file in files}


# What the files say


def test_every_internal_link_and_anchor_resolves(html, pages):
    wrong = []
    anchors = {file: {tag["id"] for tag in page.select("[id]")} for file, page in pages.items()}
    for file, page in pages.items():
        for link in page.select("a[href]"):
            target, _, anchor = link["href"].partition("#")
            if ":" in target:  # another host
                continue
            path = (html / file).parent / unquote(target) if target else html / file
            other = os.path.relpath(path, html)
            if not path.exists():
                wrong.append(f"{file}: no file for {link}")
            elif anchor and other in pages and unquote(anchor) not in anchors[other]:
                wrong.append(f"{file}: no anchor for {link}")
    assert not wrong, "\n".join(wrong)


def test_pages_load_nothing_from_another_host(html, pages):
    loads = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
    public = re.compile(r"\s*(?:https?:)?//")
    for file, page in pages.items():
        for tag in page.select(",".join(loads) + ":not([rel=canonical])"):
            assert not public.match(tag.get(loads[tag.name], "")), f"{file}: {tag}"
        for script in page.select("script"):
            assert not re.search(r"https?://", script.get_text()), f"{file}: {script}"
    for sheet in html.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", text), sheet


def test_every_page_says_what_it_is(html, pages):
    seen = set()
    for name in PAGES:
        file, page = f"{name}.html", pages[f"{name}.html"]
        titles = [h1.get_text().rstrip("#") for h1 in page.select("article h1")]
        assert len(titles) == 1, f"{file}: h1 {titles}"
        tags = [page.find("meta", {"name": "description"})]
        tags += [page.find("meta", property=f"og:{key}") for key in ("description", "title")]
        words, same, title = (tag["content"] for tag in tags)
        assert words == same and 40 < len(words) <= 200, f"{file}: described as {words!r}"
        assert titles[0].endswith(title) and page.title.get_text().startswith(titles[0]), file
        assert not {words, title} & seen, f"{file}: {title!r} or {words!r} is on two pages"
        seen |= {words, title}
        icon = page.find("link", rel="icon")
        assert icon and (html / file).parent.joinpath(icon["href"]).exists(), f"{file}: no favicon"
        for image in page.select("article img"):
            assert image.get("alt", "").strip(), f"{file}: no alt text on {image}"


def test_every_page_leads_on_and_offers_its_source(html, pages):
    for before, after in itertools.pairwise(PAGES):
        following = pages[f"{before}.html"].select_one(".prev-next-area .right-next")["href"]
        assert (html / before).parent.joinpath(following).resolve() == html / f"{after}.html"
    for name in CHAPTERS:
        link = pages[f"{name}.html"].select_one("a.btn-download-source-button")["href"]
        source = (html / name).parent / link
        assert source.suffix == ".ipynb"
        assert source.read_bytes() == (ROOT / f"{name}.ipynb").read_bytes(), name


def test_cover_and_icon_are_current(tmp_path):
    cover.draw_cover(tmp_path / "cover.svg")
    hint = "is not what `python -m tools.cover` draws"
    assert (tmp_path / "cover.svg").read_bytes() == (cover.STATIC / "cover.svg").read_bytes(), hint
    drawn, kept = (imread(folder / "cover.png") for folder in (tmp_path, cover.STATIC))
    assert drawn.shape == kept.shape == (630, 1200, 4)
    assert abs(drawn - kept).mean() < 1e-3, hint
    assert (cover.STATIC / "favicon.svg").read_text(encoding="utf-8") == cover.FAVICON, hint


# What a browser shows


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if find_browser() is None:
        if os.environ.get("AGENTRL_REQUIRE_BROWSER") == "1":
            pytest.fail(f"this test {NEEDS}")
        pytest.skip(f"this test {NEEDS}")
    with open_browser() as started:
        yield started


@pytest.fixture(scope="module")
def site(html) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=html)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def tab(browser, site) -> Iterator[Page]:
    context = browser.new_context(
        reduced_motion="reduce", permissions=["clipboard-read", "clipboard-write"]
    )
    page = context.new_page()
    page.set_default_timeout(15_000)
    yield page
    context.close()


MATHS_AND_FIGURES = """() => {
  const bad = [];
  for (const math of document.querySelectorAll("article math")) {
    const {width, height} = math.getBoundingClientRect();
    if (math.checkVisibility() && !(width > 2 && height > 5)) bad.push(math.outerHTML);
  }
  if (document.querySelector("article math") && ![...document.fonts].some(
    font => font.family.includes("STIX Math") && font.status === "loaded")) bad.push("STIX Math");
  for (const image of document.images)
    if (!(image.complete && image.naturalWidth > 0)) bad.push(image.outerHTML);
  return bad.map(html => html.slice(0, 300));
}"""

# Text against what lies behind it, by the formula of WCAG 2
CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const known = new Map();
  const rgba = colour => {
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      known.set(colour, [r, g, b, a / 255]);
    }
    return known.get(colour);
  };
  const over = ([r, g, b, a], back) => [r, g, b].map((c, i) => c * a + back[i] * (1 - a));
  const backs = new Map([[null, [255, 255, 255]]]);
  const back = element => {
    if (!backs.has(element)) backs.set(element, over(
      rgba(getComputedStyle(element).backgroundColor), back(element.parentElement)));
    return backs.get(element);
  };
  const light = colour => colour.map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0.05);
  const bad = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || element.closest("script, style, noscript, [hidden]")) continue;
    if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const colour = over(rgba(style.color), back(element));
    const [low, high] = [light(colour), light(back(element))].sort((a, b) => a - b);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const what = [element, element.parentElement]
      .map(each => `${each.tagName}.${each.className}`).join(" in ");
    if (high / low < (large ? 3 : 4.5)) bad.set(what + style.color, `${(high / low).toFixed(2)}: `
      + `${style.color} on ${back(element).map(Math.round)}: ${what}: ${text.slice(0, 40)}`);
  }
  return [...bad.values()];
}"""

SIDEWAYS = """() => {
  const bad = [], width = document.documentElement.clientWidth;
  const boxed = element => {
    for (let box = element.parentElement; box && box !== document.body; box = box.parentElement)
      if (["auto", "scroll", "hidden"].includes(getComputedStyle(box).overflowX)
          && box.getBoundingClientRect().right <= width + 1) return true;
    return false;
  };
  if (document.documentElement.scrollWidth > width) bad.push("the page scrolls sideways");
  for (const element of document.querySelectorAll("article *"))
    if (element.checkVisibility() && element.getBoundingClientRect().right > width + 1
        && !boxed(element)) bad.push(element.outerHTML.slice(0, 200));
  for (const math of document.querySelectorAll("article div.math math"))
    if (math.checkVisibility() && math.getBoundingClientRect().left < 0)
      bad.push("shows its end first: " + math.outerHTML.slice(0, 200));
  return bad.slice(0, 5);
}"""

UNFOLD = """() => {
  document.querySelectorAll("details").forEach(details => details.open = true);
  document.querySelectorAll(".toggle-button-hidden").forEach(button => button.click());
}"""
STILL = "*, *::before, *::after {transition: none !important}"


@pytest.fixture(scope="module")
def visits(browser, site) -> Callable[[str], str]:
    """Visit each page once, in all its forms; tell what was wrong, a line each, of one kind."""
    found: dict[str, list[str]] = {}

    def visit(name: str) -> None:
        def note(kind: str, *problems: str) -> None:
            found.setdefault(kind, []).extend(f"{name}.html: {problem}" for problem in problems)

        def note_request(request) -> None:
            if not request.url.startswith(site):
                note("requests", request.url)

        def note_message(message) -> None:
            if message.type in ("error", "warning"):
                note("console", message.text)

        tab = browser.new_page(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
        tab.on("request", note_request)
        tab.on("console", note_message)
        tab.on("pageerror", lambda error: note("console", str(error)))
        tab.goto(f"{site}{name}.html", wait_until="load")
        tab.add_style_tag(content=STILL)
        tab.evaluate(UNFOLD)
        note("rendering", *tab.evaluate(MATHS_AND_FIGURES))
        for theme in ("light", "dark"):
            tab.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
            note(theme, *tab.evaluate(CONTRAST))
        tab.set_viewport_size({"width": 375, "height": 800})
        note("phone", *tab.evaluate(SIDEWAYS))
        tab.close()

    for name in [*PAGES, "genindex", "search"]:
        visit(name)
    return lambda kind: "\n".join(found.get(kind, []))


def test_no_request_leaves_the_machine(visits):
    assert not visits("requests")


def test_the_console_is_clean(visits):
    assert not visits("console")


def test_maths_and_figures_are_shown(visits):
    assert not visits("rendering")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out(visits, theme):
    assert not visits(theme)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_figures_stand_out(tab, site, theme):
    tab.goto(f"{site}{CHAPTERS[0]}.html")
    tab.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    # The colours as text in large print, of which as much is asked as of lines and areas
    for name, colour in {"ink": _INK, **COLORS}.items():
        text = f'<p class="{name}" style="color: {colour}; font-size: 24px">{name}</p>'
        tab.evaluate(
            "text => document.querySelector('h1').insertAdjacentHTML('afterend', text)", text
        )
    assert not "\n".join(tab.evaluate(CONTRAST))


def test_no_page_scrolls_sideways_on_a_phone(visits):
    assert not visits("phone")


def test_search_finds_pages(tab, site):
    tab.goto(f"{site}{CHAPTERS[0]}.html")
    tab.keyboard.press("Control+k")
    tab.keyboard.type("padding")
    tab.keyboard.press("Enter")
    results = tab.locator("#search-results li a")
    results.nth(3).wait_for()  # they come in one by one
    for link in results.all():
        assert tab.request.get(link.evaluate("link => link.href")).ok, link
    results.first.click()
    tab.locator("article h1").wait_for()
    assert "padding" in tab.locator("article").inner_text().lower()


# The element that has the keyboard: what it is, and whether a person sees that it has it
FOCUSED = """kinds => {
  const element = document.activeElement, style = getComputedStyle(element);
  const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  const seen = element.checkVisibility({opacityProperty: true, visibilityProperty: true});
  return [kinds.find(kind => element.matches(kind)) ?? element.tagName.toLowerCase(),
    seen && (ring || style.boxShadow !== "none") ? "" : element.outerHTML.slice(0, 200)];
}"""
REACHED = [
    *("#pst-skip-link a", ".search-button-field", ".bd-sidebar-primary a"),
    *(".theme-switch-button", "article pre", ".copybtn", "summary", ".toggle-button"),
    *(".prev-next-area a", ".bd-sidebar-secondary a"),
]


def test_the_keyboard_reaches_everything_visibly(tab, site):
    tab.set_viewport_size({"width": 1200, "height": 720})  # on a wider window no code scrolls
    tab.goto(f"{site}chapters/05-packing.html")
    tab.add_style_tag(content=STILL)
    seen, unseen = [], []
    while "body" not in seen[1:]:  # once around
        tab.keyboard.press("Tab")
        kind, problem = tab.evaluate(FOCUSED, REACHED)
        seen.append(kind)
        unseen += [problem] if problem and kind != "body" else []
        assert len(seen) < 1000
    assert seen[0] == REACHED[0]
    assert not [kind for kind in REACHED if kind not in seen]
    assert not unseen, "no focus to be seen on\n" + "\n".join(unseen)


def test_the_keyboard_opens_and_closes_folds(tab, site):
    tab.goto(f"{site}chapters/05-packing.html")
    for button, inside in {
        ".solution .toggle-button": ".solution .cell",
        ".cell details summary": ".cell details .highlight",
    }.items():
        fold, content = tab.locator(button).first, tab.locator(inside).first
        fold.focus()
        for key in ("Enter", "Space"):
            content.wait_for(state="hidden")
            tab.keyboard.press(key)
            content.wait_for(state="visible")
            tab.keyboard.press(key)
        content.wait_for(state="hidden")


def test_code_and_notebooks_are_taken_along(tab, site):
    tab.goto(f"{site}{CHAPTERS[0]}.html")
    cell = tab.locator("div.highlight:visible", has=tab.locator(".copybtn")).first
    cell.hover()
    cell.locator(".copybtn").click()
    assert tab.evaluate("navigator.clipboard.readText()") == cell.inner_text().strip()
    tab.get_by_role("button", name="Download this page").click()
    with tab.expect_download() as download:
        tab.locator("a.btn-download-source-button").click()
    notebook = ROOT / f"{CHAPTERS[0]}.ipynb"
    assert download.value.suggested_filename == notebook.name
    assert download.value.path().read_bytes() == notebook.read_bytes()


# What is printed


@pytest.fixture(scope="module")
def pdf(browser, html, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("pdf") / "book.pdf"
    write_pdf(browser, html, output)
    return output


@pytest.fixture(scope="module")
def printed(pdf) -> PdfReader:
    return PdfReader(pdf)


def test_the_pdf_holds_the_whole_book(pdf, printed, pages):
    texts, outside = [], []
    for number, page in enumerate(PdfDocument(pdf), start=1):
        text = page.get_textpage()
        texts.append(" ".join(text.get_text_bounded().split()))
        boxes = map(text.get_rect, range(text.count_rects()))
        # A4 with 18 mm on either side
        out = [box for box in boxes if box[0] < 50 or box[2] > 545]
        outside += [f"page {number}: {text.get_text_bounded(*box)}" for box in out]
    assert "/StructTreeRoot" in printed.trailer["/Root"]  # headings and alt texts can be read out
    marks = [mark for mark in printed.outline if not isinstance(mark, list)]
    starts = [printed.get_destination_page_number(mark) for mark in marks]
    listed = " ".join(texts[1 : starts[0]])
    for name, mark, start, end in zip(PAGES, marks, starts, [*starts[1:], None], strict=True):
        article = pages[f"{name}.html"].article
        title = article.h1.get_text().rstrip("#")
        last = article.select("p:not(summary p, :has(math))")[-1].get_text()
        assert mark.title == ("About this book" if name == PAGES[0] else title), name
        assert texts[start].startswith(f"{start + 1} {mark.title}"), texts[start][:200]
        entry = re.sub(r"\W", "", f"{mark.title}{start + 1}")  # pdfium loses some spaces
        assert entry in re.sub(r"\W", "", listed), f"{mark.title} is not in the contents"
        text = re.sub(r"\W", "", "".join(texts[start:end]))
        headings = [tag.get_text().rstrip("#") for tag in article.select("h2, h3")]
        for words in [*headings, last[-30:]]:  # most chapters end with an unfolded solution
            assert re.sub(r"\W", "", words) in text, f"{name}: not printed: {words}"
    assert not outside, "\n".join(outside)
    assert not [number for number, text in enumerate(texts, start=1) if len(text) < 60], "blank"
    assert 200 < len(texts) < 350
    assert printed.metadata.title == pages[f"{PAGES[0]}.html"].title.get_text()
    assert "Hide code" not in "".join(texts)


def test_the_links_of_the_pdf_lead_somewhere(printed):
    places = find_places(printed)
    for number, page in enumerate(printed.pages, start=1):
        for link in page.get("/Annots", ()):
            link = link.get_object()
            if "/Dest" in link:
                assert link["/Dest"].removeprefix("/") in places, f"page {number}: {link}"
            else:
                assert link["/A"]["/URI"].startswith("http"), f"page {number}: {link}"
