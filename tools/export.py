"""Export the `#@save` cells of the chapters into the package `agentrl`.

    python -m tools.export           write agentrl/<slug>.py for each chapter, agentrl/__init__.py
    python -m tools.export --check   fail where one is not current, with the first difference

A code cell whose first line is `#@save` is exported whole; its imports move to the top of the
module. Nothing is written unless every chapter exports without a problem.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import keyword
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import nbformat

ROOT = Path(__file__).resolve().parent.parent
MARK = "#@save"
HAND_WRITTEN = {"check", "notebook", "report"}  # modules of agentrl that no chapter generates
FLAT = "report"  # the one of them whose names are `agentrl`'s as well
HEADER = "# Generated from {source} by tools/export.py. Do not edit: edit the notebook.\n"


class ExportError(Exception):
    """The chapters cannot be exported; the message names notebook, cell and reason, one a line."""


class Line(NamedTuple):
    """A line of source and the label of the cell it stands in."""

    text: str
    cell: str


@dataclass
class Module:
    """The saved cells of one chapter."""

    notebook: Path
    number: str
    slug: str
    docstring: str = ""
    imports: list[Line] = field(default_factory=list)
    body: list[Line] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # what the top level binds -> cell
    internal: list[tuple[ast.stmt, str]] = field(default_factory=list)  # imports of agentrl, cell
    problems: list[str] = field(default_factory=list)

    def problem(self, cell: str, text: str) -> None:
        self.problems.append(f"{self.notebook.name} {cell}: {text}")

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
    foreign = [path for path in orphans if "tools/export.py" not in _read(path)]
    if foreign:
        raise ExportError(
            "\n".join(f"agentrl/{path.name}: no chapter generates it" for path in foreign)
        )
    package.mkdir(exist_ok=True)
    for name, text in changed.items():
        replace(package / name, text)
    for path in orphans:
        path.unlink()
    return sorted([*changed, *(path.name for path in orphans)])


def check(root: Path = ROOT) -> list[str]:
    """Compare the package with what the notebooks export, in both directions.

    Returns:
        A line for each file that differs, with the first difference; empty when all is current.

    Raises:
        ExportError: a chapter cannot be exported.
    """
    package = root / "agentrl"
    wanted = generate(root)
    report = [f"agentrl/{path.name}: no chapter generates it" for path in _orphans(package, wanted)]
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
    modules = [read_module(path) for path in sorted((root / "chapters").glob("*.ipynb"))]
    by_slug: dict[str, Module] = {}
    for module in modules:
        if (other := by_slug.setdefault(module.slug, module)) is not module:
            raise ExportError(f"{module.notebook.name}: {other.notebook.name} has the same slug")
    taken: dict[str, Module] = {}
    for module in modules:
        _check_internal_imports(module, by_slug)
        for name in module.public:
            cell = module.names[name]
            if name in by_slug or name in HAND_WRITTEN:
                module.problem(cell, f"{name} is also the name of a module of agentrl")
            if name in taken:
                other = taken[name]
                module.problem(
                    cell, f"{name} is saved by {other.notebook.name} {other.names[name]} too"
                )
            taken.setdefault(name, module)
        if not module.problems:  # a syntax error above would only be reported twice
            _check_names(module)
    problems = [problem for module in modules for problem in module.problems]
    if problems:
        raise ExportError("\n".join(problems))
    files = {f"{module.slug}.py": _module_text(module) for module in modules}
    files["__init__.py"] = _init_text([*modules, *_flat(root)], version(root))
    return files


def version(root: Path = ROOT) -> str:
    """Read the version of package and book from pyproject.toml, the one place where it stands."""
    text = _read(root / "pyproject.toml")
    return tomllib.loads(text).get("project", {}).get("version", "0")


def read_module(path: Path) -> Module:
    """Take the saved cells of a notebook apart; what is wrong with them goes to `problems`."""
    match = re.fullmatch(r"(\d+)-([a-z][a-z0-9_]*)", path.stem)
    if not match or match[2] in HAND_WRITTEN or keyword.iskeyword(match[2]):
        raise ExportError(
            f"{path.name}: a chapter is called NN-slug.ipynb, slug a Python name that is free"
        )
    module = Module(path, *match.groups())
    notebook = read_notebook(path)
    module.docstring = _docstring(module, notebook)
    for cell, label in zip(notebook.cells, cell_labels(notebook), strict=True):
        if cell.cell_type == "code":
            _read_cell(module, "\n".join(cell.source.splitlines()), label)
    return module


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


def is_saved(source: str) -> bool:
    """Tell whether the source of a code cell is exported: its first line is `#@save`."""
    return source.split("\n", 1)[0].strip() == MARK


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


def _read_cell(module: Module, source: str, cell: str) -> None:
    if not is_saved(source):
        if _marks(source):
            module.problem(cell, f"{MARK} has to be the first line of its cell")
        return
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
    for name in _bound_names(tree.body):
        if module.names.setdefault(name, cell) != cell or name == "__all__":
            other = "the exporter" if name == "__all__" else module.names[name]
            module.problem(cell, f"{name} is saved by {other} too")


def _marks(source: str) -> bool:
    """Tell whether a comment, not a string, says `#@save`; a cell that is not Python has none."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return any(
        token.type == tokenize.COMMENT and token.string.replace(" ", "").startswith(MARK)
        for token in tokens
    )


