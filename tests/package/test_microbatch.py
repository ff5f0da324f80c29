"""Schedules of chapter 6: the cap is hard, every index travels once, ranks agree."""

import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agentrl as arl
import agentrl.microbatch

BUDGET = 131_072


def size(batch, lengths, packed):
    """Tokens that a microbatch takes of the budget, counted independently of the module."""
    return sum(lengths[i] for i in batch) if packed else arl.padded_tokens(batch, lengths)


def first_fit_decreasing(lengths, max_tokens):
    """The textbook algorithm, quadratic."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        for k, room in enumerate(rooms):
            if room >= length:
                rooms[k] -= length
                break
        else:
            rooms.append(max_tokens - length)
    return len(rooms)


def check(batches, lengths, max_tokens, packed):
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    assert all(batches), "an empty microbatch"
    assert max(size(batch, lengths, packed) for batch in batches) <= max_tokens


@st.composite
def problems(draw, most=40, longest=60):
    """Lengths and a budget that holds the longest: equal, nearly full and long-tailed ones."""
    max_tokens = draw(st.integers(1, longest))
    top = draw(st.sampled_from([max_tokens, max(1, max_tokens // 2), max(1, max_tokens // 3)]))
    lengths = st.one_of(
        st.integers(1, max_tokens),
        st.integers(max(1, max_tokens - 2), max_tokens),
        st.just(min(max_tokens, max_tokens // 2 + 1)),
        st.integers(0, 6).map(lambda halvings: max(1, top >> halvings)),
    )
    return draw(st.lists(lengths, min_size=1, max_size=most)), max_tokens


# Strongly curved costs pull the balance away from the tokens, which is what endangers a cap.
COSTS = {
    "default": None,
    "tokens": float,
    "square": lambda length: length**2,
    "fifth power": lambda length: length**5,
    "root": lambda length: length**0.5,
}


def random_tails(count=150):
    """Long-tailed lengths under tight budgets, the kind of fault 7."""
    for seed in range(count):
        gen = torch.Generator().manual_seed(seed)
        n = int(torch.randint(8, 80, (), generator=gen))
        lengths = (20 * torch.exp(torch.randn(n, generator=gen))).clamp(1, 400).long().tolist()
        factor = float(torch.rand((), generator=gen)) * 2 + 1
        yield lengths, int(max(lengths) * factor)


@pytest.fixture(scope="module")
def long_tail():
    """The batch of chapter 6, drawn as the reference figures say."""
    gen = torch.Generator().manual_seed(0)
    lengths = (8192 * torch.exp(0.8 * torch.randn(512, generator=gen))).clamp(256, 65536).long()
    return lengths, torch.randperm(512, generator=gen).tolist()


# The reference figures


def test_three_schedules_to_the_printed_digit(long_tail):
    lengths, arrival = long_tail
    sizes = lengths.tolist()
    by_length = lengths.argsort(descending=True, stable=True).tolist()
    schedules = {
        "random": [arrival[i : i + 8] for i in range(0, 512, 8)],
        "sorted": [by_length[i : i + 8] for i in range(0, 512, 8)],
        "budget": arl.token_budget_batches(lengths, BUDGET),
    }
    rows = {}
    for name, batches in schedules.items():
        positions = [arl.padded_tokens(batch, sizes) for batch in batches]
        padding = 1 - sum(sizes) / sum(positions)
        rows[name] = (len(batches), f"{padding:.1%}", f"{max(positions) // 1000}k")
    assert rows == {
        "random": (64, "59.3%", "524k"),
        "sorted": (64, "3.6%", "524k"),
        "budget": (51, "3.0%", "131k"),
    }
    assert (max(sizes), lengths.median().item()) == (65_536, 8_414)
    (home,) = [batch for batch in schedules["budget"] if lengths.argmax().item() in batch]
    assert len(home) == 2 and arl.padded_tokens(home, sizes) == 131_072


def test_the_packed_example_is_optimal(long_tail):
    lengths, _ = long_tail
    batches = arl.token_budget_batches(lengths, BUDGET, packed=True)
    assert f"{lengths.sum().item() / BUDGET:.2f}" == "45.47"
    assert len(batches) == 46
    check(batches, lengths.tolist(), BUDGET, packed=True)


# token_budget_batches


@pytest.mark.parametrize("packed", [False, True])
@given(problem=problems())
def test_cap_and_partition(problem, packed):
    lengths, max_tokens = problem
    batches = arl.token_budget_batches(lengths, max_tokens, packed=packed)
    check(batches, lengths, max_tokens, packed)


@pytest.mark.parametrize("packed", [False, True])
@given(problem=problems())
def test_longest_first(problem, packed):
    lengths, max_tokens = problem
    batches = arl.token_budget_batches(lengths, max_tokens, packed=packed)
    for batch in batches:
        inside = [lengths[i] for i in batch]
        assert inside == sorted(inside, reverse=True)
    firsts = [lengths[batch[0]] for batch in batches]
    assert firsts == sorted(firsts, reverse=True)


@given(problem=problems(most=60))
def test_packed_needs_as_few_as_first_fit_decreasing(problem):
    lengths, max_tokens = problem
    batches = arl.token_budget_batches(lengths, max_tokens, packed=True)
    assert len(batches) == first_fit_decreasing(lengths, max_tokens)


@settings(max_examples=60)
@given(problem=problems(most=6, longest=20))
def test_padded_needs_the_fewest_of_all_schedules(problem):
    lengths, max_tokens = problem

    def fill(order):
        count, start = 1, 0
        for stop in range(1, len(order) + 1):
            if arl.padded_tokens(order[start:stop], lengths) > max_tokens:
                count, start = count + 1, stop - 1
        return count

    # each partition is the result of filling in some order, so this minimum is the optimum
    fewest = min(map(fill, itertools.permutations(range(len(lengths)))))
    assert len(arl.token_budget_batches(lengths, max_tokens)) == fewest


@pytest.mark.parametrize("packed", [False, True])
@given(problem=problems(), data=st.data())
def test_a_forced_number_never_breaks_the_cap(problem, packed, data):
    lengths, max_tokens = problem
    fewest = len(arl.token_budget_batches(lengths, max_tokens, packed=packed))
    number = data.draw(st.integers(1, len(lengths) + 2))
    if fewest <= number <= len(lengths):
        batches = arl.token_budget_batches(lengths, max_tokens, packed=packed, num_batches=number)
        assert len(batches) == number
        check(batches, lengths, max_tokens, packed)
        longest = [lengths[batch[0]] for batch in batches]
        assert longest == sorted(longest, reverse=True)
        assert longest == [max(lengths[i] for i in batch) for batch in batches]
    else:
        with pytest.raises(ValueError, match=f"num_batches = {number} "):
            arl.token_budget_batches(lengths, max_tokens, packed=packed, num_batches=number)


@pytest.mark.parametrize("packed", [False, True])
def test_fault_7_verl_7553(packed):
    lengths = [7] * 8
    batches = arl.token_budget_batches(lengths, 8, packed=packed)
    assert len(batches) == 8
    assert max(size(batch, lengths, packed) for batch in batches) == 7
    with pytest.raises(ValueError, match=r"num_batches = 7 is too few: 8 sequences take 8 .* 8"):
        arl.token_budget_batches(lengths, 8, packed=packed, num_batches=7)
    for ranks in (1, 2, 4, 8):
        for rank in arl.rank_balanced_batches(lengths, 8, ranks, packed=packed):
            assert [size(batch, lengths, packed) for batch in rank] == [7] * (8 // ranks)
    with pytest.raises(ValueError, match=r"8 sequences .* num_ranks = 3.* take 8 of at most 8"):
        arl.rank_balanced_batches(lengths, 8, 3, packed=packed)


def test_a_forced_number_is_even(long_tail):
    lengths, _ = long_tail
    sizes = lengths.tolist()
    for packed, ratio in ((True, 1.02), (False, 1.3)):
        batches = arl.token_budget_batches(lengths, BUDGET, packed=packed, num_batches=64)
        loads = [size(batch, sizes, packed) for batch in batches]
        assert max(loads) <= ratio * sum(loads) / 64


def test_a_million_lengths():
    # Not timed: a quadratic schedule of these would take hours, and the run would say so.
    gen = torch.Generator().manual_seed(1)
    lengths = (8192 * torch.exp(0.8 * torch.randn(1_000_000, generator=gen))).clamp(256, 65536)
    sizes = lengths.long().tolist()
    for packed in (False, True):
        batches = arl.token_budget_batches(sizes, BUDGET, packed=packed)
        check(batches, sizes, BUDGET, packed)
    assert len(batches) < 1.001 * sum(sizes) / BUDGET


# Inputs


@pytest.mark.parametrize("kind", ["tuple", "numpy", "numpy int32", "tensor", "int32", "scalars"])
def test_any_container(kind):
    lengths = [5, 3, 9, 9, 1]
    numpy = pytest.importorskip("numpy") if "numpy" in kind else None
    given_as = {
        "tuple": lambda: tuple(lengths),
        "numpy": lambda: numpy.array(lengths),
        "numpy int32": lambda: numpy.array(lengths, dtype="int32"),
        "tensor": lambda: torch.tensor(lengths),
        "int32": lambda: torch.tensor(lengths, dtype=torch.int32),
        "scalars": lambda: list(torch.tensor(lengths)),
    }[kind]()
    expected = arl.token_budget_batches(lengths, 18)
    assert arl.token_budget_batches(given_as, 18) == expected == [[2, 3], [0, 1, 4]]
    expected = arl.rank_balanced_batches(lengths, 18, 2)
    assert arl.rank_balanced_batches(given_as, 18, 2) == expected
    assert all(type(i) is int for rank in expected for batch in rank for i in batch)


def test_the_input_is_left_alone():
    lengths = [torch.tensor(3), 5, 4]
    arl.token_budget_batches(lengths, 9)
    assert torch.is_tensor(lengths[0]) and lengths[1:] == [5, 4]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_a_tensor_on_another_device():
    lengths = torch.tensor([5, 3, 9])
    expected = arl.token_budget_batches(lengths, 18)
    assert arl.token_budget_batches(lengths.cuda(), 18) == expected


BAD_LENGTHS = [
    ([], ValueError, "lengths is empty"),
    ([3, 0, 2], ValueError, r"lengths\[1\] = 0"),
    ([3, 2, -4], ValueError, r"lengths\[2\] = -4"),
    ([3, 2.5], TypeError, r"lengths\[1\]"),
    (torch.tensor([3.0, 2.0]), TypeError, r"lengths\[0\]"),
    ([3, math.nan], TypeError, r"lengths\[1\]"),
    ([True, 2], TypeError, r"lengths\[0\]"),
    (["7"], TypeError, r"lengths\[0\]"),
    ([3, torch.tensor(2.5)], TypeError, r"lengths\[1\]"),
    ([None], TypeError, r"lengths\[0\]"),
    (torch.tensor([[1, 2]]), TypeError, r"lengths\[0\]"),
    (torch.tensor(4), TypeError, "lengths must"),
    ([13], ValueError, r"lengths\[0\] = 13 exceeds max_tokens = 10"),
    ([3, 10, 11, 12], ValueError, r"lengths\[2\] = 11 exceeds max_tokens = 10"),
]


@pytest.mark.parametrize(("lengths", "error", "message"), BAD_LENGTHS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_bad_length_is_named(lengths, error, message, packed):
    with pytest.raises(error, match=message):
        arl.token_budget_batches(lengths, 10, packed=packed)
    with pytest.raises(error, match=message):
        arl.rank_balanced_batches(lengths, 10, 1, packed=packed)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: arl.token_budget_batches([1], 0), ValueError, "max_tokens = 0"),
        (lambda: arl.token_budget_batches([1], 8.0), TypeError, "max_tokens"),
        (lambda: arl.token_budget_batches([1], 8, num_batches=0), ValueError, "num_batches = 0"),
        (lambda: arl.rank_balanced_batches([1], 8, 0), ValueError, "num_ranks = 0"),
        (lambda: arl.rank_balanced_batches([1], 8, -2), ValueError, "num_ranks = -2"),
        (lambda: arl.rank_balanced_batches([1, 2], 8, 3), ValueError, "2 sequences.*num_ranks = 3"),
        (
            lambda: arl.rank_balanced_batches([4, 5, 6], 8, 1, batches_per_rank=2),
            ValueError,
            "3 sequences cannot form 2 microbatches .* take 3 of at most 8",
        ),
        (
            lambda: arl.rank_balanced_batches([2, 2, 2], 8, 2, batches_per_rank=2),
            ValueError,
            "3 sequences cannot form 2 microbatches",
        ),
        (
            lambda: arl.rank_balanced_batches([2, 5], 8, 1, cost=lambda s: s - 5.0),
            ValueError,
            r"cost\([25]\) = (-3|0)\.0",
        ),
        (
            lambda: arl.rank_balanced_batches([2], 8, 1, cost=lambda s: math.nan),
            ValueError,
            r"cost\(2\) = nan",
        ),
    ],
)
def test_a_bad_argument_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# rank_balanced_batches


@pytest.mark.parametrize("packed", [False, True])
@given(
    problem=problems(),
    num_ranks=st.integers(1, 6),
    extra=st.integers(0, 2),
    cost=st.sampled_from(list(COSTS)),
)
def test_ranks_agree_under_the_cap(problem, packed, num_ranks, extra, cost):
    lengths, max_tokens = problem
    fewest = len(arl.token_budget_batches(lengths, max_tokens, packed=packed))
    least = -(-fewest // num_ranks)
    per_rank = least + extra
    keywords = {"packed": packed, "batches_per_rank": per_rank if extra else None}
    keywords["cost"] = COSTS[cost]
    if per_rank * num_ranks > len(lengths):
        with pytest.raises(ValueError, match=f"{len(lengths)} sequences .*num_ranks = {num_ranks}"):
            arl.rank_balanced_batches(lengths, max_tokens, num_ranks, **keywords)
        return
    ranks = arl.rank_balanced_batches(lengths, max_tokens, num_ranks, **keywords)
    assert [len(rank) for rank in ranks] == [per_rank] * num_ranks
    check(list(itertools.chain(*ranks)), lengths, max_tokens, packed)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("packed", [False, True])
def test_random_tails_stay_under_the_cap(packed, cost):
    scheduled = 0
    for lengths, max_tokens in random_tails():
        for num_ranks in (2, 3, 8):
            try:
                ranks = arl.rank_balanced_batches(
                    lengths, max_tokens, num_ranks, COSTS[cost], packed=packed
                )
            except ValueError as error:
                assert "cannot form" in str(error)
                continue
            scheduled += 1
            assert len({len(rank) for rank in ranks}) == 1
            check(list(itertools.chain(*ranks)), lengths, max_tokens, packed)
    assert scheduled > 300


@pytest.mark.parametrize("packed", [False, True])
@given(problem=problems(), num_ranks=st.integers(1, 5))
def test_costliest_first_on_every_rank(problem, packed, num_ranks):
    lengths, max_tokens = problem
    try:
        ranks = arl.rank_balanced_batches(lengths, max_tokens, num_ranks, packed=packed)
    except ValueError:
        return
    cost = arl.sequence_cost()
    for rank in ranks:
        rows = [[cost(lengths[i]) for i in batch] for batch in rank]
        loads = [sum(row) if packed else len(row) * max(row) for row in rows]
        assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(loads))
        for batch in rank:
            inside = [lengths[i] for i in batch]
            assert inside == sorted(inside, reverse=True)


@settings(max_examples=50)
@given(problem=problems(most=12), seed=st.integers(0, 1000))
def test_no_other_order_has_a_shorter_lockstep(problem, seed):
    lengths, max_tokens = problem
    try:
        ranks = arl.rank_balanced_batches(lengths, max_tokens, 2, packed=True)
    except ValueError:
        return
    best = arl.rank_imbalance(ranks, lengths, packed=True)
    gen = torch.Generator().manual_seed(seed)
    shuffled = [[rank[k] for k in torch.randperm(len(rank), generator=gen)] for rank in ranks]
    other = arl.rank_imbalance(shuffled, lengths, packed=True)
    assert other[0] == pytest.approx(best[0])
    assert other[1] >= best[1] * (1 - 1e-12)


@given(problem=problems(), num_ranks=st.integers(2, 4), weight=st.sampled_from([0.001, 0.1, 10]))
def test_trades_help_and_never_lengthen_the_lockstep(problem, num_ranks, weight):
    lengths, max_tokens = problem

    def cost(length):
        return length + weight * length**2

    def schedule():
        return arl.rank_balanced_batches(lengths, max_tokens, num_ranks, cost, packed=True)

    try:
        with mock.patch.object(agentrl.microbatch, "_even_totals"):
            before = arl.rank_imbalance(schedule(), lengths, cost, packed=True)
    except ValueError:
        return
    after = arl.rank_imbalance(schedule(), lengths, cost, packed=True)
    assert all(a <= b * (1 + 1e-12) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_better_than_ranks_that_schedule_alone(long_tail, num_ranks, packed):
    lengths, arrival = long_tail
    sizes = lengths.tolist()
    alone = []
    for r in range(num_ranks):
        shard = arrival[r::num_ranks]
        local = arl.token_budget_batches([sizes[i] for i in shard], BUDGET, packed=packed)
        alone.append([[shard[i] for i in batch] for batch in local])
    ranks = arl.rank_balanced_batches(lengths, BUDGET, num_ranks, packed=packed)
    before = arl.rank_imbalance(alone, sizes, packed=packed)
    after = arl.rank_imbalance(ranks, sizes, packed=packed)
    assert len(ranks[0]) <= max(map(len, alone))
    assert all(1 <= a < b for a, b in zip(after, before, strict=True))


def test_balance_on_the_long_tail(long_tail):
    lengths, _ = long_tail
    for packed, in_total, in_lockstep in ((True, 1.0002, 1.002), (False, 1.01, 1.05)):
        ranks = arl.rank_balanced_batches(lengths, BUDGET, 8, packed=packed)
        slowest, lockstep = arl.rank_imbalance(ranks, lengths, packed=packed)
        assert slowest < in_total and lockstep < in_lockstep


def test_the_quadratic_term_counts():
    # One sequence of 64 against 32 of 2: equal tokens, unequal attention.
    lengths = [64, 64] + [2] * 64
    tokens = arl.rank_balanced_batches(lengths, 128, 2, cost=float, packed=True)
    quadratic = arl.rank_balanced_batches(lengths, 128, 2, cost=lambda s: s + s * s, packed=True)
    held = [sum(lengths[i] == 64 for batch in rank for i in batch) for rank in quadratic]
    assert held == [1, 1]
    for ranks in (tokens, quadratic):
        assert sum(len(batch) for rank in ranks for batch in rank) == 66
    assert arl.rank_imbalance(quadratic, lengths, lambda s: s + s * s, packed=True)[0] < 1.001


# Cost and imbalance


def test_cost_equals_the_flop_count_of_its_terms():
    layers, width, params, length = 3, 8, 100, 5
    pairs = sum(t + 1 for t in range(length))
    forward = 2 * params * length + layers * pairs * (2 * width + 2 * width)
    assert arl.sequence_cost(params, layers, width)(length) == 3 * forward


def test_default_cost_is_the_shape_of_qwen3_8b():
    layers, width, kv, ffn, vocabulary = 36, 4096, 1024, 12_288, 151_936
    block = 2 * width * width + 2 * width * kv + 3 * width * ffn
    params = layers * block + width * vocabulary
    assert arl.sequence_cost()(1000) == pytest.approx(
        arl.sequence_cost(params, layers, width)(1000), rel=1e-3
    )


def test_imbalance_by_hand():
    lengths = [4, 2, 1, 1]
    ranks = [[[0], [2]], [[1], [3]]]  # costs 4, 1 and 2, 1; mean 4
    assert arl.rank_imbalance(ranks, lengths, float) == (5 / 4, 5 / 4)
    crossed = [[[0], [2]], [[3], [1]]]
    assert arl.rank_imbalance(crossed, lengths, float) == (5 / 4, 6 / 4)
    uneven = [[[0], [1], [2]], [[3]]]  # the second rank idles twice
    assert arl.rank_imbalance(uneven, lengths, float) == (7 / 4, 7 / 4)


def test_imbalance_counts_padding_unless_packed():
    lengths, ranks = [4, 1, 3, 2], [[[0, 1]], [[2, 3]]]
    assert arl.rank_imbalance(ranks, lengths, float) == (8 / 7, 8 / 7)
    assert arl.rank_imbalance(ranks, lengths, float, packed=True) == (1, 1)


def test_imbalance_is_over_the_mean_of_the_same_schedule():
    lengths = [4, 4, 1, 1]
    for ranks in ([[[0], [2]], [[1], [3]]], [[[0, 2]], [[1, 3]]]):  # 10 paid, and 16
        assert arl.rank_imbalance(ranks, lengths, float) == (1, 1)


# Published lengths


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
    assert (lengths < math.sqrt(10 * 100)).double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert (lengths > 1000).double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert lengths.min() >= 10 and lengths.max() < 10_000


@pytest.mark.parametrize(
    ("quantiles", "index"),
    [
        (((0, 10), (50, 100), (100, 10_000)), 1),  # percent
        (((0.1, 10), (1, 100)), 0),
        (((0, 10), (0.5, 100)), 1),
        (((0, 0), (1, 100)), 0),
        (((0, 10), (0.5, 8), (1, 100)), 1),
        (((0, 10), (0.5, 20), (0.5, 30), (1, 100)), 2),
        (((0, 10), (1, math.inf)), 1),
        (((0, 10),), 0),
    ],
)
def test_quantiles_rise_from_0_to_1(quantiles, index):
    with pytest.raises(ValueError, match=rf"quantiles\[{index}\] = "):
        arl.draw_lengths(quantiles, 10, torch.Generator())


def test_a_schedule_to_judge_is_checked():
    lengths = [3, 4, 5]
    for ranks, words in (
        ([], "ranks is empty"),
        ([[], []], "ranks is empty"),
        ([[[0]], [[1], []]], r"ranks\[1\]\[1\] is empty"),
        ([[[0, 3]]], r"ranks\[0\]\[0\]\[1\] = 3"),
        ([[[0, -1]]], r"ranks\[0\]\[0\]\[1\] = -1"),
        ([[0, 1], [2]], r"ranks\[0\]\[0\] must"),
    ):
        for packed in (False, True):
            with pytest.raises((TypeError, ValueError), match=words):
                arl.rank_imbalance(ranks, lengths, packed=packed)
    with pytest.raises(ValueError, match=r"cost\(3\) = nan"):
        arl.rank_imbalance([[[0]]], lengths, lambda s: math.nan)


def test_a_cost_must_not_fall():
    for call in (
        lambda cost: arl.rank_balanced_batches([3, 4, 5], 8, 1, cost),
        lambda cost: arl.rank_imbalance([[[0, 1]]], [3, 4, 5], cost),
    ):
        with pytest.raises(ValueError, match=r"cost\(4\) = 0.25 is below cost\(3\) = 0.33"):
            call(lambda s: 1 / s)
        call(lambda s: 1.0)
    measured = lambda s: 1 / s  # noqa: E731
    assert arl.rank_imbalance([[[0]]], [3, 4, 5], measured) == (1, 1)  # no other length is asked
    assert arl.rank_imbalance([[[0, 1]]], [3, 4, 5], measured, packed=True) == (1, 1)


def test_a_draw_is_inside_its_quantiles():
    with pytest.raises(ValueError, match="quantiles is empty"):
        arl.draw_lengths((), 5, torch.Generator())
    for n in (5, 1000, 4097):
        draws = arl.draw_lengths(((0, n), (0.5, n), (1, n)), 20, torch.Generator())
        assert draws.tolist() == [n] * 20
