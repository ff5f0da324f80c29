"""The canonical form, execution, the preflight and the comparison of outputs."""

import json
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_output

from agentrl.notebook import COLORS, progress, record
from benchmarks import common
from tools import notebooks
from tools.export import ROOT
from tools.nbcompare import GLUE, differences, tolerances
from tools.notebooks import canon, main, read
from tools.preflight import preflight

CHAPTERS = [*sorted((ROOT / "chapters").glob("*.ipynb")), *sorted((ROOT / "book").glob("*.ipynb"))]
SVG = '<svg width="1" id="agentrl"></svg>'
ALT = {"mystnb": {"image": {"alt": "A line that rises."}}}


def ran(source: str, *outputs: nbformat.NotebookNode, **metadata: object) -> nbformat.NotebookNode:
    """An executed code cell."""
    return new_code_cell(source, execution_count=1, outputs=list(outputs), metadata=metadata)


def printed(text: str, name: str = "stdout") -> nbformat.NotebookNode:
    return new_output("stream", name=name, text=text)


def shown(**data: str) -> nbformat.NotebookNode:
    mimes = {key.replace("_", "/", 1).replace("_", "+"): value for key, value in data.items()}
    return new_output("display_data", data=mimes)


def recorded(name: str, value: str) -> nbformat.NotebookNode:
    metadata = {"scrapbook": {"name": name, "mime_prefix": GLUE}}
    return new_output("display_data", data={f"{GLUE}text/plain": repr(value)}, metadata=metadata)


# What the chapters show their results with


def test_record_prints_aligned_lines_and_progress_is_silent_under_test(capsys):
    record(share="0.74", long_name=12)
    items = [1, 2]
    assert progress(items, "counting") is items
    assert capsys.readouterr() == ("share      0.74\nlong_name  12\n", "")
    assert len({*COLORS.values()}) == len(COLORS)


# The canonical form


def test_the_canonical_form_keeps_what_matters_and_drops_the_rest(make):
    path = make()
    notebook = read(path)
    cell = ran(
        "print(1)\r\nprint(2)\n\n",
        printed("1\n"),
        recorded("a", "1"),
        printed("2\n"),
        printed("oh\n", name="stderr"),
        printed("3\n"),
        printed("\rruns:  50%|###  |\r            \r", name="stderr"),
        printed("4\n"),
        printed("a warning\n\rruns:  50%|###  |\r            \r", name="stderr"),
        tags=["rtol=1e-3"],
        mystnb=ALT["mystnb"],
        papermill={"start_time": "now"},
        execution={"iopub.status.busy": "now"},
    )
    cell.execution_count = 17
    notebook.cells += [cell, new_code_cell(" \n"), new_code_cell("x = 1"), new_code_cell("x = 1")]
    notebook.metadata.update(papermill={"duration": 1}, language_info={"version": "3.11.7"})
    nbformat.write(notebook, path)
    assert canon(path)
    assert not canon(path)

    result = read(path)
    [_, first, second, third] = result.cells
    assert result.metadata == notebooks.METADATA
    assert first.source == "print(1)\nprint(2)"
    assert first.metadata == {"tags": ["rtol=1e-3"], "mystnb": ALT["mystnb"]}
    assert first.execution_count == 1
    assert [output.get("text") for output in first.outputs] == [
        "1\n2\n",
        "oh\n",
        "3\n4\n",
        "a warning\n\rruns:  50%|###  |\r            \r",
        None,
    ]
    assert second.execution_count is None  # never executed stays visible
    assert third.id == f"{second.id}-2"


def test_ids_depend_on_the_cell_alone(make):
    path = make("a = 1", "b = 2")
    canon(path)
    ids = {cell.source: cell.id for cell in read(path).cells}
    path = make("c = 3", "b = 2", "md:text", "a = 1")
    canon(path)
    more = {cell.source: cell.id for cell in read(path).cells}
    assert ids["a = 1"] == more["a = 1"]
    assert ids["b = 2"] == more["b = 2"]


# Execution


@pytest.fixture
def project(make, tmp_path, monkeypatch):
    """Make `tools.notebooks` work on notebooks under `tmp_path`."""
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr("tools.export.ROOT", tmp_path)
    return make


