"""The loader's state in a process: the server under the settings in force, kernels that were loaded, counts. Decides nothing."""

from __future__ import annotations

import logging
import os
from typing import Any

from catalog import settings as configuration
from catalog.decisions import Decision
from catalog.loader import Loader
from catalog.server import Server, log, outcomes, per_thread
from catalog.source import Source
from verifier.fork_lock import ForkLock

#: Kernels outlive a change of settings.
loader = Loader(outcomes)

_server: Server | None = None
_frozen = False
_making = ForkLock()


def server() -> Server:
    """The server under the settings in force."""
    global _server
    if (found := _server) is None:
        with _making:
            if (found := _server) is None:
                settings = configuration.current()
                if settings.log != "":
                    _set_log_level(settings.log)
                found = _server = Server(settings, _frozen, loader)
    return found


def _set_log_level(level: str) -> None:
    """A level that the user named is shown even where nothing else configured logging."""
    log.setLevel(logging.CRITICAL + 1 if level == "off" else level.upper())
    if level != "off" and not log.hasHandlers():
        log.addHandler(logging.StreamHandler())


def reload() -> None:
    """Look at the catalog anew: decisions from now on see its rows of this moment. Loaded kernels and open plans stay.

    Raises the store's errors where a catalog that served is gone, and then what it gave before stays in force.
    """
    global _server
    before = _server
    fresh = None if before is None or not isinstance(before._source, Source) else Server(before.settings, _frozen, loader)
    if fresh is not None:
        fresh.source()
    with _making:
        if _server is before:
            _server = fresh


def _forget() -> None:
    """The next call makes a server under the settings of that moment."""
    global _server
    with _making:
        _server = None


def freeze() -> None:
    """From now on nothing is loaded: a call whose best kernel is not in memory takes the next one that is, or torch (counted)."""
    global _frozen
    _frozen = True
    _forget()


def unfreeze() -> None:
    """Allow loading again."""
    global _frozen
    _frozen = False
    _forget()


configuration.on_change(_forget)


def _after_fork() -> None:
    """A forked child makes a server of its own: another thread may have been at work on the parent's."""
    global _server
    _server = None


os.register_at_fork(after_in_child=_after_fork)


def last_decision() -> Decision | None:
    """The decision behind this thread's latest attention call; None before the first."""
    return getattr(per_thread, "decision", None)


def stats() -> dict[str, Any]:
    """Counts since the start: `calls`, and `outcomes` by label ("hit:<kernel id>", "miss:<reason>"), which sum to `calls`.

    Calls with wrong arguments are none, whether torch or this package said so; those that raised NoKernelError are.
    `errors`: events besides the calls, such as a kernel put under quarantine. `loads`: binaries loaded; `loaded_bytes`: their
    size. `decisions`, `frames`: entries of the two caches.
    """
    counted = outcomes.by_label()
    answered = {label: n for label, n in counted.items() if n and not label.startswith("error:")}
    current = server()
    return {
        "calls": sum(answered.values()),
        "outcomes": answered,
        "errors": {label.removeprefix("error:"): n for label, n in counted.items() if n and label.startswith("error:")},
        "loads": loader.loads,
        "loaded_bytes": sum(k.num_bytes for k in loader.all()),
        "decisions": len(current._decisions),
        "frames": len(current.frames),
        "frozen": _frozen,
    }
