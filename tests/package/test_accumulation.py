"""Accumulated gradients against the full batch, on one process and on real ranks."""

import copy
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import FullyShardedDataParallel

from agentrl.accumulation import accumulate_gradients, global_token_count
from agentrl.course.accumulation import _episode_loss, _flat_gradient
from agentrl.grpo import LOSS_AGG_MODES, aggregate_loss, reinforce_loss, step_normalizer
from agentrl.policy import TinyAgent

SEEDS = st.integers(0, 2**16)
MODES = pytest.mark.parametrize("mode", LOSS_AGG_MODES)


def make(B, T, seed=0):
    """Log-probs, advantages and masks with rows of every kind, empty ones too."""
    generator = torch.Generator().manual_seed(seed)
    logp = torch.randn(B, T, generator=generator, dtype=torch.float64)
    advantages = torch.randn(B, generator=generator, dtype=torch.float64)
    share = torch.rand(B, 1, generator=generator)
    return logp, advantages, torch.rand(B, T, generator=generator) < share


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
    st.sampled_from(LOSS_AGG_MODES), st.integers(1, 12), st.integers(1, 9), st.integers(1, 6), SEEDS
)
def test_a_split_changes_nothing(mode, B, T, pieces, seed):
    logp, advantages, mask = make(B, T, seed)
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, B + 1, (pieces - 1,), generator=generator).sort().values
    split = torch.randperm(B, generator=generator).tensor_split(cuts)  # some pieces are empty
    norm = step_normalizer([mask[rows] for rows in split], mode, max_tokens=7)
    default = 7.0 * max(int(mask.any(1).sum()), 1) if mode == "constant" else None
    whole, expected = gradient(logp, advantages, mask, [torch.arange(B)], mode, default)
    total, got = gradient(logp, advantages, mask, split, mode, norm)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-14)


def test_counts_by_hand():
    masks = [torch.tensor([[1, 0, 1], [0, 0, 0]]), torch.tensor([[1.0, 1.0]])]
    assert global_token_count(masks).item() == 4
    assert global_token_count(masks[0]).item() == 2
    assert global_token_count(masks).dtype == torch.int64
    assert global_token_count([torch.zeros(2, 3)]).item() == 0
    assert global_token_count(torch.ones(1000, 1001).half()).item() == 1_001_000
    for bad, error in ((masks[1] / 2, ValueError), ([[1, 0]], TypeError)):
        with pytest.raises(error, match=r"mask\[0\]"):
            global_token_count([bad])


# transformers #34191
def test_mean_of_means_is_not_the_mean():
    values = [torch.ones(1, 4, dtype=torch.float64), torch.full((1, 1), 10.0, dtype=torch.float64)]
    masks = [torch.ones_like(v, dtype=torch.bool) for v in values]
    average = partial(aggregate_loss, loss_agg_mode="token_mean")
    for norm in (step_normalizer(masks), global_token_count(masks)):
        parts = [average(v, m, norm_const=norm) for v, m in zip(values, masks, strict=True)]
        assert sum(parts).item() == pytest.approx(2.8, abs=1e-15)
    local = sum(average(v, m) for v, m in zip(values, masks, strict=True)) / 2
    assert local.item() == 5.5, "the fault that norm_const repairs"


# prime-rl #798
@MODES
def test_an_empty_microbatch_is_an_exact_zero(mode):
    logp, advantages, _ = make(3, 4)
    logp[0, 0] = float("inf")
    nothing = torch.zeros(3, 4)
    for masks in ([nothing], [nothing, torch.ones(2, 4)]):
        norm = step_normalizer(masks, mode, max_tokens=4)
        loss, grad = gradient(logp, advantages, nothing, [torch.arange(3)], mode, norm)
        assert loss == 0 and (grad == 0).all()


def toy():
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([3, 4, 4, 5, 7, 9, 14, 20])
    mask = torch.arange(19) < lengths[:, None] - 1
    batch = {
        "ids": torch.randint(17, (8, 20), generator=generator),
        "action_mask": mask & (torch.rand(8, 19, generator=generator) < 0.7),
        "lengths": lengths,
        "advantages": torch.randn(8, generator=generator, dtype=torch.float64),
    }
    return batch, TinyAgent(17, d_model=8, n_layers=1, n_heads=2, max_len=32)


def accumulate(model, batch, pieces, mode="token_mean"):
    split = torch.arange(8).chunk(pieces)
    norm = step_normalizer([batch["action_mask"][r] for r in split], mode, max_tokens=20)
    return accumulate_gradients(model, lambda r: _episode_loss(model, batch, r, norm, mode), split)


def test_a_step_without_policy_tokens_leaves_the_weights_finite():
    batch, model = toy()
    batch["action_mask"] = torch.zeros_like(batch["action_mask"])
    before = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())
    loss = accumulate(model, batch, 2)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert loss == 0
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        assert torch.equal(old, new)


# nanochat #400
@MODES
def test_one_two_four_and_eight_microbatches_give_equal_parameters(mode):
    batch, model = toy()
    results = []
    for pieces in (1, 2, 4, 8):
        trained = copy.deepcopy(model)
        loss = accumulate(trained, batch, pieces, mode)
        torch.optim.SGD(trained.parameters(), lr=1.0).step()
        results.append((loss, *(p.detach() for p in trained.parameters())))
    for result in results[1:]:
        for got, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-15)


def test_own_means_would_fail_that_test():
    batch, model = toy()
    _episode_loss(model, batch, torch.arange(8), None).backward()
    expected = _flat_gradient(model)
    model.zero_grad()
    for rows in torch.arange(8).chunk(4):
        (_episode_loss(model, batch, rows, None) / 4).backward()
    assert (_flat_gradient(model) - expected).norm() > 0.1 * expected.norm()


