"""The devices of this machine, and what each can judge. Touches none of them, and makes no CUDA context."""

from __future__ import annotations

import contextlib
import functools
import re
from dataclasses import dataclass

from farm.rules import forms_here
from generator.targets import TARGETS, Target
from verifier.environment import NoDevice, device_key

#: A card's class in plans and in cluster.yaml -> words of its product name. The first that fits counts.
CLASSES = {
    "t4": r"\bT4\b",
    "rtx8000": r"RTX ?8000",
    "a100": r"\bA100\b",
    "h200": r"\bH200\b|\bGH200\b",
    "h100": r"\bH100\b|\bH800\b",
}


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """One device: its name here ("cpu", "cuda:0"), its class, its key, and the targets whose binaries it runs.

    borrowed: of these, targets of older cards, whose source is compiled for `arch` so that this card can check it. facts: what
    it says of itself (compute capability, memory, MIG, ...), and the rates that were measured on it.
    """

    device: str
    device_class: str
    name: str
    key: str
    targets: tuple[str, ...]
    borrowed: tuple[str, ...] = ()
    arch: str = ""
    facts: tuple[tuple[str, int | float | str], ...] = ()


@functools.lru_cache(maxsize=4)
def devices_here() -> tuple[LocalDevice, ...]:
    """The processor, if a form of `cpu` runs on it, and every GPU that the driver shows."""
    from verifier.gpu import gpus_here

    found = [local_device("cpu")] if forms_here() else []
    for device in gpus_here():
        with contextlib.suppress(NoDevice):
            found.append(local_device(device))
    return tuple(found)


def local_device(device: str) -> LocalDevice:
    """ "cpu", or a GPU by its name here. Raises NoDevice."""
    key = device_key(device)
    if device == "cpu":
        return LocalDevice("cpu", "cpu", key.name, key.hash, forms_here(), facts=key.facts)
    major, minor = (int(n) for n in str(key["compute_capability"]).split("."))
    own, older = targets_of(major, minor)
    return LocalDevice(device, class_of(key.name), key.name, key.hash, own + older, older, f"sm_{major}{minor}", key.facts)


def class_of(name: str) -> str:
    """The class of a product name; other cards are classes of their own."""
    for word, pattern in CLASSES.items():
        if re.search(pattern, name, re.IGNORECASE):
            return word
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def targets_of(major: int, minor: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(targets whose cubins run on this compute capability, targets of older cards whose source can be checked on it).

    A cubin runs within its major version from its minor on; one for `sm_90a` runs on 9.0 alone.
    """
    capability = 10 * major + minor

    def runs(t: Target) -> bool:
        if t.name.endswith("a"):
            return t.compute_capability == capability
        return t.compute_capability // 10 == major and t.compute_capability <= capability

    cuda = [t for t in TARGETS.values() if t.family == "cuda"]
    own = tuple(t.name for t in cuda if runs(t))
    older = (t.name for t in cuda if not runs(t) and not t.name.endswith("a") and t.compute_capability < capability)
    return own, tuple(older)


def slot_of(device: str) -> str:
    """The name of a device's measuring slot, the same for every process of this machine whatever part of it they see."""
    if device == "cpu":
        return device
    from verifier.gpu import uuid_of

    return uuid_of(device)


def device_for(target: str) -> LocalDevice | None:
    """The device that judges a target here: one that it is written for before one that only checks it."""
    able = [d for d in devices_here() if target in d.targets]
    return min(able, key=lambda d: target in d.borrowed, default=None)


def arch_for(target: str) -> str | None:
    """What a target's source is compiled for when it is to be checked on a newer card; None: for the target itself."""
    device = device_for(target)
    return device.arch if device is not None and target in device.borrowed else None
