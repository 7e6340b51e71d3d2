"""A kernel with everything bound that stays the same between calls of one shape: a call adds addresses. Chooses nothing.

A frame is used by many threads: each call takes an argument block of its own from the frame's list, or makes one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from catalog.calls import AttentionCall, Strides
from catalog.reasons import Reason, reason
from generator.binding import BoundTensor, bind
from generator.spec import AttentionSpec
from verifier.launch import CallBlock, CpuKernel

_num_threads = torch.get_num_threads


class RunFailed(RuntimeError):
    """A call that the kernel did not answer; nothing of the output may be used. broken: the kernel must not be called again."""

    def __init__(self, why: Reason, broken: bool) -> None:
        super().__init__(str(why))
        self.reason, self.broken = why, broken


@dataclass(frozen=True, slots=True)
class Output:
    """Where the output goes. shape, strides: of what the caller gets; bhsd: its strides by (batch, heads, seqlen, head_dim)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bhsd: Strides


class BoundKernel:
    """A loaded kernel for the exact shapes and strides of a call. `parallel` 0: run on the calling thread."""

    def __init__(
        self,
        kernel: CpuKernel,
        call: AttentionCall,
        spec: AttentionSpec,
        out: Output,
        captured: Mapping[str, Tensor],
        parallel: int | None = None,
    ) -> None:
        binding = bind(kernel.launch, spec)
        self.kernel, self.out = kernel, out
        self._parallel = parallel
        self._strides = [s for t in binding.tensors for s in _strides(t, call, spec, out, captured)]
        self._ints = [int(s.value) for s in binding.scalars if s.dtype == "i32"]
        self._floats = [float(s.value) for s in binding.scalars if s.dtype != "i32"]
        self._order = tuple(t.name if t.role == "captured" else t.role for t in binding.tensors)
        self.is_plain = self._order == ("q", "k", "v", "o")
        self.lse_shape = (call.batch, call.num_heads, call.seqlen_q)
        alignment = max(4 if call.dtypes[0] == "fp32" else 2, int(kernel.launch.target_facts.get("alignment_bytes", 1)))
        self._misaligned = alignment - 1
        self._blocks: list[tuple[CallBlock, int]] = []

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """For kernels that take q, k, v, o in this order. Raises RunFailed."""
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
        if (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & self._misaligned:
            raise _misaligned(self._misaligned + 1)
        self._call(addresses)

    def run_any(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, captured: Mapping[str, Tensor]
    ) -> Tensor | None:
        """For every kernel. lse: memory for it, or None: made where the kernel writes one. Returns it. Raises RunFailed."""
        if lse is None and "lse" in self._order:
            lse = q.new_empty(self.lse_shape, dtype=torch.float32)
        named = {"q": q, "k": k, "v": v, "o": out, "lse": lse, **captured}
        addresses = tuple(named[name].data_ptr() for name in self._order)  # type: ignore[union-attr]
        if any(named[name].data_ptr() & self._misaligned for name in ("q", "k", "v", "o")):  # type: ignore[union-attr]
            raise _misaligned(self._misaligned + 1)
        self._call(addresses)
        return lse

    def _call(self, addresses: tuple[int, ...]) -> None:
        try:
            block, threads = self._blocks.pop()
        except IndexError:
            block, threads = self._new_block()
        if threads != (threads := _num_threads()):
            block.set_num_threads(threads)
        block.set_pointers(addresses)
        try:
            self.kernel.run(block)
        except MemoryError as error:
            raise RunFailed(reason("launch_failed", str(error)), broken=False) from None
        except RuntimeError as error:
            raise RunFailed(reason("launch_failed", str(error)), broken=True) from None
        self._blocks.append((block, threads))

    def _new_block(self) -> tuple[CallBlock, int]:
        threads = _num_threads()
        block = self.kernel.block() if self._parallel is None else CallBlock(self.kernel.launch, self._parallel, threads)
        block.set_num_threads(threads)
        block.set_strides(self._strides)
        block.set_scalars(self._ints, self._floats)
        return block, threads


def _misaligned(alignment: int) -> RunFailed:
    return RunFailed(reason("alignment", f"an address is no multiple of {alignment} bytes"), broken=False)


def _strides(
    tensor: BoundTensor, call: AttentionCall, spec: AttentionSpec, out: Output, captured: Mapping[str, Tensor]
) -> tuple[int, ...]:
    """The strides of one parameter as the kernel addresses it."""
    match tensor.role:
        case "captured":
            return tuple(captured[tensor.name].stride())
        case "lse":
            strides: tuple[int, ...] = (call.num_heads * call.seqlen_q, call.seqlen_q, 1)
        case "q" | "k" | "v":
            strides = _unit(call.strides["qkv".index(tensor.role)])
        case "o":
            strides = _unit(out.bhsd)
    if tensor.view == "grouped":  # (batch, heads, one query, ...) as (batch, key heads, group, ...)
        return (strides[0], strides[1] * spec.group, strides[1], *strides[3:])
    return strides


def _unit(strides: Strides) -> Strides:
    """The last stride counts as one: that of a dimension of size one may be anything."""
    return (*strides[:3], 1)


def sdpa_output(query: Tensor, head_dim_v: int) -> Output:
    """Shape and strides of what torch's function would give for this query: its order of dimensions, or contiguous.

    Read from torch 2.13 on a CPU: four dimensions with equal head dimensions keep the query's order, all else is contiguous.
    """
    shape = (*query.shape[:-1], head_dim_v)
    keeps_order = query.dim() == 4 and head_dim_v == query.shape[-1]
    strides = torch.empty_like(query, device="meta").stride() if keeps_order else contiguous_strides(shape)
    return Output(shape, strides, strides if len(strides) == 4 else (math.prod(shape), *strides))


def flash_output(query: Tensor, head_dim_v: int, out: Tensor | None) -> Output:
    """(B, S, H, Dv): contiguous, or the tensor that the caller gave. Raises ValueError where that one does not fit."""
    shape = (*query.shape[:-1], head_dim_v)
    if out is None:
        strides = contiguous_strides(shape)
    else:
        check_out(out, shape, query)
        strides = out.stride()
    return Output(shape, strides, (strides[0], strides[2], strides[1], strides[3]))


def check_out(out: Tensor, shape: tuple[int, ...], query: Tensor) -> None:
    """Raises ValueError naming what of `out` does not fit."""
    for what, found, wanted in (
        ("shape", tuple(out.shape), shape),
        ("dtype", out.dtype, query.dtype),
        ("device", out.device, query.device),
    ):
        if found != wanted:
            raise ValueError(f"out: expected {what} {wanted}, found {found}")
    if out.shape[-1] != 1 and out.stride(-1) != 1:
        raise ValueError(f"out: expected a last dimension with stride 1, found {out.stride(-1)}")


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
