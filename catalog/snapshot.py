"""What a catalog consists of at one moment: names of parts and journals, compaction, fences, revocations. Reads no row."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog import journal, marks
from catalog.errors import DamagedFile
from catalog.locations import Location
from catalog.parts import PartName

#: Marks a folder as a catalog.
MARKER = "catalog.json"
ROWS = "rows"
JOURNALS = "journal"
#: What was said to language models and answered; may lie in a folder before there is a catalog in it, to be replayed.
TRANSCRIPTS = "transcripts"
#: The run id in the names of compacted parts: those that no compaction record lists are left over from a killed one.
COMPACTED = "compacted"
_CURE = "restore from a copy, or `farm catalog verify --drop-damaged` goes on without their rows"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """loose, compacted, history: part and its size in bytes. journals: path and size, those that no part was made of yet.

    missing: compacted parts that are listed and not there.
    """

    loose: tuple[tuple[PartName, int], ...]
    compacted: tuple[tuple[PartName, int], ...]
    history: tuple[tuple[PartName, int], ...]
    journals: tuple[tuple[Path, int], ...]
    compaction: marks.Compaction
    fences: tuple[marks.Fence, ...]
    revocations: tuple[marks.Revocation, ...]
    missing: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for snapshots in which every query gives the same answer."""
        marked = (self.compaction.number, tuple(f.run_id for f in self.fences), self.revocations)
        return (self.loose, self.journals, *marked)


def take(location: Location, journals: Path, *, allow_missing: bool = False, known: dict[str, Any] | None = None) -> Snapshot:
    """A consistent look at a catalog that others write to. Raises DamagedFile, NewerSchema, StorageError.

    known: records of earlier looks, which are not read again.

    The order decides: a row moves from journal to part to compacted part, and here each kind is listed before the one that its
    rows move to, so that a row on its way is seen twice (and then counted once) rather than not at all.
    """
    for attempt in range(5):
        open_journals = _journals(journals)
        sizes = {entry.name: entry.size for entry in location.files(ROWS)}
        parts = {text: name for text in sizes if (name := PartName.parse(text)) is not None}
        compaction = marks.latest_compaction(location)
        fences = marks.read_all(location, marks.FENCES, marks.Fence, known)
        revocations = marks.read_all(location, marks.REVOCATIONS, marks.Revocation, known)
        missing = tuple(sorted({*compaction.parts, *compaction.history} - parts.keys()))
        if not missing:
            break
        if attempt:
            time.sleep(0.05)  # a compaction may have gone by between our two looks
    if missing and not allow_missing:
        number = compaction.number
        raise DamagedFile(
            f"{location.at(ROWS)}/{missing[0]}: missing, and {len(missing) - 1} more of compaction {number}; {_CURE}"
        )
    hidden = set(compaction.replaced) | set(compaction.parts) | set(compaction.history)
    loose = [(name, sizes[text]) for text, name in parts.items() if text not in hidden and name.run_id != COMPACTED]
    sealed = {name.stem for name, _ in loose}
    return Snapshot(
        loose=tuple(sorted(loose, key=lambda entry: entry[0].stem)),
        compacted=tuple((parts[text], sizes[text]) for text in compaction.parts if text in parts),
        history=tuple((parts[text], sizes[text]) for text in compaction.history if text in parts),
        journals=tuple((path, size) for path, size in open_journals if path.name.removesuffix(journal.SUFFIX) not in sealed),
        compaction=compaction,
        fences=fences,
        revocations=revocations,
        missing=missing,
    )


def _journals(folder: Path) -> list[tuple[Path, int]]:
    local = Location.of(folder)
    return sorted((folder / e.name, e.size) for e in local.files("") if e.name.endswith(journal.SUFFIX))
