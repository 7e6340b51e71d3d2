"""Public faults that are not of one attention rule but of how a kernel is put together. Each is a TL program, run by the
interpreter and compiled for this CPU, with values known by hand: biases in half precision, splits of the keys, scales of
quantised tensors.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from cpu_kernels import call, widest

from generator.tl.interpreter import run
from generator.tl.ir import Program
from generator.tl.parser import parse_or_raise

FOLDER = Path(__file__).parents[2] / "examples" / "tl"
DIM = 64
INF = math.inf


def program(name: str, **changes: tuple[str, str]) -> Program:
    """A tutorial program, with pieces of its text replaced; the names of the changes only say what they are for."""
    text = (FOLDER / name).read_text()
    for what, (old, new) in changes.items():
        assert old in text, f"{what}: {old!r} is not in {name}"
        text = text.replace(old, new)
    return parse_or_raise(text)


def interpreted(code: Program, tensors: dict[str, np.ndarray], scalars: dict, outputs: dict[str, tuple[int, ...]]):
    return run(code, tensors, scalars)


def compiled(code: Program, tensors: dict[str, np.ndarray], scalars: dict, outputs: dict[str, tuple[int, ...]]):
    return call(code, tensors | {name: np.zeros(shape) for name, shape in outputs.items()}, scalars, widest())


@pytest.fixture(params=[interpreted, compiled], ids=lambda f: f.__name__)
def execute(request: pytest.FixtureRequest):
    return request.param


def first_column(*values: float) -> np.ndarray:
    """(1, 1, rows, DIM) with values in the first column: products are those of one dimension."""
    out = np.zeros((1, 1, len(values), DIM))
    out[0, 0, :, 0] = values
    return out


def rows(*values: float) -> np.ndarray:
    """(1, 1, rows, DIM), each row filled with its value."""
    return np.ones((1, 1, len(values), DIM)) * np.array(values, float)[:, None]


SIZES = {"SeqQ": 1, "Heads": 1, "KvHeads": 1, "Batch": 1, "scale": 1.0}
OUT = {"O": (1, 1, 1, DIM), "LSE": (1, 1, 1)}


@pytest.mark.parametrize(
    ("dtype", "keys", "bias", "out", "lse"),
    [
        ("f16", (-20, -17), (-65504, -65504), 19.5257, -65520.951),  # in half precision the sum is -inf
        ("f32", (2, -1), (-3.4028234663852886e38,) * 2, 15.0, -3.4028e38),  # a finite bias hides nothing: it swallows the score
        ("f16", (2, -1), (-INF, -INF), 0.0, -INF),
        ("f16", (2, -1), (-INF, 0), 20.0, -1.0),
    ],
)
def test_a_bias_is_added_in_f32(execute, dtype: str, keys: tuple, bias: tuple, out: float, lse: float) -> None:
    """huggingface/transformers#17306, pytorch/pytorch#109517: NaN where a bias drives every score to the least finite number."""
    code = program("bias.tl", dtype=("Bias in global (SeqQ, SeqK) f16", f"Bias in global (SeqQ, SeqK) {dtype}"))
    inputs = {
        "Q": first_column(1),
        "K": first_column(*keys),
        "V": rows(10, 20),
        "Bias": np.array(bias, float).reshape(1, 1, 1, 2),
    }
    got = execute(code, inputs, SIZES | {"SeqK": 2}, OUT)
    np.testing.assert_allclose(got["O"], out, rtol=1e-3)  # O is stored in half precision
    np.testing.assert_allclose(got["LSE"], lse, rtol=1e-4 if lse < -1e30 else 1e-7)


@pytest.mark.parametrize(("keys", "out", "lse"), [(5, 3.0, 1.6094), (16, 8.5, 2.7726), (0, 0.0, -INF)])
def test_splits_without_keys(execute, keys: int, out: float, lse: float) -> None:
    """Dao-AILab/flash-attention#2842: four splits of four keys over five keys leave two of them empty; over none, all."""
    sizes = SIZES | {"Splits": 4, "SplitLen": 4, "SeqK": keys}
    inputs = {"Q": rows(0), "K": rows(*[7.0] * keys), "V": rows(*range(1, keys + 1))}
    parts = execute(program("split_kv.tl"), inputs, sizes, {"PartO": (1, 1, 4, 1, DIM), "PartLSE": (1, 1, 4, 1)})
    empty = [s * 4 >= keys for s in range(4)]
    assert np.isneginf(parts["PartLSE"].ravel()).tolist() == empty and not parts["PartO"][0, 0, empty].any()
    inputs = {"PartO": parts["PartO"].reshape(1, 1, 4, DIM), "PartLSE": parts["PartLSE"].reshape(1, 1, 4)}
    got = execute(program("merge.tl"), inputs, {name: sizes[name] for name in ("Splits", "SeqQ", "Heads", "Batch")}, OUT)
    np.testing.assert_allclose(got["O"], out, rtol=1e-6)
    np.testing.assert_allclose(got["LSE"], lse, atol=1e-4)


def test_an_empty_sequence_among_others(execute) -> None:
    """Dao-AILab/flash-attention#2842: what ends early for an empty sequence wrote -inf into its neighbour's LSE."""
    v = np.zeros((3, 1, 5, DIM))
    v[0] = np.arange(1.0, 6.0)[:, None]
    v[2, 0, :2] = np.array([6.0, 7.0])[:, None]
    one_head = program("padding.tl")
    inputs = {"Q": np.zeros((3, 1, 1, DIM)), "K": np.zeros((3, 1, 5, DIM)), "V": v, "KvLen": np.array([5, 0, 2])}
    got = execute(one_head, inputs, SIZES | {"SeqK": 5, "Batch": 3}, {"O": (3, 1, 1, DIM), "LSE": (3, 1, 1)})
    np.testing.assert_allclose(got["O"][:, 0, 0, 0], [3.0, 0.0, 6.5], rtol=1e-6)
    np.testing.assert_allclose(got["LSE"].ravel(), [1.6094, -INF, 0.6931], atol=1e-4)


@pytest.mark.parametrize(
    ("scales", "out", "lse"),
    [((0.25, 0.5), 2.5, 1.3863), ((0.5, 0.25), 1.4, 2.3026), ((1.0, 1.0), 5.9512, 4.4067)],
    ids=["right", "swapped", "ignored"],
)
def test_scales_of_quantised_keys_and_values(execute, scales: tuple[float, float], out: float, lse: float) -> None:
    """flashinfer-ai/flashinfer#1023, #4979: scales lost on their way; K and V hold what e4m3 holds, and every mix-up shows."""
    code = program(
        "full.tl",
        arguments=("Argument scale f32 positive", "Argument scale, KScale, VScale f32 positive"),
        keys=("S = where(kv < SeqK, S, -inf)", "S = where(kv < SeqK, S * KScale, -inf)"),
        values=("1.0 / row_sum", "VScale / row_sum"),
    )
    inputs = {"Q": first_column(math.log(3)), "K": first_column(0, 4), "V": rows(2, 6)}
    scalars = SIZES | {"SeqK": 2, "KScale": scales[0], "VScale": scales[1]}
    got = execute(code, inputs, scalars, OUT)
    np.testing.assert_allclose(got["O"], out, rtol=2e-3)
    np.testing.assert_allclose(got["LSE"], lse, atol=2e-3)
