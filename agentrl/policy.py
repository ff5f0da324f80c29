# Generated from chapters/02-policy.ipynb by tools/export.py. Do not edit: edit the notebook.
"""TinyAgent: a language model as a policy.

What is the probability of an action sequence, and what does it cost to compute?
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "Block",
    "KVCache",
    "TinyAgent",
    "chunked_log_probs",
    "selected_log_probs",
    "sequence_log_probs",
]


@dataclass
class KVCache:
    """Keys and values of the positions seen so far.

    Attributes:
        memory: [layers, B, max_len, 2, heads, head_dim], a key and a value for each position.
        lengths: positions seen, of each of the B rows.
    """

    memory: Tensor
    lengths: list[int]

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order, and forget the others."""
        filled = max(self.lengths)
        self.memory[:, : len(rows), :filled] = self.memory[:, rows, :filled]
        self.memory = self.memory[:, : len(rows)]
        self.lengths = [self.lengths[row] for row in rows]


@dataclass
class _NewTokens:
    """Where N new tokens stand: end to end as the model reads them, and row by row.

    Attributes:
        row, position: [N], the place of each in the cache.
        length: S, positions of the longest row.
        grid: [B, T], the token that is the t-th new one of row b; 0 where there is none.
        cell: [N], the reverse: where each token is in the flattened grid.
        mask: bool [B, 1, T, S], True where a new token may attend to a position; None for
            the only token of the only row, which may attend to all.
    """

    row: Tensor
    position: Tensor
    length: int
    grid: Tensor
    cell: Tensor
    mask: Tensor | None


def _extend(cache: KVCache, counts: list[int]) -> _NewTokens:
    """Make room for `counts[b]` tokens at the end of each row b of the cache."""
    before, limit, device = cache.lengths, cache.memory.shape[2], cache.memory.device
    for b, (start, n) in enumerate(zip(before, counts, strict=True)):
        if start + n > limit:
            raise ValueError(f"row {b}: {start} + {n} positions exceed max_len = {limit}")
    cache.lengths = [start + n for start, n in zip(before, counts, strict=True)]
    T, S = max(counts), max(cache.lengths)
    cache.memory[:, :, max(before) : S] = 0  # a masked value has weight 0, and 0 * NaN is NaN
    rows = [b for b, n in enumerate(counts) for _ in range(n)]
    positions = [s + t for s, n in zip(before, counts, strict=True) for t in range(n)]
    cells = [b * T + t for b, n in enumerate(counts) for t in range(n)]
    row, position, cell = torch.tensor([rows, positions, cells], device=device).unbind(0)
    grid = cell.new_zeros(len(counts) * T)
    grid[cell] = torch.arange(len(cells), device=device)
    grid = grid.view(-1, T)
    mask = None
    if len(counts) > 1 or T > 1:
        mask = torch.arange(S, device=device) <= position[grid][:, None, :, None]
    return _NewTokens(row, position, S, grid, cell, mask)


def _cached_attention(qkv: Tensor, memory: Tensor, new: _NewTokens) -> Tensor:
    """Store keys and values, and attend to all that the rows hold: [N, 3, H, D/H] -> [N, H, D/H].

    Args:
        memory: of one layer, [B, max_len, 2, H, D/H].
    """
    memory[new.row, new.position] = qkv[:, 1:]
    k, v = memory[:, : new.length].permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, S, D/H]
    q = qkv[:, 0][new.grid].transpose(1, 2)  # [B, H, T, D/H]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=new.mask)
    return y.transpose(1, 2).flatten(0, 1)[new.cell]


