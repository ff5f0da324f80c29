"""Gradients of a batch in microbatches on ranks: how far from the gradient of the whole batch?

    python -m benchmarks accumulation

64 sequences with a long tail, sorted by length, in two microbatches on each rank. Ranks are
processes that talk over gloo, and their gradients are averaged, as data-parallel wrappers do. The
reference is one process, one batch, float64. Peers are the loss functions that the trainers call:
`agg_loss` of verl and the causal loss of `transformers`, each with the count of the whole batch, as
documented, and without it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import agentrl as arl
from benchmarks import common
from benchmarks.common import ROOT, Row, growth, key, say, timed

RANKS = {"tiny": (2,), "full": (1, 2, 4)}
GROWTH = {"tiny": (1, 4), "full": (1, 10, 100, 1_000), "cuda": (10, 100, 1_000, 10_000)}
PER_RANK = 2  # microbatches
VOCAB = 50


def toy_batch() -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(0)
    lengths = (16 * torch.randn(64, generator=gen).exp()).long().clamp(8, 128)
    return {
        "ids": torch.randint(VOCAB, (64, 128), generator=gen),
        "action_mask": torch.arange(127) < lengths[:, None] - 1,
        "lengths": lengths,
        "advantages": torch.randn(64, generator=gen, dtype=torch.float64),
    }


def cut(batch: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Some rows of a padded batch, as wide as the longest."""
    width = int(batch["lengths"][rows].max())
    return {
        "ids": batch["ids"][rows, :width],
        "action_mask": batch["action_mask"][rows, : width - 1],
        "advantages": batch["advantages"][rows],
    }


# A loss takes the model, a microbatch, and the counts of what it may divide by.


