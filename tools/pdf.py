"""Prints the built book as one PDF: `python -m tools.pdf`, after `make book`.

All pages go into one document, in the order of the contents, which Chromium prints until the page
numbers in its contents and beside its links are those of the places that these lead to: mostly
twice. The print style sheet is book/_static/print.css.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from bs4 import BeautifulSoup, Tag
from playwright.sync_api import Browser, sync_playwright
from pypdf import PdfReader, PdfWriter

from tools.export import ROOT

HTML = ROOT / "_build" / "html"
PDF = ROOT / "_build" / "agentrl.pdf"
NEEDS = "needs Chromium or Chrome on the PATH: apt-get install chromium"


def find_browser() -> str | None:
    """Return the path of an installed browser, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser that reaches no other host than this one."""
    args = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--disable-dev-shm-usage"]
    args += ["--no-sandbox"] if os.geteuid() == 0 else []  # root has to say so
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=args)
        yield browser
        browser.close()


def contents() -> list[tuple[str, list[str]]]:
    """Return the parts of the book with their pages, the landing page in a part without a name."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    parts = [
        (part["caption"], [chapter["file"] for chapter in part["chapters"]])
        for part in toc["parts"]
    ]
    return [("", [toc["root"]]), *parts]


def write_pdf(browser: Browser, html: Path = HTML, output: Path = PDF) -> None:
    """Print the pages under `html` to `output`."""
    source = html / "print.html"  # beside the pages, so that their addresses hold
    book = _join(html)
    numbers = [(number, number.parent["href"][1:]) for number in book.select("a > .page")]
    page = browser.new_page()
    page.set_default_timeout(0)  # hundreds of pages
    page.emulate_media(media="print")  # what is laid out in print only now loses the last pages
    try:
        for _ in range(4):
            source.write_text(str(book), encoding="utf-8")
            page.goto(source.as_uri())
            page.evaluate("document.fonts.ready")
            page.pdf(path=output, prefer_css_page_size=True, print_background=True, tagged=True)
            places = find_places(PdfReader(output))
            if all(number.string == str(places[anchor]) for number, anchor in numbers):
                break
            for number, anchor in numbers:
                number.string = str(places[anchor])
        else:
            raise RuntimeError("the page numbers do not settle")
    finally:
        source.unlink()
        page.close()
    chapter, printed = None, PdfWriter(clone_from=output)
    for link in book.select("nav a"):
        place = places[link["href"][1:]] - 1
        above = chapter if link["class"] == "section" else None
        item = printed.add_outline_item(title=link.contents[0], page_number=place, parent=above)
        chapter = above or item
    printed.write(output)


def find_places(printed: PdfReader) -> dict[str, int]:
    """Return the page number, counted from 1, of each place that a link leads to."""
    numbers = {page.indirect_reference.idnum: n for n, page in enumerate(printed.pages, start=1)}
    return {
        name.removeprefix("/"): numbers[place.page.idnum]
        for name, place in printed.named_destinations.items()
    }


def _join(html: Path) -> BeautifulSoup:
    """Return all pages as one, without scripts, with a cover, and contents that lack numbers."""
    (_, (landing,)), *_ = contents()
    book = BeautifulSoup((html / f"{landing}.html").read_text(encoding="utf-8"), "html.parser")
    for tag in book.head.select("script, noscript, link:not([rel=stylesheet])"):
        tag.decompose()
    for link in book.head.select("link"):
        link["href"] = link["href"].removeprefix("../")
    book.head.append(book.new_tag("link", rel="stylesheet", href="_static/print.css"))
    book.html["data-theme"] = "light"
    book.body.clear()
    cover = book.new_tag("header")
    toc = book.new_tag("nav")
    toc.append(book.new_tag("h1", string="Contents"))
    book.body.extend([cover, toc])
    for part, names in contents():
        toc.append(book.new_tag("h2", string=part))
        for name in names:
            article = _read(html, name)
            if name == landing:
                cover.extend([article.h1, article.p, article.img])
                article.section.insert(0, book.new_tag("h1", string="About this book"))
            book.body.append(article)
            for heading in article.select("h1, h2"):
                link = book.new_tag("a", string=heading.get_text().strip())
                link["href"] = f"#{heading.parent['id']}"
                link["class"] = "chapter" if heading.name == "h1" else "section"
                link.append(_page_number())
                toc.append(link)
    return book


def _read(html: Path, name: str) -> Tag:
    """Return the article of a page, with addresses that hold in the joined document."""
    text = (html / f"{name}.html").read_text(encoding="utf-8")
    article = BeautifulSoup(text, "html.parser").select_one("article.bd-article")
    folder = (html / name).parent
    article["id"] = _anchor(name)
    for tag in article.select("a.headerlink"):
        tag.decompose()
    for tag in article.select("[id]:not(article)"):
        tag["id"] = _anchor(name, tag["id"])
    for tag in article.select("[src]"):
        tag["src"] = os.path.relpath(folder / tag["src"], html)
    for link in article.select("a[href]"):
        target, _, anchor = link["href"].partition("#")
        if link.img:  # to the image itself
            link.unwrap()
        elif not target:
            link["href"] = "#" + _anchor(name, anchor)
        elif ":" not in target:
            page = os.path.relpath(folder / target, html).removesuffix(".html")
            link["href"] = "#" + _anchor(page, anchor)
            if page != "book/references":  # which is sorted by author
                link.append(_page_number())
    for details in article.select("details"):
        details["open"] = ""
        details.summary.string = "Folded on the screen"
    for code in article.select("pre"):
        lines = code.get_text().rstrip().split("\n")
        width = sorted(map(len, lines))[len(lines) * 3 // 4]
        if len(lines) <= 12:
            code["class"] = "whole"
        if len(lines) > 4 and 100 < width <= 160:  # a table stays one
            code["style"] = f"font-size: {740 / width:.2f}pt"
    return article


def _page_number() -> Tag:
    number = Tag(name="span", attrs={"class": "page"})
    number.string = "000"  # as wide as the number to come
    return number


def _anchor(page: str, anchor: str = "") -> str:
    return "--".join(filter(None, (page.replace("/", "-"), anchor)))


def main() -> None:
    """Write `_build/agentrl.pdf`."""
    if find_browser() is None:
        sys.exit(f"The PDF {NEEDS}")
    with open_browser() as browser:
        write_pdf(browser)
    print(f"The PDF is {PDF.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
