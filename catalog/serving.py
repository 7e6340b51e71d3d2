"""The loader's state in a process: settings in force, decisions and frames by key, counts. Knows no function's arguments.

A *decision* is made once for a bucket of calls, a *frame* once for exact shapes and strides: it holds what can be computed
before the addresses are known. Both caches are bounded. Reading them takes no lock; making takes one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from catalog import settings as configuration
from catalog.calls import AttentionCall
from catalog.counting import Outcome, Outcomes
from catalog.decisions import Decision
from catalog.reasons import NoKernelError, reason
from catalog.settings import Override, Settings

log = logging.getLogger("catalog")
outcomes = Outcomes()


class Frame:
    """What runs for exact shapes. `run` None: torch answers. A kernel's frame is called with the call's tensors."""

    __slots__ = ("decision", "outcome", "run")

    def __init__(self, decision: Decision, outcome: Outcome, run: Callable[..., Any] | None) -> None:
        self.decision, self.outcome, self.run = decision, outcome, run


@dataclass
class _PerThread(threading.local):
    """What `last_decision` tells: each thread its own."""

    decision: Decision | None = None


per_thread = _PerThread()


class Server:
    """Decisions and frames under one set of settings. A change makes a new one; loaded kernels and counts outlive it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.off = settings.off
        self.lock = threading.RLock()
        self.frames: dict[Any, Frame] = {}
        self.decisions: dict[Any, Decision] = {}

    def frame(self, key: Any, call: AttentionCall, override: Override | None = None) -> Frame:
        """The frame for a key that had none. Raises NoKernelError in strict mode, or where a kernel is required."""
        with self.lock:
            if (found := self.frames.get(key)) is not None:
                return found
            decision = self.decide(call, override)
            self.require(decision, override)
            made = self._frame(decision)
            _bounded(self.frames, key, made, self.settings.max_frames)
        if made.run is None:
            outcomes.warn_once(decision.reasons[0], decision.call)
        return made

    def decide(self, call: AttentionCall, override: Override | None = None) -> Decision:
        """What would answer this call."""
        blockers = call.blockers
        if self.off:
            blockers = (reason("mode_off"), *blockers)
        elif override is not None and not override.ids:
            blockers = (reason("override", "attention_kernel('sdpa') is around the call"), *blockers)
        if not blockers:
            blockers = (reason("no_catalog", "no catalog is configured; use catalog.configure(catalog=...) or FARM_CATALOG"),)
        return Decision(str(call), None, blockers)

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

    def miss(self, call: AttentionCall, override: Override | None = None) -> None:
        """Count a call that no key describes (autograd, modes, subclasses) under its first reason; warn or raise."""
        decision = self.decide(call, override)
        self.require(decision, override)
        outcomes.miss(decision.reasons[0]).tick()
        per_thread.decision = decision
        outcomes.warn_once(decision.reasons[0], decision.call)

    def _frame(self, decision: Decision) -> Frame:
        return Frame(decision, outcomes.miss(decision.reasons[0]), None)


def _bounded(cache: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Insert; the oldest entry leaves when the cache is full. The caller holds the lock."""
    while len(cache) >= limit:
        del cache[next(iter(cache))]
    cache[key] = value


# ------------------------------------------------------------------------------------------------------- the one in force

_server: Server | None = None
_making = threading.Lock()


def server() -> Server:
    """The server under the settings in force."""
    global _server
    if (found := _server) is None:
        with _making:
            if (found := _server) is None:
                found = _server = Server(configuration.current())
    return found


def _settings_changed() -> None:
    global _server
    with _making:
        _server = None


configuration.on_change(_settings_changed)


def last_decision() -> Decision | None:
    """The decision behind this thread's latest attention call; None before the first."""
    return per_thread.decision


def stats() -> dict[str, Any]:
    """Counts since the start: `calls`, and `outcomes` by label ("hit:<kernel id>", "miss:<reason>"), which sum to `calls`.

    "error:<reason>" counts events besides the calls, such as a kernel put under quarantine.
    """
    counted = outcomes.by_label()
    return {
        "calls": outcomes.total(),
        "outcomes": {label: n for label, n in counted.items() if n and not label.startswith("error:")},
        "errors": {label: n for label, n in counted.items() if n and label.startswith("error:")},
    }
