# Generated from chapters/10-throughput.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Throughput arithmetic.

How many GPU-hours does a run cost, and which half dominates: sampling episodes, or training?
"""

import argparse
import inspect
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from agentrl import check

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Cost",
    "Estimate",
    "ModelShape",
    "accelerator",
    "causal_pairs",
    "command_line",
    "decode_tokens_per_s",
    "decode_weights",
    "forward_flops",
    "matmul_weights",
    "measure_accelerator",
    "prefill_seconds",
    "prefill_tokens",
    "run_cost",
    "step_cost",
    "train_tokens_per_s",
    "training_flops",
]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a decoder-only transformer: what its parameters, FLOPs and cache follow from.

    Attributes:
        vocab, d_model: V and D.
        heads, kv_heads, head_dim: of queries and of keys; `v_dim` is the width of a value head,
            by default `head_dim`.
        ffn: inner width of a dense layer's network; `gated` networks have three matrices, others
            two.
        windows: one entry per layer, its attention window in tokens, None for full attention.
        sparse: one entry per layer, whether its network is a mixture of experts; by default none.
        experts, top_k, expert_ffn: routed experts, how many a token uses, their inner width.
        shared_ffn, shared_gate: inner width of the experts that every token uses; a gate for them.
        q_lora, kv_lora, rope_dim: ranks of latent attention, and the part of `head_dim` that
            carries the position; `kv_lora = 0` is ordinary attention, `q_lora = 0` a plain query.
        tied: the output head is the embedding.
        qkv_bias, o_bias, mlp_bias: which products have a bias (latent attention: the two
            down-projections, the output).
        qk_norm: queries and keys are normalised per head. `norms`: per layer, each of width D.
        positions: rows of a learned position table.
    """

    vocab: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    windows: tuple[int | None, ...]
    v_dim: int | None = None
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
        _check_shape(self)

    @classmethod
    def from_config(cls, config: Any) -> "ModelShape":
        """Read a `transformers` config, given as the object, or as the dict of a `config.json`.

        Raises:
            ValueError: if the architecture is not known, or the config lacks something; it says
                what is missing.
        """
        return cls(**_read_config(config))

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.windows)

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.v_dim or self.head_dim

    @property
    def sparse_layers(self) -> int:
        """Number of layers with a mixture of experts."""
        return sum(self.sparse)

    @property
    def params(self) -> int:
        """All parameters, as `model.parameters()` counts them; a tied table counts once."""
        embedding = (self.vocab + self.positions) * self.d_model
        head = self.vocab * self.d_model
        matrices = matmul_weights(self, self.experts) - (head if self.tied else 0)
        return embedding + matrices + _vectors(self)

    @property
    def active_params(self) -> int:
        """Parameters that one token meets: all but the experts that it is not routed to."""
        idle = self.sparse_layers * (self.experts - self.top_k)
        return self.params - idle * 3 * self.d_model * self.expert_ffn

    def kv_bytes(self, context: int, bytes_per_value: float = 2.0) -> float:
        """Bytes that the cache of one sequence holds after `context` tokens."""
        held = (min(context, window or context) for window in self.windows)
        return _cached_values(self) * bytes_per_value * sum(held)

    def kv_bytes_per_token(self, bytes_per_value: float = 2.0) -> float:
        """Bytes by which the cache of one sequence grows per token, while no window is full."""
        return self.kv_bytes(1, bytes_per_value)


def _check_shape(shape: "ModelShape") -> None:
    for name in ("vocab", "d_model", "heads", "kv_heads", "head_dim", "ffn", "norms"):
        check.integer(name, getattr(shape, name))
    check.not_empty("windows", shape.windows)
    for i, window in enumerate(shape.windows):
        check.integer(f"windows[{i}]", 1 if window is None else window)
    if shape.sparse and len(shape.sparse) != len(shape.windows):
        raise ValueError(f"sparse has {len(shape.sparse)} layers, windows {len(shape.windows)}")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"heads = {shape.heads} is no multiple of kv_heads = {shape.kv_heads}")
    if shape.top_k > shape.experts:
        raise ValueError(f"top_k = {shape.top_k} exceeds experts = {shape.experts}")


