"""Compares the chapters' outputs by the project's own rules, wherever pytest is started."""

pytest_plugins = ["pytester", "tools.nbcompare"]
