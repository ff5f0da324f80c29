# Generated from chapters/01-gym.ipynb by tools/export.py. Do not edit: edit the notebook.
"""A gym for fixing bugs.

What does one episode of a tool-using agent look like to a trainer?
"""

import ast
import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl import check

__all__ = [
    "ACTIONS",
    "BUILTINS",
    "GOALS",
    "MAX_BITS",
    "MAX_ITEMS",
    "MAX_SOURCE",
    "MAX_STEPS",
    "REPAIRS",
    "BugFixEnv",
    "EnvConfig",
    "Rejected",
    "Task",
    "Tokenizer",
    "build_tokenizer",
    "make_env",
    "make_tasks",
    "run_tests",
    "source_of",
]


@dataclass(frozen=True)
class Task:
    """One broken function, the words that say what it should do, and its tests.

    Attributes:
        name: unique name.
        split: 'train' or 'heldout'. The splits share faults, never programs.
        goal: the words of the prompt.
        params: the parameter names of the function.
        program: the tokens of the faulty body; the token '\\n' ends a line.
        fix: (wrong token, right token); this one replacement repairs the body.
        visible: the tests that `TEST` runs: pairs (arguments, expected value). A tuple among them
            stands for a list.
        grading: other tests, which decide the reward. The agent never sees a verdict of theirs.
    """

    name: str
    split: str
    goal: tuple[str, ...]
    params: tuple[str, ...]
    program: tuple[str, ...]
    fix: tuple[str, str]
    visible: tuple[tuple[tuple[Any, ...], Any], ...]
    grading: tuple[tuple[tuple[Any, ...], Any], ...]


def source_of(params: Sequence[str], program: Iterable[str]) -> str:
    """Write the tokens of a body as the source text of a function `f`."""
    lines = " ".join(program).split("\n")
    return "\n    ".join([f"def f({', '.join(params)}):", *map(str.strip, lines)])


@dataclass(frozen=True)
class EnvConfig:
    """Limits of an episode: `max_tokens` counts prompt, actions and observations together."""

    max_tokens: int = 256


ACTIONS = ("LOOK", "TEST", "EDIT", "SUBMIT")


class BugFixEnv:
    """One episode of repairing one program, a token at a time.

    Attributes:
        done: whether the episode is over.
        reward: 1.0 after a submission that passes every grading test, else 0.0.
        info: the task, the count of each action and of errors, and whether the episode was cut.

    Raises:
        ValueError: if the prompt alone fills `max_tokens`, or the vocabulary lacks a word.
    """

    def __init__(self, task: Task, tok: "Tokenizer", max_tokens: int = 256) -> None:
        self.task, self.tok, self.max_tokens = task, tok, max_tokens
        prompt = ["<bos>", *(f"'{word}" for word in task.goal), "<end>"]
        if max_tokens <= len(prompt):
            raise ValueError(f"max_tokens = {max_tokens} must exceed the prompt's {len(prompt)}")
        self._prompt = tok.encode(prompt)
        # All that a tool may answer, so that no step fails for want of a word.
        tok.encode([*task.program, *(f"t{i}" for i in range(1, len(task.visible) + 1))])
        self.reset()

    def reset(self) -> list[int]:
        """Start again and return the token ids of the prompt."""
        self.program = list(self.task.program)
        self.done, self.reward = False, 0.0
        self.info: dict[str, Any] = {"task": self.task, "truncated": False, "errors": 0}
        self.info |= dict.fromkeys(ACTIONS, 0)
        self._action: list[str] = []
        self._used = len(self._prompt)
        return list(self._prompt)

    def step(self, token: int) -> tuple[list[int], bool]:
        """Take one token of the agent; return the observation's token ids and whether it is over.

        Raises:
            RuntimeError: if the episode is over already.
        """
        if self.done:
            raise RuntimeError("the episode is over; call reset() to start another")
        known = 0 <= token < len(self.tok)
        self._action.append(self.tok.tokens[token] if known else "<unknown>")
        self._used += 1
        answer: list[int] = []
        if self._action[0] != "EDIT" or len(self._action) == 3:
            words, self._action = self._act(*self._action), []
            answer = self.tok.encode(words)[: self.max_tokens - self._used]
        self._used += len(answer)
        if self._used >= self.max_tokens and not self.done:
            self.done = self.info["truncated"] = True
        return answer, self.done

    def run(self, tests: Sequence[tuple[tuple[Any, ...], Any]]) -> list[bool]:
        """Run the program as it stands on tests: one verdict each."""
        return run_tests(source_of(self.task.params, self.program), tests)

    def test(self) -> list[str]:
        """Return the words that answer `TEST`."""
        failing = [f"t{i}" for i, ok in enumerate(self.run(self.task.visible), 1) if not ok]
        return ["fail", *failing] if failing else ["ok"]

    def grade(self) -> float:
        """Return the reward of a submission."""
        return float(all(self.run(self.task.grading)))

    def _act(self, kind: str, old: str = "", new: str = "") -> list[str]:
        """Carry out one complete action and return the words of its answer."""
        if kind in ACTIONS:
            self.info[kind] += 1
        if kind == "LOOK":
            return [*self.program, "<end>"]
        if kind == "TEST":
            return [*self.test(), "<end>"]
        if kind == "SUBMIT":
            self.done, self.reward = True, self.grade()
            return []
        if kind == "EDIT" and self.program.count(old) == 1 and new in self.tok.program_tokens:
            self.program[self.program.index(old)] = new
            return ["done", "<end>"]
        self.info["errors"] += 1
        return ["error", "<end>"]


