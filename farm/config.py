"""Settings of the machine, read from the environment in one place. What to build stands in a plan, not here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: Variable -> what it sets; FARM_CATALOG is the loader's too.
VARIABLES = {
    "FARM_CATALOG": "catalog of `farm sweep` and `farm catalog` where --catalog is left out",
    "FARM_CACHE": "folder for compiled binaries; default ~/.cache/kernel-farm",
    "FARM_CXX": "the C++ compiler",
    "FARM_DEBUG": "1: tracebacks instead of one line",
}
DEFAULT_CATALOG = "farm-catalog"


@dataclass(frozen=True, slots=True)
class Config:
    cache: Path
    catalog: str
    debug: bool


def load_config(environ: Mapping[str, str] = os.environ) -> Config:
    """The settings that hold for this process."""
    base = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Config(
        cache=Path(environ.get("FARM_CACHE") or base / "kernel-farm"),
        catalog=environ.get("FARM_CATALOG") or DEFAULT_CATALOG,
        debug=bool(environ.get("FARM_DEBUG")),
    )
