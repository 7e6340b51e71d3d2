"""The program that runs in a cubin's child: a CUDA context, device memory laid out as it is told to, one launch at a time.
Judges nothing.

The only place where PyCUDA is imported: it holds the primary context, the stream, copies and the tiny kernel of health checks.
Memory is mapped through cuda-bindings, which PyCUDA lacks, and kernels are launched by `verifier.launch_cuda`, as in production.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from generator.canonical import digest_bytes
from generator.translate.records import launch_from_plain
from verifier import confine
from verifier.sandbox_child import FAR_BASE, PACKET_BYTES, read_all

#: Distance of two tensors of far rows in the addresses that questions name (`verifier.arena`).
FAR_STEP = 1 << 38

#: Writes its thread's number; the driver makes machine code of it for whatever device there is.
ALIVE_PTX = b"""
.version 6.4
.target sm_75
.address_size 64
.visible .entry alive(.param .u64 out)
{
  .reg .b32 %r<2>;
  .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [out];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd2, %rd3;
  st.global.u32 [%rd4], %r1;
  ret;
}
\0"""
ALIVE_THREADS = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the arena's file that is device memory, `at` bytes into a range of addresses: `place` 0 is the common one, others
    belong to one far tensor each.
    """

    offset: int
    length: int
    place: int
    at: int
    written: bool


def place_of(address: int) -> tuple[int, int]:
    """The range of addresses that a question's address lies in, and where in it."""
    if address < FAR_BASE:
        return 0, address
    number, at = divmod(address - FAR_BASE, FAR_STEP)
    return number + 1, at


def pieces_of(segments: Sequence[Sequence[Any]], guards: bool) -> tuple[Piece, ...]:
    """What has to be mapped. guards: bands stay without memory, so that whoever touches one is stopped; else they are memory."""
    out = []
    for offset, length, kind, address in segments:
        if kind != "guard" or not guards:
            place, at = place_of(address)
            out.append(Piece(offset, length, place, at, kind != "in"))
    return tuple(out)


def spans_of(pieces: Sequence[Piece], size: int) -> dict[int, int]:
    """Bytes of addresses that each range needs; a page more at the end of far ones, where nothing is mapped."""
    spans = {0: size}
    for piece in pieces:
        if piece.place:
            spans[piece.place] = max(spans.get(piece.place, 0), piece.at + 2 * piece.length)
    return spans


