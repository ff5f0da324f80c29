"""Group RL: advantages, averages, one update, the base policy's cache, and a run that is killed."""

import copy
import json
import math
import os
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from agentrl import grpo
from agentrl.course.grpo import book_config
from agentrl.grpo import (
    ADVANTAGES,
    LOSS_AGG_MODES,
    RLConfig,
    aggregate_loss,
    clipped_surrogate_loss,
    compute_advantages,
    draw_tasks,
    entropy,
    kl_estimate,
    reinforce_loss,
    rl_update,
    sample_step,
    snap_weights,
    step_normalizer,
    train_rl,
    zero_advantage_groups,
)
from agentrl.gym import ACTIONS, BugFixEnv, build_tokenizer, make_env, make_tasks
from agentrl.packing import pack_sequences
from agentrl.policy import TinyAgent
from agentrl.rollout import Trajectory, collate, sample_groups

ROOT = Path(__file__).resolve().parents[2]
TASKS = make_tasks()
TRAIN = make_tasks("train")
TOK = build_tokenizer(TASKS)
MODES = pytest.mark.parametrize("mode", LOSS_AGG_MODES)
EACH_ADVANTAGE = pytest.mark.parametrize("kind", ADVANTAGES)
KL_KINDS = ("k1", "k2", "k3")
NAN, INF = math.nan, math.inf


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=gen(seed), dtype=torch.float64)


# Advantages -----------------------------------------------------------------------------------


def by_hand(group, kind):
    n = len(group)
    mean = math.fsum(group) / n
    if max(group) == min(group):
        return [0.0] * n
    if kind == "leave_one_out":
        return [r - (math.fsum(group) - r) / (n - 1) for r in group]
    if kind == "mean_std":
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / (n - 1))
        return [(r - mean) / (std + 1e-6) for r in group]
    return [r - mean for r in group]


@EACH_ADVANTAGE
@given(st.data(), st.integers(1, 8), st.integers(1, 4))
def test_advantages_against_a_loop(kind, data, size, groups):
    reward = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-10, 10))
    rewards = [[data.draw(reward) for _ in range(size)] for _ in range(groups)]
    got = compute_advantages([r for group in rewards for r in group], size, kind)
    expected = torch.tensor([by_hand(group, kind) for group in rewards], dtype=torch.float64)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected.flatten(), rtol=1e-9, atol=1e-9)
    assert got.view(groups, size).sum(1).abs().max() < 1e-6


@EACH_ADVANTAGE
@given(
    st.sampled_from([0.0, 0.1, 0.3, 1 / 3, 0.7, 1.0, -0.1, 1e-300, 1e300])
    | st.floats(-1e300, 1e300),
    st.integers(1, 17),
)
def test_equal_rewards_give_exactly_zero(kind, reward, size):
    got = compute_advantages([reward] * size + [reward / 2] * size, size, kind)
    assert (got == 0).all()
    assert zero_advantage_groups([reward] * size, size).tolist() == [True]


@EACH_ADVANTAGE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_equal_rewards_whose_standard_deviation_rounds(kind, dtype):
    for reward in (0.1, 0.3):
        for size in (3, 4, 8, 1_000_000):
            rewards = torch.full((size,), reward, dtype=dtype)
            assert (compute_advantages(rewards, size, kind) == 0).all()
            assert zero_advantage_groups(rewards, size).all()


def test_statistics_are_the_groups_own_and_not_the_batchs():
    rewards = [0.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 105.0]
    got = compute_advantages(rewards, 4).view(2, 4)
    torch.testing.assert_close(got[0], got[1], rtol=1e-5, atol=0)
    two, four = (compute_advantages([0.0, 1.0] * 2, size, "mean") for size in (2, 4))
    assert not torch.equal(two, four * 2)
    shifted = compute_advantages([r + 7 * (i < 4) for i, r in enumerate(rewards)], 4, "mean")
    torch.testing.assert_close(shifted, compute_advantages(rewards, 4, "mean"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [list, numpy.array, torch.tensor])
def test_rewards_of_every_kind(make):
    assert zero_advantage_groups(make([0.0, 0.0, 1.0, 0.0, 1.0, 1.0]), 2).tolist() == [1, 0, 1]
    assert compute_advantages(make([1, 0]), 2, "mean").tolist() == [0.5, -0.5]
    for kind in ADVANTAGES:
        assert compute_advantages(make([1.0, 0.0, 0.5]), 1, kind).tolist() == [0.0] * 3


# Averages -------------------------------------------------------------------------------------


def average_by_hand(values, mask, mode, norm_const):
    pairs = (zip(*row, strict=True) for row in zip(values.tolist(), mask.tolist(), strict=True))
    rows = [row for row in ([v for v, m in pair if m] for pair in pairs) if row]
    means = [math.fsum(row) / len(row) for row in rows]
    total = math.fsum(means if mode == "seq_mean_token_mean" else [v for row in rows for v in row])
    count = sum(map(len, rows)) if mode == "token_mean" else len(rows)
    return total / (norm_const or max(count, 1))


def batch_of(B, T, seed):
    """Return values and a mask of runs of various lengths, some empty."""
    lengths = torch.randint(0, T + 1, (B,), generator=gen(seed))
    return randn(B, T, seed=seed + 1), torch.arange(T)[None] < lengths[:, None]


@MODES
@given(
    st.integers(1, 5), st.integers(1, 7), st.integers(0, 2**31), st.none() | st.floats(0.1, 1000)
)
def test_averages_against_a_loop(mode, B, T, seed, norm_const):
    if mode == "constant" and norm_const is None:
        norm_const = 17.0
    values, mask = batch_of(B, T, seed)
    got = aggregate_loss(values, mask, mode, norm_const)
    assert got.shape == ()
    expected = average_by_hand(values, mask, mode, norm_const)
    assert got.item() == pytest.approx(expected, rel=1e-12, abs=1e-14)


@MODES
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.float64])
def test_a_mask_and_a_denominator_of_any_type(mode, dtype):
    values, mask = batch_of(4, 6, 3)
    expected = aggregate_loss(values, mask, mode, 5.0)
    assert aggregate_loss(values, mask.to(dtype), mode, 5) == expected
    for norm_const in (torch.tensor(5.0).double(), torch.tensor(5), numpy.float64(5)):
        assert aggregate_loss(values, mask, mode, norm_const) == expected


