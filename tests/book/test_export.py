"""The exporter: every trap it has to step over, and the package as it is committed."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell

from tools.export import ROOT, ExportError, check, export, generate
from tools.notebooks import canon, read


def cases(text: str) -> dict[str, str]:
    """Cut a text at its `## name` lines."""
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return {name: body.strip("\n") for name, body in zip(parts[1::2], parts[2::2], strict=True)}


TRAPS = cases('''
## unindented line in a string
def f() -> str:
    return """a
b
"""


def g() -> int:
    return 1
## mark in a string
TEXT = """
#@save
def hidden(): ...
"""
## overloads
@overload
def f(x: int) -> int: ...
@overload
def f(x: str) -> str: ...
def f(x):
    return x
## comments
# before
def f() -> int:  # beside
    # within
    return 1  # the end


# after
## not ASCII
def f() -> str:
    """Größe, 長さ, λ."""
    return "∑ × →"
## assignments
A = 1
B: int = 2
C, (D, *E) = 3, (4, 5)
F = G = 6
A += 1
## branches
if functools:
    A = 1
else:
    A = 2
try:
    B = 1
except ValueError:
    B = 2
## only for the type checker
if TYPE_CHECKING:
    from decimal import Decimal


def f(x: 'Decimal') -> None: ...
''')
IMPORTS = "#@save\nimport functools\nfrom typing import TYPE_CHECKING, overload"


def exported(path: Path) -> str:
    """The module text that a notebook exports."""
    return generate(path.parent.parent)[f"{path.stem.partition('-')[2]}.py"]


@pytest.mark.parametrize("source", TRAPS.values(), ids=TRAPS)
def test_a_saved_cell_is_exported_whole(make, source):
    used = "#@save\n_USED = (functools, overload, TYPE_CHECKING)"
    text = exported(make(IMPORTS, f"#@save\n{source}", used, "print('not saved')"))
    body = [
        node for node in ast.parse(text).body if not isinstance(node, ast.ImportFrom | ast.Import)
    ]
    dumps = [ast.dump(node) for node in body]
    for node in ast.parse(source).body:
        assert ast.dump(node) in dumps
    for line in source.splitlines():
        if line.strip().startswith("#"):
            assert line.strip() in text
    assert "not saved" not in text
    exec(compile(text, "module", "exec"), {"__name__": "module"})


def test_a_mark_in_a_string_saves_nothing(make):
    assert "hidden" not in exported(make('TEXT = """\n#@save\ndef hidden(): ...\n"""'))


def test_public_names_are_listed(make):
    text = exported(
        make("#@save\nA = _B = 1\nC, (d, *E) = A, (_B, 2)\nfor i in ():\n    pass", "F = 2")
    )
    assert '__all__ = ["A", "C", "E", "d"]' in text


def test_windows_line_ends(make):
    path = make()
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(new_code_cell("#@save\r\ndef f() -> int:\r\n    return 1\r\n"))
    nbformat.write(notebook, path)
    text = exported(path)
    assert "def f() -> int:\n    return 1\n" in text
    assert "\r" not in text


def test_imports_are_gathered_sorted_and_merged(make):
    first = "#@save\nimport sys\nfrom os import path, sep\n\nA = (sys, path, sep)"
    second = "#@save\nfrom os import getcwd, path\n# why ast\nimport ast\nimport torch\n"
    second += "B = (ast, getcwd, path, torch)"
    text = exported(make(first, second, "import json"))
    head = "# why ast\nimport ast\nimport sys\nfrom os import getcwd, path, sep\n\nimport torch\n"
    assert head in text
    assert text.count("import") == 4
    assert "json" not in text


def test_the_head_names_notebook_title_and_question(make):
    question = "md:Some words. How long is a row of\ntokens? More."
    lines = exported(make(question, "#@save\nA = 1", title="Rows")).splitlines()
    assert lines[0].startswith("# Generated from chapters/01-one.ipynb")
    assert "Do not edit" in lines[0]
    assert lines[1:5] == ['"""Rows.', "", "How long is a row of tokens?", '"""']


MISSING = cases("""
## body
def f():
    return gone
## annotation
def f(x: gone): ...
## annotation in a string
def f(x: 'gone'): ...
## defined later
A = gone
gone = 1
## of the kernel
def f(x):
    display(x)
""")


@pytest.mark.parametrize("source", MISSING.values(), ids=MISSING)
def test_a_name_neither_imported_nor_saved_is_reported(make, source):
    with pytest.raises(ExportError, match=r"01-one.ipynb cell 3 \(In \[2\]\): .*(gone|display)"):
        generate(make("gone = 1", f"#@save\n{source}").parent.parent)


PRESENT = cases("""
## global
def f():
    global _cache
    _cache = 1
    return _cache
## used before it is defined, but called after
def f():
    return g()


def g(): ...
## module attributes
HERE = (__name__, __file__, __doc__)
""")


