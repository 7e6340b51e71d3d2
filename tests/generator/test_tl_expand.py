"""Core code: macros written out, names substituted, constants folded; holes; identity; rank and kind of what is left."""

from pathlib import Path

import numpy as np
import pytest

from generator.tl.diagnostics import TLError
from generator.tl.expand import expand, expand_macros
from generator.tl.expressions import expression
from generator.tl.fill import fill, hole_choices
from generator.tl.fold import substitute, truth
from generator.tl.interpreter import run
from generator.tl.ir import Compute, Constant, For, If, Let, Named, Num, Reshape, Var, walk_statements
from generator.tl.parser import parse_or_raise
from generator.tl.printer import print_expression, print_program, program_hash
from generator.tl.types import Kind, Rank, environment, kind, rank, tiles

VALID = Path(__file__).parents[1] / "programs" / "valid"
MACRO = (VALID / "softmax_macro.tl").read_text()
ATTENTION = (VALID / "attention.tl").read_text()

CODE = """Argument N i32
Constant BM = 64, D = 32
Grid m = 0:ceildiv(N, BM)
Allocate X in global (N, D) f32
Allocate Y in global (N, D) f32
Allocate t in register (BM, D) f32
Allocate r in register (BM) f32
Copy X (BM, D) in coordinate [L = m] from global to shared
{}
Copy t into Y (BM, D) in coordinate [L = m] from register to global
"""


def core_of(lines: str) -> str:
    """The core code of the lines, between the copies."""
    printed = print_program(expand(parse_or_raise(CODE.format(lines))))
    return printed.split("global to shared\n")[1].split("Copy t into")[0].strip()


@pytest.mark.parametrize(
    ("lines", "core"),
    [
        ("Let row = m * BM + rows\nCompute t = X * row", "Compute t = X * (m * 64 + rows)"),
        ("Let a = 2\nLet b = a * BM + 1\nCompute t = X + b", "Compute t = X + 129"),
        ("Compute t = X * (2.0 * 3.0)", "Compute t = X * (2.0 * 3.0)"),
        ("Compute t = X * (BM // 5 % 7 - ceildiv(BM, 3))", "Compute t = X * -17"),
        ("Compute t = where(BM < 65, X, -X)", "Compute t = X"),
        ("Compute t = where(BM > 65 or not D == 32, X, -X)", "Compute t = -X"),
        ("if D == 32 and BM == 64\n  Compute t = X\nelse\n  Compute t = -X\nend", "Compute t = X"),
        ("if D != 32\n  Compute t = X\nelse\n  Compute t = -X\nend", "Compute t = -X"),
        ("if N > D\n  Compute t = X\nelse\n  Compute t = -X\nend", "if N > 32\n  Compute t = X\nelse\n  Compute t = -X\nend"),
        (
            "Compute t = X\nfor j = 0:BM // 32\n  Let k = j + 1\n  Compute t = t + k\nend",
            "Compute t = X\nfor j = 0:2\n  Compute t = t + (j + 1)\nend",
        ),
        (f"Compute t = X + {2**62} * 4", f"Compute t = X + {2**62} * 4"),
    ],
)
def test_core_code(lines, core):
    assert core_of(lines) == core


def test_lets_of_blocks_do_not_leak():
    program = parse_or_raise(
        CODE.format("for j = 0:2\n  Let k = j\n  Compute t = X + k\nend\nfor i = 0:2\n  Let k = 7\n  Compute t = t + k\nend")
    )
    values = [print_expression(s.value) for s in walk_statements(expand(program).body) if isinstance(s, Compute)]
    assert values == ["X + j", "t + 7"]


def test_core_code_has_no_names_left():
    core = expand(parse_or_raise(MACRO))
    assert not any(isinstance(s, Let | Constant | Named) for s in walk_statements(core.body))
    assert expand(core) == core == parse_or_raise(print_program(core))


def test_spans_survive():
    core = expand(parse_or_raise(MACRO))
    line = next(i for i, text in enumerate(MACRO.splitlines(), 1) if "Softmax" in text and "#" not in text)
    written_out = [s for s in walk_statements(core.body) if isinstance(s, Compute) and s.span.line == line]
    assert len(written_out) == 8


def test_operands_in_place_get_a_name_of_their_own():
    core = expand(parse_or_raise(MACRO.replace("and get P bf16", "and get S bf16").replace("GEMM P, V", "GEMM S, V")))
    reshape = next(s for s in walk_statements(core.body) if isinstance(s, Reshape))
    assert (reshape.source, reshape.into) == ("S", "S_operand")
    assert "Compute GEMM S_operand, V and accumulate acc" in print_program(core)
    assert tiles(core)["S_operand"].operand and not tiles(core)["S"].operand


