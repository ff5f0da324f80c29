"""The checks at the door of every public function: one vocabulary, the same words everywhere.

A check names the argument, the first offending index and its value. It raises `TypeError` where the
kind of a value is wrong and `ValueError` where the value is, and returns the value in the form that
its caller computes with. Values that cannot be read, as under `torch.compile` or on fake tensors,
are not checked.

This module is written by hand; the chapters import it.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "finite",
    "groups",
    "head",
    "ids",
    "integer",
    "integers",
    "mask",
    "not_empty",
    "number",
    "numbers",
    "one_of",
    "shapes",
    "tensor",
    "widened",
]


def integer(name: str, value: Any, least: int | None = 1) -> int:
    """Return an integer of at least `least`. `True` is no integer, and neither is 2.0."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if least is not None and found < least:
        raise ValueError(f"{name} = {found} must be at least {least}")
    return found


def integers(name: str, values: Any, least: int | None = 1, **most: int) -> list[int]:
    """Return a sequence of integers as a list that is not empty.

    Args:
        least: the smallest that is allowed; None allows every integer.
        **most: the largest under the name that the caller knows it by, as `max_tokens=8192`.
    """
    found = _listed(name, values, "integers")
    if set(map(type, found)) != {int}:  # an honest list costs one pass in C
        found = [integer(f"{name}[{i}]", value, None) for i, value in enumerate(found)]
    if least is not None and min(found) < least:
        index = next(i for i, value in enumerate(found) if value < least)
        raise ValueError(f"{name}[{index}] = {found[index]} must be at least {least}")
    for limit, largest in most.items():
        if max(found) > largest:
            index = next(i for i, value in enumerate(found) if value > largest)
            raise ValueError(f"{name}[{index}] = {found[index]} exceeds {limit} = {largest}")
    return found


def number(
    name: str,
    value: Any,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
) -> float:
    """Return a finite number between `least` and `most`, and greater than `above`."""
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not abs(plain) <= sys.float_info.max:
        raise ValueError(f"{name} = {plain} must be finite")
    if above is not None and plain <= above:
        raise ValueError(f"{name} = {plain} must be above {above}")
    if least is not None and plain < least:
        raise ValueError(f"{name} = {plain} must be at least {least}")
    if most is not None and plain > most:
        raise ValueError(f"{name} = {plain} must be at most {most}")
    return plain


def numbers(
    name: str, values: Any, least: float | None = None, most: float | None = None
) -> Tensor:
    """Return finite numbers as a float64 tensor [n] that is not empty; verdicts are 0 and 1."""
    if not isinstance(values, Tensor):
        values = _listed(name, values, "numbers")
        for i, value in enumerate(values):
            if not isinstance(value, bool | float):
                plain = _plain(value)
                values[i] = plain if isinstance(plain, bool) else number(f"{name}[{i}]", plain)
        values = torch.tensor(values, dtype=torch.float64)
    not_empty(name, values)
    if values.ndim != 1 or values.is_complex():
        raise ValueError(f"{name} {list(values.shape)} of {values.dtype} must be numbers [n]")
    values = values.detach().double()
    finite(name, values)
    for limit, wrong, words in (
        (least, values < (least or 0), "at least"),
        (most, values > (most or 0), "at most"),
    ):
        if limit is not None and (index := _first(wrong)):
            raise ValueError(
                f"{_at(name, index)} = {_value(values, index)} must be {words} {limit}"
            )
    return values


def one_of(name: str, value: Any, choices: Collection[str]) -> None:
    """Refuse a name that is none of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def not_empty(name: str, values: Any) -> None:
    """Refuse a collection or a tensor without entries."""
    if not (values.numel() if isinstance(values, Tensor) else len(values)):
        raise ValueError(f"{name} is empty")


def tensor(name: str, value: Any) -> Tensor:
    """Return a tensor; lists and NumPy arrays are refused, since they carry no gradient."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    return value


def shapes(**tensors: tuple[Any, str]) -> dict[str, int]:
    """Check that tensors fit together: `shapes(logp=(logp, "B T"), advantages=(advantages, "B"))`.

    An axis may be one shorter than another, `T-1`; `...` in front stands for any leading axes, the
    same in all tensors. After `?` at the end a tensor may be None.

    Returns:
        The size of each axis under its name.
    """
    sizes: dict[str, int] = {}
    leading: list[int] | None = None
    for name, (value, axes) in tensors.items():
        if value is None and axes.endswith("?"):
            continue
        axes = axes.removesuffix("?")
        have, want = list(tensor(name, value).shape), axes.split()
        cut = 0
        if want[0] == "...":
            want = want[1:]
            cut = max(len(have) - len(want), 0)
            leading = have[:cut] if leading is None else leading
        known = dict(sizes)
        fits = have[:cut] == (leading or [])[:cut] and len(have) == cut + len(want)
        for size, axis in zip(have[cut:], want, strict=False):
            letter, _, less = axis.partition("-")
            fits &= sizes.setdefault(letter, size + int(less or 0)) == size + int(less or 0)
        if not fits or (cut == 0 and axes.startswith("...") and leading):
            sides = [f"{axis} = {size}" for axis, size in known.items() if axis in axes]
            sides += [f"... = {leading}"] * axes.startswith("...")
            shape = f"[{axes.replace(' ', ', ')}]" + f" with {', '.join(sides)}" * bool(sides)
            raise ValueError(f"{name} {have} must be {shape}")
    return sizes


