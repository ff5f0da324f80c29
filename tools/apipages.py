"""A Sphinx extension for the pages around the chapters.

`{agentrl-api}` describes a part of the package from sources that it does not import: `package`,
`by-hand` or `course`. ``{version}`text` `` is the text and the version. A page that quotes a
chapter, by ``{glue:text}`../chapters/05-packing.ipynb::padding_share:s` ``, is built again when the
chapter changes; Sphinx alone would keep the old number.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from myst_nb.ext.glue.utils import PendingGlueReference
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

from tools import export

Function = ast.FunctionDef | ast.AsyncFunctionDef
VALUE = 90  # characters of a constant's value, at most


def setup(app: Sphinx) -> dict[str, bool]:
    """Register directive, role and the dependency of a quoting page on what it quotes."""
    app.add_directive("agentrl-api", ApiDirective)
    app.add_role("version", VersionRole())
    app.connect("doctree-read", _note_quoted)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _note_quoted(app: Sphinx, doctree: nodes.document) -> None:
    for quoted in {node.refdoc for node in doctree.findall(PendingGlueReference)}:
        app.env.note_dependency(app.env.doc2path(quoted))


class VersionRole(SphinxRole):
    """The version of package and book; the role's text stands in front of it."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        root = Path(self.env.srcdir)
        self.env.note_dependency(str(root / "pyproject.toml"))
        return [nodes.Text(f"{self.text} {export.version(root)}")], []


class ApiDirective(SphinxDirective):
    """A section for each module of one part of the package, an entry for each public name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        part = directives.choice(self.arguments[0], ("package", "by-hand", "course"))
        root = Path(self.env.srcdir)
        flat = export.listed_names((root / "agentrl/__init__.py").read_text("utf-8"))
        sources = (path.read_text("utf-8") for path in root.glob("agentrl/**/*.py"))
        statements = (node for source in sources for node in ast.parse(source).body)
        self.known = {node.name for node in statements if isinstance(node, ast.ClassDef)} & {*flat}
        if part == "by-hand":
            files = {f"agentrl/{name}.py": None for name in sorted(export.HAND_WRITTEN)}
        else:
            folder = "agentrl/course" if part == "course" else "agentrl"
            chapters = sorted((root / "chapters").glob("*.ipynb"))
            files = {f"{folder}/{path.stem.partition('-')[2]}.py": path for path in chapters}
        return [
            self.module(name, chapter) for name, chapter in files.items() if (root / name).exists()
        ]

    def module(self, name: str, chapter: Path | None) -> nodes.section:
        path = Path(self.env.srcdir) / name
        dotted = name.removesuffix(".py").replace("/", ".")
        source = path.read_text(encoding="utf-8")
        flat = chapter or path.stem == export.FLAT
        section = nodes.section(ids=[nodes.make_id(f"api-{dotted}")], names=[f"api-{dotted}"])
        section += nodes.title("", "", nodes.literal("", dotted))
        if chapter:
            self.env.note_dependency(str(chapter))
            places, title = read_places(chapter)
            link = self.link(chapter, "", title)
            section += nodes.paragraph("", "From the chapter ", link, nodes.Text("."))
        else:
            places = {}
            section += self.parse(ast.get_docstring(ast.parse(source)) or "")
        self.env.note_dependency(str(path))
        for public, text in described(source, "agentrl" if flat else dotted):
            [*index, entry] = self.parse(text)
            for signature in entry.findall(addnodes.desc_signature):
                for xref in list(signature.findall(addnodes.pending_xref)):
                    if xref["reftarget"] not in self.known:
                        xref.replace_self(nodes.Text(xref.astext()))
            if place := places.get(public):
                where = nodes.paragraph("", "", self.link(chapter, nodes.make_id(place), place))
                field = nodes.field("", nodes.field_name("", "Explained in"))
                field += nodes.field_body("", where)
                method = entry[-1].first_child_matching_class(addnodes.index)
                place = len(entry[-1]) if method is None else method
                entry[-1].insert(place, nodes.field_list("", field))
            section += [*index, entry]
        return section

    def parse(self, text: str) -> list[nodes.Node]:
        holder = nodes.container()
        self.state.nested_parse(StringList(text.split("\n"), source="docstring"), 0, holder)
        return holder.children

    def link(self, chapter: Path, anchor: str, text: str) -> nodes.reference:
        page = f"chapters/{chapter.stem}"
        address = self.env.app.builder.get_relative_uri(self.env.docname, page)
        address += f"#{anchor}" if anchor else ""
        return nodes.reference("", text, refuri=address, internal=True)


def read_places(notebook: Path) -> tuple[dict[str, str], str]:
    """Find the section of a chapter in which each name is saved; and the chapter's title."""
    places, heading, title = {}, "", ""
    for cell in export.read_notebook(notebook).cells:
        if cell.cell_type == "markdown":
            plain = re.sub(r"^(`{3,}|~{3,}).*?^\1", "", cell.source, flags=re.M | re.S)
            for found in re.findall(r"^#{1,3} +(.+)$", plain, re.M):
                heading = re.sub(r"[`*$]", "", found).strip()
                title = title or heading
        elif export.MARK.match(cell.source):
            names = export.bound_names(ast.parse(cell.source).body)
            places |= dict.fromkeys(names, heading)
    return places, title


