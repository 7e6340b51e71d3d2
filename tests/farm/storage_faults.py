"""Run in a mount namespace of its own: a sweep of stand-ins whose catalog's file system gets full, or goes away. No tests.

    unshare --mount python storage_faults.py full FOLDER
    unshare --mount python storage_faults.py gone FOLDER SECONDS PATIENCE

The file system is a small one in memory, mounted at FOLDER/shared. full: to the last byte, until the sweep has said that it
waits. gone: moved away, so that the bare folder is in its place. Prints what came of it as JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from catalog import audit, store, writing
from farm import standin
from farm.executors import LocalExecutor
from farm.jobs import Job, Shop
from farm.known_rows import KnownRows
from farm.progress import PlainDisplay, Tally
from farm.scheduler import Sweep
from generator.canonical import digest_text
from generator.spec import AttentionSpec

ATTEMPTS = 12


def searches() -> Any:
    for number in range(ATTEMPTS):
        spec = AttentionSpec(1, 1, 8, 8, 1, 1 + number, 4, name="prove=0.1")
        job = Job(digest_text(f"{number}"), spec, "cpu-avx2", f"program {number}", device_key=digest_text("cpu"))

        async def search(attempt: Any, job: Job = job) -> None:
            await attempt(job)

        yield search


def fill(shared: Path) -> Path:
    """A file that takes all that is left."""
    filler = shared / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    file.write(b"*" * size)
            except OSError:
                continue
    return filler


async def until(true: Any) -> None:
    while not true():
        await asyncio.sleep(0.02)


async def full(sweep: Sweep, shared: Path, notes: list[str]) -> dict[str, Any]:
    await until(lambda: sweep.counts.ended >= 2)
    filler, before = fill(shared), sweep.counts.ended
    await until(lambda: len(notes) >= 2)
    during = sweep.counts.ended
    filler.unlink()
    return {"stored_while_full": during - before}


async def gone(sweep: Sweep, shared: Path, notes: list[str], seconds: float) -> dict[str, Any]:
    away = shared.with_name("away")
    away.mkdir()
    await until(lambda: sweep.counts.ended >= 2)
    subprocess.run(["mount", "--move", shared, away], check=True)
    await asyncio.sleep(seconds)
    made = [path.name for path in shared.iterdir()]
    subprocess.run(["mount", "--move", away, shared], check=True)
    return {"made_in_its_place": made, "notes_before": len(notes)}


def main(what: str, folder: Path, *numbers: float) -> None:
    shared, cache = folder / "shared", folder / "cache"
    shared.mkdir()
    cache.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", shared], check=True)
    warnings.simplefilter("ignore", RuntimeWarning)
    writing.SEAL_ROWS, writing._RETRY_SECONDS = 1, 0.0  # type: ignore[misc]  # an open journal goes on below a mount that moved
    opened, notes = store.open(shared / "catalog", create=True), list[str]()
    opened.start_run("run-1", "storage")
    executor = LocalExecutor(Shop(opened.uri, str(cache), stages="farm.standin"))
    display = PlainDisplay(Tally(), lambda line: notes.append(line) if "cannot be stored" in line else None)
    patience = numbers[1] if numbers[1:] else 4.0

    async def sweep_and_fault() -> tuple[Sweep, dict[str, Any]]:
        with opened.writer("run-1") as writer:
            sweep = Sweep(
                executor,
                writer,
                KnownRows(opened),
                display,
                interrupted_row=standin.row_without_verdict,
                storage_patience_s=patience,
            )
            running = asyncio.ensure_future(sweep.run(searches()))
            fault = full(sweep, shared, notes) if what == "full" else gone(sweep, shared, notes, numbers[0])
            found = await asyncio.wait_for(fault, 150)
            await asyncio.wait_for(running, 60)
        return sweep, found

    sweep, found = asyncio.run(sweep_and_fault())
    executor.close()
    rows = opened.rows(["reason_code", "attempt_no"]).to_pylist()
    found |= {
        "planned": sweep.counts.planned,
        "reasons": sorted({row["reason_code"] for row in rows}),
        "rows": len(rows),
        "tries": max(row["attempt_no"] for row in rows),
        "done": sorted(standin.counts(cache)["done"].values()),
        "errors": list(audit.verify(opened, artifacts=False).errors),
        "stop_reason": sweep.stop_reason,
        "notes": notes[:3],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(float, sys.argv[3:]))
