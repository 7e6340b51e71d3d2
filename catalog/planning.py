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
from catalog.calls import AttentionCall
from catalog.cuda_frames import BoundCudaKernel
from catalog.decisions import Decision
from catalog.frames import BoundKernel, bound_kernel
from catalog.kernels import CatalogKernel
from catalog.loader import LoadedKernel, LoadFailed
from catalog.machine import this_machine
from catalog.operands import check_out, contiguous_strides, flash_output, may_be_written, num_bytes, sdpa_output
from catalog.plainness import check_like, is_plain, never
from catalog.reasons import NoKernelError, Reason, RunFailed
from catalog.selection import matching_spec
from catalog.settings import override
from catalog.source import Source
from generator.canonical import to_plain
from generator.spec import AttentionSpec, SpecError, spec_from_plain

_CLASH = "out: expected memory of its own, that torch would write too; the function itself makes a copy"
_written = torch._C._increment_version  # `torch.autograd.graph.increment_version` at half of its cost


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
    """One decision, bound to a device, a dtype, a layout and shapes. Threads may share it. A kernel that breaks at a call runs no
    more: the function answers from then on.

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
        self._run_at: Callable[..., None] | None = None  # of a kernel that takes addresses
        self._captured: dict[str, Tensor] = {}
        self._binary_hash = ""
        self._facts = _facts(*example)
        self._like = self._like_with_out = never
        self._num_bytes: tuple[int, ...] = ()  # of q, k, v and the output

    def bind(self, bound: BoundKernel | BoundCudaKernel, binary_hash: str, example: tuple[Tensor, Tensor, Tensor]) -> None:
        """The kernel that runs from now on for tensors like the example's."""
        out = example[0].new_empty_strided(bound.out.shape, bound.out.strides)
        self._binary_hash, self._num_bytes = binary_hash, tuple(map(num_bytes, (*example, out)))
        self._like, self._like_with_out = check_like(*example) or never, check_like(*example, out) or never
        self._run_at, self._bound = getattr(bound, "run_at", None), bound

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Any:
        """The call, on tensors like the example's: the same shapes, strides, dtypes and device. out: written and returned.

        Raises PlanError for other tensors, ValueError for an `out` that does not fit.
        """
        bound = self._bound
        if bound is None or not (self._like(q, k, v) if out is None else self._like_with_out(q, k, v, out)):
            if bound is None or not is_plain(q, k, v):
                return self._function_into(out, q, k, v)
            self._check_closely(bound, q, k, v, out)
        given = out
        if out is None:
            out = q.new_empty_strided(bound.out.shape, bound.out.strides)
        at = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
        if given is not None:
            at_q, at_k, at_v, begin = at
            size_q, size_k, size_v, size = self._num_bytes
            end = begin + size
            apart = (begin >= at_q + size_q or at_q >= end) and (begin >= at_k + size_k or at_k >= end)
            if not (apart and (begin >= at_v + size_v or at_v >= end)):
                raise ValueError(_CLASH)
            _written((out,))  # as any operation in place says
        try:
            if self._run_at is not None:
                self._run_at(*at, self._captured)
            else:
                bound.run(q, k, v, out, self._captured)
        except RunFailed as failure:
            if failure.broken:
                self._bound = None
                serving.loader.quarantine(self._binary_hash, failure.reason)
            raise NoKernelError(self.decision.call, (failure.reason,)) from failure
        return out

    def _function_into(self, out: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """What the function itself gives, in `out` if there is one."""
        result = self._function(q, k, v, **self._arguments)
        if out is None:
            return result
        output, *others = result if isinstance(result, tuple) else (result,)
        check_out(out, tuple(output.shape), output)
        out.copy_(output)
        return (out, *others) if others else out

    def _check_closely(self, bound: BoundKernel | BoundCudaKernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> None:
        """Raises PlanError or ValueError for plain tensors that are not like the example's; those that are pass quickly next time
        (what torch's guard is made of says more than their shapes: inference tensors, parameters).
        """
        if _facts(q, k, v) != self._facts:
            raise PlanError(_difference(self._facts, _facts(q, k, v)))
        if out is not None:
            check_out(out, bound.out.shape, q)
            if out.stride() != bound.out.strides:
                raise ValueError(f"out: expected strides {bound.out.strides}, found {out.stride()}")
            if not may_be_written(out, q, k, v):
                raise ValueError(_CLASH)
            self._like_with_out = check_like(q, k, v, out) or self._like_with_out
        else:
            self._like = check_like(q, k, v) or self._like

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
        bound = _bind(call, kernel, loaded, q, made._captured)
        if bound is not None:
            made.bind(bound, kernel.binary_hash, (q, k, v))
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
    return bound_kernel(loaded.entry, call, spec, out, captured)


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
    key = this_machine(device).device_key
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
    unloaded = set(away) - {k["binary_hash"] for k in loaded}
    return told + tuple(
        {"kernel_id": h[:12], "binary_hash": h, "num_bytes": 0, "probed": False, "quarantined": str(away[h])}
        for h in sorted(unloaded)
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
        "device": this_machine("cpu").device_name,
        "device_key": this_machine("cpu").device_key,
        "num_threads": torch.get_num_threads(),
        "environment": environment(),
        "kernels": list(loaded_kernels()),
        "stats": serving.stats(),
    }
