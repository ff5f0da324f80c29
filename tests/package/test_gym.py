"""The gym: its tasks, hostile programs, the rules of an episode, and the scripts that play it."""

import builtins
import dataclasses
import json
import random
import re
import signal
import subprocess
import sys
import threading
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl import gym
from agentrl.course.gym import TABLES, Demonstrator, play, table_score
from agentrl.gym import BugFixEnv, Task, Tokenizer, build_tokenizer, make_tasks, run_tests

TASKS, TRAIN, HELDOUT = map(make_tasks, ("all", "train", "heldout"))
TOK = build_tokenizer(TASKS)
WORDS = sorted(TOK.program_tokens)
SUM_TWO = Task(  # a task of our own, so that the catalogue may change
    name="own/sum_two",
    split="train",
    goal=("sum", "two"),
    params=("a", "b"),
    program=("return", "a", "-", "b"),
    fix=("-", "+"),
    visible=(((3, 0), 3), ((5, 1), 6), ((-2, -6), -8)),
    grading=(((2, 3), 5), ((0, 7), 7)),
)
some_task = st.sampled_from(TASKS)
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def own(**fields):
    return dataclasses.replace(SUM_TWO, **fields)


def other_repair(task):
    (other,) = {*gym.REPAIRS[task.fix[0]]} - {task.fix[1]}
    return other


def replaced(task, new):
    """The source of the task's program with `new` for the wrong token."""
    return gym.source_of(task.params, (new if t == task.fix[0] else t for t in task.program))


def plain(source, args):
    """Return what plain Python returns, a list as a tuple; None if it raises."""
    scope = {}
    exec(source, scope)
    try:
        out = scope["f"](*(list(a) if isinstance(a, tuple) else a for a in args))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None
    return tuple(out) if isinstance(out, list) else out


def say(env, text):
    """Take the tokens of a text; return the answer to each."""
    return [env.tok.decode(env.step(token)[0]) for token in env.tok.encode(text.split())]


def columns(table):
    """The entries of a table, set apart by two spaces or a new line."""
    return re.split(r"\n|  +", table.strip("\n"))


# The tasks ------------------------------------------------------------------------------------


def test_the_splits_share_faults_and_no_program():
    assert len({t.name for t in TASKS}) == len(TASKS) == len(TRAIN) + len(HELDOUT) >= 30
    assert {t.split for t in TRAIN} == {"train"} and {t.split for t in HELDOUT} == {"heldout"}
    faults = {(wrong, right) for wrong, pair in gym.REPAIRS.items() for right in pair}
    assert {t.fix for t in TRAIN} == {t.fix for t in HELDOUT} == faults
    assert not {t.program for t in TRAIN} & {t.program for t in HELDOUT}
    repaired = [{replaced(t, t.fix[1]) for t in split} for split in (TRAIN, HELDOUT)]
    assert not repaired[0] & repaired[1]
    make_tasks().clear()
    assert make_tasks() == TASKS, "a list of tasks is the caller's own"


@each_task
def test_a_task_is_broken_as_given_and_repaired_by_one_of_two_repairs(task):
    wrong, right = task.fix
    assert task.program.count(wrong) == 1, "the wrong token can be named"
    assert task.visible and task.grading and not {*task.visible} & {*task.grading}
    assert task.goal[0] == gym.GOALS.get(right, "repair")
    for args, expected in task.visible + task.grading:
        assert plain(replaced(task, right), args) == expected
    outcomes = {wrong: ("fail", 0.0), right: ("ok", 1.0)}
    # Where the goal decides, the visible tests do not.
    outcomes[other_repair(task)] = ("ok" if right in gym.GOALS else "fail", 0.0)
    for token, outcome in outcomes.items():
        env = gym.make_env(gym.EnvConfig())(task, TOK)
        say(env, "" if token == wrong else f"EDIT {wrong} {token}")
        answer = say(env, "TEST SUBMIT")[0][0]
        assert (answer, env.reward, env.done) == (*outcome, True), token


