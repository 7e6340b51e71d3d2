"""One cubin in one child process with a CUDA context of its own: started, told to run, killed from outside. Judges nothing.

A cubin is device code: it can hang or break its context and write whatever memory that context has, but it makes no system call
and sees no memory of another process. So the child keeps no files and system calls away from itself, which the driver needs;
inputs, poisoned outputs and bands around them are all that its context holds. No expected value, limit or seed exists there.

After a death, a hang or an error of the device the GPU is looked at before anybody uses it again (`verifier.gpu_health`).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from generator.translate.records import Launch
from verifier import gpu_health
from verifier.arena import Arena, Slot
from verifier.gpu import GpuUse, NoDevice, use_of, uuid_of
from verifier.sandbox import CallTensor, CannotStart, Died, Outcome, Ran, Sandbox, SandboxLimits, TimedOut

#: What can be mapped on a device is a multiple of this on every card that is known.
PAGE_BYTES = 2 << 20
#: How long a killed process may take to leave: the driver waits for its channels first.
EXIT_S = 60.0
#: Settings of the user's that say where the driver, the toolkit and a C compiler are.
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_DEVICE_ORDER", "CC", "CXX", "HOME", "USER")
_START_S = 60.0


class CudaSandbox(Sandbox):
    """As `Sandbox`, on a GPU. Raises NoDevice (also while starting) where the device, not the candidate, is the reason."""

    program = "verifier.cuda_child"
    calls: ClassVar[frozenset[str]] = frozenset()  # the device may need the driver's threads at any time

    def __init__(self, cubin: bytes, launch: Launch, device: str = "cuda:0", limits: SandboxLimits | None = None) -> None:
        gpu_health.check_in_service(device)
        limits = limits or SandboxLimits()
        self.device, self.uuid = device, uuid_of(device)
        self._before: GpuUse = use_of(device)
        self._harmed = False
        self.facts: dict[str, Any] = {}  # what the driver said of the device
        super().__init__(cubin, launch, 1, limits)

    @property
    def environment(self) -> Mapping[str, str]:  # type: ignore[override]
        """The child sees one device. Code is loaded at once, so that a first call is like the next ones."""
        passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        return {
            "PATH": "/usr/bin:/bin", **passed, "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": self.uuid, "CUDA_CACHE_DISABLE": "1",
            "CUDA_MODULE_LOADING": "EAGER",
        }  # fmt: skip

    def hear_start(self) -> None:
        started = self._hear("start", max(self.limits.start_s, _START_S))
        if not isinstance(started, dict):
            self._harmed = True
            raise CannotStart(f"the cubin could not be loaded: {started}" + self._tail())
        if "no_device" in started:
            raise NoDevice(f"device: {self.device}: {started['no_device']}")
        if "error" in started:
            raise CannotStart(started["error"])
        self.fences, self.facts = started["fences"], started["facts"]

    def close(self) -> None:
        """Kill the child; if it did not end well, wait until the device is clean and right again, or put it out of service."""
        process = self._process
        super().close()
        self._process = None
        if self._harmed and process is not None:
            self._harmed = False
            gpu_health.recover(self.device, self._before, [process.pid], lambda: is_alive(self.device))

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._harmed = True

    def extra_threads(self) -> int:
        """The driver has threads of its own, and device code cannot start any."""
        return 0

    def arena(self, slots: Sequence[Slot]) -> Arena:
        return Arena(self.memory, slots, page_bytes=PAGE_BYTES, guard_bytes=PAGE_BYTES)

    def numbers(self, tensors: Sequence[CallTensor], scalars: Sequence[int | float]) -> dict[str, Any]:
        return {"strides": [t.strides for t in tensors], "shapes": [t.shape for t in tensors], "scalars": list(scalars)}

    def ask(self, question: dict[str, Any], limit_s: float) -> Outcome:
        outcome = super().ask(question, limit_s)
        match outcome:
            case Ran(facts={"device_error": str(error)}):
                self._harmed = True
                return Died(0, 0, self._tail(), error)
            case Died() | TimedOut():
                self._harmed = True
        return outcome


class _Alive(CudaSandbox):
    """A child that only runs the tiny kernel of `verifier.cuda_child`, and says on start whether it was right."""

    def __init__(self, device: str) -> None:
        super().__init__(b"", Launch("alive", (), ()), device, SandboxLimits(start_s=30))

    def _more_facts(self) -> dict[str, Any]:
        return {"alive": True}

    def close(self) -> None:
        self._harmed = False  # a health check is not followed by another
        super().close()


def is_alive(device: str) -> str:
    """ "" when a tiny known good kernel gives the right answer in a fresh child; else what came instead."""
    try:
        with _Alive(device):
            return ""
    except (CannotStart, NoDevice) as error:
        return str(error)


def device_facts(device: str) -> dict[str, Any]:
    """What the driver says of a device, through PyCUDA in a child: name, compute capability, multiprocessors, memory, versions,
    limits. Runs the tiny kernel as well. Raises NoDevice, CannotStart.
    """
    with _Alive(device) as child:
        facts: dict[str, Any] = json.loads(json.dumps(child.facts))
        return facts