def make_env(cfg: EnvConfig) -> Callable[[Task, "Tokenizer"], BugFixEnv]:
    """Return a factory of environments that hold to the limits of `cfg`."""
    return functools.partial(BugFixEnv, max_tokens=cfg.max_tokens)


REPAIRS = {
    "//": ("+", "-"),
    "==": ("<", ">"),
    "len": ("min", "max"),
    "**": ("*", "%"),
    "!=": ("<=", ">="),
    "7": ("0", "1"),
    "8": ("2", "3"),
    "sum": ("any", "all"),
}
GOALS = {"+": "sum", "-": "difference", "<": "below", ">": "above"}
GOALS |= {"min": "smallest", "max": "largest"}


# wrong token, split, then bodies with ? in its place: each is a task for either repair
_CATALOGUE = """
// train   return a ? b | s = a ? b ; return s | return 2 * ( a ? b ) | return xs [ 0 ] ? xs [ 1 ]
// heldout return abs ( a ? b ) | m = n ? 2 ; return m * m
== train   return a ? b | return n ? 0 | return [ x for x in xs if x ? 0 ]
== train   if a ? b : return a ; return 0
== heldout return 2 * a ? b | return xs [ 0 ] ? xs [ 1 ]
len train   return ? ( xs ) | s = ? ( xs ) ; return s | return 2 * ? ( xs )
len train   return ? ( x * x for x in xs )
len heldout return [ ? ( xs ) ] | return ? ( x - 1 for x in xs )
** train   return a ? b | return n ? 2 | m = n ? 3 ; return m | return [ x ? 2 for x in xs ]
** train   return ( a ? b ) + 1
** heldout return abs ( a ) ? b | return n ? 10 | s = 0 ; for x in xs : s = s + x ? 3 ; return s
!= train   return a ? b | return n ? 0 | return [ x for x in xs if x ? 1 ]
!= train   if n ? 2 : return n ; return 0 | return sorted ( xs ) ? xs
!= heldout return a ? b + 1 | return 0 ? n | s = 0 ; for x in xs : s = s + ( x ? 2 ) ; return s
7 train   return n + ? | return xs [ ? ] | s = ? ; for x in xs : s = s + x ; return s
7 train   return a * ? + b | return [ x + ? for x in xs ]
7 heldout return n * 2 - ? | return 2 * xs [ ? ] | if a > b : return ? ; return a
8 train   return n * ? | return n % ? == 0 | return [ x * ? for x in xs ] | return a + ? * b
8 train   s = 0 ; for x in xs : s = s + ? ; return s
8 heldout m = n + ? ; return m | return [ x for x in xs if x % ? == 0 ] | return ( a - b ) * ?
sum train   return ? ( x > 0 for x in xs ) | return ? ( x == 0 for x in xs )
sum train   return ? ( x < 3 for x in xs ) | s = ? ( x > 1 for x in xs ) ; return s
sum train   return 1 + ? ( x > 5 for x in xs )
sum heldout return ? ( x % 2 == 0 for x in xs ) | return 1 - ? ( x > 2 for x in xs )
sum heldout return ? ( x + 1 > 0 for x in xs )
"""


