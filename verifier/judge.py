"""The verdict on a binary: every check on every input, in a sandbox. Decides nothing about speed; see `verifier.benchmark`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from generator.binding import Binding, bind
from generator.canonical import digest_bytes
from generator.spec import AttentionSpec, SpecError
from generator.translate.records import Launch
from verifier.arena import Arena
from verifier.checks import Finding, Outputs, case_error, check_outputs, everything_written
from verifier.environment import cores_given
from verifier.input_layout import call_view, fill, slots_of
from verifier.launch import LaunchError, check_call
from verifier.physics import too_large
from verifier.records import Binary, CaseError, Failed, Passed, Verdict, Witness
from verifier.sandbox import CallTensor, CannotStart, Died, Outcome, Ran, Sandbox, SandboxLimits, TimedOut, kept_threads
from verifier.tolerance import RULE_ID
from verifier.trial import Trial, one_thread, trials_for

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Judging:
    """What one verdict needs throughout."""

    data: bytes
    launch: Launch
    num_threads: int
    limits: SandboxLimits
    device: str

    def sandbox(self) -> Sandbox:
        return sandbox_on(self.device, self.data, self.launch, self.num_threads, self.limits)


def sandbox_on(device: str, data: bytes, launch: Launch, num_threads: int, limits: SandboxLimits) -> Sandbox:
    """A child on a device for these bytes, not started yet. Raises NoDevice."""
    if device == "cpu":
        return Sandbox(data, launch, num_threads, limits)
    from verifier.cuda_sandbox import CudaSandbox

    return CudaSandbox(data, launch, device, limits)


def default_device(target: str) -> str:
    """Where a target's binaries run unless somebody says where: the processor, or the first GPU."""
    return "cpu" if target == "cpu" else "cuda:0"


def judging_threads() -> int:
    """At least two, since races need company; not all of a large machine for small inputs."""
    return max(2, min(8, cores_given()))


def judge(
    binary: Binary,
    launch: Launch,
    spec: AttentionSpec,
    *,
    num_threads: int | None = None,
    limits: SandboxLimits | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
    device: str | None = None,
) -> Verdict:
    """Run the binary on the spec's inputs and check everything. A wrong kernel is a value; what raises is not the kernel's fault.

    num_threads: of a CPU's kernel. device: "cuda:N" or a UUID for cubins; by default the first. seed: to repeat a verdict; by
    default secret and fresh. progress: told the name of each input before it runs.
    Raises SpecError (WeakSuite) for a spec that cannot be judged, BindingError for parameters that it does not know, LaunchError
    for bytes that are not those that were built, NoDevice for a device that cannot be used.
    """
    started = time.monotonic()
    where = device or default_device(binary.target)
    judging = Judging(read_binary(binary), launch, num_threads or judging_threads(), limits or SandboxLimits(), where)
    bind(launch, spec)
    if where == "cpu" and (why := too_large(spec, judging.num_threads, judging.limits.run_s)):
        raise SpecError(f"shape: {why}")
    trials = trials_for(spec, seed)
    errors: list[CaseError] = []
    try:
        with one_thread(), judging.sandbox() as sandbox:
            for trial in trials.trials:
                if progress is not None:
                    progress(trial.case.name)
                found = _judge_trial(judging, sandbox, trial)
                if isinstance(found, Finding):
                    return Failed(found.reason, found.witness, time.monotonic() - started)
                errors.append(found)
            fences = dict(sandbox.fences)
    except CannotStart as error:
        return Failed("crash", Witness("load", str(error)), time.monotonic() - started)
    shapes = tuple(dict.fromkeys(t.case.shape for t in trials.trials))
    return Passed(RULE_ID, tuple(errors), shapes, len(trials.trials), time.monotonic() - started, trials.seed, fences)


