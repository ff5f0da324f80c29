"""The fused output heads against autograd, and the memory ledger against known cases."""

import math
import subprocess
import sys
import threading

import numpy
import pytest
import torch
import torch.distributed.tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import agentrl.logits as module
from agentrl import (
    aggregate_loss,
    checkpointed_log_probs,
    clipped_surrogate_loss,
    fused_log_probs,
    fused_policy_loss,
    kl_estimate,
    peak_memory,
    reinforce_loss,
    selected_log_probs,
)
from agentrl.grpo import LOSS_AGG_MODES
from benchmarks.models import causal_lm

GB = 1e9
VOCABULARY = 151_936
BF16 = torch.bfloat16
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FUSED = [fused_log_probs, fused_policy_loss]
HEADS = [*FUSED, checkpointed_log_probs]


def make(shape, vocab, features, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, features, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, features, generator=generator, dtype=torch.float64)
    ids = torch.randint(vocab, shape, generator=generator)
    upstream = torch.randn(shape, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), ids, upstream


def plain(hidden, weight, ids, temperature=1.0, bias=None, soft_cap=None):
    """Log-probs and entropies, with autograd and nothing clever."""
    logits = nn.functional.linear(hidden, weight, bias)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(-1, ids[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def full(hidden, weight, ids, **kwargs):
    return plain(hidden, weight, ids, **kwargs)[0]


def weighted(head, ids, upstream, **kwargs):
    """The sum of upstream * log p by a head, as a function of states, weight and bias."""

    def total(h, w, bias=None):
        given = kwargs if bias is None else kwargs | {"bias": bias}
        if head is fused_policy_loss:
            rows = ids.reshape(1, -1) if ids.ndim < 2 else ids
            h, advantages = h.reshape(*rows.shape, -1), -upstream.reshape(rows.shape)
            return head(h, w, rows, advantages, norm_const=1.0, **given)
        return (head(h, w, ids, **given) * upstream).sum()

    return total


def derive(fn, *leaves):
    """Value and all gradients of a scalar function."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    value = fn(*leaves)
    value.backward()
    return value.detach(), *(leaf.grad for leaf in leaves)


def in_float64(head, ids, upstream, *leaves, **kwargs):
    return derive(weighted(head, ids, upstream, **kwargs), *(x.double() for x in leaves))


def assert_same(got, expected, tolerance=1e-12):
    for a, b in zip(got, expected, strict=True):
        scale = max(1.0, b.abs().max().item() if b.numel() else 1.0)
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


def off(x, y):
    return (x.double() - y).norm() / y.norm()


def count(fn, *leaves):
    """Floating-point operations of a forward and backward pass."""
    with FlopCounterMode(display=False) as counter:
        derive(fn, *leaves)
    return counter.get_total_flops()


# Log-probs and entropy ----------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
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
    leaves = [hidden, weight, torch.linspace(-1, 1, 13, dtype=torch.float64)]
    fn = lambda h, w, b: fused_log_probs(h, w, ids, bias=b, entropy=entropy, **kwargs)  # noqa: E731
    assert torch.autograd.gradcheck(fn, [leaf.requires_grad_() for leaf in leaves])
    if "soft_cap" in kwargs:
        cap = kwargs["soft_cap"]
        fn = lambda h, w, b: checkpointed_log_probs(h, w, ids, 3, bias=b, soft_cap=cap)  # noqa: E731
        assert torch.autograd.gradcheck(fn, leaves)


@settings(max_examples=80)
@given(
    tokens=st.integers(0, 9),
    vocab=st.integers(1, 40),
    features=st.integers(1, 6),
    sizes=st.fixed_dictionaries(
        {
            "chunk_size": st.none() | st.integers(1, 12),
            "tile_bytes": st.none() | st.integers(1, 3000),
            "keep_bytes": st.integers(0, 4000),
        }
    ),
    kwargs=st.fixed_dictionaries(
        {"temperature": st.floats(0.2, 3.0), "soft_cap": st.none() | st.floats(0.5, 30)}
    ),
    masked=st.booleans(),
    entropy=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_equals_autograd(
    tokens, vocab, features, sizes, kwargs, masked, entropy, biased, seed
):  # fmt: skip
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

    leaves = hidden, weight, *bias
    assert_same(derive(fused, *leaves), derive(reference, *leaves))


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65])
def test_any_number_of_tokens(tokens):
    hidden, weight, ids, upstream = make((1, tokens), 130, 8)
    assert fused_log_probs(hidden, weight, ids).shape == (1, tokens)
    expected = derive(weighted(full, ids, upstream), hidden, weight)
    fused = weighted(fused_log_probs, ids, upstream, chunk_size=64)
    assert_same(derive(fused, hidden, weight), expected)


def test_extreme_logits_stay_finite():
    hidden, weight, ids, _ = make((6,), 50, 4)
    logp, spread = fused_log_probs(1e4 * hidden, weight, ids, entropy=True, tile_bytes=100)
    assert_same((logp, spread), plain(1e4 * hidden, weight, ids), 1e-11)
    assert (spread >= 0).all()


def test_float32_is_no_further_from_float64_than_the_full_computation():
    hidden, weight, ids, upstream = make((256,), 5000, 64, dtype=torch.float32)
    weight, upstream = 0.3 * weight, upstream.float()
    exact = in_float64(full, ids, upstream, hidden, weight)
    usual = derive(weighted(full, ids, upstream), hidden, weight)
    fused = derive(weighted(fused_log_probs, ids, upstream), hidden, weight)
    # Both share the rounding of the logits themselves; 5% is how far that scatters.
    logp = full(hidden.double(), weight.double(), ids)
    limit = 1.05 * off(full(hidden, weight, ids), logp)
    assert off(fused_log_probs(hidden, weight, ids), logp) <= limit
    for a, b, c in zip(fused[1:], usual[1:], exact[1:], strict=True):
        assert off(a, c) <= 1.05 * off(b, c)


@pytest.mark.parametrize("strength", [0, 8, 16, 24])
@pytest.mark.parametrize("head", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_gradients_of_likely_tokens(dtype, head, strength):
    """Where p is near 1, p - 1 and all other probabilities cancel: they must not share a sum."""
    hidden, weight, ids, upstream = make((200,), 6000, 64)
    toward = weight[ids] / weight[ids].norm(dim=1, keepdim=True) ** 2
    hidden = (0.25 * hidden + strength * toward).to(dtype)
    weight, upstream = weight.to(dtype), upstream.float()
    usual = weighted(module._head_log_probs, ids, upstream)
    fused = weighted(head, ids, upstream, chunk_size=64, tile_bytes=64 * 4 * 512)
    exact = derive(usual, hidden.double(), weight.double())
    found = derive(fused, hidden, weight), derive(usual, hidden, weight), exact
    for ours, theirs, right in zip(*(x[1:] for x in found), strict=True):
        limit = off(theirs, right)
        assert off(ours, right) <= (limit if dtype == torch.float32 else max(0.9 * limit, 3e-3))


@pytest.mark.parametrize("tokens", [40, 300])
def test_bf16_factors_are_summed_in_float32(tokens):
    hidden, weight, ids, upstream = make((tokens,), 3000, 256, dtype=BF16)
    weight = weight * 0.125
    logp, spread = fused_log_probs(hidden, weight, ids, entropy=True, chunk_size=100)
    exact = plain(hidden.double(), weight.double(), ids)
    assert logp.dtype == torch.float32
    assert (logp - exact[0]).abs().max() < 1e-5
    assert (spread - exact[1]).abs().max() < 1e-5
    assert (full(hidden, weight, ids) - exact[0]).abs().max() > 1e-3  # what bf16 logits do
    grads = derive(weighted(fused_log_probs, ids, upstream, chunk_size=100), hidden, weight)[1:]
    for a, b in zip(grads, in_float64(full, ids, upstream, hidden, weight)[1:], strict=True):
        assert a.dtype == BF16 and off(a, b) < 4e-3  # bf16 keeps 8 bits


@pytest.mark.parametrize("head", FUSED)
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_rows_of_unlikely_tokens_in_bf16(head, spread):
    """The rows of chosen tokens outweigh all others in a norm, and Adam weighs rows alike."""
    hidden, weight, ids, upstream = make((2, 120), 6000, 64)
    hidden, weight = hidden.bfloat16(), (spread / 8 * weight).bfloat16()
    ids = ids // 2  # nobody chooses the second half
    exact = in_float64(full, ids, upstream, hidden, weight)[2]
    got = derive(weighted(head, ids, upstream.float(), chunk_size=100), hidden, weight)[2]
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
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    hidden, weight, ids, _ = make((1, 8), 30, 4, dtype=BF16)
    fused_log_probs(hidden.requires_grad_(), weight, ids).sum().backward()
    assert matmul.fp32_precision == before

    def fail(*_):
        assert matmul.fp32_precision == "bf16"
        raise RuntimeError("inside")

    monkeypatch.setattr(module, "reinforce_loss", fail)
    with pytest.raises(RuntimeError, match="inside"):
        fused_policy_loss(hidden, weight, ids, torch.ones(1))
    assert matmul.fp32_precision == before

    started, ended = threading.Event(), threading.Event()

    def wait(*args):
        started.set()
        ended.wait(30)
        return reinforce_loss(*args)

    monkeypatch.setattr(module, "reinforce_loss", wait)
    slow = threading.Thread(
        target=fused_policy_loss, args=(hidden.detach(), weight, ids, torch.ones(1))
    )
    slow.start()
    assert started.wait(30)
    fused_log_probs(hidden, weight, ids)  # begins after the other head, and ends before it
    ended.set()
    slow.join()
    assert matmul.fp32_precision == before


def test_masked_tokens_may_hold_anything_and_cost_nothing():
    hidden, weight, ids, upstream = make((2, 40), 60, 8)
    mask = torch.arange(40).expand(2, 40) < 10
    ids = torch.where(mask, ids, -100)
    hidden = torch.where(mask[..., None], hidden, torch.nan)
    out = fused_log_probs(hidden, weight, ids, mask=mask)
    assert (out[~mask] == 0).all()
    assert_same((out[mask],), (full(hidden[mask], weight, ids[mask]),))
    masked = weighted(fused_log_probs, ids, upstream, mask=mask)
    value, grad_h, grad_w = derive(masked, hidden, weight)
    assert (grad_h[~mask] == 0).all() and grad_w.isfinite().all() and value.isfinite()
    assert 4 * count(masked, hidden, weight) == count(
        weighted(fused_log_probs, ids.clamp(0), upstream), hidden, weight
    )


def test_tokens_without_a_gradient_are_left_out_of_the_backward_pass():
    hidden, weight, ids, _ = make((40,), 60, 8)
    upstream = (torch.arange(40) % 4 == 1).double()
    one = 2 * 40 * 60 * 8
    for tokens, flops in ((0, one + 3 * one / 4), (40, one + 2 * one / 4)):
        fused = weighted(fused_log_probs, ids, upstream, keep_bytes=tokens * 60 * 8)
        assert count(fused, hidden, weight) == flops


def test_half_of_the_outputs_or_inputs():
    hidden, weight, ids, upstream = make((12,), 30, 6)
    assert_same(
        derive(
            lambda h, w: (fused_log_probs(h, w, ids, entropy=True)[1] * upstream).sum(),
            hidden,
            weight,
        ),
        derive(lambda h, w: (plain(h, w, ids)[1] * upstream).sum(), hidden, weight),
    )
    bias = torch.zeros(30, dtype=torch.float64)
    expected = derive(weighted(full, ids, upstream), hidden, weight, bias)
    for trained in ([0], [1], [2], [0, 2]):
        for head in FUSED:
            leaves = [
                x.clone().requires_grad_(i in trained) for i, x in enumerate((hidden, weight, bias))
            ]
            weighted(head, ids, upstream)(*leaves).backward()
            assert [i for i in range(3) if leaves[i].grad is not None] == trained
            assert_same([leaves[i].grad for i in trained], [expected[1 + i] for i in trained])
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
    fused, usual = (
        derive(lambda w, head=head: head(torch.tanh(w[ids]), w, ids).sum(), weight)
        for head in (fused_log_probs, full)
    )
    assert_same(fused, usual)


def test_int32_ids_and_mixed_dtypes():
    hidden, weight, ids, upstream = make((12,), 30, 6, dtype=torch.float32)
    low = hidden.bfloat16()
    got = derive(weighted(fused_log_probs, ids.int(), upstream), low, weight)
    expected = derive(weighted(full, ids, upstream), low.float(), weight)
    assert got[1].dtype == BF16 and got[2].dtype == torch.float32
    assert_same((got[0], got[2]), (expected[0], expected[2]), 1e-5)


def test_autocast_rounds_the_factors_and_not_the_logits():
    hidden, weight, ids, upstream = make((40,), 300, 64, dtype=torch.float32)
    weight = 0.25 * weight
    with torch.autocast("cpu", dtype=BF16):
        got = derive(weighted(fused_log_probs, ids, upstream), hidden, weight)
        logp = fused_log_probs(hidden, weight, ids)
    low_h, low_w = hidden.bfloat16(), weight.bfloat16()
    assert (logp - full(low_h.double(), low_w.double(), ids)).abs().max() < 1e-5
    for a, b in zip(got[1:], in_float64(full, ids, upstream, low_h, low_w)[1:], strict=True):
        assert a.dtype == torch.float32 and off(a, b) < 4e-3


# Logits that are kept -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16])
def test_kept_logits_change_neither_values_nor_gradients(dtype):
    hidden, weight, ids, upstream = make((2, 30), 50, 8, dtype=dtype)
    upstream[0, ::3] = 0
    row = 50 * (8 if dtype == torch.float64 else 4)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, BF16: 1e-2}[dtype]
    sizes = {"chunk_size": 7, "tile_bytes": 800, "temperature": 0.8, "soft_cap": 9.0}
    expected = derive(weighted(fused_log_probs, ids, upstream, **sizes), hidden, weight)
    for tokens in (1, 7, 20, 59, 60, 1000):
        fused = weighted(fused_log_probs, ids, upstream, **sizes, keep_bytes=tokens * row)
        assert_same(derive(fused, hidden, weight), expected, tolerance)


def test_kept_logits_save_products_and_take_memory():
    hidden, weight, ids, upstream = make((40,), 60, 8)
    one = 2 * 40 * 60 * 8
    for tokens in (0, 10, 40):
        fused = weighted(fused_log_probs, ids, upstream, keep_bytes=tokens * 60 * 8)
        assert count(fused, hidden, weight) == one * (4 - tokens / 40)
    peaks = [
        head_gb(lambda h, w, i, keep=keep: fused_log_probs(h, w, i, keep_bytes=keep), 4096)
        for keep in (0, 10**9, 10**10)
    ]
    row = 4 * VOCABULARY / GB
    assert peaks[1] - peaks[0] == pytest.approx(1e9 // (4 * VOCABULARY) * row, rel=0.01)
    assert peaks[2] - peaks[0] == pytest.approx(4096 * row, rel=0.01)
    with torch.no_grad():
        keeps = peak_memory(
            lambda h, w, i: fused_log_probs(h, w, i, keep_bytes=10**9, tile_bytes=100),
            hidden, weight, ids, device="cpu",
        )  # fmt: skip
    assert keeps < 40 * 60 * 8


# Heads with more than a weight --------------------------------------------------------------------


@pytest.mark.parametrize("soft_cap", [None, 30.0, 1.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_bias_and_soft_cap(head, biased, soft_cap):
    hidden, weight, ids, upstream = make((2, 9), 40, 6)
    leaves = [5 * hidden, weight] + [torch.linspace(-9, 9, 40, dtype=torch.float64)] * biased
    expected = derive(weighted(full, ids, upstream, soft_cap=soft_cap), *leaves)
    sizes = {"chunk_size": 4} | ({} if head is checkpointed_log_probs else {"tile_bytes": 300})
    got = derive(weighted(head, ids, upstream, soft_cap=soft_cap, **sizes), *leaves)
    assert_same(got, expected)
    left_out = derive(weighted(full, ids, upstream), *leaves[:2])
    assert (soft_cap is None and not biased) or (left_out[0] - expected[0]).abs() > 0.1


@pytest.mark.parametrize("head", FUSED)
def test_bias_and_soft_cap_in_bf16(head):
    hidden, weight, ids, upstream = make((2, 90), 800, 64, dtype=BF16)
    leaves = hidden, weight, torch.linspace(-3, 3, 800).bfloat16()
    got = derive(weighted(head, ids, upstream.float(), soft_cap=15.0, chunk_size=64), *leaves)
    for a, b in zip(
        got[1:], in_float64(full, ids, upstream, *leaves, soft_cap=15.0)[1:], strict=True
    ):
        assert a.dtype == BF16 and off(a, b) < 4e-3


class Adapted(nn.Linear):
    """A low-rank adapter whose B is 0 at first: its weight alone gives the right log-probs."""

    def __init__(self, *size):
        super().__init__(*size, bias=False)
        self.A, self.B = (
            nn.Parameter(torch.randn(2, size[0])),
            nn.Parameter(torch.zeros(size[1], 2)),
        )

    def forward(self, hidden):
        return super().forward(hidden) + hidden @ self.A.T @ self.B.T


def wrapped(head):
    head.forward = lambda hidden, inner=head.forward: inner(hidden) / 2
    return head


def hooked(head, kind):
    getattr(head, kind)(lambda *args: None)
    return head


REFUSED = {
    "adapter": (Adapted(6, 40), r"\.Adapted"),
    "another forward": (wrapped(nn.Linear(6, 40)), "Linear"),
    "hook": (hooked(nn.Linear(6, 40), "register_forward_hook"), "Linear"),
    "hook before": (hooked(nn.Linear(6, 40), "register_forward_pre_hook"), "Linear"),
    "several modules": (nn.Sequential(nn.Linear(6, 40)), r"container\.Sequential"),
    "no head": (nn.Embedding(40, 6), r"sparse\.Embedding"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("head", HEADS)
def test_a_module_that_may_do_more_is_refused_by_its_class(head, kind):
    hidden, _, ids, upstream = make((2, 9), 40, 6, dtype=torch.float32)
    given, name = REFUSED[kind]
    with pytest.raises(TypeError, match=f"weight is a .*{name}"):
        weighted(head, ids, upstream)(hidden, given)


@pytest.mark.parametrize("head", HEADS)
def test_a_linear_module_brings_its_bias_and_its_parametrization(head):
    hidden, weight, ids, upstream = make((2, 9), 40, 6)
    linear = nn.Linear(6, 40).double()
    leaves = hidden, linear.weight, linear.bias
    value, _, grad_w, grad_b = derive(weighted(full, ids, upstream), *leaves)
    fused = weighted(head, ids, upstream)(hidden, linear)
    fused.backward()
    assert_same((fused.detach(), linear.weight.grad, linear.bias.grad), (value, grad_w, grad_b))
    with pytest.raises(TypeError, match="Linear"):
        weighted(head, ids, upstream)(hidden, linear, linear.bias)  # whose bias is it?

    class LowRank(nn.Module):
        def __init__(self):
            super().__init__()
            self.A, self.B = (nn.Parameter(weight[:n, :m].clone()) for n, m in ((2, 6), (40, 2)))

        def forward(self, base):
            return base + self.B @ self.A

    nn.utils.parametrize.register_parametrization(linear, "weight", LowRank())
    adapter = linear.parametrizations.weight[0]
    for parts in ((linear,), (linear.weight, linear.bias)):  # the module, or its weight
        weighted(head, ids, upstream)(hidden, *parts).backward()
        grads = adapter.A.grad.clone(), adapter.B.grad.clone()
        linear.zero_grad()
        weighted(full, ids, upstream)(hidden, linear.weight, linear.bias).backward()
        assert_same(grads, (adapter.A.grad, adapter.B.grad))
        linear.zero_grad()


def test_a_sharded_weight_is_refused(tmp_path):
    hidden, weight, ids, _ = make((1, 2), 8, 3)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        sharded = torch.distributed.tensor.distribute_tensor(weight, mesh)
        for head in (fused_log_probs, checkpointed_log_probs):
            with pytest.raises(TypeError, match="weight is sharded: call `unshard`"):
                head(hidden, sharded, ids)
    finally:
        torch.distributed.destroy_process_group()


# Errors at the door -------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("bad", [-1, 11, 2**40])
def test_an_id_outside_the_vocabulary_is_named(head, bad):
    hidden, weight, ids, upstream = make((2, 5), 11, 3)
    ids[1, 3] = bad
    with pytest.raises(ValueError, match=rf"ids\[1, 3\] = {bad} "):
        weighted(head, ids, upstream)(hidden, weight)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_narrow_ids_are_compared_as_numbers(dtype):
    """The vocabulary does not fit their dtype, and the ids are inside it."""
    hidden, weight, ids, _ = make((2, 5), 70_000, 3)
    ids = ids % 120
    for head in (fused_log_probs, checkpointed_log_probs):
        assert torch.equal(head(hidden, weight, ids.to(dtype)), head(hidden, weight, ids))
    logits = hidden @ weight.T
    assert torch.equal(selected_log_probs(logits, ids.to(dtype)), selected_log_probs(logits, ids))


def test_the_position_is_that_of_the_caller_under_a_mask():
    hidden, weight, ids, _ = make((2, 5), 11, 3)
    ids[0, 0] = ids[1, 3] = 99
    mask = torch.ones(2, 5)
    mask[0] = 0
    with pytest.raises(ValueError, match=r"ids\[1, 3\] = 99"):
        fused_log_probs(hidden, weight, ids, mask=mask)


WRONG = [
    *((heads, {name: bad}, name) for heads, rows in (
        (HEADS, (
            ("hidden", torch.zeros(2, 5, 3).long()),
            ("weight", torch.zeros(11)), ("ids", torch.zeros(2, 5)), ("ids", torch.ones(2, 5) > 0),
            ("hidden", [[[0.0] * 3] * 5] * 2), ("weight", numpy.zeros((11, 3))),
            ("ids", [[0] * 5] * 2), ("ids", numpy.zeros((2, 5), int)),
            ("bias", torch.zeros(10)), ("bias", [0.0] * 11),
            ("soft_cap", 0.0), ("soft_cap", -30), ("soft_cap", math.nan), ("soft_cap", "30"),
            ("chunk_size", 0), ("chunk_size", 2.5), ("chunk_size", True),
        )),
        (FUSED, (
            ("mask", torch.ones(5)), ("mask", torch.full((2, 5), 0.5)), ("mask", [[1] * 5] * 2),
            ("mask", torch.tensor([0.0, -math.inf]).repeat(5, 1).T), ("mask", numpy.ones((2, 5))),
            ("temperature", 0.0), ("temperature", math.nan), ("temperature", None),
            ("tile_bytes", 0),
        )),
        ([fused_log_probs], (("keep_bytes", -1), ("keep_bytes", 1e9))),
        ([fused_policy_loss], (
            ("advantages", torch.ones(5)), ("advantages", [1.0, 1.0]),
            ("advantages", torch.ones(())),
            ("old_logp", torch.ones(2, 4)), ("old_logp", numpy.ones((2, 5))),
            ("ref_logp", torch.ones(5)), ("ref_logp", [[0.0] * 5] * 2),
            ("loss_agg_mode", "mean"), ("kl_coef", math.nan), ("kl_coef", "1"),
            ("norm_const", 0), ("norm_const", torch.tensor(-1.0)),
        )),
    ) for name, bad in rows),
    ([fused_policy_loss], {"loss_agg_mode": "constant"}, "norm_const"),
    ([fused_policy_loss], {"kl_coef": 0.1}, "kl_coef = 0.1 needs ref_logp"),
    ([fused_policy_loss], {"clip_low": -0.1, "old_logp": torch.zeros(2, 5)}, "clip_low"),
    ([fused_policy_loss], {"clip_high": math.nan, "old_logp": torch.zeros(2, 5)}, "clip_high"),
    ([fused_policy_loss], {"kl_kind": "k4", "ref_logp": torch.zeros(2, 5)}, "kind"),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "change", "name"), WRONG)
def test_wrong_arguments_are_named(heads, change, name):
    hidden, weight, ids, _ = make((2, 5), 11, 3)
    for head in heads:
        given = {"hidden": hidden, "weight": weight, "ids": ids}
        given |= {"advantages": torch.ones(2)} if head is fused_policy_loss else {}
        with pytest.raises((TypeError, ValueError), match=name):
            head(**(given | change))


# The policy loss ----------------------------------------------------------------------------------


def policy_case(seed=0, shape=(4, 9), vocab=37):
    hidden, weight, ids, noise = make(shape, vocab, 6, seed)
    mask = noise > -0.3
    mask[1] = False  # a row without a policy token
    logp = full(hidden, weight, ids)
    generator = torch.Generator().manual_seed(seed + 1)
    old, ref = (
        logp + 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    advantages = torch.randn(shape[0], generator=generator, dtype=torch.float64)
    return hidden, weight, ids, mask, old, ref, advantages


def fused_policy(ids, *args, **kwargs):
    return lambda h, w: fused_policy_loss(h, w, ids, *args, **kwargs)


def unfused_policy(ids, advantages, mask, *, old_logp=None, clip_low=0.2, clip_high=0.2, **kwargs):
    """The same loss from chapter 4's functions."""
    kwargs = {"loss_agg_mode": "token_mean", "norm_const": None, "kl_coef": 0.0} | kwargs
    tail = mask, kwargs["loss_agg_mode"], kwargs["norm_const"]
    clip = {"clip_low": clip_low, "clip_high": clip_high}

    def loss_fn(h, w):
        logp = full(h, w, ids, temperature=kwargs.get("temperature", 1.0))
        if old_logp is None:
            loss = reinforce_loss(logp, advantages, *tail)
        else:
            loss = clipped_surrogate_loss(logp, old_logp, advantages, *tail, **clip)
        if kwargs["kl_coef"]:
            kl = kl_estimate(logp, kwargs["ref_logp"], kwargs.get("kl_kind", "k3"))
            loss = loss + kwargs["kl_coef"] * aggregate_loss(kl, *tail)
        return loss

    return loss_fn


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("norm", [None, 50])
@pytest.mark.parametrize("kl", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize("clip", [math.inf, (0.2, 0.2), (0.1, 0.4), "reinforce"])
def test_policy_loss_equals_the_unfused_one(mode, norm, kl, clip):
    hidden, weight, ids, mask, old, ref, advantages = policy_case()
    norm = 7 if mode == "constant" and norm is None else norm
    kwargs = {"loss_agg_mode": mode, "norm_const": norm, "temperature": 0.8}
    if clip != "reinforce":
        low, high = clip if isinstance(clip, tuple) else (clip, clip)
        kwargs |= {"old_logp": old, "clip_low": low, "clip_high": high}
    if kl:
        kwargs |= {"ref_logp": ref, "kl_coef": 0.3, "kl_kind": kl}
    fused = fused_policy(ids, advantages, mask, chunk_size=5, tile_bytes=5 * 11 * 8, **kwargs)
    unfused = unfused_policy(ids, advantages, mask, **kwargs)
    assert_same(derive(fused, hidden, weight), derive(unfused, hidden, weight))


def test_the_clip_is_active_on_both_sides():
    """Without this the grid above could pass on ratios that never meet a bound."""
    hidden, weight, ids, mask, old, _, _ = policy_case()
    ratio = (full(hidden, weight, ids) - old).exp()[mask]
    assert (ratio < 0.9).any() and (ratio > 1.4).any()


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 8)),
    vocab=st.integers(1, 30),
    chunk_size=st.integers(1, 12),
    tile_bytes=st.none() | st.integers(1, 2000),
    mode=st.sampled_from(LOSS_AGG_MODES),
    per_token=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_policy_loss_property(shape, vocab, chunk_size, tile_bytes, mode, per_token, seed):
    hidden, weight, ids, noise = make(shape, vocab, 4, seed)
    old = full(hidden, weight, ids) + 0.3 * noise
    given = ids, noise.flip(0) if per_token else noise[:, 0], noise > 0
    kwargs = {"old_logp": old, "norm_const": 13.0, "loss_agg_mode": mode}
    fused = fused_policy(*given, **kwargs, chunk_size=chunk_size, tile_bytes=tile_bytes)
    unfused = unfused_policy(*given, **kwargs)
    assert_same(derive(fused, hidden, weight), derive(unfused, hidden, weight))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_microbatches_with_a_global_normaliser_add_up_to_the_batch(mode):
    hidden, weight, ids, mask, old, _, advantages = policy_case()
    norm = {"token_mean": mask.sum(), "constant": torch.tensor(20)}.get(mode, mask.any(1).sum())

    def loss(h, w, rows):
        given = ids[rows], advantages[rows], mask[rows]
        kwargs = {"old_logp": old[rows], "norm_const": norm, "loss_agg_mode": mode}
        return fused_policy(*given, **kwargs)(h[rows], w)

    whole = derive(lambda h, w: loss(h, w, slice(0, 4)), hidden, weight)
    split = derive(
        lambda h, w: sum(loss(h, w, rows) for rows in ([0], [1], [2, 3])), hidden, weight
    )
    assert_same(split, whole)


def test_a_masked_microbatch_is_exactly_zero():
    hidden, weight, ids, _, old, _, advantages = policy_case()
    loss = fused_policy(ids, advantages, torch.zeros(ids.shape), old_logp=old)
    value, grad_h, grad_w = derive(loss, hidden, weight)
    assert value == 0 and (grad_h == 0).all() and (grad_w == 0).all()


def test_masked_policy_inputs_may_hold_anything():
    hidden, weight, ids, mask, old, ref, advantages = policy_case()
    kl = {"kl_coef": 0.1}
    loss = fused_policy(ids, advantages, mask, old_logp=old, ref_logp=ref, **kl)
    expected = derive(loss, hidden, weight)
    nan = torch.nan
    hidden, ids = torch.where(mask[..., None], hidden, nan), torch.where(mask, ids, -100)
    old, ref = torch.where(mask, old, nan), torch.where(mask, ref, -torch.inf)
    loss = fused_policy(ids, advantages, mask, old_logp=old, ref_logp=ref, **kl)
    assert_same(derive(loss, hidden, weight), expected)


def test_a_clip_may_be_any_number():
    hidden, weight, ids, _ = make((2, 5), 11, 3)
    old = {"old_logp": torch.zeros(2, 5)}
    losses = [
        fused_policy(ids, torch.ones(2), clip_low=clip, clip_high=clip, **old)(hidden, weight)
        for clip in (0.25, numpy.float32(0.25), torch.tensor(0.25))
    ]
    assert len(set(map(float, losses))) == 1


@pytest.mark.parametrize("distance", [-1e4, -141, -20.5, 0, 20.5, 141, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16])
def test_log_ratios_are_clamped(distance, dtype):
    """One token leaves its reference, or the sampling policy, by a distance in nats."""
    hidden, weight, ids, _ = make((1, 6), 40, 4, dtype=dtype)
    logp = fused_log_probs(hidden, weight, ids)
    far = logp.clone()
    far[0, 2] -= distance
    others = torch.arange(6)[None] != 2
    wide = hidden.double(), weight.double()
    for kwargs in ({"ref_logp": far, "kl_coef": 0.1}, {"old_logp": far}):
        advantages = torch.tensor([-1.0])
        got = derive(fused_policy(ids, advantages, norm_const=6, **kwargs), hidden, weight)
        assert all(x.isfinite().all() for x in got)
        assert abs(got[0]) <= 0.1 * math.exp(20) + 1e3 if "ref_logp" in kwargs else math.exp(20)
        given = {name: x.double() if torch.is_tensor(x) else x for name, x in kwargs.items()}
        exact = derive(unfused_policy(ids, advantages, others | True, norm_const=6, **given), *wide)
        tolerance = {torch.float64: 1e-12, torch.float32: 3e-4, BF16: 3e-2}[dtype]
        for a, b in zip(got, exact, strict=True):
            assert off(a, b) < tolerance
        if abs(distance) > 20 and "old_logp" in kwargs:  # beyond the clamp the gradient is 0
            inside = derive(
                fused_policy(ids, advantages, others, norm_const=6, **kwargs), hidden, weight
            )
            assert_same(got[1:], inside[1:], tolerance)


def test_a_token_beyond_the_clamp_has_no_gradient_from_its_kl_term():
    hidden, weight, ids, _ = make((1, 6), 40, 4)
    ref = full(hidden, weight, ids) - 21
    for ref_logp in (ref, ref + 42):
        loss = fused_policy(ids, torch.zeros(1), ref_logp=ref_logp, kl_coef=0.1)
        value, grad_h, grad_w = derive(loss, hidden, weight)
        assert value > 0 and (grad_h == 0).all() and (grad_w == 0).all()


def test_a_kl_term_of_close_log_probs_in_bf16_keeps_its_digits():
    hidden, weight, ids, _ = make((1, 200), 40, 4, dtype=BF16)
    logp = fused_log_probs(hidden, weight, ids)
    loss = fused_policy(ids, torch.zeros(1), ref_logp=logp + 0.005, kl_coef=1.0)(hidden, weight)
    assert loss.item() == pytest.approx(math.exp(0.005) - 1 - 0.005, rel=1e-3)


def test_a_million_tokens_lose_no_digits():
    hidden, weight, ids, _ = make((1, 10**6), 2, 1, dtype=torch.float32)
    loss, logp = fused_policy_loss(
        hidden, weight, ids, -torch.ones(1), chunk_size=2**15, return_logp=True
    )
    assert loss.item() == pytest.approx(logp.double().mean().item(), rel=1e-6)


def test_backward_scales_and_can_run_twice():
    hidden, weight, ids, mask, old, _, advantages = policy_case()
    fused = fused_policy(ids, advantages, mask, old_logp=old)
    once = derive(fused, hidden, weight)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = fused(h, w)
    loss.backward(torch.tensor(2.0, dtype=torch.float64), retain_graph=True)
    loss.backward()
    assert_same((loss.detach(), h.grad / 3, w.grad / 3), once)


def test_gradients_may_be_changed_between_two_backward_passes():
    hidden, weight, ids, mask, _, _, advantages = policy_case()
    for loss_fn in (
        fused_policy(ids, advantages, mask),
        lambda h, w: fused_log_probs(h, w, ids, mask=mask).sum(),
        lambda h, w: fused_log_probs(h, w, ids, mask=mask, keep_bytes=10**6).sum(),
    ):
        _, *once = derive(loss_fn, hidden, weight)
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = loss_fn(h, w)
        for _ in range(3):
            loss.backward(retain_graph=True)
            assert_same((h.grad, w.grad), once)
            h.grad.zero_()
            w.grad.zero_()


@pytest.mark.parametrize("head", FUSED)
def test_what_is_not_finite_does_not_become_a_number(head):
    hidden, weight, ids, upstream = make((1, 6), 40, 4)
    hidden[0, 2, 1] = torch.nan
    loss = weighted(head, ids, upstream, tile_bytes=300)
    value, grad_h, grad_w = derive(loss, hidden, weight)
    assert value.isnan() and grad_h[0, 2].isnan().all() and grad_w.isnan().all()


def test_training_in_float16_is_refused():
    hidden, weight, ids, _ = make((1, 6), 40, 4, dtype=torch.float16)
    far = {"ref_logp": torch.tensor([-1e4, 0, 0, 0, 0, 0])[None], "kl_coef": 0.1}
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
    runs.clear()
    got = derive(lambda h, w: checkpoint(block, h, w, use_reentrant=False), hidden, weight)
    assert_same(got, expected)
    assert len(runs) == 2


@pytest.mark.parametrize("evaluation", [torch.no_grad, torch.inference_mode])
def test_policy_log_probs_and_evaluation(evaluation):
    hidden, weight, ids, mask, old, _, advantages = policy_case()
    with evaluation(), FlopCounterMode(display=False) as counter:
        loss, logp = fused_policy_loss(
            hidden, weight, ids, advantages, mask, old_logp=old, return_logp=True
        )
    assert_same((logp,), (torch.where(mask, full(hidden, weight, ids), 0.0),))
    assert not loss.requires_grad and not logp.requires_grad
    assert counter.get_total_flops() == 2 * int(mask.sum()) * weight.numel()  # one product


def test_policy_loss_takes_three_products_and_log_probs_four():
    hidden, weight, ids, upstream = make((2, 20), 60, 8)
    one = 2 * hidden.numel() * len(weight)
    for head, products in zip((full, checkpointed_log_probs, *FUSED), (3, 4, 4, 3), strict=True):
        assert count(weighted(head, ids, upstream), hidden, weight) == products * one
    policy = weighted(fused_policy_loss, ids, upstream, chunk_size=7)
    assert count(policy, hidden, weight) == 3 * one
    assert count(lambda h, w: policy(h, w.detach()) + w.sum(), hidden, weight) == 2 * one


@pytest.mark.parametrize("chunk_size", [64, 512])
def test_policy_loss_from_bf16(chunk_size):
    hidden, weight, ids, upstream = make((2, 100), 3000, 256, dtype=BF16)
    weight = weight * 0.125
    exact = full(hidden.double(), weight.double(), ids)
    sizes = {"chunk_size": chunk_size}
    logp = fused_policy_loss(hidden, weight, ids, upstream, return_logp=True, **sizes)[1]
    assert (logp - exact).abs().max() < 1e-5
    got = derive(weighted(fused_policy_loss, ids, upstream, **sizes), hidden, weight)
    for a, b in zip(got[1:], in_float64(full, ids, upstream, hidden, weight)[1:], strict=True):
        assert a.dtype == BF16 and off(a, b) < 4e-3


@pytest.mark.parametrize("chunk_size", [3, 512])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_policy_loss_of_tiles_far_below_the_largest_logit(scale, chunk_size):
    """The running maximum of the first tiles may be hundreds below the last one."""
    hidden, weight, ids, upstream = make((2, 5), 50, 4)
    sizes = {"chunk_size": chunk_size, "tile_bytes": 8 * 4 * min(chunk_size, 10)}
    for head, kept in ((fused_policy_loss, {}), (fused_log_probs, {"keep_bytes": 10**6})):
        fused = weighted(head, ids, upstream, **sizes, **kept)
        got = derive(fused, scale * hidden, weight)
        assert all(x.isfinite().all() for x in got)
        assert_same(got, derive(weighted(full, ids, upstream), scale * hidden, weight), 1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("chunk_size", [40, 512])
def test_gradients_of_half_precision_stay_close_over_a_wide_vocabulary(dtype, chunk_size):
    """The sum of e^(z - max) is beyond the range of float16 here."""
    hidden, weight, ids, upstream = make((1, 60), 80_000, 8, dtype=dtype)
    hidden = 0.05 * hidden
    exact = in_float64(full, ids, upstream, hidden, weight)
    for head in FUSED if dtype == BF16 else FUSED[:1]:
        got = derive(weighted(head, ids, upstream, chunk_size=chunk_size), hidden, weight)
        for a, b in zip(got[1:], exact[1:], strict=True):
            assert off(a, b) < 4e-3


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_checkpointed_equals_full(chunk_size):
    hidden, weight, ids, upstream = make((3, 20), 40, 6)
    got = weighted(checkpointed_log_probs, ids, upstream, chunk_size=chunk_size)
    expected = derive(weighted(full, ids, upstream), hidden, weight)
    assert_same(derive(got, hidden, weight), expected)
    with pytest.raises(ValueError, match=r"hidden \[20, 6\] must be \[B, T, D\]"):
        checkpointed_log_probs(hidden[0], weight, ids[0])


# Memory -------------------------------------------------------------------------------------------


def head_gb(head, tokens, features=1024, vocab=VOCABULARY, device="cpu"):
    hidden, weight = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for shape in ((1, tokens, features), (vocab, features))
    )
    ids = torch.empty(1, tokens, dtype=torch.long, device="meta")
    fn = lambda h, w, i: head(h, w, i).sum().backward()  # noqa: E731
    return peak_memory(fn, hidden, weight, ids, device=device) / GB


def plain_head(hidden, weight, ids):
    return module._head_log_probs(hidden, weight, ids)


def chunked_head(hidden, weight, ids):
    chunks = zip(hidden.split(1024, 1), ids.split(1024, 1), strict=True)
    return torch.cat([plain_head(h, weight, i) for h, i in chunks], 1)


def policy_head(hidden, weight, ids):
    return fused_policy_loss(hidden, weight, ids, torch.ones(len(ids), device=ids.device))


@pytest.mark.parametrize(
    ("head", "short", "long"),
    [(plain_head, 7.47, 29.87), (chunked_head, 3.73, 11.20), (checkpointed_log_probs, 2.18, 2.21)],
)
def test_published_peaks(head, short, long):
    assert round(head_gb(head, 4096), 2) == short
    assert round(head_gb(head, 16_384), 2) == long


@pytest.mark.parametrize(("head", "limit"), [(fused_log_probs, 0.50), (policy_head, 1.2)])
def test_fused_heads_stay_below_their_limits(head, limit):
    short, long = head_gb(head, 4096), head_gb(head, 16_384)
    assert short <= limit and long <= limit
    grown = (16_384 - 4096) * 1024 * (2 + 4) / GB  # grad_hidden in bf16, and its float32 sum
    assert long - short <= grown
    wider = head_gb(head, 4096, vocab=2 * VOCABULARY)
    weights = VOCABULARY * 1024 * (2 if head is fused_log_probs else 4 + 2) / GB
    logits = 0 if head is fused_log_probs else 4 * 512 * VOCABULARY / GB  # of one chunk
    assert wider - short <= max(weights, weights - 2 * VOCABULARY * 1024 / GB + logits) + 0.01


def test_a_frozen_weight_keeps_no_logits():
    def frozen(hidden, weight, ids):
        return policy_head(hidden, weight.detach(), ids)

    short = head_gb(frozen, 4096)
    assert short <= 0.05 and head_gb(frozen, 4096, vocab=2 * VOCABULARY) - short < 1e-3


def test_the_ledger_of_a_short_walk_is_that_of_the_whole_one(monkeypatch):
    """On fake tensors the loops visit three tiles; the peak must be that of all tiles."""
    sizes = {"tokens": 100, "features": 16, "vocab": 500}
    heads = {
        "log_probs": lambda h, w, i: fused_log_probs(h, w, i, chunk_size=32, tile_bytes=2**14),
        "entropy": lambda h, w, i: sum(
            fused_log_probs(h, w, i, chunk_size=32, tile_bytes=2**14, entropy=True)
        ),
        "policy": lambda h, w, i: fused_policy_loss(
            h, w, i, torch.ones(1), chunk_size=32, tile_bytes=2**14
        ),
    }
    brief = {name: head_gb(head, **sizes) for name, head in heads.items()}
    monkeypatch.setattr(module._Plan, "spans", lambda plan, *span: walk(plan, *span))

    def walk(plan, start, stop, size):
        return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]

    assert {name: head_gb(head, **sizes) for name, head in heads.items()} == brief


