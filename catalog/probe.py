"""A kernel's golden case, run in a child process before this process loads it: a crash there is a reason here. Times nothing.

The case is the smallest verified shape with one key head, on random inputs; some rows of the result are compared with the float64
reference. It shows that the binary runs on this machine as it did when it was verified; it does not verify it again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from catalog.kernels import CatalogKernel
from catalog.reasons import Reason, reason
from generator.binding import BoundTensor, bind
from generator.scores import alibi_slopes
from generator.spec import AttentionSpec
from verifier import oracle
from verifier.arena import Arena, Slot
from verifier.sandbox import CannotStart, Died, Ran, Sandbox, SandboxLimits, TimedOut

#: Largest error allowed, as a share of the largest magnitude of the right values.
TOLERANCE = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 3e-2}
#: Rows of the result that are compared.
ROWS = 16


def golden_spec(kernel: CatalogKernel) -> AttentionSpec:
    """The smallest verified case of a kernel, with one key head."""
    batch, seqlen_q, seqlen_k = min(kernel.verified, key=lambda s: s[0] * (s[1] * s[2] + s[1] + s[2]))
    shape = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    return kernel.example.with_shape(num_heads=kernel.example.group, num_kv_heads=1, **shape)


def probe(kernel: CatalogKernel, binary: bytes, timeout_s: float) -> Reason | None:
    """None when the golden case came out right; else why not. binary: the very bytes that will be loaded."""
    spec = golden_spec(kernel)
    binding = bind(kernel.launch, spec)
    limits = SandboxLimits(start_s=timeout_s, run_s=timeout_s)
    try:
        with Sandbox(binary, kernel.launch, torch.get_num_threads(), limits) as child:
            arena = Arena(child.memory, [_slot(t, spec) for t in binding.tensors])
            tensors = _fill(arena, binding.tensors, spec)
            arena.seal()
            for outcome in (child.lay_out(arena), _run(child, arena, binding.tensors, [s.value for s in binding.scalars])):
                if (why := _failure(outcome)) is not None:
                    return reason("probe_failed", f"the golden case {spec} {why}")
            changed = arena.mutated() or arena.overrun()
            if changed is not None:
                return reason("probe_failed", f"the golden case {spec} wrote to {changed.tensor} {changed.where}")
            return _compare(spec, tensors, arena, binding.tensors)
    except CannotStart as error:
        return reason("probe_failed", str(error))


def _failure(outcome: Ran | Died | TimedOut) -> str | None:
    match outcome:
        case Ran("done"):
            return None
        case Ran(result):
            return f"said {result}"
        case Died():
            return f"crashed: {outcome}"
        case TimedOut(limit_s):
            return f"did not end within {limit_s:g} s"


def _run(child: Sandbox, arena: Arena, tensors: tuple[BoundTensor, ...], scalars: list[int | float]) -> Ran | Died | TimedOut:
    strides = {slot.name: slot.strides for slot in arena.slots}
    return child.run(arena, [(t.name, strides[t.name]) for t in tensors], scalars)


def _slot(tensor: BoundTensor, spec: AttentionSpec) -> Slot:
    shape = tensor.parameter_shape(spec)
    strides = torch.empty(shape, device="meta").stride()
    return Slot(tensor.name, tensor.dtype, shape, strides, 0, max(1, torch.Size(shape).numel()), tensor.written)


def _fill(arena: Arena, tensors: tuple[BoundTensor, ...], spec: AttentionSpec) -> dict[str, Tensor]:
    """Writes random inputs and poison for outputs; gives the inputs under the oracle's names."""
    arena.poison()
    generator = torch.Generator().manual_seed(2506_12355)
    inputs: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.written:
            continue
        view = arena.views[tensor.name]
        if tensor.role == "captured":
            view.copy_(_captured(tensor, spec, generator))
            inputs[tensor.name] = view.clone()
        else:
            view.copy_(torch.randn(view.shape, generator=generator))
            inputs[tensor.role] = view.clone().reshape(tensor.shape)
    return inputs


def _captured(tensor: BoundTensor, spec: AttentionSpec, generator: torch.Generator) -> Tensor:
    """Plausible values of a rule's tensor: two documents, three quarters of the keys, the published slopes."""
    half = spec.seqlen_k // 2
    match tensor.name:
        case "Slopes":
            return torch.tensor(alibi_slopes(spec.num_heads))
        case "KvLen":
            return torch.full(tensor.shape, max(1, 3 * spec.seqlen_k // 4))
        case "DocStart":
            return (torch.arange(spec.seqlen_q) >= half).int().mul(half).expand(tensor.shape)
        case "DocEnd":
            return torch.where(torch.arange(spec.seqlen_q) >= half, spec.seqlen_k, half).expand(tensor.shape)
        case _:
            return torch.randn(tensor.shape, generator=generator)


def _compare(spec: AttentionSpec, inputs: dict[str, Tensor], arena: Arena, tensors: tuple[BoundTensor, ...]) -> Reason | None:
    rows = torch.linspace(0, spec.seqlen_q - 1, min(ROWS, spec.seqlen_q)).long().unique()
    right = oracle.attention(spec, inputs, rows)
    for tensor in (t for t in tensors if t.written):
        found = arena.views[tensor.name].reshape(tensor.shape)[:, :, rows].double()
        wanted = right.out if tensor.role == "o" else right.lse
        finite = torch.isfinite(wanted)
        error = (found - wanted)[finite].abs().max().item() if finite.any() else 0.0
        limit = TOLERANCE[spec.dtype] * max(1e-6, wanted[finite].abs().max().item() if finite.any() else 0.0)
        if not torch.equal(found[~finite], wanted[~finite]) or not error <= limit:
            message = f"the golden case {spec} came out wrong: {tensor.name} is off by {error:.3g}; allowed {limit:.3g}"
            return reason("probe_failed", message)
    return None
