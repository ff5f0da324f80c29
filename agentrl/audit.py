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

__all__ = ["leak_check", "split_invariance_check", "step_zero_ratio_check"]

_PRODUCT = re.compile("mm$|mv$|dot|attention|attn|convolution")
_FACTOR = 3  # a difference is a fault if it is more than this many times the floor


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

    def capped(self, unit: str) -> Finding:
        """Ask whether a right computation of this precision can have this floor."""
        self.limits()
        cap, why = 1.0 if self.eps > 1e-4 else 0.1, "rounding moves results by less"
        likely = "dropout or a kernel that draws on its own, or values too large for this precision"
        return Finding(self.mean, unit, "the floor", cap, why, likely)

    def judge(self, error: Tensor, unit: str, place: Callable[[int], str], likely: Any) -> Finding:
        """Compare the worst entry, and the root mean square, with what rounding does."""
        worst, mean = _size(error)
        one, average = self.limits()
        if (worst > one or mean > average) and mean < 10 * average:  # more calls may allow it
            one, average = self.limits(8)
        passed = worst <= one and mean <= average
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
    return marks if all(row[line == s].any() for row, line in lines for s in line.unique()) else []


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


def _place(where: Tensor) -> str:
    return "row {}, entry {}".format(*where.nonzero()[0].tolist()) if where.any() else "any row"


def _changed_segments(
    fn: Callable[[Tensor], Tensor], ids: Tensor, segment_ids: Tensor, before: Tensor, keep: Any
) -> tuple[Finding, bool]:
    """Change a segment, or half of the rows, all of it and its first token; see what else moves.

    Returns:
        The finding of the largest movement, and whether shapes depend on the tokens.
    """
    n, R, other = before.shape[1], len(ids), _other_tokens(ids, keep)
    owner, row = _owner(segment_ids, n), torch.arange(R, device=ids.device)[:, None]
    first = segment_ids != F.pad(segment_ids, (1, 0), value=-2)[:, :-1]
    parts = [(s, segment_ids == s) for s in segment_ids.unique().tolist()]
    halves = itertools.product(range((R - 1).bit_length()), (0, 1))  # apart once: any two rows
    parts += [(None, ((row >> bit) % 2 == half).expand_as(ids)) for bit, half in halves]
    found, vary = Finding(0.0, "nats", "any entry of another segment", 0, ""), False
    _run(fn, ids, mode=(plain := _Nudged()))
    for (segment, mine), least in itertools.product(parts, (True, first)):
        name = "other rows" if segment is None else f"segment {segment}"
        after = _run(fn, torch.where(mine & least, other, ids), mode=(watch := _Nudged()))
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
            trace = tuple(moved[row].tolist())
            found = Finding(moved.max().item(), "nats", index, 0, "", likely, trace)
    return found, vary


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
        yield Finding(int(across.sum()), "predictions", _place(across), 0, why, likely)
    raw = _run(log_prob_fn, ids)
    before, problem = _per_entry(raw, ids)
    why = "another sequence has weight 0, and shapes fix the order of sums"
    yield Finding(math.nan if problem else 0, "nats", "the output", tolerance, why, problem)
    inside = _owner(segment_ids, before.shape[1]) >= 0
    if not inside.any():
        raise ValueError("no prediction stays in its sequence: each has one token")
    bad = before.isnan().any(-1) & inside
    likely = "log_prob_fn returned NaN: a softmax over no entry, or a division by 0"
    yield Finding(math.nan if bad.any() else 0, "nats", _place(bad), tolerance, why, likely)

    def errors(mode: Any = None, draws: int = 0) -> Tensor:
        after = _run(log_prob_fn, ids, mode=mode, draws=draws)
        return _moved(_per_entry(after, ids)[0], before)[inside]

    floor, rows = _Floor(errors, _last_places(before[inside], raw)), (ids, segment_ids, before)
    again = errors(draws=1).max().item()
    found, vary = _changed_segments(log_prob_fn, *rows, keep)
    allowed = tolerance
    if again > tolerance or (vary and found.worst > tolerance):
        yield floor.capped("nats")
        allowed, why = max(tolerance, floor.limits(8)[0]), floor.why
    likely = "two calls with the same ids differ: dropout is on"
    yield Finding(again, "nats", "a second call", allowed, why, likely)
    if not found.worst <= allowed and (kept := _markers(ids, segment_ids)):
        plain, _ = _changed_segments(log_prob_fn, *rows, [*kept, *keep])
        if plain.worst <= allowed:  # only tokens that may mark padding or boundaries move it
            try:
                error, _ = _apart_from_alone(alone_fn or log_prob_fn, *rows)
                found = plain if floor.judge(error, "nats", str, str).passed else found
            except Exception:  # it holds masks or positions of the packed shape
                hint = f"masks are read from the ids: make them outside, or give keep={kept}"
                found = found.but(likely=f"{found.likely}; or {hint}")
    yield (found := found.but(threshold=allowed, why=why))
    if alone_fn is not None:
        error, places = _apart_from_alone(alone_fn, *rows)
        likely = "nothing is seen across the boundary, so positions do not restart"
        yield floor.judge(error, "nats", places.__getitem__, lambda: likely)
    also = {"loss mask": loss_mask, "alone": alone_fn}
    asked = ", ".join(name for name, value in also.items() if value is not None)
    yield found.but(index=found.index + f"; also asked: {asked}" * bool(asked))


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
    whole = _microbatches("reference", reference, size)
    plans = [_microbatches(f"splits[{i}]", split, size) for i, split in enumerate(splits)]
    names = [f"splits[{k}], {len(p)} microbatch" + "es" * (len(p) > 1) for k, p in enumerate(plans)]
    if (loss_fn is None) != (params is None):
        raise ValueError("loss_fn and params are needed together")
    eps = 0.0

    def run(plan: list[list[int]], **how: Any) -> Tensor:
        nonlocal eps
        out = _run(grad_fn, batch, plan, **how)
        parts = [g for g in tree_leaves(out) if isinstance(g, Tensor)]
        if not parts:
            raise TypeError(f"grad_fn returned {type(out).__name__} without a tensor")
        eps = max(eps, *(torch.finfo(g.dtype).eps for g in parts))
        return _vector(parts)

    def apart(g: Tensor, other: Tensor) -> Tensor:
        error = (g - other).norm()
        return (error / scale if error else error).nan_to_num(math.inf, math.inf)[None]

    grads = []
    for plan, name in zip([whole, *plans], ["the reference", *names], strict=True):
        grads.append(g := run(plan))
        bad, unit = int((~g.isfinite()).sum()), "entries that are not finite"
        likely = "a microbatch without policy tokens divides by 0, or by one reward's deviation"
        yield Finding(math.nan if bad else 0, unit, name, 0, "a gradient is finite", likely)
        likely = f"grad_fn returned {len(g)} numbers, and {len(grads[0])} for the reference"
        why = "every split has the same parameters"
        yield Finding(abs(len(g) - len(grads[0])), "entries", name, 0, why, likely)
    expected, *grads = grads
    scale = expected.norm().item()
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
    why = partial(_why_split, run, plans[k], grads[k], expected)
    found = floor.judge(errors[k], "relative", lambda _: names[k], why)
    yield (found := found.but(trace=tuple(e.item() for e in errors)))
    if loss_fn is None:
        hint = "; not asked: a factor on every gradient, which takes loss_fn and params"
        yield found.but(index=names[k] + hint)
    else:
        yield _factor(loss_fn, batch, list(params), expected).but(trace=found.trace)


