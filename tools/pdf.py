"""Prints the built book as one PDF: `python -m tools.pdf`, after `make book`.

All pages go into one document, in the order of the contents, which Chromium prints twice: the first
print tells on which page each chapter begins, the second has these numbers in the contents. The
print style sheet is book/_static/print.css.
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
from pypdf import PdfWriter

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
    numbers = {number.parent["href"][1:]: number for number in book.select("nav span")}
    page = browser.new_page()
    page.set_default_timeout(0)  # hundreds of pages
    try:
        for _ in range(2):
            source.write_text(str(book), encoding="utf-8")
            page.goto(source.as_uri())
            page.evaluate("document.fonts.ready")
            page.pdf(path=output, prefer_css_page_size=True, print_background=True)
            printed = PdfWriter(clone_from=output)
            for anchor, number in numbers.items():
                place = printed.get_destination_page_number(
                    printed.named_destinations[f"/{anchor}"]
                )
                number.string = str(place + 1)
                printed.add_outline_item(title=number.parent.contents[0], page_number=place)
    finally:
        source.unlink()
        page.close()
    printed.write(output)


def _join(html: Path) -> BeautifulSoup:
    """Return all pages as one, without scripts, with contents that still lack their numbers."""
    (_, (landing,)), *parts = contents()
    book = BeautifulSoup((html / f"{landing}.html").read_text(encoding="utf-8"), "html.parser")
    for tag in book.head.select("script, noscript, link:not([rel=stylesheet])"):
        tag.decompose()
    for link in book.head.select("link"):
        link["href"] = link["href"].removeprefix("../")
    book.head.append(book.new_tag("link", rel="stylesheet", href="_static/print.css"))
    book.html["data-theme"] = "light"
    book.body.clear()
    toc = book.new_tag("nav", attrs={"class": "print-contents"})
    book.body.extend([_read(html, landing), toc])
    for part, names in parts:
        toc.append(book.new_tag("h2", string=part))
        for name in names:
            article = _read(html, name)
            book.body.append(article)
            title = article.h1.get_text().strip()
            toc.append(book.new_tag("a", attrs={"href": f"#{article['id']}"}, string=title))
            toc.contents[-1].append(book.new_tag("span"))
    return book


def _read(html: Path, name: str) -> Tag:
    """Return the article of a page, with addresses that hold in the joined document."""
    text = (html / f"{name}.html").read_text(encoding="utf-8")
    article = BeautifulSoup(text, "html.parser").select_one("article.bd-article")
    folder = (html / name).parent
    article["id"] = _anchor(name)
    for tag in article.select("[id]:not(article)"):
        tag["id"] = _anchor(name, tag["id"])
    for tag in article.select("[src]"):
        tag["src"] = os.path.relpath(folder / tag["src"], html)
    for link in article.select("a[href]"):
        target, _, anchor = link["href"].partition("#")
        if not target:
            link["href"] = "#" + _anchor(name, anchor)
        elif ":" not in target:
            page = os.path.relpath(folder / target, html).removesuffix(".html")
            link["href"] = "#" + _anchor(page, anchor)
    for details in article.select("details"):
        details["open"] = ""
    for tag in article.select("a.headerlink"):
        tag.decompose()
    return article


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
