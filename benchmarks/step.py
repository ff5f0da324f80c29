"""One training step, padded against packed: time, memory, gradient; and the attention inside.

    python -m benchmarks step

Ours is `TinyAgent` with a padded batch, with packed rows under a block mask, and with packed rows
whose attention runs segment by segment. The peer is a Qwen2 of `transformers` of a like size: a
padded batch with its mask; one row with restarting `position_ids` and no mask, which `transformers`
documents as packed input and masks itself; and our packed rows with our mask. Each is compared with
the float64 gradient of its own padded batch. FLOPs are those that the real tokens need.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import agentrl as arl
from benchmarks import common, models
from benchmarks.common import Row, growth, key, say, timed

EPISODES = {"tiny": 6, "full": 64, "cuda": 512}
GROWTH = {"tiny": (1, 10), "full": (1, 10, 100, 1_000), "cuda": (10, 100, 1_000, 10_000)}
WIDTH = {"tiny": 32, "full": 256, "cuda": 1024}  # of the model
ATTENTION = {"tiny": (256,), "full": (256, 1024, 4096), "cuda": (1024, 4096, 16_384)}
VOCAB, LAYERS, HEADS, ROW = 512, 4, 4, 256
WAYS = (
    "agentrl padded",
    "agentrl packed, block mask",
    "agentrl packed, segments",
    "transformers padded",
    "transformers packed by position_ids",
    "transformers packed, agentrl's mask",
)


def episodes(count: int, device: str) -> tuple[list[arl.Trajectory], Tensor]:
    """Random episodes as long as those of the book's gym: median 21 tokens, a long tail."""
    gen = torch.Generator().manual_seed(0)
    draws = torch.randn(max(count, 16), generator=gen)[:count]  # PyTorch draws fewer in another way
    lengths = (21 * torch.exp(0.85 * draws)).clamp(12, 161).long()
    trajs = []
    for n in lengths.tolist():
        ids = torch.randint(1, VOCAB, (n,), generator=gen).to(device)
        trajs.append(arl.Trajectory(ids, torch.arange(n - 1).to(device) >= 8, ids[1:] * 0.0, 0.0))
    return trajs, torch.randn(count, generator=gen).to(device)


def tiny_agent(width: int, dtype: torch.dtype, device: str, layers: int = LAYERS) -> nn.Module:
    model = arl.TinyAgent(
        VOCAB, d_model=width, n_layers=layers, n_heads=HEADS, max_len=ROW, dtype=dtype
    )
    return model.to(device)


@cache
def qwen2(width: int, dtype: torch.dtype, device: str) -> nn.Module:
    model = models.causal_lm(
        attention="sdpa",
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=8 * width // 3,  # three matrices, as many weights as our two
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=4096,
    )
    return model.to(dtype).to(device).train()


