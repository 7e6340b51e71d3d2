"""The supervisor's side of a child that is timed on a GPU: buffers, fresh values, batches, answers checked. No statistics.

The device's events give the times; this process compares their sum with its own clock over many calls. A checked round has its
inputs copied out before the timed call and its outputs after it, bands included; the kernel cannot tell it from any other.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from generator.binding import Binding, bind
from generator.canonical import to_plain
from generator.spec import AttentionSpec
from generator.translate.records import Launch
from verifier.arena import Arena
from verifier.checks import Expected, Outputs, check_outputs
from verifier.cuda_sandbox import CudaSandbox
from verifier.flex_rival import COMPILER_MODULES, compiler_environment
from verifier.input_layout import call_view, slots_of
from verifier.inputs import Case, Layout, fresh_seed
from verifier.launch import check_call
from verifier.oracle import Pairs, heads_of
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
#: Key heads of sequences that are compared with float64 where a rival answers for the whole, and scores that this may cost.
CHECKED_PAIRS, CHECKED_SCORES = 4, 1 << 19
#: With more elements than this it is as many without a rival, too.
LARGE_ELEMENTS = 1 << 24
#: How far, in relative norm of a head, our answer may lie from a rival's: both round to 8 or 11 bits.
FAR_FROM_RIVAL = {"bf16": 0.05, "fp16": 0.02, "fp32": 0.02}
RIVALS_S = 240.0
#: Looked at by this process's clock: that many seconds of calls back to back.
STEADY_S = 0.05


class CudaTimingSandbox(CudaSandbox):
    """A sandbox whose child holds torch and the rivals as well. compiles: a rival is compiled in the child."""

    program = "verifier.cuda_timing_child"

    def __init__(self, cubin: bytes, launch: Launch, spec: AttentionSpec, device: str, compiles: bool = False) -> None:
        super().__init__(cubin, launch, device, SandboxLimits(start_s=120, run_s=60, cpu_s=3600))
        self.spec, self.launch = spec, launch
        self.imports = COMPILER_MODULES if compiles else ()

    @property
    def environment(self) -> Mapping[str, str]:  # type: ignore[override]
        """Whether there is a device torch asks NVML: the driver may not be started in the process that forks children."""
        more = {"CUDA_MODULE_LOADING": "LAZY", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        return {**super().environment, **compiler_environment(), **more}

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
        layout: Layout = "bshd" if self.spec.layout == "bshd" else "plain"
        case = Case("timed call", self.spec, layout=layout, seed=self._random.randrange(1 << 40), place="start")
        self._binding: Binding = bind(sandbox.launch, self.spec)
        self.captured = workload_captured(case)
        self._slots = aligned(slots_of(case, self._binding))
        self._arena = Arena(sandbox.memory, self._slots)
        self.sets = max(1, min(MAX_SETS, MAX_SETS_BYTES // max(1, self._arena.size)))
        self.count, self.graphs = 1, False
        self._rival = ""  # whose answers ours are compared with
        self._prepare()

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
            pairs = self._some_pairs()
            expected = self._expected(pairs).for_a_rival
            for name in unchecked:
                self._sandbox.must({"do": "answer", "who": name, "set": 0}, 60)
                finding = check_outputs(replace(self._outputs(pairs), lse=None, unwritten={}), expected)
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
        pairs = self._some_pairs() if self._rival or self._is_large else None
        finding = check_outputs(self._outputs(pairs), self._expected(pairs))
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
    def _is_large(self) -> bool:
        spec = self.spec
        return spec.batch * spec.num_kv_heads * spec.seqlen_k * (spec.head_dim + spec.head_dim_v) > LARGE_ELEMENTS

    def _some_pairs(self) -> Pairs:
        """(sequence, key head) that are compared with float64, drawn anew each time."""
        every = [(b, h) for b in range(self.spec.batch) for h in range(self.spec.num_kv_heads)]
        return sorted(self._random.sample(every, min(CHECKED_PAIRS, len(every))))

    def _outputs(self, pairs: Pairs | None) -> Outputs:
        views, spec = self._arena.views, self.spec
        named = {t.role: heads_of(views[t.name], spec, pairs) for t in self._binding.tensors if t.written}
        return Outputs(named["o"], named.get("lse"), {})

    def _expected(self, pairs: Pairs | None) -> Expected:
        """From what lies in the arena: the values that the candidate was given."""
        spec, views = self.spec, self._arena.views
        values = {t.role: views[t.name] for t in self._binding.tensors if t.role in ("q", "k", "v")}
        num_pairs, scores = (spec.batch * spec.num_kv_heads, CHECK_ELEMENTS) if pairs is None else (len(pairs), CHECKED_SCORES)
        rows = max(4, scores // max(1, num_pairs * spec.group * spec.seqlen_k))
        chosen = Case("timed call", spec, rows=rows, seed=self._random.randrange(1 << 40)).row_indices()
        name = "timed call" if pairs is None else f"timed call, at (sequence, key head) {', '.join(map(str, pairs))}"
        with one_thread():
            return expectation(name, spec, values | self.captured, chosen, pairs)
