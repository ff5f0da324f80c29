"""The release: what is in wheel and sdist, a clean install, one version, and the front matter."""

import ast
import email
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import nbformat
import pybtex.database
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools import export, preflight
from tools.export import ROOT

CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
FOLDERS = ("agentrl", "benchmarks", "book", "chapters", "tests", "tools")
FILES = ("MANIFEST.in", "Makefile", "README.md", "_config.yml", "_toc.yml", "conftest.py")
REQUIREMENTS = ("requirements-book.txt", "requirements.txt", "requirements-peers.txt")
FILES += ("pyproject.toml", *REQUIREMENTS)
PAGES = sorted((ROOT / "book").glob("*.md"))


def python(*arguments: str | Path, where: Path, **environment: str) -> str:
    """Run a Python by its path, which comes first; returns what it prints."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    settings = {"env": plain | environment, "cwd": where, "capture_output": True, "text": True}
    done = subprocess.run([str(argument) for argument in arguments], **settings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist of this tree, with what a working copy has lying about, and the sdist's wheel."""
    work = tmp_path_factory.mktemp("release")
    source = work / "source"
    source.mkdir()
    for name in (*FOLDERS, *FILES):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    strangers = ("_build/html/index.html", "book/__pycache__/x.pyc", "agentrl/old.txt")
    strangers += ("chapters/.ipynb_checkpoints/01-gym-checkpoint.ipynb", "chapters/.01-gym.ipynb.7")
    for stranger in strangers:
        (source / stranger).parent.mkdir(parents=True, exist_ok=True)
        (source / stranger).write_text("not for release")
    sdist = _build(source, "sdist", work / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    [unpacked] = (work / "unpacked").iterdir()
    return sdist, _build(unpacked, "wheel", work / "dist")


def _build(source: Path, kind: str, target: Path) -> Path:
    code = f"import setuptools.build_meta as b; print(b.build_{kind}({str(target)!r}))"
    target.mkdir(exist_ok=True)
    return target / python(sys.executable, "-c", code, where=source).splitlines()[-1]


@pytest.fixture(scope="module")
def fresh(built, tmp_path_factory) -> Path:
    """The Python of a new environment where pip installed the wheel.

    What it depends on is seen by a path, in this environment, so that nothing is downloaded. The
    source tree, which this environment may have installed, is not seen.
    """
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home, with_pip=False)
    fresh = home / "bin" / "python"
    site = Path(python(fresh, "-c", "import site; print(site.getsitepackages()[0])", where=home))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", fresh]
    # Without --ignore-installed pip would find the source tree's package through the path.
    python(*pip, "install", "--no-index", "--no-deps", "--ignore-installed", built[1], where=home)
    return fresh


def test_the_wheel_is_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA")))
    package = [*(ROOT / "agentrl").iterdir(), *(ROOT / "agentrl/course").iterdir()]
    assert names == {str(path.relative_to(ROOT)) for path in package if path.is_file()}
    assert "agentrl/py.typed" in names
    message = email.message_from_bytes(metadata)
    needed = [name for name in message.get_all("Requires-Dist") if "extra ==" not in name]
    assert sorted(re.match(r"[\w-]+", name)[0] for name in needed) == ["torch", "tqdm"]
    assert message["Version"] == export.version()
    assert message["Requires-Python"].startswith(">=3.11")


def pinned(name: str) -> dict[str, str]:
    """Read the versions that a requirements file pins, without the files that it includes."""
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return dict(line.split("#")[0].strip().split("==") for line in lines if "==" in line)


def test_each_requirements_file_pins_all_that_it_needs_and_none_pins_twice():
    """Peers are installed without what they need, so a pin that is missing would show late."""
    known: dict[str, str] = {}
    for name in REQUIREMENTS:
        pins = pinned(name)
        assert not known.keys() & pins.keys()
        known |= pins
        # What torch needs depends on its build; verl asks for other versions than it needs.
        for each in pins.keys() - {"torch", "verl"}:
            try:
                needs = map(Requirement, importlib.metadata.requires(each) or [])
            except importlib.metadata.PackageNotFoundError:
                assert name == "requirements-peers.txt", f"{each} is not installed"
                continue
            asked = [need.name for need in needs if not need.marker or need.marker.evaluate()]
            missing = {canonicalize_name(need) for need in asked} - {*map(canonicalize_name, known)}
            assert not missing, f"{name}: {each} needs {missing}"


