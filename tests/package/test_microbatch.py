"""Schedules of chapter 6: the cap is hard, every index travels once, ranks agree."""

import itertools
import math
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import agentrl as arl
import agentrl.microbatch

BUDGET = 131_072
BOTH = pytest.mark.parametrize("packed", [False, True])


def size(batch, lengths, packed):
    """Tokens that a microbatch takes of the budget, counted independently of the module."""
    inside = [lengths[i] for i in batch]
    return sum(inside) if packed else len(inside) * max(inside)


def check(batches, lengths, max_tokens, packed):
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    assert all(batches), "an empty microbatch"
    assert max(size(batch, lengths, packed) for batch in batches) <= max_tokens


def falls(values, rounding=0.0):
    return all(a >= b * (1 - rounding) for a, b in itertools.pairwise(values))


@st.composite
def problems(draw, most=40, longest=60):
    """Lengths and a budget that holds the longest: equal, nearly full and long-tailed ones."""
    max_tokens = draw(st.integers(1, longest))
    top = max(1, max_tokens // draw(st.integers(1, 3)))
    lengths = st.one_of(
        st.integers(1, max_tokens),
        st.integers(max(1, max_tokens - 2), max_tokens),
        st.just(min(max_tokens, max_tokens // 2 + 1)),
        st.integers(0, 6).map(lambda halvings: max(1, top >> halvings)),
    )
    return draw(st.lists(lengths, min_size=1, max_size=most)), max_tokens


def lognormal(count, seed, median=8192, least=256, most=65536):
    gen = torch.Generator().manual_seed(seed)
    lengths = median * torch.exp(0.8 * torch.randn(count, generator=gen))
    return lengths.clamp(least, most).long(), torch.randperm(count, generator=gen).tolist()


@st.composite
def random_tails(draw):
    """Long-tailed lengths under tight budgets, the kind of fault 7."""
    lengths, _ = lognormal(draw(st.integers(8, 80)), draw(st.integers(0, 10_000)), 20, 1, 400)
    return lengths.tolist(), int(max(lengths) * draw(st.floats(1, 3)))


# Strongly curved costs pull the balance away from the tokens, which is what endangers a cap.
COSTS = {
    "default": None,
    "tokens": float,
    "square": lambda length: length**2,
    "fifth power": lambda length: length**5,
    "root": lambda length: length**0.5,
}


def on_ranks(lengths, max_tokens, num_ranks, *cost, **keywords):
    """Schedule on ranks; None where there are too few sequences to give every rank as many."""
    try:
        return arl.rank_balanced_batches(lengths, max_tokens, num_ranks, *cost, **keywords)
    except ValueError as error:
        assert str(error).startswith(f"{len(lengths)} sequences cannot form")
        assert f"num_ranks = {num_ranks}" in str(error)
        return None


LENGTHS, ARRIVAL = lognormal(512, 0)  # the batch of chapter 6, drawn as the figures say


def test_three_schedules_to_the_printed_digit():
    sizes = LENGTHS.tolist()
    by_length = LENGTHS.argsort(descending=True, stable=True).tolist()
    budget = arl.token_budget_batches(LENGTHS, BUDGET)
    rows, eights = [], range(0, 512, 8)
    by_count = [[order[i : i + 8] for i in eights] for order in (ARRIVAL, by_length)]
    for batches in (*by_count, budget):
        positions = [arl.padded_tokens(batch, sizes) for batch in batches]
        padding = 1 - sum(sizes) / sum(positions)
        rows.append((len(batches), f"{padding:.1%}", f"{max(positions) // 1000}k"))
    assert rows == [(64, "59.3%", "524k"), (64, "3.6%", "524k"), (51, "3.0%", "131k")]
    assert (max(sizes), LENGTHS.median().item()) == (65_536, 8_414)
    (home,) = [batch for batch in budget if LENGTHS.argmax().item() in batch]
    assert len(home) == 2 and arl.padded_tokens(home, sizes) == 131_072
    # Packed, the number is that of the lower bound, so it is the optimum.
    assert f"{sum(sizes) / BUDGET:.2f}" == "45.47"
    assert len(arl.token_budget_batches(LENGTHS, BUDGET, packed=True)) == 46


@BOTH
@given(problem=problems())
def test_cap_partition_and_longest_first(problem, packed):
    lengths, max_tokens = problem
    batches = arl.token_budget_batches(lengths, max_tokens, packed=packed)
    check(batches, lengths, max_tokens, packed)
    assert not packed or batches == arl.packing_plan(lengths, max_tokens, "ffd")
    assert all(falls([lengths[i] for i in batch]) for batch in batches)
    assert falls([lengths[batch[0]] for batch in batches])


@settings(max_examples=60)
@given(problem=problems(most=6, longest=20))
def test_padded_needs_the_fewest_of_all_schedules(problem):
    lengths, max_tokens = problem

    def fill(order):
        batches = [[]]
        for i in order:
            if arl.padded_tokens([*batches[-1], i], lengths) > max_tokens:
                batches.append([])
            batches[-1].append(i)
        return len(batches)

    # each partition is the result of filling in some order, so this minimum is the optimum
    fewest = min(map(fill, itertools.permutations(range(len(lengths)))))
    assert len(arl.token_budget_batches(lengths, max_tokens)) == fewest


@BOTH
@given(problem=problems(), data=st.data())
def test_a_forced_number_never_breaks_the_cap(problem, packed, data):
    lengths, max_tokens = problem
    fewest = len(arl.token_budget_batches(lengths, max_tokens, packed=packed))
    number = data.draw(st.integers(1, len(lengths) + 2))
    if fewest <= number <= len(lengths):
        batches = arl.token_budget_batches(lengths, max_tokens, packed=packed, num_batches=number)
        assert len(batches) == number
        check(batches, lengths, max_tokens, packed)
        longest = [max(lengths[i] for i in batch) for batch in batches]
        assert longest == [lengths[batch[0]] for batch in batches] and falls(longest)
    else:
        with pytest.raises(ValueError, match=f"num_batches = {number} "):
            arl.token_budget_batches(lengths, max_tokens, packed=packed, num_batches=number)


@BOTH
def test_fault_7_verl_7553(packed):
    lengths = [7] * 8
    batches = arl.token_budget_batches(lengths, 8, packed=packed)
    assert [size(batch, lengths, packed) for batch in batches] == [7] * 8
    with pytest.raises(ValueError, match=r"num_batches = 7 .*8 sequences take 8 .* 8"):
        arl.token_budget_batches(lengths, 8, packed=packed, num_batches=7)
    for ranks in (1, 2, 4, 8):
        for rank in arl.rank_balanced_batches(lengths, 8, ranks, packed=packed):
            assert [size(batch, lengths, packed) for batch in rank] == [7] * (8 // ranks)
    with pytest.raises(ValueError, match=r"8 sequences .* num_ranks = 3.* take 8 of at most 8"):
        arl.rank_balanced_batches(lengths, 8, 3, packed=packed)


@pytest.mark.parametrize(
    ("packed", "even", "in_total", "in_lockstep"),
    [(True, 1.02, 1.0002, 1.002), (False, 1.3, 1.01, 1.05)],
)
def test_balance_on_the_long_tail(packed, even, in_total, in_lockstep):
    batches = arl.token_budget_batches(LENGTHS, BUDGET, packed=packed, num_batches=64)
    loads = [size(batch, LENGTHS.tolist(), packed) for batch in batches]
    assert max(loads) <= even * sum(loads) / 64
    ranks = arl.rank_balanced_batches(LENGTHS, BUDGET, 8, packed=packed)
    slowest, lockstep = arl.rank_imbalance(ranks, LENGTHS, packed=packed)
    assert slowest < in_total and lockstep < in_lockstep


@BOTH
def test_a_million_lengths(packed):
    # Not timed: a quadratic schedule of these would take hours, and the run would say so.
    lengths, _ = lognormal(1_000_000, 1)
    batches = arl.token_budget_batches(lengths, BUDGET, packed=packed)
    check(batches, lengths.tolist(), BUDGET, packed)
    assert not packed or len(batches) < 1.001 * lengths.sum() / BUDGET


def test_more_than_a_million_on_ranks():
    lengths = torch.full((1_200_000,), 100, dtype=torch.uint8)  # 8 bits hold no sum of three
    ranks = arl.rank_balanced_batches(lengths, BUDGET, 8)
    check(list(itertools.chain(*ranks)), lengths.tolist(), BUDGET, packed=False)
    assert arl.rank_imbalance(ranks, lengths)[0] < 1.02


CONTAINERS = {
    "tuple": tuple,
    "array": np.array,
    "narrow array": lambda lengths: np.array(lengths, dtype=np.int8),
    "narrow tensor": lambda lengths: torch.tensor(lengths, dtype=torch.uint8),
    "list of scalars": lambda lengths: list(torch.tensor(lengths)),
    "list of NumPy's": lambda lengths: list(np.array(lengths, dtype=np.int8)),
    "device": lambda lengths: torch.tensor(lengths, device="cuda"),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_any_container_of_any_integers(kind):
    if kind == "device" and not torch.cuda.is_available():
        pytest.skip("needs a second device")
    # In 8 bits 120 + 60 would be negative, and 2 * 120 too.
    lengths = [60, 36, 120, 120, 12]
    found = CONTAINERS[kind](lengths)
    before = repr(found)
    expected = arl.token_budget_batches(lengths, 240)
    assert arl.token_budget_batches(found, 240) == expected == [[2, 3], [0, 1, 4]]
    ranks = arl.rank_balanced_batches(found, 240, 2)
    assert ranks == arl.rank_balanced_batches(lengths, 240, 2)
    assert all(type(i) is int for rank in ranks for batch in rank for i in batch)
    arrays = [[CONTAINERS[kind](batch) for batch in rank] for rank in ranks]
    assert arl.rank_imbalance(arrays, found) == arl.rank_imbalance(ranks, lengths)
    assert arl.padded_tokens(CONTAINERS[kind]([2, 3, 0]), found) == 360
    assert repr(found) == before  # the input is left alone


@pytest.mark.parametrize(
    ("lengths", "error", "named"),
    [
        ([], ValueError, "lengths"),
        ([3, 0, 2], ValueError, r"lengths\[1\] = 0"),
        ([3, 2.5], TypeError, r"lengths\[1\]"),
        ([True, 2], TypeError, r"lengths\[0\]"),
        (["7"], TypeError, r"lengths\[0\]"),
        (torch.tensor([[1, 2]]), TypeError, r"lengths\[0\]"),
        (torch.tensor(4), TypeError, "lengths"),
        # trl #5075 is of this kind: a sequence longer than a row is never cut
        ([13], ValueError, r"lengths\[0\] = 13 .*max_tokens = 10"),
        ([3, 10, 11, 12], ValueError, r"lengths\[2\] = 11 .*max_tokens = 10"),
    ],
)
@BOTH
def test_a_bad_length_is_named(lengths, error, named, packed):
    with pytest.raises(error, match=named):
        arl.token_budget_batches(lengths, 10, packed=packed)
    with pytest.raises(error, match=named):
        arl.rank_balanced_batches(lengths, 10, 1, packed=packed)
    if "max_tokens" not in named:
        with pytest.raises(error, match=named):
            arl.rank_imbalance([[[0]]], lengths, packed=packed)


budget, imbalance = arl.token_budget_batches, arl.rank_imbalance
balanced = partial(arl.rank_balanced_batches, max_tokens=8)
ONE, TWO = {"num_ranks": 1}, {"num_ranks": 2}


@pytest.mark.parametrize(
    ("call", "lengths", "arguments", "error", "named"),
    [
        (budget, [1], {"max_tokens": 0}, ValueError, "max_tokens = 0"),
        (budget, [1], {"max_tokens": 8.0}, TypeError, "max_tokens"),
        (budget, [1], {"max_tokens": 8, "num_batches": 0}, ValueError, "num_batches = 0"),
        (budget, [1], {"max_tokens": 8, "num_batches": True}, TypeError, "num_batches"),
        (balanced, [1], {"num_ranks": 0}, ValueError, "num_ranks = 0"),
        (balanced, [1, 2], {"num_ranks": 3}, ValueError, "2 sequences.*num_ranks = 3"),
        (
            balanced,
            [4, 5, 6],
            {**ONE, "batches_per_rank": 2},
            ValueError,
            "2 .* take 3 of at most 8",
        ),
        (balanced, [2, 2, 2], {**TWO, "batches_per_rank": 2}, ValueError, "3 sequences .* form 2"),
        (balanced, [2, 5], {**ONE, "cost": lambda s: s - 5.0}, ValueError, r"cost\([25]\) = "),
        (balanced, [2], {**ONE, "cost": lambda s: math.nan}, ValueError, r"cost\(2\) = nan"),
        (balanced, [3, 4], {**ONE, "cost": lambda s: 1 / s}, ValueError, r"cost\(4\) .*cost\(3\)"),
        (imbalance, [3], {"ranks": []}, ValueError, "ranks is empty"),
        (imbalance, [3], {"ranks": [[], []]}, ValueError, "ranks is empty"),
        (imbalance, [3, 4], {"ranks": [[[0]], [[]]]}, ValueError, r"ranks\[1\]\[0\] is empty"),
        (imbalance, [3, 4], {"ranks": [[[0, 2]]]}, ValueError, r"ranks\[0\]\[0\]\[1\] = 2"),
        (imbalance, [3, 4], {"ranks": [[[0, -1]]]}, ValueError, r"ranks\[0\]\[0\]\[1\] = -1"),
        (imbalance, [3, 4], {"ranks": [[0, 1]]}, TypeError, r"ranks\[0\]\[0\]"),
        (arl.padded_tokens, [3], {"batch": []}, ValueError, "batch is empty"),
        (arl.padded_tokens, [3], {"batch": [0, 1]}, ValueError, r"batch\[1\] = 1"),
        (arl.padded_tokens, [3], {"batch": [-1]}, ValueError, r"batch\[0\] = -1"),
        (arl.padded_tokens, [2.5], {"batch": [0]}, TypeError, "longest"),
    ],
)
def test_a_bad_argument_is_named(call, lengths, arguments, error, named):
    with pytest.raises(error, match=named):
        call(lengths=lengths, **arguments)


def test_a_cost_is_asked_about_the_lengths_that_count():
    lengths, falling = [3, 4, 5], lambda s: 1 / s
    with pytest.raises(ValueError, match=r"cost\(4\) = 0.25 .*cost\(3\)"):
        arl.rank_imbalance([[[0, 1]]], lengths, falling)
    assert arl.rank_imbalance([[[0]]], lengths, falling) == (1, 1)
    assert arl.rank_imbalance([[[0, 1]]], lengths, falling, packed=True) == (1, 1)
    assert sum(map(len, arl.rank_balanced_batches(lengths, 8, 1, lambda s: 1.0)[0])) == 3


@pytest.mark.parametrize("name", COSTS)
@BOTH
@given(problem=problems() | random_tails(), num_ranks=st.integers(1, 8), extra=st.integers(0, 2))
def test_ranks_agree_under_the_cap_costliest_first(problem, packed, num_ranks, extra, name):
    lengths, max_tokens = problem
    fewest = len(arl.token_budget_batches(lengths, max_tokens, packed=packed))
    per_rank = -(-fewest // num_ranks) + extra
    keywords = {"packed": packed, "batches_per_rank": per_rank if extra else None}
    ranks = on_ranks(lengths, max_tokens, num_ranks, COSTS[name], **keywords)
    assert (ranks is None) == (per_rank * num_ranks > len(lengths))
    if ranks:
        assert [len(rank) for rank in ranks] == [per_rank] * num_ranks
        check(list(itertools.chain(*ranks)), lengths, max_tokens, packed)
    cost = COSTS[name] or arl.sequence_cost()
    for rank in ranks or []:
        rows = [[cost(lengths[i]) for i in batch] for batch in rank]
        assert falls([sum(row) if packed else len(row) * max(row) for row in rows], 1e-12)
        assert all(falls([lengths[i] for i in batch]) for batch in rank)


@given(problems(), st.integers(2, 4), st.sampled_from([0.001, 0.1, 10]), st.integers(0, 1000))
def test_trades_help_and_no_other_order_has_a_shorter_lockstep(problem, num_ranks, weight, seed):
    lengths, max_tokens = problem
    arguments = (lengths, max_tokens, num_ranks, lambda length: length + weight * length**2)
    with mock.patch.object(agentrl.microbatch, "_even_totals"):
        alone = on_ranks(*arguments, packed=True)
    if alone:
        ranks, gen = on_ranks(*arguments, packed=True), torch.Generator().manual_seed(seed)
        mixed = [[rank[k] for k in torch.randperm(len(rank), generator=gen)] for rank in ranks]
        before, after, other = (
            arl.rank_imbalance(schedule, lengths, arguments[3], packed=True)
            for schedule in (alone, ranks, mixed)
        )
        assert all(a <= b * (1 + 1e-12) for a, b in zip(after, before, strict=True))
        assert other[0] == pytest.approx(after[0])
        assert other[1] >= after[1] * (1 - 1e-12)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@BOTH
def test_better_than_ranks_that_schedule_alone(num_ranks, packed):
    alone = []
    for shard in (ARRIVAL[r::num_ranks] for r in range(num_ranks)):
        local = arl.token_budget_batches(LENGTHS[shard], BUDGET, packed=packed)
        alone.append([[shard[i] for i in batch] for batch in local])
    ranks = arl.rank_balanced_batches(LENGTHS, BUDGET, num_ranks, packed=packed)
    before = arl.rank_imbalance(alone, LENGTHS, packed=packed)
    after = arl.rank_imbalance(ranks, LENGTHS, packed=packed)
    assert len(ranks[0]) <= max(map(len, alone))
    assert all(1 <= a < b for a, b in zip(after, before, strict=True))


def test_the_quadratic_term_counts():
    # One sequence of 64 against 32 of 2: equal tokens, unequal attention.
    lengths, cost = [64, 64] + [2] * 64, lambda s: s + s * s
    ranks = arl.rank_balanced_batches(lengths, 128, 2, cost=cost, packed=True)
    assert [sum(lengths[i] == 64 for i in itertools.chain(*rank)) for rank in ranks] == [1, 1]
    assert arl.rank_imbalance(ranks, lengths, cost, packed=True)[0] < 1.001


def test_cost_is_the_flop_count_of_its_terms_and_the_default_qwen3_8b():
    layers, width, params, length = 3, 8, 100, 5
    pairs = sum(t + 1 for t in range(length))
    forward = 2 * params * length + layers * pairs * (2 * width + 2 * width)
    assert arl.sequence_cost(params, layers, width)(length) == 3 * forward
    layers, width, kv, ffn, vocabulary = 36, 4096, 1024, 12_288, 151_936
    block = 2 * width * width + 2 * width * kv + 3 * width * ffn
    exact = arl.sequence_cost(layers * block + width * vocabulary, layers, width)(1000)
    assert arl.sequence_cost()(1000) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize(
    ("lengths", "ranks", "padded", "packed"),
    [
        ([4, 2, 1, 1], [[[0], [2]], [[1], [3]]], (5 / 4, 5 / 4), None),  # 4, 1 and 2, 1; mean 4
        ([4, 2, 1, 1], [[[0], [2]], [[3], [1]]], (5 / 4, 6 / 4), None),
        ([4, 2, 1, 1], [[[0], [1], [2]], [[3]]], (7 / 4, 7 / 4), None),  # the second idles twice
        ([4, 1, 3, 2], [[[0, 1]], [[2, 3]]], (8 / 7, 8 / 7), (1, 1)),
        # over the mean of the same schedule, whether it pays 10 or 16
        ([4, 4, 1, 1], [[[0], [2]], [[1], [3]]], (1, 1), None),
        ([4, 4, 1, 1], [[[0, 2]], [[1, 3]]], (1, 1), None),
    ],
)
def test_imbalance_by_hand(lengths, ranks, padded, packed):
    assert arl.rank_imbalance(ranks, lengths, float) == padded
    assert arl.rank_imbalance(ranks, lengths, float, packed=True) == (packed or padded)


@pytest.mark.parametrize("name", arl.TRAJECTORY_QUANTILES)
def test_drawn_lengths_have_the_published_quantiles(name):
    quantiles = arl.TRAJECTORY_QUANTILES[name]
    shares, tokens = zip(*quantiles, strict=True)
    assert (shares[0], shares[-1]) == (0, 1)
    assert list(shares) == sorted(set(shares)) and list(tokens) == sorted(set(tokens))
    lengths = arl.draw_lengths(quantiles, 20_000, torch.Generator().manual_seed(0))
    assert lengths.dtype == torch.int64 and lengths.shape == (20_000,)
    assert tokens[0] <= lengths.min() and lengths.max() <= tokens[-1]
    for share, limit in quantiles[1:-1]:
        error = 4 * math.sqrt(share * (1 - share) / 20_000)
        assert (lengths < limit).double().mean().item() == pytest.approx(share, abs=error)


def test_drawn_lengths_are_log_linear_between_quantiles():
    quantiles = ((0.0, 10), (0.5, 100), (1.0, 10_000))
    lengths = arl.draw_lengths(quantiles, 20_000, torch.Generator().manual_seed(0)).double()
    for below in (lengths < math.sqrt(10 * 100), lengths >= 1000):
        assert below.double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert lengths.min() >= 10 and lengths.max() < 10_000
    for n in (5, 1000, 4097):  # exp(log(n)) may fall below n
        draws = arl.draw_lengths(((0, n), (0.5, n), (1, n)), 20, torch.Generator())
        assert draws.tolist() == [n] * 20


@pytest.mark.parametrize(
    ("quantiles", "named"),
    [
        ((), "quantiles is empty"),
        (((0, 10), (50, 100), (100, 10_000)), r"quantiles\[1\]"),  # percent
        (((0.1, 10), (1, 100)), r"quantiles\[0\]"),
        (((0, 0), (1, 100)), r"quantiles\[0\]"),
        (((0, 10), (0.5, 8), (1, 100)), r"quantiles\[1\]"),
        (((0, 10), (0.5, 20), (0.5, 30), (1, 100)), r"quantiles\[2\]"),
        (((0, 10), (1, math.inf)), r"quantiles\[1\]"),
        (((0, 10),), r"quantiles\[0\]"),
    ],
)
def test_quantiles_rise_from_0_to_1(quantiles, named):
    with pytest.raises(ValueError, match=named):
        arl.draw_lengths(quantiles, 10, torch.Generator())


# The check for a schedule


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 50), min_size=4, max_size=40),
    st.integers(50, 120),
    st.integers(1, 3),
    st.booleans(),
)
def test_right_schedules_pass_and_wrong_ones_are_named(
    lengths: list[int], cap: int, ranks: int, packed: bool
) -> None:
    plan: Any = arl.token_budget_batches(lengths, cap, packed=packed)
    if ranks > 1:
        assume(len(lengths) >= 2 * len(plan) + ranks)  # else a rank may have to stay empty
        plan = arl.rank_balanced_batches(lengths, cap, ranks, packed=packed)
    assert arl.schedule_check(plan, lengths, cap, ranks, packed=packed, slack=1.0)
    flat = plan if ranks == 1 else plan[0]
    lost = flat[0].pop()
    found = arl.schedule_check(plan, lengths, cap, ranks, packed=packed)
    assert not found and found.index == f"sequence {lost}" and "dropped" in found.likely
    flat[0] += [lost, lost]
    found = arl.schedule_check(plan, lengths, cap, ranks, packed=packed)
    assert not found and found.index == f"sequence {lost}" and "twice" in found.likely


def test_schedule_questions_come_one_by_one() -> None:
    check = arl.schedule_check
    assert check([[0, 1], [2]], [5, 3, 4], 10).worst == 10
    over = check([[0, 1], [2]], [5, 3, 4], 9)
    assert (over.worst, over.threshold, over.index) == (10, 9, "microbatch 0")
    assert check([[0, 1], [2]], [5, 3, 4], 9, packed=True)
    assert check([[[0]], [[1]]], [5, 3], 9, 2)
    assert check([torch.tensor([0, 1]), torch.tensor([2])], [5, 3, 4], 10)
    assert check([[torch.tensor([0])], [torch.tensor([1])]], [5, 3], 9, 2)
    assert "for ever" in check([[[0], [1]], [[2]]], [5, 3, 4], 9, 2).likely
    assert "filled up" in check([[[0, 1]], [[]]], [3, 3], 9, 2).likely
    assert "search for a fit" in check([[0], [1], [2]], [3, 3, 3], 9).likely
    assert check([[0], [1, 2]], [3, 3, 3], 9)  # one more than needed is always allowed
    assert not check([[0], [1, 2]], [3, 3, 3], 9, slack=0)
    assert "there is no sequence 7" in check([[0, 7], [1]], [3, 3], 9).likely


def test_a_schedule_of_two_ranks_is_not_wasteful() -> None:
    sizes = [8] * 16
    pairs, single = [[i, i + 1] for i in range(0, 16, 2)], [[i] for i in range(16)]
    assert arl.schedule_check([pairs[:4], pairs[4:]], sizes, 16, num_ranks=2)
    found = arl.schedule_check([single[:8], single[8:]], sizes, 16, num_ranks=2)
    assert not found and "room in open microbatches" in found.likely


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        (([[0]], [0], 5), ValueError, r"lengths\[0\] = 0"),
        (([[0]], [1.5], 5), TypeError, r"lengths\[0\]"),
        (([], [], 5), ValueError, "lengths"),
        (([[[0]]], [3], 5, 2), ValueError, "1 ranks, num_ranks = 2"),
        (([[0]], [3], 0), ValueError, "max_tokens = 0"),
        (([[0], [1]], [5, 3], 9, 2), TypeError, r"batches\[0\]\[0\] = 0"),
    ],
)
def test_a_schedule_that_is_none_is_refused(given, kind, says):
    with pytest.raises(kind, match=says):
        arl.schedule_check(*given)
