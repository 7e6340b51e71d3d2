"""Decisions and frames under one set of settings: what answers a call, made once and found again. Holds no state of the process.

A *decision* is made once for a bucket of calls, a *frame* once for exact shapes and strides: it holds what can be computed
before the addresses are known. Both caches are bounded. Reading them takes no lock; making takes one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from catalog import lockfile
from catalog import settings as configuration
from catalog.calls import AttentionCall
from catalog.counting import Outcome, Outcomes
from catalog.decisions import Decision
from catalog.envelope import Lengths, lengths_bucket
from catalog.errors import CatalogError
from catalog.kernels import CatalogKernel, mask_shapes, score_shapes
from catalog.keys import ShapeBucket, power_bucket
from catalog.loader import LoadedKernel, Loader, LoadFailed
from catalog.machine import this_machine
from catalog.plainness import Check, check_like, never
from catalog.reasons import NoKernelError, Reason, reason
from catalog.selection import Question, choose, matching_spec
from catalog.settings import Override, Settings
from catalog.source import Source, open_source
from generator.spec import AttentionSpec

log = logging.getLogger("catalog")
outcomes = Outcomes()
per_thread = threading.local()

#: Makes what runs from a loaded kernel and the spec that it computes for the call.
Bind = Callable[[LoadedKernel, AttentionSpec], Callable[..., Any]]


class Frame:
    """What runs for exact shapes. `run` None: torch answers. A kernel's frame is called with the call's tensors."""

    __slots__ = ("binary_hash", "check", "decision", "options", "outcome", "run")

    def __init__(self, decision: Decision, outcome: Outcome, run: Callable[..., Any] | None, binary_hash: str = "") -> None:
        self.decision, self.outcome, self.run, self.binary_hash = decision, outcome, run, binary_hash
        self.check: Check = never  # whether tensors are like those that the frame was made for
        self.options: tuple[Any, ...] = ()  # the other arguments


class Server:
    """Decisions and frames under one set of settings. A change makes a new one; loaded kernels and counts outlive it."""

    def __init__(self, settings: Settings, frozen: bool, loader: Loader) -> None:
        self.settings, self.off, self.frozen, self._loader = settings, settings.off, frozen, loader
        self.lock = threading.RLock()
        self.frames: dict[Any, Frame] = {}
        self.latest: Frame | None = None  # the same call is most often made again: one for each layer of a model
        self._decisions: dict[Any, tuple[Decision, CatalogKernel | None]] = {}
        self._unreadable: dict[str, Reason] = {}  # binaries that the catalog did not give; reload() asks again
        self._source: Source | Reason | None = None
        self._lock_file: lockfile.Lock | None = None

    def frame(self, key: Any, call: AttentionCall, override: Override | None, bind: Bind) -> Frame:
        """The frame for a key that had none. Raises NoKernelError in strict mode, or where a kernel is required."""
        with self.lock:
            if (found := self.frames.get(key)) is not None:
                return found
            # A frame outlives these addresses: alignment is looked at in every call.
            decision, kernel, loaded = self.loaded(replace(call, address_bits=0), override)
            if kernel is None or loaded is None:
                self._require_counted(decision, override)
                made = Frame(decision, outcomes.miss(decision.reasons[0]), None)
            else:
                spec = matching_spec(call, kernel)
                assert spec is not None, "a kernel was chosen whose masks are not the call's"
                hit = outcomes.get("hit", kernel.kernel_id, kernel.kernel_id)
                made = Frame(decision, hit, bind(loaded, spec), kernel.binary_hash)
            _bounded(self.frames, key, made, self.settings.max_frames)
        if made.run is None:
            self._tell_miss(decision)
        return made

    def loaded(
        self, call: AttentionCall, override: Override | None
    ) -> tuple[Decision, CatalogKernel | None, LoadedKernel | None]:
        """The decision for a call with its kernel in memory: what cannot be loaded is out, and the next one is chosen."""
        timeout_s = self.settings.probe_timeout_s if self.settings.probe == "first_load" else None
        while True:
            decision, kernel = self._decided(call, override)
            if kernel is None:
                return decision, None, None
            source = self.source()
            assert isinstance(source, Source)
            try:
                return decision, kernel, self._loader.load(kernel, source.read, timeout_s, call.device)
            except LoadFailed as failure:
                self._decisions.clear()
                if not failure.lasting:
                    self._unreadable[kernel.binary_hash] = failure.reason
                if self.settings.on_error == "raise":
                    raise NoKernelError(decision.call, (failure.reason,)) from failure

    def remember(self, frame: Frame, options: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> None:
        """Look at this frame first in the next call. options: the other arguments, which hold no tensors."""
        if not frame.check(q, k, v):
            check = check_like(q, k, v)
            if check is None:
                return
            frame.options, frame.check = options, check
        self.latest = frame

    def failed(self, frame: Frame, why: Reason, broken: bool) -> None:
        """A kernel did not answer a call: count it, and if it is broken, let it run no more. Raises under on_error = "raise"."""
        decision = per_thread.decision = Decision(frame.decision.call, None, (why,), frame.decision.considered)
        outcomes.miss(why).tick()
        if broken:
            self._loader.quarantine(frame.binary_hash, why)
            with self.lock:
                self.frames.clear()
                self.latest = None
                self._decisions.clear()
        outcomes.warn_once(why, decision.call)
        if self.settings.on_error == "raise":
            raise NoKernelError(decision.call, (why,))
        self.require(decision, configuration.override())

    def miss(self, call: AttentionCall, override: Override | None) -> None:
        """Count a call that no key describes (autograd, modes, subclasses) under its first reason; warn or raise."""
        decision = self.decide(call, override)
        self._require_counted(decision, override)
        outcomes.miss(decision.reasons[0]).tick()
        per_thread.decision = decision
        self._tell_miss(decision)

    def _tell_miss(self, decision: Decision) -> None:
        outcomes.warn_once(decision.reasons[0], decision.call)
        if self.settings.on_miss is not None:
            self.settings.on_miss(decision)

    def decide(self, call: AttentionCall, override: Override | None = None) -> Decision:
        """What would answer this call. Loads nothing."""
        with self.lock:
            return self._decided(call, override)[0]

    def _decided(self, call: AttentionCall, override: Override | None) -> tuple[Decision, CatalogKernel | None]:
        blockers = self._asked_for(override) + call.blockers
        source: Source | Reason = blockers[0] if blockers else self.source()
        if isinstance(source, Reason):
            return Decision(str(call), None, blockers or (source,)), None
        deterministic = self._deterministic()
        key = (_bucket_key(call), deterministic, override)
        if (found := self._decisions.get(key)) is not None:
            return found
        try:
            kernels = source.index.group((call.dtypes[0], call.head_dim, call.head_dim_v))
        except (CatalogError, OSError) as error:  # gone or damaged since it was opened: calls go on, reload() asks again
            why = reason("no_catalog", f"its rows cannot be read now: {error}")
            log.warning("%s", why)
            return Decision(str(call), None, (why,)), None
        machine = this_machine(call.device)
        question = Question(
            call, self.settings, machine, override, deterministic, self._loader.quarantined | self._unreadable,
            source.location_problem, self._loader.hashes if self.frozen else None, self._pinned(call, machine.device_key),
        )  # fmt: skip
        made = choose(question, kernels)
        _bounded(self._decisions, key, made, self.settings.max_decisions)
        _tell(made[0], ShapeBucket.of(call.batch, call.seqlen_q, call.seqlen_k))
        return made

    def _asked_for(self, override: Override | None) -> tuple[Reason, ...]:
        if self.off:
            return (reason("mode_off"),)
        if override is not None and not override.ids:
            return (reason("override", "attention_kernel('sdpa') is around the call"),)
        return ()

    def _pinned(self, call: AttentionCall, device_key: str) -> frozenset[str] | None:
        """What the lock allows for the call's device and bucket of lengths. Raises CatalogError for a file that is no lock."""
        if self.settings.lock is None:
            return None
        if self._lock_file is None:
            self._lock_file = lockfile.read(Path(self.settings.lock))
        lengths = lengths_bucket(call.seqlen_q, call.seqlen_k)
        here = (p for p in self._lock_file.pinned if p.device_key == device_key)
        return frozenset(p.binary_hash for p in here if _lengths_of(p.shape_bucket) == lengths)

    def _deterministic(self) -> bool:
        wanted = self.settings.deterministic
        return torch.are_deterministic_algorithms_enabled() if wanted is None else wanted

    def require(self, decision: Decision, override: Override | None) -> None:
        """Raises NoKernelError if torch would answer a call that asked for a kernel."""
        if decision.kernel_id is not None or any(r.code == "mode_off" for r in decision.reasons):
            return
        if override is not None:
            if override.require:
                raise NoKernelError(decision.call, decision.all_reasons)
            if not override.ids:
                return
        if self.settings.mode == "strict" or self.settings.force:
            raise NoKernelError(decision.call, decision.all_reasons)

    def _require_counted(self, decision: Decision, override: Override | None) -> None:
        """As `require`; a call that it ends is counted."""
        try:
            self.require(decision, override)
        except NoKernelError:
            outcomes.miss(decision.reasons[0]).tick()
            raise

    def source(self) -> Source | Reason:
        """Where kernels come from; opened once. Raises the store's errors for a location that was named and is none."""
        with self.lock:
            if self._source is None:
                self._source = open_source(self.settings.catalog, self.settings.signers)
            return self._source