def mask(name: str, value: Any) -> Tensor:
    """Return a mask as booleans. Weights and additive masks (0 and -inf) are refused."""
    value = tensor(name, value)
    if value.dtype == torch.bool:
        return value
    if index := _first((value != 0) & (value != 1)):
        raise ValueError(f"{_at(name, index)} = {_value(value, index)} must be 0 or 1")
    return value != 0


def ids(name: str, value: Any, size: int | None = None) -> Tensor:
    """Return token ids: integers from 0 to `size` - 1. On CUDA the look-up checks the range."""
    value = tensor(name, value)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, got {value.dtype}")
    if size is None or value.device.type != "cpu" or not _readable(value) or not value.numel():
        return value
    try:  # as Python's integers: the size may not fit the dtype of the ids
        low, high = map(int, value.aminmax())
    except RuntimeError:  # under vmap
        return value
    if low < 0 or high >= size:
        index = ((value < 0) | (value.long() >= size)).nonzero()[0].tolist()
        raise ValueError(f"{_at(name, index)} = {_value(value, index)} is outside 0..{size - 1}")
    return value


def finite(name: str, value: Tensor, where: Tensor | None = None) -> None:
    """Refuse NaN and infinity, looking only where the boolean mask `where` is true."""
    wrong = ~value.isfinite()
    wrong = wrong if where is None else wrong & where
    if index := _first(wrong):
        raise ValueError(f"{_at(name, index)} = {_value(value, index)} must be finite")


def groups(rewards: Any, group_size: int) -> Tensor:
    """Cut finite rewards [B], group after group, into float64 rows of `group_size`."""
    size = integer("group_size", group_size)
    rewards = numbers("rewards", rewards)
    if len(rewards) % size:
        raise ValueError(f"{len(rewards)} rewards are not a multiple of group_size = {size}")
    return rewards.view(-1, size)


def head(weight: Any, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of an output head that multiplies and adds, and does nothing else.

    An `nn.Linear` brings its bias. Any other module may do more, as one with an adapter does, and
    is refused; so is a sharded weight.
    """
    if isinstance(weight, torch.nn.Module):
        kind, hooks = type(weight), weight._forward_pre_hooks or weight._forward_hooks
        plain = kind.forward is torch.nn.Linear.forward and "forward" not in vars(weight)
        if hooks or bias is not None or not plain:
            what = f"weight is a {kind.__module__}.{kind.__qualname__}"
            why = "which may do more than multiply and add its own bias"
            raise TypeError(f"{what}, {why}: give its weight [V, D], with any adapter merged in")
        weight, bias = weight.weight, weight.bias
    if hasattr(weight, "full_tensor"):  # a DTensor
        why = "the gradient of `full_tensor()` would lack the other ranks' part"
        raise TypeError(
            "weight is sharded: call `unshard` of its module first, or wrap the head with the root "
            f"({why})"
        )
    return weight, bias


def widened(value: Tensor) -> Tensor:
    """Return the same numbers in at least float32."""
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _listed(name: str, values: Any, kind: str) -> list[Any]:
    if isinstance(values, str | bytes | dict):
        raise TypeError(f"{name} must be {kind} in a sequence, got {type(values).__name__}")
    try:
        found = values.tolist() if hasattr(values, "tolist") else list(values)
    except TypeError:
        found = values
    if not isinstance(found, list):
        raise TypeError(f"{name} must be {kind} in a sequence, got {values!r}")
    not_empty(name, found)
    return found


def _plain(value: Any) -> Any:
    """Take a number out of an array or a tensor of one entry."""
    return value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value


def _readable(value: Tensor) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()


def _first(wrong: Tensor) -> list[int] | None:
    """Return the index of the first true entry; None without one, or where none can be read."""
    if not _readable(wrong):
        return None
    try:
        return wrong.nonzero()[0].tolist() if wrong.any() else None
    except RuntimeError:  # on the meta device, under vmap
        return None


def _at(name: str, index: list[int]) -> str:
    return f"{name}{index}" if index else name


def _value(values: Tensor, index: list[int]) -> Any:
    return values[tuple(index)].item()
