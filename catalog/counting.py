"""Counts of calls by outcome, and the one-time warnings that go with them. Threads may count at once; nothing is lost."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

from catalog.reasons import Reason
from verifier.fork_lock import ForkLock

#: Outcomes that the user asked for: no warning.
_ASKED_FOR = {"mode_off", "override"}


class FallbackWarning(UserWarning):
    """torch answers a call in place of a kernel; said once for each reason."""


class Outcome:
    """One way for calls to end: a kernel that ran, or torch for a reason. `tick()` counts one: a C function, hence atomic."""

    __slots__ = ("_count", "code", "kernel_id", "label", "tick")

    def __init__(self, label: str, code: str, kernel_id: str | None) -> None:
        self.label, self.code, self.kernel_id = label, code, kernel_id
        self._count = itertools.count()
        self.tick: Callable[[], int] = self._count.__next__

    @property
    def calls(self) -> int:
        """How often `tick` was called; reading does not count."""
        return int(self._count.__reduce__()[1][0])


class Outcomes:
    """All outcomes of the process by label: "hit:<kernel id>", "miss:<reason>" and "error:<reason>"."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._by_label: dict[str, Outcome] = {}
        self._warned: set[str] = set()

    def get(self, kind: str, name: str, kernel_id: str | None = None) -> Outcome:
        label = f"{kind}:{name}"
        with self._lock:
            if label not in self._by_label:
                self._by_label[label] = Outcome(label, name, kernel_id)
            return self._by_label[label]

    def miss(self, why: Reason) -> Outcome:
        return self.get("miss", why.code)

    def by_label(self) -> dict[str, int]:
        with self._lock:
            return {label: outcome.calls for label, outcome in sorted(self._by_label.items())}

    def clear(self) -> None:
        """Start counting from zero; warnings that were given stay given."""
        with self._lock:
            for outcome in self._by_label.values():
                outcome._count = itertools.count()
                outcome.tick = outcome._count.__next__

    def warn_once(self, why: Reason, call: str, hint: str = "") -> None:
        """One warning for each reason code in the life of the process; none for what the user asked for."""
        if why.code in _ASKED_FOR:
            return
        with self._lock:
            if why.code in self._warned:
                return
            self._warned.add(why.code)
        warnings.warn(f"torch answers in place of a kernel: {why} [{call}]{hint}", FallbackWarning, stacklevel=2)

    def forget_warnings(self) -> None:
        with self._lock:
            self._warned.clear()
