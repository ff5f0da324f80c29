"""The benchmarks at a tiny size, what they share, and the results that are committed."""

import getpass
import json
import math
import re
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import agentrl as arl
from benchmarks import __main__ as runner
from benchmarks import accumulation, chapters, common, logits, rollout
from tools import notebooks
from tools.export import ROOT

PEERS = ("trl", "verl", "tensordict", "liger_kernel", "cut_cross_entropy")
RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
PAGE = ROOT / "book" / "results.ipynb"


@pytest.fixture
def no_peers(monkeypatch):
    """Make the import of each peer fail, and memory cheap: its process is tested by itself."""
    loaded = [name for name in sys.modules if name.split(".")[0] in PEERS]
    for name in (*PEERS, *loaded):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(common, "peak_bytes", lambda *_: {"peak_mb": 1.0})


def faults(rows: list[dict], curves: list[dict]) -> list[str]:
    """What is wrong with a topic's findings."""
    found = []
    for row in rows:
        name = f"{row.get('what')}, {row.get('case')}, {row.get('who')}"
        if not isinstance(row.get("what"), str) or not isinstance(row.get("who", ""), str):
            found.append(f"{name}: has no name")
        if "failed" in row:
            if not row["failed"] or "seconds" in row:
                found.append(f"{name}: failed without a reason, or yet has a time")
        elif "low" in row and not row["low"] <= row["seconds"] <= row["high"]:
            found.append(f"{name}: the median is outside of its spread")
        if row.get("valid") is False:
            found.append(f"{name}: is no valid plan")
    for curve in curves:
        if len(curve["sizes"]) != len(curve["seconds"]):
            found.append(f"{curve['who']}: sizes and times differ in number")
        if len(curve["sizes"]) > 1 and not math.isfinite(curve["exponent"] + curve["expected"]):
            found.append(f"{curve['who']}: no exponent")
    return found


# What the topics share


def test_the_exponent_of_a_known_law_comes_out():
    sizes = [1e3, 1e4, 1e5, 1e6]
    assert common.exponent(sizes, [3e-9 * n**2 for n in sizes]) == pytest.approx(2)
    assert common.exponent(sizes, [5.0 for _ in sizes]) == pytest.approx(0)
    noisy = [n * factor for n, factor in zip(sizes, (1.1, 0.9, 1.1, 0.9), strict=True)]
    assert common.exponent(sizes, noisy) == pytest.approx(1, abs=0.05)
    for bad in (([1], [1]), ([1, 2], [1]), ([1, 2], [0, 1])):
        with pytest.raises(ValueError, match="positive pairs"):
            common.exponent(*bad)


def test_growth_compares_with_the_law_and_keeps_what_failed():
    points = {n: {"seconds": 1e-9 * n * math.log(n)} for n in (10, 1_000, 100_000)}
    row = common.growth("it", "things", points, "n log n", lambda n: n * math.log(n))
    assert row["exponent"] == pytest.approx(row["expected"])
    assert 1 < row["expected"] < 1.5
    row = common.growth("it", "things", {**points, 7: {"failed": "why"}}, "n", float)
    assert row["failed"] == {"7": "why"}
    assert row["sizes"] == [10, 1_000, 100_000]


def test_runs_take_turns_after_a_warm_up_and_a_failure_is_a_result():
    calls = []

    def run(name: str) -> int:
        calls.append(name)
        if name == "c":
            raise ImportError("no module in /opt/secret/place")
        return 7

    found = common.timed({name: lambda name=name: run(name) for name in "abc"}, 3)
    assert calls == [*"abc", *"ab" * 3]
    assert found["a"]["n"] == 3
    assert found["a"]["value"] == 7
    assert found["a"]["low"] <= found["a"]["seconds"] <= found["a"]["high"]
    assert found["c"] == {"failed": "ImportError: no module in place"}


def test_a_run_may_say_how_long_it_took():
    found = common.timed({"ranks": lambda: common.Took(0.25)}, 3)["ranks"]
    assert found == {"seconds": 0.25, "low": 0.25, "high": 0.25, "n": 3}


