"""The tensors and scalars that a call of one spec has, as launch parameters by name. Reads no description."""

from __future__ import annotations

from generator.binding import SPEC_SCALARS, rule_scalars, rule_tensors
from generator.spec import TL_DTYPES, AttentionSpec
from generator.tl.ir import DType
from generator.translate.records import ScalarParameter, TensorParameter

#: Every kernel has to take these; what the spec's rules capture may be left out.
NEEDED_TENSORS = ("Q", "K", "V", "O", "LSE")


def call_tensors(spec: AttentionSpec) -> dict[str, TensorParameter]:
    """Name -> parameter: Q, K, V, O, LSE, then what rules capture. SpecError for unknown rules."""
    dtype: DType = TL_DTYPES[spec.dtype]  # type: ignore[assignment]
    found = {name: TensorParameter(name, dtype, 2, 2, name == "O") for name in "QKVO"}
    found["LSE"] = TensorParameter("LSE", "f32", 2, 1, True)
    for name, captured in rule_tensors(spec).items():
        found[name] = TensorParameter(name, captured.dtype, len(captured.offset), len(captured.shape), False)
    return found


def call_scalars(spec: AttentionSpec, positive: frozenset[str] = frozenset()) -> dict[str, ScalarParameter]:
    """Name -> parameter: sizes, the scale, and the numbers of the spec's rules. `positive`: what the kernel is promised."""
    dtypes = {name: dtype for name, (_, dtype, _) in SPEC_SCALARS.items()}
    dtypes |= {name: scalar.dtype for name, (_, scalar, _) in rule_scalars(spec).items()}
    return {name: ScalarParameter(name, dtype, name in positive) for name, dtype in dtypes.items()}
