"""Note how long each chapter takes to run on this machine, for the page of results.

    make bench TOPIC=chapters

A time that is about what is noted already is left as it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks import common
from tools import notebooks


def note(chapters: Iterable[Path], device: str) -> int:
    """Run chapters as `make run` does and keep the time of each; returns the exit status."""
    status = 0
    for path in chapters:
        started = time.perf_counter()
        failed = notebooks.run([path], {"DEVICE": device})
        if not failed:
            keep(path.stem, time.perf_counter() - started, device)
        status |= failed
    return status


def keep(chapter: str, seconds: float, device: str) -> None:
    machine = common.machine()
    file = common.RESULTS / common.slug(machine) / "chapters.json"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"topic": "chapters"}
    chapters = kept.setdefault("chapters", {})
    known = chapters.get(f"{chapter} {device}", {}).get("seconds")
    if known is None or abs(seconds - known) > max(2.0, known / 4):
        chapters[f"{chapter} {device}"] = {"seconds": round(seconds, 1), "date": common.today()}
        kept |= {"machine": machine, "chapters": dict(sorted(chapters.items()))}
        common.write(file, kept)
