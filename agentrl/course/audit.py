# Generated from chapters/11-audit.ipynb by tools/export.py. Do not edit: edit the notebook.
"""For the chapter alone: Design review."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agentrl.audit import leak_check, split_invariance_check, step_zero_ratio_check
from agentrl.curriculum import fill_groups, filter_by_pass_rate, group_filter_check
from agentrl.grpo import reinforce_loss
from agentrl.logits import checkpointed_log_probs, head_memory_check
from agentrl.microbatch import rank_balanced_batches, schedule_check, token_budget_batches
from agentrl.packing import (
    block_mask,
    pack_sequences,
    packed_logits,
    packing_plan,
    segment_cumsum,
    transformers_inputs,
    unpack,
)
from agentrl.policy import TinyAgent, selected_log_probs
from agentrl.report import CheckResult
from agentrl.rollout import Trajectory, pad_rows
from agentrl.throughput import flop_count_check

__all__ = ["Plant", "full_head", "planted_faults"]


@dataclass(frozen=True)
class Plant:
    """A fault in a small trainer and its repair, as arguments of the check that has to find it.

    Attributes:
        fault: its name; a number is a row of the table of public reports.
        check: the check.
        wrong, right: what the fault and the repair give it.
        case: what both give it.
        says: what the diagnosis of the fault has to say.
    """

    fault: str
    check: Callable[..., CheckResult]
    wrong: dict[str, Any]
    right: dict[str, Any]
    case: dict[str, Any]
    says: str

    def run(self, planted: bool) -> CheckResult:
        """Ask the check about the trainer with the fault, or about the repaired one."""
        return self.check(**self.case, **(self.wrong if planted else self.right))


def _toy_policy(dtype: torch.dtype, seed: int = 0) -> TinyAgent:
    model = TinyAgent(32, d_model=32, max_len=64, dtype=dtype, seed=seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)  # as sure of itself as a trained policy
    return model


@torch.no_grad()
def _toy_episodes(model: TinyAgent, temperature: float = 1.0) -> list[Trajectory]:
    """Sample 16 episodes of 10 to 41 tokens in two groups, with 4 tokens of tool output in each."""
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(32, (2, 4), generator=draws).repeat_interleave(8, 0)  # two prompts
    logps = []
    for t in range(4, 41):
        logp = (model(ids)[:, -1] / temperature).double().log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=draws)
        if 7 <= t < 11:  # a tool's answer
            token = torch.randint(32, (16, 1), generator=draws)
        logps.append(logp.gather(1, token) * (not 7 <= t < 11))
        ids = torch.cat([ids, token], 1)
    sampled = torch.cat([torch.zeros(16, 3, dtype=torch.float64), *logps], 1)
    mask = torch.arange(1, 41) >= 4
    mask[6:10] = False
    lengths = [10 + (7 * i) % 32 for i in range(16)]
    return [
        Trajectory(ids[i, :n], mask[: n - 1], sampled[i, : n - 1], float(i % 3 == 0))
        for i, n in enumerate(lengths)
    ]


def _padded_logp(
    model: nn.Module, trajs: Sequence[Trajectory], temperature: float = 1.0, dropout: float = 0.0
) -> list[Tensor]:
    """What a right trainer computes: a padded batch."""
    ids = pad_rows([traj.ids for traj in trajs], max(len(traj.ids) for traj in trajs), 0)
    hidden = F.dropout(model.hidden_states(ids[:, :-1]), dropout)
    logp = selected_log_probs(model.lm_head(hidden) / temperature, ids[:, 1:])
    return [row[: len(traj.ids) - 1] for row, traj in zip(logp, trajs, strict=True)]


def _packed_logp(model: nn.Module, trajs: Sequence[Trajectory], mask: bool) -> list[Tensor]:
    rows = pack_sequences(trajs, 60)
    allowed = block_mask(rows["segment_ids"]) if mask else None
    logits = model(rows["ids"], rows["position_ids"], allowed)
    return unpack(selected_log_probs(logits[:, :-1], rows["ids"][:, 1:]), rows)


def _packing_plants(dtype: torch.dtype) -> list[Plant]:
    """Segments of 9, 7 and 1 tokens in one row of 20."""
    draws = torch.Generator().manual_seed(3)
    tokens = [torch.randint(32, (n,), generator=draws) for n in (9, 7, 1)]
    row = pack_sequences(
        [Trajectory(t, torch.ones(len(t) - 1), torch.zeros(len(t) - 1), 0.0) for t in tokens], 20
    )
    model, ids, segments = _toy_policy(dtype), row["ids"], row["segment_ids"]
    positions, running = row["position_ids"], torch.arange(20)[None]

    def qwen(**inputs: Any) -> Callable[[Tensor], Tensor]:
        def logits(x: Tensor) -> Tensor:
            from transformers import Qwen3Config, Qwen3ForCausalLM

            sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                made = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, initializer_range=0.3))
            given = {**transformers_inputs(row, dtype), "input_ids": x, **inputs}
            return made.to(dtype).eval()(**given).logits

        return logits

    def blocks(x: Tensor, where: Tensor = positions) -> Tensor:
        return packed_logits(model, x, where, segments)

    rows, crosses = {"ids": ids, "segment_ids": segments}, "crosses the boundary"
    functions = [
        ("1 mask of ones", qwen(attention_mask=torch.ones(1, 20)), qwen(), crosses),
        ("2 causal mask only", lambda x: model(x, positions), blocks, crosses),
        (
            "6 state not reset",
            lambda x: x.to(dtype).cumsum(1),
            lambda x: segment_cumsum(x.to(dtype), segments),
            crosses,
        ),
    ]
    plants = [
        Plant(fault, leak_check, {"log_prob_fn": wrong}, {"log_prob_fn": right}, rows, says)
        for fault, wrong, right, says in functions
    ]
    return [
        *plants,
        Plant(
            "3 labels shifted late",
            leak_check,
            {"loss_mask": torch.ones(1, 19)},
            {"loss_mask": row["action_mask"]},
            {**rows, "log_prob_fn": blocks},
            "were shifted",
        ),
        Plant(
            "positions run on",
            leak_check,
            {"log_prob_fn": lambda x: blocks(x, running)},
            {"log_prob_fn": blocks},
            {**rows, "alone_fn": model},
            "positions do not restart",
        ),
    ]


def _exact_fits_only(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Best fit whose search finds rows that are filled exactly, and no others."""
    rows: list[list[int]] = []
    for i, n in enumerate(lengths):
        fit = [row for row in rows if sum(lengths[j] for j in row) + n == max_tokens]
        fit[0].append(i) if fit else rows.append([i])
    return rows


