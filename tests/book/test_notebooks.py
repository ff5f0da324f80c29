"""The canonical form and the execution of notebooks."""

from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest
from cells import ALT, printed, ran, recorded
from matplotlib.colors import to_rgba
from nbformat.v4 import new_code_cell

from agentrl.notebook import COLORS, draw_episode, progress, record
from tools import notebooks
from tools.notebooks import canon, main, read
from tools.preflight import preflight

# What the chapters show their results with


def test_record_prints_aligned_lines_and_progress_is_silent_under_test(capsys):
    record(share="0.74", long_name=12)
    items = [1, 2]
    assert progress(items, "counting") is items
    assert capsys.readouterr() == ("share      0.74\nlong_name  12\n", "")
    assert len({*COLORS.values()}) == len(COLORS)


def test_an_episode_is_drawn_filled_where_the_policy_chose_with_its_mask_below():
    words, by_policy = ["<bos>", "LOOK", "\n", "TEST", "SUBMIT"], [False, True, False, True, True]
    _, ax = draw_episode(words, by_policy, per_line=3)
    assert len(ax.patches) == 5
    for k, (word, mine, box) in enumerate(zip(words, by_policy, ax.patches, strict=True)):
        color = to_rgba(COLORS["policy" if mine else "context"])
        assert box.get_edgecolor() == color
        assert box.get_facecolor() == (color if mine else to_rgba("none"))
        at = (k % 3, -1.5 * (k // 3))
        assert [t.get_text() for t in ax.texts if t.get_position() == at] == [repr(word)[1:-1]]
    digits = [t for t in ax.texts if t.get_text() in ("0", "1")]
    assert "".join(t.get_text() for t in digits) == "1011", "entry t says whose token t + 1 is"
    colors = {"0": COLORS["padding"], "1": COLORS["policy"]}
    assert all(t.get_color() == colors[t.get_text()] for t in digits)
    assert [t.get_position()[0] for t in digits] == [0, 1, 2, 0], "the last token has none"
    low, high = ax.get_ylim()
    assert all(low < t.get_position()[1] < high for t in ax.texts)
    assert draw_episode(["x"] * 300, [True] * 300)[0].get_figheight() <= 4
    plt.close("all")


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


def test_a_run_takes_the_chapters_and_pages_that_are_asked_for(project, tmp_path, monkeypatch):
    chapter = project("x = 1")
    page = tmp_path / "book" / "results.ipynb"
    page.parent.mkdir()
    page.write_bytes(chapter.read_bytes())
    ran: list[Path] = []
    monkeypatch.setattr(notebooks, "run", lambda paths, parameters: ran.extend(paths) or 0)
    monkeypatch.setattr(notebooks.export, "main", lambda _: 0)
    for arguments in ([], ["--chapter", "1"], ["--chapter", "01-one"], ["--chapter", "results"]):
        assert main(["run", *arguments]) == 0
    assert ran == [chapter, page, chapter, chapter, page]


def test_a_failure_ends_the_run(project, monkeypatch):
    paths = [project("1 / 0"), project("x = 1", name="02-two")]
    ran: list[Path] = []
    monkeypatch.setattr(notebooks, "_run_one", lambda path, _: ran.append(path))
    assert notebooks.run(paths, {}) == 1
    assert ran == paths[:1]


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


def test_an_unknown_parameter_or_chapter_is_refused(project, capsys):
    path = project("x = 1")
    assert notebooks.run([path], {"SEEDZ": 1}) == 1
    assert main(["run", "--chapter", "99"]) == 1
    out = capsys.readouterr().out
    assert "No parameter is called SEEDZ in 01-one.ipynb" in out
    assert "No chapter begins with '99'" in out


def test_a_run_leaves_out_what_needs_an_absent_package(make, monkeypatch, capsys):
    path = make(ran("import no_such", printed("as it was\n"), tags=["needs=no_such"]), ran("1 + 1"))
    monkeypatch.setattr(notebooks, "ROOT", path.parent.parent)
    canon(path)
    assert notebooks.run([path], {}) == 0
    assert "cell 2 (In [1]) is left out: it needs no_such (make peers)" in capsys.readouterr().out
    _, kept, ran_again = read(path).cells
    assert (kept.source, kept.outputs[0].text) == ("import no_such", "as it was\n")
    assert ran_again.outputs[0].data["text/plain"] == "2"
