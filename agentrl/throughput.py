# Generated from chapters/10-throughput.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Throughput arithmetic.

How many GPU-hours does a run cost, and which half dominates: sampling episodes, or training?
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from agentrl import check
from agentrl.report import Finding, as_check

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Cost",
    "Estimate",
    "ModelShape",
    "accelerator",
    "causal_pairs",
    "command_line",
    "decode_flops",
    "decode_tokens_per_s",
    "decode_weights",
    "flop_count_check",
    "forward_flops",
    "matmul_weights",
    "prefill_seconds",
    "prefill_tokens",
    "run_cost",
    "step_cost",
    "train_tokens_per_s",
    "training_flops",
]


def causal_pairs(lengths: Iterable[int], window: int | None = None) -> int:
    """Count the pairs (query, key) of causal attention: sum of s(s + 1)/2 over sequences.

    Args:
        lengths: tokens of each sequence.
        window: a query sees at most this many keys, itself included; by default all before it.
    """
    lengths = check.integers("lengths", lengths, 0)
    seen, beyond = lengths, 0  # keys that the last query of each sequence sees, queries beyond it
    if window is not None:
        window = check.integer("window", window)
        seen = [s if s < window else window for s in lengths]
        beyond = sum(lengths) - sum(seen)
    return sum([k * (k + 1) for k in seen]) // 2 + beyond * (window or 0)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a decoder-only transformer: what its parameters, FLOPs and cache follow from.

    Attributes:
        head_dim, v_dim: width of a key, and of a value, by default the same.
        ffn: inner width of a dense layer's network, of three matrices if `gated`, else of two.
        windows: for each layer its attention window in tokens, None for full attention.
        sparse: for each layer whether its network is a mixture of experts; by default none.
        experts, top_k, expert_ffn: routed experts, how many a token uses, their inner width.
        shared_ffn, shared_gate: inner width of the experts that every token uses; a gate for them.
        q_lora, kv_lora, rope_dim: ranks of latent attention, and the part of `head_dim` that
            carries the position; `kv_lora = 0` is ordinary attention, `q_lora = 0` a plain query.
        tied: the output head is the embedding.
        qkv_bias, o_bias, mlp_bias: which products have a bias (latent attention: the two
            down-projections, the output).
        qk_norm, norms: queries and keys are normalised per head; norms per layer, of width D.
        positions: rows of a learned position table.
    """

    vocab: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    windows: tuple[int | None, ...]
    v_dim: int = 0
    gated: bool = True
    sparse: tuple[bool, ...] = ()
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    positions: int = 0

    def __post_init__(self) -> None:
        set_ = partial(object.__setattr__, self)  # Python's integers do not overflow
        for field in fields(self):
            if field.type in (int, "int"):
                least = int(field.default != 0)
                set_(field.name, check.integer(field.name, getattr(self, field.name), least))
        check.not_empty("windows", self.windows)
        for i, window in enumerate(self.windows):
            check.integer(f"windows[{i}]", 1 if window is None else window)
        if self.sparse and len(self.sparse) != self.layers:
            raise ValueError(f"sparse has {len(self.sparse)} layers, windows {self.layers}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is no multiple of kv_heads = {self.kv_heads}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k = {self.top_k} exceeds experts = {self.experts}")
        set_("v_dim", self.v_dim or self.head_dim)

    @classmethod
    def from_config(cls, config: Any) -> "ModelShape":
        """Read a `transformers` config, given as the object, or as the dict of a `config.json`.

        Raises:
            ValueError: naming what is missing: an architecture that is not known, or a key.
        """
        return cls(**_read_config(config))

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.windows)

    @property
    def params(self) -> int:
        """All parameters, as `model.parameters()` counts them; a tied table counts once."""
        tables = self.vocab * (not self.tied) + self.positions
        return tables * self.d_model + matmul_weights(self, self.experts) + _vectors(self)

    @property
    def active_params(self) -> int:
        """Parameters that one token meets: all but the experts that it is not routed to."""
        return self.params - matmul_weights(self, self.experts) + matmul_weights(self)

    def keys(self, context: float) -> float:
        """Keys that a token sees after `context` tokens, summed over the layers."""
        context = check.number("context", context, least=0)
        return sum(min(context, window or context) for window in self.windows)

    def kv_bytes(self, context: float, bytes_per_value: float = 2.0) -> float:
        """Bytes that the cache of one sequence holds after `context` tokens."""
        per_key = self.kv_heads * (self.head_dim + self.v_dim)
        if self.kv_lora:  # the latent, and one rotated key for all heads
            per_key = self.kv_lora + self.rope_dim
        return per_key * bytes_per_value * self.keys(context)


def matmul_weights(shape: ModelShape, experts: float | None = None) -> int:
    """Count the weights that multiply a token, the output head too; an embedding is a look-up.

    Args:
        experts: routed experts to count per layer; by default those that one token uses.
    """
    D, H = shape.d_model, shape.heads
    attention = D * (H + shape.kv_heads) * shape.head_dim + D * shape.kv_heads * shape.v_dim
    if shape.kv_lora:
        query = shape.q_lora * (D + H * shape.head_dim) or D * H * shape.head_dim
        up = shape.head_dim - shape.rope_dim + shape.v_dim  # of the latent, to keys and values
        attention = query + D * (shape.kv_lora + shape.rope_dim) + shape.kv_lora * H * up
    attention += H * shape.v_dim * D
    routed = shape.top_k if experts is None else experts
    sparse = D * (shape.experts + shape.shared_gate)
    sparse += 3 * D * (routed * shape.expert_ffn + shape.shared_ffn)
    dense = (3 if shape.gated else 2) * D * shape.ffn
    networks = sum(shape.sparse) * sparse + (shape.layers - sum(shape.sparse)) * dense
    return shape.layers * attention + networks + shape.vocab * D


def _vectors(shape: ModelShape) -> int:
    """Count norms and biases: part of the parameters, not of the FLOPs."""
    D = shape.d_model
    qkv = (shape.heads + shape.kv_heads) * shape.head_dim + shape.kv_heads * shape.v_dim
    norms = shape.norms * D + 2 * shape.head_dim * shape.qk_norm
    if shape.kv_lora:
        qkv = shape.q_lora + shape.kv_lora + shape.rope_dim
        norms += shape.q_lora + shape.kv_lora
    attention = norms + qkv * shape.qkv_bias + D * shape.o_bias
    wide = 2 if shape.gated else 1
    dense = (wide * shape.ffn + D) * shape.mlp_bias
    sparse = (wide * shape.shared_ffn + D) * shape.mlp_bias * bool(shape.shared_ffn)
    networks = sum(shape.sparse) * sparse + (shape.layers - sum(shape.sparse)) * dense
    return shape.layers * attention + networks + D


# Where a config says a field of `ModelShape`: under a key; or under (key, value where it is absent,
# value where it is null, by default the same), `...` for an error. Else the field itself.
_DECODER = {
    "vocab": "vocab_size",
    "d_model": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": ("head_dim", None),  # hidden_size / num_attention_heads
    "ffn": "intermediate_size",
    "tied": ("tie_word_embeddings", False),
}
_BIAS = dict.fromkeys(("qkv_bias", "o_bias"), ("attention_bias", False))
_MLP_BIAS = {"mlp_bias": ("mlp_bias", False)}
_GEMMA = {**_BIAS, "head_dim": "head_dim", "tied": ("tie_word_embeddings", True)}
_QWEN3 = {**_BIAS, "head_dim": "head_dim", "qk_norm": True}
_EXPERTS = {"top_k": "num_experts_per_tok", "expert_ffn": "moe_intermediate_size"}
_QWEN_EXPERTS = {**_EXPERTS, "experts": ("num_experts", None)}  # or num_local_experts
_LATENT = {
    **_BIAS,
    **_EXPERTS,
    "experts": "n_routed_experts",
    "shared_ffn": ("n_shared_experts", ..., 0),  # times expert_ffn
    "kv_heads": "num_attention_heads",
    "head_dim": "qk_nope_head_dim",  # plus rope_dim
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
    "kv_lora": "kv_lora_rank",
    "q_lora": ("q_lora_rank", ..., 0),
}
_SHARED = {"shared_ffn": "shared_expert_intermediate_size", "shared_gate": True}
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT | _MLP_BIAS,
    "deepseek_v3": _LATENT,
    "gemma": _GEMMA,
    "gemma2": _GEMMA | {"norms": 4},
    "gemma3_text": _GEMMA | {"norms": 4, "qk_norm": True},
    "llama": _BIAS | _MLP_BIAS | {"kv_heads": ("num_key_value_heads", None)},  # as many as heads
    "mistral": {},
    "mixtral": _EXPERTS | {"experts": "num_local_experts", "expert_ffn": "intermediate_size"},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": _QWEN_EXPERTS | _SHARED | {"qkv_bias": ("qkv_bias", True)},
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3 | _QWEN_EXPERTS,
}


def _getter(config: Any, kind: str) -> Callable[..., Any]:
    read = config.get if isinstance(config, Mapping) else partial(getattr, config)

    def get(key: str, absent: Any = ..., *null: Any) -> Any:
        value = read(key, missing := object())
        if value is None or value is missing:
            value = null[0] if null and value is None else absent
        if value is ...:
            raise ValueError(f"the {kind} config lacks {key!r}")
        if value is None or key == "model_type" or isinstance(value, bool | list | tuple | dict):
            return value
        return check.integer(key, value, 0)

    return get


def _read_config(config: Any) -> dict[str, Any]:
    kind = _getter(config, "given")("model_type")
    get = _getter(config, kind)
    if get("text_config", None) is not None:
        raise ValueError(f"{kind!r} holds more than a decoder: pass its text_config")
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"unknown architecture {kind!r}: missing is how its layers compute and cache; "
            f"known are {', '.join(_ARCHITECTURES)}"
        )
    shape = dict(_DECODER | _ARCHITECTURES[kind])
    for name, source in shape.items():
        if isinstance(source, str | tuple):
            shape[name] = get(*([source] if isinstance(source, str) else source))
    if shape["head_dim"] is None:
        shape["head_dim"] = shape["d_model"] // max(1, shape["heads"])
    if shape["kv_heads"] is None:
        shape["kv_heads"] = shape["heads"]
    if "kv_lora" in shape:
        shape["head_dim"] += shape["rope_dim"]
        shape["shared_ffn"] *= shape["expert_ffn"]
    if "experts" in shape:
        shape["experts"] = shape["experts"] or get("num_local_experts")
        shape["sparse"] = _sparse_layers(get, kind)
    return shape | {"windows": _windows(get, kind)}


def _windows(get: Callable[..., Any], kind: str) -> tuple[int | None, ...]:
    layers = range(get("num_hidden_layers"))
    slides = [False for _ in layers]
    if (types := get("layer_types", None)) is not None:
        if len(types) != len(layers):
            raise ValueError(f"layer_types has {len(types)}, num_hidden_layers = {len(layers)}")
        for i, name in enumerate(types):
            check.one_of(f"layer_types[{i}]", name, ("full_attention", "sliding_attention"))
        slides = [name == "sliding_attention" for name in types]
    elif kind in ("mistral", "mixtral"):
        # Mistral's class has a window of its own where the key is absent, Mixtral's has none.
        window = get("sliding_window", ... if kind == "mistral" else 0, 0)
        slides = [bool(window) for _ in layers]
    elif kind in ("gemma2", "gemma3_text"):
        period = 2 if kind == "gemma2" else get("sliding_window_pattern", 6)
        period = check.integer("sliding_window_pattern", period)
        slides = [(i + 1) % period > 0 for i in layers]
    elif kind.startswith("qwen") and get("use_sliding_window", False):
        full = 0 if kind == "qwen3_moe" else get("max_window_layers")
        slides = [(i % 2 == 0 and i < full) if kind == "qwen2_moe" else i >= full for i in layers]
    return tuple(get("sliding_window") if slide else None for slide in slides)


def _sparse_layers(get: Callable[..., Any], kind: str) -> tuple[bool, ...]:
    layers = range(get("num_hidden_layers"))
    if kind.startswith("qwen"):
        every = check.integer("decoder_sparse_step", get("decoder_sparse_step", 1))
        dense = get("mlp_only_layers", ())
        return tuple(i not in dense and (i + 1) % every == 0 for i in layers)
    if kind.startswith("deepseek"):
        if get("moe_layer_freq", 1) != 1:
            raise ValueError(f"moe_layer_freq = {get('moe_layer_freq')}: missing is which layers")
        return tuple(i >= get("first_k_dense_replace") for i in layers)
    return tuple(True for _ in layers)


def forward_flops(shape: ModelShape, lengths: Sequence[int], *, pairs: str = "causal") -> int:
    """Count the FLOPs of one forward pass: 2 per weight and token, plus attention.

    Norms, softmax and rotations are not counted.

    Args:
        lengths: tokens of each sequence; sequences do not attend to each other.
        pairs: "causal" counts what is needed; "square" counts s * s per sequence, as a kernel
            that masks does the work, and as PyTorch's counter sees it.
    """
    check.one_of("pairs", pairs, ("causal", "square"))
    lengths = check.integers("lengths", lengths, 0)
    if pairs == "square":
        seen = shape.layers * sum(s * s for s in lengths)
    else:
        windows = Counter(shape.windows).items()
        seen = sum(layers * causal_pairs(lengths, window) for window, layers in windows)
    per_pair = 2 * shape.heads * (shape.head_dim + shape.v_dim)
    return 2 * matmul_weights(shape) * sum(lengths) + per_pair * seen


def training_flops(shape: ModelShape, lengths: Sequence[int], *, pairs: str = "causal") -> int:
    """Count the FLOPs of forward and backward: three times `forward_flops`."""
    return 3 * forward_flops(shape, lengths, pairs=pairs)


@dataclass(frozen=True)
class Accelerator:
    """Peak figures of one device, who published them, and when it was announced.

    Attributes:
        flops: dense matrix FLOP/s by data type.
        bandwidth, memory: bytes/s and bytes; a memory of 0 is not known.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    date: str
    source: str

    def peak(self, dtype: str = "bfloat16") -> float:
        """Return FLOP/s of dense matrix products in `dtype`."""
        if dtype not in self.flops:
            raise ValueError(f"{self.name} has no figure for {dtype}, only {', '.join(self.flops)}")
        return self.flops[dtype]


