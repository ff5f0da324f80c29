"""Arithmetic of chapter 10: counts equal real models and PyTorch, figures to the digit."""

import contextlib
import copy
import json
import pickle
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import agentrl as arl
from agentrl.throughput import command_line
from benchmarks.models import causal_lm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 12}
BIAS, MLP_BIAS = {"attention_bias": True}, {"mlp_bias": True}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
SHARED = {**GROUPED, **MOE, "shared_expert_intermediate_size": 28}
LATENT = {
    **SMALL,
    **{"num_key_value_heads": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6},
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "n_group": 2, "topk_group": 1},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "first_k_dense_replace": 1,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
# Name of the classes, arguments of the config.
MODELS = {
    "qwen2": ("Qwen2", GROUPED),
    "qwen2 tied": ("Qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2 windows": ("Qwen2", {**GROUPED, **WINDOWS}),
    "qwen2 moe": ("Qwen2Moe", SHARED),
    "qwen2 moe, some dense": ("Qwen2Moe", {**SHARED, "decoder_sparse_step": 2}),
    "qwen3": ("Qwen3", HEADS),
    "qwen3 biased": ("Qwen3", {**HEADS, **BIAS}),
    "qwen3 moe": ("Qwen3Moe", {**HEADS, **MOE}),
    "qwen3 moe, some dense": ("Qwen3Moe", {**HEADS, **MOE, "mlp_only_layers": [1]}),
    "llama": ("Llama", GROUPED),
    "llama, all heads": ("Llama", SMALL),
    "llama biased": ("Llama", {**HEADS, **BIAS, **MLP_BIAS}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": None}),
    "mistral windows": ("Mistral", {**HEADS, "sliding_window": 5}),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "gemma": ("Gemma", HEADS),
    "gemma 2": ("Gemma2", {**HEADS, "sliding_window": 6}),
    "gemma 3": ("Gemma3", {**HEADS, "num_hidden_layers": 7, "sliding_window": 6}),
    "deepseek 2": ("DeepseekV2", LATENT),
    "deepseek 2, plain query": ("DeepseekV2", {**LATENT, "q_lora_rank": None}),
    "deepseek 2 biased": ("DeepseekV2", {**LATENT, **BIAS, **MLP_BIAS}),
    "deepseek 3": ("DeepseekV3", LATENT),
    "deepseek 3 biased": ("DeepseekV3", {**LATENT, **BIAS}),
}


PAIRS = ("causal", "square")
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SPARSE = {**QWEN3_8B, **MOE, "model_type": "qwen3_moe"}
DEEPSEEK = {**LATENT, "model_type": "deepseek_v3", "n_shared_experts": 1}
QWEN, N = arl.ModelShape.from_config(QWEN3_8B), {"params": 8.2e9}
H200 = arl.accelerator("H200")
# Reads at once, does one FLOP per second: a step takes as many seconds as it has FLOPs.
COUNTER = arl.Accelerator("counter", {"bfloat16": 1.0}, 1e300, memory=0, date="", source="")


def without(config, key):
    return {name: value for name, value in config.items() if name != key}


def build(case):
    name, arguments = MODELS[case]
    config = getattr(transformers, name + ("TextConfig" if name == "Gemma3" else "Config"))
    config = config(**arguments, pad_token_id=0)
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")
    return config, model._from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("case", MODELS)
def test_a_shape_counts_what_the_model_has_and_does(case):
    config, model = build(case)
    shape = arl.ModelShape.from_config(config)
    parameters = dict(model.named_parameters())
    total = sum(p.numel() for p in parameters.values())
    routed = sum(p.numel() for name, p in parameters.items() if ".experts." in name)
    idle = routed * (shape.experts - shape.top_k) // max(shape.experts, 1)
    assert (shape.params, shape.active_params) == (total, total - idle)

    ids = torch.arange(2 * 10).view(2, 10)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        out = model(input_ids=ids, use_cache=True)
    assert arl.forward_flops(shape, [10, 10], pairs="square") == counter.get_total_flops()

    held = 0
    for layer in out.past_key_values.layers:
        held += sum(t.numel() * t.element_size() for t in (layer.keys, layer.values))
    # A library cache of a window keeps one token less, since the query brings its own.
    spare = sum(min(10, w or 10) - min(10, (w or 11) - 1) for w in shape.windows)
    per_layer = shape.kv_bytes(1, 4) / shape.layers
    assert held == 2 * (shape.kv_bytes(10, 4) - spare * per_layer)


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "DeepseekV3", "Gemma2"])
def test_full_sizes_on_the_meta_device(name):
    config = getattr(transformers, f"{name}Config")()
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    shape = arl.ModelShape.from_config(config)
    assert shape.params == sum(p.numel() for p in model.parameters())
    if name == "DeepseekV3":
        assert f"{shape.params / 1e9:.0f}B, {shape.active_params / 1e9:.1f}B" == "671B, 37.6B"
        assert shape.kv_bytes(1) == 61 * (512 + 64) * 2


