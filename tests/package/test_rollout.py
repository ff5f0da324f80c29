"""Rollouts: which tokens are the policy's, with what probability, and in what order."""

import dataclasses
import math
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl import rollout
from agentrl.grpo import _log_probs
from agentrl.gym import ACTIONS, BugFixEnv, EnvConfig, Task, build_tokenizer, make_env, make_tasks
from agentrl.policy import TinyAgent, sequence_log_probs
from agentrl.rollout import (
    RolloutConfig,
    Trajectory,
    behavior_stats,
    check_trajectories,
    collate,
    evaluate,
    pad_rows,
    sample_groups,
)

TASKS = make_tasks()
TOK = build_tokenizer(TASKS)
CFG = RolloutConfig(max_tokens=48, group_size=4)


class Eager(TinyAgent):
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
    cfg: RolloutConfig = CFG, tasks: list[Task] = TASKS[::6], seed: int = 0, **kwargs: object
) -> list[Trajectory]:
    model = kwargs.pop("model", None) or Eager()
    return sample_groups(model, make_env(cfg), tasks, TOK, cfg, gen(seed), **kwargs)


def same(one: list[Trajectory], two: list[Trajectory], atol: float = 0.0) -> None:
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        assert a.action_mask.tolist() == b.action_mask.tolist()
        torch.testing.assert_close(a.sample_logp, b.sample_logp, rtol=0, atol=atol)
        assert (a.reward, a.info) == (b.reward, b.info)


