"""Compare the outputs of re-executed chapters with the committed ones: a pytest plugin on nbval.

Every output is compared exactly: printed text, results, recorded values, warnings. On a cell tagged
`rtol=1e-3` or `atol=1e-6` (or both), numbers written with a decimal point or an exponent may differ
by that much from the committed ones, and so may the spaces that align them; integers and all else
are still compared exactly. Of a figure only its presence is compared, because its data is printed.
A cell tagged `needs=trl` is skipped where that package is absent, unless AGENTRL_REQUIRE_PEERS is
set.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from nbval.plugin import IPyNbCell, IPyNbFile

COMPARED = {"GenuineIntel", "AuthenticAMD"}  # the makers of the processors that README.md names
GLUE = "application/papermill.record/"
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
TOLERANCE = re.compile(r"(rtol|atol)=(.*)")


def tolerances(tags: Iterable[str]) -> dict[str, float]:
    """Read the tolerances that a cell's tags declare: `rtol` and `atol`, 0 unless declared.

    Raises:
        ValueError: a tolerance is no number above 0, or `rtol` not below 0.1.
    """
    found = {"rtol": 0.0, "atol": 0.0}
    for match in filter(None, map(TOLERANCE.fullmatch, tags)):
        kind, value = match[1], float(match[2])
        if not 0 < value < {"rtol": 0.1, "atol": math.inf}[kind]:
            raise ValueError(f"{match[0]}: a tolerance is above 0, and rtol below 0.1")
        found[kind] = value
    return found


def differences(
    reference: list[dict[str, Any]],
    computed: list[dict[str, Any]],
    rtol: float = 0.0,
    atol: float = 0.0,
) -> list[str]:
    """Compare two lists of a cell's outputs.

    Args:
        reference: the committed outputs, in the notebook format.
        computed: the outputs of running the cell again.
        rtol, atol: a number x with a decimal point or exponent may differ by `atol + rtol * |x|`.

    Returns:
        A description of the first difference in each kind of output; empty if there is none.
    """
    old, new = _by_kind(reference), _by_kind(computed)
    report = []
    for kind in dict.fromkeys([*old, *new]):
        if len(old[kind]) != len(new[kind]):
            report.append(f"{kind}: {len(old[kind])} committed, {len(new[kind])} computed")
            report += [f"    computed   {text.strip()}" for text in new[kind] if not old[kind]]
            continue
        for before, after in zip(old[kind], new[kind], strict=True):
            if difference := _first_difference(before, after, rtol, atol):
                report.append(f"{kind}, {difference}")
    return report


def largest(outputs: list[dict[str, Any]]) -> float:
    """Return the largest absolute value among the numbers that a tolerance loosens, 0 if none."""
    texts = [text for texts in _by_kind(outputs).values() for text in texts]
    numbers = [n.replace(",", "") for text in texts for n in NUMBER.findall(text)]
    return max((abs(float(n)) for n in numbers if not n.lstrip("+-").isdigit()), default=0.0)


def _by_kind(outputs: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Sort the outputs of a cell by kind: stream, recorded value, MIME type."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for output in outputs:
        if output["output_type"] == "stream":  # how a stream is cut into pieces is chance
            kinds[output["name"]] = ["".join([*kinds[output["name"]], output["text"]])]
        elif output["output_type"] == "error":
            kinds["error"].append(f"{output['ename']}: {output['evalue']}")
        else:
            for mime, data in output["data"].items():
                text = data if isinstance(data, str) else json.dumps(data, sort_keys=True)
                kind = mime
                if mime.startswith(GLUE):
                    kind = f"recorded value {output['metadata']['scrapbook']['name']}"
                kinds[kind].append("" if mime.startswith("image/") else text)
    return kinds


def _first_difference(old: str, new: str, rtol: float, atol: float) -> str:
    lines = zip_longest(old.splitlines(), new.splitlines(), fillvalue="(nothing)")
    for number, (before, after) in enumerate(lines, 1):
        if before != after and not (rtol or atol):
            reason = "differs"
        elif before != after:
            reason = _outside(before, after, rtol, atol)
        else:
            continue
        if reason:
            return f"line {number} {reason}:\n    committed  {before}\n    computed   {after}"
    return ""


def _outside(old: str, new: str, rtol: float, atol: float) -> str:
    """Tell why two lines differ by more than the tolerance; empty if they do not."""
    words = [" ".join(NUMBER.sub("#", line).split()) for line in (old, new)]
    if words[0] != words[1]:
        return "differs beside its numbers"
    for before, after in zip(NUMBER.findall(old), NUMBER.findall(new), strict=True):
        if before == after:
            continue
        if not re.search(r"[.eE]", before):
            return f"differs in an integer, {before} and {after}"
        x, y = (float(text.replace(",", "")) for text in (before, after))
        if not abs(x - y) <= atol + rtol * abs(x):
            return f"differs by {abs(x - y):.3g}, more than {atol:g} + {rtol:g} * {abs(x):g}"
    return ""


def missing(tags: Iterable[str]) -> list[str]:
    """List the packages that a cell's tags need and that are not installed."""
    needs = [tag.removeprefix("needs=") for tag in tags if tag.startswith("needs=")]
    return [name for name in needs if importlib.util.find_spec(name) is None]


class Cell(IPyNbCell):
    """A code cell that is compared by `differences`."""

    def runtest(self) -> None:
        absent = missing(self.cell.metadata.get("tags", []))
        if absent and not os.environ.get("AGENTRL_REQUIRE_PEERS"):
            pytest.skip(f"needs {', '.join(absent)}, not installed: make peers")
        super().runtest()

    def compare_outputs(self, test: list, ref: list, skip_compare: object = None) -> bool:
        limits = tolerances(self.cell.metadata.get("tags", []))
        self.comparison_traceback = differences(ref, test, **limits)
        return not self.comparison_traceback


class Chapter(IPyNbFile):
    """A notebook whose code cells are compared by `differences`."""

    def collect(self) -> Iterator[Cell]:
        for item in super().collect():
            parts = {key: getattr(item, key) for key in ("name", "cell_num", "cell", "options")}
            yield Cell.from_parent(self, **parts)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Any:
    """Collect with the classes above what nbval would collect with its own."""
    collectors = yield
    return [
        Chapter.from_parent(parent, path=file_path) if isinstance(one, IPyNbFile) else one
        for one in collectors
    ]


def pytest_configure() -> None:
    """Set what the kernels inherit."""
    os.environ["AGENTRL_PROGRESS"] = "0"
    # Workers run side by side, and a sum over several threads may round differently.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say so if outputs differ on a processor on which nobody has compared them."""
    failed = any(".ipynb::" in report.nodeid for report in terminalreporter.getreports("failed"))
    if failed and (maker := processor()) not in COMPARED:
        terminalreporter.write_line(
            f"The outputs were never compared on this processor, {maker}. A cell that differs in "
            "its last digits only should not print them: please report it."
        )


def processor() -> str:
    """Name the maker of an x86-64 processor under Linux, elsewhere architecture and system."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    found = re.search(r"^vendor_id\s*: (\w+)$", text, re.MULTILINE)
    return found[1] if found else f"{platform.machine()}, {platform.system()}"