@MODES
@pytest.mark.parametrize("poison", [0.0, NAN, INF])
@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (3, 0), (0, 4)])
def test_an_empty_mask_gives_exactly_zero(mode, poison, shape):
    values = torch.full(shape, poison, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(shape)
    for norm_const in (8.0, torch.tensor(0), *([] if mode == "constant" else [None])):
        values.grad = None
        loss = aggregate_loss(values, mask, mode, norm_const)
        loss.backward()
        assert loss.item() == 0.0
        assert values.grad.shape == shape and (values.grad == 0).all()


# The denominator of a step --------------------------------------------------------------------


@MODES
@given(st.integers(1, 20), st.integers(2, 9), st.integers(9, 30), st.integers(0, 2**31))
def test_padded_packed_and_split_batches_have_one_denominator(mode, N, longest, row, seed):
    trajs = []
    for n in torch.randint(2, longest + 1, (N,), generator=gen(seed)).tolist():
        mask = torch.rand(n - 1, generator=gen(seed + n)) < torch.rand(1, generator=gen(seed + N))
        trajs.append(Trajectory(torch.arange(n), mask, torch.zeros(n - 1), 0.0))
    batch, packed = collate(trajs, 0), pack_sequences(trajs, row)
    tokens = sum(int(traj.action_mask.sum()) for traj in trajs)
    sequences = sum(bool(traj.action_mask.any()) for traj in trajs)
    expected = max(tokens if mode == "token_mean" else sequences, 1) * (
        33 if mode == "constant" else 1
    )
    halves = [pack_sequences(part, row) for part in (trajs[: N // 2], trajs[N // 2 :]) if part]
    for batches in ([batch], batch["action_mask"].split(3), [packed], halves):
        assert step_normalizer(batches, mode, max_tokens=33) == expected
    filler = {**packed, "action_mask": torch.zeros_like(packed["action_mask"])}
    assert step_normalizer([filler, packed], mode, max_tokens=33) == expected


def test_denominators_by_hand_and_of_sixty_four_sequences_in_four_rows():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 0]])
    got = [step_normalizer([mask], mode, max_tokens=10) for mode in LOSS_AGG_MODES]
    assert got == [3, 2, 2, 20]
    one = Trajectory(torch.arange(16), torch.ones(15), torch.zeros(15), 0.0)
    packed = pack_sequences([one] * 64, 256)
    assert len(packed["ids"]) == 4
    got = [step_normalizer([packed], mode, max_tokens=256) for mode in LOSS_AGG_MODES]
    assert got == [64 * 15, 64, 64, 16_384]


# What is refused, and what extreme numbers give -----------------------------------------------

X, M, A = torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2)
GRIDS = (0.0, -0.5, 0.3, NAN, INF)
RUNS = {
    "lr": (-1e-3, INF), "adam_eps": (-1.0,), "clip": (-0.1, NAN), "clip_high": (-0.1,),
    "max_grad_norm": (-1.0, 0.0), "weight_grid": GRIDS, "advantage": ("std",), "group_size": (0,),
    "loss_agg_mode": ("mean",), "prompts_per_step": (0,), "updates_per_step": (0,),
    "microbatch_size": (0,), "temperature": (0.0,),
}  # fmt: skip
BAD_VALUES = [
    (compute_advantages, ([0, 1], 2, "std"), "kind"),
    (compute_advantages, ([0.0] * 7, 4), "group_size = 4"),
    (compute_advantages, ([0.0, 1.0], 0), "group_size = 0"),
    (compute_advantages, ([0.0, 1.0, NAN, NAN], 4), r"rewards\[2\]"),
    (compute_advantages, (torch.tensor([0.0, -INF]), 2), r"rewards\[1\]"),
    (zero_advantage_groups, (torch.zeros(5), 2), "group_size = 2"),
    (zero_advantage_groups, ([0.0, NAN], 2), r"rewards\[1\]"),
    (aggregate_loss, (X, M, "mean"), "loss_agg_mode"),
    (aggregate_loss, (X, M[:, :2], "token_mean"), "mask"),
    (aggregate_loss, (X[0], M[0], "token_mean"), "values"),
    (aggregate_loss, (X, M, "constant"), "norm_const"),
    *((aggregate_loss, (X, M, "token_mean", n), "norm_const") for n in (0, 0.0, -1, NAN, A)),
    *((aggregate_loss, (X, M, "token_mean", torch.tensor(n)), "norm_const") for n in (0, -1, NAN)),
    (reinforce_loss, (X[:, :1], A, M), "mask"),
    *((reinforce_loss, (X, randn(*n), M), "advantages") for n in ((1,), (1, 3), (2, 1), (3,))),
    *((clipped_surrogate_loss, (X, randn(*n), A, M), "old_logp") for n in ((3,), (1, 3), (2, 1))),
    *((partial(clipped_surrogate_loss, clip_low=n), (X, X, A, M), "clip_low") for n in (-0.1, NAN)),
    (partial(clipped_surrogate_loss, clip_high=-0.1), (X, X, A, M), "clip_high"),
    (kl_estimate, (X, X, "k4"), "kind"),
    *((kl_estimate, (A, A[:, None], kind), "ref_logp") for kind in KL_KINDS),
    (kl_estimate, (X, X, "k3", M[0]), "mask"),
    (step_normalizer, ([M], "mean"), "loss_agg_mode"),
    (step_normalizer, ([],), "batches"),
    (step_normalizer, ([M, M / 2],), r"batches\[1\]\[0, 0\]"),
    (step_normalizer, (M,), r"batches\[0\]"),
    (step_normalizer, ([{"action_mask": M, "segment_ids": X}],), "action_mask"),
    *((snap_weights, (nn.Linear(1, 1), grid), "grid") for grid in GRIDS),
    *((lambda v, n=n: RLConfig(**{n: v}), (v,), n) for n, values in RUNS.items() for v in values),
]
BAD_KINDS = [
    (compute_advantages, ({"rewards": A}, 2), "rewards"),
    *((step_normalizer, ([M, b],), r"batches\[1\]") for b in (M.numpy(), M.tolist(), {"ids": X})),
    (step_normalizer, ([M], "constant"), "max_tokens"),
]
RIGHT = {
    aggregate_loss: {"values": X, "mask": M, "loss_agg_mode": "token_mean"},
    reinforce_loss: {"logp": X, "advantages": A, "mask": M},
    clipped_surrogate_loss: {"logp": X, "old_logp": X, "advantages": A, "mask": M},
    kl_estimate: {"logp": X, "ref_logp": X, "mask": M},
    entropy: {"logits": X},
}


