"""Predicted and measured tokens/s of decoding and training, on this machine's own roofline.

    python -m benchmarks throughput

The roofline comes from `measure_accelerator` in the same run. The model is a Qwen2 of
`transformers` with random weights, large enough that they do not fit into the caches. Decoding runs
one token of each sequence against a filled cache. The prediction is a bound, so the measured share
of it is at most 1 if the roofline is right; training is predicted at all of the peak.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import agentrl as arl
from benchmarks import common, models
from benchmarks.common import Row, growth, key, say, timed

WIDTH = {"tiny": 32, "full": 1024, "cuda": 4096}
LAYERS = {"tiny": 2, "full": 8, "cuda": 16}
HEADS = {"tiny": 4, "full": 8, "cuda": 32}
BATCHES = {"tiny": (1, 4), "full": (1, 4, 16, 64, 256, 1024), "cuda": (1, 4, 16, 64, 256, 1024)}
CONTEXT = {"tiny": 8, "full": 32, "cuda": 512}
TRAIN = {"tiny": (2, 16), "full": (4, 256), "cuda": (8, 2048)}  # sequences, tokens each


def build(size: str, device: str) -> tuple[Any, arl.ModelShape]:
    width = WIDTH[size]
    model = models.causal_lm(
        attention="sdpa",
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=LAYERS[size],
        num_attention_heads=HEADS[size],
        num_key_value_heads=HEADS[size] // 4,
    ).to(device)
    if device == "cuda":
        model = model.bfloat16()
    return model, arl.ModelShape.from_config(model.config)


def decoder(model: Any, batch: int, context: int, device: str) -> Callable[[], object]:
    """One decode step of `batch` sequences after `context` tokens; the cache is cut back."""
    from transformers import DynamicCache

    ids = torch.ones(batch, context, dtype=torch.long, device=device)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=cache, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def step() -> None:
        model(ids[:, :1], cache=cache, use_cache=True)
        cache.crop(-1)

    return step


def measure(size: str, device: str) -> Row:
    which = key(size, device)
    dtype = "bfloat16" if device == "cuda" else "float32"
    width, each = CONTEXT[which], (2.0 if dtype == "bfloat16" else 4.0)
    model, shape = build(which, device)

    def roofline() -> arl.Accelerator:
        return arl.measure_accelerator(device, (getattr(torch, dtype),), **common.PROBES[which])

    roofs, measured, predicted, rows = [roofline()], {}, {}, []
    for batch in BATCHES[which]:
        step = common.attempt(lambda: decoder(model, batch, width, device))  # noqa: B023
        measured[batch] = (
            step if isinstance(step, dict) else timed({"": step}, 5, device=device)[""]
        )
        del step
        say(f"throughput: batch {batch}")
    count, tokens = TRAIN[which]
    ids = torch.ones(count, tokens, dtype=torch.long, device=device)

    def train() -> None:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    trained = timed({"train": train}, 3, device=device)["train"]
    roofs.append(roofline())
    # The better of the two, under the name of the dtype that a GPU would use.
    peak, bandwidth = (max(r.flops[dtype] for r in roofs), max(r.bandwidth for r in roofs))
    gpu = arl.Accelerator(**vars(roofs[0]) | {"flops": {"bfloat16": peak}, "bandwidth": bandwidth})
    for batch, row in measured.items():
        limit = arl.decode_tokens_per_s(
            shape, gpu, batch=batch, context=width, bytes_per_weight=each, bytes_per_kv=each
        )
        predicted[batch] = batch / limit
        case = {"what": "decode", "case": f"batch {batch}, context {width}", "batch": batch}
        case |= {"who": "transformers decode step", "predicted_tokens_per_s": float(limit)}
        case |= {"bound": limit.assumptions["bound"], "dtype": dtype, **row}
        if "seconds" in row:
            case |= {"tokens_per_s": batch / row["seconds"]}
            case |= {"of_prediction": batch / row["seconds"] / limit}
        if case["bound"] == "memory":
            weights = arl.decode_weights(shape, batch) * each
            rows.append(case | {"bytes": weights + batch * shape.kv_bytes(width, each)})
        else:
            each_token = arl.forward_flops(shape, [width]) - arl.forward_flops(shape, [width - 1])
            rows.append(case | {"flops": batch * each_token})
    lengths = [tokens] * count
    limit = arl.train_tokens_per_s(shape, gpu, lengths=lengths, mfu=1.0)
    case = {"what": "train", "case": f"{count} x {tokens} tokens", "who": "transformers step"}
    case |= {"predicted_tokens_per_s": float(limit), "bound": "compute", "dtype": dtype, **trained}
    if "seconds" in trained:
        case |= {"tokens_per_s": sum(lengths) / trained["seconds"]}
        case |= {"of_prediction": case["tokens_per_s"] / limit}
    rows.append(case | {"flops": arl.training_flops(shape, lengths)})
    law = growth("decode step", "sequences", measured, "the roofline's", predicted.__getitem__)
    return {
        "rows": rows,
        "growth": [law],
        "parameters": shape.params,
        "roofline": {"flops": peak, "bandwidth": bandwidth},
    }


if __name__ == "__main__":
    common.main("throughput")