def _why_split(
    run: Callable[[list[list[int]]], Tensor], plan: list[list[int]], g: Tensor, expected: Tensor
) -> str:
    """Say what a wrong gradient is made of."""
    K, error = len(plan), (g - expected).norm()
    along = (g @ expected / expected.square().sum().clamp(min=1e-300)).item()
    for factor, name in ((K, f"{K} times too long"), (1 / K, f"{K} times too short")):
        if (g - along * expected).norm() < 0.1 * error and abs(along / factor - 1) < 0.01:
            wrong = "summed where they should be averaged, or the reverse"
            return f"the gradient is {name}: {K} microbatches are {wrong}"
    try:
        parts = torch.stack([run([rows]) for rows in plan]).nan_to_num()  # [K, P], each alone
    except Exception as problem:  # a trainer may refuse a part of the batch
        return f"unknown, since a microbatch alone fails: {problem}"
    own = (parts.mean(0) - g).norm() < 0.1 * error
    if parts.shape[1] <= K:
        return "each is divided by its own count" if own else "weights of microbatches are wrong"
    right, actual = (
        torch.linalg.lstsq(parts @ parts.T, (parts @ x)[:, None], driver="gelsd").solution[:, 0]
        for x in (expected, g)
    )
    if (expected - right @ parts).norm() > 0.5 * error:
        own_batch = "advantages or statistics are computed per microbatch"
        return f"a microbatch alone gives another gradient than inside the batch: {own_batch}"
    moved = (actual - right).abs() * parts.norm(dim=1)  # a part without a gradient has any weight
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
    apart, slope = min((abs(a - b), b) for a, b in itertools.pairwise(slopes))
    factor = 1 / slope if slope else math.inf
    why = "a step along the gradient changes the loss as it says"
    if not apart <= 0.1 * abs(slope):
        return Finding(0, "", "no factor can be seen: the loss is too rough", 0.1, why)
    near = min((0.25, 0.5, -1, 2, 3, 4, 8), key=lambda usual: abs(factor / usual - 1))
    shown = near if abs(factor / near - 1) <= 0.1 else f"{factor:.2g}"  # it is known to 10%
    likely = f"every gradient is about {shown} times the slope of the loss"
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


