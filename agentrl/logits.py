# Generated from chapters/07-logits.ipynb by tools/export.py. Do not edit: edit the notebook.
"""The memory of the logits.

What is the largest tensor in a training step, and can it never exist?
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from agentrl import check
from agentrl.grpo import aggregate_loss, clipped_surrogate_loss, kl_estimate, reinforce_loss
from agentrl.report import Finding, as_check

__all__ = [
    "checkpointed_log_probs",
    "fused_log_probs",
    "fused_policy_loss",
    "head_memory_check",
    "peak_memory",
]


def peak_memory(
    fn: Callable[..., Any], *args: Any, device: str | torch.device | None = None
) -> int:
    """Return the most bytes that `fn(*args)` holds at a time, beyond its arguments.

    CUDA's allocator counts them; on a CPU `fn` runs on fake tensors under PyTorch's memory tracker.

    Args:
        fn: what to measure, backward pass included. It uses no tensor but its arguments and what it
            makes of them, and on a CPU must not read their values: a ValueError says where it does.
        *args: a tensor stands for its shape, strides, dtype and requires_grad, costs nothing on the
            "meta" device, and is left as it is. Its gradient counts.
        device: CUDA where there is one, unless given.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda":
        return _ledger_peak(fn, args, device)
    fn(*_placed(args, device))  # libraries take workspaces
    placed = _placed(args, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fn(*placed)
    return torch.cuda.max_memory_allocated(device) - before


def _ledger_peak(fn: Callable[..., Any], args: tuple[Any, ...], device: torch.device) -> int:
    from torch.distributed._tools.mem_tracker import MemTracker  # slow to import, and rarely needed

    tracker = MemTracker()
    unknown = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException
    try:
        with fake_tensor.FakeTensorMode():
            placed = _placed(args, device)
            tracker.track_external(*(arg for arg in placed if isinstance(arg, Tensor)))
            before = sum(part["Total"] for part in tracker.get_tracker_snapshot("current").values())
            with tracker:
                fn(*placed)
    except unknown as error:
        why = "its result depends on values, which a fake tensor lacks: measure on CUDA, or omit it"
        raise ValueError(f"the memory ledger cannot follow {error.func}: {why}") from error
    return sum(part["Total"] for part in tracker.get_tracker_snapshot("peak").values()) - before


def _placed(args: tuple[Any, ...], device: torch.device) -> list[Any]:
    """Put zeros on `device` in the place of each tensor."""

    def like(arg: Tensor) -> Tensor:
        made = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=device)
        return made.zero_().requires_grad_(arg.requires_grad)

    return [like(arg) if isinstance(arg, Tensor) else arg for arg in args]


def _head_log_probs(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None = None, soft_cap: float = 0.0
) -> Tensor:
    """Take the log-probs [...] of ids from the full logits of states [..., D]."""
    logits = check.widened(nn.functional.linear(hidden, weight, bias))
    logits = soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits
    return torch.log_softmax(logits, -1).gather(-1, ids.long()[..., None]).squeeze(-1)


