"""A Sphinx extension for the pages around the chapters.

`{agentrl-api}` writes the index of the package from its sources, without importing them.
``{version}`text` `` is the text and the version, which stands in pyproject.toml. A page that quotes
a chapter, by ``{glue:text}`../chapters/05-packing.ipynb::padding_share:s` ``, is built again when
the chapter changes; Sphinx alone would keep the old number.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from myst_nb.ext.glue.utils import PendingGlueReference
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
ONE_LINE = 90  # characters; a longer signature has a parameter per line
PARTS = {"Args": "Arguments", "Attributes": "Attributes", "Returns": "Returns", "Raises": "Raises"}


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
        path = Path(self.env.srcdir) / "pyproject.toml"
        self.env.note_dependency(str(path))
        version = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["version"]
        return [nodes.Text(f"{self.text} {version}")], []


class ApiDirective(SphinxDirective):
    """A section for each module of the package, an entry for each public name."""

    def run(self) -> list[nodes.Node]:
        root = Path(self.env.srcdir)
        sections = []
        for notebook in sorted((root / "chapters").glob("*.ipynb")):
            slug = notebook.stem.partition("-")[2]
            if (root / f"agentrl/{slug}.py").exists():
                places, title = read_places(notebook)
                link = self.link(f"chapters/{notebook.stem}", "", title)
                chapter = nodes.paragraph("", "From the chapter ", link, nodes.Text("."))
                self.env.note_dependency(str(notebook))
                sections.append(self.module(slug, "agentrl", places, notebook.stem, chapter))
        text = "Written by hand: what the chapters show their results with. Import it by module, "
        note = self.markdown(text + "`from agentrl.notebook import record`.")
        sections.append(self.module("notebook", "agentrl.notebook", {}, "", *note))
        return sections

    def module(
        self, slug: str, prefix: str, places: dict[str, str], stem: str, *head: nodes.Node
    ) -> nodes.section:
        path = Path(self.env.srcdir) / "agentrl" / f"{slug}.py"
        self.env.note_dependency(str(path))
        section = nodes.section(ids=[f"api-{slug}"], names=[f"api-{slug}"])
        section += [nodes.title("", "", nodes.literal("", f"agentrl.{slug}")), *head]
        source = path.read_text(encoding="utf-8")
        for name, node in public_definitions(source):
            field = []
            if place := places.get(name):
                link = self.link(f"chapters/{stem}", nodes.make_id(place), place)
                field = [self.field("Explained in", nodes.paragraph("", "", link))]
            section += self.entry(f"{prefix}.{name}", node, source, field)
        return section

    def entry(
        self, name: str, node: Definition, source: str, fields: list[nodes.field]
    ) -> addnodes.desc:
        """Describe one name: signature, docstring, for a class its methods too."""
        parent, _, short = name.rpartition(".")
        method = parent not in {"agentrl", "agentrl.notebook"}
        kind = "data"
        if isinstance(node, ast.ClassDef):
            kind = "class"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kind = "method" if method else "function"
        marks = {ast.unparse(mark) for mark in getattr(node, "decorator_list", ())}
        if "property" in marks:
            kind = "property"
        signature = addnodes.desc_signature(ids=[name], fullname=name, module="agentrl")
        if kind == "class":
            signature += addnodes.desc_annotation("", "class ")
        if method and "classmethod" in marks:
            signature += addnodes.desc_annotation("", "classmethod ")
        if parent == "agentrl":
            signature += addnodes.desc_addname("", "arl.")
        signature += addnodes.desc_name("", short)
        content = addnodes.desc_content()
        if kind == "data":
            value = ast.unparse(node.value)
            if len(value) > ONE_LINE:
                value = value[: ONE_LINE - 2].rpartition(", ")[0] + ", …"
            signature += addnodes.desc_annotation("", f" = {value}")
            content += self.docstring(comment_of(node, source), fields)
        else:
            parameters, returns = signature_of(node)
            wide = len(name) + len(", ".join(parameters)) > ONE_LINE
            if parameters or kind in ("function", "method"):
                brackets = addnodes.desc_parameterlist(multi_line_parameter_list=wide)
                brackets["multi_line_trailing_comma"] = False
                brackets += [addnodes.desc_parameter("", text) for text in parameters]
                signature += brackets
            if returns:
                signature += addnodes.desc_returns("", returns)
            content += self.docstring(ast.get_docstring(node) or "", fields)
        if kind == "class":
            for item in node.body:
                public = isinstance(item, ast.FunctionDef) and not item.name.startswith("_")
                if public and ast.get_docstring(item):
                    content += self.entry(f"{name}.{item.name}", item, source, [])
        entry = addnodes.desc("", signature, content, domain="py", objtype=kind, desctype=kind)
        entry["classes"] += ["py", kind]
        self.state.document.note_explicit_target(signature)
        self.env.get_domain("py").note_object(name, kind, name, location=signature)
        return entry

    def docstring(self, text: str, fields: list[nodes.field]) -> list[nodes.Node]:
        prose, parts = read_docstring(text)
        listed = []
        for title, body in parts.items():
            if isinstance(body, str):
                listed.append(self.field(PARTS[title], *self.markdown(body)))
            else:
                lines = []
                for names, about in body:
                    lines.append(f"- {names}: {textwrap.indent(about, '  ').strip()}")
                listed.append(self.field(PARTS[title], *self.markdown("\n".join(lines))))
        listed += fields
        return [*self.markdown(prose), *([nodes.field_list("", *listed)] if listed else [])]

    def field(self, title: str, *body: nodes.Node) -> nodes.field:
        return nodes.field("", nodes.field_name("", title), nodes.field_body("", *body))

    def markdown(self, text: str) -> list[nodes.Node]:
        holder = nodes.container()
        self.state.nested_parse(StringList(text.split("\n"), source="docstring"), 0, holder)
        return holder.children

    def link(self, page: str, anchor: str, text: str) -> nodes.reference:
        address = self.env.app.builder.get_relative_uri(self.env.docname, page)
        address += f"#{anchor}" if anchor else ""
        return nodes.reference("", text, refuri=address, internal=True)


def read_places(notebook: Path) -> tuple[dict[str, str], str]:
    """Find the section of a chapter in which each name is saved; and the chapter's title."""
    places, heading, title = {}, "", ""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            plain = re.sub(r"^(`{3,}|~{3,}).*?^\1", "", source, flags=re.M | re.S)
            for found in re.findall(r"^#{1,3} +(.+)$", plain, re.M):
                heading = re.sub(r"[`*$]", "", found).strip()
                title = title or heading
        elif source.startswith("#@save"):
            for node in ast.parse(source).body:
                places |= {name: heading for name in _names(node)}
    return places, title