class Rejected(Exception):
    """A candidate program left the allow-list or its budget; `run_tests` never lets it escape."""


MAX_SOURCE = 600  # characters
MAX_STEPS = 500  # passes through loops, calls and lists, per test
MAX_ITEMS = 100  # in a list
MAX_BITS = 64  # in an integer

BUILTINS = {f.__name__: f for f in (abs, all, any, len, max, min, range, sorted, sum)}


_STATEMENTS = "FunctionDef arguments arg Return Assign For While If Pass Break Continue"
_EXPRESSIONS = (
    "BinOp UnaryOp BoolOp Compare IfExp Call Name Constant List Tuple Subscript Slice "
    "ListComp GeneratorExp comprehension Load Store"
)
_OPERATORS = "Add Sub Mult FloorDiv Mod Pow USub Not And Or Eq NotEq Lt LtE Gt GtE In NotIn"
_ALLOWED = tuple(
    getattr(ast, name) for name in f"{_STATEMENTS} {_EXPRESSIONS} {_OPERATORS}".split()
)


def _reason_against(node: ast.AST, names: set[str]) -> str | None:
    """Say why a node is outside the allow-list, or return None if it is inside."""
    if not isinstance(node, _ALLOWED):
        return f"{type(node).__name__} is not allowed"
    if isinstance(node, ast.Name) and node.id not in names:
        return f"unknown name {node.id}"
    if isinstance(node, ast.Constant) and type(node.value) not in (int, bool):
        return f"a constant of type {type(node.value).__name__}"
    if isinstance(node, ast.Call):
        plain = isinstance(node.func, ast.Name) and node.func.id in BUILTINS and not node.keywords
        return None if plain else "only plain calls of the allowed builtins"
    if isinstance(getattr(node, "ctx", None), ast.Store):
        return None if isinstance(node, ast.Name | ast.Tuple) else "only names can be assigned"
    return None


def _check(source: str) -> ast.Module:
    """Parse one plain function `f` and raise `Rejected` if it leaves the allow-list."""
    module = ast.parse(source)
    function = module.body[0] if len(module.body) == 1 else None
    if not isinstance(function, ast.FunctionDef) or function.name != "f":
        raise Rejected("not one function named f")
    nodes = list(ast.walk(function))
    params = function.args
    annotated = function.returns or any(p.annotation for p in params.args)
    if (
        annotated
        or params.defaults
        or sum(isinstance(n, ast.arg) for n in nodes) > len(params.args)
    ):
        raise Rejected("only plain parameters")
    if any(isinstance(n, ast.FunctionDef) for n in nodes[1:]) or function.decorator_list:
        raise Rejected("a function inside the function")
    own = {p.arg for p in params.args}
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if any(name.startswith("_") or name == "f" or name in BUILTINS for name in own):
        raise Rejected("a name that hides one of ours")
    for node in nodes:
        if reason := _reason_against(node, own | set(BUILTINS)):
            raise Rejected(reason)
    return module


def _bounded(value: Any) -> Any:
    """Return `value` if it is a small number or a short flat sequence of them, else reject it."""
    if type(value) in (list, tuple, range):
        if len(value) > MAX_ITEMS:
            raise Rejected(f"{len(value)} items exceed {MAX_ITEMS}")
        for item in value:
            if type(item) not in (int, bool):
                raise Rejected(f"an item of type {type(item).__name__}")
            _bounded(item)
    elif type(value) is int and value.bit_length() > MAX_BITS:
        raise Rejected(f"{value.bit_length()} bits exceed {MAX_BITS}")
    return value


_OPERATE = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Pow": operator.pow,
}


def _binary(name: str, left: Any, right: Any) -> Any:
    """Apply a binary operator; what could allocate much is refused before it runs."""
    for sequence, count in ((left, right), (right, left)):
        if (
            name == "Mult"
            and isinstance(sequence, list | tuple)
            and len(sequence) * count > MAX_ITEMS
        ):
            raise Rejected(f"{len(sequence)} * {count} items exceed {MAX_ITEMS}")
    if name == "Pow" and not 0 <= right <= MAX_BITS:
        raise Rejected(f"exponent {right} outside 0..{MAX_BITS}")
    return _bounded(_OPERATE[name](left, right))


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