def read_binary(binary: Binary) -> bytes:
    """The bytes of a binary. Raises LaunchError when they are not those that were built."""
    data = Path(binary.path).read_bytes()
    if digest_bytes(data) != binary.hash:
        raise LaunchError(f"binary: {os.path.basename(binary.path)} is not what was built (SHA-256 differs); compile it again")
    return data


@dataclass(frozen=True, slots=True)
class Setting:
    """An input laid out in a sandbox's memory, ready to be run."""

    trial: Trial
    binding: Binding
    arena: Arena
    tensors: tuple[CallTensor, ...]
    scalars: tuple[int | float, ...]


def set_up(sandbox: Sandbox, launch: Launch, trial: Trial) -> Setting:
    """Everything poisoned, then the inputs written and sealed."""
    spec = trial.case.spec
    binding = bind(launch, spec)
    slots = slots_of(trial.case, binding)
    arena = sandbox.arena(slots)
    arena.poison()
    fill(arena.views, binding, trial.values)
    arena.seal()
    tensors = tuple(CallTensor(s.name, *call_view(s, t.view, spec)) for s, t in zip(slots, binding.tensors, strict=True))
    scalars = tuple(s.value for s in binding.scalars)
    check_call(launch, [t.strides for t in tensors], scalars)
    return Setting(trial, binding, arena, tensors, scalars)


def outputs_of(setting: Setting) -> Outputs:
    """The call's outputs as they lie in the arena, no copy."""
    names = {t.role: t.name for t in setting.binding.tensors if t.written}
    views = setting.arena.views
    unwritten = {name: setting.arena.unwritten(name) for name in names.values()}
    return Outputs(views[names["o"]], views[names["lse"]] if "lse" in names else None, unwritten)


def _judge_trial(judging: Judging, sandbox: Sandbox, trial: Trial) -> Finding | CaseError:
    """Two runs: the second with inputs that cannot be written, outputs poisoned anew, and the same bits expected."""
    setting = set_up(sandbox, judging.launch, trial)
    outcome = _run(sandbox, setting, writable_inputs=True)
    if (finding := _came_back(judging, setting, outcome)) is not None:
        return finding
    if (finding := _stayed_inside(setting) or _judge_outputs(setting)) is not None:
        return finding
    error, first = case_error(outputs_of(setting), trial.expected), _kept(setting)
    setting.arena.poison_outputs()
    outcome = _run(sandbox, setting, writable_inputs=False)
    if isinstance(outcome, Died) and outcome.bad_access:
        message = "it ran on inputs that may be written, and crashed on the same inputs in memory that may only be read"
        return Finding("mutates_inputs", Witness("inputs", message, trial.case.name))
    if (finding := _came_back(judging, setting, outcome)) is not None:
        return finding
    written = everything_written(outputs_of(setting), trial.expected)
    found = _stayed_inside(setting) or written or _same_again(setting, first) or _idle(judging, sandbox, trial)
    return found or _once_more(judging, sandbox, setting) or error


def _once_more(judging: Judging, sandbox: Sandbox, setting: Setting) -> Finding | None:
    """Small random inputs as callers may have them: outputs hold any numbers, and a CPU's kernel has one thread. Within the same
    limits, not the same bits.
    """
    case = setting.trial.case
    if case.rows or case.values != "random":
        return None
    setting.arena.poison_outputs()
    for t in setting.binding.tensors:
        if t.written:
            view = setting.arena.views[t.name]
            view.copy_(torch.randn(view.shape))
    outcome = _run(sandbox, setting, writable_inputs=False, num_threads=1 if judging.device == "cpu" else None)
    found = _came_back(judging, setting, outcome) or _stayed_inside(setting) or _judge_outputs(setting)
    if found is None:
        return None
    how = "with one thread, " if judging.device == "cpu" else ""
    message = f"called {how}where the outputs held other numbers before: {found.witness.message}"
    return replace(found, witness=replace(found.witness, message=message))