# Sampling -------------------------------------------------------------------------------------


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
    prompts = [BugFixEnv(task, TOK).reset() for task in tasks]
    for traj, prompt in zip(trajs, [p for p in prompts for _ in range(4)], strict=True):
        assert traj.ids[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize("use_cache", [True, False])
def test_replaying_the_masked_tokens_gives_the_same_episode(use_cache: bool) -> None:
    trajs = sample(seed=3, use_cache=use_cache)
    for traj in trajs:
        ids, mask = traj.ids.tolist(), [False, *traj.action_mask.tolist()]
        env = BugFixEnv(traj.info["task"], TOK, CFG.max_tokens)
        expected, is_action = env.reset(), []
        is_action += [False] * len(expected)
        while not env.done:
            token = ids[len(expected)]
            answer, _ = env.step(token)
            expected += [token, *answer]
            is_action += [True, *[False] * len(answer)]
        assert ids == expected and mask == is_action
        assert traj.reward == env.reward and traj.info == env.info
        assert len(ids) <= CFG.max_tokens
        assert (traj.sample_logp[~traj.action_mask] == 0).all()
        assert (traj.sample_logp[traj.action_mask] < 0).all()
    assert any(t.info["truncated"] for t in trajs) and any(t.info["SUBMIT"] for t in trajs)
    assert any(t.info["EDIT"] for t in trajs) and any(t.info["LOOK"] for t in trajs)


def test_types_of_a_sampled_trajectory() -> None:
    for traj in sample():
        assert (traj.ids.dtype, traj.action_mask.dtype) == (torch.int64, torch.bool)
        assert traj.sample_logp.dtype == torch.float64 and not traj.sample_logp.requires_grad
        assert len(traj.action_mask) == len(traj.sample_logp) == len(traj.ids) - 1
        assert traj.reward in (0.0, 1.0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_ratio_at_step_zero_is_one(temperature: float) -> None:
    model, cfg = Eager(), dataclasses.replace(CFG, temperature=temperature)
    batch = collate(sample(cfg, model=model), TOK.pad_id)
    with torch.no_grad():
        logp = _log_probs(model, batch["ids"], temperature)
    mask = batch["action_mask"]
    ratio = (logp - batch["sample_logp"]).exp()[mask]
    assert (ratio - 1).abs().max() <= 1e-12
    if temperature == 1.0:
        with torch.no_grad():
            alone = sequence_log_probs(model, batch["ids"])
        assert (alone - batch["sample_logp"])[mask].abs().max() <= 1e-12
    else:
        with torch.no_grad():
            wrong = _log_probs(model, batch["ids"])
        assert (wrong - batch["sample_logp"])[mask].abs().max() > 0.1, "the fault would show"
    # So would scores or masks that are off by one place.
    for shifted in (mask.roll(1, 1), mask.roll(-1, 1)):
        assert (logp - batch["sample_logp"])[shifted].abs().max() > 0.1
    late = batch["sample_logp"].roll(1, 1)
    assert (logp - late)[mask].abs().max() > 0.1


def test_float32_sampling_records_what_the_trainer_computes() -> None:
    model = Eager(dtype=torch.float32)
    batch = collate(sample(model=model), TOK.pad_id)
    with torch.no_grad():
        logp = _log_probs(model, batch["ids"]).double()
    assert (logp - batch["sample_logp"])[batch["action_mask"]].abs().max() < 1e-4


# The first token of each row (nanochat's sampler gave one token to the whole group).


def first_tokens(trajs: list[Trajectory]) -> list[int]:
    return [int(t.ids[1:][t.action_mask.bool()][0]) for t in trajs]


def agreement(trajs: list[Trajectory], size: int) -> float:
    """Return the share of pairs in a group that begin with the same token."""
    first = first_tokens(trajs)
    groups = [first[i : i + size] for i in range(0, len(first), size)]
    pairs = [a == b for g in groups for i, a in enumerate(g) for b in g[:i]]
    return sum(pairs) / len(pairs)


def expected_agreement(model: TinyAgent, tasks: list[Task]) -> float:
    probs = [
        model(torch.tensor([BugFixEnv(task, TOK).reset()]))[0, -1].softmax(-1) for task in tasks
    ]
    return sum((p * p).sum().item() for p in probs) / len(probs)


@pytest.mark.parametrize("use_cache", [True, False])
def test_each_row_draws_its_own_first_token(use_cache: bool) -> None:
    model, cfg = Eager(), RolloutConfig(max_tokens=14, group_size=8)
    trajs = sample(cfg, TASKS, model=model, use_cache=use_cache)
    expected = expected_agreement(model, TASKS)
    assert expected < 0.5
    # 840 pairs, not independent; 0.1 is beyond five standard deviations.
    assert abs(agreement(trajs, 8) - expected) < 0.1


def test_a_first_token_shared_by_the_group_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = rollout._draw

    def shared(logits: Tensor, uniform: Tensor, temperature: float) -> object:
        return draw(logits, uniform[:1].expand_as(uniform), temperature)

    monkeypatch.setattr(rollout, "_draw", shared)
    model, cfg = Eager(), RolloutConfig(max_tokens=14, group_size=8)
    trajs = sample(cfg, TASKS, model=model)
    assert agreement(trajs, 8) == 1.0 > expected_agreement(model, TASKS) + 0.1


def test_rows_and_steps_use_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, used = rollout._draw, []

    def spy(logits: Tensor, uniform: Tensor, temperature: float) -> object:
        used.extend(uniform.tolist())
        return draw(logits, uniform, temperature)

    monkeypatch.setattr(rollout, "_draw", spy)
    trajs = sample()
    assert len(used) == len(set(used)) == sum(int(t.action_mask.sum()) for t in trajs)


def test_a_row_does_not_depend_on_how_long_the_others_live() -> None:
    task = TASKS[0]
    cfg = RolloutConfig(max_tokens=48, group_size=6)
    before = sample(cfg, [task])
    limits = iter([6, 48, 9, 48, 48, 20])
    short = sample_groups(
        Eager(), lambda t, tok: BugFixEnv(t, tok, next(limits)), [task], TOK, cfg, gen()
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


def talk(model: TinyAgent, talkers: list[Talker], seed: int, **kwargs: object) -> list[Trajectory]:
    envs = iter(talkers)
    cfg = RolloutConfig(group_size=1)
    return sample_groups(
        model,
        lambda task, tok: next(envs),
        [TASKS[0]] * len(talkers),
        TOK,
        cfg,
        gen(seed),
        **kwargs,
    )


def one_token_at_a_time(
    model: TinyAgent, env: Talker, column: int, width: int, seed: int
) -> Tensor:
    """The definition: read every prefix whole, draw with the number of the position and row."""
    generator, ids, waiting = gen(seed), [], env.reset()
    while waiting or not env.done:
        uniform = torch.rand(width, generator=generator, dtype=torch.float64)[column : column + 1]
        if not waiting:
            (token,), _ = rollout._draw(model(torch.tensor([ids]))[:, -1], uniform, 1.0)
            waiting = [token, *env.step(token)[0]]
        ids.append(waiting.pop(0))
    return torch.tensor(ids)


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
    with torch.no_grad():
        expected = [
            one_token_at_a_time(model, env, column, len(envs), seed)
            for column, env in enumerate(envs)
        ]
    cached, whole = talk(model, envs, seed), talk(model, envs, seed, use_cache=False)
    same(cached, whole, atol=1e-12)
    for traj, ids in zip(cached, expected, strict=True):
        assert traj.ids.tolist() == ids.tolist()
    batch = collate(cached, TOK.pad_id)
    with torch.no_grad():
        error = sequence_log_probs(model, batch["ids"]) - batch["sample_logp"]
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
    generator, cfg = gen(5), RolloutConfig(max_tokens=48, group_size=3)
    trajs = sample_groups(
        Eager(), make_env(cfg), TASKS[:4], TOK, cfg, generator, use_cache=use_cache
    )
    longest, reference = max(len(traj.ids) for traj in trajs), gen(5)
    for _ in range(longest):
        torch.rand(len(trajs), generator=reference, dtype=torch.float64)
    assert torch.equal(generator.get_state(), reference.get_state())


def test_sampling_draws_from_its_generator_alone() -> None:
    model = Eager()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one = sample(seed=1, model=model)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    same(one, sample(seed=1))
    assert [t.ids.tolist() for t in one] != [t.ids.tolist() for t in sample(seed=2)]


def test_sampling_leaves_the_model_as_it_was() -> None:
    model = Eager()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    sample(model=model)
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_one_task_one_episode() -> None:
    trajs = sample(RolloutConfig(max_tokens=20, group_size=1), TASKS[:1])
    assert len(trajs) == 1


def test_no_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="tasks is empty"):
        sample(tasks=[])


def test_an_empty_prompt_is_refused() -> None:
    envs = [Talker([1, 2], [0], 20), Talker([], [0], 20)]
    for empty in (envs, envs[1:]):
        index = len(empty) - 1
        message = f"episode {index}, of tasks[{index}], has an empty prompt"
        for use_cache in (True, False):
            with pytest.raises(ValueError, match=re.escape(message)):
                talk(Eager(), empty, 0, use_cache=use_cache)


def test_an_episode_longer_than_the_model_is_refused() -> None:
    model = TinyAgent(len(TOK), d_model=8, n_layers=1, n_heads=1, max_len=10)
    with pytest.raises(ValueError, match="max_len = 10"):
        sample(model=model)


@pytest.mark.parametrize("size", [0, -1])
def test_group_size_is_checked(size: int) -> None:
    with pytest.raises(ValueError, match=f"group_size = {size} must be at least 1"):
        RolloutConfig(group_size=size)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_is_checked(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature = {temperature} must be positive"):
        RolloutConfig(temperature=temperature)


# One draw -------------------------------------------------------------------------------------


def test_draws_follow_the_distribution() -> None:
    n, temperature = 200_000, 0.7
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -30.0, -math.inf]], dtype=torch.float64)
    uniform = torch.rand(n, generator=gen(), dtype=torch.float64)
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
    number = torch.tensor([uniform], dtype=torch.float64)
    tokens, logp = rollout._draw(logits, number, 1.0)
    assert tokens[0] in (1, 3) and math.isfinite(logp[0])


