# Generated from chapters/11-audit.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Design review.

How do you know it still optimises what you wrote?
"""

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from agentrl.curriculum import fill_groups, filter_by_pass_rate
from agentrl.grpo import reinforce_loss
from agentrl.logits import checkpointed_log_probs, peak_memory
from agentrl.microbatch import rank_balanced_batches, token_budget_batches
from agentrl.packing import (
    block_mask,
    pack_sequences,
    packed_logits,
    packing_bound,
    packing_plan,
    segment_cumsum,
    transformers_inputs,
    unpack,
)
from agentrl.policy import TinyAgent, selected_log_probs
from agentrl.report import CheckResult, judge
from agentrl.rollout import Trajectory, check_trajectories, pad_rows
from agentrl.throughput import ModelShape, training_flops

__all__ = [
    "LOGIT_SCALE",
    "SIGMAS",
    "Plant",
    "flop_count_check",
    "group_filter_check",
    "head_memory_check",
    "leak_check",
    "log_prob_tolerance",
    "planted_faults",
    "schedule_check",
    "split_invariance_check",
    "step_zero_ratio_check",
    "unit_roundoff",
]


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return u: rounding to `dtype` changes a number by at most u times its size."""
    return torch.finfo(dtype).eps / 2


def _observe(fn: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Call `fn`; return its result and the unit roundoff of the coarsest type it computed in."""
    out, seen = _watch(fn, *args)
    return out, seen.roundoff


def _watch(fn: Callable[..., Any], *args: Any) -> tuple[Any, "_Coarsest"]:
    """Call `fn`; return its result and what was seen on the way."""
    with _Coarsest() as seen:
        out = fn(*args)
    return out, seen


SIGMAS = 6  # a normal deviate is larger once in 5e8, any bounded one at most 3 times in 1e8
LOGIT_SCALE = -math.log(unit_roundoff(torch.float32))  # 16.6 nats


def log_prob_tolerance(
    logp: Tensor, roundoff: float, out_roundoff: float, logit_scale: float | None = None
) -> Tensor:
    """Return how far two computations of a log-probability may differ by rounding, in nats.

    A logit of size S, rounded on the way and at the end, is off by about 2 u S. The two sides
    differ by sqrt(2) as much, and log p moves by 1 - p times that. Forming z - logsumexp(z) in the
    type of the result costs 2 u_out S more. Times `SIGMAS`.

    Args:
        logp: log-probabilities of one side, any shape.
        roundoff: u, the unit roundoff of the coarsest type on the way.
        out_roundoff: that of the type in which log-probabilities are returned.
        logit_scale: S in nats, by default `LOGIT_SCALE` or the largest -logp: what lies further
            below the largest logit has a probability below the roundoff of float32. Larger if all
            logits share an offset, which the softmax does not see and rounding does.
    """
    logp = logp.double().clamp(max=0)
    if logit_scale is None:
        logit_scale = max(LOGIT_SCALE, float(-logp.min()) if logp.numel() else 0.0)
    spread = 2 * math.sqrt(2) * roundoff * -torch.expm1(logp)
    return SIGMAS * logit_scale * (spread + 2 * out_roundoff)


def _judge(
    error: Tensor, limit: Tensor, averaged: bool = True
) -> tuple[float, float, int | None, float]:
    """Compare errors with their limits, one by one and on average.

    Returns:
        The number to report, what it may be, the entry it belongs to (None if it is the mean), and
        the limit of the mean.
    """
    error = error.nan_to_num(nan=math.inf, posinf=math.inf)
    token = int((error / limit.clamp(min=1e-300)).argmax())
    mean_limit = limit.mean().item() / SIGMAS * (1 + SIGMAS / math.sqrt(len(limit)))
    if averaged and error[token] <= limit[token] and error.mean() > mean_limit:
        return error.mean().item(), mean_limit, None, mean_limit
    return error[token].item(), limit[token].item(), token, mean_limit


def _rounding_why(roundoff: float, token: int | None) -> str:
    kind = "its average" if token is None else f"{SIGMAS} sigma, times 1 - p"
    return f"rounding with u = {roundoff:.1e}, {kind}"


_PRECISIONS = {"highest": 2.0**-24, "high": 2.0**-11, "medium": 2.0**-8}  # float32, TF32, bf16
_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}
_NORMALISERS = {torch.ops.aten._log_softmax.default, torch.ops.aten.logsumexp.default}


def _product_roundoff(device: str) -> float:
    """Return the roundoff that torch may use in a float32 product."""
    try:
        return _PRECISIONS[torch.get_float32_matmul_precision()]
    except RuntimeError:  # set for each backend: torch has no common answer then
        backend = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
        return {"tf32": 2.0**-11, "bf16": 2.0**-8}.get(backend.matmul.fp32_precision, 2.0**-24)


class _Coarsest(TorchDispatchMode):
    """Sees every operation that torch runs.

    Attributes:
        roundoff: that of the coarsest floating type.
        products: the shapes of all matrix products in order.
        grouped: whether one of them has groups whose sizes are data.
        top: the largest logit in size that was the largest of its row, a tensor; None without one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.roundoff = 0.0
        self.products: list[torch.Size] = []
        self.grouped = False
        self.top: Tensor | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.roundoff = max(self.roundoff, unit_roundoff(x.dtype))
        if getattr(func, "_overloadpacket", None) in _PRODUCTS:  # into a given tensor, too
            self.products.append(out.shape)
            if out.dtype == torch.float32:  # which may be made in a coarser type
                self.roundoff = max(self.roundoff, _product_roundoff(out.device.type))
        self.grouped |= "grouped_mm" in str(func)
        if func in _NORMALISERS and args[0].numel() and args[0].device.type != "meta":
            top = args[0].detach().amax(args[1]).abs().nan_to_num(nan=0.0, posinf=0.0).max()
            self.top = top if self.top is None else torch.maximum(self.top, top.to(self.top))
        return out

    def logit_scale(self) -> float:
        """Return the size of the logits in nats, as far as it was seen."""
        return LOGIT_SCALE if self.top is None else max(LOGIT_SCALE, self.top.item())


def _check_rows(ids: Tensor, segment_ids: Tensor, keep: Sequence[int]) -> None:
    if ids.ndim != 2 or ids.shape != segment_ids.shape:
        shapes = f"ids {list(ids.shape)} and segment_ids {list(segment_ids.shape)}"
        raise ValueError(f"{shapes} must be alike, [R, L]")
    if ids.is_floating_point() or segment_ids.is_floating_point():
        raise TypeError(f"ids ({ids.dtype}) and segment_ids ({segment_ids.dtype}) need integers")
    if ids.unique().numel() < 2:
        raise ValueError("ids holds one token only: no other one is known to exist")
    if len(set(ids.unique().tolist()) - set(keep)) < 2:
        raise ValueError(f"keep = {list(keep)} leaves no two tokens to change")
    if max(len(row.unique()) for row in segment_ids) < 2:
        raise ValueError("segment_ids has one segment in each row: nothing could leak")


def _other_tokens(ids: Tensor, keep: Sequence[int] = ()) -> Tensor:
    """Replace each token by the next larger one that occurs; `keep` stays and is not used."""
    kept = torch.isin(ids, torch.tensor(list(keep), dtype=ids.dtype, device=ids.device))
    present = ids[~kept].unique()
    if not len(present):
        return ids
    return torch.where(kept, ids, present[torch.searchsorted(present, ids + 1) % len(present)])


def _markers(ids: Tensor, segment_ids: Tensor) -> list[int]:
    """Return tokens that may mark padding or a boundary: all paddings, first or last tokens.

    Empty if a sequence has no other token: nothing could be asked of it without them.
    """
    here, there = segment_ids[:, :-1], segment_ids[:, 1:]
    edge = (here != there) & (here >= 0) & (there >= 0)
    groups = ids[segment_ids < 0], ids[:, :-1][edge], ids[:, 1:][edge]
    marks = sorted({int(group[0]) for group in groups if len(group.unique()) == 1})
    free = (_other_tokens(ids, marks) != ids) | (segment_ids < 0)
    for row, line in zip(free, segment_ids, strict=True):
        if not all(row[line == s].any() for s in line.unique()):
            return []
    return marks


def _per_entry(values: Any, rows: Tensor, name: str) -> tuple[Tensor, str]:
    """Return [R, L or L - 1, ...] values in float64, and what is wrong with them."""
    if not isinstance(values, Tensor):
        return torch.empty(0), f"{name} returned {type(values).__name__}, not a tensor"
    R, L = rows.shape
    if values.ndim < 2 or values.shape[0] != R or values.shape[1] not in (L, L - 1):
        need = f"[{R}, {L}, ...] or [{R}, {L - 1}, ...]"
        return torch.empty(0), f"{name} returned shape {list(values.shape)}, needs {need}"
    values = values.detach().to(rows.device).double()
    return values.flatten(2) if values.ndim > 2 else values, ""


def _owner(segment_ids: Tensor, entries: int) -> Tensor:
    """Return whose an entry is, [R, entries]; -2 if it predicts across a boundary."""
    if entries == segment_ids.shape[1]:
        return segment_ids
    here, there = segment_ids[:, :-1], segment_ids[:, 1:]
    return torch.where(here == there, here, -2)


def _moved(after: Tensor, before: Tensor) -> Tensor:
    """Return |after - before| per entry, infinite where one of them alone is not a number."""
    change = torch.where(after == before, 0.0, (after - before).abs())
    change = torch.where(
        after.isnan() & before.isnan(), 0.0, change.nan_to_num(nan=math.inf, posinf=math.inf)
    )
    return change if change.ndim == 2 else change.amax(-1)


def leak_check(
    log_prob_fn: Callable[[Tensor], Tensor],
    ids: Tensor,
    segment_ids: Tensor,
    *,
    loss_mask: Tensor | None = None,
    alone_fn: Callable[[Tensor], Tensor] | None = None,
    embeds_fn: Callable[[Tensor], Tensor] | None = None,
    embeds: Tensor | None = None,
    keep: Sequence[int] = (),
    tolerance: float = 0.0,
    strict: bool = False,
) -> CheckResult:
    """Check that the sequences of a packed row do not see each other.

    Changes the tokens of one segment after another, padding included, and looks at the others; once
    all of them, once the first alone.

    Args:
        log_prob_fn: from ids [R, L] to a value for each prediction [R, L - 1], or for each token
            [R, L] or [R, L, ...]: log-probabilities, logits, the output of a layer. Masks and
            positions are best made outside: they should not change with the tokens.
        ids: token ids of packed rows.
        segment_ids: [R, L], the number of the sequence within its row, -1 on padding.
        loss_mask: [R, L - 1], nonzero where a prediction is trained; must be 0 across boundaries.
        alone_fn: the values of one sequence alone, [1, n] -> [1, n - 1] or [1, n, ...], as
            `log_prob_fn` gives them. Finds positions that do not restart.
        embeds_fn, embeds: the same from input embeddings [R, L, D]; the gradient of one segment's
            values must be 0 on every other one.
        keep: tokens that are not changed, since the function reads masks or boundaries from them,
            such as the padding.
        tolerance: a change that is allowed. 0 is right wherever the order of sums depends on shapes
            alone. Where shapes are seen to depend on the tokens, as with experts, the limit of
            rounding replaces it.
        strict: raise `AuditError` if the check fails.

    Raises:
        ValueError, TypeError: for rows in which nothing could leak, or arguments that do not fit.
    """
    _check_rows(ids, segment_ids, keep)
    segment_ids = segment_ids.to(ids.device)
    if (embeds is None) != (embeds_fn is None):
        raise ValueError("embeds and embeds_fn are needed together")
    if loss_mask is not None and loss_mask.shape != ids[:, 1:].shape:
        raise ValueError(f"loss_mask {list(loss_mask.shape)} must be {list(ids[:, 1:].shape)}")
    name = {"strict": strict, "check": "leak_check"}
    if loss_mask is not None:
        across = (_owner(segment_ids, ids.shape[1] - 1) < 0) & (loss_mask != 0).to(ids.device)
        if across.any():
            row, t = across.nonzero()[0].tolist()
            return judge(
                **name,
                worst=int(across.sum()),
                unit="predictions",
                threshold=0,
                index=f"row {row}, entry {t}",
                why="no sequence predicts another one's token",
                likely="labels were shifted after packing: the last token of a sequence predicts "
                "the first of the next",
            )
    raw, seen = _watch(log_prob_fn, ids)
    before, problem = _per_entry(raw, ids, "log_prob_fn")
    broken = {"worst": math.nan, "unit": "nats", "threshold": tolerance}
    why = "weight 0 times another sequence's value is 0, and shapes fix the order of sums"
    if problem:
        return judge(**name, **broken, index="the output", why=why, likely=problem)
    owner = _owner(segment_ids, before.shape[1])
    if not (owner >= 0).any():
        raise ValueError("no prediction stays in its sequence: each has one token")
    flat = before if before.ndim == 2 else before.sum(-1)
    if (bad := flat.isnan() & (owner >= 0)).any():
        row, t = bad.nonzero()[0].tolist()
        likely = "log_prob_fn returned NaN: a softmax over no entry, or a division by 0"
        return judge(**name, **broken, index=f"row {row}, entry {t}", why=why, likely=likely)
    again = _moved(_per_entry(log_prob_fn(ids), ids, "")[0], before)[owner >= 0].max().item()
    if again > 0:
        likely = (
            "two calls with the same ids differ: dropout is on, or the kernel is not determined"
        )
        if not again <= tolerance:
            return judge(
                **name, worst=again, unit="nats", threshold=tolerance, index="a second call",
                why="the same input gives the same output", likely=likely,
            )  # fmt: skip
    out = unit_roundoff(raw.dtype) if raw.is_floating_point() else 0.0
    roundoff = max(seen.roundoff, out)
    packed = ids, segment_ids, before, roundoff, out, seen.logit_scale()
    changes = log_prob_fn, ids, segment_ids, before, owner, seen
    found = _changed_segments(*changes, keep)
    if found.pop("shapes_vary") and not tolerance:
        tolerance = _shaped_limit(before, roundoff, out, seen)
        why = f"rounding with u = {roundoff:.1e}: the shapes of products depend on the tokens"
    if not found["worst"] <= tolerance and (kept := _markers(ids, segment_ids)):
        ordinary = _changed_segments(*changes, [*kept, *keep])
        if (
            ordinary["worst"] <= tolerance
        ):  # only tokens that may mark padding or boundaries move it
            equal = _equal_alone(alone_fn or log_prob_fn, *packed)
            if equal:
                found = ordinary
            elif equal is None:
                found["likely"] += (
                    f"; or masks are read from the ids: make them outside, or give keep={kept}"
                )
    found.pop("shapes_vary", None)
    if not found["worst"] <= tolerance:
        return judge(**name, **found, unit="nats", threshold=tolerance, why=why)
    if embeds is not None:
        through = _crossing_gradient(embeds_fn, embeds, segment_ids)
        if not through["worst"] <= tolerance:
            return judge(**name, **through, unit="of gradient", threshold=tolerance, why=why)
    if alone_fn is not None:
        apart = _against_alone(alone_fn, *packed)
        if not apart["worst"] <= apart["threshold"]:
            return judge(**name, **apart)
    also = {"loss mask": loss_mask, "alone": alone_fn, "gradients": embeds}
    if asked := ", ".join(k for k, v in also.items() if v is not None):
        found["index"] += f"; also asked: {asked}"
    return judge(**name, **found, unit="nats", threshold=tolerance, why=why)


def _parts(segment_ids: Tensor) -> Iterator[tuple[int | None, Tensor]]:
    """Yield what the rest must not depend on, as a mask [R, L].

    Each segment in all rows at once, with its number; then, without one, half of the rows, so that
    any two rows are in different halves once.
    """
    for segment in segment_ids.unique().tolist():
        yield segment, segment_ids == segment
    row = torch.arange(len(segment_ids), device=segment_ids.device)[:, None]
    for bit in range((len(segment_ids) - 1).bit_length()):
        for half in (0, 1):
            yield None, ((row >> bit) % 2 == half).expand_as(segment_ids)


def _name(segment: int | None) -> str:
    return "other rows" if segment is None else f"segment {segment}"


def _changed_segments(
    fn: Callable[[Tensor], Tensor],
    ids: Tensor,
    segment_ids: Tensor,
    before: Tensor,
    owner: Tensor,
    seen: _Coarsest,
    keep: Sequence[int] = (),
) -> dict[str, Any]:
    """Change each segment, in all rows at once, and find the largest movement elsewhere.

    Once all of its tokens change and once the first alone: the sum of many changes may be zero.
    """
    worst, index, likely, trace = -1.0, "", "", ()
    other, vary = _other_tokens(ids, keep), seen.grouped
    first = segment_ids != F.pad(segment_ids, (1, 0), value=-2)[:, :-1]
    changes = ((s, mine, p & mine) for s, mine in _parts(segment_ids) for p in (mine, first))
    for segment, mine, changed in changes:
        raw, now = _watch(fn, torch.where(changed, other, ids))
        vary |= now.products != seen.products
        after, problem = _per_entry(raw, ids, "")
        if problem:
            return {"worst": math.nan, "index": f"{_name(segment)} changed", "likely": problem,
                    "shapes_vary": vary}  # fmt: skip
        moved = _moved(after, before)
        moved = moved.masked_fill(mine[:, : moved.shape[1]] | (owner < 0), 0.0)
        if moved.max() > worst:
            row, t = divmod(int(moved.argmax()), moved.shape[1])
            worst, trace = moved.max().item(), tuple(moved[row].tolist())
            hit = owner[row, t].item()
            index = f"row {row}, entry {t} (segment {hit}), after {_name(segment)} changed"
            if segment is None or (segment_ids[row] != segment).all():
                likely = "one row sees another: boundaries are lost where rows are joined"
            elif segment < 0:
                likely = "padding is attended to"
            elif segment > hit:
                likely = "a later sequence is seen: the mask is not causal"
            else:
                likely = "attention or state crosses the boundary: it is not told where it is"
    if worst == 0:
        index = "any entry of another segment"
    return {
        "worst": worst,
        "index": index,
        "likely": likely,
        "trace": trace,
        "shapes_vary": vary,
    }


def _shaped_limit(before: Tensor, roundoff: float, out_roundoff: float, seen: _Coarsest) -> float:
    """Return how far rounding moves a value when the shapes of products change."""
    scale = max(
        seen.logit_scale(), before.nan_to_num(nan=0.0, posinf=0, neginf=0).abs().max().item()
    )
    surprise = torch.tensor(-math.inf)
    return log_prob_tolerance(surprise, roundoff, out_roundoff, scale).item()


def _crossing_gradient(
    fn: Callable[[Tensor], Tensor], embeds: Tensor, segment_ids: Tensor
) -> dict[str, Any]:
    """Find the largest input gradient that one segment's values have on another segment."""
    embeds = embeds.detach().requires_grad_()
    found = {"worst": 0.0, "index": "any segment"}
    for segment, mine in _parts(segment_ids):
        if segment is not None and segment < 0:  # padding has no values to ask for
            continue
        values = fn(embeds)
        asked = mine[:, : values.shape[1]] & (_owner(segment_ids, values.shape[1]) >= 0)
        if not asked.any():  # one token predicts nothing
            continue
        (grad,) = torch.autograd.grad(values[asked].sum(), embeds)
        size = grad.abs().double().amax(-1).to(segment_ids.device).masked_fill(mine, 0.0)
        size = size.nan_to_num(nan=math.inf, posinf=math.inf)
        if size.max() > found["worst"]:
            row, t = divmod(int(size.argmax()), size.shape[1])
            index = f"row {row}, token {t}, from the values of {_name(segment)}"
            likely = "attention or state crosses the boundary"
            found = {"worst": size.max().item(), "index": index, "likely": likely}
    return found


def _against_alone(
    fn: Callable[[Tensor], Tensor],
    ids: Tensor,
    segment_ids: Tensor,
    before: Tensor,
    roundoff: float,
    out_roundoff: float,
    logit_scale: float,
) -> dict[str, Any]:
    """Compare each segment with the same sequence alone; the worst against its tolerance."""
    fewer = ids.shape[1] - before.shape[1]
    errors, limits, names = [], [], []
    for row, segment in sorted(
        {(r, s) for r, line in enumerate(segment_ids.tolist()) for s in line}
    ):
        at = (segment_ids[row] == segment).nonzero()[:, 0]
        if segment < 0 or len(at) <= fewer:
            continue
        alone, problem = _per_entry(fn(ids[row, at][None]), ids[row, at][None], "alone_fn")
        if problem or len(alone[0]) != len(at) - fewer:
            problem = problem or f"alone_fn returned {len(alone[0])} values for {len(at)} tokens"
            return {"worst": math.nan, "threshold": 0, "unit": "nats", "likely": problem,
                    "index": f"row {row}, segment {segment}", "why": "shapes fit"}  # fmt: skip
        at = at[: len(at) - fewer]
        apart = _moved(before[row, at][None], alone)[0]
        is_logp = alone.ndim == 2 and bool((alone <= 0).all())
        logp = alone[0] if is_logp else torch.full_like(apart, -math.inf)
        scale = max(logit_scale, alone.nan_to_num(nan=0.0, posinf=0, neginf=0).abs().max().item())
        errors.append(apart)
        limits.append(log_prob_tolerance(logp, roundoff, out_roundoff, scale))
        names += [f"row {row}, entry {t} (segment {segment})" for t in at.tolist()]
    if not errors:
        return {"worst": 0.0, "threshold": 0.0}
    worst, limit, token, _ = _judge(torch.cat(errors), torch.cat(limits))
    index = f"the mean over {len(names)} entries" if token is None else names[token]
    likely = "nothing is seen across the boundary, so positions do not restart"
    return {"worst": worst, "threshold": limit, "unit": "nats", "index": index, "likely": likely,
            "why": _rounding_why(roundoff, token)}  # fmt: skip


def _equal_alone(fn: Callable[[Tensor], Tensor], *packed: Any) -> bool | None:
    """Say whether sequences alone have the same values; None if `fn` does not take them alone."""
    try:
        apart = _against_alone(fn, *packed)
    except Exception:  # it holds masks or positions of the packed shape
        return None
    return None if math.isnan(apart["worst"]) else apart["worst"] <= apart["threshold"]


def _batch_size(batch: Any) -> int:
    return len(next(iter(batch.values()))) if isinstance(batch, Mapping) else len(batch)


def _microbatches(split: Any, size: int, name: str) -> list[list[int]]:
    """Return the rows of each microbatch; an int k stands for k contiguous ones."""
    if isinstance(split, int):
        if not 1 <= split <= size:
            raise ValueError(f"{name} = {split} microbatches of {size} sequences")
        return [part.tolist() for part in torch.arange(size).tensor_split(split)]
    rows = [[int(i) for i in part] for part in split]
    wrong = Counter(itertools.chain(*rows))
    wrong.subtract(range(size))
    for i, count in sorted(wrong.items()):
        if count:
            raise ValueError(f"{name} holds sequence {i} {count + (0 <= i < size)} times")
    return rows


def _plural(k: int) -> str:
    return f"{k} microbatch" + "es" * (k != 1)


def _flat(grads: Any) -> Tensor:
    """Return all gradients in one float64 vector on the CPU."""
    parts = [g for g in tree_leaves(grads) if isinstance(g, Tensor)]
    if not parts:
        raise TypeError(f"grad_fn returned {type(grads).__name__} without a tensor")
    return torch.cat([g.detach().double().cpu().flatten() for g in parts])


def split_invariance_check(
    grad_fn: Callable[[Any, list[list[int]]], Any],
    batch: Any,
    splits: Sequence[int | Sequence[Sequence[int]]] = (2, 4),
    *,
    reference: int | Sequence[Sequence[int]] = 1,
    tolerance: float | None = None,
    strict: bool = False,
) -> CheckResult:
    """Check that the gradient of a batch does not depend on how it is split.

    Args:
        grad_fn: gets the batch and a split, a list of lists of row numbers, and returns the
            gradient after all these microbatches, before clipping, which would hide a factor: a
            tensor, or a list or dictionary of them.
        batch: a sequence, or a dictionary of tensors that share their first dimension.
        splits: each a number of contiguous microbatches, or lists of row numbers. The fault grows
            with the differences between microbatches: sort one split by length.
        reference: the split that the others are compared with, by default the whole batch at once.
        tolerance: relative, |g - g_reference| / |g_reference|; by default `SIGMAS` u sqrt(K + 16)
            for K microbatches, see the chapter. Where contributions cancel, it is relative to
            the root of the sum of squares of single sequences' gradients instead, if `grad_fn` can
            give them.
        strict: raise `AuditError` if the check fails.

    Raises:
        ValueError: naming a split that is no partition of the batch, or if all gradients are 0.
    """
    size = _batch_size(batch)
    plans = [_microbatches(split, size, f"splits[{i}]") for i, split in enumerate(splits)]
    if not plans:
        raise ValueError("splits is empty: there is nothing to compare")
    whole = _microbatches(reference, size, "reference")
    raw, roundoff = _observe(grad_fn, batch, whole)
    types = [g.dtype for g in tree_leaves(raw) if isinstance(g, Tensor)]
    expected = _flat(raw)
    roundoff = max(roundoff, *map(unit_roundoff, types))

    def verdict(**fields: Any) -> CheckResult:
        return judge(strict, check="split_invariance_check", **fields)

    def broken(g: Tensor, index: str) -> CheckResult | None:
        bad = int((~g.isfinite()).sum())
        likely = (
            "a microbatch without policy tokens divides by 0, or by a deviation over one reward"
        )
        why = "a gradient is finite"
        return verdict(worst=math.nan, unit=f"in {bad} of {len(g)} entries", index=index,
                       threshold=0.0, why=why, likely=likely) if bad else None  # fmt: skip

    def limit(k: int) -> float:
        return SIGMAS * roundoff * math.sqrt(k + 16) if tolerance is None else tolerance

    if (found := broken(expected, "the reference")) is not None:
        return found
    scale = expected.norm().item()
    errors = [(_flat(grad_fn(batch, whole)) - expected).norm().item() / (scale or 1.0)]
    if not errors[0] <= limit(len(whole)):
        return verdict(
            worst=errors[0], unit="relative", index="a second call", threshold=limit(len(whole)),
            why="the same split gives the same gradient",
            likely="dropout is on, or gradients are not cleared between calls",
        )  # fmt: skip
    errors, worst = [], (-1.0, 0, expected)
    for k, plan in enumerate(plans):
        g = _flat(grad_fn(batch, plan))
        if (found := broken(g, f"splits[{k}], {_plural(len(plan))}")) is not None:
            return found
        if len(g) != len(expected):
            return verdict(
                worst=math.nan, unit="entries", index=f"splits[{k}]", threshold=0.0,
                why="every split has the same parameters",
                likely=f"grad_fn returned {len(g)} numbers, and {len(expected)} for the reference",
            )  # fmt: skip
        difference = (g - expected).norm().item()
        errors.append(difference / scale if scale else math.inf if difference else 0.0)
        allowed = limit(len(plan))
        excess = errors[-1] / allowed if allowed else math.inf if errors[-1] else 0.0
        if excess > worst[0]:
            worst = (excess, k, g)
    if not scale and not any(errors):
        raise ValueError("the gradient is 0 for every split: there is nothing to compare")
    _, k, g = worst
    allowed, cancels = limit(len(plans[k])), ""
    if tolerance is None and allowed < errors[k] <= _CANCELLED * allowed:
        size_alone = _size_alone(grad_fn, batch, size, expected, limit(size))
        if size_alone > 1:  # contributions cancel, their roundings do not
            allowed, cancels = allowed * size_alone, f", times {size_alone:.3g}: sequences cancel"
    passed = errors[k] <= allowed
    return verdict(
        worst=errors[k], unit="relative", index=f"splits[{k}], {_plural(len(plans[k]))}",
        threshold=allowed, trace=tuple(errors),
        why=f"{SIGMAS} u sqrt(K + 16), u = {roundoff:.1e}, K = {len(plans[k])}{cancels}"
        if tolerance is None else "given",
        likely="" if passed else _why_split(grad_fn, batch, plans[k], g, expected, errors[k]),
    )  # fmt: skip


def _why_split(
    fn: Callable[..., Any],
    batch: Any,
    plan: list[list[int]],
    g: Tensor,
    expected: Tensor,
    error: float,
) -> str:
    """Say what a wrong gradient is made of."""
    K = len(plan)
    along = (g @ expected / expected.square().sum().clamp(min=1e-300)).item()
    parallel = (g - along * expected).norm() < 0.1 * error * expected.norm()
    if parallel and min(abs(along / K - 1), abs(along * K - 1)) < 0.01:
        return (
            f"the gradient is {along:.3g} times too long: {K} microbatches are summed where they "
            "should be averaged, or the reverse"
        )
    try:
        parts = torch.stack([_flat(fn(batch, [rows])) for rows in plan])  # [K, P]
    except Exception as problem:  # a trainer may refuse a part of the batch
        return f"unknown, since a microbatch alone fails: {problem}"
    parts = parts.nan_to_num()
    own = (parts.mean(0) - g).norm() < 0.1 * error * expected.norm()
    share = f"{K} microbatches are averaged with equal weight"
    if parts.shape[1] > K:
        right, actual = (_weights(parts, x) for x in (expected, g))
        unexplained = (expected - right @ parts).norm() / expected.norm()
        if unexplained > 0.5 * error:
            return (
                "a microbatch alone gives another gradient than inside the batch: advantages or "
                "statistics are computed per microbatch"
            )
        moved = (actual - right).abs() * parts.norm(dim=1)  # a silent part may have any weight
        ratio = torch.where(moved > 0.01 * moved.max(), actual / right, 1.0)
        j = int((ratio - 1).abs().argmax())
        if abs(ratio[j]) < 0.01:
            return f"microbatch {j} is left out"
        rows = f"{len(plan[j])} sequence" + "s" * (len(plan[j]) != 1)
        share = f"microbatch {j} ({rows}) counts {ratio[j]:.2f} times what it should"
    return (
        f"{share}: each is divided by its own count"
        if own
        else f"{share}: the weights are wrong, or gradients are clipped inside the loop"
    )


def _weights(parts: Tensor, target: Tensor) -> Tensor:
    """Return the weights [K] whose sum of parts [K, P] is nearest to the target [P]."""
    gram = parts @ parts.T
    return torch.linalg.lstsq(gram, (parts @ target)[:, None], driver="gelsd").solution[:, 0]


_CANCELLED = 1e4  # at more, rounding is no explanation


def _size_alone(
    fn: Callable[..., Any], batch: Any, size: int, expected: Tensor, limit: float
) -> float:
    """Return the root of the sum of squares of single sequences' gradients over that of the sum.

    0 if they do not add up to the whole gradient: then they say nothing about it.
    """
    total, squares = torch.zeros_like(expected), 0.0
    for i in range(size):
        try:
            with warnings.catch_warnings():  # a deviation over one sequence, for one
                warnings.simplefilter("ignore")
                g = _flat(fn(batch, [[i]]))
        except Exception:  # a trainer may refuse a part of the batch
            return 0.0
        if len(g) != len(expected):
            return 0.0
        total += g
        squares += g.square().sum().item()
    scale, off = math.sqrt(squares), (total - expected).norm().item()
    averages = (total / size - expected).norm().item() < 1.5 / size * off  # each has its own norm
    adds_up = off <= limit * scale and not averages
    return scale / max(expected.norm().item(), 1e-300) if adds_up else 0.0


def _per_trajectory(out: Any, trajs: Sequence[Trajectory]) -> tuple[list[Tensor], str]:
    """Return [T - 1] values for each trajectory in float64, and what is wrong with them."""
    if isinstance(out, Tensor):
        width = max(len(traj.ids) for traj in trajs) - 1
        if list(out.shape) != [len(trajs), width]:
            need = f"[{len(trajs)}, {width}]"
            return [], f"log_prob_fn returned shape {list(out.shape)}, needs {need}, or a list"
        out = [row[: len(traj.ids) - 1] for row, traj in zip(out, trajs, strict=True)]
    if not isinstance(out, list | tuple) or not all(isinstance(row, Tensor) for row in out):
        return [], f"log_prob_fn returned {type(out).__name__}, not a tensor or a list of tensors"
    if len(out) != len(trajs):
        return [], f"log_prob_fn returned {len(out)} rows for {len(trajs)} trajectories"
    for i, (row, traj) in enumerate(zip(out, trajs, strict=True)):
        if list(row.shape) != [len(traj.ids) - 1]:
            need = f"[{len(traj.ids) - 1}]"
            return [], f"log_prob_fn returned shape {list(row.shape)} for trajs[{i}], needs {need}"
    return [row.detach().double().cpu() for row in out], ""


def step_zero_ratio_check(
    log_prob_fn: Callable[[Sequence[Trajectory]], Any],
    trajs: Sequence[Trajectory],
    *,
    group_size: int | None = None,
    sampler_dtype: torch.dtype | None = None,
    logit_scale: float | None = None,
    tolerance: float | None = None,
    strict: bool = False,
) -> CheckResult:
    """Check that before the first update the trainer's log-probabilities are the sampler's.

    Args:
        log_prob_fn: gets the trajectories and returns the log-probability of each token after the
            first: a list of [T - 1], or a padded [B, T - 1].
        trajs: `sample_logp` holds what the sampler recorded, 0 where it sampled nothing. An
            `action_mask` covers all that was recorded, or none of an episode that is left out.
        group_size: also ask whether the episodes of a group drew their first tokens independently.
        sampler_dtype: the coarsest type in which the sampler computed, if it is coarser than the
            trainer's: an engine that runs elsewhere cannot be watched.
        logit_scale: the size of the logits in nats, see `log_prob_tolerance`; by default what is
            seen to enter a log-softmax, so needed with a fused kernel and logits above 16.6.
        tolerance: in nats for every token, instead of the one derived from the types.
        strict: raise `AuditError` if the check fails.

    Raises:
        ValueError: naming a trajectory that is malformed, or if no token was sampled.
    """
    check_trajectories(trajs)
    if group_size is not None and (group_size < 2 or len(trajs) % group_size):
        raise ValueError(f"{len(trajs)} trajectories are not groups of group_size = {group_size}")
    masks = [traj.action_mask.bool().cpu() for traj in trajs]
    if not any(mask.any() for mask in masks):
        raise ValueError("no trajectory has a sampled token: action_mask is 0 everywhere")

    def verdict(**fields: Any) -> CheckResult:
        return judge(strict, check="step_zero_ratio_check", **fields)

    chance, index, likely = _sampling_chance(trajs, group_size)
    if likely:
        return verdict(
            worst=-chance, unit="nats of surprise", index=index, threshold=-_RARE, likely=likely,
            why="what is rarer than once in 5e8 is no accident",
        )  # fmt: skip
    raw, seen = _watch(log_prob_fn, trajs)
    rows, problem = _per_trajectory(raw, trajs)
    why = "the same weights and the same context give the same log-probability"
    if problem:
        return verdict(worst=math.nan, unit="nats", index="the output", threshold=0.0, why=why,
                       likely=problem)  # fmt: skip
    out = max(unit_roundoff(x.dtype) for x in tree_leaves(raw) if isinstance(x, Tensor))
    theirs = {sampler_dtype or torch.float64, *(t.sample_logp.dtype for t in trajs)}
    roundoff = max(seen.roundoff, out, *map(unit_roundoff, theirs))
    out = max(out, *(unit_roundoff(t.sample_logp.dtype) for t in trajs))
    flat, sampled = (torch.cat(x) for x in (rows, [t.sample_logp.double().cpu() for t in trajs]))
    mask = torch.cat(masks)
    places = [(i, t) for i, row in enumerate(rows) for t in range(len(row))]
    apart = (flat - sampled).abs()
    if not (apart[mask].isfinite()).all():
        i, t = places[int((mask & ~apart.isfinite()).nonzero()[0])]
        return verdict(
            worst=math.nan, unit="nats", index=f"trajs[{i}], entry {t}", threshold=0.0, why=why,
            likely="the log-probability of a sampled token is not finite",
        )  # fmt: skip
    if logit_scale is None:
        logit_scale = max(seen.logit_scale(), -sampled[mask].min().item())
    if tolerance is None:
        limit = log_prob_tolerance(sampled[mask], roundoff, out, logit_scale)
    else:
        limit = torch.full_like(apart[mask], tolerance)
    error, where = apart[mask], mask.nonzero()[:, 0].tolist()
    worst, allowed, token, mean_limit = _judge(error, limit, averaged=tolerance is None)
    index = f"the mean over {len(error)} sampled tokens"
    if token is not None:
        i, t = places[where[token]]
        index = f"trajs[{i}], entry {t}, p = {sampled[mask][token].exp():.2g}"
    lost = [
        (i, t)
        for i, t in places
        if masks[i].any() and not masks[i][t] and trajs[i].sample_logp[t] != 0
    ]
    if worst <= allowed and lost:
        i, t = lost[0]
        return verdict(
            worst=len(lost), unit="tokens", index=f"trajs[{i}], entry {t}", threshold=0,
            why="every token that the sampler recorded is trained, or none of its episode",
            likely="action_mask leaves out sampled tokens, such as the last one of an episode",
        )  # fmt: skip
    return verdict(
        worst=worst, unit="nats", index=index, threshold=allowed, trace=tuple(error.tolist()),
        why=_rounding_why(roundoff, token) if tolerance is None else "given",
        likely="" if worst <= allowed
        else _why_ratio(log_prob_fn, trajs, rows, masks, limit, mean_limit, roundoff, logit_scale),
    )  # fmt: skip


def _why_ratio(
    fn: Callable[..., Any],
    trajs: Sequence[Trajectory],
    rows: list[Tensor],
    masks: list[Tensor],
    limit: Tensor,
    mean_limit: float,
    limit_roundoff: float,
    logit_scale: float,
) -> str:
    """Say what the differences have in common."""
    again = _per_trajectory(fn(trajs), trajs)[0]
    moved = max((a - b)[m].abs().max().item() for a, b, m in zip(again, rows, masks, strict=True)
                if m.any())  # fmt: skip
    if moved > mean_limit:
        return f"two calls differ by {moved:.2g} nats: dropout is on in this pass"
    old = [traj.sample_logp.double().cpu() for traj in trajs]
    top = limit.max().item()
    recorded = [(r, o, m & (o != 0)) for r, o, m in zip(rows, old, masks, strict=True)]
    covered = not any(((o != 0) & ~m).any() for o, m in zip(old, masks, strict=True))
    if covered and _agree(recorded, top, mean_limit):
        return "action_mask trains tokens that the sampler did not sample: it recorded 0 for them"
    for s in (1, -1):
        known = [m & _shift(torch.ones_like(m), s) for m in masks]
        pairs = [(_shift(row, s), o, m) for row, o, m in zip(rows, old, known, strict=True)]
        if _agree(pairs, top, mean_limit):
            return f"the log-probabilities are off by one: entry t holds the one of t {-s:+d}"
        inside = [_shift(torch.ones_like(m), s) for m in masks]
        missed = [(o != 0) & ~_shift(m, s) & i for o, m, i in zip(old, masks, inside, strict=True)]
        back = not any(x.any() for x, m in zip(missed, masks, strict=True) if m.any())
        pairs = [
            (row, o, _shift(m, s) & (o != 0)) for row, o, m in zip(rows, old, masks, strict=True)
        ]
        fewer = sum(int(m.sum()) for *_, m in recorded) < sum(int(m.sum()) for m in masks)
        if back and fewer and _agree(pairs, top, mean_limit):
            side = "before" if s > 0 else "after"
            return f"action_mask is off by one: the sampler's tokens are {side} it"
    y, x = (torch.cat([r[m] for r, m in zip(z, masks, strict=True)]) for z in (rows, old))
    error = y - x
    if error.std() < 0.05 * error.mean().abs():
        return (
            f"a constant of {error.mean():.2g} nats: one side is not normalised over the vocabulary"
        )
    slope = ((x * y).sum() / x.square().sum()).item()
    left = (y - slope * x).square().sum() / error.square().sum()
    if left < 0.5 and 0.2 < slope < 5:
        return f"log-probabilities are {slope:.2f} times the sampler's: a temperature on one side"
    small = 0.05 * error.abs().mean()  # below a wide limit, too, errors of one kind do not agree
    exact = [i for i, (r, o, m) in enumerate(zip(rows, old, masks, strict=True))
             if m.any() and (e := (r - o)[m].abs()).max() <= top and e.mean() <= small]  # fmt: skip
    if 0 < len(exact) < len(trajs):
        wrong = next(i for i in range(len(trajs)) if i not in exact)
        return (
            f"{len(exact)} of {len(trajs)} trajectories agree, trajs[{wrong}] does not: a context "
            "that differs, such as a neighbour in a packed row, or positions"
        )
    near = (error.abs() / limit).max().item()
    types = (unit_roundoff(dtype) for dtype in (torch.bfloat16, torch.float32))
    coarse = log_prob_tolerance(x, *types, logit_scale)
    worst, allowed, *_ = _judge(error.abs(), coarse)
    hint = (
        "; or a sampler in bfloat16: give sampler_dtype only if it is, since that hides the others"
    )
    return (
        "no trajectory agrees: other weights, such as a stale policy version or an adapter; other "
        "logits, such as a temperature, top-p or a penalty; or another context in every episode"
        + hint * (worst <= allowed and unit_roundoff(torch.bfloat16) > limit_roundoff)
        + "; or rounding in a deep model, this near the limit: ask again in float64" * (near < 4)
    )


def _shift(values: Tensor, by: int) -> Tensor:
    """Move entries to earlier places by `by`, filling with zeros."""
    return F.pad(values[by:], (0, by)) if by > 0 else F.pad(values[:by], (-by, 0))


def _agree(pairs: Iterable[tuple[Tensor, Tensor, Tensor]], top: float, mean: float) -> bool:
    error = torch.cat([(a - b)[m].abs() for a, b, m in pairs])
    return len(error) > 0 and bool(error.max() <= top and error.mean() <= mean)


_RARE = -20.0  # log of 1 in 5e8, as `SIGMAS`


def _sampling_chance(trajs: Sequence[Trajectory], group_size: int | None) -> tuple[float, str, str]:
    """Ask whether equal draws can be an accident; log-probability, place, cause if they cannot."""
    seen: dict[tuple[Any, ...], int] = {}
    for j, traj in enumerate(trajs):
        key = (tuple(traj.ids.tolist()), tuple(traj.sample_logp.tolist()))
        chance = float(traj.sample_logp.sum()) + 2 * math.log(len(trajs))
        if key in seen and chance < _RARE:
            place = f"trajs[{seen[key]}] and trajs[{j}]"
            return chance, place, "one episode is in the batch twice"
        seen[key] = j
    if group_size is None:
        return 0.0, "", ""
    total, equal = 0.0, []
    for g in range(len(trajs) // group_size):
        group = trajs[g * group_size : (g + 1) * group_size]
        first = [int(traj.action_mask.long().argmax()) for traj in group]
        tokens = {int(traj.ids[t + 1]) for traj, t in zip(group, first, strict=True)}
        if len(tokens) == 1:
            total += (group_size - 1) * float(group[0].sample_logp[first[0]])
            equal.append(g)
    total += len(trajs) // group_size * math.log(2)  # any subset of the groups could have stood out
    if total < _RARE:
        place = f"group {equal[0]}, first of {len(equal)} groups"
        likely = f"one first token is drawn and repeated {group_size} times"
        return total, place, likely
    return total, "", ""


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} = {value!r} is not an integer")
    if value < 1:
        raise ValueError(f"{name} = {value} is not positive")
    return int(value)


def _ranks(batches: Any, num_ranks: int) -> list[list[list[int]]]:
    """Return microbatches of each rank; a flat list is that of one rank."""
    batches = [rows.tolist() if hasattr(rows, "tolist") else rows for rows in batches]
    flat = num_ranks == 1 and not any(
        hasattr(rows, "__len__") and len(rows) and hasattr(rows[0], "__len__") for rows in batches
    )
    ranks = [batches] if flat else batches
    if len(ranks) != num_ranks:
        raise ValueError(f"batches has {len(ranks)} ranks, num_ranks = {num_ranks}")
    ranks = [list(rank) if isinstance(rank, Iterable) else [rank] for rank in ranks]
    for r, rank in enumerate(ranks):
        for b, rows in enumerate(rank):
            if not hasattr(rows, "__len__"):
                raise TypeError(f"batches[{r}][{b}] = {rows!r} is no list of indices")
    return [[[int(i) for i in rows] for rows in rank] for rank in ranks]


def schedule_check(
    batches: Sequence[Any],
    lengths: Sequence[int] | Tensor,
    max_tokens: int,
    num_ranks: int = 1,
    *,
    packed: bool = False,
    slack: float = 0.25,
    strict: bool = False,
) -> CheckResult:
    """Check that microbatches hold every sequence once, fit into memory, and are few and even.

    Args:
        batches: lists of indices into `lengths`; with several ranks, such lists for each rank.
        lengths: tokens of each sequence [N].
        max_tokens: what fits: count times longest, or with `packed` the sum of lengths.
        num_ranks: data-parallel ranks; all need the same number of microbatches, none empty.
        packed: whether the sequences of a microbatch are packed without padding.
        slack: by how much there may be more microbatches than a plan that was found, per rank;
            one more is always allowed, unless it is 0.
        strict: raise `AuditError` if the check fails.

    Raises:
        ValueError, TypeError: for lengths, a cap or ranks that are none.
    """
    max_tokens, num_ranks = _count("max_tokens", max_tokens), _count("num_ranks", num_ranks)
    lengths = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
    sizes = [_count(f"lengths[{i}]", n) for i, n in enumerate(lengths)]
    if not sizes:
        raise ValueError("lengths is empty: there is nothing to schedule")
    ranks = _ranks(batches, num_ranks)

    def verdict(**fields: Any) -> CheckResult:
        return judge(strict, check="schedule_check", **fields)

    times = Counter(i for rank in ranks for rows in rank for i in rows)
    times.subtract(range(len(sizes)))
    for i, extra in sorted(times.items()):
        if extra:
            inside = 0 <= i < len(sizes)
            likely = f"sequence {i} is dropped" if extra < 0 else f"sequence {i} is trained twice"
            return verdict(
                worst=abs(extra), unit="times too few" if extra < 0 else "times too many",
                index=f"sequence {i}", threshold=0, why="every sequence is trained once",
                likely=likely if inside else f"there is no sequence {i}",
            )  # fmt: skip
    for i, n in enumerate(sizes):
        if n > max_tokens:
            return verdict(
                worst=n, unit="tokens", index=f"sequence {i}", threshold=max_tokens,
                why="max_tokens", likely="a sequence that does not fit is cut, or the cap is not "
                "kept: it should be refused",
            )  # fmt: skip
    counts = [len(rank) for rank in ranks]
    if len(set(counts)) > 1:
        r = counts.index(min(counts))
        return verdict(
            worst=max(counts) - min(counts), unit="microbatches fewer", index=f"rank {r}",
            threshold=0, why="a collective waits for every rank",
            likely=f"ranks have {counts} microbatches: the others wait for rank {r} for ever",
        )  # fmt: skip
    loads, names = [], []
    for r, rank in enumerate(ranks):
        for k, rows in enumerate(rank):
            load = [sizes[i] for i in rows]
            loads.append(sum(load) if packed else len(load) * max(load, default=0))
            names.append(f"microbatch {k}" + f" of rank {r}" * (num_ranks > 1))
    worst = max(range(len(loads)), key=loads.__getitem__)
    trace = tuple(map(float, loads))
    if loads[worst] > max_tokens:
        return verdict(
            worst=loads[worst], unit="tokens", index=names[worst], threshold=max_tokens,
            why="max_tokens", trace=trace,
            likely="microbatches are cut by a count or an average, not by the tokens they hold",
        )  # fmt: skip
    if 0 in loads:
        return verdict(
            worst=1, unit="empty microbatches", index=names[loads.index(0)], threshold=0,
            why="a mean over nothing is not a number", likely="ranks are filled up with nothing",
        )  # fmt: skip
    need = _fewest(sizes, max_tokens, num_ranks, packed)
    allowed = max(need + 1, math.floor(need * (1 + slack))) if slack else need
    if counts[0] > allowed:
        bound = (
            f" (no plan has fewer than {packing_bound(sizes, max_tokens)} rows)" if packed else ""
        )
        return verdict(
            worst=counts[0], unit="microbatches", index="each rank" if num_ranks > 1 else "all",
            why=f"a plan with {need} exists{bound}, and {allowed - need} more allowed",
            threshold=allowed,
            likely="room in open microbatches is not used: the search for a fit is wrong, the "
            "order is kept, or a count limits them",
        )  # fmt: skip
    return verdict(worst=loads[worst], unit="tokens", index=names[worst], threshold=max_tokens,
                   why="max_tokens", trace=trace)  # fmt: skip


def _fewest(sizes: list[int], max_tokens: int, num_ranks: int, packed: bool) -> int:
    """Return how many microbatches a rank needs in a plan that we can make."""
    if num_ranks == 1:
        return len(token_budget_batches(sizes, max_tokens, packed=packed))
    return max(1, -(-len(token_budget_batches(sizes, max_tokens, packed=packed)) // num_ranks))


def _filter_cases(low: float, high: float) -> list[tuple[list[float], bool]]:
    """Return groups of rewards, and whether each can give a gradient and is inside the bounds."""
    equal = [[k / 10] * n for k in range(11) for n in (2, 3, 4, 5, 7, 8, 16)]
    mixed = [[0.0] * n + [1.0] * m for n, m in ((1, 1), (1, 7), (7, 1), (4, 4), (15, 1))]
    mixed += [[0.25, 0.5], [0.5] * 7 + [0.75], [0.0, 0.25, 0.5, 1.0]]
    cases = [(group, False) for group in equal]
    for group in mixed:
        mean = sum(group) / len(group)
        if min(abs(mean - low), abs(mean - high)) > 0.01:  # at a bound, opinions differ
            cases.append((group, low < mean < high))
    return cases


def group_filter_check(
    filter_fn: Callable[..., Sequence[Any]],
    *,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype | None = None,
    truncation: bool = False,
    fill_fn: Callable[[Callable[[int], list[list[float]]]], Any] | None = None,
    strict: bool = False,
) -> CheckResult:
    """Check that a filter keeps exactly the groups that give a gradient.

    Args:
        filter_fn: gets groups, lists of rewards, and says for each whether it is kept, in order.
        low, high: the filter's own bounds on a group's mean reward.
        dtype: give each group as a tensor of this type.
        truncation: call `filter_fn(groups, cut)`, where `cut` marks episodes that ran out of length
            with reward 0; such an episode is no failure, and must not make a group worth keeping.
        fill_fn: dynamic sampling: gets `sample(count)`, which returns that many groups, all solved;
            has to come to an end, without an exception, and say why.
        strict: raise `AuditError` if the check fails.
    """
    cases = [(g, [False] * len(g), keep) for g, keep in _filter_cases(low, high)]
    if truncation:
        cases += [([1.0] * n + [0.0], [False] * n + [True], False) for n in (3, 7)]
        finished = 2 / 3  # the mean of the three that ended
        if min(abs(finished - low), abs(finished - high)) > 0.01:
            cut = [False, False, False, True]
            cases.append(([1.0, 1.0, 0.0, 0.0], cut, low < finished < high))
    groups = [g if dtype is None else torch.tensor(g, dtype=dtype) for g, _, _ in cases]

    def verdict(**fields: Any) -> CheckResult:
        why = "equal rewards are equal: no rounding enters"
        return judge(
            strict, **{"check": "group_filter_check", "threshold": 0, "why": why, **fields}
        )

    given = (groups, [cut for _, cut, _ in cases]) if truncation else (groups,)
    try:
        kept = filter_fn(*given)
        kept = [bool(k) for k in kept]
    except Exception as problem:
        likely = f"filter_fn raised {type(problem).__name__}: {problem}"
        return verdict(worst=math.nan, unit="groups", index="the call", likely=likely)
    if len(kept) != len(cases):
        likely = f"filter_fn returned {len(kept)} verdicts for {len(cases)} groups"
        return verdict(worst=math.nan, unit="groups", index="the output", likely=likely)
    wrong = [i for i, (k, (_, _, keep)) in enumerate(zip(kept, cases, strict=True)) if k != keep]
    if wrong:
        rewards, cut, keep = cases[wrong[0]]
        short = ", ".join(f"{r:g}" for r in rewards[:4]) + ", ..." * (len(rewards) > 4)
        index = f"group {wrong[0]}, rewards [{short}]"
        return verdict(worst=len(wrong), unit="groups", index=index,
                       likely=_why_filter(rewards, cut, keep, len(wrong), cases))  # fmt: skip
    if fill_fn is not None:
        return verdict(unit="groups", **_solved(fill_fn))
    return verdict(worst=0, unit="groups", index=f"any of {len(cases)} groups")


def _why_filter(rewards: list[float], cut: list[bool], keep: bool, wrong: int, cases: Any) -> str:
    if keep:
        return "a group with unequal rewards is dropped"
    if any(cut):
        return "an episode that ran out of length is scored as a failure"
    if len(set(rewards)) > 1:
        return "a group outside the bounds is kept"
    if 0 < rewards[0] < 1:
        equal = sum(0 < g[0] < 1 and not k for g, _, k in cases)
        if wrong > equal / 2:
            return "the mean is compared and the variance is not"
        return "a standard deviation of rounding size is compared with 0"
    return "groups of equal rewards are kept"


_PATIENCE = 10_000  # groups


class _Endless(BaseException):
    """Stops a sampler that would go on for ever; no `except Exception` holds it."""


def _solved(fill_fn: Callable[..., Any]) -> dict[str, Any]:
    """Run dynamic sampling where every task is solved."""
    asked = 0

    def sample(count: int) -> list[list[float]]:
        nonlocal asked
        asked += max(count, 1)
        if asked > _PATIENCE:
            raise _Endless
        return [[1.0] * 8 for _ in range(count)]

    index, why = "every task solved", "there is nothing to find, so the search ends and says so"
    try:
        out = fill_fn(sample)
    except _Endless:
        likely = f"sampling has no bound: {asked} groups and no end"
        return {"worst": asked, "index": index, "why": why, "likely": likely}
    except Exception as problem:
        likely = f"an exception instead of a stop: {type(problem).__name__}: {problem}"
        return {"worst": max(asked, 1), "index": index, "why": why, "likely": likely}
    if not any(isinstance(x, str) and x for x in tree_leaves(out)):
        return {
            "worst": max(asked, 1),
            "index": index,
            "why": why,
            "likely": "it stops without a reason",
        }
    return {"worst": 0, "index": f"{index}: stopped after {asked}", "why": why}


def head_memory_check(
    fn: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    vocab_size: int = 32_768,
    d_model: int = 256,
    tokens: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    strict: bool = False,
) -> CheckResult:
    """Check that the memory of an output head does not grow by a row of logits per token.

    Runs forward and backward at `tokens` and twice as many under `peak_memory`, and first on a
    small case for its values.

    Args:
        fn: from hidden [1, T, D], weight [V, D] and ids [1, T] to log-probabilities [1, T].
        vocab_size, d_model, tokens: V, D and T; V well above 12 D, which a head may cost, and T at
            least the longest chunk.
        dtype: of hidden and weight.
        device: "cpu" counts fake tensors; "cuda" asks the allocator, for a head that needs a GPU.
        strict: raise `AuditError` if the check fails.

    Raises:
        ValueError: if V is at most 16 D, where the two costs cannot be told apart.
    """
    if vocab_size <= 16 * d_model:
        raise ValueError(f"vocab_size = {vocab_size} must exceed 16 d_model = {16 * d_model}")

    def verdict(**fields: Any) -> CheckResult:
        return judge(strict, check="head_memory_check", **fields)

    if problem := _head_values(fn, dtype, device):
        return verdict(**problem)

    def step(hidden: Tensor, weight: Tensor, ids: Tensor) -> None:
        fn(hidden, weight, ids).sum().backward()

    def peak(T: int) -> int:
        like = {"dtype": dtype, "device": "meta", "requires_grad": True}
        ids = torch.empty(1, T, dtype=torch.int64, device="meta")
        shapes = torch.empty(1, T, d_model, **like), torch.empty(vocab_size, d_model, **like)
        return peak_memory(step, *shapes, ids, device=device)

    slope = (peak(2 * tokens) - peak(tokens)) / tokens
    return verdict(
        worst=slope, unit="bytes per token", index=f"{tokens} to {2 * tokens} tokens",
        threshold=vocab_size,
        why=f"V = {vocab_size}: one byte per word of the vocabulary; a row of logits takes 2 to 12",
        likely="logits of all tokens are kept for the backward pass, or chunks grow with T",
    )  # fmt: skip


def _head_values(fn: Callable[..., Tensor], dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Compare a head and its gradients with float64 on a small case; {} if they agree."""
    draws = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*s, generator=draws).to(dtype) for s in ((1, 24, 16), (48, 16)))
    ids = torch.randint(48, (1, 24), generator=draws)
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    exact = (wide[0] @ wide[1].T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    slopes = torch.autograd.grad(exact.sum(), wide)
    exact = exact.detach()
    leaves = [x.to(device).requires_grad_() for x in (hidden, weight)]
    got, roundoff = _observe(fn, *leaves, ids.to(device))
    grads = [None, None]
    if isinstance(got, Tensor) and got.requires_grad:
        grads = torch.autograd.grad(got.sum(), leaves, allow_unused=True)
    got = got.cpu() if isinstance(got, Tensor) else got
    fields = {"worst": math.nan, "threshold": 0.0, "index": "the output", "why": "[1, T] is asked"}
    if not isinstance(got, Tensor) or got.shape != ids.shape:
        shape = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
        return {
            **fields,
            "unit": "nats",
            "likely": f"fn returned {shape} for ids {list(ids.shape)}",
        }
    error = (got.detach().double() - exact).abs().nan_to_num(nan=math.inf, posinf=math.inf)[0]
    limit = log_prob_tolerance(exact[0], roundoff, unit_roundoff(got.dtype))
    t = int((error / limit).argmax())
    if error[t] <= limit[t]:
        return _head_gradients(grads, slopes, roundoff)
    return {
        "worst": error[t], "threshold": limit[t], "unit": "nats", "index": f"token {t}",
        "why": f"rounding with u = {roundoff:.1e}, {SIGMAS} sigma",
        "likely": "not the log-probability of the given token",
    }  # fmt: skip


def _head_gradients(
    grads: Sequence[Tensor | None], slopes: Sequence[Tensor], roundoff: float
) -> dict[str, Any]:
    """Compare gradients by hidden and weight with float64's; {} if they agree."""
    limit = SIGMAS * roundoff * math.sqrt(17)  # as `split_invariance_check`, for one microbatch
    for name, grad, exact in zip(("hidden", "weight"), grads, slopes, strict=True):
        grad = torch.zeros_like(exact) if grad is None else grad.cpu().double()
        error = ((grad - exact).norm() / exact.norm()).item()
        if not error <= limit:
            return {
                "worst": error, "threshold": limit, "unit": "relative",
                "index": f"the gradient by {name}", "why": f"rounding with u = {roundoff:.1e}",
                "likely": "the head is cut off from the graph, or its backward pass is wrong",
            }  # fmt: skip
    return {}


def flop_count_check(
    flops: float,
    step_fn: Callable[[], Any],
    *,
    tolerance: float = 0.01,
    strict: bool = False,
) -> CheckResult:
    """Check the FLOPs that a trainer reports for a step against those that torch counts.

    Args:
        flops: as reported, forward and backward.
        step_fn: runs that step on a small model, on any device, each row one sequence. Attention by
            `scaled_dot_product_attention` runs as plain products meanwhile, over all pairs, in
            sliding windows too: report all pairs there. Other fused kernels are not counted.
        tolerance: relative. Products are counted exactly; what formulas leave out, norms and
            softmax, torch does not count either. Attention, batches of products with a square
            factor, may be counted over all pairs or over the causal half.
        strict: raise `AuditError` if the check fails.
    """
    with sdpa_kernel(SDPBackend.MATH), _Products() as seen:
        step_fn()
    again = max(0, seen.backward - 2 * seen.forward)  # activations that checkpointing recomputes
    counted = seen.forward + seen.backward - again
    if not counted:
        raise ValueError("step_fn ran no matrix product: there is nothing to compare")
    least = counted - seen.pairs * (counted / (counted + again)) / 2  # the causal half
    error = (flops - min(max(flops, least), counted)) / counted
    if abs(flops / (counted + again) - 1) <= tolerance:
        likely = "the forward pass that checkpointing repeats is counted: hardware, not model FLOPs"
    elif error > 0:
        likely = (
            "an embedding is counted as a matrix product, or attention ran in a kernel that torch "
            "does not count"
        )
    else:
        likely = (
            "a product is left out, such as the output head or attention, or a sliding window is "
            "counted, where torch multiplies all pairs"
        )
    return judge(
        strict, check="flop_count_check", worst=abs(error), unit="relative",
        index=f"{flops:,.0f} reported, {counted:,} counted", threshold=tolerance,
        why="both count matrix products, 2 per weight and token, three times for forward and "
        "backward", likely=likely,
    )  # fmt: skip


class _Products(TorchDispatchMode):
    """Counts the FLOPs of products in forward and backward, and those of attention in both."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = self.pairs = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is None and "grouped_mm" in func._overloadpacket.__name__:
            count = _grouped_flops  # torch knows no count of experts in one kernel
        if count is not None:
            flops = count(*args, **(kwargs or {}), out_val=out)
            if torch._C._current_graph_task_id() < 0:
                self.forward += flops
            else:
                self.backward += flops
            if func._overloadpacket is torch.ops.aten.bmm:  # of attention, if a factor is T by T
                self.pairs += flops * any(x.shape[1] == x.shape[2] for x in (*args[:2], out))
        return out


def _grouped_flops(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    batch = len(a) if a.ndim == b.ndim == 3 else 1
    return 2 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1]


@dataclass(frozen=True)
class Plant:
    """A fault in a small trainer, and its repair.

    Attributes:
        fault: its name; a number is a row of the table of public reports.
        check: the check that has to find it.
        run: True plants the fault, False runs the repaired trainer; returns the check's result.
        says: what the diagnosis has to say.
    """

    fault: str
    check: str
    run: Callable[[bool], CheckResult]
    says: str


def _toy_policy(dtype: torch.dtype, seed: int = 0) -> TinyAgent:
    model = TinyAgent(32, d_model=32, max_len=64, dtype=dtype, seed=seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)  # as sure of itself as a trained policy
    return model


@torch.no_grad()
def _toy_episodes(model: TinyAgent, temperature: float = 1.0) -> list[Trajectory]:
    """Sample 16 episodes of 10 to 41 tokens in two groups, with 4 tokens of tool output in each."""
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(32, (2, 4), generator=draws).repeat_interleave(8, 0)  # two prompts
    lengths = [10 + (7 * i) % 32 for i in range(16)]
    logps = []
    for t in range(4, 41):
        logp = (model(ids)[:, -1] / temperature).double().log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=draws)
        if 7 <= t < 11:  # a tool's answer
            token = torch.randint(32, (16, 1), generator=draws)
        logps.append(logp.gather(1, token) * (not 7 <= t < 11))
        ids = torch.cat([ids, token], 1)
    sampled = torch.cat([torch.zeros(16, 3, dtype=torch.float64), *logps], 1)
    mask = torch.arange(1, 41) >= 4
    mask[6:10] = False
    return [
        Trajectory(ids[i, :n], mask[: n - 1], sampled[i, : n - 1], float(i % 3 == 0))
        for i, n in enumerate(lengths)
    ]


def _padded_logp(
    model: nn.Module, trajs: Sequence[Trajectory], temperature: float = 1.0
) -> list[Tensor]:
    """What a right trainer computes: a padded batch."""
    width = max(len(traj.ids) for traj in trajs)
    ids = pad_rows([traj.ids for traj in trajs], width, 0)
    logp = selected_log_probs(model(ids[:, :-1]) / temperature, ids[:, 1:])
    return [row[: len(traj.ids) - 1] for row, traj in zip(logp, trajs, strict=True)]


def _three_rows(dtype: torch.dtype) -> dict[str, Any]:
    """Segments of 9, 7 and 1 tokens in one row of 20."""
    draws = torch.Generator().manual_seed(3)
    trajs = [
        Trajectory(
            torch.randint(32, (n,), generator=draws), torch.ones(n - 1), torch.zeros(n - 1), 0.0
        )
        for n in (9, 7, 1)
    ]
    return pack_sequences(trajs, 20)


def _toy_qwen(dtype: torch.dtype) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return Qwen3ForCausalLM(Qwen3Config(vocab_size=32, **sizes, **heads)).to(dtype).eval()


def _packing_plants(dtype: torch.dtype) -> list[Plant]:
    row, model = _three_rows(dtype), _toy_policy(dtype)
    ids, positions, segments = (row[k] for k in ("ids", "position_ids", "segment_ids"))
    running = torch.arange(20)[None]

    def qwen_logits(planted: bool) -> Callable[[Tensor], Tensor]:
        qwen = _toy_qwen(dtype)
        right = transformers_inputs(row, dtype)
        wrong = {**right, "attention_mask": torch.ones(1, 20, dtype=torch.int64)}
        kwargs = wrong if planted else right
        return lambda x: qwen(**{**kwargs, "input_ids": x}).logits

    def tiny_logits(planted: bool, where: Tensor = positions) -> Callable[[Tensor], Tensor]:
        if planted:
            return lambda x: model(x, where)
        return lambda x: packed_logits(model, x, where, segments)

    def layer(planted: bool) -> Callable[[Tensor], Tensor]:
        values = lambda x: x.to(dtype)  # noqa: E731
        return lambda x: values(x).cumsum(1) if planted else segment_cumsum(values(x), segments)

    def shifted_labels(planted: bool) -> CheckResult:
        mask = torch.ones(1, 19) if planted else row["action_mask"]
        return leak_check(tiny_logits(False), ids, segments, loss_mask=mask)

    def positions_run_on(planted: bool) -> CheckResult:
        fn = tiny_logits(False, running if planted else positions)
        return leak_check(fn, ids, segments, alone_fn=model)

    def attention(planted: bool) -> CheckResult:
        return leak_check(tiny_logits(planted), ids, segments)

    crosses = "crosses the boundary"
    return [
        Plant("1 mask of ones", "leak_check",
              lambda p: leak_check(qwen_logits(p), ids, segments), crosses),
        Plant("2 causal mask only", "leak_check", attention, crosses),
        Plant("3 labels shifted late", "leak_check", shifted_labels, "labels were shifted"),
        Plant("6 state not reset", "leak_check",
              lambda p: leak_check(layer(p), ids, segments), crosses),
        Plant("positions run on", "leak_check", positions_run_on, "positions do not restart"),
    ]  # fmt: skip


def _exact_fits_only(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Best fit whose search finds rows that are filled exactly, and no others."""
    rows: list[list[int]] = []
    for i, n in enumerate(lengths):
        fit = [row for row in rows if sum(lengths[j] for j in row) + n == max_tokens]
        fit[0].append(i) if fit else rows.append([i])
    return rows


def _schedule_plants() -> list[Plant]:
    tens = [9, 8, 9, 8, 9, 8, 9, 8, 9, 1]

    def too_long(planted: bool) -> CheckResult:
        width = 10
        try:
            rows = [[0]] if planted else packing_plan([13], width)
        except ValueError:  # the repair refuses, and its user asks for longer rows
            width = 13
            rows = packing_plan([13], width)
        return schedule_check(rows, [13], width, packed=True)

    def average(planted: bool) -> CheckResult:
        rows = [[0], [1], [2], [3], [4], [5], [6, 7]]  # ceil(56 / 8) = 7 of them
        plan = rows if planted else token_budget_batches([7] * 8, 8, packed=True)
        return schedule_check(plan, [7] * 8, 8, packed=True)

    def exact(planted: bool) -> CheckResult:
        plan = (_exact_fits_only if planted else packing_plan)([3] * 6, 7)
        return schedule_check(plan, [3] * 6, 7, packed=True)

    def whole_only(planted: bool) -> CheckResult:
        ends = range(0, len(tens) // 4 * 4 if planted else len(tens), 4)
        return schedule_check([list(range(10))[k : k + 4] for k in ends], tens, 36)

    def wraps(planted: bool) -> CheckResult:
        rows = [[(4 * k + i) % 10 for i in range(4)] for k in range(3)]
        return schedule_check(rows if planted else [rows[0], rows[1], rows[2][:2]], tens, 36)

    def uneven(planted: bool) -> CheckResult:
        ranks = rank_balanced_batches(tens, 20, 2)
        if planted:
            ranks[0] = [*ranks[0][:-2], ranks[0][-2] + ranks[0][-1]]
        return schedule_check(ranks, tens, 40 if planted else 20, 2)

    return [
        Plant("4 room not found", "schedule_check", exact, "search for a fit"),
        Plant("5 sequence cut", "schedule_check", too_long, "is cut"),
        Plant("7 cap on the average", "schedule_check", average, "by the tokens they hold"),
        Plant("last samples dropped", "schedule_check", whole_only, "sequence 8 is dropped"),
        Plant("samples twice", "schedule_check", wraps, "sequence 0 is trained twice"),
        Plant("ranks of unequal count", "schedule_check", uneven, "for ever"),
    ]


def _gradient_plants(dtype: torch.dtype) -> list[Plant]:
    model = _toy_policy(dtype)
    trajs = sorted(_toy_episodes(model), key=lambda traj: len(traj.ids))
    rewards = torch.tensor([traj.reward for traj in trajs])
    losses = torch.tensor([1.0, 1.0, 1.0, 1.0, 10.0], dtype=dtype)

    def policy(batch: Any, split: list[list[int]], fault: str) -> list[Tensor]:
        model.zero_grad()
        tokens = float(sum(traj.action_mask.sum() for traj in batch))
        whole = _advantages(rewards)
        for rows in split:
            part = [batch[i] for i in rows]
            width = max(len(traj.ids) for traj in part) - 1
            logp = pad_rows(_padded_logp(model, part), width, 0.0)
            mask = pad_rows([traj.action_mask for traj in part], width, False)
            own = _advantages(rewards[rows]) if fault == "advantages" else whole[rows]
            norm = len(split) * float(mask.sum()) if fault == "local" else tokens
            reinforce_loss(logp, own, mask, norm_const=norm).backward()
        return [p.grad for p in model.parameters()]

    def means(batch: Tensor, split: list[list[int]], fault: str) -> Tensor:
        """A model of one weight that multiplies given token losses."""
        weight = torch.ones((), dtype=dtype, requires_grad=True)
        for rows in split:
            count = len(rows) if fault in ("local", "sum") else len(batch)
            share = len(split) if fault == "local" else 1
            (weight * batch[rows].sum() / count / share).backward()
        return weight.grad

    def ranks(batch: list[Tensor], split: list[list[int]], fault: str) -> Tensor:
        """Data-parallel ranks with one microbatch each; gradients of 4 weights are averaged."""
        weight = torch.ones(4, dtype=dtype, requires_grad=True)
        parts = [torch.cat([batch[i] for i in rows]) for rows in split]  # [tokens, 4] of each rank
        tokens = [len(part) for part in parts]
        total = sum(tokens) / len(parts)  # an all-reduce
        grads = []
        for part, own in zip(parts, tokens, strict=True):
            loss = (part @ weight).sum() / (own if fault else total)
            grads += torch.autograd.grad(loss, weight)
        return torch.stack(grads).mean(0)

    def empty(batch: Tensor, split: list[list[int]], fault: str) -> Tensor:
        weight = torch.ones((), dtype=dtype, requires_grad=True)
        mask = torch.tensor([True, True, True, True, False])
        for rows in split:
            count = mask[rows].sum() if fault else mask[rows].sum().clamp(min=1)
            share = mask[rows].sum() / mask.sum() if not fault else 1 / len(split)
            (weight * (batch[rows] * mask[rows]).sum() / count * share).backward()
        return weight.grad

    def check(fn: Callable[..., Any], batch: Any, splits: list[Any], fault: str) -> Any:
        return lambda p: split_invariance_check(
            lambda b, split: fn(b, split, fault if p else ""), batch, splits
        )

    name, own = "split_invariance_check", "divided by its own count"
    uneven, even = [[0, 1, 2, 3], [4]], torch.ones(8, dtype=dtype)
    draws = torch.Generator().manual_seed(2)
    rows = [
        torch.randn(n, 4, generator=draws).add(mean).to(dtype)
        for n, mean in ((9, 1), (12, 1), (2, 10))
    ]
    return [
        Plant("8 mean of means", name, check(means, losses, [uneven], "local"), own),
        Plant("9 mean over ranks", name, check(ranks, rows, [[[0, 1], [2]]], "own"), own),
        Plant("10 no policy token", name, check(empty, losses, [uneven], "own"), "divides by 0"),
        Plant("16 sum of means", name, check(means, even, [1, 2, 4, 8], "sum"), "summed where"),
        Plant("own token count", name, check(policy, trajs, [2, 4], "local"), own),
        Plant("own advantages", name, check(policy, trajs, [2, 4], "advantages"), "advantages or"),
    ]


def _advantages(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def _ratio_plants(dtype: torch.dtype) -> list[Plant]:
    model = _toy_policy(dtype)
    trajs, warm = _toy_episodes(model), _toy_episodes(model, temperature=1.5)
    newer = _toy_policy(dtype)
    with torch.no_grad():
        draws = torch.Generator().manual_seed(5)
        for p in newer.parameters():
            p.add_((0.1 * p.std() * torch.randn(p.shape, generator=draws)).to(dtype))

    def with_mask(planted: bool) -> CheckResult:
        moved = [
            Trajectory(
                t.ids, _shift(t.action_mask, 1) if planted else t.action_mask, t.sample_logp, 0.0
            )
            for t in trajs
        ]
        return step_zero_ratio_check(lambda ts: _padded_logp(model, ts), moved)

    def without_last(planted: bool) -> CheckResult:
        short = [
            Trajectory(t.ids, F.pad(t.action_mask[:-1], (0, 1)), t.sample_logp, 0.0) for t in trajs
        ]
        return step_zero_ratio_check(
            lambda ts: _padded_logp(model, ts), short if planted else trajs
        )

    def with_dropout(planted: bool) -> CheckResult:
        def logp(ts: Sequence[Trajectory]) -> list[Tensor]:
            width = max(len(t.ids) for t in ts)
            ids = pad_rows([t.ids for t in ts], width, 0)
            hidden = F.dropout(model.hidden_states(ids[:, :-1]), 0.1, training=planted)
            out = selected_log_probs(model.lm_head(hidden), ids[:, 1:])
            return [row[: len(t.ids) - 1] for row, t in zip(out, ts, strict=True)]

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return step_zero_ratio_check(logp, trajs)

    def unshifted(planted: bool) -> CheckResult:
        def logp(ts: Sequence[Trajectory]) -> list[Tensor]:
            return [_shift(row, -1) if planted else row for row in _padded_logp(model, ts)]

        return step_zero_ratio_check(logp, trajs)

    def packed(planted: bool) -> CheckResult:
        def logp(ts: Sequence[Trajectory]) -> list[Tensor]:
            rows = pack_sequences(ts, 60)
            place = (rows[k] for k in ("ids", "position_ids"))
            logits = model(*place, None if planted else block_mask(rows["segment_ids"]))
            return unpack(selected_log_probs(logits[:, :-1], rows["ids"][:, 1:]), rows)

        return step_zero_ratio_check(logp, trajs)

    def with_temperature(planted: bool) -> CheckResult:
        T = 1.0 if planted else 1.5
        return step_zero_ratio_check(lambda ts: _padded_logp(model, ts, T), warm)

    def stale(planted: bool) -> CheckResult:
        now = newer if planted else model
        return step_zero_ratio_check(lambda ts: _padded_logp(now, ts), trajs)

    def twice(planted: bool) -> CheckResult:
        batch = [*warm[:3], *warm[4:5], *warm[4:]] if planted else warm
        return step_zero_ratio_check(lambda ts: _padded_logp(model, ts, 1.5), batch)

    def first_token(planted: bool) -> CheckResult:
        batch = _flat_episodes(planted, dtype)
        flat = lambda ts: [t.sample_logp.to(dtype) for t in ts]  # noqa: E731
        return step_zero_ratio_check(flat, batch, group_size=8)

    name = "step_zero_ratio_check"
    return [
        Plant("15 one first token", name, first_token, "repeated 8 times"),
        Plant("mask off by one", name, with_mask, "action_mask is off by one"),
        Plant("last token not trained", name, without_last, "leaves out sampled tokens"),
        Plant("targets off by one", name, unshifted, "log-probabilities are off by one"),
        Plant("leak at step 0", name, packed, "a neighbour in a packed row"),
        Plant("dropout in one pass", name, with_dropout, "dropout is on"),
        Plant("temperature once", name, with_temperature, "a temperature on one side"),
        Plant("stale policy", name, stale, "stale policy version"),
        Plant("episode twice", name, twice, "in the batch twice"),
    ]


def _flat_episodes(repeated: bool, dtype: torch.dtype) -> list[Trajectory]:
    """Two groups of 8 from a uniform policy over 32 tokens; a group may share its first draw."""
    draws = torch.Generator().manual_seed(7)
    ids = torch.randint(32, (16, 6), generator=draws)
    if repeated:
        ids[:, 2] = ids[:, 2].view(2, 8)[:, :1].expand(2, 8).flatten()
    mask = torch.tensor([0, 1, 1, 1, 1])
    logp = mask * torch.tensor(-math.log(32)).to(dtype).double()
    return [Trajectory(row, mask, logp, 0.0) for row in ids]


def _other_plants(dtype: torch.dtype) -> list[Plant]:
    def by_mean(groups: Sequence[Any]) -> list[bool]:
        return [0 < float(sum(g)) / len(g) < 1 for g in groups]

    def by_std(groups: Sequence[Any]) -> list[bool]:
        means = [sum(g) / len(g) for g in groups]
        return [bool(sum((r - m) ** 2 for r in g) > 0) for g, m in zip(groups, means, strict=True)]

    def right(groups: Sequence[Any], cut: Sequence[Any] | None = None) -> list[bool]:
        cut = cut or [[False] * len(g) for g in groups]
        kept = []
        for group, short in zip(groups, cut, strict=True):
            ended = [float(r) for r, c in zip(group, short, strict=True) if not c]
            kept.append(bool(filter_by_pass_rate([0], [ended])))
        return kept

    def filtered(wrong: Callable[..., Any], **options: Any) -> Callable[[bool], CheckResult]:
        return lambda p: group_filter_check(wrong if p else right, dtype=dtype, **options)

    def endless(sample: Callable[[int], list[list[float]]]) -> list[list[float]]:
        kept: list[list[float]] = []
        while len(kept) < 8:
            kept += [group for group in sample(8 - len(kept)) if len(set(group)) > 1]
        return kept

    def bounded(sample: Callable[[int], list[list[float]]]) -> Any:
        episodes = lambda n: [[_rewarded(r) for r in group] for group in sample(n)]  # noqa: E731
        return fill_groups(episodes, 8, 24)

    def full_head(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).float()
        return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    def chunked_head(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        chunks = zip(hidden.split(512, 1), ids.split(512, 1), strict=True)
        return torch.cat([full_head(h, weight, i) for h, i in chunks], 1)

    def head(wrong: Callable[..., Tensor]) -> Callable[[bool], CheckResult]:
        return lambda p: head_memory_check(wrong if p else checkpointed_log_probs, dtype=dtype)

    def solved(p: bool) -> CheckResult:
        return group_filter_check(right, dtype=dtype, fill_fn=endless if p else bounded)

    name = "group_filter_check"
    return [
        Plant("11 mean alone", name, filtered(by_mean), "the variance is not"),
        Plant("12 std above 0", name, filtered(by_std), "rounding size"),
        Plant("13 every task solved", name, solved, "no bound"),
        Plant("truncation as failure", name,
              filtered(lambda groups, cut: right(groups), truncation=True), "ran out of length"),
        Plant("14 embedding counted", "flop_count_check",
              lambda p: _flops(p, dtype), "an embedding"),
        Plant("logits of all tokens", "head_memory_check", head(full_head), "are kept"),
        Plant("chunks keep their logits", "head_memory_check", head(chunked_head), "are kept"),
    ]  # fmt: skip


def _rewarded(reward: float) -> Trajectory:
    return Trajectory(torch.zeros(2, dtype=torch.int64), torch.ones(1), torch.zeros(1), reward)


def _flops(planted: bool, dtype: torch.dtype) -> CheckResult:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 160}
    config = Qwen2Config(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    with torch.random.fork_rng(devices=[]):
        model = Qwen2ForCausalLM(config).to(dtype)
    ids = torch.zeros(1, 32, dtype=torch.int64)
    flops = training_flops(ModelShape.from_config(config), [32]) + planted * 6 * 1000 * 64 * 32
    return flop_count_check(flops, lambda: model(ids, use_cache=False).logits.sum().backward())


def planted_faults(dtype: torch.dtype = torch.float32) -> list[Plant]:
    """Return small faulty trainers beside their repairs, to see the checks work.

    The numbered ones boil down public reports; two of them need `transformers`.

    Args:
        dtype: in which the trainers compute.
    """
    plants = [*_packing_plants(dtype), *_schedule_plants(), *_gradient_plants(dtype)]
    plants += [*_ratio_plants(dtype), *_other_plants(dtype)]
    numbered = [p for p in plants if p.fault[0].isdigit()]
    rest = [p for p in plants if not p.fault[0].isdigit()]
    return sorted(numbered, key=lambda p: int(p.fault.split()[0])) + rest