def test_training_flops_equal_pytorchs_counter():
    model = causal_lm()
    ids = torch.arange(32)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    shape = arl.ModelShape.from_config(model.config)
    assert arl.training_flops(shape, [32], pairs="square") == counter.get_total_flops()
    assert arl.training_flops(shape, [32], pairs="square") == 30_375_936
    masked = 3 * 2 * 2 * 2 * 64 * (32 * 32 - 32 * 33 // 2)
    assert arl.training_flops(shape, [32]) == 30_375_936 - masked


def test_the_course_model_has_a_shape_too():
    model = arl.TinyAgent(50, d_model=32, n_layers=3, max_len=40)
    sizes = {"vocab": 50, "d_model": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 128}
    shape = arl.ModelShape(**sizes, gated=False, windows=(None,) * 3, positions=40)
    assert shape.params == sum(p.numel() for p in model.parameters())
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2, 20, dtype=torch.long), attention_mask=mask)
    linear = 2 * arl.matmul_weights(shape) * 40
    assert counter.get_total_flops() in (
        linear,  # the fused attention of this device is not counted
        arl.forward_flops(shape, [20, 20], pairs="square"),
    )


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.none() | st.integers(1, 35))
def test_causal_pairs_are_those_one_would_list(lengths, window):
    queries = [q for s in lengths for q in range(s)]
    listed = [k for q in queries for k in range(q + 1) if window is None or q - k < window]
    assert arl.causal_pairs(lengths, window) == len(listed)


def test_packed_sequences_do_not_attend_to_each_other():
    assert arl.causal_pairs([64] * 64) == 133_120
    assert arl.causal_pairs([64 * 64]) == 8_390_656
    shape = QWEN
    apart, joined = arl.forward_flops(shape, [64] * 64), arl.forward_flops(shape, [4096])
    assert joined - apart == 36 * 4 * 32 * 128 * (8_390_656 - 133_120)


def test_the_roofline_to_the_digit():
    assert f"{QWEN.kv_bytes(1) / 1e3:.0f}" == "147"
    assert H200.memory == 141e9 and H200.bandwidth == 4.8e12
    for batch, context, digits in ((64, 2048, "8598"), (256, 16_384, "1935"), (64, 16_384, "1796")):
        rate = arl.decode_tokens_per_s(QWEN, H200, batch=batch, context=context, **N)
        assert f"{rate:.0f}" == digits
    assert abs(rate.assumptions["memory_gb"] - 171.0) < 0.05
    assert rate.assumptions["gpus_to_hold_it"] == 2
    assert f"{arl.train_tokens_per_s(QWEN, H200, **N):.0f}" == "8041"


def test_the_gpu_hours_to_the_digit():
    step = arl.step_cost(QWEN, H200, **N)
    hours = {name: f"{value:.2f}" for name, value in step.gpu_hours.items()}
    assert hours == {"train": "0.42", "old log-probs": "0.14", "prefill": "0.11", "decode": "0.95"}
    assert (f"{step.total:.2f}", f"{step.decode_share:.0%}") == ("1.62", "59%")
    assert f"{arl.run_cost(step, steps=300).total:.0f}" == "487"
    slower = arl.step_cost(QWEN, H200, busy=0.25, **N)
    assert round(slower.total - step.total) == 1
    # No mean context is longer than that of an agent that writes last, but a server may be asked.
    last = arl.step_cost(QWEN, H200, context=21_000, **N).assumptions
    assert last["context"] == sum(range(18_000, 24_000)) // last["policy_tokens"] + 1
    assert arl.decode_tokens_per_s(QWEN, H200, batch=1, context=65_536) > 0


