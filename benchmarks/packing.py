"""Packing side by side: planners, attention over packed rows, and a training step.

    python benchmarks/packing.py [--sequences 1000000] [--repeats 5] [--only plan attention step]

Planners: TRL's best-fit decreasing (`pip install trl==1.16.0 datasets`) against agentrl, on
lognormal lengths in rows of 8,192. TRL plans and gathers the tokens in one function, and for a
million sequences the gathering alone needs more memory than most machines have; so its gathering is
replaced by an exit, and the time is that of planning alone, which favours TRL. agentrl gets the
lengths as a Python list. A peer that does not import is left out and the reason printed.

Attention: the packed rows of a batch with a dense mask, with `flex_attention` (compiled), and
segment by segment; forward, and forward with backward. What does not run here is reported with its
reason.

Step: one gradient step on 64 sampled episodes, padded against packed.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F

import agentrl as arl


def fastest(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each, the best of `repeats`, the runs taking turns."""
    best = dict.fromkeys(runs, math.inf)
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in names if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Planners


class _Planned(Exception):
    """TRL has its rows and would gather the tokens now."""


def load_trl() -> Callable[[Tensor], tuple[int, float]]:
    """TRL's best-fit decreasing, to (rows, seconds); raises whatever importing it raises."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from trl import data_utils

    def stop(*_: object) -> None:
        raise _Planned

    # What it calls before it plans stays; what copies tokens does nothing.
    data_utils.pc = SimpleNamespace(
        list_value_length=pc.list_value_length,
        greater=pc.greater,
        filter=lambda column, mask: column,
        list_slice=lambda column, *_: column,
        make_struct=pc.make_struct,
        take=stop,
    )

    def plan(lengths: Tensor) -> tuple[int, float]:
        offsets = pa.array(F.pad(lengths.cumsum(0), (1, 0)).numpy())
        tokens = pa.nulls(int(lengths.sum()), pa.null())  # as many as real ones, in no memory
        table = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, tokens)})
        start = time.perf_counter()
        try:
            data_utils._pack_bfd(table, 8192)
        except _Planned:
            seconds = time.perf_counter() - start
            frame = sys.exc_info()[2].tb_next.tb_frame
            return len(frame.f_locals["bins"]), seconds
        raise RuntimeError("this version of trl plans in another way")

    return plan


def planners(sequences: int, repeats: int) -> None:
    try:
        from importlib.metadata import version

        trl, name = load_trl(), f"trl {version('trl')} bfd"
    except Exception as error:  # any peer may fail to import in its own way
        trl, name = None, ""
        print(f"trl is left out: {type(error).__name__}: {error}\n")
    print("| sequences | planner | rows | bound | ms | trl / this |")
    print("| --- | --- | --- | --- | --- | --- |")
    for n in (64, 10_000, sequences):
        gen = torch.Generator().manual_seed(0)
        lengths = (1600 * torch.exp(0.8 * torch.randn(n, generator=gen))).clamp(16, 8192).long()
        plain, bound = lengths.tolist(), arl.packing_bound(lengths, 8192)
        reference = math.nan
        if trl:
            found = [trl(lengths) for _ in range(1 if n > 100_000 else repeats)]
            reference = min(seconds for _, seconds in found)
            print(f"| {n:,} | {name} | {found[0][0]:,} | {bound:,} | {reference * 1e3:.2f} | 1 |")
        for strategy in ("bfd", "ffd"):

            def plan(strategy: str = strategy, plain: list[int] = plain) -> list[list[int]]:
                return arl.packing_plan(plain, 8192, strategy)

            rows, seconds = len(plan()), fastest({"": plan}, repeats)[""]
            print(
                f"| {n:,} | agentrl {strategy} | {rows:,} | {bound:,} | {seconds * 1e3:.2f} "
                f"| {reference / seconds:.1f} |"
            )
    print()


# Attention


def attention(repeats: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    gen = torch.Generator().manual_seed(0)
    draws = (60 * torch.exp(0.8 * torch.randn(64, generator=gen))).clamp(10, 256).long().tolist()
    print(f"64 sequences, {sum(draws):,} tokens, 4 heads of 16, float32\n")
    print("| row length | rows | attention | forward ms | and backward ms |")
    print("| --- | --- | --- | --- | --- |")
    compiled = torch.compile(flex_attention, dynamic=False)
    for L in (256, 1024, 4096):
        trajs = [
            arl.Trajectory(torch.ones(n).long(), torch.ones(n - 1), torch.ones(n - 1), 0.0)
            for n in draws
        ]
        packed = arl.pack_sequences(trajs, L)
        numbers = packed["segment_ids"]
        R, real = len(numbers), numbers >= 0
        mask, sizes = arl.block_mask(numbers), packed["cu_seqlens"].diff().tolist()

        def may_see(b: Tensor, h: Tensor, q: Tensor, k: Tensor, numbers: Tensor = numbers):
            return (numbers[b, q] == numbers[b, k]) & (q >= k)

        blocks = create_block_mask(may_see, R, None, L, L, device="cpu")
        rows = [torch.randn(R, 4, L, 16, generator=gen) for _ in range(3)]
        flat = [torch.randn(1, 4, int(real.sum()), 16, generator=gen) for _ in range(3)]
        ways: dict[str, tuple[list[Tensor], Callable[..., Tensor]]] = {
            "dense mask": (
                rows,
                lambda *a, m=mask: F.scaled_dot_product_attention(*a, attn_mask=m),
            ),
            "flex_attention": (rows, lambda *a, b=blocks: compiled(*a, block_mask=b)),
            "segment by segment": (flat, lambda *a, s=sizes: arl.segment_attention(*a, s)),
        }
        for name, (inputs, way) in ways.items():
            cells = []
            for backward in (False, True):
                tensors = [x.clone().requires_grad_(backward) for x in inputs]

                def run(way=way, tensors=tensors, backward: bool = backward) -> None:
                    y = way(*tensors)
                    if backward:
                        y.sum().backward()

                try:
                    run()  # compiles
                    cells.append(f"{fastest({'': run}, repeats)[''] * 1e3:.2f}")
                except Exception as error:  # the reason is the result
                    cells.append(str(error).strip().splitlines()[0][:60])
            print(f"| {L:,} | {R} | {name} | {' | '.join(cells)} |")
    print()


# A training step


def step(repeats: int, seed: int) -> None:
    tok = arl.build_tokenizer(arl.make_tasks())
    base, cfg = arl.make_rl_base(tok), arl.RLConfig()
    gen = torch.Generator().manual_seed(seed)
    trajs = arl.sample_step(base, arl.make_tasks("train"), tok, cfg, gen)
    batch = arl.collate(trajs, tok.pad_id)
    real, positions = int(batch["lengths"].sum()), batch["ids"].numel()
    print(f"64 episodes, {real:,} tokens, {positions:,} padded positions\n")
    print("| dtype | rows | attention | positions ratio | forward | step | gradient differs by |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for dtype in (torch.float64, torch.float32):
        model = arl.TinyAgent(len(tok), dtype=dtype)
        model.load_state_dict(base.state_dict())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
        advantages = arl.compute_advantages(batch, cfg).to(dtype)

        def padded_loss(model=model, advantages=advantages) -> Tensor:
            logp = arl.sequence_log_probs(model, batch["ids"])
            return arl.reinforce_loss(logp, advantages, batch["action_mask"])

        losses = {("padded", ""): (padded_loss, positions)}
        for L in (256, 2048):
            packed = arl.pack_sequences(trajs, L)
            spread = arl.spread(advantages, packed)
            for way in ("mask", "segments"):

                def packed_loss(model=model, packed=packed, spread=spread, way=way, L=L) -> Tensor:
                    keys = ("ids", "position_ids", "segment_ids")
                    logits = arl.packed_logits(model, *(packed[k] for k in keys), attention=way)
                    logp = arl.selected_log_probs(logits[:, :-1], packed["ids"][:, 1:])
                    return arl.reinforce_loss(logp, spread, packed["action_mask"])

                computed = packed["ids"].numel() if way == "mask" else real
                losses[f"{len(packed['rows'])} of {L:,}", way] = (packed_loss, computed)

        def gradient(loss: Callable[[], Tensor], model=model, optimizer=optimizer) -> Tensor:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            return torch.cat([p.grad.flatten() for p in model.parameters()])

        reference = gradient(padded_loss)
        steps = fastest({k: lambda f=f: gradient(f) for k, (f, _) in losses.items()}, repeats)
        with torch.no_grad():
            forwards = fastest({k: f for k, (f, _) in losses.items()}, repeats)
        for key, (loss, computed) in losses.items():
            error = (gradient(loss) - reference).abs().max().item()
            first = next(iter(losses))
            print(
                f"| {str(dtype).removeprefix('torch.')} | {key[0]} | {key[1]} "
                f"| {positions / computed:.2f}x | {forwards[first] / forwards[key]:.2f}x "
                f"| {steps[first] / steps[key]:.2f}x | {error:.1e} |"
            )
    print(
        "\nDistance from the positions ratio: padded attention pays for pairs among padding, a\n"
        "dense mask for pairs that it removes, segments for one small call each; loss and\n"
        "optimizer cost the same in all.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Packing side by side.")
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5, help="timing takes the fastest")
    parser.add_argument("--seed", type=int, default=14, help="of the sampled episodes")
    parser.add_argument("--only", nargs="+", default=["plan", "attention", "step"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{processor()}, one thread, Python {platform.python_version()}, ", end="")
    print(f"torch {torch.__version__}\n")
    if "plan" in args.only:
        planners(args.sequences, args.repeats)
    if "attention" in args.only:
        attention(args.repeats)
    if "step" in args.only:
        step(args.repeats, args.seed)


if __name__ == "__main__":
    main()