@pytest.mark.parametrize(
    ("error", "call", "arguments", "names"),
    [(ValueError, *row) for row in BAD_VALUES] + [(TypeError, *row) for row in BAD_KINDS],
)
def test_bad_input_is_named(error, call, arguments, names):
    with pytest.raises(error, match=names):
        call(*arguments)


@pytest.mark.parametrize("call", RIGHT)
def test_lists_and_arrays_and_weighted_masks_are_refused(call):
    call(**RIGHT[call])
    for name, value in RIGHT[call].items():
        for other in (value.numpy(), value.tolist()) if isinstance(value, torch.Tensor) else ():
            with pytest.raises(TypeError, match=name):
                call(**{**RIGHT[call], name: other})
    if "mask" in RIGHT[call]:
        with pytest.raises(ValueError, match=r"mask\[0, 0\]"):
            call(**{**RIGHT[call], "mask": M / 2})


def test_the_grid_is_off_until_the_book_asks_for_it_and_refuses_an_lr_that_it_rounds_away():
    plain, book = RLConfig(seed=3), book_config(seed=3)
    assert (plain.weight_grid, plain.adam_eps) == (None, 1e-8)
    assert (book.weight_grid, book.adam_eps) == (2.0**-16, 1e-5)
    assert vars(book) == {**vars(plain), "weight_grid": 2.0**-16, "adam_eps": 1e-5}
    assert RLConfig(clip_high=INF, max_grad_norm=INF).max_grad_norm == INF, "no bound"
    with pytest.raises(ValueError, match="weight_grid"):
        book_config(lr=1e-6)
    assert RLConfig(lr=1e-6).lr == book_config(lr=1e-6, weight_grid=None).lr == 1e-6
    assert book_config(lr=2.0**-17).lr == 2.0**-17 and book_config(lr=0.0).lr == 0


