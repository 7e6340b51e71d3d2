"""The program that runs in a candidate's child: maps what it is told to, calls the kernel, says that it is done. Judges nothing.

It imports neither torch nor numpy, and never sees a reference, a tolerance or a seed. `verifier.sandbox` starts it and speaks
with it over a socket of whole packets; every answer carries the number of its question.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import platform
import socket
import struct
import threading
from typing import Any

from generator.translate.records import Launch, launch_from_plain
from verifier import confine
from verifier.launch import CallBlock, CpuKernel, LaunchError, load_cpu, parallel_pointer, seal

PACKET_BYTES = 1 << 18
FAR_BASE = 0x2000_0000_0000  # as in verifier.arena, which imports too much for a child
_MAP_FIXED, _PROT_NONE = 0x10, 0
#: All bits of MXCSR but the flags that say what has happened (Intel's manual, volume 1, 10.2.3).
MXCSR_CONTROL = 0xFFC0

_libc = ctypes.CDLL(None, use_errno=True)
_libm = ctypes.CDLL("libm.so.6")
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class Room:
    """A range of addresses with nothing in it, into which pieces of the arena's file are mapped, always at the same place."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.base = 0
        self._size = 0
        self._far: list[tuple[int, int]] = []

    def lay_out(self, size: int, segments: list[list[Any]], guards: bool, writable_inputs: bool) -> None:
        """guards: pages around tensors cannot be touched; otherwise they are memory like any other."""
        if size > self._size:
            self.base, self._size = self._map(0, size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0), size
        self._map(self.base, self._size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0)
        while self._far:
            _libc.munmap(*self._far.pop())
        for offset, length, kind, address in segments:
            if kind == "guard" and guards:
                continue
            reads_only = kind == "in" and not writable_inputs
            protection = mmap.PROT_READ | (0 if reads_only else mmap.PROT_WRITE)
            self._map(self.address(address), length, protection, mmap.MAP_SHARED | _MAP_FIXED, self._handle, offset)
            if address >= FAR_BASE:
                self._far.append((address, length))

    def address(self, offset: int) -> int:
        """From FAR_BASE on, addresses are given as they are."""
        return offset if offset >= FAR_BASE else self.base + offset

    @staticmethod
    def _map(address: int, length: int, protection: int, flags: int, handle: int, offset: int) -> int:
        found = _libc.mmap(address or None, length, protection, flags, handle, offset)
        if found is None or found == ctypes.c_void_p(-1).value:
            raise MemoryError(f"cannot map {length} bytes: {os.strerror(ctypes.get_errno())}")
        return int(found)


class Child:
    """Answers one question at a time, until the channel closes or a question says to stop."""

    def __init__(self, channel: socket.socket, arena: int) -> None:
        self._channel = channel
        self._room = Room(arena)
        self._kernel: CpuKernel | None = None
        self._parallel = 0
        self._block: CallBlock | None = None

    def take(self, kernel: CpuKernel, parallel: int) -> None:
        """The candidate, once it is loaded, and the pool of threads that it is given."""
        self._kernel, self._block, self._parallel = kernel, kernel.block(), parallel

    def serve(self) -> None:
        while packet := self._channel.recv(PACKET_BYTES):
            question = json.loads(packet)
            self._answer(question["nonce"], **self._do(question))
            if question["do"] == "stop":
                return

    def _answer(self, nonce: str, **facts: Any) -> None:
        self._channel.send(json.dumps({"nonce": nonce, **facts}).encode())

    def _do(self, question: dict[str, Any]) -> dict[str, Any]:
        match question["do"]:
            case "map":
                self._room.lay_out(question["size"], question["segments"], question["guards"], question["writable_inputs"])
                return {"base": self._room.base}
            case "run":
                assert self._block is not None
                self.fill(self._block, question["addresses"], question)
                self._block.set_num_threads(question["num_threads"])
                return {"result": self._run(self._block)}
            case "pool":
                assert self._kernel is not None
                return {"threads": working_threads(self._parallel, self._kernel.num_threads)}
            case "stop":
                return {}
            case other:
                raise ValueError(f"do: expected map, run, pool or stop, found {other!r}")

    def fill(self, block: CallBlock, addresses: list[int], numbers: dict[str, Any]) -> None:
        block.set_pointers([self._room.address(offset) for offset in addresses])
        block.set_strides(numbers["strides"])
        block.set_scalars(numbers["ints"], numbers["floats"])

    def _run(self, block: CallBlock) -> str:
        assert self._kernel is not None
        before = float_mode()
        try:
            self._kernel.run(block)
        except (MemoryError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        if (after := float_mode()) != before:
            was, now = (f"{mode[1]:#06x}" for mode in (before, after))
            return f"the thread's floating-point mode (MXCSR) was {was} before the call and {now} after it: put it back"
        return "done"


def warm_pool(pointer: int, num_threads: int) -> None:
    """Start the OpenMP threads now: later, none may start. The body that they run is a call that does nothing."""
    if pointer:
        parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(pointer)
        parallel(ctypes.cast(_libc.getppid, ctypes.c_void_p), None, num_threads, 0)


def working_threads(pointer: int, num_threads: int) -> int:
    """How many threads a parallel region of `num_threads` has now; without a pool, that many."""
    if not pointer:
        return num_threads
    seen: set[int] = set()
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.add(threading.get_native_id()))
    parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(pointer)
    parallel(ctypes.cast(body, ctypes.c_void_p), None, num_threads, 0)
    return len(seen)