def test_slow_runs_are_repeated_less():
    found = common.timed({"a": lambda: None}, 5, longest=-1.0)
    assert found == {"a": {}}  # not even once: only the warm-up
    assert common.timed({"a": lambda: None}, 5, longest=0.0)["a"]["n"] == 1


def test_the_fraction_of_the_limit():
    best = {"flops": {"float32": 100.0}, "copy_bytes_per_s": 10.0}
    rows = [
        {"seconds": 2.0, "flops": 50, "dtype": "float32"},
        {"seconds": 2.0, "bytes": 5},
        {"failed": "why", "flops": 50, "dtype": "float32"},
        {"seconds": 2.0, "flops": 50, "dtype": "float32", "peak_flops": 50.0},  # of that moment
    ]
    common.with_fractions(rows, best)
    assert [row.get("of_limit") for row in rows] == [0.25, 0.25, None, 0.5]


def test_a_probe_runs_before_each_run_and_its_warm_up_does_not_count(monkeypatch):
    calls = []
    took = {"probe": iter([9.0, 0.8, 0.2, 0.4]), "a": iter([9.0, 3.0, 1.0, 2.0])}

    def clock(run, _: str) -> tuple:
        return next(took[run()]), None

    def call(name: str) -> str:
        calls.append(name)
        return name

    monkeypatch.setattr(common, "_seconds", clock)
    found = common.timed({"a": lambda: call("a")}, 3, probe=lambda: call("probe"))["a"]
    assert calls == ["probe", "a"] * 4
    assert found == {"seconds": 2.0, "low": 1.0, "high": 3.0, "n": 3, "probe": 0.4}


def test_machines_are_named_without_their_host():
    cpu = {"cpu": "Intel(R) Xeon(R) CPU E5-2680 @ 2.40GHz", "cores": 4, "gpu": None}
    assert common.slug(cpu) == "intel-xeon-e5-2680-4-cores"
    assert common.slug(cpu | {"gpu": "NVIDIA H200"}).startswith("nvidia-h200-intel")
    text = json.dumps(common.machine())
    assert socket.gethostname() not in text
    assert common.tidy({"a": [math.nan, 1.23456, 123456]}) == {"a": [None, 1.235, 123456]}


def test_peak_memory_counts_what_a_run_holds_at_once():
    code = """
import torch
from benchmarks import common

def run():
    for _ in range(3):
        torch.ones(50_000_000, dtype=torch.uint8)

run()
print(common._peak(run, "cpu")["peak_mb"])
"""  # in a process whose heap has no room left by others
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True, check=True)
    assert 40 < float(done.stdout) < 110
    found = common.peak_bytes("packing", "agentrl bfd", "tiny", "cpu")
    assert found["peak_mb"] >= 0
    assert "KeyError" in common.peak_bytes("packing", "nobody", "tiny", "cpu")["failed"]


def test_a_peer_that_does_not_install_is_reported_and_the_others_go_on(monkeypatch, tmp_path):
    calls = []

    def fake(command: list, **_: object) -> subprocess.CompletedProcess:
        calls.append([str(word) for word in command])
        bad = command[-1].startswith("trl") if command[2] == "pip" else False
        return subprocess.CompletedProcess(command, int(bad), "", "ERROR: no such version\n")

    monkeypatch.setattr(runner.subprocess, "run", fake)
    monkeypatch.setattr(runner, "VENV", tmp_path)
    runner.make_environment()
    failed = json.loads((tmp_path / "failed.json").read_text())
    assert list(failed) == ["trl"]
    assert "no such version" in failed["trl"]
    assert not (tmp_path / "installed.txt").exists()  # it is tried again
    assert any("--no-deps" in call and call[-1].startswith("verl==") for call in calls)
    assert not any("--no-deps" in call and call[-1].startswith("torch==") for call in calls)


