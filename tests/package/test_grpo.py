"""Group RL: advantages, averages, one update, the base policy's cache, and a run that is killed."""

import copy
import functools
import json
import math
import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from agentrl import grpo
from agentrl.course import grpo as course
from agentrl.course.grpo import behavior_clone, book_config, demonstrate, make_rl_base
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
from agentrl.rollout import Trajectory, collate, evaluate, sample_groups

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
    rows = [
        [v for v, m in zip(row, keep, strict=True) if m]
        for row, keep in zip(values.tolist(), mask.tolist(), strict=True)
    ]
    if mode in ("token_mean", "constant"):
        total = math.fsum(v for row in rows for v in row)
        count = sum(map(len, rows))
    else:
        per_row = [math.fsum(row) for row in rows if row]
        if mode == "seq_mean_token_mean":
            per_row = [math.fsum(row) / len(row) for row in rows if row]
        total, count = math.fsum(per_row), sum(1 for row in rows if row)
    return total / (norm_const if norm_const is not None else max(count, 1))


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
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_masked_values_are_never_read(mode, poison):
    values, mask = batch_of(5, 6, 1)
    clean = values.clone().requires_grad_()
    dirty = values.masked_fill(~mask, poison).requires_grad_()
    losses = [aggregate_loss(v, mask, mode, 9.0) for v in (clean, dirty)]
    for loss in losses:
        loss.backward()
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(clean.grad, dirty.grad)
    assert (dirty.grad[~mask] == 0).all()


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


@MODES
@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 9), st.integers(0, 2**31))
def test_microbatches_add_up_to_the_batch(mode, B, T, size, seed):
    values, mask = batch_of(B, T, seed)
    norm_const = step_normalizer([mask], mode, max_tokens=T)
    whole, parts = (values.clone().requires_grad_() for _ in range(2))
    total = aggregate_loss(whole, mask, mode, norm_const)
    total.backward()
    order = torch.randperm(B, generator=gen(seed))
    losses = [aggregate_loss(parts[r], mask[r], mode, norm_const) for r in order.split(size)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(sum(losses).detach(), total.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-13, atol=1e-15)
    if mode != "constant":
        assert torch.equal(aggregate_loss(values, mask, mode), total.detach())


# The denominator of a step --------------------------------------------------------------------


def test_the_denominator_by_hand():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 0]])
    got = [step_normalizer([mask], mode, max_tokens=10) for mode in LOSS_AGG_MODES]
    assert got == [3, 2, 2, 20]


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


def test_sixty_four_sequences_in_four_packed_rows():
    one = Trajectory(torch.arange(16), torch.ones(15), torch.zeros(15), 0.0)
    packed = pack_sequences([one] * 64, 256)
    assert len(packed["ids"]) == 4
    got = [step_normalizer([packed], mode, max_tokens=256) for mode in LOSS_AGG_MODES]
    assert got == [64 * 15, 64, 64, 16_384]


# What is refused, and what extreme numbers give -----------------------------------------------

X, M, A = torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2)
BAD = [
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
    *(
        (reinforce_loss, (X, randn(*size), M), "advantages")
        for size in ((1,), (1, 3), (2, 1), (3,))
    ),
    *((clipped_surrogate_loss, (X, randn(*n), A, M), "old_logp") for n in ((3,), (1, 3), (2, 1))),
    (kl_estimate, (X, X, "k4"), "kind"),
    *((kl_estimate, (A, A[:, None], kind), "ref_logp") for kind in KL_KINDS),
    (kl_estimate, (X, X, "k3", M[0]), "mask"),
    (step_normalizer, ([M], "mean"), "loss_agg_mode"),
    (step_normalizer, ([],), "batches"),
    (step_normalizer, ([M, M / 2],), r"batches\[1\]\[0, 0\]"),
    (step_normalizer, (M,), r"batches\[0\]"),
    (step_normalizer, ([{"action_mask": M, "segment_ids": X}],), "action_mask"),
    *((snap_weights, (nn.Linear(1, 1), grid), "grid") for grid in (0.0, -0.5, 0.3, NAN, INF)),
]
RIGHT = {
    aggregate_loss: {"values": X, "mask": M, "loss_agg_mode": "token_mean"},
    reinforce_loss: {"logp": X, "advantages": A, "mask": M},
    clipped_surrogate_loss: {"logp": X, "old_logp": X, "advantages": A, "mask": M},
    kl_estimate: {"logp": X, "ref_logp": X, "mask": M},
    entropy: {"logits": X},
}