_RTX = "NVIDIA RTX Blackwell PRO whitepaper, Workstation Edition"
# Name, dense bf16 TFLOP/s, TB/s, GB, announced, source
_PUBLISHED = (
    ("A100", 312, 2.039, 80, "2020-11", "NVIDIA A100 80GB SXM data sheet"),
    ("H100", 989, 3.35, 80, "2022-03", "NVIDIA H100 SXM data sheet, half of sparse"),
    ("H200", 989, 4.8, 141, "2023-11", "NVIDIA H200 SXM data sheet, half of sparse"),
    ("B200", 2250, 7.7, 180, "2024-03", "NVIDIA Blackwell data sheet, HGX B200"),
    ("MI300X", 1307.4, 5.3, 192, "2023-06", "AMD Instinct MI300X data sheet"),
    ("L40S", 362.05, 0.864, 48, "2023-08", "NVIDIA L40S data sheet"),
    ("RTX PRO 6000", 503.8, 1.792, 96, "2025-03", _RTX),
)
ACCELERATORS = {
    name: Accelerator(name, {"bfloat16": tflops * 1e12}, tb_s * 1e12, gb * 1e9, date, source)
    for name, tflops, tb_s, gb, date, source in _PUBLISHED
}


def accelerator(name: str) -> Accelerator:
    """Return a device's published figures; an unknown name is an error that lists the known."""
    known = {key.lower().replace(" ", ""): gpu for key, gpu in ACCELERATORS.items()}
    found = known.get(str(name).lower().replace(" ", "").replace("-", ""))
    if found is None:
        raise ValueError(f"unknown accelerator {name!r}; known are {', '.join(ACCELERATORS)}")
    return found


