"""Refuse in a notebook what would pass the tests unseen, or mislead a reader.

`python -m tools.notebooks check` prints what it finds.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import nbval.plugin

from tools import export, nbcompare
from tools.export import ROOT, cell_labels
from tools.notebooks import Notebook, canonical, parameter, read

# and rtol=, atol=, needs=; `wrap` is for the style sheet: it breaks the lines of printed prose;
# `lesson`: a training loop, a model or a reference head that is the lesson, so shown at any length
TAGS = {"parameters", "hide-input", "hide-output", "hide-cell", "wrap", "lesson"}
FOLDED = {"hide-input", "hide-cell", "lesson"}
SHOWN_LINES = 15  # of code, at most, in a cell that is not folded
SECOND_EDITION = "second-edition"  # a tag of the title cell: what is only reported elsewhere fails
PRAGMA = re.compile(r"#\s*(?:noqa|(?:fmt|isort|mypy|pylint|ruff):|pragma\b|type:\s*ignore)")
NUMBER_CLAIMS = re.compile(
    r"(?<![\w.])(?:\d[\d,]*\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+"  # 0.74, 1.5e-6, 1e-6
    r"|\d[\d,]*\s?(?:%|per ?cent\b)"
    r"|factors? of \d(?:[\d,]*\d)?"
    r"|\d[\d,]*[\s-]?(?:×|(?:x|times|fold)\b)(?!\s*\d)"  # but not 8 x 8
    r"|\d[\d,]*[\s-]?(?:[kKMGTP]i?B(?:/s)?|bytes?|[mµun]?s|(?:milli|micro|nano)?seconds?|minutes?"
    r"|hours?|days?|GPU-hours?|nats?|percentage points?|k tokens"
    r"|tokens?(?:/s)?|[MGTP]?FLOPs?(?:/s)?)(?!\w))"
)
PATH = re.compile(r"(?<![\w.:/<])/(?:[\w.@+-]+/)+[\w.@+-]+|\b[A-Z]:\\\w")
INSTALL = re.compile(
    r"(?<![\w-])(?:pip3?|uv|conda|mamba|apt|apt-get)(?: +(?:-\S+|pip))* +install\b"
)
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
            found = [*prose_faults(cell.source), *_glue_faults(cell.source, recorded)]
        else:
            found = ["a raw cell shows nothing"]
        report += [f"{path.name} {label}: {reason}" for reason in found]
    report += [f"{path.name}: {reason}" for reason in _notebook_faults(notebook, recorded)]
    if any(SECOND_EDITION in cell.metadata.get("tags", []) for cell in notebook.cells[:1]):
        report += [f"{path.name} {label}: {fault}" for label, fault in house_faults(notebook)]
    if text != canonical(notebook):
        report.append(f"{path.name}: not in canonical form: run `tools.notebooks canon` on it")
    return report


def show(paths: list[Path]) -> int:
    """Print the findings; without any, the cells that a second edition may not have.

    Returns:
        The exit status.
    """
    report = [line for path in paths for line in preflight(path)]
    print("\n".join(report or ["preflight: nothing to refuse"]))
    for path in [] if report else paths:
        if places := dict(house_faults(read(path))):
            cells = " ".join(re.findall(r"In (\[\d+\])", " ".join(places)))
            print(f"{path.name}: {len(places)} cells too long to show, or with a pragma: {cells}")
    return int(bool(report))


def _notebook_faults(notebook: Notebook, recorded: Counter[str]) -> Iterator[str]:
    prose = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    if not notebook.cells or not notebook.cells[0].source.startswith("# "):
        yield "does not begin with a markdown cell '# Title'"
    tagged = sum("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells)
    if tagged > 1:
        yield f"{tagged} cells of parameters, and a run sets those of the first alone"
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
    for label, count in long_cells(notebook).items():
        yield label, f"{count} lines of code in view, more than {SHOWN_LINES}: fold it"
    for cell, label in zip(notebook.cells, cell_labels(notebook), strict=True):
        if cell.cell_type == "code":
            for pragma in PRAGMA.findall(cell.source):
                yield label, f"a note to a tool, {pragma!r}"


def long_cells(notebook: Notebook) -> dict[str, int]:
    """Map the label of each code cell that is too long to be shown to its lines of code."""
    found = {}
    for cell, label in zip(notebook.cells, cell_labels(notebook), strict=True):
        if cell.cell_type == "code" and not FOLDED & {*cell.metadata.get("tags", [])}:
            lines = [line.strip() for line in cell.source.splitlines()]
            found[label] = sum(bool(line) and not line.startswith("#") for line in lines)
    return {label: count for label, count in found.items() if count > SHOWN_LINES}


def _code_faults(cell: Notebook) -> Iterator[str]:
    source = cell.source
    if cell.execution_count is None:
        yield "not executed, so nothing compares it"
    tree = ast.Module([], [])
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        yield f"line {error.lineno} is no Python; magics (%) and shell escapes (!) can fail unseen"
    if source.rstrip().endswith(";"):
        yield "ends in ';', which hides its result"
    tags = cell.metadata.get("tags", [])
    if "parameters" in tags:
        yield from _parameter_faults(tree)
    for tag in tags:
        if tag not in TAGS and not re.match("(rtol|atol|needs)=", tag):
            yield f"tag {tag!r} is none of {', '.join(sorted(TAGS))}, rtol=, atol=, needs="
    try:
        atol = nbcompare.tolerances(tags)["atol"]
        if atol > nbcompare.largest(cell.get("outputs", [])) / 2:
            yield f"atol={atol:g} is more than half of the largest number, so nothing is compared"
    except ValueError as error:
        yield str(error)
    needs = {tag.removeprefix("needs=") for tag in tags if tag.startswith("needs=")}
    for module in sorted(imported(tree) - _available(ROOT) - needs):
        yield f"imports {module}, which no requirement names; a peer has a tag needs={module}"
    if any(INSTALL.search(text) for text in _texts(tree)) or "ensurepip" in imported(tree):
        yield "installs a package: name it in requirements.txt instead"
    for marker in nbval.plugin.find_comment_markers(source):
        yield f"a comment changes what is compared: {marker[0]}"
    if re.search(r"^\s*# long:", source, re.MULTILINE):
        yield "a note to a tool, '# long:': fold the cell instead (hide-input)"


def imported(tree: ast.AST) -> set[str]:
    """Collect the top-level modules that a tree imports, at any depth, by name or by a literal."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=module, level=level):
                found.add("." * level + (module or ""))
            case ast.Call(args=[ast.Constant(value=str(name)), *_]):
                if re.search(r"\b(import_module|__import__)$", ast.unparse(node.func)):
                    found.add(name)
    return {name.partition(".")[0] or name for name in found}