def matmul_weights(shape: ModelShape, experts: float | None = None) -> int:
    """Count the weights that multiply a token in matrix products.

    Args:
        shape: of the model.
        experts: routed experts to count per layer; by default those that one token uses.

    Returns:
        Weights of attention, networks, routers and the output head. The embedding is a look-up
        and counts 0.
    """
    D, H = shape.d_model, shape.heads
    if shape.kv_lora:
        query = shape.q_lora * (D + H * shape.head_dim) if shape.q_lora else D * H * shape.head_dim
        up = shape.head_dim - shape.rope_dim + shape.value_dim  # of the latent, to keys and values
        attention = query + D * (shape.kv_lora + shape.rope_dim) + shape.kv_lora * H * up
    else:
        attention = D * (H + shape.kv_heads) * shape.head_dim
        attention += D * shape.kv_heads * shape.value_dim
    attention += H * shape.value_dim * D
    routed = shape.top_k if experts is None else experts
    sparse = D * shape.experts + 3 * D * (routed * shape.expert_ffn + shape.shared_ffn)
    sparse += D * shape.shared_gate
    dense = (3 if shape.gated else 2) * D * shape.ffn
    networks = shape.sparse_layers * sparse + (shape.layers - shape.sparse_layers) * dense
    return shape.layers * attention + networks + shape.vocab * D


def _vectors(shape: ModelShape) -> int:
    # Norms and biases: part of the parameters, not of the FLOPs.
    D = shape.d_model
    qkv = (shape.heads + shape.kv_heads) * shape.head_dim + shape.kv_heads * shape.value_dim
    norms = shape.norms * D + 2 * shape.head_dim * shape.qk_norm
    if shape.kv_lora:
        qkv = shape.q_lora + shape.kv_lora + shape.rope_dim
        norms += shape.q_lora + shape.kv_lora
    attention = norms + qkv * shape.qkv_bias + D * shape.o_bias
    wide = 2 if shape.gated else 1
    dense = (wide * shape.ffn + D) * shape.mlp_bias
    sparse = (wide * shape.shared_ffn + D) * shape.mlp_bias * bool(shape.shared_ffn)
    networks = shape.sparse_layers * sparse + (shape.layers - shape.sparse_layers) * dense
    return shape.layers * attention + networks + D


def _cached_values(shape: ModelShape) -> int:
    # Per layer and token. Latent attention keeps the latent and one rotated key for all heads.
    if shape.kv_lora:
        return shape.kv_lora + shape.rope_dim
    return shape.kv_heads * (shape.head_dim + shape.value_dim)


_ARCHITECTURES = (
    "deepseek_v2",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)


def _getter(config: Any, kind: str) -> Any:
    read = config.get if isinstance(config, Mapping) else partial(getattr, config)

    def get(name: str, *other: Any, null: Any = None) -> Any:
        """Read a field; `other` stands for an absent one and, without `null`, for None."""
        value = read(name, absent := object())
        if value is None and null is not None:
            return null
        if value is None or value is absent:
            if not other:
                raise ValueError(f"the {kind} config lacks {name!r}")
            return other[0]
        if isinstance(value, str) and name != "model_type":
            raise TypeError(f"{name} = {value!r} is a text")
        return value

    return get


def _read_config(config: Any) -> dict[str, Any]:
    kind = _getter(config, "given")("model_type")
    if _getter(config, kind)("text_config", None) is not None:
        raise ValueError(f"{kind!r} holds more than a decoder: pass its text_config")
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"unknown architecture {kind!r}: missing is how its layers compute and cache; "
            f"known are {', '.join(_ARCHITECTURES)}"
        )
    get = _getter(config, kind)
    bias = get("attention_bias", False)
    shape = {
        "vocab": get("vocab_size"),
        "d_model": get("hidden_size"),
        "heads": get("num_attention_heads"),
        "ffn": get("intermediate_size"),
        "tied": get("tie_word_embeddings", kind.startswith("gemma")),
        "windows": _windows(get, kind),
        "qkv_bias": kind == "qwen2" or (get("qkv_bias", True) if kind == "qwen2_moe" else bias),
        "o_bias": bias and kind not in ("qwen2", "qwen2_moe"),
        "mlp_bias": get("mlp_bias", False) if kind in ("llama", "deepseek_v2") else False,
        "qk_norm": kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        "norms": 4 if kind in ("gemma2", "gemma3_text") else 2,
    }
    if kind in ("mistral", "mixtral"):
        shape |= {"qkv_bias": False, "o_bias": False}
    shape |= _heads(get, kind, shape["d_model"], shape["heads"])
    return shape | _experts(get, kind, len(shape["windows"]))


