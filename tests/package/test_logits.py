"""The fused output heads against autograd, and the memory ledger against known cases."""

import subprocess
import sys
import threading

import numpy
import pytest
import torch
import torch.distributed.tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import agentrl.logits as module
from agentrl.grpo import (
    LOSS_AGG_MODES,
    aggregate_loss,
    clipped_surrogate_loss,
    kl_estimate,
    reinforce_loss,
)
from agentrl.logits import (
    checkpointed_log_probs,
    fused_log_probs,
    fused_policy_loss,
    peak_memory,
)
from agentrl.policy import selected_log_probs
from benchmarks.models import causal_lm

GB = 1e9
VOCABULARY = 151_936
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make(shape, vocab, features, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, features, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, features, generator=generator, dtype=torch.float64)
    ids = torch.randint(vocab, shape, generator=generator)
    upstream = torch.randn(shape, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), ids, upstream


def plain(hidden, weight, ids, temperature=1.0):
    """Log-probs and entropies, with autograd and nothing clever."""
    logp = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return logp.gather(-1, ids[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def fused_sum(head, ids, upstream, **sizes):
    """The sum of upstream * log p by one of the fused heads, a function of states and weight."""
    if head == "fused_log_probs":
        return lambda h, w: (fused_log_probs(h, w, ids, **sizes) * upstream).sum()
    ids, advantages = ids.reshape(1, -1), -upstream.reshape(1, -1)
    return lambda h, w: fused_policy_loss(
        h.reshape(*ids.shape, -1), w, ids, advantages, norm_const=1.0, **sizes
    )


def derive(fn, hidden, weight):
    """Value and both gradients of a scalar function."""
    h, w = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    value = fn(h, w)
    value.backward()
    return value.detach(), h.grad, w.grad


def assert_same(got, expected, tolerance=1e-12):
    for a, b in zip(got, expected, strict=True):
        scale = max(1.0, b.abs().max().item() if b.numel() else 1.0)
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


# Log-probs and entropy ----------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"chunk": 3, "tile_bytes": 3 * 4 * 8},
        {"temperature": 0.7, "chunk": 4, "tile_bytes": 200},
        {"temperature": 1.7, "mask": True, "chunk": 2, "tile_bytes": 100},
    ],
)
def test_gradcheck(kwargs, entropy):
    hidden, weight, ids, upstream = make((2, 4), 13, 4)
    if kwargs.get("mask"):
        kwargs = kwargs | {"mask": upstream > 0}
    fn = lambda h, w: fused_log_probs(h, w, ids, entropy=entropy, **kwargs)  # noqa: E731
    assert torch.autograd.gradcheck(fn, (hidden.requires_grad_(), weight.requires_grad_()))


@settings(max_examples=60)
@given(
    tokens=st.integers(0, 9),
    vocab=st.integers(1, 40),
    features=st.integers(1, 6),
    chunk=st.none() | st.integers(1, 12),
    tile_bytes=st.none() | st.integers(1, 3000),
    temperature=st.floats(0.2, 3.0),
    masked=st.booleans(),
    entropy=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_equals_autograd(
    tokens, vocab, features, chunk, tile_bytes, temperature, masked, entropy, seed
):
    hidden, weight, ids, upstream = make((tokens,), vocab, features, seed)
    mask = upstream > 0 if masked else None
    upstream = torch.where(upstream.abs() < 0.4, 0.0, upstream)  # some tokens have no gradient
    kept = torch.ones(tokens) if mask is None else mask

    def reference(h, w):
        logp, spread = plain(h, w, ids, temperature)
        total = logp * upstream + (0.3 * spread * upstream if entropy else 0)
        return (total * kept).sum()

    def fused(h, w):
        out = fused_log_probs(
            h,
            w,
            ids,
            temperature=temperature,
            chunk=chunk,
            mask=mask,
            tile_bytes=tile_bytes,
            entropy=entropy,
        )
        return ((out[0] + 0.3 * out[1] if entropy else out) * upstream).sum()

    assert_same(derive(fused, hidden, weight), derive(reference, hidden, weight))


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65])
def test_any_number_of_tokens(tokens):
    hidden, weight, ids, upstream = make((1, tokens), 130, 8)
    fused = lambda h, w: (fused_log_probs(h, w, ids, chunk=64) * upstream).sum()  # noqa: E731
    reference = lambda h, w: (plain(h, w, ids)[0] * upstream).sum()  # noqa: E731
    assert fused_log_probs(hidden, weight, ids).shape == (1, tokens)
    assert_same(derive(fused, hidden, weight), derive(reference, hidden, weight))