@pytest.mark.parametrize(
    ("change", "factors"),
    [
        ({"old_passes": 2}, {"old log-probs": 2}),
        ({"old_passes": 0}, {"old log-probs": 0}),
        ({"prefill_mfu": 0.8}, {"prefill": 1 / 2}),
        ({"mfu": 0.8}, {"train": 1 / 2, "old log-probs": 1 / 2}),
        ({"busy": 0.25}, {"decode": 2}),
        ({"train_busy": 0.5}, {"train": 2, "old log-probs": 2}),
    ],
)
def test_an_assumption_moves_its_parts_alone(change, factors):
    before = arl.step_cost(QWEN, H200).gpu_hours
    after = arl.step_cost(QWEN, H200, **change).gpu_hours
    assert after == pytest.approx({name: h * factors.get(name, 1) for name, h in before.items()})


@settings(max_examples=30)
@given(st.integers(1, 20))
def test_longer_work_costs_more_than_in_proportion(scale):
    """Tokens grow with the length, and so does the cache that each sampled one reads."""
    lengths = {"tokens": 1200, "policy_tokens": 300, "prompt_tokens": 200, "context": 800}
    longer = {name: scale * n for name, n in lengths.items()}
    once = arl.step_cost(QWEN, H200, **lengths, **N).gpu_hours
    more = arl.step_cost(QWEN, H200, **longer, **N).gpu_hours
    for part in ("train", "old log-probs", "prefill"):
        assert abs(more[part] - scale * once[part]) < 1e-9 * more[part]
    assert scale * once["decode"] <= more["decode"] <= scale**2 * once["decode"]


