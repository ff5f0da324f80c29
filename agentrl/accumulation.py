# Generated from chapters/08-accumulation.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Gradient accumulation that equals the batch.

When does splitting a batch change the gradient?
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from agentrl import check
from agentrl.grpo import gather_counts

__all__ = ["accumulate_gradients", "global_token_count"]


def global_token_count(
    mask: Tensor | Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Count the policy tokens of a batch on all ranks, by one collective of a scalar.

    Args:
        mask: [B, T], 1 on policy tokens; or several, one per microbatch of this rank.
        group: the ranks that share the batch, by default all; without `torch.distributed`, this
            process alone.

    Returns:
        An int64 scalar on the device of the mask, the same on every rank. It is 0 if there is no
        policy token at all; `step_normalizer` is a denominator in that case too.
    """
    masks = [mask] if isinstance(mask, Tensor) else list(mask)
    count = sum(int(check.mask(f"mask[{i}]", m).sum()) for i, m in enumerate(masks))
    device = masks[0].device if masks else None
    total = sum(counts[0] for counts in gather_counts([count], group, device))
    return torch.tensor(total, device=device)


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
        model: in `DistributedDataParallel`, sharded by `fully_shard`, or as it is; its gradients
            have been cleared.
        loss_fn: gives a microbatch's share of the loss, its sum over `step_normalizer`. It calls
            `model` itself, since a wrapper reduces nothing for a loss made without it.
        microbatches: of this rank, as many as on every other.
        group: the ranks, by default all; a wrapped model must use the same. A bare module on
            several ranks needs it, `torch.distributed.group.WORLD` for all: this function then
            reduces the gradients, and nobody else may.
        sync_each: reduce gradients after every microbatch instead of after the last one.

    Returns:
        The loss of the whole batch, the same on every rank: the one that was optimised, so the one
        to log. Clip the gradients after this, not before.

    Raises:
        TypeError: for a model in the older `FullyShardedDataParallel`, or one that hides a sharded
            module inside another.
        ValueError: without a microbatch; and before the backward pass, if a wrapper was bypassed.
    """
    _check_wrapper(model, group)
    ddp, sharded = isinstance(model, DistributedDataParallel), _is(model, "fsdp", "FSDPModule")
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    scale = ranks if ddp or sharded else 1  # both wrappers average over ranks; this makes it a sum
    total: Tensor | None = None
    for k, microbatch in enumerate(microbatches):
        sync = sync_each or k + 1 == len(microbatches)
        if sharded:
            model.set_requires_gradient_sync(sync)
        with model.no_sync() if ddp and not sync else contextlib.nullcontext():
            with _through(model) if ddp else contextlib.nullcontext():
                loss = loss_fn(microbatch)
            (loss * scale).backward()
        share = check.widened(loss.detach())
        total = share.clone() if total is None else total + share
    if total is None:
        raise ValueError("microbatches is empty")
    if ranks == 1:
        return total
    if not (ddp or sharded):
        for p in filter(lambda p: p.requires_grad, model.parameters()):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=group)
    dist.all_reduce(total, group=group)
    return total


def _is(thing: Any, module: str, name: str) -> bool:
    """Tell whether a thing is of a class that is slow to import: nothing is before somebody did."""
    return isinstance(thing, getattr(sys.modules.get(f"torch.distributed.{module}"), name, ()))


def _check_wrapper(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Refuse a module whose gradients somebody else reduces, or nobody."""
    if any(_is(part, "fsdp", "FullyShardedDataParallel") for part in model.modules()):
        raise TypeError("model holds FullyShardedDataParallel (FSDP1): shard it by fully_shard")
    if isinstance(model, DistributedDataParallel) or _is(model, "fsdp", "FSDPModule"):
        return
    if any(_is(p, "tensor", "DTensor") for p in model.parameters()):
        given = "model has sharded weights and is not sharded itself"
        raise TypeError(f"{given}: pass the module that fully_shard returned")
    if group is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"model is a bare {type(model).__name__}, and {dist.get_world_size()} ranks are "
            "running: pass the DistributedDataParallel wrapper or the module that fully_shard "
            "returned; or, to have the gradients reduced here, group=torch.distributed.group.WORLD"
        )


@contextlib.contextmanager
def _through(model: DistributedDataParallel) -> Iterator[None]:
    """Refuse a loss that was made without the wrapper: its backward pass would reduce nothing."""
    calls: list[bool] = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    try:
        yield
    finally:
        hook.remove()
    if not any(calls):
        raise ValueError(
            "loss_fn did not call the DistributedDataParallel wrapper, so no gradient would be "
            "reduced: build the loss from model(...), not from model.module; or pass the bare "
            "module and group=torch.distributed.group.WORLD"
        )
