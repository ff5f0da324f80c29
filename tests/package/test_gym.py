"""The gym: its tasks, hostile programs, and the rules of an episode."""

import builtins
import dataclasses
import json
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from agentrl import gym
from agentrl.gym import (
    ACTIONS,
    MAX_SOURCE,
    MAX_STEPS,
    BugFixEnv,
    EnvConfig,
    Tokenizer,
    build_tokenizer,
    make_env,
    make_tasks,
    run_tests,
    source_of,
)

TASKS = make_tasks()
PAIRS = ((2, 3), (5, 1), (-4, 2), (0, 7), (3, 0), (-2, -6))
SUM_TWO = gym.Task(  # a task of our own, so that the catalogue may change
    name="own/sum_two",
    split="train",
    family="-->+",
    goal=("sum", "two"),
    params=("a", "b"),
    program=("return", "a", "-", "b"),
    fix=("-", "+"),
    tests=tuple(((a, b), a + b) for a, b in PAIRS),
)
TWICE = dataclasses.replace(SUM_TWO, name="own/twice", program=("return", "a", "-", "a", "-", "b"))
TOK = build_tokenizer([*TASKS, SUM_TWO])
IDS = [task.name for task in TASKS]


def repaired(task: gym.Task) -> tuple[str, ...]:
    return tuple(task.fix[1] if token == task.fix[0] else token for token in task.program)


# The tasks ------------------------------------------------------------------------------------


def test_twenty_train_and_ten_heldout() -> None:
    assert len(make_tasks("train")) == 20
    assert len(make_tasks("heldout")) == 10
    assert make_tasks("train") + make_tasks("heldout") != []
    assert {t.name for t in make_tasks()} == {
        t.name for split in ("train", "heldout") for t in make_tasks(split)
    }
    assert len({t.name for t in TASKS}) == 30
    assert all(t.split == split for split in ("train", "heldout") for t in make_tasks(split))


def test_splits_share_families_and_no_program() -> None:
    train, held = make_tasks("train"), make_tasks("heldout")
    assert {t.family for t in held} == {t.family for t in train}
    assert not {t.program for t in train} & {t.program for t in held}
    assert not {(t.params, repaired(t)) for t in train} & {(t.params, repaired(t)) for t in held}


def test_lists_of_tasks_are_the_callers_own() -> None:
    make_tasks().clear()
    assert len(make_tasks()) == 30


@pytest.mark.parametrize("task", TASKS, ids=IDS)
def test_task_is_broken_as_given_and_repaired_by_its_fix(task: gym.Task) -> None:
    wrong, right = task.fix
    assert task.family == f"{wrong}->{right}"
    assert task.program.count(wrong) == 1, "the faulty token can be named"
    assert not all(run_tests(source_of(task.params, task.program), task.tests))
    assert all(run_tests(source_of(task.params, repaired(task)), task.tests))
    assert len(task.tests) == 6
    TOK.encode([*task.program, *task.fix])


@pytest.mark.parametrize("task", TASKS, ids=IDS)
def test_expected_values_are_those_of_plain_python(task: gym.Task) -> None:
    source = source_of(task.params, repaired(task))
    assert [call_plain(source, args) for args, _ in task.tests] == [out for _, out in task.tests]


@pytest.mark.parametrize("split", ["", "Train", "test", None, 1])
def test_unknown_split_is_named(split: object) -> None:
    with pytest.raises(ValueError, match=f"got {split!r}"):
        make_tasks(split)  # type: ignore[arg-type]


# Hostile programs -----------------------------------------------------------------------------
# Each would return its argument, and so pass IDENTITY, if it were let go; or it shows by how it
# fails that it reached what it should not.

IDENTITY = (((4,), 4), (((3, 1, 2),), (3, 1, 2)))


def body(text: str) -> str:
    return "def f(n):\n" + "\n".join("    " + line for line in text.split("\n"))


REFUSED_BUILTINS = """
open eval exec compile getattr setattr type object vars globals locals input id iter next map filter
zip list tuple dict set str bytes int bool print exit breakpoint memoryview super hash pow divmod
isinstance Exception
"""