MEASURES = {
    "surrogate": lambda x, y: clipped_surrogate_loss(x, y, -torch.ones(len(x)), torch.ones_like(x)),
    "reinforce": lambda x, y: reinforce_loss(x, y[:, 0], torch.ones_like(x)),
    "entropy": lambda x, y: entropy(torch.stack([x, y], -1)),
    **{kind: partial(kl_estimate, kind=kind) for kind in KL_KINDS},
    **{m: lambda x, _, m=m: aggregate_loss(x, torch.ones_like(x), m, 1e6) for m in LOSS_AGG_MODES},
}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pair", [(-1e4, -1.0), (-1.0, -1e4), (-1e4, -1e4), (-1.0, -1.0078125)])
def test_extreme_and_near_log_probs_over_a_million_tokens(measure, dtype, pair):
    logp, old = (torch.full((1000, 1000), x).to(dtype) for x in pair)
    logp.requires_grad_()
    got, exact = MEASURES[measure](logp, old), MEASURES[measure](logp.double(), old.double())
    assert got.dtype == torch.float32 and got.isfinite().all()
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)
    got.sum().backward()
    assert logp.grad.isfinite().all()


def test_half_precision_counts_and_ratios_are_at_least_float32():
    assert step_normalizer([torch.ones(1000, 1000).half()]) == 1e6  # would round, or overflow
    assert step_normalizer([torch.ones(1, 1001).bfloat16()]) == 1001
    logp = torch.full((1, 1), 6.0, dtype=torch.float16, requires_grad=True)  # a ratio of 403
    one = torch.ones(1, 1)
    clipped_surrogate_loss(logp, torch.zeros_like(logp), -one, one).backward()
    assert abs(logp.grad.item() - math.exp(6)) < 0.5


@pytest.mark.parametrize(
    ("d", "alive"), [(-199, 0), (-21, 0), (-19, 1), (19, 1), (21, 0), (2e3, 0)]
)
def test_log_ratios_are_clamped_and_have_no_gradient_beyond(d, alive):  # OpenRLHF #1335
    logp = torch.tensor([[-1.0]], requires_grad=True)
    old, one = logp.detach() - d, torch.ones(1, 1)
    sign = -math.copysign(1, d) * one  # so that no bound of the clip cuts the gradient already
    for loss in (kl_estimate(logp, old).sum(), clipped_surrogate_loss(logp, old, sign, one)):
        (grad,) = torch.autograd.grad(loss, logp)
        assert loss.isfinite() and loss.abs() <= math.exp(20) * 1.001
        assert bool(grad != 0) == bool(alive)
    cut = clipped_surrogate_loss(logp, old, one, one).item()
    assert cut == pytest.approx(-min(math.exp(max(min(d, 20), -20)), 1.2))


# Losses ---------------------------------------------------------------------------------------


def clipped_by_hand(logp, old, adv, low, high):
    ratio = math.exp(logp - old)
    return -min(ratio * adv, min(max(ratio, 1 - low), 1 + high) * adv)


@MODES
@given(st.integers(0, 2**31), st.floats(0, 0.9), st.floats(0, 2), st.booleans())
def test_losses_against_a_loop(mode, seed, low, high, spread):
    logp, mask = batch_of(3, 5, seed)
    old, adv = logp + 0.5 * randn(3, 5, seed=seed + 2), randn(3, 5, seed=seed + 3)
    adv = adv if spread else adv[:, 0]
    table = adv if spread else adv[:, None].expand(3, 5)
    tokens = zip(*(x.flatten().tolist() for x in (logp, old, table)), strict=True)
    clipped = torch.tensor([clipped_by_hand(*x, low, high) for x in tokens], dtype=torch.float64)
    bounds = {"clip_low": low, "clip_high": high}
    for got, values in (
        (clipped_surrogate_loss(logp, old, adv, mask, mode, 7.0, **bounds), clipped),
        (reinforce_loss(logp, adv, mask, mode, 7.0), (-table * logp).flatten()),
    ):
        expected = average_by_hand(values.view(3, 5), mask, mode, 7.0)
        assert got.item() == pytest.approx(expected, rel=1e-11, abs=1e-13)


@pytest.mark.parametrize(
    ("ratio", "adv", "slope"),
    [
        (1.0, 1.0, -1.0), (1.0, -1.0, 1.0),
        (1.25, 1.0, -1.25), (1.35, 1.0, 0.0), (1.35, -1.0, 1.35),  # cut above for good tokens
        (0.85, -1.0, 0.85), (0.75, -1.0, 0.0), (0.75, 1.0, -0.75),  # and below for bad ones
    ],
)  # fmt: skip
def test_where_the_gradient_is_cut(ratio, adv, slope):
    logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    one, adv = torch.ones(1, 1), torch.tensor([adv])
    loss = clipped_surrogate_loss(logp, torch.zeros(1, 1), adv, one, clip_low=0.2, clip_high=0.3)
    loss.backward()
    assert logp.grad.item() == pytest.approx(slope, abs=1e-12)


def test_at_ratio_one_the_surrogate_has_the_gradient_of_reinforce():
    logp, mask = batch_of(4, 6, 8)
    adv, grads = randn(4, seed=1), []
    for loss in (
        lambda x: clipped_surrogate_loss(x, logp, adv, mask),
        lambda x: clipped_surrogate_loss(x, x, adv, mask),  # what is recorded gets no gradient
        lambda x: reinforce_loss(x, adv, mask),
    ):
        x = logp.clone().requires_grad_()
        loss(x).backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1]) and grads[0][mask].abs().min() > 0
    torch.testing.assert_close(grads[0], grads[2], rtol=1e-14, atol=1e-16)