def test_extreme_logits_stay_finite():
    hidden, weight, ids, _ = make((6,), 50, 4)
    logp, spread = fused_log_probs(1e4 * hidden, weight, ids, entropy=True, tile_bytes=100)
    assert_same((logp, spread), plain(1e4 * hidden, weight, ids), 1e-11)
    assert (spread >= 0).all()


def test_float32_is_no_further_from_float64_than_the_full_computation():
    hidden, weight, ids, upstream = make((256,), 5000, 64, dtype=torch.float32)
    weight = 0.3 * weight
    exact = derive(
        lambda h, w: (plain(h, w, ids)[0] * upstream).sum(), hidden.double(), weight.double()
    )
    exact_logp = plain(hidden.double(), weight.double(), ids)[0]
    upstream32 = upstream.float()
    full = derive(lambda h, w: (plain(h, w, ids)[0] * upstream32).sum(), hidden, weight)
    fused = derive(lambda h, w: (fused_log_probs(h, w, ids) * upstream32).sum(), hidden, weight)

    def error(x, y):
        return (x.double() - y).norm() / y.norm()

    # Both share the rounding of the logits themselves; 5% is how far that scatters.
    assert error(fused_log_probs(hidden, weight, ids), exact_logp) <= 1.05 * error(
        plain(hidden, weight, ids)[0], exact_logp
    )
    for a, b, c in zip(fused[1:], full[1:], exact[1:], strict=True):
        assert error(a, c) <= 1.05 * error(b, c)


