"""Output heads: time, peak memory and errors of log-probs and gradients, beside every peer's.

    python -m benchmarks logits
    python -m benchmarks logits --device cuda

One forward and backward pass of sum(upstream * log p). All heads take turns in one process; memory
is of a process each, and a head that fails there, because it does not fit or cannot run on this
device, is not timed and keeps the reason. Errors are against float64 on the first tokens of the
same inputs. FLOPs are those of the matrix products that a head executes: 3, or 4 if it multiplies
again for the backward pass. What the machine can multiply is measured before each run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import agentrl as arl
from benchmarks import common
from benchmarks.common import Row, attempt, growth, key, say, timed

V = {"tiny": 384, "full": 151_936, "cuda": 151_936}
PICKED = ("fused", "cut", "liger", "torch")  # the heads one would pick: the others take minutes
SHAPES = {  # by set and name: dtype, tokens, features, heads whose name begins so
    "tiny": {"float32": ("float32", 8, 128, ("",)), "bf16": ("bfloat16", 8, 128, PICKED)},
    "full": {
        "float32": ("float32", 4096, 256, ("",)),
        # As many tokens as a chunk: chunked and checkpointed heads would be the full one.
        "bf16-short": ("bfloat16", 1024, 1024, ("full", "trl", "verl", *PICKED)),
        "bf16-long": ("bfloat16", 4096, 1024, ("full", *PICKED)),
    },
    "cuda": {
        f"{dtype}, D = {features:,}, T = {tokens:,}": (dtype, tokens, features, ("",))
        for dtype in ("bfloat16", "float32")
        for features in (1024, 4096)
        for tokens in (4096, 16_384)
    },
}
REPEATS = {"tiny": 1, "full": 5, "cuda": 7}
ERROR_TOKENS = 256
GROWTH = {  # dtype, features, tokens
    "tiny": ("float32", 128, (2, 20)),
    "full": ("float32", 256, (4, 40, 400, 4_000)),
    "cuda": ("bfloat16", 4096, (16, 160, 1_600, 16_000)),
}
GROWING = ("full", "fused_log_probs", "fused_policy_loss", "torch linear_cross_entropy")


# Each head takes states [T, D], weight [V, D], ids [T] and upstream [T], and returns the scalar
# loss, sum of upstream * log p, and log p [T].

Pair = tuple[Tensor, Tensor]


def _pair(logp: Tensor, upstream: Tensor) -> Pair:
    return (logp * upstream).sum(), logp


def _plain(h: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(F.linear(h, w).float(), -1).gather(-1, ids[..., None])[..., 0]


def full(h: Tensor, w: Tensor, ids: Tensor, upstream: Tensor) -> Pair:
    return _pair(_plain(h, w, ids), upstream)


def chunked(h: Tensor, w: Tensor, ids: Tensor, upstream: Tensor) -> Pair:
    parts = [_plain(a, w, i) for a, i in zip(h.split(1024), ids.split(1024), strict=True)]
    return _pair(torch.cat(parts), upstream)


def checkpointed(h: Tensor, w: Tensor, ids: Tensor, upstream: Tensor) -> Pair:
    return _pair(arl.checkpointed_log_probs(h[None], w, ids[None])[0], upstream)


def fused_log_probs(h: Tensor, w: Tensor, ids: Tensor, upstream: Tensor) -> Pair:
    return _pair(arl.fused_log_probs(h, w, ids), upstream)


def fused_policy_loss(h: Tensor, w: Tensor, ids: Tensor, upstream: Tensor) -> Pair:
    loss, logp = arl.fused_policy_loss(
        h[None], w, ids[None], -upstream[None], norm_const=1.0, return_logp=True
    )
    return loss, logp[0]


def trl_selective(h: Tensor, w: Tensor, ids: Tensor, upstream: Tensor) -> Pair:
    from trl.trainer.utils import selective_log_softmax

    return _pair(selective_log_softmax((h @ w.T)[None], ids[None])[0], upstream)


def trl_chunked(h: Tensor, w: Tensor, ids: Tensor, upstream: Tensor) -> Pair:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as width  # what its trainers pass

    outputs = ChunkedLogProbFunction.apply(h, w, None, ids, 1.0, width, None, 1.0, ())
    return _pair(outputs[0], upstream)


def verl(h: Tensor, w: Tensor, ids: Tensor, upstream: Tensor) -> Pair:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return _pair(FusedLinearForPPO()(h, w, ids)[0], upstream)


def verl_triton(h: Tensor, w: Tensor, ids: Tensor, upstream: Tensor) -> Pair:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return _pair(linear_cross_entropy(h, w, ids, 1.0, "none")[0], upstream)


def cut_cross_entropy(
    h: Tensor, w: Tensor, ids: Tensor, upstream: Tensor, impl: str = "torch_compile"
) -> Pair:
    from cut_cross_entropy import linear_cross_entropy

    return _pair(-linear_cross_entropy(h, w, ids, impl=impl, reduction="none"), upstream)


def liger(h: Tensor, w: Tensor, ids: Tensor, upstream: Tensor) -> Pair:
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    return _pair(LigerFusedLinearPPOBase.chunk_forward(h[None], w, ids[None])[0], upstream)


def liger_triton(h: Tensor, w: Tensor, ids: Tensor, upstream: Tensor) -> Pair:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return _pair(-LigerFusedLinearCrossEntropyLoss(reduction="none")(w, h, ids), upstream)


def torch_linear_cross_entropy(h: Tensor, w: Tensor, ids: Tensor, upstream: Tensor) -> Pair:
    options = torch.nn.LinearCrossEntropyOptions()
    if not h.is_cuda:  # the default makes chunks of two rows there
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256, chunking_method=None)
    loss = F.linear_cross_entropy(h, w, ids, reduction="none", options=options)
    return _pair(-loss, upstream)


HEADS: dict[str, tuple[Callable[..., Pair], int]] = {  # function, products that it executes
    "full": (full, 3),
    "chunked": (chunked, 3),
    "checkpointed": (checkpointed, 4),
    "fused_log_probs": (fused_log_probs, 4),
    "fused_policy_loss": (fused_policy_loss, 3),
    "trl selective_log_softmax": (trl_selective, 3),
    "trl ChunkedLogProbFunction": (trl_chunked, 4),
    "verl FusedLinearForPPO": (verl, 4),
    "cut-cross-entropy torch_compile": (cut_cross_entropy, 3),
    "liger chunk_forward": (liger, 4),
    "torch linear_cross_entropy": (torch_linear_cross_entropy, 4),
}
TRITON: dict[str, tuple[Callable[..., Pair], int]] = {  # these need a GPU
    "cut-cross-entropy cce": (partial(cut_cross_entropy, impl="cce"), 4),
    "liger LigerFusedLinearCrossEntropyLoss": (liger_triton, 4),
    "verl linear_cross_entropy": (verl_triton, 4),
}


def inputs(which: str, dtype: str, tokens: int, features: int, device: str) -> tuple[Tensor, ...]:
    """Hidden states of unit scale and a weight whose logits have a standard deviation of 2."""
    gen = torch.Generator(device).manual_seed(0)
    words, as_given = V[which], getattr(torch, dtype)
    h = torch.randn(tokens, features, generator=gen, device=device)
    w = torch.randn(words, features, generator=gen, device=device) * (2 / features**0.5)
    ids = torch.randint(words, (tokens,), generator=gen, device=device)
    upstream = torch.randn(tokens, generator=gen, device=device)
    return h.to(as_given).requires_grad_(), w.to(as_given).requires_grad_(), ids, upstream


def run(head: str, h: Tensor, w: Tensor, ids: Tensor, upstream: Tensor) -> Tensor:
    """Forward and backward; returns log p [T] and leaves the gradients of `h` and `w`."""
    h.grad = w.grad = None
    loss, logp = (HEADS | TRITON)[head][0](h, w, ids, upstream)
    loss.backward()
    return logp.detach()


def peak(job: str, size: str, device: str) -> Callable[[], object]:
    which, (case, head) = key(size, device), job.split("|")
    dtype, tokens, features, _ = SHAPES[which][case]
    # Kernels are tuned at the shape itself. A process on a CPU would keep memory of such a run.
    warm_up = tokens if device == "cuda" else 32
    run(head, *inputs(which, dtype, warm_up, features, device))
    given = inputs(which, dtype, tokens, features, device)
    return lambda: run(head, *given)


def errors(heads: list[str], given: tuple[Tensor, ...]) -> dict[str, Row]:
    """The largest error of a log-prob in nats, and the relative one of the worse gradient."""
    h, w, ids, upstream = given
    h = h.detach()[:ERROR_TOKENS].clone().requires_grad_()
    ids, upstream = ids[:ERROR_TOKENS], upstream[:ERROR_TOKENS]

    def reference() -> tuple[Tensor, ...]:
        h64, w64 = (x.detach().double().requires_grad_() for x in (h, w))
        logp = (h64 @ w64.T).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        (logp * upstream.double()).sum().backward()
        return logp.detach(), h64.grad, w64.grad

    exact = attempt(reference)  # it may not fit

    def of(head: str) -> Row:
        if isinstance(exact, dict):
            return {"no_errors": exact["failed"]}
        got, (logp, *grads) = run(head, h, w, ids, upstream), exact
        pairs = zip((h.grad, w.grad), grads, strict=True)
        off = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
        return {"logp_error": (got.double() - logp).abs().max().item(), "grad_error": max(off)}

    found = {head: attempt(partial(of, head)) for head in heads}
    return {h: {"no_errors": row["failed"]} if "failed" in row else row for h, row in found.items()}


def compare(size: str, device: str) -> list[Row]:
    which, rows = key(size, device), []
    every = HEADS | (TRITON if which == "cuda" else {})
    for case, (dtype, tokens, features, names) in SHAPES[which].items():
        found: dict[str, Row] = {}
        for head in [head for head in every if head.startswith(names)]:
            found[head] = common.peak_bytes("logits", f"{case}|{head}", size, device)
            say(f"logits: {case}, memory of {head}")
        fit = [head for head, row in found.items() if "failed" not in row]
        given = inputs(which, dtype, tokens, features, device)
        runs = {head: partial(run, head, *given) for head in fit}
        side = common.PROBES[which]["size"]
        square = torch.ones(side, side, dtype=getattr(torch, dtype), device=device)
        times = timed(
            runs,
            REPEATS[which],
            device=device,
            longest=30.0,
            probe=lambda square=square: [square @ square for _ in range(3)],
        )
        for head, row in times.items():
            if "probe" in row:
                row["peak_flops"] = 3 * 2 * side**3 / row.pop("probe")
            found[head] |= row
        off = errors([head for head in fit if "failed" not in found[head]], given)
        del given, runs
        for head, row in found.items():
            products = every[head][1]
            flops = products * 2 * tokens * features * V[which]
            case_of = {"what": "head", "case": case, "who": head, "products": products}
            rows.append(case_of | row | off.get(head, {}) | {"flops": flops, "dtype": dtype})
    return rows


def curves(size: str, device: str) -> tuple[list[Row], list[Row]]:
    which, rows = key(size, device), []
    dtype, features, counts = GROWTH[which]
    words, kind = V[which], getattr(torch, dtype)
    roof = arl.measure_accelerator(device, (kind,), **common.PROBES[which])

    def expected(tokens: float) -> float:
        """Weight and gradient are moved whatever the tokens; the products grow with them."""
        moved = 4 * words * features * kind.itemsize  # read twice, and a gradient written and read
        return moved / roof.bandwidth + 3 * 2 * tokens * features * words / roof.flops[dtype]

    points: dict[str, dict[int, Row]] = {head: {} for head in GROWING}
    for tokens in counts:
        given = inputs(which, dtype, tokens, features, device)
        runs = {head: partial(run, head, *given) for head in GROWING}
        for head, row in timed(runs, 3, device=device).items():
            points[head][tokens] = row
            case = {"what": "growth", "case": f"{tokens:,} tokens", "who": head}
            flops = HEADS[head][1] * 2 * tokens * features * words
            rows.append(case | row | {"flops": flops, "dtype": dtype})
        say(f"logits: growth, {tokens:,} tokens")
    return rows, [
        growth(head, "tokens", p, "the roofline's", expected) for head, p in points.items()
    ]


def measure(size: str, device: str) -> Row:
    rows, found = curves(size, device)
    return {"rows": compare(size, device) + rows, "growth": found}


if __name__ == "__main__":
    common.main("logits")
