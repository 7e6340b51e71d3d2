"""The supervisor's side of a timed child: buffers, fresh values, batches on this process's clock, answers checked. No
statistics.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from generator.binding import Binding, BoundTensor, bind, captured_shape, rule_tensors
from generator.canonical import to_plain
from generator.scores import alibi_slopes
from generator.spec import AttentionSpec
from generator.translate.records import Launch
from verifier.arena import Arena, Slot
from verifier.checks import Expected, Outputs, check_outputs
from verifier.dtypes import torch_dtype
from verifier.flex_rival import COMPILER_MODULES, compiler_environment
from verifier.input_layout import call_view, slots_of
from verifier.input_values import captured_values
from verifier.inputs import Case, Layout, fresh_seed
from verifier.launch import check_call
from verifier.records import Witness
from verifier.sandbox import CallTensor, Died, Outcome, Ran, Sandbox, SandboxLimits, TimedOut, kept_threads
from verifier.trial import expectation, one_thread

OURS = "ours"
#: A batch should take about this long, so that the handshake (tens of microseconds, subtracted) is noise.
BATCH_S = 2e-3
MAX_SETS = 16
MAX_SET_BYTES = 256 << 20
#: Scores in float64 that one check of an answer may cost.
CHECK_ELEMENTS = 1 << 21
#: Relative distance of a row from a rival's, over which one of the two is wrong.
FAR_FROM_RIVAL = {"fp32": 0.002, "fp16": 0.05, "bf16": 0.2}
#: Seconds that the rivals may take to be made, compiled where they have to be.
RIVALS_S = 180
#: Rate of torch's matrix product by dtype and threads, the best that this process saw: other work on the machine only lowers it.
_MATMUL_FLOPS: dict[tuple[str, int], float] = {}
#: Calls of a candidate after which its last answer is checked.
MANY_CALLS = 40


class Refused(Exception):
    """The candidate may not be timed any further: a reason of the closed list, with its witness."""

    def __init__(self, reason: str, witness: Witness) -> None:
        super().__init__(f"{reason}: {witness.message}")
        self.reason, self.witness = reason, witness


@dataclass(frozen=True, slots=True)
class Batch:
    """call_s: seconds of one call, on this process's clock, the handshake subtracted. child_s: the same on the child's clock."""

    call_s: float
    child_s: float


class TimingSandbox(Sandbox):
    """A sandbox whose child holds torch and the rivals; allocator and threads are as in production.

    compiles: a rival is compiled in the child.
    """

    program = "verifier.timing_child"

    def __init__(self, binary: bytes, launch: Launch, spec: AttentionSpec, num_threads: int, compiles: bool = False) -> None:
        super().__init__(binary, launch, num_threads, SandboxLimits(start_s=120, run_s=60, cpu_s=1800, memory_bytes=24 << 30))
        self.spec, self.launch, self.num_threads = spec, launch, num_threads
        self.imports = COMPILER_MODULES if compiles else ()

    @property
    def environment(self) -> Mapping[str, str]:  # type: ignore[override]
        return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", **compiler_environment()}

    def _more_facts(self) -> dict[str, Any]:
        return {"spec": to_plain(self.spec)}

    def must(self, question: dict[str, Any], limit_s: float) -> Ran:
        """The answer, or Refused for a child that died or hangs."""
        return came_back(self.ask(question, limit_s))


def came_back(outcome: Outcome) -> Ran:
    match outcome:
        case Ran(result="done"):
            return outcome
        case Ran(result=result):
            raise Refused("crash", Witness("return code", result, "timed call"))
        case TimedOut(limit_s=limit_s):
            raise Refused("timeout", Witness("time limit", f"a batch took more than {limit_s:g} s and was killed", "timed call"))
        case Died():
            raise Refused("crash", Witness("crash", f"the kernel {outcome}", "timed call"))


class Workload:
    """Sets of buffers for one spec in a timed child."""

    def __init__(self, sandbox: TimingSandbox, seed: int | None = None) -> None:
        self.spec, self._sandbox = sandbox.spec, sandbox
        self._random = random.Random(fresh_seed() if seed is None else seed)
        layout: Layout = "bshd" if self.spec.layout == "bshd" else "plain"
        self._case = Case("timed call", self.spec, layout=layout, seed=self._random.randrange(1 << 40), place="start")
        self._binding: Binding = bind(sandbox.launch, self.spec)
        self.captured = workload_captured(self._case)
        slots = aligned(slots_of(self._case, self._binding))
        self.sets = max(1, min(MAX_SETS, MAX_SET_BYTES // max(1, sum(s.storage * s.element_size for s in slots))))
        names = [{s.name: f"{s.name}.{i}" for s in slots} for i in range(self.sets)]
        self._names = names
        self._arena = Arena(sandbox.memory, [replace(s, name=n[s.name]) for n in names for s in slots])
        self._slots = slots
        self.batch, self.handshake_s = 1, 0.0
        self._timed: list[Batch] = []
        self._last = 0  # a set that the last batch of ours went through
        self._pool = self._random_pool()
        self._given: dict[str, int] = {}  # where in the pool the values of a buffer were copied from
        self._lay_out()

    def _random_pool(self) -> Tensor:
        """Normal numbers to copy stretches of: as fresh as new ones for whoever remembers, and as cheap as a copy."""
        largest = max(math.prod(t.shape) for t in self._binding.tensors if t.role in ("q", "k", "v"))
        generator = torch.Generator().manual_seed(self._random.randrange(1 << 40))
        return torch.randn(largest + (1 << 16), generator=generator).to(torch_dtype(self.spec))

    def _lay_out(self) -> None:
        self._arena.poison()
        for names in self._names:
            for t in self._binding.captured:
                self._arena.views[names[t.name]].copy_(self.captured[t.name])
        self.fresh_values(self.sets)
        self._sandbox.must({"do": "map", **self._segments(), "guards": True, "writable_inputs": True}, 60)
        self._sandbox.must({"do": "sets", "sets": [self._set_places(names) for names in self._names]}, 60)

    def _segments(self) -> dict[str, Any]:
        return {"size": self._arena.size, "segments": [[s.offset, s.length, s.kind, s.address] for s in self._arena.segments]}

    def _set_places(self, names: Mapping[str, str]) -> dict[str, Any]:
        """What the child needs to see the buffers as torch tensors: by role, captured ones by name."""
        roles = {t.name: t.name if t.role == "captured" else t.role for t in self._binding.tensors}
        return {
            roles[s.name]: {
                "address": self._arena.address_of(names[s.name]), "dtype": s.dtype, "shape": s.shape, "strides": s.strides,
            }
            for s in self._slots
        }  # fmt: skip

    def start_rivals(
        self, groups: Sequence[str] | None = None, near: float = float("inf")
    ) -> tuple[list[str], dict[str, str], float]:
        """(names that take part, why the others do not, matrix product rate); each rival's answer is checked once.

        One that a first look finds more than twice `near` times as slow as the fastest takes no part.
        """
        facts = self._sandbox.must({"do": "rivals", "groups": groups}, RIVALS_S).facts
        names, unsupported = list(facts["rivals"]), dict(facts["unsupported"])
        # The fastest: what is taken off a batch may be too little, never too much, whatever else the machine did meanwhile.
        self.handshake_s = min(self._go(OURS if not names else names[0], 0, 0).wall_s for _ in range(21))
        first_look = {name: self._first_look(name) for name in names}
        fastest = min(first_look.values(), default=BATCH_S)
        expected = self._expected(0)
        for name in tuple(names):
            if first_look[name] > 2 * near * fastest:
                problem: str | None = f"{first_look[name] / fastest:.1f} times as slow as the fastest rival at first look"
            else:
                self._sandbox.must({"do": "answer", "who": name, "set": 0}, 60)
                problem = self._rival_problem(expected)
            if problem is not None:
                names.remove(name)
                unsupported[name] = problem
        if names:
            self._choose_batch(fastest)
        key = (self.spec.dtype, self._sandbox.num_threads)
        rate = _MATMUL_FLOPS[key] = max(_MATMUL_FLOPS.get(key, 0.0), float(facts["matmul_flops"]))
        return names, unsupported, rate

    def _rival_problem(self, expected: Expected) -> str | None:
        """A rival that computes something else is no rival."""
        out = self._arena.views[self._names[0]["O"]]
        finding = check_outputs(Outputs(out, None, {}), expected.for_a_rival)
        return None if finding is None else f"gives another answer: {finding.witness.message}"

    def _first_look(self, who: str) -> float:
        """Seconds of one call; of a short one, the best of a few."""
        first = self.time_batch(who).call_s
        return first if first > 10 * BATCH_S else min(first, *(self.time_batch(who).call_s for _ in range(4)))

    def _choose_batch(self, call_s: float) -> None:
        self.batch = max(1, min(self.sets, round(BATCH_S / max(call_s, 1e-6))))

    def load_candidate(self, alone: bool = False) -> None:
        """From here on the candidate's code is in the child. alone: no rival told how long a call takes."""
        self._sandbox.must({"do": "stop"}, 60)
        self._sandbox.hear_start()
        tensors = [
            CallTensor(s.name, *call_view(s, t.view, self.spec)) for s, t in zip(self._slots, self._binding.tensors, strict=True)
        ]
        scalars = [s.value for s in self._binding.scalars]
        check_call(self._sandbox.launch, [t.strides for t in tensors], scalars)
        addresses = [[self._arena.address_of(names[t.name]) for t in tensors] for names in self._names]
        self._sandbox.must({"do": "candidate", "addresses": addresses, **self._sandbox.numbers(tensors, scalars)}, 60)
        self._arena.seal()
        if alone:
            self._choose_batch(self._first_look(OURS))
        self._timed.clear()

    @property
    def in_use(self) -> int:
        """Sets that calls go through: one more than a batch has, so that each is met again soon, and never in a fixed order."""
        return min(self.sets, self.batch + 1)

    def fresh_values(self, num_sets: int | None = None) -> None:
        """New numbers in the Q, K and V of the sets in use, or of so many."""
        for names in self._names[: num_sets or self.in_use]:
            for t in self._binding.tensors:
                if t.role in ("q", "k", "v"):
                    count = math.prod(t.shape)
                    self._given[names[t.name]] = first = self._random.randrange(len(self._pool) - count)
                    self._arena.views[names[t.name]].copy_(self._pool[first : first + count].view(t.shape))

    def time_batch(self, who: str) -> Batch:
        """One call on each of `batch` sets, which ones is random. Raises Refused when one of ours left something unwritten."""
        first = self._random.randrange(self.in_use - self.batch + 1)
        if who == OURS:
            for index in range(first, first + self.batch):
                self._poison_set(index)
        ran = self._go(who, first, self.batch)
        result = Batch(without_handshake(ran.wall_s, self.handshake_s) / self.batch, float(ran.facts["clock_s"]) / self.batch)
        if who == OURS:
            self._last = self._random.randrange(first, first + self.batch)
            for index in range(first, first + self.batch):
                self._all_written(index)
            self._timed.append(result)
        return result

    def wear_out(self, limit_s: float = 2.0) -> None:
        """More calls like the timed ones, until there were many (or time is up): a kernel may be right for its first few only."""
        deadline, at_least = time.monotonic() + limit_s, len(self._timed) + 4
        while len(self._timed) * self.batch < MANY_CALLS and (time.monotonic() < deadline or len(self._timed) < at_least):
            self.fresh_values()
            self.time_batch(OURS)

    def _go(self, who: str, first: int, count: int) -> Ran:
        self._sandbox.must({"do": "line up", "who": who, "first": first, "count": count}, 60)
        return self._sandbox.must({"do": "go"}, self._sandbox.limits.run_s)

    def wall_vs_device(self) -> float:
        """This process's clock over the child's own, over all timed calls; far from 1 says that the child's clock is not to
        be trusted.
        """
        child_s = sum(b.child_s for b in self._timed)
        return sum(b.call_s for b in self._timed) / child_s if child_s > 0 else float("inf")

    def _poison_set(self, index: int) -> None:
        for t in self._binding.tensors:
            if t.written:
                self._arena.poison_output(self._names[index][t.name])

    def _all_written(self, index: int) -> None:
        for t in self._binding.tensors:
            if t.written and bool((missing := self._arena.unwritten(self._names[index][t.name])).any()):
                share = f"{int(missing.sum())} of {missing.numel()} elements of {t.name} were not written by a timed call"
                raise Refused("unwritten_output", Witness("written", share, "timed call"))

    def check_answer(self) -> None:
        """A call of the last batch of ours, against the reference, with guard bands and inputs; then whether it gave its threads
        back. Raises Refused.
        """
        if (over := self._arena.overrun()) is not None:
            message = f"{over.num_bytes} bytes outside the elements of {over.tensor} were written, the first {over.where}"
            raise Refused("out_of_bounds", Witness("guard bands", message, "timed call"))
        self._inputs_unchanged(self._last)
        names = self._names[self._last]
        written = {t.role: self._arena.views[names[t.name]] for t in self._binding.tensors if t.written}
        finding = check_outputs(Outputs(written["o"], written.get("lse"), {}), self._expected(self._last))
        if finding is not None:
            raise Refused(finding.reason, finding.witness)
        working = came_back(self._sandbox.working_threads()).facts["threads"]
        if working < self._sandbox.num_threads:
            raise Refused("crash", Witness("threads", kept_threads(working, self._sandbox.num_threads), "timed call"))

    def compare_with(self, rival: str) -> None:
        """All rows and heads of the last answer, loosely: what lies far from a rival's was not computed. Raises Refused.

        A row for which the rival has no finite answer (it may see nothing) says nothing.
        """
        view = self._arena.views[next(self._names[self._last][t.name] for t in self._binding.tensors if t.role == "o")]
        ours = view.to(torch.float32, copy=True)
        self._sandbox.must({"do": "answer", "who": rival, "set": self._last}, 60)
        theirs = view.float()
        off = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)
        if bool((far := off > FAR_FROM_RIVAL[self.spec.dtype]).any()):
            batch, head, query = (int(i) for i in far.nonzero()[0])
            where = f"batch {batch}, head {head}, query {query}"
            message = f"{int(far.sum())} of {far.numel()} rows are far from the answer of {rival} ({where})"
            raise Refused("wrong_value", Witness("rival", message, "timed call"))

    def _values(self, index: int, tensor: BoundTensor) -> Tensor:
        first = self._given[self._names[index][tensor.name]]
        return self._pool[first : first + math.prod(tensor.shape)].view(tensor.shape)

    def _inputs_unchanged(self, index: int) -> None:
        for t in self._binding.tensors:
            if not t.written:
                given = self.captured[t.name] if t.role == "captured" else self._values(index, t)
                if not torch.equal(self._arena.views[self._names[index][t.name]], given):
                    message = f"the input {t.name} of a timed call was changed"
                    raise Refused("mutates_inputs", Witness("inputs", message, "timed call"))

    def _expected(self, index: int) -> Expected:
        """From the values that were given, not from what lies in the buffers now."""
        spec = self.spec
        values: dict[str, Tensor] = {t.role: self._values(index, t) for t in self._binding.tensors if t.role in ("q", "k", "v")}
        rows = max(4, CHECK_ELEMENTS // max(1, spec.batch * spec.num_heads * spec.seqlen_k))
        chosen = replace(self._case, rows=rows, seed=self._random.randrange(1 << 40)).row_indices()
        with one_thread():
            return expectation("timed call", spec, {**values, **self.captured}, chosen)


def without_handshake(wall_s: float, handshake_s: float) -> float:
    """Seconds of a batch without the way to the child and back; all of it where that was not slower than the fastest way."""
    return wall_s - handshake_s if wall_s > handshake_s else wall_s


def aligned(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Buffers as torch allocates them: at the start of pages."""
    return tuple(replace(slot, place="start") for slot in slots)


def workload_captured(case: Case) -> dict[str, Tensor]:
    """What the rules capture, as a typical call has it: lengths from half to full, eight documents, the published slopes."""
    spec, tensors = case.spec, captured_values(case)
    for name, captured in rule_tensors(spec).items():
        shape = captured_shape(captured, spec)
        match name:
            case "KvLen":
                tensors[name] = (torch.linspace(1, 0.5, spec.batch) * spec.seqlen_k).round().int().clamp(min=1)
            case "Slopes":
                tensors[name] = torch.tensor(alibi_slopes(spec.num_heads))
            case "DocStart" | "DocEnd":
                size = max(1, -(-spec.seqlen_k // 8))
                position = (torch.arange(spec.seqlen_q) + spec.seqlen_k - spec.seqlen_q).clamp(min=0)
                start = position // size * size
                edge = start if name == "DocStart" else (start + size).clamp(max=spec.seqlen_k)
                tensors[name] = edge.int().expand(shape).contiguous()
    return tensors