@pytest.mark.parametrize(("call", "arguments", "names"), BAD)
def test_a_bad_value_is_named(call, arguments, names):
    with pytest.raises(ValueError, match=names):
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


@pytest.mark.parametrize("batch", [M.numpy(), M.tolist(), {"ids": X}, {"action_mask": [1]}])
def test_a_microbatch_that_is_no_tensor_is_named(batch):
    with pytest.raises(TypeError, match=r"batches\[1\]"):
        step_normalizer([M, batch])
    with pytest.raises(TypeError, match="rewards"):
        compute_advantages({"rewards": A}, 2)
    with pytest.raises(TypeError, match="max_tokens"):
        step_normalizer([M], "constant")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1e-3), ("lr", INF), ("adam_eps", -1.0), ("clip", -0.1), ("clip", NAN),
        ("clip_high", -0.1), ("max_grad_norm", -1.0), ("max_grad_norm", 0.0),
        ("weight_grid", 0.0), ("weight_grid", 0.3), ("weight_grid", INF), ("advantage", "std"),
        ("loss_agg_mode", "mean"), ("prompts_per_step", 0), ("updates_per_step", 0),
        ("microbatch_size", 0), ("group_size", 0), ("temperature", 0.0),
    ],
)  # fmt: skip
def test_a_run_refuses_what_would_wreck_it(name, value):
    with pytest.raises(ValueError, match=name):
        RLConfig(**{name: value})


def test_reproducibility_is_off_until_the_book_asks_for_it():
    plain, book = RLConfig(seed=3), book_config(seed=3)
    assert (plain.weight_grid, plain.adam_eps) == (None, 1e-8)
    assert (book.weight_grid, book.adam_eps) == (2.0**-16, 1e-5)
    assert vars(book) == {**vars(plain), "weight_grid": 2.0**-16, "adam_eps": 1e-5}
    assert RLConfig(clip_high=INF, max_grad_norm=INF).max_grad_norm == INF, "no bound"


def test_a_learning_rate_that_the_grid_rounds_away_is_refused():
    with pytest.raises(ValueError, match="weight_grid"):
        book_config(lr=1e-6)
    assert RLConfig(lr=1e-6).lr == book_config(lr=1e-6, weight_grid=None).lr == 1e-6
    assert book_config(lr=2.0**-17).lr == 2.0**-17 and book_config(lr=0.0).lr == 0


MEASURES = {
    "surrogate": lambda x, y: clipped_surrogate_loss(x, y, -torch.ones(len(x)), torch.ones_like(x)),
    "reinforce": lambda x, y: reinforce_loss(x, y[:, 0], torch.ones_like(x)),
    "entropy": lambda x, y: entropy(torch.stack([x, y], -1)),
    **{kind: functools.partial(kl_estimate, kind=kind) for kind in KL_KINDS},
    **{m: lambda x, _, m=m: aggregate_loss(x, torch.ones_like(x), m, 1e6) for m in LOSS_AGG_MODES},
}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pair", [(-1e4, -1.0), (-1.0, -1e4), (-1e4, -1e4), (-1.0, -1.0)])
def test_extreme_log_probs_over_a_million_tokens(measure, dtype, pair):
    logp, old = (torch.full((1000, 1000), x).to(dtype) for x in pair)
    logp.requires_grad_()
    got, exact = MEASURES[measure](logp, old), MEASURES[measure](logp.double(), old.double())
    assert got.dtype == torch.float32 and got.isfinite().all()
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)
    got.sum().backward()
    assert logp.grad.isfinite().all()


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_near_log_probs_in_half_precision_keep_their_distance(kind, dtype):  # unsloth-zoo #1240
    logp, ref = torch.tensor([[-1.0, -0.5, -2.0], [-1.0078125, -0.50390625, -1.9921875]]).to(dtype)
    got = kl_estimate(logp, ref, kind)
    assert got.dtype == torch.float32 and (got != 0).all()
    exact = kl_estimate(logp.double(), ref.double(), kind)
    torch.testing.assert_close(got.double(), exact, rtol=1e-3, atol=0)


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
    assert clipped_surrogate_loss(logp, old, one, one) == -min(math.exp(max(d, -20)), 1.2)


