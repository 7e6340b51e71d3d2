"""`farm.lock`: the rows that production loads, pinned, so that a catalog that grows changes no choice silently. Loads no kernel.

A lock is JSON: the catalog's digest, and for every device and problem the chosen row and its binary. A choice in a previous lock
wins ties when the next one is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog.choice import COLUMNS, choose_each
from catalog.errors import CatalogError
from catalog.keys import ShapeBucket
from catalog.locations import Location, read_small
from generator.canonical import digest

if TYPE_CHECKING:
    from catalog.store import Catalog

FILE = "farm.lock"
_VERSION = 1
_EXTRA = ("device_name", "spec_name", "target", "num_heads", "num_kv_heads", "batch", "seqlen_q", "seqlen_k")


@dataclass(frozen=True, slots=True)
class Pinned:
    """One choice. p50_s is what was measured then, in seconds."""

    device_key: str
    device_name: str
    family_hash: str
    shape_bucket: str
    spec_hash: str
    spec_name: str
    num_heads: int
    num_kv_heads: int
    work: int  # batch * num_heads * seqlen_q * seqlen_k
    row_id: str
    binary_hash: str
    p50_s: float


@dataclass(frozen=True, slots=True)
class Lock:
    """catalog_digest: of the verified rows that the catalog had, whatever files they lie in."""

    catalog: str
    catalog_digest: str
    pinned: tuple[Pinned, ...]

    def find(self, device_key: str, family_hash: str, bucket: ShapeBucket, num_heads: int | None = None) -> Pinned | None:
        """The pinned choice for a shape bucket: of the same head count where there is one, else of the largest problem in it."""
        inside = [
            p for p in self.pinned if (p.device_key, p.family_hash, p.shape_bucket) == (device_key, family_hash, str(bucket))
        ]
        return max(inside, key=lambda p: (p.num_heads == num_heads, p.work, p.spec_hash), default=None)

    def incumbents(self) -> dict[tuple[str, str], str]:
        """(device key, spec hash) -> row id."""
        return {(p.device_key, p.spec_hash): p.row_id for p in self.pinned}


def catalog_digest(catalog: Catalog) -> str:
    """SHA-256 over the ids of all verified, unrevoked rows: the same after compaction, another after any row that could serve."""
    return digest(sorted(catalog.rows(["row_id"], "status = 'ok' and revoked_at is null")["row_id"].to_pylist()))


def make(catalog: Catalog, previous: Lock | None = None, filters: Any = None) -> Lock:
    """A lock of the best row of each device and problem; `previous` choices stay where they tie."""
    needed = list(dict.fromkeys([*COLUMNS, *_EXTRA]))
    choices = choose_each(catalog.rows(needed, filters), previous.incumbents() if previous else None)
    return Lock(catalog.uri, catalog_digest(catalog), tuple(_pin(choice.row) for choice in choices.values()))


def _pin(row: Mapping[str, Any]) -> Pinned:
    work = row["batch"] * row["num_heads"] * row["seqlen_q"] * row["seqlen_k"]
    plain = {name: row[name] for name in Pinned.__dataclass_fields__ if name != "work"}
    plain |= {name: row[name] or "" for name in ("device_name", "spec_name")}
    return Pinned(**plain, work=work)


def write(lock: Lock, path: Path) -> None:
    """Replaces the file whole. Raises StorageError."""
    body = {"farm_lock": _VERSION, **asdict(lock)}
    folder = Location.of(path.absolute().parent)
    folder.replace(path.name, (json.dumps(body, indent=1, sort_keys=True) + "\n").encode())


def read(path: Path) -> Lock:
    """Raises CatalogError that names the file and what is wrong with it."""
    try:
        body = json.loads(read_small(path))
        if int(body.pop("farm_lock")) > _VERSION:  # before its fields, some of which are new
            raise CatalogError(f"{path}: was written by a later version; update kernel-farm here")
        pinned = tuple(Pinned(**p) for p in body.pop("pinned"))
        for pin in pinned:
            ShapeBucket.parse(pin.shape_bucket)
        return Lock(**body, pinned=pinned)
    except CatalogError:
        raise
    except OSError as error:
        raise CatalogError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CatalogError(f"{path}: is no lock file; `farm catalog lock` writes one") from None


@dataclass(frozen=True, slots=True)
class Repinned:
    """A choice that a new lock makes otherwise. before, after: None where there is none."""

    before: Pinned | None
    after: Pinned | None


def changes(before: Lock, after: Lock) -> list[Repinned]:
    """Where two locks differ in the row that they pin."""
    a, b = ({(p.device_key, p.spec_hash): p for p in lock.pinned} for lock in (before, after))
    pairs = [(a.get(pair), b.get(pair)) for pair in sorted(a.keys() | b.keys())]
    return [Repinned(x, y) for x, y in pairs if (x and x.row_id) != (y and y.row_id)]


def problems(lock: Lock, catalog: Catalog) -> list[str]:
    """Pinned rows that the catalog can no longer serve: gone, revoked or superseded."""
    held = _verified_rows(catalog)
    said = []
    for pin in lock.pinned:
        row = held.get(pin.row_id)
        if row is None:
            said.append(f"{pin.row_id[:12]} ({pin.spec_name or pin.spec_hash[:12]}): no verified row of the catalog any more")
        elif row["revoked_at"] is not None:
            said.append(f"{pin.row_id[:12]} ({pin.spec_name or pin.spec_hash[:12]}): revoked: {row['revoked_reason']}")
    return said


def _verified_rows(catalog: Catalog) -> dict[str, dict[str, Any]]:
    rows = catalog.rows(["row_id", "revoked_at", "revoked_reason"], {"status": "ok"}).to_pylist()
    return {row["row_id"]: row for row in rows}
