# Generated from chapters/05-packing.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Padding and packing.

How much of a padded batch is waste, and what does removing it risk?
"""

import functools
import heapq
import operator
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from agentrl.rollout import Trajectory, _check_sample_logp, check_trajectories

__all__ = [
    "block_mask",
    "pack_sequences",
    "packed_logits",
    "packing_bound",
    "packing_plan",
    "prefix_tree_tokens",
    "segment_attention",
    "segment_cumsum",
    "spread",
    "transformers_inputs",
    "unpack",
]


def packing_plan(
    lengths: Sequence[int] | Tensor, max_tokens: int, strategy: str = "bfd"
) -> list[list[int]]:
    """Choose which sequences share a row, so that few rows are needed.

    Sequences are placed longest first: each into the fullest row that it fits into (`bfd`, best-fit
    decreasing) or into the first one (`ffd`, first-fit decreasing), else into a new row. At most
    11/9 of the optimum and a constant (Johnson 1973). O(n log n) for n sequences.

    Args:
        lengths: tokens of each sequence, at least 1.
        max_tokens: tokens that a row holds.
        strategy: `bfd` or `ffd`.

    Returns:
        Rows of indices into `lengths`, in the order in which they were opened; inside a row the
        longest comes first. Every index occurs once.

    Raises:
        TypeError: if a length or `max_tokens` is no integer.
        ValueError: for no lengths, a length below 1 or above `max_tokens`, an unknown strategy.
    """
    if strategy not in ("bfd", "ffd"):
        raise ValueError(f"strategy must be 'bfd' or 'ffd', got {strategy!r}")
    sizes, max_tokens = _sizes(lengths, max_tokens)
    sizes, order = sizes.sort(descending=True, stable=True)
    values, counts = sizes.unique_consecutive(return_counts=True)
    place = _best_fit if strategy == "bfd" else _first_fit
    row_of = torch.frombuffer(
        place(values.tolist(), counts.tolist(), max_tokens), dtype=torch.int64
    )
    by_row = order[row_of.argsort(stable=True)].tolist()
    ends = row_of.bincount().cumsum(0).tolist()
    return [by_row[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} = {value!r} is no integer") from None


def _sizes(lengths: Sequence[int] | Tensor, max_tokens: int) -> tuple[Tensor, int]:
    """Check both; return the lengths as an int64 tensor [n] on the CPU, and `max_tokens`."""
    max_tokens = _integer("max_tokens", max_tokens)
    if len(lengths) == 0:
        raise ValueError("lengths is empty: there is nothing to pack")
    if isinstance(lengths, Tensor):
        lengths = lengths.tolist()
    try:
        sizes = torch.frombuffer(array("q", lengths), dtype=torch.int64)
    except (TypeError, OverflowError):
        whole = [_integer(f"lengths[{i}]", n) for i, n in enumerate(lengths)]
        sizes = torch.tensor([max(0, min(n, 2**63 - 1)) for n in whole])
    if sizes.min() < 1 or sizes.max() > max_tokens:
        index = int(((sizes < 1) | (sizes > max_tokens)).nonzero()[0])
        reason = "is below 1" if sizes[index] < 1 else f"exceeds max_tokens = {max_tokens}"
        raise ValueError(f"lengths[{index}] = {int(lengths[index])} {reason}")
    return sizes, max_tokens


def _best_fit(lengths: list[int], counts: list[int], max_tokens: int) -> array:
    """Return the row of each sequence, the longest first; `lengths` are distinct and fall.

    Rows with the same room are alike, and a best fit that still has room for the length is the best
    fit again. So equal lengths are placed many at a time.
    """
    row_of, rows = array("q"), 0
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
            row_of.extend([row for row in group[:full] for _ in range(each)])
            row_of.extend(group[full:] * rest)
            put(room - each * length, group[:full])
            put(room - rest * length, group[full:])
            count -= full * each + rest
    return row_of


def _first_fit(lengths: list[int], counts: list[int], max_tokens: int) -> array:
    """Return the row of each sequence, the longest first; `lengths` are distinct and fall."""
    row_of = array("q")
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
            row_of.extend([row] * each)
            count -= each
            room[row] -= each * length
            if room[row] < length:
                heapq.heappop(fits)
                heapq.heappush(waiting, (-room[row], row))
    return row_of


def packing_bound(lengths: Sequence[int] | Tensor, max_tokens: int) -> int:
    """Return a number of rows below which no plan can go.

    A function u on [0, 1] is dual feasible if numbers that sum to at most 1 have values that sum to
    at most 1. Then u(length / max_tokens), summed over all sequences, is at most the number of
    rows. The bound is the best over the three families of Fekete and Schepers 2001, and the
    identity, which gives the total number of tokens over `max_tokens`.

    Args:
        lengths: tokens of each sequence, at least 1.
        max_tokens: tokens that a row holds.

    Raises:
        TypeError, ValueError: as `packing_plan`.
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
    small = sizes[2 * sizes <= C]
    for s in small[:: -(-len(small) // 512) or 1].tolist():
        large = sizes > C - s
        # 1 above 1 - e, 0 below e, x between, for e = s / C
        middle = int(tokens[(sizes >= s) & ~large].sum())
        best = max(best, int(counts[large].sum()) - (-middle // C))
        # 1 / m from e to 1/2, 0 below, 1 - floor((1 - x) / e) / m above 1/2, for m = floor(1 / e)
        value = torch.where(2 * sizes > C, C // s - (C - sizes) // s, (sizes >= s).long())
        best = max(best, -(-int((value * counts).sum()) // (C // s)))
    return max(best, int(counts[2 * sizes > C].sum()))


def pack_sequences(trajs: Sequence[Trajectory], max_tokens: int, pad_id: int = 0) -> dict[str, Any]:
    """Put trajectories behind one another in few rows, and keep where each begins.

    Args:
        trajs: N trajectories of at least 1 token; `action_mask` holds 0 and 1 in any dtype.
        max_tokens: L, the tokens that a row holds.
        pad_id: fills `ids`.

    Returns:
        On the device of the trajectories, with R rows: `ids` [R, L]; `position_ids` [R, L], from 0
        in each sequence; `segment_ids` [R, L], the number of the sequence within its row, -1 on
        padding; `action_mask` bool and `sample_logp` [R, L - 1], where the entry that would predict
        the first token of the next sequence is 0; `rows`, the plan; `cu_seqlens` int32 [N + 1], the
        boundaries of all sequences, row after row, in the tokens without padding,
        `ids[segment_ids >= 0]`.

    Raises:
        ValueError, TypeError: naming the index of a trajectory that is malformed, too long, or
            whose `sample_logp` is not finite at a policy token.
    """
    _check(trajs)
    lengths = [len(traj.ids) for traj in trajs]
    rows, max_tokens = packing_plan(lengths, max_tokens), int(max_tokens)
    ids, device = [traj.ids for traj in trajs], trajs[0].ids.device
    spare = [max_tokens - sum(lengths[i] for i in row) for row in rows]
    sizes = torch.tensor([0, *(lengths[i] for row in rows for i in row)], device=device)

    def lay_out(values: Sequence[Tensor], value: float, gap: int = 0) -> Tensor:
        """All pieces in one copy: the values of each sequence, its gap, and what a row lacks."""
        dtype = functools.reduce(torch.promote_types, {v.dtype for v in values})
        filling, pieces = values[0].new_full((max_tokens,), value, dtype=dtype), []
        for row, padding in zip(rows, spare, strict=True):
            for i in row:
                pieces += [values[i], filling[:gap]] if gap else [values[i]]
            pieces.append(filling[:padding])
        return torch.cat(pieces).view(len(rows), max_tokens)

    ramp = torch.arange(max_tokens, device=device)
    number = {i: ramp[k : k + 1] for row in rows for k, i in enumerate(row)}  # within the row
    # After each sequence comes one 0, since its last token predicts nothing here.
    masks = lay_out([traj.action_mask for traj in trajs], 0, 1).bool()
    logps = lay_out([traj.sample_logp.detach() for traj in trajs], 0.0, 1)
    if (masks & ~logps.isfinite().to(masks.device)).any():
        _check_sample_logp(trajs)  # says where
    return {
        "ids": lay_out(ids, pad_id),
        "position_ids": lay_out([ramp[:n] for n in lengths], 0),
        "segment_ids": lay_out([number[i].expand(n) for i, n in enumerate(lengths)], -1),
        "action_mask": masks[:, :-1],
        "sample_logp": logps[:, :-1],
        "rows": rows,
        "cu_seqlens": sizes.cumsum(0, dtype=torch.int32),
    }


def _check(trajs: Sequence[Trajectory]) -> None:
    check_trajectories(trajs, min_tokens=1)  # a single token predicts nothing, but packs
    for index, traj in enumerate(trajs):
        if not traj.sample_logp.is_floating_point():
            dtype = traj.sample_logp.dtype
            raise ValueError(f"trajs[{index}].sample_logp is {dtype}, needs floats")


def unpack(values: Tensor, packed: dict[str, Any]) -> list[Tensor]:
    """Cut packed values into those of each trajectory, in the order in which they were given.

    Args:
        values: [R, L, ...] for values of tokens, or [R, L - 1, ...] for values of predictions.
        packed: what `pack_sequences` returned.

    Returns:
        Views [T, ...], or [T - 1, ...], one for each trajectory.

    Raises:
        ValueError: if `values` has another shape.
    """
    R, L = packed["ids"].shape
    if values.ndim < 2 or len(values) != R or L - values.shape[1] not in (0, 1):
        raise ValueError(
            f"values {list(values.shape)} must be [{R}, {L}, ...] or [{R}, {L - 1}, ...]"
        )
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


def block_mask(segment_ids: Tensor) -> Tensor:
    """Say who may attend to whom: bool [R, 1, L, L], True where the row may see the column.

    A token sees its own segment up to itself. Padding sees itself alone, so that no row is empty.
    """
    L = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None]  # [R, L, L]
    causal = torch.ones(L, L, dtype=torch.bool, device=segment_ids.device).tril()
    itself = torch.eye(L, dtype=torch.bool, device=segment_ids.device)
    return (same & causal & (segment_ids >= 0)[:, :, None] | itself)[:, None]


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], **options: Any
) -> Tensor:
    """Attend causally within each segment and compute nothing else.

    Args:
        q, k, v: [..., N, D], the segments one after another along N.
        lengths: of the segments; they sum to N.
        **options: for `scaled_dot_product_attention`, such as `scale` and `enable_gqa`.

    Returns:
        [..., N, D].
    """
    parts = zip(*(x.split(list(lengths), -2) for x in (q, k, v)), strict=True)
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
        self.unseen |= not torch.is_grad_enabled()
        if attn_mask is not None or dropout_p or not (is_causal or query.shape[-2] == 1):
            given = "no" if attn_mask is None else "a"
            raise RuntimeError(
                "the model must attend causally, without a mask or dropout, but it called "
                f"scaled_dot_product_attention with {given} mask, dropout_p = {dropout_p}, "
                f"is_causal = {is_causal}: {_USE_MASK}"
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
    """Return the logits of packed rows, each sequence as if it were alone: [R, L, V].

    Args:
        model: called with `ids`, `position_ids` and, for `mask`, a boolean `attention_mask`, as
            `TinyAgent`; returns the logits. For a `transformers` model, whose eager attention would
            add such a mask as 0 and 1, there is `transformers_inputs`.
        ids, position_ids, segment_ids: [R, L], as `pack_sequences` returns them.
        attention: `mask` gives the model a block-diagonal causal mask, whose cost grows with R L^2.
            `segments` runs the tokens without the padding in one row and each attention segment by
            segment; logits at padding are then 0. `auto` is `mask` up to 256 tokens a row, else
            `segments`.

    Raises:
        ValueError: if the shapes differ, or for another `attention`.
        TypeError: for `mask` with a model that does not return a tensor, as those of
            `transformers`.
        RuntimeError: for `segments` with a model that does not attend by
            `torch.nn.functional.scaled_dot_product_attention`, or that asks it for a mask of its
            own, for dropout, or for attention that is not causal; or with checkpoints, which
            attend again: reentrant ones at once, others in the backward pass.
    """
    if not ids.shape == position_ids.shape == segment_ids.shape:
        shapes = [list(x.shape) for x in (ids, position_ids, segment_ids)]
        raise ValueError(f"ids, position_ids and segment_ids differ in shape: {shapes}")
    if attention not in ("auto", "mask", "segments"):
        raise ValueError(f"attention must be 'auto', 'mask' or 'segments', got {attention!r}")
    R, L = ids.shape
    if attention == "mask" or (attention == "auto" and L <= 256):
        logits = model(ids, position_ids=position_ids, attention_mask=block_mask(segment_ids))
        if not isinstance(logits, Tensor):
            kind = type(logits).__name__
            raise TypeError(f"the model returned {kind}, not a tensor of logits: {_FOR_OTHERS}")
        return logits
    real = segment_ids >= 0
    number = segment_ids + L * torch.arange(R, device=ids.device)[:, None]  # differs between rows
    lengths = number[real].unique_consecutive(return_counts=True)[1].tolist()
    with _SegmentAttention(lengths) as mode:
        logits = model(ids[real][None], position_ids=position_ids[real][None])[0]
    if not mode.calls:
        raise RuntimeError(f"the model never called scaled_dot_product_attention: {_USE_MASK}")
    if mode.unseen and _recomputes(logits.grad_fn):
        raise RuntimeError(
            "the model attends where autograd does not look, as reentrant checkpoints do, which "
            f"attend again in the backward pass without these segments: {_USE_MASK}"
        )
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
    """Turn packed rows into arguments for a causal language model of `transformers`.

    Args:
        packed: what `pack_sequences` returned.
        dtype: of the model.
        boundaries: False gives rows [R, L] and a 4-D mask, for the `eager` and `sdpa` attention.
            True gives one row [1, N] without padding and its `cu_seq_lens`, for attention that
            reads them, such as `flash_attention_2`.

    Returns:
        Keyword arguments of the model's forward. There is no cache: with one, `transformers` would
        take the rows for a text that goes on.
    """
    real = packed["segment_ids"] >= 0
    if boundaries:
        cu, longest = packed["cu_seqlens"], int(packed["cu_seqlens"].diff().max())
        return {
            "input_ids": packed["ids"][real][None],
            "position_ids": packed["position_ids"][real][None],
            "cu_seq_lens_q": cu,
            "cu_seq_lens_k": cu,
            "max_length_q": longest,
            "max_length_k": longest,
            "use_cache": False,
        }
    mask = block_mask(packed["segment_ids"])
    # Additive, since the eager attention adds whatever it is given: True would count as 1.
    additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return {
        "input_ids": packed["ids"],
        "position_ids": packed["position_ids"],
        "attention_mask": additive.masked_fill(~mask, torch.finfo(dtype).min),
        "use_cache": False,
    }


def spread(values: Tensor, packed: dict[str, Any]) -> Tensor:
    """Give each prediction the value of its trajectory, such as an advantage: [N] -> [R, L - 1].

    Raises:
        ValueError: if there are not as many values as trajectories.
    """
    count = len(packed["cu_seqlens"]) - 1
    if list(values.shape) != [count]:
        raise ValueError(f"values {list(values.shape)} do not fit {count} trajectories")
    order = [i for row in packed["rows"] for i in row]
    real = packed["segment_ids"] >= 0
    lengths = packed["cu_seqlens"].diff()
    out = values.new_zeros(real.shape).to(real.device)
    out[real] = values.to(real.device)[order].repeat_interleave(lengths)
    return out[:, :-1]


def segment_cumsum(values: Tensor, segment_ids: Tensor) -> Tensor:
    """Sum over time from the start of each segment: [R, L, ...] -> the same shape.

    The smallest layer with a state. One pass over time that drops the state at each boundary, so
    that nothing of another segment is ever added, not even to be subtracted again.
    """
    previous = F.pad(segment_ids, (1, 0), value=-1)[:, :-1]
    starts = (segment_ids != previous) | (segment_ids < 0)  # [R, L]; padding keeps no state
    state, out = torch.zeros_like(values[:, 0]), []
    for t in range(values.shape[1]):
        start = starts[:, t].view(-1, *[1] * (values.ndim - 2))
        state = torch.where(start, 0, state) + values[:, t]
        out.append(state)
    return torch.stack(out, 1)


def prefix_tree_tokens(sequences: Sequence[Tensor | Sequence[int]]) -> int:
    """Count the tokens that are left when every shared prefix is computed once.

    Args:
        sequences: token ids.

    Returns:
        The nodes of the prefix tree. After sorting, a sequence shares its longest prefix with its
        predecessor.
    """
    ordered = sorted(s.tolist() if isinstance(s, Tensor) else list(s) for s in sequences)
    shared = 0
    for a, b in pairwise(ordered):
        equal = [x == y for x, y in zip(a, b, strict=False)]
        shared += equal.index(False) if False in equal else len(equal)
    return sum(map(len, ordered)) - shared
