"""Target-free passes of the translators: what a core program means for tiles, state and order. Emits no code.

`analyze(program)` takes a core program (`generator.tl.expand`) and gives one frozen, printable
record that every translator reads.
"""

from __future__ import annotations

from generator.translate.passes.analysis import Analysis, LoopPlan, Mask, TileRange, analyze

__all__ = ["Analysis", "LoopPlan", "Mask", "TileRange", "analyze"]