def test_the_largest_number_draws_the_last_token_that_can_be_drawn() -> None:
    logits = torch.randn(20_000, 7, generator=gen(), dtype=torch.float64) * 3
    logits[:, 5:] = -math.inf
    uniform = torch.full((len(logits),), 1 - 2**-53, dtype=torch.float64)
    tokens, _ = rollout._draw(logits, uniform, 1.0)
    assert max(tokens) <= 4


def test_a_low_temperature_is_greedy() -> None:
    logits = torch.randn(64, 30, generator=gen())
    uniform = torch.rand(64, generator=gen(1), dtype=torch.float64)
    tokens, _ = rollout._draw(logits, uniform, 1e-6)
    assert tokens == logits.argmax(-1).tolist()


# Batches --------------------------------------------------------------------------------------


def traj(length: int = 4, reward: float = 0.0, **fields: object) -> Trajectory:
    values: dict[str, object] = {
        "ids": torch.arange(1, length + 1),
        "action_mask": torch.arange(length - 1) % 2 == 1,
        "sample_logp": -torch.arange(length - 1).double() / 7,
        "reward": reward,
        **fields,
    }
    return Trajectory(**values)  # type: ignore[arg-type]


def test_collate() -> None:
    batch = collate([traj(3, 1.0), traj(5), traj(2, 0.25)], pad_id=9)
    assert batch["ids"].tolist() == [[1, 2, 3, 9, 9], [1, 2, 3, 4, 5], [1, 2, 9, 9, 9]]
    assert batch["action_mask"].int().tolist() == [[0, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]]
    assert batch["lengths"].tolist() == [3, 5, 2]
    assert batch["rewards"].tolist() == [1.0, 0.0, 0.25]
    assert batch["sample_logp"].tolist()[0] == [0.0, -1 / 7, 0.0, 0.0]
    assert {k: v.dtype for k, v in batch.items()} == {
        "ids": torch.int64,
        "action_mask": torch.bool,
        "sample_logp": torch.float64,
        "lengths": torch.int64,
        "rewards": torch.float64,
    }


