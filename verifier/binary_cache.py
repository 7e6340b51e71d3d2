"""Compiled binaries kept under what they depend on. Compiles nothing.

Layout: `objects/<first two>/<sha256>.so` (or .cubin) holds bytes under their own hash; `entries/<first two>/<key>.json`, written
last, says which object a key stands for. Both are written under private names and renamed, so that a reader sees a whole entry
or none, whoever else writes or is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from generator.canonical import digest, digest_bytes
from verifier.own_folder import own_folder
from verifier.records import Binary


def cache_key(source_hash: str, flags: tuple[str, ...], compiler_version: str) -> str:
    """What a binary depends on: source, flags (architecture included) and toolchain."""
    return digest({"source": source_hash, "flags": flags, "compiler": compiler_version, "layout": 1})


@contextlib.contextmanager
def private_folder(cache: Path) -> Iterator[Path]:
    """A folder that only this call uses, on the cache's own file system; what cannot be removed (a busy mount) is left behind."""
    (cache / "tmp").mkdir(parents=True, exist_ok=True)
    with own_folder("build", cache / "tmp") as folder:
        yield folder


def _entry_path(cache: Path, key: str) -> Path:
    return cache / "entries" / key[:2] / f"{key}.json"


def write_atomically(path: Path, data: bytes) -> None:
    """A file that readers see whole or not at all, readable for this user; makes the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o600)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_entry(cache: Path, key: str, binary: Binary, data: bytes, suffix: str) -> Binary:
    """Store the object under its own hash, then the entry that names it. Returns the binary with its path."""
    path = cache / "objects" / binary.hash[:2] / (binary.hash + suffix)
    write_atomically(path, data)
    plain = {**asdict(binary), "path": str(path.relative_to(cache))}
    write_atomically(_entry_path(cache, key), json.dumps(plain).encode())
    return Binary(**{**plain, "path": str(path), "flags": tuple(binary.flags)})


def read_entry(cache: Path, key: str) -> Binary | None:
    """The cached binary of a key; None when there is none or when its bytes are not the ones that were stored."""
    try:
        plain = json.loads(_entry_path(cache, key).read_bytes())
        path = cache / plain["path"]
        if digest_bytes(path.read_bytes()) != plain["hash"]:
            return None
        return Binary(**{**plain, "path": str(path), "flags": tuple(plain["flags"]), "cached": True})
    except (OSError, ValueError, KeyError, TypeError):
        return None
