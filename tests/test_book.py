"""The book's configuration: a fault on a page fails the build, maths is markup, solutions fold."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.export import ROOT
from tools.pdf import contents


def build(source: Path, output: Path) -> subprocess.CompletedProcess:
    """Build a book as `make book` does."""
    command = [Path(sys.executable).with_name("jupyter-book"), "build", source, "-W", "-n"]
    command += ["--keep-going", "--path-output", output]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_chapter_is_in_the_table_of_contents():
    listed = [page for _, pages in contents() for page in pages]
    chapters = sorted(f"chapters/{path.stem}" for path in (ROOT / "chapters").glob("*.ipynb"))
    assert [file for file in listed if file.startswith("chapters/")] == chapters


SAMPLE = r"""# Sample

Inline $\frac{a}{b}$ and

$$ \log \pi_\theta(a \mid s) = \sum_{i=1}^{N} x_i, \dots $$ (eq-sample)

with {eq}`eq-sample`.

\begin{align}
a &= 1 \\
b &= 2
\end{align}

```{exercise}
:label: ex-sample

Why?
```

````{solution-start} ex-sample
:class: dropdown
````

```python
print("in the solution")
```

````{solution-end}
````
"""


@pytest.fixture
def sample(tmp_path):
    """Write a book of one page with the project's configuration, and build it."""

    def write(text: str) -> tuple[subprocess.CompletedProcess, str]:
        for name in ("tools", "book"):
            (tmp_path / name).symlink_to(ROOT / name)
        (tmp_path / "_config.yml").write_bytes((ROOT / "_config.yml").read_bytes())
        (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: page\n")
        (tmp_path / "page.md").write_text(text)
        done = build(tmp_path, tmp_path)
        return done, (tmp_path / "_build/html/page.html").read_text(encoding="utf-8")

    return write


def test_maths_is_markup_and_solutions_fold(sample):
    done, page = sample(SAMPLE)
    assert done.returncode == 0, done.stderr
    assert page.count("<math ") == 3
    assert "<mfrac>" in page
    assert '<mtable class="ams-align"' in page
    solution = page.index('class="solution dropdown admonition"')
    assert solution < page.index("in the solution")


def test_faults_on_a_page_fail_the_build(sample):
    faults = [r"$\nosuchcommand$", "{glue:text}`noglue`", "{cite}`nobody`", "{ref}`nowhere`"]
    done, _ = sample("# Sample\n\n" + "\n\n".join(faults))
    assert done.returncode != 0
    for name in ("nosuchcommand", "noglue", "nobody", "nowhere"):
        assert re.search(f"WARNING: .*{name}", done.stderr), done.stderr