# Losses ---------------------------------------------------------------------------------------


@MODES
def test_reinforce_is_minus_advantage_times_log_probability(mode):
    logp, mask = batch_of(4, 6, 2)
    adv = randn(4, seed=5)
    values = torch.stack([-a * row for a, row in zip(adv, logp, strict=True)])
    expected = average_by_hand(values, mask, mode, 7.0)
    assert reinforce_loss(logp, adv, mask, mode, 7.0).item() == pytest.approx(expected, rel=1e-12)
    spread = reinforce_loss(logp, adv[:, None].expand(4, 6), mask, mode, 7.0)
    assert spread.item() == pytest.approx(expected, rel=1e-12)


def clipped_by_hand(logp, old, adv, low, high):
    ratio = math.exp(logp - old)
    return -min(ratio * adv, min(max(ratio, 1 - low), 1 + high) * adv)


@MODES
@given(st.integers(0, 2**31), st.floats(0, 0.9), st.floats(0, 2), st.booleans())
def test_clipped_surrogate_against_a_loop(mode, seed, low, high, spread):
    logp, mask = batch_of(3, 5, seed)
    old = logp + 0.5 * randn(3, 5, seed=seed + 2)
    adv = randn(3, 5, seed=seed + 3) if spread else randn(3, seed=seed + 3)
    table = adv if spread else adv[:, None].expand(3, 5)
    values = torch.tensor(
        [
            [clipped_by_hand(*x, low, high) for x in zip(*rows, strict=True)]
            for rows in zip(logp.tolist(), old.tolist(), table.tolist(), strict=True)
        ],
        dtype=torch.float64,
    )
    got = clipped_surrogate_loss(logp, old, adv, mask, mode, 7.0, clip_low=low, clip_high=high)
    expected = average_by_hand(values, mask, mode, 7.0)
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


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e4])
@pytest.mark.parametrize("where", ["logp", "old", "advantages"])
def test_masked_entries_do_not_reach_the_losses(poison, where):
    logp, mask = batch_of(4, 6, 2)
    clean = {"logp": logp, "old": logp + 0.1, "advantages": randn(4, 6, seed=4)}
    dirty = {**clean, where: clean[where].masked_fill(~mask, poison)}
    for loss in (
        lambda x, d: clipped_surrogate_loss(x, d["old"], d["advantages"], mask),
        lambda x, d: reinforce_loss(x, d["advantages"], mask),
    ):
        x, y = (d["logp"].clone().requires_grad_() for d in (clean, dirty))
        a, b = loss(x, clean), loss(y, dirty)
        a.backward()
        b.backward()
        assert torch.equal(a, b) and torch.equal(x.grad, y.grad)


def test_kl_estimators_average_to_the_divergence():
    p, q = randn(6, seed=1).log_softmax(-1), randn(6, seed=2).log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum().item()
    mean = {k: (p.exp() * kl_estimate(p, q, k)).sum().item() for k in KL_KINDS}
    assert mean["k1"] == pytest.approx(divergence, rel=1e-12)
    assert mean["k3"] == pytest.approx(divergence, rel=1e-12)
    assert mean["k2"] == pytest.approx((p.exp() * (p - q) ** 2).sum().item() / 2, rel=1e-12)
    assert abs(mean["k2"] - divergence) > 1e-3
    assert torch.equal(kl_estimate(p, q), kl_estimate(p, q, "k3"))


@given(st.floats(-20, 20))
def test_k3_is_never_negative_and_exact_near_zero(d):
    logp, zero = torch.tensor([d, 0.0], dtype=torch.float64)
    assert kl_estimate(logp, zero).item() >= 0
    small = logp * 1e-9
    assert kl_estimate(small, zero).item() == pytest.approx((d * 1e-9) ** 2 / 2, abs=1e-23)


