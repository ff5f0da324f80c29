# Generated from chapters/06-microbatch.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Microbatches under a token budget.

What bounds memory, a count of sequences or a count of tokens?
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from agentrl import check
from agentrl.packing import packing_plan

__all__ = [
    "TRAJECTORY_QUANTILES",
    "draw_lengths",
    "padded_tokens",
    "rank_balanced_batches",
    "rank_imbalance",
    "sequence_cost",
    "token_budget_batches",
]


def padded_tokens(batch: Sequence[int], lengths: Sequence[int]) -> int:
    """Positions of one padded microbatch: its count times its longest.

    Args:
        batch: indices into `lengths`.
        lengths: tokens of each sequence, as a list.
    """
    return len(batch) * max(lengths[i] for i in batch)


def _longest_first(sizes: Sequence[int]) -> list[int]:
    """Return the indices from the longest to the shortest, equal ones in their given order."""
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)


def _runs(
    order: list[int],
    sizes: Sequence[int],
    max_tokens: int,
    costs: Sequence[float] = (),
    cap: float = math.inf,
) -> list[list[int]]:
    """Cut the longest-first order into runs of at most `max_tokens` padded tokens.

    With `costs`, a run of several sequences costs at most `cap`: its count times its first's cost.
    """
    runs, start = [], 0
    while start < len(order):
        longest = order[start]
        count = max_tokens // sizes[longest]
        if costs and count * costs[longest] > cap:
            count = max(1, int(cap / costs[longest]))
        runs.append(order[start : start + count])
        start += count
    return runs


def token_budget_batches(
    lengths: Sequence[int] | torch.Tensor,
    max_tokens: int,
    *,
    packed: bool = False,
    num_batches: int | None = None,
) -> list[list[int]]:
    """Split sequences into microbatches of at most `max_tokens`, longest first.

    Args:
        lengths: tokens of each sequence [N]: a list, a NumPy array or a tensor on any device.
        max_tokens: the hard cap of a microbatch: its count times its longest, or with `packed`
            the sum of its lengths.
        packed: whether the sequences of a microbatch are packed without padding.
        num_batches: exactly this many microbatches, as even as the cap allows; by default the
            fewest that longest-first filling (padded, optimal) or first-fit decreasing (packed,
            at most 11/9 of the optimum plus 6/9, Dosa 2007) needs.

    Returns:
        Microbatches as lists of indices, each index once, none empty.

    Raises:
        ValueError: also if `num_batches` is too few for the cap or more than there are sequences.
    """
    max_tokens = check.integer("max_tokens", max_tokens)
    sizes = check.integers("lengths", lengths, max_tokens=max_tokens)
    if packed:
        batches = packing_plan(sizes, max_tokens, "ffd")
    else:
        batches = _runs(_longest_first(sizes), sizes, max_tokens)
    if num_batches is None:
        return batches
    num_batches = check.integer("num_batches", num_batches)
    batches = _exactly(num_batches, batches, sizes, max_tokens, sizes, packed)
    return sorted(batches, key=lambda batch: sizes[batch[0]], reverse=True)


def _load(batch: list[int], costs: Sequence[float], packed: bool) -> float:
    """Cost of a longest-first microbatch: every row costs as much as the longest if padded."""
    return sum(costs[i] for i in batch) if packed else len(batch) * costs[batch[0]]


def _exactly(
    num_batches: int,
    fewest: list[list[int]],
    sizes: Sequence[int],
    max_tokens: int,
    costs: Sequence[float],
    packed: bool,
) -> list[list[int]]:
    """Exactly `num_batches` microbatches within the cap, none empty, even in cost."""
    if num_batches < len(fewest):
        raise ValueError(
            f"num_batches = {num_batches} is too few: {len(sizes)} sequences take {len(fewest)} "
            f"microbatches of at most {max_tokens} tokens"
        )
    if num_batches > len(sizes):
        raise ValueError(f"num_batches = {num_batches} exceeds the {len(sizes)} sequences")
    order = _longest_first(sizes)
    if packed:
        even = _lightest_fit(num_batches, order, sizes, max_tokens, costs) or fewest
    else:
        even = _even_runs(num_batches, order, sizes, max_tokens, costs)
    return _halve_heaviest(num_batches, even, costs, packed)


