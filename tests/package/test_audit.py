"""The checks find what is planted, where it is planted, and nothing in right trainers."""

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import agentrl as arl
from agentrl import audit
from agentrl.course import audit as course
from benchmarks.models import causal_lm

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def row(lengths: list[int], width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """One packed row: token ids and segment ids."""
    segments = [k for k, n in enumerate(lengths) for _ in range(n)]
    segments += [-1] * (width - len(segments))
    ids = torch.randint(10, (1, width), generator=generator(seed))
    ids[0, :2] = torch.tensor([0, 9])
    return ids, torch.tensor([segments])


def episodes(logits: Tensor, ids: Tensor) -> list[arl.Trajectory]:
    """Episodes whose sampler had these logits [B, T - 1, V] in float64."""
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    mask = torch.ones_like(logp[0])
    return [arl.Trajectory(i, mask, p, 0.0) for i, p in zip(ids, logp, strict=True)]


def random_episodes(seed: int, B: int = 4, T: int = 12) -> tuple[list[arl.Trajectory], Tensor]:
    draws = generator(seed)
    logits = 4 * torch.randn(B, T - 1, 16, generator=draws, dtype=torch.float64)
    return episodes(logits, torch.randint(16, (B, T), generator=draws)), logits


def scored(logits: Tensor, trajs: list[arl.Trajectory]) -> list[Tensor]:
    return [arl.selected_log_probs(z, traj.ids[1:]) for z, traj in zip(logits, trajs, strict=True)]


def finds(found: arl.CheckResult, says: str) -> None:
    assert not found and says in found.likely, (says, found)


# What rounding does


def test_products_and_narrower_types_are_moved_by_a_last_place_and_nothing_else() -> None:
    a, x = torch.eye(64), torch.rand(64, 64, generator=generator(0)) + 1
    out, y = torch.empty(64, 64), x.double()
    with audit._Nudged(0) as seen:
        moved = [a @ x, torch.mm(a, x, out=out), torch.addmm(x, a, 0 * x)]
        halves = x.bfloat16()
        kept = [x + 0, x.T, x.double(), (x > 1).float(), a.softmax(-1), torch.arange(99).float()]
    assert out is moved[1] and seen.eps == 2.0**-8
    for z in moved:
        assert 0 < (z - x).abs().max() <= 4 * 2.0**-23 and (z != x).double().mean() > 0.3
    assert (halves != x.bfloat16()).any() and torch.equal(kept[2], y)
    plain = [x, x.T, y, (x > 1) * 1.0, a.softmax(-1), torch.arange(99.0)]
    assert all(torch.equal(k, r) for k, r in zip(kept, plain, strict=True))


@pytest.mark.parametrize("by", ["name", "backend"])
def test_products_in_tf32_are_moved_by_more(by: str) -> None:
    backend, x = torch.backends.mkldnn.matmul, torch.ones(8, 8)
    before = backend.fp32_precision
    try:
        if by == "name":
            torch.set_float32_matmul_precision("high")
        else:
            backend.fp32_precision = "tf32"
        with audit._Nudged(0) as seen:
            x @ x
        assert seen.eps == 2.0**-11
    finally:
        torch.set_float32_matmul_precision("highest")
        backend.fp32_precision = before
    with audit._Nudged(0) as seen:
        x @ x
    assert seen.eps == 2.0**-23


def deep(layers: int, scale: float, dtype: torch.dtype, seed: int) -> arl.TinyAgent:
    """A policy of any depth, whose blocks are `scale` times as loud."""
    model = arl.TinyAgent(32, d_model=32, n_layers=layers, dtype=dtype, seed=seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
        for name, p in model.named_parameters():
            if "blocks" in name and p.ndim == 2:
                p.mul_(scale)
    return model


def ways(model: Any) -> tuple[Any, Any, Any]:
    """Score episodes in a padded batch, in packed rows, and in rows that leak."""
    packed = partial(course._packed_logp, model)
    padded = partial(course._padded_logp, model)
    return padded, partial(packed, mask=True), partial(packed, mask=False)


def sampled(model: Any, exact: bool) -> list[arl.Trajectory]:
    """Episodes whose sampler scored each alone, in the model's type or in float64."""
    draws, lengths = generator(1), [10 + (7 * i) % 32 for i in range(8)]
    ids = [torch.randint(32, (n,), generator=draws) for n in lengths]
    trajs = [arl.Trajectory(x, torch.ones(len(x) - 1), torch.zeros(len(x) - 1), 0.0) for x in ids]
    model = copy.deepcopy(model).double() if exact else model
    logps = [arl.sequence_log_probs(model, x[None])[0].detach().double() for x in ids]
    return [replace(t, sample_logp=x) for t, x in zip(trajs, logps, strict=True)]


def gradient(model: Any, trajs: Any, split: list[list[int]], local: bool = False) -> list[Tensor]:
    """A policy gradient over microbatches, with a count of its own for each or for all."""
    model.zero_grad()
    tokens = sum(len(traj.ids) - 1 for traj in trajs)
    for rows in split:
        part = [trajs[i] for i in rows]
        ids = arl.pad_rows([traj.ids for traj in part], max(len(t.ids) for t in part), 0)
        logp = arl.sequence_log_probs(model, ids)
        lines = zip(logp, part, rows, strict=True)
        loss = sum((-1) ** i * line[: len(t.ids) - 1].sum() for line, t, i in lines)
        count = sum(len(t.ids) - 1 for t in part) * len(split) if local else tokens
        (loss / count).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.3, 2.0])