@MODES
@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e4])
@pytest.mark.parametrize("where", ["logp", "old", "advantages"])
def test_masked_entries_are_never_read(mode, poison, where):
    logp, mask = batch_of(4, 6, 2)
    clean = {"logp": logp, "old": logp + 0.1, "advantages": randn(4, 6, seed=4)}
    dirty = {**clean, where: clean[where].masked_fill(~mask, poison)}
    for loss in (
        lambda x, y, a: aggregate_loss(x, mask, mode, 9.0),
        lambda x, y, a: reinforce_loss(x, a, mask, mode, 9.0),
        lambda x, y, a: clipped_surrogate_loss(x, y, a, mask, mode, 9.0),
        *(lambda x, y, a, k=k: (kl_estimate(x, y, k, mask) / 9).sum() for k in KL_KINDS),
    ):
        x, y = (d["logp"].clone().requires_grad_() for d in (clean, dirty))
        a, b = (loss(z, d["old"], d["advantages"]) for z, d in ((x, clean), (y, dirty)))
        a.backward()
        b.backward()
        assert torch.equal(a, b) and torch.equal(x.grad, y.grad) and (y.grad[~mask] == 0).all()


@given(st.floats(-20, 20))
def test_k3_is_never_negative_and_exact_near_zero(d):
    logp, zero = torch.tensor([d, 0.0], dtype=torch.float64)
    assert kl_estimate(logp, zero).item() >= 0
    small = logp * 1e-9
    assert kl_estimate(small, zero).item() == pytest.approx((d * 1e-9) ** 2 / 2, abs=1e-23)


@given(st.integers(2, 12), st.integers(0, 99))
def test_the_mean_and_the_gradient_of_each_kl_estimator(words, seed):
    """Expected over tokens drawn from p, by enumeration."""
    logits = randn(words, seed=seed).requires_grad_()
    q = randn(words, seed=seed + 100).log_softmax(0)

    def of(loss_of):
        value = loss_of(logits.log_softmax(0))
        return value.detach(), torch.autograd.grad(value, logits)[0]

    drawn = logits.detach().softmax(0)
    k1, k2, k3 = (of(lambda p, k=k: (drawn * kl_estimate(p, q, k)).sum()) for k in KL_KINDS)
    forward = of(lambda p: (p.exp() * (p - q)).sum())  # KL(p, q)
    reverse = of(lambda p: (q.exp() * (q - p)).sum())  # KL(q, p)
    square = of(lambda p: (drawn * (p - q) ** 2 / 2).sum())
    pairs = [(k1[0], forward[0]), (k2[0], square[0]), (k3[0], forward[0])]
    pairs += [(k1[1], torch.zeros_like(q)), (k2[1], forward[1]), (k3[1], reverse[1])]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert torch.equal(kl_estimate(logits, q), kl_estimate(logits, q, "k3"))


def test_advantages_are_constants():
    logp, advantages = torch.randn(2, 3, requires_grad=True), torch.ones(2, requires_grad=True)
    reinforce_loss(logp, advantages, torch.ones(2, 3)).backward()
    clipped_surrogate_loss(logp, logp.detach(), advantages, torch.ones(2, 3)).backward()
    assert advantages.grad is None and logp.grad is not None


def test_entropy():
    assert entropy(torch.zeros(3, 8)).tolist() == pytest.approx([math.log(8)] * 3)
    logits = randn(2, 3, 5)
    p = logits.softmax(-1)
    torch.testing.assert_close(entropy(logits), -(p * p.log()).sum(-1), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(entropy(logits + 1000), entropy(logits), rtol=1e-9, atol=1e-9)


# One step -------------------------------------------------------------------------------------


class Eager(TinyAgent):
    """A small random policy that likes actions and program tokens, so that much happens."""

    def __init__(self):
        super().__init__(len(TOK), d_model=16, n_layers=1, n_heads=2, max_len=64)
        liked = [3.0 * (t in ACTIONS) + (t in TOK.program_tokens) for t in TOK.tokens]
        self.register_buffer("liked", torch.tensor(liked, dtype=torch.float64))

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) + self.liked


SMALL = RLConfig(max_tokens=32, group_size=4, prompts_per_step=4, max_grad_norm=1e9)


def small(**changes):
    return RLConfig(**{**vars(SMALL), **changes})


def step_of_trajectories(cfg=SMALL, rewards=None, seed=0):
    """Sample with the random policy; rewards are drawn, with one group of equal ones, or given."""
    trajs = sample_groups(Eager(), make_env(cfg), TRAIN[:4], TOK, cfg, gen(seed))
    drawn = torch.randint(0, 2, (len(trajs),), generator=gen(seed + 1)).tolist()
    drawn[4:8] = [1, 1, 1, 1]
    drawn[:2] = [0, 1]
    for traj, reward in zip(trajs, drawn if rewards is None else rewards, strict=True):
        traj.reward = float(reward)
    return trajs