def _schedule_plants() -> list[Plant]:
    tens = [9, 8, 9, 8, 9, 8, 9, 8, 9, 1]
    fours = [list(range(k, min(k + 4, 10))) for k in (0, 4, 8)]
    ranks = rank_balanced_batches(tens, 20, 2)
    merged = [
        [*ranks[0][:-2], ranks[0][-2] + ranks[0][-1]],
        ranks[1],
    ]  # a rank joins two of its own
    average = [[0], [1], [2], [3], [4], [5], [6, 7]]  # ceil(56 / 8) = 7 of them
    cases = [
        (
            "4 room not found",
            _exact_fits_only([3] * 6, 7),
            packing_plan([3] * 6, 7),
            {"lengths": [3] * 6, "max_tokens": 7, "packed": True},
            "search for a fit",
        ),
        (
            "7 cap on the average",
            average,
            token_budget_batches([7] * 8, 8, packed=True),
            {"lengths": [7] * 8, "max_tokens": 8, "packed": True},
            "by the tokens they hold",
        ),
        (
            "last samples dropped",
            fours[:2],
            fours,
            {"lengths": tens, "max_tokens": 36},
            "8 is dropped",
        ),
        (
            "samples twice",
            [*fours[:2], [8, 9, 0, 1]],
            fours,
            {"lengths": tens, "max_tokens": 36},
            "sequence 0 is trained twice",
        ),
        (
            "ranks of unequal count",
            merged,
            ranks,
            {"lengths": tens, "max_tokens": 40, "num_ranks": 2},
            "for ever",
        ),
    ]
    return [
        Plant(
            "5 sequence cut",
            schedule_check,
            {"batches": [[0]], "max_tokens": 10},
            {"batches": packing_plan([13], 13), "max_tokens": 13},
            {"lengths": [13], "packed": True},
            "is cut",
        ),
        *(
            Plant(fault, schedule_check, {"batches": wrong}, {"batches": right}, case, says)
            for fault, wrong, right, case, says in cases
        ),
    ]