def test_the_loss_of_a_microbatch_stays_what_it_was_and_adds_up_in_float32():
    model, kept = torch.nn.Linear(1, 1, bias=False, dtype=torch.float32), []
    torch.nn.init.ones_(model.weight)

    def loss_fn(x):
        kept.append(model(x).sum().bfloat16())
        return kept[-1]

    total = accumulate_gradients(model, loss_fn, [torch.ones(1, 1)] * 300)
    assert total.data_ptr() != kept[0].data_ptr()  # ranks add up in place
    assert total.dtype == torch.float32 and total == 300  # bfloat16 would stop at 256
    assert all(loss == 1 for loss in kept)


def test_what_cannot_be_accumulated_is_refused():
    with pytest.raises(ValueError, match="microbatches is empty"):
        accumulate_gradients(torch.nn.Linear(1, 1), lambda _: None, [])
    model = object.__new__(FullyShardedDataParallel)
    torch.nn.Module.__init__(model)
    for hidden in (model, torch.nn.Sequential(torch.nn.Linear(1, 1), model)):
        with pytest.raises(TypeError, match="shard it by fully_shard"):
            accumulate_gradients(hidden, lambda x: x, [1])


# Ranks --------------------------------------------------------------------------------------------


def torchrun(ranks, *command):
    launch = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def test_ranks_make_the_gradient_of_one_process_and_a_dead_one_ends_the_run():
    done = torchrun(2, "-m", "agentrl.course.accumulation", "--lose-last-rank")
    lines = done.stdout.splitlines()
    assert lines[0] == "2 ranks, gloo", done.stderr
    rows = [line.split() for line in lines[2:5]]
    assert [row[0] for row in rows] == ["all-reduce", "ddp", "fsdp2"]
    assert all(row[2:] == ["True"] * 3 for row in rows), lines
    assert all(float(row[1]) > 0.05 for row in rows), "an own count per rank must show"
    assert all(float(off) > 0.05 for off in lines[5].split()[-2:]), "so must a bypassed wrapper"
    assert lines[6].startswith("refused: loss_fn did not call the DistributedDataParallel wrapper")
    assert lines[7].startswith("refused: rank 1 has 1 microbatches and rank 0 has 2")
    assert done.returncode != 0
    assert "RuntimeError: rank 1 is gone" in done.stderr


RANKS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from agentrl.accumulation import *
from agentrl.grpo import RLConfig, rl_update, step_normalizer
from agentrl.course.accumulation import _flat_gradient
dist.init_process_group("gloo")
rank, everyone = dist.get_rank(), dist.group.WORLD

def refused(call, words, kind=ValueError):
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError("accepted: " + words)

def make(kind):
    model = torch.nn.Linear(1, 2, bias=False).double()
    torch.nn.init.ones_(model.weight)
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return DistributedDataParallel(model) if kind == "ddp" else model

def loss_of(model):
    return lambda v: model(v.reshape(-1, 1))[:, 0].sum() / 5

# transformers #34242: token losses 1, 1, 1, 1 on one rank, 10 on the other, an empty microbatch.
values = [torch.ones(1, 4), torch.full((1, 1), 10.0)][rank].double()
masks, pieces = [torch.ones_like(values), torch.zeros(2, 3)], [values, torch.zeros(1, 3).double()]
assert global_token_count(masks).item() == 5
modes = ("token_mean", "seq_mean_token_mean", "constant")
norms = [step_normalizer(masks, m, max_tokens=3) for m in modes]
assert norms == [5.0, 2.0, 6.0], norms
segments, mask = torch.tensor([[0, 0, 1, 1, -1]]), torch.tensor([[1, 0, 1, 0]])
packed = {"segment_ids": segments, "action_mask": mask}
assert [step_normalizer([packed], m, max_tokens=3) for m in modes] == [4.0, 4.0, 12.0]
for kind in ("bare", "ddp", "fsdp2"):
    for sync_each in (False, True):
        model = make(kind)
        loss = accumulate_gradients(
            model, loss_of(model), pieces, sync_each=sync_each, group=everyone)
        grad = _flat_gradient(model)
        assert abs(loss.item() - 2.8) < 1e-12, (kind, loss)
        assert (grad - torch.tensor([2.8, 0.0])).abs().max() < 1e-6, (kind, sync_each, grad)
hidden = torch.nn.Sequential(make("fsdp2"))
refused(lambda: accumulate_gradients(hidden, loss_of(hidden), pieces), "has sharded", TypeError)
# trl #7245, minimind #853: the wrapper is bypassed.
ddp = make("ddp")

def looks_only(v):
    with torch.no_grad():
        ddp(v.reshape(-1, 1))
    return loss_of(ddp.module)(v)

for model, loss_fn, words in (
    (ddp, loss_of(ddp.module), "did not call the DistributedDataParallel wrapper"),
    (ddp, looks_only, "did not call the DistributedDataParallel wrapper"),
    (ddp.module, loss_of(ddp.module), "2 ranks are running"),
    (ddp.module, loss_of(ddp), "2 ranks are running"),
):
    refused(lambda: accumulate_gradients(model, loss_fn, pieces), words)
    assert ddp.module.weight.grad is None, "refused before the backward pass"
accumulate_gradients(ddp.module, loss_of(ddp.module), pieces, group=everyone)
assert (_flat_gradient(ddp) - torch.tensor([2.8, 0.0])).abs().max() < 1e-6
refused(lambda: rl_update(ddp.module, None, [], RLConfig()), "accumulate_gradients")
# Without microbatches on one rank both are told, and nobody waits.
for mine in ([masks[0]] * (rank + 1), masks if rank else []):
    refused(lambda: step_normalizer(mine), "rank 1 has 2 microbatches and rank 0 has")
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