def test_either_the_goal_tells_two_tasks_apart_or_the_visible_tests_do():
    twins = {(t.program, t.fix[1]): t for t in TASKS}
    assert len(twins) == len(TASKS)
    for task in TASKS:
        twin, told = twins[task.program, other_repair(task)], task.fix[1] in gym.GOALS
        assert task.split == twin.split and task.grading != twin.grading
        assert (task.goal != twin.goal) == (task.visible == twin.visible) == told


# Hostile programs -----------------------------------------------------------------------------
# Each would return its argument, and so pass IDENTITY, if it were let go; or it shows by how it
# fails that it reached what it should not.

IDENTITY = (((4,), 4), (((3, 1, 2),), (3, 1, 2)))

# Values that nobody may compute; the last ones are builtins, reached by their names.
VALUES = r"""
sum(1 for a in range(99) for b in range(99) for c in range(99))
[sum(a for b in range(99)) for a in range(99)]  0 in (1 for a in range(99) for b in range(99))
sum(range(10 ** 18))  sorted(range(10 ** 18))  any(a < 0 for a in range(10 ** 18))
[0] * 10 ** 10  10 ** 10 * [0]  (0, 1) * 10 ** 10  sum(([0] * 99 for a in range(99)), [])
sum((sum(([0] * 99 for a in range(9)), []) for b in range(40)), [])  [0 for n[0] in range(3)]
9 ** 9 ** 9 ** 9  2 ** -1  1 << 10 ** 10  1 % 0  [1][5]  [1] + 1  max(())  1(2)  n is 4  n is n
__import__  __builtins__  __name__  __debug__  _tick  _binary  ＿＿builtins＿＿  𝓮𝓿𝓪𝓵  n.__class__
n.sort()  ().__class__.__base__.__subclasses__()  [1 for _bounded in range(3)]
(a for a in range(2)).gi_frame.f_back.f_globals  lambda: n  [*range(3)]  sorted(range(3), key=abs)
max(1, 2, **n)  max(1, 2)(3)  n[0](1)  'a'  'a' * 10 ** 10  '%1000000000d' % 1  b'a'  '\d'  f'{n}'
f'{max(1, 2)!r:>1000000000}'  1.5  1e999  1j  None  ...  1 / 2  1 @ 2  1 | 2  ~1  {1: 2}  {1, 2}
{a: a for a in range(3)}  {a for a in range(3)}  [a async for a in n]
open  eval  exec  compile  getattr  setattr  type  object  vars  globals  locals  input  id  iter
next  map  filter  zip  list  tuple  dict  set  str  bytes  int  bool  print  exit  breakpoint
memoryview  super  hash  pow  divmod  isinstance  Exception
"""

