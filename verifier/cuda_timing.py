"""The supervisor's side of a child that is timed on a GPU: buffers, fresh values, batches, answers checked. No statistics.

The device's events give the times; this process compares their sum with its own clock over many calls. A checked round has its
inputs copied out before the timed call and its outputs after it, bands included; the kernel cannot tell it from any other.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from generator.binding import Binding, bind, rule_tensors
from generator.canonical import to_plain
from generator.spec import AttentionSpec
from generator.translate.records import Launch
from verifier.arena import Arena
from verifier.checks import Expected, Outputs, check_outputs
from verifier.cuda_sandbox import CudaSandbox
from verifier.flex_rival import compiler_environment
from verifier.inputs import Case, call_view, fresh_seed, slots_of
from verifier.launch import check_call
from verifier.records import Witness
from verifier.sandbox import CallTensor, Ran, SandboxLimits
from verifier.timing import CHECK_ELEMENTS, Refused, aligned, came_back, workload_captured
from verifier.trial import expectation, one_thread

MAX_SETS = 8
MAX_SETS_BYTES = 4 << 30
#: A call below this is timed as a graph of several; a batch should then take about BATCH_S.
SHORT_S = 200e-6
BATCH_S = 1e-3
MAX_CALLS = 32
#: With more elements than this, one key head of one sequence is compared with float64, and the whole with a rival.
LARGE_ELEMENTS = 1 << 24
#: How far, in relative norm of a head, our answer may lie from a rival's: both round to 8 or 11 bits.
FAR_FROM_RIVAL = {"bf16": 0.05, "fp16": 0.02, "fp32": 0.02}
RIVALS_S = 240.0
#: Looked at by this process's clock: that many seconds of calls back to back.
STEADY_S = 0.05


class CudaTimingSandbox(CudaSandbox):
    """A sandbox whose child holds torch and the rivals as well."""

    program = "verifier.cuda_timing_child"

    def __init__(self, cubin: bytes, launch: Launch, spec: AttentionSpec, device: str) -> None:
        super().__init__(cubin, launch, device, SandboxLimits(start_s=120, run_s=60, cpu_s=3600))
        self.spec, self.launch = spec, launch

    @property
    def environment(self) -> Mapping[str, str]:  # type: ignore[override]
        return {**super().environment, **compiler_environment(), "CUDA_MODULE_LOADING": "LAZY"}

    def _more_facts(self) -> dict[str, Any]:
        return {"spec": to_plain(self.spec)}

    def must(self, question: dict[str, Any], limit_s: float) -> Ran:
        """The answer, or Refused for a child that died, hangs, or was stopped by the device."""
        return came_back(self.ask(question, limit_s))


@dataclass(frozen=True, slots=True)
class Rates:
    """Of a device, as torch has them: operations of a matrix product and bytes of a copy in a second. empty_s: what events take
    around nothing.
    """

    matmul_flops: float
    copy_bytes_per_s: float
    empty_s: float


@dataclass(slots=True)
class Known:
    """What earlier children of this process found for a spec on a device, so that it is not found again for each candidate.

    out: rivals that take no part, with the reason. right: those whose answer was compared with float64.
    """

    out: dict[str, str] = field(default_factory=dict)
    right: set[str] = field(default_factory=set)
    rates: Rates | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """What the rivals say before the candidate is there: seconds of a call of those that take part, why others do not."""

    seconds: dict[str, float]
    unsupported: dict[str, str]
    rates: Rates


class CudaWorkload:
    """Sets of buffers for one spec in a timed child."""

    def __init__(self, sandbox: CudaTimingSandbox, seed: int | None = None) -> None:
        self.spec, self._sandbox = sandbox.spec, sandbox
        self._random = random.Random(fresh_seed() if seed is None else seed)
        layout = "bshd" if self.spec.layout == "bshd" else "plain"
        case = Case("timed call", self.spec, layout=layout, seed=self._random.randrange(1 << 40), place="start")
        self._binding: Binding = bind(sandbox.launch, self.spec)
        self.captured = workload_captured(case)
        self._slots = aligned(slots_of(case, self._binding))
        self._arena = Arena(sandbox.memory, self._slots)
        self.sets = max(1, min(MAX_SETS, MAX_SETS_BYTES // max(1, self._arena.size)))
        self.count, self.graphs = 1, False
        self._rival = ""  # whose answers ours are compared with
        self._prepare()

    # ------------------------------------------------------------------------------------------------------ preparing

    def _prepare(self) -> None:
        self._arena.poison()
        for t in self._binding.captured:
            self._arena.views[t.name].copy_(self.captured[t.name])
        tensors = [self._place(s.name) for s in self._slots]
        self._sandbox.must({"do": "prepare", "size": self._arena.size, "tensors": tensors, "sets": self.sets}, 120)
        self.fresh_values()

    def _place(self, name: str) -> dict[str, Any]:
        slot = next(s for s in self._slots if s.name == name)
        first, last = self._arena.extent_of(name)
        return {
            "name": name, "role": self._roles[name], "dtype": slot.dtype, "shape": slot.shape, "strides": slot.strides,
            "first": first, "last": last, "start": self._arena.address_of(name), "written": slot.written,
        }  # fmt: skip

    @property
    def _roles(self) -> dict[str, str]:
        return {t.name: t.name if t.role == "captured" else t.role for t in self._binding.tensors}

    def start_rivals(self, names: tuple[str, ...], known: Known) -> Started:
        """Each rival's answer is checked once for a spec; one that computes something else is no rival."""
        wanted = [name for name in names if name not in known.out]
        facts = self._sandbox.must({"do": "rivals", "names": wanted, "rates": known.rates is None}, RIVALS_S).facts
        seconds, unsupported = dict(facts["seconds"]), {n: known.out[n] for n in names if n in known.out} | facts["unsupported"]
        if unchecked := [name for name in seconds if name not in known.right]:
            self.fresh_values(keep=0)
            expected = _loose(self._expected())
            for name in unchecked:
                self._sandbox.must({"do": "answer", "who": name, "set": 0}, 60)
                finding = check_outputs(replace(self._outputs(), lse=None, unwritten={}), expected)
                if finding is not None:
                    del seconds[name]
                    unsupported[name] = f"gives another answer: {finding.witness.message}"
        known.right |= seconds.keys()
        known.rates = known.rates or Rates(*(float(facts[f.name]) for f in fields(Rates)))
        self._rival = min(seconds, key=lambda name: seconds[name], default="")
        return Started(seconds, unsupported, known.rates)

    def load_candidate(self) -> dict[str, Any]:
        """From here on the candidate is in the child. Gives seconds of a call, and the function's attributes."""
        self._sandbox.must({"do": "stop"}, 60)
        self._sandbox.hear_start()
        tensors = [
            CallTensor(s.name, *call_view(s, t.view, self.spec)) for s, t in zip(self._slots, self._binding.tensors, strict=True)
        ]
        scalars = [s.value for s in self._binding.scalars]
        check_call(self._sandbox.launch, [t.strides for t in tensors], scalars)
        roles = [self._roles[t.name] for t in tensors]
        question = {"do": "candidate", "roles": roles, **self._sandbox.numbers(tensors, scalars)}
        return self._sandbox.must(question, 60).facts

    def choose_batch(self, seconds: float) -> dict[str, str]:
        """Graphs of several calls where one takes too little time. Gives those that could not be captured, with the reason."""
        self.graphs = seconds < SHORT_S
        self.count = max(1, min(MAX_CALLS, round(BATCH_S / max(seconds, 1e-6)))) if self.graphs else 1
        facts = self._sandbox.must({"do": "batch", "count": self.count, "graphs": self.graphs}, 120).facts
        return dict(facts["without_graph"])

    # --------------------------------------------------------------------------------------------------------- timing

    def fresh_values(self, keep: int | None = None) -> None:
        """New numbers in every set's q, k and v. keep: the set that is copied into the arena, to be checked against."""
        self._sandbox.must({"do": "values", "seed": self._random.randrange(1 << 48), "keep": keep}, 60)
        if keep is not None:
            self._arena.seal()

    def time_batch(self, who: str, first: int = 0) -> float:
        """Seconds of one call, by device events. Raises Refused when one of ours left something unwritten."""
        facts = self._sandbox.must({"do": "time", "who": who, "first": first}, self._sandbox.limits.run_s).facts
        if facts.get("unwritten"):
            message = f"{facts['unwritten']} elements were not written by a timed call"
            raise Refused("unwritten_output", Witness("written", message, "timed call"))
        return float(facts["device_s"])

    def steady(self, who: str, seconds: float) -> tuple[float, float]:
        """(device seconds of one call on warm caches, this process's clock over the device's) of calls back to back."""
        count = max(3, min(2000, round(STEADY_S / max(seconds, 1e-6))))
        ran = self._sandbox.must({"do": "steady", "who": who, "count": count}, self._sandbox.limits.run_s)
        device_s = float(ran.facts["device_s"])
        return device_s / ran.facts["calls"], ran.wall_s / max(device_s, 1e-9)

    # -------------------------------------------------------------------------------------------------------- answers

    def checked_set(self) -> int:
        """A set that the next batch of ours goes through."""
        return self._random.randrange(min(self.count, self.sets)) if self.graphs else self._random.randrange(self.sets)

    def check_answer(self, index: int) -> None:
        """What a timed call on the kept set left there: bands, inputs, outputs. Raises Refused."""
        self._sandbox.must({"do": "download", "set": index}, 60)
        if (over := self._arena.overrun()) is not None:
            message = f"{over.num_bytes} bytes outside the elements of {over.tensor} were written, the first {over.where}"
            raise Refused("out_of_bounds", Witness("guard bands", message, "timed call"))
        if (changed := self._arena.mutated()) is not None:
            message = f"{changed.num_bytes} bytes of the input {changed.tensor} were changed, the first {changed.where}"
            raise Refused("mutates_inputs", Witness("inputs", message, "timed call"))
        finding = check_outputs(self._outputs(), self._expected())
        if finding is not None:
            raise Refused(finding.reason, finding.witness)
        if self._rival:
            self._compare(index)

    def _compare(self, index: int) -> None:
        """All heads, loosely: what lies far from a rival's answer was not computed."""
        found = float(self._sandbox.must({"do": "compare", "who": self._rival, "set": index}, 60).facts["difference"])
        limit = FAR_FROM_RIVAL[self.spec.dtype]
        if not found <= limit:
            message = f"a head lies {found:.3g} (relative norm) from the answer of {self._rival}, over {limit:g}"
            raise Refused("wrong_value", Witness("rival", message, "timed call"))

    @property
    def _compared(self) -> AttentionSpec:
        """The part of the call that is compared with float64."""
        spec = self.spec
        elements = spec.batch * spec.num_kv_heads * spec.seqlen_k * (spec.head_dim + spec.head_dim_v)
        if elements <= LARGE_ELEMENTS:
            return spec
        part = spec.with_shape(batch=1, num_heads=spec.group, num_kv_heads=1)
        return replace(part, softmax_scale=spec.scale)

    def _outputs(self) -> Outputs:
        part, views = self._compared, self._arena.views
        named = {t.role: views[t.name][: part.batch, : part.num_heads] for t in self._binding.tensors if t.written}
        return Outputs(named["o"], named.get("lse"), {})

    def _expected(self) -> Expected:
        """From what lies in the arena: the values that the candidate was given."""
        part = self._compared
        heads = {"q": part.num_heads, "k": part.num_kv_heads, "v": part.num_kv_heads}
        views = self._arena.views
        values = {t.role: views[t.name][: part.batch, : heads[t.role]].clone() for t in self._binding.tensors if t.role in heads}
        rows = max(4, CHECK_ELEMENTS // max(1, part.batch * part.num_heads * part.seqlen_k))
        chosen = Case("timed call", part, rows=rows, seed=self._random.randrange(1 << 40)).row_indices()
        with one_thread():
            return expectation("timed call", part, values | part_of_captured(self.spec, self.captured, part), chosen)


def part_of_captured(spec: AttentionSpec, captured: Mapping[str, Tensor], part: AttentionSpec) -> dict[str, Tensor]:
    """Captured tensors of a call cut to its first sequences and heads."""
    out = {}
    for name, rule in rule_tensors(spec).items():
        batch, heads = slice(part.batch), slice(part.num_heads)
        cuts = {"b": batch, "Batch": batch, "h": heads, "Heads": heads, "KvHeads": slice(part.num_kv_heads)}
        out[name] = captured[name][tuple(cuts.get(axis, slice(None)) for axis in rule.offset + rule.shape)]
    return out


def _loose(expected: Expected) -> Expected:
    """A rival's error may be larger than a candidate's: it is not the one judged."""
    limits = expected.limits
    return replace(expected, limits=type(limits)(*(16 * getattr(limits, f) for f in limits.__slots__)))
