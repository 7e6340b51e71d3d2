"""A known good CUDA kernel and kernels that a GPU's judge must refuse, with the reason that each must be refused for.

One source with a macro for each fault, made by hand, for the self-test of GPUs and for tests; no translator prints it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from generator.canonical import digest_text
from generator.spec import AttentionSpec
from generator.translate.facts import CudaFacts, FieldType, ParameterField
from generator.translate.records import Launch, Translated
from verifier.traps import causal_form, launch_of

SOURCE = Path(__file__).parent / "attention.cu"
_DTYPES = {"fp32": 0, "fp16": 1, "bf16": 2}
#: Shared memory that no card gives to a block.
TOO_MUCH_SHARED = 1 << 20


@dataclass(frozen=True, slots=True)
class CudaTrap:
    """reason and check: what the verdict has to say; check "" for any. macros: where the fault is put into the source."""

    name: str
    reason: str
    check: str
    macros: tuple[tuple[str, str], ...] = ()
    quick: bool = False


_FIRST_THREAD = "blockIdx.x == 0 && threadIdx.x == 0"
_LAST_BLOCK = "blockIdx.x + 1 == gridDim.x"

CUDA_TRAPS: tuple[CudaTrap, ...] = (
    CudaTrap("zeros", "wrong_value", "", (("FAULT_OUT", "out = 0;"),), quick=True),
    CudaTrap("wrong_scale", "wrong_value", "", (("FAULT_SCALE", "1.05f *"),)),
    CudaTrap("no_op", "unwritten_output", "written", (("FAULT_FIRST", "return;"),), quick=True),
    CudaTrap("partial", "unwritten_output", "written", (("FAULT_FIRST", f"if ({_LAST_BLOCK}) return;"),)),
    CudaTrap(
        "mutates_inputs", "mutates_inputs", "inputs",
        (("FAULT_LAST", f"if ({_FIRST_THREAD}) ((T*)k)[0] = (T)(((T*)k)[0] + 1);"),), quick=True,
    ),
    CudaTrap(
        "racy", "nondeterministic", "two runs",
        (("FAULT_LAST", "if (threadIdx.x == 0 && total > 0) *lse += (clock64() >> 4 & 7) * 1e-5f;"),),
    ),
    CudaTrap(
        "writes_past_end", "out_of_bounds", "guard bands",
        (("FAULT_LAST", f"if ({_LAST_BLOCK} && threadIdx.x == 0) o[HEAD_DIM_V] = o[0];"),), quick=True,
    ),
    CudaTrap(
        "reads_past_end", "out_of_bounds", "guard bands",
        (("FAULT_OUT", f"if ({_LAST_BLOCK} && v[(p.SeqK - 1) * p.sv[2] + HEAD_DIM_V] == 12345) out = store(0.f);"),),
    ),
    CudaTrap(
        "illegal_access", "crash", "crash",
        (("FAULT_LAST", f"if ({_FIRST_THREAD}) *(volatile int*)4096 = 1;"),), quick=True,
    ),
    CudaTrap("stops_itself", "crash", "crash", (("FAULT_LAST", f'if ({_FIRST_THREAD}) asm volatile("trap;");'),)),
    CudaTrap("too_much_shared", "crash", "load"),
    CudaTrap(
        "endless", "timeout", "time limit",
        (("FAULT_FIRST", f"if ({_FIRST_THREAD}) while (*(volatile const T*)q == *(volatile const T*)q) {{}}"),), quick=True,
    ),
)  # fmt: skip

_PLACES = ("FAULT_FIRST", "FAULT_SCALE", "FAULT_OUT", "FAULT_LAST")


def cuda_launch(spec: AttentionSpec, isa: str, shared_bytes: int = 0) -> Launch:
    """How the hand-made kernels are called: the struct at the head of the source, field by field."""
    plain = launch_of(spec)
    fields: list[ParameterField] = [{"offset": 8 * i, "type": "pointer", "tensor": t.name} for i, t in enumerate(plain.tensors)]
    at = 8 * len(fields)
    for t in plain.tensors:
        for axis in range(t.ndim):
            fields.append({"offset": at, "type": "i64", "tensor": t.name, "stride": axis})
            at += 8
    for s in plain.scalars:
        kind: FieldType = "i32" if s.dtype == "i32" else "f32"
        fields.append({"offset": at, "type": kind, "scalar": s.name})
        at += 4
    facts: CudaFacts = {
        "isa": isa,
        "family": "plain",
        "grid": [["*", ["*", "Batch", "Heads"], "SeqQ"], 1, 1],
        "threads": 64,
        "shared_bytes": shared_bytes,
        "cluster": [1, 1, 1],
        "aligned_16": [],
        "repack": None,
        "tensor_maps": [],
        "workspace": None,
        "parameters": {"bytes": -(-at // 8) * 8, "alignment": 8, "fields": fields},
    }
    return Launch(plain.entry, plain.tensors, plain.scalars, facts)


def cuda_kernel(spec: AttentionSpec, isa: str, name: str = "good") -> Translated:
    """The hand-made kernel of that name ("good" has no fault), for a spec without score rules whose only mask is causal."""
    trap = next((t for t in CUDA_TRAPS if t.name == name), None)
    assert name == "good" or trap is not None, name
    macros = dict.fromkeys(_PLACES, "") | (dict(trap.macros) if trap else {})
    facts = {
        "DTYPE": _DTYPES[spec.dtype], "HEAD_DIM": spec.head_dim, "HEAD_DIM_V": spec.head_dim_v, "CAUSAL": causal_form(spec),
        "INFINITY": "__int_as_float(0x7f800000)", **macros,
    }  # fmt: skip
    source = "".join(f"#define {key} {value}\n" for key, value in facts.items()) + SOURCE.read_text()
    launch = cuda_launch(spec, isa, TOO_MUCH_SHARED if name == "too_much_shared" else 0)
    return Translated("sm_75", "cuda", source, launch, digest_text(name), {})
