# Generated from chapters/07-logits.ipynb by tools/export.py. Do not edit: edit the notebook.
"""The memory of the logits.

What is the largest tensor in a training step, and can it never exist?
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from agentrl.grpo import aggregate_loss, clipped_surrogate_loss, kl_estimate, reinforce_loss

__all__ = ["checkpointed_log_probs", "fused_log_probs", "fused_policy_loss", "peak_memory"]


def peak_memory(
    fn: Callable[..., Any], *args: Any, device: str | torch.device | None = None
) -> int:
    """Return the most bytes that `fn(*args)` holds at a time, beyond its arguments.

    Args:
        fn: what to measure, backward pass included. It uses no tensor but its arguments and what it
            makes of them, and must not read their values on a machine without CUDA.
        *args: tensors and other values. Tensors stand for their shape, dtype and requires_grad; on
            the "meta" device they cost nothing. They and their gradients are left as they are.
        device: where to measure. A CUDA device reads the allocator; "cpu" runs fake tensors under
            PyTorch's memory tracker. CUDA where there is one, unless given.

    Returns:
        Bytes above what was allocated before the call. The gradients of the arguments count.

    Raises:
        ValueError: if the tracker cannot follow `fn`: a shape or a branch depends on values.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    return _allocator_peak(fn, args, device) if device.type == "cuda" else _ledger_peak(fn, args)


def _ledger_peak(fn: Callable[..., Any], args: tuple[Any, ...]) -> int:
    from torch.distributed._tools.mem_tracker import MemTracker  # slow to import, and rarely needed

    tracker = MemTracker()

    def total(kind: str) -> int:
        return sum(device["Total"] for device in tracker.get_tracker_snapshot(kind).values())

    try:
        with FakeTensorMode():
            placed = [_like(arg, torch.empty_strided, device="cpu") for arg in args]
            tracker.track_external(*(arg for arg in placed if isinstance(arg, Tensor)))
            before = total("current")
            with tracker:
                fn(*placed)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"the memory ledger cannot follow {error.func}: its result depends on the values of a "
            "tensor, and a fake tensor has none. Measure on a CUDA device, or leave that step out."
        ) from error
    return total("peak") - before


def _allocator_peak(fn: Callable[..., Any], args: tuple[Any, ...], device: torch.device) -> int:
    fn(*(_like(arg, _zeros_strided, device=device) for arg in args))  # libraries take workspaces
    placed = [_like(arg, _zeros_strided, device=device) for arg in args]
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fn(*placed)
    return torch.cuda.max_memory_allocated(device) - before


def _like(arg: Any, make: Callable[..., Tensor], device: str | torch.device) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    made = make(arg.shape, arg.stride(), dtype=arg.dtype, device=device)
    return made.requires_grad_(arg.requires_grad)


def _zeros_strided(*args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_strided(*args, **kwargs).zero_()


def _head_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits, -1).gather(-1, ids.long()[..., None]).squeeze(-1)


def checkpointed_log_probs(
    hidden: Tensor, weight: Tensor, ids: Tensor, chunk_size: int = 1024
) -> Tensor:
    """Return the log-probability of each token, one chunk of positions alive at a time.

    Args:
        hidden: the states that the output head reads, [B, T, D].
        weight: of the output head, [V, D].
        ids: the chosen tokens [B, T], scored by the state at the same place.
        chunk_size: positions per chunk; each chunk is computed again in the backward pass.

    Returns:
        log p(id) in nats, [B, T], in float32 (float64 from float64).

    Raises:
        ValueError: if the shapes do not fit, `chunk_size` is below 1, or an id is outside the
            vocabulary.
    """
    _check_head(hidden, weight, ids)
    if ids.ndim < 2:
        raise ValueError(f"ids {list(ids.shape)} must be [B, T]")
    _kept(ids, None, len(weight))
    if chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size} must be at least 1")
    chunks = zip(hidden.split(chunk_size, 1), ids.split(chunk_size, 1), strict=True)
    parts = [checkpoint(_head_log_probs, h, weight, i, use_reentrant=False) for h, i in chunks]
    return torch.cat(parts, dim=1)


