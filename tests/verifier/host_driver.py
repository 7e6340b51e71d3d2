"""The driver's functions and cuda.core's objects that the launcher uses, on the host's memory. What a kernel does is a test's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from verifier import launch_cuda


@dataclass(frozen=True)
class Launched:
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    stream: int


class HostDriver:
    """Notes launches and hands each to `run(launched, address of the array of parameters)`."""

    def __init__(self, run: Callable[[Launched, int], None], sms: int) -> None:
        from cuda.bindings import driver

        self._real, self._run, self._sms = driver, run, sms
        self._memory: dict[int, Any] = {}
        self._names: list[str] = []
        self.shared_limit, self.launches = 0, list[Launched]()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch_cuda, "_driver", lambda: self)
        monkeypatch.setattr(launch_cuda, "_core", lambda: self)

    def __getattr__(self, name: str) -> Any:  # enumerations and integer types
        return getattr(self._real, name)

    def Device(self) -> Any:
        return SimpleNamespace(device_id=0, properties=SimpleNamespace(multiprocessor_count=self._sms))

    @property
    def ObjectCode(self) -> HostDriver:
        return self

    def from_cubin(self, cubin: bytes, *, name: str) -> HostDriver:
        if cubin != b"cubin":
            raise RuntimeError(f"{name}: no cubin")
        return self

    def get_kernel(self, name: str) -> Any:
        self._names.append(name)
        return SimpleNamespace(handle=len(self._names))

    def cuGetErrorString(self, status: Any) -> tuple[int, bytes]:
        return 0, b"refused"

    def cuKernelGetFunction(self, kernel: int) -> tuple[int, int]:
        return 0, kernel

    def cuKernelSetAttribute(self, attribute: Any, value: int, kernel: int, device: int) -> tuple[int]:
        self.shared_limit = value
        return (0,)

    def cuMemAlloc(self, size: int) -> tuple[int, int]:
        buffer = ctypes.create_string_buffer(size + 16)
        address = -(-ctypes.addressof(buffer) // 16) * 16
        self._memory[address] = buffer
        return 0, address

    def cuMemFree(self, address: int) -> tuple[int]:
        del self._memory[address]
        return (0,)

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[int]:
        ctypes.memset(address, value, size)
        return (0,)

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> tuple[int]:
        assert extra == 0 and (config.sharedMemBytes <= 48 * 1024 or config.sharedMemBytes <= self.shared_limit)
        size = config.attrs[0].value.clusterDim if config.numAttrs else SimpleNamespace(x=1, y=1, z=1)
        launched = Launched(
            self._names[int(function) - 1],
            (config.gridDimX, config.gridDimY, config.gridDimZ),
            (config.blockDimX, config.blockDimY, config.blockDimZ),
            (size.x, size.y, size.z),
            int(config.hStream),
        )
        self.launches.append(launched)
        self._run(launched, parameters)
        return (0,)
