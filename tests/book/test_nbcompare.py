"""The comparison of outputs."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
from cells import SVG, printed, ran, recorded, shown
from nbformat.v4 import new_output

from tools import nbcompare
from tools.export import ROOT
from tools.nbcompare import differences, tolerances

FLAGS = ["--nbval", "--nbval-current-env", "-p", "tools.nbcompare", "-p", "no:cacheprovider"]


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
    result = pytester.runpytest_subprocess(*FLAGS, "-n", "2", "--dist", "loadscope", "-rA", path)
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


def test_a_cell_that_needs_an_absent_package_is_skipped_aloud_or_required(
    pytester, monkeypatch, make
):
    path = make(ran("import no_such", tags=["needs=no_such"]), ran("print(1)", printed("1\n")))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("AGENTRL_REQUIRE_PEERS", raising=False)
    result = pytester.runpytest_subprocess(*FLAGS, "-rs", path)
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*needs no_such, not installed: make peers*"])
    monkeypatch.setenv("AGENTRL_REQUIRE_PEERS", "1")
    pytester.runpytest_subprocess(*FLAGS, path).assert_outcomes(passed=1, failed=1)


NOISE = """import torch

x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
print((x @ x.T).double().sum().item().hex())"""


def test_a_digit_of_rounding_noise_fails_under_the_foreign_kernels(pytester, monkeypatch, make):
    """What `make test` runs again under other kernels would notice it."""
    foreign = re.search(r"^FOREIGN := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)[1]
    settings = dict(pair.split("=") for pair in foreign.split())

    def digits(**more: str) -> str:
        command = [sys.executable, "-c", NOISE]
        env = os.environ | more
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    if digits() == digits(**settings):
        pytest.skip("this processor computes as the foreign kernels do")
    path = make(ran(NOISE, printed(digits())))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.runpytest_subprocess(*FLAGS, path).assert_outcomes(passed=1)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    pytester.runpytest_subprocess(*FLAGS, path).assert_outcomes(failed=1)


@pytest.mark.parametrize(("maker", "said"), [("AuthenticAMD", False), ("aarch64, Linux", True)])
def test_an_unknown_processor_is_named_beside_a_cell_that_differs(monkeypatch, maker, said):
    class Reporter:
        lines: ClassVar[list[str]] = []
        write_line = lines.append

        def getreports(self, _: str) -> list[SimpleNamespace]:
            return [SimpleNamespace(nodeid="chapters/01-gym.ipynb::Cell 3")]

    assert nbcompare.processor().strip()
    monkeypatch.setattr(nbcompare, "processor", lambda: maker)
    nbcompare.pytest_terminal_summary(reporter := Reporter())
    assert any(maker in line for line in reporter.lines) == said