@functools.cache
def _available(root: Path) -> set[str]:
    """Collect what a cell may import: the standard library, the package and the requirements."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    for name in ("requirements-book.txt", "requirements.txt"):
        lines += (root / name).read_text("utf-8").splitlines()
    declared = {_plain(name[0]) for line in lines if (name := re.match(r"[\w.-]+", line))}
    known = metadata.packages_distributions().items()
    modules = {module for module, names in known if {*map(_plain, names)} & declared}
    same = {name.replace("-", "_") for name in declared}  # also where it is not installed
    return {*sys.stdlib_module_names, "agentrl", *modules, *same}


def _plain(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _texts(tree: ast.AST) -> Iterator[str]:
    """Go through the strings of a tree, and those that stand together as a command's words do."""
    for node in ast.walk(tree):
        words = getattr(node, "elts", getattr(node, "args", [node]))
        if isinstance(words, list):
            yield " ".join(str(getattr(word, "value", "")) for word in words)


def _parameter_faults(tree: ast.Module) -> Iterator[str]:
    """Find what `make run` could not set."""
    for node in tree.body:
        try:
            ast.literal_eval((parameter(node) or ("", "?"))[1])
        except (SyntaxError, ValueError):
            yield f"line {node.lineno} of the parameters: not NAME = literal, so no run can set it"


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


def prose_faults(source: str) -> Iterator[str]:
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
