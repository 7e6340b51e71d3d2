"""The choice: hard filters, each with a reason, then rank by measured time. Pure: loads nothing, launches nothing, times nothing.

Deny by default: a kernel serves a call only where every filter finds proof in its rows. Adding a filter is adding a function to
FILTERS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from catalog.calls import AttentionCall
from catalog.decisions import Considered, Decision
from catalog.envelope import Lengths, lengths_bucket
from catalog.kernels import CatalogKernel, Measured, mask_shapes, score_shapes
from catalog.keys import power_bucket
from catalog.reasons import Reason, reason
from catalog.settings import Override, Settings
from generator.binding import BindingError, bind
from generator.spec import AttentionSpec, SpecError
from verifier.cuda_versions import driver_problem

#: Microseconds that a call through the loader takes on the host besides the kernel. A kernel's measured time is that of a
#: prepared argument block, torch's that of its function as a user calls it: this much is added to ours before the two are
#: compared, which decides for calls of some ten microseconds and for no others. Measured by benchmarks/loader_host_cost.py on
#: 2026-11-30, EPYC (Zen 4): `scaled_dot_product_attention` less "the kernel alone", 4.3 to 4.4 in the medians of three processes
#: (5.0 to 5.2 beside other work, as most hosts have it). FlashAttention's functions take 2 more, which is not counted. GPUs are
#: given the same number, though their host runs ahead.
HOST_COST_US = 5.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process runs on. device_key: hash of `verifier.environment.device_key` of the call's device; flags: CPU flags;
    driver_cuda: the CUDA release that a GPU's driver supports, where it is known.
    """

    device_key: str
    device_name: str
    flags: frozenset[str]
    isa_needs: dict[str, frozenset[str]]
    driver_cuda: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that a choice depends on. quarantined: binary hash -> why. location: "" or why binaries
    may not be loaded. loaded: hashes of the only binaries that may run, after freeze(); None before. pinned: hashes that the
    lock pins for this device and bucket; None without a lock.
    """

    call: AttentionCall
    settings: Settings
    machine: Machine
    override: Override | None = None
    deterministic: bool = False
    quarantined: dict[str, Reason] = field(default_factory=dict)
    location: str = ""
    loaded: frozenset[str] | None = None
    pinned: frozenset[str] | None = None

    @property
    def lengths(self) -> Lengths:
        return lengths_bucket(self.call.seqlen_q, self.call.seqlen_k)

    @property
    def grid(self) -> int:
        """As `Measured.grid`."""
        return power_bucket(self.call.batch) * power_bucket(self.call.num_heads)


Filter = Callable[[Question, CatalogKernel], Iterator[Reason]]


def choose(question: Question, kernels: tuple[CatalogKernel, ...]) -> tuple[Decision, CatalogKernel | None]:
    """The decision among the kernels of the call's dtype and head dimensions, and the kernel that it names."""
    pairs = sorted(((_consider(question, k), k) for k in kernels), key=lambda pair: _preference(pair[0]))
    name, considered = str(question.call), tuple(c for c, _ in pairs)
    if considered and considered[0].accepted:
        return Decision(name, considered[0].kernel_id, (), considered), pairs[0][1]
    return Decision(name, None, (_why_torch(question, considered),), considered), None


def _preference(c: Considered) -> tuple[bool, float, str]:
    """Accepted first, then the fastest; ties by id, so that all processes agree."""
    return not c.accepted, math.inf if c.predicted_us is None else c.predicted_us, c.kernel_id


def _why_torch(question: Question, considered: tuple[Considered, ...]) -> Reason:
    """The reason to count the call under: that of the kernel that came furthest, since it is the one to mend."""
    if not considered:
        call = question.call
        dims = call.head_dim if call.head_dim == call.head_dim_v else f"{call.head_dim}/{call.head_dim_v}"
        return reason("no_kernel", f"no kernel for {call.dtypes[0]} with head dimension {dims}")
    nearest = max(considered, key=lambda c: (min(_RANK[r.code] for r in c.reasons), -len(c.reasons)))
    first = min(nearest.reasons, key=lambda r: _RANK[r.code])
    if first.code in ("masks", "scores"):
        return reason("no_kernel", f"no kernel for these rules; nearest {nearest.kernel_id}: {first.message}")
    gain = ""
    if nearest.predicted_us and nearest.sdpa_us and nearest.sdpa_us > nearest.predicted_us:
        gain = f" (it would take {nearest.predicted_us / nearest.sdpa_us:.0%} of torch's time)"
    return reason(first.code, f"nearest kernel {nearest.kernel_id}: {first.message}{gain}")


