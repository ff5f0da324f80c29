# Generated from chapters/05-packing.ipynb by tools/export.py. Do not edit: edit the notebook.
"""For the chapter alone: Padding and packing."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from agentrl import check

__all__ = ["prefix_tree_tokens"]


def prefix_tree_tokens(sequences: Sequence[Tensor | Sequence[int]]) -> int:
    """Count the tokens that are left when every prefix shared by sequences is computed once.

    These are the nodes of the prefix tree. After sorting, a sequence shares its longest prefix with
    its predecessor.

    Raises:
        ValueError, TypeError: if there are no sequences, or one is not of token ids.
    """
    check.not_empty("sequences", sequences)
    ordered = sorted(check.integers(f"sequences[{i}]", s, 0) for i, s in enumerate(sequences))
    shared = 0
    for a, b in pairwise(ordered):
        equal = [x == y for x, y in zip(a, b, strict=False)]
        shared += equal.index(False) if False in equal else len(equal)
    return sum(map(len, ordered)) - shared