@pytest.mark.parametrize("source", PRESENT.values(), ids=PRESENT)
def test_a_name_in_scope_is_not_reported(make, source):
    assert exported(make(f"#@save\n{source}"))


PROBLEMS = {
    "mark below the first line": ("x = 1\n#@save", "is the whole first line"),
    "mark of no target": ("#@save corse\nx = 1", "is the whole first line"),
    "del": ("#@save\nif True:\n    x = 1\n    del x", "del x, which is saved"),
    "del in the course": ("#@save course\nx = 1\ndel new, x", "del new, which is saved"),
    "magic": ("#@save\n%time x = 1", "line 2"),
    "unused import": ("#@save\nimport json", "imported but unused"),
    "import beside code": ("#@save\nimport json; A = json", "shares its line"),
    "star": ("#@save\nfrom json import *", r"import \*"),
    "flat import": ("#@save\nfrom agentrl import f\nA = f", "from agentrl.x import y"),
    "whole package": ("#@save\nimport agentrl as arl\nA = arl", "from agentrl.x import y"),
    "later chapter": ("#@save\nfrom agentrl.two import g\nA = g", "no earlier chapter"),
    "own module": ("#@save\nfrom agentrl.one import f\nA = f", "no earlier chapter"),
    "unknown name": ("#@save\nfrom agentrl.zero import h\nA = h", "00-zero.ipynb saves no h"),
    "saved twice": ("#@save\ndef f(): ...", r"f is saved by 00-zero.ipynb cell 2 \(In \[1\]\) too"),
    "named like a module": ("#@save\nzero = 1", "also the name of a module"),
    "saved again": ("#@save\ndef new(): ...", r"new is saved by cell 2 \(In \[1\]\) too"),
    "runs on import": ("#@save\nimport torch\ntorch.manual_seed(0)", "line 3: would run whenever"),
    "used from the course": ("#@save\nA = stage", "`stage`: saved for the course, so nothing"),
    "imported from the course": (
        "#@save\nfrom agentrl.course.zero import z\nA = z",
        "takes nothing from the course",
    ),
    "private, in the course": ("#@save course\nA = _own", "`_own`: private to agentrl.one"),
    "gone, in the course": ("#@save course\nA = gone", "`gone`: neither imported nor saved"),
    "later course": (
        "#@save course\nfrom agentrl.course.two import t\nA = t",
        "agentrl.course.two is no earlier chapter",
    ),
    "saved for both": ("#@save course\ndef new(): ...", r"new is saved by cell 2 \(In \[1\]\) too"),
    "list of names": ('#@save\n__all__ = ["f"]', "__all__ is saved by the exporter too"),
}


