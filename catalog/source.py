"""Where kernels come from: a catalog's rows, its binaries, and whether they may be loaded. Chooses and loads none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from catalog.kernels import COLUMNS, Group, KernelIndex
from catalog.reasons import Reason, reason
from catalog.settings import default_location
from catalog.trust import host_code_problem

if TYPE_CHECKING:
    from catalog.store import Catalog

log = logging.getLogger("catalog")


@dataclass(frozen=True, slots=True)
class Source:
    """One catalog, for serving. read: the bytes of an artifact by its hash. location_problem: "" when binaries may be loaded."""

    uri: str
    index: KernelIndex
    read: Callable[[str], bytes]
    location_problem: str


def open_source(catalog: Any, signers: tuple[str, ...] = ()) -> Source | Reason:
    """The source of an open catalog, a location, or (None) the default folder; a Source is itself. A reason where there is none.

    signers: where there are any, kernels come from the manifests that they signed, and from nothing else.
    A location that was named and holds no catalog raises the store's LocationError: only the default folder may be missing.
    """
    if isinstance(catalog, Source):
        return catalog
    from catalog.errors import StorageError
    from catalog.snapshot import MARKER
    from catalog.store import Catalog as OpenCatalog
    from catalog.store import open as open_catalog

    if catalog is None:
        folder = default_location()
        if not (folder / MARKER).exists():
            return reason(
                "no_catalog", f"none is configured and there is none at {folder}; use configure(catalog=...) or FARM_CATALOG"
            )
        catalog = folder
    if not isinstance(catalog, OpenCatalog):
        try:
            catalog = open_catalog(catalog, damaged="skip", recover=False)
        except StorageError as error:
            return reason("no_catalog", str(error))

    if signers:
        return _signed(catalog, signers)

    told: set[str] = set()

    def fetch(group: Group | None) -> list[dict[str, Any]]:
        keep: dict[str, Any] = {"status": ["ok", "unverified"]}
        if group is not None:
            keep |= dict(zip(("dtype", "head_dim", "head_dim_v"), group, strict=True))
        rows: list[dict[str, Any]] = catalog.rows(COLUMNS, keep).to_pylist()
        for problem in catalog.problems:
            if problem not in told:  # kernels may be missing for it, and no reason of a call would say so
                told.add(problem)
                log.warning("left out: %s; `farm catalog verify` names all that is damaged", problem)
        return [row for row in rows if row["binary_hash"] is not None]

    return Source(catalog.uri, KernelIndex(fetch), catalog.artifacts.get, host_code_problem(catalog.location.local, catalog.uri))


def _signed(catalog: Catalog, signers: tuple[str, ...]) -> Source | Reason:
    """The source of what trusted people vouch for: no row of the catalog itself is read."""
    from catalog import signing

    signing.needs_cryptography()
    said: list[str] = []
    trusted = signing.trusted_signers(signers)
    rows = signing.vouched_rows(catalog.location, trusted, said.append)
    if not rows:
        names = ", ".join(map(str, trusted)) or "nobody"
        more = f" ({'; '.join(said)})" if said else ""
        return reason("signature", f"nothing in {catalog.uri} is signed by {names}; `farm catalog sign` signs{more}")

    def fetch(group: Group | None) -> list[dict[str, Any]]:
        return [row for row in rows if group is None or (row["dtype"], row["head_dim"], row["head_dim_v"]) == group]

    return Source(catalog.uri, KernelIndex(fetch), catalog.artifacts.get, host_code_problem(catalog.location.local, catalog.uri))
