"""Notebooks made for a test, and how properties are tested."""

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import torch
from hypothesis import settings
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

# One for all files: a profile that a file loads would hold for those imported after it.
settings.register_profile("agentrl", deadline=None, derandomize=True)
settings.load_profile("agentrl")

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write `chapters/<name>.ipynb` under `tmp_path` and return its path.

    A cell is markdown if its text begins with `md:`, else code; a cell given as a notebook node
    stays as it is. The title comes first unless `title` is empty.
    """

    def write(
        *cells: str | nbformat.NotebookNode, name: str = "01-one", title: str = "One"
    ) -> Path:
        nodes = [new_markdown_cell(f"# {title}")] if title else []
        for cell in cells:
            if isinstance(cell, str):
                text = cell.removeprefix("md:")
                cell = new_code_cell(cell) if text == cell else new_markdown_cell(text)
            nodes.append(cell)
        path = tmp_path / "chapters" / f"{name}.ipynb"
        path.parent.mkdir(exist_ok=True)
        nbformat.write(new_notebook(cells=nodes), path)
        return path

    return write


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