def float_mode() -> tuple[int, int]:
    """How this thread computes: the x87 control word, and the control bits of MXCSR (rounding, traps, subnormals flushed).

    (0, 0) on other processors than x86-64.
    """
    environment = ctypes.create_string_buffer(64)  # fenv_t of glibc: 28 bytes as x87 stores them, then MXCSR
    if platform.machine() != "x86_64" or _libm.fegetenv(environment):
        return 0, 0
    return struct.unpack_from("<H", environment)[0], struct.unpack_from("<I", environment, 28)[0] & MXCSR_CONTROL


def read_all(handle: int) -> bytes:
    return os.pread(handle, os.fstat(handle).st_size, 0)


def fenced_kernel(
    facts: dict[str, Any], binary: bytes, channel: socket.socket, parallel: int, fences: dict[str, bool]
) -> CpuKernel | None:
    """Put the fences up and load the candidate behind them; says on the channel that it did, or why not."""
    launch: Launch = launch_from_plain(facts["launch"])
    seal(binary)
    fences["no_new_privileges"] = confine.no_new_privileges()
    fences["no_files"] = confine.no_files()
    warm_pool(parallel, facts["num_threads"])
    fences["few_system_calls"] = confine.few_system_calls(reading_files=True)
    started: dict[str, Any] = {"nonce": "start", "fences": fences}
    try:
        kernel = load_cpu(binary, launch, expected_hash=facts["hash"], num_threads=facts["num_threads"], parallel=parallel)
    except LaunchError as error:
        channel.send(json.dumps({**started, "error": str(error)}).encode())
        return None
    confine.few_system_calls(reading_files=False)
    channel.send(json.dumps(started).encode())
    return kernel


def main(facts: dict[str, Any]) -> None:
    """facts: parent, handles (channel, arena, binary), launch, hash, openmp (a path), num_threads, cpu_s, memory_bytes."""
    confine.bound_to_parent(facts["parent"])
    confine.limit(facts["cpu_s"], facts["memory_bytes"])
    channel_handle, arena, binary = facts["handles"]
    channel = socket.socket(fileno=channel_handle)
    fences = {"no_network": confine.no_network()}
    if facts["openmp"]:
        ctypes.CDLL(facts["openmp"])
    ctypes.CDLL("libm.so.6")  # the libraries' files are opened while files can be
    parallel = parallel_pointer()
    kernel = fenced_kernel(facts, read_all(binary), channel, parallel, fences)
    if kernel is not None:
        child = Child(channel, arena)
        child.take(kernel, parallel)
        with contextlib.suppress(ConnectionError):
            child.serve()
    os._exit(0)
