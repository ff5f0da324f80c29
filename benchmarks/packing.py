"""Packing plans: rows, lower bound, time and memory, beside TRL's best-fit decreasing.

    python -m benchmarks packing

TRL plans and gathers the tokens in one function, and for a million sequences the gathering alone
needs more memory than most machines have. So for the plans its gathering is replaced by an exit,
and the time is that of planning alone, which favours TRL. Beside it stands `pack_dataset` as its
documentation calls it, on sizes that fit, against `pack_sequences`. agentrl gets a Python list.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import agentrl as arl
from benchmarks import common
from benchmarks.common import Row, growth, say, timed

SIZES = {"tiny": (10, 100), "full": (1_000, 10_000, 100_000, 1_000_000)}
WHOLE = {"tiny": (20,), "full": (1_000, 10_000)}
PEAK = {"tiny": 100, "full": 100_000}
SLOW = 2.0  # seconds after which a planner is not repeated


def lognormal(n: int, gen: torch.Generator) -> Tensor:
    return (1600 * torch.exp(0.8 * torch.randn(n, generator=gen))).clamp(16, 8192).long()


def uniform(n: int, gen: torch.Generator) -> Tensor:
    return torch.randint(2048, 6145, (n,), generator=gen)


def two_humps(n: int, gen: torch.Generator) -> Tensor:
    """Short episodes that end early, and long ones that use most of a row."""
    short = (200 * torch.exp(0.4 * torch.randn(n, generator=gen))).clamp(16, 8192)
    long = (6500 * torch.exp(0.1 * torch.randn(n, generator=gen))).clamp(16, 8192)
    return torch.where(torch.rand(n, generator=gen) < 0.8, short, long).long()


def sessions(n: int, gen: torch.Generator) -> Tensor:
    return arl.draw_lengths(arl.TRAJECTORY_QUANTILES["mixed sessions"], n, gen)


DISTRIBUTIONS = {  # name: lengths, tokens of a row
    "lognormal": (lognormal, 8192),
    "uniform, C/4 to 3C/4": (uniform, 8192),
    "two humps": (two_humps, 8192),
    "mixed sessions": (sessions, 131_072),
}


class _Planned(Exception):
    """TRL has its rows and would gather the tokens now."""


@cache
def load_trl() -> Callable[[Tensor, int], Callable[[], int]]:
    """TRL's best-fit decreasing as lengths -> a function that plans and returns the rows."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from trl import data_utils

    def stop(*_: object) -> None:
        raise _Planned

    # What it calls before it plans stays; what copies tokens does nothing.
    quick = SimpleNamespace(
        list_value_length=pc.list_value_length,
        greater=pc.greater,
        filter=lambda column, mask: column,
        list_slice=lambda column, *_: column,
        make_struct=pc.make_struct,
        take=stop,
    )

    def prepare(lengths: Tensor, max_tokens: int) -> Callable[[], int]:
        offsets = pa.array(F.pad(lengths.cumsum(0), (1, 0)).numpy())
        tokens = pa.nulls(int(lengths.sum()), pa.null())  # as many as real ones, in no memory
        table = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, tokens)})

        def plan() -> int:
            kept, data_utils.pc = data_utils.pc, quick
            try:
                data_utils._pack_bfd(table, max_tokens)
            except _Planned:
                return len(sys.exc_info()[2].tb_next.tb_frame.f_locals["bins"])
            finally:
                data_utils.pc = kept
            raise RuntimeError("this version of trl plans in another way")

        return plan

    return prepare


def planners(lengths: Tensor, max_tokens: int) -> dict[str, Callable[[], int]]:
    """The planners on one list of lengths; each returns its number of rows."""
    plain = lengths.tolist()

    def ours(strategy: str) -> Callable[[], int]:
        return lambda: len(arl.packing_plan(plain, max_tokens, strategy))

    prepared: list[Callable[[], int]] = []

    def trl() -> int:
        if not prepared:  # inside the run, so that a missing peer is reported; the warm-up pays
            prepared.append(load_trl()(lengths, max_tokens))
        return prepared[0]()

    return {"agentrl bfd": ours("bfd"), "agentrl ffd": ours("ffd"), "trl bfd": trl}


