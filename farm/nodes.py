"""Which device actors a Ray cluster's nodes ask for, from their resources. Starts none and knows no job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from farm.devices import LocalDevice, targets_of
from farm.rules import CPU_FORMS

#: A node's resource `class_<name>` -> compute capability. What a card really is, its actor reads.
CAPABILITIES = {"t4": (7, 5), "rtx8000": (7, 5), "a100": (8, 0), "h100": (9, 0), "h200": (9, 0)}
PREFIX = "class_"


@dataclass(frozen=True, slots=True)
class DeviceWish:
    """A device to put an actor on.

    device: as its own actor names it: "cpu", and "cuda:0" whichever GPU Ray gave it. expected_class: what its node's
    resources say; "" where nothing says it. node_id: the only node for it; "" for this machine.
    """

    device: str
    targets: tuple[str, ...]
    expected_class: str = ""
    node_id: str = ""
    options: tuple[tuple[str, Any], ...] = (("num_cpus", 0),)


def local_wishes(targets: tuple[str, ...], devices: Iterable[LocalDevice]) -> tuple[DeviceWish, ...]:
    """One for each device of this machine that a plan's targets can use."""
    on_gpu = (("num_gpus", 1), ("num_cpus", 1))
    return tuple(
        DeviceWish("cpu", d.targets) if d.device == "cpu" else DeviceWish("cuda:0", d.targets, options=on_gpu)
        for d in devices
        if set(targets) & set(d.targets)
    )


def node_wishes(targets: tuple[str, ...], nodes: Iterable[Mapping[str, Any]]) -> tuple[DeviceWish, ...]:
    """One for each unit of a class resource on living nodes (`ray.nodes()`) that a plan's targets can use.

    A GPU's actor asks for one GPU, one CPU and one unit of its class. The actor of the `cpu` class takes all CPUs of its node,
    so that no builder works beside a measurement.
    """
    wishes: list[DeviceWish] = []
    for node in nodes:
        if not node["Alive"]:
            continue
        for name, amount in sorted(node["Resources"].items()):
            if not name.startswith(PREFIX):
                continue
            device_class = name.removeprefix(PREFIX)
            able = targets_of_class(device_class)
            if set(targets) & set(able):
                cpus = node["Resources"].get("CPU", 0) if device_class == "cpu" else 1
                gpus = {} if device_class == "cpu" else {"num_gpus": 1}
                options = tuple(sorted(({"num_cpus": cpus, "resources": {name: 1}} | gpus).items()))
                device = "cpu" if device_class == "cpu" else "cuda:0"
                wishes += [DeviceWish(device, able, device_class, node["NodeID"], options)] * int(amount)
    return tuple(wishes)


def targets_of_class(device_class: str) -> tuple[str, ...]:
    """Targets that a class of device judges, those that it only checks included; none for a class that is not known."""
    if device_class == "cpu":
        return tuple(CPU_FORMS)
    if device_class not in CAPABILITIES:
        return ()
    own, older = targets_of(*CAPABILITIES[device_class])
    return own + older


def builder_rooms(nodes: Iterable[Mapping[str, Any]], wishes: Iterable[DeviceWish] = ()) -> dict[str, int]:
    """Node -> CPUs on which builders may work: what device actors do not hold, on nodes whose CPUs no measurement owns."""
    held = Counter[str]()
    for wish in wishes:
        held[wish.node_id] += int(dict(wish.options)["num_cpus"])
    able = [n for n in nodes if n["Alive"] and f"{PREFIX}cpu" not in n["Resources"]]
    rooms = {n["NodeID"]: int(n["Resources"].get("CPU", 0)) - held[n["NodeID"]] for n in able}
    return {node: room for node, room in rooms.items() if room > 0}


def classes_of(node: Mapping[str, Any]) -> dict[str, int]:
    """Class -> how many devices of it a node says that it has."""
    return {name.removeprefix(PREFIX): int(n) for name, n in sorted(node["Resources"].items()) if name.startswith(PREFIX)}


def unmet_targets(targets: Iterable[str], nodes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Target -> why no living node can judge it, with the cure; those that one can are not named."""
    nodes = [n for n in nodes if n["Alive"]]
    there = {name for node in nodes for name in classes_of(node)}
    unmet = {}
    for target in targets:
        able = [name for name in ("cpu", *CAPABILITIES) if target in targets_of_class(name)]
        if not there & set(able):
            wanted = " or ".join(f"{PREFIX}{name}" for name in able) or "a class that is not known yet"
            join = f"; join one with `ray start --address=HEAD:6379 --resources '{{\"{PREFIX}{able[0]}\": 1}}'`" if able else ""
            unmet[target] = f"no node of the cluster has the resource {wanted}{join}"
    return unmet