def test_the_peers_are_pinned():
    lines = runner.requirements().splitlines()
    names = [line.partition("#")[0].strip() for line in lines]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", name) for name in names if name)
    assert {name.split("==")[0] for name in names} >= set(common.PEERS)


# The topics


@pytest.fixture(scope="module")
def two_ranks() -> dict:
    """What two processes say of each way to divide."""
    return accumulation.launch(2)


@pytest.mark.parametrize("topic", runner.TOPICS)
def test_each_topic_runs_small_and_reports_absent_peers(topic, no_peers, monkeypatch, two_ranks):
    monkeypatch.setattr(accumulation, "launch", lambda ranks: two_ranks)
    found = import_module(f"benchmarks.{topic}").measure("tiny", "cpu")
    assert faults(found["rows"], found["growth"]) == []
    assert all(len(curve["sizes"]) == 2 or curve["failed"] for curve in found["growth"])
    ours = [row for row in found["rows"] if row["who"].startswith(("agentrl", "fused"))]
    assert not [row for row in ours if "failed" in row]
    rows = [row for row in found["rows"] if row["what"] != "peak memory"]
    absent = [row for row in rows if re.match(r"trl|verl|liger|cut", row["who"])]
    if topic in ("packing", "microbatch", "logits", "flops"):
        assert absent
        assert all("ModuleNotFoundError" in row["failed"] for row in absent)
    json.dumps(common.tidy(found), allow_nan=False)


GPU_SETS = {  # the set of a GPU host, cut down to what a CPU can do
    logits: {
        "V": {"cuda": 384},
        "SHAPES": {"cuda": {n: (n, 300, 128, ("",)) for n in ("float32", "bfloat16")}},
        "REPEATS": {"cuda": 1},
        "GROWTH": {"cuda": ("bfloat16", 128, (16, 160))},
    },
    rollout: {
        "PROMPTS": {"cuda": 1},
        "MODEL": {"cuda": {"d_model": 16, "n_layers": 1, "n_heads": 2}},
        "NEW_TOKENS": {"cuda": 4},
        "REPEATS": {"cuda": 1},
        "GROWTH": {"cuda": (1, 10)},
    },
}


@pytest.fixture(params=GPU_SETS, ids=lambda module: module.__name__)
def gpu_set(request, monkeypatch):
    """A topic that measures its set for a GPU, on the CPU."""
    for name, value in GPU_SETS[request.param].items():
        monkeypatch.setattr(request.param, name, value)
    monkeypatch.setattr(request.param, "key", lambda *_: "cuda")
    monkeypatch.setitem(common.PROBES, "cuda", common.PROBES["tiny"])
    return request.param


def test_the_set_of_a_gpu_runs_small(gpu_set, monkeypatch):
    monkeypatch.setattr(common, "peak_bytes", common.in_process)
    monkeypatch.setattr(rollout.arl, "make_rl_base", lambda tok: arl.TinyAgent(len(tok), d_model=8))
    found = gpu_set.measure("full", "cpu")
    assert faults(found["rows"], found["growth"]) == []
    who = {row["who"]: row for row in found["rows"]}
    if gpu_set is logits:
        assert {*logits.HEADS, *logits.TRITON} <= set(who)
        assert all(who[head]["failed"] for head in logits.TRITON)
        right = [row for row in found["rows"] if row["who"] in ("full", "fused_log_probs")]
        right = [row for row in right if row["what"] == "head"]
        assert len(right) == 4
        assert all(row["peak_mb"] >= 0 and row["grad_error"] < 0.01 for row in right)
        assert all("seconds" in row and row["flops"] > 0 for row in right)
    else:
        assert {row["dtype"] for row in found["rows"] if row["what"] == "sampling"} == {
            "float32",
            "bfloat16",
        }
        assert "failed" not in who["transformers generate"]


