"""Keep the notebooks in one form and execute them.

    python -m tools.notebooks canon FILES              bring notebooks into the canonical form
    python -m tools.notebooks run [--chapter 05] [-p NAME VALUE]   execute notebooks with papermill
    python -m tools.notebooks check [FILES]            what tools/preflight.py refuses

A run with the chapters' own parameters replaces the committed notebook if every cell succeeded. A
run with other parameters goes to `_build/runs/`, and says where its outputs differ.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import nbformat

from tools import export, nbcompare
from tools.export import ROOT, cell_labels

Notebook = nbformat.NotebookNode

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_METADATA = ("mystnb", "tags")


# The canonical form


def canonical(notebook: Notebook) -> str:
    """Write a notebook in its one form, so that the same content gives the same bytes.

    The code is formatted, cell ids come from the sources, execution counts follow the order of the
    cells, neighbouring streams are one, and of the metadata only what the book or the tests read
    stays.
    """
    seen: Counter[str] = Counter()
    cells, count = [], 0
    for cell, source in zip(notebook.cells, _formatted_sources(notebook), strict=True):
        if not source:
            continue
        digest = hashlib.sha256(f"{cell.cell_type}\n{source}".encode()).hexdigest()[:8]
        seen[digest] += 1
        plain = {
            "cell_type": cell.cell_type,
            "id": digest if seen[digest] == 1 else f"{digest}-{seen[digest]}",
            "metadata": {
                key: cell.metadata[key] for key in CELL_METADATA if cell.metadata.get(key)
            },
            "source": source,
        }
        if cell.cell_type == "code":
            count += 1
            ran = cell.execution_count is not None
            plain["execution_count"] = count if ran else None
            plain["outputs"] = _canonical_outputs(cell.outputs, count)
        cells.append(plain)
    form = {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return nbformat.writes(nbformat.from_dict(form), version=4).rstrip("\n") + "\n"


def _formatted_sources(notebook: Notebook) -> list[str]:
    """Format the code cells with ruff, which would put a space into `#@save` if it saw it."""
    plain = ["\n".join(cell.source.splitlines()).strip("\n ") for cell in notebook.cells]
    cells = [
        nbformat.v4.new_code_cell(export.MARK.sub(r"#:@save\1", source))
        for cell, source in zip(notebook.cells, plain, strict=True)
        if cell.cell_type == "code"
    ]
    text = nbformat.writes(nbformat.v4.new_notebook(cells=cells, metadata=METADATA))
    try:
        text = export.ruff(text, "format", name="chapters/chapter.ipynb")
    except export.ExportError:
        return plain  # the preflight names the cell that is no Python
    code = (cell.source for cell in nbformat.reads(text, as_version=4).cells)
    return [
        re.sub("^#:@save", "#@save", next(code)) if cell.cell_type == "code" else source
        for cell, source in zip(notebook.cells, plain, strict=True)
    ]


def _canonical_outputs(outputs: list[Notebook], count: int) -> list[Notebook]:
    """Join neighbouring streams of a name; recorded values, which show nothing, come last."""
    shown: list[Notebook] = []
    recorded: list[Notebook] = []
    for output in outputs:
        if any(mime.startswith(nbcompare.GLUE) for mime in output.get("data", {})):
            recorded.append(output)
            continue
        if output.output_type == "stream" and shown and shown[-1].get("name") == output.name:
            shown[-1].text += output.text
            continue
        if output.get("name") == "stderr" and re.fullmatch(r"[^\n]*\r\s*", output.text):
            continue  # a progress bar that has cleared itself
        output = nbformat.from_dict(output)
        if output.output_type == "execute_result":
            output.execution_count = count
        shown.append(output)
    return shown + recorded


def read(path: Path) -> Notebook:
    """Read a notebook as format 4.5, whatever minor format it is in."""
    return nbformat.v4.upgrade(export.read_notebook(path))


def canon(path: Path) -> bool:
    """Bring a notebook file into the canonical form; tells whether it changed."""
    text = canonical(read(path))
    changed = text != path.read_text(encoding="utf-8")
    if changed:
        export.replace(path, text)
    return changed


# Execution


def run(paths: list[Path], parameters: dict[str, Any]) -> int:
    """Execute chapters one after another; returns the exit status.

    Args:
        paths: the notebooks.
        parameters: values for the cell tagged `parameters`. A chapter without one of them runs with
            the others, one without any of them not at all.
    """
    os.environ["AGENTRL_PROGRESS"] = "0"  # the chapters' bars would end up in their outputs
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as under test
    own = {path: _parameters(read(path)) for path in paths}
    if parameters:
        own = {path: has for path, has in own.items() if has.keys() & parameters}
    for name in parameters:
        if not any(name in defaults for defaults in own.values()):
            print(f"No parameter is called {name} in {', '.join(path.name for path in paths)}.")
            return 1
    for path, defaults in own.items():
        values = {
            name: _like(defaults[name], value)
            for name, value in parameters.items()
            if name in defaults
        }
        changed = {name: value for name, value in values.items() if value != defaults[name]}
        if not _run_one(path, changed):
            return 1
    return 0


def _parameters(notebook: Notebook) -> dict[str, Any]:
    """Read the names and values that the cell tagged `parameters` assigns."""
    found = {}
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            for node in ast.parse(cell.source).body:
                if pair := parameter(node):
                    found[pair[0]] = _literal(pair[1])
    return found


def parameter(statement: ast.stmt) -> tuple[str, str] | None:
    """Read the name and the value of `NAME = value` or `NAME: type = value`."""
    match statement:
        case (
            ast.Assign(targets=[ast.Name(name)], value=value)
            | ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value)
        ):
            return name, ast.unparse(value)
    return None


def _literal(text: str) -> Any:
    """Read a Python literal, or else the text itself; a list without brackets is one too."""
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
    return list(value) if isinstance(value, tuple) else value


def _like(default: Any, value: Any) -> Any:
    """Give a text parameter its text back, `0,1` and not the list `[0, 1]`."""
    if not isinstance(default, str):
        return value
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _run_one(path: Path, parameters: dict[str, Any]) -> bool:
    import papermill
    from nbclient.exceptions import DeadKernelError

    runs = ROOT / "_build" / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "source.ipynb", Path(folder) / path.name
        left_out = _leave_out(path, source)
        try:
            papermill.execute_notebook(
                str(source),
                str(output),
                parameters=parameters,
                kernel_name="python3",
                language="python",
                cwd=str(path.parent),
                progress_bar={"desc": path.stem},
                extra_arguments=["--log-level=ERROR"],
            )
        except (papermill.PapermillExecutionError, DeadKernelError) as error:
            kept = runs / path.name
            export.replace(kept, output.read_text(encoding="utf-8"))
            if isinstance(error, DeadKernelError):
                print(f"{path.name} failed: its process was killed, as for want of memory")
            else:
                print(f"{path.name} In [{error.exec_count}] failed: {error.ename}: {error.evalue}")
            print(f"The notebook is as it was; this run is in {kept.relative_to(ROOT)}.")
            return False
        executed = read(output)
    for cell in executed.cells:
        cell.update(left_out.get(cell.id, {}))
    if not parameters:
        before = path.read_text(encoding="utf-8")
        text = canonical(executed)
        if text != before:
            export.replace(path, text)
        print(f"{path.name}: {'unchanged' if text == before else 'outputs refreshed'}")
        return True
    executed.cells = [
        cell
        for cell in executed.cells
        if "injected-parameters" not in cell.metadata.get("tags", [])
    ]
    kept = runs / path.name
    export.replace(kept, canonical(executed))
    given = ", ".join(f"{name} = {value!r}" for name, value in parameters.items())
    print(f"{path.name} with {given}: written to {kept.relative_to(ROOT)}")
    for line in _compare(read(path), executed) or ["every output equals the committed one"]:
        print(f"  {line}")
    return True


def _leave_out(path: Path, copy: Path) -> dict[str, Notebook]:
    """Copy a notebook without the code that needs an absent package; returns those cells by id."""
    notebook, left_out = read(path), {}
    for cell, label in zip(notebook.cells, cell_labels(notebook), strict=True):
        if absent := nbcompare.missing(cell.metadata.get("tags", [])):
            print(f"{path.name} {label} is left out: it needs {', '.join(absent)} (make peers)")
            left_out[cell.id] = nbformat.from_dict(dict(cell))
            cell.source = ""
    nbformat.write(notebook, copy)
    return left_out


def _compare(committed: Notebook, computed: Notebook) -> list[str]:
    report = []
    pairs = zip(committed.cells, computed.cells, cell_labels(committed), strict=True)
    for old, new, label in pairs:
        if old.cell_type == "code":
            limits = nbcompare.tolerances(old.metadata.get("tags", []))
            found = nbcompare.differences(old.outputs, new.outputs, **limits)
            report += [f"{label}: {difference}" for difference in found]
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.notebooks")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("canon", help="bring notebooks into the canonical form")
    one.add_argument("files", nargs="+", type=Path)
    one = commands.add_parser("run", help="execute chapters")
    one.add_argument("--chapter", default="", help="number or beginning of the name; default all")
    one.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    one = commands.add_parser("check", help="the preflight")
    one.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    chapters = sorted((ROOT / "chapters").glob("*.ipynb"))
    pages = sorted((ROOT / "book").glob("*.ipynb"))
    if options.command == "canon":
        for path in options.files:
            print(f"{path}: {'written' if canon(path) else 'canonical'}")
        return 0
    if options.command == "check":
        from tools import preflight  # which needs this module

        return preflight.show(options.files or [*chapters, *pages])
    number = options.chapter.zfill(2) if options.chapter.isdigit() else options.chapter
    chosen = [path for path in chapters if path.name.startswith(number)]
    chosen += [path for path in pages if path.name.startswith(options.chapter)]
    if not chosen:
        print(f"No chapter begins with {options.chapter!r}.")
        return 1
    if status := export.main([]):
        return status  # the chapters would run with the package as it was
    return run(chosen, {name: _literal(value) for name, value in options.p})


if __name__ == "__main__":
    sys.exit(main())
