# Generated from chapters/05-packing.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Padding and packing.

How much of a padded batch is waste, and what does removing it risk?
"""

import functools
import heapq
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from agentrl import check
from agentrl.rollout import Trajectory, check_trajectories

__all__ = [
    "block_mask",
    "pack_sequences",
    "packed_logits",
    "packing_bound",
    "packing_plan",
    "segment_attention",
    "segment_cumsum",
    "spread",
    "transformers_inputs",
    "unpack",
]


def block_mask(segment_ids: Tensor) -> Tensor:
    """Say who may attend to whom: [R, L] -> bool [R, 1, L, L], True where row may see column.

    A token sees its own segment up to itself. Padding sees itself alone, so that no row is empty.
    """
    L = check.shapes(segment_ids=(check.ids("segment_ids", segment_ids), "R L"))["L"]
    same = segment_ids[:, :, None] == segment_ids[:, None]  # [R, L, L]
    causal = torch.ones(L, L, dtype=torch.bool, device=segment_ids.device).tril()
    itself = torch.eye(L, dtype=torch.bool, device=segment_ids.device)
    return (same & causal & (segment_ids >= 0)[:, :, None] | itself)[:, None]


def packing_plan(
    lengths: Sequence[int] | Tensor, max_tokens: int, strategy: str = "bfd"
) -> list[list[int]]:
    """Choose which sequences share a row of `max_tokens`, so that few rows are needed.

    Sequences are placed longest first: each into the fullest row that it fits into (`bfd`, best-fit
    decreasing) or into the first one (`ffd`, first-fit decreasing), else into a new row. At most
    11/9 of the optimum and a constant (Johnson 1973). O(n log n) for n sequences.

    Returns:
        Rows of indices into `lengths`, in the order in which they were opened; inside a row the
        longest comes first. Every index occurs once.

    Raises:
        ValueError, TypeError: if a length is not an integer from 1 to `max_tokens`, or there are
            none, or the strategy is unknown.
    """
    check.one_of("strategy", strategy, ("bfd", "ffd"))
    sizes, max_tokens = _sizes(lengths, max_tokens)
    order = (sizes.max() - sizes).argsort(stable=True)
    values, counts = sizes[order].unique_consecutive(return_counts=True)
    place = _best_fit if strategy == "bfd" else _first_fit
    row_of = _as_tensor(place(values.tolist(), counts.tolist(), max_tokens))
    by_row = order[row_of.argsort(stable=True)].tolist()
    ends = row_of.bincount().cumsum(0).tolist()
    return [by_row[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _sizes(lengths: Sequence[int] | Tensor, max_tokens: int) -> tuple[Tensor, int]:
    max_tokens = check.integer("max_tokens", max_tokens)
    return _as_tensor(check.integers("lengths", lengths, max_tokens=max_tokens)), max_tokens


def _as_tensor(integers: list[int]) -> Tensor:
    """Do as `torch.tensor` does, several times as fast."""
    return torch.frombuffer(array("q", integers), dtype=torch.int64)


def _best_fit(lengths: list[int], counts: list[int], max_tokens: int) -> list[int]:
    """Return the row of each sequence, the longest first; `lengths` are distinct and fall.

    Rows with the same room are alike, and a best fit that still has room for the length is the best
    fit again. So equal lengths are placed many at a time.
    """
    row_of: list[int] = []
    rows = 0
    at: dict[int, list[int]] = {}  # room -> the rows that have it
    fits: list[int] = []  # heap of rooms that the current length fits into
    waiting: list[int] = []  # heap of the other rooms, negated: the largest first

    def put(room: int, group: list[int]) -> None:
        if room and room in at:
            at[room] += group
        elif room and group:
            at[room] = group
            heapq.heappush(waiting, -room)

    for length, count in zip(lengths, counts, strict=True):
        while waiting and -waiting[0] >= length:
            heapq.heappush(fits, -heapq.heappop(waiting))
        while count:
            room = fits[0] if fits else max_tokens
            each = room // length
            need = -(-count // each)  # rows
            if not fits:
                group = list(range(rows, rows + need))
                rows += need
            elif need < len(at[room]):
                group = at[room][-need:]
                del at[room][-need:]
            else:
                group = at.pop(heapq.heappop(fits))
            full = min(count // each, len(group))
            rest = count - full * each if full < len(group) else 0
            whole = group[:full]  # rows that take `each`
            row_of += whole if each == 1 else [row for row in whole for _ in range(each)]
            row_of += group[full:] * rest
            put(room - each * length, whole)
            put(room - rest * length, group[full:])
            count -= full * each + rest
    return row_of


def _first_fit(lengths: list[int], counts: list[int], max_tokens: int) -> list[int]:
    """Return the row of each sequence, the longest first; `lengths` are distinct and fall."""
    row_of: list[int] = []
    room: list[int] = []  # of each row
    fits: list[int] = []  # heap of rows that the current length fits into
    waiting: list[tuple[int, int]] = []  # heap of (-room, row) of the others
    for length, count in zip(lengths, counts, strict=True):
        while waiting and -waiting[0][0] >= length:
            heapq.heappush(fits, heapq.heappop(waiting)[1])
        while count:
            if not fits:
                fits.append(len(room))
                room.append(max_tokens)
            row = fits[0]
            each = min(count, room[row] // length)
            row_of += [row] * each
            count -= each
            room[row] -= each * length
            if room[row] < length:
                heapq.heappop(fits)
                heapq.heappush(waiting, (-room[row], row))
    return row_of


def packing_bound(lengths: Sequence[int] | Tensor, max_tokens: int) -> int:
    """Return a number of rows of `max_tokens` below which no plan can go.

    A function u on [0, 1] is dual feasible if numbers that sum to at most 1 have values that sum to
    at most 1. Then u(length / max_tokens), summed over all sequences, is at most the number of
    rows. The bound is the best over the three families of Fekete and Schepers 2001, and the
    identity, which gives the total number of tokens over `max_tokens`.

    Raises:
        ValueError, TypeError: as `packing_plan`.
    """
    sizes, C = _sizes(lengths, max_tokens)
    sizes, counts = sizes.unique(return_counts=True)
    tokens = sizes * counts
    best = -(-int(tokens.sum()) // C)
    for k in range(1, 33):
        # x where (k + 1) x is whole, else floor((k + 1) x) / k
        whole = (k + 1) * sizes % C == 0
        floors = int(((k + 1) * sizes // C * counts)[~whole].sum())
        best = max(best, -(-(int(tokens[whole].sum()) * k + floors * C) // (C * k)))
    half = 2 * sizes > C
    small = sizes[~half]
    for s in small[:: -(-len(small) // 512) or 1].tolist():
        fits, large = sizes >= s, sizes > C - s
        # 1 above 1 - e, 0 below e, x between, for e = s / C
        middle = int(tokens[fits & ~large].sum())
        best = max(best, int(counts[large].sum()) - (-middle // C))
        # 1 / m from e to 1/2, 0 below, 1 - floor((1 - x) / e) / m above 1/2, for m = floor(1 / e)
        value = torch.where(half, C // s - (C - sizes) // s, fits.long())
        best = max(best, -(-int((value * counts).sum()) // (C // s)))
    return max(best, int(counts[half].sum()))


def pack_sequences(trajs: Sequence[Trajectory], max_tokens: int, pad_id: int = 0) -> dict[str, Any]:
    """Put N trajectories behind one another in R rows of L = `max_tokens`; keep where each begins.

    Returns:
        On the device of the trajectories: `ids` [R, L]; `position_ids` [R, L], from 0 in each
        sequence; `segment_ids` [R, L], the number of the sequence within its row, -1 on padding;
        `action_mask` bool and `sample_logp` [R, L-1], where the entry that would predict the first
        token of the next sequence is 0; `rows`, the plan; `cu_seqlens` int32 [N+1], the boundaries
        of all sequences, row after row, in the tokens without padding, `ids[segment_ids >= 0]`.

    Raises:
        ValueError, TypeError: naming the index of a trajectory that is malformed, too long, or
            whose `sample_logp` is not finite at a policy token.
    """
    check_trajectories(trajs, min_tokens=1)  # a single token predicts nothing, but packs
    lengths = [len(traj.ids) for traj in trajs]
    rows, max_tokens = packing_plan(lengths, max_tokens), int(max_tokens)
    pad_id, device = check.integer("pad_id", pad_id, None), trajs[0].ids.device
    spare = [max_tokens - sum(lengths[i] for i in row) for row in rows]
    sizes = torch.tensor([0, *(lengths[i] for row in rows for i in row)], device=device)

    @torch.no_grad()
    def lay_out(values: Sequence[Tensor], value: float, gap: int = 0) -> Tensor:
        """All pieces in one copy: the values of each sequence, its gap, and what a row lacks."""
        dtype = functools.reduce(torch.promote_types, {v.dtype for v in values})
        filling, pieces = values[0].new_full((max_tokens,), value, dtype=dtype), []
        between = filling[:gap]
        for row, padding in zip(rows, spare, strict=True):
            for i in row:
                pieces += [values[i], between] if gap else [values[i]]
            pieces.append(filling[:padding])
        return torch.cat(pieces).view(len(rows), max_tokens)

    ramp = torch.arange(max_tokens, device=device)
    number = {i: ramp[k : k + 1] for row in rows for k, i in enumerate(row)}  # within the row
    # After each sequence comes one 0, since its last token predicts nothing here.
    masks = lay_out([traj.action_mask for traj in trajs], 0, 1).bool()
    logps = lay_out([traj.sample_logp for traj in trajs], 0.0, 1)
    if (masks & ~logps.isfinite().to(masks.device)).any():
        for i, traj in enumerate(trajs):
            mask = traj.action_mask.to(logps.device, torch.bool)
            check.finite(f"trajs[{i}].sample_logp", traj.sample_logp, where=mask)
    return {
        "ids": lay_out([traj.ids for traj in trajs], pad_id),
        "position_ids": lay_out([ramp[:n] for n in lengths], 0),
        "segment_ids": lay_out([number[i].expand(n) for i, n in enumerate(lengths)], -1),
        "action_mask": masks[:, :-1],
        "sample_logp": logps[:, :-1],
        "rows": rows,
        "cu_seqlens": sizes.cumsum(0, dtype=torch.int32),
    }


def unpack(values: Tensor, packed: dict[str, Any]) -> list[Tensor]:
    """Cut packed values into those of each trajectory, in the order in which they were given.

    [R, L, ...], values of tokens, gives N views [T, ...]; [R, L-1, ...], values of predictions,
    gives N views [T-1, ...].

    Raises:
        ValueError, TypeError: if `values` has another shape or is no tensor.
    """
    R, L = packed["ids"].shape
    if check.tensor("values", values).shape[:2] not in ((R, L), (R, L - 1)):
        shape = list(values.shape)
        raise ValueError(f"values {shape} must be [{R}, {L}, ...] or [{R}, {L - 1}, ...]")
    fewer = L - values.shape[1]
    lengths = iter(packed["cu_seqlens"].diff().tolist())
    out: dict[int, Tensor] = {}
    for row, indices in enumerate(packed["rows"]):
        start = 0
        for i in indices:
            length = next(lengths)
            out[i] = values[row, start : start + length - fewer]
            start += length
    return [out[i] for i in range(len(out))]


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], **options: Any
) -> Tensor:
    """Attend causally within each segment and compute nothing else: [..., N, D] -> [..., N, D].

    Args:
        lengths: of the segments, which stand one after another; they sum to N.
        **options: for `scaled_dot_product_attention`, such as `scale` and `enable_gqa`.
    """
    sizes = check.integers("lengths", lengths)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if check.tensor(name, x).ndim < 2 or x.shape[-2] != sum(sizes):
            raise ValueError(
                f"{name} {list(x.shape)} must be [..., {sum(sizes)}, D], as lengths sum"
            )
    parts = zip(*(x.split(sizes, -2) for x in (q, k, v)), strict=True)
    return torch.cat(
        [F.scaled_dot_product_attention(*part, is_causal=True, **options) for part in parts], -2
    )


_FOR_OTHERS = "a transformers model takes transformers_inputs instead"
_USE_MASK = f"use attention='mask'; {_FOR_OTHERS}"


class _SegmentAttention(TorchFunctionMode):
    """Answers a model's calls of `scaled_dot_product_attention` with `segment_attention`."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.lengths, self.calls = lengths, 0
        self.unseen = False  # by autograd

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        self.unseen |= not torch.is_grad_enabled()
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,  # scale, enable_gqa
    ) -> Tensor:
        if attn_mask is not None or dropout_p or not (is_causal or query.shape[-2] == 1):
            given = "no" if attn_mask is None else "a"
            asked = f"{given} mask, dropout_p = {dropout_p}, is_causal = {is_causal}"
            raise RuntimeError(
                f"the model does not just attend causally, but with {asked}: {_USE_MASK}"
            )
        return segment_attention(query, key, value, self.lengths, **options)


