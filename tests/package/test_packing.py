"""Packing: plans and their certificates, round trips, and exact isolation of the segments."""

import math
import warnings
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import agentrl as arl
from benchmarks.models import causal_lm

V = 11
ATTENTION = ("mask", "segments")
KEYS = ("ids", "position_ids", "segment_ids")
F64 = torch.float64


def make_trajs(lengths: list[int], seed: int = 0) -> list[arl.Trajectory]:
    """Random trajectories of the given lengths."""
    g = torch.Generator().manual_seed(seed)
    return [
        arl.Trajectory(
            ids=torch.randint(1, V, (n,), generator=g),
            action_mask=torch.rand(n - 1, generator=g) < 0.5,
            sample_logp=-torch.rand(n - 1, generator=g, dtype=F64),
            reward=float(n),
        )
        for n in lengths
    ]


def pack(*lengths: int, max_tokens: int) -> dict:
    return arl.pack_sequences(make_trajs(list(lengths)), max_tokens)


def make_model(seed: int = 0, dtype: torch.dtype = F64) -> arl.TinyAgent:
    return arl.TinyAgent(V, d_model=16, n_layers=2, n_heads=2, max_len=64, dtype=dtype, seed=seed)


def run(model: torch.nn.Module, packed: dict, attention: str = "mask") -> Tensor:
    return arl.packed_logits(model, *(packed[key] for key in KEYS), attention=attention)


def scores(model: arl.TinyAgent, packed: dict, attention: str = "mask") -> list[Tensor]:
    logits = run(model, packed, attention)
    return arl.unpack(arl.selected_log_probs(logits[:, :-1], packed["ids"][:, 1:]), packed)


def close(a: Tensor, b: Tensor, atol: float = 1e-12) -> bool:
    return torch.allclose(a, b, rtol=0, atol=atol)


# Plans


