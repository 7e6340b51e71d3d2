"""One candidate in one child process: started, told to run, killed. What it wrote is judged elsewhere, by the process that
owns this.

The child leads a session and a process group of its own; the whole group gets SIGKILL at a limit and at the end. It has hard
limits of CPU time and address space, an empty working folder, no core dumps, no network, no files (Landlock), and, from the
moment that the candidate is mapped, only the system calls that computing needs (seccomp): none that starts a process or a
thread, opens a file, sends a signal or reaches the network. It dies when this process dies. Inputs and outputs lie in memory
that this process owns (`verifier.arena`); the answer over the channel is only "done", under a number that the question gave.
A child that has answered for a call is stopped until it is asked again: nothing of the call goes on while its results are looked
at.

What is not stopped: on kernels without Landlock or seccomp the candidate may read what this user may read (`fences` of a started
sandbox says which are up); a candidate can forge its child's answers, which gains nothing, since outputs are judged and time is
taken here; it can measure its neighbours through shared caches; it can slow the machine down while it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

from generator.canonical import digest_bytes, to_plain
from generator.translate.records import Launch
from verifier.arena import Arena, Memory, Slot
from verifier.nursery import NurseryDied, Nursling, nursery_for
from verifier.own_folder import OwnFolder
from verifier.sandbox_child import PACKET_BYTES


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """start_s: until the candidate is loaded; run_s: one call; cpu_s: the child's life, all threads; memory_bytes: besides the
    tensors, the child's address space (thread stacks and the allocator's reservations count).
    """

    start_s: float = 20.0
    run_s: float = 10.0
    cpu_s: int = 300
    memory_bytes: int = 4 << 30


@dataclass(frozen=True, slots=True)
class Ran:
    """The call came back; `result` is "done" or what the launcher said. wall_s: on this process's clock. facts: what else it
    said.
    """

    result: str
    wall_s: float
    facts: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Died:
    """The child ended instead of answering: by a signal (its number), or with an exit status. error: what a GPU's driver said
    when it stopped the kernel; nothing can be done in that process any more.
    """

    signal: int
    status: int
    log: str
    error: str = ""

    @property
    def forbidden_call(self) -> bool:
        return self.signal == 31  # SIGSYS: what the filter of system calls sends

    @property
    def bad_access(self) -> bool:
        return self.signal in (7, 11) or "illegal memory access" in self.error  # SIGBUS, SIGSEGV

    def __str__(self) -> str:
        if self.error:
            return f"was stopped by the device: {self.error}"
        if self.forbidden_call:
            return "made a system call that computing does not need (a process, a thread, a signal or the network)"
        if self.signal:
            return f"killed by {signal.Signals(self.signal).name}"
        words = self.log.strip().splitlines()
        return f"exited with status {self.status}" + (f" ({words[-1][:200]})" if words else "")


@dataclass(frozen=True, slots=True)
class TimedOut:
    limit_s: float


Outcome = Ran | Died | TimedOut


class CallTensor(NamedTuple):
    """One tensor of a call as the kernel addresses it: its slot in the arena; strides in elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


#: Programs whose children import for themselves what takes long.
_IMPORT_THEMSELVES: set[str] = set()


class CannotStart(RuntimeError):
    """The child could not load the candidate, or did not come up: the message says which."""


