"""The CPU translator: core TL to one self-contained C++17 source with vector code.

`kernel.py` puts it together. What is decided, in order:

    ops       statements as loads, stores, products and single assignments, with what is live after each
    folding   scalings that products and stores do on the way, zeros that are never written
    layouts   for each tile, rows in vector lanes or row by row; which forms a loaded tile needs; which tiles share memory
    limits    masks of a loop as the columns that each row may see
    sharing   packed copies that the blocks of a head share

A decided program is a `Unit`. What is written from it: `loops` (control flow), `copies`, `gemm` (products), and element-wise
statements, which `nests` fuses into passes and `lanes` and `rows` write with the expressions of `vectors`; `frame` puts the
arguments, the block and the entry point around them. `runtime/` holds the C++ headers that the text calls.
"""

from generator.translate.cpu.kernel import translate_cpu

__all__ = ["translate_cpu"]
