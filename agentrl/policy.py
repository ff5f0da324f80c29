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
        keys, values: [layers, B, heads, max_len, head_dim]; filled up to `length`.
        length: positions seen, the same in every row.
    """

    keys: Tensor
    values: Tensor
    length: int = 0

    def select(self, rows: Tensor) -> "KVCache":
        """Keep the given rows, indices [K], and forget the others."""
        kept = []
        for full in (self.keys, self.values):
            L, _, H, S, D = full.shape
            kept.append(full.new_empty(L, len(rows), H, S, D))
            kept[-1][:, :, :, : self.length] = full[:, rows, :, : self.length]  # the filled part
        return KVCache(*kept, self.length)


# long: a whole block, as it is usually written
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
        self, x: Tensor, mask: Tensor | None, cache: tuple[Tensor, Tensor, int] | None = None
    ) -> Tensor:
        B, T, D = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.n_heads, D // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, T, D/H]
        if cache is not None:
            keys, values, start = cache
            keys[:, :, start : start + T] = k
            values[:, :, start : start + T] = v
            k, v = keys[:, :, : start + T], values[:, :, : start + T]
        causal = mask is None and T > 1
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.relu(self.up(self.norm2(x))))


# long: the model; cutting it in two would hide that it is whole
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
        lm_head: the output layer; `lm_head.weight` is [V, D]. It starts as a copy of the token
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
        shape = (len(self.blocks), batch, heads, self.max_len, width // heads)
        return KVCache(*(self.lm_head.weight.new_empty(shape) for _ in range(2)))

    def hidden_states(
        self,
        ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return the states that the output head reads, [B, T, D].

        Args:
            ids: token ids [B, T].
            position_ids: [B, T]; by default 0, 1, 2, ... after what the cache holds.
            attention_mask: bool [B, 1, T, T], True where the row may attend to the column; by
                default causal.
            cache: keys and values of the positions before `ids`; it is extended in place.

        Raises:
            ValueError: if the sequence would exceed `max_len`.
        """
        start, T = (cache.length if cache else 0), ids.shape[1]
        if position_ids is None:
            if start + T > self.max_len:
                raise ValueError(f"{start} + {T} positions exceed max_len = {self.max_len}")
            position_ids = torch.arange(start, start + T, device=ids.device)
        if start and T > 1 and attention_mask is None:
            attention_mask = ids.new_ones(T, start + T, dtype=torch.bool).tril(start)
        x = self.token(ids) + self.position(position_ids)
        for i, block in enumerate(self.blocks):
            x = block(x, attention_mask, (cache.keys[i], cache.values[i], start) if cache else None)
        if cache:
            cache.length += T
        return self.norm(x)

    def forward(
        self,
        ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return logits [B, T, V]; the arguments are those of `hidden_states`."""
        return self.lm_head(self.hidden_states(ids, position_ids, attention_mask, cache))


def selected_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each chosen token.

    Args:
        logits: [..., V].
        ids: the chosen tokens [...], scored against the logits at the same place.

    Returns:
        log p(id) in nats, [...]: `logits[id] - logsumexp(logits)`, in float32 or better; logits in
        half precision are converted first.

    Raises:
        ValueError: if the shapes differ, or an id is outside the vocabulary.
    """
    if logits.shape[:-1] != ids.shape:
        raise ValueError(f"logits {list(logits.shape)} do not fit ids {list(ids.shape)}")
    _check_ids(ids, logits.shape[-1])
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return logits.gather(-1, ids[..., None])[..., 0] - logits.logsumexp(-1)


def _check_ids(ids: Tensor, vocab_size: int) -> None:
    # On CUDA the look-up itself checks, without waiting for the device.
    if ids.device.type == "cpu" and ids.numel() and not 0 <= ids.min() <= ids.max() < vocab_size:
        index = ((ids < 0) | (ids >= vocab_size)).nonzero()[0].tolist()
        raise ValueError(f"ids{index} = {ids[tuple(index)].item()} is outside 0..{vocab_size - 1}")


def sequence_log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the log-probability of every token after the first, given those before it.

    Args:
        model: maps ids [B, T] to logits [B, T, V].
        ids: [B, T] with T >= 2.

    Returns:
        [B, T-1]; entry t scores token t + 1.

    Raises:
        ValueError: if a sequence has no second token.
    """
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"ids {list(ids.shape)} must be [B, T] with T >= 2")
    return selected_log_probs(model(ids[:, :-1]), ids[:, 1:])


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
        ValueError: if `chunk_size` is below 1, or the shapes differ.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size} must be at least 1")
    if hidden.shape[:2] != ids.shape:
        raise ValueError(f"hidden {list(hidden.shape)} does not fit ids {list(ids.shape)}")
    chunks = zip(hidden.split(chunk_size, 1), ids.split(chunk_size, 1), strict=True)
    return torch.cat([selected_log_probs(F.linear(h, weight), i) for h, i in chunks], dim=1)
