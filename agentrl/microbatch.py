# Generated from chapters/06-microbatch.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Microbatches under a token budget.

What bounds memory, a count of sequences or a count of tokens?
"""

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from agentrl import check
from agentrl.packing import packing_plan
from agentrl.report import Finding, as_check

__all__ = [
    "padded_tokens",
    "rank_balanced_batches",
    "rank_imbalance",
    "schedule_check",
    "sequence_cost",
    "token_budget_batches",
]


def padded_tokens(batch: Sequence[int], lengths: Sequence[int]) -> int:
    """Positions of a padded microbatch of indices into `lengths`: its rows times its longest."""
    rows = check.integers("batch", batch, 0, last_index=len(lengths) - 1)
    return len(rows) * check.integer("longest", max(lengths[i] for i in rows))


def _longest_first(sizes: Sequence[int]) -> list[int]:
    """Return the indices from the longest to the shortest, equal ones in their given order."""
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)


def _runs(order: list[int], rows: Callable[[int], int]) -> list[list[int]]:
    """Cut the longest-first order into runs: one that begins with sequence i has `rows(i)`."""
    runs, start = [], 0
    while start < len(order):
        stop = start + rows(order[start])
        runs.append(order[start:stop])
        start = stop
    return runs


def token_budget_batches(
    lengths: Sequence[int] | torch.Tensor,
    max_tokens: int,
    *,
    packed: bool = False,
    num_batches: int | None = None,
) -> list[list[int]]:
    """Split sequences [N] into microbatches of at most `max_tokens`, longest first.

    Args:
        max_tokens: the hard cap of a microbatch: its rows times its longest, or with `packed`
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
    fewest = _fewest(sizes, max_tokens, packed)
    if num_batches is None:
        return fewest
    num_batches = check.integer("num_batches", num_batches)
    if not len(fewest) <= num_batches <= len(sizes):
        raise ValueError(
            f"num_batches = {num_batches} is outside {len(fewest)}..{len(sizes)}: {len(sizes)} "
            f"sequences take {len(fewest)} microbatches of at most {max_tokens} tokens"
        )
    batches = _exactly(num_batches, fewest, _Problem(sizes, sizes, max_tokens, packed))
    return sorted(batches, key=lambda batch: sizes[batch[0]], reverse=True)


