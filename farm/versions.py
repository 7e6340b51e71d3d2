"""Which translator and which harness made a row: versions that change with the code, not with a number somebody has to raise."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from importlib.resources.abc import Traversable


def _package_version() -> str:
    try:
        return version("kernel-farm")
    except PackageNotFoundError:
        return "0"


def _digest(package: str, folders: tuple[str, ...] = ("",)) -> str:
    """Of every source file below the folders, names included; bytes of compiled Python and the like left out."""
    found = hashlib.sha256()
    root = resources.files(package)
    for folder in folders:
        for name, content in sorted(_files(root.joinpath(folder) if folder else root)):
            found.update(name.encode() + b"\0" + content)
    return found.hexdigest()[:12]


def _files(folder: Traversable) -> list[tuple[str, bytes]]:
    """(path below the folder, content) of its source files, those of folders in it included."""
    listed = []
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            listed += [(f"{entry.name}/{name}", content) for name, content in _files(entry)]
        elif entry.name.endswith((".py", ".h", ".cuh", ".cpp")):
            listed.append((entry.name, entry.read_bytes()))
    return listed


@functools.cache
def translator_version() -> str:
    """What turns a program into source: the language and the translators."""
    return f"{_package_version()}+{_digest('generator', ('tl', 'translate'))}"


@functools.cache
def harness_version() -> str:
    """What compiles, judges and times."""
    return f"{_package_version()}+{_digest('verifier')}"