@pytest.mark.parametrize("layers", [2, 12])
def test_right_trainers_of_any_depth_and_size_raise_no_alarm_and_wrong_ones_do(
    layers: int, scale: float, dtype: torch.dtype
) -> None:
    model = deep(layers, scale, dtype, seed=layers)
    padded, packed, leaky = ways(model)
    for exact in (False, True):
        trajs = sampled(model, exact)
        for right in (padded, packed):
            assert (found := arl.step_zero_ratio_check(right, trajs)), found
        for wrong in (leaky, partial(padded, temperature=0.5)):
            assert not arl.step_zero_ratio_check(wrong, trajs)
    order = sorted(range(8), key=lambda i: len(trajs[i].ids))
    splits = [2, [order[:4], order[4:]], [[i] for i in order]]
    found = arl.split_invariance_check(partial(gradient, model), trajs, splits)
    assert found, found
    wrong = arl.split_invariance_check(partial(gradient, model, local=True), trajs, splits)
    loud = scale * layers > 20 and dtype == torch.bfloat16  # the gradient is mostly rounding
    assert not wrong or loud, wrong


@pytest.mark.parametrize(("layers", "scale", "head"), [(2, 0.3, 4), (12, 0.1, 1), (28, 1.0, 20)])
def test_a_leak_of_a_third_of_a_nat_is_found_in_bf16(layers: int, scale: float, head: int) -> None:
    model = deep(layers, scale, torch.bfloat16, seed=0)
    with torch.no_grad():
        model.lm_head.weight.div_(head)
    _, packed, leaky = ways(model)
    trajs = sampled(model, exact=True)
    pairs = zip(leaky(trajs), packed(trajs), strict=True)
    assert 0.25 < max((a - b).abs().max() for a, b in pairs) < 0.51
    finds(arl.step_zero_ratio_check(leaky, trajs), "a neighbour in a packed row")
    assert arl.step_zero_ratio_check(packed, trajs)
    # Of a fixed batch nothing can be asked but the difference, and the limit is far below 1.1 nats.
    fixed = arl.step_zero_ratio_check(lambda _: packed(trajs), trajs)
    assert fixed and fixed.worst < fixed.threshold < 0.8


@pytest.mark.parametrize("offset", [200.0, -200.0])
def test_an_offset_of_all_logits_is_no_alarm(offset: float) -> None:
    trajs, logits = random_episodes(2, B=64)
    assert arl.step_zero_ratio_check(
        lambda ts: scored((logits + offset).bfloat16().float(), ts), trajs
    )
    assert not arl.step_zero_ratio_check(lambda ts: [x - 1.0 for x in scored(logits, ts)], trajs)


def test_a_floor_above_the_cap_is_a_finding() -> None:
    trajs, logits = random_episodes(2)
    draws = generator(0)  # of its own, which cannot be repeated

    def dropped(ts: list[arl.Trajectory]) -> list[Tensor]:
        return scored(logits * (torch.rand(logits.shape, generator=draws) > 0.1), ts)

    found = arl.step_zero_ratio_check(dropped, trajs)
    assert not found and ("two calls" in found.likely or "draws on its own" in found.likely)
    large = arl.step_zero_ratio_check(lambda ts: scored((logits + 4000).bfloat16(), ts), trajs)
    finds(large, "too large")
    assert large.index == "the floor"
    seeded = arl.step_zero_ratio_check(lambda ts: scored(F.dropout(logits, 0.1), ts), trajs)
    finds(seeded, "dropout")