class Estimate(float):
    """A number with its unit and its assumptions: every argument, and what follows from them."""

    unit: str
    assumptions: dict[str, Any]

    def __new__(cls, value: float, unit: str = "", **assumptions: Any) -> "Estimate":
        """Make the number; a copy sets its attributes afterwards."""
        self = super().__new__(cls, value)
        self.unit, self.assumptions = unit, assumptions
        return self

    def report(self) -> str:
        """Return the number, its unit and the assumptions, on one line."""
        given = ", ".join(f"{name}={_text(value)}" for name, value in self.assumptions.items())
        return f"{_text(float(self))} {self.unit} ({given})"


def _priced(shape: ModelShape, gpu: Accelerator) -> dict[str, Any]:
    """Say of which model and device an estimate is."""
    return {
        "gpu": gpu.name,
        "gpu_tflops": gpu.peak() / 1e12,
        "gpu_tb_per_s": gpu.bandwidth / 1e12,
        "model_params": shape.params,
        "layers": shape.layers,
    }


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _one_number(shape: ModelShape, params: float | None) -> float | None:
    """Return `params`, a rounded number of weights that stands for the exact counts, or None."""
    if params is not None and shape.experts:
        raise ValueError(
            f"params = {params} is one number, and a model with experts = {shape.experts} holds,"
            " reads and multiplies different ones: leave it out"
        )
    return None if params is None else check.number("params", params, above=0)


