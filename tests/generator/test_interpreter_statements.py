"""Statement by statement: branches, bounds, captured tensors, coordinates that are data, rounding, and the errors of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from generator.tl.diagnostics import TLError
from generator.tl.evaluate import ProgramError
from generator.tl.fill import fill
from generator.tl.interpreter import CallError, Step, run
from generator.tl.ir import Program
from generator.tl.parser import parse_or_raise
from generator.tl.printer import print_program

EXAMPLES = Path(__file__).parents[2] / "examples" / "tl"


def program(*lines: str) -> Program:
    return parse_or_raise("\n".join(("Kernel k", *lines)))


def copy_rows(*middle: str, dtype: str = "f32") -> Program:
    """y = f(x) for a tile of 4 rows and 3 columns at a time."""
    return program(
        "Argument N i32",
        "Grid m = 0:ceildiv(N, 4)",
        f"Allocate X in global (N, 3) {dtype}",
        "Allocate Y in global (N, 3) f32",
        "Allocate t in register (4, 3) f32",
        "Allocate r in register (4) f32",
        "Copy X (4, 3) in coordinate [L = m] from global to shared",
        *middle,
        "Copy t into Y (4, 3) in coordinate [L = m] from register to global",
    )


X = np.arange(18, dtype=float).reshape(6, 3)


def result(p: Program, x: np.ndarray = X, **scalars: int | float) -> np.ndarray:
    return run(p, {"X": x}, {"N": len(x)} | scalars)["Y"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("X", X),
        ("rows + cols", np.array([0, 1, 2, 3, 0, 1])[:, None] + np.arange(3)),
        ("m", np.array([0, 0, 0, 0, 1, 1])[:, None] + np.zeros(3)),
        ("where(X > 4 and not (X >= 9), 1.0, -inf)", np.where((X > 4) & ~(X >= 9), 1.0, -np.inf)),
        ("where(X < 2 or cols == 1, 1, 0)", np.where((X < 2) | (np.arange(3) == 1), 1.0, 0)),
        ("X - rowmax(X)", X - X.max(1, keepdims=True)),
        ("rowsum(X) * cols", X.sum(1, keepdims=True) * np.arange(3)),
        ("rowsum(where(cols < 2, X, 0.0))", X[:, :2].sum(1, keepdims=True) + np.zeros(3)),
        ("rows // 2 * 10 + cols % 2", np.array([0, 0, 10, 10, 0, 0])[:, None] + np.array([0, 1, 0])),
        ("(rows - 3) // 2", np.array([-2, -1, -1, 0, -2, -1])[:, None] + np.zeros(3)),
        ("floor(X / 4)", np.floor(X / 4)),
        ("max(min(X, 7), 3)", np.clip(X, 3, 7)),
        ("exp2(log2(X + 1)) + exp(0.0) + sqrt(4.0) - tanh(0.0) + log(1.0) - abs(-3)", X + 1),
        ("1 / X", np.divide(1, X, out=np.full_like(X, np.inf), where=X > 0)),
        ("X[m * 4 + 1, cols]", X[[1, 1, 1, 1, 5, 5]]),
        ("X[rows - 1, 2 - cols]", np.array([[0, 0, 0], *X[:3, ::-1], [0, 0, 0], X[0, ::-1]])),
    ],
)
def test_expressions(expression: str, value: np.ndarray) -> None:
    np.testing.assert_allclose(result(copy_rows(f"Compute t = {expression}")), value, rtol=1e-6)


def test_a_row_value_is_broadcast_over_columns() -> None:
    np.testing.assert_array_equal(result(copy_rows("Compute r = rows * 2", "Compute t = r + cols"))[:2], [[0, 1, 2], [2, 3, 4]])


def test_if_takes_one_branch_for_a_whole_block() -> None:
    p = copy_rows("Compute t = X", "if m == 0", "Compute t = X + 1", "else", "if N > 100", "Compute t = 0", "end", "end")
    np.testing.assert_array_equal(result(p), X + np.array([1, 1, 1, 1, 0, 0])[:, None])


@pytest.mark.parametrize(
    ("bounds", "expected"), [("0:3", 12), ("0:3 reversed", 210), ("2:2", 0), ("3:1 reversed", 0), ("-1:1", -10), ("m:m + 2", 1)]
)
def test_loops_run_in_the_order_they_say(bounds: str, expected: int) -> None:
    p = copy_rows("Compute t = 0", f"for j = {bounds}", "Compute t = t * 10 + j", "end")
    assert result(p)[0, 0] == expected


def test_loops_nest_and_see_each_other() -> None:
    p = copy_rows("Compute t = 0", "for i = 0:3", "for j = i:3 reversed", "Compute t = t * 10 + i * 3 + j", "end", "end")
    assert result(p)[0, 0] == 210548


def test_what_lies_outside_reads_zero_and_is_not_written() -> None:
    """The second block covers rows 4 to 7; memory holds 5 rows and the program is told so, or that only 3 of them count."""
    p = program(
        "Argument N i32", "Allocate Len in global (1) i32", "Grid m = 0:2",
        "Allocate X in global (Len[0], 3) f32", "Allocate Y in global (N, 3) f32", "Allocate t in register (4, 3) f32",
        "Copy X (4, 3) in coordinate [L = m] from global to shared", "Compute t = X + 1",
        "Copy t into Y (4, 3) in coordinate [L = m] from register to global",
    )  # fmt: skip
    x = np.array(X[:5])
    x[3:] = np.nan
    y = run(p, {"X": x, "Len": [3]}, {"N": 5})["Y"]
    np.testing.assert_array_equal(y, np.array([*(X[:3] + 1), [1, 1, 1], [1, 1, 1]]))


def test_memory_that_nobody_writes_shows() -> None:
    p = copy_rows("Compute t = X")
    only_first = parse_or_raise(print_program(p).replace("ceildiv(N, 4)", "1"))
    y = run(only_first, {"X": X}, {"N": 6})["Y"]
    assert np.isfinite(y[:4]).all() and np.isnan(y[4:]).all()
    kept = run(only_first, {"X": X, "Y": np.full((6, 3), 7.0)}, {"N": 6})["Y"]
    assert (kept[4:] == 7).all() and np.isfinite(kept[:4]).all()


def test_coordinates_may_be_data() -> None:
    """A page table: the tile of keys that an iteration reads is looked up."""
    p = program(
        "Argument Pages, Batch i32", "Grid b = 0:Batch",
        "Allocate Table in global (Pages) i32 with offset [b]", "Allocate Pool in global (8, 2) f32",
        "Allocate Y in global (2, 2) f32 with offset [b]", "Allocate t in register (2, 2) f32 = 0",
        "for j = 0:Pages", "Copy Pool (2, 2) in coordinate [L = Table[j]] from global to shared",
        "Compute t = t * 10 + Pool", "end", "Copy t into Y (2, 2) from register to global",
    )  # fmt: skip
    pool = np.repeat(np.arange(4), 2)[:, None] * np.ones(2)
    out = run(p, {"Table": [[3, 1], [0, 2]], "Pool": pool}, {"Pages": 2, "Batch": 2})["Y"]
    np.testing.assert_array_equal(out[:, 0, 0], [31, 2])


def test_i32_tiles_and_outputs_are_exact() -> None:
    p = program(
        "Argument N i32", "Grid m = 0:1", "Allocate X in global (N) i32", "Allocate Y in global (N) i32",
        "Allocate t in register (4) i32", "Compute t = X[rows] * 2 + 1", "Copy t into Y (4) from register to global",
    )  # fmt: skip
    y = run(p, {"X": [2**24 + 1, 5]}, {"N": 2})["Y"]
    assert y.dtype == np.int32 and y.tolist() == [2**25 + 3, 11]


def test_several_outputs_and_no_offset_at_all() -> None:
    p = program(
        "Argument N i32", "Grid m = 0:1", "Allocate X in global (N, 2) f32", "Allocate Y in global (N, 2) f32",
        "Allocate Z in global (N) f32", "Allocate t in register (4, 2) f32", "Allocate r in register (4) f32",
        "Copy X (4, 2) from global to shared", "Compute t = -X", "Compute r = rowsum(t)",
        "Copy t into Y (4, 2) from register to global", "Copy r into Z (4) from register to global",
    )  # fmt: skip
    out = run(p, {"X": X[:3, :2]}, {"N": 3})
    assert list(out) == ["Y", "Z"]
    np.testing.assert_array_equal(out["Z"], -X[:3, :2].sum(1))


def test_reshape_rounds_its_operand_and_leaves_the_source() -> None:
    p = program(
        "Grid m = 0:1", "Allocate A in global (2, 2) f32", "Allocate Y in global (2, 2) f32", "Allocate Z in global (2, 2) f32",
        "Allocate s in register (2, 2) f32", "Allocate t in register (2, 2) f32",
        "Copy A (2, 2) from global to shared", "Compute GEMM A, A^T and get s",
        "Reshape s from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new) and get p bf16",
        "Compute GEMM p, A and get t",
        "Copy s into Y (2, 2) from register to global", "Copy t into Z (2, 2) from register to global",
    )  # fmt: skip
    a = np.array([[1 + 2**-10, 0], [0, 1.0]])
    out = run(p, {"A": a}, {})
    square = np.float32(a[0, 0]) ** 2
    assert out["Y"][0, 0] == square and out["Z"][0, 0] == np.float32(a[0, 0])  # bf16 rounds the square to 1
    assert run(p, {"A": a}, {}, precision="exact")["Z"][0, 0] == a[0, 0] ** 3


def test_first_wrong_tile_can_be_found_by_tracing() -> None:
    right = fill(parse_or_raise((EXAMPLES / "causal.tl").read_text()), {"BM": 64, "BN": 64})
    wrong = fill(parse_or_raise((EXAMPLES / "causal.tl").read_text().replace("kv <= q", "kv < q")), {"BM": 64, "BN": 64})
    rng = np.random.default_rng(0)
    call = {name: rng.standard_normal((1, 1, 70, 64)) for name in "QKV"}
    scalars = {"scale": 0.125, "SeqQ": 70, "SeqK": 70, "Heads": 1, "KvHeads": 1, "Batch": 1}
    steps: tuple[list[Step], list[Step]] = ([], [])
    for p, seen in zip((right, wrong), steps, strict=True):
        run(p, call, scalars, trace=seen.append)
    first = next(b for a, b in zip(*steps, strict=True) if not np.array_equal(a.value, b.value, equal_nan=True))
    assert first.written == "S" and first.block == {"m": 0, "h": 0, "b": 0} and first.loops == {"j": 0}
    assert "where" in (EXAMPLES / "causal.tl").read_text().splitlines()[first.statement.span.line - 1]


def test_two_runs_agree_bit_for_bit() -> None:
    p = fill(parse_or_raise((EXAMPLES / "causal.tl").read_text()), {"BM": 64, "BN": 128})
    rng = np.random.default_rng(1)
    call = {name: rng.standard_normal((1, 2, 90, 64)) for name in "QKV"}
    scalars = {"scale": 0.125, "SeqQ": 90, "SeqK": 90, "Heads": 2, "KvHeads": 2, "Batch": 1}
    first, second = run(p, call, scalars), run(p, call, scalars)
    assert all(np.array_equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("Compute t = X + u",), "u: expected a scalar, or a tile that was made before"),
        (("Compute u = X",), "u: expected an Allocate, a Copy or a Reshape that makes this tile"),
        (("Compute r = X",), r"r: expected a value that fits \(4, 1\), found \(4, 3\)"),
        (("Compute t = Q[rows, cols]",), "Q: expected a matrix in global memory to index"),
        (("Compute t = X[rows]",), "X: expected 2 indices, found 1"),
        (("Compute GEMM X, X and get t",), "contracted dims disagree"),
    ],
)
def test_programs_without_meaning_say_why(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        result(copy_rows(*lines, "Compute t = 0"))


def test_sketches_and_holes_do_not_run() -> None:
    with pytest.raises(TLError, match="sketch"):
        run(parse_or_raise((EXAMPLES / "sketch.tl").read_text()), {}, {})
    with pytest.raises(TLError, match="BM"):
        run(parse_or_raise((EXAMPLES / "causal.tl").read_text()), {}, {})


def test_offsets_beyond_the_array_and_broken_promises_are_named() -> None:
    p = program(
        "Argument n f32 positive", "Argument B i32", "Grid b = 0:B", "Allocate X in global (2, 2) f32 with offset [b]",
        "Allocate Y in global (2, 2) f32 with offset [b]", "Allocate t in register (2, 2) f32",
        "Copy X (2, 2) from global to shared", "Compute t = X * n", "Copy t into Y (2, 2) from register to global",
    )  # fmt: skip
    with pytest.raises(CallError, match=r"X: expected leading axes that hold index \(1,\), found shape \(1, 2, 2\)"):
        run(p, {"X": np.ones((1, 2, 2))}, {"n": 1.0, "B": 2})
    with pytest.raises(CallError, match="n: expected a positive number, as the program promises, found 0.0"):
        run(p, {"X": np.ones((1, 2, 2))}, {"n": 0.0, "B": 1})