def test_a_sampler_in_a_coarser_type_has_to_be_named() -> None:
    model = deep(2, 1.0, torch.float32, seed=0)
    coarse = sampled(copy.deepcopy(model).bfloat16(), exact=False)
    fn = ways(model)[0]
    finds(arl.step_zero_ratio_check(fn, coarse), "sampler_dtype")
    assert arl.step_zero_ratio_check(fn, coarse, sampler_dtype=torch.bfloat16)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(DTYPES))
def test_rounded_logits_are_no_alarm(seed: int, dtype: torch.dtype) -> None:
    trajs, logits = random_episodes(seed)
    result = arl.step_zero_ratio_check(lambda ts: scored(logits.to(dtype), ts), trajs)
    assert result, result


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(DTYPES), st.integers(1, 16))
def test_rounded_gradients_are_no_alarm(seed: int, dtype: torch.dtype, k: int) -> None:
    draws = generator(seed)
    values = torch.randn(16, 40, generator=draws).to(dtype)

    def grad(batch: Tensor, split: list[list[int]]) -> Tensor:
        total = torch.zeros(40, dtype=dtype)
        for rows in split:
            total = total + batch[rows].sum(0) / 16
        return total

    order = torch.randperm(16, generator=draws).tolist()
    splits = [k, [order[i::k] for i in range(k)]]
    result = arl.split_invariance_check(grad, values, splits)
    assert result, result


def test_equal_to_the_bit_can_be_asked_for() -> None:
    equal = lambda b, s: torch.ones(2)  # noqa: E731
    assert arl.split_invariance_check(equal, torch.ones(4), [2], tolerance=0.0)
    close = lambda b, s: torch.ones(2) + (len(s) - 1) * 2.0**-23  # noqa: E731
    assert arl.split_invariance_check(close, torch.ones(4), [2])
    found = arl.split_invariance_check(close, torch.ones(4), [2], tolerance=0.0)
    assert not found and found.worst == pytest.approx(2.0**-23, rel=1e-3)


# Leaks

LAYOUTS = st.lists(st.integers(1, 6), min_size=2, max_size=5)
PARTS = torch.tensor([[0] * 4 + [1] * 4 + [-1]])
SUMS = lambda x: arl.segment_cumsum(x.double(), PARTS)  # noqa: E731


@settings(max_examples=25)
@given(LAYOUTS, st.integers(0, 3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_state_that_crosses_a_boundary_is_found(
    lengths: list[int], padding: int, dtype: torch.dtype
) -> None:
    ids, segments = row(lengths, sum(lengths) + padding)
    found = arl.leak_check(lambda x: x.to(dtype).cumsum(1), ids, segments)
    assert not found and "crosses the boundary" in found.likely
    place, hit, changed = (
        int(found.index.replace(",", "").replace(")", "").split()[i]) for i in (3, 5, 8)
    )
    assert segments[0, place] == hit > changed
    assert arl.leak_check(lambda x: arl.segment_cumsum(x.to(dtype), segments), ids, segments)


def test_a_leak_of_one_entry_is_found_there() -> None:
    ids, segments = row([4, 4], 9)

    def fn(x: Tensor) -> Tensor:
        out = x.double().clone()
        out[0, 6] += 1e-9 * x[0, 1]
        return out

    found = arl.leak_check(fn, ids, segments)
    assert not found and found.index.startswith("row 0, entry 6 (segment 1)")
    assert found.trace[6] == found.worst > 0 and sum(x > 0 for x in found.trace) == 1
    assert arl.leak_check(fn, ids, segments, tolerance=1e-6)


@pytest.mark.parametrize("numbers", [[[0, 0, 0, 0], [0, 0, 1, 1]], [[0, 0, 0, 0], [1, 1, 2, 2]]])
def test_a_leak_from_row_to_row_is_found(numbers: list[list[int]]) -> None:
    segments = torch.tensor(numbers)
    ids = torch.arange(1, 9).view(2, 4)
    flat = lambda x: x.double().cumsum(-1)  # noqa: E731

    def joined(x: Tensor) -> Tensor:  # the last segment of a row runs on into the next row
        first = flat(x[:1])
        second = arl.segment_cumsum(x[1:].double(), segments[1:])
        second[:, :2] += first[:, -1:]
        return torch.cat([first, second])

    found = arl.leak_check(joined, ids, segments)
    assert not found and found.index.startswith("row 1, entry"), found
    assert "one row sees another" in found.likely
    right = lambda x: arl.segment_cumsum(x.double(), segments)  # noqa: E731
    assert arl.leak_check(right, ids, segments)
    # A sum that the change of all tokens leaves as it is, seen by the second half alone.
    same = torch.tensor([[1, 2, 3, 4]] * 2)
    summed = lambda x: right(x) + torch.tensor([[0.0], [1.0]]) * x[0].sum()  # noqa: E731
    assert not arl.leak_check(summed, same, segments)


@pytest.mark.parametrize(
    ("fn", "more", "says"),
    [
        (lambda x: x.double() + x[:, -1:], {}, "padding is attended to"),
        (lambda x: x.double() + x[:, 7:8] * (torch.arange(9) < 4), {}, "not causal"),
        (SUMS, {"loss_mask": torch.ones(1, 8)}, "labels"),
        (SUMS, {"alone_fn": lambda x: x.double().cumsum(1) + 1}, "positions do not restart"),
        (lambda x: x.double()[:, :3], {}, "returned shape [1, 3]"),
        (lambda x: None, {}, "returned NoneType"),
        (lambda x: x.double() / 0 * 0, {}, "returned NaN"),
        (lambda x: torch.rand(x.shape), {}, "two calls"),
    ],
)
def test_what_a_leak_is_likely_to_be(fn: Any, more: dict[str, Any], says: str) -> None:
    finds(arl.leak_check(fn, *row([4, 4], 9), **more), says)


def test_the_report_says_what_was_asked() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 0]])
    alone = lambda x: x.double().cumsum(1)  # noqa: E731
    found = arl.leak_check(SUMS, *row([4, 4], 9), loss_mask=mask, alone_fn=alone)
    assert found and found.index.endswith("also asked: loss mask, alone")