def described(source: str, module: str) -> Iterator[tuple[str, str]]:
    """Write a directive of Sphinx's for each public name, in the order of the lines."""
    listed = export.listed_names(source)
    found = {}  # of overloads the last
    for node in ast.parse(source).body:
        found |= dict.fromkeys({*export.bound_names([node])} & {*listed}, node)
    for name, node in found.items():
        if isinstance(node, Function | ast.ClassDef):
            yield name, _definition(node, module)
            continue
        value = ast.unparse(node.value)
        if len(value) > VALUE:
            value = value[: VALUE - 2].rpartition(", ")[0] + ", …"
        line = source.split("\n")[node.end_lineno - 1][node.end_col_offset :]
        about = line.partition("#")[2].strip().removeprefix("fmt: skip")
        options = f":no-index-entry:\n:module: {module}\n:value: {value}"
        yield name, f"::::{{py:data}} {name}\n{options}\n\n{about}\n::::"


def _definition(node: Function | ast.ClassDef, module: str = "") -> str:
    """Write the directive of a function, of a class with its methods, or of a method."""
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    options = [":no-index-entry:", *([f":module: {module}"] if module else [])]
    kind, fence, body = "function" if module else "method", "::::" if module else ":::", ""
    if isinstance(node, ast.ClassDef):
        kind = "class"
        for item in node.body:
            public = isinstance(item, Function) and not item.name.startswith("_")
            if public and ast.get_docstring(item):
                body += f"\n\n{_definition(item)}"
    signature = node.name + signature_of(node)
    if "property" in marks:
        kind, signature = "property", node.name
        options.append(f":type: {ast.unparse(node.returns)}")
    options += [f":{mark}:" for mark in ("classmethod", "staticmethod") if mark in marks]
    about = read_docstring(ast.get_docstring(node) or "")
    lines = "\n".join(options)
    return f"{fence}{{py:{kind}}} {signature}\n{lines}\n\n{about}{body}\n{fence}"


def signature_of(node: Function | ast.ClassDef) -> str:
    """Write out the parameters, as their author did, and what is returned."""
    if isinstance(node, Function):
        parameters = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))
        returns = ast.unparse(node.returns).strip("'") if node.returns else "None"
        return f"({parameters})" + (f" -> {returns}" if returns != "None" else "")
    for item in node.body:
        if isinstance(item, Function) and item.name in {"__init__", "__new__"}:
            return signature_of(item).partition(" -> ")[0]
    marks = " ".join(map(ast.unparse, node.decorator_list))
    if "dataclass" not in marks:
        return ""
    fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign)]
    return f"({', '.join(['*'] * ('kw_only=True' in marks) + fields)})"


def read_docstring(text: str) -> str:
    """Make a field of each part that a docstring names, in it an item for each name."""

    def field(part: re.Match[str]) -> str:
        body = textwrap.dedent(part[2]).strip()
        if part[1] != "Returns":
            body = re.sub(r"^(\S[^:]*): ", _item, body, flags=re.M)
        title = {"Args": "Arguments"}.get(part[1], part[1])
        return f":{title}:\n{textwrap.indent(body, '    ')}\n\n"

    return re.sub(
        r"^(Args|Attributes|Returns|Raises):\n((?: +.*(?:\n|$)|\n)+)", field, text, flags=re.M
    )


def _item(names: re.Match[str]) -> str:
    return "- " + ", ".join(f"`{name}`" for name in names[1].split(", ")) + ": "