def public_definitions(source: str) -> Iterator[tuple[str, Definition]]:
    """Go through the public names of a module in the order of its lines; overloads once."""
    tree = ast.parse(source)
    listed: list[str] = []
    found: dict[str, Definition] = {}
    for node in tree.body:
        for name in _names(node):
            if name == "__all__":
                listed = ast.literal_eval(node.value)
            found[name] = node
    for name, node in found.items():
        if name in listed:
            yield name, node


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
            return [name]
    return []


def signature_of(node: ast.FunctionDef | ast.ClassDef) -> tuple[list[str], str]:
    """Write out the parameters, each as its author did, and what is returned."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        quoted = isinstance(node.returns, ast.Constant)  # the name of a class in its own body
        returns = str(node.returns.value) if quoted else ast.unparse(node.returns or ast.Name(""))
        return _parameters(node.args), "" if returns == "None" else returns
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name in {"__init__", "__new__"}:
            return _parameters(method.args), ""
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return [], ""
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    keywords = any("kw_only=True" in ast.unparse(item) for item in node.decorator_list)
    return ["*"] * keywords + [ast.unparse(item) for item in fields], ""


def _parameters(arguments: ast.arguments) -> list[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    texts = [_parameter(*pair) for pair in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        texts.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        texts.append("*" + _parameter(arguments.vararg, None))
    elif arguments.kwonlyargs:
        texts.append("*")
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    texts += [_parameter(*pair) for pair in keywords]
    if arguments.kwarg:
        texts.append("**" + _parameter(arguments.kwarg, None))
    return texts[1:] if texts and texts[0] in {"self", "cls"} else texts


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg + (f": {ast.unparse(argument.annotation)}" if argument.annotation else "")
    if default is not None:
        text += (" = " if argument.annotation else "=") + ast.unparse(default)
    return text


def read_docstring(text: str) -> tuple[str, dict[str, str | list[tuple[str, str]]]]:
    """Take a docstring apart: its prose, and by heading a text or a list of names and texts."""
    prose: list[str] = []
    parts: dict[str, list[str]] = {}
    lines = prose
    for line in text.split("\n"):
        if line[:-1] in PARTS and line.endswith(":"):
            lines = parts.setdefault(line[:-1], [])
        elif lines is not prose and line and not line.startswith(" "):
            lines = prose
            lines += ["", line]
        else:
            lines.append(line)
    read: dict[str, str | list[tuple[str, str]]] = {}
    for title, body in parts.items():
        block = textwrap.dedent("\n".join(body)).strip()
        if title == "Returns":
            read[title] = block
            continue
        items: list[tuple[str, str]] = []
        for item in re.split(r"\n(?=\S)", block):
            names, _, about = item.partition(": ")
            quoted = ", ".join(f"`{name}`" for name in names.split(", "))
            items.append((quoted, re.sub(r"\n\s+", "\n", about)))
        read[title] = items
    return "\n".join(prose).strip(), read


def comment_of(node: ast.stmt, source: str) -> str:
    """Read the comment behind a constant on its line, unless it speaks to the formatter."""
    line = source.split("\n")[node.end_lineno - 1][node.end_col_offset :]
    return line.partition("#")[2].strip().removeprefix("fmt: skip")
