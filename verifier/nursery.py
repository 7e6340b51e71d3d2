"""A process that has imported what children need and forks one for each candidate, since importing costs more than judging.

It never sees a candidate, an input or a reference: every child is a fresh copy of the same empty state. It ends when the process
that started it ends, and its children end with it. One for each program in a process; `nursery_for` finds it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKET_BYTES = 1 << 18
_PACKAGES = str(Path(__file__).resolve().parent.parent)
_BOOT = "import json,sys; f=json.loads(sys.argv[1]); sys.path[:]=f['path']; from verifier.nursery import serve; serve(f)"


class NurseryDied(RuntimeError):
    """The process that forks children is gone; its last words follow."""


@dataclass(frozen=True, slots=True)
class Nursling:
    """A child: its process id, which is also its group's, and how to wait for it."""

    pid: int
    nursery: Nursery

    def wait(self, timeout_s: float | None = None) -> int:
        """Exit status, negative for a signal. Raises subprocess.TimeoutExpired."""
        return self.nursery.wait(self.pid, timeout_s)

    def kill(self) -> None:
        """SIGKILL to its group; nothing where it has ended, whoever has its number by now."""
        self.nursery.kill(self.pid)


class Nursery:
    """The supervisor's end. Safe to use from several threads."""

    def __init__(self, program: str, environment: Mapping[str, str]) -> None:
        self.owner = os.getpid()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        facts = {
            "program": program,
            "path": [_PACKAGES, *(p for p in sys.path if p)],
            "channel": theirs.fileno(),
            "parent": self.owner,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, json.dumps(facts)],
            stdin=subprocess.DEVNULL, env={"OPENBLAS_NUM_THREADS": "1", **environment}, cwd="/", start_new_session=True,
            pass_fds=(theirs.fileno(),),
        )  # fmt: skip
        theirs.close()
        self._asking, self._reading = threading.Lock(), threading.Lock()
        self._codes: dict[int, int] = {}
        self._spawned: list[int] = []

    @property
    def alive(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def spawn(self, facts: Mapping[str, Any], handles: Sequence[int], log: int, folder: str, limit_s: float) -> Nursling:
        """Fork a child that runs the program's main with `facts`, in which "handles" becomes the numbers it knows them by."""
        packet = json.dumps({"facts": facts, "folder": folder}).encode()
        with self._asking:
            try:
                socket.send_fds(self._channel, [packet], [log, *handles])
            except OSError as error:
                raise NurseryDied(str(error)) from None
            deadline = time.monotonic() + limit_s
            while not self._spawned:
                if time.monotonic() > deadline:
                    raise NurseryDied(f"no child within {limit_s:g} s")
                self._read(0.05)
            return Nursling(self._spawned.pop(), self)

    def kill(self, pid: int) -> None:
        """By the process that alone tells the system to forget a child and its number. Dead, it took its children along."""
        with self._asking, contextlib.suppress(OSError):
            self._channel.send(json.dumps({"kill": pid}).encode())

    def wait(self, pid: int, timeout_s: float | None) -> int:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while pid not in self._codes:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(pid), timeout_s or 0)
            try:
                self._read(0.05)
            except NurseryDied:
                return -9  # its children died with it
        return self._codes[pid]

    def _read(self, timeout_s: float) -> None:
        """Take one message in, if one comes. Raises NurseryDied."""
        with self._reading:
            if not select.select([self._channel], [], [], timeout_s)[0]:
                return
            try:
                packet = self._channel.recv(PACKET_BYTES)
            except OSError:
                packet = b""
            if not packet:
                raise NurseryDied(f"exit status {self._process.poll()}")
            message = json.loads(packet)
            if "spawned" in message:
                self._spawned.append(message["spawned"])
            else:
                self._codes[message["pid"]] = message["code"]

    def close(self) -> None:
        self._channel.close()
        if self.owner == os.getpid():
            self._process.kill()
            self._process.wait()


_nurseries: dict[tuple[int, str, tuple[tuple[str, str], ...]], Nursery] = {}
_starting = threading.Lock()


def nursery_for(program: str, environment: Mapping[str, str]) -> Nursery:
    """The nursery of a program in this process, started when there is none or the last one died."""
    key = (os.getpid(), program, tuple(sorted(environment.items())))
    with _starting:
        found = _nurseries.get(key)
        if found is None or not found.alive:
            found = _nurseries[key] = Nursery(program, environment)
        return found


@atexit.register
def close_all() -> None:
    """End this process's nurseries; those of a process that forked this one are left alone."""
    for (owner, _, _), nursery in _nurseries.items():
        if owner == os.getpid():
            nursery.close()


def serve(facts: dict[str, Any]) -> None:
    """Import the program, then fork a child for each request until the channel closes or the parent is gone."""
    channel = socket.socket(fileno=facts["channel"])
    program = __import__(facts["program"], fromlist=["main"])
    children: dict[int, int] = {}  # pidfd -> pid
    listening: list[Any] = [channel]
    while os.getppid() == facts["parent"]:
        ready = select.select([*listening, *children], [], [], 1.0)[0]
        for handle in ready:
            if handle in children:
                _kill_group(children[handle])  # what a child left; once it is taken in, its number may be a stranger's
                _, status = os.waitpid(pid := children.pop(handle), 0)
                os.close(handle)
                channel.send(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}).encode())
        if channel in ready:
            packet, handles, _, _ = socket.recv_fds(channel, PACKET_BYTES, 16)
            if not packet:
                break
            request = json.loads(packet)
            if (pid := request.get("kill")) is not None:
                if pid in children.values():
                    _kill_group(pid)
                continue
            pid = os.fork()
            if pid == 0:
                for pidfd in children:
                    os.close(pidfd)
                channel.close()
                _become_child(program, request, handles)
            children[os.pidfd_open(pid)] = pid
            for handle in handles:
                os.close(handle)
            channel.send(json.dumps({"spawned": pid}).encode())
    os._exit(0)


def _kill_group(pid: int) -> None:
    """A child and all of its group, which it may not lead yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _become_child(program: Any, request: dict[str, Any], handles: list[int]) -> None:
    """A session of its own, output into the log, then the program; whatever happens, this process ends here."""
    code = 1
    try:
        os.setsid()
        log, *others = handles
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.chdir(request["folder"])
        os.environ["TMPDIR"] = request["folder"]
        program.main({**request["facts"], "parent": os.getppid(), "handles": others})
        code = 0
    except BaseException:
        import traceback

        with contextlib.suppress(OSError):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
