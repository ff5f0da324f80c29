# Generated from chapters/08-accumulation.ipynb by tools/export.py. Do not edit: edit the notebook.
"""For the chapter alone: Gradient accumulation that equals the batch."""

import argparse
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing import errors
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from agentrl.accumulation import accumulate_gradients
from agentrl.grpo import reinforce_loss, step_normalizer
from agentrl.policy import TinyAgent, sequence_log_probs

__all__ = []


def _episode_loss(
    model: nn.Module,
    batch: dict[str, Tensor],
    rows: Tensor,
    norm_const: float | Tensor | None,
    loss_agg_mode: str = "token_mean",
) -> Tensor:
    """Return the loss of some episodes of a padded batch, cut to the longest of them.

    Args:
        batch: `ids` [B, T], `action_mask` [B, T - 1], `lengths` [B], `advantages` [B].
        rows: which episodes.
        norm_const, loss_agg_mode: as in `aggregate_loss`.
    """
    width = int(batch["lengths"][rows].max())
    logp = sequence_log_probs(model, batch["ids"][rows, :width])
    mask = batch["action_mask"][rows, : width - 1]
    return reinforce_loss(logp, batch["advantages"][rows], mask, loss_agg_mode, norm_const)


def _flat_gradient(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters in one vector; sharded ones are gathered."""
    grads = [p.grad for p in model.parameters()]
    return torch.cat(
        [(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for g in grads]
    )


_KINDS = ("all-reduce", "ddp", "fsdp2")
_PER_RANK = 2  # microbatches


def _policy(kind: str, batch: dict[str, Any], device: torch.device) -> nn.Module:
    """Build the policy for `alone` or `all-reduce` (nothing to do), in `ddp`, or as `fsdp2`."""
    model = TinyAgent(len(batch["weights"]["token.weight"])).to(device)
    model.load_state_dict(batch["weights"])
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
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


def _relative_error(model: nn.Module, expected: Tensor) -> float:
    return ((_flat_gradient(model) - expected).norm() / expected.norm()).item()


def _compare(batch: dict[str, Any], device: torch.device) -> Iterator[str]:
    """Make the batch's gradient on all ranks; yield lines that compare it with one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    order = batch["lengths"].argsort(stable=True)
    mine = order.tensor_split(ranks * _PER_RANK)[rank * _PER_RANK : (rank + 1) * _PER_RANK]
    masks = [batch["action_mask"][rows] for rows in mine]
    norm = step_normalizer(masks)
    # The fault: a rank divides by its own count, and the gradients are averaged over ranks.
    own = ranks * float(sum(mask.sum() for mask in masks))
    alone = _policy("alone", batch, device)
    loss = _episode_loss(alone, batch, order, None)
    loss.backward()
    expected = _flat_gradient(alone)
    clipped = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    yield "            own count  global to 1e-12    loss    norm"
    for kind in _KINDS:
        line, group = f"{kind:<11}", dist.group.WORLD if kind == "all-reduce" else None
        for norm_const in (own, norm):
            model = _policy(kind, batch, device)
            share = partial(_episode_loss, model, batch, norm_const=norm_const)
            total = accumulate_gradients(model, share, mine, group=group)
            error = _relative_error(model, expected)
            line += f"{error:10.3f}" if norm_const is own else f"{error <= 1e-12!s:>16}"
        length = nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # once, after accumulation
        length = length.full_tensor() if hasattr(length, "full_tensor") else length
        yield line + f"{torch.allclose(total, loss)!s:>8}{torch.allclose(length, clipped)!s:>8}"
    # Another fault: the loss is made by the module inside the wrapper, so nothing is reduced.
    model = _policy("ddp", batch, device)
    share = partial(_episode_loss, model.module, batch, norm_const=norm)
    for rows in mine:
        (ranks * share(rows)).backward()
    errors: list[Any] = [None] * ranks
    dist.all_gather_object(errors, _relative_error(model, expected))
    yield "model.module inside ddp, on each rank: " + " ".join(f"{e:.3f}" for e in errors)
    for bad in (
        partial(accumulate_gradients, model, share, mine),
        partial(step_normalizer, masks[: 1 + (rank + 1 < ranks)]),
    ):
        try:
            bad()
        except ValueError as error:
            yield f"refused: {error}"


@errors.record  # so that torchrun prints the message of the rank that failed first
def _main(argv: Sequence[str] | None = None) -> None:
    """Compare the gradient that ranks make together with that of one process; under torchrun."""
    parser = argparse.ArgumentParser(prog="agentrl.course.accumulation")
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
    loaded = torch.load(args.batch, weights_only=True) if args.batch else _toy_batch()
    batch = {k: v if k == "weights" else v.to(device) for k, v in loaded.items()}
    for line in (f"{ranks} ranks, {dist.get_backend()}", *_compare(batch, device)):
        if rank == 0:
            print(line, flush=True)
    if args.lose_last_rank and rank + 1 == ranks:
        raise RuntimeError(f"rank {rank} is gone")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__" and "TORCHELASTIC_RUN_ID" in os.environ:  # not in a notebook
    _main()