HOSTILE = {
    # endless, or far too long
    "while true": body("while True:\n    pass\nreturn n"),
    "while with a changing test": body("i = 0\nwhile i > -1:\n    i = i + 1\nreturn n"),
    "while else": body("while 1:\n    continue\nelse:\n    n = n\nreturn n"),
    "work in the test of a while": body("while sum(range(99)):\n    pass\nreturn n"),
    "nested loops": body(
        "for a in range(100):\n    for b in range(100):\n        for c in range(100):\n"
        "            pass\nreturn n"
    ),
    "nested comprehensions": body(
        "x = sum(1 for a in range(99) for b in range(99) for c in range(99))\nreturn n"
    ),
    "comprehensions in comprehensions": body(
        "x = [sum(a for b in range(99)) for a in range(99)]\nreturn n"
    ),
    "filter that never holds": body(
        "x = [a for a in range(99) if 0 for b in range(9) if 0]\n"
        "y = any(0 for a in range(99) for b in range(99) if a < 0)\nreturn n"
    ),
    "huge range in sum": body("x = sum(range(10 ** 18))\nreturn n"),
    "huge range in sorted": body("x = sorted(range(10 ** 18))\nreturn n"),
    "huge range in any": body("x = any(a < 0 for a in range(10 ** 18))\nreturn n"),
    "huge range in a loop": body("for a in range(1, 10 ** 18):\n    pass\nreturn n"),
    "huge literal range": body("for a in range(1000000000000000000):\n    pass\nreturn n"),
    "membership in a generator": body(
        "x = 0 in (1 for a in range(99) for b in range(99))\nreturn n"
    ),
    "generator of generators": body(
        "g = (a for a in range(99))\nfor i in range(99):\n    g = (b for b in g)\n"
        "x = sum(g)\nreturn n"
    ),
    "generator that reads its own name": body(
        "g = (a for a in range(99))\ng = (b for a in range(99) for b in g)\n"
        "x = sum(1 for a in range(99) for b in range(99) for c in g)\ny = 1 in g\n"
        "while 1:\n    g = (a for a in g)\nreturn n"
    ),
    "many sorts": body("while 1:\n    " + "; ".join(["x=sorted(range(99))"] * 24) + "\nreturn n"),
    # memory
    "list multiplication": body("x = [0] * 10 ** 10\nreturn n"),
    "list multiplied from the left": body("x = 10 ** 10 * [0]\nreturn n"),
    "tuple multiplication": body("x = (0, 1) * 10 ** 10\nreturn n"),
    "nested doubling": body("x = [1]\nwhile 1:\n    x = x + x\nreturn n"),
    "doubling by literal": body("x = [1]\nfor i in range(60):\n    x = [x, x]\nreturn n"),
    "doubling by comprehension": body(
        "x = [1]\nfor i in range(60):\n    x = [b for a in (0, 1) for b in x]\nreturn n"
    ),
    "sum of lists": body("x = sum(([0] * 99 for a in range(99)), [])\nreturn n"),
    "sum of sums of lists": body(
        "x = sum((sum(([0] * 99 for a in range(9)), []) for b in range(40)), [])\nreturn n"
    ),
    "power": body("x = 9 ** 9 ** 9 ** 9\nreturn n"),
    "power of a power": body("x = 2\nwhile 1:\n    x = x ** 64\nreturn n"),
    "power of a long literal": body(f"x = 0x{'f' * 500} ** 64\nreturn n"),
    "negative power, a float": body("x = 2 ** -1\nreturn n"),
    "squaring": body("x = 3\nwhile 1:\n    x = x * x\nreturn n"),
    "doubling a number": body("x = 1\nwhile 1:\n    x = x + x\nreturn n"),
    "shift": body("x = 1 << 10 ** 10\nreturn n"),
    "aliased operators": body("x = 1\nx **= 10 ** 10\nreturn n"),
    # the stack
    "recursion": body("return f(n)"),
    "recursion by an alias": body("g = f\nreturn g(n)"),
    "recursion by a comprehension's name": body(
        "abs = f\nx = [1 for f in range(0)]\nreturn abs(n - 1) + abs(n - 1) if n > -40 else n"
    ),
    "recursion by a generator's name": body(
        "abs = f\nx = (1 for f in range(0))\n"
        "return n if n == n and not abs(n) == abs(n) else abs(n)"
    ),
    "recursion by a tuple target": body(
        "any = f\nx = [a for a, f in ()]\nreturn any(n) if any(n) else n"
    ),
    "mutual recursion": "def f(n):\n    return g(n)\ndef g(n):\n    return f(n)",
    "parentheses": body("return " + "(" * 280 + "n" + ")" * 280),
    "brackets": body("x = " + "[" * 280 + "]" * 280 + "\nreturn n"),
    "unary operators": body("x = " + "-" * 550 + "1\nreturn n"),
    "comparisons": body("return " + "n<" * 270 + "n"),
    "sums of sums": body("x = " + "1+" * 270 + "1\n" + "y = " + "1*" * 10 + "1\nreturn n + n"),
    "nested ifs": "def f(n):\n"
    + "".join(" " * i + "if 1:\n" for i in range(1, 30))
    + " " * 30
    + "return g",
    "indentation": "def f(n):\n" + "".join("\t" * i + "if 1:\n" for i in range(1, 30)),
    "long source": body("return n" + " " * 100_000),
    "long comment": body("return n  #" + "x" * MAX_SOURCE),
    "long name": body(f"{'x' * MAX_SOURCE} = n\nreturn {'x' * MAX_SOURCE}"),
    "long number": body(f"x = {'9' * 5000}\nreturn n"),
    # imports, attributes, names
    "import": body("import os\nreturn n"),
    "import from": body("from os import path\nreturn n"),
    "import outside": "import os\n" + body("return n"),
    "import by name": body("x = __import__\nreturn n"),
    "import called": body("__import__(0)\nreturn n"),
    "attribute": body("x = n.__class__\nreturn n"),
    "attribute of a literal": body("x = ().__class__.__base__.__subclasses__()\nreturn n"),
    "generator frame": body("x = (a for a in range(2)).gi_frame.f_back.f_globals\nreturn n"),
    "method": body("n.append(1)\nreturn n"),
    "sort in place": body("x = n.sort()\nreturn n"),
    "attribute as a target": body("for n.x in range(2):\n    pass\nreturn n"),
    "builtins": body("x = __builtins__\nreturn n"),
    "name": body("x = __name__\nreturn n"),
    "debug": body("x = __debug__\nreturn n"),
    "own counter": body("x = _tick\nreturn n"),
    "own bound": body("x = _binary\nreturn n"),
    **{f"builtin {name}": body(f"x = {name}\nreturn n") for name in REFUSED_BUILTINS.split()},
    "print": body("print(n)\nreturn n"),
    "eval": body("return eval(n)"),
    "exit": body("exit()\nreturn n"),
    # names of ours
    "counter as a variable": body("_tick = max\nwhile 1:\n    pass\nreturn n"),
    "counter as a parameter": "def f(_tick):\n    return _tick",
    "bound as a loop variable": body("x = [1 for _bounded in range(3)]\nreturn n"),
    "operator as a target": body("_binary = 1\nreturn n"),
    "builtins as a variable": body("__builtins__ = 1\nreturn n"),
    "dunder parameter": "def f(__class__):\n    return __class__",
    "its own name": body("f = n\nreturn f"),
    "its own name, a loop": body("for f in range(3):\n    pass\nreturn n"),
    "its own name, a parameter": "def f(f):\n    return f",
    # syntax outside the allow-list
    "lambda": body("x = lambda: n\nreturn n"),
    "lambda as the program": "f = lambda n: n",
    "lambda called": body("return (lambda x: x)(n)"),
    "class": body("class A:\n    pass\nreturn n"),
    "class outside": "class A:\n    pass\n" + body("return n"),
    "class named f": "class f:\n    n = 1",
    "try": body("try:\n    x = 1\nexcept:\n    x = 2\nreturn n"),
    "try around a loop": body(
        "while 1:\n    try:\n        while 1:\n            pass\n    except:\n        pass"
    ),
    "try star": body("try:\n    pass\nexcept* ValueError:\n    pass\nreturn n"),
    "walrus": body("return (x := n)"),
    "decorator": "@max\n" + body("return n"),
    "default": "def f(n, x=1):\n    return n",
    "default that keeps state": "def f(n, g=(x for x in range(9))):\n    return n if any(g) else n",
    "keyword-only": "def f(n, *, x=1):\n    return n",
    "positional-only": "def f(n, /):\n    return n",
    "star args": "def f(*n):\n    return n[0]",
    "star star args": "def f(n, **x):\n    return n",
    "annotation": "def f(n: int):\n    return n",
    "annotation with a value": "def f(n: 1):\n    return n",
    "annotation of the result": "def f(n) -> max:\n    return n",
    "annotated assignment": body("x: int = n\nreturn x"),
    "starred call": body("return max(*n)"),
    "starred list": body("x = [*range(3)]\nreturn n"),
    "starred target": body("a, *b = 1, 2, 3\nreturn n"),
    "keyword call": body("x = sorted(range(3), key=abs)\nreturn n"),
    "double star call": body("x = max(1, 2, **n)\nreturn n"),
    "call of a call": body("x = max(1, 2)(3)\nreturn n"),
    "call of a subscript": body("x = n[0](1)\nreturn n"),
    "f-string": body("x = f'{n}'\nreturn n"),
    "f-string that calls": body("x = f'{max(1, 2)!r:>1000000000}'\nreturn n"),
    "string": body("x = 'a'\nreturn n"),
    "string multiplication": body("x = 'a' * 10 ** 10\nreturn n"),
    "string formatting": body("x = '%1000000000d' % 1\nreturn n"),
    "docstring": body("'''says what it does'''\nreturn n"),
    "bytes": body("x = b'a'\nreturn n"),
    "float": body("x = 1.5\nreturn n"),
    "infinity": body("x = 1e999\nreturn n"),
    "complex": body("x = 1j\nreturn n"),
    "none": body("x = None\nreturn n"),
    "ellipsis": body("x = ...\nreturn n"),
    "division": body("x = 1 / 2\nreturn n"),
    "matrix product": body("x = 1 @ 2\nreturn n"),
    "bit operators": body("x = 1 | 2\nreturn n"),
    "inversion": body("x = ~1\nreturn n"),
    "identity": body("x = n is n\nreturn n"),
    "dict": body("x = {1: 2}\nreturn n"),
    "set": body("x = {1, 2}\nreturn n"),
    "dict comprehension": body("x = {a: a for a in range(3)}\nreturn n"),
    "set comprehension": body("x = {a for a in range(3)}\nreturn n"),
    "global": body("global n\nreturn n"),
    "global of another name": body("global x\nx = 1\nreturn n"),
    "nonlocal": body("nonlocal x\nreturn n"),
    "delete": body("x = 1\ndel x\nreturn n"),
    "delete an item": body("del n[0]\nreturn n"),
    "with": body("with n:\n    pass\nreturn n"),
    "assert": body("assert 1\nreturn n"),
    "raise": body("raise ValueError\nreturn n"),
    "raise an exit": body("raise SystemExit"),
    "raise an interrupt": body("raise KeyboardInterrupt"),
    "yield": body("yield n"),
    "yield from": body("yield from n"),
    "async": "async def f(n):\n    return n",
    "async comprehension": body("x = [a async for a in n]\nreturn n"),
    "await": body("await n\nreturn n"),
    "match": body("match n:\n    case x:\n        return x"),
    "augmented assignment": body("x = 1\nx += 1\nreturn n"),
    "expression statement": body("n\nreturn n"),
    "type alias": body("type X = int\nreturn n"),
    "type parameter": "def f[T](n):\n    return n",
    "semicolons outside": "x = 1; " + "f = 1",
    "two functions": body("return n") + "\n" + body("return n"),
    "function inside": body("def g():\n    pass\nreturn n"),
    "another name": "def g(n):\n    return n",
    "no function": "n",
    "nothing": "",
    "only a comment": "# def f(n): return n",
    "an expression": "f(4)",
    "null byte": body("return n") + "\0",
    "null byte inside": "def f(n):\n    return\0 n",
    "surrogate": body("return n  # \ud800"),
    "surrogate name": body("\udc80 = n\nreturn n"),
    "byte order mark inside": body("return \ufeff n"),
    "coding line": "# -*- coding: utf-7 -*-\n" + body("+AC0-return n"),
    "homoglyph of an underscore": body("＿tick = 1\nreturn n"),  # NFKC makes it _tick
    "homoglyph of underscores": body("x = ＿＿builtins＿＿\nreturn n"),
    "homoglyph of a builtin": body("x = 𝓮𝓿𝓪𝓵\nreturn n"),
    "homoglyph of its own name": body("abs = f\nx = [1 for 𝒇 in range(0)]\nreturn n"),
    "line continuation at the end": body("return n\\"),
    "unclosed": body("return (n"),
    "bad escape": body("x = '\\d'\nreturn n"),
    "number glued to a keyword": body("return 0x1for x in n"),
    "call of a number, a warning": body("x = 1(2)\nreturn n"),
    "identity with a literal, a warning": body("x = n is 4\nreturn n"),
    # inputs and results
    "writes to its input": body("n[0] = 9\nreturn n"),
    "writes a slice": body("n[:] = [1]\nreturn n"),
    "writes through a loop target": body("for n[0] in range(3):\n    pass\nreturn n"),
    "writes through a comprehension": body("x = [0 for n[0] in range(3)]\nreturn n"),
    "writes through a tuple": body("(n[0], x) = 1, 2\nreturn n"),
    "writes through a list target": body("[x] = [1]\nreturn n"),
    "input augmented": body("n += [1]\nreturn n"),
    "a class equal to everything": body(
        "class A:\n    def __eq__(self, x):\n        return True\nreturn A()"
    ),
    "a builtin": body("return max"),
    "itself": body("return f"),
    "a generator": body("return (x for x in n)"),
    "a tuple for a list": body("return (3, 1, 2)"),
    "a range": body("return range(4)"),
    "a bool for an int": body("return n == n"),
    "bools in a list": body("return [n == n, n == n, n == n]"),
    "nested list": body("return [[3, 1, 2]]"),
    "nothing returned": body("pass"),
    # plain errors
    "wrong number of parameters": "def f():\n    return 4",
    "too many parameters": "def f(n, m):\n    return n",
    "division by zero": body("x = 1 % 0\nreturn n"),
    "index": body("x = [1][5]\nreturn n"),
    "type error": body("x = [1] + 1\nreturn n"),
    "unpacking": body("a, b = 1, 2, 3\nreturn n"),
    "unbound": body("x = y\ny = 1\nreturn n"),
    "minimum of nothing": body("x = max(())\nreturn n"),
    "syntax": "def f(n) return n",
}