def packed_logits(
    model: nn.Module,
    ids: Tensor,
    position_ids: Tensor,
    segment_ids: Tensor,
    *,
    attention: str = "auto",
) -> Tensor:
    """Return the logits of packed rows, each sequence as if it were alone: [R, L] -> [R, L, V].

    Args:
        model: called with `ids`, `position_ids` and, for `mask`, a boolean `attention_mask`, as
            `TinyAgent`; returns the logits. A `transformers` model, whose eager attention would
            add such a mask as 0 and 1, takes `transformers_inputs` instead.
        attention: `mask` gives the model a block-diagonal causal mask, whose cost grows with R L^2.
            `segments` runs the tokens without the padding in one row and each attention segment by
            segment; logits at padding are then 0. It depends on values, so `torch.compile` around
            this function leaves it out of the graph; a model compiled by itself stays compiled.
            `auto` is `mask` up to 256 tokens a row, else `segments`.

    Raises:
        ValueError, TypeError: if an argument has another shape or kind, or the model does not
            return a tensor.
        RuntimeError: for `segments` if the model does not attend causally, without mask or
            dropout, by `torch.nn.functional.scaled_dot_product_attention`, or if checkpoints make
            it attend again: reentrant ones at once, others in the backward pass.
    """
    check.one_of("attention", attention, ("auto", "mask", "segments"))
    rows = {"ids": ids, "position_ids": position_ids, "segment_ids": segment_ids}
    R, L = check.shapes(**{k: (check.ids(k, x), "R L") for k, x in rows.items()}).values()
    if attention == "mask" or (attention == "auto" and L <= 256):
        logits = model(ids, position_ids=position_ids, attention_mask=block_mask(segment_ids))
        if not isinstance(logits, Tensor):
            raise TypeError(f"the model returned {type(logits).__name__}, no logits; {_FOR_OTHERS}")
        return logits
    if torch.compiler.is_compiling():
        return torch.compiler.disable(packed_logits)(model, **rows, attention="segments")
    real = segment_ids >= 0
    number = segment_ids + L * torch.arange(R, device=ids.device)[:, None]  # differs between rows
    lengths = number[real].unique_consecutive(return_counts=True)[1].tolist()
    with _SegmentAttention(lengths) as mode:
        logits = model(ids[real][None], position_ids=position_ids[real][None])[0]
    if not mode.calls:
        raise RuntimeError(f"the model never called scaled_dot_product_attention: {_USE_MASK}")
    if mode.unseen and _recomputes(logits.grad_fn):
        why = "reentrant checkpoints attend again in the backward pass, without these segments"
        raise RuntimeError(f"{why}: {_USE_MASK}")
    return logits.new_zeros(R, L, logits.shape[-1]).masked_scatter(real[..., None], logits)


