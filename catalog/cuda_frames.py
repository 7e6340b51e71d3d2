"""A cubin with everything bound that stays the same between CUDA calls of one shape. Chooses none, judges none.

Launches go to torch's current stream on the tensors' device, whatever device or context is current in the calling thread. The
launcher is the one that the verifier's children use (`verifier.launch_cuda`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from catalog.calls import AttentionCall
from catalog.operands import Output, strides_of
from catalog.reasons import RunFailed, reason
from generator.binding import bind
from generator.canonical import digest_bytes
from generator.spec import AttentionSpec
from generator.translate.records import Launch
from verifier.cuda_arguments import PlacedTensor, cuda_facts
from verifier.launch import LaunchError
from verifier.launch_cuda import CudaError, CudaKernel, checked

#: Calls whose arguments stay packed: as many sets of addresses of one shape as a serving loop goes round.
KEPT_CALLS = 64
#: The largest handle of a stream that stands for whichever context is current: null, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD.
PER_THREAD = 2


class CudaEntry:
    """A cubin in this process, loaded on each device when it is first called there, for the life of the process."""

    def __init__(self, launch: Launch, cubin: bytes, expected_hash: str) -> None:
        """Raises LaunchError for other bytes than the expected ones, and for the launch of another kind of kernel."""
        if digest_bytes(cubin) != expected_hash:
            raise LaunchError("binary: it is not what was verified (SHA-256 differs)")
        self.launch, self._cubin = launch, cubin
        self._kernels: dict[tuple[int, int], CudaKernel] = {}
        self._lock = threading.Lock()
        wanted = cuda_facts(launch)["workspace"]
        self._one_a_stream = bool(wanted and wanted["exclusive"])

    def kernel(self, device: int, stream: int) -> CudaKernel:
        """The loaded kernel for a device; one of its own for each stream where launches may not overlap. Raises CudaError."""
        key = (device, stream if self._one_a_stream else 0)
        with self._lock:
            if key not in self._kernels:
                self._kernels[key] = CudaKernel(self.launch, self._cubin)
            return self._kernels[key]


class BoundCudaKernel:
    """A loaded cubin for the exact shapes and strides of a call. Threads may share it."""

    def __init__(
        self, entry: CudaEntry, call: AttentionCall, spec: AttentionSpec, out: Output, captured: Mapping[str, Tensor]
    ) -> None:
        binding = bind(entry.launch, spec)
        self.out, self._entry = out, entry
        self._names = [t.name if t.role == "captured" else t.role for t in binding.tensors]
        self._shapes = [t.parameter_shape(spec) for t in binding.tensors]
        self._strides = [strides_of(t, call, spec, out, captured) for t in binding.tensors]
        self._scalars = [s.value for s in binding.scalars]
        self._lse_shape = (call.batch, call.num_heads, call.seqlen_q)
        self._every_output = bool(entry.launch.target_facts.get("every_output"))
        self._prepared: dict[tuple[int, ...], Any] = {}
        self._keeping = threading.Lock()

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, captured: Mapping[str, Tensor] | None = None) -> None:
        """Writes `out`, queued on the current stream; an LSE is not kept, and only kernels that insist write one. Raises
        RunFailed.
        """
        if self._every_output and "lse" in self._names:
            self.run_with_lse(q, k, v, out, captured)
            return
        self._run(q.device.index, {"q": q, "k": k, "v": v, "o": out, **(captured or {})})

    def run_with_lse(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, captured: Mapping[str, Tensor] | None = None) -> Tensor:
        """Writes `out` and gives the LSE (B, H, Sq). Raises RunFailed."""
        lse = q.new_empty(self._lse_shape, dtype=torch.float32)
        self._run(q.device.index, {"q": q, "k": k, "v": v, "o": out, "lse": lse, **(captured or {})})
        return lse

    def _run(self, device: int, tensors: Mapping[str, Tensor]) -> None:
        stream = current_stream(device)
        key = (device, stream, *(tensors[name].data_ptr() if name in tensors else 0 for name in self._names))
        try:
            prepared = self._prepared.get(key)
            if prepared is None:
                with on_device(device):
                    prepared = self._prepare(device, stream, key[2:])
            if stream > PER_THREAD or is_current(device):  # a stream that somebody made brings its context
                prepared.run(stream)
            else:
                with on_device(device):
                    prepared.run(stream)
        except LaunchError as error:
            raise RunFailed(reason("layout", str(error)), broken=False) from None
        except CudaError as error:
            raise RunFailed(reason("launch_failed", str(error)), broken=True) from None

    def _prepare(self, device: int, stream: int, addresses: tuple[int, ...]) -> Any:
        places = zip(addresses, self._shapes, self._strides, strict=True)
        with allocating_in_captures():
            kernel = self._entry.kernel(device, stream)
            prepared = kernel.prepare([PlacedTensor(*place) if place[0] else None for place in places], self._scalars)
        most = 1 if prepared.repacks else KEPT_CALLS  # copies of operands take memory
        with self._keeping:
            while len(self._prepared) >= most:
                del self._prepared[next(iter(self._prepared))]
            self._prepared[(device, stream, *addresses)] = prepared
        return prepared


def current_stream(device: int) -> int:
    """The handle of torch's current stream on a device."""
    return int(torch.cuda.current_stream(device).cuda_stream)


@contextlib.contextmanager
def allocating_in_captures() -> Iterator[None]:
    """Memory may be taken and modules loaded inside, also while a stream of this thread is being captured."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = checked(driver.cuThreadExchangeStreamCaptureMode(relaxed), "capture mode")
    try:
        yield
    finally:
        checked(driver.cuThreadExchangeStreamCaptureMode(before), "capture mode")


@functools.cache
def _primary_context(device: int) -> Any:
    """torch's context of a device: torch numbers devices as the driver does."""
    from cuda.bindings import driver

    ordinal = checked(driver.cuDeviceGet(device), f"device {device}")
    return checked(driver.cuDevicePrimaryCtxRetain(ordinal), f"the context of device {device}")


@functools.cache
def _current_context() -> Callable[[], tuple[Any, ...]]:
    from cuda.bindings import driver

    return driver.cuCtxGetCurrent


def is_current(device: int) -> bool:
    """Whether torch's context of the device is current in this thread."""
    return bool(_current_context()()[1] == _primary_context(device))


@contextlib.contextmanager
def on_device(device: int) -> Iterator[None]:
    """torch's context of the device is current inside, in threads that never used CUDA as well; outside it is as before.

    cuda.core's `Device.set_current` would leave the thread on another device than torch believes.
    """
    from cuda.bindings import driver

    if is_current(device):
        yield
        return
    checked(driver.cuCtxPushCurrent(_primary_context(device)), "entering the context")
    try:
        yield
    finally:
        checked(driver.cuCtxPopCurrent(), "leaving the context")
