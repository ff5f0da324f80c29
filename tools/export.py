"""Export the `#@save` cells of the chapters into the package `agentrl`.

    python -m tools.export           write agentrl/ from the chapters
    python -m tools.export --check   fail where a file is not current, with the first difference

A code cell whose first line is `#@save` goes whole to `agentrl/<slug>.py`, one that begins with
`#@save course` to `agentrl/course/<slug>.py`; its imports move to the top of the module. A course
cell may use what the chapter's other saved cells define or import: the exporter writes the imports
that this takes. Nothing is written unless every chapter exports without a problem.
"""

from __future__ import annotations

import argparse
import ast
import copy
import io
import json
import keyword
import os
import re
import subprocess
import sys
import textwrap
import tokenize
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import nbformat

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"\A# ?@save( course)?[ \t]*(?=\n|\Z)")  # the first line of a saved cell
HAND_WRITTEN = {"check", "notebook", "report"}  # modules of agentrl that no chapter generates
TAKEN = {*HAND_WRITTEN, "course"}
FLAT = "report"  # the one of them whose names are `agentrl`'s as well
HEADER = "# Generated from {source} by tools/export.py. Do not edit: edit the notebook.\n"
COURSE = HEADER.format(source="chapters/*.ipynb") + (
    '"""What the chapters run on and no trainer imports."""\n'
)


class ExportError(Exception):
    """The chapters cannot be exported; the message names notebook, cell and reason, one a line."""


class Line(NamedTuple):
    """A line of source and the label of the cell it stands in."""

    text: str
    cell: str


@dataclass
class Module:
    """What one chapter saves for the package, or for the course alone."""

    notebook: Path
    number: str
    slug: str
    main: Module | None = None  # of a module of the course: the same chapter's for the package
    docstring: str = ""
    imports: list[Line] = field(default_factory=list)
    body: list[Line] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # what the top level binds -> cell
    internal: list[tuple[ast.stmt, str]] = field(default_factory=list)  # imports of agentrl, cell
    problems: list[str] = field(default_factory=list)

    def problem(self, cell: str, text: str) -> None:
        self.problems.append(f"{self.notebook.name} {cell}: {text}")

    @property
    def path(self) -> str:
        """Where the module goes, from `agentrl/`, without `.py`."""
        return f"course/{self.slug}" if self.main else self.slug

    @property
    def dotted(self) -> str:
        return self.path.replace("/", ".")

    @property
    def public(self) -> list[str]:
        return sorted(name for name in self.names if not name.startswith("_"))


def export(root: Path = ROOT) -> list[str]:
    """Write the modules that changed, all or none, and remove those whose notebook is gone.

    Args:
        root: the folder that holds `chapters/` and `agentrl/`.

    Returns:
        The names of the files written or removed.

    Raises:
        ExportError: a chapter cannot be exported, or a hand-written file is in the way.
    """
    package = root / "agentrl"
    wanted = generate(root)
    changed = {name: text for name, text in wanted.items() if text != _read(package / name)}
    orphans = _orphans(package, wanted)
    foreign = [name for name in orphans if "tools/export.py" not in _read(package / name)]
    if foreign:
        raise ExportError("\n".join(f"agentrl/{name}: no chapter generates it" for name in foreign))
    (package / "course").mkdir(parents=True, exist_ok=True)
    for name, text in changed.items():
        replace(package / name, text)
    for name in orphans:
        (package / name).unlink()
    return sorted([*changed, *orphans])


def check(root: Path = ROOT) -> list[str]:
    """Compare the package with what the notebooks export, in both directions.

    Returns:
        A line for each file that differs, with the first difference; empty when all is current.

    Raises:
        ExportError: a chapter cannot be exported.
    """
    package = root / "agentrl"
    wanted = generate(root)
    report = [f"agentrl/{name}: no chapter generates it" for name in _orphans(package, wanted)]
    for name, text in wanted.items():
        if not (package / name).exists():
            report.append(f"agentrl/{name}: missing")
            continue
        lines = zip_longest(_read(package / name).splitlines(), text.splitlines())
        for number, (have, want) in enumerate(lines, 1):
            if have != want:
                report.append(
                    f"agentrl/{name} line {number} differs from what the chapters export:\n"
                    f"    package   {_shown(have)}\n    notebook  {_shown(want)}"
                )
                break
    return report