@given(st.integers(2, 12), st.integers(0, 99))
def test_the_gradient_of_each_kl_estimator(words, seed):
    """Expected over tokens drawn from p, by enumeration: 0, KL(p, q) and KL(q, p)."""
    logits = randn(words, seed=seed).requires_grad_()
    q = randn(words, seed=seed + 100).log_softmax(0)

    def gradient(loss_of):
        return torch.autograd.grad(loss_of(logits.log_softmax(0)), logits)[0]

    drawn = logits.detach().softmax(0)
    found = [gradient(lambda p, k=k: (drawn * kl_estimate(p, q, k)).sum()) for k in KL_KINDS]
    wanted = [
        torch.zeros(words, dtype=torch.float64),
        gradient(lambda p: (p.exp() * (p - q)).sum()),
        gradient(lambda p: (q.exp() * (q - p)).sum()),
    ]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("junk", [NAN, INF, -1e3])
@pytest.mark.parametrize("kind", KL_KINDS)
def test_masked_log_probs_do_not_reach_the_kl_term(junk, kind):
    logp = torch.tensor([[-1.0, junk]], requires_grad=True)
    mask = torch.tensor([[1, 0]])
    kl = kl_estimate(logp, torch.tensor([[-2.0, 0.0]]), kind, mask)
    (grad,) = torch.autograd.grad(aggregate_loss(kl, mask, "token_mean"), logp)
    assert kl[0, 1] == 0 and grad[0, 1] == 0 and grad.isfinite().all()


def test_advantages_are_constants():
    logp, advantages = torch.randn(2, 3, requires_grad=True), torch.ones(2, requires_grad=True)
    reinforce_loss(logp, advantages, torch.ones(2, 3)).backward()
    clipped_surrogate_loss(logp, logp.detach(), advantages, torch.ones(2, 3)).backward()
    assert advantages.grad is None and logp.grad is not None


@pytest.mark.parametrize("name", ["clip_low", "clip_high"])
@pytest.mark.parametrize("value", [-0.1, NAN])
def test_a_clip_is_not_negative(name, value):
    with pytest.raises(ValueError, match=name):
        clipped_surrogate_loss(X, X, A, M, **{name: value})


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
    trajs = step_of_trajectories()
    whole, parts = (
        weights_after(trajs, torch.optim.SGD, microbatch_size=size, lr=1.0) for size in (64, 2)
    )
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


def test_gradient_norm_is_limited():
    trajs = step_of_trajectories()
    free = weights_after(trajs, torch.optim.SGD, lr=1.0) - START
    held = weights_after(trajs, torch.optim.SGD, lr=1.0, max_grad_norm=1e-3) - START
    assert free.norm() > 1e-2
    torch.testing.assert_close(held, free * 1e-3 / free.norm(), rtol=1e-4, atol=1e-12)


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