# Bodies, first those that take for ever, memory or the stack, then those that use what is refused,
# then those that write to their input, return another type or fail. `\n` ends a line.
BODIES = r"""
while True: pass\nreturn n  i = 0\nwhile i > -1: i = i + 1\nreturn n  while sum(range(99)): pass
while 1: continue\nelse: n = n\nreturn n  for a in range(1, 10 ** 18): pass\nreturn n
for a in range(100):\n for b in range(100): pass\nreturn n  for a in range(10000000): pass\nreturn n
x = any(0 for a in range(99) for b in range(99) if a < 0)\nreturn n  x = 1\nx **= 10 ** 10\nreturn n
g = (a for a in range(99))\nfor i in range(99): g = (b for b in g)\nx = sum(g)\nreturn n
g = (a for a in range(99)); g = (b for a in range(99) for b in g); x = sum(1 for c in g); return n
g = (0 for a in range(9)); x = 1 in g\nwhile 1: g = (a for a in g)\nreturn n  pass  return (n
x = [1]\nwhile 1: x = x + x\nreturn n  x = [1]\nfor i in range(60): x = [x, x]\nreturn n
x = [1]\nfor i in range(60): x = [b for a in (0, 1) for b in x]\nreturn n  g = f\nreturn g(n)
x = 2\nwhile 1: x = x ** 64\nreturn n  x = 3\nwhile 1: x = x * x  x = 1\nwhile 1: x = x + x
return f(n)  any = f\nx = [a for a, f in ()]\nreturn any(n) if any(n) else n  return n == n
abs = f\nx = [1 for f in range(0)]\nreturn abs(n - 1) + abs(n - 1) if n > -40 else n  return max
abs = f\nx = (1 for f in range(0))\nreturn n if n == n and not abs(n) == abs(n) else abs(n)
abs = f\nx = [1 for 𝒇 in range(0)]\nreturn n  import os\nreturn n  from os import path\nreturn n
__import__(0)\nreturn n  n.append(1)\nreturn n  for n.x in range(2): pass\nreturn n  return f
print(n)\nreturn n  return eval(n)  exit()\nreturn n  _tick = max\nwhile 1: pass  f = n\nreturn f
_binary = 1\nreturn n  __builtins__ = 1\nreturn n  ＿tick = 1\nreturn n
for f in range(3): pass\nreturn n  return (lambda x: x)(n)  class A: pass\nreturn n  yield n
try: x = 1\nexcept: x = 2\nreturn n  while 1:\n try:\n\twhile 1: pass\n except: pass
try: pass\nexcept* ValueError: pass\nreturn n  return (x := n)  x: int = n\nreturn x
return max(*n)  a, *b = 1, 2, 3\nreturn n  '''says what it does'''\nreturn n  global n\nreturn n
global x\nx = 1\nreturn n  nonlocal x\nreturn n  x = 1\ndel x\nreturn n  del n[0]\nreturn n
with n: pass\nreturn n  assert 1\nreturn n  raise ValueError\nreturn n  raise KeyboardInterrupt
yield from n  await n\nreturn n  match n:\n case x: return x  x = 1\nx += 1\nreturn n  n\nreturn n
type X = int\nreturn n  def g(): pass\nreturn n  n[0] = 9\nreturn n  n[:] = [1]\nreturn n
raise SystemExit  for n[0] in range(3): pass\nreturn n  (n[0], x) = 1, 2\nreturn n
class A:\n def __eq__(self, x): return True\nreturn A()  return (x for x in n)  return (3, 1, 2)
n += [1]\nreturn n  return [[3, 1, 2]]  return [n == n, n == n, n == n]  return 0x1for x in n
a, b = 1, 2, 3\nreturn n  x = y\ny = 1\nreturn n  [x] = [1]\nreturn n  return range(4)
"""


# Whole sources: anything but one plain function f.
SOURCES = r"""
n  f(4)  # def f(n): return n  f = lambda n: n  x = 1; f = 1  def f(n) return n  class f: n = 1
async def f(n): return n  import os\ndef f(n): return n  class A: pass\ndef f(n): return n
@max\ndef f(n): return n  def f(n): return n\ndef f(n): return n  def g(n): return n
def f(n): return g(n)\ndef g(n): return n  def f(): return 4  def f(n, m): return n
def f(n, *, x=1): return n  def f(n, /): return n  def f(n, **x): return n  def f(*n): return n[0]
def f(n: int): return n  def f(n: 1): return n  def f(n) -> max: return n  def f[T](n): return n
def f(f): return f  def f(_tick): return _tick  def f(__class__): return __class__
def f(n, g=(x for x in range(9))): return n if any(g) else n  def f(n, x=1): return n
"""


def body(text):
    return "def f(n):\n" + "\n".join("    " + line for line in text.split("\n"))


