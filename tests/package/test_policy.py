"""The policy: what its probabilities are, whichever way they are computed."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import agentrl as arl

V = 11


def tiny(seed: int = 0, **kwargs: object) -> arl.TinyAgent:
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 4, "max_len": 24, "seed": seed, **kwargs}
    return arl.TinyAgent(V, **sizes)  # type: ignore[arg-type]


def some_ids(B: int, T: int, seed: int = 0) -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(a: Tensor, b: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


# The model


@settings(max_examples=40)
@given(
    st.integers(0, 2**31),
    st.sampled_from([(8, 1, 1), (16, 2, 4), (12, 3, 2)]),
    st.integers(1, 4),
    st.lists(st.integers(1, 7), min_size=1, max_size=5).filter(lambda parts: sum(parts) <= 24),
)
def test_cache_equals_full(
    seed: int, sizes: tuple[int, int, int], B: int, parts: list[int]
) -> None:
    d_model, n_layers, n_heads = sizes
    model = tiny(seed, d_model=d_model, n_layers=n_layers, n_heads=n_heads)
    ids = some_ids(B, sum(parts), seed)
    cache = model.new_cache(B)
    cache.memory.fill_(math.nan)  # what the memory held does not matter
    pieces = [model(part, cache=cache) for part in ids.split(parts, dim=1)]
    assert cache.lengths == [sum(parts)] * B
    close(torch.cat(pieces, 1), model(ids))


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 4), st.data())
def test_rows_of_a_cache_may_differ_and_leave(seed: int, B: int, data: st.DataObject) -> None:
    """Any number of tokens per row and pass, and any rows kept in between."""
    model, ids = tiny(seed), some_ids(B, 24, seed)
    expected, cache, rows = model(ids), model.new_cache(B), list(range(B))
    cache.memory.fill_(math.nan)
    while rows:
        room = [24 - n for n in cache.lengths]
        counts = [data.draw(st.integers(0, min(7, r))) for r in room]
        if sum(counts) == 0:
            break
        spans = [(r, s, s + n) for r, s, n in zip(rows, cache.lengths, counts, strict=True)]
        new = torch.cat([ids[r, a:b] for r, a, b in spans])
        out = model(new[None], cache=cache, counts=counts)
        close(out[0], torch.cat([expected[r, a:b] for r, a, b in spans]))
        assert cache.lengths == [b for _, _, b in spans]
        kept = [k for k in range(len(rows)) if data.draw(st.booleans())]
        if kept:
            cache.select(kept)
            rows = [rows[k] for k in kept]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_cache_of_selected_rows(kind: type) -> None:
    model, ids = tiny(), some_ids(5, 12)
    cache = model.new_cache(5)
    model(ids[:, :4], cache=cache)
    cache.select(kind([4, 1, 1]))
    close(model(ids[[4, 1, 1], 4:], cache=cache), model(ids[[4, 1, 1]])[:, 4:])
    assert cache.lengths == [12, 12, 12]


def test_cached_position_ids() -> None:
    model, ids = tiny(), some_ids(2, 6)
    places = torch.tensor([[3, 4, 5, 6, 7, 8], [0, 2, 4, 6, 8, 10]])
    cache = model.new_cache(2)
    out = [model(ids[:, a:b], places[:, a:b], cache=cache) for a, b in ((0, 1), (1, 6))]
    close(torch.cat(out, 1), model(ids, places))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_default_positions_and_mask_are_causal(dtype: torch.dtype) -> None:
    model, ids = tiny(), some_ids(2, 7)
    mask = torch.ones(2, 1, 7, 7).tril().to(dtype)
    close(model(ids, torch.arange(7).expand(2, 7), mask), model(ids), 1e-13)
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % V
    assert torch.equal(model(changed)[:, :5], model(ids)[:, :5]), "the past does not see it"
    assert (model(changed)[:, 5:] != model(ids)[:, 5:]).any(-1).all(), "the rest does"


def test_mask_hides_and_position_matters() -> None:
    model, ids = tiny(), some_ids(1, 8)
    # Two sequences in one row, 0..4 and 5..7, each with positions of its own.
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    segment = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    mask = (segment[:, None] == segment[None]).tril()[None, None]
    out = model(ids, places, mask)
    close(out[:, :5], model(ids[:, :5]), 1e-13)
    close(out[:, 5:], model(ids[:, 5:]), 1e-13)
    for fault in (model(ids, None, mask), model(ids, places)):  # running positions, causal
        assert (fault[:, 5:] - out[:, 5:]).abs().max() > 1e-3


def test_rows_are_independent() -> None:
    model, ids = tiny(), some_ids(6, 10)
    close(torch.cat([model(row[None]) for row in ids]), model(ids), 1e-13)


def test_forward_is_the_head_over_hidden_states() -> None:
    model, ids = tiny(), some_ids(2, 5)
    hidden = model.hidden_states(ids)
    assert hidden.shape == (2, 5, 16)
    assert torch.equal(F.linear(hidden, model.lm_head.weight), model(ids))
    assert model.lm_head.weight.shape == (V, 16)
    assert model.lm_head.weight.data_ptr() != model.token.weight.data_ptr(), "not tied"


def test_same_seed_same_weights_whatever_else_is_drawn() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = tiny(7)
    assert torch.equal(state, torch.get_rng_state()), "the caller's draws stay as they were"
    torch.rand(3)
    two, other = tiny(7), tiny(8)
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    assert not all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtype(dtype: torch.dtype) -> None:
    model = tiny(dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(some_ids(1, 3)).dtype == model.new_cache(1).memory.dtype == dtype
    for p, q in zip(model.parameters(), tiny().parameters(), strict=True):
        close(p, q.to(dtype), 0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_model_can_be_mapped_over_sequences() -> None:
    model, ids = tiny(), some_ids(3, 6)
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, weights, (row[None, :-1],))[0]
        return F.cross_entropy(logits, row[1:])

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, ids)
    for b in range(3):
        alone = torch.func.grad(loss)(weights, ids[b])
        for name, gradient in alone.items():
            close(each[name][b], gradient)


# Log-probabilities


def test_selected_log_probs_are_those_of_a_distribution() -> None:
    logits = randn(2, 3, V) * 5
    every = torch.arange(V)
    table = torch.stack([arl.selected_log_probs(logits, every[v].expand(2, 3)) for v in every], -1)
    close(table.exp().sum(-1), torch.ones(2, 3).double(), 1e-14)
    close(table, logits.log_softmax(-1), 1e-13)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 3, 4), (0,), (3, 0)])
def test_selected_log_probs_of_any_rank(shape: tuple[int, ...]) -> None:
    logits, ids = randn(*shape, V), torch.zeros(shape, dtype=torch.long)
    assert arl.selected_log_probs(logits, ids).shape == shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_converted_before_the_sum(dtype: torch.dtype) -> None:
    logits = randn(64, 4096, seed=1).to(dtype)
    ids = torch.randint(4096, (64,), generator=torch.Generator().manual_seed(2))
    got = arl.selected_log_probs(logits, ids)
    assert got.dtype == torch.float32
    exact = logits.double().log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    assert (got.double() - exact).abs().max() < 1e-5
    inside = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    assert (inside.double() - exact).abs().max() > 1e-4, "the fault would show"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_far_and_equal_logits_are_finite_in_at_least_float32(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [7.0, 7.0, 7.0]]).to(dtype)
    got = torch.stack([arl.selected_log_probs(logits, torch.tensor([i, i])) for i in range(3)], 1)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    far = [0.0, *(logits[0, 1:].double() - logits[0, 0].double()).tolist()]
    close(got.double(), torch.tensor([far, [-math.log(3)] * 3]).double(), 1e-6)
    hidden, weight = randn(1, 5, 4).to(dtype), randn(V, 4, seed=1).to(dtype)
    chunked = arl.chunked_log_probs(hidden, weight, some_ids(1, 5), 2)
    assert chunked.dtype == got.dtype
    close(chunked, arl.selected_log_probs(F.linear(hidden, weight), some_ids(1, 5)), 1e-6)


def loop_log_probs(model: arl.TinyAgent, ids: Tensor) -> Tensor:
    """Score every token by a run over its prefix alone."""

    def score(prefix: Tensor, token: int) -> float:
        logits = model(prefix[None])[0, -1].tolist()
        return logits[token] - math.log(sum(map(math.exp, logits)))

    rows = [[score(row[:t], row[t]) for t in range(1, len(row))] for row in ids]
    return torch.tensor(rows, dtype=torch.float64)


def test_sequence_log_probs_against_a_loop_over_prefixes() -> None:
    model, ids = tiny(), some_ids(3, 9)
    right = arl.sequence_log_probs(model, ids)
    assert right.shape == (3, 8)
    close(right, loop_log_probs(model, ids))
    for logits, chosen in ((model(ids)[:, 1:], ids[:, 1:]), (model(ids)[:, :-1], ids[:, :-1])):
        shifted = arl.selected_log_probs(logits, chosen)  # each token sees itself
        assert (shifted - right).abs().max() > 0.1, "a shift by one would show"


def test_sequence_log_probs_sum_to_one_over_all_sequences() -> None:
    model = arl.TinyAgent(3, d_model=8, n_heads=2, max_len=8)
    first = torch.zeros(27, 1, dtype=torch.long)
    rest = torch.cartesian_prod(*[torch.arange(3)] * 3)
    total = arl.sequence_log_probs(model, torch.cat([first, rest], 1)).sum(1).exp().sum()
    assert total.item() == pytest.approx(1.0, abs=1e-13)


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(1, 17), st.integers(1, 25), st.integers(0, 2**31))
def test_chunked_equals_full_with_gradients(B: int, T: int, chunk_size: int, seed: int) -> None:
    hidden, weight = randn(B, T, 6, seed=seed), randn(V, 6, seed=seed + 1)
    ids, upstream = some_ids(B, T, seed), randn(B, T, seed=seed + 2)
    results = []
    for score in (
        lambda h, w: arl.chunked_log_probs(h, w, ids, chunk_size),
        lambda h, w: arl.selected_log_probs(F.linear(h, w), ids),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logp = score(h, w)
        (logp * upstream).sum().backward()
        results.append((logp.detach(), h.grad, w.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_gradients_through_the_model() -> None:
    model, ids = tiny(d_model=8, n_layers=1, n_heads=2), some_ids(2, 4)

    def score(weight: Tensor) -> Tensor:
        weights = {"blocks.0.qkv.weight": weight}
        call = lambda ids: torch.func.functional_call(model, weights, (ids,))  # noqa: E731
        return arl.sequence_log_probs(call, ids)

    assert torch.autograd.gradcheck(score, (model.blocks[0].qkv.weight,))


# What is refused

ROWS, TOO_HIGH = some_ids(2, 4), torch.tensor([[2, 99]])
ADDITIVE = torch.zeros(4, 1, 4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -math.inf)
MODEL = [  # rows of the cache, arguments of the model, the error, what it names
    (0, {"ids": TOO_HIGH}, ValueError, r"ids\[0, 1\] = 99"),
    (0, {"ids": -TOO_HIGH}, ValueError, r"ids\[0, 0\] = -2"),
    (1, {"ids": TOO_HIGH}, ValueError, r"ids\[0, 1\] = 99"),
    *((0, {"ids": ids}, TypeError, "ids") for ids in (ROWS.tolist(), ROWS.numpy(), ROWS.float())),
    (0, {"ids": ROWS[0]}, ValueError, "ids"),
    (0, {"ids": some_ids(1, 25)}, ValueError, "25 positions exceed max_len = 24"),
    (1, {"ids": some_ids(1, 25)}, ValueError, "25 exceeds max_len = 24"),
    (2, {"ids": some_ids(1, 26), "counts": [1, 25]}, ValueError, r"\[1\] = 25 .*max_len = 24"),
    *((2, {"ids": some_ids(1, 5), "counts": counts}, ValueError, "counts")
      for counts in ([3, 1, 1], [3, 1], [6, -1])),
    (2, {"ids": some_ids(1, 5), "counts": [4.0, 1.0]}, TypeError, "counts"),
    (0, {"ids": some_ids(1, 8), "counts": [3, 5]}, ValueError, "counts"),
    (2, {"ids": ROWS, "attention_mask": torch.ones(2, 1, 4, 4)}, ValueError, "attention_mask"),
    *((0, {"ids": ROWS, "position_ids": places}, kind, words) for places, kind, words in (
        ([[0, 1, 2, 3]] * 2, TypeError, "position_ids"),
        (torch.arange(4), ValueError, "position_ids"),
        (torch.arange(21, 25).expand(2, 4), ValueError, r"position_ids\[0, 3\] = 24"))),
    # Fault 24: four rows of four tokens, so a mask [4, 4] may be [B, T] or [T, T].
    *((0, {"ids": some_ids(4, 4), "attention_mask": mask}, ValueError, "_mask") for mask in (
        torch.ones(4, 4).bool().tril(), torch.ones(4, 4).long(), torch.ones(1, 1, 4, 4).bool(),
        torch.ones(4, 2, 4, 4).bool(), torch.full((4, 1, 4, 4), 0.5), ADDITIVE)),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "given", "kind", "words"), MODEL, ids=lambda x: None)
def test_what_does_not_fit_is_refused_and_leaves_the_cache(
    rows: int, given: dict, kind: type, words: str
) -> None:
    model = tiny()
    cache = model.new_cache(rows) if rows else None
    with pytest.raises(kind, match=words):
        model(**given, cache=cache)
    assert cache is None or cache.lengths == [0] * rows


LOGITS, HIDDEN, HEAD = randn(2, V), randn(1, 4, 6), randn(V, 6)
REFUSED = [  # a function, its arguments, the error, what it names
    *((arl.selected_log_probs, (LOGITS, torch.tensor(x)), ValueError, rf"ids\[{i}\] = {x[i]}")
      for x, i in (([0, -1], 1), ([0, V], 1), ([-100, 0], 0))),
    *((arl.selected_log_probs, (LOGITS, x), TypeError, "ids") for x in (torch.zeros(2), [0, 1])),
    (arl.selected_log_probs, (LOGITS, some_ids(1, 3)[0]), ValueError, "ids"),
    (arl.selected_log_probs, (LOGITS.numpy(), some_ids(1, 2)[0]), TypeError, "logits"),
    *((arl.sequence_log_probs, (tiny(), ids), ValueError, "ids")
      for ids in (some_ids(2, 1), some_ids(2, 0), ROWS[0], ROWS[None])),
    (arl.sequence_log_probs, (tiny(), [[1, 2, 3]]), TypeError, "ids"),
    (arl.sequence_log_probs, (tiny(), TOO_HIGH), ValueError, r"ids\[0, 1\] = 99"),
    (arl.sequence_log_probs, (tiny(), TOO_HIGH.flip(1)), ValueError, r"ids\[0, 0\] = 99"),
    (arl.sequence_log_probs, (lambda ids: {"logits": ids}, ROWS), TypeError, "model"),
    (arl.chunked_log_probs, (HIDDEN[:, :2], HEAD, TOO_HIGH, 2), ValueError, r"ids\[0, 1\] = 99"),
    (arl.chunked_log_probs, (HIDDEN, HEAD, some_ids(1, 3), 2), ValueError, "ids"),
    (arl.chunked_log_probs, (HIDDEN, HEAD[:, 1:], some_ids(1, 4), 2), ValueError, "weight"),
    (arl.chunked_log_probs, (HIDDEN, torch.nn.Linear(6, V), ROWS[:1], 2), TypeError, "weight"),
    *((arl.chunked_log_probs, (HIDDEN, HEAD, some_ids(1, 4), size), kind, "chunk_size")
      for size, kind in ((0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError))),
    *((tiny().new_cache(3).select, (rows,), kind, "rows") for rows, kind in (
        ([True, False, True], TypeError), (torch.tensor([True]), TypeError), ([], ValueError),
        ([0, 3], ValueError), ([-1], ValueError), ([0, 1, 2, 0], ValueError))),
    (tiny().new_cache, (2.0,), TypeError, "batch"),
    *((arl.TinyAgent, (V, *sizes), kind, words) for sizes, kind, words in (
        ((16, 2, 5), ValueError, "d_model = 16 .* n_heads = 5"), ((16, 0), ValueError, "n_layers"),
        ((16.0,), TypeError, "d_model"), ((16, 2, "4"), TypeError, "n_heads"),
        ((16, 2, 4, True), TypeError, "max_len"))),
]  # fmt: skip


@pytest.mark.parametrize(("function", "given", "kind", "words"), REFUSED, ids=lambda x: None)
def test_the_argument_is_named(function, given: tuple, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        function(*given)
