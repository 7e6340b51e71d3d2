"""What makes a folder a catalog: its marker, and folders of known names. Reads no row.

A marker is written once and never changes, so that whoever finds one may go by it.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from catalog import artifacts, marks, starts
from catalog.errors import LocationError, NewerSchema, StorageError
from catalog.locations import TEMPORARY, Location
from catalog.snapshot import JOURNALS, MARKER, ROWS, TRANSCRIPTS
from generator.canonical import canonical_json

_VERSION = 1
_FORMAT = {"format": "kernel-farm catalog", "version": _VERSION}
_RECORDS = (marks.COMPACTIONS, marks.FENCES, marks.REVOCATIONS, marks.RUNS, starts.STARTS)
_FOLDERS = (artifacts.FOLDER, JOURNALS, ROWS, TRANSCRIPTS, *_RECORDS)


def is_catalog(location: Location) -> bool:
    """Whether a catalog lies there. Raises LocationError for the marker of something else, and NewerSchema."""
    if location.local is not None:
        _check_kinds(location.local)
    try:
        marker = location.read(MARKER)
    except FileNotFoundError:
        return False
    try:
        found = json.loads(marker[:1000])
        kind, version = found["format"], int(found["version"])
    except (ValueError, TypeError, KeyError, RecursionError):
        kind, version = None, 0
    if kind != _FORMAT["format"]:
        cure = f"expected {canonical_json(_FORMAT)} in it: restore it from a copy, or write that"
        raise LocationError(f"catalog: {location.at(MARKER)} is not the marker of a catalog; {cure}")
    if version > _VERSION:
        raise NewerSchema(
            f"catalog: {location.uri} was made by a later version of this program (format {version}, here {_VERSION}); update it"
        )
    return True


def _check_kinds(folder: Path) -> None:
    """Raises LocationError where something else has the name of the folder, of a folder in it, or of the marker."""
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        where = "is" if folder.exists() else "lies below"
        raise LocationError(f"catalog: {folder} {where} a file; expected a folder") from None
    for entry in found:
        if entry.name in _FOLDERS and not entry.is_dir():
            raise LocationError(f"catalog: {entry.path}: expected a folder; this is no catalog, or a damaged one")
        if entry.name == MARKER and not entry.is_file():
            raise LocationError(f"catalog: {entry.path}: expected a file; this is no catalog, or a damaged one")


def make_catalog(location: Location, create: bool) -> None:
    """Makes an empty catalog, or says why not. Raises LocationError."""
    if not create:
        raise LocationError(f"catalog: there is no catalog at {location.uri}; `farm sweep --catalog {location.uri}` makes one")
    used = location.local is not None and location.local.is_dir() and any(map(_is_foreign, location.local.iterdir()))
    if used and not location.exists(MARKER):  # which another process may have made a moment ago
        raise LocationError(f"catalog: {location.uri} has other files in it; expected an empty or new folder")
    fresh = location.local if location.local is not None and not location.local.exists() else None
    try:
        location.put_new(MARKER, canonical_json(_FORMAT).encode())
    except StorageError:
        if fresh is not None:
            with contextlib.suppress(OSError):
                fresh.rmdir()  # an empty folder of a catalog that could not be made
        raise


def _is_foreign(path: Path) -> bool:
    """Whether a file speaks against making a catalog in its folder."""
    return path.name != TRANSCRIPTS and not path.name.startswith(TEMPORARY)
