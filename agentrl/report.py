"""What a check of a trainer reports, and the error that it raises where it must not fail.

This module is written by hand; the chapters import it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec

__all__ = ["AuditError", "CheckResult", "Finding", "as_check"]

P = ParamSpec("P")


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


@dataclass(frozen=True)
class Finding:
    """One question of a check: what was found, and what would have been allowed.

    The fields are those of `CheckResult`. NaN is never allowed.
    """

    worst: float
    unit: str
    index: str
    threshold: float
    why: str
    likely: str = ""
    trace: tuple[float, ...] = ()

    @property
    def passed(self) -> bool:
        return bool(self.worst <= self.threshold)

    def but(self, **changes: Any) -> Finding:
        """Return the same finding with other fields."""
        return replace(self, **changes)


def as_check(questions: Callable[P, Iterator[Finding]]) -> Callable[P, CheckResult]:
    """Make a check of a generator: its result is the first finding that fails, or else the last.

    A keyword `strict=True` of the check raises `AuditError` with the report if it fails.
    """

    @functools.wraps(questions)
    def check(*args: P.args, **kwargs: P.kwargs) -> CheckResult:
        for found in questions(*args, **kwargs):
            last = found
            if not found.passed:
                break
        fields = vars(last.but(likely="" if last.passed else last.likely))
        result = CheckResult(questions.__name__, last.passed, **fields)
        if kwargs.get("strict") and not result:
            raise AuditError(str(result))
        return result

    signature = inspect.signature(questions).replace(return_annotation=CheckResult)
    check.__dict__["__signature__"] = signature
    return check


def _number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) < 1e12 and float(x).is_integer() else f"{x:.3g}"
