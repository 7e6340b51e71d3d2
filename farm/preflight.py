"""A cluster before a sweep: what every node has installed, and what a plan asks for that none can meet. Starts no actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from farm import actors
from farm.nodes import builder_rooms, classes_of, node_wishes, targets_of_class, unmet_targets
from farm.session import dashboard, on_node, ray

ANSWER_S = 60.0  # for all nodes together; a node's first worker imports the farm's packages


@dataclass(frozen=True, slots=True)
class NodeLook:
    """One living node. versions: of Python, Ray, torch, this package and its parts, the toolkits; {} where it did not answer.

    refused: what keeps its devices from serving. differing: what differs from the driver's and does no harm to pickles or rows.
    """

    node_id: str
    address: str
    cpus: float
    classes: dict[str, int]
    versions: dict[str, str]
    refused: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        has = ", ".join(f"{n} x {name}" for name, n in self.classes.items() if name != "head") or "no device"
        told = ", ".join(f"{name} {version or 'missing'}" for name, version in self.versions.items() if name in actors.SHOWN)
        lines = [f"{self.address} ({self.node_id[:8]}): {self.cpus:g} CPUs, {has}; {told or 'nothing told'}"]
        return lines + [f"    refused: {why}" for why in self.refused] + [f"    differs: {what}" for what in self.differing]


@dataclass(frozen=True, slots=True)
class Preflight:
    """unmet: target -> why no node can judge it."""

    nodes: tuple[NodeLook, ...]
    unmet: dict[str, str]
    builder_cpus: int
    dashboard: str = ""

    @property
    def ready(self) -> bool:
        return not self.unmet and self.builder_cpus > 0 and not any(node.refused for node in self.nodes)

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"ready": self.ready}

    def lines(self) -> list[str]:
        lines = [line for node in self.nodes for line in node.lines()]
        lines.append(f"builders: {self.builder_cpus} CPUs" if self.builder_cpus else "builders: no node has a CPU for them")
        lines += [f"{target}: {why}" for target, why in self.unmet.items()]
        return lines + ([f"Ray's dashboard: {self.dashboard}"] if self.dashboard else [])


def preflight(targets: tuple[str, ...], timeout_s: float = ANSWER_S) -> Preflight:
    """Asks every living node of the cluster that this process has joined; one that is silent for `timeout_s` is refused."""
    nodes: list[Mapping[str, Any]] = [n for n in ray.nodes() if n["Alive"]]
    asked = {actors.told.options(scheduling_strategy=on_node(n["NodeID"])).remote(): n for n in nodes}
    ready, silent = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
    own = actors.versions() | actors.installed()
    looks = [_look(asked[ref], _answer(ref), own) for ref in ready]
    for ref in silent:
        ray.cancel(ref, force=True)
        looks.append(_look(asked[ref], f"it did not answer within {timeout_s:.0f} s", own))
    looks.sort(key=lambda look: (look.address, look.node_id))
    refused = {look.node_id for look in looks if look.refused}
    serving = [n for n in nodes if n["NodeID"] not in refused]
    wishes, unmet = node_wishes(targets, serving), unmet_targets(targets, serving)
    unmet |= {target: why for target in unmet if (why := _all_refused(target, looks))}
    return Preflight(tuple(looks), unmet, sum(builder_rooms(serving, wishes).values()), dashboard())


def _all_refused(target: str, looks: list[NodeLook]) -> str:
    """Why a target has no device although nodes have one; "" where none has."""
    there = [look for look in looks if look.refused and any(target in targets_of_class(name) for name in look.classes)]
    told = "; ".join(f"{look.address} ({look.node_id[:8]}): {look.refused[0]}" for look in there)
    return f"every node that has a device for it is refused: {told}" if told else ""


def _answer(ref: Any) -> dict[str, str] | str:
    try:
        answer: dict[str, str] = ray.get(ref, timeout=10)
    except Exception as error:
        return str(error).strip().splitlines()[-1]
    return answer


def _look(node: Mapping[str, Any], answer: dict[str, str] | str, own: dict[str, str]) -> NodeLook:
    about = (node["NodeID"], node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0), classes_of(node))
    if isinstance(answer, str):
        return NodeLook(*about, {}, (answer,))
    told = tuple(f"{name} is {answer.get(name) or 'missing'} here and {own[name] or 'missing'} at the driver" for name in own)
    differs = {name: text for name, text in zip(own, told, strict=True) if answer.get(name) != own[name]}
    must = actors.versions()
    return NodeLook(
        *about,
        answer,
        tuple(text for name, text in differs.items() if name in must),
        tuple(text for name, text in differs.items() if name not in must),
    )
