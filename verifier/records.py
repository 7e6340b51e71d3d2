"""What the verifier says: binaries, verdicts and measurements, and the closed list of reasons. No judging happens here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

#: Every way an attempt can end -> whether trying again may end otherwise ("transient") or not ("final").
REASONS: dict[str, Literal["final", "transient"]] = {
    "ok": "final",
    "tl_rejected": "final",
    "source_rejected": "final",
    "translate_failed": "final",
    "unsupported_dtype": "final",
    "does_not_fit": "final",
    "compile_error": "final",
    "compile_timeout": "transient",
    "compile_oom": "transient",
    "compiled_unverified": "final",
    "crash": "final",
    "timeout": "final",
    "mutates_inputs": "final",
    "unwritten_output": "final",
    "out_of_bounds": "final",
    "wrong_value": "final",
    "nondeterministic": "final",
    "implausible_time": "final",
    "throttled": "transient",
    "author_failed": "transient",
    "lost_node": "transient",
    "missing_device": "transient",
    "budget_stopped": "transient",
    "not_run": "transient",
}


@dataclass(frozen=True, slots=True)
class Binary:
    """A shared object or cubin, with where its bytes lie.

    hash: SHA-256 of the bytes. compile_s: what its compiler took; cached: that was spared now. resources: registers, spill_bytes,
    shared_bytes, local_bytes, instructions, as far as known.
    """

    path: str
    hash: str
    source_hash: str
    target: str
    compiler: str
    flags: tuple[str, ...]
    compile_s: float
    resources: dict[str, Any] = field(default_factory=dict)
    log: str = ""
    cached: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class CompileFailed:
    reason: Literal["compile_error", "compile_timeout", "compile_oom"]
    log: str
    compile_s: float


@dataclass(frozen=True, slots=True)
class Witness:
    """The smallest evidence of a failure: which input, which check, what was expected and found."""

    check: str
    message: str
    input_name: str = ""
    expected: str = ""
    found: str = ""


@dataclass(frozen=True, slots=True)
class CaseError:
    """One input of the suite: errors against fp64, of the candidate and of the trusted plain implementation.

    row: the largest error of a row by the row's own scale (`verifier.tolerance.Errors`); lse_max: 0 where there is no LSE.
    """

    input_name: str
    rms: float
    max_abs: float
    trusted_rms: float
    trusted_max_abs: float
    limit_rms: float
    limit_max_abs: float
    row: float = 0.0
    limit_row: float = 0.0
    lse_max: float = 0.0
    limit_lse_max: float = 0.0


@dataclass(frozen=True, slots=True)
class Passed:
    """Every check held on every input. `shapes` are (batch, seqlen_q, seqlen_k) that were verified.

    seed: what the inputs were made from; secret while the candidate ran. fences: which fences of the sandbox were up.
    """

    rule_id: str
    cases: tuple[CaseError, ...]
    shapes: tuple[tuple[int, int, int], ...]
    seeds_count: int
    verify_s: float
    seed: int = 0
    fences: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """A candidate that was refused, or a measurement that says nothing: a reason of REASONS with its evidence.

    verify_s: seconds that it took to find out. again_s: of a measurement, as in `Measurement.environment`.
    """

    reason: str
    witness: Witness
    verify_s: float = 0.0
    again_s: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        assert self.reason in REASONS and self.reason != "ok", self.reason


Verdict = Passed | Failed


#: What a measurement may be asked to time beside a candidate: torch's own function in all its ways (with the masks as a tensor
#: where it has none of its own), the same in plain operations, and FlexAttention compiled.
RIVAL_GROUPS = ("torch-sdpa", "torch-eager", "flex-attention")


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Why a rival does not take part."""

    why: str


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call of one contestant: samples in the order taken."""

    name: str
    samples_s: tuple[float, ...]
    p20_s: float
    p50_s: float
    p80_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """A candidate timed beside its rivals in one run, calls alternating.

    ratio_p50: rival's time over ours, of the best rival; above 1 we win. floor_s: below this the device's physics is broken.
    environment: `again_s` of it are seconds of measurements that were not believed and made again, and of waiting before that.
    """

    method: str
    ours: Timing
    rivals: tuple[Timing, ...]
    unsupported: dict[str, str]  # rival -> why it could not take part
    best_rival: str
    ratio_p50: float
    ratio_low: float
    ratio_high: float
    floor_s: float
    wall_vs_device: float
    num_threads: int
    environment: dict[str, Any]
