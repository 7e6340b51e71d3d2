"""A known good kernel and kernels that must be refused, as C++ sources with the reason that each must be refused for.

They are made by hand, for `verifier.selftest` and for tests; no translator prints them and no catalog holds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from generator.canonical import digest_text
from generator.spec import TL_DTYPES, AttentionSpec
from generator.translate.records import Launch, ScalarParameter, TensorParameter, Translated

FOLDER = Path(__file__).parent
_DTYPES = {"fp32": 0, "fp16": 1, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Trap:
    """reason and check: what the verdict has to say; no check: any, where leftover memory decides which. caught_by: which of the
    two sees it; quick: part of the short self-test.
    """

    name: str
    reason: str
    check: str
    caught_by: Literal["judge", "measure"] = "judge"
    quick: bool = False


TRAPS: tuple[Trap, ...] = (
    Trap("zeros", "wrong_value", "max_abs", quick=True),
    Trap("mean_of_v", "wrong_value", "max_abs"),
    Trap("first_v", "wrong_value", "max_abs"),
    Trap("wrong_scale", "wrong_value", "lse_max", quick=True),
    Trap("no_op", "unwritten_output", "written", quick=True),
    Trap("stale_answer", "unwritten_output", "written"),
    Trap("partial", "unwritten_output", "written", quick=True),
    Trap("uninitialised", "wrong_value", ""),
    Trap("cached_by_pointer", "wrong_value", "max_abs", quick=True),
    Trap("knows_by_q", "wrong_value", "max_abs"),
    Trap("right_a_dozen_times", "wrong_value", "max_abs"),
    Trap("knows_the_poison", "wrong_value", "max_abs"),
    Trap("two_threads_only", "wrong_value", "max_abs"),
    Trap("left_at_work", "crash", "threads"),
    Trap("leaves_flushing", "crash", "return code"),
    Trap("background_thread", "crash", "system call"),
    Trap("forged_answer", "crash", "crash"),
    Trap("exits", "crash", "crash"),
    Trap("writes_result_file", "unwritten_output", "written"),
    Trap("mutates_inputs", "mutates_inputs", "inputs", quick=True),
    Trap("restores_inputs", "mutates_inputs", "inputs"),
    Trap("reads_supervisor", "wrong_value", "max_abs"),
    Trap("calls_a_library", "unwritten_output", "written"),
    Trap("low_precision", "wrong_value", "max_abs", quick=True),
    Trap("whole_tiles_only", "wrong_value", "max_abs", quick=True),
    Trap("fixed_scale", "wrong_value", "max_abs"),
    Trap("no_even_lengths", "wrong_value", "max_abs"),
    Trap("wrong_kv_head", "wrong_value", "max_abs"),
    Trap("mask_start_aligned", "wrong_value", "max_abs"),
    Trap("causal_off_by_one", "wrong_value", "max_abs"),
    Trap("needs_alignment", "crash", "crash"),
    Trap("offsets_32_bit", "crash", "crash"),
    Trap("nan_filled", "wrong_value", "finite", quick=True),
    Trap("masked_rows_nan", "wrong_value", "finite"),
    Trap("masked_rows_mean", "wrong_value", "lse pattern"),
    Trap("finite_minus_infinity", "wrong_value", "max_abs"),
    Trap("no_running_max", "wrong_value", "max_abs"),
    Trap("swapped_rows", "wrong_value", "max_abs"),
    Trap("lse_base_2", "wrong_value", "lse_max", quick=True),
    Trap("writes_past_end", "out_of_bounds", "guard bands", quick=True),
    Trap("writes_in_gaps", "out_of_bounds", "guard bands"),
    Trap("reads_past_end", "out_of_bounds", "guard bands", quick=True),
    Trap("reads_beyond_as_zero", "wrong_value", "finite"),
    Trap("null_pointer", "crash", "crash", quick=True),
    Trap("aborts", "crash", "crash"),
    Trap("out_of_memory", "crash", "return code"),
    Trap("endless", "timeout", "time limit", quick=True),
    Trap("grandchild", "crash", "system call"),
    Trap("network", "crash", "system call"),
    Trap("racy", "nondeterministic", "two runs", quick=True),
    Trap("lazy_pages", "unwritten_output", "written"),
    Trap("new_buffers_only", "unwritten_output", "written"),
    Trap("every_second_call", "unwritten_output", "written", "measure"),
)


def launch_of(spec: AttentionSpec, entry: str = "attention_kernel") -> Launch:
    """How the hand-made kernels are called."""
    dtype = TL_DTYPES[spec.dtype]
    matrices = tuple(TensorParameter(name, dtype, 2, 2, name == "O") for name in "QKVO")  # type: ignore[arg-type]
    scalars = tuple(ScalarParameter(name, "i32", False) for name in ("SeqQ", "SeqK", "Heads", "KvHeads", "Batch"))
    return Launch(
        entry,
        (*matrices, TensorParameter("LSE", "f32", 2, 1, True)),
        (ScalarParameter("scale", "f32", False), *scalars),
        {"isa": "avx2"},
    )


def causal_form(spec: AttentionSpec) -> int:
    """How the sources name the mask: 0 none, 1 causal aligned at the end, 2 at the start. For specs that have no other rule."""
    assert not spec.scores and all(rule.name == "causal" for rule in spec.masks), spec
    causal = 0
    for rule in spec.masks:
        causal = 2 if dict(rule.parameters).get("align") == "top_left" else 1
    return causal


def kernel(spec: AttentionSpec, name: str) -> Translated:
    """The hand-made kernel of that name, for a spec without score rules whose only mask, if any, is causal."""
    facts = {
        "DTYPE": _DTYPES[spec.dtype], "HEAD_DIM": spec.head_dim, "HEAD_DIM_V": spec.head_dim_v, "CAUSAL": causal_form(spec),
    }  # fmt: skip
    defines = "".join(f"#define {key} {value}\n" for key, value in facts.items())
    source = defines + (FOLDER / "core.h").read_text() + (FOLDER / f"{name}.cpp").read_text()
    return Translated("cpu", "c++", source, launch_of(spec), digest_text(name), {})