def policy_gradient(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    """Minus advantage times log-prob, per token [B, T - 1]."""
    logp = arl.sequence_log_probs(model, part["ids"])
    return -part["advantages"].to(logp.dtype)[:, None] * logp


def ours(model: nn.Module, part: dict[str, Tensor], counts: Row, mode: str) -> Tensor:
    norm = counts["norm"] if mode == "global" else float(part["action_mask"].sum()) * PER_RANK
    loss = arl.aggregate_loss(policy_gradient(model, part), part["action_mask"], "token_mean", norm)
    return loss * (counts["ranks"] if mode == "global" else 1)  # the average over ranks is a sum


def verl(model: nn.Module, part: dict[str, Tensor], counts: Row, mode: str) -> Tensor:
    from verl.trainer.ppo.core_algos import agg_loss

    values, mask = policy_gradient(model, part), part["action_mask"]
    if mode == "global":
        tokens = {"dp_size": counts["ranks"], "batch_num_tokens": counts["norm"]}
        return agg_loss(values, mask, "token-mean", **tokens)
    return agg_loss(values, mask, "token-mean") / PER_RANK


def causal(model: nn.Module, part: dict[str, Tensor], counts: Row, mode: str) -> Tensor:
    """The loss of `transformers` knows no advantages: its reference is plain likelihood."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    labels = part["ids"].clone()
    labels[:, 1:].masked_fill_(~part["action_mask"], -100)
    labels[:, 0] = -100
    logits = model(part["ids"])
    if mode == "global":  # the trainer multiplies by the ranks, since they are averaged
        loss = ForCausalLMLoss(logits, labels, VOCAB, num_items_in_batch=counts["norm"])
        return loss * counts["ranks"]
    return ForCausalLMLoss(logits, labels, VOCAB) / PER_RANK


LOSSES = {
    "agentrl step_normalizer": (ours, "global"),
    "own count of each microbatch (the fault)": (ours, "local"),
    "verl agg_loss, batch_num_tokens": (verl, "global"),
    "verl agg_loss, defaults": (verl, "local"),
    "transformers loss, num_items_in_batch": (causal, "global"),
    "transformers loss, defaults": (causal, "local"),
}


def reference(loss: Callable[..., Tensor], batch: dict[str, Tensor]) -> Tensor:
    """The float64 gradient of the whole batch in one process, by its definition."""
    model, mask = arl.TinyAgent(VOCAB), batch["action_mask"]
    values = -arl.sequence_log_probs(model, batch["ids"])
    if loss is not causal:
        values = values * batch["advantages"][:, None]
    ((values * mask).sum() / mask.sum()).backward()
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def worker() -> None:
    """What one rank does: each loss in each dtype; rank 0 prints the errors."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks, batch = dist.get_rank(), dist.get_world_size(), toy_batch()
    chunks = batch["lengths"].argsort(stable=True).chunk(ranks * PER_RANK)
    mine = [cut(batch, rows) for rows in chunks[rank * PER_RANK : (rank + 1) * PER_RANK]]
    norm = arl.step_normalizer([part["action_mask"] for part in mine])
    counts = {"norm": norm, "ranks": ranks}
    found = {}
    for who, (loss, mode) in LOSSES.items():
        for dtype in (torch.float32, torch.float64):
            name = str(dtype).removeprefix("torch.")

            def error(loss=loss, mode=mode, dtype=dtype) -> dict[str, float]:
                model = arl.TinyAgent(VOCAB, dtype=dtype)
                for part in mine:
                    loss(model, part, counts, mode).backward()
                grad = flat(model)
                dist.all_reduce(grad)
                exact = reference(loss, batch)
                off = grad.double() / ranks - exact
                return {"error": (off.norm() / exact.norm()).item()}

            found[f"{who}|{name}"] = common.attempt(error)
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def launch(ranks: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.accumulation", "--rank"]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | variables | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        texts = [process.communicate(timeout=300)[0] for process in processes]
    except subprocess.TimeoutExpired:
        return {"failed": "a rank did not end within 300 s"}
    finally:
        for process in processes:
            process.kill()  # does nothing to one that has ended
    bad = [process.returncode for process in processes if process.returncode]
    if bad:
        return {"failed": f"a rank ended with status {bad[0]}"}
    return json.loads(texts[0].strip().splitlines()[-1])


def errors(size: str) -> list[Row]:
    rows = []
    for ranks in RANKS[size]:
        found = launch(ranks)
        for who in LOSSES:
            for dtype in ("float32", "float64"):
                row = found if "failed" in found else found[f"{who}|{dtype}"]
                case = {"what": "gradient error", "ranks": ranks, "dtype": dtype, "who": who}
                rows.append(case | row)
        say(f"accumulation: {ranks} ranks")
    return rows


def curves(size: str, device: str) -> tuple[list[Row], list[Row]]:
    """Time of a step against its number of microbatches, each of 8 sequences of 64 tokens."""
    rows: list[Row] = []
    points: dict[str, dict[int, Row]] = {"agentrl accumulate_gradients": {}, "plain loop": {}}
    gen = torch.Generator().manual_seed(0)
    model = arl.TinyAgent(VOCAB, dtype=torch.float32).to(device)
    mask, shape = torch.ones(8, 63, dtype=torch.bool, device=device), arl.ModelShape(
        vocab=VOCAB, d_model=64, heads=4, kv_heads=4, head_dim=16, ffn=256, windows=(None, None),
        gated=False,
    )  # fmt: skip
    for count in GROWTH[key(size, device)]:
        parts = [torch.randint(VOCAB, (8, 64), generator=gen).to(device) for _ in range(count)]
        advantages = torch.ones(8, device=device)

        def loss(ids: Tensor, norm: float) -> Tensor:
            logp = arl.sequence_log_probs(model, ids)
            return arl.reinforce_loss(logp, advantages, mask, norm_const=norm)  # noqa: B023

        def plain(parts=parts) -> None:
            model.zero_grad()
            for ids in parts:
                loss(ids, float(len(parts) * mask.numel())).backward()

        def accumulated(parts=parts) -> None:
            model.zero_grad()
            norm = arl.step_normalizer([mask] * len(parts))
            arl.accumulate_gradients(model, partial(loss, norm=norm), parts)

        runs = dict(zip(points, (accumulated, plain), strict=True))
        for who, row in timed(runs, 3, device=device).items():
            points[who][count] = row
            case = {"what": "step", "case": f"{count:,} microbatches", "who": who}
            flops = arl.training_flops(shape, [64] * 8 * count)
            rows.append(case | row | {"flops": flops, "dtype": "float32"})
    return rows, [growth(who, "microbatches", p, "n", float) for who, p in points.items()]


def measure(size: str, device: str) -> Row:
    rows, found = curves(size, device)
    return {"rows": errors(size) + rows, "growth": found}


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        worker()
    else:
        common.main("accumulation")
