"""A kernel's golden case, run in a child process before this process loads it: a crash there is a reason here. Times nothing.

The case is a small one of those that were verified, on the verifier's own inputs, in its sandbox, under its tolerance. It shows
that the binary runs on this machine as it did when it was verified; it does not verify it again.
"""

from __future__ import annotations

import torch

from catalog.kernels import CatalogKernel
from catalog.reasons import Reason, reason
from generator.binding import BindingError
from generator.spec import SpecError
from verifier.checks import check_outputs
from verifier.gpu import NoDevice
from verifier.inputs import Case, with_lengths
from verifier.judge import outputs_of, sandbox_on, set_up
from verifier.launch import LaunchError
from verifier.sandbox import CannotStart, Died, Outcome, Ran, SandboxLimits, TimedOut
from verifier.trial import make_trial

#: A case with fewer pairs of query and key than this tells little.
ENOUGH_PAIRS = 512
SEED = 2506_12355


def golden_case(kernel: CatalogKernel) -> Case:
    """The smallest verified shape that tells something, with one key head; some rows of the result are compared."""
    sizes = sorted(set(kernel.verified), key=lambda shape: shape[0] * shape[1] * shape[2])
    batch, seqlen_q, seqlen_k = next((s for s in sizes if s[1] * s[2] >= ENOUGH_PAIRS), sizes[-1])
    spec = with_lengths(kernel.example, batch, seqlen_q, seqlen_k, 1, kernel.example.group)
    return Case("golden case", spec, rows=16, seed=SEED)


def probe(kernel: CatalogKernel, binary: bytes, timeout_s: float, device: str = "cpu") -> Reason | None:
    """None when the golden case came out right; else why not. binary: the very bytes that will be loaded. A GPU needs PyCUDA for
    it, in the child.
    """
    try:
        trial = make_trial(golden_case(kernel))
        limits = SandboxLimits(start_s=timeout_s, run_s=timeout_s)
        with sandbox_on(device, binary, kernel.launch, torch.get_num_threads(), limits) as child:
            setting = set_up(child, kernel.launch, trial)
            for outcome in (child.lay_out(setting.arena), child.run(setting.arena, setting.tensors, setting.scalars)):
                if (why := _failure(outcome)) is not None:
                    return reason("probe_failed", f"the golden case ({trial.case.spec}) {why}")
            trespass = setting.arena.mutated() or setting.arena.overrun()
            if trespass is not None:
                return reason(
                    "probe_failed", f"the golden case wrote {trespass.num_bytes} bytes of {trespass.tensor} {trespass.where}"
                )
            finding = check_outputs(outputs_of(setting), trial.expected)
            return None if finding is None else reason("probe_failed", f"the golden case: {finding.witness.message}")
    except (CannotStart, NoDevice, LaunchError, BindingError, SpecError) as error:
        return reason("probe_failed", str(error))


def _failure(outcome: Outcome) -> str | None:
    match outcome:
        case Ran(result="done"):
            return None
        case Ran(result=result):
            return f"said {result}"
        case Died():
            return str(outcome)
        case TimedOut(limit_s=limit_s):
            return f"did not end within {limit_s:g} s"
