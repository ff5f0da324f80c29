"""The preflight: what it lets pass, and what it refuses with which words."""

import ast
import json
from pathlib import Path

import nbformat
import pytest
from cells import ALT, SVG, printed, ran, recorded, shown
from nbformat.v4 import new_output

from tools.export import ROOT
from tools.notebooks import canon, main
from tools.preflight import imported, preflight, prose_faults

CHAPTERS = [*sorted((ROOT / "chapters").glob("*.ipynb")), *sorted((ROOT / "book").glob("*.ipynb"))]


def findings(path: Path) -> list[str]:
    """What the preflight says of a notebook brought into canonical form."""
    canon(path)
    return preflight(path)


def long(lines: int) -> str:
    return "# as long as that\n\n" + "\n".join(f"x{i} = {i}" for i in range(lines))


EXERCISE = "md:```{exercise}\n:label: ex-one\n\nHalve five.\n```"
SOLUTION = "md:```{solution} ex-one\n:class: dropdown\n\nIt is odd.\n```"
CLEAN = {
    "output": [ran("print(0.5)", printed("0.5 of/both sides 1/2\n"))],
    "figure": [ran("figure()", shown(image_svg_xml=SVG), **ALT)],
    "tolerance": [ran("print(0.5)", printed("0.5\n"), tags=["rtol=1e-3", "atol=1e-9"])],
    "saved": [ran("#@save\nx = 1")],
    "16 lines": [ran(long(16))],
    "magic in a string": [ran('x = """\n%time\n!ls\n"""')],
    "glued": [
        ran("record()", recorded("a", "0.7")),
        "md:It is {glue:text}`a`, or {glue:text}`a:.1f`.",
    ],
    "imports": [ran("import os, torch.nn\nfrom PIL import Image\nfrom agentrl.gym import x")],
    "need": [ran("import verl.utils, trl", tags=["needs=trl", "needs=verl"])],
    "words": [ran("print('pip can install it', ['a', 'pip'], ['install'])")],
    "parameters": [ran('A = "0,1"\nB: list[int] = [2, -1]', tags=["parameters"])],
    "recorded, not quoted": [ran("record()", recorded("a", "0.7"))],
    "exercise": [EXERCISE, SOLUTION],
    "code span": ["md:At `0.5` and `12 GB`, as in `x * 2.0`."],
    "maths": ["md:So $x = 0.5$ and\n\n$$\ny = 1.5 \\times 10^{3}\n$$"],
    "maths of an environment": ["md:So\n\n\\begin{align}\nz &= 2.5\n\\end{align}"],
    "cited": ["md:Their run took 3.5 hours and 12% of {cite}`qwen3`. Ours is short."],
    "link": ["md:See [the report](https://example.org/v1.5/50%25) and <https://example.org/2.5>."],
    "options": ["md:```{image} a.svg\n:width: 50%\n:alt: 0.5 of it\n```"],
    "code block": ["md:```python\nx = 0.5  # 20%\n```"],
    "plain integers": ["md:30 tasks, 20 of them for training, 8 x 8 episodes, chapter 5, in 2025."],
}


@pytest.mark.parametrize("cells", CLEAN.values(), ids=CLEAN)
def test_the_preflight_passes(make, cells):
    assert findings(make(*cells)) == []