def _even_runs(
    num_batches: int,
    order: list[int],
    sizes: Sequence[int],
    max_tokens: int,
    costs: Sequence[float],
) -> list[list[int]]:
    """Runs of at most `max_tokens`, at most `num_batches` of them, with the lowest cost cap."""
    best = _runs(order, sizes, max_tokens)
    low, high = sum(costs) / num_batches, max(_load(run, costs, packed=False) for run in best)
    for _ in range(16):  # down to a cap within 2e-5 of the range
        cap = (low + high) / 2
        runs = _runs(order, sizes, max_tokens, costs, cap)
        if len(runs) <= num_batches:
            best, high = runs, cap
        else:
            low = cap
    return best


def _lightest_fit(
    num_batches: int,
    order: list[int],
    sizes: Sequence[int],
    max_tokens: int,
    costs: Sequence[float],
) -> list[list[int]] | None:
    """Each sequence, longest first, to the cheapest microbatch with room; None if none has."""
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    room = [max_tokens] * num_batches
    open_, parked = [(0.0, b) for b in range(num_batches)], []  # (cost, b), (-room, cost, b)
    for i in order:
        while parked and -parked[0][0] >= sizes[i]:
            heapq.heappush(open_, heapq.heappop(parked)[1:])
        while open_ and room[open_[0][1]] < sizes[i]:
            cost, b = heapq.heappop(open_)
            heapq.heappush(parked, (-room[b], cost, b))
        if not open_:
            return None
        cost, b = open_[0]
        batches[b].append(i)
        room[b] -= sizes[i]
        heapq.heapreplace(open_, (cost + costs[i], b))
    return batches


def _halve_heaviest(
    num_batches: int, batches: list[list[int]], costs: Sequence[float], packed: bool
) -> list[list[int]]:
    """Halve the heaviest microbatch of more than one sequence until there are `num_batches`."""
    heap = [(-_load(batch, costs, packed), batch) for batch in batches if len(batch) > 1]
    heapq.heapify(heap)
    done = [batch for batch in batches if len(batch) == 1]
    while len(heap) + len(done) < num_batches:
        _, batch = heapq.heappop(heap)
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            if len(half) > 1:
                heapq.heappush(heap, (-_load(half, costs, packed), half))
            else:
                done.append(half)
    return done + [batch for _, batch in heap]


def sequence_cost(
    n_params: float = 7.57e9, n_layers: int = 36, d_attention: int = 4096
) -> Callable[[int], float]:
    """Return a function from the length of a sequence to the FLOPs of training on it.

    c(s) = 6 N s + 6 L d s (s + 1): three times the forward pass, whose matrix products take 2 FLOPs
    per parameter and token, and whose causal attention takes 4 d FLOPs per pair and layer.

    Args:
        n_params: parameters in matrix products: without the embedding table, with the output head.
        n_layers: transformer layers.
        d_attention: query heads times head dimension. The defaults are the shape of Qwen3-8B.
    """
    linear, quadratic = 6.0 * n_params, 6.0 * n_layers * d_attention
    return lambda length: linear * length + quadratic * length * (length + 1)


def rank_imbalance(
    ranks: Sequence[Sequence[Sequence[int]]],
    lengths: Sequence[int] | torch.Tensor,
    cost: Callable[[int], float] | None = None,
    *,
    packed: bool = False,
) -> tuple[float, float]:
    """Time of a step over that of the same microbatches perfectly balanced, at least 1.

    Padding counts on both sides. So this compares the ranks of one schedule, and two schedules only
    if they pad alike.

    Args:
        ranks: microbatches of each rank, lists of indices into `lengths`.
        lengths: tokens of each sequence [N].
        cost: FLOPs of a sequence of the given length, positive; by default `sequence_cost()`.
        packed: whether a microbatch costs the sum of its sequences, or its count times its longest,
            whose cost must then be the highest.

    Returns:
        The slowest rank's cost over the mean, and the sum over k of the costliest k-th microbatch
        of any rank over the same mean.

    Raises:
        ValueError: also if there is no microbatch, or one is empty.
    """
    sizes = check.integers("lengths", lengths)
    for r, rank in enumerate(ranks):
        for b, batch in enumerate(rank):
            check.integers(f"ranks[{r}][{b}]", batch, 0, last_index=len(sizes) - 1)
    check.not_empty("ranks", list(itertools.chain(*ranks)))
    held = (sizes[i] for rank in ranks for batch in rank for i in batch)
    price = _check_costs(held, cost or sequence_cost(), rising=not packed)
    loads = []
    for rank in ranks:
        rows = [[price[sizes[i]] for i in batch] for batch in rank]
        loads.append([sum(row) if packed else len(row) * max(row) for row in rows])
    mean = sum(map(sum, loads)) / len(loads)
    steps = range(max(map(len, loads)))
    lockstep = sum(max(load[k] for load in loads if k < len(load)) for k in steps)
    return max(map(sum, loads)) / mean, lockstep / mean


