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
    """One for each unit of a class resource on living nodes (`ray.nodes()`) that a plan's targets can use; a node is one `cpu`.

    A GPU's actor asks for one GPU, one CPU and one unit of its class. The actor of the `cpu` class takes all CPUs of its node
    that no GPU's needs, so that no builder works beside a measurement; where no other node has CPUs for builders it takes none,
    and builders and measurements take turns there, by the locks of `farm.quiet`, as on a single machine.
    """
    alive = [node for node in nodes if node["Alive"]]
    on_gpus = {node["NodeID"]: _gpu_wishes(targets, node) for node in alive}
    alone = not _rooms_apart(_rooms(alive, (wish for wishes in on_gpus.values() for wish in wishes)), alive)
    found: list[DeviceWish] = []
    for node in alive:
        if "cpu" in classes_of(node) and set(targets) & set(CPU_FORMS):
            cpus = 0 if alone else max(0, int(node["Resources"].get("CPU", 0)) - len(on_gpus[node["NodeID"]]))
            options = (("num_cpus", cpus), ("resources", {f"{PREFIX}cpu": 1}))
            found.append(DeviceWish("cpu", tuple(CPU_FORMS), "cpu", node["NodeID"], options))
        found += on_gpus[node["NodeID"]]
    return tuple(found)


def _gpu_wishes(targets: tuple[str, ...], node: Mapping[str, Any]) -> list[DeviceWish]:
    wishes: list[DeviceWish] = []
    for name, amount in classes_of(node).items():
        able = targets_of_class(name)
        if name != "cpu" and set(targets) & set(able):
            options = (("num_cpus", 1), ("num_gpus", 1), ("resources", {f"{PREFIX}{name}": 1}))
            wishes += [DeviceWish("cuda:0", able, name, node["NodeID"], options)] * amount
    return wishes


def targets_of_class(device_class: str) -> tuple[str, ...]:
    """Targets that a class of device judges, those that it only checks included; none for a class that is not known."""
    if device_class == "cpu":
        return tuple(CPU_FORMS)
    if device_class not in CAPABILITIES:
        return ()
    own, older = targets_of(*CAPABILITIES[device_class])
    return own + older


def builder_rooms(nodes: Iterable[Mapping[str, Any]], wishes: Iterable[DeviceWish] = ()) -> dict[str, int]:
    """Node -> CPUs on which builders may work: what the actors of `wishes` do not hold, on nodes whose CPUs no measurement owns;
    on those, too, where there are no others and a `cpu` device left them.
    """
    alive = [node for node in nodes if node["Alive"]]
    rooms = _rooms(alive, wishes)
    return _rooms_apart(rooms, alive) or rooms


def _rooms(nodes: Iterable[Mapping[str, Any]], wishes: Iterable[DeviceWish]) -> dict[str, int]:
    held = Counter[str]()
    for wish in wishes:
        held[wish.node_id] += int(dict(wish.options)["num_cpus"])
    rooms = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) - held[node["NodeID"]] for node in nodes}
    return {node: room for node, room in rooms.items() if room > 0}


def _rooms_apart(rooms: Mapping[str, int], nodes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Those of nodes whose processor is nobody's device."""
    apart = {node["NodeID"] for node in nodes if "cpu" not in classes_of(node)}
    return {node: room for node, room in rooms.items() if node in apart}


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
