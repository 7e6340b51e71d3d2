"""The columns of a catalog row as data: name, Arrow type, what it holds. Checks and stores nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

_TIME = pa.timestamp("us", tz="UTC")
_SHAPE = pa.struct([("batch", pa.int64()), ("seqlen_q", pa.int64()), ("seqlen_k", pa.int64())])
_CASE_NUMBERS = ("rms", "max_abs", "trusted_rms", "trusted_max_abs", "limit_rms", "limit_max_abs")
_CASE = pa.struct([("input_name", pa.string()), *((name, pa.float64()) for name in _CASE_NUMBERS)])
_TEXTS = pa.list_(pa.string())


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `form` narrows the type: "hash" (64 hex digits), "json" (JSON text), "count" and "amount" (not negative)."""

    name: str
    type: pa.DataType
    about: str
    form: str = ""


def _columns(group: str, *lines: str) -> tuple[tuple[str, Column], ...]:
    """Lines of the form `name kind what it holds` as columns."""
    kinds: dict[str, tuple[pa.DataType, str]] = {
        "text": (pa.string(), ""),
        "hash": (pa.string(), "hash"),
        "json": (pa.string(), "json"),
        "int": (pa.int64(), ""),
        "count": (pa.int64(), "count"),
        "float": (pa.float64(), ""),
        "amount": (pa.float64(), "amount"),
        "bool": (pa.bool_(), ""),
        "time": (_TIME, ""),
        "texts": (_TEXTS, ""),
        "floats": (pa.list_(pa.float64()), ""),
        "shapes": (pa.list_(_SHAPE), ""),
        "cases": (pa.list_(_CASE), ""),
    }
    made = []
    for line in lines:
        name, kind, about = line.split(maxsplit=2)
        made.append((group, Column(name, kinds[kind][0], about, kinds[kind][1])))
    return tuple(made)


