"""The widths that generated code counts in, and lengths rounded up to them. Chooses no tile size."""

from __future__ import annotations

#: Floats of the widest vector (AVX-512). What is a multiple of it fills whole vectors with every instruction set.
VECTOR = 16
#: Rows that the widest block of lanes holds: `LANES` of runtime/simd.h with AVX-512. AVX2's divides it.
BLOCK = 64
#: 16-bit values that one step of a bf16 product takes: two AVX-512 vectors of pairs, or a row of an AMX tile.
CHUNK = 32
#: Shared packs start at whole cache lines.
CACHE_LINE_BYTES = 64


def chunks(n: int) -> int:
    """n rounded up to whole chunks."""
    return -(-n // CHUNK) * CHUNK


def padded(n: int) -> str:
    """n rounded up to whole vectors, as C++ text: by the compiler where the instruction set decides."""
    return str(n) if n % VECTOR == 0 else f"up({n})"


def cache_lines(size: str) -> str:
    """A size in bytes, as C++ text, rounded up to whole cache lines."""
    return f"({size} + {CACHE_LINE_BYTES - 1}) / {CACHE_LINE_BYTES} * {CACHE_LINE_BYTES}"
