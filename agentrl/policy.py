# Generated from chapters/02-policy.ipynb by tools/export.py. Do not edit: edit the notebook.
"""TinyAgent: a language model as a policy.

What is the probability of an action sequence, and what does it cost to compute?
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agentrl import check

__all__ = [
    "Block",
    "KVCache",
    "TinyAgent",
    "chunked_log_probs",
    "selected_log_probs",
    "sequence_log_probs",
]


def selected_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return log p(id) in nats for each chosen token: logits [..., V], ids [...] -> [...].

    Logits in half precision are converted first, so the result is in float32 or better.

    Raises:
        ValueError, TypeError: if the shapes differ, or, on the CPU, an id is outside 0..V-1.
    """
    check.shapes(logits=(logits, "... V"), ids=(ids, "..."))
    check.ids("ids", ids, logits.shape[-1])
    logits = check.widened(logits)
    return logits.gather(-1, ids.long()[..., None])[..., 0] - logits.logsumexp(-1)


def sequence_log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the log-prob of every token after the first, given those before: [B, T] -> [B, T-1].

    Entry t scores token t + 1. The model maps ids [B, T] to logits [B, T, V].

    Raises:
        ValueError, TypeError: if a sequence has no second token, an id is outside the vocabulary,
            or the model does not return a tensor.
    """
    if check.shapes(ids=(ids, "B T"))["T"] < 2:
        raise ValueError(f"ids {list(ids.shape)} must be [B, T] with T >= 2")
    logits = check.tensor("model(ids)", model(ids[:, :-1]))
    check.ids("ids", ids, logits.shape[-1])
    return selected_log_probs(logits, ids[:, 1:])


class Block(nn.Module):
    """One pre-norm block, attention and a two-layer network: [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"d_model = {d_model} is not a multiple of n_heads = {n_heads}")
        self.n_heads = n_heads
        self.norm1 = nn.LayerNorm(d_model, bias=False)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.norm2 = nn.LayerNorm(d_model, bias=False)
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(
        self, x: Tensor, mask: Tensor | None, cache: "tuple[Tensor, _NewTokens] | None" = None
    ) -> Tensor:
        B, T, D = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.n_heads, D // self.n_heads)
        if cache is None:
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, T, D/H]
            causal = mask is None and T > 1
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
            y = y.transpose(1, 2)
        else:
            y = _cached_attention(qkv[0], *cache)
        x = x + self.proj(y.reshape(B, T, D))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class TinyAgent(nn.Module):
    """A decoder-only transformer with learned absolute positions: ids [B, T] -> logits [B, T, V].

    `seed` seeds the initial weights, which are drawn on the CPU. The output layer `lm_head`, whose
    weight is [V, D], starts as half the token embedding, which makes copying a token from the
    context easy to learn, and is not tied.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 64,
        n_layers: int = 2,
        n_heads: int = 4,
        max_len: int = 256,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "d_model": d_model, "max_len": max_len}
        for name, size in {**sizes, "n_layers": n_layers, "n_heads": n_heads}.items():
            check.integer(name, size)
        self.max_len = max_len
        with torch.random.fork_rng(devices=[]):  # the layers draw weights that are not kept
            self.token = nn.Embedding(vocab_size, d_model)
            self.position = nn.Embedding(max_len, d_model)
            self.blocks = nn.ModuleList(Block(d_model, n_heads) for _ in range(n_layers))
            self.norm = nn.LayerNorm(d_model, bias=False)
            self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self.to(dtype)
        self._initialise(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        for name, p in self.named_parameters():
            if p.ndim == 2:
                scale = p.shape[1] ** -0.5
                scale = {"token.weight": 0.2, "position.weight": 0.02}.get(name, scale)
                if name.endswith(("proj.weight", "down.weight")):
                    scale /= 2  # quiet residual branches
                p.copy_(scale * torch.randn(p.shape, generator=generator, dtype=torch.float64))
        self.lm_head.weight.copy_(self.token.weight / 2)

    def new_cache(self, batch: int) -> "KVCache":
        """Return an empty cache for `batch` rows of up to `max_len` positions."""
        rows, heads = check.integer("batch", batch), self.blocks[0].n_heads
        width = self.position.embedding_dim // heads
        shape = (len(self.blocks), rows, self.max_len, 2, heads, width)
        return KVCache(self.lm_head.weight.new_empty(shape), [0] * rows)

    def hidden_states(
        self,
        ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: "KVCache | None" = None,
        counts: list[int] | None = None,
    ) -> Tensor:
        """Return the states that the output head reads: ids [B, T] -> [B, T, D].

        Args:
            position_ids: [B, T]; by default 0, 1, 2, ... after what the cache holds.
            attention_mask: [B, 1, T, T], 1 where the row may attend to the column, else 0; by
                default causal. Not with a cache.
            cache: keys and values of the positions before `ids`; it is extended in place.
            counts: for rows that differ: ids are [1, N], the new tokens of all rows of the cache
                end to end, and `counts[b]` of them belong to row b. By default T in each row.

        Raises:
            ValueError, TypeError: if an argument does not fit the model, `ids` or the cache. On
                CUDA an id outside the vocabulary fails in the look-up instead.
        """
        B, T = check.shapes(ids=(ids, "B T")).values()
        check.ids("ids", ids, self.token.num_embeddings)
        if position_ids is not None:
            check.shapes(ids=(ids, "B T"), position_ids=(position_ids, "B T"))
            check.ids("position_ids", position_ids, self.max_len)
        if attention_mask is not None:
            attention_mask = check.mask("attention_mask", attention_mask)
            if attention_mask.shape != (B, 1, T, T):  # SDPA would take a mask [B, T] as [T, T]
                shape = list(attention_mask.shape)
                raise ValueError(f"attention_mask {shape} must be [B, 1, T, T] = {[B, 1, T, T]}")
        if counts is not None if cache is None else attention_mask is not None:
            raise ValueError("counts need a cache, and attention_mask does not go with one")
        if cache is None:
            if position_ids is None and self.max_len < T:
                raise ValueError(f"{T} positions exceed max_len = {self.max_len}")
            places = torch.arange(T, device=ids.device) if position_ids is None else position_ids
            x = self.token(ids) + self.position(places)
            for block in self.blocks:
                x = block(x, attention_mask)
            return self.norm(x)
        counts = [T] * B if counts is None else check.integers("counts", counts, 0)
        if len(counts) != len(cache.lengths) or sum(counts) != B * T:
            raise ValueError(
                f"counts = {counts} do not fit ids {[B, T]} and {len(cache.lengths)} rows"
            )
        new = _extend(cache, counts)
        places = new.position.view(B, T) if position_ids is None else position_ids
        x = (self.token(ids) + self.position(places)).view(1, B * T, -1)
        for i, block in enumerate(self.blocks):
            x = block(x, None, (cache.memory[i], new))
        return self.norm(x).view(B, T, -1)

    def forward(
        self,
        ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: "KVCache | None" = None,
        counts: list[int] | None = None,
    ) -> Tensor:
        """Return logits [B, T, V]; the arguments are those of `hidden_states`."""
        return self.lm_head(self.hidden_states(ids, position_ids, attention_mask, cache, counts))


def chunked_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, chunk_size: int) -> Tensor:
    """Return log p(id) a chunk of positions at a time: [B, T, D], [V, D], [B, T] -> [B, T].

    At most B * chunk_size * V logits exist at a time in the forward pass. Autograd keeps every
    chunk; chapter 7 removes that too.

    Args:
        hidden: the states that the output head reads; `weight` is that head's.
        ids: the chosen tokens, each scored by the state at the same place.

    Raises:
        ValueError, TypeError: if an argument has another shape or kind, or an id is outside 0..V-1.
    """
    check.integer("chunk_size", chunk_size)
    check.shapes(hidden=(hidden, "B T D"), weight=(weight, "V D"), ids=(ids, "B T"))
    check.ids("ids", ids, len(weight))
    chunks = zip(hidden.split(chunk_size, 1), ids.split(chunk_size, 1), strict=True)
    return torch.cat([selected_log_probs(F.linear(h, weight), i) for h, i in chunks], dim=1)


@dataclass
class KVCache:
    """Keys and values of the positions seen so far."""

    memory: Tensor  # [layers, B, max_len, 2, heads, head_dim], a key and a value per position
    lengths: list[int]  # how many positions each of the B rows has seen

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order, and forget the others; at most B rows are kept."""
        rows = check.integers("rows", rows, 0, last_row=len(self.lengths) - 1)
        if len(rows) > len(self.lengths):
            raise ValueError(f"rows = {rows} are more than the cache has: {len(self.lengths)}")
        filled = max(self.lengths)
        self.memory[:, : len(rows), :filled] = self.memory[:, rows, :filled]
        self.memory = self.memory[:, : len(rows)]
        self.lengths = [self.lengths[row] for row in rows]