#: (group, column), in the order of the schema.
GROUPED_COLUMNS = (
    *_columns(
        "identity",
        "row_id text 32 hex digits: attempt key, attempt number and run",
        "attempt_key hash content key of the planned attempt; what resuming goes by",
        "attempt_no count 1 for the first try; more after transient failures and for a verification of an old row",
        "sweep_id text the sweep as its user knows it, over restarts",
        "run_id text one start of a sweep; a superseded run is fenced by this",
        "writer_id text the process that wrote the row",
        "sequence count grows from row to row, above all rows that the writer saw on opening; orders rows, clocks do not",
        "schema_version count version of these columns at writing",
        "created_at time when the attempt ended, UTC",
        "status text ok, failed, unverified or not_run; follows from reason_code",
        "reason_code text one of verifier.records.REASONS",
        "message text one sentence on why",
        "revoked_at time when the row was revoked; null if never",
        "revoked_reason text why it was revoked",
    ),
    *_columns(
        "specification",
        "spec json canonical JSON of the AttentionSpec",
        "spec_hash hash AttentionSpec.hash",
        "family_hash hash AttentionSpec.family_hash: what decides which kernels fit, shapes left out",
        "spec_name text the model or test that asks",
        "op text attention",
        "direction text forward",
        "phase text prefill or decode",
        "num_heads count query heads",
        "num_kv_heads count key and value heads",
        "head_dim count of Q and K",
        "head_dim_v count of V and O",
        "head_layout text mha, gqa, mqa or mla",
        "batch count sequences",
        "seqlen_q count query length",
        "seqlen_k count key length",
        "dtype text of Q, K, V and O: fp32, fp16 or bf16",
        "dtype_out text of O, where it differs",
        "accumulate_dtype text of the sums",
        "layout text bhsd or bshd",
        "masks text mask rules with parameters, joined by ' & '; empty: every key is visible",
        "scores text score rules with parameters, joined by ' | '",
        "causal bool whether a causal mask rule is among them",
        "softmax_scale float the scale, default resolved",
        "masked_row_rule text what a row with nothing to see gives",
        "shape_bucket text bucket of batch and lengths, b1_q1024_k1024",
        "verified_shapes shapes envelope: the (batch, seqlen_q, seqlen_k) that were verified",
    ),
    *_columns(
        "kernel",
        "target text generator.targets name: cpu, sm_75, sm_80, sm_90a",
        "language text c++ or cuda",
        "sketch_hash hash artifact: TL sketch as the author gave it",
        "tl_hash hash artifact: TL code as the author gave it, holes open",
        "program_hash hash artifact: printed canonical program, holes filled",
        "source_hash hash artifact: translated source",
        "binary_hash hash artifact: shared object or cubin",
        "log_hash hash artifact: compiler and verifier log",
        "transcript_hash hash artifact: conversation with the author",
        "log_truncated bool whether the log artifact lacks a part",
        "launch json generator.translate.records.Launch",
        "schedule json the translator's decisions",
        "entry_point text symbol in the binary",
        "tuning json values of the holes",
        "translator_version text version of the translator",
        "harness_version text version of verifier and benchmark",
        "compiler text name and version",
        "compile_flags texts as given to the compiler",
        "cuda_toolkit text version whose headers and compiler built it",
        "ptx_isa text PTX ISA version, where PTX is kept",
        "isa texts instruction sets that the binary needs, as the loader checks them",
        "resources json all that the compiler and driver report",
        "registers count a thread",
        "spill_bytes count a thread",
        "shared_bytes count a block",
        "local_bytes count a thread",
        "binary_bytes count size of the binary",
    ),
    *_columns(
        "lineage",
        "author text rules, or the model's name",
        "author_mode text rules, llm or llm-direct",
        "prompt_hash hash artifact: the prompt",
        "parent_row_id text the row whose feedback led to this one, or that this one verifies again",
        "generation count distance from the first proposal",
        "proposal count number of the try among its siblings",
        "tokens_in count prompt tokens",
        "tokens_out count answer tokens",
        "cost_usd amount what the provider charges",
    ),
    *_columns(
        "device",
        "device_key hash what the row may be used for: hash of device",
        "device json verifier.environment.DeviceKey, every field",
        "verified_on text device and architecture of the verdict, where the source was compiled for another than the target's",
        "device_class text class in the plan: cpu, t4, rtx8000, a100, h100, h200",
        "device_name text exact product or CPU model name",
        "compute_capability text 9.0; null on a CPU",
        "sm_count count multiprocessors",
        "memory_bytes count device memory",
        "power_limit_w amount power limit",
        "mig text MIG state",
        "cores count CPU cores given",
        "uuid_hash text hash of the device's UUID",
        "host_hash text hash of the host's name",
        "ray_node_id text Ray's id of the node",
        "driver text full driver version",
        "cuda_runtime text runtime version",
        "torch text version",
        "python text version",
        "os text system and kernel",
        "farm_version text version of this program",
        "environment json everything else that is known",
    ),
    *_columns(
        "verification",
        "rule_id text tolerance rule",
        "seeds_count count secret seeds",
        "distributions texts names of the inputs",
        "reference_dtype text fp64",
        "cases cases errors, trusted errors and limits of each input",
        "max_abs amount largest absolute error of all inputs",
        "max_rel amount largest relative error",
        "rms_error amount largest rms error of all inputs",
        "trusted_rms amount plain implementation's rms error on that input",
        "trusted_max_abs amount plain implementation's largest error",
        "limit_rms amount limit on that input",
        "limit_max_abs amount limit on that input",
        "mismatched_share amount share of elements beyond the limit",
        "inputs_unchanged bool input hashes equal before and after",
        "poison_clean bool no poison left in outputs, guard bands whole",
        "timed_iteration_checked bool an output of the timed loop was verified",
        "deterministic bool two runs were bitwise equal",
        "sanitizer text which one, and what it said",
        "witness_check text the check that failed",
        "witness_input text the input it failed on",
        "witness_expected text expected there",
        "witness_found text found there",
        "repro_command text command that repeats the attempt",
    ),
    *_columns(
        "timing",
        "timing_method text clock and cache rule",
        "warmups count calls before the first sample",
        "num_samples count length of samples_s",
        "samples_s floats seconds a call, in the order taken",
        "p20_s amount seconds",
        "p50_s amount seconds",
        "p80_s amount seconds",
        "mean_s amount seconds",
        "ci_low_s amount lower end of the median's confidence interval, seconds",
        "ci_high_s amount upper end, seconds",
        "num_threads count CPU threads",
        "clock_lock text whether clocks were locked, or why not",
        "sm_clock_before_mhz amount before the samples",
        "sm_clock_after_mhz amount after them",
        "temperature_c float after the samples",
        "throttle_flags texts reasons the driver gave",
        "l2_state text cold or warm",
        "launches_per_call count kernels a call",
        "wall_vs_device amount wall time over device time",
    ),
    *_columns(
        "comparison",
        "baseline_name text best rival",
        "baseline_version text its version",
        "baseline_p50_s amount its median, seconds",
        "ratio_p50 amount rival's time over ours; above 1 we win",
        "ratio_low amount lower end of its interval",
        "ratio_high amount upper end of its interval",
        "interleaved bool whether calls alternated",
        "rivals json every rival's quantiles in seconds, and why others could not take part",
        "peak_fraction amount of the device's peak rate",
        "floor_s amount seconds; no right result can be faster",
        "plausible bool whether the time is above the floor",
    ),
    *_columns(
        "budget",
        "compile_s amount seconds of the compiler; 0 where the binary was in the cache",
        "verify_s amount seconds",
        "measure_s amount seconds of the measurement that counts: child, rivals, rounds, checks",
        "again_s amount seconds of measurements that were not believed and made again, and of waiting before that",
        "author_s amount seconds",
        "queue_s amount seconds waiting; no limit counts them",
        "gpu_s amount seconds that the attempt had a GPU: verdict, sanitizer, measuring (again), profiler",
        "wall_s amount seconds of the attempt, waiting left out",
        "stop_reason text what stopped the sweep, where something did",
    ),
)
