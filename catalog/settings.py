"""How the loader behaves: one frozen `Settings`, from `configure()` and the FARM_* variables. Chooses and loads nothing.

Precedence: `attention_kernel(...)` around a call, then `configure(...)`, then the environment, then the defaults. One exception:
`FARM_MODE=off` is the operator's kill switch and wins over `configure(mode=...)`.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verifier.fork_lock import ForkLock

MODES = ("auto", "strict", "off")
ON_ERROR = ("fallback", "raise")
PROBES = ("first_load", "off")
LOG_LEVELS = ("", "debug", "info", "warning", "error", "off")

#: The FARM_* variables that mean something to the loader, and what each sets.
VARIABLES = {
    "FARM_MODE": "auto, strict or off: off is bit-identical torch, whatever configure() said",
    "FARM_FORCE": "kernel ids, comma separated: only these may run, and a call that none of them can take raises",
    "FARM_DENY": "kernel ids, comma separated: these never run",
    "FARM_CATALOG": "location of the catalog that serves",
    "FARM_SIGNERS": "a file of public keys, one a line: only what one of them signed may serve",
    "FARM_LOG": "debug, info, warning, error or off",
}

#: FARM_* variables that other packages and the tests read: known here so that they draw no warning.
_OTHER_VARIABLES = {
    "FARM_CACHE", "FARM_CUDA_CACHE", "FARM_CXX", "FARM_DEBUG", "FARM_HEAD_S", "FARM_LOCKS", "FARM_QUIET_WAIT_S",
    "FARM_TEST_CACHE",
}  # fmt: skip


def default_location() -> Path:
    """The user's own catalog, where nobody names another: $XDG_DATA_HOME/kernel-farm/catalog, else below ~/.local/share.

    Serving and the `farm` command follow one rule: what is named, else FARM_CATALOG, else this.
    """
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "kernel-farm" / "catalog"


class SettingsError(ValueError):
    """A setting with a value that it cannot have: names the setting, the value and what is allowed."""


class UnknownSettingWarning(UserWarning):
    """A FARM_* variable or a configure() keyword that nothing reads: most often a typing error."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that the loader reads, after `configure()` and the environment.

    catalog: an open catalog, a location, or None for the user's default folder.
    signers: public keys (`ssh-ed25519 AAAA... name`), or files of such lines: only what one of them signed may serve. Empty: no
        signature is asked for.
    lock: path of a `farm.lock`: only the binaries that it pins for a device and a bucket of lengths may serve there.
    mode: "auto" falls back to torch with one warning a reason; "strict" raises with every reason; "off" is torch alone.
    on_miss: called with the `Decision` of every new call that torch has to answer.
    on_error: what a kernel that fails at a call does: "fallback" (quarantine it, let torch answer) or "raise".
    deterministic, batch_invariant: only kernels whose rows promise it. None: `deterministic` follows torch's own switch.
    allow_host_code: load shared objects from catalogs that are not a private local folder.
    allow_unmeasured: serve verified kernels that have no time for this device, ranked last.
    min_gain, min_saving_us: how much faster than torch SDPA a kernel must have been measured to be chosen.
    probe: when a kernel runs its golden case in a child process: before it is loaded into this one, or never ("off").
    log: level of the `catalog` logger; "" leaves it to the program.
    max_decisions, max_frames: bounds of the two caches (by bucket; by exact shapes).
    """

    catalog: Any = None
    signers: tuple[str, ...] = ()
    lock: str | os.PathLike[str] | None = None
    mode: str = "auto"
    on_miss: Callable[[Any], None] | None = None
    on_error: str = "fallback"
    deterministic: bool | None = None
    batch_invariant: bool = False
    allow_host_code: bool = False
    allow_unmeasured: bool = False
    min_gain: float = 0.05
    min_saving_us: float = 2.0
    probe: str = "first_load"
    probe_timeout_s: float = 20.0
    max_decisions: int = 4096
    max_frames: int = 1024
    force: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    log: str = ""
    kill_switch: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        for name, allowed in (("mode", MODES), ("on_error", ON_ERROR), ("probe", PROBES), ("log", LOG_LEVELS)):
            if getattr(self, name) not in allowed:
                raise SettingsError(f"{name}: expected one of {', '.join(filter(None, allowed))}, found {getattr(self, name)!r}")
        for name, what in (("catalog", "a location or an open catalog"), ("lock", "the path of a lock file")):
            if type(given := getattr(self, name)).__module__ == "builtins" and not isinstance(given, str | None):
                raise SettingsError(f"{name}: expected {what}, found {given!r}")
        for name in ("force", "deny", "signers"):
            if not all(isinstance(one, str) for one in getattr(self, name)):
                raise SettingsError(f"{name}: expected texts, found {getattr(self, name)!r}")
        for name in ("deterministic", "batch_invariant", "allow_host_code", "allow_unmeasured"):
            if not isinstance(given := getattr(self, name), bool | None):
                raise SettingsError(f"{name}: expected True or False, found {given!r}")
        if self.on_miss is not None and not callable(self.on_miss):
            raise SettingsError(f"on_miss: expected a function of one decision, found {self.on_miss!r}")
        for name in ("max_decisions", "max_frames"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise SettingsError(f"{name}: expected a whole number of at least 1, found {getattr(self, name)!r}")
        for name in ("min_gain", "min_saving_us", "probe_timeout_s"):
            if not isinstance(getattr(self, name), int | float) or not getattr(self, name) >= 0:
                raise SettingsError(f"{name}: expected a number of at least 0, found {getattr(self, name)!r}")

    @property
    def off(self) -> bool:
        return self.kill_switch or self.mode == "off"


def warn_unknown(names: Mapping[str, object] | set[str], known: set[str], what: str) -> None:
    """One warning for each name that nothing reads, with the nearest name that something does."""
    for name in sorted(set(names) - known):
        near = difflib.get_close_matches(name, sorted(known), n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}"
        warnings.warn(f"{name}: nothing reads this {what}{hint}", UnknownSettingWarning, stacklevel=3)


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings that the FARM_* variables make, and a warning for each FARM_* name that nothing reads.

    Raises SettingsError for a value that a variable cannot have.
    """
    ours = {name for name in environ if name.startswith("FARM_")}
    warn_unknown(ours, set(VARIABLES) | _OTHER_VARIABLES, "variable")
    found: dict[str, Any] = {}
    if mode := environ.get("FARM_MODE"):
        if mode not in MODES:
            raise SettingsError(f"FARM_MODE: expected one of {', '.join(MODES)}, found {mode!r}")
        found["mode"] = mode
        found["kill_switch"] = mode == "off"
    if log := environ.get("FARM_LOG"):
        if log.lower() not in LOG_LEVELS:
            raise SettingsError(f"FARM_LOG: expected one of {', '.join(LOG_LEVELS)}, found {log!r}")
        found["log"] = log.lower()
    if location := environ.get("FARM_CATALOG"):
        found["catalog"] = location
    if signers := environ.get("FARM_SIGNERS"):
        found["signers"] = (signers,)
    for variable, name in (("FARM_FORCE", "force"), ("FARM_DENY", "deny")):
        if ids := tuple(part.strip() for part in environ.get(variable, "").split(",") if part.strip()):
            found[name] = ids
    return found