class Hang(BaseException):
    """Not an Exception: what contains a program's errors must not contain this."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def state_of_process() -> dict[str, object]:
    return {
        "builtins": dict(vars(builtins)),
        "modules": set(sys.modules),
        "recursion limit": sys.getrecursionlimit(),
        "threads": {t.ident for t in threading.enumerate()},
        "filters": list(warnings.filters),
        "allowed builtins": dict(gym.BUILTINS),
        "gym": dict(vars(gym)),
        "integer digits": sys.get_int_max_str_digits(),
        "trace": (sys.gettrace(), sys.getprofile()),
        "streams": (sys.stdout, sys.stderr, sys.displayhook, sys.excepthook),
    }


def test_enough_hostile_programs() -> None:
    assert len(set(HOSTILE.values())) == len(HOSTILE) >= 40
    assert run_tests(body("return n"), IDENTITY) == [True, True], "the harmless one passes"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_fails_and_leaves_no_trace(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    inputs = [list(args[0]) if isinstance(args[0], tuple) else args[0] for args, _ in IDENTITY]
    tests = [((value,), expected) for value, (_, expected) in zip(inputs, IDENTITY, strict=True)]
    before = state_of_process()
    with warnings.catch_warnings(), within(30):
        warnings.simplefilter("error")
        first = run_tests(HOSTILE[name], tests)
        again = run_tests(HOSTILE[name], tests)
    assert first == again == [False, False]
    assert inputs == [4, [3, 1, 2]], "the inputs are as they were"
    after = state_of_process()
    assert before == after
    assert capfd.readouterr() == ("", "")


SUBPROCESS = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (200, 200))
from agentrl.gym import run_tests

def peak():  # ru_maxrss would start from the parent's size; VmHWM begins with this program
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024

before = peak()
tests = (((4,), 4), (((3, 1, 2),), (3, 1, 2)))
bad = [name for name, text in json.load(sys.stdin).items() if any(run_tests(text, tests))]
print(json.dumps([bad, peak() - before]))
"""