def _recomputes(node: Any) -> bool:
    """Tell whether a reentrant checkpoint is behind this node of the graph."""
    waiting, seen = [node], {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        if "CheckpointFunction" in type(node).__name__:
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False


def transformers_inputs(
    packed: dict[str, Any], dtype: torch.dtype = torch.float32, *, boundaries: bool = False
) -> dict[str, Any]:
    """Turn packed rows into keyword arguments of a causal language model of `transformers`.

    There is no cache: with one, `transformers` would take the rows for a text that goes on.

    Args:
        dtype: of the model.
        boundaries: False gives rows [R, L] and a 4-D mask, for the `eager` and `sdpa` attention.
            True gives one row [1, N] without padding and its `cu_seq_lens`, for attention that
            reads them, such as `flash_attention_2`.
    """
    given = {"input_ids": packed["ids"], "position_ids": packed["position_ids"]}
    if boundaries:
        real, cu = packed["segment_ids"] >= 0, packed["cu_seqlens"]
        given = {key: value[real][None] for key, value in given.items()}
        given |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), cu)
        given |= dict.fromkeys(("max_length_q", "max_length_k"), int(cu.diff().max()))
    else:
        mask = block_mask(packed["segment_ids"])
        # Additive, since the eager attention adds whatever it is given: True would count as 1.
        additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        given["attention_mask"] = additive.masked_fill(~mask, torch.finfo(dtype).min)
    return {**given, "use_cache": False}


