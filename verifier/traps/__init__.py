"""A known good kernel and kernels that must be refused, as C++ sources with the reason that each must be refused for.

They are made by hand, for `verifier.selftest` and for tests; no translator prints them and no catalog holds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from generator.canonical import digest_text
from generator.spec import AttentionSpec
from generator.translate.records import Launch, ScalarParameter, TensorParameter, Translated

FOLDER = Path(__file__).parent
_DTYPES = {"fp32": 0, "fp16": 1, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Trap:
    """reason and check: what the verdict has to say. caught_by: `judge` refuses it, or only `measure` can."""

    name: str
    reason: str
    check: str
    caught_by: Literal["judge", "measure"] = "judge"


def launch_of(spec: AttentionSpec, entry: str = "attention_kernel") -> Launch:
    """How the hand-made kernels are called."""
    dtype = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}[spec.dtype]
    matrices = tuple(TensorParameter(name, dtype, 2, 2, name == "O") for name in "QKVO")  # type: ignore[arg-type]
    scalars = tuple(ScalarParameter(name, "i32", False) for name in ("SeqQ", "SeqK", "Heads", "KvHeads", "Batch"))
    return Launch(
        entry,
        (*matrices, TensorParameter("LSE", "f32", 2, 1, True)),
        (ScalarParameter("scale", "f32", False), *scalars),
        {"isa": "avx2"},
    )


def good_kernel(spec: AttentionSpec) -> Translated:
    """A plain, right kernel for a spec without score rules whose only mask, if any, is causal."""
    return kernel(spec, "good")


def kernel(spec: AttentionSpec, name: str) -> Translated:
    """The hand-made kernel of that name, for a spec without score rules whose only mask, if any, is causal."""
    assert not spec.scores and all(rule.name == "causal" for rule in spec.masks), spec
    causal = 0
    for rule in spec.masks:
        causal = 2 if dict(rule.parameters).get("align") == "top_left" else 1
    facts = {"DTYPE": _DTYPES[spec.dtype], "HEAD_DIM": spec.head_dim, "HEAD_DIM_V": spec.head_dim_v, "CAUSAL": causal}
    defines = "".join(f"#define {key} {value}\n" for key, value in facts.items())
    source = defines + (FOLDER / "core.h").read_text() + (FOLDER / f"{name}.cpp").read_text()
    return Translated("cpu", "c++", source, launch_of(spec), digest_text(name), {})