CONTAINERS = {
    "list": list,
    "array": np.array,
    "narrow array": lambda lengths: np.array(lengths, dtype=np.uint16),
    "narrow tensor": lambda lengths: torch.tensor(lengths, dtype=torch.int32),
    "list of NumPy's": lambda lengths: list(np.array(lengths, dtype=np.int32)),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_lengths_of_any_integer_type_do_not_overflow(kind):
    lengths = CONTAINERS[kind]([65_535, 1])
    assert arl.causal_pairs(lengths) == 65_535 * 65_536 // 2 + 1
    for pairs in ("causal", "square"):
        found = arl.forward_flops(QWEN, lengths, pairs=pairs)
        assert found == arl.forward_flops(QWEN, [65_535, 1], pairs=pairs) > 2**45
    sizes = {name: np.int32(size) for name, size in vars(QWEN).items() if type(size) is int}
    narrow = arl.ModelShape(**sizes, windows=(None,) * 36, qk_norm=True)
    assert (narrow, narrow.params) == (QWEN, 8_190_735_360)


def test_more_than_a_million_sequences():
    lengths = torch.full((1_200_000,), 24_000, dtype=torch.int16)
    assert arl.causal_pairs(lengths, 4096) == 1_200_000 * arl.causal_pairs([24_000], 4096)
    for params in (None, 8e9):
        got = arl.train_tokens_per_s(QWEN, H200, lengths=lengths, params=params)
        one = arl.train_tokens_per_s(QWEN, H200, lengths=[24_000], params=params)
        assert got == pytest.approx(one, rel=1e-12)
        assert "tokens=28,800,000,000" in got.report()


@pytest.mark.parametrize("kind", [np.float16, torch.tensor])
def test_numbers_of_any_type_lose_no_digits(kind):
    change = {"busy": 0.25, "batch": 64.0, "mfu": 0.5, "tokens": 24_000.0, "episodes": 512}
    exact = arl.step_cost(QWEN, H200, **change)
    found = arl.step_cost(QWEN, H200, **{name: kind(n) for name, n in change.items()})
    assert found.gpu_hours == pytest.approx(exact.gpu_hours, rel=1e-12)


@pytest.mark.parametrize(
    ("lengths", "window", "error", "named"),
    [
        ([], None, ValueError, "lengths"),
        ([4, -3], None, ValueError, r"lengths\[1\] = -3"),
        ([2.5], None, TypeError, r"lengths\[0\]"),
        ([True, 2], None, TypeError, r"lengths\[0\]"),
        ([4], 0, ValueError, "window = 0"),
        ([4], 2.0, TypeError, "window"),
    ],
)
def test_a_bad_length_or_window_is_named(lengths, window, error, named):
    calls = [partial(arl.causal_pairs, lengths, window)]
    if window is None:
        calls += [partial(arl.forward_flops, QWEN, lengths, pairs=pairs) for pairs in PAIRS]
        calls += [partial(arl.prefill_seconds, QWEN, H200, lengths=lengths, params=8e9)]
    for call in calls:
        with pytest.raises(error, match=named):
            call()


def test_every_assumption_comes_back():
    step = arl.step_cost(QWEN, H200)
    for name in arl.step_cost.__kwdefaults__:
        assert name in step.assumptions and name in step.report()
    assert step.assumptions["params"] == "exact"
    rate = arl.decode_tokens_per_s(QWEN, H200, batch=3, context=70)
    assert {"batch", "context", *arl.decode_tokens_per_s.__kwdefaults__} <= set(rate.assumptions)
    assert "batch=3" in rate.report() and "tokens/s per GPU" in rate.report()
    for other in (copy.deepcopy(rate), pickle.loads(pickle.dumps(rate))):
        assert other == rate and other.report() == rate.report()


@settings(max_examples=50)
@given(st.integers(1, 4096), st.integers(1, 100_000), st.sampled_from([1.0, 2.0]))
def test_decoding_is_the_slower_of_reading_and_computing(batch, context, width):
    shape = QWEN
    arguments = {"batch": batch, "context": context, "bytes_per_kv": width}
    rate = arl.decode_tokens_per_s(shape, H200, **arguments)
    read = 2 * (shape.params - shape.vocab * shape.d_model) + batch * context * width * 73_728
    flops = batch * (2 * arl.matmul_weights(shape) + 36 * 4 * 32 * 128 * context)
    slower = max(read / 4.8e12, flops / 989e12)
    assert abs(rate * slower / batch - 1) < 1e-9
    assert rate.assumptions["bound"] == ("memory" if read / 4.8e12 >= flops / 989e12 else "compute")
    more = arl.decode_tokens_per_s(shape, H200, **{**arguments, "batch": batch + 1})
    assert more >= rate * (1 - 1e-12)


def test_a_decoded_token_attends_within_each_window():
    sizes = {"vocab": 10, "d_model": 8, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn": 10}
    shape = arl.ModelShape(**sizes, v_dim=3, windows=(4, 4, None, 200))
    products = 2 * (4 * (8 * (4 + 2) * 6 + 8 * 2 * 3 + 4 * 3 * 8 + 3 * 8 * 10) + 10 * 8)
    scores_and_values = 4 * (2 * 6 + 2 * 3) * (4 + 4 + 100 + 100)
    rate = arl.decode_tokens_per_s(shape, COUNTER, batch=5, context=100)
    assert 1 / rate == pytest.approx(products + scores_and_values, rel=1e-12)


def test_latent_attention_decodes_from_the_latent():
    shape = arl.ModelShape.from_config(transformers.DeepseekV3Config())
    per_key = 128 * (2 * (512 + 64) + 2 * 512)  # scores, then values
    for context in (10_000, 20_000):
        flops = 1 / arl.decode_tokens_per_s(shape, COUNTER, batch=1, context=context)
        assert flops == pytest.approx(2 * arl.matmul_weights(shape) + 61 * per_key * context)
    assert round(61 * per_key / shape.kv_bytes(1)) == 242
    fp8 = {"bytes_per_weight": 1, "bytes_per_kv": 1}
    rate = arl.decode_tokens_per_s(shape, H200, batch=1024, context=16_384, **fp8)
    assert (f"{rate:.0f}", rate.assumptions["bound"]) == ("2813", "compute")


def test_a_batch_reads_more_experts_than_a_token_uses():
    shape = arl.ModelShape.from_config(SPARSE)
    embedding = shape.vocab * shape.d_model
    assert round(arl.decode_weights(shape, 1)) == shape.active_params - embedding
    assert round(arl.decode_weights(shape, 1e4)) == shape.params - embedding


def test_windows_bound_the_cache():
    shape = arl.ModelShape.from_config(transformers.Gemma3TextConfig())
    slides = sum(window is not None for window in shape.windows)
    assert 0 < slides < shape.layers
    full = slides * 4096 + (shape.layers - slides) * 10**5
    assert shape.kv_bytes(10**5) == shape.kv_bytes(1) / shape.layers * full


def reads_by_turns(tokens, policy, turns, prompt, group, turn_reuse, group_reuse):
    """Read the episode turn by turn, as a server would."""
    tools = tokens - policy - prompt
    shared = prompt * (1 - group_reuse * (1 - 1 / group))  # what a reading of the prompt costs
    answers = [0.0] + [tools / (turns - 1)] * (turns - 1) if turns > 1 else [tools]
    total, context = 0.0, 0.0  # context: all before the turn but the prompt
    for turn, answer in enumerate(answers):
        total += answer + (shared if turn == 0 else (1 - turn_reuse) * (shared + context))
        context += answer + policy / turns
    return total


SOME = st.integers(0, 5000)


@given(st.integers(1, 30), SOME, SOME, SOME, st.integers(1, 16), st.floats(0, 1), st.floats(0, 1))
def test_prefill_is_what_the_turns_read(turns, prompt, tools, policy, group, kept, shared):
    tokens = prompt + tools + policy + 1
    expected = reads_by_turns(tokens, policy, turns, prompt, group, kept, shared)
    episode = {"turns": turns, "prompt_tokens": prompt, "group_size": group}
    found = arl.prefill_tokens(tokens, policy, **episode, turn_reuse=kept, group_reuse=shared)
    assert abs(found - expected) <= 1e-9 * max(1, expected)
    if kept == 1 and shared == 0:
        assert abs(found - (tokens - policy)) < 1e-6


def test_losing_the_cache_between_turns_costs_a_large_factor():
    kept = arl.prefill_tokens(24_000, 6000, turns=20, prompt_tokens=4000)
    lost = arl.prefill_tokens(24_000, 6000, turns=20, prompt_tokens=4000, turn_reuse=0.0)
    assert kept == 18_000 and lost == 277_000


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN3_8B, "model_type": "mamba2"}, "mamba2.*missing.*qwen3"),
        (without(QWEN3_8B, "model_type"), "lacks 'model_type'"),
        ({**QWEN3_8B, "num_key_value_heads": None}, "lacks 'num_key_value_heads'"),
        ({**SMALL, "model_type": "qwen2"}, "qwen2 config lacks 'num_key_value_heads'"),
        # What deepseek leaves out is not taken for none.
        (without(DEEPSEEK, "q_lora_rank"), "lacks 'q_lora_rank'"),
        (without(DEEPSEEK, "n_shared_experts"), "lacks 'n_shared_experts'"),
        (without(DEEPSEEK, "first_k_dense_replace"), "lacks 'first_k_dense_replace'"),
        ({**QWEN3_8B, "layer_types": ["linear_attention"] * 36}, r"layer_types\[0\]"),
        ({"model_type": "gemma3", "text_config": {}}, "text_config"),
        ({**QWEN3_8B, "num_key_value_heads": 5}, "heads = 32 is no multiple of kv_heads = 5"),
        ({**QWEN3_8B, "vocab_size": 0}, "vocab = 0"),
        ({**QWEN3_8B, "num_hidden_layers": 0}, "windows is empty"),
        ({**QWEN3_8B, "layer_types": ["full_attention"] * 4}, "layer_types has 4, .* = 36"),
        ({**QWEN3_8B, **WINDOWS, "sliding_window": 0}, r"windows\[1\] = 0"),
        ({**SPARSE, "decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({**SPARSE, "num_experts_per_tok": 7}, "top_k = 7 exceeds experts = 6"),
    ],
)
def test_an_incomplete_config_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        arl.ModelShape.from_config(config)