def naive_plan(lengths: list[int], max_tokens: int, strategy: str) -> list[list[int]]:
    """The textbook loop, quadratic in the number of sequences."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [r for r in range(len(rows)) if room[r] >= lengths[i]]
        best = room.__getitem__ if strategy == "bfd" else None
        r = min(fitting, key=best, default=len(rows))
        if not fitting:
            rows.append([])
            room.append(max_tokens)
        rows[r].append(i)
        room[r] -= lengths[i]
    return rows


def optimum(lengths: list[int], max_tokens: int) -> int:
    """The fewest rows, by dynamic programming over subsets."""
    best = [(1, 0)] + [(len(lengths) + 1, 0)] * (2 ** len(lengths) - 1)  # rows, tokens in the last
    for subset in range(1, len(best)):
        for i, n in enumerate(lengths):
            if subset >> i & 1:
                rows, used = best[subset ^ 1 << i]
                after = (rows, used + n) if used + n <= max_tokens else (rows + 1, n)
                best[subset] = min(best[subset], after)
    return best[-1][0]


def instances(rows: tuple[int, int], shortest: int, most: int) -> st.SearchStrategy:
    """Lengths, the shortest a share of the row, and the tokens of a row."""
    return st.integers(*rows).flatmap(
        lambda c: st.tuples(
            st.lists(st.integers(max(1, c // shortest), c), min_size=1, max_size=most), st.just(c)
        )
    )


@pytest.mark.parametrize("strategy", ["bfd", "ffd"])
@settings(max_examples=200)
@given(instances((1, 60), 60, 50))
def test_plan_equals_the_textbook_loop(strategy: str, instance: tuple[list[int], int]) -> None:
    lengths, max_tokens = instance
    plan = arl.packing_plan(lengths, max_tokens, strategy)
    naive = naive_plan(lengths, max_tokens, strategy)
    assert sorted(i for row in plan for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= max_tokens for row in plan)
    assert strategy == "bfd" or plan == naive
    fills = [sorted(sum(lengths[i] for i in row) for row in rows) for rows in (plan, naive)]
    assert fills[0] == fills[1]
    for row in plan:
        assert [lengths[i] for i in row] == sorted((lengths[i] for i in row), reverse=True)
    assert arl.packing_bound(lengths, max_tokens) <= len(plan)


@settings(max_examples=150)
@given(instances((3, 100), 5, 8))
def test_bound_never_exceeds_the_optimum(instance: tuple[list[int], int]) -> None:
    lengths, max_tokens = instance
    bound = arl.packing_bound(lengths, max_tokens)
    assert -(-sum(lengths) // max_tokens) <= bound <= optimum(lengths, max_tokens)


def test_bound_of_sequences_that_do_not_fit_together() -> None:
    assert arl.packing_bound([6] * 10, 10) == 10  # the sum says 6
    assert arl.packing_bound([34] * 10, 100) == 5  # two to a row; the sum says 4
    assert arl.packing_bound([51, 50], 100) == 2


def dual_feasible(max_tokens: int, lengths: list[int]) -> list[Callable[[Fraction], Fraction]]:
    """The three families as Fekete and Schepers define them, in exact arithmetic."""

    def rounded(k: int) -> Callable[[Fraction], Fraction]:
        return lambda x: x if (k + 1) * x % 1 == 0 else Fraction((k + 1) * x // 1, k)

    def cut(e: Fraction) -> Callable[[Fraction], Fraction]:
        return lambda x: Fraction(1) if x > 1 - e else x if x >= e else Fraction(0)

    def counted(e: Fraction) -> Callable[[Fraction], Fraction]:
        m = 1 // e
        return lambda x: 1 - Fraction((1 - x) // e, m) if 2 * x > 1 else Fraction(int(x >= e), m)

    edges = [Fraction(n, max_tokens) for n in set(lengths) if 2 * n <= max_tokens]
    return [rounded(k) for k in range(1, 33)] + [f(e) for e in edges for f in (cut, counted)]


@example(([25, 20, 20, 18, 18], 54))  # here the first family alone finds the third row
@example(([19, 19, 19, 13, 13], 43))  # the same, with k = 3 or above
@example(([14, 9, 5, 3], 16))  # the second
@example(([36, 36, 14, 14, 14], 60))  # the third
@given(instances((2, 60), 60, 30))
def test_bound_is_the_best_of_the_families_to_the_digit(instance: tuple[list[int], int]) -> None:
    lengths, max_tokens = instance
    shares = [Fraction(n, max_tokens) for n in lengths]
    sums = [sum(map(u, shares), Fraction(0)) for u in dual_feasible(max_tokens, lengths)]
    large = sum(2 * x > 1 for x in shares)
    bound = arl.packing_bound(lengths, max_tokens)
    assert type(bound) is int and bound == max(large, *map(math.ceil, [sum(shares), *sums]))


def test_fault_4_three_of_three_in_rows_of_nine() -> None:
    assert arl.packing_plan([3, 3, 3], 7) == [[0, 1], [2]]
    for c in (9, 17, 8193):  # the fault showed in rows of a power of two and one
        assert len(arl.packing_plan([c // 3] * 3, c)) == 1
        assert len(arl.packing_plan([c // 2] * 6, c)) == 3


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor, bytearray])
@pytest.mark.parametrize("most", [5, torch.tensor(5), np.int32(5)])
def test_plan_takes_integers_of_every_kind(make: Callable, most: object) -> None:
    lengths = make([5, 2, 3])
    assert arl.packing_plan(lengths, most) == [[0], [2, 1]]
    assert arl.packing_bound(lengths, most) == 2
    assert pack(5, 2, 3, max_tokens=most)["ids"].shape == (2, 5)


# Packing


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(20, 50))
def test_round_trip(lengths: list[int], max_tokens: int) -> None:
    trajs = make_trajs(lengths)
    packed = arl.pack_sequences(trajs, max_tokens, pad_id=0)
    R, L = len(packed["rows"]), max_tokens
    assert packed["ids"].shape == (R, L)
    assert packed["position_ids"].shape == packed["segment_ids"].shape == (R, L)
    assert packed["action_mask"].shape == packed["sample_logp"].shape == (R, L - 1)
    for key in ("ids", "action_mask", "sample_logp"):
        for value, traj in zip(arl.unpack(packed[key], packed), trajs, strict=True):
            assert torch.equal(value, getattr(traj, key))
    for position, traj in zip(arl.unpack(packed["position_ids"], packed), trajs, strict=True):
        assert position.tolist() == list(range(len(traj.ids)))
    padding = packed["segment_ids"] < 0
    assert int((~padding).sum()) == sum(lengths)
    assert (packed["ids"][padding] == 0).all() and (packed["segment_ids"][padding] == -1).all()
    assert packed["action_mask"].sum() == sum(int(traj.action_mask.sum()) for traj in trajs)
    for r, row in enumerate(packed["rows"]):
        number = packed["segment_ids"][r]
        for k, i in enumerate(row):
            assert torch.equal(packed["ids"][r, number == k], trajs[i].ids)
    cu, flat = packed["cu_seqlens"], packed["ids"][~padding]
    assert cu.dtype == torch.int32 and cu[0] == 0 and cu[-1] == sum(lengths)
    assert len(cu) == len(lengths) + 1  # trailing padding is no sequence
    for k, i in enumerate(i for row in packed["rows"] for i in row):
        assert torch.equal(flat[cu[k] : cu[k + 1]], trajs[i].ids)


def test_fault_3_the_boundary_predicts_nothing() -> None:
    ids, ones = (torch.tensor([1, 2, 3]), torch.tensor([4, 5])), torch.ones(2)
    pair = [arl.Trajectory(x, ones[: len(x) - 1], ones[: len(x) - 1], 0.0) for x in ids]
    packed = arl.pack_sequences(pair, 6)
    assert packed["ids"].tolist() == [[1, 2, 3, 4, 5, 0]]
    labels = torch.where(packed["action_mask"], packed["ids"][:, 1:], -100)
    assert labels.tolist() == [[2, 3, -100, 5, -100]]
    assert packed["sample_logp"].tolist() == [[1, 1, 0, 1, 0]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert packed["segment_ids"].tolist() == [[0, 0, 0, 1, 1, -1]]
    assert packed["cu_seqlens"].tolist() == [0, 3, 5]


def test_a_log_prob_that_is_not_finite_is_named_by_its_trajectory() -> None:
    trajs = make_trajs([1, 5, 4, 5])
    for traj in trajs:
        traj.action_mask = torch.zeros(len(traj.ids) - 1)
        traj.sample_logp = torch.full_like(traj.action_mask, math.nan)
    rows = arl.pack_sequences(trajs, 10)["rows"]  # nobody sampled anything
    trajs[2].action_mask[1] = 1
    with pytest.raises(ValueError, match=r"trajs\[2\].sample_logp\[1\] = nan"):
        arl.pack_sequences(trajs, 10)
    trajs[2].sample_logp[1] = -2.0
    assert arl.pack_sequences(trajs, 10)["rows"] == rows


def test_one_token_predicts_nothing_and_packs() -> None:
    packed = pack(1, 3, 1, max_tokens=5)
    assert packed["cu_seqlens"].tolist() == [0, 3, 4, 5]
    assert packed["action_mask"][0, 2:].tolist() == [False, False]
    assert run(make_model(), pack(1, max_tokens=1), "segments").shape == (1, 1, V)


def test_spread_gives_each_prediction_the_value_of_its_trajectory() -> None:
    lengths, values = [3, 7, 2, 5], torch.tensor([1.0, 2.0, 3.0, 4.0])
    packed = pack(*lengths, max_tokens=9)
    given = arl.unpack(arl.spread(values, packed), packed)
    for length, value, out in zip(lengths, values.tolist(), given, strict=True):
        assert out.tolist() == [value] * (length - 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda() -> None:
    cuda = [
        arl.Trajectory(t.ids.cuda(), t.action_mask.cuda(), t.sample_logp.cuda(), 0.0)
        for t in make_trajs([9, 7, 1])
    ]
    packed = arl.pack_sequences(cuda, 10)
    assert packed["cu_seqlens"].device.type == packed["ids"].device.type == "cuda"
    for attention in ATTENTION:
        run(make_model().cuda(), packed, attention)


# Exactness


@pytest.mark.parametrize("attention", ATTENTION)
@settings(max_examples=25)
@example([6, 6, 6], 6, 0)  # rows of one segment each: all have the number 0
@example([2], 50, 0)  # mostly padding
@given(st.lists(st.integers(1, 14), min_size=1, max_size=8), st.integers(14, 60), st.integers(0, 9))
def test_packed_equals_alone(
    attention: str, lengths: list[int], max_tokens: int, seed: int
) -> None:
    trajs, model = make_trajs([*lengths, 3], seed), make_model(seed)
    weights = [torch.randn(len(t.ids) - 1, dtype=F64) for t in trajs]
    packed = scores(model, arl.pack_sequences(trajs, max_tokens), attention)
    alone = [arl.sequence_log_probs(model, t.ids[None])[0] if len(t.ids) > 1 else t.sample_logp
             for t in trajs]  # fmt: skip
    gradients = []
    for values in (packed, alone):
        loss = sum((w * v).sum() for w, v in zip(weights, values, strict=True))
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(map(close, packed, alone))
    for a, b in zip(*gradients, strict=True):
        assert close(a, b, 1e-12 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("attention", ATTENTION)
@settings(max_examples=20)
@given(st.lists(st.integers(1, 14), min_size=2, max_size=8), st.data())
def test_fault_2_a_segment_moves_no_other_by_a_bit(
    dtype: torch.dtype, attention: str, lengths: list[int], data: st.DataObject
) -> None:
    model, trajs = make_model(dtype=dtype), make_trajs(lengths)
    which = data.draw(st.integers(0, len(trajs) - 1))
    where = data.draw(st.integers(0, lengths[which] - 1))
    before = scores(model, arl.pack_sequences(trajs, 60), attention)
    trajs[which].ids[where] = (trajs[which].ids[where] + 1) % V
    after = scores(model, arl.pack_sequences(trajs, 60), attention)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(a, b) or i == which


@pytest.mark.parametrize("attention", ATTENTION)
def test_cross_segment_input_gradient_is_exactly_zero(attention: str) -> None:
    model, packed = make_model(), pack(9, 7, 1, 5, max_tokens=30)
    inputs: list[Tensor] = []
    model.token.register_forward_hook(lambda _, __, out: inputs.append(out))
    logits = run(model, packed, attention)
    (embedded,), numbers = inputs, packed["segment_ids"]
    seen = numbers if attention == "mask" else numbers[numbers >= 0][None]
    for k in range(4):
        loss = logits[numbers == k].square().sum()
        (gradient,) = torch.autograd.grad(loss, embedded, retain_graph=True)
        assert (gradient[seen != k] == 0).all()
        assert (gradient[seen == k] != 0).any()


@pytest.mark.parametrize("attention", ATTENTION)
def test_float32_agrees_to_rounding(attention: str) -> None:
    model, trajs = make_model(dtype=torch.float32), make_trajs([40, 3, 17, 25, 12, 9, 60, 2])
    packed = scores(model, arl.pack_sequences(trajs, 64), attention)
    for a, traj in zip(packed, trajs, strict=True):
        assert close(a, arl.sequence_log_probs(model, traj.ids[None])[0], 5e-6)


def test_block_mask() -> None:
    mask = arl.block_mask(torch.tensor([[0, 0, 1, -1, -1]]))
    assert mask.dtype == torch.bool and mask.shape == (1, 1, 5, 5)
    rows = ["10000", "11000", "00100", "00010", "00001"]
    assert mask[0, 0].int().tolist() == [[int(x) for x in row] for row in rows]


def test_auto_takes_segments_in_long_rows() -> None:
    for max_tokens, expected in ((400, "segments"), (100, "mask")):
        packed = pack(20, 30, 9, max_tokens=max_tokens)
        assert torch.equal(run(make_model(), packed, "auto"), run(make_model(), packed, expected))


@pytest.mark.parametrize("outer", [True, False], ids=["the call", "the model"])
def test_fault_27_segments_survive_compilation(outer: bool) -> None:
    model = make_model()
    inner = model if outer else torch.compile(model, backend="aot_eager")
    call = torch.compile(run, backend="aot_eager") if outer else run
    for lengths in ([9, 7, 1], [7, 9, 1], [3, 3, 3, 3]):  # two layouts share all shapes
        packed = pack(*lengths, max_tokens=17)
        real = packed["segment_ids"] >= 0
        pair = [x[real] for x in (call(inner, packed, "segments"), run(model, packed))]
        assert close(*pair)
        weight = model.token.weight
        assert close(*(torch.autograd.grad(x.square().sum(), weight)[0] for x in pair))


class Attention(torch.nn.Module):
    """One layer of attention that calls the function with the given options."""

    def __init__(self, kv_heads: int = 4, **options) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        q, *kv = (torch.randn(V, n, 8, generator=g, dtype=F64) for n in (4, kv_heads, kv_heads))
        self.q, self.kv, self.options = torch.nn.Parameter(q), kv, options

    def forward(self, ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None):
        q, k, v = (table[ids].transpose(1, 2) for table in (self.q, *self.kv))
        options = {"is_causal": True, **self.options}
        if attention_mask is not None:
            options |= {"attn_mask": attention_mask, "is_causal": False}
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


FOUR = pack(3, 7, 1, 4, max_tokens=12)


@pytest.mark.parametrize(
    "model",
    [
        Attention(scale=2.0),
        Attention(kv_heads=2, enable_gqa=True),
        Attention(kv_heads=1, enable_gqa=True, scale=0.1, attn_mask=None, dropout_p=0.0),
    ],
    ids=["scale", "grouped heads", "all"],
)
def test_segments_keep_the_options_of_the_model(model: Attention) -> None:
    real = FOUR["segment_ids"] >= 0
    assert close(*(run(model, FOUR, attention)[real] for attention in ATTENTION))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_mask": torch.ones(15, 15).bool().tril(), "is_causal": False}, "with a mask"),
        ({"attn_mask": torch.zeros(15, 15, dtype=F64)}, "with a mask"),
        ({"dropout_p": 0.1}, "no mask, dropout_p = 0.1"),
        ({"is_causal": False}, "no mask, dropout_p = 0.0, is_causal = False"),
    ],
)
def test_segments_refuse_what_they_would_drop(options: dict, words: str) -> None:
    with pytest.raises(RuntimeError, match=f"{words}.*attention='mask'"):
        run(Attention(**options), FOUR, "segments")
    eager = lambda ids, position_ids: F.one_hot(ids, V).double()  # noqa: E731
    with pytest.raises(RuntimeError, match="attention='mask'"):
        run(eager, FOUR, "segments")


def test_segments_refuse_reentrant_checkpoints() -> None:
    # They attend again in the backward pass, where nothing says where a segment ends.
    layer = Attention()
    again = lambda *args, **kwargs: checkpoint(  # noqa: E731
        lambda q: layer(*args, **kwargs) * q.sum(), layer.q, use_reentrant=True
    )
    with pytest.raises(RuntimeError, match=r"reentrant checkpoints.*attention='mask'"):
        run(again, FOUR, "segments")
    assert run(again, FOUR, "mask").requires_grad
    with torch.no_grad():  # nothing will be recomputed
        run(again, FOUR, "segments")
    frozen, head = torch.no_grad()(layer.forward), torch.nn.Linear(32, 5).double()
    run(frozen, FOUR, "segments")  # a reference policy, which never has gradients
    above = lambda *args, **kwargs: head(frozen(*args, **kwargs))  # noqa: E731
    assert run(above, FOUR, "segments").requires_grad  # a frozen trunk, a trained head


def test_segment_attention_takes_grouped_heads() -> None:
    q, kv = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8)
    y = arl.segment_attention(q, kv, kv, [4, 5], enable_gqa=True)
    for a, b in ((0, 4), (4, 9)):
        part = (x[:, :, a:b] for x in (q, kv, kv))
        alone = F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)
        assert torch.allclose(y[:, :, a:b], alone)


# A real architecture


def tiny_qwen(implementation: str) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")

    def by_boundaries(module, query, key, value, mask, scaling, cu_seq_lens_q=None, **rest):
        n = query.shape[2]
        sizes = [n] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
        out = arl.segment_attention(query, key, value, sizes, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    transformers.AttentionInterface.register("boundaries", by_boundaries)
    return causal_lm("Qwen3", implementation, vocab_size=V, hidden_size=32, head_dim=8).eval()


@pytest.fixture(scope="module", params=["eager", "sdpa", "boundaries"])
def qwen(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, bool]:
    """A small Qwen3, and whether it takes boundaries instead of a mask."""
    return tiny_qwen(request.param), request.param == "boundaries"


def test_boundaries_are_told_to_queries_and_keys() -> None:
    given = arl.transformers_inputs(pack(5, 12, 3, max_tokens=17), boundaries=True)
    assert given["cu_seq_lens_q"].tolist() == given["cu_seq_lens_k"].tolist() == [0, 12, 17, 20]
    assert given["max_length_q"] == given["max_length_k"] == 12


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_transformers_model_is_sent_to_its_own_inputs(implementation: str) -> None:
    packed = pack(9, 7, 1, max_tokens=17)
    for attention in ("mask", "auto"):
        with pytest.raises(TypeError, match=r"returned CausalLMOutput.*transformers_inputs"):
            run(tiny_qwen(implementation), packed, attention)
    with pytest.raises(RuntimeError, match="transformers_inputs"):
        run(tiny_qwen("eager"), packed, "segments")


def qwen_scores(qwen: tuple[torch.nn.Module, bool], packed: dict, **changes) -> list[Tensor]:
    model, boundaries = qwen
    arguments = arl.transformers_inputs(packed, model.dtype, boundaries=boundaries)
    logits = model(**{**arguments, **changes}).logits
    if boundaries:
        real = packed["segment_ids"] >= 0
        logits = logits.new_zeros(*real.shape, V).masked_scatter(real[..., None], logits)
    return arl.unpack(logits.log_softmax(-1), packed)


def qwen_alone(qwen: tuple[torch.nn.Module, bool], trajs: list[arl.Trajectory]) -> list[Tensor]:
    return [qwen[0](t.ids[None], use_cache=False).logits[0].log_softmax(-1) for t in trajs]


@pytest.mark.parametrize("lengths", [[9, 7, 1], [1, 1, 1], [5, 12, 3, 8, 2, 2]])
@pytest.mark.parametrize("max_tokens", [17, 23])
def test_fault_1_qwen3_equals_alone(qwen, lengths: list[int], max_tokens: int) -> None:
    trajs, parameters = make_trajs(lengths), list(qwen[0].parameters())
    packed = qwen_scores(qwen, arl.pack_sequences(trajs, max_tokens))
    alone = qwen_alone(qwen, trajs)
    assert all(close(a, b, 1e-6) for a, b in zip(packed, alone, strict=True))
    losses = [sum(x.square().sum() for x in values) for values in (packed, alone)]
    for a, b in zip(*(torch.autograd.grad(loss, parameters) for loss in losses), strict=True):
        assert close(a, b, max(1e-6, 1e-5 * b.abs().max().item()))


def test_fault_1_qwen3_keeps_segments_apart(qwen) -> None:
    trajs = make_trajs([9, 7, 1])
    before = qwen_scores(qwen, arl.pack_sequences(trajs, 20))
    trajs[0].ids[0] = (trajs[0].ids[0] + 1) % V
    after = qwen_scores(qwen, arl.pack_sequences(trajs, 20))
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, True, True]


def test_fault_1_the_library_leaks_without_explicit_boundaries(qwen) -> None:
    if qwen[1]:
        pytest.skip("asks about masks")
    packed = pack(9, 7, 1, max_tokens=17)
    right = torch.cat(qwen_scores(qwen, packed))
    inferred = torch.cat(qwen_scores(qwen, packed, attention_mask=None))
    ones = torch.cat(qwen_scores(qwen, packed, attention_mask=torch.ones_like(packed["ids"])))
    assert (right - inferred).abs().max() < 1e-6 < 1e-3 < (right - ones).abs().max()


# State and prefixes


def test_fault_6_a_state_ends_with_its_segment() -> None:
    numbers = torch.tensor([[0, 0, 1, 1]])
    assert arl.segment_cumsum(torch.ones(1, 4), numbers).tolist() == [[1, 2, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_state_in_half_precision_keeps_its_digits(dtype: torch.dtype) -> None:
    summed = arl.segment_cumsum(torch.ones(1, 5000, dtype=dtype), torch.zeros(1, 5000).long())
    assert summed.dtype == torch.float32 and summed[0, -1] == 5000  # bfloat16 would stop at 256


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(9, 20))
@settings(max_examples=30)
def test_segment_cumsum_equals_alone(lengths: list[int], max_tokens: int) -> None:
    packed = pack(*lengths, max_tokens=max_tokens)
    values = torch.randn(*packed["ids"].shape, 3, dtype=F64)
    summed = arl.unpack(arl.segment_cumsum(values, packed["segment_ids"]), packed)
    for a, b in zip(summed, arl.unpack(values, packed), strict=True):
        assert close(a, b.cumsum(0))
    # A neighbour that is not a number must not spoil the rest.
    first = packed["segment_ids"] == 0
    values[first] = math.nan
    assert arl.segment_cumsum(values, packed["segment_ids"])[~first].isfinite().all()


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8))
def test_prefix_tree_counts_distinct_prefixes(sequences: list[list[int]]) -> None:
    nodes = {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}
    for kind in (list, tuple, torch.tensor, np.array):
        assert arl.prefix_tree_tokens([kind(s) for s in sequences]) == len(nodes)


# What is refused

TWO, TRAJS = pack(3, 4, max_tokens=10), make_trajs([3, 13])
ROW, HEADS = [TWO[key] for key in KEYS], torch.ones(1, 2, 7, 4)
PLANNERS = (arl.packing_plan, arl.packing_bound)
LENGTHS = [  # lengths for rows of 10, the error, what it names
    ([13], ValueError, r"lengths\[0\] = 13 .*max_tokens = 10"),
    ([1, 2, 11, 12], ValueError, r"lengths\[2\] = 11 .*max_tokens = 10"),
    *(([1, n], ValueError, rf"lengths\[1\] = {n} ") for n in (2**63, 0, -3, -(2**70))),
    *(([1, n], TypeError, r"lengths\[1\]") for n in (2.5, torch.tensor(2.5), True, "2", None)),
    *((bad, TypeError, r"lengths") for bad in (torch.tensor([1.0]), np.ones((1, 1)), 3, "12")),
    ([], ValueError, "lengths"),
]
REFUSED = [  # a function, its arguments, the error, what it names
    *((f, (lengths, 10), kind, words) for f in PLANNERS for lengths, kind, words in LENGTHS),
    *((f, ([3], bad), TypeError, "max_tokens") for f in PLANNERS for bad in (9.0, "9", None, True)),
    (arl.packing_plan, ([1], 0), ValueError, "max_tokens"),
    (arl.packing_plan, ([1], 10, "best"), ValueError, "strategy.*'best'"),
    (arl.pack_sequences, (TRAJS, 10), ValueError, r"\[1\] = 13 .*max_tokens = 10"),  # fault 5
    (arl.pack_sequences, ([], 10), ValueError, "trajs"),
    (arl.pack_sequences, (TRAJS, 20.0), TypeError, "max_tokens"),
    (arl.pack_sequences, (TRAJS, 20, 0.5), TypeError, "pad_id"),
    *((arl.unpack, (torch.zeros(shape), TWO), ValueError, r"\[1, 10, ...\] or \[1, 9, ...\]")
      for shape in ((2, 10), (1, 8), (1, 11), (10,))),
    *((f, (bad, TWO), TypeError, "values")
      for f in (arl.unpack, arl.spread) for bad in ([1.0], np.ones(2))),
    *((arl.spread, (torch.ones(shape), TWO), ValueError, "values") for shape in ((3,), (), (2, 1))),
    *((arl.block_mask, (bad,), kind, "segment_ids") for bad, kind in (
        (ROW[2].tolist(), TypeError), (ROW[2] >= 0, TypeError), (ROW[2][0], ValueError))),
    *((arl.segment_attention, (HEADS, HEADS, HEADS, sizes), kind, "lengths")
      for sizes, kind in (([3, 5], ValueError), ([], ValueError), ([3.0, 4.0], TypeError))),
    (arl.segment_attention, (HEADS, HEADS.numpy(), HEADS, [3, 4]), TypeError, "k must"),
    (arl.segment_attention, (HEADS, HEADS, HEADS[:, :, :5], [3, 4]), ValueError, "v "),
    *((arl.packed_logits, (make_model(), *ROW[:i], bad, *ROW[i + 1 :]), TypeError, key)
      for i, key in enumerate(KEYS) for bad in (ROW[i].tolist(), ROW[i].numpy(), ROW[i].float())),
    (arl.packed_logits, (make_model(), ROW[0], ROW[1][:, :5], ROW[2]), ValueError, "position_ids"),
    (arl.packed_logits, (make_model(), *(x[0] for x in ROW)), ValueError, "ids"),
    (run, (make_model(), TWO, "flash"), ValueError, "attention.*'flash'"),
    *((arl.segment_cumsum, (values, ROW[2]), kind, "values")
      for values, kind in ((np.ones((1, 10)), TypeError), (torch.ones(1, 9), ValueError))),
    (arl.segment_cumsum, (torch.ones(1, 10), ROW[2].float()), TypeError, "segment_ids"),
    (arl.prefix_tree_tokens, ([],), ValueError, "sequences"),
    *((arl.prefix_tree_tokens, ([[1], bad],), kind, r"sequences\[1\]")
      for bad, kind in (([], ValueError), ([1.5], TypeError), ("ab", TypeError), (3, TypeError))),
]  # fmt: skip


@pytest.mark.parametrize(("function", "given", "kind", "words"), REFUSED, ids=lambda x: None)
def test_the_argument_is_named(function: Callable, given: tuple, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        function(*given)