HOSTILE = [
    *(body(f"x = {value}\nreturn n") for value in columns(VALUES)),
    *(body(text.replace(r"\n", "\n").replace(r"\t", "  ")) for text in columns(BODIES)),
    *(text.replace(r"\n", "\n") for text in columns(SOURCES)),
    body("while 1:\n    " + "; ".join(["x=sorted(range(99))"] * 24) + "\nreturn n"),
    # source text that is deep or long
    *(body(f"x = {x}\nreturn n") for x in ("[" * 280 + "]" * 280, "-" * 550 + "1", "9" * 5000)),
    *(body(f"x = {x}\nreturn n") for x in (f"0x{'f' * 500} ** 64", "(1, " * 140 + ")" * 140)),
    body("return 1" + "+1" * 270),
    *(body(f"return {x}") for x in ("(" * 280 + "n" + ")" * 280, "n<" * 270 + "n")),
    "def f(n):\n" + "".join(" " * i + "if 1:\n" for i in range(1, 30)) + " " * 30 + "return g",
    *(body("return n" + " " * 100_000), body("return n  #" + "x" * gym.MAX_SOURCE)),
    body(f"{'x' * gym.MAX_SOURCE} = n\nreturn {'x' * gym.MAX_SOURCE}"),
    # text that Python's own parser trips over
    *("", body("return n") + "\0", "def f(n):\n    return\0 n", body("return n  # \ud800")),
    *(body("\udc80 = n\nreturn n"), body("return \ufeff n"), body("return n\\")),
    "# -*- coding: utf-7 -*-\n" + body("+AC0-return n"),
]


@pytest.fixture(autouse=True)
def alarm():
    """Interrupts a test that hangs, by an error that is no Exception: a scorer contains those."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("still running"))
    signal.alarm(180)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def state_of_process():
    return [
        *(dict(vars(builtins)), set(sys.modules), dict(gym.BUILTINS), dict(vars(gym))),
        *(sys.getrecursionlimit(), sys.get_int_max_str_digits(), list(warnings.filters)),
        *(sys.gettrace(), sys.getprofile(), sys.displayhook, sys.excepthook),
        *(sys.stdout, sys.stderr, {t.ident for t in threading.enumerate()}),
    ]


@pytest.mark.parametrize("source", HOSTILE, ids=lambda source: ascii(source[10:60]))
def test_a_hostile_program_fails_and_leaves_no_trace(source, capfd):
    inputs = [4, [3, 1, 2]]
    tests = [((value,), expected) for value, (_, expected) in zip(inputs, IDENTITY, strict=True)]
    before = state_of_process()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdicts = [run_tests(source, tests), run_tests(source, tests)]
    assert verdicts == [[False, False]] * 2
    assert inputs == [4, [3, 1, 2]], "the inputs are as they were"
    assert state_of_process() == before
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
bad = [text for text in json.load(sys.stdin) if any(run_tests(text, tests))]
print(json.dumps([bad, peak() - before]))
"""


def test_all_of_them_in_a_process_of_their_own_with_little_memory():
    assert len({*HOSTILE}) == len(HOSTILE) >= 200
    command, text = [sys.executable, "-W", "error", "-c", SUBPROCESS], json.dumps(HOSTILE)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    passed, grown_mb = json.loads(done.stdout)
    assert passed == [] and grown_mb < 50


def test_the_step_budget_is_per_test_and_starts_anew():
    def passes(k, tests=IDENTITY):
        return all(run_tests(body(f"i = 0\nwhile i < {k}: i = i + 1\nreturn n"), tests))

    # The budget may count other things beside passes, so the boundary is found, then used.
    most = max(k for k in range(gym.MAX_STEPS + 1) if passes(k, IDENTITY[:1]))
    assert most > 0 and passes(most, IDENTITY * 5)
    assert not passes(gym.MAX_STEPS + 1) and passes(most), "also after one that used it up"


def test_a_verdict_does_not_depend_on_what_ran_before():
    half = body("x = n - 4\nreturn [3, 1, 2][x] + 1")
    tests = (((4,), 4), ((9,), 0), ((4,), 4))
    assert run_tests(half, tests) == run_tests(half, tests[::-1]) == [True, False, True]
    assert not any(any(run_tests(source, IDENTITY)) for source in HOSTILE)
    assert run_tests(half, tests) == [True, False, True]
    assert run_tests(half, ()) == run_tests("garbage(", ()) == []