def _bounded(cache: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Insert; the oldest entry leaves when the cache is full. The caller holds the lock."""
    while len(cache) >= limit:
        del cache[next(iter(cache))]
    cache[key] = value


def _bucket_key(call: AttentionCall) -> Any:
    """What a decision depends on: buckets, never lengths, and rules without their numbers."""
    longest = max(call.batch, call.num_heads, call.seqlen_q, call.seqlen_k)
    reach = longest * max(abs(stride) for strides in call.strides for stride in strides)
    heads = (power_bucket(call.num_heads), call.num_heads // call.num_kv_heads)
    rules = (tuple(mask_shapes(form) for form in call.mask_forms), score_shapes(call.scores), call.captured)
    return (
        call.device, call.dtypes, call.head_dim, call.head_dim_v, ShapeBucket.of(call.batch, call.seqlen_q, call.seqlen_k), heads,
        rules, call.need_lse, call.scale > 0, call.address_bits, max(31, reach.bit_length()),
    )  # fmt: skip


def _lengths_of(shape_bucket: str) -> Lengths:
    bucket = ShapeBucket.parse(shape_bucket)
    return bucket.seqlen_q, bucket.seqlen_k


def _tell(decision: Decision, bucket: ShapeBucket) -> None:
    """One line for each new bucket: the kernel, what it gains, the runner-up."""
    first, second = (*decision.considered, None, None)[:2]
    if decision.kernel_id is None or first is None:
        log.info("%s %s: torch (%s)", decision.call, bucket, decision.reasons[0].code)
        return
    gain = f"{first.sdpa_us / first.predicted_us:.2f}x torch" if first.sdpa_us and first.predicted_us else "not measured"
    runner_up = second.kernel_id if second is not None and second.accepted else "torch"
    log.info("%s %s: kernel %s, predicted %s, runner-up %s", decision.call, bucket, first.kernel_id, gain, runner_up)