def test_a_mask_that_is_read_from_the_ids_is_no_leak() -> None:
    ids = torch.tensor([[0, 0, 5, 3, 7, 2, 4], [6, 8, 3, 5, 2, 9, 4]])
    segments = torch.where(ids == 0, -1, 0)
    right = lambda x: ((x != 0) * x).double().cumsum(1)  # noqa: E731
    assert arl.leak_check(right, ids, segments)
    finds(
        arl.leak_check(lambda x: (x + 1).double().cumsum(1), ids, segments), "padding is attended"
    )


def test_boundaries_that_are_read_from_the_ids_are_no_leak() -> None:
    ids = torch.tensor([[5, 3, 1, 7, 2, 4, 1, 6, 8, 1]])
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2]])

    def right(x: Tensor) -> Tensor:
        end = (x == 1).long()
        return arl.segment_cumsum(x.double(), end.cumsum(1) - end)

    assert arl.leak_check(right, ids, segments)
    finds(arl.leak_check(lambda x: right(x) + x[:, :1], ids, segments), "crosses the boundary")
    # It cannot be asked of a sequence alone, so it is an alarm that names the way out.
    fixed = lambda x: right(x) + torch.zeros(1, 10)  # noqa: E731
    finds(arl.leak_check(fixed, ids, segments), "keep=[1]")
    assert arl.leak_check(fixed, ids, segments, keep=[1])
    assert not arl.leak_check(lambda x: fixed(x) + x[:, :1], ids, segments, keep=[1])


def test_rounding_is_allowed_where_shapes_depend_on_the_tokens_and_nowhere_else() -> None:
    ids, segments = row([6, 6], 12)
    table = torch.randn(10, 64, generator=generator(1))
    weight = torch.randn(64, 8, generator=generator(2))

    def fn(x: Tensor, order: bool, leak: float = 0.0) -> Tensor:  # order: sums go by the tokens
        cut = 1 + int(x.sum()) % 60 if order else 30
        h = table[x]
        y = h[..., :cut] @ weight[:cut] + h[..., cut:] @ weight[cut:]
        return y + leak * x[:, :1, None]

    found = arl.leak_check(lambda x: fn(x, True), ids, segments)
    assert found and "what rounding does" in found.why and 0 < found.worst < found.threshold < 1
    assert not arl.leak_check(lambda x: fn(x, True, leak=1.0), ids, segments)
    assert arl.leak_check(lambda x: fn(x, False), ids, segments).threshold == 0
    assert not arl.leak_check(lambda x: fn(x, False, leak=1e-2), ids, segments)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts_that_share_their_products_are_no_leak(experts: str) -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    model = causal_lm("Qwen3Moe", initializer_range=0.15, decoder_sparse_step=1, **sizes, **moe)
    model.config._experts_implementation = experts
    ids = torch.randint(1, 64, (2, 40), generator=generator(0))
    segments = torch.arange(3).repeat_interleave(torch.tensor([13, 20, 7])).expand(2, -1)
    positions = torch.cat([torch.arange(n) for n in (13, 20, 7)]).expand(2, -1)

    def logits(x: Tensor, allowed: Tensor) -> Tensor:
        mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
        return model.eval()(x, position_ids=positions, attention_mask=mask, use_cache=False).logits

    block = arl.block_mask(segments)
    with torch.no_grad():
        passed = arl.leak_check(lambda x: logits(x, block), ids, segments)
        both = arl.leak_check(lambda x: logits(x, block | block.mT), ids, segments)
        causal = torch.ones_like(block).tril()
        crossing = arl.leak_check(lambda x: logits(x, causal), ids, segments)
    assert passed and both and passed.threshold < 1e-3
    finds(crossing, "crosses the boundary")