@dataclass
class _NewTokens:
    """Where N new tokens stand: end to end as the model reads them, and row by row."""

    row: Tensor  # [N], the row of each token in the cache
    position: Tensor  # [N], its position there
    length: int  # S, the number of positions in the longest row
    grid: Tensor  # [B, T], the token that is the t-th new one of row b; 0 where there is none
    cell: Tensor  # [N], the place of each token in the flattened grid
    mask: Tensor | None  # [B, 1, T, S], what a new token may see; None if one row gets one token


def _extend(cache: KVCache, counts: list[int]) -> _NewTokens:
    """Make room for `counts[b]` tokens at the end of each row b of the cache."""
    before, limit, device = cache.lengths, cache.memory.shape[2], cache.memory.device
    after = [start + n for start, n in zip(before, counts, strict=True)]
    cache.lengths = check.integers("positions", after, 0, max_len=limit)
    T, S = max(counts), max(after)
    cache.memory[:, :, max(before) : S] = 0  # a masked value has weight 0, and 0 * NaN is NaN
    rows = [b for b, n in enumerate(counts) for _ in range(n)]
    positions = [s + t for s, n in zip(before, counts, strict=True) for t in range(n)]
    cells = [b * T + t for b, n in enumerate(counts) for t in range(n)]
    row, position, cell = torch.tensor([rows, positions, cells], device=device).unbind(0)
    number, place = torch.arange(len(cells), device=device), torch.arange(S, device=device)
    grid = cell.new_zeros(len(counts) * T).scatter(0, cell, number).view(-1, T)
    mask = None if len(counts) == T == 1 else place <= position[grid][:, None, :, None]
    return _NewTokens(row, position, S, grid, cell, mask)


def _cached_attention(qkv: Tensor, memory: Tensor, new: _NewTokens) -> Tensor:
    """Store keys and values, and attend to all that the rows hold: [N, 3, H, D/H] -> [N, H, D/H].

    `memory` [B, max_len, 2, H, D/H] is that of one layer.
    """
    memory[new.row, new.position] = qkv[:, 1:]
    k, v = memory[:, : new.length].permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, S, D/H]
    q = qkv[:, 0][new.grid].transpose(1, 2)  # [B, H, T, D/H]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=new.mask)
    return y.transpose(1, 2).flatten(0, 1)[new.cell]