class Sandbox:
    """A context manager; inside it the child is alive unless a run says otherwise. Never used again after a death or a
    timeout.
    """

    program = "verifier.sandbox_child"
    #: Questions that are calls: the child is stopped when it has answered.
    calls: ClassVar[frozenset[str]] = frozenset({"run", "go"})
    #: Modules that every child needs and that take long to import.
    imports: tuple[str, ...] = ()
    #: Little, and an allocator that hands out dirty memory, so that scratch nobody wrote is noticed; idle threads sleep.
    environment: ClassVar[Mapping[str, str]] = {
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C",
        "OMP_WAIT_POLICY": "PASSIVE",
        "MALLOC_PERTURB_": "165",
        "GLIBC_TUNABLES": "glibc.malloc.perturb=165:glibc.malloc.mmap_threshold=1073741824",
    }

    def __init__(self, binary: bytes, launch: Launch, num_threads: int, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self.memory = Memory()
        self.fences: dict[str, bool] = {}
        self._binary, self._launch, self._num_threads = binary, launch, num_threads
        self._channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._held = OwnFolder("child")
        self._folder = self._held.path
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: Nursling | None = None
        self._signals = -1  # a handle of the process: its number may be another's one day
        self._stopped = False
        self._threads = 0

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        binary = os.memfd_create("farm-binary", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(binary), "wb") as file:
                file.write(self._binary)
            facts = {
                "launch": to_plain(self._launch),
                "hash": digest_bytes(self._binary),
                "num_threads": self._num_threads,
                "openmp": openmp_of_torch(),
                "cpu_s": self.limits.cpu_s,
                "memory_bytes": self.limits.memory_bytes + (1 << 27) * self._num_threads,
                **self._more_facts(),
            }
            handles = (self._theirs.fileno(), self.memory.handle, binary)
            self._process = self._child(facts, handles)
        except NurseryDied as error:
            raise CannotStart(f"the process that starts children died: {error}") from None
        finally:
            os.close(binary)
        self._theirs.close()
        if self.calls:
            with contextlib.suppress(OSError):  # gone already: the channel tells
                self._signals = os.pidfd_open(self.pid)
        self.hear_start()

    def _child(self, facts: dict[str, Any], handles: tuple[int, ...]) -> Nursling:
        log, limit_s = self._log.fileno(), self.limits.start_s
        if self.imports and self.program not in _IMPORT_THEMSELVES:
            try:
                return nursery_for(self.program, self.environment).spawn(facts, handles, log, self._folder, limit_s, self.imports)
            except NurseryDied:  # it cannot hold the modules: every child imports them for itself
                _IMPORT_THEMSELVES.add(self.program)
        return nursery_for(self.program, self.environment).spawn(facts, handles, log, self._folder, limit_s)

    def hear_start(self) -> None:
        """Wait for the child to say which fences are up and that it is ready. Raises CannotStart."""
        started = self._hear("start", self.limits.start_s)
        if not isinstance(started, dict):
            raise CannotStart(f"the candidate could not be loaded: {started}" + self._tail())
        if "error" in started:
            raise CannotStart(started["error"])
        self.fences = started["fences"]
        self._threads = self._count_threads()

    def _more_facts(self) -> dict[str, Any]:
        """What another program than the usual one is told besides."""
        return {}

    def close(self) -> None:
        """Kill the group, whatever state it is in, and give everything back."""
        if self._process is not None:
            self._kill()
        if self._signals >= 0:
            os.close(self._signals)
            self._signals = -1
        self._channel.close()
        self._theirs.close()
        self._log.close()
        self.memory.close()
        self._held.close()

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def arena(self, slots: Sequence[Slot]) -> Arena:
        """Memory for one input, in pieces that the child can map."""
        return Arena(self.memory, slots)

    def lay_out(self, arena: Arena, *, guards: bool = True, writable_inputs: bool = True) -> Outcome:
        """Map the arena. guards: bands around tensors that nobody may touch; without, they are memory, checked afterwards."""
        segments = [[s.offset, s.length, s.kind, s.address] for s in arena.segments]
        return self.ask(
            {"do": "map", "size": arena.size, "segments": segments, "guards": guards, "writable_inputs": writable_inputs},
            self.limits.start_s,
        )

    def run(
        self, arena: Arena, tensors: Sequence[CallTensor], scalars: Sequence[int | float], num_threads: int | None = None
    ) -> Outcome:
        """Call the kernel once. tensors: of each parameter, in launch order; scalars likewise. num_threads: fewer than the child
        was given; a GPU's kernel has none.
        """
        call: dict[str, Any] = {
            "num_threads": num_threads or self._num_threads,
            "addresses": [arena.address_of(t.name) for t in tensors],
            **self.numbers(tensors, scalars),
        }
        return self.ask({"do": "run", **call}, self.limits.run_s)

    def numbers(self, tensors: Sequence[CallTensor], scalars: Sequence[int | float]) -> dict[str, Any]:
        pairs = list(zip(self._launch.scalars, scalars, strict=True))
        return {
            "strides": [stride for t in tensors for stride in t.strides],
            "ints": [int(value) for scalar, value in pairs if scalar.dtype == "i32"],
            "floats": [float(value) for scalar, value in pairs if scalar.dtype != "i32"],
        }

    def working_threads(self) -> Outcome:
        """Asks how many threads of the child's pool take part in a parallel region now ("threads" of the answer's facts): as many
        as it was given, unless a call left a region of its own other than by its end.
        """
        return self.ask({"do": "pool"}, self.limits.run_s)

    def extra_threads(self) -> int:
        """Threads that the child has now beyond those it had before its first run."""
        return max(0, self._count_threads() - self._threads)

    def _count_threads(self) -> int:
        try:
            return len(os.listdir(f"/proc/{self.pid}/task"))
        except OSError:
            return self._threads

    def ask(self, question: dict[str, Any], limit_s: float) -> Outcome:
        """Send a question and wait for its answer; the time from one to the other is measured here."""
        if self._stopped:
            self._signal(signal.SIGCONT)
            self._stopped = False
        nonce = secrets.token_hex(16)
        packet = json.dumps({**question, "nonce": nonce}).encode()
        self._channel.settimeout(limit_s)
        started = time.perf_counter()
        try:
            self._channel.send(packet)
        except (BrokenPipeError, ConnectionError):
            return self._death()
        answer = self._hear(nonce, limit_s)
        wall_s = time.perf_counter() - started
        if question["do"] in self.calls:
            self._signal(signal.SIGSTOP)
            self._stopped = True
        return Ran(answer.pop("result", "done"), wall_s, answer) if isinstance(answer, dict) else answer

    def _signal(self, number: int) -> None:
        """To the whole process, if it is still there."""
        if self._signals >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._signals, number)

    def _hear(self, nonce: str, limit_s: float) -> dict[str, Any] | Died | TimedOut:
        """The packet that carries the nonce; any other is not from our code and is dropped."""
        deadline = time.monotonic() + limit_s
        while (left := deadline - time.monotonic()) > 0:
            self._channel.settimeout(left)
            try:
                packet = self._channel.recv(PACKET_BYTES)
            except TimeoutError:
                break
            except ConnectionError:
                return self._death()
            if not packet:
                return self._death()
            if (answer := _parsed(packet)).get("nonce") == nonce:
                return answer
        self._kill()
        return TimedOut(limit_s)

    def _death(self) -> Died:
        assert self._process is not None
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:  # it closed its end and lives on
            self._process.kill()
            code = self._process.wait()
        return Died(max(0, -code), max(0, code), self._tail())

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4096:].decode(errors="replace")


def kept_threads(found: int, given: int) -> str:
    return f"{found} of {given} threads of the pool are there after the call: it left a parallel region other than by its end"


def _parsed(packet: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(packet)
        return answer if isinstance(answer, dict) else {}
    except ValueError:
        return {}


def openmp_of_torch() -> str:
    """The OpenMP runtime that torch brings, so that the child loads the same one without loading torch; "" for the system's."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    package = Path(spec.origin).parent
    folders = (package / "lib", package.parent / "torch.libs")
    return next((str(file) for folder in folders for file in sorted(folder.glob("libgomp*.so*"))), "")