def weights_after(trajs, optimizer=torch.optim.Adam, **changes):
    model, cfg = Eager(), small(**changes)
    rl_update(model, optimizer(model.parameters(), lr=cfg.lr), trajs, cfg)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


START = nn.utils.parameters_to_vector(Eager().parameters()).detach()


@MODES
@pytest.mark.parametrize("updates", [1, 3])
def test_microbatch_size_does_not_change_the_update(mode, updates):
    trajs = step_of_trajectories()
    for optimizer in (torch.optim.Adam, torch.optim.SGD):
        changes = {"loss_agg_mode": mode, "updates_per_step": updates, "lr": 1e-2}
        whole = weights_after(trajs, optimizer, microbatch_size=64, **changes)
        assert (whole - START).abs().max() > 1e-6
        for size in (1, 2, 3, 4, 8):
            parts = weights_after(trajs, optimizer, microbatch_size=size, **changes)
            torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


def test_a_mean_per_microbatch_would_show(monkeypatch):
    monkeypatch.setattr(grpo, "step_normalizer", lambda *args, **kwargs: None)
    trajs, changes = step_of_trajectories(), {"optimizer": torch.optim.SGD, "lr": 1.0}
    whole, parts = (weights_after(trajs, microbatch_size=size, **changes) for size in (64, 2))
    assert (parts - whole).norm() > 1e-2 * (whole - START).norm()


@MODES
@EACH_ADVANTAGE
def test_update_against_the_whole_batch_with_all_rows(mode, kind):
    # Rows without an advantage are left out of the passes, and still count in the averages.
    trajs = step_of_trajectories()
    model, batch = Eager(), collate(trajs, 0)
    adv = compute_advantages(batch["rewards"], 4, kind)
    assert (adv == 0).sum() >= 4
    logp = grpo._log_probs(model, batch["ids"])
    norm = 16 * 32.0 if mode == "constant" else None
    loss = reinforce_loss(logp, adv, batch["action_mask"], mode, norm)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    moved = weights_after(trajs, torch.optim.SGD, lr=1.0, loss_agg_mode=mode, advantage=kind)
    torch.testing.assert_close(moved - START, -gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.3])
def test_equal_rewards_leave_the_weights_bitwise(reward):
    trajs = step_of_trajectories(rewards=[reward] * 16)
    model = Eager()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    rl_update(model, optimizer, step_of_trajectories(), SMALL)  # moments that would move it on
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    stats = rl_update(model, optimizer, trajs, SMALL)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert str(state) == str(optimizer.state_dict())
    assert stats == {"loss": 0.0, "grad_norm": 0.0, "clip_fraction": 0.0, "zero_advantage": 1.0}


def test_statistics_of_an_update_and_where_it_goes():
    trajs, model = step_of_trajectories(), Eager()
    batch = collate(trajs, 0)
    adv = compute_advantages(batch["rewards"], 4)

    def score():
        with torch.no_grad():
            logp = grpo._log_probs(model, batch["ids"])
        return (logp * batch["action_mask"] * adv[:, None]).sum().item()

    before = score()
    stats = rl_update(model, torch.optim.SGD(model.parameters(), lr=1e-3), trajs, SMALL)
    assert score() > before
    zero = zero_advantage_groups(batch["rewards"], 4)
    assert stats["zero_advantage"] == zero.double().mean().item() > 0
    assert stats["clip_fraction"] == 0.0, "nothing is clipped where the ratio is 1"
    assert stats["grad_norm"] > 0
    for traj in trajs:
        traj.sample_logp = torch.where(traj.action_mask, traj.sample_logp - 1, 0.0)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    assert rl_update(model, still, trajs, SMALL)["clip_fraction"] == 1.0


def test_gradient_norm_is_limited_and_a_readers_trajectories_do():
    trajs = step_of_trajectories()
    free = weights_after(trajs, torch.optim.SGD, lr=1.0) - START
    held = weights_after(trajs, torch.optim.SGD, lr=1.0, max_grad_norm=1e-3) - START
    assert free.norm() > 1e-2
    torch.testing.assert_close(held, free * 1e-3 / free.norm(), rtol=1e-4, atol=1e-12)
    for traj in trajs:
        traj.action_mask, traj.info = traj.action_mask.float(), {}
    assert torch.equal(weights_after(trajs, torch.optim.SGD, lr=1.0) - START, free)