def test_all_of_them_in_a_process_of_their_own_with_little_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SUBPROCESS],
        input=json.dumps(HOSTILE),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    passed, grown_mb = json.loads(done.stdout)
    assert passed == []
    assert grown_mb < 50


def loops(passes: int) -> str:
    return body(f"i = 0\nwhile i < {passes}:\n    i = i + 1\nreturn n")


def test_step_budget_is_per_test_and_starts_anew() -> None:
    # The budget may count other things beside passes, so the boundary is found, then used.
    most = max(k for k in range(MAX_STEPS + 1) if run_tests(loops(k), IDENTITY[:1]) == [True])
    assert 0 < most <= MAX_STEPS
    assert run_tests(loops(most), IDENTITY * 5) == [True] * 10
    assert run_tests(loops(MAX_STEPS + 1), IDENTITY) == [False, False]
    assert run_tests(loops(most), IDENTITY) == [True, True], "also after one that used it up"


def test_a_verdict_does_not_depend_on_what_ran_before() -> None:
    half = body("x = n - 4\nreturn [3, 1, 2][x] + 1")
    tests = (((4,), 4), ((9,), 0), ((4,), 4))
    assert run_tests(half, tests) == run_tests(half, tests) == [True, False, True]
    assert run_tests(half, tests[::-1]) == [True, False, True]
    for program in HOSTILE.values():
        with within(30):
            run_tests(program, IDENTITY)
    assert run_tests(half, tests) == [True, False, True]


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ("n == n", True, True),
        ("n == n", 1, False),
        ("1", True, False),
        ("[1, 0]", (1, 0), True),
        ("[1, 0]", (True, False), False),
        ("[n == n]", (True,), True),
        ("[n == n]", (1,), False),
        ("[]", (), True),
        ("()", (), False),
        ("range(0)", (), False),
        ("0", (), False),
        ("[3, 1, 2][1:]", (1, 2), True),
        ("- 4 % 3", 2, True),
        ("7 // 2", 3, True),
        ("2 ** 10", 1024, True),
        ("2 ** 63", 2**63, True),
        ("2 ** 64", 2**64, False),
        ("sorted([3, 1, 2])", (1, 2, 3), True),
        ("[x for x in range(100)]", tuple(range(100)), True),
        ("[x for x in range(101)]", tuple(range(101)), False),
        ("[0] * 100", (0,) * 100, True),
        ("[0] * 101", (0,) * 101, False),
        ("[0] * -1", (), True),
    ],
)
def test_results_are_compared_with_their_types(value: str, expected: object, same: bool) -> None:
    assert run_tests(body(f"return {value}"), [((4,), expected)]) == [same]