def losses(width: int, count: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The loss of each way, and the model that it belongs to."""
    trajs, advantages = episodes(count, device)
    advantages = advantages.to(dtype)
    batch = arl.collate(trajs, 0)
    packed = arl.pack_sequences(trajs, ROW)
    spread = arl.spread(advantages, packed)
    norm = float(batch["action_mask"].sum())
    ours = tiny_agent(width, dtype, device)
    rows = [packed[k] for k in ("ids", "position_ids", "segment_ids")]
    real = torch.arange(batch["ids"].shape[1], device=device) < batch["lengths"].to(device)[:, None]

    def padded() -> Tensor:
        logp = arl.sequence_log_probs(ours, batch["ids"])
        return arl.reinforce_loss(logp, advantages, batch["action_mask"], norm_const=norm)

    def in_rows(logits: Tensor, ids: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        logp = arl.selected_log_probs(logits[:, :-1], ids[:, 1:])
        return arl.reinforce_loss(logp, weights, mask, norm_const=norm)

    def ours_packed(way: str) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            logits = arl.packed_logits(ours, *rows, attention=way)
            return in_rows(logits, packed["ids"], spread, packed["action_mask"])

        return loss

    def theirs(way: str) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            model = qwen2(width, dtype, device)
            if way == "padded":
                logits = model(batch["ids"], attention_mask=real.long(), use_cache=False).logits
                mask, ids = batch["action_mask"], batch["ids"]
                return in_rows(logits, ids, advantages, mask)
            if way == "mask":
                logits = model(**arl.transformers_inputs(packed, dtype)).logits
                return in_rows(logits, packed["ids"], spread, packed["action_mask"])
            # As DataCollatorWithFlattening makes it: one row without padding, positions restart.
            kept = packed["segment_ids"] >= 0
            ids, positions = packed["ids"][kept][None], packed["position_ids"][kept][None]
            logits = model(ids, position_ids=positions, use_cache=False).logits
            weights, mask = (
                F.pad(packed_value, (0, 1))[kept][None, :-1]
                for packed_value in (spread, packed["action_mask"])
            )
            return in_rows(logits, ids, weights, mask)

        return loss

    ways = (padded, *map(ours_packed, ("mask", "segments")))
    ways += tuple(map(theirs, ("padded", "positions", "mask")))
    return dict(zip(WAYS, ways, strict=True)) | {"ours": ours}


def step(way: str, found: dict[str, Any], width: int, dtype: torch.dtype, device: str) -> Tensor:
    """Forward and backward; returns the gradient as one vector."""
    loss = found[way]()
    model = found["ours"] if way.startswith("agentrl") else qwen2(width, dtype, device)
    model.zero_grad(set_to_none=True)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def model_shape(width: int) -> arl.ModelShape:
    return arl.ModelShape(
        vocab=VOCAB,
        d_model=width,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=width // HEADS,
        ffn=4 * width,
        windows=(None,) * LAYERS,
        gated=False,
    )


def peak(job: str, size: str, device: str) -> Callable[[], object]:
    size = key(size, device)
    parts = (WIDTH[size], torch.float32, device)
    step(job, losses(WIDTH[size], 2, torch.float32, device), *parts)  # imports, and warms up
    if not job.startswith("agentrl"):
        qwen2(*parts).zero_grad(set_to_none=True)  # the gradients count, as those of ours do
    found = losses(WIDTH[size], EPISODES[size], torch.float32, device)
    return lambda: step(job, found, *parts)


def steps(size: str, device: str) -> list[Row]:
    width, count, dtype = WIDTH[key(size, device)], EPISODES[key(size, device)], torch.float32
    found = losses(width, count, dtype, device)
    trajs, _ = episodes(count, device)
    lengths = [len(traj.ids) for traj in trajs]
    packed_rows = len(arl.packing_plan(lengths, ROW))
    positions = dict.fromkeys(WAYS, sum(lengths))
    positions |= {w: packed_rows * ROW for w in WAYS if "mask" in w}
    positions |= {w: count * max(lengths) for w in WAYS if w.endswith("padded")}
    flops = arl.training_flops(model_shape(width), lengths)
    runs = {way: lambda way=way: step(way, found, width, dtype, device) for way in WAYS}
    rows = []
    exact: dict[str, Tensor] = {}
    for way, row in timed(runs, 5, device=device).items():
        row |= {"what": "step", "case": f"{count} episodes, width {width}, float32", "who": way}
        row |= {"tokens": sum(lengths), "positions": positions[way]}
        row |= {"flops": flops, "dtype": "float32"}
        if "failed" not in row:
            whose = way.split()[0]
            if whose not in exact:
                double = losses(width, count, torch.float64, device)
                exact[whose] = step(f"{whose} padded", double, width, torch.float64, device)
                del double
            off = runs[way]().double() - exact[whose]
            row["error"] = (off.norm() / exact[whose].norm()).item()
            row |= common.peak_bytes("step", way, size, device)
        rows.append(row)
        say(f"step: {way}")
    return rows


def attention(size: str, device: str) -> list[Row]:
    """Attention over packed rows alone: dense mask, compiled flex_attention, segment by segment."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    gen, rows = torch.Generator().manual_seed(0), []
    draws = (60 * torch.exp(0.8 * torch.randn(64, generator=gen))).clamp(10, 256).long().tolist()
    # Compiling takes long, and what is left without it does not matter for a look.
    compiled = flex_attention if size == "tiny" else torch.compile(flex_attention, dynamic=False)
    for L in ATTENTION[key(size, device)]:
        trajs = [
            arl.Trajectory(torch.ones(n).long(), torch.ones(n - 1), torch.ones(n - 1), 0.0)
            for n in draws
        ]
        packed = arl.pack_sequences(trajs, L)
        numbers = packed["segment_ids"].to(device)
        mask, sizes = arl.block_mask(numbers), packed["cu_seqlens"].diff().tolist()

        def may_see(b: Tensor, h: Tensor, q: Tensor, k: Tensor, numbers: Tensor = numbers):
            return (numbers[b, q] == numbers[b, k]) & (q >= k)

        shapes = ((len(numbers), HEADS, L, 16), (1, HEADS, int((numbers >= 0).sum()), 16))
        whole, flat = ([torch.randn(s, generator=gen).to(device) for _ in "qkv"] for s in shapes)

        blocks = create_block_mask(may_see, len(numbers), None, L, L, device=device)

        ways = {
            "dense mask": (whole, lambda *a, m=mask: F.scaled_dot_product_attention(*a, m)),
            "torch flex_attention": (whole, lambda *a, b=blocks: compiled(*a, block_mask=b)),
            "agentrl segments": (flat, lambda *a, s=sizes: arl.segment_attention(*a, s)),
        }
        for backward in (False, True):
            runs = {}
            for who, (inputs, way) in ways.items():
                tensors = [x.clone().requires_grad_(backward) for x in inputs]

                def run(way=way, tensors=tensors, backward: bool = backward) -> None:
                    y = way(*tensors)
                    if backward:
                        y.sum().backward()

                runs[who] = run
            case = f"rows of {L:,}, forward{' and backward' if backward else ''}"
            flops = (3 if backward else 1) * 4 * 16 * HEADS * arl.causal_pairs(draws)
            for who, row in timed(runs, 5, device=device).items():
                row |= {"what": "attention", "case": case, "who": who}
                rows.append(row | {"flops": flops, "dtype": "float32"})
    return rows


def curves(size: str, device: str) -> tuple[list[Row], list[Row]]:
    rows: list[Row] = []
    points: dict[str, dict[int, Row]] = {way: {} for way in WAYS[:3]}
    for count in GROWTH[key(size, device)]:
        found = losses(64, count, torch.float32, device)
        lengths = [len(traj.ids) for traj in episodes(count, device)[0]]
        flops = arl.training_flops(model_shape(64), lengths)
        runs = {
            way: lambda way=way, found=found: step(way, found, 64, torch.float32, device)
            for way in points
        }
        for way, row in timed(runs, 3, device=device).items():
            points[way][sum(lengths)] = row
            case = {"what": "growth", "case": f"{sum(lengths):,} tokens", "who": way}
            rows.append(case | row | {"flops": flops, "dtype": "float32"})
        say(f"step: growth, {count} episodes")
    return rows, [growth(way, "tokens", p, "n", float) for way, p in points.items()]


def measure(size: str, device: str) -> Row:
    rows = steps(size, device) + attention(size, device)
    more, found = curves(size, device)
    return {"rows": rows + more, "growth": found}


if __name__ == "__main__":
    common.main("step")
