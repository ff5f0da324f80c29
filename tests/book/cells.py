"""Executed cells and outputs, made for a test."""

import nbformat
from nbformat.v4 import new_code_cell, new_output

from tools.nbcompare import GLUE

SVG = '<svg width="1" id="agentrl"></svg>'
ALT = {"mystnb": {"image": {"alt": "A line that rises."}}}


def ran(source: str, *outputs: nbformat.NotebookNode, **metadata: object) -> nbformat.NotebookNode:
    """An executed code cell."""
    return new_code_cell(source, execution_count=1, outputs=list(outputs), metadata=metadata)


def printed(text: str, name: str = "stdout") -> nbformat.NotebookNode:
    return new_output("stream", name=name, text=text)


def shown(**data: str) -> nbformat.NotebookNode:
    mimes = {key.replace("_", "/", 1).replace("_", "+"): value for key, value in data.items()}
    return new_output("display_data", data=mimes)


def recorded(name: str, value: str) -> nbformat.NotebookNode:
    metadata = {"scrapbook": {"name": name, "mime_prefix": GLUE}}
    return new_output("display_data", data={f"{GLUE}text/plain": repr(value)}, metadata=metadata)