def generate(root: Path = ROOT) -> dict[str, str]:
    """Build the text of every generated file of the package, by file name.

    Raises:
        ExportError: a chapter cannot be exported.
    """
    chapters = [read_chapter(path) for path in sorted((root / "chapters").glob("*.ipynb"))]
    modules = [module for chapter in chapters for module in chapter]
    by_name: dict[str, Module] = {}
    for module in modules:
        if (other := by_name.setdefault(module.dotted, module)) is not module:
            raise ExportError(f"{module.notebook.name}: {other.notebook.name} has the same slug")
    taken: dict[str, Module] = {}
    for module in modules:
        _check_internal_imports(module, by_name)
        for name in module.public:
            cell = module.names[name]
            if name in by_name or name in TAKEN:
                module.problem(cell, f"{name} is also the name of a module of agentrl")
            if name in taken:
                other = taken[name]
                module.problem(
                    cell, f"{name} is saved by {other.notebook.name} {other.names[name]} too"
                )
            taken.setdefault(name, module)
    for main, course in chapters:
        if not main.problems and not course.problems:  # a syntax error would be reported twice
            _check_names(main, course)
            if course.names:
                _check_names(course, main)
    problems = [problem for module in modules for problem in module.problems]
    if problems:
        raise ExportError("\n".join(problems))
    written = [module for module in modules if module.names or not module.main]
    files = {f"{module.path}.py": _module_text(module) for module in written}
    files["__init__.py"] = _init_text([*written, *_flat(root)], version(root))
    files["course/__init__.py"] = COURSE
    return files


def version(root: Path = ROOT) -> str:
    """Read the version of package and book from pyproject.toml, the one place where it stands."""
    text = _read(root / "pyproject.toml")
    return tomllib.loads(text).get("project", {}).get("version", "0")


def read_chapter(path: Path) -> tuple[Module, Module]:
    """Take the saved cells of a notebook apart: those for the package, those for the course.

    What is wrong with a cell goes to the `problems` of its module.
    """
    match = re.fullmatch(r"(\d+)-([a-z][a-z0-9_]*)", path.stem)
    if not match or match[2] in TAKEN or keyword.iskeyword(match[2]):
        raise ExportError(
            f"{path.name}: a chapter is called NN-slug.ipynb, slug a Python name that is free"
        )
    main = Module(path, *match.groups())
    course = Module(path, *match.groups(), main=main)
    saved: dict[str, str] = {}
    notebook = read_notebook(path)
    _set_docstrings(main, course, notebook)
    for cell, label in zip(notebook.cells, cell_labels(notebook), strict=True):
        if cell.cell_type != "code":
            continue
        source = "\n".join(cell.source.splitlines())
        if mark := MARK.match(source):
            _read_cell(course if mark[1] else main, source, label, saved)
        elif _marks(source):
            main.problem(label, "#@save or #@save course is the whole first line of its cell")
    return main, course


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """Read a notebook as format 4, whatever minor format it is in.

    Raises:
        ExportError: it is no notebook, as one with the marks of a merge.
    """
    try:
        return nbformat.read(path, as_version=4)
    except nbformat.reader.NotJSONError:
        raise ExportError(f"{path.name}: is no notebook") from None


def cell_labels(notebook: nbformat.NotebookNode) -> list[str]:
    """Name each cell as a person finds it: its place, and for code its number in Jupyter."""
    labels, code = [], 0
    for place, cell in enumerate(notebook.cells, 1):
        code += cell.cell_type == "code"
        labels.append(f"cell {place}" + (f" (In [{code}])" if cell.cell_type == "code" else ""))
    return labels


def replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(text.encode())
    temporary.replace(path)


def ruff(source: str, *command: str, name: str = "agentrl/module.py") -> str:
    """Run a ruff command on a source, by the project's settings for a file of that name.

    Raises:
        ExportError: ruff cannot read the source.
    """
    settings = ["--config", str(ROOT / "pyproject.toml"), "--stdin-filename", name, "-"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, *settings],
        input=source.encode(),
        capture_output=True,
        cwd=ROOT,
    )
    if done.returncode:
        raise ExportError(f"ruff {command[0]}: {done.stderr.decode().strip()}")
    return done.stdout.decode()