_lock = ForkLock()
_configured: dict[str, Any] = {}
_current: Settings | None = None
_listeners: list[Callable[[], None]] = []


def configure(**changes: Any) -> Settings:
    """Set any field of `Settings` for this process; what is not named keeps its value. Returns the settings in force.

    `configure()` reads the environment again. An unknown keyword warns and changes nothing. Raises SettingsError (a ValueError)
    for a value that a setting cannot have, and then nothing changes either.
    """
    global _current
    known = {name for name in Settings.__dataclass_fields__ if name != "kill_switch"}
    warn_unknown(set(changes), known, "setting")
    changes = {name: _tidy(name, value) for name, value in changes.items() if name in known}
    with _lock:
        merged = {**_configured, **changes}
        settings = _build(merged)
        _configured.clear()
        _configured.update(merged)
        _current = settings
    for listener in _listeners:
        listener()
    return settings


def reset() -> None:
    """Forget every `configure()`; the environment is read again at the next use."""
    global _current
    with _lock:
        _configured.clear()
        _current = None
    for listener in _listeners:
        listener()


def current() -> Settings:
    """The settings in force. The environment is read at the first use, never at import."""
    global _current
    if (settings := _current) is None:
        with _lock:
            settings = _current = _build(_configured)
    return settings


def on_change(listener: Callable[[], None]) -> None:
    """Call `listener` after every change of settings (caches of decisions are dropped by it)."""
    _listeners.append(listener)


def _tidy(name: str, value: Any) -> Any:
    if name in ("force", "deny", "signers"):
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, Iterable | None):
            raise SettingsError(f"{name}: expected a text or several, found {value!r}")
        return (value,) if isinstance(value, str) else tuple(value or ())
    return value


def _build(configured: Mapping[str, Any]) -> Settings:
    return replace(Settings(**from_environment(os.environ)), **configured)


@dataclass(frozen=True, slots=True)
class Override:
    """What `attention_kernel` asks of the calls inside it. `ids` empty: torch only."""

    ids: tuple[str, ...]
    require: bool


_override: ContextVar[Override | None] = ContextVar("farm_attention_kernel", default=None)
override = _override.get


@contextmanager
def attention_kernel(ids: str | tuple[str, ...] | list[str], require: bool = False) -> Iterator[None]:
    """Only these kernels may answer the attention calls inside; "sdpa" stands for torch. Per context, as a ContextVar is.

    ids: kernel ids (any unique beginning of one) or "sdpa". require: a call that none of them can take raises `NoKernelError`
    with every reason, instead of falling back.
    """
    wanted = (ids,) if isinstance(ids, str) else tuple(ids)
    kernels = tuple(name for name in wanted if name != "sdpa")
    token = _override.set(Override(kernels, require and "sdpa" not in wanted))
    try:
        yield
    finally:
        _override.reset(token)
