"""The policy: what its probabilities are, whichever way they are computed."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from agentrl.policy import (
    TinyAgent,
    chunked_log_probs,
    selected_log_probs,
    sequence_log_probs,
)

V = 11


def tiny(seed: int = 0, **kwargs: object) -> TinyAgent:
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 4, "max_len": 24, "seed": seed, **kwargs}
    return TinyAgent(V, **sizes)  # type: ignore[arg-type]


def some_ids(B: int, T: int, seed: int = 0) -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# The model ------------------------------------------------------------------------------------


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
    pieces = [model(part, cache=cache) for part in ids.split(parts, dim=1)]
    assert cache.lengths == [sum(parts)] * B
    torch.testing.assert_close(torch.cat(pieces, 1), model(ids), rtol=0, atol=1e-12)


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
        wanted = torch.cat([expected[r, a:b] for r, a, b in spans])
        torch.testing.assert_close(out[0], wanted, rtol=0, atol=1e-12)
        assert cache.lengths == [b for _, _, b in spans]
        kept = [k for k in range(len(rows)) if data.draw(st.booleans())]
        if kept:
            cache.select(kept)
            rows = [rows[k] for k in kept]


def test_cache_of_selected_rows() -> None:
    model, ids = tiny(), some_ids(5, 12)
    cache = model.new_cache(5)
    model(ids[:, :4], cache=cache)
    cache.select([4, 1, 1])
    out = model(ids[[4, 1, 1], 4:], cache=cache)
    torch.testing.assert_close(out, model(ids[[4, 1, 1]])[:, 4:], rtol=0, atol=1e-12)
    assert cache.lengths == [12, 12, 12]


def test_cache_does_not_depend_on_what_its_memory_held() -> None:
    model, ids = tiny(), some_ids(3, 9)
    cache = model.new_cache(3)
    cache.memory.fill_(math.nan)
    out = torch.cat([model(ids[:, t : t + 1], cache=cache) for t in range(9)], 1)
    torch.testing.assert_close(out, model(ids), rtol=0, atol=1e-12)


def test_counts_must_fit_the_cache_and_the_tokens() -> None:
    model = tiny()
    cache = model.new_cache(2)
    with pytest.raises(ValueError, match=re.escape("counts = [3, 1, 1]")):
        model(some_ids(1, 5), cache=cache, counts=[3, 1, 1])
    with pytest.raises(ValueError, match=re.escape("counts = [3, 1]")):
        model(some_ids(1, 5), cache=cache, counts=[3, 1])
    with pytest.raises(ValueError, match=r"row 1: 0 \+ 25 positions exceed max_len = 24"):
        model(some_ids(1, 26), cache=cache, counts=[1, 25])
    assert cache.lengths == [0, 0], "a refused call leaves the cache as it was"


def test_cached_position_ids() -> None:
    model, ids = tiny(), some_ids(2, 6)
    places = torch.tensor([[3, 4, 5, 6, 7, 8], [0, 2, 4, 6, 8, 10]])
    cache = model.new_cache(2)
    out = torch.cat(
        [model(ids[:, a:b], places[:, a:b], cache=cache) for a, b in ((0, 1), (1, 6))], 1
    )
    torch.testing.assert_close(out, model(ids, places), rtol=0, atol=1e-12)


def test_default_positions_and_mask_are_causal() -> None:
    model, ids = tiny(), some_ids(2, 7)
    places = torch.arange(7).expand(2, 7)
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    torch.testing.assert_close(model(ids, places, mask), model(ids), rtol=0, atol=1e-13)
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
    torch.testing.assert_close(out[:, :5], model(ids[:, :5]), rtol=0, atol=1e-13)
    torch.testing.assert_close(out[:, 5:], model(ids[:, 5:]), rtol=0, atol=1e-13)
    running = model(ids, None, mask)
    assert (running[:, 5:] - out[:, 5:]).abs().max() > 1e-3
    causal = model(ids, places)
    assert (causal[:, 5:] - out[:, 5:]).abs().max() > 1e-3


def test_rows_are_independent() -> None:
    model, ids = tiny(), some_ids(6, 10)
    for row in range(6):
        torch.testing.assert_close(
            model(ids[row : row + 1]), model(ids)[row : row + 1], rtol=0, atol=1e-13
        )


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
    two = tiny(7)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert any(
        not torch.equal(a, b) for a, b in zip(one.parameters(), tiny(8).parameters(), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtype(dtype: torch.dtype) -> None:
    model = tiny(dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(some_ids(1, 3)).dtype == dtype
    cache = model.new_cache(1)
    assert cache.memory.dtype == dtype
    reference = tiny()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q.to(dtype), rtol=0, atol=0)


def test_an_id_outside_is_named_where_it_stands() -> None:
    model, ids = tiny(), some_ids(2, 6)
    calls = (
        model,
        lambda x: sequence_log_probs(model, x),
        lambda x: chunked_log_probs(randn(2, 6, 4), randn(V, 4), x, 2),
    )
    for t in (0, 3, 5):
        bad = ids.clone()
        bad[1, t] = 99
        for call in calls:
            with pytest.raises(ValueError, match=re.escape(f"ids[1, {t}] = 99 is outside 0..10")):
                call(bad)
    with pytest.raises(ValueError, match=re.escape("position_ids[0, 5] = 24 is outside 0..23")):
        model(ids, position_ids=torch.arange(19, 25).expand(2, 6))


def test_a_refused_id_leaves_the_cache_as_it_was() -> None:
    model = tiny()
    cache = model.new_cache(1)
    model(some_ids(1, 3), cache=cache)
    with pytest.raises(ValueError, match=re.escape("ids[0, 1] = 99 is outside 0..10")):
        model(torch.tensor([[2, 99]]), cache=cache)
    assert cache.lengths == [3]


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
            torch.testing.assert_close(each[name][b], gradient, rtol=0, atol=1e-12)


def test_what_would_be_ignored_is_refused() -> None:
    model, ids = tiny(), some_ids(2, 4)
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="attention_mask does not go with a cache"):
        model(ids, attention_mask=mask, cache=model.new_cache(2))
    with pytest.raises(ValueError, match=re.escape("counts = [3, 5] belong to a cache")):
        model(ids.view(1, 8), counts=[3, 5])


def test_too_long_is_refused_with_both_numbers() -> None:
    model = tiny()
    model(some_ids(1, 24))
    with pytest.raises(ValueError, match=r"25 positions exceed max_len = 24"):
        model(some_ids(1, 25))
    cache = model.new_cache(1)
    model(some_ids(1, 20), cache=cache)
    with pytest.raises(ValueError, match=r"20 \+ 5 positions exceed max_len = 24"):
        model(some_ids(1, 5), cache=cache)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="d_model = 64 is not a multiple of n_heads = 5"):
        TinyAgent(V, n_heads=5)


# Log-probabilities ----------------------------------------------------------------------------


def test_selected_log_probs_are_those_of_a_distribution() -> None:
    logits = randn(2, 3, V) * 5
    every = torch.arange(V)
    table = torch.stack([selected_log_probs(logits, every[v].expand(2, 3)) for v in every], -1)
    torch.testing.assert_close(table.exp().sum(-1), torch.ones(2, 3).double(), rtol=0, atol=1e-14)
    torch.testing.assert_close(table, logits.log_softmax(-1), rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 3, 4), (0,), (3, 0)])
def test_selected_log_probs_of_any_rank(shape: tuple[int, ...]) -> None:
    logits, ids = randn(*shape, V), torch.zeros(shape, dtype=torch.long)
    assert selected_log_probs(logits, ids).shape == shape


def test_selected_log_probs_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], dtype=torch.float64)
    got = torch.stack([selected_log_probs(logits, torch.tensor([i])) for i in range(3)])[:, 0]
    torch.testing.assert_close(got, torch.tensor([0.0, -2e4, -1e4]).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_converted_before_the_sum(dtype: torch.dtype) -> None:
    logits = randn(64, 4096, seed=1).to(dtype)
    ids = torch.randint(4096, (64,), generator=torch.Generator().manual_seed(2))
    got = selected_log_probs(logits, ids)
    assert got.dtype == torch.float32
    exact = logits.double().log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    assert (got.double() - exact).abs().max() < 1e-5
    inside = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    assert (inside.double() - exact).abs().max() > 1e-4, "the fault would show"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_precisions_stay(dtype: torch.dtype) -> None:
    logits = randn(3, V).to(dtype)
    assert selected_log_probs(logits, torch.zeros(3, dtype=torch.long)).dtype == dtype


def test_selected_log_probs_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=re.escape("logits [2, 3, 11] do not fit ids [2, 4]")):
        selected_log_probs(randn(2, 3, V), torch.zeros(2, 4, dtype=torch.long))
    for bad in (-1, V, -100):
        ids = torch.zeros(2, 3, dtype=torch.long)
        ids[1, 2] = bad
        with pytest.raises(ValueError, match=re.escape(f"ids[1, 2] = {bad} is outside 0..10")):
            selected_log_probs(randn(2, 3, V), ids)


def loop_log_probs(model: TinyAgent, ids: Tensor) -> Tensor:
    """Score every token by a run over its prefix alone."""
    rows = []
    for row in ids:
        scores = []
        for t in range(1, len(row)):
            logits = model(row[None, :t])[0, -1]
            total = sum(math.exp(v) for v in logits.tolist())
            scores.append(logits[row[t]].item() - math.log(total))
        rows.append(scores)
    return torch.tensor(rows, dtype=torch.float64)


def test_sequence_log_probs_against_a_loop_over_prefixes() -> None:
    model, ids = tiny(), some_ids(3, 9)
    got = sequence_log_probs(model, ids)
    assert got.shape == (3, 8)
    torch.testing.assert_close(got, loop_log_probs(model, ids), rtol=0, atol=1e-12)


def test_a_shift_by_one_would_show() -> None:
    model, ids = tiny(), some_ids(3, 9)
    right = sequence_log_probs(model, ids)
    shifted = selected_log_probs(model(ids)[:, 1:], ids[:, 1:])  # each token sees itself
    unshifted = selected_log_probs(model(ids)[:, :-1], ids[:, :-1])
    assert (shifted - right).abs().max() > 0.1
    assert (unshifted - right).abs().max() > 0.1


def test_sequence_log_probs_sum_to_one_over_all_sequences() -> None:
    model = TinyAgent(3, d_model=8, n_heads=2, max_len=8)
    first = torch.zeros(27, 1, dtype=torch.long)
    rest = torch.cartesian_prod(*[torch.arange(3)] * 3)
    total = sequence_log_probs(model, torch.cat([first, rest], 1)).sum(1).exp().sum()
    assert total.item() == pytest.approx(1.0, abs=1e-13)


@pytest.mark.parametrize("shape", [(2, 1), (2, 0), (5,), (1, 2, 3)])
def test_sequence_log_probs_need_a_second_token(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"ids {list(shape)} must be [B, T]")):
        sequence_log_probs(tiny(), torch.zeros(shape, dtype=torch.long))


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(1, 17), st.integers(1, 25), st.integers(0, 2**31))
def test_chunked_equals_full_with_gradients(B: int, T: int, chunk_size: int, seed: int) -> None:
    hidden, weight = randn(B, T, 6, seed=seed), randn(V, 6, seed=seed + 1)
    ids, upstream = some_ids(B, T, seed), randn(B, T, seed=seed + 2)
    results = []
    for score in (
        lambda h, w: chunked_log_probs(h, w, ids, chunk_size),
        lambda h, w: selected_log_probs(F.linear(h, w), ids),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logp = score(h, w)
        (logp * upstream).sum().backward()
        results.append((logp.detach(), h.grad, w.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_chunked_scores_the_token_at_the_same_place() -> None:
    model, ids = tiny(), some_ids(2, 9)
    hidden = model.hidden_states(ids[:, :-1])
    got = chunked_log_probs(hidden, model.lm_head.weight, ids[:, 1:], 3)
    torch.testing.assert_close(got, sequence_log_probs(model, ids), rtol=0, atol=1e-13)


@pytest.mark.parametrize("chunk_size", [0, -1])
def test_chunked_refuses_an_empty_chunk(chunk_size: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_size = {chunk_size} must be at least 1"):
        chunked_log_probs(randn(1, 3, 6), randn(V, 6), some_ids(1, 3), chunk_size)


def test_chunked_names_shapes_that_differ() -> None:
    with pytest.raises(ValueError, match=re.escape("hidden [1, 3, 6] does not fit ids [1, 4]")):
        chunked_log_probs(randn(1, 3, 6), randn(V, 6), some_ids(1, 4), 2)


def test_gradients_through_the_model() -> None:
    model, ids = tiny(d_model=8, n_layers=1, n_heads=2), some_ids(2, 6)
    model.zero_grad()
    sequence_log_probs(model, ids).sum().backward()
    weight = model.blocks[0].qkv.weight
    direction = randn(*weight.shape, seed=3)
    slope = (weight.grad * direction).sum().item()
    eps, ends = 1e-6, []
    with torch.no_grad():
        for sign in (1, -1):
            weight += sign * eps * direction
            ends.append(sequence_log_probs(model, ids).sum().item())
            weight -= sign * eps * direction
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * eps), rel=1e-6)