def _deal(batches: list[list[int]], loads: list[float], num_ranks: int) -> list[list[list[int]]]:
    """Give every rank one of each `num_ranks` neighbours in cost, evening out the totals."""
    by_load = sorted(range(len(batches)), key=loads.__getitem__, reverse=True)
    steps = [by_load[k : k + num_ranks] for k in range(0, len(by_load), num_ranks)]
    totals = [0.0] * num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for step in sorted(steps, key=lambda step: loads[step[-1]] - loads[step[0]]):
        lightest_first = sorted(range(num_ranks), key=totals.__getitem__)
        for rank, batch in zip(lightest_first, step, strict=True):
            ranks[rank].append(batch)
            totals[rank] += loads[batch]
    return [[batches[b] for b in rank] for rank in ranks]


def _best_trade(
    dear: list[list[int]],
    cheap: list[list[int]],
    rooms: tuple[list[int], list[int]],
    slack: list[float],
    sizes: Sequence[int],
    costs: Sequence[float],
    gap: float,
) -> tuple[int, int, int, int] | None:
    """Sequence i of dear[a] for j of cheap[b], nearest to half the gap: (a, i, b, j) or None."""
    offers = sorted((costs[j], b, j) for b, batch in enumerate(cheap) for j in [*batch, -1])
    best, trade = gap / 2, None
    for a, batch in enumerate(dear):
        for i in batch:
            middle = bisect.bisect_left(offers, (costs[i] - gap / 2,))
            for cost, b, j in offers[max(0, middle - 3) : middle + 3]:
                rise, tokens = costs[i] - cost, sizes[i] - sizes[j]
                fits = rise <= slack[b] and -rooms[0][a] <= tokens <= rooms[1][b]
                if fits and abs(rise - gap / 2) < best and (j >= 0 or len(batch) > 1):
                    best, trade = abs(rise - gap / 2), (a, i, b, j)
    return trade


def _even_totals(
    ranks: list[list[list[int]]], sizes: Sequence[int], costs: Sequence[float], max_tokens: int
) -> None:
    """Let the costliest and the cheapest rank trade sequences, in place, until they agree."""
    sizes, costs = [*sizes, 0], [*costs, 0.0]  # index -1: nothing in return
    loads = [[sum(costs[i] for i in batch) for batch in rank] for rank in ranks]
    rooms = [[max_tokens - sum(sizes[i] for i in batch) for batch in rank] for rank in ranks]
    for _ in range(4 * len(ranks)):
        totals = [sum(load) for load in loads]
        dear, cheap = totals.index(max(totals)), totals.index(min(totals))
        slack = [max(step) - step[cheap] for step in zip(*loads, strict=True)]
        pair, gap = (ranks[dear], ranks[cheap]), totals[dear] - totals[cheap]
        trade = _best_trade(*pair, (rooms[dear], rooms[cheap]), slack, sizes, costs, gap)
        if gap < 1e-4 * totals[cheap] or trade is None:
            return
        a, i, b, j = trade
        for rank, batch, leaves, comes in ((dear, a, i, j), (cheap, b, j, i)):
            kept = [k for k in (*ranks[rank][batch], comes) if k not in (leaves, -1)]
            ranks[rank][batch] = sorted(kept, key=sizes.__getitem__, reverse=True)
            loads[rank][batch] += costs[comes] - costs[leaves]
            rooms[rank][batch] += sizes[leaves] - sizes[comes]


