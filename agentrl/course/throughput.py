# Generated from chapters/10-throughput.ipynb by tools/export.py. Do not edit: edit the notebook.
"""For the chapter alone: Throughput arithmetic."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from agentrl.throughput import Accelerator

__all__ = ["measure_accelerator"]


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
    """
    flops = {}
    for dtype in dtypes:
        a = torch.ones(size, size, dtype=dtype, device=device)
        seconds = _best(lambda a=a: a @ a, device, repeats)
        flops[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    gpu = torch.cuda.get_device_properties(device) if source.is_cuda else None
    return Accelerator(
        name=gpu.name if gpu else f"CPU, {torch.get_num_threads()} threads",
        flops=flops,
        bandwidth=2 * copy_bytes / _best(lambda: target.copy_(source), device, repeats),
        memory=gpu.total_memory if gpu else 0,
        source="measured",
        date=time.strftime("%Y-%m-%d"),
    )


def _best(run: Callable[[], Any], device: str, repeats: int) -> float:
    best = math.inf
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
