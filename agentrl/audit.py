# Generated from chapters/11-audit.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Design review.

How do you know it still optimises what you wrote?
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl import check
from agentrl.report import Finding, as_check
from agentrl.rollout import Trajectory, check_trajectories

__all__ = ["group_filter_check", "leak_check", "split_invariance_check", "step_zero_ratio_check"]

_PRODUCT = re.compile("mm$|mv$|dot|attention|attn|convolution")


class _Nudged(TorchDispatchMode):
    """Moves what is rounded, products and conversions to a narrower type, by up to one last place.

    Attributes:
        seed: of the draws; without one it only watches.
        eps: the coarsest last place of them, relative to the number.
        shapes: of all products; None for one whose shapes are data.
    """

    def __init__(self, seed: int | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.seed, self.eps = seed, 0.0
        self.least = torch.finfo(dtype).eps / 2 if dtype else 0.0
        self.shapes: list[Any] = []
        self.draws: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(getattr(func, "_overloadpacket", func))
        product = _PRODUCT.search(name)
        narrower = name == "aten._to_copy" and out.itemsize < args[0].itemsize
        if product or (narrower and args[0].is_floating_point()):
            shapes = [x.shape for x in tree_leaves((args, out)) if isinstance(x, Tensor)]
            self.shapes += [None if "grouped" in name else shapes] * bool(product)
            for x in tree_leaves(out) if self.seed is not None else ():
                if isinstance(x, Tensor) and x.is_floating_point():
                    self._move(x)
        return out

    def varies(self, other: "_Nudged") -> bool:
        """Tell whether two calls had other shapes, and so may have summed in another order."""
        return self.shapes != other.shapes or None in self.shapes

    def _move(self, x: Tensor) -> None:
        wide, info = check.widened(x), torch.finfo(x.dtype)
        eps = max(info.eps if wide is x else info.eps / 2, self.least)  # summed wide, rounded once
        backend = torch.backends.cuda if x.is_cuda else torch.backends.mkldnn
        if x.dtype == torch.float32 and backend.matmul.fp32_precision == "tf32":
            eps = max(eps, 2**-11)
        if x.device not in self.draws:
            self.draws[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        options = {"generator": self.draws[x.device], "device": x.device, "dtype": wide.dtype}
        noise = torch.rand(x.shape, **options).mul_(2).sub_(1).mul_(eps).add_(1)
        x.copy_((wide * noise).clamp_(info.min, info.max))
        self.eps = max(self.eps, eps)


def _run(fn: Callable[..., Any], *args: Any, draws: int = 0, mode: Any = None) -> Any:
    """Call `fn` with torch's own generators seeded by `draws`, so that dropout can be repeated."""
    with torch.random.fork_rng(range(torch.cuda.device_count())), mode or nullcontext():
        torch.manual_seed(draws)
        return fn(*args)


_FACTOR = 3  # a difference is a fault if it is more than this many times the floor


class _Floor:
    """What rounding does to the entries of a result, seen in calls that are nudged.

    Args:
        errors: how far the entries of a nudged call are from those of a plain one, [n].
        least: what is always allowed, some last places of the result.
        dtype: a coarser type to nudge by.
        given: what one entry may differ by, instead of all this.
    """

    def __init__(
        self, errors: Callable[[Any], Tensor], least: float, dtype: Any = None, given: Any = None
    ) -> None:
        self.errors, self.least, self.dtype, self.given = errors, least, dtype, given
        self.calls, self.worst, self.mean, self.eps = 0, 0.0, 0.0, 0.0
        self.why = "given" if given is not None else f"{_FACTOR} times what rounding does"

    def limits(self, calls: int = 2) -> tuple[float, float]:
        """Return what one entry may differ by, and what the root mean square may be."""
        if self.given is not None:
            return self.given, math.inf
        for seed in range(self.calls, calls):
            mode = _Nudged(seed, self.dtype)
            worst, mean = _size(self.errors(mode))
            self.worst, self.mean = max(self.worst, worst), max(self.mean, mean)
            self.calls, self.eps = seed + 1, max(self.eps, mode.eps)
        return max(_FACTOR * self.worst, self.least), max(_FACTOR * self.mean, self.least)

    @property
    def cap(self) -> float:
        """The largest floor that a right computation of this precision may have."""
        self.limits()
        return 1.0 if self.eps > 1e-4 else 0.1

    def capped(self, unit: str) -> Finding:
        """Refuse a floor above the cap."""
        cap, why = self.cap, "rounding moves results by less"
        likely = "dropout or a kernel that draws on its own, or values too large for this precision"
        return Finding(self.mean, unit, "the floor", cap, why, likely)

    def judge(self, error: Tensor, unit: str, place: Callable[[int], str], likely: Any) -> Finding:
        """Compare the worst entry, and the root mean square, with what rounding does."""
        worst, mean = _size(error)
        for calls in (2, 8):  # before an alarm, see more of a floor that could be large enough
            one, average = self.limits(calls)
            passed = worst <= one and mean <= average
            if passed or mean > _FACTOR * self.cap:
                break
        cause, trace = "" if passed else likely(), tuple(error.tolist())
        if worst <= one and not passed:
            index = f"the root mean square over {len(error)}"
            return Finding(mean, unit, index, average, self.why, cause, trace)
        return Finding(worst, unit, place(int(error.argmax())), one, self.why, cause, trace)


def _last_places(values: Tensor, *raw: Tensor) -> float:
    """Return four last places of the largest value, in the coarsest type that holds them."""
    eps = max(torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0 for x in raw)
    return 4 * eps * values.nan_to_num(0, 0, 0).abs().max().item()


def _size(error: Tensor) -> tuple[float, float]:
    """Return the largest entry and the root mean square."""
    return error.max().item(), error.square().mean().sqrt().item()


def _other_tokens(ids: Tensor, keep: Sequence[int]) -> Tensor:
    """Replace each token by the next larger one that occurs; `keep` stays and is not used."""
    kept = torch.isin(ids, torch.tensor(list(keep), dtype=ids.dtype, device=ids.device))
    present = ids[~kept].unique()
    if not len(present):
        return ids
    return torch.where(kept, ids, present[torch.searchsorted(present, ids + 1) % len(present)])


def _markers(ids: Tensor, segment_ids: Tensor) -> list[int]:
    """Return tokens that may mark padding or a boundary: all paddings, last or first tokens.

    None if a sequence has no other token: nothing could be asked of it without them.
    """
    here, there = segment_ids[:, :-1], segment_ids[:, 1:]
    edge = (here != there) & (here >= 0) & (there >= 0)
    groups = ids[segment_ids < 0], ids[:, :-1][edge], ids[:, 1:][edge]
    marks = sorted({int(group[0]) for group in groups if len(group.unique()) == 1})
    lines = zip((_other_tokens(ids, marks) != ids) | (segment_ids < 0), segment_ids, strict=True)
    free = all(row[line == s].any() for row, line in lines for s in line.unique())
    return marks if free else []


def _per_entry(values: Any, rows: Tensor) -> tuple[Tensor, str]:
    """Return [R, L or L - 1, ...] values in float64, and what is wrong with them."""
    if not isinstance(values, Tensor):
        return torch.empty(0), f"log_prob_fn returned {type(values).__name__}, not a tensor"
    R, L = rows.shape
    if values.ndim < 2 or values.shape[0] != R or values.shape[1] not in (L, L - 1):
        need = f"[{R}, {L}, ...] or [{R}, {L - 1}, ...]"
        return torch.empty(0), f"log_prob_fn returned shape {list(values.shape)}, needs {need}"
    values = values.detach().to(rows.device).double()
    return values.flatten(2) if values.ndim > 2 else values[..., None], ""


def _owner(segment_ids: Tensor, entries: int) -> Tensor:
    """Return whose an entry is, [R, entries]; -2 if it predicts across a boundary."""
    if entries == segment_ids.shape[1]:
        return segment_ids
    here, there = segment_ids[:, :-1], segment_ids[:, 1:]
    return torch.where(here == there, here, -2)


def _moved(after: Tensor, before: Tensor) -> Tensor:
    """Return |after - before| per entry, infinite where one of them alone is not a number."""
    change = (after - before).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    same = (after == before) | (after.isnan() & before.isnan())
    return change.masked_fill(same, 0.0).amax(-1)


@as_check
def leak_check(
    log_prob_fn: Callable[[Tensor], Tensor],
    ids: Tensor,
    segment_ids: Tensor,
    *,
    loss_mask: Tensor | None = None,
    alone_fn: Callable[[Tensor], Tensor] | None = None,
    keep: Sequence[int] = (),
    tolerance: float = 0.0,
    strict: bool = False,
) -> Iterator[Finding]:
    """Check that the sequences of a packed row do not see each other.

    Changes the tokens of one segment after another, padding included, and looks at the others.

    Args:
        log_prob_fn: from ids [R, L] to a value for each prediction [R, L - 1], or for each token
            [R, L] or [R, L, ...]. Make masks and positions outside: they must not change with ids.
        ids: token ids of packed rows.
        segment_ids: [R, L], the number of the sequence within its row, -1 on padding.
        loss_mask: [R, L - 1], where a prediction is trained; must be 0 across boundaries.
        alone_fn: the values of one sequence alone, [1, n] -> [1, n - 1] or [1, n, ...]. Finds
            positions that do not restart.
        keep: tokens that are not changed, since the function reads masks or boundaries from them.
        tolerance: a change that is allowed. With 0, what rounding does is allowed where shapes are
            seen to depend on the tokens, as with experts, and else nothing.
        strict: raise `AuditError` if the check fails.

    Raises:
        ValueError, TypeError: if nothing could leak in these rows, or arguments do not fit.
    """
    check.shapes(ids=(ids, "R L"), segment_ids=(segment_ids, "R L"))
    ids, segment_ids = check.ids("ids", ids), check.ids("segment_ids", segment_ids).to(ids.device)
    if len({*ids.unique().tolist()} - {*keep}) < 2:
        raise ValueError(f"ids holds no two tokens to change, with keep = {list(keep)}")
    if max(len(row.unique()) for row in segment_ids) < 2:
        raise ValueError("segment_ids has one segment in each row: nothing could leak")
    if loss_mask is not None:
        check.shapes(ids=(ids, "R L"), loss_mask=(loss_mask, "R L-1"))
        across = check.mask("loss_mask", loss_mask).to(ids.device)
        across = across & (_owner(segment_ids, ids.shape[1] - 1) < 0)
        why = "no sequence predicts another one's token"
        likely = "labels were shifted after packing: a sequence's last token predicts the next one"
        yield Finding(int(across.sum()), "predictions", _first(across), 0, why, likely)
    raw = _run(log_prob_fn, ids)
    before, problem = _per_entry(raw, ids)
    why = "another sequence has weight 0, and shapes fix the order of sums"
    if problem:
        yield Finding(math.nan, "nats", "the output", tolerance, why, problem)
    owner = _owner(segment_ids, before.shape[1])
    inside = owner >= 0
    if not inside.any():
        raise ValueError("no prediction stays in its sequence: each has one token")
    if (bad := before.isnan().any(-1) & inside).any():
        likely = "log_prob_fn returned NaN: a softmax over no entry, or a division by 0"
        yield Finding(math.nan, "nats", _first(bad), tolerance, why, likely)

    def errors(mode: Any = None, draws: int = 0) -> Tensor:
        after = _run(log_prob_fn, ids, mode=mode, draws=draws)
        return _moved(_per_entry(after, ids)[0], before)[inside]

    floor = _Floor(errors, _last_places(before[inside], raw))
    allowed, again = tolerance, errors(draws=1).max().item()
    if again > tolerance:
        yield floor.capped("nats")
        allowed = max(tolerance, floor.limits(8)[0])
        likely = "two calls with the same ids differ: dropout is on"
        yield Finding(again, "nats", "a second call", allowed, floor.why, likely)
    rows = ids, segment_ids, before
    found, vary = _changed_segments(log_prob_fn, *rows, keep)
    if found.worst > allowed and vary:
        yield floor.capped("nats")
        allowed, why = max(allowed, floor.limits(8)[0]), floor.why
    if not found.worst <= allowed and (kept := _markers(ids, segment_ids)):
        plain, _ = _changed_segments(log_prob_fn, *rows, [*kept, *keep])
        if plain.worst <= allowed:  # only tokens that may mark padding or boundaries move it
            equal = _equal_alone(alone_fn or log_prob_fn, *rows, floor)
            hint = f"; or masks are read from the ids: make them outside, or give keep={kept}"
            found = plain if equal else found.but(likely=found.likely + hint * (equal is None))
    found = found.but(threshold=allowed, why=why)
    yield found
    if alone_fn is not None:
        error, places = _apart_from_alone(alone_fn, *rows)
        likely = "nothing is seen across the boundary, so positions do not restart"
        yield floor.judge(error, "nats", places.__getitem__, lambda: likely)
    also = {"loss mask": loss_mask, "alone": alone_fn}
    asked = ", ".join(name for name, value in also.items() if value is not None)
    yield found.but(index=found.index + f"; also asked: {asked}" * bool(asked))


def _first(where: Tensor) -> str:
    return "row {}, entry {}".format(*where.nonzero()[0].tolist()) if where.any() else "any row"


def _parts(segment_ids: Tensor) -> Iterator[tuple[int | None, Tensor]]:
    """Yield what the rest must not depend on, as a mask [R, L]: a segment, then half of the rows.

    Any two rows are in different halves once.
    """
    for segment in segment_ids.unique().tolist():
        yield segment, segment_ids == segment
    row = torch.arange(len(segment_ids), device=segment_ids.device)[:, None]
    for bit in range((len(segment_ids) - 1).bit_length()):
        for half in (0, 1):
            yield None, ((row >> bit) % 2 == half).expand_as(segment_ids)


def _changed_segments(
    fn: Callable[[Tensor], Tensor], ids: Tensor, segment_ids: Tensor, before: Tensor, keep: Any
) -> tuple[Finding, bool]:
    """Change each segment, all of it and its first token; find the largest movement elsewhere.

    Returns:
        The finding, and whether shapes depend on the tokens.
    """
    owner, other = _owner(segment_ids, before.shape[1]), _other_tokens(ids, keep)
    first = segment_ids != F.pad(segment_ids, (1, 0), value=-2)[:, :-1]
    found, vary, n = Finding(-1.0, "nats", "", 0, ""), False, before.shape[1]
    _run(fn, ids, mode=(plain := _Nudged()))
    for segment, mine in _parts(segment_ids):
        name = "other rows" if segment is None else f"segment {segment}"
        for changed in (mine, mine & first):
            after = _run(fn, torch.where(changed, other, ids), mode=(watch := _Nudged()))
            after, problem = _per_entry(after, ids)
            if problem:
                return Finding(math.nan, "nats", f"{name} changed", 0, "", problem), vary
            vary |= plain.varies(watch)
            moved = _moved(after, before).masked_fill((owner < 0) | mine[:, :n], 0.0)
            if moved.max() > found.worst:
                row, t = divmod(int(moved.argmax()), n)
                likely = "attention or state crosses the boundary: it is not told where it is"
                if segment is None or (segment_ids[row] != segment).all():
                    likely = "one row sees another: boundaries are lost where rows are joined"
                elif segment < 0:
                    likely = "padding is attended to"
                elif segment > owner[row, t]:
                    likely = "a later sequence is seen: the mask is not causal"
                index = f"row {row}, entry {t} (segment {owner[row, t]}), after {name} changed"
                size, trace = moved.max().item(), tuple(moved[row].tolist())
                found = Finding(size, "nats", index, 0, "", likely, trace)
    return found if found.worst else found.but(index="any entry of another segment"), vary


def _apart_from_alone(
    fn: Callable[[Tensor], Tensor], ids: Tensor, segment_ids: Tensor, before: Tensor
) -> tuple[Tensor, list[str]]:
    """Return how far each entry is from the same sequence alone [n], and where each is."""
    fewer, errors, places = ids.shape[1] - before.shape[1], [], []
    for row, line in enumerate(segment_ids):
        for segment in line.unique().tolist():
            at = (line == segment).nonzero()[:, 0]
            if segment < 0 or len(at) <= fewer:
                continue
            alone, problem = _per_entry(_run(fn, ids[row, at][None]), ids[row, at][None])
            at = at[: len(at) - fewer]
            if problem or alone.shape[1] != len(at):
                raise ValueError(f"alone_fn returned {alone.shape[1:2]} for {len(at)}: {problem}")
            errors.append(_moved(before[row, at][None], alone)[0])
            places += [f"row {row}, entry {t} (segment {segment})" for t in at.tolist()]
    return torch.cat(errors), places


def _equal_alone(fn: Callable[[Tensor], Tensor], *rows: Any) -> bool | None:
    """Say whether sequences alone have the same values; None if `fn` does not take them alone."""
    *rows, floor = rows
    try:
        error, _ = _apart_from_alone(fn, *rows)
    except Exception:  # it holds masks or positions of the packed shape
        return None
    return floor.judge(error, "nats", str, str).passed


def _microbatches(name: str, split: Any, size: int) -> list[list[int]]:
    """Return the rows of each microbatch; an int k stands for k contiguous ones."""
    if not isinstance(split, Iterable):
        count = check.integers(name, [split], sequences=size)[0]
        return [part.tolist() for part in torch.arange(size).tensor_split(count)]
    rows = [[int(i) for i in part] for part in split]
    wrong = Counter(itertools.chain(*rows))
    wrong.subtract(range(size))
    for i, count in sorted(wrong.items()):
        if count:
            raise ValueError(f"{name} holds sequence {i} {count + (0 <= i < size)} times")
    return rows


def _tensors(grads: Any) -> list[Tensor]:
    parts = [g for g in tree_leaves(grads) if isinstance(g, Tensor)]
    if not parts:
        raise TypeError(f"grad_fn returned {type(grads).__name__} without a tensor")
    return parts


def _vector(parts: Iterable[Tensor]) -> Tensor:
    """Return all numbers in one float64 vector on the CPU."""
    return torch.cat([p.detach().double().cpu().flatten() for p in parts])


@as_check
def split_invariance_check(
    grad_fn: Callable[[Any, list[list[int]]], Any],
    batch: Any,
    splits: Sequence[int | Sequence[Sequence[int]]] = (2, 4),
    *,
    reference: int | Sequence[Sequence[int]] = 1,
    loss_fn: Callable[[Any], Any] | None = None,
    params: Iterable[Tensor] | None = None,
    tolerance: float | None = None,
    strict: bool = False,
) -> Iterator[Finding]:
    """Check that the gradient of a batch does not depend on how it is split.

    Args:
        grad_fn: gets the batch and a split, a list of lists of row numbers, and returns the
            gradient after all these microbatches, before clipping, which would hide a factor: a
            tensor, or a list or dictionary of them.
        batch: a sequence, or a dictionary of tensors that share their first dimension.
        splits: each a number of contiguous microbatches, or lists of row numbers. The fault grows
            with the differences between microbatches: sort one split by length.
        reference: the split that the others are compared with, by default the whole batch at once.
        loss_fn, params: the loss of the batch as you would write it down, and the parameters in the
            order of the gradient. Without them a factor on every gradient is not seen.
        tolerance: relative to the norm of the reference, instead of what rounding does.
        strict: raise `AuditError` if the check fails.

    Raises:
        ValueError, TypeError: if a split is no partition of the batch, or all gradients are 0.
    """
    size = len(next(iter(batch.values()))) if isinstance(batch, Mapping) else len(batch)
    check.not_empty("splits", splits)
    plans = [_microbatches(f"splits[{i}]", split, size) for i, split in enumerate(splits)]
    whole = _microbatches("reference", reference, size)
    names = [f"splits[{k}], {len(p)} microbatch" + "es" * (len(p) > 1) for k, p in enumerate(plans)]
    if (loss_fn is None) != (params is None):
        raise ValueError("loss_fn and params are needed together")

    def run(plan: list[list[int]], **how: Any) -> Tensor:
        return _vector(_tensors(_run(grad_fn, batch, plan, **how)))

    def apart(g: Tensor, other: Tensor) -> Tensor:
        error = (g - other).norm()
        return (error / scale if error else error).nan_to_num(math.inf, math.inf)[None]

    def finite(g: Tensor, index: str) -> Finding:
        bad, unit = int((~g.isfinite()).sum()), "entries that are not finite"
        likely = "a microbatch without policy tokens divides by 0, or by one reward's deviation"
        return Finding(math.nan if bad else 0, unit, index, 0, "a gradient is finite", likely)

    raw = _tensors(_run(grad_fn, batch, whole))
    expected, eps = _vector(raw), max(torch.finfo(g.dtype).eps for g in raw)
    scale = expected.norm().item()
    yield finite(expected, "the reference")
    grads = []
    for plan, name in zip(plans, names, strict=True):
        grads.append(run(plan))
        yield finite(grads[-1], name)
        likely = f"grad_fn returned {len(grads[-1])} numbers, and {len(expected)} for the reference"
        extra = abs(len(grads[-1]) - len(expected))
        yield Finding(extra, "entries", name, 0, "every split has the same parameters", likely)
    errors = [apart(g, expected) for g in grads]
    if not scale and not any(errors):
        raise ValueError("the gradient is 0 for every split: there is nothing to compare")
    k = max(range(len(plans)), key=errors.__getitem__)
    sides = (whole, expected), (plans[k], grads[k])  # nudged in turn

    def nudged(mode: _Nudged) -> Tensor:
        plan, plain = sides[mode.seed % 2]
        return apart(run(plan, mode=mode), plain)

    least = eps * math.sqrt(16 + len(plans[k]))  # the sum is rounded at each microbatch
    floor = _Floor(nudged, least, given=tolerance)
    again = apart(run(whole, draws=1), expected)
    likely = "dropout is on, or gradients are not cleared between calls"
    found = floor.judge(again, "relative", lambda _: "a second call", lambda: likely)
    yield found.but(threshold=min(found.threshold, 0.5), likely=likely)
    yield floor.capped("relative")
    why = partial(_why_split, grad_fn, batch, plans[k], grads[k], expected)
    found = floor.judge(errors[k], "relative", lambda _: names[k], why)
    yield (found := found.but(trace=tuple(e.item() for e in errors)))
    if loss_fn is None:
        hint = "; not asked: a factor on every gradient, which takes loss_fn and params"
        yield found.but(index=names[k] + hint)
    else:
        yield _factor(loss_fn, batch, list(params), expected).but(trace=found.trace)


def _why_split(
    fn: Callable[..., Any], batch: Any, plan: list[list[int]], g: Tensor, expected: Tensor
) -> str:
    """Say what a wrong gradient is made of."""
    K, error = len(plan), (g - expected).norm()
    along = (g @ expected / expected.square().sum().clamp(min=1e-300)).item()
    parallel = (g - along * expected).norm() < 0.1 * error
    if parallel and min(abs(along / K - 1), abs(along * K - 1)) < 0.01:
        wrong = "summed where they should be averaged, or the reverse"
        return f"the gradient is {along:.3g} times too long: {K} microbatches are {wrong}"
    try:
        parts = torch.stack([_vector(_tensors(_run(fn, batch, [rows]))) for rows in plan])  # [K, P]
    except Exception as problem:  # a trainer may refuse a part of the batch
        return f"unknown, since a microbatch alone fails: {problem}"
    parts = parts.nan_to_num()
    right, actual = (
        torch.linalg.lstsq(parts @ parts.T, (parts @ x)[:, None], driver="gelsd").solution[:, 0]
        for x in (expected, g)
    )
    own = (parts.mean(0) - g).norm() < 0.1 * error
    if parts.shape[1] <= K:
        return "each is divided by its own count" if own else "weights of microbatches are wrong"
    if (expected - right @ parts).norm() > 0.5 * error:
        own_batch = "advantages or statistics are computed per microbatch"
        return f"a microbatch alone gives another gradient than inside the batch: {own_batch}"
    moved = (actual - right).abs() * parts.norm(dim=1)  # a silent part may have any weight
    ratio = torch.where(moved > 0.01 * moved.max(), actual / right, 1.0)
    j = int((ratio - 1).abs().argmax())
    if abs(ratio[j]) < 0.01:
        return f"microbatch {j} is left out"
    cause = "each is divided by its own count" if own else "or gradients are clipped in the loop"
    rows = f"{len(plan[j])} sequence" + "s" * (len(plan[j]) != 1)
    return f"microbatch {j} ({rows}) counts {ratio[j]:.2f} times what it should: {cause}"


def _factor(loss_fn: Callable[[Any], Any], batch: Any, params: list[Tensor], g: Tensor) -> Finding:
    """Compare how the loss changes along the gradient with what the gradient predicts."""
    start = [p.detach().clone() for p in params]
    sizes = [p.numel() for p in start]
    if sum(sizes) != len(g):
        raise ValueError(f"params hold {sum(sizes)} numbers, the gradient {len(g)}")

    @torch.no_grad()
    def at(step: float) -> tuple[float, Tensor]:
        """Return the loss after a step along the gradient, and where rounding led it."""
        for p, old, piece in zip(params, start, g.split(sizes), strict=True):
            p.copy_(old.double() + step * piece.view(old.shape).to(old.device))
        return (float(_run(loss_fn, batch)), _vector(params)) if step else (0.0, g)

    slopes, unit = [], (_vector(start).norm() / g.norm()).item()
    try:
        for step in (1e-2 * unit, 1e-3 * unit, 1e-4 * unit):
            (up, there), (down, here) = at(step), at(-step)
            slopes.append((up - down) / (g @ (there - here)).item())
    finally:
        at(0.0)
    pairs = [(abs(a - b), b) for a, b in itertools.pairwise(slopes)]
    apart, slope = min(pairs)
    factor = 1 / slope if slope else math.inf
    why = "a step along the gradient changes the loss as it says"
    if not apart <= 0.1 * abs(slope):
        return Finding(0, "", "no factor can be seen: the loss is too rough", 0.1, why)
    likely = f"every gradient is {factor:.2g} times the slope of the loss"
    return Finding(abs(factor - 1), "relative", "the loss along the gradient", 0.1, why, likely)


def _per_trajectory(out: Any, trajs: Sequence[Trajectory]) -> tuple[list[Tensor], str]:
    """Return [T - 1] values for each trajectory in float64, and what is wrong with them."""
    width = max(len(traj.ids) for traj in trajs) - 1
    if isinstance(out, Tensor) and out.shape == (len(trajs), width):
        out = [row[: len(traj.ids) - 1] for row, traj in zip(out, trajs, strict=True)]
    need = f"log_prob_fn must return [{len(trajs)}, {width}] or a list of [T - 1], got "
    if not isinstance(out, list | tuple) or not all(isinstance(row, Tensor) for row in out):
        return [], need + (str(list(out.shape)) if isinstance(out, Tensor) else type(out).__name__)
    if len(out) != len(trajs):
        return [], need + f"{len(out)} rows"
    for i, (row, traj) in enumerate(zip(out, trajs, strict=True)):
        if row.shape != (len(traj.ids) - 1,):
            return [], need + f"{list(row.shape)} for trajs[{i}] of {len(traj.ids)} tokens"
    return [row.detach().double().cpu() for row in out], ""


@as_check
def step_zero_ratio_check(
    log_prob_fn: Callable[[Sequence[Trajectory]], Any],
    trajs: Sequence[Trajectory],
    *,
    group_size: int | None = None,
    sampler_dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    strict: bool = False,
) -> Iterator[Finding]:
    """Check that before the first update the trainer's log-probabilities are the sampler's.

    Args:
        log_prob_fn: gets trajectories and computes the log-probability of each token after the
            first: a list of [T - 1], or a padded [B, T - 1].
        trajs: `sample_logp` holds what the sampler recorded, 0 where it sampled nothing. An
            `action_mask` covers all that was recorded, or none of an episode that is left out.
        group_size: also ask whether the episodes of a group drew their first tokens independently.
        sampler_dtype: in which the sampler computed, if that is coarser than the trainer's type.
        tolerance: in nats for every token, instead of what rounding does.
        strict: raise `AuditError` if the check fails.

    Raises:
        ValueError, TypeError: if a trajectory is malformed, or no token was sampled.
    """
    check_trajectories(trajs)
    masks = [traj.action_mask.bool().cpu() for traj in trajs]
    places = [(i, t) for i, mask in enumerate(masks) for t in mask.nonzero()[:, 0].tolist()]
    if not places:
        raise ValueError("no trajectory has a sampled token: action_mask is 0 everywhere")
    if group_size is not None and len(trajs) % check.integer("group_size", group_size, 2):
        raise ValueError(f"{len(trajs)} trajectories are not groups of group_size = {group_size}")
    yield _sampling_chance(trajs, group_size)
    raw = _run(log_prob_fn, trajs)
    rows, problem = _per_trajectory(raw, trajs)
    why = "the same weights and the same context give the same log-probability"
    if problem:
        yield Finding(math.nan, "nats", "the output", 0, why, problem)

    def flat(values: Iterable[Tensor]) -> Tensor:
        return torch.cat([v.double().cpu()[m] for v, m in zip(values, masks, strict=True)])

    def errors(mode: Any = None, batch: Sequence[Trajectory] = trajs, draws: int = 0) -> Tensor:
        after = _run(log_prob_fn, batch, mode=mode, draws=draws)
        return _moved(flat(_per_trajectory(after, trajs)[0])[:, None], ours[:, None])

    def place(k: int) -> str:
        return "trajs[{}], entry {}, p = {:.2g}".format(*places[k], theirs[k].exp())

    ours, theirs = flat(rows), flat(traj.sample_logp for traj in trajs)
    error = (ours - theirs).abs().nan_to_num(math.inf, math.inf)
    if not error.isfinite().all():
        likely = "the log-probability of a sampled token is not finite"
        yield Finding(math.nan, "nats", place(int(error.argmax())), 0, why, likely)
    recorded = (traj.sample_logp for traj in trajs)
    least = _last_places(torch.cat([ours, theirs]), *tree_leaves(raw), *recorded)
    floor = _Floor(errors, least, sampler_dtype, tolerance)
    again, likely = errors(draws=1), "two calls differ: dropout is on in this pass"
    found = floor.judge(again, "nats", place, lambda: likely)
    yield found.but(threshold=min(found.threshold, 0.5), likely=likely)
    yield floor.capped("nats")
    yield from _neighbours(errors, trajs, torch.tensor(places), floor)
    found = floor.judge(error, "nats", place, partial(_why_ratio, trajs, rows, masks, floor))
    yield found
    known = (traj.sample_logp.cpu() != 0 for traj in trajs)
    left = [k & ~m & m.any() for k, m in zip(known, masks, strict=True)]
    lost = [(i, t) for i, x in enumerate(left) for t in x.nonzero()[:, 0].tolist()]
    index = "trajs[{}], entry {}".format(*lost[0]) if lost else ""
    likely = "action_mask leaves out sampled tokens, such as the last one of an episode"
    why = "every token that the sampler recorded is trained, or none of its episode"
    yield Finding(len(lost), "tokens", index, 0, why, likely)
    yield found


def _neighbours(
    errors: Callable[..., Tensor], trajs: Sequence[Trajectory], places: Tensor, floor: _Floor
) -> Iterator[Finding]:
    """Turn every other trajectory round, but its first and last token: no other one may move."""
    turned = [replace(t, ids=t.ids[[0, *range(len(t.ids) - 2, 0, -1), -1]]) for t in trajs]
    vary = errors(draws=1, mode=(plain := _Nudged())).any()
    for part in (0, 1):
        batch = [
            (old, new)[i % 2 == part]
            for i, (old, new) in enumerate(zip(trajs, turned, strict=True))
        ]
        moved = errors(batch=batch, mode=(watch := _Nudged()))
        moved = moved.masked_fill(places[:, 0] % 2 == part, 0.0)
        index = "trajs[{}], entry {}, after others changed".format(*places[moved.argmax()].tolist())
        allowed = floor.limits(8)[0] if moved.any() and (vary or plain.varies(watch)) else 0.0
        why = "shapes depend on the tokens" if allowed else "another trajectory has weight 0"
        likely = "a context that differs: a neighbour in a packed row, or a statistic of the batch"
        yield Finding(moved.max().item(), "nats", index, allowed, why, likely)


def _shift(values: Tensor, by: int) -> Tensor:
    """Move entries to earlier places by `by`, filling with zeros."""
    return F.pad(values[by:], (0, by)) if by > 0 else F.pad(values[:by], (-by, 0))


def _why_ratio(
    trajs: Sequence[Trajectory], rows: list[Tensor], masks: list[Tensor], floor: _Floor
) -> str:
    """Say what the differences have in common."""
    one, mean = floor.limits()
    old = [traj.sample_logp.double().cpu() for traj in trajs]
    known = [o != 0 for o in old]  # what the sampler recorded

    def agree(ours: Iterable[Tensor], at: Iterable[Tensor]) -> bool:
        error = torch.cat([(r - o)[m].abs() for r, o, m in zip(ours, old, at, strict=True)])
        return len(error) > 0 and bool(error.max() <= one and error.square().mean().sqrt() <= mean)

    def within(parts: Iterable[Tensor], wholes: Iterable[Tensor]) -> bool:
        return not any((p & ~w).any() for p, w in zip(parts, wholes, strict=True))

    both = [m & k for m, k in zip(masks, known, strict=True)]
    if within(known, masks) and agree(rows, both):
        return "action_mask trains tokens that the sampler did not sample: it recorded 0 for them"
    for s in (1, -1):
        inside = [_shift(torch.ones_like(m), s) for m in masks]
        if agree([_shift(r, s) for r in rows], [m & i for m, i in zip(masks, inside, strict=True)]):
            return f"the log-probabilities are off by one: entry t holds the one of t {-s:+d}"
        moved = [_shift(m, s) for m in masks]
        asked = [k & i & m.any() for k, i, m in zip(known, inside, masks, strict=True)]
        shifted = [m & k for m, k in zip(moved, known, strict=True)]
        if within(asked, moved) and not within(masks, known) and agree(rows, shifted):
            side = "before" if s > 0 else "after"
            return f"action_mask is off by one: the sampler's tokens are {side} it"
    y, x = (torch.cat([v[m] for v, m in zip(values, masks, strict=True)]) for values in (rows, old))
    error = y - x
    if error.std() < 0.05 * error.mean().abs():
        return f"a constant of {error.mean():.2g} nats: one side is not normalised over the words"
    slope = ((x * y).sum() / x.square().sum()).item()
    left = (y - slope * x).square().sum() / error.square().sum()
    if left < 0.5 and 0.2 < slope < 5:
        return f"log-probabilities are {slope:.2f} times the sampler's: a temperature on one side"
    parts = [(r - o)[m].abs() for r, o, m in zip(rows, old, masks, strict=True)]
    small = 0.05 * error.abs().mean()  # below a wide limit, too, errors of one kind do not agree
    far = [i for i, e in enumerate(parts) if len(e) and not (e.max() <= one and e.mean() <= small)]
    if 0 < len(far) < len(trajs):
        agreeing = f"{len(trajs) - len(far)} of {len(trajs)} trajectories agree"
        return f"{agreeing}, trajs[{far[0]}] does not: a context that differs, such as positions"
    return (
        "no trajectory agrees: other weights, as of a stale policy or an adapter; other logits, as "
        "by top-p or a penalty; or a sampler in a coarser type: give sampler_dtype only if it is"
    )


def _sampling_chance(trajs: Sequence[Trajectory], group_size: int | None) -> Finding:
    """Ask whether equal draws can be an accident."""
    seen: dict[Any, int] = {}
    found = Finding(0, "nats of surprise", "", 20, "what is rarer than once in 5e8 is no accident")
    for j, traj in enumerate(trajs):
        first = seen.setdefault((*traj.ids.tolist(), *traj.sample_logp.tolist()), j)
        surprise = -float(traj.sample_logp.sum()) - 2 * math.log(len(trajs))
        if first != j and surprise > found.threshold:
            index, likely = f"trajs[{first}] and trajs[{j}]", "one episode is in the batch twice"
            return found.but(worst=surprise, index=index, likely=likely)
    if group_size is None:
        return found
    surprise, equal = -len(trajs) / group_size * math.log(2), []  # any of the groups may stand out
    for g in range(0, len(trajs), group_size):
        first = [int(traj.action_mask.long().argmax()) for traj in trajs[g : g + group_size]]
        group = list(zip(trajs[g : g + group_size], first, strict=True))
        if len({int(traj.ids[t + 1]) for traj, t in group}) == 1:
            surprise -= (group_size - 1) * float(trajs[g].sample_logp[first[0]])
            equal.append(g // group_size)
    index = f"group {equal[0]}, first of {len(equal)} groups" if equal else "any group"
    likely = f"one first token is drawn and repeated {group_size} times"
    return found.but(worst=surprise, index=index, likely=likely)


def _filter_cases(low: float, high: float, truncation: bool) -> list[Any]:
    """Return groups of rewards, which episodes were cut, and whether the group is to be kept."""
    equal = [[k / 10] * n for k in range(11) for n in (2, 3, 4, 5, 7, 8, 16)]
    mixed = [[0.0] * n + [1.0] * m for n, m in ((1, 1), (1, 7), (7, 1), (4, 4), (15, 1))]
    mixed += [[0.25, 0.5], [0.5] * 7 + [0.75], [0.0, 0.25, 0.5, 1.0]]
    cases = [(group, [False] * len(group)) for group in (*equal, *mixed)]
    if truncation:  # of what ran out of length nothing is known
        cases += [([1.0] * n + [0.0], [False] * n + [True]) for n in (3, 7)]
        cases += [([1.0, 1.0, 0.0, 0.0], [False] * 3 + [True])]
    judged = []
    for group, cut in cases:
        ended = [r for r, c in zip(group, cut, strict=True) if not c]
        mean = sum(ended) / len(ended)
        if len({*ended}) == 1 or min(abs(mean - low), abs(mean - high)) > 0.01:  # else a convention
            judged.append((group, cut, len({*ended}) > 1 and low < mean < high))
    return judged


def _why_filter(rewards: list[float], cut: list[bool], keep: bool, wrong: int) -> str:
    if keep:
        return "a group with unequal rewards is dropped"
    if any(cut):
        return "an episode that ran out of length is scored as a failure"
    if len({*rewards}) > 1:
        return "a group outside the bounds is kept"
    if wrong > 31:  # more than half of the groups of equal rewards between 0 and 1
        return "groups of equal rewards are kept: the mean is compared and the variance is not"
    return "a standard deviation of rounding size is compared with 0"


@as_check
def group_filter_check(
    filter_fn: Callable[..., Sequence[Any]],
    *,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype | None = None,
    truncation: bool = False,
    fill_fn: Callable[[Callable[[int], list[list[float]]]], Any] | None = None,
    strict: bool = False,
) -> Iterator[Finding]:
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
    cases = _filter_cases(low, high, truncation)
    groups = [g if dtype is None else torch.tensor(g, dtype=dtype) for g, _, _ in cases]
    passed = Finding(0, "groups", f"any of {len(cases)} groups", 0, "equal rewards are equal")
    broken = passed.but(worst=math.nan, index="the output")
    try:
        given = (groups, [cut for _, cut, _ in cases]) if truncation else (groups,)
        kept = [bool(k) for k in filter_fn(*given)]
    except Exception as problem:
        yield broken.but(likely=f"filter_fn raised {type(problem).__name__}: {problem}")
    if len(kept) != len(cases):
        likely = f"filter_fn returned {len(kept)} verdicts for {len(cases)} groups"
        yield broken.but(likely=likely)
    wrong = [i for i, (k, (_, _, keep)) in enumerate(zip(kept, cases, strict=True)) if k != keep]
    for i in wrong[:1]:
        short = ", ".join(f"{r:g}" for r in cases[i][0][:4]) + ", ..." * (len(cases[i][0]) > 4)
        index, likely = f"group {i}, rewards [{short}]", _why_filter(*cases[i], len(wrong))
        yield passed.but(worst=len(wrong), index=index, likely=likely)
    yield passed if fill_fn is None else _solved(fill_fn)


class _Endless(BaseException):
    """Stops a sampler that would go on for ever; no `except Exception` holds it."""


def _solved(fill_fn: Callable[..., Any]) -> Finding:
    """Run dynamic sampling where every task is solved."""
    asked, out, likely = 0, None, "it stops without a reason"

    def sample(count: int) -> list[list[float]]:
        nonlocal asked
        asked += max(count, 1)
        if asked > 10_000:
            raise _Endless
        return [[1.0] * 8 for _ in range(count)]

    try:
        out = fill_fn(sample)
    except _Endless:
        likely = f"sampling has no bound: {asked} groups and no end"
    except Exception as problem:
        likely = f"an exception instead of a stop: {type(problem).__name__}: {problem}"
    reason = any(isinstance(x, str) and x for x in tree_leaves(out))
    why = "there is nothing to find, so the search ends and says so"
    index = f"every task solved, after {asked} groups"
    return Finding(0 if reason else max(asked, 1), "groups", index, 0, why, likely)
