# Generated from chapters/08-accumulation.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Gradient accumulation that equals the batch.

When does splitting a batch change the gradient?
"""

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing import errors
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from agentrl.grpo import LOSS_AGG_MODES, reinforce_loss
from agentrl.policy import TinyAgent, sequence_log_probs

__all__ = ["accumulate_gradients", "global_token_count", "step_normalizer"]


def _episode_loss(
    model: nn.Module,
    batch: dict[str, Tensor],
    rows: Tensor,
    norm_const: float | Tensor | None,
    mode: str = "token_mean",
) -> Tensor:
    """Return the loss of some episodes of a padded batch, cut to the longest of them.

    Args:
        batch: `ids` [B, T], `action_mask` [B, T - 1], `lengths` [B], `advantages` [B].
        rows: which episodes.
        norm_const, mode: as in `aggregate_loss`.
    """
    width = int(batch["lengths"][rows].max())
    logp = sequence_log_probs(model, batch["ids"][rows, :width])
    mask = batch["action_mask"][rows, : width - 1]
    return reinforce_loss(logp, batch["advantages"][rows], mask, mode, norm_const)


def _flat_gradient(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters in one vector; sharded ones are gathered."""
    grads = [p.grad for p in model.parameters()]
    return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in grads])


def _ranks(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _collective_device(group: dist.ProcessGroup | None, near: torch.device) -> torch.device:
    """Return where the tensors of a collective must be: with NCCL on this rank's GPU, as `near`."""
    if dist.get_backend(group) != "nccl":
        return torch.device("cpu")
    bound = (group or dist.group.WORLD).bound_device_id
    current = torch.device("cuda", torch.cuda.current_device())
    return near if near.type == "cuda" else bound or current


def global_token_count(
    mask: Tensor | Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Count the policy tokens of a batch on all ranks, by one all-reduce of a scalar.

    Args:
        mask: [B, T], nonzero on policy tokens; or several, one per microbatch of this rank.
        group: the ranks that share the batch, by default all; without `torch.distributed`, this
            process alone.

    Returns:
        An int64 scalar on the device of the mask, the same on every rank. It is 0 if there is no
        policy token at all; `step_normalizer` is a denominator in that case too.
    """
    masks = [mask] if isinstance(mask, Tensor) else list(mask)
    count = torch.tensor(0, device=masks[0].device if masks else None)
    for m in masks:
        count = count + m.bool().sum()
    if _ranks(group) == 1:
        return count
    total = count.to(_collective_device(group, count.device))
    dist.all_reduce(total, group=group)
    return total.to(count.device)


def step_normalizer(
    masks: Sequence[Tensor],
    mode: str = "token_mean",
    *,
    max_tokens: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Return the denominator of an optimizer step, for each microbatch on each rank.

    Every rank has to call it, before the first backward pass; it waits for the others.

    Args:
        masks: this rank's microbatches, [B, T] each, nonzero on policy tokens. A row is
            a sequence, so not of packed rows.
        mode: one of `LOSS_AGG_MODES`.
        max_tokens: for `constant`, which divides by sequences * max_tokens.
        group: the ranks that share the step, by default all.

    Returns:
        For `norm_const` of `aggregate_loss`, over all ranks: policy tokens for `token_mean`;
        sequences with a policy token for the `seq_mean` modes, times `max_tokens` for `constant`.
        At least 1, so that a step without policy tokens has loss 0 and gradient 0.

    Raises:
        ValueError: for an unknown mode or a missing `max_tokens`; and, on every rank alike, if a
            rank has no microbatch or another number of them than rank 0.
    """
    if mode not in LOSS_AGG_MODES:
        raise ValueError(f"mode must be one of {LOSS_AGG_MODES}, got {mode!r}")
    if mode == "constant" and (max_tokens is None or max_tokens < 1):
        raise ValueError(f"mode 'constant' needs max_tokens >= 1, got {max_tokens}")
    near = masks[0].device if len(masks) else torch.device("cpu")
    tokens = sum(int(mask.bool().sum()) for mask in masks)
    sequences = sum(int(mask.bool().any(-1).sum()) for mask in masks)
    for rank, (number, *_) in enumerate(
        per_rank := _gather([len(masks), tokens, sequences], group, near)
    ):
        if number != per_rank[0][0]:
            raise ValueError(
                f"rank {rank} has {number} microbatches and rank 0 has {per_rank[0][0]}: "
                "all ranks need the same number"
            )
    if not per_rank[0][0]:
        raise ValueError("masks is empty: there is no microbatch")
    tokens, sequences = (max(sum(column), 1) for column in list(zip(*per_rank, strict=True))[1:])
    if mode == "token_mean":
        return float(tokens)
    return float(sequences * max_tokens if mode == "constant" else sequences)


def _gather(
    numbers: list[int], group: dist.ProcessGroup | None, near: torch.device
) -> list[list[int]]:
    """Return the numbers of every rank, in one all-gather."""
    if _ranks(group) == 1:
        return [numbers]
    mine = torch.tensor(numbers, device=_collective_device(group, near))
    everyone = [torch.empty_like(mine) for _ in range(_ranks(group))]
    dist.all_gather(everyone, mine, group=group)
    return [row.tolist() for row in everyone]


def accumulate_gradients(
    model: nn.Module,
    loss_fn: Callable[[Any], Tensor],
    microbatches: Sequence[Any],
    *,
    group: dist.ProcessGroup | None = None,
    sync_each: bool = False,
) -> Tensor:
    """Add up the gradients of all microbatches of all ranks.

    Args:
        model: as it is, in `DistributedDataParallel`, or sharded by `fully_shard`; its gradients
            have been cleared.
        loss_fn: gives a microbatch's share of the loss, its sum over `step_normalizer`.
        microbatches: of this rank, as many as on every other.
        group: the ranks, by default all; a wrapped model must use the same.
        sync_each: reduce gradients after every microbatch instead of after the last one.

    Returns:
        The loss of the whole batch, the same on every rank: the one that was optimised, so the one
        to log. Clip the gradients after this, not before.

    Raises:
        TypeError: for a model in the older `FullyShardedDataParallel`, or one that hides a sharded
            module inside another.
        ValueError: without a microbatch.
    """
    if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
        raise TypeError("model holds FullyShardedDataParallel (FSDP1): shard it by fully_shard")
    if not isinstance(model, FSDPModule) and any(
        isinstance(p, DTensor) for p in model.parameters()
    ):
        raise TypeError(
            "model has sharded weights and is not sharded itself: pass the module that fully_shard "
            "returned; tensor parallelism alone is not supported"
        )
    ranks = _ranks(group)
    wrapped = isinstance(model, DistributedDataParallel | FSDPModule)
    scale = ranks if wrapped else 1  # both wrappers average over ranks; this makes it a sum
    total: Tensor | None = None
    for k, microbatch in enumerate(microbatches):
        sync = sync_each or k + 1 == len(microbatches)
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(sync)
        quiet = isinstance(model, DistributedDataParallel) and not sync
        with model.no_sync() if quiet else contextlib.nullcontext():
            loss = loss_fn(microbatch)
            (loss * scale).backward()
        total = loss.detach().clone() if total is None else total + loss.detach()
    if total is None:
        raise ValueError("microbatches is empty")
    if ranks == 1:
        return total
    if not wrapped:
        for p in filter(lambda p: p.requires_grad, model.parameters()):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=group)
    dist.all_reduce(total, group=group)
    return total


_KINDS = ("all-reduce", "ddp", "fsdp2")
_PER_RANK = 2  # microbatches


def _wrap(kind: str, model: TinyAgent, device: torch.device) -> nn.Module:
    """Prepare a model for `all-reduce` (nothing to do), `ddp` or `fsdp2`."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        mesh = init_device_mesh(device.type, (_ranks(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _toy_batch() -> dict[str, Any]:
    """Make 64 random sequences with a long tail, and the weights of a small policy."""
    generator = torch.Generator().manual_seed(0)
    lengths = (16 * torch.randn(64, generator=generator).exp()).long().clamp(8, 128)
    return {
        "ids": torch.randint(50, (64, 128), generator=generator),
        "action_mask": torch.arange(127) < lengths[:, None] - 1,
        "lengths": lengths,
        "advantages": torch.randn(64, generator=generator, dtype=torch.float64),
        "weights": TinyAgent(50).state_dict(),
    }


def _compare(kind: str, batch: dict[str, Any], device: torch.device) -> str:
    """Make the batch's gradient on all ranks; return a line that compares it with one process."""
    rank, ranks = dist.get_rank(), _ranks()
    order = batch["lengths"].argsort(stable=True)
    mine = order.tensor_split(ranks * _PER_RANK)[rank * _PER_RANK : (rank + 1) * _PER_RANK]
    masks = [batch["action_mask"][rows] for rows in mine]
    norm = step_normalizer(masks)
    # The fault: a rank divides by its own count, and the gradients are averaged over ranks.
    own = ranks * float(sum(mask.sum() for mask in masks))

    def fresh() -> TinyAgent:
        model = TinyAgent(len(batch["weights"]["token.weight"])).to(device)
        model.load_state_dict(batch["weights"])
        return model

    alone = fresh()
    loss = _episode_loss(alone, batch, order, None)
    loss.backward()
    expected = _flat_gradient(alone)
    clipped = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    line = f"{kind:<11}"
    for norm_const in (own, norm):
        model = _wrap(kind, fresh(), device)
        share = partial(_episode_loss, model, batch, norm_const=norm_const)
        total = accumulate_gradients(model, share, mine)
        error = ((_flat_gradient(model) - expected).norm() / expected.norm()).item()
        line += f"{error:10.3f}" if norm_const is own else f"{error <= 1e-12!s:>16}"
    length = nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # once, after accumulation
    length = length.full_tensor() if isinstance(length, DTensor) else length
    return line + f"{torch.allclose(total, loss)!s:>8}{torch.allclose(length, clipped)!s:>8}"


@errors.record  # so that torchrun prints the message of the rank that failed first
def _main(argv: Sequence[str] | None = None) -> None:
    """Compare the gradient that ranks make together with that of one process; under torchrun."""
    parser = argparse.ArgumentParser(prog="agentrl.accumulation")
    parser.add_argument("batch", nargs="?", help="a file with a batch and weights; else a toy")
    parser.add_argument("--device", default="cpu", help="cpu: gloo; cuda: NCCL, a GPU per rank")
    parser.add_argument("--lose-last-rank", action="store_true", help="to see how the run ends")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    # NCCL needs a GPU for each rank; with fewer the ranks talk over gloo, on the CPU.
    cuda = args.device == "cuda" and torch.cuda.device_count() >= int(
        os.environ["LOCAL_WORLD_SIZE"]
    )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Nobody waits longer than this for a rank that is silent but not dead.
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    say(f"{ranks} ranks, {dist.get_backend()}")
    loaded = torch.load(args.batch, weights_only=True) if args.batch else _toy_batch()
    batch = {k: v if k == "weights" else v.to(device) for k, v in loaded.items()}
    say("            own count  global to 1e-12    loss    norm")
    for kind in _KINDS:
        say(_compare(kind, batch, device))
    masks = [batch["action_mask"]] * (2 if rank + 1 < ranks else 1)
    try:
        step_normalizer(masks)
    except ValueError as error:
        say(f"refused: {error}")
    if args.lose_last_rank and rank + 1 == ranks:
        raise RuntimeError(f"rank {rank} is gone")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__" and "TORCHELASTIC_RUN_ID" in os.environ:  # not in a notebook
    _main()
