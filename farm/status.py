"""What running sweeps of this machine say of themselves: one small file each, rewritten as they go. Starts and stops none."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

FOLDER = "runs"
EVERY_S = 2.0
#: A file that its sweep has not touched for so long is of one that died.
STALE_S = 60.0


class StatusFile:
    """Written by a sweep's driver; gone when it ends in good order."""

    def __init__(self, cache: Path, run_id: str, catalog: str, plan: str) -> None:
        self._path = cache / FOLDER / f"{run_id}.json"
        self._head = {"run_id": run_id, "catalog": catalog, "plan": plan, "pid": os.getpid(), "started_at": time.time()}
        self._written = 0.0

    def write(self, facts: dict[str, Any], *, now: bool = False) -> None:
        """At most every EVERY_S seconds. A folder that cannot be written stops no sweep."""
        if not now and time.monotonic() - self._written < EVERY_S:
            return
        self._written = time.monotonic()
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".tmp")
            fresh.write_text(json.dumps(self._head | {"written_at": time.time()} | facts))
            fresh.replace(self._path)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()


def running_sweeps(cache: Path) -> list[dict[str, Any]]:
    """What each living sweep said last, the oldest first; files of dead ones are taken away."""
    found = []
    for path in sorted((cache / FOLDER).glob("*.json")):
        try:
            said = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if _alive(said):
            found.append(said)
        elif time.time() - said.get("written_at", 0.0) > STALE_S:
            with contextlib.suppress(OSError):
                path.unlink()
    return found


def _alive(said: dict[str, Any]) -> bool:
    """Whether the driver lives on this machine; on a shared cache folder, whether it wrote a moment ago."""
    if time.time() - said.get("written_at", 0.0) < 5 * EVERY_S:
        return True
    try:
        return "farm" in Path(f"/proc/{said['pid']}/cmdline").read_text()
    except (OSError, KeyError):
        return False


def status_lines(said: dict[str, Any]) -> list[str]:
    """One sweep for people."""
    from farm.machine_view import machine_lines
    from farm.progress import clock

    minutes = clock(time.time() - said["started_at"])
    lines = [f"{said['run_id']}: plan {said['plan']}, catalog {said['catalog']}, running for {minutes}"]
    ended = ", ".join(f"{n} {reason}" for reason, n in said["by_reason"].items()) or "none yet"
    left = f", about {clock(said['left_s'])} left" if said.get("left_s") is not None else ""
    lines.append(f"    ended: {ended}; {said['known']} had ended before; {said['rate_per_min']:.1f} a minute{left}")
    if said["best_ratio"]:
        lines.append(f"    best so far: {said['best_ratio']:.2f}x the rival")
    if said.get("author"):
        lines.append(f"    {said['author']}")
    return lines + [f"    {line}" for line in machine_lines(said["machine"])]