class _Instrument(ast.NodeTransformer):
    """Put a step counter into each loop and a bound around each new value."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return _call("_binary", ast.Constant(type(node.op).__name__), node.left, node.right)

    def visit_For(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(_call("_tick")))
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        node.ifs.insert(0, _call("_tick"))
        return node

    def visit_Call(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        return (
            node if isinstance(getattr(node, "ctx", None), ast.Store) else _call("_bounded", node)
        )

    visit_While = visit_For
    visit_List = visit_Tuple = visit_ListComp = visit_Call


@functools.lru_cache(maxsize=16_384)
def _compile(source: str) -> tuple[Callable[..., Any], list[int]] | None:
    """Return the guarded function and its step counter, or None for what is refused."""
    counter = [0]

    def tick() -> bool:
        counter[0] += 1
        if counter[0] > MAX_STEPS:
            raise Rejected(f"more than {MAX_STEPS} steps")
        return True

    def bounded(value: Any) -> Any:
        tick()  # what a builtin does inside is work too
        return _bounded(value)

    scope = {**BUILTINS, "_tick": tick, "_bounded": bounded, "_binary": _binary}
    scope["__builtins__"] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a candidate's bad style is not our output
            module = ast.fix_missing_locations(_Instrument().visit(_check(source)))
            exec(compile(module, "<candidate>", "exec"), scope)
    except Exception:  # whatever the parser says of it, it is not a program
        return None
    return scope["f"], counter


def _thaw(value: Any) -> Any:
    """Turn the tuple that stands for a list into a fresh list."""
    return list(value) if isinstance(value, tuple) else value


def _same(value: Any, expected: Any) -> bool:
    """Compare types as well as values, also inside a list."""
    if type(value) is not type(expected) or value != expected:
        return False
    return type(value) is not list or list(map(type, value)) == list(map(type, expected))


def run_tests(source: str, tests: Sequence[tuple[tuple[Any, ...], Any]]) -> list[bool]:
    """Run an untrusted function `f` on every test, inside an allow-list and a step budget.

    Args:
        source: the text of one function `f`.
        tests: pairs (arguments, expected value); a tuple among them stands for a list.

    Returns:
        One verdict per test. A program that is refused, raises or exceeds its budget fails; nothing
        that it does is raised here.
    """
    compiled = _compile(source) if len(source) <= MAX_SOURCE else None
    if compiled is None:
        return [False] * len(tests)
    function, counter = compiled
    verdicts = []
    for args, expected in tests:
        counter[0] = 0
        try:
            verdicts.append(_same(function(*map(_thaw, args)), _thaw(expected)))
        except Exception:  # it fails its own test and nothing else
            verdicts.append(False)
    return verdicts


_INPUTS: dict[tuple[str, ...], tuple[tuple[Any, ...], ...]] = {
    ("a", "b"): (
        *((2, 3), (5, 4), (-4, 2), (6, -1), (3, 3), (-2, -6)),
        *((0, 5), (7, 0), (1, 0), (2, 1), (0, 0), (9, 2)),
    ),
    ("n",): tuple((n,) for n in (4, 7, 0, -3, 12, 1, 2, 3, -1, 9, 10)),
    ("xs",): tuple(
        (xs,)
        for xs in (
            *((3, 1, 2), (-1, 4, -5, 6), (0, 0), (7, 2), (-2, -3, -8), (5, 0, 9, 2), (4, 4)),
            *((2, 0), (1, 2), (0, 3, 0), (6,), (0,), (-2, 5), (1, 1), (2, 7), (-4, -1)),
            *((3, -7), (-3, 8, 1), (9, 0, 4), (6, 8), (7, 9, 1), (8, 0, 9)),
        )
    ),
}
_KINDS = {("a", "b"): "two", ("n",): "number", ("xs",): "list"}


def _outputs(params: tuple[str, ...], program: Iterable[str]) -> list[tuple[type, Any]]:
    """Run a body of the catalogue, not a candidate's: type and value for each input."""
    scope: dict[str, Any] = {}
    exec(source_of(params, program), scope)
    found = []
    for args in _INPUTS[params]:
        try:
            value = scope["f"](*map(_thaw, args))
        except (ArithmeticError, IndexError, TypeError):
            value = None
        found.append((type(value), tuple(value) if isinstance(value, list) else value))
    return found