def _gradient_plants(dtype: torch.dtype) -> list[Plant]:
    model, name = _toy_policy(dtype), split_invariance_check
    trajs = sorted(_toy_episodes(model), key=lambda traj: len(traj.ids))
    rewards = torch.tensor([traj.reward for traj in trajs])
    tokens = float(sum(traj.action_mask.sum() for traj in trajs))

    def standard(values: Tensor) -> Tensor:
        return (values - values.mean()) / (values.std() + 1e-6)

    def loss(rows: list[int], advantages: Tensor, norm: float) -> Tensor:
        part = [trajs[i] for i in rows]
        width = max(len(traj.ids) for traj in part) - 1
        mask = pad_rows([traj.action_mask for traj in part], width, False)
        logp = pad_rows(_padded_logp(model, part), width, 0.0)
        return reinforce_loss(logp, advantages, mask, norm_const=norm)

    def policy(_: Any, split: list[list[int]], fault: str = "") -> list[Tensor]:
        model.zero_grad()
        for rows in split:
            own = standard(rewards[rows]) if fault == "advantages" else standard(rewards)[rows]
            count = float(sum(trajs[i].action_mask.sum() for i in rows))
            norm = len(split) * count if fault == "local" else tokens
            loss(rows, own, norm / 2 if fault == "twice" else norm).backward()
        return [p.grad for p in model.parameters()]

    def means(batch: Tensor, split: list[list[int]], fault: str = "") -> Tensor:
        """A model of one weight that multiplies given token losses."""
        weight = torch.ones((), dtype=dtype, requires_grad=True)
        for rows in split:
            count = len(rows) if fault else len(batch)
            share = len(split) if fault == "local" else 1
            (weight * batch[rows].sum() / count / share).backward()
        return weight.grad

    def ranks(batch: list[Tensor], split: list[list[int]], fault: str = "") -> Tensor:
        """Data-parallel ranks with one microbatch each; gradients of 4 weights are averaged."""
        weight = torch.ones(4, dtype=dtype, requires_grad=True)
        parts = [torch.cat([batch[i] for i in rows]) for rows in split]  # [tokens, 4] of each rank
        total = sum(map(len, parts)) / len(parts)  # an all-reduce
        losses = [(part @ weight).sum() / (len(part) if fault else total) for part in parts]
        return torch.stack([torch.autograd.grad(x, weight)[0] for x in losses]).mean(0)

    def empty(batch: Tensor, split: list[list[int]], fault: str = "") -> Tensor:
        weight = torch.ones((), dtype=dtype, requires_grad=True)
        mask = torch.tensor([True, True, True, True, False])
        for rows in split:
            count = mask[rows].sum() if fault else 4
            share = len(split) if fault else 1
            (weight * (batch[rows] * mask[rows]).sum() / count / share).backward()
        return weight.grad

    losses, even = torch.tensor([1.0, 1.0, 1.0, 1.0, 10.0], dtype=dtype), torch.ones(8, dtype=dtype)
    draws = torch.Generator().manual_seed(2)
    rows = [
        torch.randn(n, 4, generator=draws).add(mean).to(dtype)
        for n, mean in ((9, 1), (12, 1), (2, 10))
    ]
    uneven, own = [[0, 1, 2, 3], [4]], "divided by its own count"
    slope = {
        "loss_fn": lambda _: loss(list(range(16)), standard(rewards), tokens),
        "params": list(model.parameters()),
    }
    cases = [
        ("8 mean of means", means, "local", losses, [uneven], own),
        ("9 mean over ranks", ranks, "own", rows, [[[0, 1], [2]]], own),
        ("10 no policy token", empty, "own", losses, [uneven], "divides by 0"),
        ("16 sum of means", means, "sum", even, [1, 2, 4, 8], "summed where"),
        ("25 all twice as large", policy, "twice", trajs, [2], "2 times the slope"),
        ("own token count", policy, "local", trajs, [2, 4], own),
        ("own advantages", policy, "advantages", trajs, [2, 4], "advantages or"),
    ]
    return [
        Plant(
            fault,
            name,
            {"grad_fn": partial(fn, fault=kind)},
            {"grad_fn": fn},
            {"batch": batch, "splits": splits, **(slope if kind == "twice" else {})},
            says,
        )
        for fault, fn, kind, batch, splits, says in cases
    ]


