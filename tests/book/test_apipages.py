"""The pages of the package: each public name, as its source describes it."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup

from tools import apipages, export, notebooks
from tools.export import ROOT, bound_names

BOOK = """
title: agentrl
only_build_toc_files: true
execute: {execute_notebooks: "off"}
parse: {myst_enable_extensions: [colon_fence, fieldlist]}
sphinx:
  local_extensions: {tools.apipages: TOOLS}
  recursive_update: true
"""


@pytest.fixture
def book(tmp_path):
    """Build a book of the given pages as the project does; returns the second or only one."""
    (tmp_path / "_config.yml").write_text(BOOK.replace("TOOLS", str(ROOT)))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def build(page: str, *others: str) -> str:
        toc = {"format": "jb-book", "root": page}
        toc |= {"chapters": [{"file": name} for name in others]} if others else {}
        (tmp_path / "_toc.yml").write_text(yaml.safe_dump(toc))
        command = [Path(sys.executable).with_name("jupyter-book"), "build", ".", "-W", "-n"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        page = others[0] if others else page
        return (tmp_path / f"_build/html/{page}.html").read_text(encoding="utf-8")

    return build


def sections(page: str) -> dict[str, str]:
    """Cut a page of the package at its names."""
    parts = re.split(r'id="(agentrl\.[\w.]+)">', page)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


PARTS = "".join(f"```{{agentrl-api}} {part}\n```\n" for part in ("package", "by-hand", "course"))


def test_the_api_page_describes_every_public_name(book, tmp_path):
    for folder in ("agentrl", "chapters"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "api.md").write_text(f"# The package\n\n{PARTS}")
    entries = sections(book("api"))
    chapters = {path.stem.partition("-")[2]: path.stem for path in ROOT.glob("chapters/*.ipynb")}
    for path in ROOT.glob("agentrl/**/[a-z]*.py"):
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        source = path.read_text(encoding="utf-8")
        public = importlib.import_module(dotted).__all__
        assert dict(apipages.described(source, "")).keys() == {*public}
        nodes = {name: node for node in ast.parse(source).body for name in bound_names([node])}
        for name in public:
            flat = path.stem in chapters or path.stem == export.FLAT
            entry = entries[f"{'agentrl' if flat else dotted}.{name}"]
            if path.stem in chapters:
                assert f'href="chapters/{chapters[path.stem]}.html#' in entry, name
            if isinstance(nodes[name], ast.ClassDef | ast.FunctionDef):
                about = ast.get_docstring(nodes[name])
                assert about, f"{name} has no docstring"
                assert re.search(r"[\w ]+", about)[0] in entry, name
    assert "sig-paren" not in entries["agentrl.ModelShape.layers"]  # a property
    assert "sig-paren" in entries["agentrl.ModelShape.kv_bytes"]
    assert "classmethod" in entries["agentrl.ModelShape.from_config"]


SAMPLE = '''
from dataclasses import dataclass, field

LIMIT = 3  # of each
LONG = [
    1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007, 1008, 1009, 1010, 1011,
    1012, 1013, 1014, 1015, 1016, 1017, 1018, 1019,
]

@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two numbers."""

    first: int
    second: list[int] = field(default_factory=list)

    def total(self, *more: float, scale: float = 1.0, **rest) -> "float":
        """Add up.

        Args:
            more, rest: further numbers, `scale`
                times.
            scale: one.

        Returns:
            The sum [B]: a number.

        A closing remark.
        """

    def _hidden(self): ...


def plain(a, /, b: int = 2, *, c="x") -> None: ...
'''


def test_signatures_and_docstrings_are_read_as_written():
    *_, pair, plain = ast.parse(SAMPLE).body
    text = "(*, first: int, second: list[int] = field(default_factory=list))"
    assert apipages.signature_of(pair) == text
    total = pair.body[3]
    assert apipages.signature_of(total) == "(*more: float, scale: float=1.0, **rest) -> float"
    assert apipages.signature_of(plain) == "(a, /, b: int=2, *, c='x')"
    assert apipages.read_docstring(ast.get_docstring(total)).split("\n") == [
        "Add up.",
        "",
        ":Arguments:",
        "    - `more`, `rest`: further numbers, `scale`",
        "        times.",
        "    - `scale`: one.",
        "",
        ":Returns:",
        "    The sum [B]: a number.",
        "",
        "A closing remark.",
    ]


def test_the_course_stands_apart_and_last(book, make, tmp_path):
    course = '#@save course\ndef stage(p: Pair) -> Pair:\n    """Prepare."""\n    return p'
    make(f"#@save{SAMPLE}", "md:## On stage\n\n```\n# not this\n```", course)
    export.export(tmp_path)
    for name in export.HAND_WRITTEN:
        shutil.copy(ROOT / "agentrl" / f"{name}.py", tmp_path / "agentrl")
    (tmp_path / "api.md").write_text(f"# The package\n\n{PARTS}")
    page = book("api")
    titles = [f"agentrl.{name}" for name in ("one", "check", "notebook", "report", "course.one")]
    places = [page.index(f'<span class="pre">{title}</span></code><a') for title in titles]
    assert places == sorted(places)
    entries = sections(page)
    assert {"agentrl.LIMIT", "agentrl.Pair.total", "agentrl.check.integer"} < entries.keys()
    assert "agentrl.Pair._hidden" not in entries
    texts = {name: BeautifulSoup(entry, "html.parser").text for name, entry in entries.items()}
    assert texts["agentrl.LIMIT"].startswith("\nagentrl.LIMIT = 3#\nof each\n")
    assert "1013, …#" in texts["agentrl.LONG"]
    assert entries["agentrl.stage"].count('title="agentrl.Pair"') == 2
    assert 'href="chapters/01-one.html#on-stage">On stage' in entries["agentrl.stage"]


def test_a_quoted_number_follows_its_chapter(book, make, tmp_path):
    quote = "{glue:text}`chapters/01-one.ipynb::share:s`"
    (tmp_path / "root.md").write_text("# Root\n")  # which Sphinx always writes again
    (tmp_path / "page.md").write_text("# Page\n\n{version}`Version`, share " + quote + ".\n")
    for value in ("0.25", "0.75"):
        cell = nbformat.v4.new_code_cell("record(share=...)", execution_count=1)
        data = {"application/papermill.record/text/plain": repr(value)}
        metadata = {"scrapbook": {"mime_prefix": "application/papermill.record/", "name": "share"}}
        cell.outputs = [nbformat.v4.new_output("display_data", data, metadata=metadata)]
        path = make(cell)
        path.write_text(notebooks.canonical(notebooks.read(path)))
        page = re.sub("<.*?>", "", book("root", "page", "chapters/01-one"))
        assert f"Version {export.version()}, share {value}." in page
