# Generated from chapters/01-gym.ipynb by tools/export.py. Do not edit: edit the notebook.
"""For the chapter alone: A gym for fixing bugs."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.gym import GOALS, REPAIRS, BugFixEnv, Task

__all__ = ["TABLES", "Demonstrator", "play", "table_score"]


def table_score(key: Callable[[Task], Any], train: Sequence[Task], tasks: Sequence[Task]) -> float:
    """Return the share of `tasks` that a table solves, from `key` to the commonest repair."""
    seen: dict[Any, Counter[str]] = defaultdict(Counter)
    for task in train:
        seen[key(task)][task.fix[1]] += 1
    best = {entry: count.most_common(1)[0][0] for entry, count in seen.items()}
    return sum(best.get(key(task)) == task.fix[1] for task in tasks) / len(tasks)


TABLES: dict[str, Callable[[Task], Any]] = {
    "wrong token": lambda task: task.fix[0],
    "goal": lambda task: task.goal[0],
    "wrong token and goal": lambda task: (task.fix[0], task.goal[0]),
}


@dataclass(frozen=True)
class Demonstrator:
    """A scripted agent that knows the two repairs of each wrong token, with chances to go wrong.

    Attributes:
        read: it reads the goal where the goal decides, and guesses elsewhere.
        slip: its first edit puts some other repair in.
        test: it tests after an edit.
        retry: after a failed test it tries the other repair.
        lost: it begins with edits that help nothing; the long tail of lengths comes from here.
    """

    read: float = 0.6
    slip: float = 0.12
    test: float = 0.5
    retry: float = 0.75
    lost: float = 0.1

    def act(self, env: BugFixEnv, rng: random.Random) -> Iterator[tuple[str, ...]]:
        """Yield the actions of one episode; reads the environment between them."""
        wrong, right = env.task.fix
        pair = REPAIRS[wrong]
        yield ("LOOK",)
        if rng.random() < self.lost:
            yield from self._wander(env, rng)
        told = right in GOALS and rng.random() < self.read
        now = right if told else rng.choice(pair)
        if rng.random() < self.slip:
            now = rng.choice(_WORDS)
        if env.program.count(wrong) == 1:
            yield ("EDIT", wrong, now)
            while rng.random() < self.test:
                yield ("TEST",)
                done = all(env.run(env.task.visible)) or rng.random() >= self.retry
                if done or env.program.count(now) != 1:
                    break
                before, now = now, rng.choice([token for token in pair if token != now])
                yield ("EDIT", before, now)
        yield ("SUBMIT",)

    def _wander(self, env: BugFixEnv, rng: random.Random) -> Iterator[tuple[str, ...]]:
        for _ in range(rng.randint(1, 8)):
            old = rng.choice([token for token in env.program if token != "\n"])
            new, errors = rng.choice(_WORDS), env.info["errors"]
            yield ("EDIT", old, new)
            if env.info["errors"] == errors and env.program.count(new) == 1 and old != new:
                yield ("EDIT", new, old)
            if rng.random() < 0.5:
                yield (rng.choice(("LOOK", "TEST")),)


_WORDS = sorted({token for pair in REPAIRS.values() for token in pair})


def play(env: BugFixEnv, actions: Iterable[tuple[str, ...]]) -> tuple[list[int], list[bool]]:
    """Play actions, read one by one: the token ids of the episode, and which are the agent's."""
    ids = env.reset()
    mine = [False] * len(ids)
    for action in actions:
        for token in env.tok.encode(action):
            if env.done:
                return ids, mine
            observation, _ = env.step(token)
            ids += [token, *observation]
            mine += [True] + [False] * len(observation)
    return ids, mine