def decode_weights(shape: ModelShape, batch: float) -> float:
    """Count the weights that one decode step of `batch` sequences reads.

    All of a dense model but its embedding, of which a step reads one row per sequence. Of E experts
    with k per token, E (1 - (1 - k/E)^batch) are expected to be hit when tokens choose
    independently and evenly, an assumption that real routers do not quite keep.
    """
    batch = check.number("batch", batch, above=0)
    miss = 1 - shape.top_k / shape.experts if shape.experts else 1.0
    return matmul_weights(shape, shape.experts * (1 - miss**batch)) + _vectors(shape)


def decode_flops(shape: ModelShape, context: float) -> float:
    """Count the FLOPs of one decoded token that attends to `context` tokens.

    Latent attention multiplies with the latent as it is cached: its up-projections act on the query
    and on the sum of values instead.
    """
    per_key = 2 * shape.kv_lora + shape.rope_dim if shape.kv_lora else shape.head_dim + shape.v_dim
    return 2 * matmul_weights(shape) + 2 * shape.heads * per_key * shape.keys(context)


def decode_tokens_per_s(
    shape: ModelShape,
    gpu: Accelerator,
    *,
    batch: float,
    context: float,
    params: float | None = None,
    bytes_per_weight: float = 2.0,
    bytes_per_kv: float = 2.0,
    bandwidth_share: float = 1.0,
) -> Estimate:
    """Bound the tokens/s that one GPU decodes: the roofline of one step.

    Over the GPUs that hold the batch together the tokens/s per GPU are the same, if communication
    is free. The assumptions say what bounds it, and what weights and caches need.

    Args:
        batch, context: sequences that decode together, tokens that each attends to on average.
        params: a rounded number of weights to read instead of the exact ones, for 2 * params FLOPs.
        bytes_per_weight, bytes_per_kv: 2 for bf16, 1 for 8 bits.
        bandwidth_share: of the peak that is reached.
    """
    batch = check.number("batch", batch, above=0)
    context = check.number("context", context, above=0)
    params = _one_number(shape, params)
    bytes_per_weight = check.number("bytes_per_weight", bytes_per_weight, above=0)
    bytes_per_kv = check.number("bytes_per_kv", bytes_per_kv, above=0)
    bandwidth_share = check.number("bandwidth_share", bandwidth_share, above=0, most=1)
    given = {name: value for name, value in locals().items() if name not in ("shape", "gpu")}
    cache = batch * shape.kv_bytes(context, bytes_per_kv)
    weights = (params or decode_weights(shape, batch)) * bytes_per_weight
    to_read = (weights + cache) / (gpu.bandwidth * bandwidth_share)
    to_compute = batch * (2 * params if params else decode_flops(shape, context)) / gpu.peak()
    held = (params or shape.params) * bytes_per_weight + cache
    return Estimate(
        batch / max(to_read, to_compute),
        "tokens/s per GPU",
        **_priced(shape, gpu) | given | {"params": params or "exact"},
        bound="memory" if to_read >= to_compute else "compute",
        memory_gb=held / 1e9,
        gpus_to_hold_it=math.ceil(held / gpu.memory) if gpu.memory else "unknown",
    )


