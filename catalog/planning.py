"""Decisions ahead of time: plans, warm-up, and what the catalog could serve. Only `Plan.run` is on a call path."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from catalog import attention, serving
from catalog.calls import SPEC_DTYPES, AttentionCall
from catalog.cuda_frames import BoundCudaKernel
from catalog.decisions import Decision
from catalog.frames import BoundKernel, bound_kernel
from catalog.kernels import CatalogKernel
from catalog.loader import LoadedKernel, LoadFailed
from catalog.operands import check_out, contiguous_strides, flash_output, num_bytes, sdpa_output
from catalog.plainness import check_like, is_plain, never, nothing_watches
from catalog.reasons import NoKernelError, Reason, RunFailed
from catalog.selection import matching_spec
from catalog.settings import override
from catalog.source import Source
from generator.canonical import to_plain
from generator.spec import AttentionSpec, SpecError, spec_from_plain

_DTYPES = {name: dtype for dtype, name in SPEC_DTYPES.items()}


class PlanError(ValueError):
    """Tensors that a plan was not made for: names what differs."""


def call_of_spec(spec: AttentionSpec, device: str = "cpu") -> AttentionCall:
    """The call that a spec states, on contiguous tensors in the spec's layout."""

    def strides(heads: int, seqlen: int, dim: int) -> tuple[int, int, int, int]:
        if spec.layout == "bhsd":
            return contiguous_strides((spec.batch, heads, seqlen, dim))  # type: ignore[return-value]
        b, s, h, d = contiguous_strides((spec.batch, seqlen, heads, dim))
        return b, h, s, d

    return AttentionCall(
        "spec", device, (spec.dtype,) * 3, spec.batch, spec.num_heads, spec.num_kv_heads, spec.seqlen_q, spec.seqlen_k,
        spec.head_dim, spec.head_dim_v,
        (
            strides(spec.num_heads, spec.seqlen_q, spec.head_dim),
            strides(spec.num_kv_heads, spec.seqlen_k, spec.head_dim),
            strides(spec.num_kv_heads, spec.seqlen_k, spec.head_dim_v),
        ),
        scale=spec.scale, mask_forms=(spec.masks,), scores=spec.scores,
    )  # fmt: skip