def test_no_tests_no_verdicts() -> None:
    assert run_tests(body("return n"), ()) == []
    assert run_tests("garbage(", ()) == []


SCRAPS = sorted(
    {*TOK.program_tokens, *(t for t in TOK.tokens if t.isidentifier())}
    | {"while", "def", "f", "\n", "    ", "=", ":", "(", ")", "[", "]", ",", "**", "10", "lambda"}
    | {"import", "_tick", "__builtins__", ".", "range", "sorted", "yield", "'", "#", "\\", "\0"}
    | {"f", "g", "n", "xs", "pass", "True", "None", "1", "-", "*", "not", "*n", "@", ";", "class"}
)


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from(SCRAPS), max_size=40),
    st.sampled_from(["def f(n):\n    return ", "def f(n):\n    ", ""]),
)
def test_random_tokens_never_raise(words: list[str], head: str) -> None:
    with within(30):
        verdicts = run_tests(head + " ".join(words), IDENTITY)
    assert len(verdicts) == 2
    assert all(type(v) is bool for v in verdicts)


@settings(max_examples=200)
@given(st.text(max_size=80), st.sampled_from(["def f(n):\n    return ", "def f(n):\n    ", ""]))
def test_random_text_never_raises(text: str, head: str) -> None:
    with within(30):
        assert len(run_tests(head + text, IDENTITY)) == 2


