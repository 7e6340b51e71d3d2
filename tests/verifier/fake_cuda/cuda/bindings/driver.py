"""A stand-in for the CUDA driver on ordinary memory: ranges of addresses, mappings with access rights, "cubins" that are shared
objects. A kernel that touches what is not mapped dies by SIGSEGV, as the real one is stopped by the device.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from types import SimpleNamespace
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_GRANULE = 2 << 20

CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)


class CUmemAllocationProp:
    def __init__(self) -> None:
        self.type, self.location = 0, SimpleNamespace(type=0, id=0)


class CUmemAccessDesc:
    location: object = None
    flags = 0


def _anonymous(address: int, size: int, protection: int, fixed: bool) -> int:
    found = _libc.mmap(address or None, size, protection, _ANONYMOUS | (0x10 if fixed else 0), -1, 0)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return int(found)


def cuMemAddressReserve(size: int, alignment: int, address: int, flags: int):
    assert size and not size % _GRANULE
    wide = _anonymous(0, size + _GRANULE, 0, False)
    return 0, (wide + _GRANULE - 1) // _GRANULE * _GRANULE


def cuMemAddressFree(address: int, size: int):
    return (0,)


def cuMemCreate(size: int, properties: CUmemAllocationProp, flags: int):
    assert not size % _GRANULE and properties.location.type == 1 and properties.type == 1
    return 0, size


def cuMemMap(address: int, size: int, offset: int, memory: int, flags: int):
    assert not address % _GRANULE and memory == size
    return (int(_anonymous(address, size, 0, True) != address),)


def cuMemUnmap(address: int, size: int):
    _anonymous(address, size, 0, True)
    return (0,)


def cuMemRelease(memory: int):
    return (0,)


def cuMemSetAccess(address: int, size: int, accesses: list[CUmemAccessDesc], count: int):
    assert count == len(accesses) == 1
    return (_libc.mprotect(address, size, accesses[0].flags),)


def cuMemAlloc(size: int):
    return 0, _anonymous(0, size, 3, False)


def cuMemsetD8(address: int, value: int, size: int):
    ctypes.memset(address, value, size)
    return (0,)


def cuMemFree(address: int):
    return (0,)


def cuKernelGetFunction(kernel: object):
    return 0, kernel


def cuKernelSetAttribute(attribute: int, value: int, kernel: object, device: int):
    return (1 if value > 227 * 1024 else 0,)


def cuGetErrorString(status: int):
    return 0, b"invalid argument"


class CUlaunchConfig:
    pass


class CUfunction:
    """A kernel by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


def cuLaunchKernelEx(config: CUlaunchConfig, function: CUfunction, parameters: int, extra: int):
    kernel = core_kernels[function.number]
    if kernel.refused:
        return (1,)
    block = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
    kernel.function(ctypes.c_void_p(block), ctypes.c_int64(config.gridDimX))
    return (0,)


#: The kernels that cuda.core's stand-in has loaded, by number.
core_kernels: dict[int, Any] = {}
