"""The second entry point of a kernel, NAME__unaligned: for calls with rows that do not begin at multiples of 16 bytes.

The same program, tiles and instructions; what moves rows between memory and tiles does it in pieces as wide as each matrix's own
address and pitch allow (`runtime/narrow*.cuh`). Kept small, since few calls need it: loops are not split into edges and middle.
The kernel itself knows nothing of it, so neither its registers nor its results change. Emits nothing.
"""

from __future__ import annotations

import dataclasses

from generator.targets import Target
from generator.tl.ir import Hint, Program
from generator.translate.cuda.parameters import Parameters
from generator.translate.cuda.unit import Unit
from generator.translate.cuda.writer import Writer
from generator.translate.facts import SecondEntry

#: Speed given up for size. `order`: blocks take tiles by number, so that all warps of a wgmma kernel's producer know the next.
HINTS = {"split": "off", "ahead": "off", "order": "static", "announce": "off"}
#: Operands are copied first where that is faster (docs/cuda_translator.md): rows that only narrower pieces than this fit, and
#: matrices that all have more rows than the copies of their family can keep up with.
LEAST_BYTES = 4
MOST_ROWS = {"wgmma": 512, "cp.async": 640, "registers": 1280}


def entry_of(entry: str) -> str:
    return f"{entry}__unaligned"


def unaligned_unit(core: Program, target: Target, w: Writer) -> Unit:
    """The unit of a program's second entry point, written behind the first."""
    kept = tuple(s for s in core.body if not (isinstance(s, Hint) and s.name in HINTS))
    hinted = (*(Hint(name, value) for name, value in HINTS.items()), *kept)
    unit = Unit.of(dataclasses.replace(core, body=hinted), target)
    unit.w, unit.narrow = w, True
    return unit


def unaligned_facts(entry: str, shared_bytes: int, copies: str, parameters: Parameters | None = None) -> SecondEntry:
    """What of a launch description is another for the second entry point.

    copies: the family that moves tiles, of MOST_ROWS. parameters: where it has its own block.
    """
    out: SecondEntry = {
        "entry": entry_of(entry),
        "shared_bytes": shared_bytes,
        "aligned_16": [],
        "least_bytes": LEAST_BYTES,
        "most_rows": MOST_ROWS[copies],
    }
    if parameters is not None:
        out["parameters"], out["tensor_maps"], out["workspace"] = parameters.facts(), [], None
    return out