numbers = st.integers(-20, 20)
lists = st.lists(numbers, max_size=6).map(tuple)


def plain(source: str) -> Callable[..., object]:
    scope: dict[str, object] = {}
    exec(source, scope)
    return scope["f"]  # type: ignore[return-value]


def call_plain(source: str, args: tuple[object, ...]) -> object:
    """Return what plain Python returns, a list as a tuple; None if it raises."""
    try:
        out = plain(source)(*(list(a) if isinstance(a, tuple) else a for a in args))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None
    return tuple(out) if isinstance(out, list) else out


@settings(max_examples=30)
@given(st.data())
@pytest.mark.parametrize("task", TASKS, ids=IDS)
def test_sandbox_equals_plain_python(task: gym.Task, data: st.DataObject) -> None:
    args = tuple(data.draw(lists if p == "xs" else numbers) for p in task.params)
    source = source_of(task.params, repaired(task))
    expected = call_plain(source, args)
    assert run_tests(source, [(args, expected)]) == [type(expected) in (int, bool, tuple)]


@settings(max_examples=400)
@given(st.sampled_from(TASKS), st.data())
def test_an_edited_program_passes_only_what_plain_python_passes(
    task: gym.Task, data: st.DataObject
) -> None:
    words = sorted(TOK.program_tokens)
    program = list(task.program)
    for _ in range(data.draw(st.integers(1, 3))):
        program[data.draw(st.integers(0, len(program) - 1))] = data.draw(st.sampled_from(words))
    source = source_of(task.params, program)
    for (args, expected), passed in zip(task.tests, run_tests(source, task.tests), strict=True):
        if passed:
            assert call_plain(source, args) == expected


# Words and ids --------------------------------------------------------------------------------


def test_vocabulary_is_shared_and_goal_words_are_not_program_tokens() -> None:
    assert TOK.pad_id == 0 and TOK.tokens[0] == "<pad>"
    assert len(TOK) == len(set(TOK.tokens)) == len(TOK.tokens)
    assert build_tokenizer([SUM_TWO, *reversed(TASKS)]).tokens == TOK.tokens, (
        "the order of tasks is no matter"
    )
    for task in TASKS:
        assert not {f"'{word}" for word in task.goal} & TOK.program_tokens
        assert TOK.decode(TOK.encode(task.program)) == list(task.program)


@given(st.lists(st.integers(0, len(TOK) - 1)))
def test_ids_go_to_words_and_back(ids: list[int]) -> None:
    assert TOK.encode(TOK.decode(ids)) == ids


def test_a_word_and_an_id_outside_the_vocabulary_are_named() -> None:
    with pytest.raises(ValueError, match=re.escape("words[1] = 'perl'")):
        TOK.encode(["return", "perl"])
    for bad in (-1, len(TOK), 10**9):
        with pytest.raises(ValueError, match=re.escape(f"ids[2] = {bad} is outside 0..")):
            TOK.decode([0, 1, bad])


def test_encode_takes_an_iterator() -> None:
    assert TOK.encode(iter(["return", "x"])) == TOK.encode(["return", "x"])
    assert TOK.decode(iter([1, 2])) == TOK.decode([1, 2])


