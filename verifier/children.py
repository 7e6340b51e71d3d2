"""Short-lived helper programs (compilers) as killable children with hard limits. Candidates run in `verifier.sandbox` instead."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Literal

#: The child's own shell sets the limits (no Python runs between fork and exec, so threads of the parent do no harm) and
#: starts a reader of the lifeline: a pipe whose other end only the parent holds. However the parent dies, the reader sees the
#: end of the pipe and kills the group.
_WRAPPER = """
ulimit -c 0
ulimit -v "$1" 2>/dev/null
ulimit -t "$2" 2>/dev/null
ulimit -f 8388608 2>/dev/null
shift 2
exec 3<&0
(read _ <&3; kill -KILL 0) &
exec "$@" </dev/null 3<&-
"""

LOG_LIMIT = 64 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Hard limits of a helper: seconds on the wall and of CPU (whole group: each process), bytes of address space of each
    process.
    """

    wall_s: float = 120.0
    memory_bytes: int = 4 << 30


@dataclass(frozen=True, slots=True)
class Ended:
    """How a helper ended. `code` is the exit status, negative for a signal; `log` is its output, cut in the middle when long."""

    how: Literal["exited", "timeout"]
    code: int
    log: str
    wall_s: float


def run_limited(argv: Sequence[str], limits: Limits, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Ended:
    """Run a program in a process group of its own; at the limit, and whenever it ends, the whole group is killed.

    Raises FileNotFoundError when the program does not exist.
    """
    lifeline_read, lifeline_write = os.pipe()
    shell = ["/bin/sh", "-c", _WRAPPER, "sh", str(limits.memory_bytes // 1024), str(int(limits.wall_s) + 1)]
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(
                [*shell, *argv], stdin=lifeline_read, stdout=output, stderr=output, cwd=cwd, env=env, start_new_session=True
            )
        finally:
            os.close(lifeline_read)
        how = "timeout"
        try:
            if _ends_within(child.pid, limits.wall_s):
                how = "exited"
        finally:
            _kill_group(child.pid)  # before the system forgets it: then its number may be a stranger's
            code = child.wait()
            os.close(lifeline_write)
        wall_s = time.monotonic() - started
        if code == 127 and not _exists(argv[0]):
            raise FileNotFoundError(argv[0])
        return Ended(how, code, _read_log(output), wall_s)  # type: ignore[arg-type]


def _ends_within(pid: int, seconds: float) -> bool:
    """Waits for the end of a child, and leaves its status to be asked for."""
    handle = os.pidfd_open(pid)
    try:
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        return bool(waiting.poll(1e3 * seconds))
    finally:
        os.close(handle)


def _kill_group(pid: int) -> None:
    """SIGKILL to every process of the group that `pid` leads; a group that is gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _exists(program: str) -> bool:
    from shutil import which

    return which(program) is not None


def _read_log(output: IO[bytes]) -> str:
    output.seek(0)
    data = output.read()
    if len(data) > LOG_LIMIT:
        data = data[: LOG_LIMIT // 2] + b"\n[... cut ...]\n" + data[-LOG_LIMIT // 2 :]
    return data.decode(errors="replace")
