# Generated from chapters/06-microbatch.ipynb by tools/export.py. Do not edit: edit the notebook.
"""For the chapter alone: Microbatches under a token budget."""

import math
from collections.abc import Sequence

import torch

from agentrl import check

__all__ = ["TRAJECTORY_QUANTILES", "draw_lengths"]

TRAJECTORY_QUANTILES: dict[str, tuple[tuple[float, float], ...]] = {
    # Pan et al. 2024, arXiv 2412.21139v1, table 8, number of tokens; 491 and 5,557 trajectories
    "SWE-Gym, resolved": (
        (0.0, 2560), (0.05, 5813), (0.1, 8357), (0.25, 11559.5), (0.5, 15999),
        (0.75, 22040.5), (0.9, 31632), (0.95, 39512.5), (1.0, 81245),
    ),
    "SWE-Gym, unresolved": (
        (0.0, 1615), (0.05, 1833), (0.1, 1907), (0.25, 2268), (0.5, 12305),
        (0.75, 26434), (0.9, 41182.2), (0.95, 51780.6), (1.0, 167834),
    ),
    # Card of agentic-coding-trajectories, deepest prompt of 15,000 sessions: cumulative histogram
    # and p50, p95, p99. The two ends are not published: 2,048 and 131,072 are assumed.
    "mixed sessions": (
        (0.0, 2048), (1072 / 15000, 8192), (5269 / 15000, 16384), (0.5, 23840),
        (7658 / 15000, 24576), (9242 / 15000, 32768), (13990 / 15000, 65536), (0.95, 69274),
        (0.99, 89876), (1.0, 131072),
    ),
}  # fmt: skip


def draw_lengths(
    quantiles: Sequence[tuple[float, float]], count: int, generator: torch.Generator
) -> torch.Tensor:
    """Draw lengths [count], int64 tokens, from published quantiles, log-linear between them.

    Args:
        quantiles: pairs (share of trajectories below, tokens) from share 0 to share 1, both rising.
        generator: a CPU generator.

    Raises:
        ValueError: naming a pair that is no such quantile.
    """
    count = check.integer("count", count)
    check.not_empty("quantiles", quantiles)
    for k, (share, size) in enumerate(quantiles):
        before = quantiles[k - 1] if k else (-1.0, 1.0)
        end = (k == 0, k + 1 == len(quantiles)) == (share == 0, share == 1)
        if not (end and before[0] < share <= 1 and before[1] <= size < math.inf):
            raise ValueError(f"quantiles[{k}] = ({share}, {size}) does not rise from share 0 to 1")
    shares, tokens = torch.tensor([*zip(*quantiles, strict=True)], dtype=torch.float64)
    draws = torch.rand(count, generator=generator, dtype=torch.float64)
    right = torch.searchsorted(shares, draws).clamp(1, len(shares) - 1)
    inside = (draws - shares[right - 1]) / (shares[right] - shares[right - 1])
    lengths = torch.lerp(tokens[right - 1].log(), tokens[right].log(), inside).exp().long()
    return lengths.maximum(tokens[right - 1].long())  # exp(log(n)) may fall below n