IMPOSSIBLE = """
    busy=0 busy=1.5 train_busy=0 mfu=40 mfu=nan batch=-1 context=0 policy_tokens=30000.0
    prompt_tokens=20000.0
    turn_reuse=2 group_reuse=-1 bandwidth_share=1.1 bytes_per_kv=0 bytes_per_weight=nan tokens=0
    old_passes=-1 old_passes=inf turns=0.5 group_size=0.5 episodes=0 params=-1.0 prefill_mfu=0
    context=21001 context=16384;tokens=12000
"""


@pytest.mark.parametrize("case", IMPOSSIBLE.split())
def test_an_impossible_assumption_is_named(case):
    change = {name: float(value) for name, _, value in (c.partition("=") for c in case.split(";"))}
    name, value = next(iter(change.items()))
    with pytest.raises(ValueError, match=f"{name} = {value:g}"):
        arl.step_cost(QWEN, H200, **change)


def test_one_number_of_params_does_not_stand_for_a_mixture_of_experts():
    shape = arl.ModelShape.from_config(SPARSE)
    decode = partial(arl.decode_tokens_per_s, batch=1, context=10)
    prefill, train = (
        partial(f, lengths=[10]) for f in (arl.prefill_seconds, arl.train_tokens_per_s)
    )
    for call in (decode, prefill, train, arl.step_cost):
        assert call(shape, H200)
        with pytest.raises(ValueError, match=r"params = 1000 .* experts = 6 "):
            call(shape, H200, params=1000)