def _read_cell(module: Module, source: str, cell: str, saved: dict[str, str]) -> None:
    """Add a cell to its module, and its names to those that the notebook has saved so far."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        module.problem(cell, f"line {error.lineno}: {error.msg}")
        return
    lines = source.split("\n")
    to_top: set[int] = set()
    for node in tree.body:
        if isinstance(node, ast.Expr):
            module.problem(cell, f"line {node.lineno}: would run whenever agentrl is imported")
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        start = node.lineno
        while start > 2 and lines[start - 2].startswith("#"):  # a comment above goes along
            start -= 1
        span = range(start, node.end_lineno + 1)
        if any(
            other is not node
            and other.lineno <= node.end_lineno
            and other.end_lineno >= node.lineno
            for other in tree.body
        ):
            module.problem(cell, f"line {node.lineno}: an import shares its line")
        to_top.update(span)
        targets = (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
        if any((target or "").split(".")[0] == "agentrl" for target in targets):
            module.internal.append((node, cell))
    module.imports += [Line(lines[number - 1], cell) for number in sorted(to_top)]
    kept = [line for number, line in enumerate(lines, 1) if number not in {1, *to_top}]
    text = "\n".join(kept).strip("\n")
    if text:
        module.body += [Line(line, cell) for line in [*text.split("\n"), "", ""]]
    for name in bound_names(tree.body):
        module.names[name] = cell
        other = "the exporter" if name == "__all__" else saved.setdefault(name, cell)
        if other != cell:
            module.problem(cell, f"{name} is saved by {other} too")
    for name in sorted(_deleted_names(tree.body) & saved.keys()):
        module.problem(cell, f"del {name}, which is saved")


def _marks(source: str) -> bool:
    """Tell whether a comment, not a string, says `#@save`; a cell that is not Python has none."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return any(
        token.type == tokenize.COMMENT and re.match(r"#\s*@save\b", token.string)
        for token in tokens
    )


def bound_names(statements: list[ast.stmt]) -> list[str]:
    """List the names that statements define at the top level of a module, imports left out."""
    names: list[str] = []
    for node in statements:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.append(node.name)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names += [
                    leaf.id
                    for target in targets
                    for leaf in ast.walk(target)
                    if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Store)
                ]
            case ast.If() | ast.Try() | ast.With():
                branches = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
                branches += [handler.body for handler in getattr(node, "handlers", [])]
                for branch in branches:
                    names += bound_names(branch)
    return names


def listed_names(source: str) -> list[str]:
    """Read the `__all__` of a module's source, without importing it."""
    found = re.search(r"^__all__ = (\[.*?\])", source, re.M | re.S)
    return ast.literal_eval(found[1]) if found else []


def _deleted_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Collect the names that statements delete outside of functions and classes."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
            names.add(node.id)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names |= _deleted_names(ast.iter_child_nodes(node))
    return names


def _set_docstrings(main: Module, course: Module, notebook: nbformat.NotebookNode) -> None:
    """Make the docstrings from the chapter's title and the first question in its text."""
    prose = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    title = re.search(r"^# +(.+)$", prose, re.MULTILINE)
    if not title:
        main.problem("cell 1", "no title: the first markdown cell begins with '# Title'")
        return
    question = re.search(r"(?:^|(?<=[.!:*\n]))\s*([A-Z][^.!?#]*\?)", prose[title.end() :])
    parts = [title[1].strip().rstrip(".") + "."]
    if question:
        parts.append(" ".join(question[1].split()))
    parts = [part.replace("\\", "\\\\").replace('"""', "'''") for part in parts]
    main.docstring = "\n\n".join(parts)
    course.docstring = f"For the chapter alone: {parts[0]}"


def _check_internal_imports(module: Module, by_name: dict[str, Module]) -> None:
    for node, cell in module.internal:
        whole = {alias.name for alias in node.names} <= HAND_WRITTEN  # from agentrl import check
        if isinstance(node, ast.ImportFrom) and node.module == "agentrl" and whole:
            continue
        if isinstance(node, ast.Import) or node.module == "agentrl":
            module.problem(
                cell, "a saved cell imports by name from the module: from agentrl.x import y"
            )
            continue
        slug = node.module.removeprefix("agentrl.")
        if slug in HAND_WRITTEN:
            continue
        if slug.startswith("course") and not module.main:
            module.problem(cell, "what is saved for the package takes nothing from the course")
            continue
        source = by_name.get(slug)
        if source is None or source.number >= module.number:
            module.problem(cell, f"agentrl.{slug} is no earlier chapter")
            continue
        for alias in node.names:
            if alias.name not in source.names:
                module.problem(cell, f"{source.notebook.name} saves no {alias.name}")


