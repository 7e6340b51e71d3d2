"""A stand-in for the part of cuda.core that the launcher uses: "cubins" are shared objects."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace

from cuda.bindings.driver import core_kernels


class Device:
    device_id = 0
    properties = SimpleNamespace(multiprocessor_count=4)


class Kernel:
    attributes = SimpleNamespace(num_regs=32, local_size_bytes=32, shared_size_bytes=32)

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.function, self.refused = library[f"launch_{name}"], hasattr(library, "refused_by_the_driver")
        self.handle = len(core_kernels) + 1
        core_kernels[self.handle] = self


class ObjectCode:
    def __init__(self, cubin: bytes) -> None:
        handle = os.memfd_create("fake-cubin", 0)
        os.write(handle, cubin)
        self._library = ctypes.CDLL(f"/proc/self/fd/{handle}")

    @staticmethod
    def from_cubin(cubin: bytes, *, name: str) -> ObjectCode:
        return ObjectCode(cubin)

    def get_kernel(self, name: str) -> Kernel:
        return Kernel(self._library, name)