def test_nan_in_padding_is_nobodys_business() -> None:
    ids, segments = row([4, 4], 9)
    fn = lambda x: x.double().masked_fill(segments < 0, math.nan)  # noqa: E731
    assert arl.leak_check(fn, ids, segments)
    after = lambda x: x.double() / (x[:, :1] == ids[:, :1])  # noqa: E731
    assert arl.leak_check(after, ids, segments).worst == math.inf  # appears after a change only


# Splits


def token_means(counts: list[int], seed: int) -> tuple[list[Tensor], Any]:
    draws = generator(seed)
    batch = [torch.randn(n, 30, generator=draws, dtype=torch.float64) for n in counts]

    def grad(batch: Any, split: list[list[int]], local: bool) -> Tensor:
        total = torch.zeros(30, dtype=torch.float64)
        for rows in split:
            part = torch.cat([batch[i] for i in rows])
            total += part.sum(0) / (len(part) * len(split) if local else sum(counts))
        return total

    return batch, grad


@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=8), st.integers(0, 1000))
def test_local_means_are_found_and_their_weight_is_named(counts: list[int], seed: int) -> None:
    counts = sorted(counts)
    counts[-1] += 5
    halves = [part.tolist() for part in torch.tensor(counts).tensor_split(2)]
    assume(sum(halves[0]) != sum(halves[1]))  # equal halves make the local means right
    batch, grad = token_means(counts, seed)
    assert arl.split_invariance_check(lambda b, s: grad(b, s, False), batch, (1, 2, 3))
    found = arl.split_invariance_check(lambda b, s: grad(b, s, True), batch, (1, 2))
    assert not found and found.index == "splits[1], 2 microbatches"
    assert "divided by its own count" in found.likely and found.trace[0] == 0
    weights = [sum(counts) / (2 * sum(half)) for half in halves]
    worst = max(range(2), key=lambda j: abs(weights[j] - 1))
    words = found.likely.split()
    assert words[:3] == ["microbatch", str(worst), f"({len(halves[worst])}"]
    assert float(words[5]) == pytest.approx(weights[worst], abs=0.006)


@pytest.mark.parametrize("size", [0.0, 1e-8, 1e-5])
def test_a_microbatch_without_a_gradient_is_not_left_out(size: float) -> None:
    values = torch.randn(50, 40, generator=generator(0), dtype=torch.float64)
    values[10:20] *= size  # groups without variance, but for rounding
    split = [list(range(10)), list(range(10, 20)), list(range(20, 50))]
    grad = lambda batch, plan: sum(batch[r].mean(0) for r in plan) / len(plan)  # noqa: E731
    found = arl.split_invariance_check(grad, values, [split])
    finds(found, "divided by its own count")
    assert "left out" not in found.likely


def test_a_microbatch_left_out_is_named() -> None:
    batch, grad = token_means([3, 4, 5, 6], 0)
    first = lambda b, s: grad(b, s[: 1 + (len(s) == 1)], False)  # noqa: E731
    finds(arl.split_invariance_check(first, batch, [2]), "microbatch 1 is left out")