def prefill_seconds(
    shape: ModelShape,
    gpu: Accelerator,
    *,
    lengths: Sequence[int],
    mfu: float = 0.4,
    params: float | None = None,
) -> Estimate:
    """Estimate the seconds in which one GPU reads prompts: forward FLOPs over the reached peak.

    Args:
        lengths: tokens of each prompt.
        mfu: the share of peak FLOP/s that is reached.
        params: use 2 * params FLOPs per token instead of exact counts, which include attention
            (and the output head at every token, though a server needs it at the last one only).
    """
    lengths = check.integers("lengths", lengths, 0)
    tokens = check.integer("tokens", sum(lengths))
    mfu = check.number("mfu", mfu, above=0, most=1)
    params = _one_number(shape, params)
    flops = 2 * params * tokens if params else forward_flops(shape, lengths)
    work = {"tokens": tokens, "sequences": len(lengths), "longest": max(lengths)}
    rule = {"mfu": mfu, "params": params or "exact"}
    return Estimate(flops / (gpu.peak() * mfu), "s", **_priced(shape, gpu), **work, **rule)


def train_tokens_per_s(
    shape: ModelShape,
    gpu: Accelerator,
    *,
    lengths: Sequence[int] = (1,),
    mfu: float = 0.4,
    params: float | None = None,
) -> Estimate:
    """Estimate the tokens/s that one GPU trains on: three forward passes' FLOPs per token.

    The arguments are those of `prefill_seconds`; `lengths` matters for exact counts.
    """
    forward = prefill_seconds(shape, gpu, lengths=lengths, mfu=mfu, params=params)
    tokens = forward.assumptions["tokens"]
    return Estimate(tokens / (3 * forward), "tokens/s per GPU", **forward.assumptions)