def _run(
    sandbox: Sandbox, setting: Setting, *, writable_inputs: bool, guards: bool = True, num_threads: int | None = None
) -> Outcome:
    mapped = sandbox.lay_out(setting.arena, guards=guards, writable_inputs=writable_inputs)
    if not isinstance(mapped, Ran) or mapped.result != "done":
        return mapped
    return sandbox.run(setting.arena, setting.tensors, setting.scalars, num_threads)


def _came_back(judging: Judging, setting: Setting, outcome: Outcome) -> Finding | None:
    name = setting.trial.case.name
    match outcome:
        case Ran(result="done"):
            return None
        case Ran(result=result):
            return Finding("crash", Witness("return code", result, name))
        case TimedOut(limit_s=limit_s):
            return Finding("timeout", Witness("time limit", f"one call took more than {limit_s:g} s and was killed", name))
        case Died():
            return _explain_death(judging, setting.trial, outcome)


def _explain_death(judging: Judging, trial: Trial, died: Died) -> Finding:
    """A bad access may have hit a guard band: run again, in a fresh child, with bands that are memory like any other."""
    crash = Finding("crash", Witness("system call" if died.forbidden_call else "crash", f"the kernel {died}", trial.case.name))
    if not died.bad_access:
        return crash
    try:
        with judging.sandbox() as sandbox:
            setting = set_up(sandbox, judging.launch, trial)
            outcome = _run(sandbox, setting, writable_inputs=True, guards=False)
            if not isinstance(outcome, Ran):
                return crash
            if (finding := _stayed_inside(setting)) is not None:
                return finding
    except CannotStart:
        return crash
    message = "it reads memory outside its tensors: it crashes when nothing may be touched there, and runs when it may"
    return Finding("out_of_bounds", Witness("guard bands", message, trial.case.name))


def _stayed_inside(setting: Setting) -> Finding | None:
    name = setting.trial.case.name
    if (over := setting.arena.overrun()) is not None:
        message = f"{over.num_bytes} bytes outside the elements of {over.tensor} were written, the first {over.where}"
        return Finding("out_of_bounds", Witness("guard bands", message, name))
    if (changed := setting.arena.mutated()) is not None:
        message = f"{changed.num_bytes} bytes of the input {changed.tensor} were changed, the first {changed.where}"
        return Finding("mutates_inputs", Witness("inputs", message, name))
    return None


def _judge_outputs(setting: Setting) -> Finding | None:
    return check_outputs(outputs_of(setting), setting.trial.expected)


def _kept(setting: Setting) -> dict[str, torch.Tensor]:
    views = setting.arena.views
    return {t.name: views[t.name].clone(memory_format=torch.contiguous_format) for t in setting.binding.tensors if t.written}


def _same_again(setting: Setting, first: dict[str, torch.Tensor]) -> Finding | None:
    for name, before in first.items():
        integers = torch.int16 if before.element_size() == 2 else torch.int32
        different = before.view(integers) != setting.arena.views[name].contiguous().view(integers)
        if bool(different.any()):
            message = (
                f"{int(different.sum())} of {different.numel()} elements of {name} differ between two runs on the same input"
            )
            return Finding("nondeterministic", Witness("two runs", message, setting.trial.case.name))
    return None


def _idle(judging: Judging, sandbox: Sandbox, trial: Trial) -> Finding | None:
    """Nothing of the call goes on: it started no thread, and gave back those that it was lent."""
    if judging.device == "cpu":
        outcome = sandbox.working_threads()
        if not isinstance(outcome, Ran):
            return Finding("crash", Witness("threads", "the pool of threads does not answer after the call", trial.case.name))
        if (found := outcome.facts["threads"]) < judging.num_threads:
            return Finding("crash", Witness("threads", kept_threads(found, judging.num_threads), trial.case.name))
    if extra := sandbox.extra_threads():
        message = f"{extra} threads that the call started are still there after it came back"
        return Finding("crash", Witness("threads", message, trial.case.name))
    return None