class _Plan:
    """How one call of a fused head runs: in tiles of `rows` tokens by `cols` vocabulary entries."""

    def __init__(self, states: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> None:
        self.soft_cap, temperature, chunk_size, tile_bytes = settings
        kind, self.scale = states.device.type, 1.0 / temperature
        self.low = torch.promote_types(states.dtype, weight.dtype)  # of the factors of a product
        if torch.is_autocast_enabled(kind) and self.low != torch.float64:
            self.low = torch.get_autocast_dtype(kind)
        self.acc = torch.promote_types(self.low, torch.float32)  # of the logits and of every sum
        budget = (tile_bytes or (2**24 if kind == "cuda" else 2**23)) // self.acc.itemsize
        rows = math.isqrt(budget)
        self.rows = max(1, min(len(states), chunk_size or rows - rows % 64 * (rows > 64)))
        # Beside the tile lie its columns of the weight and of the gradient: bound these as well.
        cols = max(1, min(budget // self.rows, budget // weight.shape[1]))
        self.cols = min(cols - cols % 64 * (cols > 64), len(weight))
        self.brief = isinstance(states, fake_tensor.FakeTensor)

    def spans(self, start: int, stop: int, size: int) -> list[slice]:
        """Cut a range; on fake tensors walk two and the last, since memory repeats from there."""
        spans = [slice(i, min(i + size, stop)) for i in range(start, stop, size)]
        return spans[:2] + spans[2:][-1:] if self.brief else spans


def _prepare(
    weight: Any, bias: Tensor | None, settings: tuple[Any, ...], given: dict[str, tuple[Any, str]]
) -> tuple[tuple[Any, ...], tuple[bool, ...], Tensor | None]:
    """Check a call; return (states [N, D], weight, bias, ids [N], plan), needs and index.

    Needs says whether the first three need a gradient, index which tokens a mask has kept.
    """
    weight, bias = check.head(weight, bias)
    check.shapes(**given, weight=(weight, "V D"), bias=(bias, "V?"))
    hidden, ids, mask = (given[name][0] for name in ("hidden", "ids", "mask"))
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise TypeError(f"hidden and weight are {hidden.dtype} and {weight.dtype}, must be floats")
    soft_cap, temperature, chunk_size, tile_bytes = settings
    check.number("temperature", temperature, above=0)
    check.number("soft_cap", 1.0 if soft_cap is None else soft_cap, above=0)
    check.integer("chunk_size", 1 if chunk_size is None else chunk_size)
    check.integer("tile_bytes", 1 if tile_bytes is None else tile_bytes)
    kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else check.mask("mask", mask)
    check.ids("ids", ids.masked_fill(~kept, 0).cpu(), len(weight))
    known = not isinstance(ids, fake_tensor.FakeTensor)  # a fake tensor has no values
    index = kept.reshape(-1).nonzero()[:, 0] if known and not kept.all() else None
    states, chosen = _flat(hidden, index, hidden.shape[-1]), _flat(ids, index).long()
    call = states, weight, bias, chosen, _Plan(states, weight, settings)
    trained = torch.is_grad_enabled()
    return call, tuple(trained and x is not None and x.requires_grad for x in call[:3]), index


def _flat(values: Tensor, index: Tensor | None, *shape: int) -> Tensor:
    values = values.reshape(-1, *shape)
    return values if index is None else values.index_select(0, index)


def _unflat(values: Tensor, index: Tensor | None, shape: torch.Size) -> Tensor:
    if index is not None:
        values = values.new_zeros(shape.numel()).index_copy(0, index, values)
    return values.view(shape)


def checkpointed_log_probs(
    hidden: Tensor,
    weight: Tensor | nn.Module,
    ids: Tensor,
    chunk_size: int = 1024,
    *,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Return log p(id) [B, T] in nats, the logits of `chunk_size` positions alive at a time.

    The backward pass computes each chunk again. The arguments are those of `fused_log_probs`.
    """
    given = {"hidden": (hidden, "B T D"), "ids": (ids, "B T"), "mask": (None, "B T?")}
    (_, weight, bias, *_), *_ = _prepare(weight, bias, (soft_cap, 1.0, None, None), given)
    size = check.integer("chunk_size", chunk_size)
    chunks = zip(hidden.split(size, 1), ids.split(size, 1), strict=True)
    again = {"use_reentrant": False, "bias": bias, "soft_cap": soft_cap or 0.0}
    return torch.cat([checkpoint(_head_log_probs, h, weight, i, **again) for h, i in chunks], 1)


def _mixed(x: Tensor) -> bool:
    return x.is_cuda  # torch.mm(bf16, bf16, out_dtype=float32)


def _factors(matrix: Tensor, plan: _Plan, dtype: torch.dtype, size: int) -> Callable[..., Tensor]:
    """Return a function from a span of up to `size` rows to them in dtype, rounded to plan.low."""
    if len(matrix) <= size or matrix.dtype == plan.low == dtype:
        return matrix.to(plan.low).to(dtype).__getitem__
    # In one buffer until the next span: a fresh tensor would cost more than the conversion.
    buffer = matrix.new_empty(size, matrix.shape[1], dtype=dtype)
    rows = lru_cache(1)(lambda i, j: buffer[: j - i].copy_(matrix[i:j].to(plan.low)))
    return lambda span: rows(span.start, span.stop)


def _multiply(out: Tensor, left: Tensor, right: Tensor, add: bool = False) -> Tensor:
    """Compute out (+)= left @ right. A CPU rounds a product of bf16 factors, then adds."""
    if left.dtype != out.dtype and not (_mixed(left) and out.dtype == torch.float32):
        product = torch.mm(left, right)
        return out.add_(product) if add else out.copy_(product)
    mixed = {} if left.dtype == out.dtype else {"out_dtype": out.dtype}
    # not addmm_: PyTorch's counter of operations does not see that one; nor addmm with out_dtype
    args = (out, left, right) if add else (left, right)
    return (torch.addmm if add else torch.mm)(*args, out=out, **mixed)


_LOCK, _running = threading.Lock(), []  # what each running head is to restore


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


class _Head:
    """A fused head at work: its logits, a tile [t, v] at a time.

    Tiles of the first tokens stay in `kept` [K, V], as its rows `source` if tokens were left out.
    """

    def __init__(self, call: tuple[Any, ...], kept: Tensor, source: Tensor | None = None) -> None:
        states, self.weight, bias, self.ids, self.plan = call
        weight, plan, rows, cols = self.weight, self.plan, self.plan.rows, self.plan.cols
        self.kept, self.source, self.held = kept, source, len(kept if source is None else source)
        self.bias = None if bias is None else bias.to(plan.acc)
        self.limit = plan.scale * (plan.soft_cap or 1.0)
        self.vocabulary = plan.spans(0, len(weight), cols)
        self.tokens = plan.spans(0, self.held, rows) + plan.spans(self.held, len(states), rows)
        # Few tokens are converted once; many, tile by tile, or the copy would grow with them.
        whole = rows if len(states) > 4 * rows else len(states)
        kinds = plan.low if _mixed(states) else plan.acc, plan.low  # for the logits, for gradients
        self.states, self.low_states = (_factors(states, plan, kind, whole) for kind in kinds)
        self.words, self.low_words = (_factors(weight, plan, kind, cols) for kind in kinds)
        self.buffer = kept.new_empty(rows * cols)

    def tile(self, tokens: slice, words: slice) -> Tensor:
        shape = tokens.stop - tokens.start, words.stop - words.start
        return self.buffer[: math.prod(shape)].view(shape)

    def block(self, words: slice) -> Tensor:
        """Return the tiles [K, v] that stay; tile after tile, each lies in one piece."""
        count = len(self.kept)
        return self.kept.view(-1)[count * words.start : count * words.stop].view(count, -1)

    def logits(self, tokens: slice, words: slice, out: Tensor) -> Tensor:
        """Compute a tile of logits, capped, divided by the temperature."""
        _multiply(out, self.states(tokens), self.words(words).T)
        if self.bias is not None:
            out.add_(self.bias[words])
        if self.plan.soft_cap is not None:
            out.div_(self.plan.soft_cap).tanh_()
        return out if self.limit == 1.0 else out.mul_(self.limit)

    def bend(self, logits: Tensor) -> Tensor | None:
        """Return the derivative of capped logits by those under the cap, 1 - tanh^2, if capped."""
        if self.plan.soft_cap is None:
            return None
        return torch.square(logits).mul_(-(self.limit**-2)).add_(1.0)

    def place(self, tokens: slice, words: slice) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return where in the tile each id [t] lies, and whether it lies there at all."""
        column = self.ids[tokens] - words.start
        nearest = column.clamp(0, words.stop - words.start - 1)
        return (torch.arange(len(column), device=column.device), nearest), nearest == column

    def chosen_slope(self, state: Tensor, slopes: Tensor) -> Tensor:
        """Return the derivative of the loss by the chosen logits [N]."""
        (top, total, logp, entropy), (grad, *more) = state, slopes
        slope = grad * logp.expm1()
        for grad_entropy in more:
            slope += grad_entropy * logp.exp() * (logp + entropy)
        bent = self.bend(top + (total.log() + logp))
        return slope if bent is None else slope * bent

    def add_chosen(self, grad_h: Tensor, slope: Tensor) -> None:
        """Add what the chosen logits contribute to the gradient of the states."""
        for tokens in self.tokens:
            rows = self.weight.index_select(0, self.ids[tokens]).to(self.plan.low)
            grad_h[tokens].addcmul_(slope[tokens, None], rows.to(grad_h.dtype))


def _absorb(tile: Tensor, place: tuple[Any, Tensor], state: Tensor, moment: bool = False) -> Tensor:
    """Fold a tile of logits into `state`, make it exp(tile - maximum), return the sums' factor."""
    (top, total, chosen, first), (index, inside) = state, place
    chosen.copy_(torch.where(inside, tile[index], chosen))
    higher = torch.maximum(top, tile.amax(1))
    drop = top - higher
    tile.sub_(higher[:, None])
    if moment:
        first.add_(total * drop).mul_(drop.exp()).add_((tile.exp() * tile).sum(1))
    total.mul_(drop.exp_()).add_(tile.exp_().sum(1))
    top.copy_(higher)
    return drop


def _tile_slopes(tile: Tensor, state: Tensor, slopes: Tensor) -> None:
    """Turn a tile of logits [t, v] into the derivative of the loss by those not chosen.

    slopes [1, t] or [2, t] are -1/temperature times the gradients by log-prob, and by entropy.
    """
    (top, total, _, entropy), (grad, *more) = state, slopes
    tile.sub_(top[:, None])
    slope = (grad / total)[:, None]
    for grad_entropy in more:
        shift = entropy - total.log()
        slope = (tile + shift[:, None]).mul_((grad_entropy / total)[:, None]).add_(slope)
    tile.exp_().mul_(slope)


def _set_chosen(tile: Tensor, place: tuple[Any, Tensor], value: Tensor | float) -> None:
    """Overwrite the entry of each id that lies in the tile; value is [t] or one number."""
    index, inside = place
    tile[index] = torch.where(inside, value, tile[index]).to(tile.dtype)


def _scan(head: _Head, entropy: bool = False, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return maximum, sum, log-prob, entropy [4, N], and the tiles' maxima so far [tiles, K].

    To mean [N, D] the rows of the weight that were not chosen are added, times probability * sum.
    """
    state = head.buffer.new_zeros(4, len(head.ids))  # maximum, sum, chosen logit, first moment
    state[0] = torch.finfo(state.dtype).min
    tops = head.buffer.new_empty(-(-len(head.weight) // head.plan.cols), head.held)
    for number, words in enumerate(head.vocabulary):
        for tokens in head.tokens:
            stays = tokens.stop <= head.held
            tile = head.block(words)[tokens] if stays else head.tile(tokens, words)
            place, bent = head.place(tokens, words), head.bend(head.logits(tokens, words, tile))
            drop = _absorb(tile, place, state[:, tokens], entropy)
            if bent is not None:
                tile.mul_(bent)
            if mean is not None:
                _set_chosen(tile, place, 0.0)
                out = mean[tokens].mul_(drop[:, None])
                _multiply(out, tile.to(head.plan.low), head.low_words(words), add=True)
        tops[number] = state[0, : head.held]
    top, total, chosen, first = state
    log_total = total.log()
    # Not chosen - (top + log_total): that sum is large, and its rounding error with it.
    chosen.sub_(top).sub_(log_total)
    first.div_(-total).add_(log_total)
    return state, tops


def _scan_back(head: _Head, state: Tensor, tops: Tensor, slopes: Tensor, grads: Any) -> None:
    """Add to the gradients by states, weight and bias; slopes as in `_tile_slopes`."""
    grad_h, grad_w, grad_b = grads
    chosen = head.chosen_slope(state, slopes)
    many = grad_w is not None and grad_w.dtype != head.plan.acc and len(head.tokens) > 1
    sums = state.new_empty(head.plan.cols if many else 0, head.weight.shape[1])
    for number, words in enumerate(head.vocabulary):
        out = sums[: words.stop - words.start].zero_() if many or grad_w is None else grad_w[words]
        for tokens in head.tokens:
            tile, place = head.tile(tokens, words), head.place(tokens, words)
            if tokens.stop <= head.held:
                rows = tokens if head.source is None else head.source[tokens]
                fade = (tops[number, tokens] - state[0, tokens]).exp_()
                factor = fade * (slopes[0, tokens] / state[1, tokens])
                torch.mul(head.block(words)[rows], factor[:, None], out=tile)
            else:
                bent = head.bend(head.logits(tokens, words, tile))
                _tile_slopes(tile, state[:, tokens], slopes[:, tokens])
                if bent is not None:
                    tile.mul_(bent)
            _set_chosen(tile, place, 0.0)
            if grad_b is not None:
                grad_b[words] += tile.sum(0)
            tile = tile.to(head.plan.low)
            if grad_h is not None:
                _multiply(grad_h[tokens], tile, head.low_words(words), add=True)
            if grad_w is not None:
                _set_chosen(tile, place, chosen[tokens])
                _multiply(out, tile.T, head.low_states(tokens), add=True)
        if many:  # they were added in float32
            grad_w[words] = out
    if grad_h is not None:
        head.add_chosen(grad_h, chosen)
    if grad_b is not None:
        grad_b.index_add_(0, head.ids, chosen)


class _FusedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, entropy: bool, kept: int, *call: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, plan = call
        room = call[1].new_empty(kept, len(call[1]), dtype=plan.acc)
        with _products(plan, room.device):
            state, tops = _scan(_Head(call, room), entropy)
        ctx.save_for_backward(*tensors, state, tops, room)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return state[2].clone(), state[3].clone() if entropy else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        states, weight, bias, ids, state, tops, kept = ctx.saved_tensors
        plan, count, source = ctx.plan, len(ids), None
        grad = torch.zeros_like(state[0]) if grad is None else grad
        slopes = torch.stack([grad] if grad_entropy is None else [grad, grad_entropy]) * -plan.scale
        if not isinstance(grad, fake_tensor.FakeTensor):  # which has no values: every token counts
            live = slopes.abs().sum(0).nonzero()[:, 0]
            if len(live) < count:
                source = live[live < len(kept)]
                states, ids, state, tops = states[live], ids[live], state[:, live], tops[:, source]
                slopes = slopes[:, live]
        leaves, kinds = (states, weight, bias), (plan.acc, weight.dtype, plan.acc)
        made = zip(leaves, kinds, ctx.needs_input_grad[2:5], strict=True)
        grads = [torch.zeros_like(leaf, dtype=kind) if need else None for leaf, kind, need in made]
        with _products(plan, grad.device):
            call = states, weight, bias, ids, plan
            _scan_back(_Head(call, kept, source), state, tops, slopes, grads)
        pairs = zip(grads, leaves, strict=True)
        grad_h, *others = (made if made is None else made.to(leaf.dtype) for made, leaf in pairs)
        if grad_h is not None and source is not None:
            grad_h = grad_h.new_zeros(count, grad_h.shape[1]).index_copy_(0, live, grad_h)
        return None, None, grad_h, *others, None, None


def fused_log_probs(
    hidden: Tensor,
    weight: Tensor | nn.Module,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    entropy: bool = False,
    chunk_size: int | None = None,
    tile_bytes: int | None = None,
    keep_bytes: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return log p(id) [...] in nats without ever holding its logits; with `entropy`, a pair.

    Four matrix products, forward and backward: logits, the same again, and one for each gradient.
    Beyond the gradients, memory depends on neither tokens nor vocabulary, but for a few numbers per
    token, the float32 gradient of `hidden` and, with a mask or zero gradients, a copy of the states
    that count. Computed and returned in at least float32.

    Args:
        hidden: the states that the output head reads, [..., D]. A head that multiplies its logits
            by a number takes them multiplied by it.
        weight: of the head, [V, D], or the `nn.Linear` itself, with its bias. A module that does
            more, as with an adapter, is refused; its bare weight would leave the adapter out.
        ids: the chosen tokens [...], scored by the state at the same place.
        bias: of the head, [V].
        soft_cap: c, if the head makes c * tanh(logit / c) of its logits, as Gemma 2 does.
        temperature: the logits are divided by it.
        mask: [...]; where it is 0 nothing is computed, the result is 0, and the id may be anything.
        entropy: also return the entropy of each token's distribution, with its gradient.
        chunk_size: tokens per tile; by default as many as vocabulary entries, unless D is large.
        tile_bytes: memory of a tile of float32 logits; 8 MiB, on CUDA 16 MiB.
        keep_bytes: memory for logits that wait for the backward pass, so that it need not compute
            them again: those of as many tokens as fit. None with `entropy`.
    """
    keep_bytes = check.integer("keep_bytes", keep_bytes, 0)
    given = {"hidden": (hidden, "... D"), "ids": (ids, "..."), "mask": (mask, "...?")}
    settings = soft_cap, temperature, chunk_size, tile_bytes
    call, needs, index = _prepare(weight, bias, settings, given)
    states, weight, *_, plan = call
    kept = min(keep_bytes // (plan.acc.itemsize * len(weight)), len(states))
    logp, entropies = _FusedLogProbs.apply(
        entropy, kept if any(needs) and not entropy else 0, *call
    )
    logp = _unflat(logp, index, ids.shape)
    return (logp, _unflat(entropies, index, ids.shape)) if entropy else logp


@contextlib.contextmanager
def _inner_graph() -> Iterator[None]:
    """A graph of its own, in evaluation too, that a checkpoint around the head does not see."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), hooks:
        yield


class _Ready(torch.autograd.Function):
    """A loss whose gradients by the leaves are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, grads: list[Tensor | None], *leaves: Tensor) -> Tensor:
        pairs = zip(grads, leaves, strict=True)
        ctx.save_for_backward(
            *(made if made is None else made.to(leaf.dtype) for made, leaf in pairs)
        )
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A plain loss.backward() has 1. Looking costs nothing on a CPU, and spares a copy.
        ready = {1} if grad.device.type == "cpu" and type(grad) is Tensor and grad == 1 else {}
        made = enumerate(ctx.saved_tensors)
        scaled = (x if x is None or i in ready else (x * grad).to(x.dtype) for i, x in made)
        return None, None, *scaled


def fused_policy_loss(
    hidden: Tensor,
    weight: Tensor | nn.Module,
    ids: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    old_logp: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    norm_const: float | Tensor | None = None,
    loss_agg_mode: str = "token_mean",
    ref_logp: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_kind: str = "k3",
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    chunk_size: int = 512,
    tile_bytes: int | None = None,
    return_logp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return a policy-gradient loss and leave its gradients ready, in one pass over the head.

    Three matrix products: `backward` only multiplies the gradients by what comes in, so there is no
    second derivative, and no training in float16, whose loss scale arrives too late. Log-ratios are
    clamped to -20 and 20, as in chapter 4; beyond, their gradient is 0.

    Args:
        hidden, weight, ids, bias, soft_cap, temperature, tile_bytes: as in `fused_log_probs`.
        advantages, clip_low, clip_high, loss_agg_mode: as in `clipped_surrogate_loss`.
        mask: [B, T], 1 on the policy's tokens; the others cost nothing. All of them if None.
        old_logp: log-probs [B, T] of the policy that sampled. None: REINFORCE, -advantage * log p.
        norm_const: counted over all microbatches and ranks. None is right for a single one only.
        ref_logp, kl_coef, kl_kind: log-probs [B, T] of a reference, and weight and kind of the KL
            term towards it: k2 descends KL(p, ref), k3 KL(ref, p).
        chunk_size: tokens whose logits are held at a time; with a frozen head, a tile of them.
        return_logp: also return the log-probs [B, T], detached, 0 where masked.
    """
    if check.number("kl_coef", kl_coef) and ref_logp is None:
        raise ValueError(f"kl_coef = {kl_coef} needs ref_logp, the log-probs of the reference")
    per_token = check.tensor("advantages", advantages).ndim > 1
    given = {"hidden": (hidden, "B T D"), "ids": (ids, "B T"), "mask": (mask, "B T?")}
    given |= {"old_logp": (old_logp, "B T?"), "ref_logp": (ref_logp, "B T?")}
    given["advantages"] = advantages, "B T" if per_token else "B"
    settings = soft_cap, temperature, chunk_size, tile_bytes
    call, needs, index = _prepare(weight, bias, settings, given)
    states, weight, bias, chosen, plan = call
    if any(needs) and plan.low == torch.float16:
        raise TypeError(
            "float16 gradients would round to 0 before a loss scaler acts: use bfloat16"
        )
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    with _inner_graph():  # the loss is linear in the values: its gradient holds their weights
        values = torch.zeros(mask.shape, dtype=plan.acc, device=mask.device, requires_grad=True)
        norm_const = norm_const.clone() if isinstance(norm_const, Tensor) else norm_const
        mean = aggregate_loss(values, mask.clone(), loss_agg_mode, norm_const)
        weights = torch.autograd.grad(mean, values)[0]
    advantages = advantages if per_token else advantages[:, None].expand(ids.shape)
    given = advantages, old_logp, ref_logp, weights
    given = (x if x is None else _flat(x, index).detach().to(plan.acc) for x in given)
    advantages, old, ref, weights = given
    clip = {"clip_low": clip_low, "clip_high": clip_high}
    chunks, logp = plan.spans(0, len(states), plan.rows), torch.empty_like(weights)
    kinds = states.dtype, plan.acc if len(chunks) > 1 else weight.dtype, plan.acc
    made = zip(call, kinds, needs, strict=False)  # one chunk can be rounded at once
    grads = [torch.zeros_like(leaf, dtype=kind) if need else None for leaf, kind, need in made]
    # The tiles of a chunk wait for the loss only where the weight or the bias is trained.
    room = weights.new_empty(plan.rows if any(needs[1:]) else 0, len(weight))
    total = weights.new_zeros(())
    with torch.no_grad(), _products(plan, ids.device):
        for tokens in chunks:
            part = states[tokens], weight, bias, chosen[tokens], plan
            head = _Head(part, room[: len(part[0])])
            mean = room.new_zeros(part[0].shape) if needs[0] else None
            state, tops = _scan(head, mean=mean)
            logp[tokens] = state[2]
            with _inner_graph():  # a weight scales the advantage, so it scales the loss
                leaf = state[2].clone().requires_grad_()
                scaled = (advantages[tokens] * weights[tokens])[None]
                rest = scaled, torch.ones_like(scaled), "constant", 1.0
                if old is None:
                    loss = reinforce_loss(leaf[None], *rest)
                else:
                    loss = clipped_surrogate_loss(leaf[None], old[None, tokens], *rest, **clip)
                if ref is not None:
                    loss += kl_coef * (kl_estimate(leaf, ref[tokens], kl_kind) @ weights[tokens])
                slopes = torch.autograd.grad(loss, leaf)[0][None] * -plan.scale
            total += loss.detach()
            if mean is not None:
                mean.mul_((slopes[0] / state[1])[:, None])
                head.add_chosen(mean, head.chosen_slope(state, slopes))
                grads[0][tokens] = mean
            if len(room):
                _scan_back(head, state, tops, slopes, (None, *grads[1:]))
    room = head = None  # before the gradients are rounded
    loss = _Ready.apply(total, grads, *call[:3])
    return (loss, _unflat(logp, index, ids.shape)) if return_logp else loss


def _head_results(
    fn: Callable[..., Any], leaves: Iterable[Tensor], ids: Tensor, upstream: Tensor
) -> list[Any]:
    """Return what a head gives, and the gradients of hidden and weight."""
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = fn(*leaves, ids)
    if isinstance(out, Tensor) and out.shape == ids.shape and out.requires_grad:
        out.backward(upstream.to(out))
    return [out, *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def _head_values(
    fn: Callable[..., Tensor], tokens: int, dtype: torch.dtype, device: str
) -> Iterator[Finding]:
    """Compare a head with float64 on a small vocabulary, and its errors with the plain head's."""
    draws = torch.Generator().manual_seed(0)
    shapes = (1, tokens, 16), (48, 16)
    leaves = [torch.randn(*s, generator=draws).to(device, dtype) for s in shapes]
    ids = torch.randint(48, (1, tokens), generator=draws).to(device)
    upstream = torch.randn(1, tokens, generator=draws)  # as in training: signs and sizes differ
    upstream *= torch.randint(3, (1, tokens), generator=draws)  # and some are 0
    out, *grads = _head_results(fn, leaves, ids, upstream)
    shape = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
    likely = f"fn returned {shape} for ids {list(ids.shape)}"
    yield Finding(0 if shape == list(ids.shape) else math.nan, "nats", "the output", 0, "", likely)
    plain = _head_results(_head_log_probs, leaves, ids, upstream)
    exact = _head_results(_head_log_probs, [x.double() for x in leaves], ids, upstream)
    why = "4 times the error of the plain head in this type, or some last places"
    error = (out.double() - exact[0]).abs()[0].nan_to_num(math.inf, math.inf)
    places = torch.finfo(out.dtype).eps * exact[0].abs().max().item()
    allowed = 4 * max((plain[0] - exact[0]).abs().max().item(), places)
    index, likely = f"token {int(error.argmax())}", "not the log-probability of the given token"
    yield Finding(error.max().item(), "nats", index, allowed, why, likely)
    likely = "the head is cut off from the graph, or its backward pass is wrong"
    for k, name in enumerate(("hidden", "weight")):
        right = exact[1 + k]
        error, usual = (
            (x.double() - right).norm() / right.norm() for x in (grads[k], plain[1 + k])
        )
        allowed = 4 * max(usual.item(), 2 * torch.finfo(dtype).eps)
        yield Finding(error.item(), "relative", f"the gradient of {name}", allowed, why, likely)


@as_check
def head_memory_check(
    fn: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    vocab_size: int = 32_768,
    d_model: int = 256,
    tokens: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    strict: bool = False,
) -> Iterator[Finding]:
    """Check that an output head is right, and keeps no row of logits per token.

    Compares values and gradients on a small vocabulary, then memory at `tokens` and twice as many.

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
    check.integer("tokens", tokens)
    check.integer("vocab_size", vocab_size, 16 * check.integer("d_model", d_model) + 1)
    yield from _head_values(fn, tokens, dtype, device)

    def step(hidden: Tensor, weight: Tensor, ids: Tensor) -> None:
        fn(hidden, weight, ids).sum().backward()

    def peak(T: int) -> int:
        like = {"dtype": dtype, "device": "meta", "requires_grad": True}
        ids = torch.empty(1, T, dtype=torch.int64, device="meta")
        shapes = torch.empty(1, T, d_model, **like), torch.empty(vocab_size, d_model, **like)
        return peak_memory(step, *shapes, ids, device=device)

    slope = (peak(2 * tokens) - peak(tokens)) / tokens
    why = "V: one byte per word of the vocabulary; a row of logits takes 2 to 12"
    likely = "logits of all tokens are kept for the backward pass, or chunks grow with T"
    index = f"{tokens} to {2 * tokens} tokens"
    yield Finding(slope, "bytes per token", index, vocab_size, why, likely)