def _fewest(sizes: list[int], max_tokens: int, packed: bool) -> list[list[int]]:
    """Split sequences, longest first, into as few microbatches as the rule of each kind finds."""
    if packed:
        return packing_plan(sizes, max_tokens, "ffd")
    return _runs(_longest_first(sizes), lambda i: max_tokens // sizes[i])


class _Problem(NamedTuple):
    """Tokens and cost of each sequence, the cap of a microbatch, and whether it is packed."""

    sizes: list[int]
    costs: Sequence[float]
    max_tokens: int
    packed: bool

    def load(self, batch: list[int]) -> float:
        """Cost of a longest-first microbatch; each row costs as much as the longest if padded."""
        if self.packed:
            return sum(self.costs[i] for i in batch)
        return len(batch) * self.costs[batch[0]]


def _exactly(count: int, fewest: list[list[int]], problem: _Problem) -> list[list[int]]:
    """Make `count` microbatches within the cap, none empty, even in cost."""
    even = _lightest_fit(count, problem) if problem.packed else _even_runs(count, problem)
    return _halve_heaviest(count, even or fewest, problem)


def _even_runs(count: int, problem: _Problem) -> list[list[int]]:
    """Make at most `count` runs within the cap, with the lowest second cap, on their cost."""
    sizes, costs, max_tokens, _ = problem
    order = _longest_first(sizes)

    def rows(i: int) -> int:
        most = max_tokens // sizes[i]
        return most if most * costs[i] <= cap else max(1, int(cap / costs[i]))

    cap = math.inf
    best = _runs(order, rows)
    low, high = sum(costs) / count, max(map(problem.load, best))
    for _ in range(16):  # down to a cap within 2e-5 of the range
        cap = (low + high) / 2
        runs = _runs(order, rows)
        if len(runs) <= count:
            best, high = runs, cap
        else:
            low = cap
    return best


def _lightest_fit(count: int, problem: _Problem) -> list[list[int]] | None:
    """Give each sequence, longest first, to the cheapest microbatch with room; None if none has."""
    sizes, costs, max_tokens, _ = problem
    batches: list[list[int]] = [[] for _ in range(count)]
    room = [max_tokens] * count
    open_, parked = [(0.0, b) for b in range(count)], []  # (cost, b), (-room, cost, b)
    for i in _longest_first(sizes):
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


def _halve_heaviest(count: int, batches: list[list[int]], problem: _Problem) -> list[list[int]]:
    """Halve the heaviest microbatch of more than one sequence until there are `count`."""
    heap = [(-problem.load(batch), batch) for batch in batches if len(batch) > 1]
    heapq.heapify(heap)
    done = [batch for batch in batches if len(batch) == 1]
    while len(heap) + len(done) < count:
        _, batch = heapq.heappop(heap)
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            if len(half) > 1:
                heapq.heappush(heap, (-problem.load(half), half))
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
        cost: FLOPs of a sequence of the given length, positive; by default `sequence_cost()`.
        packed: whether a microbatch costs the sum of its sequences, or its rows times its longest,
            whose cost must then be the highest.

    Returns:
        The slowest rank's cost over the mean, and the sum over k of the costliest k-th microbatch
        of any rank over the same mean.
    """
    sizes = check.integers("lengths", lengths)
    last = len(sizes) - 1
    rows = [
        [
            [sizes[i] for i in check.integers(f"ranks[{r}][{b}]", batch, 0, last_index=last)]
            for b, batch in enumerate(rank)
        ]
        for r, rank in enumerate(ranks)
    ]
    check.not_empty("ranks", held := list(itertools.chain(*itertools.chain(*rows))))
    price = _prices(held, cost, rising=not packed)
    loads = [
        [sum(map(price.get, row)) if packed else len(row) * price[max(row)] for row in rank]
        for rank in rows
    ]
    mean = sum(map(sum, loads)) / len(loads)
    lockstep = sum(map(max, itertools.zip_longest(*loads, fillvalue=0)))
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
    gap: float,
    problem: _Problem,
) -> tuple[int, int, int, int] | None:
    """Find sequence i of dear[a] for j of cheap[b], nearest to half the gap: (a, i, b, j)."""
    sizes, costs, _, _ = problem
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


def _even_totals(ranks: list[list[list[int]]], problem: _Problem) -> None:
    """Let the costliest and the cheapest rank trade sequences, in place, until they agree."""
    sizes, costs = [*problem.sizes, 0], [*problem.costs, 0.0]  # index -1: nothing in return
    problem = problem._replace(sizes=sizes, costs=costs)
    loads = [[problem.load(batch) for batch in rank] for rank in ranks]
    rooms = [
        [problem.max_tokens - sum(sizes[i] for i in batch) for batch in rank] for rank in ranks
    ]
    for _ in range(4 * len(ranks)):
        totals = [sum(load) for load in loads]
        dear, cheap = totals.index(max(totals)), totals.index(min(totals))
        slack = [max(step) - step[cheap] for step in zip(*loads, strict=True)]
        gap, free = totals[dear] - totals[cheap], (rooms[dear], rooms[cheap])
        trade = _best_trade(ranks[dear], ranks[cheap], free, slack, gap, problem)
        if gap < 1e-4 * totals[cheap] or trade is None:
            return
        a, i, b, j = trade
        for rank, batch, leaves, comes in ((dear, a, i, j), (cheap, b, j, i)):
            kept = [k for k in (*ranks[rank][batch], comes) if k not in (leaves, -1)]
            ranks[rank][batch] = sorted(kept, key=sizes.__getitem__, reverse=True)
            loads[rank][batch] += costs[comes] - costs[leaves]
            rooms[rank][batch] += sizes[leaves] - sizes[comes]


def _prices(
    sizes: Iterable[int], cost: Callable[[int], float] | None, rising: bool = True
) -> dict[int, float]:
    """Return the cost of each distinct length, or raise an error that names a bad one."""
    cost = cost or sequence_cost()
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
    """Split sequences [N] over ranks, into equally many microbatches of at most `max_tokens`.

    Args:
        max_tokens, packed: as in `token_budget_batches`.
        cost: what a sequence of the given length costs, positive and rising; by default the
            FLOPs of `sequence_cost()`. Only ratios matter.
        batches_per_rank: by default the fewest microbatches, as `token_budget_batches` finds them,
            over the ranks and rounded up.

    Returns:
        For each rank its microbatches as lists of indices, costliest first: each index once, none
        empty, as many on every rank, and the k-th ones of all ranks alike in cost.

    Raises:
        ValueError: also if there are too few sequences to give every rank as many microbatches.
    """
    max_tokens = check.integer("max_tokens", max_tokens)
    num_ranks = check.integer("num_ranks", num_ranks)
    sizes = check.integers("lengths", lengths, max_tokens=max_tokens)
    fewest = _fewest(sizes, max_tokens, packed)
    least = -(-len(fewest) // num_ranks)
    per_rank = least if batches_per_rank is None else batches_per_rank
    per_rank = check.integer("batches_per_rank", per_rank)
    if per_rank < least or per_rank * num_ranks > len(sizes):
        raise ValueError(
            f"{len(sizes)} sequences cannot form {per_rank} microbatches on each of num_ranks = "
            f"{num_ranks}, none empty: they take {len(fewest)} of at most {max_tokens} tokens"
        )
    price = _prices(sizes, cost)
    problem = _Problem(sizes, [price[size] for size in sizes], max_tokens, packed)
    batches = _exactly(per_rank * num_ranks, fewest, problem)
    ranks = _deal(batches, list(map(problem.load, batches)), num_ranks)
    if packed:
        _even_totals(ranks, problem)
    return [sorted(rank, key=problem.load, reverse=True) for rank in ranks]


def _by_rank(batches: Any, num_ranks: int) -> list[list[list[int]]]:
    """Return the microbatches of each rank; a flat list is that of one rank."""
    listed = [rows.tolist() if isinstance(rows, torch.Tensor) else rows for rows in batches]
    flat = num_ranks == 1 and not any(isinstance(r, Iterable) for rows in listed for r in rows)
    ranks = [listed] if flat else listed
    if len(ranks) != num_ranks:
        raise ValueError(f"batches has {len(ranks)} ranks, num_ranks = {num_ranks}")
    for r, rank in enumerate(ranks):
        for b, rows in enumerate(rank if isinstance(rank, Iterable) else [rank]):
            if not isinstance(rows, Iterable):
                raise TypeError(f"batches[{r}][{b}] = {rows!r} is no list of indices")
    return [[[int(i) for i in rows] for rows in rank] for rank in ranks]


@as_check
def schedule_check(
    batches: Sequence[Any],
    lengths: Sequence[int] | torch.Tensor,
    max_tokens: int,
    num_ranks: int = 1,
    *,
    packed: bool = False,
    slack: float = 0.25,
    strict: bool = False,
) -> Iterator[Finding]:
    """Check that microbatches hold every sequence once, fit into memory, and are few and even.

    Args:
        batches: lists of indices into `lengths`; with several ranks, such lists for each rank.
        lengths: tokens of each sequence [N].
        max_tokens: what fits: count times longest, or with `packed` the sum of lengths.
        num_ranks: data-parallel ranks; all need the same number of microbatches, none empty.
        packed: whether the sequences of a microbatch are packed without padding.
        slack: by how much there may be more microbatches than a plan that was found, per rank;
            one more is always allowed, unless it is 0.
        strict: raise `AuditError` if the check fails.

    Raises:
        ValueError, TypeError: if the lengths, the cap or the ranks are not positive integers.
    """
    num_ranks = check.integer("num_ranks", num_ranks)
    max_tokens, sizes = check.integer("max_tokens", max_tokens), check.integers("lengths", lengths)
    ranks = _by_rank(batches, num_ranks)
    times = Counter(i for rank in ranks for rows in rank for i in rows)
    times.subtract(range(len(sizes)))
    i = next((i for i, extra in sorted(times.items()) if extra), 0)
    likely = f"sequence {i} is " + ("dropped" if times[i] < 0 else "trained twice")
    likely = likely if 0 <= i < len(sizes) else f"there is no sequence {i}"
    unit, why = "times too few" if times[i] < 0 else "times too many", "each is trained once"
    yield Finding(abs(times[i]), unit, f"sequence {i}", 0, why, likely)
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    likely = "a sequence that does not fit is cut, or the cap is not kept: it should be refused"
    index = f"sequence {longest}"
    yield Finding(sizes[longest], "tokens", index, max_tokens, "max_tokens", likely)
    counts = [len(rank) for rank in ranks]
    fewer, r = max(counts) - min(counts), counts.index(min(counts))
    likely = f"ranks have {counts} microbatches: the others wait for rank {r} for ever"
    why = "a collective waits for every rank"
    yield Finding(fewer, "microbatches fewer", f"rank {r}", 0, why, likely)
    loads, names = [], []
    for r, k, rows in ((r, k, rows) for r, rank in enumerate(ranks) for k, rows in enumerate(rank)):
        load = [sizes[i] for i in rows]
        loads.append(sum(load) if packed else len(load) * max(load, default=0))
        names.append(f"microbatch {k}" + f" of rank {r}" * (num_ranks > 1))
    index, trace = names[loads.index(max(loads))], tuple(map(float, loads))
    likely = "microbatches are cut by a count or an average, not by the tokens they hold"
    fullest = Finding(max(loads), "tokens", index, max_tokens, "max_tokens", likely, trace)
    yield fullest
    index, why = names[loads.index(min(loads))], "a mean over nothing is not a number"
    likely = "ranks are filled up with nothing"
    yield Finding(loads.count(0), "empty microbatches", index, 0, why, likely)
    need = -(-len(token_budget_batches(sizes, max_tokens, packed=packed)) // num_ranks)
    allowed = max(need + 1, math.floor(need * (1 + slack))) if slack else need
    likely = "room in open microbatches is not used: the search for a fit is wrong, or a count cuts"
    why = f"a plan with {need} exists"
    yield Finding(counts[0], "microbatches", "each rank", allowed, why, likely)
    yield fullest
