"""The interpreter's own rules, on small programs: bounds, rounding, loops, branches, captured tensors, errors."""

import numpy as np
import pytest

from generator.tl.interpreter import CallError, run
from generator.tl.ir import Allocate, Argument, Axis, Constant, Copy, For, Gemm, Grid, Num, Op, Program, Var
from generator.tl.numerics import Numerics, round_bf16


def gemm_program(dtype: str = "f32") -> Program:
    """C = A B^T in tiles of 4 x 3 x 2."""
    m, n, k = Var("m"), Var("n"), Var("k")
    tile = {"BM": 4, "BN": 3, "BK": 2}
    body = (
        Argument(("M", "N", "K"), "i32"),
        *(Constant(name, (size,)) for name, size in tile.items()),
        Grid((Axis("m", Op("ceildiv", (Var("M"), Var("BM")))), Axis("n", Op("ceildiv", (Var("N"), Var("BN")))))),
        Allocate("A", "global", (Var("M"), Var("K")), dtype),
        Allocate("B", "global", (Var("N"), Var("K")), dtype),
        Allocate("C", "global", (Var("M"), Var("N")), dtype),
        Allocate("acc", "register", (Var("BM"), Var("BN")), "f32", init=Num(0)),
        For(
            "k",
            Num(0),
            Op("ceildiv", (Var("K"), Var("BK"))),
            False,
            (
                Copy("A", "A", (Var("BM"), Var("BK")), (m, k), "global", "shared"),
                Copy("B", "B", (Var("BN"), Var("BK")), (n, k), "global", "shared"),
                Gemm("A", False, "B", True, "acc", True),
            ),
        ),
        Copy("acc", "C", (Var("BM"), Var("BN")), (m, n), "register", "global"),
    )
    return Program("gemm", "code", body)


@pytest.mark.parametrize("shape", [(4, 3, 2), (1, 1, 1), (9, 7, 5), (8, 6, 1)])
def test_gemm_at_ragged_sizes(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((n, k))
    got = run(gemm_program(), {"A": a, "B": b}, {"M": m, "N": n, "K": k}, precision="exact")["C"]
    np.testing.assert_allclose(got, a @ b.T, atol=1e-13)
    assert got.dtype == np.float64


def test_empty_contraction_and_empty_grid() -> None:
    got = run(gemm_program(), {"A": np.ones((2, 0)), "B": np.ones((3, 0))}, {"M": 2, "N": 3, "K": 0})["C"]
    np.testing.assert_array_equal(got, np.zeros((2, 3)))
    assert run(gemm_program(), {"A": np.ones((0, 2)), "B": np.ones((3, 2))}, {"M": 0, "N": 3, "K": 2})["C"].shape == (0, 3)


def test_trace_sees_every_tile() -> None:
    seen = []
    run(gemm_program(), {"A": np.ones((5, 3)), "B": np.ones((2, 3))}, {"M": 5, "N": 2, "K": 3}, trace=seen.append)
    assert [(s.written, s.loops.get("k")) for s in seen[:7]] == [
        ("A", 0), ("B", 0), ("acc", 0), ("A", 1), ("B", 1), ("acc", 1), ("C", None),
    ]  # fmt: skip
    assert seen[5].block == {"m": 0, "n": 0} and seen[-1].block == {"m": 1, "n": 0}
    np.testing.assert_array_equal(seen[5].value[:, :2], np.full((4, 2), 3.0))
    np.testing.assert_array_equal(seen[5].value[:, 2], np.zeros(4))


def test_operands_and_output_are_rounded_as_stated() -> None:
    third = 1 / 3
    arrays, sizes = {"A": [[third]], "B": [[1.0]]}, {"M": 1, "N": 1, "K": 1}
    for dtype, rounded in (("f32", np.float32(third)), ("f16", np.float16(third)), ("bf16", 0.333984375)):
        assert run(gemm_program(dtype), arrays, sizes)["C"][0, 0] == rounded
        assert run(gemm_program(dtype), arrays, sizes, precision="exact")["C"][0, 0] == third


def test_bf16_rounds_to_nearest_even_and_keeps_what_is_not_finite() -> None:
    half_ulp = 2.0**-8
    x = np.array([1 + half_ulp, 1 + 3 * half_ulp, 1 + half_ulp * 1.01, -np.inf, 3.4e38, np.nan, -0.0], dtype=np.float32)
    np.testing.assert_array_equal(round_bf16(x), np.array([1, 1 + 4 * half_ulp, 1 + 2 * half_ulp, -np.inf, np.inf, np.nan, -0.0]))


@pytest.mark.parametrize(
    ("fn", "args", "value"), [("//", (-7, 2), -4), ("%", (-7, 2), 1), ("ceildiv", (7, 2), 4), ("//", (1, 0), 0)]
)
def test_whole_numbers_floor(fn: str, args: tuple[int, int], value: int) -> None:
    assert Numerics().apply(fn, list(args)) == value
    assert Numerics().apply(fn, [np.array([args[0]]), args[1]]).tolist() == [value]


@pytest.mark.parametrize(
    ("tensors", "scalars", "message"),
    [
        ({"A": np.ones((2, 2))}, {}, "B: expected an array with 2 axes, found nothing"),
        ({"B": np.ones((2, 2, 2))}, {}, r"B: expected 2 axes \(0 leading\), found shape \(2, 2, 2\)"),
        ({"B": np.ones((2, 3))}, {}, r"B: expected \(2, 2\) in its last axes, found shape \(2, 3\)"),
        ({"B": np.ones((2, 2), bool)}, {}, r"B: expected numbers \(f32\), found an array of bool"),
        ({"B": np.ones((2, 2))}, {"M": None}, r"M: expected a whole number \(i32\), found None"),
        ({"B": np.ones((2, 2))}, {"M": 2.5}, r"M: expected a whole number \(i32\), found 2.5"),
    ],
)
def test_wrong_arguments_are_named(tensors: dict, scalars: dict, message: str) -> None:
    with pytest.raises(CallError, match=message):
        run(gemm_program(), {"A": np.ones((2, 2))} | tensors, {"M": 2, "N": 2, "K": 2} | scalars)


def test_missing_scalar_is_named() -> None:
    with pytest.raises(CallError, match=r"K: expected a number \(i32\), found nothing"):
        run(gemm_program(), {"A": np.ones((2, 2)), "B": np.ones((2, 2))}, {"M": 2, "N": 2})
