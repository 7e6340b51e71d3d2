"""How a CUDA kernel is launched: the record put together from its parts. What the facts mean is told in `translate.facts`."""

from __future__ import annotations

from generator.translate.cuda.scalars import plain
from generator.translate.cuda.unit import Unit
from generator.translate.facts import CudaFacts, Formula
from generator.translate.records import Launch, ScalarParameter, TensorParameter


def blocks(u: Unit) -> Formula:
    """The number of blocks of the whole grid, as an expression of scalars."""
    out: Formula = plain(u.program.axes[0].extent)
    for axis in u.program.axes[1:]:
        out = ["*", out, plain(axis.extent)]
    return out


def make_launch(u: Unit, entry: str, facts: CudaFacts) -> Launch:
    tensors = tuple(
        TensorParameter(a.name, a.dtype, len(a.offset), len(a.shape), a.name in u.program.outputs) for a in u.matrices
    )
    scalars = tuple(ScalarParameter(n, a.dtype, a.positive) for n, a in u.program.arguments.items())
    return Launch(entry, tensors, scalars, facts)


def vector_loads(u: Unit) -> list[str]:
    """Tensors whose address and strides have to be multiples of 16 bytes."""
    return [a.name for a in u.matrices if a.name in u.loaded and any(t.matrix.name == a.name for t in u.tiles.values())]