@pytest.mark.parametrize("dtype", DTYPES)
def test_contributions_that_cancel_are_no_alarm(dtype: torch.dtype) -> None:
    values = torch.randn(16, 400, generator=generator(0)).to(dtype)
    values = torch.cat([values, -values])  # advantages +1 and -1 on the same sequences
    values[0] *= 1.05

    def grad(batch: Tensor, split: list[list[int]], local: bool = False) -> Tensor:
        weight = torch.ones(400, dtype=dtype, requires_grad=True)
        for rows in split:
            loss = (batch[rows] * torch.rand(400, generator=generator(1)).to(dtype)) @ weight
            (loss.sum() / (len(rows) * len(split) if local else len(batch))).backward()
        return weight.grad

    splits = [4, 32, [list(range(16)), list(range(16, 32))]]
    found = arl.split_invariance_check(grad, values, splits)
    assert found, found
    uneven = [[[0, 1, 2], list(range(3, 32))]]
    assert not arl.split_invariance_check(lambda b, s: grad(b, s, True), values, uneven)


@pytest.mark.parametrize(
    ("grad", "worst", "says"),
    [
        (lambda b, s: torch.rand(5), None, "dropout"),
        (lambda b, s: torch.tensor([0.0, 0.0]) / (2 - len(s)), math.nan, "divides by 0"),
        (lambda b, s: torch.ones(len(s)), 1, "returned 2 numbers, and 1"),
        (lambda b, s: torch.zeros(3) + len(s) - 1, math.inf, ""),
    ],
)
def test_random_and_broken_gradients_are_diagnosed(grad: Any, worst: Any, says: str) -> None:
    found = arl.split_invariance_check(grad, torch.ones(4, 3), [2])
    finds(found, says)
    assert worst is None or found.worst == worst or math.isnan(found.worst) == math.isnan(worst)


def test_a_trainer_that_refuses_a_part_of_the_batch_gets_its_verdict() -> None:
    def grad(batch: Tensor, split: list[list[int]]) -> Tensor:
        if sum(map(len, split)) < len(batch):
            raise RuntimeError("a batch of 4")
        return torch.arange(5.0) * len(split) + len(split) ** 2

    finds(arl.split_invariance_check(grad, torch.ones(4), [2]), "a batch of 4")
    with pytest.raises(ValueError, match="the gradient is 0 for every split: there is nothing"):
        arl.split_invariance_check(lambda b, s: {"w": torch.zeros(3)}, {"x": torch.ones(4)}, [2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0, 1.0])
def test_a_factor_on_every_gradient_is_seen_by_the_loss_alone(
    factor: float, dtype: torch.dtype
) -> None:
    model = deep(2, 1.0, dtype, seed=0)
    trajs, kept = sampled(model, exact=False), [p.detach().clone() for p in model.parameters()]

    def scaled(batch: Any, split: list[list[int]]) -> list[Tensor]:
        return [factor * g for g in gradient(model, batch, split)]

    def loss(batch: Any) -> Tensor:
        signed = [(-1) ** i * x.sum() for i, x in enumerate(ways(model)[0](batch))]
        return sum(signed) / sum(len(traj.ids) - 1 for traj in batch)

    blind = arl.split_invariance_check(scaled, trajs, [2])
    assert blind and "not asked: a factor on every gradient" in blind.index
    seen = {"loss_fn": loss, "params": model.parameters()}
    found = arl.split_invariance_check(scaled, trajs, [2], **seen)
    assert bool(found) == (factor == 1.0), found
    assert found or f"is about {factor:g} times" in found.likely
    assert all(torch.equal(p, k) for p, k in zip(model.parameters(), kept, strict=True))


def test_a_loss_that_is_too_rough_for_a_slope_is_said_to_be() -> None:
    weight = torch.ones(4, dtype=torch.float64)
    rough = lambda _: torch.randn((), generator=generator(int(1e9 * weight.sum()) % 997))  # noqa: E731
    grad = lambda b, s: torch.ones(4)  # noqa: E731
    found = arl.split_invariance_check(grad, [1, 2], [2], loss_fn=rough, params=[weight])
    assert found and "too rough" in found.index


# Ratios


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(0, 3), st.integers(0, 10))
def test_one_wrong_token_is_found_where_it_is(seed: int, i: int, t: int) -> None:
    trajs, logits = random_episodes(seed)

    def logp(ts: list[arl.Trajectory]) -> list[Tensor]:
        out = scored(logits.float(), ts)
        out[i][t] -= 1e-3
        return out

    found = arl.step_zero_ratio_check(logp, trajs)
    assert not found and found.index.startswith(f"trajs[{i}], entry {t}, ")
    assert 0.5e-3 < found.worst < 2e-3


