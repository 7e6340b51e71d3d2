"""Settings of the machine, read from the environment in one place. What to build stands in a plan, not here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from catalog.settings import default_location
from farm.console import InputError

#: Variable -> what it sets; FARM_CATALOG is the loader's too.
VARIABLES = {
    "FARM_CATALOG": "the catalog where --catalog is left out; default: the user's own, ~/.local/share/kernel-farm/catalog",
    "FARM_CACHE": "folder for compiled binaries; default ~/.cache/kernel-farm",
    "FARM_CXX": "the C++ compiler",
    "FARM_LOCKS": "folder of the locks that keep one measurement alone on a machine; default: that of temporary files",
    "FARM_HEAD_S": "seconds that the head of a Ray cluster may be silent before a sweep ends; default 20",
    "FARM_DEBUG": "1: tracebacks instead of one line",
}


@dataclass(frozen=True, slots=True)
class Config:
    """cache: the folder for compiled binaries. catalog: where --catalog names none. head_s: a silent Ray head counts as lost."""

    cache: Path
    catalog: str
    debug: bool
    head_s: float = 20.0


def usable_cache(config: Config) -> Path:
    """The folder for compiled binaries, made where there is none. Raises InputError where it cannot be."""
    try:
        config.cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        cure = "export FARM_CACHE=/a/folder/of/yours"
        raise InputError(
            "FARM_CACHE", f"{config.cache}: cannot be made ({(error.strerror or str(error)).lower()}); {cure}"
        ) from None
    return config.cache


def load_config(environ: Mapping[str, str] = os.environ) -> Config:
    """The settings that hold for this process."""
    base = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Config(
        cache=Path(environ.get("FARM_CACHE") or base / "kernel-farm"),
        catalog=environ.get("FARM_CATALOG") or str(default_location()),
        debug=bool(environ.get("FARM_DEBUG")),
        head_s=_seconds(environ, "FARM_HEAD_S", 20.0),
    )


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    given = environ.get(name)
    try:
        seconds = float(given) if given else default
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InputError(name, f"expected seconds, such as {default:g}, found {given!r}")
    return seconds


def catalog_location(given: str | None) -> str:
    """The catalog that --catalog names, else FARM_CATALOG, else the user's own: as `catalog.configure` has it."""
    return load_config().catalog if given is None else given
