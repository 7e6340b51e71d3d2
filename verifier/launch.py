"""Calls compiled kernels: the `Launcher` protocol and the CPU's way of it (dlopen, one argument block). Judges nothing,
imports no torch.

The verifier's children and the production loader use the same code path from here.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from generator.canonical import digest_bytes
from generator.translate.records import Launch, TensorParameter
from verifier.fork_lock import ForkLock


class TensorLike(Protocol):
    """What a launcher needs of a tensor; torch tensors have it."""

    def data_ptr(self) -> int: ...
    def stride(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class RawTensor:
    """An address with strides in elements, for callers without torch. shape: None where nobody asks for it."""

    pointer: int
    strides: tuple[int, ...]
    shape: tuple[int, ...] | None = None

    def data_ptr(self) -> int:
        return self.pointer

    def stride(self) -> tuple[int, ...]:
        return self.strides


class Launcher(Protocol):
    """A loaded kernel of any target."""

    launch: Launch

    def call(self, tensors: Sequence[TensorLike], scalars: Sequence[int | float]) -> None:
        """Run once. Tensors and scalars stand in the order of `launch`; the call returns when the work is done or queued."""
        ...


class LaunchError(ValueError):
    """Arguments that the kernel's contract does not allow; the message names the parameter."""


class FarmCall(ctypes.Structure):
    """The argument block of a C++ kernel (docs/architecture.md)."""

    _fields_ = [
        ("tensors", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("ints", ctypes.c_void_p),
        ("floats", ctypes.c_void_p),
        ("parallel", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
    ]


class CallBlock:
    """Memory for the arguments of one kernel, filled anew for each call. Not shared between threads."""

    __slots__ = (
        "_call",
        "_floats",
        "_float_pack",
        "_int_pack",
        "_ints",
        "_pointers",
        "_stride_pack",
        "_strides",
        "address",
        "put_pointers",
    )

    def __init__(self, launch: Launch, parallel: int, num_threads: int) -> None:
        num_strides = sum(t.ndim for t in launch.tensors)
        num_ints = sum(s.dtype == "i32" for s in launch.scalars)
        num_floats = len(launch.scalars) - num_ints
        pointer_pack, self._stride_pack = struct.Struct(f"{len(launch.tensors)}Q"), struct.Struct(f"{num_strides}q")
        self._int_pack, self._float_pack = struct.Struct(f"{num_ints}q"), struct.Struct(f"{num_floats}f")
        self._pointers, self._strides = (ctypes.create_string_buffer(max(8, p.size)) for p in (pointer_pack, self._stride_pack))
        self._ints, self._floats = (ctypes.create_string_buffer(max(8, p.size)) for p in (self._int_pack, self._float_pack))
        addresses = [ctypes.addressof(b) for b in (self._pointers, self._strides, self._ints, self._floats)]
        self._call = FarmCall(*addresses, parallel or None, num_threads)
        self.address = ctypes.addressof(self._call)
        #: As `set_pointers`, each pointer an argument: one C call, for who makes many calls.
        self.put_pointers: Callable[..., None] = functools.partial(pointer_pack.pack_into, self._pointers, 0)

    def set_pointers(self, pointers: Sequence[int]) -> None:
        self.put_pointers(*pointers)

    def set_strides(self, strides: Sequence[int]) -> None:
        """Tensor after tensor, every axis, in elements."""
        self._stride_pack.pack_into(self._strides, 0, *strides)

    def set_scalars(self, ints: Sequence[int], floats: Sequence[float]) -> None:
        """The i32 scalars and the f32 scalars, each in the order of the launch."""
        self._int_pack.pack_into(self._ints, 0, *ints)
        self._float_pack.pack_into(self._floats, 0, *floats)

    def set_num_threads(self, num_threads: int) -> None:
        self._call.num_threads = num_threads


class CpuKernel:
    """A C++ kernel in this process. It stays loaded for the life of the process.

    `call` checks its arguments; `run` on a filled `block()` is the path for callers that have checked them before.
    """

    def __init__(self, launch: Launch, entry: Any, num_threads: int | None, parallel: int) -> None:
        self.launch = launch
        self.num_threads = num_threads or default_num_threads()
        self._parallel = parallel
        self._entry = entry
        self._is_int = tuple(s.dtype == "i32" for s in launch.scalars)
        self._local = threading.local()

    def block(self) -> CallBlock:
        return CallBlock(self.launch, self._parallel, self.num_threads)

    def run(self, block: CallBlock) -> None:
        """Raises MemoryError when the kernel found no memory for its scratch (nothing is written then)."""
        code = self._entry(block.address)
        if code == 1:
            raise MemoryError(f"{self.launch.entry}: no memory for scratch")
        if code != 0:
            raise RuntimeError(f"{self.launch.entry}: returned {code}, which its contract does not know")

    def call(self, tensors: Sequence[TensorLike], scalars: Sequence[int | float]) -> None:
        """Raises LaunchError for arguments that the launch does not allow."""
        strides = [t.stride() for t in tensors]
        check_call(self.launch, strides, scalars)
        block = getattr(self._local, "block", None)
        if block is None:
            block = self._local.block = self.block()
        block.set_pointers([t.data_ptr() for t in tensors])
        block.set_strides([s for axes in strides for s in axes])
        block.set_scalars(
            [int(v) for v, is_int in zip(scalars, self._is_int, strict=True) if is_int],
            [float(v) for v, is_int in zip(scalars, self._is_int, strict=True) if not is_int],
        )
        self.run(block)


def check_call(launch: Launch, strides: Sequence[Sequence[int]], scalars: Sequence[int | float]) -> None:
    """Numbers of arguments, ranks, unit strides and promises. Raises LaunchError."""
    if len(strides) != len(launch.tensors):
        raise LaunchError(
            f"tensors: expected {len(launch.tensors)} ({', '.join(t.name for t in launch.tensors)}), found {len(strides)}"
        )
    if len(scalars) != len(launch.scalars):
        raise LaunchError(
            f"scalars: expected {len(launch.scalars)} ({', '.join(s.name for s in launch.scalars)}), found {len(scalars)}"
        )
    for parameter, axes in zip(launch.tensors, strides, strict=True):
        check_strides(parameter, axes)
    for scalar, value in zip(launch.scalars, scalars, strict=True):
        if scalar.positive and not value > 0:
            raise LaunchError(f"{scalar.name}: expected more than 0, as the kernel was promised, found {value}")


def check_strides(parameter: TensorParameter, strides: Sequence[int]) -> None:
    """Raises LaunchError for a wrong rank, or a last axis that is not contiguous in a matrix of two axes."""
    if len(strides) != parameter.ndim:
        raise LaunchError(f"{parameter.name}: expected {parameter.ndim} axes, found {len(strides)}")
    if parameter.axes == 2 and strides[-1] != 1:
        raise LaunchError(
            f"{parameter.name}: expected a last axis with stride 1, found stride {strides[-1]}; make it contiguous first"
        )


def load_cpu(
    data: bytes, launch: Launch, *, expected_hash: str | None = None, num_threads: int | None = None, parallel: int | None = None
) -> CpuKernel:
    """Load a shared object from memory: the bytes that are hashed are the bytes that are mapped.

    `expected_hash`: SHA-256; a difference raises LaunchError. The same bytes are mapped once in a process. `parallel`: the
    address of the function that runs threads, `parallel_pointer()` by default.
    """
    found = digest_bytes(data)
    if expected_hash is not None and found != expected_hash:
        raise LaunchError(f"binary: expected SHA-256 {expected_hash}, found {found}; the file was changed after it was built")
    library = _library(found, data)
    try:
        entry = library[launch.entry]
    except AttributeError:
        raise LaunchError(f"binary: no entry point named {launch.entry}") from None
    entry.argtypes, entry.restype = [ctypes.c_void_p], ctypes.c_int32
    return CpuKernel(launch, entry, num_threads, parallel_pointer() if parallel is None else parallel)


_libraries: dict[str, ctypes.CDLL] = {}
_sealed: dict[str, int] = {}
_loading = ForkLock()


def seal(data: bytes) -> None:
    """Put the bytes where `load_cpu` will map them from, for a process that will not be able to make files any more."""
    name = digest_bytes(data)
    _sealed[name] = _sealed_file(name, data)


def _library(name: str, data: bytes) -> ctypes.CDLL:
    with _loading:
        if name not in _libraries:
            handle = _sealed.pop(name) if name in _sealed else _sealed_file(name, data)
            try:
                # The file stays open: glibc remembers libraries by path, and a later file under the same number would be
                # taken for this one.
                _libraries[name] = ctypes.CDLL(f"/proc/self/fd/{handle}", mode=os.RTLD_LOCAL | os.RTLD_NOW)
            except OSError as error:
                os.close(handle)
                raise LaunchError(f"binary: cannot be loaded: {error}") from None
        return _libraries[name]


def _sealed_file(name: str, data: bytes) -> int:
    """An anonymous file that nobody, this process included, can write any more."""
    handle = os.memfd_create(f"farm-{name[:16]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return handle


def default_num_threads() -> int:
    """torch's own count when torch is loaded, else the CPUs given to this process."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else len(os.sched_getaffinity(0))


def parallel_pointer() -> int:
    """The address of GOMP_parallel in the OpenMP runtime that torch runs on, so that there is one pool of threads.

    Without torch: the system's libgomp, loaded now; without that: 0, and kernels run on the thread that calls.
    """
    for path in (*_loaded_openmp(), "libgomp.so.1"):
        try:
            library = ctypes.CDLL(path)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


def _loaded_openmp() -> list[str]:
    """OpenMP runtimes that are mapped into this process, torch's own first."""
    found: dict[str, None] = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path and os.path.basename(path).startswith(("libgomp", "libiomp5", "libomp")):
                found["/" + path] = None
    return sorted(found, key=lambda path: "torch" not in path)