def _tasks_of(wrong: str, split: str, body: str) -> list[Task]:
    """Make the two tasks of a body, one for each repair of the wrong token."""
    tokens = body.replace(" ; ", " \n ").split(" ")
    params = next(names for names in _INPUTS if {*names} <= {*tokens})
    bodies = {
        token: tuple(token if t == "?" else t for t in tokens) for token in (wrong, *REPAIRS[wrong])
    }
    rows = list(zip(_INPUTS[params], *(_outputs(params, b) for b in bodies.values()), strict=True))
    rows = [row for row in rows if None not in (row[2][1], row[3][1])]
    tasks = []
    for k, right in enumerate(REPAIRS[wrong], 2):
        rows.sort(key=lambda row: row[1] == row[k])  # first where the broken program is wrong
        same = [row for row in rows if row[2] == row[3]]
        apart = [row for row in rows if row[2] != row[3]]
        visible = same[:3] if right in GOALS else apart[:4:2] + same[:1]
        rest = [row for row in apart if row not in visible]
        grading = rest[:3] + rest[3:][-2:]  # the last ones: there the broken program may be right
        grading += [row for row in same if row not in visible][:1]
        shown, kept = (tuple((row[0], row[k][1]) for row in part) for part in (visible, grading))
        goal = (GOALS.get(right, "repair"), _KINDS[params])
        name = f"{body} [{right}]"
        tasks.append(Task(name, split, goal, params, bodies[wrong], (wrong, right), shown, kept))
    return tasks


@functools.cache
def _all_tasks() -> tuple[Task, ...]:
    found: list[Task] = []
    for line in _CATALOGUE.strip().splitlines():
        wrong, split, bodies = line.split(maxsplit=2)
        for body in bodies.split(" | "):
            found += _tasks_of(wrong, split, body)
    return tuple(found)


def make_tasks(split: str = "all") -> list[Task]:
    """Return the tasks of the gym, or one split of them: 'all', 'train' or 'heldout'."""
    check.one_of("split", split, ("all", "train", "heldout"))
    return [task for task in _all_tasks() if split in ("all", task.split)]


_MARKERS = ("<pad>", "<bos>", "<end>")
_ANSWERS = ("ok", "fail", "done", "error", "t1", "t2", "t3")


class Tokenizer:
    """A vocabulary of whole words.

    Attributes:
        tokens: the word of each id; `len(tok)` is the vocabulary size.
        program_tokens: the words that may stand in a program.
        pad_id: the id of padding, 0.
    """

    def __init__(self, goal_words: Iterable[str], program_tokens: Iterable[str]) -> None:
        program = sorted(set(program_tokens))
        goal = sorted({f"'{word}" for word in goal_words})
        fixed = (*_MARKERS, *ACTIONS, *_ANSWERS)
        for word in sorted({*program} & {*fixed, *goal}):
            raise ValueError(f"program token {word!r} has another meaning already")
        self.tokens = [*fixed, *goal, *program]
        self.program_tokens = frozenset(program)
        self.pad_id = 0
        self._ids = {token: i for i, token in enumerate(self.tokens)}

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the id of each word; a word outside the vocabulary is a ValueError."""
        words = list(words)
        for index, word in enumerate(words):
            if word not in self._ids:
                raise ValueError(f"words[{index}] = {word!r} is not in the vocabulary")
        return [self._ids[word] for word in words]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the word of each id; an id outside the vocabulary is a ValueError."""
        ids = [int(i) for i in ids]
        for index, i in enumerate(ids):
            if not 0 <= i < len(self.tokens):
                raise ValueError(f"ids[{index}] = {i} is outside 0..{len(self.tokens) - 1}")
        return [self.tokens[i] for i in ids]


def build_tokenizer(tasks: Iterable[Task]) -> Tokenizer:
    """Build the vocabulary of a list of tasks; pass all tasks, so that both splits share ids."""
    tasks = list(tasks)
    return Tokenizer(
        (word for task in tasks for word in task.goal),
        (token for task in tasks for token in (*task.program, *task.fix)),
    )