def _check_head(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> None:
    for name, value in (("hidden", hidden), ("weight", weight), ("ids", ids)):
        if not isinstance(value, Tensor):
            hint = ", such as lm_head.weight" if name == "weight" else ""
            raise TypeError(f"{name} must be a tensor{hint}, is {type(value).__name__}")
    if weight.ndim != 2 or hidden.ndim < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} does not fit weight {list(weight.shape)}")
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise TypeError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}: both must be floating"
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"ids are {ids.dtype}, must be integers")
    for name, values in (("ids", ids), ("mask", mask)):
        if values is not None and values.shape != hidden.shape[:-1]:
            raise ValueError(
                f"{name} {list(values.shape)} do not fit hidden {list(hidden.shape)}: one per state"
            )
    if hasattr(weight, "full_tensor"):  # a DTensor
        raise TypeError(
            "weight is sharded: call `unshard` of its module first, or wrap the head with the root"
            " (the gradient of `full_tensor()` would lack the other ranks' part)"
        )
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature = {temperature} must be positive and finite")


def _kept(ids: Tensor, mask: Tensor | None, vocab_size: int) -> Tensor | None:
    """Positions with a nonzero mask in the flattened `ids`, or None for all; their ids checked."""
    if isinstance(ids, FakeTensor):
        return None  # no values to read: the ledger counts every token
    rows = None if mask is None else mask.reshape(-1).nonzero()[:, 0]
    if rows is not None and len(rows) == ids.numel():
        rows = None
    flat = (ids.reshape(-1) if rows is None else ids.reshape(-1)[rows]).long()
    outside = (flat < 0) | (flat >= vocab_size)
    if outside.any():
        first = int(outside.nonzero()[0])
        place = torch.tensor(first if rows is None else int(rows[first]))
        index = [int(i) for i in torch.unravel_index(place, ids.shape)]
        raise ValueError(f"ids{index} = {int(flat[first])} is outside 0..{vocab_size - 1}")
    return rows


class _Plan(NamedTuple):
    """How one call of a fused head runs."""

    rows: int  # tokens in a tile
    cols: int  # vocabulary entries in a tile
    scale: float  # 1 / temperature
    low: torch.dtype  # of the factors of a product
    acc: torch.dtype  # of the logits and of every sum
    brief: bool  # on fake tensors: walk two tiles and the last, memory repeats from there


