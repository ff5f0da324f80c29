"""Microbatch schedules: round robin, verl's, agentrl's, under the same hard cap on packed tokens.

    python -m benchmarks microbatch

Each is judged by the cost model that verl balances with, 24576 s + s^2, and agentrl gets the same
model as its `cost`, so that nobody is graded in a currency of their own.

How verl is called: `get_seqlen_balanced_partitions(workloads, ranks, equal_size=True)` gives the
ranks their sequences, as its trainer's `_balance_batch` does; `rearrange_micro_batches` then splits
each rank's share, as its actor does. Its all-reduce over the number of microbatches is replaced by
calling every rank in one process with the largest number that any rank came back with, until all
agree; that is the fixed point which the all-reduce reaches. Its time is that of the driver and of
the slowest rank's last split, since ranks work at the same time, without selecting the tokens; ours
is made whole by every rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch.nn import functional as F

import agentrl as arl
from benchmarks import common
from benchmarks.common import Row, growth, say, timed

SEQUENCES = {"tiny": 64, "full": 512}
RANKS = {"tiny": (2,), "full": (4, 8)}
GROWTH = {"tiny": (16, 64), "full": (8, 80, 800, 8_000, 80_000, 800_000)}
TOO_LONG = 3.0  # seconds, after which a larger size is not run
PEAK = {"tiny": 128, "full": 4_000}

Schedule = list[list[list[int]]]


def workload(length: int) -> float:
    """verl's `calculate_workload`, calibrated there for a hidden size of 4096."""
    return 24_576 * length + length**2


def round_robin(lengths: list[int], max_tokens: int, num_ranks: int) -> Schedule:
    """Each rank takes every n-th sequence and packs its own by first-fit decreasing."""
    ranks = []
    for r in range(num_ranks):
        shard = range(r, len(lengths), num_ranks)
        local = arl.token_budget_batches([lengths[i] for i in shard], max_tokens, packed=True)
        ranks.append([[shard[i] for i in batch] for batch in local])
    return ranks


def balanced(
    lengths: list[int], max_tokens: int, num_ranks: int, per_rank: int | None = None
) -> Schedule:
    return arl.rank_balanced_batches(
        lengths, max_tokens, num_ranks, workload, packed=True, batches_per_rank=per_rank
    )


def verl(
    lengths: list[int], max_tokens: int, num_ranks: int, spent: list[float] | None = None
) -> Schedule:
    """Divide by verl; `spent` gets the seconds of its driver and of its slowest rank."""
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import (
        get_seqlen_balanced_partitions,
        rearrange_micro_batches,
        tu,
    )

    def tokens(shard: list[int]) -> TensorDict:
        # As many tokens as real ones, one byte each: what they are does not matter here.
        offsets = F.pad(torch.tensor(shard).cumsum(0), (1, 0))
        ids = torch.nested.nested_tensor_from_jagged(
            torch.empty(int(offsets[-1]), dtype=torch.int8), offsets
        )
        return TensorDict({"input_ids": ids}, batch_size=[len(shard)])

    start = time.perf_counter()
    workloads = [workload(length) for length in lengths]
    shards = get_seqlen_balanced_partitions(workloads, num_ranks, equal_size=True)
    driver = time.perf_counter() - start
    held = [tokens([lengths[i] for i in shard]) for shard in shards]
    number, agreed = 1, False
    while not agreed:
        local, took = [], []
        for batch in held:
            start = time.perf_counter()
            # It would also select the tokens of each microbatch; ours returns indices only.
            with mock.patch.object(tu, "index_select_tensor_dict", lambda *_: None):
                split = rearrange_micro_batches(batch, max_tokens, min_num_micro_batch=number)
            took.append(time.perf_counter() - start)
            local.append(split[1])
        counts = {len(batches) for batches in local}
        number, agreed = max(counts), len(counts) == 1
    if spent is not None:
        spent.append(driver + max(took))
    return [
        [[shard[i] for i in batch] for batch in batches]
        for shard, batches in zip(shards, local, strict=True)
    ]


METHODS: dict[str, Callable[[list[int], int, int], Schedule]] = {
    "round robin": round_robin,
    "verl": verl,
    "agentrl": balanced,
}


def draw(count: int, seed: int = 0) -> list[int]:
    """Lengths with the long tail of chapter 6."""
    gen = torch.Generator().manual_seed(seed)
    draws = 8192 * torch.exp(0.8 * torch.randn(count, generator=gen))
    return draws.clamp(256, 65536).long().tolist()


def problems(count: int) -> dict[str, tuple[list[int], int]]:
    """Lengths and budgets: the batch of chapter 6, and draws from published quantiles."""
    found = {
        "long tail": (draw(count), 131_072),
        "long tail, tight": (draw(count), 65_536),
    }
    gen = torch.Generator().manual_seed(6)
    for name, quantiles in arl.TRAJECTORY_QUANTILES.items():
        lengths = arl.draw_lengths(quantiles, count, gen).tolist()
        found[name] = (lengths, 1 << math.ceil(math.log2(max(lengths))))
    return found