@settings(max_examples=50)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=6), st.integers(0, 3))
def test_collate_keeps_every_entry(lengths: list[int], pad_id: int) -> None:
    trajs = [traj(n, float(i)) for i, n in enumerate(lengths)]
    batch = collate(trajs, pad_id)
    for i, t in enumerate(trajs):
        n = lengths[i]
        assert torch.equal(batch["ids"][i, :n], t.ids)
        assert (batch["ids"][i, n:] == pad_id).all()
        for key in ("action_mask", "sample_logp"):
            assert torch.equal(batch[key][i, : n - 1], getattr(t, key))
            assert not batch[key][i, n - 1 :].any()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float64]
)
def test_a_readers_mask_may_have_any_type(dtype: torch.dtype) -> None:
    own = traj(5, action_mask=torch.tensor([0, 1, 1, 0]).to(dtype))
    for trajs in ([own, traj(3)], [traj(3), own]):
        batch = collate(trajs, 0)
        assert batch["action_mask"].dtype == torch.bool
        assert batch["action_mask"][[t is own for t in trajs].index(True)].tolist() == [
            False,
            True,
            True,
            False,
        ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float32])
def test_the_first_row_does_not_decide_the_precision_of_the_others(dtype: torch.dtype) -> None:
    coarse = traj(4, sample_logp=torch.zeros(3, dtype=dtype))
    batch = collate([coarse, traj(4)], 0)
    assert torch.equal(batch["sample_logp"][1], traj(4).sample_logp)


def test_ids_of_other_integer_types() -> None:
    batch = collate([traj(4, ids=torch.arange(1, 5, dtype=torch.int32)), traj(3)], 0)
    assert batch["ids"].tolist() == [[1, 2, 3, 4], [1, 2, 3, 0]]


