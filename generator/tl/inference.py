"""What code may leave unsaid and its declarations decide: a transposed operand, a Reshape's dtype. Rejecting is the checker's.

A GEMM without any ^T is read as the one product whose axes agree *by name*: `Compute GEMM Q, K and get S` with Q (BM, D),
K (BN, D) and S (BM, BN) is Q K^T. Where names leave more than one reading, the text is taken as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from generator.tl.diagnostics import Diagnostic
from generator.tl.grammar import UNSTATED
from generator.tl.ir import Allocate, Copy, DType, Expr, Gemm, Reshape, Stmt, walk_statements
from generator.tl.rewrite import map_statements

Shape = tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class TileShape:
    """Shape and dtype of a tile, as far as the text states them."""

    shape: Shape
    dtype: DType


def tile_shapes(body: tuple[Stmt, ...]) -> dict[str, TileShape]:
    """Every tile that is allocated, copied or reshaped into being; the first statement that makes it decides."""
    matrices = {s.name: s for s in walk_statements(body) if isinstance(s, Allocate) and s.level == "global"}
    tiles = {
        s.name: TileShape(s.shape, s.dtype) for s in walk_statements(body) if isinstance(s, Allocate) and s.level != "global"
    }
    for s in walk_statements(body):
        if isinstance(s, Copy) and s.into_level != "global" and s.into not in tiles:
            source = matrices.get(s.source) if s.source_level == "global" else tiles.get(s.source)
            if source is not None:
                tiles[s.into] = TileShape(s.shape, source.dtype)
        elif isinstance(s, Reshape) and s.into not in tiles and s.source in tiles:
            tiles[s.into] = TileShape(tiles[s.source].shape, s.dtype)
    return tiles


def infer(body: tuple[Stmt, ...]) -> tuple[tuple[Stmt, ...], list[Diagnostic]]:
    """The same statements with every inferable thing stated, and what has to be said about it."""
    tiles = tile_shapes(body)
    notes: list[Diagnostic] = []
    gemms = [s for s in walk_statements(body) if isinstance(s, Gemm)]

    def stated(s: Stmt) -> Iterator[Stmt]:
        match s:
            case Gemm():
                yield _transposed(s, tiles, notes)
            case Reshape(dtype=dtype) if dtype == UNSTATED:
                yield _with_dtype(s, gemms, tiles, notes)
            case _:
                yield s

    return map_statements(body, stated), notes


def transpositions(s: Gemm, tiles: Mapping[str, TileShape]) -> list[tuple[bool, bool]]:
    """Every (a_transposed, b_transposed) under which the axes agree by name; empty where a shape is unknown or has one axis."""
    known = [tiles.get(name) for name in (s.a, s.b)]
    shapes = [t.shape for t in known if t is not None]
    if len(shapes) != 2 or any(len(shape) != 2 for shape in shapes):
        return []
    result = tiles[s.into].shape if s.into in tiles else None
    fitting = []
    for a_transposed in (False, True):
        for b_transposed in (False, True):
            m, k = shapes[0][::-1] if a_transposed else shapes[0]
            k_of_b, n = shapes[1][::-1] if b_transposed else shapes[1]
            if k == k_of_b and (result is None or result == (m, n)):
                fitting.append((a_transposed, b_transposed))
    return fitting


def _transposed(s: Gemm, tiles: Mapping[str, TileShape], notes: list[Diagnostic]) -> Gemm:
    if s.a_transposed or s.b_transposed:
        return s
    fitting = transpositions(s, tiles)
    if len(fitting) != 1 or fitting[0] == (False, False):
        return s
    read = replace(s, a_transposed=fitting[0][0], b_transposed=fitting[0][1])
    product = f"{s.a}{'^T' * read.a_transposed}, {s.b}{'^T' * read.b_transposed}"
    notes.append(
        Diagnostic(
            "inferred", "warning", f"read as GEMM {product}: no other product has axes that agree", s.span, f"write {product}"
        )
    )
    return read


def _with_dtype(s: Reshape, gemms: list[Gemm], tiles: Mapping[str, TileShape], notes: list[Diagnostic]) -> Reshape:
    """The dtype of the operand that it meets in the next GEMM."""
    for gemm in gemms:
        if gemm.span.line < s.span.line or s.into not in (gemm.a, gemm.b):
            continue
        other = tiles.get(gemm.b if gemm.a == s.into else gemm.a)
        if other is not None and other.dtype != UNSTATED:
            return replace(s, dtype=other.dtype)
    hint = f"write ... and get {s.into} bf16"
    notes.append(
        Diagnostic("missing-dtype", "error", f"the dtype of {s.into} is not stated and no GEMM decides it", s.span, hint)
    )
    return replace(s, dtype="f32")