def test_a_run_refreshes_the_committed_notebook_and_a_second_changes_nothing(project, capsys):
    figure = new_code_cell("fig, ax = figure(2, 1)\nax.plot([1, 2])\nprint(SEEDS)", metadata=ALT)
    path = project(
        new_code_cell("SEEDS = [0, 1]", metadata={"tags": ["parameters"]}),
        "import random\n\nfrom agentrl.notebook import figure, progress, record",
        'record(share="0.74", count=3)\nfor _ in progress(range(3)):\n    pass',
        figure,
        "md:The share is {glue:text}`share`.",
    )
    assert notebooks.run([path], {"SEEDS": [0, 1]}) == 0  # the defaults: nothing is injected
    first = path.read_bytes()
    assert preflight(path) == []
    assert notebooks.run([path], {}) == 0
    assert path.read_bytes() == first
    assert "unchanged" in capsys.readouterr().out

    assert notebooks.run([path], {"SEEDS": [2]}) == 0
    assert path.read_bytes() == first
    out = capsys.readouterr().out
    assert "with SEEDS = [2]: written to _build/runs/01-one.ipynb" in out
    assert "committed  [0, 1]" in out
    assert "computed   [2]" in out


def test_a_run_keeps_the_time_of_a_chapter_by_machine(project, tmp_path):
    path = project(new_code_cell('DEVICE = "cpu"', metadata={"tags": ["parameters"]}))
    assert notebooks.run([path], {}) == 0
    [file] = (tmp_path / "benchmarks/results").rglob("chapters.json")
    assert file.parent.name == common.slug(common.machine())

    def times() -> dict[str, float]:
        kept = json.loads(file.read_text())["chapters"]
        return {name: entry["seconds"] for name, entry in kept.items()}

    assert list(times()) == ["01-one cpu"]
    notebooks._keep_time("01-one", 100.0, "cpu")
    notebooks._keep_time("01-one", 120.0, "cpu")  # about the same
    assert times()["01-one cpu"] == 100.0
    notebooks._keep_time("01-one", 10.0, "cpu")
    notebooks._keep_time("01-one", 20.0, "cuda")
    assert times() == {"01-one cpu": 10.0, "01-one cuda": 20.0}


def test_pages_run_after_the_chapters_and_leave_no_time(project, tmp_path, monkeypatch):
    chapter = project("x = 1")
    (tmp_path / "book").mkdir()
    page = tmp_path / "book" / "results.ipynb"
    page.write_bytes(project("y = 2", name="02-two").read_bytes())
    (tmp_path / "chapters" / "02-two.ipynb").unlink()
    ran: list[Path] = []
    with monkeypatch.context() as patch:
        patch.setattr(notebooks, "run", lambda paths, parameters: ran.extend(paths) or 0)
        patch.setattr(notebooks.export, "main", lambda _: 0)
        assert main(["run"]) == 0
        assert main(["run", "--chapter", "01"]) == 0
        assert main(["run", "--chapter", "01", "-p", "DEVICE", "cuda"]) == 0
        assert main(["run", "--chapter", "01", "-p", "SEEDS", "1"]) == 0  # it notes no time
        assert main(["run", "--chapter", "results"]) == 0
    assert ran == [*[chapter, page] * 3, chapter, page]
    assert notebooks.run([page], {}) == 0
    assert preflight(page) == []
    assert not list((tmp_path / "benchmarks").rglob("*.json"))


def test_after_a_failure_only_the_pages_run(project, tmp_path, monkeypatch):
    paths = [project("1 / 0"), project("x = 1", name="02-two"), tmp_path / "book" / "results.ipynb"]
    paths[2].parent.mkdir()
    paths[2].write_bytes(paths[1].read_bytes())
    ran: list[Path] = []
    monkeypatch.setattr(
        notebooks, "_run_one", lambda path, _: ran.append(path) or path is not paths[0]
    )
    assert notebooks.run(paths, {}) == 1
    assert ran == [paths[0], paths[2]]


def test_a_text_parameter_stays_text():
    assert notebooks._like("0", notebooks._literal("0,1")) == "0,1"
    assert notebooks._like("cpu", notebooks._literal("cuda")) == "cuda"
    assert notebooks._like([0], notebooks._literal("2,3")) == [2, 3]


def test_a_failed_run_leaves_the_committed_notebook(project, tmp_path, capsys):
    path = project("x = 1", "x / 0")
    before = path.read_bytes()
    assert notebooks.run([path], {}) == 1
    assert path.read_bytes() == before
    out = capsys.readouterr().out
    assert "01-one.ipynb In [2] failed: ZeroDivisionError: division by zero" in out
    assert "ZeroDivisionError" in (tmp_path / "_build/runs/01-one.ipynb").read_text()