def test_the_first_row_does_not_decide_the_type() -> None:
    small = traj(3, ids=torch.tensor([1, 2, 3], dtype=torch.uint8))
    large = traj(3, ids=torch.tensor([1, 300, 3]))
    assert collate([small, large], 0)["ids"].tolist() == [[1, 2, 3], [1, 300, 3]]
    assert rollout.pad_rows([torch.tensor([1]), torch.tensor([2.5])], 2, 0).tolist() == [
        [1.0, 0.0],
        [2.5, 0.0],
    ]
    assert rollout.pad_rows(torch.ones(1, 2), 3, 0).tolist() == [[1.0, 1.0, 0.0]]
    with pytest.raises(ValueError, match="rows is empty"):
        rollout.pad_rows([], 3, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_policy_token_needs_a_finite_log_prob(value: float) -> None:
    logp = torch.tensor([value, -1.0, -2.0])  # entry 0 is not the policy's
    assert len(collate([traj(), traj(sample_logp=logp)], 0)["ids"]) == 2
    message = re.escape(f"trajs[1].sample_logp[1] = {value} is not finite")
    with pytest.raises(ValueError, match=message):
        collate([traj(), traj(sample_logp=logp.flip(0).roll(-1))], 0)


def test_a_diverged_policy_is_named_not_sampled() -> None:
    model = TinyAgent(len(TOK), d_model=16, n_layers=1, n_heads=2)
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    with pytest.raises(ValueError, match=re.escape("logits[0] are no distribution")):
        sample(CFG, model=model)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"ids": torch.ones(1, 4, dtype=torch.long)}, "trajs[2].ids has shape [1, 4]"),
        ({"ids": torch.ones(1, dtype=torch.long)}, "trajs[2].ids has shape [1]"),
        ({"ids": torch.ones(0, dtype=torch.long)}, "trajs[2].ids has shape [0]"),
        ({"ids": torch.tensor(3)}, "trajs[2].ids has shape []"),
        ({"ids": torch.ones(4)}, "trajs[2].ids is torch.float32"),
        ({"ids": torch.ones(4, dtype=torch.bool)}, "trajs[2].ids is torch.bool"),
        ({"action_mask": torch.ones(4)}, "trajs[2].action_mask has shape [4], needs [3]"),
        ({"action_mask": torch.ones(3, 1)}, "trajs[2].action_mask has shape [3, 1], needs [3]"),
        ({"sample_logp": torch.ones(2)}, "trajs[2].sample_logp has shape [2], needs [3]"),
        ({"action_mask": torch.tensor([0.0, 0.5, 1.0])}, "trajs[2].action_mask (torch.float32)"),
        ({"action_mask": torch.tensor([0, 1, 2])}, "trajs[2].action_mask (torch.int64)"),
        ({"action_mask": torch.tensor([0.0, math.nan, 1.0])}, "trajs[2].action_mask"),
        ({"action_mask": torch.tensor([0, -1, 1])}, "trajs[2].action_mask"),
    ],
)
def test_a_malformed_trajectory_is_named(bad: dict[str, Tensor], message: str) -> None:
    trajs = [traj(), traj(5), traj(**bad), traj(**bad)]
    with pytest.raises(ValueError, match=re.escape(message)):
        check_trajectories(trajs)
    with pytest.raises(ValueError, match=re.escape(message)):
        collate(trajs, 0)
    check_trajectories(trajs[:2])


def test_no_trajectories_are_refused() -> None:
    with pytest.raises(ValueError, match="trajs is empty"):
        collate([], 0)


def test_what_is_no_trajectory_is_refused() -> None:
    with pytest.raises(TypeError, match=re.escape("trajs[0].ids must be a tensor, is NoneType")):
        collate([torch.arange(3)], 0)
    lists = Trajectory(torch.arange(3), [True, False], torch.zeros(2), 0.0)
    with pytest.raises(
        TypeError, match=re.escape("trajs[0].action_mask must be a tensor, is list")
    ):
        collate([lists], 0)


@pytest.mark.parametrize("reward", [None, torch.tensor([0.0, 1.0]), "passed"])
def test_a_reward_that_is_no_number_is_named(reward: object) -> None:
    message = re.escape(f"trajs[1].reward = {reward!r} is no number")
    with pytest.raises(TypeError, match=message):
        collate([traj(), traj(reward=reward)], 0)
    assert collate([traj(reward=torch.tensor([0.5]))], 0)["rewards"].tolist() == [0.5]


def test_pad_rows() -> None:
    rows = [torch.tensor([1.5]), torch.tensor([2.0, 3.0]), torch.tensor([])]
    assert pad_rows(rows, 3, -1).tolist() == [[1.5, -1, -1], [2, 3, -1], [-1, -1, -1]]
    assert pad_rows(rows, 2, 0).shape == (3, 2)
    with pytest.raises(ValueError, match=re.escape("rows[1] has 2 entries, more than width = 1")):
        pad_rows(rows, 1, 0)


# Statistics -----------------------------------------------------------------------------------