def _ratio_plants(dtype: torch.dtype) -> list[Plant]:
    model, newer = _toy_policy(dtype), _toy_policy(dtype)
    trajs, warm = _toy_episodes(model), _toy_episodes(model, temperature=1.5)
    with torch.no_grad():
        draws = torch.Generator().manual_seed(5)
        for p in newer.parameters():
            p.add_((0.1 * p.std() * torch.randn(p.shape, generator=draws)).to(dtype))
    logp = partial(_padded_logp, model)
    late = [replace(t, action_mask=F.pad(t.action_mask[1:], (0, 1))) for t in trajs]
    short = [replace(t, action_mask=F.pad(t.action_mask[:-1], (0, 1))) for t in trajs]
    twice = [*warm[:3], warm[4], *warm[4:]]
    uniform = {"log_prob_fn": lambda ts: [t.sample_logp.to(dtype) for t in ts], "group_size": 8}
    functions = [
        (
            "31 leak at step 0",
            lambda ts: _packed_logp(model, ts, False),
            lambda ts: _packed_logp(model, ts, True),
            "a neighbour in a packed row",
        ),
        ("dropout in one pass", partial(logp, dropout=0.1), logp, "dropout is on"),
        (
            "targets off by one",
            lambda ts: [F.pad(row[:-1], (1, 0)) for row in logp(ts)],
            logp,
            "log-probabilities are off by one",
        ),
        ("stale policy", partial(_padded_logp, newer), logp, "a stale policy"),
    ]
    episodes = [
        ("mask off by one", late, trajs, {"log_prob_fn": logp}, "action_mask is off by one"),
        ("last token not trained", short, trajs, {"log_prob_fn": logp}, "leaves out sampled"),
        (
            "episode twice",
            twice,
            warm,
            {"log_prob_fn": partial(logp, temperature=1.5)},
            "in the batch twice",
        ),
        (
            "15 one first token",
            _flat_episodes(True, dtype),
            _flat_episodes(False, dtype),
            uniform,
            "repeated 8 times",
        ),
    ]
    ratio = step_zero_ratio_check
    return [
        *(
            Plant(
                fault, ratio, {"log_prob_fn": wrong}, {"log_prob_fn": right}, {"trajs": trajs}, says
            )
            for fault, wrong, right, says in functions
        ),
        *(
            Plant(fault, ratio, {"trajs": wrong}, {"trajs": right}, case, says)
            for fault, wrong, right, case, says in episodes
        ),
        Plant(
            "temperature once",
            ratio,
            {"log_prob_fn": logp},
            {"log_prob_fn": partial(logp, temperature=1.5)},
            {"trajs": warm},
            "a temperature on one side",
        ),
    ]


def _flat_episodes(repeated: bool, dtype: torch.dtype) -> list[Trajectory]:
    """Two groups of 8 from a uniform policy over 32 tokens; a group may share its first draw."""
    draws = torch.Generator().manual_seed(7)
    ids = torch.randint(32, (16, 6), generator=draws)
    if repeated:
        ids[:, 2] = ids[:, 2].view(2, 8)[:, :1].expand(2, 8).flatten()
    mask = torch.tensor([0, 1, 1, 1, 1])
    logp = mask * torch.tensor(-math.log(32)).to(dtype).double()
    return [Trajectory(row, mask, logp, 0.0) for row in ids]