def test_a_run_whose_process_is_killed_names_the_chapter(project, tmp_path, capsys):
    path = project("x = 1", "import os\n\nos.kill(os.getpid(), 9)")
    before = path.read_bytes()
    assert notebooks.run([path], {}) == 1
    assert path.read_bytes() == before
    assert "01-one.ipynb failed: its process was killed" in capsys.readouterr().out


def test_a_chapter_without_the_parameter_does_not_run(project, capsys):
    cell = new_code_cell("STEPS: int = 1", metadata={"tags": ["parameters"]})
    paths = [project("x = 1"), project(cell, "print(STEPS)", name="02-two")]
    before = paths[0].read_bytes()
    assert notebooks.run(paths, {"STEPS": 2}) == 0
    out = capsys.readouterr().out
    assert "02-two.ipynb with STEPS = 2" in out and "01-one" not in out
    assert "computed   2" in out
    assert paths[0].read_bytes() == before


def test_no_chapter_runs_with_a_package_that_could_not_be_exported(project, monkeypatch):
    monkeypatch.setattr(notebooks.export, "main", lambda _: 1)
    path = project("x = 1")
    before = path.read_bytes()
    assert main(["run"]) == 1
    assert path.read_bytes() == before


def test_a_chapter_is_chosen_by_its_number(project, monkeypatch):
    ran = []
    monkeypatch.setattr(notebooks.export, "main", lambda _: 0)
    monkeypatch.setattr(notebooks, "run", lambda paths, _: ran.append([p.name for p in paths]) or 0)
    project("x = 1")
    project("x = 1", name="10-ten")
    assert main(["run", "--chapter", "1"]) == 0
    assert ran == [["01-one.ipynb"]]


def test_an_unknown_parameter_or_chapter_is_refused(project, capsys):
    path = project("x = 1")
    assert notebooks.run([path], {"SEEDZ": 1}) == 1
    assert main(["run", "--chapter", "99"]) == 1
    out = capsys.readouterr().out
    assert "No parameter is called SEEDZ in 01-one.ipynb" in out
    assert "No chapter begins with '99'" in out


# The preflight


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
    "need": [
        ran("def f():\n    import verl.utils, trl", tags=["needs=trl", "needs=verl"]),
    ],
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
    "skip": [ran("x", tags=["nbval-skip"]), "tag 'nbval-skip' is none of"],
    "ignore": [ran("x", tags=["nbval-ignore-output"]), "tag 'nbval-ignore-output'"],
    "raises": [ran("x", tags=["raises-exception"]), "tag 'raises-exception'"],
    "injected": [ran("x", tags=["injected-parameters"]), "tag 'injected-parameters'"],
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
    "decimal": ["md:The share is 0.74 here.", "'0.74' is typed"],
    "kilobytes": ["md:The cache takes 147 KB.", "'147 KB' is typed"],
    "kibibytes": ["md:A buffer of 16 KiB.", "'16 KiB' is typed"],
    "a rate": ["md:It moves 12 bytes/token.", "'12 bytes' is typed"],
    "percentage": ["md:Padding is 74% of it.", "'74%' is typed"],
    "per cent": ["md:Padding is 74 percent of it.", "'74 percent' is typed"],
    "times": ["md:It is 9x faster.", "'9x' is typed"],
    "multiplication sign": ["md:It is 9× faster.", "'9×' is typed"],
    "times in words": ["md:That is 9 times as fast.", "'9 times' is typed"],
    "bytes": ["md:It takes 20 GB.", "'20 GB' is typed"],
    "seconds": ["md:It takes 3 s.", "'3 s' is typed"],
    "tokens": ["md:A median of 18 tokens.", "'18 tokens' is typed"],
    "power": ["md:An error of 1e-6 is left.", "'1e-6' is typed"],
    "in a table": ["md:| a | b |\n| --- | --- |\n| share | 0.74 |", "'0.74' is typed"],
    "in a heading": ["md:## 74% of it is waste", "'74%' is typed"],
    "in a list": ["md:- first\n- 2.5 nats", "'2.5' is typed"],
    "in a directive": ["md:```{note}\nIt is 0.74.\n```", "'0.74' is typed"],
    "cited next door": ["md:It is theirs {cite}`qwen3`. Ours is 0.74.", "'0.74' is typed"],
    "factor": ["md:That is a factor of 9 less.", "'factor of 9' is typed"],
    "points": ["md:It rose by 4 percentage points.", "'4 percentage points' is typed"],
    "milliseconds": ["md:It takes 12 milliseconds.", "'12 milliseconds' is typed"],
    "hours": ["md:It takes 3 hours.", "'3 hours' is typed"],
    "days": ["md:It takes 3 days.", "'3 days' is typed"],
    "nats": ["md:It is off by 2 nats.", "'2 nats' is typed"],
    "work": ["md:It costs 5 TFLOPs.", "'5 TFLOPs' is typed"],
    "thousands": ["md:A context of 12k tokens.", "'12k tokens' is typed"],
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
    assert ("in view or pragma: 1 cells, [1]\n" in capsys.readouterr().out) == bool(reason)
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