@pytest.mark.parametrize("strength", [0, 8, 16, 24])
@pytest.mark.parametrize("head", ["fused_log_probs", "fused_policy_loss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_likely_tokens(dtype, head, strength):
    """Where p is near 1, p - 1 and all other probabilities cancel: they must not share a sum."""
    hidden, weight, ids, upstream = make((200,), 6000, 64)
    toward = weight[ids] / weight[ids].norm(dim=1, keepdim=True) ** 2
    hidden = (0.25 * hidden + strength * toward).to(dtype)
    weight, upstream = weight.to(dtype), upstream.float()
    fused = fused_sum(head, ids, upstream, chunk=64, tile_bytes=64 * 4 * 512)

    def full(h, w):
        return (module._head_log_probs(h, w, ids) * upstream).sum()

    exact = derive(full, hidden.double(), weight.double())
    for ours, usual, right in zip(
        derive(fused, hidden, weight)[1:], derive(full, hidden, weight)[1:], exact[1:], strict=True
    ):
        error, limit = ((x.double() - right).norm() / right.norm() for x in (ours, usual))
        assert error <= (limit if dtype == torch.float32 else max(0.9 * limit, 3e-3))


@pytest.mark.parametrize("tokens", [40, 300])
def test_bf16_factors_are_summed_in_float32(tokens):
    hidden, weight, ids, upstream = make((tokens,), 3000, 256, dtype=torch.bfloat16)
    weight = weight * 0.125
    logp, spread = fused_log_probs(hidden, weight, ids, entropy=True, chunk=100)
    exact = plain(hidden.double(), weight.double(), ids)
    assert logp.dtype == torch.float32
    assert (logp - exact[0]).abs().max() < 1e-5
    assert (spread - exact[1]).abs().max() < 1e-5
    assert (plain(hidden, weight, ids)[0] - exact[0]).abs().max() > 1e-3  # what bf16 logits do
    _, grad_h, grad_w = derive(
        lambda h, w: (fused_log_probs(h, w, ids, chunk=100) * upstream).sum(), hidden, weight
    )
    _, exact_h, exact_w = derive(
        lambda h, w: (plain(h, w, ids)[0] * upstream).sum(), hidden.double(), weight.double()
    )
    assert grad_h.dtype == grad_w.dtype == torch.bfloat16
    for a, b in ((grad_h, exact_h), (grad_w, exact_w)):
        assert (a.double() - b).norm() / b.norm() < 4e-3  # bf16 keeps 8 bits


@pytest.mark.parametrize("head", ["fused_log_probs", "fused_policy_loss"])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_rows_of_unlikely_tokens_in_bf16(head, spread):
    """The rows of chosen tokens outweigh all others in a norm, and Adam weighs rows alike."""
    hidden, weight, ids, upstream = make((2, 120), 6000, 64)
    hidden, weight = hidden.bfloat16(), (spread / 8 * weight).bfloat16()
    ids = ids // 2  # nobody chooses the second half
    fused = fused_sum(head, ids, upstream.float(), chunk=100)
    exact = derive(
        lambda h, w: (plain(h, w, ids)[0] * upstream).sum(), hidden.double(), weight.double()
    )[2]
    errors = (derive(fused, hidden, weight)[2] - exact).norm(dim=1) / exact.norm(dim=1)
    assert errors.median() < 3e-3 and errors.max() < 8e-3


def test_a_certain_token_and_a_vanishing_gradient_in_bf16():
    hidden, weight, ids, _ = make((3,), 300, 16, dtype=torch.bfloat16)
    hidden[0] = 100 * weight[ids[0]]  # p is 1 to float32
    for upstream in (torch.tensor([1.0, 0.0, 1e38]), torch.tensor([1e-40, 1e-38, 1e-45])):
        _, grad_h, grad_w = derive(
            lambda h, w, g=upstream: (fused_log_probs(h, w, ids) * g).sum(), hidden, weight
        )
        assert grad_h.isfinite().all() and grad_w.isfinite().all()
        assert grad_h[0].abs().max() < 1e-6 and grad_h[1].abs().max() < 1e-30


def test_the_precision_of_the_process_is_restored():
    settings_ = torch.backends.mkldnn.matmul
    before = settings_.fp32_precision
    hidden, weight, ids, _ = make((8,), 30, 4, dtype=torch.bfloat16)
    fused_log_probs(hidden.requires_grad_(), weight, ids).sum().backward()
    assert settings_.fp32_precision == before

    def fail(logp, t):
        raise RuntimeError("inside")

    plan = module._plan(hidden, weight, 1.0, None, None)
    with pytest.raises(RuntimeError, match="inside"):
        module._FusedPolicyLoss.apply(hidden, weight, ids, fail, plan, (True, True))
    assert settings_.fp32_precision == before

    started, ended = threading.Event(), threading.Event()

    def wait(logp, t):
        started.set()
        ended.wait(30)
        return logp.sum()

    slow = threading.Thread(
        target=module._FusedPolicyLoss.apply, args=(hidden, weight, ids, wait, plan, (False, False))
    )
    slow.start()
    started.wait(30)
    fused_log_probs(hidden, weight, ids)  # begins after the other head, and ends before it
    ended.set()
    slow.join()
    assert settings_.fp32_precision == before


def test_masked_tokens_may_hold_anything_and_cost_nothing():
    hidden, weight, ids, _ = make((2, 40), 60, 8)
    mask = torch.arange(40).expand(2, 40) < 10
    ids = torch.where(mask, ids, -100)
    hidden = torch.where(mask[..., None], hidden, torch.nan)
    out = fused_log_probs(hidden, weight, ids, mask=mask)
    expected = plain(hidden[mask], weight, ids[mask])[0]
    assert (out[~mask] == 0).all()
    assert_same((out[mask],), (expected,))

    def count(mask):
        with FlopCounterMode(display=False) as counter:
            derive(
                lambda h, w: fused_log_probs(h, w, ids.clamp(0), mask=mask).sum(), hidden, weight
            )
        return counter.get_total_flops()

    assert count(mask) * 4 == count(torch.ones_like(mask))
    value, grad_h, grad_w = derive(
        lambda h, w: fused_log_probs(h, w, ids, mask=mask).sum(), hidden, weight
    )
    assert (grad_h[~mask] == 0).all() and grad_w.isfinite().all() and value.isfinite()


def test_tokens_without_a_gradient_are_left_out_of_the_backward_pass():
    hidden, weight, ids, _ = make((40,), 60, 8)
    upstream = (torch.arange(40) < 10).double()
    with FlopCounterMode(display=False) as counter:
        derive(lambda h, w: (fused_log_probs(h, w, ids) * upstream).sum(), hidden, weight)
    one = 2 * 40 * 60 * 8
    assert counter.get_total_flops() == one + 3 * one / 4


def test_half_of_the_outputs_or_inputs():
    hidden, weight, ids, upstream = make((12,), 30, 6)
    only_entropy = derive(
        lambda h, w: (fused_log_probs(h, w, ids, entropy=True)[1] * upstream).sum(), hidden, weight
    )
    assert_same(
        only_entropy,
        derive(lambda h, w: (plain(h, w, ids)[1] * upstream).sum(), hidden, weight),
    )
    for frozen in (0, 1):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        leaves[frozen].requires_grad_(False)
        fused_log_probs(*leaves, ids).sum().backward()
        expected = derive(lambda h, w: plain(h, w, ids)[0].sum(), hidden, weight)
        assert leaves[frozen].grad is None
        assert_same((leaves[1 - frozen].grad,), (expected[2 - frozen],))
    with torch.no_grad():
        assert not fused_log_probs(hidden.requires_grad_(), weight, ids).requires_grad


def test_strided_inputs_and_a_tied_weight():
    hidden, weight, ids, _ = make((5, 6), 20, 8)
    strided = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.stack([weight, weight], 2)[..., 0]
    assert not strided.is_contiguous() and not wide.is_contiguous()
    fused = lambda h, w: fused_log_probs(h, w, ids.T.contiguous().T).sum()  # noqa: E731
    reference = derive(lambda h, w: plain(h, w, ids)[0].sum(), hidden, weight)
    assert_same(derive(fused, strided, wide), reference)

    def tied(head):
        table = weight.clone().requires_grad_()
        head(torch.tanh(table[ids]), table).sum().backward()
        return table.grad

    assert_same(
        (tied(lambda h, w: fused_log_probs(h, w, ids)),),
        (tied(lambda h, w: plain(h, w, ids)[0]),),
    )


def test_int32_ids_and_mixed_dtypes():
    hidden, weight, ids, _ = make((12,), 30, 6, dtype=torch.float32)
    low = hidden.bfloat16()
    got = derive(lambda h, w: fused_log_probs(h, w, ids.int()).sum(), low, weight)
    expected = derive(lambda h, w: plain(h.float(), w, ids)[0].sum(), low, weight)
    assert got[1].dtype == torch.bfloat16 and got[2].dtype == torch.float32
    assert_same((got[0], got[2]), (expected[0], expected[2]), 1e-5)


def test_autocast_rounds_the_factors_and_not_the_logits():
    hidden, weight, ids, _ = make((40,), 300, 64, dtype=torch.float32)
    weight = 0.25 * weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = derive(lambda h, w: fused_log_probs(h, w, ids).sum(), hidden, weight)
        logp = fused_log_probs(hidden, weight, ids)
    low_h, low_w = hidden.bfloat16(), weight.bfloat16()
    exact = plain(low_h.double(), low_w.double(), ids)[0]
    assert (logp - exact).abs().max() < 1e-5
    expected = derive(lambda h, w: plain(h, w, ids)[0].sum(), low_h.double(), low_w.double())
    for a, b in zip(got[1:], expected[1:], strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() / b.norm() < 4e-3


# Errors at the door -------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [fused_log_probs, checkpointed_log_probs, fused_policy_loss])
@pytest.mark.parametrize("bad", [-1, 11, 2**40])
def test_an_id_outside_the_vocabulary_is_named(head, bad):
    hidden, weight, ids, _ = make((2, 5), 11, 3)
    ids[1, 3] = bad
    extra = (torch.ones(2),) if head is fused_policy_loss else ()
    with pytest.raises(ValueError, match=rf"ids\[1, 3\] = {bad} is outside 0\.\.10"):
        head(hidden, weight, ids, *extra)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_narrow_ids_are_compared_as_numbers(dtype):
    """The vocabulary does not fit their dtype, and the ids are inside it."""
    hidden, weight, ids, _ = make((2, 5), 70_000, 3)
    ids = ids % 120
    for head in (fused_log_probs, checkpointed_log_probs):
        assert torch.equal(head(hidden, weight, ids.to(dtype)), head(hidden, weight, ids))
    logits = hidden @ weight.T
    assert torch.equal(selected_log_probs(logits, ids.to(dtype)), selected_log_probs(logits, ids))


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


def test_a_clip_may_be_any_number():
    hidden, weight, ids, _ = make((2, 5), 11, 3)
    losses = [
        fused_policy_loss(hidden, weight, ids, torch.ones(2), old_logp=torch.zeros(2, 5), clip=clip)
        for clip in (0.25, (0.25, 0.25), numpy.float32(0.25), torch.tensor(0.25))
    ]
    assert len(set(map(float, losses))) == 1


def test_the_position_is_that_of_the_caller_under_a_mask():
    hidden, weight, ids, _ = make((2, 5), 11, 3)
    ids[0, 0] = ids[1, 3] = 99
    mask = torch.ones(2, 5)
    mask[0] = 0
    with pytest.raises(ValueError, match=r"ids\[1, 3\] = 99"):
        fused_log_probs(hidden, weight, ids, mask=mask)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.zeros(11, 4)}, ValueError, "does not fit weight"),
        ({"weight": torch.nn.Linear(3, 11)}, TypeError, "lm_head.weight, is Linear"),
        ({"ids": [[0] * 5] * 2}, TypeError, "ids must be a tensor, is list"),
        ({"ids": torch.zeros(2, 4, dtype=torch.long)}, ValueError, "ids"),
        ({"ids": torch.zeros(2, 5)}, TypeError, "ids are torch.float32"),
        ({"hidden": torch.zeros(2, 5, 3, dtype=torch.long)}, TypeError, "hidden is torch.int64"),
        ({"mask": torch.ones(5)}, ValueError, "mask"),
        ({"temperature": 0.0}, ValueError, "temperature = 0.0"),
        ({"temperature": float("nan")}, ValueError, "temperature = nan"),
        ({"chunk": 0}, ValueError, "chunk = 0"),
        ({"tile_bytes": 0}, ValueError, "tile_bytes = 0"),
    ],
)
def test_wrong_arguments(change, error, message):
    hidden, weight, ids, _ = make((2, 5), 11, 3)
    arguments = {"hidden": hidden, "weight": weight, "ids": ids} | change
    with pytest.raises(error, match=message):
        fused_log_probs(**arguments)
    with pytest.raises(error, match=message):
        fused_policy_loss(**arguments, advantages=torch.ones(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": torch.ones(5)}, "advantages"),
        ({"old_logp": torch.ones(2, 4)}, "old_logp"),
        ({"ref_logp": torch.ones(5)}, "ref_logp"),
        ({"clip": (-0.1, 0.2)}, "clip"),
        ({"loss_agg_mode": "mean"}, "mode"),
        ({"loss_agg_mode": "constant"}, "norm_const"),
        ({"norm_const": 0}, "norm_const"),
        ({"norm_const": torch.tensor(-1.0)}, "norm_const"),
        ({"kl_coef": 0.1}, "kl_coef = 0.1 needs ref_logp"),
    ],
)
def test_wrong_policy_arguments(change, message):
    hidden, weight, ids, _ = make((2, 5), 11, 3)
    with pytest.raises(ValueError, match=message):
        fused_policy_loss(hidden, weight, ids, **({"advantages": torch.ones(2)} | change))