def _heads(get: Any, kind: str, d_model: int, heads: int) -> dict[str, int]:
    if kind.startswith("deepseek"):
        rope = get("qk_rope_head_dim")
        shape = {"head_dim": get("qk_nope_head_dim") + rope, "rope_dim": rope}
        shape |= {"v_dim": get("v_head_dim"), "kv_heads": heads}
        return shape | {"kv_lora": get("kv_lora_rank"), "q_lora": get("q_lora_rank", null=0)}
    # Where a class has a fixed default of its own, the config must say the width.
    divided = () if kind.startswith(("gemma", "qwen3")) else (d_model // heads,)
    default = (heads,) if kind == "llama" else ()
    return {
        "head_dim": get("head_dim", *divided),
        "kv_heads": get("num_key_value_heads", *default),
    }


def _windows(get: Any, kind: str) -> tuple[int | None, ...]:
    layers = range(get("num_hidden_layers"))
    types = get("layer_types", None)
    if types is not None:
        if len(types) != len(layers):
            raise ValueError(f"layer_types has {len(types)}, num_hidden_layers = {len(layers)}")
        for i, name in enumerate(types):
            if name not in ("full_attention", "sliding_attention"):
                raise ValueError(f"layer_types[{i}] = {name!r}: missing is how it computes")
        slides = [name == "sliding_attention" for name in types]
    elif kind in ("mistral", "mixtral"):
        # Mistral's class has a window of its own where the key is missing, Mixtral's has none.
        absent = (None,) if kind == "mixtral" else ()
        slides = [bool(get("sliding_window", *absent, null=0)) for _ in layers]
    elif kind in ("gemma2", "gemma3_text"):
        period = 2 if kind == "gemma2" else get("sliding_window_pattern", 6)
        slides = [bool((i + 1) % period) for i in layers]
    elif kind.startswith("qwen") and get("use_sliding_window", False):
        slides = [kind == "qwen3_moe" or i >= get("max_window_layers") for i in layers]
        if kind == "qwen2_moe":
            slides = [bool((i + 1) % 2) and i < get("max_window_layers") for i in layers]
    else:
        slides = [False for _ in layers]
    return tuple(get("sliding_window") if slide else None for slide in slides)


def _experts(get: Any, kind: str, layers: int) -> dict[str, Any]:
    if kind == "mixtral":
        found = {"experts": get("num_local_experts"), "expert_ffn": get("intermediate_size")}
        sparse = [True] * layers
    elif kind in ("qwen2_moe", "qwen3_moe"):
        name = "num_experts" if get("num_experts", None) else "num_local_experts"
        found = {"experts": get(name), "expert_ffn": get("moe_intermediate_size")}
        every, dense = get("decoder_sparse_step", 1), get("mlp_only_layers", ())
        sparse = [i not in dense and (i + 1) % every == 0 for i in range(layers)]
        if kind == "qwen2_moe":
            found |= {"shared_ffn": get("shared_expert_intermediate_size"), "shared_gate": True}
    elif kind.startswith("deepseek"):
        found = {"experts": get("n_routed_experts"), "expert_ffn": get("moe_intermediate_size")}
        found["shared_ffn"] = get("n_shared_experts", null=0) * found["expert_ffn"]
        if get("moe_layer_freq", 1) != 1:
            raise ValueError(f"moe_layer_freq = {get('moe_layer_freq')}: missing is which layers")
        sparse = [i >= get("first_k_dense_replace") for i in range(layers)]
    else:
        return {}
    return found | {"top_k": get("num_experts_per_tok"), "sparse": tuple(sparse)}


def causal_pairs(lengths: Iterable[int], window: int | None = None) -> int:
    """Count the pairs (query, key) of causal attention: sum of s(s + 1)/2 over sequences.

    Args:
        lengths: tokens of each sequence.
        window: a query sees at most this many keys, itself included; by default all before it.
    """
    check.integer("window", 1 if window is None else window)
    return _pairs(check.integers("lengths", lengths, 0), window)


def _pairs(counts: list[int], window: int | None) -> int:
    pairs = 0
    for s in counts:
        seen = s if window is None else min(s, window)
        pairs += seen * (seen + 1) // 2 + (s - seen) * seen
    return pairs


def forward_flops(shape: ModelShape, lengths: Sequence[int], *, pairs: str = "causal") -> int:
    """Count the FLOPs of one forward pass: 2 per weight and token, plus attention.

    Args:
        shape: of the model.
        lengths: tokens of each sequence; sequences do not attend to each other.
        pairs: "causal" counts what is needed; "square" counts s * s per sequence, as a kernel
            that masks does the work, and as PyTorch's counter sees it.

    Returns:
        FLOPs of the matrix products. Norms, softmax and rotations are not counted.
    """
    check.one_of("pairs", pairs, ("causal", "square"))
    lengths = check.integers("lengths", lengths, 0)
    total = 2 * matmul_weights(shape) * sum(lengths)
    per_pair = 2 * shape.heads * (shape.head_dim + shape.value_dim)
    for window in set(shape.windows):
        layers = shape.windows.count(window)
        square = sum(s * s for s in lengths) if pairs == "square" else 0
        total += layers * per_pair * (square or _pairs(lengths, window))
    return total


def training_flops(shape: ModelShape, lengths: Sequence[int], *, pairs: str = "causal") -> int:
    """Count the FLOPs of forward and backward: three times `forward_flops`."""
    return 3 * forward_flops(shape, lengths, pairs=pairs)


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Peak figures of one device.

    Attributes:
        name: of the device.
        flops: dense matrix FLOP/s by data type.
        bandwidth: of its memory, bytes/s.
        memory: bytes; 0 where it is not known.
        source, date: who published the figures and when the device was announced.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    source: str
    date: str

    def peak(self, dtype: str = "bfloat16") -> float:
        """Return FLOP/s of dense matrix products in `dtype`."""
        if dtype not in self.flops:
            raise ValueError(f"{self.name} has no figure for {dtype}, only {', '.join(self.flops)}")
        return self.flops[dtype]


def _published(name: str, tflops: float, tb_s: float, gb: float, source: str, date: str) -> Any:
    flops = {"bfloat16": tflops * 1e12}
    return Accelerator(
        name=name, flops=flops, bandwidth=tb_s * 1e12, memory=gb * 1e9, source=source, date=date
    )


ACCELERATORS = {
    gpu.name: gpu
    for gpu in (
        _published("A100", 312, 2.039, 80, "NVIDIA A100 80GB SXM data sheet", "2020-11"),
        _published("H100", 989, 3.35, 80, "NVIDIA H100 SXM data sheet, half of sparse", "2022-03"),
        _published("H200", 989, 4.8, 141, "NVIDIA H200 SXM data sheet, half of sparse", "2023-11"),
        _published("B200", 2250, 7.7, 180, "NVIDIA Blackwell data sheet, HGX B200", "2024-03"),
        _published("MI300X", 1307.4, 5.3, 192, "AMD Instinct MI300X data sheet", "2023-06"),
        _published("L40S", 362.05, 0.864, 48, "NVIDIA L40S data sheet", "2023-08"),
        _published(
            "RTX PRO 6000",
            503.8,
            1.792,
            96,
            "NVIDIA RTX Blackwell PRO whitepaper, Workstation Edition",
            "2025-03",
        ),
    )
}


def accelerator(name: str) -> Accelerator:
    """Return a device's published figures; an unknown name is an error that lists the known."""
    known = {key.lower().replace(" ", ""): gpu for key, gpu in ACCELERATORS.items()}
    found = known.get(name.lower().replace(" ", "").replace("-", ""))
    if found is None:
        raise ValueError(f"unknown accelerator {name!r}; known are {', '.join(ACCELERATORS)}")
    return found


class Estimate(float):
    """A number with its unit and the assumptions it rests on.

    Attributes:
        unit: of the number.
        assumptions: from name to value, every argument and what was derived on the way.
    """

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


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None:
            check.number(name, value, above=0)


def _share(**values: float) -> None:
    for name, value in values.items():
        check.number(name, value, least=0, most=1)


def _one_number(shape: ModelShape, params: float | None) -> None:
    _positive(params=params)
    if shape.experts and params is not None:
        raise ValueError(
            f"params = {params:g} is one number, and a model with experts = {shape.experts} holds,"
            " reads and multiplies different ones: leave it out"
        )


def decode_weights(shape: ModelShape, batch: float) -> float:
    """Count the weights that one decode step of `batch` sequences reads.

    All of a dense model but its embedding, of which a step reads one row per sequence. Of E experts
    with k per token, E (1 - (1 - k/E)^batch) are expected to be hit when tokens choose
    independently and evenly, an assumption that real routers do not quite keep.
    """
    hit = 0.0
    if shape.experts:
        hit = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** batch)
    return matmul_weights(shape, hit) + _vectors(shape)