def spread(values: Tensor, packed: dict[str, Any]) -> Tensor:
    """Give each prediction the value of its trajectory, such as an advantage: [N] -> [R, L-1].

    Raises:
        ValueError, TypeError: if `values` is no tensor with one value for each trajectory.
    """
    lengths = packed["cu_seqlens"].diff()
    if check.tensor("values", values).shape != lengths.shape:
        raise ValueError(f"values {list(values.shape)} do not fit {len(lengths)} trajectories")
    order = [i for row in packed["rows"] for i in row]
    real = packed["segment_ids"] >= 0
    out = values.new_zeros(real.shape).to(real.device)
    out[real] = values.to(real.device)[order].repeat_interleave(lengths)
    return out[:, :-1]


def segment_cumsum(values: Tensor, segment_ids: Tensor) -> Tensor:
    """Sum over time from the start of each segment: [R, L, ...] -> the same, in float32 or better.

    The smallest layer with a state. One pass over time that drops the state at each boundary, so
    that nothing of another segment is ever added, not even to be subtracted again.
    """
    values = check.widened(check.tensor("values", values))
    if check.ids("segment_ids", segment_ids).ndim != 2 or values.shape[:2] != segment_ids.shape:
        shapes = f"{list(values.shape)} and segment_ids {list(segment_ids.shape)}"
        raise ValueError(f"values {shapes} must be [R, L, ...] and [R, L]")
    previous = F.pad(segment_ids, (1, 0), value=-1)[:, :-1]
    starts = (segment_ids != previous) | (segment_ids < 0)  # [R, L]; padding keeps no state
    state, out = torch.zeros_like(values[:, 0]), []
    for t in range(values.shape[1]):
        start = starts[:, t].view(-1, *[1] * (values.ndim - 2))
        state = torch.where(start, 0, state) + values[:, t]
        out.append(state)
    return torch.stack(out, 1)