@pytest.mark.parametrize(("source", "reason"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_problem_is_reported_with_its_cell_and_nothing_is_written(make, tmp_path, source, reason):
    make("#@save\ndef f(): ...", "#@save course\nz = 1", name="00-zero")
    make("#@save\ndef g(): ...", "#@save course\nt = 1", name="02-two")
    export(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "agentrl").rglob("*.py")}
    make("#@save\ndef new(): ...\n_own = 1", source, "#@save course\nstage = 1")
    with pytest.raises(ExportError, match=rf"01-one.ipynb cell 3 \(In \[2\]\): .*{reason}"):
        export(tmp_path)
    assert {path: path.read_bytes() for path in (tmp_path / "agentrl").rglob("*.py")} == before


@pytest.mark.parametrize("name", ["01-notebook", "01-course", "01-async", "01-Big", "one"])
def test_a_slug_is_a_name_that_is_free(make, tmp_path, name):
    make("#@save\ndef f(): ...", name=name)
    with pytest.raises(ExportError, match=f"{name}.ipynb: a chapter is called NN-slug.ipynb"):
        export(tmp_path)


def test_two_chapters_of_one_slug_are_refused(make, tmp_path):
    make("#@save\ndef f(): ...", name="01-one")
    make("#@save\ndef g(): ...", name="02-one")
    with pytest.raises(ExportError, match=r"02-one.ipynb: 01-one.ipynb has the same slug"):
        export(tmp_path)


@pytest.mark.parametrize("text", ["", '{\n<<<<<<< HEAD\n "cells": []\n}'])
def test_what_is_no_notebook_is_named(make, tmp_path, text):
    make("#@save\ndef f(): ...").write_text(text)
    with pytest.raises(ExportError, match=r"01-one.ipynb: is no notebook"):
        export(tmp_path)


def test_an_earlier_chapter_is_imported_by_name(make, tmp_path):
    make("#@save\ndef f() -> int:\n    return 1\n\n\n_private = 2", name="00-zero")
    imports = "#@save\nfrom agentrl.zero import _private, f"
    make(imports, "#@save\ndef g() -> int:\n    return f() + _private")
    assert export(tmp_path) == ["__init__.py", "course/__init__.py", "one.py", "zero.py"]
    assert export(tmp_path) == []
    done = _python("import agentrl as arl; print(arl.g(), arl.__all__)", tmp_path)
    assert done == "3 ['f', 'g']"


def test_a_course_cell_goes_apart_with_the_imports_it_takes(make, tmp_path):
    make("#@save course\ndef base() -> int:\n    return 1", name="00-zero", title="Zero")
    path = make(
        "# @save\nimport decimal as d\nfrom os import path, sep\n\nA = (d, path, sep)\n_B = 2",
        "#@save\ndef f(x: int) -> int:\n    return x + _B",
        "# @save course\nfrom agentrl.course.zero import base\n\n_C = d.Decimal(1)",
        "#@save course\ndef stage() -> int:\n    return f(base()) + len(sep) + int(_C)",
    )
    assert export(tmp_path)[1:4] == ["course/__init__.py", "course/one.py", "course/zero.py"]
    text = (tmp_path / "agentrl/course/one.py").read_text()
    assert text.split("\n\n__all__")[0].splitlines()[1:] == [
        '"""For the chapter alone: One."""',
        "",
        "import decimal as d",
        "from os import sep",
        "",
        "from agentrl.course.zero import base",
        "from agentrl.one import f",
    ]
    assert "stage" not in (tmp_path / "agentrl/one.py").read_text()
    code = "import agentrl as arl; print(arl.stage(), arl.base.__module__, 'stage' in dir(arl))"
    assert _python(code, tmp_path) == "5 agentrl.course.zero True"
    canon(path)  # the mark in its one form
    assert [cell.source.split("\n")[0] for cell in read(path).cells[1:]] == [
        *["#@save"] * 2,
        *["#@save course"] * 2,
    ]
    assert check(tmp_path) == []


def test_check_finds_differences_both_ways(make, tmp_path):
    path = make("#@save\ndef f() -> int:\n    return 1")
    module = tmp_path / "agentrl" / "one.py"
    export(tmp_path)
    assert check(tmp_path) == []

    module.write_text(module.read_text().replace("return 1", "return 2"))  # a hand edit
    [report] = check(tmp_path)
    assert "agentrl/one.py line 8" in report
    assert "return 2" in report
    assert "return 1" in report

    export(tmp_path)
    make("#@save\ndef f() -> int:\n    return 3")  # a stale module
    assert "return 3" in check(tmp_path)[0]

    export(tmp_path)
    path.rename(path.with_name("01-other.ipynb"))  # an orphan, a missing one, a stale list of names
    assert [line.split(":")[0].split(" line")[0] for line in check(tmp_path)] == [
        "agentrl/one.py",
        "agentrl/other.py",
        "agentrl/__init__.py",
    ]
    (tmp_path / "agentrl/course/one.py").write_text(module.read_text())  # another orphan
    assert export(tmp_path) == ["__init__.py", "course/one.py", "one.py", "other.py"]
    assert not module.exists()

    module.write_text("x = 1\n")  # written by somebody: not ours to remove
    assert check(tmp_path) == ["agentrl/one.py: no chapter generates it"]
    with pytest.raises(ExportError, match="no chapter generates it"):
        export(tmp_path)


def test_the_output_is_clean_for_ruff(make, tmp_path):
    untidy = "#@save\ndef f(x:int)->int: return {'a':functools,'b':(overload,TYPE_CHECKING)}[x]"
    make(IMPORTS, untidy, "#@save\nif TYPE_CHECKING:\n  A = 1\nnames = dict(first=1,\n second=2)")
    make("#@save\ndef g(): ...", name="02-two")
    export(tmp_path)
    for command in (["check"], ["format", "--check"]):
        settings = ["--config", ROOT / "pyproject.toml", "--no-cache", tmp_path / "agentrl"]
        subprocess.run([sys.executable, "-m", "ruff", *command, *settings], check=True)


def test_the_package_is_what_the_chapters_export():
    assert check() == []


def test_the_version_is_that_of_pyproject(make, tmp_path):
    make("#@save\ndef f(): ...")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1.2.3"\n')
    export(tmp_path)
    assert _python("import agentrl; print(agentrl.__version__)", tmp_path) == "1.2.3"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1.3.0"\n')
    [report] = check(tmp_path)  # stale
    assert "agentrl/__init__.py" in report and '"1.3.0"' in report


def test_a_name_is_imported_when_it_is_used(make, tmp_path):
    make("#@save\nimport decimal\n\nA = decimal.Decimal(1)", "#@save\nB = 2")
    export(tmp_path)
    code = """
import sys, importlib, typing
before = {*sys.modules}
import agentrl
assert {*sys.modules} - before == {"agentrl"}  # no more, so as good as no time
assert {"A", "B", "__version__"} <= set(dir(agentrl)) and agentrl.B == 2
print("agentrl.one" in sys.modules, "B" in vars(agentrl), hasattr(agentrl, "C"))
"""
    assert _python(code, tmp_path) == "True True False"


def _python(code: str, path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