def decode_tokens_per_s(
    shape: ModelShape,
    gpu: Accelerator,
    *,
    batch: float,
    context: int,
    params: float | None = None,
    bytes_per_weight: float = 2.0,
    bytes_per_kv: float = 2.0,
    bandwidth_share: float = 1.0,
) -> Estimate:
    """Bound the tokens/s that one GPU decodes: the roofline of one step.

    Latent attention multiplies with the latent as it is cached: its up-projections act on the query
    and on the sum of values instead, and scores and values cost 2 * heads * (2 * kv_lora +
    rope_dim) FLOPs per key and layer.

    Args:
        shape, gpu: the model and the device.
        batch: sequences that decode together, on the GPU or on the group of GPUs that hold them.
        context: tokens that each of them attends to, on average.
        params: a rounded number of weights to read instead of the exact ones, for 2 * params FLOPs;
            not for a mixture of experts, which holds, reads and multiplies different numbers.
        bytes_per_weight, bytes_per_kv: 2 for bf16, 1 for 8 bits.
        bandwidth_share: of the peak that is reached.

    Returns:
        tokens/s per GPU. Splitting the step over g GPUs divides its bytes and its time by g, so
        the tokens/s per GPU stay the same while communication is free. The assumptions hold
        `bound`, memory or compute; `memory_gb`, what weights and caches need; and
        `gpus_to_hold_it`, the smallest such group.
    """
    _positive(batch=batch, context=context, bytes_per_weight=bytes_per_weight)
    _positive(bytes_per_kv=bytes_per_kv, bandwidth_share=bandwidth_share)
    _one_number(shape, params)
    _share(bandwidth_share=bandwidth_share)
    cache = batch * shape.kv_bytes(context, bytes_per_kv)
    weights = (params or decode_weights(shape, batch)) * bytes_per_weight
    keys = sum(min(context, window or context) for window in shape.windows)
    per_key = shape.head_dim + shape.value_dim
    if shape.kv_lora:
        per_key = 2 * shape.kv_lora + shape.rope_dim
    attention = 2 * shape.heads * per_key * keys
    flops = batch * (2 * (params or matmul_weights(shape)) + attention * (params is None))
    to_read = (weights + cache) / (gpu.bandwidth * bandwidth_share)
    to_compute = flops / gpu.peak()
    held = (params or shape.params) * bytes_per_weight + cache
    return Estimate(
        batch / max(to_read, to_compute),
        "tokens/s per GPU",
        **_priced(shape, gpu),
        batch=batch,
        context=context,
        params="exact" if params is None else params,
        bytes_per_weight=bytes_per_weight,
        bytes_per_kv=bytes_per_kv,
        bandwidth_share=bandwidth_share,
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
        shape, gpu: the model and the device.
        lengths: tokens of each prompt.
        mfu: the share of peak FLOP/s that is reached.
        params: use 2 * params FLOPs per token instead of exact counts, which include attention
            (and the output head at every token, though a server needs it at the last one only);
            not for a mixture of experts.
    """
    lengths = check.integers("lengths", lengths, 0)
    _positive(mfu=mfu, tokens=sum(lengths))
    _one_number(shape, params)
    _share(mfu=mfu)
    flops = 2 * params * sum(lengths) if params else forward_flops(shape, lengths)
    rule = "exact" if params is None else params
    seconds = flops / (gpu.peak() * mfu)
    work = {"tokens": sum(lengths), "sequences": len(lengths), "longest": max(lengths)}
    return Estimate(seconds, "s", **_priced(shape, gpu), **work, mfu=mfu, params=rule)


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
    turns: int = 1,
    prompt_tokens: float = 0.0,
    group_size: int = 8,
    turn_reuse: float = 1.0,
    group_reuse: float = 0.0,
) -> float:
    """Count the tokens that an episode makes a server read, on average.

    Args:
        tokens: of the episode; `policy_tokens` of them are sampled, evenly over the turns.
        turns: turns of the episode. The first reads the prompt, each later one an equal share of
            the tools' output.
        prompt_tokens: at the start, the same in all episodes of a group.
        group_size: episodes that share the prompt.
        turn_reuse: 1 when the cache survives from turn to turn, 0 when each turn reads everything
            before it again, or the share of such reads that is saved.
        group_reuse: 1 when a prompt is read once per group, 0 when once per episode.

    """
    _share(turn_reuse=turn_reuse, group_reuse=group_reuse)
    _positive(tokens=tokens, turns=turns, group_size=group_size)
    check.number("turns", turns, least=1)
    check.number("group_size", group_size, least=1)
    check.number("policy_tokens", policy_tokens, least=0, most=tokens)
    check.number("prompt_tokens", prompt_tokens, least=0, most=tokens - policy_tokens)
    tools = tokens - policy_tokens - prompt_tokens
    lost = 1 - turn_reuse
    prompts = prompt_tokens * (1 + lost * (turns - 1)) * (1 - group_reuse * (1 - 1 / group_size))
    tools *= 1 + lost * max(turns - 2, 0) / 2  # the k-th answer is read again by all later turns
    sampled = policy_tokens * lost * (turns - 1) / 2
    return prompts + tools + sampled


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
        shape, gpu: the model and the device.
        episodes: per step, of `tokens` tokens each, of which the policy samples `policy_tokens`.
        batch, context: of decoding, as in `decode_tokens_per_s`; no context is longer than that of
            an agent that reads everything before it writes, tokens - policy_tokens / 2.
        busy: the share of the rollout time in which a GPU decodes, between waits.
        mfu, prefill_mfu: of training and scoring, and of prefill.
        bandwidth_share, bytes_per_weight, bytes_per_kv: as in `decode_tokens_per_s`.
        old_passes: forward passes for old and reference log-probs.
        turns, prompt_tokens, group_size, turn_reuse, group_reuse: as in `prefill_tokens`.
        params: use 6 * params FLOPs per token and 2 * params in a forward pass; exact otherwise,
            for episodes of equal length, prefill at the mean cost of a token. Not for a mixture of
            experts.
    """
    assumptions = {name: value for name, value in locals().items() if name not in ("shape", "gpu")}
    _positive(episodes=episodes, busy=busy, mfu=mfu, prefill_mfu=prefill_mfu)
    _share(busy=busy)
    check.number("old_passes", old_passes, least=0)
    reads = prefill_tokens(
        tokens,
        policy_tokens,
        turns=turns,
        prompt_tokens=prompt_tokens,
        group_size=group_size,
        turn_reuse=turn_reuse,
        group_reuse=group_reuse,
    )
    longest = tokens - policy_tokens / 2
    if context > longest:
        raise ValueError(
            f"context = {context} exceeds {longest:g}: no mean over the last"
            f" {policy_tokens:g} of {tokens:g} tokens is longer"
        )
    rate = decode_tokens_per_s(
        shape,
        gpu,
        batch=batch,
        context=context,
        params=params,
        bytes_per_weight=bytes_per_weight,
        bytes_per_kv=bytes_per_kv,
        bandwidth_share=bandwidth_share,
    )
    lengths = [round(tokens)]
    scored = prefill_seconds(shape, gpu, lengths=lengths, mfu=mfu, params=params)
    read = prefill_seconds(shape, gpu, lengths=lengths, mfu=prefill_mfu, params=params)
    seconds = {
        "train": 3 * scored,
        "old log-probs": old_passes * scored,
        "prefill": read * reads / tokens,
        "decode": policy_tokens / rate / busy,
    }
    assumptions |= _priced(shape, gpu) | {
        "params": "exact" if params is None else params,
        "decode_tokens_per_s": float(rate),
        "decode_bound": rate.assumptions["bound"],
        "decode_memory_gb": rate.assumptions["memory_gb"],
        "gpus_to_hold_it": rate.assumptions["gpus_to_hold_it"],
        "train_tokens_per_s": tokens / (3 * scored),
        "tokens_read_per_episode": reads,
    }
    return Cost({name: episodes * s / 3600 for name, s in seconds.items()}, assumptions)


def run_cost(step: Cost, *, steps: int = 300) -> Cost:
    """Multiply a step by the number of steps, all assumed alike."""
    _positive(steps=steps)
    hours = {name: steps * value for name, value in step.gpu_hours.items()}
    return Cost(hours, {**step.assumptions, "steps": steps})


def measure_accelerator(
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    *,
    size: int = 1024,
    copy_bytes: int = 2**28,
    repeats: int = 5,
) -> Accelerator:
    """Measure the roofline of this machine: the best of `repeats` runs, after one to warm up.

    Args:
        device: "cpu" or a CUDA device.
        dtypes: data types to measure products in; the estimates of this module read `bfloat16`.
        size: of the square matrices; several thousand on a GPU.
        copy_bytes: size of the tensor that is copied, which should exceed the caches. A copy reads
            and writes, so it moves twice as many bytes.
        repeats: runs to take the best of.
    """
    gpu = torch.device(device).type == "cuda"
    flops = {}
    for dtype in dtypes:
        a = torch.ones(size, size, dtype=dtype, device=device)
        seconds = _best(lambda a=a: a @ a, device, repeats)
        flops[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    bandwidth = 2 * copy_bytes / _best(lambda: target.copy_(source), device, repeats)
    memory = torch.cuda.get_device_properties(device).total_memory if gpu else 0
    name = torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    return Accelerator(
        name=name,
        flops=flops,
        bandwidth=bandwidth,
        memory=memory,
        source="measured",
        date=time.strftime("%Y-%m-%d"),
    )


def _best(run: Any, device: str, repeats: int) -> float:
    best = math.inf
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        """Say what is wrong on one line, without the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m agentrl.throughput",
        description="Estimate the GPU-hours of an RL run.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="config.json of a transformers model")
    parser.add_argument("--gpu", required=True, help=f"one of {', '.join(ACCELERATORS)}")
    parser.add_argument("--steps", type=int, default=300, help="steps of the run (default 300)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    for name, argument in list(inspect.signature(step_cost).parameters.items())[2:]:
        kind = int if argument.annotation in (int, "int") else float
        text = f"{kind.__name__}, default {argument.default}"
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, default=argument.default, help=text)
    return parser


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command line: `python -m agentrl.throughput --config config.json --gpu H200`."""
    parser = _parser()
    options = vars(parser.parse_args(argv))
    path, name, steps, as_json = (options.pop(key) for key in ("config", "gpu", "steps", "json"))
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        if not isinstance(config, dict):
            raise ValueError("it holds no JSON object")
        shape = ModelShape.from_config(config)
    except (OSError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        parser.error(f"--config {path}: {reason}")
    try:
        run = run_cost(step_cost(shape, accelerator(name), **options), steps=steps)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(_as_dict(run), indent=2) if as_json else run.report())
    return 0


def _as_dict(cost: Cost) -> dict[str, Any]:
    totals = {"total_gpu_hours": cost.total, "decode_share": cost.decode_share}
    return {"gpu_hours": cost.gpu_hours, **totals, "assumptions": cost.assumptions}


# As a script only: in a notebook this module has no spec.
if __name__ == "__main__" and globals().get("__spec__") is not None:
    sys.exit(command_line())
