"""The count of lines."""

from nbformat.v4 import new_code_cell

from tools import export, size

SAMPLE = '''"""Two
lines."""

import x  # this one is logic

# a comment


def f(a):
    """One."""
    check.integer("a", a)
    a = check.tensor(
        "a", a
    )
    if a < 0:
        # inside
        raise ValueError(a)
    if a:
        x(a)
    elif not a:
        raise x
    return check

'''


def test_each_line_is_of_one_kind():
    found = size.count(SAMPLE)
    assert found == {"logic": 5, "docstrings": 3, "checks": 9, "rest": 6}
    assert found.total() == len(SAMPLE.splitlines())


def test_the_report_sets_the_parts_apart(make, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_one.py").write_text("x = 1\n" * 1234)
    make("#@save\nA = 1\n\nB = 2", "#@save course\nC = 3", "x = 1\n" * 16)
    folded = new_code_cell("x = 1\n" * 16, metadata={"tags": ["hide-input"]})
    make("#@save\nD = 4", folded, name="12-later")
    export.export(tmp_path)
    lines = list(size.report(tmp_path))
    rows = {line.split("  ")[0]: line.split() for line in lines}
    total = sum(int(rows[name][1]) for name in ("__init__", "one"))
    assert rows["parts I and II"][4] == str(total) and rows["parts I and II"][-1] == "5,500"
    assert rows["part III"][2] == rows["later"][1]
    assert "public names 4, 1 of them the course's" in lines
    assert "tests 1,234 lines of at most 8,000" in lines
    assert lines[-2:] == ["cells with more than 15 lines of code in view: 1", "  01-one 1"]