EQUAL = """
n == n -> True  [1, 0] -> (1, 0)  [n == n] -> (True,)  [] -> ()  [3, 1, 2][1:] -> (1, 2)
- 4 % 3 -> 2  7 // 2 -> 3  2 ** 10 -> 1024  2 ** 63 -> 2 ** 63  [0] * 100 -> (0,) * 100
[0] * -1 -> ()  [x for x in range(100)] -> (*range(100),)
"""
UNEQUAL = """
n == n -> 1  1 -> True  [1, 0] -> (True, False)  [n == n] -> (1,)  () -> ()  range(0) -> ()
0 -> ()  2 ** 64 -> 2 ** 64  [0] * 101 -> (0,) * 101  [x for x in range(101)] -> (*range(101),)
"""


@pytest.mark.parametrize(("table", "same"), [(EQUAL, True), (UNEQUAL, False)])
def test_results_are_compared_with_their_types(table, same):
    for entry in columns(table):
        value, expected = entry.split(" -> ")
        assert run_tests(body(f"return {value}"), [((4,), eval(expected))]) == [same], entry


SCRAPS = columns(r"""
while  def  f  lambda  import  ,  .  '  #  \  _tick  __builtins__  range  yield  g  pass  True
None  not  *n  @  ;  class  (  )  =  :  **  and  else  0  -  LOOK  EDIT  done  fail  t1
""")
SCRAPS += [*WORDS, "\n", "    ", "\0"]


@settings(max_examples=600)
@given(
    st.text(max_size=80) | st.lists(st.sampled_from(SCRAPS), max_size=40).map(" ".join),
    st.sampled_from(["def f(n):\n    return ", "def f(n):\n    ", ""]),
)
def test_random_text_never_raises(text, head):
    verdicts = run_tests(head + text, IDENTITY)
    assert len(verdicts) == 2 and all(type(v) is bool for v in verdicts)


@settings(max_examples=400)
@given(some_task, st.data())
def test_the_sandbox_equals_plain_python(task, data):
    numbers, source = st.integers(-20, 20), replaced(task, task.fix[1])
    lists = st.lists(numbers, max_size=6).map(tuple)
    args = tuple(data.draw(lists if p == "xs" else numbers) for p in task.params)
    expected = plain(source, args)
    assert run_tests(source, [(args, expected)]) == [expected is not None]


@settings(max_examples=400)
@given(some_task, st.data())
def test_an_edited_program_passes_only_what_plain_python_passes(task, data):
    program = list(task.program)
    for _ in range(data.draw(st.integers(1, 3))):
        program[data.draw(st.integers(0, len(program) - 1))] = data.draw(st.sampled_from(WORDS))
    source, tests = gym.source_of(task.params, program), task.visible + task.grading
    for (args, expected), passed in zip(tests, run_tests(source, tests), strict=True):
        assert not passed or plain(source, args) == expected


# Words and ids --------------------------------------------------------------------------------


def test_the_vocabulary_is_shared_and_goal_words_are_not_program_tokens():
    assert TOK.pad_id == 0 and TOK.tokens[0] == "<pad>"
    assert len(TOK) == len(TOK.tokens) == len({*TOK.tokens})
    assert TOK.encode(iter(TOK.decode(iter(range(len(TOK)))))) == [*range(len(TOK))]
    assert build_tokenizer(reversed(TASKS)).tokens == TOK.tokens, "the order of tasks is no matter"
    for task in TASKS:
        assert {*task.program, *task.fix} <= TOK.program_tokens
        assert not {f"'{word}" for word in task.goal} & TOK.program_tokens