def _check_costs(
    sizes: Iterable[int], cost: Callable[[int], float], rising: bool = True
) -> dict[int, float]:
    """Return the cost of each distinct length, or raise an error that names a bad one."""
    price = {size: check.number(f"cost({size})", cost(size), above=0) for size in sorted({*sizes})}
    for (short, less), (long, more) in itertools.pairwise(price.items()):
        if rising and more < less:
            raise ValueError(f"cost({long}) = {more} is below cost({short}) = {less}: it must rise")
    return price


def rank_balanced_batches(
    lengths: Sequence[int] | torch.Tensor,
    max_tokens: int,
    num_ranks: int,
    cost: Callable[[int], float] | None = None,
    *,
    packed: bool = False,
    batches_per_rank: int | None = None,
) -> list[list[list[int]]]:
    """Split sequences over ranks into equally many microbatches of at most `max_tokens`.

    Args:
        lengths: tokens of each sequence [N]: a list, a NumPy array or a tensor on any device.
        max_tokens: the hard cap of a microbatch, as in `token_budget_batches`.
        num_ranks: data-parallel ranks.
        cost: what a sequence of the given length costs, positive and rising; by default the
            FLOPs of `sequence_cost()`. Only ratios matter.
        packed: whether the sequences of a microbatch are packed without padding.
        batches_per_rank: microbatches on each rank; by default the fewest, as
            `token_budget_batches` finds them, over the ranks and rounded up.

    Returns:
        For each rank its microbatches as lists of indices, costliest first: each index once, none
        empty, as many on every rank, and the k-th ones of all ranks alike in cost.

    Raises:
        ValueError: also if there are too few sequences to give every rank as many microbatches.
    """
    max_tokens = check.integer("max_tokens", max_tokens)
    num_ranks = check.integer("num_ranks", num_ranks)
    sizes = check.integers("lengths", lengths, max_tokens=max_tokens)
    fewest = token_budget_batches(sizes, max_tokens, packed=packed)
    least = max(1, -(-len(fewest) // num_ranks))
    per_rank = least if batches_per_rank is None else batches_per_rank
    per_rank = check.integer("batches_per_rank", per_rank)
    if per_rank < least or per_rank * num_ranks > len(sizes):
        raise ValueError(
            f"{len(sizes)} sequences cannot form {per_rank} microbatches on each of num_ranks = "
            f"{num_ranks}, none empty: they take {len(fewest)} of at most {max_tokens} tokens"
        )
    price = _check_costs(sizes, cost or sequence_cost())
    costs = [price[size] for size in sizes]
    batches = _exactly(per_rank * num_ranks, fewest, sizes, max_tokens, costs, packed)
    ranks = _deal(batches, [_load(batch, costs, packed) for batch in batches], num_ranks)
    if packed:
        _even_totals(ranks, sizes, costs, max_tokens)
    return [
        sorted(rank, key=lambda batch: _load(batch, costs, packed), reverse=True) for rank in ranks
    ]


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
    """Draw lengths from published quantiles, log-linear between them.

    Args:
        quantiles: pairs (share of trajectories below, tokens) from share 0 to share 1, both rising.
        count: lengths to draw.
        generator: a CPU generator.

    Returns:
        Lengths [count], int64, tokens.

    Raises:
        ValueError: naming a pair that is no such quantile.
    """
    check.not_empty("quantiles", quantiles)
    for k, (share, size) in enumerate(quantiles):
        before = quantiles[k - 1] if k else (-1.0, 1.0)
        end = (k == 0, k + 1 == len(quantiles)) == (share == 0, share == 1)
        if not (end and before[0] < share <= 1 and before[1] <= size < math.inf):
            raise ValueError(f"quantiles[{k}] = ({share}, {size}) does not rise from share 0 to 1")
    shares, tokens = (torch.tensor(c, dtype=torch.float64) for c in zip(*quantiles, strict=True))
    draws = torch.rand(count, generator=generator, dtype=torch.float64)
    right = torch.searchsorted(shares, draws).clamp(1, len(shares) - 1)
    inside = (draws - shares[right - 1]) / (shares[right] - shares[right - 1])
    lengths = torch.lerp(tokens[right - 1].log(), tokens[right].log(), inside).exp().long()
    return lengths.maximum(tokens[right - 1].long())  # exp(log(n)) may fall below n
