"""Every planted fault is found with its cause, and no repaired trainer is accused."""

import sys
from functools import cache

import pytest
import torch

import agentrl as arl

plants = cache(arl.planted_faults)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_planted_fault_is_found_with_its_cause(dtype: torch.dtype) -> None:
    missed = []
    for plant in plants(dtype):
        result = plant.run(True)
        if result or plant.says not in result.likely or result.check != plant.check.__name__:
            missed.append(f"{plant.fault}: {result!r}")
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_check_fires_on_a_repaired_trainer(dtype: torch.dtype) -> None:
    alarms = [f"{p.fault}: {r!r}" for p in plants(dtype) if not (r := p.run(False))]
    assert not alarms, "\n".join(alarms)


def test_the_table_has_every_public_report_and_every_check() -> None:
    faults = plants(torch.float32)
    reports = {int(p.fault.split()[0]) for p in faults if p.fault[0].isdigit()}
    assert reports == {*range(1, 18), 25, 31}
    checks = {name for name in arl.__all__ if name.endswith("_check")} - {"as_check"}
    assert {p.check.__name__ for p in faults} == checks
    assert len({p.fault for p in faults}) == len(faults)


def test_the_table_needs_no_library_and_its_runs_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        table = {plant.fault: plant for plant in arl.planted_faults()}
        assert not table["11 mean alone"].run(True)
    for fault in ("1 mask of ones", "14 embedding counted", "dropout in one pass"):
        assert not table[fault].run(True)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_copy_of_the_logits_is_found(dtype: torch.dtype) -> None:
    copies = {p.fault: p.run(True).worst / 32_768 for p in plants(dtype) if "logits" in p.fault}
    assert copies["chunks keep their logits"] == pytest.approx(4, abs=0.2)  # of 4 bytes a word
    assert copies["logits of all tokens"] > 9


def test_no_two_plants_are_the_same_run_and_each_gives_the_same_twice() -> None:
    results = [p.run(True) for p in plants(torch.float32) if p.fault[0].isdigit()]
    assert len(set(map(str, results))) == len(results)
    for plant in plants(torch.float32):
        if plant.check in (arl.leak_check, arl.step_zero_ratio_check, arl.schedule_check):
            first, second = plant.run(True), plant.run(True)
            assert str(first) == str(second) and first.trace == second.trace