# The policy loss ----------------------------------------------------------------------------------


def policy_case(seed=0, shape=(4, 9), vocab=37):
    hidden, weight, ids, noise = make(shape, vocab, 6, seed)
    mask = noise > -0.3
    mask[1] = False  # a row without a policy token
    logp = plain(hidden, weight, ids)[0]
    generator = torch.Generator().manual_seed(seed + 1)
    old, ref = (
        logp + 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    advantages = torch.randn(shape[0], generator=generator, dtype=torch.float64)
    return hidden, weight, ids, mask, old, ref, advantages


def unfused_loss(h, w, ids, mask, advantages, old, clip, mode, norm, ref, coef, temperature=1.0):
    logp = plain(h, w, ids, temperature)[0]
    if old is None:
        loss = reinforce_loss(logp, advantages, mask, mode, norm)
    else:
        low, high = clip
        loss = clipped_surrogate_loss(
            logp, old, advantages, mask, mode, norm, clip_low=low, clip_high=high
        )
    if ref is not None:
        loss = loss + coef * aggregate_loss(kl_estimate(logp, ref), mask, mode, norm)
    return loss


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("norm", [None, 50])
@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("clip", [None, (0.2, 0.2), (0.1, 0.4), "reinforce"])
def test_policy_loss_equals_the_unfused_one(mode, norm, kl, clip):
    if mode == "constant" and norm is None:
        norm = 7
    hidden, weight, ids, mask, old, ref, advantages = policy_case()
    old = None if clip == "reinforce" else old
    ref = ref if kl else None
    fused_clip = 0.2 if clip == "reinforce" else clip
    bounds = (float("inf"),) * 2 if clip is None else clip

    def fused(h, w):
        return fused_policy_loss(
            h,
            w,
            ids,
            advantages,
            mask,
            old_logp=old,
            clip=fused_clip,
            norm_const=norm,
            loss_agg_mode=mode,
            ref_logp=ref,
            kl_coef=0.3 if kl else 0.0,
            temperature=0.8,
            chunk=5,
            tile_bytes=5 * 11 * 8,
        )

    def unfused(h, w):
        return unfused_loss(
            h, w, ids, mask, advantages, old, bounds, mode, norm, ref, 0.3, temperature=0.8
        )

    assert_same(derive(fused, hidden, weight), derive(unfused, hidden, weight))


def test_the_clip_is_active_on_both_sides():
    """Without this the grid above could pass on ratios that never meet a bound."""
    hidden, weight, ids, mask, old, _, _ = policy_case()
    ratio = (plain(hidden, weight, ids)[0] - old).exp()[mask]
    assert (ratio < 0.9).any() and (ratio > 1.4).any()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators(kind):
    hidden, weight, ids, mask, _, ref, advantages = policy_case()
    fused = derive(
        lambda h, w: fused_policy_loss(
            h, w, ids, advantages, mask, ref_logp=ref, kl_coef=0.5, kl_kind=kind
        ),
        hidden,
        weight,
    )

    def unfused(h, w):
        logp = plain(h, w, ids)[0]
        kl = aggregate_loss(kl_estimate(logp, ref, kind), mask, "token_mean")
        return reinforce_loss(logp, advantages, mask) + 0.5 * kl

    assert_same(fused, derive(unfused, hidden, weight))


@settings(max_examples=40)
@given(
    rows=st.integers(1, 5),
    tokens=st.integers(1, 8),
    vocab=st.integers(1, 30),
    chunk=st.integers(1, 12),
    tile_bytes=st.none() | st.integers(1, 2000),
    mode=st.sampled_from(LOSS_AGG_MODES),
    per_token=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_policy_loss_property(rows, tokens, vocab, chunk, tile_bytes, mode, per_token, seed):
    hidden, weight, ids, noise = make((rows, tokens), vocab, 4, seed)
    mask = noise > 0
    old = plain(hidden, weight, ids)[0] + 0.3 * noise
    advantages = noise.flip(0) if per_token else noise[:, 0]
    norm = 13.0

    def fused(h, w):
        return fused_policy_loss(
            h,
            w,
            ids,
            advantages,
            mask,
            old_logp=old,
            norm_const=norm,
            loss_agg_mode=mode,
            chunk=chunk,
            tile_bytes=tile_bytes,
        )

    def unfused(h, w):
        return unfused_loss(h, w, ids, mask, advantages, old, (0.2, 0.2), mode, norm, None, 0)

    assert_same(derive(fused, hidden, weight), derive(unfused, hidden, weight))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_microbatches_with_a_global_normaliser_add_up_to_the_batch(mode):
    hidden, weight, ids, mask, old, _, advantages = policy_case()
    norm = {"token_mean": mask.sum(), "constant": torch.tensor(20)}.get(mode, mask.any(1).sum())

    def loss(h, w, rows):
        return fused_policy_loss(
            h[rows],
            w,
            ids[rows],
            advantages[rows],
            mask[rows],
            old_logp=old[rows],
            norm_const=norm,
            loss_agg_mode=mode,
        )

    whole = derive(lambda h, w: loss(h, w, slice(0, 4)), hidden, weight)
    split = derive(
        lambda h, w: sum(loss(h, w, rows) for rows in ([0], [1], [2, 3])), hidden, weight
    )
    assert_same(split, whole)


def test_a_masked_microbatch_is_exactly_zero():
    hidden, weight, ids, _, old, _, advantages = policy_case()
    mask = torch.zeros(ids.shape)
    value, grad_h, grad_w = derive(
        lambda h, w: fused_policy_loss(h, w, ids, advantages, mask, old_logp=old), hidden, weight
    )
    assert value == 0 and (grad_h == 0).all() and (grad_w == 0).all()


def test_masked_policy_inputs_may_hold_anything():
    hidden, weight, ids, mask, old, ref, advantages = policy_case()
    expected = derive(
        lambda h, w: fused_policy_loss(
            h, w, ids, advantages, mask, old_logp=old, ref_logp=ref, kl_coef=0.1
        ),
        hidden,
        weight,
    )
    nan = torch.nan
    hidden, ids = torch.where(mask[..., None], hidden, nan), torch.where(mask, ids, -100)
    old, ref = torch.where(mask, old, nan), torch.where(mask, ref, -torch.inf)
    got = derive(
        lambda h, w: fused_policy_loss(
            h, w, ids, advantages, mask, old_logp=old, ref_logp=ref, kl_coef=0.1
        ),
        hidden,
        weight,
    )
    assert_same(got, expected)


def test_backward_scales_and_can_run_twice():
    hidden, weight, ids, mask, old, _, advantages = policy_case()
    once = derive(
        lambda h, w: fused_policy_loss(h, w, ids, advantages, mask, old_logp=old), hidden, weight
    )
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = fused_policy_loss(h, w, ids, advantages, mask, old_logp=old)
    loss.backward(torch.tensor(2.0, dtype=torch.float64), retain_graph=True)
    loss.backward()
    assert_same((loss.detach(), h.grad / 3, w.grad / 3), once)


def test_gradients_may_be_changed_between_two_backward_passes():
    hidden, weight, ids, mask, _, _, advantages = policy_case()
    for loss_fn in (
        lambda h, w: fused_policy_loss(h, w, ids, advantages, mask),
        lambda h, w: fused_log_probs(h, w, ids, mask=mask).sum(),
    ):
        _, *once = derive(loss_fn, hidden, weight)
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = loss_fn(h, w)
        for _ in range(3):
            loss.backward(retain_graph=True)
            assert_same((h.grad, w.grad), once)
            h.grad.zero_()
            w.grad.zero_()


@pytest.mark.parametrize("frozen", [0, 1])
def test_policy_gradient_with_one_side_frozen(frozen):
    hidden, weight, ids, mask, old, _, advantages = policy_case()
    sizes = {"chunk": 5, "tile_bytes": 5 * 7 * 8}
    loss_fn = lambda h, w: fused_policy_loss(  # noqa: E731
        h, w, ids, advantages, mask, old_logp=old, **sizes
    )
    expected = derive(loss_fn, hidden, weight)
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    leaves[frozen].requires_grad_(False)
    loss = loss_fn(*leaves)
    loss.backward()
    assert leaves[frozen].grad is None
    assert_same((loss.detach(), leaves[1 - frozen].grad), (expected[0], expected[2 - frozen]))


@pytest.mark.parametrize("head", ["fused_log_probs", "fused_policy_loss"])
def test_what_is_not_finite_does_not_become_a_number(head):
    hidden, weight, ids, _ = make((1, 6), 40, 4)
    hidden[0, 2, 1] = torch.nan

    def loss_fn(h, w):
        if head == "fused_log_probs":
            return fused_log_probs(h, w, ids, tile_bytes=300).sum()
        return fused_policy_loss(h, w, ids, torch.ones(1), tile_bytes=300)

    value, grad_h, grad_w = derive(loss_fn, hidden, weight)
    assert value.isnan() and grad_h[0, 2].isnan().all() and grad_w.isnan().all()


def test_training_in_float16_is_refused():
    hidden, weight, ids, _ = make((1, 6), 40, 4, dtype=torch.float16)
    loss = fused_policy_loss(hidden, weight, ids, torch.ones(1))
    assert loss.isfinite()
    with pytest.raises(TypeError, match="float16"):
        fused_policy_loss(hidden.requires_grad_(), weight, ids, torch.ones(1))


def test_a_checkpoint_around_the_loss_runs_it_twice():
    hidden, weight, ids, mask, _, _, advantages = policy_case()
    runs = []

    def block(h, w):
        runs.append(1)
        return fused_policy_loss(2 * h, w, ids, advantages, mask, chunk=2)

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
    assert_same((logp,), (torch.where(mask, plain(hidden, weight, ids)[0], 0.0),))
    assert not loss.requires_grad and not logp.requires_grad
    assert counter.get_total_flops() == 2 * int(mask.sum()) * weight.numel()  # one product


def test_policy_loss_takes_three_products_and_log_probs_four():
    hidden, weight, ids, _ = make((2, 20), 60, 8)

    def count(loss):
        with FlopCounterMode(display=False) as counter:
            derive(loss, hidden, weight)
        return counter.get_total_flops() / (2 * hidden.numel() * len(weight))

    assert count(lambda h, w: plain(h, w, ids)[0].sum()) == 3
    assert count(lambda h, w: checkpointed_log_probs(h, w, ids).sum()) == 4
    assert count(lambda h, w: fused_log_probs(h, w, ids, chunk=7).sum()) == 4
    assert count(lambda h, w: fused_policy_loss(h, w, ids, torch.ones(2), chunk=7)) == 3
    assert count(lambda h, w: fused_policy_loss(h, w.detach(), ids, torch.ones(2)) + w.sum()) == 2


@pytest.mark.parametrize("chunk", [64, 512])
def test_policy_loss_from_bf16(chunk):
    hidden, weight, ids, upstream = make((2, 100), 3000, 256, dtype=torch.bfloat16)
    weight = weight * 0.125

    def fused(h, w):
        return fused_policy_loss(h, w, ids, -upstream, norm_const=1, chunk=chunk)

    exact_logp = plain(hidden.double(), weight.double(), ids)[0]
    logp = fused_policy_loss(hidden, weight, ids, upstream, chunk=chunk, return_logp=True)[1]
    assert (logp - exact_logp).abs().max() < 1e-5
    got = derive(fused, hidden, weight)
    exact = derive(
        lambda h, w: (plain(h, w, ids)[0] * upstream).sum(), hidden.double(), weight.double()
    )
    for a, b in zip(got[1:], exact[1:], strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() / b.norm() < 4e-3


@pytest.mark.parametrize("chunk", [3, 512])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_policy_loss_of_tiles_far_below_the_largest_logit(scale, chunk):
    """The running maximum of the first tiles may be hundreds below the last one."""
    hidden, weight, ids, upstream = make((2, 5), 50, 4)
    hidden = scale * hidden
    got = derive(
        lambda h, w: fused_policy_loss(
            h, w, ids, -upstream, norm_const=1, chunk=chunk, tile_bytes=8 * 4 * min(chunk, 10)
        ),
        hidden,
        weight,
    )
    assert all(x.isfinite().all() for x in got)
    reference = derive(lambda h, w: (plain(h, w, ids)[0] * upstream).sum(), hidden, weight)
    assert_same(got, reference, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chunk", [40, 512])
def test_gradients_of_half_precision_stay_close_over_a_wide_vocabulary(dtype, chunk):
    """The sum of e^(z - max) is beyond the range of float16 here."""
    hidden, weight, ids, upstream = make((1, 60), 80_000, 8, dtype=dtype)
    hidden = 0.05 * hidden
    exact = derive(
        lambda h, w: (plain(h, w, ids)[0] * upstream).sum(), hidden.double(), weight.double()
    )
    fused = derive(
        lambda h, w: (fused_log_probs(h, w, ids, chunk=chunk) * upstream).sum(), hidden, weight
    )
    heads = [fused]
    if dtype != torch.float16:
        heads.append(
            derive(
                lambda h, w: fused_policy_loss(h, w, ids, -upstream, norm_const=1, chunk=chunk),
                hidden,
                weight,
            )
        )
    for got in heads:
        for a, b in zip(got[1:], exact[1:], strict=True):
            assert (a.double() - b).norm() / b.norm() < 4e-3


# Checkpointing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_checkpointed_equals_full(chunk_size):
    hidden, weight, ids, upstream = make((3, 20), 40, 6)
    got = derive(
        lambda h, w: (checkpointed_log_probs(h, w, ids, chunk_size) * upstream).sum(),
        hidden,
        weight,
    )
    assert_same(got, derive(lambda h, w: (plain(h, w, ids)[0] * upstream).sum(), hidden, weight))
    with pytest.raises(ValueError, match="chunk_size = 0"):
        checkpointed_log_probs(hidden, weight, ids, 0)
    with pytest.raises(ValueError, match=r"ids \[20\] must be \[B, T\]"):
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


def full_head(hidden, weight, ids):
    return module._head_log_probs(hidden, weight, ids)


def chunked_head(hidden, weight, ids):
    chunks = zip(hidden.split(1024, 1), ids.split(1024, 1), strict=True)
    return torch.cat([full_head(h, weight, i) for h, i in chunks], 1)


def policy_head(hidden, weight, ids):
    return fused_policy_loss(hidden, weight, ids, torch.ones(len(ids), device=ids.device))


@pytest.mark.parametrize(
    ("head", "short", "long"),
    [(full_head, 7.47, 29.87), (chunked_head, 3.73, 11.20), (checkpointed_log_probs, 2.18, 2.21)],
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
        "log_probs": lambda h, w, i: fused_log_probs(h, w, i, chunk=32, tile_bytes=2**14),
        "entropy": lambda h, w, i: sum(
            fused_log_probs(h, w, i, chunk=32, tile_bytes=2**14, entropy=True)
        ),
        "policy": lambda h, w, i: fused_policy_loss(
            h, w, i, torch.ones(1), chunk=32, tile_bytes=2**14
        ),
    }
    brief = {name: head_gb(head, **sizes) for name, head in heads.items()}
    plan = module._plan
    monkeypatch.setattr(module, "_plan", lambda *args: plan(*args)._replace(brief=False))
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
        fused_policy_loss(states, model.lm_head.weight, ids[:, 1:], torch.ones(2), chunk=5)
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
        lambda h, w: (fused_log_probs(h, w, ids, chunk=50) * upstream).sum(), hidden, weight
    )
    policy = derive(
        lambda h, w: fused_policy_loss(h, w, ids, -upstream, norm_const=1, chunk=50), hidden, weight
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
    "head", [full_head, chunked_head, checkpointed_log_probs, fused_log_probs, policy_head]
)
def test_ledger_agrees_with_the_allocator(head, tokens):
    assert head_gb(head, tokens, device="cuda") == pytest.approx(head_gb(head, tokens), rel=0.06)


def test_public_names():
    assert {"peak_memory", "checkpointed_log_probs", "fused_log_probs", "fused_policy_loss"} <= set(
        module.__all__
    )
