"""Rollouts: which tokens are the policy's, with what probability, and in what order."""

import dataclasses
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import agentrl as arl
from agentrl import rollout
from agentrl.gym import ACTIONS

TASKS = arl.make_tasks()
TOK = arl.build_tokenizer(TASKS)
CFG = arl.RolloutConfig(max_tokens=48, group_size=4)
F64 = torch.float64


class Eager(arl.TinyAgent):
    """A random policy that likes actions and program tokens, so that much happens."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(len(TOK), d_model=16, n_layers=2, n_heads=2, max_len=64, **kwargs)
        liked = torch.tensor([3.0 * (t in ACTIONS) + (t in TOK.program_tokens) for t in TOK.tokens])
        self.register_buffer("liked", liked.to(self.lm_head.weight.dtype))

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        return super().forward(*args, **kwargs) + self.liked


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sample(
    cfg: arl.RolloutConfig = CFG,
    tasks: list[arl.Task] = TASKS[::6],
    seed: int = 0,
    **kwargs: object,
) -> list[arl.Trajectory]:
    model = kwargs.pop("model", None) or Eager()
    return arl.sample_groups(model, arl.make_env(cfg), tasks, TOK, cfg, gen(seed), **kwargs)


def same(one: list[arl.Trajectory], two: list[arl.Trajectory], atol: float = 0.0) -> None:
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        assert a.action_mask.tolist() == b.action_mask.tolist()
        torch.testing.assert_close(a.sample_logp, b.sample_logp, rtol=0, atol=atol)
        assert (a.reward, a.info) == (b.reward, b.info)


# Sampling


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("seed", range(3))
def test_the_cache_does_not_change_the_episodes(seed: int, temperature: float) -> None:
    cfg = dataclasses.replace(CFG, temperature=temperature)
    cached = sample(cfg, seed=seed)
    assert len({len(t.ids) for t in cached}) > 3, "rows end at different times"
    same(cached, sample(cfg, seed=seed, use_cache=False), atol=1e-12)
    same(cached, sample(cfg, seed=seed))


def test_the_caller_gets_groups_in_the_order_of_its_tasks() -> None:
    tasks = [TASKS[5], TASKS[2], TASKS[5], TASKS[20]]
    trajs = sample(tasks=tasks)
    assert [t.info["task"].name for t in trajs] == [t.name for t in tasks for _ in range(4)]
    prompts = [arl.BugFixEnv(task, TOK).reset() for task in tasks]
    for traj, prompt in zip(trajs, [p for p in prompts for _ in range(4)], strict=True):
        assert traj.ids[: len(prompt)].tolist() == prompt
    assert len(sample(arl.RolloutConfig(max_tokens=20, group_size=1), TASKS[:1])) == 1


@pytest.mark.parametrize("use_cache", [True, False])
def test_replaying_the_masked_tokens_gives_the_same_episode(use_cache: bool) -> None:
    trajs = sample(seed=3, use_cache=use_cache)
    for traj in trajs:
        ids, mask = traj.ids.tolist(), [False, *traj.action_mask.tolist()]
        env = arl.BugFixEnv(traj.info["task"], TOK, CFG.max_tokens)
        expected, is_action = env.reset(), []
        is_action += [False] * len(expected)
        while not env.done:
            token = ids[len(expected)]
            answer, _ = env.step(token)
            expected += [token, *answer]
            is_action += [True, *[False] * len(answer)]
        assert ids == expected and mask == is_action
        assert traj.reward == env.reward and traj.info == env.info
        assert len(ids) <= CFG.max_tokens and traj.reward in (0.0, 1.0)
        logp = traj.sample_logp
        assert (logp[~traj.action_mask] == 0).all() and (logp[traj.action_mask] < 0).all()
        assert (traj.ids.dtype, traj.action_mask.dtype) == (torch.int64, torch.bool)
        assert logp.dtype == F64 and not logp.requires_grad
        assert len(traj.action_mask) == len(logp) == len(traj.ids) - 1
    assert any(t.info["truncated"] for t in trajs) and any(t.info["SUBMIT"] for t in trajs)
    assert any(t.info["EDIT"] for t in trajs) and any(t.info["LOOK"] for t in trajs)


def trained(model: arl.TinyAgent, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """What a trainer computes for the tokens after the first."""
    with torch.no_grad():
        return arl.selected_log_probs(model(ids[:, :-1]) / temperature, ids[:, 1:])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(("dtype", "most"), [(F64, 1e-12), (torch.float32, 1e-4)])
def test_the_ratio_at_step_zero_is_one(temperature: float, dtype: torch.dtype, most: float) -> None:
    model, cfg = Eager(dtype=dtype), dataclasses.replace(CFG, temperature=temperature)
    batch = arl.collate(sample(cfg, model=model), TOK.pad_id)
    sampled, mask = batch["sample_logp"], batch["action_mask"]
    logp = trained(model, batch["ids"], temperature).double()
    assert ((logp - sampled).exp()[mask] - 1).abs().max() <= most
    without = (arl.sequence_log_probs(model, batch["ids"]) - sampled)[mask].abs().max()
    assert without <= most if temperature == 1.0 else without > 0.1, "the fault would show"
    # So would scores or masks that are off by one place.
    for shifted in (mask.roll(1, 1), mask.roll(-1, 1)):
        assert (logp - sampled)[shifted].abs().max() > 0.1
    assert (logp - sampled.roll(1, 1))[mask].abs().max() > 0.1


# The first token of each row (nanochat's sampler gave one token to the whole group).


def agreement(trajs: list[arl.Trajectory], size: int) -> float:
    """Return the share of pairs in a group that begin with the same token."""
    first = [int(t.ids[1:][t.action_mask.bool()][0]) for t in trajs]
    groups = [first[i : i + size] for i in range(0, len(first), size)]
    pairs = [a == b for g in groups for i, a in enumerate(g) for b in g[:i]]
    return sum(pairs) / len(pairs)


def expected_agreement(model: arl.TinyAgent, tasks: list[arl.Task]) -> float:
    prompts = [torch.tensor([arl.BugFixEnv(task, TOK).reset()]) for task in tasks]
    probs = [model(prompt)[0, -1].softmax(-1) for prompt in prompts]
    return sum((p * p).sum().item() for p in probs) / len(probs)


@pytest.mark.parametrize("use_cache", [True, False])
def test_each_row_draws_its_own_first_token(use_cache: bool) -> None:
    model, cfg = Eager(), arl.RolloutConfig(max_tokens=14, group_size=8)
    trajs = sample(cfg, TASKS, model=model, use_cache=use_cache)
    expected = expected_agreement(model, TASKS)
    assert expected < 0.5
    # 840 pairs, not independent; 0.1 is beyond five standard deviations.
    assert abs(agreement(trajs, 8) - expected) < 0.1


def test_a_first_token_shared_by_the_group_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = rollout._draw
    monkeypatch.setattr(rollout, "_draw", lambda x, u, t: draw(x, u[:1].expand_as(u), t))
    model, cfg = Eager(), arl.RolloutConfig(max_tokens=14, group_size=8)
    trajs = sample(cfg, TASKS, model=model)
    assert agreement(trajs, 8) == 1.0 > expected_agreement(model, TASKS) + 0.1


def test_a_row_does_not_depend_on_how_long_the_others_live() -> None:
    task = TASKS[0]
    cfg = arl.RolloutConfig(max_tokens=48, group_size=6)
    before = sample(cfg, [task])
    limits = iter([6, 48, 9, 48, 48, 20])
    short = arl.sample_groups(
        Eager(), lambda t, tok: arl.BugFixEnv(t, tok, next(limits)), [task], TOK, cfg, gen()
    )
    assert len(short[0].ids) <= 6
    same([before[i] for i in (1, 3, 4)], [short[i] for i in (1, 3, 4)], atol=1e-12)
    for i in (0, 2, 5):
        assert short[i].ids.tolist() == before[i].ids[: len(short[i].ids)].tolist()


class Talker:
    """An environment that answers each token with as many tokens as it pleases, up to a limit."""

    def __init__(self, prompt: list[int], answers: list[int], limit: int) -> None:
        self.prompt, self.answers, self.limit = prompt, answers, limit
        self.info: dict[str, object] = {}
        self.reward = 0.0

    def reset(self) -> list[int]:
        self.used, self.turn, self.done = len(self.prompt), 0, False
        return list(self.prompt)

    def step(self, token: int) -> tuple[list[int], bool]:
        self.used += 1
        count = min(self.answers[self.turn], self.limit - self.used)
        self.turn, self.used = self.turn + 1, self.used + count
        self.done = self.used == self.limit or self.turn == len(self.answers)
        return [(token + 7 * t) % len(TOK) for t in range(1, count + 1)], self.done


def talk(
    model: arl.TinyAgent, talkers: list[Talker], seed: int, **kwargs: object
) -> list[arl.Trajectory]:
    envs, tasks = iter(talkers), [TASKS[0]] * len(talkers)
    cfg = arl.RolloutConfig(group_size=1)
    return arl.sample_groups(model, lambda *_: next(envs), tasks, TOK, cfg, gen(seed), **kwargs)


def one_token_at_a_time(
    model: arl.TinyAgent, env: Talker, column: int, width: int, seed: int
) -> list[int]:
    """The definition: read every prefix whole, draw with the number of the position and row."""
    generator, ids, waiting = gen(seed), [], env.reset()
    while waiting or not env.done:
        uniform = torch.rand(width, generator=generator, dtype=F64)[column : column + 1]
        if not waiting:
            (token,), _ = rollout._draw(model(torch.tensor([ids]))[:, -1], uniform, 1.0)
            waiting = [token, *env.step(token)[0]]
        ids.append(waiting.pop(0))
    return ids


talkers = st.builds(
    Talker,
    st.lists(st.integers(0, len(TOK) - 1), min_size=1, max_size=6),
    st.lists(st.one_of(st.just(0), st.integers(0, 12)), min_size=1, max_size=8),
    st.integers(8, 40),
)


@settings(max_examples=30)
@given(st.lists(talkers, min_size=1, max_size=5), st.integers(0, 99))
@example([Talker([1, 2], [3, 30], 20)], 0)  # one row, cut in the middle of an answer
@example([Talker([1], [0] * 8, 40), Talker([1, 2, 3], [12, 0, 5], 40), Talker([4], [0], 9)], 1)
def test_answers_of_any_length_are_read_as_one_token_at_a_time(
    envs: list[Talker], seed: int
) -> None:
    model = Eager()
    cached, whole = talk(model, envs, seed), talk(model, envs, seed, use_cache=False)
    same(cached, whole, atol=1e-12)
    with torch.no_grad():
        for column, (traj, env) in enumerate(zip(cached, envs, strict=True)):
            expected = one_token_at_a_time(model, env, column, len(envs), seed)
            assert traj.ids.tolist() == expected
    batch = arl.collate(cached, TOK.pad_id)
    error = trained(model, batch["ids"]) - batch["sample_logp"]
    assert error[batch["action_mask"]].abs().max() <= 1e-12


@settings(max_examples=20)
@given(st.lists(talkers, min_size=1, max_size=5))
def test_the_model_reads_each_token_once_in_a_pass_per_draw(envs: list[Talker]) -> None:
    model, read = Eager(), []
    model.token.register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    trajs = talk(model, envs, 0)
    assert len(read) == max(int(traj.action_mask.sum()) for traj in trajs)
    # All but each row's last draw and the answer to it, which nobody reads.
    last = [int(traj.action_mask.nonzero().max()) + 1 for traj in trajs]
    assert sum(read) == sum(last)


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_generator_is_left_where_the_longest_episode_ends(use_cache: bool) -> None:
    generator, cfg = gen(5), arl.RolloutConfig(max_tokens=48, group_size=3)
    trajs = arl.sample_groups(
        Eager(), arl.make_env(cfg), TASKS[:4], TOK, cfg, generator, use_cache=use_cache
    )
    longest, reference = max(len(traj.ids) for traj in trajs), gen(5)
    for _ in range(longest):
        torch.rand(len(trajs), generator=reference, dtype=F64)
    assert torch.equal(generator.get_state(), reference.get_state())


def test_sampling_draws_from_its_generator_alone_and_leaves_the_model() -> None:
    model = Eager()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one = sample(seed=1, model=model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    torch.manual_seed(99)
    same(one, sample(seed=1))
    assert [t.ids.tolist() for t in one] != [t.ids.tolist() for t in sample(seed=2)]


# One draw


def test_draws_follow_the_distribution() -> None:
    n, temperature = 200_000, 0.7
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -30.0, -math.inf]], dtype=F64)
    uniform = torch.rand(n, generator=gen(), dtype=F64)
    tokens, logp = rollout._draw(logits.expand(n, -1), uniform, temperature)
    probs = (logits[0] / temperature).softmax(-1).tolist()
    counts = Counter(tokens)
    for token, p in enumerate(probs):
        assert abs(counts[token] - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 1e-6
    for token, value in zip(tokens[:100], logp[:100], strict=True):
        assert value == pytest.approx(math.log(probs[token]), abs=1e-12)


@pytest.mark.parametrize("uniform", [0.0, 5e-324, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[-math.inf, 0.3, -math.inf, 0.1, -math.inf, -math.inf]])
    tokens, logp = rollout._draw(logits, torch.tensor([uniform], dtype=F64), 1.0)
    assert tokens[0] in (1, 3) and math.isfinite(logp[0])


def test_the_largest_number_draws_the_last_token_that_can_be_drawn() -> None:
    logits = torch.randn(20_000, 7, generator=gen(), dtype=F64) * 3
    logits[:, 5:] = -math.inf
    uniform = torch.full((len(logits),), 1 - 2**-53, dtype=F64)
    assert max(rollout._draw(logits, uniform, 1.0)[0]) <= 4


def test_a_low_temperature_is_greedy() -> None:
    logits = torch.randn(64, 30, generator=gen())
    uniform = torch.rand(64, generator=gen(1), dtype=F64)
    assert rollout._draw(logits, uniform, 1e-6)[0] == logits.argmax(-1).tolist()


# Batches


def traj(length: int = 4, reward: object = 0.0, **fields: object) -> arl.Trajectory:
    values: dict[str, object] = {
        "ids": torch.arange(1, length + 1),
        "action_mask": torch.arange(length - 1) % 2 == 1,
        "sample_logp": -torch.arange(length - 1).double() / 7,
        "reward": reward,
        **fields,
    }
    return arl.Trajectory(**values)  # type: ignore[arg-type]


@settings(max_examples=50)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=6), st.integers(0, 3))
def test_collate_keeps_every_entry(lengths: list[int], pad_id: int) -> None:
    trajs = [traj(n, i / 4) for i, n in enumerate(lengths)]
    batch = arl.collate(trajs, pad_id)
    assert batch["lengths"].tolist() == lengths
    assert batch["rewards"].tolist() == [i / 4 for i in range(len(lengths))]
    types = {"ids": torch.int64, "action_mask": torch.bool, "sample_logp": F64}
    types |= {"lengths": torch.int64, "rewards": F64}
    assert {k: v.dtype for k, v in batch.items()} == types
    for i, (t, n) in enumerate(zip(trajs, lengths, strict=True)):
        assert torch.equal(batch["ids"][i, :n], t.ids)
        assert (batch["ids"][i, n:] == pad_id).all()
        for key in ("action_mask", "sample_logp"):
            assert torch.equal(batch[key][i, : n - 1], getattr(t, key))
            assert not batch[key][i, n - 1 :].any()


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.uint8, torch.uint8, torch.float16),
        (torch.int16, torch.int32, torch.bfloat16),
        (torch.int32, torch.int64, torch.float32),
        (torch.int64, torch.float16, F64),
        (torch.int64, F64, F64),
    ],
)
def test_fields_of_any_type_lose_nothing_in_any_order(dtypes: tuple[torch.dtype, ...]) -> None:
    fields = [torch.tensor([1, 2, 3]), torch.tensor([0, 1]), torch.tensor([-1e4, -0.3])]
    own = arl.Trajectory(*(x.to(dtype) for x, dtype in zip(fields, dtypes, strict=True)), 0.0)
    other = traj(3, ids=torch.tensor([1, 300, 3]))
    assert arl.collate([own], 0)["sample_logp"].dtype == F64
    for trajs in ([own, other], [other, own]):
        packed = arl.pack_sequences(trajs, 3, pad_id=-1)
        for batch in (arl.collate(trajs, -1), {k: packed[k] for k in vars(own) if k in packed}):
            for i, t in enumerate(trajs):
                assert batch["ids"][i].tolist() == t.ids.tolist()
                assert batch["action_mask"][i].tolist() == t.action_mask.bool().tolist()
                assert batch["sample_logp"][i].tolist() == t.sample_logp.tolist()
            assert batch["action_mask"].dtype == torch.bool and batch["sample_logp"].dtype == F64


def test_what_may_stand_in_a_batch() -> None:
    own = traj(sample_logp=torch.tensor([math.nan, -1.0, math.inf]))  # entry 1 is the policy's
    assert arl.collate([traj(), own], 0)["sample_logp"][1, 1] == -1
    rewards = [torch.tensor([0.5]), torch.tensor(0.5), np.float32(0.5), 1, True]
    batch = arl.collate([traj(reward=reward) for reward in rewards], 0)
    assert batch["rewards"].tolist() == [0.5, 0.5, 0.5, 1, 1]


def test_pad_rows() -> None:
    rows = [torch.tensor([1.5]), torch.tensor([2.0, 3.0]), torch.tensor([])]
    assert arl.pad_rows(rows, 3, -1).tolist() == [[1.5, -1, -1], [2, 3, -1], [-1, -1, -1]]
    assert arl.pad_rows(rows, 2, 0).shape == (3, 2)
    mixed = [torch.tensor([1]), torch.tensor([2.5])]
    assert arl.pad_rows(mixed, 2, 0).tolist() == [[1, 0], [2.5, 0]]
    assert arl.pad_rows(torch.ones(1, 2), 3, 0).tolist() == [[1.0, 1.0, 0.0]]
    assert arl.pad_rows(torch.ones(2, 0), 1, 7).tolist() == [[7], [7]]
    rows = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    assert torch.autograd.grad(arl.pad_rows(rows, 2, 0).sum(), rows)[1].tolist() == [1]


# Statistics


def test_evaluate_counts_what_it_sampled() -> None:
    model, tasks, cfg = Eager(), TASKS[:3], arl.RolloutConfig(max_tokens=30)
    result = arl.evaluate(model, tasks, TOK, 5, generator=gen(4), cfg=cfg)
    trajs = sample(dataclasses.replace(cfg, group_size=5), tasks, seed=4, model=model)
    rates = [sum(t.reward for t in trajs[i : i + 5]) / 5 for i in (0, 5, 10)]
    assert list(result["by_task"].values()) == pytest.approx(rates)
    assert list(result["by_task"]) == [t.name for t in tasks]
    assert result["pass_rate"] == pytest.approx(sum(rates) / 3)
    cfg = SimpleNamespace(max_tokens=20, temperature=1.0)  # repeatable by default
    one, two = (arl.evaluate(Eager(), TASKS[:2], TOK, 2, cfg=cfg) for _ in range(2))
    assert one == two


def test_standard_error_against_the_sample_variances(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = (torch.rand(7, 5, generator=gen()) < 0.4).double()  # [tasks, episodes]
    trajs = [traj(reward=reward) for reward in rewards.flatten().tolist()]
    monkeypatch.setattr(rollout, "sample_groups", lambda *args: trajs)
    result = arl.evaluate(Eager(), TASKS[:7], TOK, 5)
    by_hand = math.sqrt(sum(row.var().item() / 5 for row in rewards)) / 7
    assert result["stderr"] == pytest.approx(by_hand, rel=1e-12)
    assert result["pass_rate"] == pytest.approx(rewards.mean().item())


def test_behavior_stats_against_a_loop() -> None:
    trajs = sample()
    n, tokens = len(trajs), sum(len(t.ids) for t in trajs)
    policy = sum(int(m) for t in trajs for m in t.action_mask)
    expected = {"reward": sum(t.reward for t in trajs) / n, "tokens": tokens / n}
    expected["policy_share"] = policy / tokens
    for key in (*ACTIONS, "errors", "truncated"):
        expected[key.lower()] = sum(t.info[key] for t in trajs) / n
    assert arl.behavior_stats(trajs) == expected
    assert arl.behavior_stats([traj(info=COUNTS)])["look"] == 0
    assert {"look", "test", "edit", "submit"} <= set(expected)


# What is refused


DIVERGED = arl.TinyAgent(len(TOK), d_model=16, n_layers=1, n_heads=2)
torch.nn.init.constant_(DIVERGED.lm_head.weight, math.nan)
SHORT = arl.TinyAgent(len(TOK), d_model=8, n_layers=1, n_heads=1, max_len=10)
NAN, INF = math.nan, math.inf
COUNTS = dict.fromkeys((*ACTIONS, "errors", "truncated"), 0)  # all that `info` must hold
CONFIGS = [  # a field, values, the error
    ("group_size", (0, -1), ValueError),
    ("group_size", (2.0, True), TypeError),
    ("max_tokens", (2.5,), TypeError),
    ("temperature", (0.0, -1.0, NAN), ValueError),
    ("temperature", ("1",), TypeError),
]
MALFORMED = [  # a field of a trajectory of 4 tokens, values, the error
    ("ids", (torch.ones(1, 4).long(), torch.ones(1).long(), torch.ones(0).long()), ValueError),
    ("ids", (torch.tensor(3),), ValueError),
    ("ids", (torch.ones(4), torch.ones(4).bool(), [1, 2, 3, 4], np.arange(4)), TypeError),
    ("action_mask", (torch.ones(4), torch.ones(3, 1)), ValueError),
    ("action_mask", [torch.tensor([0, x, 1]) for x in (0.5, -INF, 2, NAN, 1j, -1)], ValueError),
    ("action_mask", ([False, True, True], np.ones(3)), TypeError),
    ("sample_logp", (torch.ones(2),), ValueError),
    ("sample_logp", (torch.ones(3).long(), [0.0, -1.0, -2.0]), TypeError),
]
BATCHES = ((arl.collate, 0), (arl.pack_sequences, 9), (arl.behavior_stats,))
ROWS = [torch.ones(1), torch.ones(2)]
REFUSED = [  # a function, its arguments, the error, what it names
    *((arl.RolloutConfig, {f: value}, kind, f) for f, values, kind in CONFIGS for value in values),
    *((sample, {"cfg": SimpleNamespace(**{**vars(CFG), f: value})}, kind, f)
      for f, values, kind in CONFIGS for value in values if f != "max_tokens"),
    (sample, {"tasks": []}, ValueError, "tasks"),
    *((talk, {"model": SHORT, "talkers": [Talker([1], [0], 9), Talker([], [0], 9)], "seed": 0,
              "use_cache": cache}, ValueError, r"tasks\[1\]") for cache in (True, False)),
    (sample, {"model": SHORT}, ValueError, "max_len = 10"),
    (sample, {"model": DIVERGED}, ValueError, r"logits\[0\] are no distribution"),
    *((arl.evaluate, (Eager(), TASKS[:2], TOK, n), kind, "episodes")
      for n, kind in ((0, ValueError), (2.0, TypeError), (True, TypeError))),
    *((f, ([traj(), traj(5), traj(**{key: bad}), traj(**{key: bad})], *more), kind, r"trajs\[2\]")
      for key, values, kind in MALFORMED for bad in values for f, *more in BATCHES),
    *((f, ([], *more), ValueError, "trajs") for f, *more in BATCHES),
    (arl.check_trajectories, ([traj(1)], 2), ValueError, r"trajs\[0\]"),
    *((arl.collate, ([traj(), traj(sample_logp=torch.tensor([-1.0, bad, -2.0]))], 0), ValueError,
       rf"sample_logp\[1, 1\] = {bad}") for bad in (NAN, INF, -INF)),
    *((arl.collate, ([traj(), traj(reward=r)], 0), kind, r"rewards\[1\]") for r, kind in (
        (None, TypeError), (torch.tensor([0.0, 1.0]), TypeError), ("passed", TypeError),
        (NAN, ValueError))),
    *((arl.behavior_stats, ([traj(info=COUNTS), traj(info={k: 0 for k in COUNTS if k != key})],),
       ValueError, rf"trajs\[1\].info = .* no '{key}'") for key in COUNTS),
    (arl.collate, ([torch.arange(3)], 0), TypeError, r"trajs\[0\].ids"),
    *((arl.collate, ([traj()], pad), TypeError, "pad_id") for pad in (0.5, True)),
    (arl.pad_rows, ([], 3, 0), ValueError, "rows"),
    (arl.pad_rows, (ROWS, 1, 0), ValueError, r"rows\[1\] \[2\] .* width = 1"),
    *((arl.pad_rows, ([torch.ones(1), row], 1, 0), kind, r"rows\[1\]") for row, kind in (
        (torch.ones(1, 1), ValueError), (torch.tensor(1.0), ValueError), ([1.0], TypeError),
        (np.ones(1), TypeError))),
    *((arl.pad_rows, (ROWS, width, 0), TypeError, "width") for width in (2.0, True)),
]  # fmt: skip


@pytest.mark.parametrize(("function", "given", "kind", "words"), REFUSED, ids=lambda x: None)
def test_the_argument_is_named(function, given: dict | tuple, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        function(**given) if isinstance(given, dict) else function(*given)
