"""What a check of a trainer reports, and the error that it raises where it must not fail.

This module is written by hand; the chapters import it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["AuditError", "CheckResult", "judge"]


class AuditError(AssertionError):
    """Raised under `strict=True` by a check that fails; the message is its report."""


@dataclass(frozen=True)
class CheckResult:
    """What a check found. True if it passed; `print` shows the report.

    Attributes:
        check: its name.
        passed: the verdict.
        worst: the number furthest above its limit, in `unit`.
        index: where.
        threshold: `worst` may be this large, and `why`.
        likely: the likely cause, if it failed.
        trace: numbers of places that were compared, in order, to plot, if the check keeps them.
    """

    check: str
    passed: bool
    worst: float
    unit: str
    index: str
    threshold: float
    why: str
    likely: str = ""
    trace: tuple[float, ...] = field(default=(), repr=False)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        lines = [
            f"{self.check}: {'passed' if self.passed else 'FAILED'}",
            f"  worst      {_number(self.worst)} {self.unit} at {self.index}",
            f"  threshold  {_number(self.threshold)}: {self.why}",
        ]
        return "\n".join(lines + [f"  likely     {self.likely}"] * bool(self.likely))

    def __repr__(self) -> str:  # what pytest prints beside a failed assert
        verdict = "passed" if self.passed else f"FAILED, {self.likely}"
        return f"<{self.check} {verdict}; {_number(self.worst)} {self.unit} at {self.index}>"


def judge(strict: bool, **fields: Any) -> CheckResult:
    """Build the result of a check, which passes if `worst` is at most `threshold`; NaN is not.

    Args:
        strict: raise `AuditError` with the report if it fails.
        **fields: those of `CheckResult` without `passed`; `likely` is dropped if it passes.
    """
    worst, threshold = float(fields.pop("worst")), float(fields.pop("threshold"))
    passed = worst <= threshold
    if passed:
        fields["likely"] = ""
    result = CheckResult(passed=passed, worst=worst, threshold=threshold, **fields)
    if strict and not passed:
        raise AuditError(str(result))
    return result


def _number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) < 1e12 and float(x).is_integer() else f"{x:.3g}"