def prefill_tokens(
    tokens: float,
    policy_tokens: float,
    *,
    turns: float = 1,
    prompt_tokens: float = 0.0,
    group_size: float = 8,
    turn_reuse: float = 1.0,
    group_reuse: float = 0.0,
) -> float:
    """Count the tokens that an episode makes a server read, on average.

    Args:
        tokens, policy_tokens: all, and those sampled, evenly over the turns.
        turns: the first reads the prompt, each later one an equal share of the tools' output.
        prompt_tokens, group_size: of the prompt, and how many episodes share it.
        turn_reuse: 1 when the cache survives from turn to turn, 0 when each turn reads everything
            before it again, or the share of such reads that is saved.
        group_reuse: 1 when a prompt is read once per group, 0 when once per episode.
    """
    tokens = check.number("tokens", tokens, above=0)
    policy_tokens = check.number("policy_tokens", policy_tokens, 0, tokens)
    prompt_tokens = check.number("prompt_tokens", prompt_tokens, 0, tokens - policy_tokens)
    turns, group_size = check.number("turns", turns, 1), check.number("group_size", group_size, 1)
    lost = 1 - check.number("turn_reuse", turn_reuse, 0, 1)
    shared = check.number("group_reuse", group_reuse, 0, 1) * (1 - 1 / group_size)
    prompts = prompt_tokens * (1 + lost * (turns - 1)) * (1 - shared)
    tools = tokens - policy_tokens - prompt_tokens
    tools *= 1 + lost * max(turns - 2, 0) / 2  # the k-th answer is read again by all later turns
    return prompts + tools + policy_tokens * lost * (turns - 1) / 2


@dataclass(frozen=True)
class Cost:
    """GPU-hours by part, with the assumptions they rest on."""

    gpu_hours: dict[str, float]
    assumptions: dict[str, Any]

    @property
    def total(self) -> float:
        """GPU-hours of all parts."""
        return sum(self.gpu_hours.values())

    @property
    def decode_share(self) -> float:
        """The part of the GPU-hours that is spent on decoding."""
        return self.gpu_hours["decode"] / self.total

    def report(self) -> str:
        """Return the table of parts and the list of assumptions, as text."""
        rows = [*self.gpu_hours.items(), ("total", self.total)]
        lines = [f"{name:<14} {hours:10.2f} GPU-hours" for name, hours in rows]
        lines.append(f"{'decode share':<14} {self.decode_share:10.0%}")
        lines += [f"  {name:<24} {_text(value)}" for name, value in self.assumptions.items()]
        return "\n".join(lines)