def test_update_of_a_readers_trajectories():
    trajs = step_of_trajectories()
    expected = weights_after(trajs)
    for traj in trajs:
        traj.action_mask, traj.info = traj.action_mask.float(), {}
    torch.testing.assert_close(weights_after(trajs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_an_update_scores_at_the_temperature_of_the_sampler(temperature):
    cfg = small(temperature=temperature)
    trajs, model = step_of_trajectories(cfg), Eager()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert rl_update(model, optimizer, trajs, cfg)["clip_fraction"] == 0.0
    assert rl_update(model, optimizer, trajs, SMALL)["clip_fraction"] > 0.01


def test_half_precision_logits_meet_the_temperature_in_float32():
    logits = torch.tensor([10.0, 9.5]).bfloat16().expand(1, 1, 2)
    model = nn.Linear(1, 1)
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
    assert all(abs(c - 200) < 5 * math.sqrt(500 * 0.4 * 0.6) for c in counts.values())
    names = [t.info["task"].name for t in sample_step(Eager(), TRAIN, TOK, SMALL, gen(3))]
    assert names == [t.name for t in draw_tasks(TRAIN, 4, gen(3)) for _ in range(4)]


# The demonstrator and the base policy ---------------------------------------------------------


def test_demonstrations_replay():
    rng = random.Random(0)
    for task in TRAIN * 3:
        traj = demonstrate(task, TOK, rng)
        env, ids = BugFixEnv(task, TOK), traj.ids.tolist()
        expected = env.reset()
        mask = [False] * len(expected)
        while not env.done:
            token = ids[len(expected)]
            answer, _ = env.step(token)
            expected += [token, *answer]
            mask += [True, *[False] * len(answer)]
        assert (ids, traj.action_mask.tolist()) == (expected, mask[1:])
        assert traj.reward == env.reward and traj.info["task"] == task
        assert (traj.sample_logp == 0).all()
    one, other = (demonstrate(TRAIN[0], TOK, random.Random(0)).ids for _ in range(2))
    assert torch.equal(one, other)


def test_behavior_clone_learns_and_is_repeatable():
    rng = random.Random(0)
    data = [demonstrate(TRAIN[i % 20], TOK, rng) for i in range(640)]
    runs = []
    for _ in range(2):
        model = TinyAgent(len(TOK), d_model=16, n_layers=1, n_heads=2)
        losses = behavior_clone(model, data, TOK)
        runs.append((losses, weights_of(model)))
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5
    assert runs[0] == runs[1]


@pytest.fixture
def built(tmp_path, monkeypatch):
    """The paths that were written in a cache of this test's own, one entry per training."""
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    paths, write = [], course.save_atomically
    monkeypatch.setattr(
        course, "save_atomically", lambda state, path: (paths.append(path), write(state, path))
    )
    return paths


def weights_of(model):
    return b"".join(v.numpy().tobytes() for v in model.state_dict().values())


def base(tok=TOK, **kwargs):
    return weights_of(make_rl_base(tok, **{"episodes": 64, **kwargs}))


def test_base_policy_is_trained_once(tmp_path, built):
    torch.manual_seed(0)
    first = base()
    torch.manual_seed(1)
    assert base() == first and len(built) == 1
    assert built[0].parent == tmp_path / "cache"
    built[0].unlink()
    assert base() == first and len(built) == 2, "made again, the same bits"
    assert sorted(p.suffix for p in built[0].parent.iterdir()) == [".lock", ".pt"], "nothing else"


def test_what_determines_the_base_policy_is_in_its_key(built, monkeypatch):
    results = [base(), base(episodes=65), base(seed=1), base(build_tokenizer(TRAIN))]
    other = functools.partial(course.Demonstrator, skill=0.9, look=0.5)
    monkeypatch.setattr(course, "Demonstrator", other)
    results.append(base())
    monkeypatch.setattr(torch, "__version__", "0.0")
    base()
    assert len(set(built)) == len(built) == 6
    assert len(set(results)) == 5


class Attack:
    def __reduce__(self):
        return os.mkdir, ("touched",)


@pytest.mark.parametrize(
    "damage", ["empty", "cut", "flipped", "garbage", "other", "digest", "code"]
)
def test_a_damaged_cache_is_rebuilt(built, damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = base()
    path = built[0]
    data = path.read_bytes()
    if damage == "digest":  # a proper file whose weights are not those that were written
        saved = torch.load(path, weights_only=True)
        saved["weights"]["lm_head.weight"][0, 0] += 1e-9
        torch.save(saved, path)
    elif damage in ("other", "code"):
        torch.save({"something": 1} if damage == "other" else {"weights": Attack()}, path)
    else:
        half = len(data) // 2
        flipped = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
        files = {"empty": b"", "cut": data[:-100], "flipped": flipped, "garbage": b"x" * 99}
        path.write_bytes(files[damage])
    assert base() == good and len(built) == 2, "trained again"
    assert base() == good and len(built) == 2, "and repaired"
    assert not Path("touched").exists()


def test_an_interrupted_write_leaves_nothing_to_trust(built, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            base()
    assert not built[0].exists()
    base()
    assert built[0].exists()


CONCURRENT = """
import hashlib, os, sys
import torch
torch.set_num_threads(1)
from agentrl import make_tasks, build_tokenizer
from agentrl.course import grpo
tok = build_tokenizer(make_tasks())
write = grpo.save_atomically
def spy(state, path):
    print("trained", flush=True)
    write(state, path)
grpo.save_atomically = spy
pids = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        weights = grpo.make_rl_base(tok, episodes=64).state_dict().values()
        text = hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights)).hexdigest()
        os.write(1, ("weights " + text + "\\n").encode())
        os._exit(0)
    pids.append(pid)
sys.exit(any(os.waitpid(pid, 0)[1] for pid in pids))
"""


def run_python(code, *args, **env):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AGENTRL_PROGRESS": "0", **env}
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_processes_side_by_side_train_once(tmp_path):
    lines = run_python(CONCURRENT, AGENTRL_CACHE=str(tmp_path)).split("\n")[:-1]
    assert lines.count("trained") == 1
    hashes = [line for line in lines if line.startswith("weights")]
    assert len(hashes) == 4 and len(set(hashes)) == 1


# A run, and one that is killed ----------------------------------------------------------------


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


def test_history(parity):
    history, weights = run(4)
    assert len(history) == 4 and (history, weights) == run(4)
    for record in history:
        assert record["episodes"] == 16 and 16 <= record["tokens"] <= 16 * 32
        assert 0 < record["reward"] < 1
        assert {"loss", "grad_norm", "clip_fraction", "zero_advantage"} < set(record)
    assert weights != weights_of(Eager())
    assert run(4, small(seed=1))[0] != history
    assert run(4, small(adam_eps=1e-5))[1] != weights
    assert run(2)[0] == history[:2]


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
        return sample_groups(model, pay_parity(cfg), tasks[at : at + 2], tok, cfg, generator)


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
    for options in ({"checkpoint_every": 0}, {"checkpoint_every": -1}, {"tasks": []}):
        with pytest.raises(ValueError, match=next(iter(options))):
            train_rl(
                **{"model": Eager(), "tasks": TRAIN, "tok": TOK, "cfg": SMALL, "steps": 1} | options
            )


def test_a_damaged_checkpoint_does_not_start_the_run_again(parity, tmp_path):
    path = tmp_path / "run.pt"
    run(2, checkpoint=path)
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole[: len(whole) // 2], b"", b"text", pickle.dumps([1, 2], 2)):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{re.escape(str(path))} is damaged, or"):
            run(3, checkpoint=path)
        assert path.read_bytes() == damaged


def test_numbers_of_numpy_can_be_resumed(tmp_path):
    cfg = small(lr=numpy.float64(1e-3), seed=numpy.int64(1))
    assert type(cfg.lr) is float and type(cfg.seed) is int
    path = tmp_path / "run.pt"
    run(1, cfg, checkpoint=path)
    assert len(run(2, cfg, checkpoint=path)[0]) == 2


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

def die_in(module, name, call, before=b""):
    real, calls = getattr(module, name), [0]
    def wrapper(*args, **kwargs):
        calls[0] += 1
        if calls[0] == call:
            if before:  # a write that got this far
                args[1].write(before)
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

points = [(torch, "save", 2), (torch, "save", 1, b"half a file"), (os, "fsync", 1),
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
    out = run_python(KILLED, tmp_path, steps := 20, every, seed)
    kills, saved, finished = json.loads(out.strip().split("\n")[-1])
    assert finished and kills >= 5 and any(0 < n < steps for n in saved)
    whole, killed = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("whole", "killed"))
    assert whole == killed
    assert len({r["reward"] for r in whole[0]}) > 2 and whole[1] != weights_of(Eager()).hex()
    names = {"run.pt", "run.pt.partial", "whole.json", "killed.json"}
    assert {p.name for p in tmp_path.iterdir()} <= names


# The figures that the gym must reach ----------------------------------------------------------


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TestBase:
    def test_base_passes_some_of_the_training_tasks(self, one_thread):
        result = evaluate(make_rl_base(TOK), TRAIN, TOK, 32, generator=gen(5))
        assert result["pass_rate"] - 2 * result["stderr"] >= 0.20
        assert result["pass_rate"] + 2 * result["stderr"] <= 0.50


class Seed:
    """Sixty steps from one seed; a class for each, so that they run side by side."""

    seed: int

    def test_sixty_steps_reach_the_band(self, one_thread):
        model = make_rl_base(TOK)
        train_rl(model, TRAIN, TOK, book_config(seed=self.seed), 60)
        result = evaluate(model, make_tasks("heldout"), TOK, 64)
        assert result["pass_rate"] >= 0.70


TestSeed0, TestSeed1, TestSeed2, TestSeed3 = (
    type(f"TestSeed{seed}", (Seed,), {"seed": seed}) for seed in range(4)
)
