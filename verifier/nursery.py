"""A process that has imported what children need and forks one for each candidate, since importing costs more than judging.

It never sees a candidate, an input or a reference: every child is a fresh copy of the same empty state. It ends when the process
that started it ends, and its children end with it. One for each program in a process; `nursery_for` finds it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import itertools
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
DRIVER_IS_UP = 86  # exit status: what was to be imported beforehand cannot be
_NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED
MOST_HANDLES = 16  # that come with one request
_PACKAGES = str(Path(__file__).resolve().parent.parent)
_BOOT = "import json,sys; f=json.loads(sys.argv[1]); sys.path[:]=f['path']; from verifier.nursery import serve; serve(f)"


class NurseryDied(RuntimeError):
    """The process that forks children is gone; its last words follow."""


@dataclass(frozen=True, slots=True)
class Nursling:
    """A child: its process id, which is also its group's, and how to wait for it.

    serial: its number among all that the nursery has forked, since the system gives process ids again.
    """

    pid: int
    serial: int
    nursery: Nursery

    def wait(self, timeout_s: float | None = None) -> int:
        """Exit status, negative for a signal. Raises subprocess.TimeoutExpired."""
        return self.nursery.wait(self.serial, timeout_s)

    def kill(self) -> None:
        """SIGKILL to its group; nothing where it has ended, whoever has its process id by now."""
        self.nursery.kill(self.serial)


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
        self._codes: dict[int, int] = {}  # exit statuses by serial
        self._spawned: list[tuple[int, int]] = []  # process id, serial

    @property
    def alive(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def spawn(
        self, facts: Mapping[str, Any], handles: Sequence[int], log: int, folder: str, limit_s: float, imports: Sequence[str] = ()
    ) -> Nursling:
        """Fork a child that runs the program's main with `facts`, in which "handles" becomes the numbers it knows them by.

        imports: modules that the nursery holds from then on, for this child and all later ones. Raises NurseryDied where they
        cannot be held.
        """
        packet = json.dumps({"facts": facts, "folder": folder, "imports": list(imports)}).encode()
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
            return Nursling(*self._spawned.pop(), self)

    def kill(self, serial: int) -> None:
        """By the process that alone tells the system to forget a child and its id. Dead, it took its children along."""
        with self._asking, contextlib.suppress(OSError):
            self._channel.send(json.dumps({"kill": serial}).encode())

    def wait(self, serial: int, timeout_s: float | None) -> int:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while serial not in self._codes:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"child {serial}", timeout_s or 0)
            try:
                self._read(0.05)
            except NurseryDied:
                return -9  # its children died with it
        return self._codes[serial]

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
                with contextlib.suppress(subprocess.TimeoutExpired):  # the channel closes a moment before the process has ended
                    self._process.wait(5)
                raise NurseryDied(f"exit status {self._process.poll()}")
            message = json.loads(packet)
            if "spawned" in message:
                self._spawned.append((message["spawned"], message["serial"]))
            else:
                self._codes[message["ended"]] = message["code"]

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
    children: dict[int, _Forked] = {}  # by pidfd
    listening: list[Any] = [channel]
    serials = itertools.count()
    while os.getppid() == facts["parent"]:
        ready = select.select([*listening, *children], [], [], 1.0)[0]
        for pidfd in children.keys() & ready:
            ended = children.pop(pidfd)
            _kill_group(ended.pid)  # what a child left; once it is taken in, its id may be a stranger's
            _, status = os.waitpid(ended.pid, 0)
            os.close(pidfd)
            _tell(channel, ended=ended.serial, code=os.waitstatus_to_exitcode(status))
        if channel in ready:
            packet, handles, _, _ = socket.recv_fds(channel, PACKET_BYTES, MOST_HANDLES)
            if not packet:
                break
            request = json.loads(packet)
            if "kill" in request:
                for child in children.values():
                    if child.serial == request["kill"]:
                        _kill_group(child.pid)
                continue
            import_all(request["imports"])
            pid = os.fork()
            if pid == 0:
                for pidfd in children:
                    os.close(pidfd)
                channel.close()
                _become_child(program, request, handles)
            child = children[os.pidfd_open(pid)] = _Forked(pid, next(serials))
            for handle in handles:
                os.close(handle)
            _tell(channel, spawned=pid, serial=child.serial)
    os._exit(0)


@dataclass(frozen=True, slots=True)
class _Forked:
    """A child as the process that forked it knows it."""

    pid: int
    serial: int


def _tell(channel: socket.socket, **facts: int) -> None:
    channel.send(json.dumps(facts).encode())


def import_all(names: Sequence[str]) -> None:
    """Modules for all children from now on. Ends this process where importing started the CUDA driver: no child could use it."""
    for name in names:
        with contextlib.suppress(ImportError):  # the child that needs it says so
            importlib.import_module(name)
    if names and driver_is_up():
        os._exit(DRIVER_IS_UP)


def driver_is_up() -> bool:
    """Whether something in this process has initialised the CUDA driver: a process that forks after it has children without."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALISED)


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