@pytest.mark.parametrize(
    ("call", "args", "named"),
    [
        *((make_tasks, (split,), repr(split)) for split in ("", "Train", "test", None, 1)),
        (TOK.encode, (["return", "perl"],), "words[1] = 'perl'"),
        *((TOK.decode, ([0, 1, bad],), f"ids[2] = {bad}") for bad in (-1, len(TOK), 10**9)),
        *((Tokenizer, (["sum"], [w]), repr(w)) for w in ("LOOK", "done", "t1", "<end>", "'sum")),
        *((BugFixEnv, (SUM_TWO, TOK, k), f"max_tokens = {k}") for k in (-1, 0, 1, 4)),
        (BugFixEnv, (SUM_TWO, Tokenizer(["other"], ["return"])), "words[1]"),
        (BugFixEnv, (own(visible=SUM_TWO.visible * 2), TOK), "'t4'"),
        (BugFixEnv, (own(program=("return", "elsewhere")), TOK), "words[1] = 'elsewhere'"),
    ],
)
def test_bad_input_is_named(call, args, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        call(*args)


# Episodes -------------------------------------------------------------------------------------


def test_an_episode_that_solves_its_task():
    env = BugFixEnv(SUM_TWO, TOK)
    assert TOK.decode(env.reset()) == ["<bos>", "'sum", "'two", "<end>"]
    assert say(env, "LOOK") == [["return", "a", "-", "b", "<end>"]]
    assert say(env, "TEST") == [["fail", "t2", "t3", "<end>"]], "3 - 0 is 3 + 0"
    assert say(env, "EDIT - +") == [[], [], ["done", "<end>"]]
    assert say(env, "TEST") == [["ok", "<end>"]]
    assert (env.done, env.reward) == (False, 0.0), "only a submission is rewarded"
    assert say(env, "SUBMIT") == [[]]
    assert (env.done, env.reward) == (True, 1.0)
    counts = {"LOOK": 1, "TEST": 2, "EDIT": 1, "SUBMIT": 1, "errors": 0}
    assert env.info == {"task": SUM_TWO, "truncated": False, **counts}
    with pytest.raises(RuntimeError, match="over"):
        env.step(0)


PASS, FAIL = (((1, 2), -1),), (((1, 2), 99),)
SUITES = [PASS, FAIL, PASS + FAIL, FAIL + PASS]


@pytest.mark.parametrize("visible", SUITES)
@pytest.mark.parametrize("grading", SUITES)
def test_the_visible_tests_answer_and_all_grading_tests_pay(visible, grading):
    env = BugFixEnv(own(visible=visible, grading=grading), TOK)
    failing = [f"t{i}" for i, test in enumerate(visible, 1) if test in FAIL]
    assert env.run(visible + grading) == [test in PASS for test in visible + grading]
    assert env.test() == (["fail", *failing] if failing else ["ok"])
    assert say(env, "TEST SUBMIT") == [[*env.test(), "<end>"], []]
    assert env.reward == env.grade() == float(grading == PASS)


def test_an_environment_with_another_scorer_and_another_answer():
    class Weak(BugFixEnv):
        def test(self):
            return []

        def grade(self):
            return float(any(self.run(self.task.visible)))

    env = Weak(SUM_TWO, TOK)
    assert say(env, "TEST SUBMIT") == [["<end>"], []]
    assert env.reward == 1.0


MALFORMED = """
<pad>  <bos>  <end>  ok  t1  error  return  'sum  +  EDIT LOOK TEST  EDIT - <end>  EDIT - 'sum
EDIT * +  EDIT - t1  EDIT EDIT EDIT  EDIT SUBMIT SUBMIT  EDIT <pad> <pad>  EDIT 'sum +  EDIT b a
"""
ACTIONS = [TOK.encode(text.split(" ")) for text in columns(MALFORMED)]
for unknown in (-1, -len(TOK), len(TOK), len(TOK) + 1, 10**12):
    ACTIONS += [[unknown], [*TOK.encode(["EDIT", "-"]), unknown]]


@pytest.mark.parametrize("action", ACTIONS)
def test_a_malformed_action_costs_its_tokens_and_gets_an_error(action):
    env = BugFixEnv(own(program=("return", "a", "-", "b", "+", "b", "-", "0")), TOK)
    answers = [env.step(token) for token in action]
    assert answers == [([], False)] * (len(action) - 1) + [(TOK.encode(["error", "<end>"]), False)]
    assert env.program == list(env.task.program)
    assert (env.reward, env.info["errors"]) == (0.0, 1)
    assert say(env, "EDIT 0 1")[-1] == ["done", "<end>"], "the next action counts as ever"


def test_reset_starts_again_and_gives_a_list_of_its_own():
    env = BugFixEnv(SUM_TWO, TOK)
    first = env.reset()
    say(env, "LOOK EDIT - + SUBMIT")
    env.reset().clear()
    assert env.reset() == first
    assert (env.done, env.reward, env.program) == (False, 0.0, ["return", "a", "-", "b"])
    assert {*env.info.values()} == {SUM_TWO, 0}
    say(env, "EDIT -")
    env.reset()
    assert say(env, "LOOK")[0][-1] == "<end>", "half an action is forgotten"
    say(env, "SUBMIT")
    assert env.reward == 0.0, "the repair of the first episode is gone"


tokens = st.sampled_from(TOK.encode(gym.ACTIONS[:3])) | st.integers(-2, len(TOK) + 1)


@settings(max_examples=150)
@given(some_task, st.integers(6, 60), st.lists(tokens, min_size=60, max_size=60))
def test_an_episode_ends_at_exactly_max_tokens(task, max_tokens, tokens):
    env = gym.make_env(gym.EnvConfig(max_tokens=max_tokens))(task, TOK)
    used = len(env.reset())
    for token in tokens:
        answer, done = env.step(token)
        used += 1 + len(answer)
        assert done == env.done and used <= max_tokens
        assert all(0 <= i < len(TOK) for i in answer)
        if done:
            break
        assert used < max_tokens
    submitted = env.info["SUBMIT"] == 1
    assert env.done and env.info["truncated"] is not submitted
    assert submitted or (used, env.reward) == (max_tokens, 0.0)


@pytest.mark.parametrize(("max_tokens", "text"), [(7, "LOOK"), (9, "EDIT - +"), (5, "SUBMIT")])
def test_where_an_episode_is_cut(max_tokens, text):
    env = BugFixEnv(SUM_TWO, TOK, max_tokens)  # the prompt has 4 tokens
    last = {"LOOK": ["return", "a"], "EDIT - +": ["done", "<end>"], "SUBMIT": []}[text]
    assert say(env, text)[-1] == last, "the answer is cut where the episode is"
    assert (env.done, env.reward, env.info["truncated"]) == (True, 0.0, text != "SUBMIT")
    env = BugFixEnv(SUM_TWO, TOK, 10)
    say(env, "EDIT - + SUBMIT")
    assert (env.reward, env.info["truncated"]) == (1.0, False), "the last token counts"
    assert BugFixEnv(SUM_TWO, TOK).max_tokens == gym.EnvConfig().max_tokens == 256


# Every program that the environment can reach by edits stays inside the sandbox's promises.
edits = st.lists(st.tuples(*[st.sampled_from(WORDS)] * 2), min_size=1, max_size=6)


@settings(max_examples=150)
@example(SUM_TWO, [("-", "\n"), ("\n", "(")])
@given(some_task, edits)
def test_edits_never_raise(task, edits):
    env = BugFixEnv(task, TOK)
    play(env, [*(("EDIT", *edit) for edit in edits), ("LOOK",), ("TEST",), ("SUBMIT",)])
    assert env.done and env.reward in (0.0, 1.0)


def test_a_power_tower_in_four_legal_edits_is_refused():
    task = next(t for t in TRAIN if t.program[:4] == ("return", "2", "*", "("))
    env = BugFixEnv(task, TOK)
    say(env, "EDIT * ** EDIT // ** EDIT a 10 EDIT b 10")
    assert " ".join(env.program) == "return 2 ** ( 10 ** 10 )"
    assert (env.info["errors"], env.test()[0], env.grade()) == (0, "fail", 0.0)


# Tables and scripts ---------------------------------------------------------------------------


def test_no_table_solves_the_held_out_tasks():
    assert max(table_score(key, TRAIN, HELDOUT) for key in TABLES.values()) <= 0.67
    assert table_score(lambda task: task.name, TRAIN, TRAIN) == 1.0, "known by heart"
    assert table_score(lambda task: task.name, TRAIN, HELDOUT) == 0.0, "an unknown entry is wrong"
    common, rare = own(fix=("-", "+")), own(fix=("-", "*"))
    train, tasks = [rare, common, common], [rare, rare, rare, common]
    assert table_score(lambda task: task.fix[0], train, tasks) == 0.25


def test_play_stops_at_the_end_and_says_whose_a_token_is():
    ids, mine = play(BugFixEnv(SUM_TWO, TOK, 12), [("LOOK",), ("EDIT", "-", "+"), ("TEST",)])
    assert " ".join(TOK.decode(ids)) == "<bos> 'sum 'two <end> LOOK return a - b <end> EDIT -"
    assert mine == [word in ("LOOK", "EDIT") for word in TOK.decode(ids)[:-1]] + [True]


def run_script(task, seed=0, **chances):
    """Actions and reward of a script that is careful but for the given chances."""
    script = Demonstrator(**{"read": 1, "slip": 0, "test": 1, "retry": 1, "lost": 0, **chances})
    env, taken = BugFixEnv(task, TOK), []
    play(env, (taken.append(action) or action for action in script.act(env, random.Random(seed))))
    return taken, env.reward


@settings(max_examples=100)
@given(some_task, st.integers(0, 99), st.tuples(*[st.floats(0, 1)] * 5))
def test_a_script_plays_legal_actions_and_the_same_ones_again(task, seed, chances):
    episodes = []
    for env in (BugFixEnv(task, TOK), BugFixEnv(task, TOK)):
        episodes.append(play(env, Demonstrator(*chances).act(env, random.Random(seed))))
        assert env.done and (env.info["SUBMIT"] == 1) is not env.info["truncated"]
    assert episodes[0] == episodes[1]


@each_task
def test_what_each_chance_of_the_script_does(task):
    (wrong, right), other = task.fix, other_repair(task)
    look, edit, test, submit = ("LOOK",), ("EDIT", wrong, right), ("TEST",), ("SUBMIT",)
    straight = [look, edit, test, submit]
    again = [look, ("EDIT", wrong, other), test, ("EDIT", other, right), test, submit]
    careful = [run_script(task, seed) for seed in range(8)]
    expected = [(straight, 1.0)] if right in gym.GOALS else [(straight, 1.0), (again, 1.0)]
    assert all(one in careful for one in expected) and all(one in expected for one in careful)

    guesses = [run_script(task, seed, read=0, test=0) for seed in range(16)]
    assert all(actions in ([look, edit, submit], [*again[:2], submit]) for actions, _ in guesses)
    assert {reward for _, reward in guesses} == {0.0, 1.0}
    kept = [run_script(task, seed, read=0, retry=0)[0] for seed in range(8)]
    assert all(actions in (straight, [*again[:3], submit]) for actions in kept)
    slips = {run_script(task, seed, slip=1, test=0)[0][1][2] for seed in range(16)}
    assert slips - {right, other}, "some repair of another token"
    lost = [run_script(task, seed, lost=1, test=0)[0] for seed in range(8)]
    assert all(actions[0] == look and actions[-1] == submit for actions in lost)
    assert max(map(len, lost)) > 8