def _picked(values: Iterable[Tensor], masks: Iterable[Tensor]) -> Tensor:
    """Return the masked entries of all trajectories in one float64 vector."""
    return torch.cat([v.double().cpu()[m] for v, m in zip(values, masks, strict=True)])


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
    raw, old = _run(log_prob_fn, trajs), [traj.sample_logp for traj in trajs]
    rows, problem = _per_trajectory(raw, trajs)
    why = "the same weights and the same context give the same log-probability"
    yield Finding(math.nan if problem else 0, "nats", "the output", 0, why, problem)
    ours, theirs = _picked(rows, masks), _picked(old, masks)

    def errors(mode: Any = None, batch: Sequence[Trajectory] = trajs, draws: int = 0) -> Tensor:
        after = _per_trajectory(_run(log_prob_fn, batch, mode=mode, draws=draws), trajs)[0]
        return _moved(_picked(after, masks)[:, None], ours[:, None])

    def place(k: int) -> str:
        return "trajs[{}], entry {}, p = {:.2g}".format(*places[k], theirs[k].exp())

    error = (ours - theirs).abs().nan_to_num(math.inf, math.inf)
    worst, likely = error.max().item(), "the log-probability of a sampled token is not finite"
    worst = worst if worst < math.inf else math.nan
    yield Finding(worst, "nats", place(int(error.argmax())), math.inf, why, likely)
    least = _last_places(torch.cat([ours, theirs]), *tree_leaves(raw), *old)
    floor = _Floor(errors, least, sampler_dtype, tolerance)
    again, likely = errors(draws=1), "two calls differ: dropout is on in this pass"
    found = floor.judge(again, "nats", place, lambda: likely)
    yield found.but(threshold=min(found.threshold, 0.5), likely=likely)
    yield floor.capped("nats")
    yield from _neighbours(errors, trajs, torch.tensor(places), floor)
    yield (found := floor.judge(error, "nats", place, partial(_why_ratio, rows, old, masks, floor)))
    left = [(o.cpu() != 0) & ~m & m.any() for o, m in zip(old, masks, strict=True)]
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
        batch = [turned[i] if i % 2 == part else traj for i, traj in enumerate(trajs)]
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


def _why_ratio(rows: list[Tensor], old: list[Tensor], masks: list[Tensor], floor: _Floor) -> str:
    """Say what the differences have in common."""
    one, mean = floor.limits()
    known = [o.cpu() != 0 for o in old]  # what the sampler recorded

    def agree(ours: Iterable[Tensor], at: Iterable[Tensor]) -> bool:
        at = list(at)
        error = (_picked(ours, at) - _picked(old, at)).abs()
        return len(error) > 0 and bool(error.max() <= one and error.square().mean().sqrt() <= mean)

    def within(parts: Iterable[Tensor], wholes: Iterable[Tensor]) -> bool:
        return not any((p & ~w).any() for p, w in zip(parts, wholes, strict=True))

    if within(known, masks) and agree(rows, known):
        return "action_mask trains tokens that the sampler did not sample: it recorded 0 for them"
    for s in (1, -1):
        inside = [_shift(torch.ones_like(m), s) for m in masks]
        moved = [_shift(m, s) for m in masks]
        if agree([_shift(r, s) for r in rows], map(torch.logical_and, masks, inside)):
            return f"the log-probabilities are off by one: entry t holds the one of t {-s:+d}"
        asked = [k & i & m.any() for k, i, m in zip(known, inside, masks, strict=True)]
        if within(asked, moved) and not within(masks, known) and agree(rows, asked):
            side = "before" if s > 0 else "after"
            return f"action_mask is off by one: the sampler's tokens are {side} it"
    y, x = _picked(rows, masks), _picked(old, masks)
    error = y - x
    if error.std() < 0.05 * error.mean().abs():
        return f"a constant of {error.mean():.2g} nats: one side is not normalised over the words"
    slope = ((x * y).sum() / x.square().sum()).item()
    if (y - slope * x).square().sum() < 0.5 * error.square().sum() and 0.2 < slope < 5:
        return f"log-probabilities are {slope:.2f} times the sampler's: a temperature on one side"
    sizes, small = error.abs().split([int(m.sum()) for m in masks]), 0.05 * error.abs().mean()
    far = [i for i, e in enumerate(sizes) if len(e) and not (e.max() <= one and e.mean() <= small)]
    if 0 < len(far) < len(rows):
        agreeing = f"{len(rows) - len(far)} of {len(rows)} trajectories agree"
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
        group = trajs[g : g + group_size]
        first = [int(traj.action_mask.long().argmax()) for traj in group]
        if len({int(traj.ids[t + 1]) for traj, t in zip(group, first, strict=True)}) == 1:
            surprise -= (group_size - 1) * float(group[0].sample_logp[first[0]])
            equal.append(g // group_size)
    index = f"group {equal[0]}, first of {len(equal)} groups" if equal else "any group"
    likely = f"one first token is drawn and repeated {group_size} times"
    return found.but(worst=surprise, index=index, likely=likely)