class Plan:
    """One decision, bound to a device, a dtype, a layout and shapes. Immutable; threads may share it.

    kernel: the id of the kernel, None for torch. reasons: why torch. envelope: the buckets of lengths
    (queries x keys, each named by its largest) that the kernel serves.
    """

    def __init__(
        self, decision: Decision, function: Callable[..., Any], arguments: dict[str, Any], example: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self.decision, self.kernel, self.reasons = decision, decision.kernel_id, decision.reasons
        self.envelope: tuple[str, ...] = ()
        self._function, self._arguments = function, arguments
        self._bound: BoundKernel | BoundCudaKernel | None = None
        self._captured: dict[str, Tensor] = {}
        self._binary_hash = ""
        self._facts, self._check = _facts(*example), check_like(*example) or never
        self._num_bytes: tuple[int, ...] = ()  # of q, k, v and the output

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Any:
        """The call, on tensors like the example's: the same shapes, strides, dtypes and device. out: written and returned.

        Raises PlanError for other tensors, ValueError for an `out` that does not fit.
        """
        bound = self._bound
        if bound is None or not (self._check(q, k, v) and nothing_watches()):
            if bound is None or not is_plain(q, k, v):
                result = self._function(q, k, v, **self._arguments)
                return result if out is None else out.copy_(result)
            if _facts(q, k, v) != self._facts:
                raise PlanError(_difference(self._facts, _facts(q, k, v)))
        if out is None:
            out = q.new_empty_strided(bound.out.shape, bound.out.strides)
        elif (out.stride(), out.shape, out.dtype, out.device) != (bound.out.strides, bound.out.shape, q.dtype, q.device):
            check_out(out, bound.out.shape, q)
            raise ValueError(f"out: expected strides {bound.out.strides}, found {out.stride()}")
        elif self._clashes(out, q, k, v):
            raise ValueError("out: expected memory of its own, that torch would write too; the function itself makes a copy")
        try:
            bound.run(q, k, v, out, self._captured)
        except RunFailed as failure:
            if failure.broken:
                serving.loader.quarantine(self._binary_hash, failure.reason)
            raise NoKernelError(self.decision.call, (failure.reason,)) from failure
        return out

    def _clashes(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """As `catalog.operands.may_be_written`, for tensors that are like the example's."""
        at, (size_q, size_k, size_v, size) = out.data_ptr(), self._num_bytes
        at_q, at_k, at_v, end = q.data_ptr(), k.data_ptr(), v.data_ptr(), at + size
        apart = (
            (at >= at_q + size_q or at_q >= end) and (at >= at_k + size_k or at_k >= end) and (at >= at_v + size_v or at_v >= end)
        )
        return not apart or out.requires_grad

    def __repr__(self) -> str:
        return f"Plan({self.decision.call}: {self.kernel or 'torch'})"


def _facts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """What a plan is bound to."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
    )  # fmt: skip


def _difference(wanted: tuple[Any, ...], found: tuple[Any, ...]) -> str:
    names = [f"{what} of {x}" for what in ("shape", "strides", "dtype", "device") for x in ("q", "k", "v")]
    told = [f"{name}: expected {w}, found {f}" for name, w, f in zip(names, wanted, found, strict=True) if w != f]
    return "; ".join(told) + "; make another plan, or call the function itself"


def plan(function: Callable[..., Any] | str, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Plan:
    """A plan for `function(q, k, v, **arguments)` with tensors like these. Loads the kernel now.

    function: scaled_dot_product_attention or flash_attn_func, or its name. Raises NoKernelError in strict mode.
    """
    name = function if isinstance(function, str) else function.__name__
    call = attention.describe(name, q, k, v, **arguments)
    server = serving.server()
    decision, kernel, loaded = server.loaded(call, override())
    if kernel is None:
        server.require(decision, override())
    made = Plan(decision, getattr(attention, name), arguments, (q, k, v))
    if kernel is not None and loaded is not None:
        made._captured = attention.captured_of(arguments)
        made._binary_hash = kernel.binary_hash
        made._bound = bound = _bind(call, kernel, loaded, q, made._captured)
        if bound is not None:
            out = q.new_empty_strided(bound.out.shape, bound.out.strides)
            made._num_bytes = tuple(map(num_bytes, (q, k, v, out)))
        made.envelope = tuple(f"{q} x {k}" for q, k in sorted(kernel.lengths))
    return made


def _bind(
    call: AttentionCall, kernel: CatalogKernel, loaded: LoadedKernel, q: Tensor, captured: dict[str, Tensor]
) -> BoundKernel | BoundCudaKernel | None:
    """None for calls with more results than the output: their plans go through the function."""
    spec = matching_spec(call, kernel)
    assert spec is not None
    if call.need_lse:
        return None
    is_sdpa = call.function == "scaled_dot_product_attention"
    out = sdpa_output(q, call.head_dim_v) if is_sdpa else flash_output(q, call.head_dim_v, None)
    return bound_kernel(loaded.entry, call, spec, out, captured, parallel=0 if serving.forked else None)


@dataclass(frozen=True, slots=True)
class Warmed:
    """What warm-up did for one spec or kernel. kernel_id None: torch will answer, for these reasons."""

    what: str
    kernel_id: str | None
    reasons: tuple[Reason, ...]
    seconds: float

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain


def warmup(what: str | Iterable[AttentionSpec], device: str = "cpu") -> tuple[Warmed, ...]:
    """Load and probe ahead of traffic: afterwards, calls of these specs do no more than look up and launch.

    what: specs; "catalog": every kernel that may serve on this device; "log:FILE": specs as JSON, one a line
    (AttentionSpec.to_json). Every kernel runs its golden case in a child process before it is loaded, unless `probe` is "off".
    Raises SpecError, before anything is loaded, for anything else.
    """
    if isinstance(what, str) and what == "catalog":
        return tuple(_warm_kernel(kernel, device) for kernel in _serviceable(device))
    specs: tuple[AttentionSpec, ...]
    if isinstance(what, str) and what.startswith("log:"):
        specs = _logged_specs(Path(what.removeprefix("log:")))
    else:
        specs = tuple(what) if isinstance(what, Iterable) and not isinstance(what, str) else (what,)  # type: ignore[assignment]
        if not all(isinstance(spec, AttentionSpec) for spec in specs):
            raise SpecError(f'warmup: expected specs, "catalog" or "log:FILE", found {what!r}')
    return tuple(_warm_spec(spec, device) for spec in specs)


def _logged_specs(path: Path) -> tuple[AttentionSpec, ...]:
    """Raises SpecError naming file and line."""
    specs = []
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"warmup: {path}: cannot be read: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                specs.append(spec_from_plain(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise SpecError(f"{path}:{number}: expected the JSON of a spec ({error})") from None
    return tuple(dict.fromkeys(specs))


def _warm_spec(spec: AttentionSpec, device: str) -> Warmed:
    started = time.perf_counter()
    server = serving.server()
    decision, _, _ = server.loaded(call_of_spec(spec, device), override())
    return Warmed(str(spec), decision.kernel_id, decision.reasons, time.perf_counter() - started)


def _serviceable(device: str) -> tuple[CatalogKernel, ...]:
    """The kernels with a verified, unrevoked row for this device."""
    source = serving.server().source()
    if not isinstance(source, Source):
        return ()
    key = serving.this_machine(device).device_key
    return tuple(k for k in source.index.all() if k.unavailable is None and k.device_key == key and k.verified)


def _warm_kernel(kernel: CatalogKernel, device: str) -> Warmed:
    started = time.perf_counter()
    server = serving.server()
    source, settings = server.source(), server.settings
    assert isinstance(source, Source)
    if source.location_problem and not settings.allow_host_code:
        return Warmed(str(kernel.example), None, (Reason("location", source.location_problem),), 0.0)
    try:
        timeout_s = settings.probe_timeout_s if settings.probe == "first_load" else None
        serving.loader.load(kernel, source.read, timeout_s, device)
    except LoadFailed as failure:
        return Warmed(str(kernel.example), None, (failure.reason,), time.perf_counter() - started)
    return Warmed(str(kernel.example), kernel.kernel_id, (), time.perf_counter() - started)


def has_kernel(spec: AttentionSpec, device: str = "cpu") -> bool:
    """Whether a kernel would answer this spec on contiguous tensors. Loads nothing."""
    return serving.server().decide(call_of_spec(spec, device), override()).kernel_id is not None


def get_kernel_variants(spec: AttentionSpec, device: str = "cpu") -> Decision:
    """Every candidate for a spec, with its reasons and predicted times, as `explain` tells them. Loads nothing."""
    return serving.server().decide(call_of_spec(spec, device), override())


def loaded_kernels() -> tuple[dict[str, Any], ...]:
    """The kernels in this process, and those under quarantine with the reason, as plain values."""
    loaded = tuple({**k.to_plain(), "quarantined": ""} for k in serving.loader.all())
    away = serving.loader.quarantined
    told = tuple({**k, "quarantined": str(away.get(k["binary_hash"], ""))} for k in loaded)
    never = set(away) - {k["binary_hash"] for k in loaded}
    return told + tuple(
        {"kernel_id": h[:12], "binary_hash": h, "num_bytes": 0, "probed": False, "quarantined": str(away[h])}
        for h in sorted(never)
    )


def collect_env() -> dict[str, Any]:
    """What a report of a fault should hold: settings, device, catalog, kernels, counts; plain values."""
    from verifier.environment import environment

    server = serving.server()
    source = server.source()
    return {
        "settings": {name: repr(getattr(server.settings, name)) for name in type(server.settings).__dataclass_fields__},
        "catalog": source.uri if isinstance(source, Source) else str(source),
        "location_problem": source.location_problem if isinstance(source, Source) else "",
        "device": serving.this_machine("cpu").device_name,
        "device_key": serving.this_machine("cpu").device_key,
        "num_threads": torch.get_num_threads(),
        "environment": environment(),
        "kernels": list(loaded_kernels()),
        "stats": serving.stats(),
    }
