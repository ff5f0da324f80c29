"""Keep the notebooks in one form, execute them, and refuse what would pass the tests unseen.

    python -m tools.notebooks canon FILES              bring notebooks into the canonical form
    python -m tools.notebooks run [--chapter 05] [-p NAME VALUE]   execute notebooks with papermill
    python -m tools.notebooks check [FILES]            the preflight

A run with the chapters' own parameters replaces the committed notebook if every cell succeeded. A
run with other parameters goes to `_build/runs/`, and says where its outputs differ. The time that
a chapter took, with no other parameter than `DEVICE`, is kept with the benchmarks' results.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import nbval.plugin

from benchmarks import common
from tools import export, nbcompare
from tools.export import ROOT, cell_labels

Notebook = nbformat.NotebookNode

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_METADATA = ("mystnb", "tags")
# and rtol=, atol=; `wrap` is for the style sheet: it breaks the lines of an output that is prose
# `lesson`: a training loop, a model or a reference head that is the lesson, so shown at any length
TAGS = {"parameters", "hide-input", "hide-output", "hide-cell", "wrap", "lesson"}
FOLDED = {"hide-input", "hide-cell", "lesson"}
SHOWN_LINES = 15  # of code, at most, in a cell that is not folded
SECOND_EDITION = "second-edition"  # a tag of the title cell: what is only reported elsewhere fails
PRAGMA = re.compile(r"#\s*(?:noqa|(?:fmt|isort|mypy|pylint|ruff):|pragma\b|type:\s*ignore)")


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
    if parameters:  # a page has none, and shows what the run notes
        own = {
            path: has
            for path, has in own.items()
            if has.keys() & parameters or path.parent.name != "chapters"
        }
    for name in parameters:
        if not any(name in defaults for defaults in own.values()):
            print(f"No parameter is called {name} in {', '.join(path.name for path in paths)}.")
            return 1
    failed = False
    for path, defaults in own.items():
        values = {
            name: _like(defaults[name], value)
            for name, value in parameters.items()
            if name in defaults
        }
        changed = {name: value for name, value in values.items() if value != defaults[name]}
        # After a failure the pages still run, since they read what the chapters noted.
        if not (failed and path.parent.name == "chapters"):
            failed |= not _run_one(path, changed)
    return int(failed)


def _parameters(notebook: Notebook) -> dict[str, Any]:
    """Read the names and values that the cell tagged `parameters` assigns."""
    found = {}
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            for node in ast.parse(cell.source).body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    found[node.targets[0].id] = _literal(ast.unparse(node.value))
    return found


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
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / path.name
        try:
            papermill.execute_notebook(
                str(path),
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
    if path.parent.name == "chapters" and parameters.keys() <= {"DEVICE"}:
        _keep_time(path.stem, time.perf_counter() - started, parameters.get("DEVICE", "cpu"))
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


def _keep_time(chapter: str, seconds: float, device: str) -> None:
    """Note how long a chapter took on this machine, unless that is about what is noted already."""
    description = common.machine()
    file = ROOT / "benchmarks" / "results" / common.slug(description) / "chapters.json"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"topic": "chapters"}
    kept["machine"] = description
    chapters = kept.setdefault("chapters", {})
    known = chapters.get(f"{chapter} {device}", {}).get("seconds")
    # About the same is left as it is, else a run would never change nothing.
    if known is None or abs(seconds - known) > max(2.0, known / 4):
        taken = {"seconds": round(seconds, 1), "date": common.today()}
        chapters[f"{chapter} {device}"] = taken
        kept["chapters"] = dict(sorted(chapters.items()))
        common.write(file, kept)


def _compare(committed: Notebook, computed: Notebook) -> list[str]:
    report = []
    pairs = zip(committed.cells, computed.cells, cell_labels(committed), strict=True)
    for old, new, label in pairs:
        if old.cell_type == "code":
            limits = nbcompare.tolerances(old.metadata.get("tags", []))
            found = nbcompare.differences(old.outputs, new.outputs, **limits)
            report += [f"{label}: {difference}" for difference in found]
    return report


# The preflight

NUMBER_CLAIMS = re.compile(
    r"(?<![\w.])(?:\d[\d,]*\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+"  # 0.74, 1.5e-6, 1e-6
    r"|\d[\d,]*\s?(?:%|per ?cent\b)"
    r"|factors? of \d[\d,]*"
    r"|\d[\d,]*[\s-]?(?:×|(?:x|times|fold)\b)(?!\s*\d)"  # but not 8 x 8
    r"|\d[\d,]*[\s-]?(?:[kKMGTP]i?B(?:/s)?|bytes?|[mµun]?s|(?:milli|micro|nano)?seconds?|minutes?"
    r"|hours?|days?|GPU-hours?|nats?|percentage points?|k tokens"
    r"|tokens?(?:/s)?|[MGTP]?FLOPs?(?:/s)?)(?!\w))"
)
PATH = re.compile(r"(?<![\w.:/<])/(?:[\w.@+-]+/)+[\w.@+-]+|\b[A-Z]:\\\w")
ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")
OPAQUE = {
    "bibliography",
    "code",
    "code-block",
    "figure",
    "glue",
    "image",
    "math",
    "tableofcontents",
}


def preflight(path: Path) -> list[str]:
    """Find what would pass the tests unseen, or mislead a reader.

    Returns:
        A line for each finding: notebook, cell, reason.
    """
    text = path.read_text(encoding="utf-8")
    try:
        notebook = read(path)
    except export.ExportError as error:
        return [str(error)]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if code and all(cell.execution_count is None for cell in code):
        return [f"{path.name}: not executed at all"]
    report = []
    labels = cell_labels(notebook)
    recorded = Counter(name for cell in notebook.cells for name in _recorded(cell))
    for cell, label in zip(notebook.cells, labels, strict=True):
        if cell.cell_type == "code":
            found = [*_code_faults(cell), *_output_faults(cell)]
        elif cell.cell_type == "markdown":
            found = [*_prose_faults(cell.source), *_glue_faults(cell.source, recorded)]
        else:
            found = ["a raw cell shows nothing"]
        report += [f"{path.name} {label}: {reason}" for reason in found]
    report += [f"{path.name}: {reason}" for reason in _notebook_faults(notebook, recorded)]
    if any(SECOND_EDITION in cell.metadata.get("tags", []) for cell in notebook.cells[:1]):
        report += [f"{path.name} {label}: {fault}" for label, fault in house_faults(notebook)]
    if text != canonical(notebook):
        report.append(f"{path.name}: not in canonical form: run `tools.notebooks canon` on it")
    return report


def _notebook_faults(notebook: Notebook, recorded: Counter[str]) -> Iterator[str]:
    prose = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    if not notebook.cells or not notebook.cells[0].source.startswith("# "):
        yield "does not begin with a markdown cell '# Title'"
    for name, count in recorded.items():
        if count > 1:
            yield f"records {name!r} {count} times"
    solved = set(re.findall(r"\{solution(?:-start)?\}[ \t]+(\S+)", prose))
    for match in re.finditer(r"\{exercise(?:-start)?\}.*\n((?::.*\n)*)", prose + "\n"):
        label = re.search(r"^:label:\s*(\S+)", match[1], re.MULTILINE)
        if not label:
            yield f"an exercise without a :label:, {match[0].strip()!r}"
        elif label[1] not in solved:
            yield f"exercise {label[1]} has no solution"


def house_faults(notebook: Notebook) -> Iterator[tuple[str, str]]:
    """Find what a chapter of the second edition may not have: long cells in view, lint pragmas."""
    for cell, label in zip(notebook.cells, cell_labels(notebook), strict=True):
        if cell.cell_type != "code":
            continue
        lines = [line.strip() for line in cell.source.splitlines()]
        count = sum(bool(line) and not line.startswith("#") for line in lines)
        if count > SHOWN_LINES and not FOLDED & {*cell.metadata.get("tags", [])}:
            yield label, f"{count} lines of code in view, more than {SHOWN_LINES}: fold it"
        for pragma in PRAGMA.findall(cell.source):
            yield label, f"a note to a tool, {pragma!r}"


def _code_faults(cell: Notebook) -> Iterator[str]:
    source = cell.source
    if cell.execution_count is None:
        yield "not executed, so nothing compares it"
    try:
        ast.parse(source)
    except SyntaxError as error:
        yield f"line {error.lineno} is no Python; magics (%) and shell escapes (!) can fail unseen"
    if source.rstrip().endswith(";"):
        yield "ends in ';', which hides its result"
    tags = cell.metadata.get("tags", [])
    for tag in tags:
        if tag not in TAGS and not nbcompare.TOLERANCE.fullmatch(tag):
            yield f"tag {tag!r} is none of {', '.join(sorted(TAGS))}, rtol=, atol="
    try:
        atol = nbcompare.tolerances(tags)["atol"]
        if atol > nbcompare.largest(cell.get("outputs", [])) / 2:
            yield f"atol={atol:g} is more than half of the largest number, so nothing is compared"
    except ValueError as error:
        yield str(error)
    for marker in nbval.plugin.find_comment_markers(source):
        yield f"a comment changes what is compared: {marker[0]}"
    if re.search(r"^\s*# long:", source, re.MULTILINE):
        yield "a note to a tool, '# long:': fold the cell instead (hide-input)"


def _output_faults(cell: Notebook) -> Iterator[str]:
    mimes = {mime.split("/")[0] for output in cell.outputs for mime in output.get("data", {})}
    if "image" in mimes and any(output.output_type == "execute_result" for output in cell.outputs):
        yield "a figure cell shows the value of its last line too: assign it to _"
    for output in cell.outputs:
        if output.output_type == "error":
            yield f"a saved error, {output.ename}: {output.evalue}"
            continue
        if output.output_type == "stream":
            if output.name == "stderr":
                yield f"stderr: {output.text.strip()[:200]}"
            texts = {"text/plain": output.text}
        else:
            texts = output.data
        for mime, text in texts.items():
            if mime.startswith("image/"):
                yield from _figure_faults(cell, mime, text)
            elif match := PATH.search(str(text)):
                yield f"an absolute path in the output, {match[0]}"
            elif match := ADDRESS.search(str(text)):
                yield f"a memory address in the output, {match[0]}"


def _figure_faults(cell: Notebook, mime: str, text: str) -> Iterator[str]:
    alt = str(cell.metadata.get("mystnb", {}).get("image", {}).get("alt", ""))
    if not alt.strip():
        yield 'a figure without alt text: cell metadata {"mystnb": {"image": {"alt": "..."}}}'
    caption = str(cell.metadata.get("mystnb", {}).get("figure", {}).get("caption", ""))
    for name, words in (("alt text", alt), ("caption", caption)):
        for match in NUMBER_CLAIMS.finditer(_words(words)):
            yield f"{match[0]!r} in the {name}, which nothing compares: leave it to the output"
    if "<dc:date>" in text[:5000]:
        yield "a figure with a date"
    if mime != "image/svg+xml" or 'id="agentrl"' not in text[:2000]:
        yield "a figure with ids of its own: make it with agentrl.notebook.figure"


def _recorded(cell: Notebook) -> list[str]:
    outputs = cell.get("outputs", [])
    return [
        output.metadata["scrapbook"]["name"]
        for output in outputs
        if "scrapbook" in output.get("metadata", {})
    ]


def _glue_faults(source: str, recorded: Counter[str]) -> Iterator[str]:
    uses = re.findall(r"\{glue(?::\w*)?\}`([^`]+)`", source)
    uses += re.findall(r"\{glue(?::\w*)?\}[ \t]+(\S+)", source)
    for use in uses:
        name = use.split("::")[-1].split(":")[0]
        if "::" not in use and name not in recorded:
            yield f"the prose quotes {name!r}, which no cell records"


def _prose_faults(source: str) -> Iterator[str]:
    for block in _prose_blocks(source):
        for sentence in re.split(r"(?<=[.!?])\s+(?=[^a-z\s])", block):
            if "{cite" in sentence:
                continue
            for match in NUMBER_CLAIMS.finditer(_words(sentence)):
                yield (
                    f"{match[0]!r} is typed: record and glue what is measured, cite what is "
                    f"published, and write a chosen value as `code`, in: {sentence.strip()[:80]}"
                )


def _prose_blocks(source: str) -> list[str]:
    """Cut markdown into paragraphs, list items, headings and table rows, without code and maths."""
    source = re.sub(
        r"<!--.*?-->|\$\$.*?\$\$|\\begin\{(\w+\*?)\}.*?\\end\{\1\}", "", source, flags=re.S
    )
    blocks, closing, options = [""], [], False
    for line in source.split("\n"):
        text = line.strip()
        fence = re.match(r"(`{3,}|~{3,}|:{3,})\s*(?:\{([\w:-]+)\})?(.*)", text)
        opaque = any(hidden for _, hidden in closing)
        if closing and fence and not fence[2] and not fence[3] and fence[1] == closing[-1][0]:
            closing.pop()
        elif fence and not opaque:
            name = fence[2] or ""
            hidden = not name or name.split(":")[0] in OPAQUE
            closing.append((fence[1], hidden))
            options = True
            blocks += ["" if hidden else fence[3], ""]
        elif opaque or (options and re.match(r":[\w-]+:", text)) or text.startswith("% "):
            continue
        else:
            options = False
            if not text or re.match(r"[-*+>|#]|\d+[.)]\s|\([\w-]+\)=", text):
                blocks.append("")
            if not re.fullmatch(r"\([\w-]+\)=", text):
                blocks[-1] += " " + re.sub(r"^\d+[.)]\s", "", text)
    return [block for block in blocks if block.strip()]


def _words(text: str) -> str:
    """Leave out of a sentence its roles, code spans, maths and link targets."""
    text = re.sub(r"\{[\w:-]+\}(`+).*?\1", " ", text)
    text = re.sub(r"(`+).*?\1", " ", text)
    text = re.sub(r"(?<!\\)\$[^$]*(?<!\\)\$", " ", text)
    return re.sub(r"\]\([^)]*\)|<[^>\s]+>|https?://\S+", "] ", text)


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
        paths = options.files or [*chapters, *pages]
        report = [line for path in paths for line in preflight(path)]
        print("\n".join(report or ["preflight: nothing to refuse"]))
        for path in [] if report else paths:
            if places := dict(house_faults(read(path))):
                cells = " ".join(re.findall(r"In (\[\d+\])", " ".join(places)))
                print(f"{path.name}: too long in view or pragma: {len(places)} cells, {cells}")
        return bool(report)
    number = options.chapter.zfill(2) if options.chapter.isdigit() else options.chapter
    chosen = [path for path in chapters if path.name.startswith(number)]
    # Pages come last, since they read what a run notes: the time, also on another device.
    also = chosen and {name for name, _ in options.p} <= {"DEVICE"}
    chosen += [path for path in pages if also or path.name.startswith(options.chapter)]
    if not chosen:
        print(f"No chapter begins with {options.chapter!r}.")
        return 1
    if status := export.main([]):
        return status  # the chapters would run with the package as it was
    return run(chosen, {name: _literal(value) for name, value in options.p})


if __name__ == "__main__":
    sys.exit(main())