def test_a_difference_that_every_token_may_have_is_too_much_on_average() -> None:
    trajs, logits = random_episodes(1, B=64)

    def logp(ts: list[arl.Trajectory], size: float) -> list[Tensor]:
        return [x - size * (1 - x.exp()) for x in scored(logits.bfloat16().float(), ts)]

    found = arl.step_zero_ratio_check(lambda ts: logp(ts, 0.07), trajs)
    assert not found and found.index == "the root mean square over 704"
    assert arl.step_zero_ratio_check(lambda ts: logp(ts, 0.01), trajs)


def test_patterns_of_ratios() -> None:
    trajs, logits = random_episodes(3, B=8)
    noise = torch.randn(logits.shape, generator=generator(1))
    half = logits + noise * (torch.arange(8) > 3)[:, None, None]
    says = {
        "a constant of -0.1": lambda ts: [x - 0.1 for x in scored(logits, ts)],
        "a temperature on one side": lambda ts: scored(logits / 2, ts),
        "off by one": lambda ts: [F.pad(x[:-1], (1, 0)) for x in scored(logits, ts)],
        "other weights": lambda ts: scored(logits + noise, ts),
        "4 of 8 trajectories agree": lambda ts: scored(half, ts),
        "two calls differ": lambda ts: scored(logits + 0.1 * torch.randn(logits.shape), ts),
        "stale policy": lambda ts: scored(logits + 1e-3 * noise, ts),
        "only if it is": lambda ts: [-x for x in scored(logits, ts)],
        "top-p": lambda ts: [x.exp() for x in scored(logits, ts)],
        "a statistic of the batch": lambda ts: [
            x - 1e-6 * ts[3].ids[-2] for x in scored(logits, ts)
        ],
    }
    for text, fn in says.items():
        finds(arl.step_zero_ratio_check(fn, trajs), text)


@pytest.mark.parametrize(("by", "side"), [(-1, "before"), (1, "after")])
def test_the_side_of_a_shifted_mask(by: int, side: str) -> None:
    trajs, logits = random_episodes(3, B=8)
    mask = torch.zeros(11, dtype=torch.bool)
    mask[2:5] = mask[7:10] = True
    kept = [replace(traj, sample_logp=traj.sample_logp * mask) for traj in trajs]
    for shift, says in ((by, True), (-3, False)):
        moved = [replace(traj, action_mask=audit._shift(mask, shift)) for traj in kept]
        found = arl.step_zero_ratio_check(lambda ts: scored(logits, ts), moved)
        text = f"off by one: the sampler's tokens are {side} it"
        assert not found and (text in found.likely) == says


def test_sampled_tokens_are_all_trained_and_no_others() -> None:
    trajs, logits = random_episodes(4)
    late, places = torch.arange(11) > 3, torch.arange(11)
    trajs = [replace(t, action_mask=late, sample_logp=t.sample_logp * late) for t in trajs]

    def found(mask: Any) -> arl.CheckResult:
        masked = [replace(t, action_mask=mask(i)) for i, t in enumerate(trajs)]
        return arl.step_zero_ratio_check(lambda ts: scored(logits, ts), masked)

    assert found(lambda i: late)
    short = found(lambda i: late & (places < 10))
    finds(short, "leaves out sampled tokens")
    assert (short.worst, short.index) == (4, "trajs[0], entry 10")
    finds(found(lambda i: places >= 0), "did not sample")
    assert found(lambda i: late & (i != 1))  # left out as a whole: a choice
    hidden = lambda ts: torch.stack(scored(logits, ts)).masked_fill(~late, math.nan)  # noqa: E731
    assert arl.step_zero_ratio_check(hidden, trajs)  # masked entries are not read


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda ts: torch.zeros(4, 3), "[4, 11] or a list of [T - 1], got [4, 3]"),
        (lambda ts: [t.sample_logp for t in ts[:2]], "got 2 rows"),
        (lambda ts: [t.sample_logp[:-1] for t in ts], "got [10] for trajs[0] of 12 tokens"),
        (lambda ts: [t.sample_logp * math.nan for t in ts], "not finite"),
        (lambda ts: None, "got NoneType"),
        (lambda ts: [t.sample_logp.tolist() for t in ts], "got list"),
        (lambda ts: (t.sample_logp for t in ts), "got generator"),
    ],
)
def test_broken_log_probs_are_diagnosed(fn: Any, says: str) -> None:
    found = arl.step_zero_ratio_check(fn, random_episodes(0)[0])
    assert not found and math.isnan(found.worst) and says in found.likely


