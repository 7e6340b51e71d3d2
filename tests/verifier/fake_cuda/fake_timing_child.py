"""The timed child with torch's GPU part stood in for: tensors of the host, events by the host's clock, no graphs."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import torch

from verifier import cuda_rivals, cuda_timing_child


class Event:
    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return max(1e3 * (end.at - self.at), 1e-6)


def _no_graphs(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("graphs are not stood in for")


CUDA = SimpleNamespace(
    init=lambda: None,
    Event=Event,
    CUDAGraph=_no_graphs,
    ExternalStream=lambda handle, device: handle,
    set_stream=lambda stream: None,
    current_stream=lambda: SimpleNamespace(cuda_stream=77),
    synchronize=lambda: None,
    empty_cache=lambda: None,
    mem_get_info=lambda: (1 << 30, 1 << 31),
    _sleep=lambda cycles: None,
)


class HostTorch:
    """torch, with what is asked for on "cuda" made on the host."""

    cuda = CUDA

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("empty", "randn", "Generator"):
            return found
        return lambda *a, **k: found(*a, **{key: "cpu" if key == "device" else value for key, value in k.items()})

    def device(self, name: str) -> Any:
        return contextlib.nullcontext()


cuda_timing_child.torch = cuda_rivals.torch = HostTorch()
cuda_timing_child.COPY_BYTES, cuda_timing_child.PRODUCT_SIZE = 1 << 20, 64
main = cuda_timing_child.main