def judge(ranks: Schedule, lengths: list[int], max_tokens: int) -> Row:
    """Microbatches per rank, the fullest, imbalance of totals and in lockstep (1 is perfect)."""
    indices = sorted(i for rank in ranks for batch in rank for i in batch)
    counts = sorted({len(rank) for rank in ranks})
    fullest = max(sum(lengths[i] for i in batch) for rank in ranks for batch in rank)
    slowest, lockstep = arl.rank_imbalance(ranks, lengths, workload, packed=True)
    return {
        "valid": indices == list(range(len(lengths))),
        "cap_kept": fullest <= max_tokens,
        "fullest": fullest,
        "per_rank": counts[-1],
        "equal_counts": len(counts) == 1,
        "slowest": slowest,
        "lockstep": lockstep,
    }


def schedules(size: str) -> list[Row]:
    rows = []
    for case, (lengths, budget) in problems(SEQUENCES[size]).items():
        for num_ranks in RANKS[size]:
            methods = dict(METHODS)
            theirs = common.attempt(lambda: verl(lengths, budget, num_ranks))  # noqa: B023
            if "failed" not in theirs:
                methods["agentrl, verl's count"] = partial(balanced, per_rank=len(theirs[0]))
            made: dict[str, Schedule] = {}

            def run(who: str, lengths=lengths, budget=budget, n=num_ranks, m=methods, made=made):
                spent: list[float] = []
                also = {"spent": spent} if who == "verl" else {}
                made[who] = m[who](lengths, budget, n, **also)
                return common.Took(spent[0]) if spent else None

            for who, row in timed({who: partial(run, who) for who in methods}, 3).items():
                row |= {"what": "schedule", "case": case, "budget": budget, "ranks": num_ranks}
                row |= {"who": who, "bytes": 16 * len(lengths)}
                if "failed" not in row:
                    row |= judge(made[who], lengths, budget)
                rows.append(row)
        say(f"microbatch: {case}")
    return rows


def fault() -> list[Row]:
    """Eight sequences of 7 tokens and a budget of 8: verl issue 7553, one per microbatch."""
    rows = []
    for who, method in METHODS.items():
        ranks = common.attempt(lambda method=method: method([7] * 8, 8, 1))
        row = ranks if isinstance(ranks, dict) else judge(ranks, [7] * 8, 8)
        rows.append({"what": "verl issue 7553", "who": who, **row})
    return rows


def growing() -> dict[str, Callable[[list[int]], object]]:
    return {
        "agentrl token_budget_batches, padded": lambda x: arl.token_budget_batches(x, 131_072),
        "agentrl token_budget_batches, packed": (
            lambda x: arl.token_budget_batches(x, 131_072, packed=True)
        ),
        "agentrl rank_balanced_batches": lambda x: balanced(x, 131_072, 8),
        "verl": lambda x: verl(x, 131_072, 8, spent := []) and common.Took(spent[0]),
    }


def curves(size: str) -> tuple[list[Row], list[Row]]:
    rows: list[Row] = []
    points: dict[str, dict[int, Row]] = {who: {} for who in growing()}
    for count in GROWTH[size]:
        lengths = draw(count, seed=1)
        runs = {}
        for who, function in growing().items():
            last = [row.get("seconds", math.inf) for row in points[who].values()][-1:]
            if last and last[0] > TOO_LONG:
                why = f"not run: the size before took {last[0]:.1f} s"
                points[who][count] = {"failed": why if last[0] < math.inf else "as before"}
            else:
                runs[who] = lambda f=function, x=lengths: f(x)
        for who, row in timed(runs, 3, longest=TOO_LONG).items():
            points[who][count] = row
            case = {"what": "growth", "case": f"{count:,} sequences", "who": who}
            rows.append(case | row | {"bytes": 16 * count})
        say(f"microbatch: growth, {count:,}")
    return rows, [
        growth(who, "sequences", p, "n log n", lambda n: n * math.log(n))
        for who, p in points.items()
    ]


def peak(job: str, size: str, device: str) -> Callable[[], object]:
    METHODS[job](draw(64), 131_072, 2)
    lengths = draw(PEAK[size])
    return lambda: METHODS[job](lengths, 131_072, 8)


def measure(size: str, device: str) -> Row:
    rows = schedules(size) + fault()
    for who in METHODS:
        row = {"what": "peak memory", "case": "long tail", "count": PEAK[size], "who": who}
        rows.append(row | common.peak_bytes("microbatch", who, size, device))
    more, found = curves(size)
    return {"rows": rows + more, "growth": found}


if __name__ == "__main__":
    common.main("microbatch")