# Episodes -------------------------------------------------------------------------------------


def play(env: BugFixEnv, text: str) -> list[list[str]]:
    """Take the tokens of a text; return the answer to each."""
    return [env.tok.decode(env.step(token)[0]) for token in env.tok.encode(text.split())]


def test_prompt() -> None:
    env = BugFixEnv(SUM_TWO, TOK)
    assert TOK.decode(env.reset()) == ["<bos>", "'sum", "'two", "<end>"]


def test_an_episode_that_solves_its_task() -> None:
    env = BugFixEnv(SUM_TWO, TOK)
    assert play(env, "LOOK") == [["return", "a", "-", "b", "<end>"]]
    failing = play(env, "TEST")[0]
    assert failing[0] == "fail" and failing[-1] == "<end>"
    names = [f"t{i}" for i, (args, out) in enumerate(SUM_TWO.tests, 1) if args[0] - args[1] != out]
    assert failing[1:-1] == names, "the answer says which tests fail"
    assert play(env, "EDIT - +") == [[], [], ["done", "<end>"]]
    assert play(env, "TEST") == [["ok", "<end>"]]
    assert (env.done, env.reward) == (False, 0.0), "only a submission is rewarded"
    assert play(env, "SUBMIT") == [[]]
    assert (env.done, env.reward) == (True, 1.0)
    assert env.info == {
        "task": SUM_TWO, "truncated": False, "errors": 0,
        "LOOK": 1, "TEST": 2, "EDIT": 1, "SUBMIT": 1,
    }  # fmt: skip


@pytest.mark.parametrize("task", TASKS, ids=IDS)
def test_every_task_can_be_solved_by_its_fix_and_not_without(task: gym.Task) -> None:
    env = make_env(EnvConfig())(task, TOK)
    play(env, "SUBMIT")
    assert (env.done, env.reward) == (True, 0.0)
    env.reset()
    for token in ("EDIT", *task.fix, "SUBMIT"):
        env.step(TOK.encode([token])[0])
    assert (env.done, env.reward) == (True, 1.0)


@pytest.mark.parametrize(
    "action",
    [
        "<pad>", "<bos>", "<end>", "ok", "t1", "error", "return", "'sum", "+",
        "EDIT LOOK TEST", "EDIT - <end>", "EDIT - 'sum", "EDIT * +", "EDIT - t1", "EDIT EDIT EDIT",
        "EDIT SUBMIT SUBMIT", "EDIT <pad> <pad>", "EDIT 'sum +",
    ],
)  # fmt: skip
def test_a_malformed_action_costs_its_tokens_and_gets_an_error(action: str) -> None:
    env = BugFixEnv(SUM_TWO, TOK)
    answers = play(env, action)
    assert answers[-1] == ["error", "<end>"] and not any(answers[:-1])
    assert env.program == list(SUM_TWO.program)
    assert (env.done, env.reward, env.info["errors"]) == (False, 0.0, 1)
    play(env, "EDIT - + SUBMIT")
    assert env.reward == 1.0, "the next action counts as ever"


def test_an_edit_of_a_token_that_stands_twice_is_an_error() -> None:
    for edit in ("EDIT a b", "EDIT - +"):
        assert play(BugFixEnv(TWICE, TOK), edit)[-1] == ["error", "<end>"]
    assert play(BugFixEnv(TWICE, TOK), "EDIT b a")[-1] == ["done", "<end>"]


@pytest.mark.parametrize("token", [-1, -len(TOK), len(TOK), len(TOK) + 1, 10**12])
def test_an_unknown_id_is_a_malformed_action(token: int) -> None:
    env = BugFixEnv(SUM_TWO, TOK)
    answer, done = env.step(token)
    assert (TOK.decode(answer), done) == (["error", "<end>"], False)
    env.step(TOK.encode(["EDIT"])[0])
    env.step(token)
    assert TOK.decode(env.step(token)[0]) == ["error", "<end>"]


def test_step_after_the_end_is_an_error_and_reset_starts_again() -> None:
    env = BugFixEnv(SUM_TWO, TOK)
    first = env.reset()
    play(env, "LOOK EDIT - + SUBMIT")
    with pytest.raises(RuntimeError, match="over"):
        env.step(0)
    assert env.reset() == first
    assert (env.done, env.reward, env.program) == (False, 0.0, list(SUM_TWO.program))
    assert set(env.info.values()) == {SUM_TWO, 0}
    play(env, "SUBMIT")
    assert env.reward == 0.0, "the repair of the first episode is gone"


def test_reset_in_the_middle_of_an_action_forgets_it() -> None:
    env = BugFixEnv(SUM_TWO, TOK)
    play(env, "EDIT -")
    env.reset()
    assert play(env, "LOOK")[0][-1] == "<end>"