def test_evaluate_counts_what_it_sampled() -> None:
    model, tasks, cfg = Eager(), TASKS[:3], RolloutConfig(max_tokens=30)
    result = evaluate(model, tasks, TOK, 5, generator=gen(4), cfg=cfg)
    trajs = sample(dataclasses.replace(cfg, group_size=5), tasks, seed=4, model=model)
    rates = [sum(t.reward for t in trajs[i : i + 5]) / 5 for i in (0, 5, 10)]
    assert list(result["by_task"].values()) == pytest.approx(rates)
    assert list(result["by_task"]) == [t.name for t in tasks]
    assert result["pass_rate"] == pytest.approx(sum(rates) / 3)


def test_evaluate_is_repeatable_by_default() -> None:
    cfg = EnvConfig(max_tokens=20)
    cfg = SimpleNamespace(max_tokens=cfg.max_tokens, temperature=1.0)
    assert evaluate(Eager(), TASKS[:2], TOK, 2, cfg=cfg) == evaluate(
        Eager(), TASKS[:2], TOK, 2, cfg=cfg
    )


def fake_evaluate(monkeypatch: pytest.MonkeyPatch, rewards: Tensor) -> dict[str, object]:
    """Evaluate as if the sampled rewards were these, [tasks, episodes]."""
    trajs = [traj(reward=r) for r in rewards.flatten().tolist()]
    monkeypatch.setattr(rollout, "sample_groups", lambda *a, **k: trajs)
    return evaluate(Eager(), TASKS[: len(rewards)], TOK, rewards.shape[1])


def test_standard_error_against_the_sample_variances(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = (torch.rand(7, 5, generator=gen()) < 0.4).double()
    result = fake_evaluate(monkeypatch, rewards)
    by_hand = math.sqrt(sum(row.var().item() / 5 for row in rewards)) / 7
    assert result["stderr"] == pytest.approx(by_hand, rel=1e-12)
    assert result["pass_rate"] == pytest.approx(rewards.mean().item())


def test_standard_error_is_that_of_repeated_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, episodes, repeats = torch.tensor([0.1, 0.5, 0.9, 1.0, 0.0]).double(), 6, 400
    means, squares = [], []
    for repeat in range(repeats):
        draws = torch.rand(len(rates), episodes, generator=gen(repeat), dtype=torch.float64)
        result = fake_evaluate(monkeypatch, (draws < rates[:, None]).double())
        means.append(result["pass_rate"])
        squares.append(result["stderr"] ** 2)
    observed = torch.tensor(means).var().item()
    claimed = sum(squares) / repeats
    exact = float((rates * (1 - rates) / episodes).sum()) / len(rates) ** 2
    assert claimed == pytest.approx(exact, rel=0.1)
    assert observed == pytest.approx(exact, rel=0.3)


def test_behavior_stats_against_a_loop() -> None:
    trajs = sample()
    stats = behavior_stats(trajs)
    n = len(trajs)
    assert stats["reward"] == sum(t.reward for t in trajs) / n
    assert stats["tokens"] == sum(len(t.ids) for t in trajs) / n
    policy = sum(int(m) for t in trajs for m in t.action_mask)
    assert stats["policy_share"] == policy / sum(len(t.ids) for t in trajs)
    for key in ("look", "test", "edit", "submit"):
        assert stats[key] == sum(t.info[key.upper()] for t in trajs) / n
    for key in ("errors", "truncated"):
        assert stats[key] == sum(t.info[key] for t in trajs) / n
    assert set(stats) == {
        "reward", "tokens", "policy_share", "look", "test", "edit", "submit", "errors", "truncated"
    }  # fmt: skip


def test_behavior_stats_name_what_is_missing() -> None:
    with pytest.raises(ValueError, match="trajs is empty"):
        behavior_stats([])
    counts = dict.fromkeys((*ACTIONS, "errors", "truncated"), 0)
    assert behavior_stats([traj(info=counts)])["look"] == 0
    for key in counts:
        info = {k: 0 for k in counts if k != key}
        message = re.escape(f"trajs[1].info = {info} has no {key!r}")
        with pytest.raises(ValueError, match=message):
            behavior_stats([traj(info=counts), traj(info=info)])
