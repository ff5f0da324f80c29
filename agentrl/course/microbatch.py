# Generated from chapters/06-microbatch.ipynb by tools/export.py. Do not edit: edit the notebook.
"""For the chapter alone: Microbatches under a token budget."""

import math
from collections.abc import Sequence

import torch

from agentrl import check

__all__ = ["TRAJECTORY_QUANTILES", "draw_lengths"]

_BELOW = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
_RESOLVED = (2560, 5813, 8357, 11559.5, 15999, 22040.5, 31632, 39512.5, 81245)
_UNRESOLVED = (1615, 1833, 1907, 2268, 12305, 26434, 41182.2, 51780.6, 167834)
_SESSIONS = {1072: 8192, 5269: 16384, 7500: 23840, 7658: 24576, 9242: 32768, 13990: 65536}
TRAJECTORY_QUANTILES: dict[str, tuple[tuple[float, float], ...]] = {
    # Pan et al. 2024, arXiv 2412.21139v1, table 8, number of tokens; 491 and 5,557 trajectories
    "SWE-Gym, resolved": tuple(zip(_BELOW, _RESOLVED, strict=True)),
    "SWE-Gym, unresolved": tuple(zip(_BELOW, _UNRESOLVED, strict=True)),
    # Card of agentic-coding-trajectories, deepest prompt of 15,000 sessions: cumulative histogram
    # and p50, p95, p99. The two ends are not published: 2,048 and 131,072 are assumed.
    "mixed sessions": (
        (0.0, 2048),
        *((sessions / 15000, tokens) for sessions, tokens in _SESSIONS.items()),
        (0.95, 69274),
        (0.99, 89876),
        (1.0, 131072),
    ),
}


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
