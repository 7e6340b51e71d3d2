"""A stand-in for the part of PyCUDA that the verifier uses, on ordinary memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace


class Error(Exception):
    pass


class Context:
    pushed = 0

    def push(self) -> None:
        Context.pushed += 1

    @staticmethod
    def pop() -> None:
        Context.pushed -= 1

    @staticmethod
    def synchronize() -> None:
        pass


class Device:
    def __init__(self, number: int) -> None:
        assert number == 0

    def retain_primary_context(self) -> Context:
        return Context()

    def compute_capability(self) -> tuple[int, int]:
        return 9, 0

    def name(self) -> str:
        return "a stand-in"

    def get_attribute(self, attribute: int) -> int:
        return attribute

    def total_memory(self) -> int:
        return 1 << 30


class Stream:
    handle = 77

    def __init__(self, flags: int = 0) -> None:
        self.flags = flags

    def synchronize(self) -> None:
        pass


class _Function:
    def prepare(self, kinds: str) -> None:
        assert kinds == "P"

    def prepared_call(self, grid: tuple[int, ...], block: tuple[int, ...], out: int) -> None:
        numbers = (ctypes.c_uint32 * block[0]).from_address(out)
        numbers[:] = range(block[0])


device_attribute = SimpleNamespace(
    MULTIPROCESSOR_COUNT=4, L2_CACHE_SIZE=1 << 20, MAX_SHARED_MEMORY_PER_MULTIPROCESSOR=1 << 17, CLOCK_RATE=1000
)


def init() -> None:
    pass


def get_driver_version() -> int:
    return 13000


def module_from_buffer(data: bytes) -> SimpleNamespace:
    assert data.endswith(b"\0") and b".entry alive" in data
    return SimpleNamespace(get_function=lambda name: _Function())


def mem_alloc(size: int) -> int:
    from cuda.bindings.driver import cuMemAlloc

    return cuMemAlloc(size)[1]


def memset_d32(address: int, value: int, count: int) -> None:
    (ctypes.c_uint32 * count).from_address(address)[:] = [value] * count


def memcpy_htod(address: int, data: memoryview) -> None:
    ctypes.memmove(address, bytes(data), len(data))


def memcpy_dtoh(out, address: int) -> None:
    out[:] = ctypes.string_at(address, len(out))