class DeviceRoom:
    """Ranges of device addresses with nothing in them, into which memory is mapped; copied from and to the arena's file."""

    def __init__(self, cuda: Any, handle: int, ordinal: int) -> None:
        from cuda.bindings import driver

        from verifier.launch_cuda import checked

        self._cuda, self._driver, self._checked, self._handle = cuda, driver, checked, handle
        self._property = driver.CUmemAllocationProp()
        self._property.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._property.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._property.location.id = ordinal
        self.can_seal = True  # whether the driver can map memory that may only be read
        self._file: mmap.mmap | None = None
        self._bases: dict[int, tuple[int, int]] = {}
        self._mapped: list[tuple[int, int, Any]] = []
        self._pieces: tuple[Piece, ...] = ()

    def lay_out(self, size: int, segments: Sequence[Sequence[Any]], guards: bool, writable_inputs: bool) -> None:
        """Map the arena's tensors anew and copy the file's content into them."""
        self._clear()
        self._file = mmap.mmap(self._handle, size)
        self._pieces = pieces_of(segments, guards)
        for place, span in spans_of(self._pieces, size).items():
            base = self._checked(self._driver.cuMemAddressReserve(span, 0, 0, 0), f"reserving {span} bytes of addresses")
            self._bases[place] = (int(base), span)
        for piece in self._pieces:
            self._map(piece)
        self.upload()
        if not writable_inputs and self.can_seal:
            self._seal()

    def _map(self, piece: Piece) -> None:
        memory = self._checked(
            self._driver.cuMemCreate(piece.length, self._property, 0), f"{piece.length} bytes of device memory"
        )
        address = self._address(piece)
        self._checked(self._driver.cuMemMap(address, piece.length, 0, memory, 0), "mapping device memory")
        self._mapped.append((address, piece.length, memory))
        self._allow(address, piece.length, "READWRITE")

    def _allow(self, address: int, length: int, what: str) -> None:
        access = self._driver.CUmemAccessDesc()
        access.location = self._property.location
        access.flags = getattr(self._driver.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{what}")
        self._checked(self._driver.cuMemSetAccess(address, length, [access], 1), f"access {what.lower()}")

    def _seal(self) -> None:
        """Inputs may only be read from now on, where the driver knows how."""
        from verifier.launch_cuda import CudaError

        for piece in self._pieces:
            if not piece.written:
                try:
                    self._allow(self._address(piece), piece.length, "READ")
                except CudaError:
                    self.can_seal = False
                    return

    def _address(self, piece: Piece) -> int:
        return self._bases[piece.place][0] + piece.at

    def address(self, named: int) -> int:
        """The device address that a question's address stands for."""
        place, at = place_of(named)
        return self._bases[place][0] + at

    def upload(self) -> None:
        with memoryview(self._file) as view:  # type: ignore[arg-type]
            for piece in self._pieces:
                with view[piece.offset : piece.offset + piece.length] as part:
                    self._cuda.memcpy_htod(self._address(piece), part)
        self._cuda.Context.synchronize()  # a copy from pageable memory may return before it is there

    def download(self) -> None:
        """Everything that is mapped, inputs and bands included, so that the supervisor sees whatever changed."""
        with memoryview(self._file) as view:  # type: ignore[arg-type]
            for piece in self._pieces:
                with view[piece.offset : piece.offset + piece.length] as part:
                    self._cuda.memcpy_dtoh(part, self._address(piece))

    def _clear(self) -> None:
        for address, length, memory in self._mapped:
            self._checked(self._driver.cuMemUnmap(address, length), "unmapping")
            self._checked(self._driver.cuMemRelease(memory), "releasing")
        for base, span in self._bases.values():
            self._checked(self._driver.cuMemAddressFree(base, span), "freeing addresses")
        self._mapped, self._bases = [], {}
        if self._file is not None:
            self._file.close()
            self._file = None


class CudaChild:
    """Answers one question at a time, until the channel closes, a question says to stop, or the device stops the kernel."""

    def __init__(self, channel: socket.socket, cuda: Any, stream: Any, room: DeviceRoom) -> None:
        self._channel, self._cuda, self._stream, self.room = channel, cuda, stream, room
        self._kernel: Any = None

    def take(self, kernel: Any) -> None:
        self._kernel = kernel

    def serve(self) -> None:
        while packet := self._channel.recv(PACKET_BYTES):
            question = json.loads(packet)
            try:
                facts = self._do(question)
            except (self._cuda.Error, RuntimeError) as error:  # PyCUDA's, and those of the launcher and of torch
                facts = {"device_error": f"{type(error).__name__}: {error}"}
            self._channel.send(json.dumps({"nonce": question["nonce"], **facts}).encode())
            if question["do"] == "stop" or "device_error" in facts:
                return

    def _do(self, question: dict[str, Any]) -> dict[str, Any]:
        match question["do"]:
            case "map":
                self.room.lay_out(question["size"], question["segments"], question["guards"], question["writable_inputs"])
                return {"sealed": self.room.can_seal}
            case "run":
                return {"result": self._run(question)}
            case "stop":
                return {}
            case other:
                raise ValueError(f"do: expected map, run or stop, found {other!r}")

    def _run(self, question: dict[str, Any]) -> str:
        from verifier.cuda_arguments import PlacedTensor
        from verifier.launch import LaunchError

        places = zip(question["addresses"], question["shapes"], question["strides"], strict=True)
        tensors = [PlacedTensor(self.room.address(at), tuple(shape), tuple(strides)) for at, shape, strides in places]
        try:
            call = self._kernel.prepare(tensors, question["scalars"])
        except LaunchError as error:
            return f"LaunchError: {error}"
        call.run(self._stream.handle)
        self._stream.synchronize()
        self.room.download()
        return "done"


def first_device() -> tuple[Any, Any, Any]:
    """PyCUDA, the first visible device, and its primary context, pushed. Raises whatever is wrong with driver or package."""
    with contextlib.suppress(Exception):  # PyCUDA wants cuRAND, which may lie in a Python package of its own
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("curand")
    import pycuda.driver as cuda

    cuda.init()
    device = cuda.Device(0)
    context = device.retain_primary_context()
    context.push()
    return cuda, device, context


def open_device(channel: socket.socket, fences: dict[str, bool]) -> tuple[Any, Any, Any] | None:
    """As `first_device`; None, told on the channel, where that fails."""
    try:
        return first_device()
    except Exception as error:  # whatever is wrong with driver, device or package, it is not the candidate
        cure = "; install it with `pip install pycuda`" if isinstance(error, ImportError) else ""
        say(channel, {"no_device": f"{type(error).__name__}: {error}{cure}", "fences": fences})
        return None


def told_by(cuda: Any, device: Any) -> dict[str, Any]:
    """What the driver says of the device: plain values."""
    attribute = cuda.device_attribute
    major, minor = device.compute_capability()
    return {
        "name": device.name(),
        "compute_capability": f"{major}.{minor}",
        "sm_count": device.get_attribute(attribute.MULTIPROCESSOR_COUNT),
        "memory_bytes": device.total_memory(),
        "l2_bytes": device.get_attribute(attribute.L2_CACHE_SIZE),
        "shared_bytes_per_sm": device.get_attribute(attribute.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
        "sm_clock_khz": device.get_attribute(attribute.CLOCK_RATE),
        "driver_version": cuda.get_driver_version(),
        "pycuda": ".".join(map(str, _pycuda_version())),
    }


def _pycuda_version() -> tuple[int, ...]:
    import pycuda

    return tuple(pycuda.VERSION)


def alive(cuda: Any) -> str:
    """ "" when the tiny kernel gives the right answer."""
    out = cuda.mem_alloc(4 * ALIVE_THREADS)
    cuda.memset_d32(int(out), 0xDEAD, ALIVE_THREADS)
    function = cuda.module_from_buffer(ALIVE_PTX).get_function("alive")
    function.prepare("P")
    function.prepared_call((1, 1), (ALIVE_THREADS, 1, 1), int(out))
    cuda.Context.synchronize()
    found = bytearray(4 * ALIVE_THREADS)
    cuda.memcpy_dtoh(found, int(out))
    numbers = [int.from_bytes(found[i : i + 4], "little") for i in range(0, len(found), 4)]
    return "" if numbers == list(range(ALIVE_THREADS)) else f"a tiny kernel gave {numbers[:4]}... instead of 0, 1, 2..."


def load(facts: dict[str, Any], binary: bytes) -> Any:
    """The candidate in this process's context. Raises LaunchError for other bytes, CudaError where the driver refuses them."""
    from verifier.launch import LaunchError
    from verifier.launch_cuda import CudaKernel

    if digest_bytes(binary) != facts["hash"]:
        raise LaunchError("binary: it is not what was built (SHA-256 differs)")
    return CudaKernel(launch_from_plain(facts["launch"]), binary)


def fence(facts: dict[str, Any]) -> dict[str, bool]:
    """The fences of a child that runs a CUDA driver: no address space limit (it reserves terabytes), files and threads stay."""
    confine.bound_to_parent(facts["parent"])
    confine.limit_processor(facts["cpu_s"])
    return {"no_network": confine.no_network(), "no_new_privileges": confine.no_new_privileges(), "device_code_only": True}


def say(channel: socket.socket, facts: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        channel.send(json.dumps({"nonce": "start", **facts}).encode())


def main(facts: dict[str, Any]) -> None:
    """facts: parent, handles (channel, arena, binary), launch, hash, cpu_s; alive: only a health check."""
    channel_handle, arena, binary = facts["handles"]
    channel = socket.socket(fileno=channel_handle)
    fences = fence(facts)
    if (opened := open_device(channel, fences)) is None:
        os._exit(0)
    cuda, device, _context = opened  # a context that nobody holds is given back
    told = told_by(cuda, device)
    if facts.get("alive"):
        wrong = alive(cuda)
        say(channel, {"fences": fences, "facts": told, **({"error": wrong} if wrong else {})})
        os._exit(0)
    try:
        kernel = load(facts, read_all(binary))
    except Exception as error:
        say(channel, {"fences": fences, "error": str(error)})
        os._exit(0)
    child = CudaChild(channel, cuda, cuda.Stream(), DeviceRoom(cuda, arena, 0))
    child.take(kernel)
    say(channel, {"fences": fences, "facts": told})
    with contextlib.suppress(ConnectionError):
        child.serve()
    os._exit(0)