def step_cost(
    shape: ModelShape,
    gpu: Accelerator,
    *,
    episodes: int = 512,
    tokens: float = 24_000,
    policy_tokens: float = 6_000,
    batch: float = 64,
    context: int = 16_384,
    busy: float = 0.5,
    train_busy: float = 1.0,
    mfu: float = 0.4,
    prefill_mfu: float = 0.4,
    bandwidth_share: float = 1.0,
    old_passes: float = 1.0,
    turns: int = 1,
    prompt_tokens: float = 0.0,
    group_size: int = 8,
    turn_reuse: float = 1.0,
    group_reuse: float = 0.0,
    bytes_per_weight: float = 2.0,
    bytes_per_kv: float = 2.0,
    params: float | None = None,
) -> Cost:
    """Estimate the GPU-hours of one step of RL, by part.

    Args:
        episodes: of equal length; `tokens`, `policy_tokens`, `turns` and what follows are those of
            `prefill_tokens`, read at the mean cost of a token.
        batch: and `context`, `bandwidth_share`, bytes and `params` as in `decode_tokens_per_s`; no
            context is longer than of an agent that first reads all: tokens - policy_tokens / 2.
        busy, train_busy: the share of its time in which a GPU for rollouts decodes, between waits
            for tools, and in which one for training computes, between waits for rollouts.
        mfu, prefill_mfu: of training and scoring, and of prefill.
        old_passes: forward passes for old and reference log-probs.
    """
    episodes = check.number("episodes", episodes, above=0)
    tokens = check.number("tokens", tokens, above=0)
    policy_tokens = check.number("policy_tokens", policy_tokens, 0, tokens)
    busy = check.number("busy", busy, above=0, most=1)
    train_busy = check.number("train_busy", train_busy, above=0, most=1)
    prefill_mfu = check.number("prefill_mfu", prefill_mfu, above=0, most=1)
    old_passes = check.number("old_passes", old_passes, least=0)
    given = {name: value for name, value in locals().items() if name not in ("shape", "gpu")}
    reads = prefill_tokens(tokens, policy_tokens, **_taken(prefill_tokens, given))
    if context > (longest := tokens - policy_tokens / 2):
        raise ValueError(
            f"context = {context} exceeds {longest:g}: no mean over the last"
            f" {policy_tokens:g} of {tokens:g} tokens is longer"
        )
    decode = _taken(decode_tokens_per_s, given) | {"batch": batch, "context": context}
    rate = decode_tokens_per_s(shape, gpu, **decode)
    forward = partial(prefill_seconds, shape, gpu, lengths=[round(tokens)], params=params)
    scored = forward(mfu=mfu)
    seconds = {
        "train": 3 * scored / train_busy,
        "old log-probs": old_passes * scored / train_busy,
        "prefill": forward(mfu=prefill_mfu) * reads / tokens,
        "decode": policy_tokens / rate / busy,
    }
    assumptions = (
        given
        | _priced(shape, gpu)
        | {
            "params": params or "exact",
            "decode_tokens_per_s": float(rate),
            "decode_bound": rate.assumptions["bound"],
            "decode_memory_gb": rate.assumptions["memory_gb"],
            "gpus_to_hold_it": rate.assumptions["gpus_to_hold_it"],
            "train_tokens_per_s": tokens / (3 * scored),
            "tokens_read_per_episode": reads,
        }
    )
    return Cost({name: episodes * s / 3600 for name, s in seconds.items()}, assumptions)