def _check_names(module: Module, other: Module) -> None:
    """Report names that the saved cells use but neither import nor save, and other such slips.

    What a module of the course takes from its chapter's other saved cells is imported instead.
    """
    lines = [*module.imports, *module.body]
    source = "\n".join(line.text for line in lines) + "\n"
    found = ruff(source, "check", "--select=F", "--output-format=json", "--exit-zero")
    imported = _imported_names(other) if module.main else {}
    seen, added = set(), set()
    for item in json.loads(found):
        row = item["location"]["row"] - 1
        if item["code"] == "F811" and row < len(module.imports):
            continue  # imported by two cells
        cell = lines[row].cell
        text = item["message"]
        if item["code"] == "F821":
            name = text.split("`")[1]
            if module.main and name in other.names and not name.startswith("_"):
                added.add(f"from agentrl.{other.slug} import {name}")
                continue
            if name in imported:
                added.add(imported[name])
                continue
            if name not in other.names:
                text += ": neither imported nor saved in a saved cell"
            elif module.main:
                text += f": private to agentrl.{other.slug}"
            else:
                text += ": saved for the course, so nothing for the package may use it"
        if (cell, text) not in seen:
            seen.add((cell, text))
            module.problem(cell, text)
    module.imports += [Line(text, "") for text in sorted(added)]


def _imported_names(module: Module) -> dict[str, str]:
    """Map what a module's imports bind to an import of that alone."""
    found = {}
    for node in ast.parse("\n".join(line.text for line in module.imports)).body:
        for alias in getattr(node, "names", ()):
            name = alias.asname or alias.name.partition(".")[0]
            alone = copy.copy(node)
            alone.names = [alias]
            found[name] = ast.unparse(alone)
    return found


def _module_text(module: Module) -> str:
    parts = [
        HEADER.format(source=f"chapters/{module.notebook.name}"),
        f'"""{module.docstring}\n"""\n'
        if "\n" in module.docstring
        else f'"""{module.docstring}"""\n',
        *(line.text + "\n" for line in module.imports),
        f"\n__all__ = {module.public!r}\n\n",
        *(line.text + "\n" for line in module.body),
    ]
    return _formatted("".join(parts))


def _init_text(modules: list[Module], number: str) -> str:
    modules = [module for module in modules if module.public]
    imports = "".join(
        f"    from agentrl.{module.dotted} import {', '.join(module.public)}\n"
        for module in modules
    )
    names = sorted(name for module in modules for name in module.public)
    table = "\n".join(map(_of_module, modules))
    text = HEADER.format(source="chapters/*.ipynb")
    text += f'''"""Scaling and efficiency for agentic reinforcement learning: the saved helpers.

A name is imported from its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
{imports or "    pass"}

__all__ = {names!r}
__version__ = {number!r}

# Each module, followed by its names
_MODULES = """
{table}"""
_HOME = {{n: module for module, *names in map(str.split, _MODULES.split("\\n\\n")) for n in names}}


if not TYPE_CHECKING:  # a type checker shall see the names above and no others

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'agentrl' has no attribute {{name!r}}")
        value = getattr(import_module(f"agentrl.{{_HOME[name]}}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({{*globals(), *__all__}})
'''
    return _formatted(text)


def _of_module(module: Module) -> str:
    """Write a module and its public names, as a paragraph."""
    return textwrap.fill(" ".join([module.dotted, *module.public]), 98) + "\n"


def _flat(root: Path) -> list[Module]:
    """Return the hand-written module whose names stand in `agentrl`, where there is one."""
    path = root / "agentrl" / f"{FLAT}.py"
    names = dict.fromkeys(listed_names(_read(path)), "")
    return [Module(path, "", FLAT, names=names)] if names else []


def _formatted(source: str) -> str:
    """Sort the imports and `__all__`, and format, by the project's own ruff settings."""
    in_order = ruff(source, "check", "--select=I,RUF022", "--fix-only", "--quiet")
    return ruff(in_order, "format")


def _orphans(package: Path, wanted: dict[str, str]) -> list[str]:
    have = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    return sorted(have - wanted.keys() - {f"{name}.py" for name in HAND_WRITTEN})


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _shown(line: str | None) -> str:
    return "(end of file)" if line is None else line


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.export", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    options = parser.parse_args(arguments)
    try:
        if not options.check:
            print("\n".join(f"agentrl/{name} written" for name in export()) or "agentrl is current")
            return 0
        differences = check()
    except ExportError as error:
        print(f"Not exported:\n{error}", file=sys.stderr)
        return 1
    if differences:
        print("\n".join(differences), file=sys.stderr)
        print("Edit the notebook, not the package, and run `make export`.", file=sys.stderr)
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
