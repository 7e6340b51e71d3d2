"""One program for one CUDA target: its analysis, its tiles and the text being written. Decides nothing about instructions."""

from __future__ import annotations

from dataclasses import dataclass, field

from generator.targets import Target
from generator.tl.ir import Allocate, Copy, Expr, Gemm, Program, Stmt, walk_statements
from generator.translate.cuda import names
from generator.translate.cuda.comments import describe
from generator.translate.cuda.element_code import ElementCode
from generator.translate.cuda.refusal import Refused
from generator.translate.cuda.scalars import Scalars
from generator.translate.cuda.writer import Writer
from generator.translate.passes import Analysis, analyze
from generator.translate.passes.scope import flatten


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


@dataclass
class SharedTile:
    """A tile in shared memory. rows, cols: as the program says; stored_rows, stored_cols: padded with zeros for the instructions.

    stages: slots of a ring; offset: bytes from the start of the block's shared memory.
    """

    name: str
    matrix: Allocate
    rows: int
    cols: int
    stored_rows: int
    stored_cols: int
    bytes: int
    stages: int = 1
    offset: int = 0


@dataclass
class Unit:
    """What all emitters of one kernel share."""

    program: Program
    target: Target
    analysis: Analysis
    scalars: Scalars
    code: ElementCode
    w: Writer
    rows: int  # of the block: of every register tile
    tiles: dict[str, SharedTile] = field(default_factory=dict)
    narrow: bool = False  # rows may begin anywhere: see `unaligned`

    @staticmethod
    def of(program: Program, target: Target) -> Unit:
        """Analyses a core program. Raises Refused for what no CUDA target can do."""
        analysis = analyze(program)
        program = analysis.program
        _check_dtypes(program, target)
        scalars = Scalars.of(program, analysis.scope)
        return Unit(program, target, analysis, scalars, ElementCode(scalars), Writer(), _block_rows(program, analysis))

    @property
    def matrices(self) -> list[Allocate]:
        """Global matrices, in textual order: the tensors of the launch."""
        return [a for a in self.program.allocations.values() if a.level == "global"]

    @property
    def loaded(self) -> set[str]:
        """Matrices that are copied by tiles."""
        return {s.source for s in walk_statements(self.program.code) if isinstance(s, Copy) and s.source_level == "global"}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.analysis.scope.tiles[name]

    def dtype(self, name: str) -> str:
        return self.analysis.scope.names.tiles[name].dtype

    def is_shared(self, name: str) -> bool:
        return self.analysis.scope.names.tiles[name].level == "shared"

    def scalar(self, e: Expr) -> str:
        return self.scalars.text(e)

    def gemms(self) -> list[Gemm]:
        return [s for s in flatten(self.program.code) if isinstance(s, Gemm)]

    def register_tiles(self) -> list[str]:
        """Tiles held in registers as numbers, without the operands that a Reshape makes."""
        known = self.analysis.scope.names.tiles
        return [n for n, t in known.items() if t.level == "register" and not t.operand]

    def operands(self) -> list[str]:
        return [n for n, t in self.analysis.scope.names.tiles.items() if t.operand]

    def comment(self, s: Stmt) -> str:
        return f"// {describe(s)}"

    def lead(self, a: Allocate) -> str:
        """Elements from a tensor's base to the matrix that this block sees."""
        parts = [f"(i64)({self.scalar(e)}) * {names.stride(a.name, k)}" for k, e in enumerate(a.offset)]
        return " + ".join(parts) or "0"


def _check_dtypes(program: Program, target: Target) -> None:
    for a in program.allocations.values():
        if a.dtype not in target.dtypes:
            allowed = ", ".join(sorted(target.dtypes))
            raise Refused(
                "unsupported_dtype", f"{a.name}: {a.dtype} has no instructions on {target.isa}; use one of {allowed}", a.span.line
            )
    matrices = {n: a for n, a in program.allocations.items() if a.level == "global"}
    copied = {s.into: s.source for s in walk_statements(program.code) if isinstance(s, Copy) and s.into_level == "shared"}
    for g in flatten(program.code):
        if isinstance(g, Gemm):
            for operand in (g.a, g.b):
                source = matrices.get(copied.get(operand, ""))
                if source is not None and source.dtype not in ("f16", "bf16"):
                    taken = " or ".join(dtype for dtype in ("f16", "bf16") if dtype in target.dtypes)
                    message = f"{source.name}: products on {target.isa} take {taken}, found {source.dtype}; use target cpu"
                    raise Refused("unsupported_dtype", message, source.span.line)


def _block_rows(program: Program, analysis: Analysis) -> int:
    """Rows of the block: all register tiles have them."""
    known = analysis.scope.names.tiles
    rows = {t.extents[0] for t in known.values() if t.level == "register" and t.extents}
    if len(rows) > 1:
        raise Refused(
            "translate_failed", f"register tiles have {', '.join(map(str, sorted(rows)))} rows; give all of them the same number"
        )
    if not rows:
        raise Refused("translate_failed", "no tile in registers; compute something before it is written")
    return rows.pop()