def test_ledger_counts_known_tensors():
    x = torch.empty(1000, 250, device="meta", requires_grad=True)
    assert peak_memory(lambda x: None, x, device="cpu") == 0
    assert peak_memory(lambda x: x.exp(), x, device="cpu") == 1_000_000
    assert 2e6 <= peak_memory(lambda x: x.exp().sum().backward(), x, device="cpu") < 2.01e6
    half = torch.empty(1000, dtype=torch.bfloat16, device="meta")
    assert peak_memory(lambda x, n: [x + i for i in range(n)], half, 3, device="cpu") == 6000
    assert x.grad is None


def test_ledger_leaves_real_arguments_alone():
    x = torch.ones(100, requires_grad=True)
    assert peak_memory(lambda x: x.exp().sum().backward(), x, device="cpu") >= 800
    assert x.grad is None


@pytest.mark.parametrize(
    "fn", [lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x if x.sum() > 0 else -x]
)
def test_ledger_refuses_what_depends_on_values(fn):
    with pytest.raises(ValueError, match="cannot follow aten"):
        peak_memory(fn, torch.ones(10), device="cpu")


def test_ledger_agrees_with_a_real_run():
    """High-water mark of a process that runs the plain head, within 4%."""
    code = """
import torch
from pathlib import Path
from agentrl.logits import _head_log_probs, peak_memory
torch.set_num_threads(1)
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(l for l in lines if l.startswith(field)).split()[1])
def step(h, w, i):
    _head_log_probs(h, w, i).sum().backward()
def make(tokens):
    return (torch.randn(1, tokens, 64, requires_grad=True),
            torch.randn(20_000, 64, requires_grad=True), torch.zeros(1, tokens, dtype=torch.long))
step(*make(8))
args = make(1500)
ledger = peak_memory(step, *args, device="cpu")
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
step(*args)
print((status("VmHWM") - before) / ledger)
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert abs(float(done.stdout) - 1) < 0.04, done.stdout


# A real model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_head_of_qwen3(tied):
    pytest.importorskip("transformers")
    model = causal_lm("Qwen3", vocab_size=120, hidden_size=16, tie_word_embeddings=tied).double()
    ids = torch.randint(120, (2, 17), generator=torch.Generator().manual_seed(1))

    def gradient(loss):
        model.zero_grad()
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    library = gradient(model(ids, labels=ids).loss)
    states = model.model(ids).last_hidden_state[:, :-1]
    for head in (fused_log_probs, checkpointed_log_probs):
        ours = gradient(-head(states, model.lm_head.weight, ids[:, 1:]).mean())
        # the library computes its loss in float32, whatever the model is
        torch.testing.assert_close(ours[0], library[0].double(), rtol=1e-6, atol=0)
        assert (ours[1] - library[1]).norm() / library[1].norm() < 1e-6
        states = model.model(ids).last_hidden_state[:, :-1]
    logits = model(ids[:, :-1]).logits
    exact = gradient(-logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).mean())
    states = model.model(ids).last_hidden_state[:, :-1]
    fused = gradient(
        fused_policy_loss(states, model.lm_head.weight, ids[:, 1:], torch.ones(2), chunk_size=5)
    )
    assert_same(fused, exact)


# CUDA ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", [False, True])
def test_the_products_of_cuda_on_fake_tensors(entropy, monkeypatch):
    """Dtypes and shapes of what CUDA runs, where factors stay bf16 and torch.mm sums in float32."""
    monkeypatch.setattr(module, "_mixed", lambda x: True)
    for head in (fused_log_probs, policy_head):
        kwargs = {"entropy": entropy} if head is fused_log_probs else {}
        with FakeTensorMode():
            hidden, weight = (
                torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
                for shape in ((2, 900, 16), (700, 16))
            )
            out = head(hidden, weight, torch.empty(2, 900, dtype=torch.long), **kwargs)
            total = sum(x.sum() for x in out) if isinstance(out, tuple) else out.sum()
            total.backward()
        assert total.dtype == torch.float32
        assert hidden.grad.shape == hidden.shape and hidden.grad.dtype == torch.bfloat16
        assert weight.grad.shape == weight.shape and weight.grad.dtype == torch.bfloat16


def test_the_products_of_cuda_emulated(monkeypatch):
    """The same branch with values: bf16 factors, products summed in float32."""

    def multiply(out, a, b, add=False):
        assert a.dtype == b.dtype == torch.bfloat16 and out.dtype == torch.float32
        product = a.float() @ b.float()
        return out.add_(product) if add else out.copy_(product)

    monkeypatch.setattr(module, "_mixed", lambda x: True)
    monkeypatch.setattr(module, "_multiply", multiply)
    hidden, weight, ids, upstream = make((2, 90), 500, 64, dtype=torch.bfloat16)
    weight = 0.25 * weight
    exact = derive(
        lambda h, w: (plain(h, w, ids)[0] * upstream).sum(), hidden.double(), weight.double()
    )
    fused = derive(
        lambda h, w: (fused_log_probs(h, w, ids, chunk_size=50) * upstream).sum(), hidden, weight
    )
    policy = derive(
        lambda h, w: fused_policy_loss(h, w, ids, -upstream, norm_const=1, chunk_size=50),
        hidden,
        weight,
    )
    for got in (fused, policy):
        assert abs(got[0] - exact[0]) < 1e-3
        for a, b in zip(got[1:], exact[1:], strict=True):
            assert (a.double() - b).norm() / b.norm() < 4e-3


@CUDA
def test_cuda_equals_float64():
    hidden, weight, ids, upstream = (
        x.cuda() for x in make((3, 700), 9000, 256, dtype=torch.bfloat16)
    )
    weight = 0.125 * weight
    exact = derive(
        lambda h, w: (plain(h, w, ids)[0] * upstream).sum(), hidden.double(), weight.double()
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        logp = fused_log_probs(hidden, weight, ids)
        fused = derive(lambda h, w: (fused_log_probs(h, w, ids) * upstream).sum(), hidden, weight)
        policy = derive(
            lambda h, w: fused_policy_loss(h, w, ids, -upstream, norm_const=1), hidden, weight
        )
    torch.cuda.current_stream().wait_stream(stream)
    assert (logp - plain(hidden.double(), weight.double(), ids)[0]).abs().max() < 1e-5
    for got in (fused, policy):
        for a, b in zip(got[1:], exact[1:], strict=True):
            assert (a.double() - b).norm() / b.norm() < 4e-3


@CUDA
@pytest.mark.parametrize("tokens", [4096, 16_384])
@pytest.mark.parametrize(
    "head", [plain_head, chunked_head, checkpointed_log_probs, fused_log_probs, policy_head]
)
def test_ledger_agrees_with_the_allocator(head, tokens):
    assert head_gb(head, tokens, device="cuda") == pytest.approx(head_gb(head, tokens), rel=0.06)


def test_public_names():
    assert {"peak_memory", "checkpointed_log_probs", "fused_log_probs", "fused_policy_loss"} <= set(
        module.__all__
    )
