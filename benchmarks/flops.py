"""FLOP counters: their error against PyTorch's own counter, and what packing does to them.

    python -m benchmarks flops

PyTorch counts the products that run, attention over all pairs of a row; so ours is asked for
"square" pairs there. The FLOPs that are needed are those of causal attention inside each sequence.
TRL gives FLOPs per token of a sequence length, verl those of a list of lengths, and 6 N the rule of
thumb, with N all parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import agentrl as arl
from benchmarks import common, models
from benchmarks.common import Row, attempt, growth, say, timed

CASES = {  # sequences of one row, tokens each
    "1 x 32, alone": [32],
    "1 x 512, alone": [512],
    "8 x 64, packed in one row": [64] * 8,
    "64 x 64, packed in one row": [64] * 64,
}
GROWTH = {"tiny": (10, 100), "full": (1_000, 10_000, 100_000, 1_000_000)}


@cache  # so that nobody is timed making it
def config() -> Any:
    return models.config(max_position_embeddings=4096)  # eager: the counter sees its products


@cache
def by_torch(tokens: int) -> int:
    """What PyTorch's counter says of one row, forward and backward."""
    model = models.causal_lm(max_position_embeddings=4096)
    ids = torch.ones(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def causal(lengths: list[int]) -> int:
    """PyTorch's count of each sequence, less the pairs that the mask throws away."""
    width = config().num_hidden_layers * config().hidden_size  # of all heads
    return sum(by_torch(n) - 3 * 2 * 2 * width * (n * n - n) // 2 for n in lengths)


def trl(lengths: list[int]) -> int:
    from trl.trainer.utils import compute_flops_per_token

    return sum(n * compute_flops_per_token(config(), n) for n in lengths)


def verl(lengths: list[int]) -> int:
    from verl.utils.flops_counter import FlopsCounter

    return round(FlopsCounter(config()).estimate_flops(lengths, 1.0)[0] * 1e12)


def verl_formula(lengths: list[int]) -> int:
    """The formula that `FlopsCounter` uses; the class asks for a GPU's name first."""
    from verl.utils.flops_counter import ESTIMATE_FUNC

    return round(ESTIMATE_FUNC["qwen2"](config(), sum(lengths), lengths, 1.0) * 1e12)


def six_n(lengths: list[int]) -> int:
    return 6 * arl.ModelShape.from_config(config()).params * sum(lengths)


def ours(lengths: list[int]) -> int:
    return arl.training_flops(arl.ModelShape.from_config(config()), lengths, pairs="square")


def needed(lengths: list[int]) -> int:
    return arl.training_flops(arl.ModelShape.from_config(config()), lengths)


COUNTERS: dict[str, Callable[[list[int]], int]] = {
    "agentrl training_flops, pairs='square'": ours,
    "agentrl training_flops": needed,
    "trl compute_flops_per_token": trl,
    "verl FlopsCounter": verl,
    "verl FlopsCounter, its formula": verl_formula,
    "6 N per token": six_n,
}


def errors() -> list[Row]:
    rows = []
    for case, lengths in CASES.items():
        row_length = sum(lengths)
        run = by_torch(row_length)  # a dense kernel multiplies all pairs of the row
        exact = causal(lengths)
        for who, counter in COUNTERS.items():
            for asked, given in (("row", [row_length]), ("sequences", lengths)):
                if asked == "sequences" and len(lengths) == 1:
                    continue
                row = {"what": "count", "case": case, "asked": asked, "who": who}
                value = attempt(lambda c=counter, g=given: c(g))
                if isinstance(value, dict):
                    rows.append(row | value)
                    continue
                row |= {"count": value, "counted_by_torch": run, "needed": exact}
                rows.append(row | {"off_torch": value / run - 1, "off_needed": value / exact - 1})
    return rows


def measure(size: str, device: str) -> Row:
    growing = (
        "agentrl training_flops",
        "trl compute_flops_per_token",
        "verl FlopsCounter, its formula",
    )
    rows, points = errors(), {who: {} for who in growing}
    for count in GROWTH[size]:
        lengths = [64 + i % 1000 for i in range(count)]
        runs = {who: lambda f=COUNTERS[who], x=lengths: f(x) for who in points}
        for who, row in timed(runs, 3).items():
            points[who][count] = row
            row |= {"what": "time", "case": "sequences", "count": count, "who": who}
            rows.append(row | {"bytes": 8 * count})
    say("flops: counted")
    curves = [growth(who, "sequences", p, "n", float) for who, p in points.items()]
    return {"rows": rows, "growth": curves}


if __name__ == "__main__":
    common.main("flops")