def test_reset_gives_lists_of_its_own() -> None:
    env = BugFixEnv(SUM_TWO, TOK)
    env.reset().clear()
    assert len(env.reset()) == 4
    play(env, "LOOK EDIT - +")
    assert BugFixEnv(SUM_TWO, TOK).program == ["return", "a", "-", "b"]


@settings(max_examples=150)
@given(
    st.sampled_from(TASKS),
    st.integers(6, 60),
    st.lists(
        st.one_of(
            st.sampled_from(TOK.encode(ACTIONS[:3])),
            st.integers(-2, len(TOK) + 1),
        ),
        min_size=60,
        max_size=60,
    ),
)
def test_an_episode_ends_at_exactly_max_tokens(
    task: gym.Task, max_tokens: int, tokens: list[int]
) -> None:
    assume(max_tokens > len(task.goal) + 2)
    env = BugFixEnv(task, TOK, max_tokens)
    used = len(env.reset())
    for token in tokens:
        answer, done = env.step(token)
        used += 1 + len(answer)
        assert done == env.done and used <= max_tokens
        assert all(0 <= i < len(TOK) for i in answer)
        if done:
            break
        assert used < max_tokens
    assert env.done
    submitted = env.info["SUBMIT"] == 1
    assert env.info["truncated"] is not submitted
    if not submitted:
        assert (used, env.reward) == (max_tokens, 0.0)


def test_an_answer_is_cut_where_the_episode_is() -> None:
    env = BugFixEnv(SUM_TWO, TOK, max_tokens=7)  # prompt 4, LOOK 1, and 2 of the answer's 5
    assert play(env, "LOOK") == [["return", "a"]]
    assert (env.done, env.reward, env.info["truncated"]) == (True, 0.0, True)


def test_a_submission_with_the_last_token_counts() -> None:
    env = BugFixEnv(SUM_TWO, TOK, max_tokens=10)  # prompt 4, EDIT 3 and its answer 2, SUBMIT 1
    play(env, "EDIT - + SUBMIT")
    assert (env.done, env.reward, env.info["truncated"]) == (True, 1.0, False)
    env = BugFixEnv(SUM_TWO, TOK, max_tokens=9)
    assert play(env, "EDIT - +")[-1] == ["done", "<end>"]
    assert (env.done, env.reward, env.info["truncated"]) == (True, 0.0, True)


@pytest.mark.parametrize("max_tokens", [-1, 0, 1, 4])
def test_a_limit_that_leaves_no_room_is_refused(max_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens = {max_tokens} must exceed the prompt's 4"):
        BugFixEnv(SUM_TWO, TOK, max_tokens)
    BugFixEnv(SUM_TWO, TOK, 5)


def test_a_task_of_another_vocabulary_is_refused() -> None:
    small = Tokenizer(["other"], ["return"])
    with pytest.raises(ValueError, match=re.escape('words[1] = "\'sum"')):
        BugFixEnv(SUM_TWO, small)


def test_no_step_lacks_a_word() -> None:
    seven = dataclasses.replace(SUM_TWO, tests=SUM_TWO.tests[:1] * 7)
    with pytest.raises(ValueError, match=re.escape("'t7' is not in the vocabulary")):
        BugFixEnv(seven, TOK)
    foreign = dataclasses.replace(SUM_TWO, program=("return", "elsewhere"))
    with pytest.raises(ValueError, match=re.escape("words[1] = 'elsewhere'")):
        BugFixEnv(foreign, TOK)


@pytest.mark.parametrize("word", ["LOOK", "done", "t1", "<end>", "'sum"])
def test_a_word_has_one_meaning(word: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"program token {word!r}")):
        Tokenizer(["sum"], ["return", word])


def test_make_env_passes_the_limit_on() -> None:
    assert make_env(EnvConfig(max_tokens=33))(SUM_TWO, TOK).max_tokens == 33
    assert make_env(EnvConfig())(SUM_TWO, TOK).max_tokens == 256


# Every program that the environment can reach by edits stays inside the sandbox's promises.
@settings(max_examples=150)
@example(SUM_TWO, [("-", "\n"), ("\n", "(")])
@given(
    st.sampled_from(TASKS),
    st.lists(st.tuples(*[st.sampled_from(sorted(TOK.program_tokens))] * 2), min_size=1, max_size=6),
)
def test_edits_never_raise(task: gym.Task, edits: list[tuple[str, str]]) -> None:
    env = BugFixEnv(task, TOK)
    for old, new in edits:
        for token in TOK.encode(["EDIT", old, new]):
            env.step(token)
    for token in TOK.encode(["LOOK", "TEST", "SUBMIT"]):
        if not env.done:
            env.step(token)
    assert env.done and env.reward in (0.0, 1.0)
