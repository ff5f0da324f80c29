"""Small models of `transformers`, for the benchmarks and for the tests of the package."""

from __future__ import annotations

from typing import Any

import torch

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config(family: str = "Qwen2", attention: str = "eager", **changes: Any) -> Any:
    """Return a config of `family`: `SMALL`, but for the changes."""
    import transformers

    fields = {**SMALL, "attn_implementation": attention, **changes}
    return getattr(transformers, f"{family}Config")(**fields)


def causal_lm(family: str = "Qwen2", attention: str = "eager", **changes: Any) -> Any:
    """Return a model of `config`, the same each time."""
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config(family, attention, **changes))