def test_the_ranges_accept_what_is_tested():
    """The requirements pin all that pyproject.toml asks for, within the range."""
    pins = pinned("requirements-book.txt") | pinned("requirements.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [project["dependencies"], *project["optional-dependencies"].values()]
    for need in map(Requirement, itertools.chain(*asked)):
        assert need.specifier.contains(pins[need.name], prereleases=True), (need, pins[need.name])


def test_the_changes_name_both_ends_of_each_range():
    changes = (ROOT / "book/changes.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["notebooks"]]
    ranges = {need.name: need.specifier for need in map(Requirement, needs)}
    for name in ("torch", "transformers"):
        low, high = re.search(rf"^\| {name}.*\| `(\S+)` \| `(\S+)` \|$", changes, re.M).groups()
        assert low in ranges[name] and high in ranges[name]
        major, minor, *_ = Version(high).release
        assert name != "torch" or f"{major}.{minor + 1}.0" not in ranges[name], "untested above"
        [least] = [Version(bound.version) for bound in ranges[name] if bound.operator == ">="]
        assert Version(low).release[: len(least.release)] == least.release, name


def test_the_sdist_holds_the_course_and_no_build(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    wanted = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and not any(re.match(r"__pycache__|\.", part) for part in path.relative_to(ROOT).parts)
    }
    made = {"PKG-INFO", "setup.cfg"}
    info = {name for name in files if name.startswith("agentrl_book.egg-info/")}
    assert files - made - info == wanted | {*FILES}
    assert not [name for name in names if re.search(r"_build|pycache|\.pyc|/\.|old\.txt", name)]


def used_names() -> list[str]:
    """Every `arl.name` in the code of a chapter."""
    used = set()
    for path in CHAPTERS:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                used |= {
                    node.attr
                    for node in ast.walk(ast.parse(cell.source))
                    if isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "arl"
                }
    return sorted(used)


def test_a_clean_install_has_every_name_that_a_chapter_uses(fresh, tmp_path):
    code = f"""
import agentrl as arl, sys
print(arl.__file__)
assert "torch" not in sys.modules, "import agentrl has to stay light"
assert set(arl.__all__) <= set(dir(arl))
missing = [name for name in {used_names()!r} if not hasattr(arl, name)]
print(missing, [name for name in arl.__all__ if getattr(arl, name) is None])
"""
    where, missing = python(fresh, "-c", code, where=tmp_path).splitlines()
    assert missing == "[] []"
    assert Path(where).is_relative_to(fresh.parent.parent)


def test_the_package_loads_torch_and_nothing_else(fresh, tmp_path):
    """Every name at once: what else is loaded, torch loads itself for what the package uses."""
    code = """
import sys, torch, tqdm
before = set(sys.modules)
import agentrl as arl
assert [getattr(arl, name) for name in arl.__all__]
print(*{name.partition(".")[0] for name in sys.modules.keys() - before})
"""
    loaded = set(python(fresh, "-c", code, where=tmp_path).split()) - sys.stdlib_module_names
    of_torch = {"filelock", "mpmath", "sympy", "torch", "_remote_module_non_scriptable"}
    assert loaded - of_torch - {"numpy"} == {"agentrl"}


def versions(root: Path, fresh: Path, where: Path) -> dict[str, str]:
    """The version, wherever somebody reads one."""
    changes = (root / "book/changes.md").read_text(encoding="utf-8")
    installed = "from importlib.metadata import version as v; print(v('agentrl-book'))"
    package = "import agentrl; print(agentrl.__version__)"
    return {
        "pyproject.toml": export.version(root),
        "the wheel": python(fresh, "-c", installed, where=where),
        "agentrl.__version__": python(fresh, "-c", package, where=where),
        "the newest change": re.search(r"^## `(\d\S*)`", changes, re.MULTILINE)[1],
    }


def test_package_and_book_have_one_version(fresh, tmp_path):
    found = versions(ROOT, fresh, tmp_path)
    assert len(set(found.values())) == 1, found
    for page in ("intro", "changes"):  # and these show it, by a role
        assert "{version}`" in (ROOT / f"book/{page}.md").read_text(encoding="utf-8")


SCRIPT = """\
import torch

import agentrl as arl

trajectory = arl.Trajectory(torch.arange(4), torch.ones(3), torch.zeros(3), reward=1.0)
rows: list[list[int]] = arl.packing_plan([3, 4, 5], max_tokens=8)
packed = arl.pack_sequences([trajectory], max_tokens=8)
shape: arl.ModelShape = arl.ModelShape.from_config(object())
bound: str = arl.packing_bound([3, 4, 5], max_tokens=8)
arl.packing_pan([3], max_tokens=8)
"""


def test_a_type_checker_reads_the_installed_package(fresh, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    heavy = "mypy-torch.*,matplotlib.*"  # their types take long to read, and are not ours
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n[{heavy}]\nfollow_imports = skip\n")
    command = ["-m", "mypy", "--python-executable", fresh, "--cache-dir", os.devnull]
    done = subprocess.run(
        [sys.executable, *command, "script.py"], cwd=tmp_path, capture_output=True, text=True
    )
    found = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(found) == 2, done.stdout + done.stderr
    assert found[0].startswith("script.py:9:") and '"str"' in found[0]
    assert found[1].startswith("script.py:10:") and "packing_pan" in found[1]


@pytest.mark.parametrize("name", ["01-gym"])
def test_a_downloaded_notebook_runs_with_the_package_alone(fresh, tmp_path, name):
    committed = nbformat.read(ROOT / f"chapters/{name}.ipynb", as_version=4)
    nbformat.write(committed, tmp_path / f"{name}.ipynb")
    settings = {"AGENTRL_PROGRESS": "0", "IPYTHONDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    code = "import sys; from nbclient.cli import main; main(sys.argv[1:])"
    arguments = ["--inplace", "--kernel_name=python3", f"{name}.ipynb"]
    kernel = tmp_path / "kernels" / "python3"  # this environment's own may be another Python
    kernel.mkdir(parents=True)
    launch = [str(fresh), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": launch, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    python(fresh, "-c", code, *arguments, where=tmp_path, JUPYTER_PATH=str(tmp_path), **settings)
    ran = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    assert _printed(ran) == _printed(committed)


def _printed(notebook: nbformat.NotebookNode) -> list[str]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in cells
    ]


def prose(root: Path) -> str:
    pages = [path.read_text(encoding="utf-8") for path in (root / "book").glob("*.md")]
    for path in (root / "chapters").glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        pages += [cell.source for cell in cells if cell.cell_type == "markdown"]
    return "\n\n".join(pages)


def bibliography_faults(entries: str, text: str) -> list[str]:
    """Entries that nothing cites, or that lack what a reader needs to find the work."""
    cited = {
        key.strip()
        for keys in re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", text)
        for key in re.sub(r"[{<].*?[}>]", "", keys).split(",")
    }
    faults = []
    for key, entry in pybtex.database.parse_string(entries, "bibtex").entries.items():
        if key not in cited:
            faults.append(f"{key} is cited nowhere")
        lacks = [name for name in ("title", "year") if not entry.fields.get(name)]
        lacks += [] if entry.persons.get("author") else ["author"]
        lacks += [] if {"url", "doi"} & entry.fields.keys() else ["url or doi"]
        faults += [f"{key} has no {name}" for name in lacks]
    return faults


def test_every_reference_is_complete_and_cited():
    entries = (ROOT / "book/references.bib").read_text(encoding="utf-8")
    assert bibliography_faults(entries, prose(ROOT)) == []


def test_a_reference_that_nobody_cites_is_found():
    entries = "@misc{a, title={A}, author={B}, year={2020}, url={u}}\n@misc{b, title={B}}"
    found = bibliography_faults(entries, "x {cite}`a` y")
    assert found == ["b is cited nowhere"] + [
        f"b has no {n}" for n in ("year", "author", "url or doi")
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_front_matter_types_no_measured_number(page):
    assert list(preflight.prose_faults(page.read_text(encoding="utf-8"))) == []


def test_the_landing_page_has_a_line_for_each_chapter():
    rows = re.findall(r"^\| \{doc\}.*$", (ROOT / "book/intro.md").read_text("utf-8"), re.MULTILINE)
    linked = [re.search(r"<\.\./chapters/([\w-]+)>", row)[1] for row in rows]
    assert linked == [path.stem for path in CHAPTERS]
    for row, name in zip(rows, linked, strict=True):
        assert f"`../chapters/{name}.ipynb::" in row, f"no number of {name}"


def test_every_page_is_in_the_table_of_contents():
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    listed = [entry["file"] for part in contents["parts"] for entry in part["chapters"]]
    pages = {path.relative_to(ROOT).with_suffix("").as_posix() for path in PAGES}
    assert pages <= {*listed, contents["root"]}
