"""Small checked records beside the parts: which compaction holds, which runs are fenced, what is revoked, what was planned.

Each is a file of JSON that never changes, with the SHA-256 of its body inside. Decides nothing about rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from catalog.errors import DamagedFile, NewerSchema
from catalog.locations import Location
from generator.canonical import canonical_json, digest, digest_text

COMPACTIONS, FENCES, REVOCATIONS, RUNS = "compacted", "fences", "revocations", "runs"
_FORMAT = 1
_COPY = ".copy"


@dataclass(frozen=True, slots=True)
class Compaction:
    """The newest one says which compacted parts count.

    parts: the latest attempt of each key, no key twice. history: superseded attempts. replaced: parts that are hidden from the
    moment this record exists, whether or not their files are still there.
    """

    number: int = 0
    parts: tuple[str, ...] = ()
    history: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    last_sequence: int = 0


@dataclass(frozen=True, slots=True)
class Fence:
    """A superseded run. limits: writer -> the largest sequence of its rows that still count; rows of other writers do not."""

    run_id: str
    limits: dict[str, int] = field(default_factory=dict)
    fenced_at: str = ""


@dataclass(frozen=True, slots=True)
class Revocation:
    """Rows that may no longer be served: one row by its id, or all rows of a binary by its hash."""

    row_id: str
    binary_hash: str
    reason: str
    revoked_at: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run of a sweep set out to do. planned = its terminal rows (one a try) + cached (attempts that had ended before)."""

    run_id: str
    sweep_id: str
    planned: int
    cached: int


def write(location: Location, file: str, record: Any) -> bool:
    """Stores a record under a name that is not taken; False where it is."""
    return location.put_new(file, _encode(record))


def _encode(record: Any) -> bytes:
    body = {"format": _FORMAT, **asdict(record)}
    return json.dumps({"sha256": digest(body), "body": body}, indent=1).encode()


def read(location: Location, file: str) -> dict[str, Any]:
    """The fields of a record. Raises FileNotFoundError, DamagedFile, NewerSchema."""
    path = location.at(file)
    try:
        held = json.loads(location.read(file))
        body = held["body"]
        sound = digest_text(canonical_json(body)) == held["sha256"]
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise DamagedFile(
            f"{path}: damaged: not what was written; restore it from a copy, or delete it if what it says is known to be void"
        )
    if body.pop("format") > _FORMAT:
        raise NewerSchema(f"{path}: was written by a later version; update kernel-farm on this machine")
    fields: dict[str, Any] = body
    return fields


def read_all(location: Location, folder: str, kind: type, known: dict[str, Any] | None = None) -> tuple[Any, ...]:
    """Every record of a folder, by name. known: records that were read before, by file; new ones are added."""
    known = {} if known is None else known
    files = sorted(f"{folder}/{e.name}" for e in location.files(folder) if e.name.endswith(".json"))
    for file in files:
        if file not in known:
            known[file] = kind(**read(location, file))
    return tuple(known[file] for file in files)


def commit(location: Location, compaction: Compaction) -> bool:
    """Makes a compaction hold; False when there is one of its number or a later one. Two copies: no part is found without it."""
    file = f"{COMPACTIONS}/{compaction.number:08d}.json"
    if any(number >= compaction.number for number in compaction_numbers(location)):
        return False
    location.replace(file + _COPY, _encode(compaction))
    return write(location, file, compaction) and compaction_numbers(location)[-1] == compaction.number


def latest_compaction(location: Location) -> Compaction:
    """The one that holds; an empty one where nothing was compacted yet."""
    numbers = compaction_numbers(location)
    if not numbers:
        return Compaction()
    file = f"{COMPACTIONS}/{numbers[-1]:08d}.json"
    try:
        fields = read(location, file)
    except DamagedFile:
        fields = read(location, file + _COPY)
    lists = {name: tuple(fields[name]) for name in ("parts", "history", "replaced")}
    return Compaction(**{**fields, **lists})


def compaction_numbers(location: Location) -> list[int]:
    return sorted(int(e.name[:-5]) for e in location.files(COMPACTIONS) if e.name.endswith(".json") and e.name[:-5].isdecimal())


def forget_compactions(location: Location, numbers: Iterable[int]) -> None:
    for number in numbers:
        location.delete(f"{COMPACTIONS}/{number:08d}.json")
        location.delete(f"{COMPACTIONS}/{number:08d}.json{_COPY}")
