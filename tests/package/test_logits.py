"""The fused output heads against autograd, and the memory ledger against known cases."""

import math
import subprocess
import sys
import threading
from functools import partial

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import agentrl as arl
import agentrl.logits as module
from agentrl import checkpointed_log_probs, fused_log_probs, fused_policy_loss, peak_memory
from agentrl.grpo import LOSS_AGG_MODES
from benchmarks.models import causal_lm

GB = 1e9
V = 151_936
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FUSED = [fused_log_probs, fused_policy_loss]
HEADS = [*FUSED, checkpointed_log_probs]
each = pytest.mark.parametrize


def make(shape, vocab, features, seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, features, generator=generator, dtype=F64)
    weight = torch.randn(vocab, features, generator=generator, dtype=F64)
    ids = torch.randint(vocab, shape, generator=generator)
    upstream = torch.randn(shape, generator=generator, dtype=F64)
    return hidden.to(dtype), weight.to(dtype), ids, upstream


def plain(hidden, weight, ids, temperature=1.0, bias=None, soft_cap=None):
    """Log-probs and entropies, with autograd and nothing clever."""
    logits = nn.functional.linear(hidden, weight, bias)
    logits = soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(-1, ids[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def full(*args, **kwargs):
    return plain(*args, **kwargs)[0]


def weighted(head, ids, upstream, **kwargs):
    """The sum of upstream * log p by a head, as a function of states, weight and bias."""

    def total(hidden, weight, bias=None):
        given = kwargs if bias is None else kwargs | {"bias": bias}
        if head is not fused_policy_loss:
            return (head(hidden, weight, ids, **given) * upstream).sum()
        rows = ids.reshape(-1, ids.shape[-1])
        hidden, advantages = hidden.reshape(*rows.shape, -1), -upstream.reshape(rows.shape)
        return head(hidden, weight, rows, advantages, norm_const=1.0, **given)

    return total


def derive(fn, *leaves):
    """Value and all gradients of a scalar function."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    value = fn(*leaves)
    value.backward()
    return value.detach(), *(leaf.grad for leaf in leaves)


def assert_same(got, expected, tolerance=1e-12):
    for a, b in zip(got, expected, strict=True):
        scale = max(1.0, b.abs().max().item() if b.numel() else 1.0)
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


def off(x, y):
    return (x.double() - y).norm() / y.norm()


def gradient_errors(head, ids, upstream, *leaves, **kwargs):
    """Of each gradient, against float64 on the same numbers."""
    sizes = {"chunk_size": kwargs.pop("chunk_size")} if "chunk_size" in kwargs else {}
    got = derive(weighted(head, ids, upstream, **kwargs, **sizes), *leaves)[1:]
    exact = derive(weighted(full, ids, upstream, **kwargs), *(x.double() for x in leaves))[1:]
    assert [x.dtype for x in got] == [x.dtype for x in leaves]
    return [off(a, b).item() for a, b in zip(got, exact, strict=True)]


def count(fn, *leaves):
    """Floating-point operations of a forward and backward pass."""
    with FlopCounterMode(display=False) as counter:
        derive(fn, *leaves)
    return counter.get_total_flops()


# Log-probs and entropy ----------------------------------------------------------------------------


@each("entropy", [False, True])
@each(
    "kwargs",
    [
        {},
        {"chunk_size": 3, "tile_bytes": 3 * 4 * 8},
        {"temperature": 0.7, "chunk_size": 4, "tile_bytes": 200, "soft_cap": 2.0},
        {"temperature": 1.7, "mask": True, "chunk_size": 2, "tile_bytes": 100},
        {"keep_bytes": 5 * 13 * 8, "chunk_size": 2, "tile_bytes": 100, "soft_cap": 1.5},
    ],
)
def test_gradcheck(kwargs, entropy):
    hidden, weight, ids, upstream = make((2, 4), 13, 4)
    kwargs = kwargs | ({"mask": upstream > 0} if "mask" in kwargs else {})
    leaves = [x.requires_grad_() for x in (hidden, weight, torch.linspace(-1, 1, 13, dtype=F64))]
    fused = lambda h, w, b: fused_log_probs(h, w, ids, bias=b, entropy=entropy, **kwargs)  # noqa: E731
    assert torch.autograd.gradcheck(fused, leaves)
    again = lambda h, w, b: checkpointed_log_probs(h, w, ids, 3, bias=b, soft_cap=2)  # noqa: E731
    assert "soft_cap" not in kwargs or torch.autograd.gradcheck(again, leaves)


@settings(max_examples=80)
@given(
    tokens=st.integers(0, 9) | st.sampled_from([63, 64, 65]),
    vocab=st.integers(1, 40),
    features=st.integers(1, 6),
    sizes=st.fixed_dictionaries({
        "chunk_size": st.none() | st.integers(1, 12) | st.just(64),
        "tile_bytes": st.none() | st.integers(1, 3000),
        "keep_bytes": st.integers(0, 4000),
    }),
    kwargs=st.fixed_dictionaries(
        {"temperature": st.floats(0.2, 3.0), "soft_cap": st.none() | st.floats(0.5, 30)}
    ),
    choices=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_equals_autograd(tokens, vocab, features, sizes, kwargs, choices, seed):
    masked, entropy, biased = choices
    hidden, weight, ids, upstream = make((tokens,), vocab, features, seed)
    bias = [make((1,), 1, vocab, seed)[0][0]] if biased else []
    mask = upstream > 0 if masked else None
    upstream = torch.where(upstream.abs() < 0.4, 0.0, upstream)  # some tokens have no gradient
    kept = torch.ones(tokens) if mask is None else mask

    def reference(h, w, b=None):
        logp, spread = plain(h, w, ids, bias=b, **kwargs)
        return ((logp + (0.3 * spread if entropy else 0)) * upstream * kept).sum()

    def fused(h, w, b=None):
        out = fused_log_probs(h, w, ids, bias=b, mask=mask, entropy=entropy, **kwargs, **sizes)
        return ((out[0] + 0.3 * out[1] if entropy else out) * upstream).sum()

    assert fused_log_probs(hidden, weight, ids).shape == ids.shape
    assert_same(derive(fused, hidden, weight, *bias), derive(reference, hidden, weight, *bias))


@each("strength", [0, 8, 16, 24])
@each("head", FUSED)
@each("dtype", [F32, BF16])
def test_gradients_of_likely_tokens(dtype, head, strength):
    """Where p is near 1, p - 1 and all other probabilities cancel: they must not share a sum."""
    hidden, weight, ids, upstream = make((200,), 6000, 64)
    toward = weight[ids] / weight[ids].norm(dim=1, keepdim=True) ** 2
    hidden, weight = (0.25 * hidden + strength * toward).to(dtype), weight.to(dtype)
    given = ids, upstream.float(), hidden, weight
    usual = gradient_errors(module._head_log_probs, *given)
    for ours, limit in zip(gradient_errors(head, *given, chunk_size=64), usual, strict=True):
        assert ours <= (limit if dtype == F32 else max(0.9 * limit, 3e-3))
    exact = full(hidden.double(), weight.double(), ids)
    # Both share the rounding of the logits themselves; 5% is how far that scatters.
    limit = 1.05 * off(module._head_log_probs(hidden, weight, ids), exact)
    assert off(fused_log_probs(hidden, weight, ids), exact) <= limit


@each(
    ("vocab", "features", "scale", "chunk_size"),
    # The sum of e^(z - max) is beyond the range of float16 in the last two.
    [
        (3000, 256, 0.125, 512),
        (3000, 256, 0.125, 64),
        (80_000, 8, 0.05, 512),
        (80_000, 8, 0.05, 40),
    ],
)
@each("head", FUSED)
def test_half_precision_is_summed_in_float32(head, vocab, features, scale, chunk_size):
    hidden, weight, ids, upstream = make((2, 45), vocab, features, dtype=BF16)
    leaves, bias = (hidden, scale * weight), torch.linspace(-3, 3, vocab).bfloat16()
    given, size = (head, ids, upstream.float()), {"chunk_size": chunk_size}
    assert max(gradient_errors(*given, *leaves, **size)) < 4e-3
    assert max(gradient_errors(*given, *leaves, bias, soft_cap=15.0, **size)) < 4e-3
    exact = plain(*(x.double() for x in leaves), ids)
    if head is fused_log_probs:
        assert max(gradient_errors(*given, *(x.half() for x in leaves), **size)) < 4e-3
        got = fused_log_probs(*leaves, ids, entropy=True, **size)
    else:
        got = fused_policy_loss(*leaves, ids, upstream, return_logp=True, **size)[1:]
    for a, b in zip(got, exact, strict=False):
        assert a.dtype == F32 and (a - b).abs().max() < 1e-5
    assert vocab > 3000 or (full(*leaves, ids) - exact[0]).abs().max() > 1e-3  # bf16 logits


@each("head", FUSED)
@each("spread", [1.0, 3.0])
def test_rows_of_unlikely_tokens_in_bf16(head, spread):
    """The rows of chosen tokens outweigh all others in a norm, and Adam weighs rows alike."""
    hidden, weight, ids, upstream = make((2, 120), 6000, 64)
    leaves = hidden.bfloat16(), (spread / 8 * weight).bfloat16()
    ids = ids // 2  # nobody chooses the second half
    exact = derive(weighted(full, ids, upstream), *(x.double() for x in leaves))[2]
    got = derive(weighted(head, ids, upstream.float(), chunk_size=100), *leaves)[2]
    errors = (got - exact).norm(dim=1) / exact.norm(dim=1)
    assert errors.median() < 3e-3 and errors.max() < 8e-3


def test_a_certain_token_and_a_vanishing_gradient_in_bf16():
    hidden, weight, ids, _ = make((3,), 300, 16, dtype=BF16)
    hidden[0] = 100 * weight[ids[0]]  # p is 1 to float32
    for upstream in (torch.tensor([1.0, 0.0, 1e38]), torch.tensor([1e-40, 1e-38, 1e-45])):
        _, grad_h, grad_w = derive(weighted(fused_log_probs, ids, upstream), hidden, weight)
        assert grad_h.isfinite().all() and grad_w.isfinite().all()
        assert grad_h[0].abs().max() < 1e-6 and grad_h[1].abs().max() < 1e-30


def test_the_precision_of_the_process_is_restored(monkeypatch):
    matmul, started, ended = torch.backends.mkldnn.matmul, threading.Event(), threading.Event()
    before, loss = matmul.fp32_precision, arl.reinforce_loss
    hidden, weight, ids, _ = make((1, 8), 30, 4, dtype=BF16)
    fused_log_probs(hidden.requires_grad_(), weight, ids).sum().backward()
    assert matmul.fp32_precision == before

    def fail(*_):
        assert matmul.fp32_precision == "bf16"
        raise RuntimeError("inside")

    def wait(*args):
        started.set()
        ended.wait(30)
        return loss(*args)

    run = partial(fused_policy_loss, hidden.detach(), weight, ids, torch.ones(1))
    monkeypatch.setattr(module, "reinforce_loss", fail)
    with pytest.raises(RuntimeError, match="inside"):
        run()
    assert matmul.fp32_precision == before
    monkeypatch.setattr(module, "reinforce_loss", wait)
    slow = threading.Thread(target=run)
    slow.start()
    assert started.wait(30)
    fused_log_probs(hidden, weight, ids)  # begins after the other head, and ends before it
    ended.set()
    slow.join()
    assert matmul.fp32_precision == before


def test_masked_tokens_may_hold_anything_and_cost_nothing():
    hidden, weight, ids, upstream = make((2, 40), 60, 8)
    mask = torch.arange(40).expand(2, 40) < 10
    everything = count(weighted(fused_log_probs, ids, upstream), hidden, weight)
    ids = torch.where(mask, ids, -100)
    hidden = torch.where(mask[..., None], hidden, torch.nan)
    out = fused_log_probs(hidden, weight, ids, mask=mask)
    assert (out[~mask] == 0).all()
    assert_same((out[mask],), (full(hidden[mask], weight, ids[mask]),))
    masked = weighted(fused_log_probs, ids, upstream, mask=mask)
    value, grad_h, grad_w = derive(masked, hidden, weight)
    assert (grad_h[~mask] == 0).all() and grad_w.isfinite().all() and value.isfinite()
    assert 4 * count(masked, hidden, weight) == everything


def test_half_of_the_outputs_or_inputs():
    hidden, weight, ids, upstream = make((12,), 30, 6)
    spread = lambda h, w: (fused_log_probs(h, w, ids, entropy=True)[1] * upstream).sum()  # noqa: E731
    usual = lambda h, w: (plain(h, w, ids)[1] * upstream).sum()  # noqa: E731
    assert_same(derive(spread, hidden, weight), derive(usual, hidden, weight))
    given = hidden, weight, torch.zeros(30, dtype=F64)
    expected = derive(weighted(full, ids, upstream), *given)[1:]
    for trained in ([0], [1], [2], [0, 2]):
        for head in FUSED:
            leaves = [x.clone().requires_grad_(i in trained) for i, x in enumerate(given)]
            weighted(head, ids, upstream, chunk_size=5, tile_bytes=5 * 7 * 8)(*leaves).backward()
            assert [i for i in range(3) if leaves[i].grad is not None] == trained
            assert_same([leaves[i].grad for i in trained], [expected[i] for i in trained])
    with torch.no_grad():
        assert not fused_log_probs(hidden.requires_grad_(), weight, ids).requires_grad


def test_strided_inputs_and_a_tied_weight():
    hidden, weight, ids, upstream = make((5, 6), 20, 8)
    strided = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.stack([weight, weight], 2)[..., 0]
    assert not strided.is_contiguous() and not wide.is_contiguous()
    fused = weighted(fused_log_probs, ids.T.contiguous().T, upstream)
    expected = derive(weighted(full, ids, upstream), hidden, weight)
    assert_same(derive(fused, strided, wide), expected)
    heads = fused_log_probs, full
    assert_same(*(derive(lambda w, f=f: f(w[ids].tanh(), w, ids).sum(), weight) for f in heads))


@each("dtype", [torch.uint8, torch.int16, torch.int32])
def test_narrow_ids_and_mixed_dtypes(dtype):
    """The vocabulary does not fit the dtype of the ids, which are inside it."""
    hidden, weight, ids, upstream = make((2, 6), 70_000, 3, dtype=F32)
    ids, low, narrow = ids % 120, hidden.bfloat16(), (ids % 120).to(dtype)
    got = derive(weighted(fused_log_probs, narrow, upstream), low, weight)
    expected = derive(weighted(full, ids, upstream), low.float(), weight)
    assert got[1].dtype == BF16 and got[2].dtype == F32
    assert_same((got[0], got[2]), (expected[0], expected[2]), 1e-5)
    logits = hidden @ weight.T
    for head, *args in ((arl.selected_log_probs, logits), (checkpointed_log_probs, hidden, weight)):
        assert torch.equal(head(*args, narrow), head(*args, ids))


def test_autocast_rounds_the_factors_and_not_the_logits():
    hidden, weight, ids, upstream = make((40,), 300, 64, dtype=F32)
    leaves = hidden, 0.25 * weight
    with torch.autocast("cpu", dtype=BF16):
        got = derive(weighted(fused_log_probs, ids, upstream), *leaves)
        logp = fused_log_probs(*leaves, ids)
    rounded = [x.bfloat16().double() for x in leaves]
    assert (logp - full(*rounded, ids)).abs().max() < 1e-5
    for a, b in zip(got[1:], derive(weighted(full, ids, upstream), *rounded)[1:], strict=True):
        assert a.dtype == F32 and off(a, b) < 4e-3


# Logits that are kept -----------------------------------------------------------------------------


@each(("dtype", "tolerance"), [(F64, 1e-12), (F32, 1e-5), (BF16, 1e-2)])
def test_kept_logits_change_neither_values_nor_gradients(dtype, tolerance):
    hidden, weight, ids, upstream = make((2, 30), 50, 8, dtype=dtype)
    upstream[0, ::3] = 0
    row = 50 * (8 if dtype == F64 else 4)
    kwargs = {"chunk_size": 7, "tile_bytes": 800, "temperature": 0.8, "soft_cap": 9.0}
    expected = derive(weighted(fused_log_probs, ids, upstream, **kwargs), hidden, weight)
    for tokens in (1, 7, 20, 59, 60, 1000):
        fused = weighted(fused_log_probs, ids, upstream, **kwargs, keep_bytes=tokens * row)
        assert_same(derive(fused, hidden, weight), expected, tolerance)


@each(("head", "live", "kwargs", "products"), [
    (full, 1, {}, 3), (checkpointed_log_probs, 1, {}, 4), (fused_policy_loss, 1, {}, 3),
    (fused_policy_loss, 1, {"chunk_size": 7}, 3), (fused_log_probs, 1, {}, 4),
    (fused_log_probs, 1, {"keep_bytes": 10 * 60 * 8}, 3.75),
    (fused_log_probs, 1, {"keep_bytes": 40 * 60 * 8}, 3), (fused_log_probs, 4, {}, 1 + 3 / 4),
    (fused_log_probs, 4, {"keep_bytes": 40 * 60 * 8}, 1 + 2 / 4),
])  # fmt: skip
def test_products(head, live, kwargs, products):
    """Kept logits save a product, and tokens without a gradient are left out going backward."""
    hidden, weight, ids, _ = make((2, 20), 60, 8)
    loss = weighted(head, ids, (torch.arange(40) % live == 0).view(2, 20).double(), **kwargs)
    assert count(loss, hidden, weight) == products * 2 * 40 * 60 * 8
    if head is fused_policy_loss:
        assert count(lambda h: loss(h, weight), hidden) == 2 * 2 * 40 * 60 * 8


def test_kept_logits_take_the_memory_they_may():
    def peak(keep):
        return head_gb(partial(fused_log_probs, keep_bytes=keep), 4096)

    without, row = peak(0), 4 * V / GB
    assert peak(10**9) - without == pytest.approx(10**9 // (4 * V) * row, rel=0.01)
    assert peak(10**10) - without == pytest.approx(4096 * row, rel=0.01)
    with torch.no_grad():
        assert peak(10**9) < 0.1


# Heads with more than a weight --------------------------------------------------------------------


@each("soft_cap", [None, 30.0, 1.0])
@each("biased", [False, True])
@each("head", HEADS)
def test_bias_and_soft_cap(head, biased, soft_cap):
    hidden, weight, ids, upstream = make((2, 9), 40, 6)
    leaves = [5 * hidden, weight] + [torch.linspace(-9, 9, 40, dtype=F64)] * biased
    expected = derive(weighted(full, ids, upstream, soft_cap=soft_cap), *leaves)
    for size in (1, 4, 100):
        fused = weighted(head, ids, upstream, soft_cap=soft_cap, chunk_size=size)
        assert_same(derive(fused, *leaves), expected)
    left_out = weighted(full, ids, upstream)(*leaves[:2])
    assert (soft_cap is None and not biased) or (left_out - expected[0]).abs() > 0.1


class Adapted(nn.Linear):
    """A low-rank adapter whose B is 0 at first: its weight alone gives the right log-probs."""

    def __init__(self):
        super().__init__(6, 40, bias=False)
        self.A, self.B = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(40, 2))

    def forward(self, hidden):
        return super().forward(hidden) + hidden @ self.A.T @ self.B.T


def changed(change):
    head = nn.Linear(6, 40)
    change(head)
    return head


@each(
    ("given", "name"),
    [
        (Adapted(), r"\.Adapted"),
        (changed(lambda head: setattr(head, "forward", lambda x: x)), "Linear"),
        (changed(lambda head: head.register_forward_hook(print)), "Linear"),
        (changed(lambda head: head.register_forward_pre_hook(print)), "Linear"),
        (nn.Sequential(nn.Linear(6, 40)), r"container\.Sequential"),
        (nn.Embedding(40, 6), r"sparse\.Embedding"),
    ],
)
@each("head", HEADS)
def test_a_module_that_may_do_more_is_refused_by_its_class(head, given, name):
    hidden, _, ids, upstream = make((2, 9), 40, 6, dtype=F32)
    with pytest.raises(TypeError, match=f"weight is a .*{name}"):
        weighted(head, ids, upstream)(hidden, given)


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.A, self.B = (nn.Parameter(make(size, 1, 1)[3]) for size in ((2, 6), (40, 2)))

    def forward(self, base):
        return base + self.B @ self.A


@each("head", HEADS)
def test_a_linear_module_brings_its_bias_and_its_parametrization(head):
    hidden, _, ids, upstream = make((2, 9), 40, 6)
    linear = nn.Linear(6, 40).double()

    def gradients(head, *given):
        linear.zero_grad()
        weighted(head, ids, upstream)(hidden, *given).backward()
        return [p.grad.clone() for p in linear.parameters()]

    for parametrized in (False, True):
        if parametrized:
            nn.utils.parametrize.register_parametrization(linear, "weight", LowRank())
        expected = gradients(full, linear.weight, linear.bias)
        assert_same(gradients(head, linear), expected)
        assert_same(gradients(head, linear.weight, linear.bias), expected)
    with pytest.raises(TypeError, match="Linear"):
        gradients(head, linear, linear.bias)  # whose bias is it?


@each("head", HEADS)
def test_a_sharded_weight_is_refused(head):
    hidden, weight, ids, upstream = make((1, 2), 8, 3)
    weight.full_tensor = None  # as a DTensor has it
    with pytest.raises(TypeError, match="weight is sharded: call `unshard`"):
        weighted(head, ids, upstream)(hidden, weight)


# Errors at the door -------------------------------------------------------------------------------


@each("head", HEADS)
@each("bad", [-1, 11, 2**40])
def test_an_id_outside_the_vocabulary_is_named(head, bad):
    hidden, weight, ids, upstream = make((2, 5), 11, 3)
    ids[1, 3] = bad
    with pytest.raises(ValueError, match=rf"ids\[1, 3\] = {bad} "):
        weighted(head, ids, upstream)(hidden, weight)
    if head is fused_log_probs:  # the position is the caller's under a mask
        mask = torch.tensor([[0] * 5, [1] * 5])
        ids[0, 0] = 99
        with pytest.raises(ValueError, match=rf"ids\[1, 3\] = {bad} "):
            head(hidden, weight, ids, mask=mask)


ONES, ZEROS = torch.ones(2, 5), numpy.zeros((2, 5))
WRONG = {  # what each head refuses, by the name of the argument
    checkpointed_log_probs: {
        "hidden": (torch.zeros(2, 5, 3).long(), [[[0.0] * 3] * 5] * 2),
        "weight": (torch.zeros(11), torch.zeros(11, 3).int(), numpy.zeros((11, 3)), None),
        "ids": (ONES, ONES > 0, ZEROS.astype(int), [[0] * 5] * 2, torch.zeros(2, 4).long(), None),
        "bias": (torch.zeros(10), [0.0] * 11),
        "soft_cap": (0.0, -30, math.nan, "30"),
        "chunk_size": (0, 2.5, True),
    },
    fused_log_probs: {
        "mask": (torch.ones(5), 0.5 * ONES, ONES.log() - math.inf, ZEROS, [[1] * 5] * 2),
        "temperature": (0.0, math.nan, math.inf, None),
        "tile_bytes": (0,),
        "keep_bytes": (-1, 1e9),
    },
    fused_policy_loss: {
        "advantages": (torch.ones(5), torch.ones(()), [1.0, 1.0]),
        "old_logp": (torch.ones(2, 4), ZEROS),
        "ref_logp": (torch.ones(5), [[0.0] * 5] * 2),
        "clip_low": (-0.1, math.nan),
        "clip_high": (-0.1, math.nan),
        "loss_agg_mode": ("mean",),
        "norm_const": (0, torch.tensor(-1.0)),
        "kl_coef": (math.nan, "1"),
        "kind": ("k4",),
    },
}


@each(("head", "name", "bad"), [
    (head, name, bad)
    for head in HEADS
    for names in (WRONG if head is fused_policy_loss else [checkpointed_log_probs, head])
    for name, values in WRONG[names].items()
    for bad in values
    if (head, name) != (fused_policy_loss, "keep_bytes")
])  # fmt: skip
def test_wrong_arguments_are_named(head, name, bad):
    hidden, weight, ids, _ = make((2, 5), 11, 3)
    given = {"hidden": hidden, "weight": weight, "ids": ids}
    if head is fused_policy_loss:
        given |= {"advantages": torch.ones(2), "old_logp": -ONES, "ref_logp": -ONES}
    with pytest.raises((TypeError, ValueError), match=name):
        head(**(given | {"kl_kind" if name == "kind" else name: bad}))
    if head is fused_policy_loss:
        for change in ({"loss_agg_mode": "constant"}, {"kl_coef": 0.1, "ref_logp": None}):
            with pytest.raises(ValueError, match=r"norm_const|kl_coef = 0\.1 needs ref_logp"):
                head(**(given | change))


# The policy loss ----------------------------------------------------------------------------------


def policy_case(seed=0, shape=(4, 9), vocab=37):
    hidden, weight, ids, noise = make(shape, vocab, 6, seed)
    mask = noise > -0.3
    mask[1:2] = False  # a row without a policy token
    logp = full(hidden, weight, ids)
    old, ref = (logp + 0.4 * make(shape, 1, 1, seed + i)[3] for i in (1, 2))
    advantages = make(shape[:1], 1, 1, seed + 3)[3]
    return hidden, weight, ids, mask, old, ref, advantages


def fused_policy(ids, *args, **kwargs):
    return lambda h, w: fused_policy_loss(h, w, ids, *args, **kwargs)


def unfused_policy(
    ids, advantages, mask, loss_agg_mode="token_mean", norm_const=None, *, temperature=1.0,
    old_logp=None, ref_logp=None, kl_coef=0.0, kl_kind="k3", **clip,
):  # fmt: skip
    """The same loss from chapter 4's functions."""
    tail = mask, loss_agg_mode, norm_const

    def loss_fn(h, w):
        logp = full(h, w, ids, temperature=temperature)
        if old_logp is None:
            loss = arl.reinforce_loss(logp, advantages, *tail)
        else:
            loss = arl.clipped_surrogate_loss(logp, old_logp, advantages, *tail, **clip)
        if kl_coef:
            loss += kl_coef * arl.aggregate_loss(arl.kl_estimate(logp, ref_logp, kl_kind), *tail)
        return loss

    return loss_fn


@settings(max_examples=200, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 8)),
    vocab=st.integers(1, 30),
    sizes=st.fixed_dictionaries(
        {"chunk_size": st.integers(1, 12), "tile_bytes": st.none() | st.integers(1, 2000)}
    ),
    mode=st.sampled_from(LOSS_AGG_MODES),
    norm=st.sampled_from([None, 50]),
    kl=st.sampled_from([None, "k1", "k2", "k3"]),
    clip=st.sampled_from(
        [None, (math.inf, math.inf), (numpy.float32(0.2), torch.tensor(0.2)), (0.1, 0.4)]
    ),
    per_token=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_policy_loss_equals_the_unfused_one(
    shape, vocab, sizes, mode, norm, kl, clip, per_token, seed
):
    hidden, weight, ids, mask, old, ref, advantages = policy_case(seed, shape, vocab)
    given = ids, old.flip(0) - 1 if per_token else advantages, mask
    kwargs = {"loss_agg_mode": mode, "norm_const": norm, "temperature": 0.8}
    if mode == "constant":
        kwargs["norm_const"] = norm or 7
    if clip:
        kwargs |= {"old_logp": old, "clip_low": clip[0], "clip_high": clip[1]}
    if kl:
        kwargs |= {"ref_logp": ref, "kl_coef": 0.3, "kl_kind": kl}
    fused, unfused = fused_policy(*given, **kwargs, **sizes), unfused_policy(*given, **kwargs)
    assert_same(derive(fused, hidden, weight), derive(unfused, hidden, weight))


def test_the_clip_is_active_on_both_sides():
    """Without this the test above could pass on ratios that never meet a bound."""
    hidden, weight, ids, mask, old, _, _ = policy_case()
    ratio = (full(hidden, weight, ids) - old).exp()[mask]
    assert (ratio < 0.9).any() and (ratio > 1.4).any()


@each("mode", LOSS_AGG_MODES)
def test_microbatches_with_a_global_normaliser_add_up_to_the_batch(mode):
    hidden, weight, ids, mask, old, _, advantages = policy_case()
    norm = {"token_mean": mask.sum(), "constant": torch.tensor(20)}.get(mode, mask.any(1).sum())

    def loss(h, w, rows):
        given = h[rows], w, ids[rows], advantages[rows], mask[rows]
        return fused_policy_loss(*given, old_logp=old[rows], norm_const=norm, loss_agg_mode=mode)

    pieces = [0], [1], [2, 3]
    split = derive(lambda h, w: sum(loss(h, w, rows) for rows in pieces), hidden, weight)
    assert_same(split, derive(lambda h, w: loss(h, w, slice(0, 4)), hidden, weight))


def test_masked_policy_inputs_may_hold_anything():
    hidden, weight, ids, mask, old, ref, advantages = policy_case()
    nothing = fused_policy(ids, advantages, torch.zeros(ids.shape), old_logp=old)
    assert all((x == 0).all() for x in derive(nothing, hidden, weight))

    def run(hidden, ids, old, ref):
        kwargs = {"old_logp": old, "ref_logp": ref, "kl_coef": 0.1}
        return derive(fused_policy(ids, advantages, mask, **kwargs), hidden, weight)

    expected, nan = run(hidden, ids, old, ref), torch.nan
    hidden, ids = torch.where(mask[..., None], hidden, nan), torch.where(mask, ids, -100)
    old, ref = torch.where(mask, old, nan), torch.where(mask, ref, -torch.inf)
    assert_same(run(hidden, ids, old, ref), expected)


@each("distance", [-1e4, -141, -20.5, 0, 20.5, 141, 1e4])
@each(("dtype", "tolerance"), [(F64, 1e-12), (F32, 3e-4), (BF16, 3e-2)])
def test_log_ratios_are_clamped(distance, dtype, tolerance):
    """One token is so many nats from its reference, or from the policy that sampled it."""
    hidden, weight, ids, _ = make((1, 6), 40, 4, dtype=dtype)
    far, one = fused_log_probs(hidden, weight, ids), torch.arange(6)[None] == 2
    far[one] -= distance
    for kwargs in ({"ref_logp": far, "kl_coef": 0.1}, {"old_logp": far}):

        def run(mask, fused=fused_policy, leaves=(hidden, weight), kwargs=kwargs):
            given = {name: x.double() if torch.is_tensor(x) else x for name, x in kwargs.items()}
            return derive(fused(ids, -torch.ones(1), mask, norm_const=6, **given), *leaves)

        got, wide = run(one | True), (hidden.double(), weight.double())
        assert all(x.isfinite().all() for x in got) and got[0].abs() < math.exp(20)
        for a, b in zip(got, run(one | True, unfused_policy, wide), strict=True):
            assert off(a, b) < tolerance
        if abs(distance) > 20 and "old_logp" in kwargs:  # beyond the clamp the gradient is 0
            assert_same(got[1:], run(~one)[1:], tolerance)


def test_a_kl_term_beyond_the_clamp_has_no_gradient_and_a_close_one_keeps_its_digits():
    hidden, weight, ids, _ = make((1, 200), 40, 4, dtype=BF16)
    logp = fused_log_probs(hidden, weight, ids)
    for distance in (-21, 21):
        loss = fused_policy(ids, torch.zeros(1), ref_logp=logp + distance, kl_coef=0.1)
        value, grad_h, grad_w = derive(loss, hidden, weight)
        assert value > 0 and (grad_h == 0).all() and (grad_w == 0).all()
    loss = fused_policy(ids, torch.zeros(1), ref_logp=logp + 0.005, kl_coef=1.0)(hidden, weight)
    assert loss.item() == pytest.approx(math.exp(0.005) - 1 - 0.005, rel=1e-3)


def test_a_million_tokens_lose_no_digits():
    hidden, weight, ids, _ = make((1, 10**6), 2, 1, dtype=F32)
    policy = partial(fused_policy_loss, chunk_size=2**15, return_logp=True)
    loss, logp = policy(hidden, weight, ids, -torch.ones(1))
    assert loss.item() == pytest.approx(logp.double().mean().item(), rel=1e-6)


def test_backward_scales_and_can_run_twice():
    hidden, weight, ids, mask, old, _, advantages = policy_case()
    for loss_fn in (
        fused_policy(ids, advantages, mask, old_logp=old),
        lambda h, w: fused_log_probs(h, w, ids, mask=mask).sum(),
        lambda h, w: fused_log_probs(h, w, ids, mask=mask, keep_bytes=10**6).sum(),
    ):
        _, *once = derive(loss_fn, hidden, weight)
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = loss_fn(h, w)
        for scale in (1, 1, 2):  # gradients may be changed in between
            loss.backward(torch.tensor(scale, dtype=F64), retain_graph=True)
            assert_same((h.grad / scale, w.grad / scale), once)
            h.grad.zero_()
            w.grad.zero_()


@each("head", FUSED)
def test_what_is_not_finite_does_not_become_a_number(head):
    hidden, weight, ids, upstream = make((1, 6), 40, 4)
    hidden[0, 2, 1] = torch.nan
    loss = weighted(head, ids, upstream, tile_bytes=300)
    value, grad_h, grad_w = derive(loss, hidden, weight)
    assert value.isnan() and grad_h[0, 2].isnan().all() and grad_w.isnan().all()


def test_training_in_float16_is_refused():
    hidden, weight, ids, _ = make((1, 6), 40, 4, dtype=torch.float16)
    far = {"ref_logp": torch.tensor([[-1e4, 0, 0, 0, 0, 0]]), "kl_coef": 0.1}
    assert fused_policy_loss(hidden, weight, ids, torch.ones(1), **far).isfinite()
    with pytest.raises(TypeError, match="float16"):
        fused_policy_loss(hidden.requires_grad_(), weight, ids, torch.ones(1))


def test_a_checkpoint_around_the_loss_runs_it_twice():
    hidden, weight, ids, mask, _, _, advantages = policy_case()
    runs = []

    def block(h, w):
        runs.append(1)
        return fused_policy_loss(2 * h, w, ids, advantages, mask, chunk_size=2)

    expected = derive(block, hidden, weight)
    got = derive(lambda h, w: checkpoint(block, h, w, use_reentrant=False), hidden, weight)
    assert_same(got, expected)
    assert len(runs) == 3


@each("evaluation", [torch.no_grad, torch.inference_mode])
def test_policy_log_probs_and_evaluation(evaluation):
    hidden, weight, ids, mask, old, _, advantages = policy_case()
    policy = partial(fused_policy_loss, old_logp=old, return_logp=True)
    with evaluation(), FlopCounterMode(display=False) as counter:
        loss, logp = policy(hidden, weight, ids, advantages, mask)
    assert_same((logp,), (torch.where(mask, full(hidden, weight, ids), 0.0),))
    assert not loss.requires_grad and not logp.requires_grad
    assert counter.get_total_flops() == 2 * int(mask.sum()) * weight.numel()  # one product


@each("chunk_size", [3, 512])
@each("scale", [1.0, 30.0, 1e4])
@each("kwargs", [{}, {"keep_bytes": 10**6}])
def test_tiles_far_below_the_largest_logit(kwargs, scale, chunk_size):
    """The running maximum of the first tiles may be hundreds below the last one."""
    hidden, weight, ids, upstream = make((2, 5), 50, 4)
    head, hidden = fused_log_probs if kwargs else fused_policy_loss, scale * hidden
    sizes = {"chunk_size": chunk_size, "tile_bytes": 8 * 4 * min(chunk_size, 10)}
    got = derive(weighted(head, ids, upstream, **kwargs, **sizes), hidden, weight)
    assert_same(got, derive(weighted(full, ids, upstream), hidden, weight), 1e-11)
    logp, spread = fused_log_probs(hidden, weight, ids, entropy=True, **sizes)
    assert_same((logp, spread), plain(hidden, weight, ids), 1e-11)
    assert (spread >= 0).all()


# Memory -------------------------------------------------------------------------------------------


def head_gb(head, tokens, features=1024, vocab=V, device="cpu"):
    like = {"dtype": BF16, "device": "meta", "requires_grad": True}
    hidden, weight = (torch.empty(*s, **like) for s in ((1, tokens, features), (vocab, features)))
    ids = torch.empty(1, tokens, dtype=torch.long, device="meta")

    def run(hidden, weight, ids):
        out = head(hidden, weight, ids)
        total = sum(out).sum() if isinstance(out, tuple) else out.sum()
        return total.backward() if total.requires_grad else None

    return peak_memory(run, hidden, weight, ids, device=device) / GB


plain_head = module._head_log_probs


def chunked_head(hidden, weight, ids):
    chunks = zip(hidden.split(1024, 1), ids.split(1024, 1), strict=True)
    return torch.cat([plain_head(h, weight, i) for h, i in chunks], 1)


def policy_head(hidden, weight, ids, **kwargs):
    return fused_policy_loss(hidden, weight, ids, torch.ones(len(ids), device=ids.device), **kwargs)


@each(
    ("head", "short", "long"),
    [(plain_head, 7.47, 29.87), (chunked_head, 3.73, 11.20), (checkpointed_log_probs, 2.18, 2.21)],
)
def test_published_peaks(head, short, long):
    assert round(head_gb(head, 4096), 2) == short
    assert round(head_gb(head, 16_384), 2) == long


@each(("head", "limit"), [(fused_log_probs, 0.50), (policy_head, 1.2)])
def test_fused_heads_stay_below_their_limits(head, limit):
    short, long = head_gb(head, 4096), head_gb(head, 16_384)
    assert short <= limit and long <= limit
    grown = (16_384 - 4096) * 1024 * (2 + 4) / GB  # grad_hidden in bf16, and its float32 sum
    assert long - short <= grown
    wider = head_gb(head, 4096, vocab=2 * V)
    weights = V * 1024 * (2 if head is fused_log_probs else 4 + 2) / GB
    logits = 0 if head is fused_log_probs else 4 * 512 * V / GB  # of one chunk
    assert wider - short <= max(weights, weights - 2 * V * 1024 / GB + logits) + 0.01


def test_a_frozen_weight_keeps_no_logits():
    def frozen(hidden, weight, ids):
        return policy_head(hidden, weight.detach(), ids)

    short = head_gb(frozen, 4096)
    assert short <= 0.05 and head_gb(frozen, 4096, vocab=2 * V) - short < 1e-3


def test_the_ledger_of_a_short_walk_is_that_of_the_whole_one(monkeypatch):
    """On fake tensors the loops visit three tiles; the peak must be that of all tiles."""
    tiles = {"chunk_size": 32, "tile_bytes": 2**14}
    heads = [
        *(partial(fused_log_probs, entropy=entropy, **tiles) for entropy in (False, True)),
        *(partial(fused_log_probs, keep_bytes=keep, **tiles) for keep in (10**5, 10**6)),
        partial(policy_head, **tiles),
    ]
    brief = [head_gb(head, 100, 16, 500) for head in heads]
    whole = lambda _, start, stop, size: [  # noqa: E731
        slice(i, min(i + size, stop)) for i in range(start, stop, size)
    ]
    monkeypatch.setattr(module._Plan, "spans", whole)
    assert [head_gb(head, 100, 16, 500) for head in heads] == brief


def test_ledger_counts_known_tensors():
    for x in (torch.empty(1000, 250, device="meta"), torch.ones(1000, 250)):
        x.requires_grad_()
        assert peak_memory(lambda x: None, x, device="cpu") == 0
        assert peak_memory(lambda x: x.exp(), x, device="cpu") == 1_000_000
        assert 2e6 <= peak_memory(lambda x: x.exp().sum().backward(), x, device="cpu") < 2.01e6
        assert x.grad is None  # arguments are left alone
    half = torch.empty(1000, dtype=BF16, device="meta")
    assert peak_memory(lambda x, n: [x + i for i in range(n)], half, 3, device="cpu") == 6000


@each("fn", [lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x if x.sum() > 0 else -x])
def test_ledger_refuses_what_depends_on_values(fn):
    with pytest.raises(ValueError, match="cannot follow aten"):
        peak_memory(fn, torch.ones(10), device="cpu")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ledger_agrees_with_a_real_run():
    """High-water mark of a process that runs the plain head, within 4%."""
    code = """
import torch
from pathlib import Path
from agentrl.logits import _head_log_probs, peak_memory
torch.set_num_threads(1)
def status(field):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(field)[1].split()[0])
def step(h, w, i):
    _head_log_probs(h, w, i).sum().backward()
def make(*rows):
    return [torch.randn(n, 64, requires_grad=True) for n in rows] + [torch.zeros(rows[0]).long()]
step(*make(8, 20_000))
args = make(1500, 20_000)
ledger = peak_memory(step, *args, device="cpu")
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS:")
step(*args)
print((status("VmHWM:") - before) / ledger)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert abs(float(done.stdout) - 1) < 0.04, done.stdout


# Real models --------------------------------------------------------------------------------------


@each(
    ("family", "fields"),
    [
        ("Qwen3", {"tie_word_embeddings": True}),
        ("Qwen3", {"tie_word_embeddings": False}),
        ("Gemma2", {"final_logit_softcapping": 2.0}),
        ("Phi", {}),  # its head has a bias
    ],
)
def test_the_head_of_a_real_model(family, fields):
    pytest.importorskip("transformers")
    model = causal_lm(family, vocab_size=120, hidden_size=16, **fields).double()
    for parameter in model.lm_head.parameters():
        nn.init.normal_(parameter)
    ids = torch.randint(120, (2, 17), generator=torch.Generator().manual_seed(1))
    cap = {"soft_cap": fields.get("final_logit_softcapping")}

    def gradient(loss):
        model.zero_grad()
        loss.backward()
        return loss.detach(), *(p.grad for p in model.parameters())

    exact = gradient(-arl.selected_log_probs(model(ids[:, :-1]).logits, ids[:, 1:]).mean())
    for head in HEADS:
        states = model.base_model(ids[:, :-1]).last_hidden_state
        fused = weighted(head, ids[:, 1:], -torch.ones(2, 16, dtype=F64) / 32, **cap)
        assert_same(gradient(fused(states, model.lm_head)), exact, 1e-10)


# CUDA ---------------------------------------------------------------------------------------------


@each("entropy", [False, True])
def test_the_products_of_cuda_on_fake_tensors(entropy, monkeypatch):
    """Dtypes and shapes of what CUDA runs, where factors stay bf16 and torch.mm sums in float32."""
    monkeypatch.setattr(module, "_mixed", lambda x: True)
    for head in (partial(fused_log_probs, entropy=entropy), policy_head):
        with FakeTensorMode():
            shapes = (2, 900, 16), (700, 16)
            leaves = [torch.empty(shape, dtype=BF16, requires_grad=True) for shape in shapes]
            out = head(*leaves, torch.empty(2, 900, dtype=torch.long))
            total = sum(x.sum() for x in out) if isinstance(out, tuple) else out.sum()
            total.backward()
        assert total.dtype == F32
        assert [(x.grad.shape, x.grad.dtype) for x in leaves] == [(x.shape, BF16) for x in leaves]


def test_the_products_of_cuda_emulated(monkeypatch):
    """The same branch with values: bf16 factors, products summed in float32."""

    def multiply(out, a, b, add=False):
        assert a.dtype == b.dtype == BF16 and out.dtype == F32
        product = a.float() @ b.float()
        return out.add_(product) if add else out.copy_(product)

    monkeypatch.setattr(module, "_mixed", lambda x: True)
    monkeypatch.setattr(module, "_multiply", multiply)
    hidden, weight, ids, upstream = make((2, 90), 500, 64, dtype=BF16)
    for head in FUSED:
        given = ids, upstream, hidden, 0.25 * weight
        assert max(gradient_errors(head, *given, chunk_size=50)) < 4e-3
        value = weighted(head, *given[:2])(*given[2:])
        exact = weighted(full, *given[:2])(*(x.double() for x in given[2:]))
        assert abs(value - exact) < 1e-3


@CUDA
def test_cuda_equals_float64():
    hidden, weight, ids, upstream = (x.cuda() for x in make((3, 700), 9000, 256, dtype=BF16))
    weight = 0.125 * weight
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        logp = fused_log_probs(hidden, weight, ids)
        heads = [*FUSED, partial(fused_log_probs, keep_bytes=10**7)]
        errors = [gradient_errors(head, ids, upstream, hidden, weight) for head in heads]
    torch.cuda.current_stream().wait_stream(stream)
    assert (logp - full(hidden.double(), weight.double(), ids)).abs().max() < 1e-5
    assert max(map(max, errors)) < 4e-3


@CUDA
@each("tokens", [4096, 16_384])
@each("head", [plain_head, chunked_head, checkpointed_log_probs, fused_log_probs, policy_head])
def test_ledger_agrees_with_the_allocator(head, tokens):
    assert head_gb(head, tokens, device="cuda") == pytest.approx(head_gb(head, tokens), rel=0.06)


# The check for a head


def widened(h, w, i, reentrant: bool = False):
    """A right head that widens what it gets, then goes by chunks and computes each again."""
    wide = w.float()
    score = lambda h, w, i: (h @ w.T).log_softmax(-1).gather(-1, i[..., None])[..., 0]  # noqa: E731
    chunks = zip(h.float().split(64, 1), i.split(64, 1), strict=True)
    return torch.cat([checkpoint(score, a, wide, b, use_reentrant=reentrant) for a, b in chunks], 1)


def trl_selected(h, w, i):
    trl = pytest.importorskip("trl.trainer.utils")
    score = lambda h, i: trl.selective_log_softmax(nn.functional.linear(h, w), i)  # noqa: E731
    chunks = zip(h.split(256, 1), i.split(256, 1), strict=True)
    return torch.cat([checkpoint(score, a, b, use_reentrant=False) for a, b in chunks], 1)


def trl_chunked(h, w, i):
    trl = pytest.importorskip("trl.kernels")
    return trl.ChunkedLogProbFunction.apply(h[0], w, None, i[0], 1.0, 256, None, 1.0, ())[0][None]


def verl_fused(h, w, i):
    verl = pytest.importorskip("verl.utils.experimental.torch_functional")
    return verl.FusedLinearForPPO(256)(h, w, i)[0]


def torch_fused(h, w, i):
    if not hasattr(nn.functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=256, chunking_method=None)
    return -nn.functional.linear_cross_entropy(h[0], w, i[0], reduction="none", options=options)[
        None
    ]


def own_type(h, w, i):
    """The head of a model that computes its log-softmax in the type of its logits."""
    return nn.functional.linear(h, w).log_softmax(-1).gather(-1, i[..., None])[..., 0]


RIGHT = {
    "plain": module._head_log_probs,
    "own type": own_type,
    "chunked": chunked_head,
    "checkpointed": arl.checkpointed_log_probs,
    "checkpointed, 8 at a time": partial(arl.checkpointed_log_probs, chunk_size=8),
    "fused": arl.fused_log_probs,
    "widened": widened,
    "widened, reentrant": partial(widened, reentrant=True),
    "trl selected": trl_selected,
    "trl chunked": trl_chunked,
    "verl": verl_fused,
    "torch": torch_fused,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", RIGHT)
def test_right_heads_of_every_form_are_not_accused(form, dtype):
    for found in module._head_values(RIGHT[form], 1024, dtype, "cpu"):
        assert found.passed, found
    assert found.index == "the gradient of weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wrong_heads_are_found(dtype):
    right = module._head_log_probs
    wrong = {
        "gradient of hidden": lambda h, w, i: right(h.detach(), w, i),
        "gradient of weight": lambda h, w, i: right(h, w.detach(), i),
        "not the log-prob": lambda h, w, i: (h @ w.T).gather(-1, i[..., None])[..., 0],
        "[1, 4096, 48] for ids [1, 4096]": lambda h, w, i: (h @ w.T).log_softmax(-1),
        "of the given token": lambda h, w, i: h.sum(-1) * math.nan,
        "NoneType": lambda h, w, i: None,
    }
    for says, head in wrong.items():
        found = arl.head_memory_check(head, dtype=dtype)
        assert not found and says in str(found), found


def test_the_memory_of_heads():
    assert arl.head_memory_check(arl.fused_log_probs, tokens=1024, vocab_size=8192, d_model=128)
    assert arl.head_memory_check(widened)
    full = arl.head_memory_check(arl.full_head, tokens=1024)
    assert not full and full.worst >= 2 * 32_768


def test_a_vocabulary_too_small_to_tell_is_refused():
    with pytest.raises(ValueError, match="vocab_size = 100"):
        arl.head_memory_check(own_type, vocab_size=100)
