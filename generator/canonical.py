"""Identity of records: canonical JSON and its SHA-256. Not a serializer for files that people read."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from typing import Any

_PLAIN = frozenset({str, int, float, bool, type(None)})


@functools.cache
def _compared(kind: type) -> tuple[str, ...] | None:
    """Names of a dataclass's fields that count; None of any other type."""
    return tuple(f.name for f in dataclasses.fields(kind) if f.compare) if dataclasses.is_dataclass(kind) else None


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as plain JSON values, field names kept."""
    if type(value) in _PLAIN:
        return value
    if (names := _compared(type(value))) is not None:  # type: ignore[arg-type]  # mypy: no type[Any] has a hash
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [to_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): to_plain(v) for k, v in value.items()}
    return value


def canonical_json(value: Any) -> str:
    """Sorted keys, no white space, no NaN: the same text for equal records on every machine.

    Raises ValueError for NaN and infinities, TypeError for values that JSON has no form for.
    """
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 (hex) of a record's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def digest_text(text: str) -> str:
    """SHA-256 (hex) of a text as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest_bytes(data: bytes) -> str:
    """SHA-256 (hex) of bytes."""
    return hashlib.sha256(data).hexdigest()
