"""How busy this machine is, and waiting until it is less so. Measures no kernel, and slows nothing down."""

from __future__ import annotations

import time
from pathlib import Path

#: Seconds that one look takes.
LOOK_S = 0.3
#: Cores that may be busy with other work on a machine that counts as quiet.
QUIET_CORES = 0.3


def busy_cores(look_s: float = LOOK_S) -> float:
    """Cores of this machine that worked over the last `look_s` seconds, whoever they worked for; 0 where it is not told."""
    before = _ticks()
    time.sleep(look_s)
    after = _ticks()
    if before is None or after is None or after[1] <= before[1]:
        return 0.0
    return (after[0] - before[0]) / (after[1] - before[1]) * after[2]


def wait_for_quiet(limit_s: float) -> float:
    """Return once the machine is quiet, or after `limit_s`. Gives the cores that were busy at the end."""
    until = time.monotonic() + limit_s
    while (busy := busy_cores()) > QUIET_CORES and time.monotonic() < until:
        time.sleep(min(1.0, limit_s / 10))
    return busy


def _ticks() -> tuple[int, int, int] | None:
    """(ticks spent working, ticks in all, cores) since the machine started."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    ticks = [int(n) for n in lines[0].split()[1:9]]  # user nice system idle iowait irq softirq steal
    cores = sum(line.startswith("cpu") for line in lines) - 1
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks), cores