def test_weights_stay_on_the_grid_and_noise_is_dropped():
    trajs, grid = step_of_trajectories(), 2.0**-16
    start = (START / grid).round() * grid
    free = weights_after(trajs, torch.optim.SGD, lr=1.0)
    held = weights_after(trajs, torch.optim.SGD, lr=1.0, weight_grid=grid)
    assert not torch.equal(free, (free / grid).round() * grid)
    assert torch.equal(held, (held / grid).round() * grid)
    assert (held - free).abs().max() <= grid / 2
    model = nn.Linear(1, len(start), bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_((start + 1e-14)[:, None])
    snap_weights(model)
    assert torch.equal(model.weight[:, 0], start)
    half = nn.Linear(2, 2, bias=False).half()
    with torch.no_grad():
        half.weight.copy_(before := torch.tensor([[1.0, -3.0], [0.5, 60000.0]]).half())
    snap_weights(half)
    assert torch.equal(half.weight, before), "in half precision they are on the grid already"


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_an_update_scores_at_the_temperature_of_the_sampler(temperature):
    cfg = small(temperature=temperature)
    trajs, model = step_of_trajectories(cfg), Eager()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert rl_update(model, optimizer, trajs, cfg)["clip_fraction"] == 0.0
    assert rl_update(model, optimizer, trajs, SMALL)["clip_fraction"] > 0.01


def test_half_precision_logits_meet_the_temperature_in_float32():
    logits, model = torch.tensor([10.0, 9.5]).bfloat16().expand(1, 1, 2), nn.Linear(1, 1)
    model.forward = lambda ids: logits
    got = grpo._log_probs(model, torch.tensor([[0, 1]]), 0.7)
    exact = (logits.double() / 0.7).log_softmax(-1)[..., 1]
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-6)


def test_an_update_is_of_one_process(monkeypatch):
    monkeypatch.setattr(grpo, "_ranks", lambda group=None: 2)
    with pytest.raises(ValueError, match="accumulate_gradients"):
        weights_after(step_of_trajectories())


def test_draw_tasks():
    drawn = draw_tasks(TRAIN, 8, gen(1))
    assert len({t.name for t in drawn}) == 8
    assert drawn == draw_tasks(TRAIN, 8, gen(1)) != draw_tasks(TRAIN, 8, gen(2))
    assert {t.name for t in draw_tasks(TRAIN, 99, gen())} == {t.name for t in TRAIN}
    counts, generator = dict.fromkeys((t.name for t in TRAIN), 0), gen()
    for _ in range(500):
        for task in draw_tasks(TRAIN, 8, generator):
            counts[task.name] += 1
    share = 8 / len(TRAIN)
    spread = math.sqrt(500 * share * (1 - share))
    assert all(abs(c - 500 * share) < 5 * spread for c in counts.values())
    names = [t.info["task"].name for t in sample_step(Eager(), TRAIN, TOK, SMALL, gen(3))]
    assert names == [t.name for t in draw_tasks(TRAIN, 4, gen(3)) for _ in range(4)]


# A run, and one that is killed ----------------------------------------------------------------


def weights_of(model):
    return b"".join(v.numpy().tobytes() for v in model.state_dict().values())


def run_python(code, *args, **env):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AGENTRL_PROGRESS": "0", **env}
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Parity(BugFixEnv):
    """Pays for an odd sum of tokens, so that a random policy has something to learn from."""

    def reset(self):
        self.total = 0
        return super().reset()

    def step(self, token):
        answer, done = super().step(token)
        self.total += token
        self.reward = float(done and self.total % 2)
        return answer, done


def pay_parity(cfg):
    return lambda task, tok: Parity(task, tok, cfg.max_tokens)


@pytest.fixture
def parity(monkeypatch):
    monkeypatch.setattr(grpo, "make_env", pay_parity)


def run(steps, cfg=SMALL, **kwargs):
    model = Eager()
    history = train_rl(model, TRAIN[:6], TOK, cfg, steps, **kwargs)
    return history, weights_of(model)


def test_history(parity, tmp_path):
    history, weights = run(4)
    assert len(history) == 4 and (history, weights) == run(4)
    for record in history:
        assert record["episodes"] == 16 and 16 <= record["tokens"] <= 16 * 32
        assert 0 < record["reward"] < 1
        assert {"loss", "grad_norm", "clip_fraction", "zero_advantage"} < set(record)
    assert weights != weights_of(Eager())
    assert run(4, small(adam_eps=1e-5))[1] != weights
    assert run(2)[0] == history[:2]
    cfg = small(lr=numpy.float64(1e-3), seed=numpy.int64(1))
    assert type(cfg.lr) is float and type(cfg.seed) is int
    run(1, cfg, checkpoint=tmp_path / "run.pt")
    assert history != run(4, cfg, checkpoint=tmp_path / "run.pt")[0] == run(4, small(seed=1))[0]


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_run_in_pieces_equals_a_whole_one(parity, tmp_path, every):
    path = tmp_path / "deep" / "run.pt"
    whole = run(7)
    for steps in (2, 2, 3, 7):
        torch.manual_seed(steps)
        pieces = run(steps, checkpoint=path, checkpoint_every=every)
    assert pieces == whole
    assert run(7, checkpoint=str(path)) == whole, "nothing is left to do, weights and all"
    assert [p.name for p in path.parent.iterdir()] == ["run.pt"]


class Round:
    """A sampler that takes the tasks in turn, two at a time, and says which."""

    rule = "in turn"

    def __init__(self):
        self.state = {"next": 0}

    def __call__(self, model, tasks, tok, cfg, generator):
        at = self.state["next"]
        self.state["next"], self.record = at + 2, {"first": at}
        chosen = tasks[at : at + 2]
        return sample_groups(model, pay_parity(cfg), chosen, tok, cfg, generator) if chosen else []


