"""The vocabulary of checks. The wording of an error is pinned here, and nowhere else."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from agentrl import check

T = torch.tensor
NAN, INF = math.nan, math.inf
F = torch.zeros

ERRORS = [
    # a call, and the words of its error
    (lambda: check.integer("n", 2.5), TypeError, "n must be an integer, got 2.5"),
    (lambda: check.integer("n", 2.0), TypeError, "n must be an integer, got 2.0"),
    (lambda: check.integer("n", True), TypeError, "n must be an integer, got True"),
    (lambda: check.integer("n", np.True_), TypeError, "n must be an integer, got np.True_"),
    (lambda: check.integer("n", T(True)), TypeError, "n must be an integer, got tensor(True)"),
    (lambda: check.integer("n", "3"), TypeError, "n must be an integer, got '3'"),
    (lambda: check.integer("n", None), TypeError, "n must be an integer, got None"),
    (lambda: check.integer("n", 0), ValueError, "n = 0 must be at least 1"),
    (lambda: check.integers("xs", []), ValueError, "xs is empty"),
    (lambda: check.integers("xs", T([])), ValueError, "xs is empty"),
    (lambda: check.integers("xs", 3), TypeError, "xs must be integers in a sequence, got 3"),
    (lambda: check.integers("xs", "12"), TypeError, "xs must be integers in a sequence, got str"),
    (lambda: check.integers("xs", [True, 2]), TypeError, "xs[0] must be an integer, got True"),
    (lambda: check.integers("xs", T([True])), TypeError, "xs[0] must be an integer, got True"),
    (lambda: check.integers("xs", np.ones(2)), TypeError, "xs[0] must be an integer, got 1.0"),
    (lambda: check.integers("xs", [1, 2, 3, 0]), ValueError, "xs[3] = 0 must be at least 1"),
    (lambda: check.integers("xs", [9, 13], cap=10), ValueError, "xs[1] = 13 exceeds cap = 10"),
    (lambda: check.number("x", "1"), TypeError, "x must be a number, got '1'"),
    (lambda: check.number("x", True), TypeError, "x must be a number, got True"),
    (lambda: check.number("x", NAN), ValueError, "x = nan must be finite"),
    (lambda: check.number("x", T(INF)), ValueError, "x = inf must be finite"),
    (lambda: check.number("x", -1, least=0), ValueError, "x = -1 must be at least 0"),
    (lambda: check.number("x", 2, most=1), ValueError, "x = 2 must be at most 1"),
    (lambda: check.number("x", 0, above=0), ValueError, "x = 0 must be above 0"),
    (lambda: check.numbers("xs", []), ValueError, "xs is empty"),
    (lambda: check.numbers("xs", ["a"]), TypeError, "xs[0] must be a number, got 'a'"),
    (lambda: check.numbers("xs", 0.5), TypeError, "xs must be numbers in a sequence, got 0.5"),
    (lambda: check.numbers("xs", [0, NAN]), ValueError, "xs[1] = nan must be finite"),
    (lambda: check.number("x", 10**400), ValueError, f"x = {10**400} must be finite"),
    (lambda: check.numbers("xs", [0, 10**400]), ValueError, f"xs[1] = {10**400} must be finite"),
    (lambda: check.numbers("xs", [0, -1], least=0), ValueError, "xs[1] = -1.0 must be at least 0"),
    (lambda: check.numbers("xs", [0, 2], most=1), ValueError, "xs[1] = 2.0 must be at most 1"),
    (lambda: check.numbers("xs", F(2, 2)), ValueError, "xs [2, 2] of torch.float32 must be numb"),
    (lambda: check.one_of("kind", "x", ("a", "b")), ValueError, "kind must be one of 'a', 'b', go"),
    (
        lambda: check.one_of("kind", 1, ("a", "b")),
        ValueError,
        "kind must be one of 'a', 'b', got 1",
    ),
    (lambda: check.not_empty("rows", []), ValueError, "rows is empty"),
    (lambda: check.tensor("x", [1.0]), TypeError, "x must be a tensor, got list"),
    (lambda: check.tensor("x", np.ones(2)), TypeError, "x must be a tensor, got ndarray"),
    (lambda: check.shapes(x=(F(2), "B T")), ValueError, "x [2] must be [B, T]"),
    (
        lambda: check.shapes(x=(F(2, 3), "B T"), y=(F(2, 4), "B T")),
        ValueError,
        "y [2, 4] must be [B, T] with B = 2, T = 3",
    ),
    (
        lambda: check.shapes(x=(F(2, 3), "B T"), y=(F(2, 3), "B T-1")),
        ValueError,
        "y [2, 3] must be [B, T-1] with B = 2, T = 3",
    ),
    (
        lambda: check.shapes(x=(F(2, 3, 5), "... V"), y=(F(2, 4), "...")),
        ValueError,
        "y [2, 4] must be [...] with ... = [2, 3]",
    ),
    (
        lambda: check.shapes(x=(F(2, 3, 5), "... V"), y=(F(()), "...")),
        ValueError,
        "y [] must be [...] with ... = [2, 3]",
    ),
    (
        lambda: check.shapes(x=(F(2), "B"), y=([1, 2], "B")),
        TypeError,
        "y must be a tensor, got lis",
    ),
    (
        lambda: check.shapes(x=(F(2, 3), "B T"), y=(None, "B?"), z=(F(3), "B?")),
        ValueError,
        "z [3] must be [B] with B = 2",
    ),
    (lambda: check.shapes(x=(None, "B")), TypeError, "x must be a tensor, got NoneType"),
    (
        lambda: check.head(torch.nn.Sequential()),
        TypeError,
        "weight is a torch.nn.modules.container.Sequential, which may do more than multiply and "
        "add its own bias: give its weight [V, D], with any adapter merged in",
    ),
    (lambda: check.mask("m", T([[1, 0.5]])), ValueError, "m[0, 1] = 0.5 must be 0 or 1"),
    (lambda: check.mask("m", T([0.0, -INF])), ValueError, "m[1] = -inf must be 0 or 1"),
    (lambda: check.mask("m", T([NAN])), ValueError, "m[0] = nan must be 0 or 1"),
    (lambda: check.mask("m", [1, 0]), TypeError, "m must be a tensor, got list"),
    (lambda: check.ids("ids", F(2)), TypeError, "ids must be integers, got torch.float32"),
    (lambda: check.ids("ids", T([True])), TypeError, "ids must be integers, got torch.bool"),
    (lambda: check.ids("ids", T([[1, 9]]), 9), ValueError, "ids[0, 1] = 9 is outside 0..8"),
    (lambda: check.ids("ids", T([1, -1]), 9), ValueError, "ids[1] = -1 is outside 0..8"),
    (lambda: check.finite("x", T([[0.0, NAN]])), ValueError, "x[0, 1] = nan must be finite"),
    (lambda: check.groups([0, 1, 1], 2), ValueError, "3 rewards are not a multiple of group_size"),
    (lambda: check.groups([0, NAN], 2), ValueError, "rewards[1] = nan must be finite"),
]


@pytest.mark.parametrize(("call", "kind", "words"), ERRORS, ids=lambda x: None)
def test_an_error_names_argument_index_and_value(call, kind, words):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert caught.type is kind
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("make", [list, tuple, np.array, T, lambda xs: [np.int64(x) for x in xs]])
def test_sequences_of_every_kind_are_read_alike(make):
    assert check.integers("xs", make([3, 1, 2])) == [3, 1, 2]
    assert check.numbers("xs", make([3, 1, 2])).equal(T([3.0, 1.0, 2.0], dtype=torch.float64))
    assert check.groups(make([1, 0, 1, 1]), 2).tolist() == [[1, 0], [1, 1]]


def test_values_come_back_in_the_form_that_is_computed_with():
    assert type(check.integer("n", np.int32(3))) is int
    assert check.integer("n", T(3)) == 3
    assert check.integers("xs", range(1, 4)) == [1, 2, 3]
    assert check.number("x", np.float32(0.5)) == 0.5
    assert check.number("x", T(2)) == check.number("x", T([2])) == 2
    assert check.numbers("xs", [True, np.False_, T(True), T([0.5])]).tolist() == [1, 0, 1, 0.5]
    assert check.mask("m", T([[1.0, 0.0]])).tolist() == [[True, False]]
    kept = F(2, 3, dtype=torch.bool)
    assert check.mask("m", kept) is kept
    assert check.ids("ids", T([0, 8], dtype=torch.uint8), 300) is not None
    assert check.ids("ids", T([], dtype=torch.long), 3).numel() == 0
    assert check.widened(F(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert check.widened(F(1, dtype=torch.float64)).dtype == torch.float64


def test_shapes_are_named():
    sizes = check.shapes(
        hidden=(F(2, 3, 5), "B T D"), weight=(F(7, 5), "V D"), ids=(F(2, 3), "B T")
    )
    assert sizes == {"B": 2, "T": 3, "D": 5, "V": 7}
    assert check.shapes(logits=(F(2, 3, 5), "... V"), ids=(F(2, 3), "...")) == {"V": 5}
    assert check.shapes(logits=(F(5), "... V"), ids=(F(()), "...")) == {"V": 5}


def test_finite_looks_only_where_it_is_told():
    check.finite("x", T([NAN, 1.0]), where=T([False, True]))
    with pytest.raises(ValueError, match=r"x\[0\]"):
        check.finite("x", T([NAN, 1.0]), where=T([True, True]))


def test_values_that_cannot_be_read_are_not_checked():
    with FakeTensorMode():
        check.mask("m", torch.rand(3))
        check.ids("ids", torch.zeros(3, dtype=torch.long), 5)
    check.mask("m", torch.rand(3, device="meta"))
    torch.vmap(lambda x: check.mask("m", x))(torch.rand(2, 3))
    torch.vmap(lambda x: check.ids("ids", x, 5))(torch.full((2, 3), 9))


@given(st.lists(st.integers(-5, 5), min_size=1), st.integers(-5, 5), st.integers(-5, 5))
def test_the_first_offence_is_named(values, least, most):
    wrong = [f"xs[{i}] = {x}" for i, x in enumerate(values) if x < least]
    wrong = wrong or [f"xs[{i}] = {x}" for i, x in enumerate(values) if x > most]
    if wrong:
        with pytest.raises(ValueError) as caught:
            check.integers("xs", values, least, cap=most)
        assert str(caught.value).startswith(wrong[0] + " ")
    else:
        assert check.integers("xs", values, least, cap=most) == values


def test_a_head_is_a_weight_or_a_linear_module():
    linear, bias = torch.nn.Linear(2, 3), F(3)
    assert check.head(linear) == (linear.weight, linear.bias)
    assert check.head(linear.weight) == (linear.weight, None)
    assert check.head(linear.weight, bias) == (linear.weight, bias)
