"""Count the lines of package, tests and tools beside their targets: `python -m tools.size`."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools import export, preflight
from tools.export import ROOT
from tools.notebooks import read

KINDS = ("logic", "docstrings", "checks", "rest")
PACKAGE, TESTS = 5_500, 8_000  # lines at most; the package's are for the chapters up to LAST
LAST = 11


def count(source: str) -> Counter[str]:
    """Count the lines of a module by kind.

    Checks are what refuses bad input: calls of `agentrl.check`, `raise`, and an `if` that holds no
    more than a `raise`. The rest is comments and empty lines.
    """
    lines = source.splitlines()
    kinds = ["logic" if (text := line.strip()) and text[0] != "#" else "rest" for line in lines]
    for node in ast.walk(ast.parse(source)):
        for kind, statement in _marked(node):
            first, last = statement.lineno - 1, statement.end_lineno
            kinds[first:last] = [kind] * (last - first)
    return Counter(kinds)


def _marked(node: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    holders = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, holders) and ast.get_docstring(node, clean=False) is not None:
        yield "docstrings", node.body[0]
    match node:
        case ast.Raise() | ast.If(body=[ast.Raise()], orelse=[]):
            yield "checks", node
        case ast.Expr(value=ast.Call(func=func)) | ast.Assign(value=ast.Call(func=func)):
            if ast.unparse(func).startswith("check."):
                yield "checks", node


def total(folder: Path) -> int:
    """Count the lines of the Python files in a folder and below."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))


def report(root: Path = ROOT) -> Iterator[str]:
    """Write the table, line by line."""
    chapters = sorted((root / "chapters").glob("*.ipynb"))
    later = {path.stem[3:] for path in chapters if int(path.stem[:2]) > LAST}
    yield f"{'package':<22}{'lines':>7}" + "".join(f"{kind:>12}" for kind in KINDS)
    parts: dict[str, Counter[str]] = {}
    for path in sorted((root / "agentrl").rglob("*.py")):
        name = path.relative_to(root / "agentrl").with_suffix("").as_posix()
        found = count(path.read_text("utf-8"))
        part = "the course" if "/" in name else "part III" if name in later else "parts I and II"
        parts.setdefault(part, Counter()).update(found)
        yield _row(name, found)
    for part, found in sorted(parts.items()):
        limit = f"  of at most {PACKAGE:,}" if part == "parts I and II" else ""
        yield _row(part, found) + limit
    listed = export.listed_names((root / "agentrl/__init__.py").read_text("utf-8"))
    staged = [path.read_text("utf-8") for path in (root / "agentrl/course").glob("*.py")]
    course = sum(len(export.listed_names(source)) for source in staged)
    yield f"public names {len(listed)}, {course} of them the course's"
    yield f"tests {total(root / 'tests'):,} lines of at most {TESTS:,}"
    yield f"tools {total(root / 'tools'):,}, benchmarks {total(root / 'benchmarks'):,} lines"
    long = {path.stem: len(preflight.long_cells(read(path))) for path in chapters}
    more = f"more than {preflight.SHOWN_LINES} lines of code in view"
    yield f"cells with {more}: {sum(long.values())}"
    yield "  " + ", ".join(f"{name} {number}" for name, number in long.items() if number)


def _row(name: str, found: Counter[str]) -> str:
    cells = [found.total(), *(found[kind] for kind in KINDS)]
    return f"{name:<22}{cells[0]:>7,}" + "".join(f"{cell:>12,}" for cell in cells[1:])


if __name__ == "__main__":
    print("\n".join(report()))