def _consider(question: Question, kernel: CatalogKernel) -> Considered:
    reasons = tuple(r for check in FILTERS for r in check(question, kernel))
    time = _measured_for(question, kernel)
    if time is None:
        return Considered(kernel.kernel_id, not reasons, reasons)
    ours_us, torch_us = _predict(question, time)
    return Considered(kernel.kernel_id, not reasons, reasons, round(ours_us, 2), round(torch_us, 2))


def matching_spec(call: AttentionCall, kernel: CatalogKernel) -> AttentionSpec | None:
    """The form of the call that the kernel computes; None where it computes another."""
    for spec in call.specs():
        if mask_shapes(spec.masks) == kernel.masks:
            return spec
    return None


def _requested(question: Question, kernel: CatalogKernel) -> Iterator[Reason]:
    wanted = question.override.ids if question.override is not None else question.settings.force
    if wanted and not _named(kernel, wanted):
        yield reason("override", f"only {', '.join(wanted)} may answer")
    if _named(kernel, question.settings.deny):
        yield reason("denied", f"{kernel.kernel_id} is on the deny list")


def _named(kernel: CatalogKernel, ids: tuple[str, ...]) -> bool:
    names = (kernel.binary_hash, *kernel.row_ids)
    return any(name.startswith(wanted) for wanted in ids for name in names)


def _trusted(question: Question, kernel: CatalogKernel) -> Iterator[Reason]:
    if kernel.unavailable is not None:
        yield reason(*kernel.unavailable)
    if (why := question.quarantined.get(kernel.binary_hash)) is not None:
        yield reason("quarantined", f"{why.code}: {why.message}")
    if question.location and not question.settings.allow_host_code:
        yield reason("location", question.location)
    if question.pinned is not None and kernel.binary_hash not in question.pinned:
        yield reason("lock", f"the lock pins {', '.join(sorted(h[:12] for h in question.pinned)) or 'nothing'} for these lengths")
    if question.loaded is not None and kernel.binary_hash not in question.loaded:
        yield reason("frozen", "freeze() was called before this kernel was loaded")


def _device(question: Question, kernel: CatalogKernel) -> Iterator[Reason]:
    on_cpu = question.call.device == "cpu"
    if (kernel.target == "cpu") != on_cpu:
        yield reason("device", f"a kernel for {kernel.target}; the tensors lie on {question.call.device}")
        return
    if kernel.device_key != question.machine.device_key:
        yield reason("device", f"verified on {kernel.device_name}, another device than this {question.machine.device_name}")
    if on_cpu:
        needed = frozenset().union(*(question.machine.isa_needs.get(name, frozenset({name})) for name in kernel.isa))
        if lacking := sorted(needed - question.machine.flags):
            yield reason("isa", f"this processor lacks {', '.join(lacking)}")
        return
    if problem := driver_problem(kernel.cuda_toolkit, kernel.ptx_isa, kernel.is_ptx, question.machine.driver_cuda):
        yield reason("driver", problem)
    elif kernel.is_ptx:
        yield reason("driver", "its binary is PTX, which would be compiled while serving, unmeasured; only cubins are loaded")


def _problem(question: Question, kernel: CatalogKernel) -> Iterator[Reason]:
    call = question.call
    spec = matching_spec(call, kernel)
    if spec is None:
        asked = " or ".join(" & ".join(map(str, form)) or "none" for form in call.mask_forms)
        yield reason("masks", f"computes {_rules(kernel.masks)}; the call has {asked}")
    if score_shapes(call.scores) != kernel.scores:
        yield reason("scores", f"computes {_rules(kernel.scores)}; the call has {' '.join(map(str, call.scores)) or 'none'}")
    if (call.scale > 0) != kernel.positive_scale:
        yield reason(
            "promise", f"verified for scales {'above' if kernel.positive_scale else 'of at most'} 0; the call has {call.scale:g}"
        )
    if call.need_lse and not kernel.has_lse:
        yield reason("lse", "the kernel gives no log-sum-exp")
    if spec is not None and score_shapes(call.scores) == kernel.scores:
        try:
            bind(kernel.launch, spec)
        except (BindingError, SpecError) as error:
            yield reason("binding", str(error))


def _rules(
    shapes: frozenset[tuple[str, tuple[tuple[str, str], ...]]] | tuple[tuple[str, tuple[tuple[str, str], ...]], ...],
) -> str:
    texts = (name + (f"({', '.join(f'{k}={v}' for k, v in choices)})" if choices else "") for name, choices in shapes)
    return " & ".join(sorted(texts)) or "none"


