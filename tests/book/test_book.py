"""The book's configuration: a fault on a page fails the build, maths is markup, solutions fold."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from tools.export import ROOT
from tools.pdf import contents


def build(source: Path, output: Path) -> subprocess.CompletedProcess:
    """Build a book as `make book` does: without what only runs the chapters."""
    absent = output / "absent"
    absent.mkdir(exist_ok=True)
    for name in ("agentrl", "matplotlib", "torch", "transformers"):
        (absent / f"{name}.py").write_text("raise ImportError('make book does not install this')")
    command = [Path(sys.executable).with_name("jupyter-book"), "build", source, "-W", "-n"]
    command += ["--keep-going", "--path-output", output]
    environment = os.environ | {"PYTHONPATH": str(absent)}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


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
    """Write a book of one page with the project's configuration, and build it.

    Keyword arguments replace empty addresses in the configuration.
    """

    def write(text: str, **addresses: str) -> tuple[subprocess.CompletedProcess, str]:
        for name in ("tools", "book"):
            (tmp_path / name).symlink_to(ROOT / name)
        config = (ROOT / "_config.yml").read_text(encoding="utf-8")
        for name, address in addresses.items():
            assert len(re.findall(f'\\b{name}: ""', config)) == 1
            config = re.sub(f'\\b{name}: ""', f'{name}: "{address}"', config)
        (tmp_path / "_config.yml").write_text(config, encoding="utf-8")
        (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: part/page\n")
        (tmp_path / "part").mkdir()
        (tmp_path / "part/page.md").write_text(text)
        done = build(tmp_path, tmp_path)
        return done, (tmp_path / "_build/html/part/page.html").read_text(encoding="utf-8")

    return write


def test_maths_is_markup_and_solutions_fold(sample):
    done, page = sample(SAMPLE)
    assert done.returncode == 0, done.stderr
    assert page.count("<math ") == 3
    assert "<mfrac>" in page
    assert '<mtable class="ams-align"' in page
    solution = page.index('class="solution dropdown admonition"')
    assert solution < page.index("in the solution")
    # without addresses of repository and site, no link and no tag that needs them
    assert not re.search('source-edit-button|source-issues-button|canonical|og:(url|image)"', page)


@pytest.mark.parametrize(
    ("repository", "edit", "issue"),
    [
        ("https://github.com/NAME/agentrl", "/edit/main/", "/issues/new?"),
        ("https://gitlab.com/GROUP/agentrl", "/-/edit/main/", "/-/issues/new?"),
    ],
)
def test_addresses_turn_on_links_to_the_source_and_previews(
    sample, tmp_path, repository, edit, issue
):
    done, text = sample("# Sample\n\nWords.\n", url=repository, baseurl="https://host/book")
    assert done.returncode == 0, done.stderr
    page = BeautifulSoup(text, "html.parser")
    assert page.select_one("a.btn-source-edit-button")["href"] == f"{repository}{edit}part/page.md"
    link = page.select_one("a.btn-source-issues-button")["href"]
    assert link.startswith(repository + issue) and "page%20%2Fpart/page.html" in link
    address = "https://host/book/part/page.html"
    assert page.find("link", rel="canonical")["href"] == address
    assert page.find("meta", property="og:url")["content"] == address
    image = page.find("meta", property="og:image")["content"].removeprefix("https://host/book/")
    assert (tmp_path / "_build/html" / image).read_bytes().startswith(b"\x89PNG")
    for name in ("genindex", "search"):  # they have no source
        assert "source-edit-button" not in (tmp_path / f"_build/html/{name}.html").read_text()


def test_faults_on_a_page_fail_the_build(sample):
    faults = [r"$\nosuchcommand$", "{glue:text}`noglue`", "{cite}`nobody`", "{ref}`nowhere`"]
    done, _ = sample("# Sample\n\n" + "\n\n".join(faults))
    assert done.returncode != 0
    for name in ("nosuchcommand", "noglue", "nobody", "nowhere"):
        assert re.search(f"WARNING: .*{name}", done.stderr), done.stderr