def test_what_does_not_fit_is_reported_and_the_others_go_on(monkeypatch):
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.28 GiB.")

    monkeypatch.setitem(logits.HEADS, "full", (too_large, 3))
    monkeypatch.setattr(common, "peak_bytes", lambda *_: {"peak_mb": 1.0})  # it fits only there
    rows = [row for row in logits.compare("tiny", "cpu") if row["case"] == "float32"]
    full = next(row for row in rows if row["who"] == "full")
    assert full["failed"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 9.28 GiB."
    assert "seconds" not in full
    assert next(row for row in rows if row["who"] == "chunked")["grad_error"] < 1e-5


def test_ranks_divide_by_what_the_whole_batch_has(two_ranks):
    assert two_ranks["agentrl step_normalizer|float64"]["error"] < 1e-13
    assert two_ranks["agentrl step_normalizer|float32"]["error"] < 1e-6
    assert two_ranks["own count of each microbatch (the fault)|float64"]["error"] > 0.1


def test_the_reference_count_is_pytorchs():
    from benchmarks import flops

    assert flops.by_torch(32) == flops.ours([32]) == 30_375_936


def test_the_time_of_a_chapter_is_kept_by_machine(monkeypatch, tmp_path):
    def times() -> dict[str, float]:
        kept = json.loads((folder / "chapters.json").read_text())["chapters"]
        return {name: entry["seconds"] for name, entry in kept.items()}

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    folder = tmp_path / common.slug(common.machine())
    ran = []
    monkeypatch.setattr(notebooks, "run", lambda *given: ran.append(given) or len(ran) % 2)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "chapters", "--device", "cuda"])
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    for name in ("02-two", "01-one"):
        (tmp_path / "chapters").mkdir(exist_ok=True)
        (tmp_path / "chapters" / f"{name}.ipynb").touch()
    assert runner.main() == 1  # the first failed
    assert [(path.stem, given) for [path], given in ran] == [
        ("01-one", {"DEVICE": "cuda"}),
        ("02-two", {"DEVICE": "cuda"}),
    ]
    assert list(times()) == ["02-two cuda"]
    for seconds, kept in ((100.0, 100.0), (120.0, 100.0), (10.0, 10.0)):  # about the same stays
        chapters.keep("01-one", seconds, "cpu")
        assert times()["01-one cpu"] == kept


# What is committed


@pytest.mark.parametrize("path", RESULTS, ids=[f"{p.parent.name}/{p.stem}" for p in RESULTS])
def test_committed_results_are_whole_and_name_no_place(path: Path):
    text = path.read_text(encoding="utf-8")
    document = json.loads(text)
    assert document["topic"] == path.stem
    assert common.slug(document["machine"]) == path.parent.name
    assert not re.search(r"(?<![\w.])/(?:[\w.-]+/)+[\w.-]+", text)
    for word in (socket.gethostname(), getpass.getuser()):
        assert not re.search(rf"\b{re.escape(word)}\b", text), word
    if path.stem == "chapters":
        assert all(entry["seconds"] >= 0 for entry in document["chapters"].values())
        return
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", document["date"])
    assert set(document["versions"]) == set(common.PEERS)
    assert document["limits"]["flops"]["float32"] > 0
    assert faults(document["rows"], document["growth"]) == []
    if path.stem == "logits":  # what was measured is what the code measures
        size = common.key(document["size"], document["device"])
        heads = [row for row in document["rows"] if row["what"] == "head"]
        assert {row["case"] for row in heads} == {*logits.SHAPES[size]}
        for row in heads:
            dtype, tokens, features, names = logits.SHAPES[size][row["case"]]
            work = row["products"] * 2 * tokens * features * logits.V[size]
            assert row["flops"] == pytest.approx(work, rel=1e-3) and row["dtype"] == dtype
            assert row["who"].startswith(names)


def test_the_page_has_all_that_it_reads():
    source = PAGE.read_text(encoding="utf-8")
    machine = re.search(r'MACHINE = \\"([\w-]+)\\"', source)[1]
    folder = ROOT / "benchmarks" / "results" / machine
    assert {path.stem for path in folder.glob("*.json")} >= {*runner.TOPICS, "chapters"}