# The comparison


def test_numbers_are_compared_within_the_declared_tolerance_and_all_else_exactly():
    old, near, far = (printed(f"loss {x}  steps 60\n") for x in ("0.1234", "0.1235", "0.1300"))
    assert differences([old], [old]) == []
    assert differences([old], [near])
    assert differences([old], [near], rtol=1e-3) == []
    assert differences([old], [near], atol=2e-4) == []
    assert differences([old], [near], atol=2e-5)
    assert "more than 0 + 0.001" in differences([old], [far], rtol=1e-3)[0]
    assert "integer" in differences([old], [printed("loss 0.1234  steps 61\n")], rtol=1e-1)[0]
    assert "beside" in differences([old], [printed("cost 0.1234  steps 60\n")], rtol=1e-1)[0]
    assert "beside" in differences([old], [printed("loss nan  steps 60\n")], rtol=1e-1)[0]
    assert differences([printed("9.999 x")], [printed("10.000 x")], rtol=1e-3) == []
    assert differences([printed(" 1.0e-6")], [printed("-1.0e-6")], rtol=1e-2)
    assert differences([printed("1,000.5")], [printed("1,000.6")], rtol=1e-3) == []


def test_streams_are_compared_whole_and_figures_by_presence():
    assert differences([printed("a\nb\n")], [printed("a\n"), printed("b\n")]) == []
    assert differences([shown(image_svg_xml="<svg/>")], [shown(image_svg_xml="<svg>1</svg>")]) == []
    assert differences([], [printed("Warning", name="stderr")])


def test_tolerances_are_read_from_tags():
    assert tolerances(["parameters", "rtol=1e-3"]) == {"rtol": 1e-3, "atol": 0.0}


def test_pytest_compares_each_output(pytester, monkeypatch, make, tmp_path):
    """Run a notebook whose committed outputs are wrong in all the ways that count."""
    warning = "import sys\n\nprint(1)\nprint('careful', file=sys.stderr)"
    figure = "fig, ax = figure(2, 1)\nprint(1)"
    near, far = "print('loss', 0.1235)", "print('loss', 0.1239)"
    loss, tag = printed("loss 0.1234\n"), {"tags": ["rtol=1e-3"]}
    path = make(
        ran("from agentrl.notebook import figure, progress, record"),
        ran("for i in progress(range(2)):\n    print(i)", printed("0\n1\n")),
        ran("record(a='0.5')", printed("a  0.5\n"), recorded("a", "0.5")),
        ran("1.5", new_output("execute_result", {"text/plain": "1.5"}, execution_count=1)),
        ran(
            figure,
            printed("1\n"),
            shown(text_plain="<Figure size 200x100 with 1 Axes>", image_svg_xml=SVG),
        ),
        ran(near, loss, **tag),
        # all that follow differ
        ran("print(12)", printed("13\n")),
        ran("print(1)", printed("1\n2\n")),
        ran("print(1)\nprint(2)", printed("1\n")),
        ran(warning, printed("1\n")),
        ran("fig = 1\nprint(1)", printed("1\n"), shown(image_svg_xml=SVG)),
        ran(figure + "  # extra", printed("1\n")),
        ran("record(b='0.5')", printed("b  0.5\n"), recorded("b", "0.6")),
        ran("2.5", new_output("execute_result", {"text/plain": "2.6"}, execution_count=1)),
        ran("print(2)"),
        ran(near + "  # exact", loss),
        ran(far, loss, **tag),
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    flags = ["--nbval", "--nbval-current-env", "-p", "tools.nbcompare", "-p", "no:cacheprovider"]
    result = pytester.runpytest_subprocess(*flags, "-n", "2", "--dist", "loadscope", "-rA", path)
    result.assert_outcomes(passed=6, failed=11)
    failed = {
        line.split("Cell ")[1].split()[0]
        for line in result.outlines
        if "FAILED" in line and "Cell" in line
    }
    assert failed == {str(number) for number in range(6, 17)}
    result.stdout.fnmatch_lines(
        ["*stdout, line 1 differs:", "    committed  13", "    computed   12"]
    )
