"""A kernel with everything bound that stays the same between calls of one shape: a call adds addresses. Chooses nothing.

A frame is used by many threads: each call takes an argument block of its own from the frame's list, or makes one.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Mapping
from operator import itemgetter

import torch
from torch import Tensor

from catalog.calls import AttentionCall
from catalog.cuda_frames import BoundCudaKernel, CudaEntry
from catalog.operands import NOTHING, Output, strides_of
from catalog.reasons import RunFailed, reason
from generator.binding import bind
from generator.spec import AttentionSpec
from verifier.launch import CallBlock, CpuKernel

_num_threads = torch.get_num_threads
_ROLES = ("q", "k", "v", "o", "lse")


class BoundKernel:
    """A loaded kernel for the exact shapes and strides of a call."""

    def __init__(
        self,
        kernel: CpuKernel,
        call: AttentionCall,
        spec: AttentionSpec,
        out: Output,
        captured: Mapping[str, Tensor],
    ) -> None:
        binding = bind(kernel.launch, spec)
        self.kernel, self.out = kernel, out
        self._strides = [s for t in binding.tensors for s in strides_of(t, call, spec, out, captured)]
        self._ints = [int(s.value) for s in binding.scalars if s.dtype == "i32"]
        self._floats = [float(s.value) for s in binding.scalars if s.dtype != "i32"]
        order = [t.name if t.role == "captured" else t.role for t in binding.tensors]
        self._captured = [name for name in order if name not in _ROLES]
        self._in_launch_order = itemgetter(*((*_ROLES, *self._captured).index(name) for name in order))
        self._lse_shape = (call.batch, call.num_heads, call.seqlen_q)
        self._lse_elements = math.prod(self._lse_shape) if "lse" in order else 0
        alignment = max(4 if call.dtypes[0] == "fp32" else 2, int(kernel.launch.target_facts.get("alignment_bytes", 1)))
        self._misaligned = alignment - 1
        self._blocks: list[tuple[CallBlock, int]] = []
        _alive.add(self)

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, captured: Mapping[str, Tensor] = NOTHING) -> None:
        """Writes `out`; an LSE that the kernel gives is dropped. Raises RunFailed."""
        self.run_at(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), captured)

    def run_with_lse(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, captured: Mapping[str, Tensor] = NOTHING) -> Tensor:
        """Writes `out` and gives the LSE (B, H, Sq). Raises RunFailed."""
        lse = q.new_empty(self._lse_shape, dtype=torch.float32)
        self.run_at(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), captured, lse.data_ptr())
        return lse

    def run_at(self, q: int, k: int, v: int, out: int, captured: Mapping[str, Tensor] = NOTHING, lse: int = 0) -> None:
        """As `run`, on the addresses of tensors. lse: where to write it; 0 drops it. Raises RunFailed."""
        if (q | k | v | out) & self._misaligned:
            why = f"an address is no multiple of {self._misaligned + 1} bytes"
            raise RunFailed(reason("alignment", why), broken=False)
        if not (q and k and v):  # storage that was given back, as sharded parameters' is
            raise RunFailed(reason("tensor_view", "an input has no memory"), broken=False)
        if self._lse_elements and not lse:
            lse = _scratch(self._lse_elements)
        addresses: tuple[int, ...] = (q, k, v, out, lse)
        if self._captured:
            addresses += tuple(captured[name].data_ptr() for name in self._captured)
        try:
            block, threads = self._blocks.pop()
        except IndexError:
            block, threads = self.new_block()
        if threads != (threads := _num_threads()):
            block.set_num_threads(threads)
        block.put_pointers(*self._in_launch_order(addresses))
        try:
            self.kernel.run(block)
        except MemoryError as error:
            raise RunFailed(reason("launch_failed", str(error)), broken=False) from None
        except RuntimeError as error:
            raise RunFailed(reason("launch_failed", str(error)), broken=True) from None
        self._blocks.append((block, threads))

    def new_block(self) -> tuple[CallBlock, int]:
        """An argument block with all but the addresses filled in, and the number of threads that it names."""
        threads = _num_threads()
        block = CallBlock(self.kernel.launch, 0, threads) if _forked else self.kernel.block()
        block.set_num_threads(threads)
        block.set_strides(self._strides)
        block.set_scalars(self._ints, self._floats)
        return block, threads

    def forget_blocks(self) -> None:
        """The next call makes an argument block anew."""
        self._blocks = []


_alive: weakref.WeakSet[BoundKernel] = weakref.WeakSet()
_forked = False


def _after_fork() -> None:
    """In a forked child OpenMP's pool is gone: kernels run on the calling thread, those of plans that the parent made as well."""
    global _forked
    _forked = True
    for bound in tuple(_alive):
        bound.forget_blocks()


os.register_at_fork(after_in_child=_after_fork)


class _PerThread(threading.local):
    """Memory for an LSE that nobody wants: calls are synchronous, so one for each thread is enough."""

    scratch: Tensor = torch.empty(0)
    address = 0


_per_thread = _PerThread()


def _scratch(num_elements: int) -> int:
    """The address of that many fp32 elements, this thread's own until its next call."""
    if _per_thread.scratch.numel() < num_elements:
        _per_thread.scratch = torch.empty(num_elements, dtype=torch.float32)
        _per_thread.address = _per_thread.scratch.data_ptr()
    return _per_thread.address


def bound_kernel(
    entry: CpuKernel | CudaEntry,
    call: AttentionCall,
    spec: AttentionSpec,
    out: Output,
    captured: Mapping[str, Tensor],
) -> BoundKernel | BoundCudaKernel:
    """What runs a loaded kernel, on the processor or on a GPU."""
    if isinstance(entry, CudaEntry):
        return BoundCudaKernel(entry, call, spec, out, captured)
    return BoundKernel(entry, call, spec, out, captured)
