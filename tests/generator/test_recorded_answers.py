"""Programs as a language model wrote them, unchanged: they check, and the interpreter gives what was asked for."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from dense_attention import attention, random_call

from generator.spec import AttentionSpec, Rule
from generator.tl.checker import parse_and_check
from generator.tl.interpreter import run
from generator.tl.ir import Program

ANSWERS = Path(__file__).parents[1] / "responses"
SHAPES = [(1, 2, 1, 150, 200), (2, 2, 2, 200, 130), (1, 4, 2, 1, 65)]


def program_of(name: str) -> Program:
    block = re.search(r"```tl\n(.*?)```", (ANSWERS / f"{name}.answer.md").read_text(), re.DOTALL)
    assert block is not None
    parsed = parse_and_check(block[1])
    assert parsed.program is not None, parsed.diagnostics
    return parsed.program


def sizes(shape: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(("Batch", "Heads", "KvHeads", "SeqQ", "SeqK"), shape, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("name", "dims", "scalars", "rules"),
    [
        ("prefix_mla", (192, 128), {"Prefix": 70}, {"masks": (Rule.make("prefix", length=70),)}),
        (
            "window_softcap", (128, 128), {"Window": 40, "cap": 2.5},
            {"masks": (Rule.make("window", left=39, right=0),), "scores": (Rule.make("softcap", cap=2.5),)},
        ),
    ],
)  # fmt: skip
def test_attention(name: str, dims: tuple[int, int], scalars: dict, rules: dict, shape: tuple[int, ...]) -> None:
    batch, heads, kv_heads, sq, sk = shape
    spec = AttentionSpec(heads, kv_heads, *dims, batch, sq, sk, "bf16", **rules)
    call = random_call(spec)
    out = run(program_of(name), call, sizes(shape) | scalars | {"scale": spec.scale}, precision="exact")
    o, lse = attention(spec, call)
    np.testing.assert_allclose(out["O"], o, atol=1e-11)
    np.testing.assert_allclose(out["LSE"], lse, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_retention(shape: tuple[int, ...]) -> None:
    batch, heads, kv_heads, sq, sk = shape
    spec = AttentionSpec(heads, kv_heads, 128, 128, batch, sq, sk, "bf16")
    call = random_call(spec)
    out = run(program_of("retention"), call, sizes(shape) | {"scale": spec.scale}, precision="exact")["O"]
    k, v = (np.repeat(call[n], spec.group, axis=1) for n in "KV")
    distance = np.arange(sq)[:, None] + sk - sq - np.arange(sk)
    decay = (1 - 2.0 ** (-5 - np.arange(heads)))[:, None, None] ** np.maximum(distance, 0)
    weights = np.where(distance >= 0, decay * spec.scale * np.einsum("bhqd,bhkd->bhqk", call["Q"], k), 0)
    np.testing.assert_allclose(out, weights @ v, atol=1e-11)