@pytest.mark.parametrize("case", MODELS)
def test_a_config_json_reads_like_the_object_and_a_missing_key_like_the_library(case):
    config, _ = build(case)
    whole = json.loads(json.dumps(config.to_dict()))
    assert arl.ModelShape.from_config(whole) == arl.ModelShape.from_config(config)
    older = without(whole, "layer_types")
    assert arl.ModelShape.from_config(older) == arl.ModelShape.from_config(config)
    for key in whole:
        rest = without(config.to_dict(), key)
        with contextlib.suppress(ValueError):  # no guess; some the library refuses itself
            shape = arl.ModelShape.from_config(rest)
            library = type(config)(**without(rest, "model_type"))
            assert shape == arl.ModelShape.from_config(library), key


def test_what_a_config_may_leave_out():
    shape = arl.ModelShape.from_config({"model_type": "llama", **SMALL})
    assert (shape.kv_heads, shape.head_dim) == (4, 8)
    assert arl.ModelShape.from_config(DEEPSEEK).q_lora == 24
    assert arl.ModelShape.from_config({**DEEPSEEK, "q_lora_rank": None}).q_lora == 0


def test_accelerators_have_sources():
    expected = {"A100", "H100", "H200", "B200", "MI300X", "L40S", "RTX PRO 6000"}
    assert set(arl.ACCELERATORS) == expected
    for name, gpu in arl.ACCELERATORS.items():
        assert arl.accelerator(name) is gpu and gpu.source and gpu.date[:2] == "20"
    assert "Workstation Edition" in arl.accelerator("RTX PRO 6000").source
    assert arl.accelerator("rtx-pro-6000") is arl.ACCELERATORS["RTX PRO 6000"]
    with pytest.raises(ValueError, match=r"unknown accelerator 'H300'; known are A100, .*H200"):
        arl.accelerator("H300")
    with pytest.raises(ValueError, match="no figure for float64"):
        H200.peak("float64")


def test_this_machine_has_a_roofline():
    kinds = (torch.float32, torch.float64)
    gpu = arl.measure_accelerator("cpu", kinds, size=64, copy_bytes=2**16, repeats=1)
    assert set(gpu.flops) == {"float32", "float64"} and gpu.source == "measured"
    assert gpu.bandwidth > 0 and all(rate > 0 for rate in gpu.flops.values())


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_8B))
    return str(path)


def test_the_command_prints_the_same_table(config, capsys):
    assert command_line(["--config", config, "--gpu", "h200", "--params", "8.2e9"]) == 0
    text = capsys.readouterr().out
    run = arl.run_cost(arl.step_cost(QWEN, H200, **N))
    assert text.strip() == run.report()
    command_line(["--config", config, "--gpu", "H200", "--json", "--turns", "20", "--steps", "2"])
    answer = json.loads(capsys.readouterr().out)
    run = arl.run_cost(arl.step_cost(QWEN, H200, turns=20), steps=2)
    assert answer["gpu_hours"] == run.gpu_hours and answer["assumptions"]["turns"] == 20
    assert answer["total_gpu_hours"] == run.total


def said(**change):
    return json.dumps({**QWEN3_8B, **change})


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        ("--gpu H300", said(), "unknown accelerator 'H300'"),
        ("--gpu H200 --busy 2", said(), "busy = 2.0"),
        ("--gpu H200 --batch many", said(), "--batch"),
        ("--gpu H200 --bust 1", said(), "--bust"),
        ("--gpu H200 --steps 0", said(), "steps = 0"),
        ("--gpu H200 --tokens 8000", said(), "context = 16384 exceeds 5000"),
        ("--steps 3", said(), "--gpu"),
        ("--gpu H200 --config no_such_file.json", said(), "no_such_file.json"),
        ("--gpu H200", "{", "config.json"),
        ("--gpu H200", "[1]", "config.json"),
        ("--gpu H200", said(model_type="mamba2"), "config.json: unknown architecture 'mamba2'"),
        ("--gpu H200", "\xff\x00", "config.json"),
        ("--gpu H200", said(hidden_size="4096"), "config.json: hidden_size"),
        ("--gpu H200", said(num_hidden_layers=36.5), "config.json: num_hidden_layers"),
    ],
)
def test_what_is_wrong_gets_one_line(config, capsys, arguments, content, message):
    Path(config).write_bytes(content.encode("latin-1"))
    with pytest.raises(SystemExit) as stop:
        command_line(["--config", config, *arguments.split()])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out
    assert err.count("\n") == 1 and message in err


