"""Why a kernel or a whole call is turned down: the closed list of reason codes. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

#: Code -> what it means. Calls are counted under these.
REASON_CODES = {
    # the call
    "mode_off": "mode is off: torch alone answers",
    "override": "attention_kernel(...) around the call does not allow it",
    "denied": "the deny list names the kernel",
    "no_catalog": "no catalog is configured or found",
    "signature": "nobody who is trusted signed it",
    "no_kernel": "the catalog has no kernel for this family of calls",
    "frozen": "freeze() was called and this kernel is not loaded",
    "requires_grad": "an input wants gradients",
    "tensor_subclass": "an input is not a plain tensor",
    "tensor_layout": "an input is not strided",
    "tensor_view": "an input's memory does not hold its values",
    "autocast": "autocast is on",
    "functorch": "inside a functorch transform",
    "torch_mode": "a torch mode is active",
    "torch_backend": "the program chooses among torch's own ways to compute it",
    "compiling": "torch is tracing the call",
    "rank": "the number of dimensions is not one that kernels take",
    "empty": "a tensor has no elements",
    "broadcast": "sizes would have to be broadcast, or do not fit",
    "dropout": "dropout is wanted",
    "mask_tensor": "a mask given as a tensor",
    "argument": "an argument that no kernel implements",
    "scale": "the softmax scale is not a finite number that fp32 holds",
    # the kernel
    "device": "not the device that the kernel was verified on",
    "isa": "this processor lacks instructions that the kernel needs",
    "driver": "this driver does not take binaries of the kernel's CUDA release, or of its kind",
    "location": "shared objects from this catalog may not be loaded",
    "lock": "the lock file pins another kernel, or none",
    "revoked": "the row was revoked",
    "unverified": "the row is not verified",
    "dtype": "another dtype",
    "head_dim": "another head dimension",
    "gqa": "another ratio of query heads to key heads",
    "masks": "another mask rule",
    "scores": "another score rule",
    "layout": "strides that the kernel does not take",
    "alignment": "addresses that the kernel does not take",
    "address_range": "offsets beyond the range that was verified",
    "envelope": "sizes outside the verified buckets",
    "promise": "a promise of the kernel does not hold",
    "binding": "the kernel has a parameter that this call gives no value for",
    "lse": "the kernel gives no log-sum-exp and the call wants it",
    "deterministic": "determinism is wanted and the row does not promise it",
    "unmeasured": "no time was measured on this device at these sizes",
    "not_faster": "not faster than torch by enough",
    "quarantined": "the kernel failed in this process",
    "digest": "the binary's bytes are not the ones that were verified",
    "load_failed": "the binary could not be loaded",
    "probe_failed": "the kernel failed its golden case in a child process",
    "launch_failed": "the kernel failed at a call",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason: a code of REASON_CODES, and a sentence with what was found and what was needed."""

    code: str
    message: str

    def __post_init__(self) -> None:
        assert self.code in REASON_CODES, self.code

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


def reason(code: str, message: str = "") -> Reason:
    """A reason; without a message, the code's own meaning."""
    return Reason(code, message or REASON_CODES[code])


class NoKernelError(RuntimeError):
    """No kernel may answer a call that asked for one (strict mode, FARM_FORCE, attention_kernel(require=True)).

    reasons: every one of them, of the call and of each kernel.
    """

    def __init__(self, call: str, reasons: tuple[Reason, ...]) -> None:
        self.reasons = reasons
        lines = "\n".join(f"  - {r}" for r in dict.fromkeys(reasons)) or "  - no_kernel: the catalog is empty"
        super().__init__(f"no kernel may answer {call}:\n{lines}")


class RunFailed(RuntimeError):
    """A call that the kernel did not answer; nothing of the output may be used. broken: the kernel must not be called again."""

    def __init__(self, why: Reason, broken: bool) -> None:
        super().__init__(str(why))
        self.reason, self.broken = why, broken
