"""Kills what a sweep leaves behind when its driver dies, however it dies. Starts nothing and judges nothing.

The guardian is a small process in a session of its own, at the other end of a pipe that only the driver holds. When the pipe
ends it looks through /proc for processes of this run (by a mark in their environment, or by an open file in the run's own folder
for Ray, whose processes overwrite their environment with their title) and kills them until none is left.

Runs as a script without the rest of the package, so that it starts in milliseconds and holds little memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "KERNEL_FARM_RUN"
PATIENCE_S = 10.0


class Guardian:
    """The driver's end. Every process that is started after this one inherits the run's mark."""

    def __init__(self, run_id: str) -> None:
        os.environ[MARK] = run_id
        argv = [sys.executable, "-I", "-S", __file__, str(os.getpid()), f"{MARK}={run_id}"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)

    def watch_folder(self, folder: str) -> None:
        """Processes with a file open below this folder belong to the run; the folder is removed with them."""
        assert self._process.stdin
        self._process.stdin.write(f"{folder}\n".encode())
        self._process.stdin.flush()

    def close(self, timeout_s: float = PATIENCE_S + 5) -> None:
        """Ends the run's processes now and waits until they are gone."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        os.environ.pop(MARK, None)


def _belongs(process: Path, mark: bytes, folders: list[str]) -> bool:
    try:
        if mark in (process / "environ").read_bytes().split(b"\0"):
            return True
        if folders:
            for link in os.scandir(process / "fd"):
                target = os.readlink(link.path)
                if any(target.startswith(folder + "/") for folder in folders):
                    return True
    except OSError:
        pass  # gone, or another user's
    return False


def left_behind(mark: bytes, folders: list[str], spare: set[int]) -> list[int]:
    """Ids of living processes of the run."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) not in spare and _belongs(process, mark, folders):
            found.append(int(process.name))
    return found


def _main() -> None:
    driver, mark, folders = int(sys.argv[1]), sys.argv[2].encode(), []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        folders.append(line.rstrip("\n"))
    spare = {os.getpid(), driver}
    until, quiet = time.monotonic() + PATIENCE_S, 0
    enough = 2 if Path(f"/proc/{driver}").exists() else 20  # a session that was being started may still bring up agents
    while time.monotonic() < until and quiet < enough:
        found = left_behind(mark, folders, spare)
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        time.sleep(0.1)
    if "KERNEL_FARM_KEEP_RAY_LOGS" not in os.environ:
        for folder in folders:
            _remove(folder)


def _remove(folder: str) -> None:
    """What was killed a moment ago may still have made a file while the folder was being emptied: then once more."""
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        if not Path(folder).exists():
            return
        time.sleep(0.2)


if __name__ == "__main__":
    _main()