def _plan(
    hidden: Tensor, weight: Tensor, temperature: float, chunk: int | None, tile_bytes: int | None
) -> _Plan:
    if (chunk is not None and chunk < 1) or (tile_bytes is not None and tile_bytes < 1):
        raise ValueError(f"chunk = {chunk} and tile_bytes = {tile_bytes} must be at least 1")
    kind = hidden.device.type
    low = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(kind) and low != torch.float64:
        low = torch.get_autocast_dtype(kind)
    acc = torch.float64 if low == torch.float64 else torch.float32
    budget = (tile_bytes or (2**24 if kind == "cuda" else 2**23)) // acc.itemsize
    rows = max(1, min(len(hidden), chunk or _round(math.isqrt(budget))))
    # Beside the tile lie its columns of the weight and of the gradient: bound these as well.
    cols = max(1, _round(min(budget // rows, budget // weight.shape[1])))
    brief = isinstance(hidden, FakeTensor)
    return _Plan(rows, min(cols, len(weight)), 1.0 / temperature, low, acc, brief)


def _round(size: int) -> int:
    return size // 64 * 64 if size > 64 else size  # whole vector registers


def _spans(total: int, size: int, plan: _Plan) -> list[slice]:
    spans = [slice(i, min(i + size, total)) for i in range(0, total, size)]
    return spans[:2] + spans[2:][-1:] if plan.brief else spans


def _mixed(x: Tensor) -> bool:
    return x.is_cuda  # torch.mm(bf16, bf16, out_dtype=float32)


def _factors(x: Tensor, plan: _Plan, size: int, wide: bool = False) -> Callable[[slice], Tensor]:
    """Return a function from a span of at most `size` rows of x to them as factors of a product.

    They are rounded to plan.low. `wide` factors have the dtype that makes float32 logits. What has
    to be converted goes through one buffer: a fresh tensor per tile costs more than the conversion.
    So a factor is valid until the next one is asked for.
    """
    dtype = plan.acc if wide and not _mixed(x) else plan.low
    if x.dtype == plan.low == dtype:
        return lambda span: x[span]
    buffer = x.new_empty(size, x.shape[1], dtype=dtype)
    rounds = dtype != plan.low
    return lambda span: buffer[: span.stop - span.start].copy_(
        x[span].to(plan.low) if rounds else x[span]
    )


def _multiply(out: Tensor, a: Tensor, b: Tensor, add: bool = False) -> Tensor:
    """Compute out = a @ b, or out += a @ b. Inside a product, and over several, sums are float32.

    A CPU cannot return float32 from bf16 factors: there each product is rounded, then added.
    """
    if a.dtype != out.dtype and not (_mixed(a) and out.dtype == torch.float32):
        product = torch.mm(a, b)
        return out.add_(product) if add else out.copy_(product)
    mixed = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    # not addmm_: PyTorch's counter of operations does not see that one; nor addmm with out_dtype
    return torch.addmm(out, a, b, out=out, **mixed) if add else torch.mm(a, b, out=out, **mixed)


_LOCK = threading.Lock()
_running: list[str] = []  # what each running head is to restore


@contextlib.contextmanager
def _products(plan: _Plan, device: torch.device) -> Iterator[None]:
    """Autocast off: the plan says what to round. On a CPU, bf16 units for factors that are bf16."""
    with torch.autocast(device.type, enabled=False):
        if device.type != "cpu" or plan.low != torch.bfloat16:
            yield
            return
        # A setting of the process: other threads see it, and the last head to end restores it.
        settings = torch.backends.mkldnn.matmul
        with _LOCK:
            _running.append(_running[0] if _running else settings.fp32_precision)
            settings.fp32_precision = "bf16"
        try:
            yield
        finally:
            with _LOCK:
                before = _running.pop()
                if not _running:
                    settings.fp32_precision = before


def _tile_logits(buffer: Tensor, h: Tensor, w: Tensor, scale: float) -> Tensor:
    """Logits of one tile [t, v], in the front of `buffer`, from h [t, D] and w [v, D]."""
    z = buffer[: len(h) * len(w)].view(len(h), len(w))
    _multiply(z, h, w.T)
    return z if scale == 1.0 else z.mul_(scale)


def _place(ids: Tensor, span: slice) -> tuple[Tensor, Tensor]:
    """Where in the flattened tile of `span` each id [t] lies, and whether it lies there at all."""
    column, width = ids - span.start, span.stop - span.start
    nearest = column.clamp(0, width - 1)
    first = torch.arange(0, len(ids) * width, width, device=ids.device)
    return first + nearest, nearest == column


def _new_state(tokens: int, like: Tensor) -> Tensor:
    state = like.new_zeros(4, tokens)  # maximum, sum, chosen logit, first moment
    state[0] = torch.finfo(like.dtype).min
    return state


def _absorb(z: Tensor, place: tuple[Tensor, Tensor], state: Tensor, moment: bool = False) -> Tensor:
    """Fold a tile of logits into `state`; z becomes exp(z - maximum).

    Return by how much that rescales what was summed before, [t].
    """
    top, total, chosen, first = state
    index, inside = place
    chosen.copy_(torch.where(inside, z.take(index), chosen))
    higher = torch.maximum(top, z.amax(1))
    drop = top - higher
    z.sub_(higher[:, None])
    if moment:
        first.add_(total * drop).mul_(drop.exp()).add_((z.exp() * z).sum(1))
    total.mul_(drop.exp_()).add_(z.exp_().sum(1))
    top.copy_(higher)
    return drop


def _tile_slopes(z: Tensor, saved: Tensor, g: Tensor, q: Tensor | None) -> None:
    """Turn a tile of logits z [t, v] into the loss's derivative by those not chosen, over a unit.

    saved [4, t] is the maximum, the sum, the log-prob and the entropy of each token; g is
    -1/temperature times the gradient by its log-prob, q the same by its entropy. The unit is a
    number per token, g / sum without q and 1 / sum with it: a factor for rows of D numbers, not for
    the rows of the tile.
    """
    top, total, _, entropy = saved
    z.sub_(top[:, None])
    if q is None:
        z.exp_()
        return
    slope = (z + (entropy - total.log())[:, None]).mul_(q[:, None]).add_(g[:, None])
    z.exp_().mul_(slope)


def _chosen_slope(saved: Tensor, g: Tensor, q: Tensor | None) -> Tensor:
    """Derivative by the chosen logit [t], in the same unit."""
    _, total, logp, entropy = saved
    if q is None:
        return logp.expm1() * total
    return (g * logp.expm1() + q * logp.exp() * (logp + entropy)) * total


def _set_chosen(z: Tensor, place: tuple[Tensor, Tensor], value: Tensor | float) -> None:
    """Overwrite the entry of each id that lies in the tile; value is [t] or one number."""
    index, inside = place
    values = torch.where(inside, value, z.take(index)).to(z.dtype)
    z.view(-1).index_copy_(0, index, values)  # scatter_ would copy the whole tile, twice, in bf16


def _scan(hidden: Tensor, weight: Tensor, ids: Tensor, plan: _Plan, entropy: bool) -> Tensor:
    """Maximum, sum, log-prob and, if wanted, entropy [4, N] of the tokens of hidden [N, D]."""
    buffer = hidden.new_empty(plan.rows * plan.cols, dtype=plan.acc)
    state = _new_state(len(hidden), buffer)
    row_factor, col_factor = _row_factors(hidden, plan), _factors(weight, plan, plan.cols, True)
    for v in _spans(len(weight), plan.cols, plan):
        w = col_factor(v)
        for t in _spans(len(hidden), plan.rows, plan):
            z = _tile_logits(buffer, row_factor(t), w, plan.scale)
            _absorb(z, _place(ids[t], v), state[:, t], entropy)
    top, total, chosen, first = state
    log_total = total.log()
    # Not chosen - (top + log_total): that sum is large, and its rounding error with it.
    chosen.sub_(top).sub_(log_total)
    first.div_(-total).add_(log_total)
    return state


def _row_factors(hidden: Tensor, plan: _Plan) -> Callable[[slice], Tensor]:
    # Few tokens are converted once; many, tile by tile, or the copy would grow with their number.
    if len(hidden) > 4 * plan.rows:
        return _factors(hidden, plan, plan.rows, True)
    whole = _factors(hidden, plan, len(hidden), True)(slice(0, len(hidden)))
    return lambda t: whole[t]


def _spare(hidden: Tensor, plan: _Plan) -> Tensor | None:
    """Room for a tile in plan.low, where that is not the dtype of the logits."""
    return None if plan.low == plan.acc else hidden.new_empty(plan.rows * plan.cols, dtype=plan.low)


def _lowered(z: Tensor, spare: Tensor | None, unit: Tensor | None = None) -> Tensor:
    """The tile itself, still in its unit, or unit * z rounded into `spare`.

    To round it is a walk over the tile in any case, and float16 has no room for other units.
    """
    if spare is None:
        return z
    low = spare[: z.numel()].view(z.shape)
    return low.copy_(z if unit is None else z.mul_(unit[:, None]))


def _scaled(h: Tensor, unit: Tensor, buffer: Tensor) -> Tensor:
    return torch.mul(h, unit[:, None], out=buffer[: len(h)])


def _add_chosen(
    grad_h: Tensor, weight: Tensor, ids: Tensor, slope: Tensor, low: torch.dtype
) -> None:
    """Add what the chosen logits contribute to the gradient by hidden [t, D]."""
    rows = weight.index_select(0, ids).to(low)
    grad_h.addcmul_(slope[:, None], rows.to(grad_h.dtype))


def _scan_back(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    saved: Tensor,
    g: Tensor,
    q: Tensor | None,
    plan: _Plan,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by hidden, in plan.acc, and by weight, in its dtype."""
    buffer = saved.new_empty(plan.rows * plan.cols)
    spare = _spare(hidden, plan)
    unit = (g if q is None else 1.0) / saved[1]
    chosen = _chosen_slope(saved, g, q) * (1.0 if spare is None else unit)
    grad_h = saved.new_zeros(hidden.shape) if needs[0] else None
    grad_w = torch.empty_like(weight) if needs[1] else None
    if needs[1] and not len(hidden):
        grad_w.zero_()
    add_up = weight.dtype != plan.acc and len(hidden) > plan.rows  # in float32, tile by tile
    tile_w = saved.new_empty(plan.cols if add_up else 0, weight.shape[1])
    scaled = saved.new_empty(plan.rows if spare is None else 0, weight.shape[1])
    row_factor, col_factor = _row_factors(hidden, plan), _factors(weight, plan, plan.cols, True)
    low_rows, low_cols = _factors(hidden, plan, plan.rows), _factors(weight, plan, plan.cols)
    rows = _spans(len(hidden), plan.rows, plan)
    for v in _spans(len(weight), plan.cols, plan):
        w, low_w = col_factor(v), low_cols(v) if needs[0] else None
        for t in rows:
            h = row_factor(t)
            z = _tile_logits(buffer, h, w, plan.scale)
            _tile_slopes(z, saved[:, t], g[t], None if q is None else q[t])
            z, place = _lowered(z, spare, unit[t]), _place(ids[t], v)
            if grad_h is not None:
                _set_chosen(z, place, 0.0)
                _multiply(grad_h[t], z, low_w, add=True)
            if needs[1]:
                _set_chosen(z, place, chosen[t])
                into = tile_w[: len(w)] if add_up else grad_w[v]
                h = _scaled(h, unit[t], scaled) if spare is None else low_rows(t)
                _multiply(into, z.T, h, add=t.start > 0)
        if needs[1] and add_up:
            grad_w[v] = tile_w[: len(w)]
    if grad_h is not None:
        for t in rows:
            _add_chosen(grad_h[t], weight, ids[t], chosen[t], plan.low)
        if spare is None:
            grad_h.mul_(unit[:, None])
    return grad_h, grad_w


class _FusedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, plan: _Plan, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        with _products(plan, hidden.device):
            saved = _scan(hidden, weight, ids, plan, entropy)
        ctx.save_for_backward(hidden, weight, ids, saved)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return saved[2].clone(), saved[3].clone() if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, q: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, saved = ctx.saved_tensors
        plan, tokens = ctx.plan, len(hidden)
        g = torch.zeros_like(saved[0]) if g is None else g * -plan.scale
        q = None if q is None else q * -plan.scale
        live = None  # on fake tensors every token counts
        if not isinstance(g, FakeTensor):
            live = (g if q is None else g.abs() + q.abs()).nonzero()[:, 0]
        if live is not None and len(live) < tokens:
            hidden, ids, saved, g = hidden[live], ids[live], saved[:, live], g[live]
            q = None if q is None else q[live]
        with _products(plan, g.device):
            needs = ctx.needs_input_grad[:2]
            grad_h, grad_w = _scan_back(hidden, weight, ids, saved, g, q, plan, needs)
        grad_h = None if grad_h is None else grad_h.to(hidden.dtype)
        if grad_h is not None and len(grad_h) < tokens:
            grad_h = grad_h.new_zeros(tokens, grad_h.shape[1]).index_copy_(0, live, grad_h)
        return grad_h, grad_w, None, None, None


def fused_log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    mask: Tensor | None = None,
    entropy: bool = False,
    tile_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-probability of each token without ever holding its logits.

    Four matrix products, forward and backward: one, the same again to recompute the tiles, and one
    for each gradient. Beyond the gradients, memory depends on neither the tokens nor the
    vocabulary, but for a few numbers per token, the float32 gradient of `hidden` and, with a mask
    or zero gradients, a copy of the states that count.

    Args:
        hidden: the states that the output head reads, [..., D].
        weight: of the output head, [V, D]; it may be tied to the embedding, or frozen.
        ids: the chosen tokens [...], scored by the state at the same place.
        temperature: the logits are divided by it.
        chunk: tokens per tile; by default as many as vocabulary entries, if D is not much larger.
        mask: [...]; where it is 0 nothing is computed, the result is 0, and the id may be anything.
        entropy: also return the entropy of each token's distribution, with its gradient.
        tile_bytes: a tile of float32 logits, and what lies beside it, takes at most so much memory,
            in bytes; 8 MiB, on CUDA 16 MiB.

    Returns:
        log p(id) in nats, [...], summed and returned in float32 (float64 from float64) whatever the
        inputs are. With `entropy`, a pair: log-probs and entropies in nats.

    Raises:
        ValueError: if shapes do not fit, an id is outside the vocabulary, or a size or the
            temperature is not positive.
        TypeError: if a dtype is not of the right kind.
    """
    _check_head(hidden, weight, ids, mask, temperature)
    rows = _kept(ids, mask, len(weight))
    h, i = _flat(hidden, rows, hidden.shape[-1]), _flat(ids, rows).long()
    plan = _plan(h, weight, temperature, chunk, tile_bytes)
    logp, spread = _FusedLogProbs.apply(h, weight, i, plan, entropy)
    logp = _unflat(logp, rows, ids.shape)
    return (logp, _unflat(spread, rows, ids.shape)) if entropy else logp


def _flat(x: Tensor, rows: Tensor | None, *shape: int) -> Tensor:
    x = x.reshape(-1, *shape)
    return x if rows is None else x.index_select(0, rows)


def _unflat(x: Tensor, rows: Tensor | None, shape: torch.Size) -> Tensor:
    return (
        x.view(shape)
        if rows is None
        else x.new_zeros(shape.numel()).index_copy(0, rows, x).view(shape)
    )


@contextlib.contextmanager
def _inner_graph() -> Iterator[None]:
    """A graph of its own, in evaluation too, that a checkpoint around the head does not see."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), hooks:
        yield


def _token_weights(
    mask: Tensor, mode: str, norm_const: float | Tensor | None, dtype: torch.dtype
) -> Tensor:
    with _inner_graph():
        norm_const = norm_const.clone() if isinstance(norm_const, Tensor) else norm_const
        values = torch.zeros(mask.shape, dtype=dtype, device=mask.device, requires_grad=True)
        total = aggregate_loss(values, mask.clone(), mode, norm_const)
        return torch.autograd.grad(total, values)[0]


def _weighted_loss(
    logp: Tensor,
    advantages: Tensor,
    old_logp: Tensor | None,
    weights: Tensor,
    clip: tuple[float, float],
) -> Tensor:
    """Sum of weight times loss over tokens [n]; a weight scales the advantage, so the loss."""
    mask, advantages = torch.ones_like(logp[None]), (advantages * weights)[None]
    if old_logp is None:
        return reinforce_loss(logp[None], advantages, mask, "constant", 1.0)
    low, high = clip
    return clipped_surrogate_loss(
        logp[None], old_logp[None], advantages, mask, "constant", 1.0, clip_low=low, clip_high=high
    )


def _policy_chunk(
    buffer: Tensor,
    h: Tensor,
    factors: tuple[Callable[[slice], Tensor], Callable[[slice], Tensor]],
    ids: Tensor,
    plan: _Plan,
    tiles: list[slice],
    mean: Tensor | None,
    spare: Tensor | None,
    kept: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probs [n] of a chunk, and the unit [tiles, n] in which buffer holds the tiles of p.

    mean [n, D], if wanted, becomes the mean of the weight's rows under p, the chosen row left out.
    With `kept` the tiles stay in the buffer side by side, else each overwrites the last.
    """
    wide, low = factors
    state = _new_state(len(h), buffer)
    tops = buffer.new_empty(-(-tiles[-1].stop // plan.cols), len(h))
    for k, v in enumerate(tiles):
        z = _tile_logits(buffer[len(h) * v.start if kept else 0 :], h, wide(v), plan.scale)
        place = _place(ids, v)
        drop = _absorb(z, place, state)
        tops[k] = state[0]
        if mean is not None:
            _set_chosen(z, place, 0.0)
            _multiply(mean.mul_(drop[:, None]), _lowered(z, spare), low(v), add=True)
    top, total, chosen, _ = state
    if mean is not None:
        mean.div_(total[:, None])
    # A tile e^40 below the largest logit vanishes beside it; the bound keeps 1 / unit finite.
    return (chosen - top) - total.log(), tops.sub_(top).clamp_(min=-40).exp_().div_(total)


def _slope(
    loss_fn: Callable[[Tensor, slice], Tensor], logp: Tensor, t: slice
) -> tuple[Tensor, Tensor]:
    """The loss of a chunk, and its derivative by each log-prob."""
    with _inner_graph():
        logp = logp.detach().requires_grad_()
        loss = loss_fn(logp, t)
        return loss.detach(), torch.autograd.grad(loss, logp)[0]


def _policy_pass(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    loss_fn: Callable[[Tensor, slice], Tensor],
    plan: _Plan,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Loss, log-probs, gradient by hidden, gradient by weight (in plan.acc or its own dtype)."""
    chunks, tiles = _spans(len(hidden), plan.rows, plan), _spans(len(weight), plan.cols, plan)
    logp = hidden.new_zeros(len(hidden), dtype=plan.acc)
    loss = logp.new_zeros(())
    grad_h = torch.zeros_like(hidden) if needs[0] else None
    # Several chunks add up in float32; a single one can be rounded at once.
    dtype = plan.acc if len(chunks) > 1 else weight.dtype
    grad_w = torch.empty_like(weight, dtype=dtype) if needs[1] else None
    if needs[1] and not chunks:
        grad_w.zero_()
    # The logits of a chunk wait for the loss only where the weight is trained.
    width = len(weight) if needs[1] else plan.cols
    buffer, spare = logp.new_empty(plan.rows * width), _spare(hidden, plan)
    sum_h = logp.new_empty(plan.rows if needs[0] else 0, weight.shape[1])
    scaled = logp.new_empty(plan.rows if spare is None else 0, weight.shape[1])
    row_factor = _factors(hidden, plan, plan.rows, True)
    factors = _factors(weight, plan, plan.cols, True), _factors(weight, plan, plan.cols)
    low_rows = _factors(hidden, plan, plan.rows)
    for t in chunks:
        h, n = row_factor(t), t.stop - t.start
        mean = sum_h[:n].zero_() if needs[0] else None
        logp[t], unit = _policy_chunk(
            buffer, h, factors, ids[t], plan, tiles, mean, spare, needs[1]
        )
        if not any(needs):
            loss += loss_fn(logp[t], t)
            continue
        value, slope = _slope(loss_fn, logp[t], t)
        loss += value
        g = slope * -plan.scale
        chosen = logp[t].expm1()
        if grad_h is not None:
            _add_chosen(mean, weight, ids[t], chosen, plan.low)
            grad_h[t] = mean.mul_(g[:, None])
        for k, v in enumerate(tiles) if needs[1] else ():
            z = buffer[n * v.start : n * v.stop].view(n, -1)
            _set_chosen(z, _place(ids[t], v), chosen / unit[k])
            z = _lowered(z, spare, unit[k] * g)
            x = _scaled(h, unit[k] * g, scaled) if spare is None else low_rows(t)
            _multiply(grad_w[v], z.T, x, add=t.start > 0)
    return loss, logp, grad_h, grad_w


class _FusedPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        loss_fn: Callable[[Tensor, slice], Tensor],
        plan: _Plan,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        with _products(plan, hidden.device):
            loss, logp, grad_h, grad_w = _policy_pass(hidden, weight, ids, loss_fn, plan, needs)
        ctx.save_for_backward(grad_h, None if grad_w is None else grad_w.to(weight.dtype))
        ctx.mark_non_differentiable(logp)
        return loss, logp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_h, grad_w = ctx.saved_tensors
        # A plain loss.backward() has g = 1. Looking costs nothing on a CPU, and spares a copy.
        if g.device.type != "cpu" or isinstance(g, FakeTensor) or g != 1:
            grad_w = None if grad_w is None else (grad_w * g).to(grad_w.dtype)
        grad_h = None if grad_h is None else (grad_h * g).to(grad_h.dtype)
        return grad_h, grad_w, None, None, None, None


def fused_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    old_logp: Tensor | None = None,
    clip: float | tuple[float, float] | None = 0.2,
    norm_const: float | Tensor | None = None,
    loss_agg_mode: str = "token_mean",
    ref_logp: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_kind: str = "k3",
    temperature: float = 1.0,
    chunk: int = 512,
    tile_bytes: int | None = None,
    return_logp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return a policy-gradient loss and leave its gradients ready, in one pass over the head.

    Three matrix products, forward and backward together. The gradients are computed with the loss
    and kept for `backward`, which multiplies them by what comes in: once, so no second derivative.
    Not for training in float16, whose loss scale arrives too late.

    Args:
        hidden: the states that the output head reads, [B, T, D].
        weight: of the output head, [V, D].
        ids: the chosen tokens [B, T], scored by the state at the same place.
        advantages: one per sequence [B], or one per token [B, T].
        mask: [B, T], nonzero on the policy's tokens; the others cost nothing. All of them if None.
        old_logp: log-probs [B, T] of the policy that sampled. None: REINFORCE, -advantage * log p.
        clip: how far the ratio may leave 1, one number or (lower, upper); None: no clipping.
        norm_const: the denominator of `loss_agg_mode`, counted over all microbatches and ranks.
            None: of this call alone, which is right for a single microbatch only (chapter 8).
        loss_agg_mode: as in `aggregate_loss`.
        ref_logp, kl_coef, kl_kind: log-probs [B, T] of a reference policy, the weight of the KL
            term towards it, and its estimator, as in `kl_estimate`: k2 descends KL(p, ref), k3
            KL(ref, p).
        temperature: the logits are divided by it.
        chunk: tokens whose logits are held at a time, 4 * chunk * V bytes. With a frozen weight, or
            without gradients, a tile of them.
        tile_bytes: memory of a tile of float32 logits, in bytes; 8 MiB, on CUDA 16 MiB.
        return_logp: also return the log-probs [B, T], detached, 0 where masked.

    Raises:
        ValueError: if shapes do not fit, an id is outside the vocabulary, a size or the temperature
            is not positive, a side of the clip is negative, or `kl_coef` lacks `ref_logp`.
        TypeError: if a dtype is not of the right kind.
    """
    _check_head(hidden, weight, ids, mask, temperature)
    clip = math.inf if clip is None else clip
    clip = clip if isinstance(clip, tuple | list) else (clip, clip)
    _check_policy(ids, advantages, old_logp, clip, ref_logp)
    if kl_coef and ref_logp is None:
        raise ValueError(f"kl_coef = {kl_coef} needs ref_logp, the log-probs of the reference")
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    rows = _kept(ids, mask, len(weight))
    h, i = _flat(hidden, rows, hidden.shape[-1]), _flat(ids, rows).long()
    plan = _plan(h, weight, temperature, chunk, tile_bytes)
    if advantages.ndim < ids.ndim:
        advantages = advantages[:, None].expand(ids.shape)
    weights = _token_weights(mask, loss_agg_mode, norm_const, plan.acc)
    adv, old, ref, weights = (
        None if x is None else _flat(x, rows).detach().to(plan.acc)
        for x in (advantages, old_logp, ref_logp, weights)
    )

    def loss_fn(logp: Tensor, t: slice) -> Tensor:
        loss = _weighted_loss(logp, adv[t], None if old is None else old[t], weights[t], clip)
        if ref is None:
            return loss
        return loss + kl_coef * (kl_estimate(logp, ref[t], kl_kind) * weights[t]).sum()

    trained = torch.is_grad_enabled()
    needs = (trained and hidden.requires_grad, trained and weight.requires_grad)
    if any(needs) and plan.low == torch.float16:
        raise TypeError(
            "in float16 the gradients, made before the factor of a loss scaler is known, would"
            " round to 0: use fused_log_probs, or bfloat16"
        )
    loss, logp = _FusedPolicyLoss.apply(h, weight, i, loss_fn, plan, needs)
    return (loss, _unflat(logp, rows, ids.shape)) if return_logp else loss


def _check_policy(
    ids: Tensor,
    advantages: Tensor,
    old_logp: Tensor | None,
    clip: tuple[float, float],
    ref_logp: Tensor | None,
) -> None:
    if ids.ndim != 2:
        raise ValueError(f"ids {list(ids.shape)} must be [B, T]")
    if advantages.shape not in (ids.shape, ids.shape[:1]):
        raise ValueError(
            f"advantages {list(advantages.shape)} must be one per row or token of {list(ids.shape)}"
        )
    for name, values in (("old_logp", old_logp), ("ref_logp", ref_logp)):
        if values is not None and values.shape != ids.shape:
            raise ValueError(f"{name} {list(values.shape)} do not fit ids {list(ids.shape)}")
    if not (clip[0] >= 0 and clip[1] >= 0):
        raise ValueError(f"clip = {clip}: neither side may be negative")