def _taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Select those of the given values that are optional arguments of the function."""
    return {name: given[name] for name in function.__kwdefaults__ if name in given}


def run_cost(step: Cost, *, steps: float = 300) -> Cost:
    """Multiply a step by the number of steps, all assumed alike."""
    steps = check.number("steps", steps, above=0)
    hours = {name: steps * value for name, value in step.gpu_hours.items()}
    return Cost(hours, step.assumptions | {"steps": steps})


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command line: `python -m agentrl.throughput --config config.json --gpu H200`."""
    program, one_line = "python -m agentrl.throughput", argparse.SUPPRESS  # no usage with an error
    parser = argparse.ArgumentParser(program, one_line, step_cost.__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, help="config.json of a transformers model")
    parser.add_argument("--gpu", required=True, help=f"one of {', '.join(ACCELERATORS)}")
    parser.add_argument("--steps", type=int, default=300, help="steps of the run, default 300")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    for name, default in step_cost.__kwdefaults__.items():
        kind = int if step_cost.__annotations__[name] in (int, "int") else float
        text = f"{kind.__name__}, default {default}"
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default, help=text)
    options = vars(parser.parse_args(argv))
    path, name, steps, as_json = (options.pop(key) for key in ("config", "gpu", "steps", "json"))
    try:
        shape = ModelShape.from_config(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        parser.error(f"--config {path}: {error}")
    try:
        run = run_cost(step_cost(shape, accelerator(name), **options), steps=steps)
    except ValueError as error:
        parser.error(str(error))
    totals = {"total_gpu_hours": run.total, "decode_share": run.decode_share}
    parts = {"gpu_hours": run.gpu_hours, **totals, "assumptions": run.assumptions}
    print(json.dumps(parts, indent=2) if as_json else run.report())
    return 0


# As a script only: in a notebook this module has no spec.
if __name__ == "__main__" and globals().get("__spec__") is not None:
    sys.exit(command_line())


class _Products(TorchDispatchMode):
    """Counts the FLOPs of products: forward, backward, what checkpointing repeats, attention's."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = self.again = self.pairs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is None and "grouped_mm" in func._overloadpacket.__name__:
            count = _grouped_flops  # torch knows no count of experts in one kernel
        if count is None:
            return out
        flops = count(*args, **(kwargs or {}), out_val=out)
        inside = torch._C._current_graph_task_id() >= 0  # a backward pass
        repeated = inside and torch.is_grad_enabled()
        self.again += flops * repeated
        self.forward += flops * (not inside)
        self.backward += flops * (inside and not repeated)
        if func._overloadpacket is torch.ops.aten.bmm and not repeated:
            square = any(x.shape[1] == x.shape[2] for x in (*args[:2], out))
            self.pairs += flops * square  # of attention, if a factor is T by T
        return out


def _grouped_flops(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    batch = len(a) if a.ndim == b.ndim == 3 else 1
    return 2 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1]


@as_check
def flop_count_check(
    flops: float,
    step_fn: Callable[[], Any],
    *,
    tolerance: float = 0.01,
    strict: bool = False,
) -> Iterator[Finding]:
    """Check the FLOPs that a trainer reports for a step against those that torch counts.

    Args:
        flops: as reported, forward and backward.
        step_fn: runs that step on a small model, on any device, each row one sequence. Attention by
            `scaled_dot_product_attention` runs as plain products meanwhile, over all pairs, in
            sliding windows too: report all pairs there. Other fused kernels are not counted.
        tolerance: relative. Products are counted exactly, weights that are frozen without their
            gradient. Norms and softmax are not counted. Attention, batches of products with a
            square factor, may be counted over all pairs or over the causal half.
        strict: raise `AuditError` if the check fails.
    """
    with sdpa_kernel(SDPBackend.MATH), _Products() as seen:
        step_fn()
    counted = seen.forward + min(seen.backward, 2 * seen.forward)  # a head may repeat itself
    if not counted:
        raise ValueError("step_fn ran no matrix product: there is nothing to compare")
    least = counted - seen.pairs / 2  # the causal half
    error = (flops - min(max(flops, least), counted)) / counted
    likely = "a product is left out, as the head or attention, or a sliding window is counted"
    if error and abs(flops / (seen.forward + seen.backward + seen.again) - 1) <= tolerance:
        likely = "the forward pass that checkpointing repeats is counted: hardware, not model FLOPs"
    elif error > 0:
        likely = "an embedding is counted as a matrix product, or a frozen weight's gradient"
    index = f"{flops:,.0f} reported, {counted:,} counted"
    why = "both count matrix products, 2 per weight and token in each pass"
    yield Finding(abs(error), "relative", index, tolerance, why, likely)
