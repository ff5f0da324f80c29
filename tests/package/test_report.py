"""The report of a check: what it prints, what fails, what strict raises."""

import math
from collections.abc import Iterator

import pytest

import agentrl as arl
from agentrl import report


@report.as_check
def a_check(
    *worst: float, threshold: float = 1.0, strict: bool = False
) -> Iterator[report.Finding]:
    for value in worst:
        yield report.Finding(value, "nats", "row 3", threshold, "so", "this")


def test_the_report_has_verdict_number_place_limit_and_cause() -> None:
    assert str(a_check(2.0)).splitlines() == [
        "a_check: FAILED",
        "  worst      2 nats at row 3",
        "  threshold  1: so",
        "  likely     this",
    ]
    assert repr(a_check(2.0)) == "<a_check FAILED, this; 2 nats at row 3>"
    assert str(a_check(0.5)).splitlines()[0] == "a_check: passed"
    assert "likely" not in str(a_check(0.5))


def test_the_first_question_that_fails_is_the_result_and_strict_raises_it() -> None:
    assert a_check(1.0) and not a_check(1.5)
    assert a_check(0.1, 3.0, 2.0).worst == 3 and a_check(0.1, 0.5).worst == 0.5
    with pytest.raises(AssertionError, match="a_check: FAILED") as caught:
        a_check(2.0, strict=True)
    assert isinstance(caught.value, arl.AuditError) and "row 3" in str(caught.value)
    assert a_check(0.5, strict=True)


def test_a_nan_never_passes() -> None:
    assert not a_check(math.nan, 0.0) and not a_check(0.0, threshold=math.nan)
    with pytest.raises(arl.AuditError):
        a_check(math.nan, strict=True)