def test_the_module_runs_as_a_script(config):
    command = [sys.executable, "-m", "agentrl.throughput", "--config", config, "--gpu", "H100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and "decode share" in done.stdout


# The check for a count


def test_flops():
    x = torch.ones(4, 8, requires_grad=True)
    step = lambda: (x @ torch.ones(8, 2, requires_grad=True)).sum().backward()  # noqa: E731
    assert arl.flop_count_check(3 * 2 * 4 * 8 * 2, step)
    assert "embedding" in arl.flop_count_check(1000, step).likely
    assert "left out" in arl.flop_count_check(128, step).likely


def test_flops_of_frozen_weights_are_counted_as_torch_counts_them():
    x, layers = torch.ones(4, 8), torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    layers[0].requires_grad_(False)
    layers[1].requires_grad_(False)
    one = 2 * 4 * 8 * 8
    step = lambda: layers(x).sum().backward()  # noqa: E731
    assert arl.flop_count_check(3 * one + one, step)  # no gradient reaches the frozen ones
    layers[0].requires_grad_(True)
    right = 3 * one + 2 * one + one + one  # the second passes a gradient on, and has none
    assert arl.flop_count_check(right, step)
    again = lambda: checkpoint(layers, x, use_reentrant=False).sum().backward()  # noqa: E731
    assert arl.flop_count_check(right, again)
    found = arl.flop_count_check(right + 2 * one, again)
    assert not found and "checkpointing repeats" in found.likely
    assert "a frozen weight" in arl.flop_count_check(9 * one, step).likely


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_flops_do_not_depend_on_kernels_and_recomputation(attention, checkpointing):
    pytest.importorskip("transformers")
    model = causal_lm(attention=attention).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.zeros(1, 64, dtype=torch.int64)
    step = lambda: model(ids, use_cache=False).logits.sum().backward()  # noqa: E731
    shape = arl.ModelShape.from_config(model.config)
    for pairs in ("causal", "square"):
        found = arl.flop_count_check(arl.training_flops(shape, [64], pairs=pairs), step)
        assert found, found
    right = arl.training_flops(shape, [64])
    more = arl.flop_count_check(right + 6 * 1000 * 64 * 64, step)
    assert not more and "an embedding" in more.likely
    less = arl.flop_count_check(right - 6 * 1000 * 64 * 64, step)
    assert not less and "left out" in less.likely


def test_flops_of_attention_are_all_pairs_half_of_them_and_no_less():
    q = torch.randn(1, 2, 64, 8, requires_grad=True)
    step = lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()  # noqa: E731
    pairs = 3 * 2 * (2 * 2 * 64 * 64 * 8)  # forward and backward, scores and values
    assert arl.flop_count_check(pairs, step) and arl.flop_count_check(pairs / 2, step)
    for less in (0.4 * pairs, 0.0):
        assert "left out" in arl.flop_count_check(less, step).likely


def test_flops_of_a_batch_of_products_that_is_no_attention_are_not_halved():
    x, w = torch.randn(4, 16, 8, requires_grad=True), torch.randn(4, 8, 32, requires_grad=True)
    step = lambda: torch.bmm(x, w).sum().backward()  # noqa: E731
    flops = 3 * 2 * 4 * 16 * 8 * 32
    assert arl.flop_count_check(flops, step)
    assert not arl.flop_count_check(flops / 2, step)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_flops_of_experts_do_not_depend_on_their_kernel(experts) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = experts
    model = transformers.MixtralForCausalLM._from_config(config, attn_implementation="eager")
    ids = torch.arange(32)[None]
    step = lambda: model(ids, use_cache=False).logits.sum().backward()  # noqa: E731
    shape = arl.ModelShape.from_config(config)
    right = arl.training_flops(shape, [32])
    assert (found := arl.flop_count_check(right, step)), found
    idle = 3 * 2 * 3 * 64 * 96 * 2 * 32 * 2  # the two experts that a token uses, left out
    assert not arl.flop_count_check(right - idle / 2, step)


def test_a_step_without_a_product_is_refused():
    with pytest.raises(ValueError, match="no matrix product"):
        arl.flop_count_check(1, lambda: None)