def _filter_plants(dtype: torch.dtype) -> list[Plant]:
    def by_mean(groups: Sequence[Any]) -> list[bool]:
        return [0 < float(sum(g)) / len(g) < 1 for g in groups]

    def by_std(groups: Sequence[Any]) -> list[bool]:
        means = [sum(g) / len(g) for g in groups]
        return [bool(sum((r - m) ** 2 for r in g) > 0) for g, m in zip(groups, means, strict=True)]

    def right(groups: Sequence[Any]) -> list[bool]:
        return [bool(filter_by_pass_rate([0], [[float(r) for r in g]])) for g in groups]

    def finished(groups: Sequence[Any], cut: Sequence[Any]) -> list[bool]:
        pairs = zip(groups, cut, strict=True)
        return right([[r for r, c in zip(g, short, strict=True) if not c] for g, short in pairs])

    def endless(sample: Callable[[int], list[list[float]]]) -> list[list[float]]:
        kept: list[list[float]] = []
        while len(kept) < 8:
            kept += [group for group in sample(8 - len(kept)) if len(set(group)) > 1]
        return kept

    def bounded(sample: Callable[[int], list[list[float]]]) -> Any:
        def episodes(count: int) -> list[list[Trajectory]]:
            one = torch.zeros(2, dtype=torch.int64), torch.ones(1), torch.zeros(1)
            return [[Trajectory(*one, reward) for reward in group] for group in sample(count)]

        return fill_groups(episodes, 8, 24)

    cases = [
        ("11 mean alone", by_mean, right, {}, "the variance is not"),
        ("12 std above 0", by_std, right, {}, "rounding size"),
        (
            "truncation as failure",
            lambda groups, cut: right(groups),
            finished,
            {"truncation": True},
            "ran out of length",
        ),
    ]
    return [
        Plant(
            "13 every task solved",
            group_filter_check,
            {"fill_fn": endless},
            {"fill_fn": bounded},
            {"filter_fn": right},
            "no bound",
        ),
        *(
            Plant(
                fault,
                group_filter_check,
                {"filter_fn": wrong},
                {"filter_fn": repair},
                {"dtype": dtype, **case},
                says,
            )
            for fault, wrong, repair, case, says in cases
        ),
    ]


def full_head(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The log-probability of each token from the logits of all of them: [B, T]."""
    logits = F.linear(hidden, weight).float()
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def _chunked_head(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    chunks = zip(hidden.split(512, 1), ids.split(512, 1), strict=True)
    return torch.cat([full_head(h, weight, i) for h, i in chunks], 1)


class _Upstream(torch.autograd.Function):
    """Passes values on, and a wrong gradient back: the first token's to all, or 1."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, first: bool) -> Tensor:
        ctx.first = first
        return logp.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad[:, :1].expand_as(grad) if ctx.first else torch.ones_like(grad)), None


def _counted_step() -> None:
    """A step of the small Qwen2 of the public report."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 160}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng(devices=[]):
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, num_hidden_layers=2))
    model(torch.zeros(1, 32, dtype=torch.int64), use_cache=False).logits.sum().backward()


def _head_plants(dtype: torch.dtype) -> list[Plant]:
    def upstream(first: bool) -> Callable[..., Tensor]:
        return lambda *inputs: _Upstream.apply(checkpointed_log_probs(*inputs), first)

    cases = [
        ("17 one token's gradient", upstream(True), "backward pass is wrong"),
        ("17 no token's gradient", upstream(False), "backward pass is wrong"),
        ("logits of all tokens", full_head, "are kept"),
        ("chunks keep their logits", _chunked_head, "are kept"),
    ]
    return [
        Plant(
            "14 embedding counted",
            flop_count_check,
            {"flops": 41_877_504},
            {"flops": 30_375_936},
            {"step_fn": _counted_step},
            "an embedding",
        ),
        *(
            Plant(
                fault,
                head_memory_check,
                {"fn": wrong},
                {"fn": checkpointed_log_probs},
                {"dtype": dtype},
                says,
            )
            for fault, wrong, says in cases
        ),
    ]


def planted_faults(dtype: torch.dtype = torch.float32) -> list[Plant]:
    """Return small faulty trainers beside their repairs, to see the checks work.

    The numbered ones boil down public reports; two of them need `transformers`.

    Args:
        dtype: in which the trainers compute.
    """
    plants = [*_packing_plants(dtype), *_schedule_plants(), *_gradient_plants(dtype)]
    plants += [*_ratio_plants(dtype), *_filter_plants(dtype), *_head_plants(dtype)]
    number = [(int(p.fault.split()[0]) if p.fault[0].isdigit() else math.inf) for p in plants]
    return [plants[i] for i in sorted(range(len(plants)), key=number.__getitem__)]