def _bound_names(statements: list[ast.stmt]) -> list[str]:
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
                    names += _bound_names(branch)
    return names


def _docstring(module: Module, notebook: nbformat.NotebookNode) -> str:
    """Make the module docstring from the chapter's title and the first question in its text."""
    prose = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    title = re.search(r"^# +(.+)$", prose, re.MULTILINE)
    if not title:
        module.problem("cell 1", "no title: the first markdown cell begins with '# Title'")
        return ""
    question = re.search(r"(?:^|(?<=[.!:*\n]))\s*([A-Z][^.!?#]*\?)", prose[title.end() :])
    parts = [title[1].strip().rstrip(".") + "."]
    if question:
        parts.append(" ".join(question[1].split()))
    text = "\n\n".join(parts)
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _check_internal_imports(module: Module, by_slug: dict[str, Module]) -> None:
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
        source = by_slug.get(slug)
        if source is None or source.number >= module.number:
            module.problem(cell, f"agentrl.{slug} is no earlier chapter")
            continue
        for alias in node.names:
            if alias.name not in source.names:
                module.problem(cell, f"{source.notebook.name} saves no {alias.name}")


def _check_names(module: Module) -> None:
    """Report names that the saved cells use but neither import nor save, and other such slips."""
    lines = [*module.imports, *module.body]
    source = "\n".join(line.text for line in lines) + "\n"
    found = ruff(source, "check", "--select=F", "--output-format=json", "--exit-zero")
    seen = set()
    for item in json.loads(found):
        row = item["location"]["row"] - 1
        if item["code"] == "F811" and row < len(module.imports):
            continue  # imported by two cells
        cell = lines[row].cell
        text = item["message"]
        if item["code"] == "F821":
            text += ": neither imported nor saved in a saved cell"
        if (cell, text) not in seen:
            seen.add((cell, text))
            module.problem(cell, text)


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
        f"    from agentrl.{module.slug} import {', '.join(module.public)}\n" for module in modules
    )
    home = {name: module.slug for module in modules for name in module.public}
    text = HEADER.format(source="chapters/*.ipynb")
    text += f'''"""Scaling and efficiency for agentic reinforcement learning: the saved helpers.

A name is imported from its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
{imports or "    pass"}

__all__ = {sorted(home)!r}
__version__ = {number!r}

_HOME = {home!r}


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


def _flat(root: Path) -> list[Module]:
    """Return the hand-written module whose names stand in `agentrl`, where there is one."""
    path = root / "agentrl" / f"{FLAT}.py"
    found = re.search(r"^__all__ = (\[.*?\])", _read(path), re.M | re.S)
    names = dict.fromkeys(ast.literal_eval(found[1]), "") if found else {}
    return [Module(path, "", FLAT, names=names)] if names else []


def _formatted(source: str) -> str:
    """Sort the imports and `__all__`, and format, by the project's own ruff settings."""
    in_order = ruff(source, "check", "--select=I,RUF022", "--fix-only", "--quiet")
    return ruff(in_order, "format")


def _orphans(package: Path, wanted: dict[str, str]) -> list[Path]:
    known = {*wanted, *(f"{name}.py" for name in HAND_WRITTEN)}
    return sorted(path for path in package.glob("*.py") if path.name not in known)


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
