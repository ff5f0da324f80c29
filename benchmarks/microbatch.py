"""Microbatch schedules side by side: round robin, verl 0.9.1, agentrl.

    python benchmarks/microbatch.py [--ranks 4 8] [--repeats 3]

All schedules have the same hard cap on the tokens of a packed microbatch. Each is judged by the
cost model that verl balances with, 24576 s + s^2, and agentrl gets the same model as its `cost`, so
that nobody is graded in a currency of their own. verl installs with `pip install --no-deps
verl==0.9.1` plus ray, tensordict, pyvers, cloudpickle, hydra-core, omegaconf, codetiming, msgpack
and protobuf; where it does not import, the tables say why and go on.

How verl is called: `get_seqlen_balanced_partitions(workloads, ranks, equal_size=True)` gives the
ranks their sequences, as its trainer's `_balance_batch` does; `rearrange_micro_batches` then splits
each rank's share, as its actor does. Its all-reduce over the number of microbatches is replaced by
calling every rank in one process with the largest number that any rank came back with, until all
agree; that is the fixed point which the all-reduce reaches.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

import agentrl as arl

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


def balanced(lengths: list[int], max_tokens: int, num_ranks: int, per_rank=None) -> Schedule:
    return arl.rank_balanced_batches(
        lengths, max_tokens, num_ranks, workload, packed=True, batches_per_rank=per_rank
    )


def load_verl() -> Callable[[list[int], int, int], Schedule]:
    """verl's schedule as a function, or whatever importing it raises."""
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import (
        get_seqlen_balanced_partitions,
        rearrange_micro_batches,
    )

    def split(shard: list[int], max_tokens: int, at_least: int) -> list[list[int]]:
        ids = torch.nested.nested_tensor(
            [torch.empty(length, dtype=torch.int8) for length in shard], layout=torch.jagged
        )
        batch = TensorDict({"input_ids": ids}, batch_size=[len(shard)])
        return rearrange_micro_batches(batch, max_tokens, min_num_micro_batch=at_least)[1]

    def schedule(lengths: list[int], max_tokens: int, num_ranks: int) -> Schedule:
        workloads = [workload(length) for length in lengths]
        shards = get_seqlen_balanced_partitions(workloads, num_ranks, equal_size=True)
        number, agreed = 1, False
        while not agreed:
            local = [split([lengths[i] for i in s], max_tokens, number) for s in shards]
            counts = {len(batches) for batches in local}
            number, agreed = max(counts), len(counts) == 1
        return [
            [[shard[i] for i in batch] for batch in batches]
            for shard, batches in zip(shards, local, strict=True)
        ]

    return schedule


def problems() -> dict[str, tuple[list[int], int]]:
    """Lengths and budgets: the batch of chapter 6, and draws from published quantiles."""
    gen = torch.Generator().manual_seed(0)
    example = (8192 * torch.exp(0.8 * torch.randn(512, generator=gen))).clamp(256, 65536).long()
    gen = torch.Generator().manual_seed(6)
    found = {
        "long-tailed example": (example.tolist(), 131_072),
        "long-tailed example, tight": (example.tolist(), 65_536),
    }
    for name, quantiles in arl.TRAJECTORY_QUANTILES.items():
        lengths = arl.draw_lengths(quantiles, 512, gen).tolist()
        found[name] = (lengths, 1 << math.ceil(math.log2(max(lengths))))
    return found


def timed(function: Callable[[], Schedule], repeats: int) -> tuple[Schedule, float]:
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        best = min(best, time.perf_counter() - start)
    return result, best


def judge(ranks: Schedule, lengths: list[int], max_tokens: int) -> str:
    """Table cells: microbatches per rank, fullest, imbalance in total and in lockstep."""
    indices = sorted(i for rank in ranks for batch in rank for i in batch)
    assert indices == list(range(len(lengths))), "an index is missing or twice"
    counts = sorted({len(rank) for rank in ranks})
    fullest = max(sum(lengths[i] for i in batch) for rank in ranks for batch in rank)
    slowest, lockstep = arl.rank_imbalance(ranks, lengths, workload, packed=True)
    per_rank = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    over = "" if fullest <= max_tokens else " **over**"
    return f"{per_rank} | {fullest:,}{over} | {slowest:.4f} | {lockstep:.4f}"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in names if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description="Microbatch schedules side by side.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeats", type=int, default=3, help="timing takes the fastest")
    args = parser.parse_args()

    print(f"{processor()}, Python {platform.python_version()}, torch {torch.__version__}\n")
    methods: dict[str, Callable[[list[int], int, int], Schedule]] = {"round robin": round_robin}
    try:
        from importlib.metadata import version

        methods[f"verl {version('verl')}"] = verl = load_verl()
    except Exception as error:  # any peer may fail to import in its own way
        verl = None
        print(f"verl is left out: {type(error).__name__}: {error}\n")
    methods["agentrl"] = balanced

    print("slowest: the costliest rank over the mean. lockstep: ranks wait in every microbatch.\n")
    print("| lengths, budget | ranks | schedule | per rank | fullest | slowest | lockstep | ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, (lengths, budget) in problems().items():
        for num_ranks in args.ranks:
            rows = dict(methods)
            if verl:
                per_rank = len(verl(lengths, budget, num_ranks)[0])
                rows["agentrl, verl's number"] = lambda *problem, k=per_rank: balanced(*problem, k)
            for method, schedule in rows.items():
                start = f"| {name}, {budget:,} | {num_ranks} | {method} | "
                try:
                    problem = (lengths, budget, num_ranks)
                    ranks, seconds = timed(lambda: schedule(*problem), args.repeats)  # noqa: B023
                except Exception as error:
                    print(f"{start}{type(error).__name__}: {error} | | | | |")
                    continue
                print(f"{start}{judge(ranks, lengths, budget)} | {1000 * seconds:.1f} |")

    print("\nEight sequences of 7 tokens, budget 8 (verl #7553):\n")
    for method, schedule in methods.items():
        ranks = schedule([7] * 8, 8, 1)
        fullest = max(7 * len(batch) for batch in ranks[0])
        print(f"- {method}: {len(ranks[0])} microbatches, fullest {fullest} tokens")

    print("\nNear-linear, one rank, budget 131,072:\n")
    print("| sequences | padded, s | packed, s | packed microbatches | sum over budget |")
    print("| --- | --- | --- | --- | --- |")
    gen = torch.Generator().manual_seed(1)
    for count in (10_000, 100_000, 1_000_000):
        draws = 8192 * torch.exp(0.8 * torch.randn(count, generator=gen))
        lengths = draws.clamp(256, 65536).long().tolist()
        _, padded = timed(lambda: [arl.token_budget_batches(lengths, 131_072)], 1)  # noqa: B023
        (batches,), packed = timed(
            lambda: [arl.token_budget_batches(lengths, 131_072, packed=True)],  # noqa: B023
            1,
        )
        bound = sum(lengths) / 131_072
        print(f"| {count:,} | {padded:.2f} | {packed:.2f} | {len(batches):,} | {bound:,.1f} |")


if __name__ == "__main__":
    main()