def test_equal_draws_are_judged_by_their_probability() -> None:
    trajs, _ = random_episodes(5, B=8)
    exact = lambda ts: [t.sample_logp for t in ts]  # noqa: E731
    assert arl.step_zero_ratio_check(exact, trajs, group_size=4)
    twice = [*trajs[:7], trajs[2]]
    assert "trajs[2] and trajs[7]" in arl.step_zero_ratio_check(exact, twice).index
    sure = [replace(t, sample_logp=1e-3 * t.sample_logp) for t in twice]
    assert arl.step_zero_ratio_check(exact, sure)  # a sure policy repeats itself


def test_trajectories_agree_within_the_limit_or_not_at_all() -> None:
    trajs, logits = random_episodes(0)

    def off(ts: list[arl.Trajectory]) -> list[Tensor]:  # half by little, half by much
        return [x + (1e-3, 1.0)[i % 2] * (-1) ** torch.arange(len(x))
                for i, x in enumerate(scored(logits, ts))]  # fmt: skip

    finds(arl.step_zero_ratio_check(off, trajs), "no trajectory agrees")


# Filters


# At the door

IDS, SEGMENTS = row([4, 4], 8)
TRAJS, _ = random_episodes(0)
UNSAMPLED = [replace(t, action_mask=0 * t.action_mask) for t in TRAJS]
WEIGHTED = [replace(t, action_mask=0.5 * t.action_mask) for t in TRAJS]
LEAK, SPLIT, RATIO = (
    partial(arl.leak_check, lambda x: x.double()),
    partial(arl.split_invariance_check, lambda b, s: torch.ones(2)),
    partial(arl.step_zero_ratio_check, lambda ts: [t.sample_logp for t in ts]),
)


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: LEAK(IDS, SEGMENTS[:, :5]), ValueError, r"segment_ids \[1, 5\]"),
        (lambda: LEAK(IDS.float(), SEGMENTS), TypeError, "ids"),
        (lambda: LEAK(IDS.tolist(), SEGMENTS), TypeError, "ids must be a tensor, got list"),
        (lambda: LEAK(IDS, SEGMENTS.numpy()), TypeError, "segment_ids must be a tensor"),
        (lambda: LEAK(IDS, SEGMENTS * 0), ValueError, "one segment"),
        (lambda: LEAK(IDS * 0, SEGMENTS), ValueError, "no two tokens"),
        (lambda: LEAK(IDS, SEGMENTS, loss_mask=IDS), ValueError, "loss_mask"),
        (lambda: LEAK(IDS, SEGMENTS, loss_mask=torch.full((1, 7), 0.5)), ValueError, "loss_mask"),
        (
            lambda: arl.leak_check(
                lambda x: x[:, 1:].double(), torch.tensor([[3, 5]]), torch.tensor([[0, 1]])
            ),
            ValueError,
            "each has one token",
        ),
        (lambda: SPLIT(torch.ones(4), [5]), ValueError, r"splits\[0\]\[0\] = 5"),
        (lambda: SPLIT(torch.ones(4), [True]), TypeError, r"splits\[0\]"),
        (lambda: SPLIT(torch.ones(4), []), ValueError, "splits is empty"),
        (lambda: SPLIT(torch.ones(4), [2], reference=5), ValueError, "reference"),
        (lambda: SPLIT(torch.ones(4), [2, [[0, 1], [1, 2, 3]]]), ValueError, "sequence 1 2 times"),
        (lambda: SPLIT(torch.ones(4), [[[0, 1, 2]]]), ValueError, "sequence 3 0 times"),
        (lambda: SPLIT(torch.ones(4), [2], params=[]), ValueError, "loss_fn and params"),
        (
            lambda: SPLIT(torch.ones(4), [2], loss_fn=len, params=[torch.ones(3)]),
            ValueError,
            "params hold 3 numbers, the gradient 2",
        ),
        (lambda: arl.split_invariance_check(lambda b, s: None, [1], [1]), TypeError, "NoneType"),
        (lambda: RATIO([]), ValueError, "empty"),
        (lambda: RATIO(UNSAMPLED), ValueError, "0 everywhere"),
        (lambda: RATIO(WEIGHTED), ValueError, "action_mask"),
        (lambda: RATIO(TRAJS, group_size=3), ValueError, "group_size = 3"),
        (lambda: RATIO(TRAJS, group_size=1), ValueError, "group_size = 1"),
    ],
)
def test_bad_input_is_refused_by_name_and_index(call: Any, kind: Any, says: str) -> None:
    with pytest.raises(kind, match=says):
        call()