def test_the_macro_computes_softmax():
    """Against NumPy, ragged sizes, scores of both signs."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 2, 70, 64), (1, 2, 50, 64), (1, 2, 50, 128)))
    program = parse_or_raise(MACRO.replace("bf16", "f32"))
    found = run(expand(program), {"Q": q, "K": k, "V": v}, {"scale": 0.5, "SeqQ": 70, "SeqK": 50, "Heads": 2, "Batch": 1})["O"]
    scores = 0.5 * q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    assert np.abs(found - (weights / weights.sum(-1, keepdims=True)) @ v).max() < 1e-5


def test_a_written_out_macro_is_the_same_program_for_who_hashes():
    program = parse_or_raise(MACRO)
    written_out = expand_macros(program)
    assert not any(isinstance(s, Named) for s in walk_statements(written_out.body))
    assert program_hash(program) == program_hash(written_out)
    assert expand(program) == expand(written_out)
    assert expand_macros(written_out) is written_out


def test_macros_with_one_state_share_temporaries_and_avoid_names():
    twice = MACRO.replace("Allocate row_sum", "Allocate row_max_new in register (BM) f32\nAllocate row_sum")
    line = "  Compute Softmax S, scale and get S with row_max, row_sum, acc\n"
    written_out = expand_macros(parse_or_raise(twice.replace(line, line + line)))
    assert [n for n in written_out.allocations if "row_max" in n] == ["row_max", "row_max_new_2", "row_max_base", "row_max_new"]


def test_macros_that_are_none():
    with pytest.raises(TLError, match="Normalize has no stated meaning"):
        expand_macros(parse_or_raise(MACRO.replace("Softmax S, scale", "Normalize S")))
    with pytest.raises(TLError, match="row maximum and row sum"):
        expand_macros(parse_or_raise(MACRO.replace(" with row_max, row_sum, acc", "")))
    sketch = parse_or_raise("Compute Normalize S")
    assert expand_macros(sketch) is sketch
    with pytest.raises(TLError, match="a sketch has no core code"):
        expand(sketch)


def test_holes():
    program = parse_or_raise(ATTENTION.replace("BM = 128, BN = 128", "BM in {64, 128}, BN in {32, 64, 96}"))
    choices = list(hole_choices(program))
    assert choices[:4] == [{"BM": 64, "BN": 32}, {"BM": 64, "BN": 64}, {"BM": 64, "BN": 96}, {"BM": 128, "BN": 32}]
    assert len(choices) == 6 and len({program_hash(fill(program, c)) for c in choices}) == 6
    filled = fill(program, {"BM": 128})
    assert list(filled.holes) == ["BN"] and fill(filled, {"BN": 64, "BM": 128}).holes == {}
    assert list(hole_choices(fill(filled, {"BN": 64}))) == [{}]


@pytest.mark.parametrize(
    ("values", "message"),
    [({"BM": 96}, "BM = 96 is no choice: 128"), ({"BK": 1}, "BK is no constant of this program"), ({"DW": 1}, "did you mean D")],
)
def test_wrong_fillings(values, message):
    with pytest.raises(TLError, match=message):
        fill(parse_or_raise(ATTENTION), values)


def test_the_hash_ignores_what_says_nothing():
    program = parse_or_raise(ATTENTION)
    assert program_hash(parse_or_raise(ATTENTION.replace(" = ", "  =   ") + "# the end\n\n")) == program_hash(program)
    assert program_hash(
        parse_or_raise(ATTENTION.replace("Compute acc = acc * corr", "Compute Multiply acc, corr and get new acc"))
    ) == program_hash(program)
    assert program_hash(parse_or_raise(ATTENTION.replace("corr", "correction"))) != program_hash(program)
    assert program_hash(parse_or_raise(ATTENTION.replace("<= 8", "<= 8.0"))) != program_hash(program)


@pytest.mark.parametrize(
    ("text", "of_rank", "of_kind"),
    [
        ("N + m * 64", Rank.SCALAR, Kind.INT),
        ("scale * N", Rank.SCALAR, Kind.FLOAT),
        ("N / 2", Rank.SCALAR, Kind.FLOAT),
        ("rows + m", Rank.ROW, Kind.INT),
        ("cols", Rank.COL, Kind.INT),
        ("rows < cols", Rank.ELEMENT, Kind.BOOL),
        ("r * 2", Rank.ROW, Kind.FLOAT),
        ("rowmax(t + cols)", Rank.ROW, Kind.FLOAT),
        ("t * r", Rank.ELEMENT, Kind.FLOAT),
        ("X", Rank.ELEMENT, Kind.FLOAT),
        ("X[rows, cols]", Rank.ELEMENT, Kind.FLOAT),
        ("Ends[rows]", Rank.ROW, Kind.INT),
        ("Ends[cols]", Rank.COL, Kind.INT),
        ("Ends[m] + j", Rank.SCALAR, Kind.INT),
        ("where(rows < 3, 1, 2)", Rank.ROW, Kind.INT),
        ("where(N < 3, 1, t)", Rank.ELEMENT, Kind.FLOAT),
        ("where(N < 3, m < 1, m > 1)", Rank.SCALAR, Kind.BOOL),
        ("floor(scale)", Rank.SCALAR, Kind.INT),
        ("not (N < 3)", Rank.SCALAR, Kind.BOOL),
        ("max(N, 3) // 2", Rank.SCALAR, Kind.INT),
        ("max(N, 3.0)", Rank.SCALAR, Kind.FLOAT),
        ("exp2(N)", Rank.SCALAR, Kind.FLOAT),
    ],
)
def test_rank_and_kind(text, of_rank, of_kind):
    lines = "for j = 0:2\n  Compute t = X\nend"
    code = CODE.format(lines).replace("Grid", "Argument scale f32\nAllocate Ends in global (N) i32\nGrid")
    env = environment(expand(parse_or_raise(code)))
    assert (rank(expression(text), env), kind(expression(text), env)) == (of_rank, of_kind)


def test_unknown_names_have_no_type():
    with pytest.raises(KeyError, match="nothing"):
        rank(Var("nothing"), environment(expand(parse_or_raise(ATTENTION))))


def test_truth_of_tests():
    assert truth(expression("1 < 2 and not 3 == 4")) is True
    assert truth(expression("x < 2 and 3 == 4")) is False
    assert truth(expression("x < 2 or 3 == 4")) is None
    assert truth(substitute(expression("x < 2 or 3 == 4"), {"x": Num(1)})) is True


def test_statements_keep_their_blocks():
    core = expand(parse_or_raise(CODE.format("for j = 0:N\n  if j > 3\n    Compute t = X\n  end\nend")))
    (loop,) = [s for s in core.body if isinstance(s, For)]
    assert isinstance(loop.body[0], If) and loop.body[0].otherwise == ()
