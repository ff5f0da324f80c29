"""Accumulated gradients against the full batch, on one process and on real ranks."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import FullyShardedDataParallel

from agentrl.accumulation import (
    _episode_loss,
    _flat_gradient,
    accumulate_gradients,
    global_token_count,
    step_normalizer,
)
from agentrl.grpo import LOSS_AGG_MODES, RLConfig, aggregate_loss, reinforce_loss
from agentrl.grpo import _norm_const as norm_of_rl_update
from agentrl.policy import TinyAgent

MODES = pytest.mark.parametrize("mode", LOSS_AGG_MODES)


def make(B, T, seed=0):
    """Advantages, log-probs and masks with rows of every kind, empty ones too."""
    generator = torch.Generator().manual_seed(seed)
    logp = torch.randn(B, T, generator=generator, dtype=torch.float64)
    advantages = torch.randn(B, generator=generator, dtype=torch.float64)
    share = torch.rand(B, 1, generator=generator)
    return logp, advantages, torch.rand(B, T, generator=generator) < share


def split_rows(count, pieces, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    cuts = torch.randint(0, count + 1, (pieces - 1,), generator=generator).sort().values
    return order.tensor_split(cuts)  # some pieces are empty


def gradient(logp, advantages, mask, split, mode, norm):
    leaf = logp.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for rows in split:
        loss = reinforce_loss(leaf[rows], advantages[rows], mask[rows], mode, norm)
        loss.backward()
        total += loss.detach()
    return total, leaf.grad


@settings(max_examples=150)
@given(
    mode=st.sampled_from(LOSS_AGG_MODES),
    B=st.integers(1, 12),
    T=st.integers(1, 9),
    pieces=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
def test_a_split_changes_nothing(mode, B, T, pieces, seed):
    logp, advantages, mask = make(B, T, seed)
    split = split_rows(B, pieces, seed)
    norm = step_normalizer([mask[rows] for rows in split], mode, max_tokens=7)
    default = 7.0 * max(int(mask.any(1).sum()), 1) if mode == "constant" else None
    whole, expected = gradient(logp, advantages, mask, [torch.arange(B)], mode, default)
    total, got = gradient(logp, advantages, mask, split, mode, norm)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-14)


@MODES
def test_the_normaliser_is_that_of_rl_update(mode):
    _, _, mask = make(9, 6, 4)
    mask[3] = False  # a row without a policy token is no sequence
    cfg = RLConfig(loss_agg_mode=mode)
    got = step_normalizer(mask.split([2, 3, 4]), mode, max_tokens=cfg.max_tokens)
    assert got == norm_of_rl_update(mask, cfg)


def test_counts_by_hand():
    masks = [torch.tensor([[1, 0, 1], [0, 0, 0]]), torch.tensor([[1.0, 1.0]])]
    assert global_token_count(masks).item() == 4
    assert global_token_count(masks[0]).item() == 2
    assert global_token_count(masks).dtype == torch.int64
    assert global_token_count([torch.zeros(2, 3)]).item() == 0
    expected = {
        "token_mean": 4,
        "seq_mean_token_mean": 2,
        "seq_mean_token_sum": 2,
        "constant": 20,
    }
    assert {m: step_normalizer(masks, m, max_tokens=10) for m in expected} == expected


@MODES
def test_a_filler_row_or_microbatch_changes_no_normaliser(mode):
    _, _, mask = make(5, 4, 1)
    alone = step_normalizer([mask], mode, max_tokens=9)
    filled = step_normalizer([mask, torch.zeros(3, 4)], mode, max_tokens=9)
    assert alone == filled


# transformers #34191
def test_mean_of_means_is_not_the_mean():
    values = [torch.ones(1, 4, dtype=torch.float64), torch.full((1, 1), 10.0, dtype=torch.float64)]
    masks = [torch.ones_like(v, dtype=torch.bool) for v in values]
    for norm in (step_normalizer(masks), global_token_count(masks)):
        parts = [
            aggregate_loss(v, m, "token_mean", norm) for v, m in zip(values, masks, strict=True)
        ]
        assert sum(parts).item() == pytest.approx(2.8, abs=1e-15)


# prime-rl #798
@MODES
def test_an_empty_microbatch_is_an_exact_zero(mode):
    logp, advantages, _ = make(3, 4)
    logp[0, 0] = float("inf")
    nothing = torch.zeros(3, 4)
    full = torch.ones(2, 4)
    for masks in ([nothing], [nothing, full]):
        norm = step_normalizer(masks, mode, max_tokens=4)
        loss, grad = gradient(logp, advantages, nothing, [torch.arange(3)], mode, norm)
        assert loss == 0 and (grad == 0).all()


def test_a_step_without_policy_tokens_leaves_the_weights_finite():
    batch, model = toy()
    batch["action_mask"] = torch.zeros_like(batch["action_mask"])
    norm = step_normalizer([batch["action_mask"]])
    before = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())
    loss = accumulate_gradients(
        model, lambda rows: _episode_loss(model, batch, rows, norm), torch.arange(8).chunk(2)
    )
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert loss == 0
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        assert torch.equal(old, new)


def toy(B=8, V=17):
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([3, 4, 4, 5, 7, 9, 14, 20])[:B]
    mask = torch.arange(19) < lengths[:, None] - 1
    batch = {
        "ids": torch.randint(V, (B, 20), generator=generator),
        "action_mask": mask & (torch.rand(B, 19, generator=generator) < 0.7),
        "lengths": lengths,
        "advantages": torch.randn(B, generator=generator, dtype=torch.float64),
    }
    return batch, TinyAgent(V, d_model=8, n_layers=1, n_heads=2, max_len=32)


# nanochat #400
@MODES
def test_one_two_four_and_eight_microbatches_give_equal_parameters(mode):
    batch, model = toy()
    results = []
    for pieces in (1, 2, 4, 8):
        trained = copy.deepcopy(model)
        split = torch.arange(8).chunk(pieces)
        norm = step_normalizer([batch["action_mask"][r] for r in split], mode, max_tokens=20)
        loss = accumulate_gradients(
            trained, lambda r, m=trained, n=norm: _episode_loss(m, batch, r, n, mode), split
        )
        torch.optim.SGD(trained.parameters(), lr=1.0).step()
        results.append((loss, [p.detach() for p in trained.parameters()]))
    for loss, parameters in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-13, atol=1e-15)
        for got, expected in zip(parameters, results[0][1], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-15)


def test_own_means_would_fail_that_test():
    batch, model = toy()
    _episode_loss(model, batch, torch.arange(8), None).backward()
    expected = _flat_gradient(model)
    model.zero_grad()
    for rows in torch.arange(8).chunk(4):
        (_episode_loss(model, batch, rows, None) / 4).backward()
    assert (_flat_gradient(model) - expected).norm() > 0.1 * expected.norm()


def test_bad_input_is_named():
    mask = torch.ones(1, 2)
    with pytest.raises(ValueError, match="mode must be one of"):
        step_normalizer([mask], "mean")
    for bad in (None, 0):
        with pytest.raises(ValueError, match=f"needs max_tokens >= 1, got {bad}"):
            step_normalizer([mask], "constant", max_tokens=bad)
    with pytest.raises(ValueError, match="masks is empty"):
        step_normalizer([])
    with pytest.raises(ValueError, match="microbatches is empty"):
        accumulate_gradients(torch.nn.Linear(1, 1), lambda _: None, [])


# Ranks --------------------------------------------------------------------------------------------


def test_the_loss_of_a_microbatch_stays_what_it_was():
    model, kept = torch.nn.Linear(1, 1).double(), []

    def loss_fn(x):
        kept.append(model(x).sum())
        return kept[-1]

    total = accumulate_gradients(model, loss_fn, [torch.ones(1, 1).double()])
    assert total.data_ptr() != kept[0].data_ptr()  # ranks add up in place


def test_the_older_sharding_is_refused():
    model = object.__new__(FullyShardedDataParallel)
    torch.nn.Module.__init__(model)
    for hidden in (model, torch.nn.Sequential(torch.nn.Linear(1, 1), model)):
        with pytest.raises(TypeError, match="shard it by fully_shard"):
            accumulate_gradients(hidden, lambda x: x, [1])


def torchrun(ranks, *command):
    launch = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()
    return subprocess.run(
        [sys.executable, *launch, *command],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_ranks_make_the_gradient_of_one_process_and_a_dead_one_ends_the_run():
    done = torchrun(2, "-m", "agentrl.accumulation", "--lose-last-rank")
    lines = done.stdout.splitlines()
    assert lines[0] == "2 ranks, gloo", done.stderr
    rows = [line.split() for line in lines[2:5]]
    assert [row[0] for row in rows] == ["all-reduce", "ddp", "fsdp2"]
    assert all(row[2:] == ["True"] * 3 for row in rows), lines
    assert all(float(row[1]) > 0.05 for row in rows), "an own count per rank must show"
    assert lines[5].startswith("refused: rank 1 has 1 microbatches and rank 0 has 2")
    assert done.returncode != 0
    assert "RuntimeError: rank 1 is gone" in done.stderr


RANKS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from agentrl.accumulation import *
from agentrl.accumulation import _flat_gradient
dist.init_process_group("gloo")
rank = dist.get_rank()
# transformers #34242: token losses 1, 1, 1, 1 on one rank, 10 on the other, an empty microbatch.
values = [torch.ones(1, 4), torch.full((1, 1), 10.0)][rank].double()
masks = [torch.ones_like(values), torch.zeros(2, 3)]
assert global_token_count(masks).item() == 5
norms = [step_normalizer(masks, m, max_tokens=3)
         for m in ("token_mean", "seq_mean_token_mean", "constant")]
assert norms == [5.0, 2.0, 6.0], norms
for kind in ("plain", "ddp", "fsdp2"):
    for sync_each in (False, True):
        model = torch.nn.Linear(1, 2, bias=False).double()
        torch.nn.init.ones_(model.weight)
        if kind == "ddp":
            model = DistributedDataParallel(model)
        if kind == "fsdp2":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        pieces = [values, torch.zeros(1, 3).double()]
        if kind == "fsdp2":
            try:
                accumulate_gradients(torch.nn.Sequential(model), lambda v: v, pieces)
            except TypeError as error:
                assert "has sharded weights" in str(error)
            else:
                raise AssertionError("a hidden sharded module was accepted")
        loss = accumulate_gradients(
            model, lambda v: model(v.reshape(-1, 1))[:, 0].sum() / 5, pieces, sync_each=sync_each)
        grad = _flat_gradient(model)
        assert abs(loss.item() - 2.8) < 1e-12, (kind, loss)
        assert (grad - torch.tensor([2.8, 0.0])).abs().max() < 1e-6, (kind, sync_each, grad)
# Without microbatches on one rank both are told, and nobody waits.
for mine in ([masks[0]] * (rank + 1), masks if rank else []):
    try:
        step_normalizer(mine)
    except ValueError as error:
        assert "rank 1 has 2 microbatches and rank 0 has" in str(error)
    else:
        raise AssertionError("unequal microbatch counts were accepted")
dist.barrier()
dist.destroy_process_group()
print("fine")
"""


def test_on_two_ranks_by_hand(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = torchrun(2, str(script))
    # Two processes share the stream, so their lines may run into each other.
    assert done.returncode == 0 and done.stdout.split() in (["fine"] * 2, ["finefine"]), done.stderr