class Block(nn.Module):
    """One pre-norm block, attention and a two-layer network: [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1 = nn.LayerNorm(d_model, bias=False)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.norm2 = nn.LayerNorm(d_model, bias=False)
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(
        self, x: Tensor, mask: Tensor | None, cache: tuple[Tensor, _NewTokens] | None = None
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


def _check_ids(ids: Tensor, size: int, name: str = "ids") -> None:
    # On CUDA the look-up itself checks, without waiting for the device.
    unread = type(ids) is not Tensor or torch.compiler.is_compiling()  # fake, or to be traced
    if unread or ids.device.type != "cpu" or not ids.numel():
        return
    try:  # as Python's integers: the size may not fit the dtype of the ids
        inside = 0 <= int(ids.min()) <= int(ids.max()) < size
    except RuntimeError:  # under vmap no value can be read
        return
    if not inside:
        index = ((ids < 0) | (ids.long() >= size)).nonzero()[0].tolist()
        raise ValueError(f"{name}{index} = {ids[tuple(index)].item()} is outside 0..{size - 1}")


class TinyAgent(nn.Module):
    """A decoder-only transformer with learned absolute positions.

    Args:
        vocab_size: V, the number of tokens.
        d_model: D, the width.
        n_layers, n_heads: depth, and attention heads of width D / n_heads.
        max_len: the longest sequence.
        dtype: of the parameters.
        seed: of the initial weights, drawn on the CPU.

    Attributes:
        lm_head: the output layer; `lm_head.weight` is [V, D]. It starts as half the token
            embedding, which makes copying a token from the context easy to learn, and is not tied.
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
        if d_model % n_heads:
            raise ValueError(f"d_model = {d_model} is not a multiple of n_heads = {n_heads}")
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

    def new_cache(self, batch: int) -> KVCache:
        """Return an empty cache for `batch` rows of up to `max_len` positions."""
        width, heads = self.position.embedding_dim, self.blocks[0].n_heads
        shape = (len(self.blocks), batch, self.max_len, 2, heads, width // heads)
        return KVCache(self.lm_head.weight.new_empty(shape), [0] * batch)

    def hidden_states(
        self,
        ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        counts: list[int] | None = None,
    ) -> Tensor:
        """Return the states that the output head reads, [B, T, D].

        Args:
            ids: token ids [B, T].
            position_ids: [B, T]; by default 0, 1, 2, ... after what the cache holds.
            attention_mask: bool [B, 1, T, T], True where the row may attend to the column; by
                default causal. Not with a cache.
            cache: keys and values of the positions before `ids`; it is extended in place.
            counts: for a cache of rows that differ: ids are [1, N], the new tokens of all rows
                end to end, and `counts[b]` of them are row b's. By default T in each row.

        Raises:
            ValueError: if a sequence would exceed `max_len`, an id is outside the vocabulary (on
                CUDA the look-up fails instead), or `counts` or a mask do not fit the cache.
        """
        B, T = ids.shape
        _check_ids(ids, self.token.num_embeddings)
        if position_ids is not None:
            _check_ids(position_ids, self.max_len, "position_ids")
        if cache is None:
            new, places = None, torch.arange(T, device=ids.device)
            if position_ids is None and ids.shape[1] > self.max_len:
                raise ValueError(f"{T} positions exceed max_len = {self.max_len}")
            if counts is not None:
                raise ValueError(f"counts = {counts} belong to a cache, and there is none")
        else:
            if attention_mask is not None:
                raise ValueError("attention_mask does not go with a cache, whose rows are causal")
            counts = [T] * B if counts is None else counts
            if len(counts) != len(cache.lengths) or sum(counts) != B * T:
                held = f"{B * T} tokens and {len(cache.lengths)} rows"
                raise ValueError(f"counts = {counts} do not fit {held}")
            new = _extend(cache, counts)
            places = new.position.view(B, T)
        x = self.token(ids) + self.position(places if position_ids is None else position_ids)
        if new is None:
            for block in self.blocks:
                x = block(x, attention_mask)
        else:
            x = x.view(1, B * T, -1)
            for i, block in enumerate(self.blocks):
                x = block(x, None, (cache.memory[i], new))
        return self.norm(x.view(B, T, -1))

    def forward(
        self,
        ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        counts: list[int] | None = None,
    ) -> Tensor:
        """Return logits [B, T, V]; the arguments are those of `hidden_states`."""
        return self.lm_head(self.hidden_states(ids, position_ids, attention_mask, cache, counts))


def _widened(x: Tensor) -> Tensor:
    """The same in at least float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def selected_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each chosen token.

    Args:
        logits: [..., V].
        ids: the chosen tokens [...], scored against the logits at the same place.

    Returns:
        log p(id) in nats, [...]: `logits[id] - logsumexp(logits)`, in float32 or better; logits in
        half precision are converted first.

    Raises:
        ValueError: if the shapes differ, or, on the CPU, an id is outside the vocabulary.
    """
    if logits.shape[:-1] != ids.shape:
        raise ValueError(f"logits {list(logits.shape)} do not fit ids {list(ids.shape)}")
    _check_ids(ids, logits.shape[-1])
    logits = _widened(logits)
    return logits.gather(-1, ids.long()[..., None])[..., 0] - logits.logsumexp(-1)


def sequence_log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the log-probability of every token after the first, given those before it.

    Args:
        model: maps ids [B, T] to logits [B, T, V].
        ids: [B, T] with T >= 2.

    Returns:
        [B, T-1]; entry t scores token t + 1.

    Raises:
        ValueError: if a sequence has no second token, or an id is outside the vocabulary.
    """
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"ids {list(ids.shape)} must be [B, T] with T >= 2")
    logits = model(ids[:, :-1])
    _check_ids(ids, logits.shape[-1])
    return selected_log_probs(logits, ids[:, 1:])


def chunked_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, chunk_size: int) -> Tensor:
    """Return the log-probability of each chosen token, a chunk of positions at a time.

    Args:
        hidden: the states that the output head reads, [B, T, D].
        weight: of the output head, [V, D].
        ids: the chosen tokens [B, T], scored by the state at the same place.
        chunk_size: positions per chunk; at most B * chunk_size * V logits exist at a time in the
            forward pass. Autograd keeps every chunk; chapter 7 removes that too.

    Returns:
        log p(id) in nats, [B, T].

    Raises:
        ValueError: if `chunk_size` is below 1, the shapes differ, or an id is outside the
            vocabulary.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size} must be at least 1")
    if hidden.shape[:2] != ids.shape:
        raise ValueError(f"hidden {list(hidden.shape)} does not fit ids {list(ids.shape)}")
    _check_ids(ids, len(weight))
    chunks = zip(hidden.split(chunk_size, 1), ids.split(chunk_size, 1), strict=True)
    return torch.cat([selected_log_probs(F.linear(h, weight), i) for h, i in chunks], dim=1)