def test_a_sampler_is_resumed_with_its_state_and_ends_the_run(tmp_path):
    path = tmp_path / "run.pt"
    whole = run(5, sampler=Round())
    for steps in (1, 2, 5):
        pieces = run(steps, sampler=Round(), checkpoint=path)
    assert pieces == whole
    history = whole[0]
    assert [(r["first"], r["episodes"]) for r in history] == [(0, 8), (2, 8), (4, 8)]
    assert "stopped after 3 of 5 steps" in history[-1]["reason"]
    assert run(9, sampler=Round(), checkpoint=path) == whole, "it has ended for good"
    with pytest.raises(ValueError, match="rule"):
        run(5, checkpoint=path)
    with pytest.raises(ValueError, match="no episode"):
        run(5, sampler=lambda *_: [])
    assert run(3, sampler=sample_step) == run(3)


def test_a_checkpoint_of_another_run_is_refused(parity, tmp_path):
    path = tmp_path / "run.pt"
    run(3, checkpoint=path)
    with pytest.raises(ValueError, match=r"has cfg = \{'seed': 0\}, this run has \{'seed': 1\}"):
        run(3, small(seed=1), checkpoint=path)
    with pytest.raises(ValueError, match=r"run\.pt has 3 steps, more than 2"):
        run(2, checkpoint=path)
    with pytest.raises(ValueError, match=r"torch\.float64, the model in .*float32"):
        train_rl(Eager().float(), TRAIN[:6], TOK, SMALL, 4, checkpoint=path)
    model = Eager()
    with pytest.raises(ValueError, match=r"run\.pt has tasks = .*, this run has"):
        train_rl(model, TRAIN[:5], TOK, SMALL, 3, checkpoint=path)
    assert weights_of(model) == weights_of(Eager()), "a refused checkpoint changes nothing"
    for name, value in (("checkpoint_every", 0), ("tasks", []), ("steps", -1)):
        arguments = {"model": Eager(), "tasks": TRAIN, "tok": TOK, "cfg": SMALL, "steps": 1}
        with pytest.raises(ValueError, match=name):
            train_rl(**{**arguments, name: value})


def test_a_damaged_checkpoint_does_not_start_the_run_again(parity, tmp_path):
    path = tmp_path / "run.pt"
    run(2, checkpoint=path)
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole[: len(whole) // 2], b"", b"text", pickle.dumps([1, 2], 2)):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{re.escape(str(path))} is damaged, or"):
            run(3, checkpoint=path)
        assert path.read_bytes() == damaged


# The runner imports once and forks: what is killed is a process of its own each time.
KILLED = """
import json, os, random, signal, sys
sys.path.insert(0, "tests/package")
import torch
torch.set_num_threads(1)
import test_grpo as t
from agentrl import grpo
folder, steps, every, seed = sys.argv[1], *map(int, sys.argv[2:])
path = f"{folder}/run.pt"
grpo.make_env = t.pay_parity

def die_in(module, name, call):
    real, calls = getattr(module, name), [0]
    def wrapper(*args, **kwargs):
        calls[0] += 1
        if calls[0] == call:
            if name == "save":  # a write that got this far
                args[1].write(b"half a file")
                args[1].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(module, name, wrapper)

def attempt(name, checkpoint, where=None):
    pid = os.fork()
    if pid == 0:
        if where:
            die_in(*where)
        history, weights = t.run(steps, checkpoint=checkpoint, checkpoint_every=every)
        with open(f"{folder}/{name}.json", "w") as file:
            json.dump([history, weights.hex()], file)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])

points = [(torch, "save", 2), (torch, "save", 1), (os, "fsync", 1),
          (os, "replace", 2), (grpo, "rl_update", 2), (grpo, "sample_groups", 1)]
random.Random(seed).shuffle(points)
points.insert(0, (grpo, "rl_update", every + 2))
attempt("whole", None)
kills, saved = 0, []
for where in points:
    kills += attempt("killed", path, where)
    saved.append(len(torch.load(path, weights_only=True)["history"]))
print(json.dumps([kills, saved, not attempt("killed", path)]))
"""


@pytest.mark.parametrize(("every", "seed"), [(1, 0), (1, 1), (3, 2)])
def test_a_killed_run_equals_one_that_was_not(tmp_path, every, seed):
    out = run_python(KILLED, tmp_path, steps := 14, every, seed)
    kills, saved, finished = json.loads(out.strip().split("\n")[-1])
    assert finished and kills >= 4 and any(0 < n < steps for n in saved)
    whole, killed = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("whole", "killed"))
    assert whole == killed
    assert len({r["reward"] for r in whole[0]}) > 2 and whole[1] != weights_of(Eager()).hex()
    names = {"run.pt", "run.pt.partial", "whole.json", "killed.json"}
    assert {p.name for p in tmp_path.iterdir()} <= names