def _sizes(question: Question, kernel: CatalogKernel) -> Iterator[Reason]:
    call = question.call
    group = call.num_heads // call.num_kv_heads
    max_heads = dict(kernel.max_heads)
    if group not in max_heads:
        known = ", ".join(map(str, max_heads)) or "none"
        yield reason("gqa", f"{group} query heads share a key head; verified: {known}")
    elif power_bucket(call.num_heads) > power_bucket(max_heads[group]):
        yield reason("envelope", f"{call.num_heads} query heads; verified up to {power_bucket(max_heads[group])}")
    if power_bucket(call.batch) > power_bucket(kernel.max_batch):
        yield reason("envelope", f"batch {call.batch}; verified up to {power_bucket(kernel.max_batch)}")
    if question.lengths not in kernel.lengths:
        known = ", ".join(_lengths_text(b) for b in sorted(kernel.lengths)[:4]) or "no bucket whole"
        more = f" and {len(kernel.lengths) - 4} more" if len(kernel.lengths) > 4 else ""
        yield reason("envelope", f"the bucket {_lengths_text(question.lengths)} is not verified; verified: {known}{more}")


def _lengths_text(bucket: Lengths) -> str:
    return f"{bucket[0]} x {bucket[1]}"


def _memory(question: Question, kernel: CatalogKernel) -> Iterator[Reason]:
    call, facts = question.call, kernel.launch.target_facts
    item = 4 if call.dtypes[0] == "fp32" else 2
    needed = max(item, int(facts.get("alignment_bytes", item)))
    if call.address_bits % needed:
        yield reason("alignment", f"an address is no multiple of {needed} bytes")
    if limit := facts.get("max_offset"):
        reach = max(_reach(call, strides, k) for strides, k in zip(call.strides, (False, True, True), strict=True))
        if reach >= int(limit):
            yield reason("address_range", f"an element lies {reach} elements from its base; verified below {limit}")


def _reach(call: AttentionCall, strides: tuple[int, int, int, int], key_side: bool) -> int:
    """The largest offset of an element, in elements."""
    heads, seqlen = (call.num_kv_heads, call.seqlen_k) if key_side else (call.num_heads, call.seqlen_q)
    sizes = (call.batch, heads, seqlen, max(call.head_dim, call.head_dim_v))
    return sum((n - 1) * abs(s) for n, s in zip(sizes, strides, strict=True))


def _promises(question: Question, kernel: CatalogKernel) -> Iterator[Reason]:
    if question.deterministic and not kernel.deterministic:
        yield reason("deterministic", "two runs were not found bitwise equal")
    if question.settings.batch_invariant and not kernel.launch.target_facts.get("batch_invariant"):
        yield reason("deterministic", "the kernel does not promise the same result at every batch size")


def _speed(question: Question, kernel: CatalogKernel) -> Iterator[Reason]:
    time = _measured_for(question, kernel)
    asked_for = question.override is not None or bool(question.settings.force)
    if time is None:
        if not (question.settings.allow_unmeasured or asked_for):
            yield reason("unmeasured", f"no time in the bucket {_lengths_text(question.lengths)} on this device")
        return
    ours_us, torch_us = _predict(question, time)
    saved = torch_us - ours_us
    if not asked_for and (saved < question.settings.min_gain * torch_us or saved < question.settings.min_saving_us):
        yield reason("not_faster", f"{ours_us:.1f} us with its host cost, torch {torch_us:.1f} us")


#: In the order in which reasons are told.
FILTERS: tuple[Filter, ...] = (_requested, _trusted, _device, _problem, _sizes, _memory, _promises, _speed)

#: The further down, the nearer a kernel came to serving.
_RANK = {
    code: rank
    for rank, codes in enumerate(
        (
            ("device", "isa", "driver"),
            ("masks", "scores"),
            ("promise", "gqa", "lse", "binding"),
            ("unverified", "revoked", "location"),
            ("envelope",),
            ("alignment", "address_range"),
            ("override", "denied", "quarantined", "deterministic", "frozen", "lock"),
            ("unmeasured", "not_faster"),
        )
    )
    for code in codes
}


def _measured_for(question: Question, kernel: CatalogKernel) -> Measured | None:
    """The measurement in the call's bucket of lengths, at the nearest batch times heads; of several, the worst.

    On a GPU the product has to be the same power of two: how a small grid fills it says nothing about a large one.
    """
    if kernel.device_key != question.machine.device_key:
        return None
    inside = [m for m in kernel.measured if m.lengths == question.lengths]
    if not inside:
        return None
    distance = min(_octaves(m.grid, question.grid) for m in inside)
    if distance and kernel.target != "cpu":
        return None
    return max((m for m in inside if _octaves(m.grid, question.grid) == distance), key=lambda m: m.ours_s / m.torch_s)


def _octaves(one: int, other: int) -> int:
    return abs(one.bit_length() - other.bit_length())


def _predict(question: Question, time: Measured) -> tuple[float, float]:
    """Microseconds of ours (host cost included) and of torch's for the largest call of the bucket, by the amount of work."""
    work = question.grid * math.prod(question.lengths)
    measured = time.num_heads * math.prod(time.shape)
    factor = 1e6 * work / measured
    return time.ours_s * factor + HOST_COST_US, time.torch_s * factor