def whole(lengths: Tensor, max_tokens: int) -> dict[str, Callable[[], object]]:
    """Plan and gather, as a user would call it."""
    trajs = [
        arl.Trajectory(torch.zeros(n).long(), torch.zeros(n - 1).bool(), torch.zeros(n - 1), 0.0)
        for n in lengths.tolist()
    ]
    made: list[Any] = []

    def trl() -> object:
        from trl import pack_dataset

        if not made:
            import datasets

            datasets.disable_progress_bars()
            datasets.disable_caching()
            made.append(datasets.Dataset.from_dict({"input_ids": [t.ids.tolist() for t in trajs]}))
        return pack_dataset(made[0], max_tokens, "bfd")

    return {
        "agentrl pack_sequences": lambda: arl.pack_sequences(trajs, max_tokens),
        "trl pack_dataset": trl,
    }


def check(lengths: list[int], max_tokens: int) -> bool:
    """Each index once and no row too full, for both strategies."""
    for strategy in ("bfd", "ffd"):
        rows = arl.packing_plan(lengths, max_tokens, strategy)
        if sorted(i for row in rows for i in row) != list(range(len(lengths))):
            return False
        if max(sum(lengths[i] for i in row) for row in rows) > max_tokens:
            return False
    return True


def peak(job: str, size: str, device: str) -> Callable[[], object]:
    gen = torch.Generator().manual_seed(0)
    planners(lognormal(50, gen), 8192)[job]()  # imports
    lengths = lognormal(PEAK[size], gen)
    return load_trl()(lengths, 8192) if job == "trl bfd" else planners(lengths, 8192)[job]


def plans(size: str) -> tuple[list[Row], list[Row]]:
    rows, curves = [], {}
    for case, (draw, max_tokens) in DISTRIBUTIONS.items():
        for count in SIZES[size]:
            lengths = draw(count, torch.Generator().manual_seed(0))
            plain = lengths.tolist()
            bound = arl.packing_bound(plain, max_tokens)
            others = {
                "agentrl packing_bound": lambda p=plain, C=max_tokens: arl.packing_bound(p, C),
                "sorting alone": lambda x=lengths: x.sort(stable=True),
            }
            valid = check(plain, max_tokens)
            runs = planners(lengths, max_tokens)
            for who, row in timed(runs | others, 5, longest=SLOW).items():
                row |= {"what": "plan", "case": case, "count": count, "who": who}
                row["bytes"] = 16 * count  # a length in, an index out
                if who in runs:
                    row["bound"] = bound
                if who in runs and who.startswith("agentrl"):
                    row["valid"] = valid
                rows.append(row)
                curves.setdefault((case, who), {})[count] = row
            say(f"packing: {case}, {count:,}")
    return rows, [
        growth(f"{who}, {case}", "lengths", points, "n log n", lambda n: n * math.log(n))
        for (case, who), points in curves.items()
    ]


def measure(size: str, device: str) -> Row:
    rows, curves = plans(size)
    for count in WHOLE[size]:
        lengths = lognormal(count, torch.Generator().manual_seed(0))
        for who, row in timed(whole(lengths, 8192), 3, longest=SLOW).items():
            row |= {"what": "plan and gather", "case": "lognormal", "count": count, "who": who}
            rows.append(row | {"bytes": 2 * 8 * int(lengths.sum())})  # ids in, ids out
    for who in ("agentrl bfd", "trl bfd"):
        row = {"what": "peak memory", "case": "lognormal", "count": PEAK[size], "who": who}
        rows.append(row | common.peak_bytes("packing", who, size, device))
    return {"rows": rows, "growth": curves}


if __name__ == "__main__":
    common.main("packing")
