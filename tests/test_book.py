"""The book builds without a warning, and its pages read with the network off."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tools.export import ROOT


def build(source: Path, output: Path) -> subprocess.CompletedProcess:
    """Build a book as `make book` does."""
    command = [Path(sys.executable).with_name("jupyter-book"), "build", source, "-W", "-n"]
    command += ["--keep-going", "--path-output", output]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def html(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("book")
    done = build(ROOT, output)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return output / "_build" / "html"


class Loads(HTMLParser):
    """Collects what a page loads: scripts, styles, images, frames."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.in_script = tag == "script"
        if tag in {"script", "img", "iframe", "source", "video", "audio", "embed"}:
            self.loads.append(attributes.get("src") or "")
        if tag == "link":
            self.loads.append(attributes.get("href") or "")
        if tag == "img":
            self.images.append(attributes)

    def handle_data(self, data: str) -> None:
        if self.in_script:
            self.loads += re.findall(r"https?://[^\s\"']+", data)

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False


def test_every_chapter_is_in_the_table_of_contents():
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    listed = [entry["file"] for part in contents["parts"] for entry in part["chapters"]]
    chapters = sorted(f"chapters/{path.stem}" for path in (ROOT / "chapters").glob("*.ipynb"))
    assert [file for file in listed if file.startswith("chapters/")] == chapters


def test_pages_load_nothing_from_another_host(html):
    pages = list(html.rglob("*.html"))
    assert len(pages) > 3
    for page in pages:
        found = Loads(page.read_text(encoding="utf-8")).loads
        assert not [load for load in found if re.match(r"(https?:)?//", load)], page
    for sheet in html.rglob("*.css"):
        loads = re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)", sheet.read_text())
        assert not loads, sheet


def test_every_image_has_a_description(html):
    for page in (html / "chapters").glob("*.html"):
        for image in Loads(page.read_text(encoding="utf-8")).images:
            assert image.get("alt"), (page, image)


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