REFUSED = {
    "unexecuted": ["x = 1", "not executed at all"],
    "unexecuted cell": [ran("x = 1"), "y = 1", "not executed, so nothing compares it"],
    "error": [
        ran("1 / 0", new_output("error", ename="E", evalue="v", traceback=[])),
        "saved error, E: v",
    ],
    "stderr": [ran("x", printed("UserWarning: no\n", "stderr")), "stderr: UserWarning: no"],
    "path": [
        ran("x", printed("saved in /tmp/run/file.pt\n")),
        "absolute path in the output, /tmp/run",
    ],
    "path in a result": [ran("x", shown(text_plain="PosixPath('/home/ann/x')")), "/home/ann/x"],
    "path on Windows": [ran("x", printed("C:\\Users\\ann\n")), "absolute path"],
    "address": [ran("f", shown(text_plain="<function f at 0x7f2a5c1d0>")), "memory address"],
    **{
        tag: [ran("x", tags=[tag]), f"tag {tag!r} is none of"]
        for tag in ("nbval-skip", "nbval-ignore-output", "raises-exception", "injected-parameters")
    },
    "skip by comment": [ran("# NBVAL_IGNORE_OUTPUT\nx"), "changes what is compared: check"],
    "magic": [ran("%matplotlib inline\nx"), "no Python"],
    "cell magic": [ran("%%time\nx"), "no Python"],
    "shell": [ran("!false"), "no Python"],
    "semicolon": [ran("x;"), "ends in ';'"],
    "note to this tool": [ran("x = 1\n    # long: a table"), "fold the cell instead"],
    "wide tolerance": [ran("x", tags=["rtol=0.5"]), "rtol below 0.1"],
    "no tolerance": [ran("x", tags=["rtol=tight"]), "could not convert"],
    "tolerance of everything": [
        ran("x", printed("900 draws, off by -2.5\n"), tags=["atol=1.5"]),
        "atol=1.5 is more than half of the largest number",
    ],
    "tolerance of nothing": [ran("x", printed("3 draws\n"), tags=["atol=0.1"]), "atol=0.1 is more"],
    "number in alt text": [
        ran("figure()", shown(image_svg_xml=SVG), mystnb={"image": {"alt": "It falls to 19%."}}),
        "'19%' in the alt text",
    ],
    "no alt": [ran("figure()", shown(image_svg_xml=SVG)), "without alt text"],
    "empty alt": [
        ran("figure()", shown(image_svg_xml=SVG), mystnb={"image": {"alt": " "}}),
        "without alt text",
    ],
    "pixels": [ran("plt.plot()", shown(image_png="iVBO"), **ALT), "ids of its own"],
    "number in a caption": [
        ran(
            "f()",
            shown(image_svg_xml=SVG),
            mystnb={**ALT["mystnb"], "figure": {"caption": "26% less"}},
        ),
        "'26%' in the caption",
    ],
    "date": [
        ran("figure()", shown(image_svg_xml=SVG + "<dc:date>2025</dc:date>"), **ALT),
        "a figure with a date",
    ],
    "random ids": [ran("plt.plot()", shown(image_svg_xml="<svg></svg>"), **ALT), "ids of its own"],
    "value beside a figure": [
        ran(
            "ax.plot()",
            new_output("execute_result", {"text/plain": "[<Line2D>]"}, execution_count=1),
            shown(image_svg_xml=SVG),
            **ALT,
        ),
        "shows the value of its last line",
    ],
    "unknown value": [
        ran("record()"),
        "md:It is {glue:text}`a`.",
        "quotes 'a', which no cell records",
    ],
    "unknown figure": ["md:```{glue} fig\n```", "quotes 'fig'"],
    "recorded twice": [
        ran("record()", recorded("a", "1")),
        ran("record() ", recorded("a", "2")),
        "records 'a' 2 times",
    ],
    "no solution": [EXERCISE, "exercise ex-one has no solution"],
    "no label": [
        "md:```{exercise-start}\n```\nHalve.\n```{exercise-end}\n```",
        "without a :label:",
    ],
    "in a table": ["md:| a | b |\n| --- | --- |\n| share | 0.74 |", "'0.74' is typed"],
    "in a heading": ["md:## 74% of it is waste", "'74%' is typed"],
    "in a list": ["md:- first\n- 2.5 nats", "'2.5' is typed"],
    "in a directive": ["md:```{note}\nIt is 0.74.\n```", "'0.74' is typed"],
    "cited next door": ["md:It is theirs {cite}`qwen3`. Ours is 0.74.", "'0.74' is typed"],
    "raw": [nbformat.v4.new_raw_cell("x"), "raw cell"],
    **{
        source: [ran(source), f"imports {name}, which no requirement names"]
        for source, name in {
            "import einops": "einops",
            "def f():\n    from liger_kernel.ops import x": "liger_kernel",
            "import math, Bio.Seq as b": "Bio",
            "if x:\n    importlib.import_module('vllm.core')": "vllm",
            "__import__('sglang')": "sglang",
            "from . import common": ".",
            "import pip": "pip",
        }.items()
    },
    "another need": [ran("import verl", tags=["needs=trl"]), "a peer has a tag needs=verl"],
    **{
        source: [ran(source), "installs a package"]
        for source in (
            "subprocess.run([sys.executable, '-m', 'pip', 'install', 'x'], check=True)",
            "command = 'pip', '-q', 'install', 'x'",
            "os.system('pip3 install x')",
            "os.popen(f'{sys.executable} -m pip --no-input install {name}')",
            "get_ipython().run_line_magic('pip', 'install x')",
            "get_ipython().system('uv pip install x')",
            "import ensurepip",
        )
    },
    "pip by magic": [ran("%pip install x"), "no Python"],
    "pip by shell": [ran("!pip install x"), "no Python"],
    "parameters in pairs": [
        ran("A, B = 1, 2", tags=["parameters"]),
        "line 1 of the parameters: not NAME = literal",
    ],
    "parameter without a value": [ran("A = 1\nB: int", tags=["parameters"]), "line 2 of the"],
    "computed parameter": [ran("A = 2 * n", tags=["parameters"]), "line 1 of the parameters"],
    "parameters twice": [
        ran("A = 1", tags=["parameters"]),
        ran("B = 1", tags=["parameters"]),
        "2 cells of parameters",
    ],
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_the_preflight_refuses(make, case):
    *cells, reason = case
    report = findings(make(*cells))
    assert len(report) == 1
    assert report[0].startswith("01-one.ipynb")
    assert reason in report[0]


TYPED = "0.74, 1e-6, 74%, 74 percent, 9x, 9×, 9 times, factor of 9, 4 percentage points, 147 KB"
TYPED += ", 16 KiB, 20 GB, 12 bytes, 3 s, 12 milliseconds, 3 hours, 3 days, 2 nats, 18 tokens"
TYPED += ", 12k tokens, 5 TFLOPs"


@pytest.mark.parametrize("claim", TYPED.split(", "))
def test_a_measured_number_is_not_typed(claim):
    [fault] = prose_faults(f"It took 8 tasks and is {claim}, or less.")
    assert fault.startswith(f"{claim!r} is typed")


SECOND = {
    "15 lines": [ran(long(15)), ""],
    "16 lines": [ran(long(16)), "16 lines of code in view, more than 15"],
    "folded": [ran(long(16), tags=["hide-input"]), ""],
    "folded with its output": [ran(long(16), tags=["hide-cell"]), ""],
    "output folded": [ran(long(16), tags=["hide-output"]), "16 lines of code in view"],
    "the lesson": [ran(long(40), tags=["lesson"]), ""],
    "formatter": [ran("x = {}  # fmt: skip"), "a note to a tool, '# fmt:'"],
    "linter": [ran("def f():  # noqa: E731\n    pass"), "a note to a tool, '# noqa'"],
    "type checker": [ran("x = y  # type: ignore[arg-type]"), "'# type: ignore'"],
}


@pytest.mark.parametrize(("cell", "reason"), SECOND.values(), ids=SECOND)
def test_the_second_edition_is_held_to_more(make, capsys, cell, reason):
    path = make(cell)
    assert findings(path) == []
    assert main(["check", str(path)]) == 0
    assert ("or with a pragma: [1]\n" in capsys.readouterr().out) == bool(reason)
    title = nbformat.v4.new_markdown_cell("# One", metadata={"tags": ["second-edition"]})
    report = findings(make(title, cell, title=""))
    assert len(report) == bool(reason)
    assert all(reason in line for line in report)


def test_the_preflight_refuses_other_forms_and_missing_titles(make):
    assert "# Title" in findings(make(ran("x = 1"), title=""))[0]
    path = make(ran("x = 1"))
    assert findings(path) == []
    notebook = json.loads(path.read_text())
    notebook["cells"][1]["execution_count"] = 5
    path.write_text(json.dumps(notebook))
    assert "not in canonical form" in preflight(path)[0]
    assert main(["check", str(path)]) == 1
    assert main(["canon", str(path)]) == 0
    assert main(["check", str(path)]) == 0


def test_every_chapter_passes_the_preflight():
    assert [line for path in CHAPTERS for line in preflight(path)] == []


def test_no_tool_needs_the_benchmarks():
    for path in (ROOT / "tools").glob("*.py"):
        assert "benchmarks" not in imported(ast.parse(path.read_text(encoding="utf-8")))
