"""Which versions of CUDA go together: what a release's PTX is called, and which binaries a driver takes. Asks no driver."""

from __future__ import annotations

import re

#: CUDA release -> the PTX ISA that it writes and that its driver compiles.
PTX_ISA = {
    (11, 8): (7, 8), (12, 0): (8, 0), (12, 1): (8, 1), (12, 2): (8, 2), (12, 3): (8, 3), (12, 4): (8, 4), (12, 5): (8, 5),
    (12, 6): (8, 5), (12, 7): (8, 6), (12, 8): (8, 7), (12, 9): (8, 8), (13, 0): (9, 0),
}  # fmt: skip

Version = tuple[int, int]


def version_of(text: str | None) -> Version | None:
    """The first `major.minor` in a text: "NVRTC 13.0" is (13, 0)."""
    found = re.search(r"(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None


def ptx_isa_of(toolkit: str | None) -> str | None:
    """The PTX ISA of a CUDA release, as a row keeps it; None where the release is not known here."""
    isa = PTX_ISA.get(version_of(toolkit) or (0, 0))
    return None if isa is None else _text(isa)


def driver_problem(toolkit: str | None, ptx_isa: str | None, is_ptx: bool, driver: Version | None) -> str:
    """Why a driver cannot take a binary; "" when it can, or where one of the two does not say.

    A cubin runs on every driver of its toolkit's major version, PTX only where the driver's compiler knows its ISA. driver: the
    CUDA release that it supports.
    """
    built, isa = version_of(toolkit), version_of(ptx_isa)
    if driver is None or built is None:
        return ""
    takes = PTX_ISA.get(driver)
    fits = isa is None or takes is None or isa <= takes if is_ptx else built[0] <= driver[0]
    if fits:
        return ""
    made = f"CUDA {_text(built)}" + (f" (PTX ISA {_text(isa)})" if isa else "")
    most = f"CUDA {_text(driver)}" + (f" (PTX ISA {_text(takes)})" if takes else "")
    return f"made by {made}; this driver takes up to {most}: update the driver, or sweep again with an older toolkit"


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
