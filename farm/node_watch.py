"""A cluster's nodes as a sweep sees them: looked at every few seconds. Starts and ends nothing on them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from farm.nodes import DeviceWish, classes_of, node_wishes
from farm.session import own_node, ray

WATCH_S = 3.0  # between looks


@dataclass(frozen=True, slots=True)
class Seen:
    """One look. nodes: as `ray.nodes()` has them; alive: ids. wishes: a device each. home_lost: the driver's own node is gone."""

    nodes: tuple[Mapping[str, Any], ...]
    alive: frozenset[str]
    wishes: tuple[DeviceWish, ...]
    home_lost: bool

    def missing(self, there: Iterable[DeviceWish]) -> list[DeviceWish]:
        """The wishes that none of those `there` stands for, by node and class."""
        have = Counter((wish.node_id, wish.expected_class) for wish in there)
        found = []
        for wish in self.wishes:
            key = (wish.node_id, wish.expected_class)
            have[key] -= 1
            if have[key] < 0:
                found.append(wish)
        return found


class NodeWatch:
    """targets: devices that can use none of them are no concern of the sweep's. facts: of the nodes, for the display."""

    def __init__(self, targets: tuple[str, ...]) -> None:
        self._targets, self._home, self._looked = targets, own_node(), -WATCH_S
        self.facts: list[dict[str, Any]] = []

    def look(self) -> Seen | None:
        """None where the last look was a moment ago."""
        if time.monotonic() - self._looked < WATCH_S:
            return None
        self._looked = time.monotonic()
        nodes: tuple[Mapping[str, Any], ...] = tuple(ray.nodes())
        alive = frozenset(n["NodeID"] for n in nodes if n["Alive"])
        self.facts = [_node_facts(n) for n in nodes]
        return Seen(nodes, alive, node_wishes(self._targets, nodes), self._home not in alive)


def _node_facts(node: Mapping[str, Any]) -> dict[str, Any]:
    """A node of `ray.nodes()` for the display."""
    cpus = node["Resources"].get("CPU", 0.0)
    about = {"node": node["NodeID"][:8], "address": node["NodeManagerAddress"], "alive": node["Alive"], "cpus": cpus}
    return about | {"classes": classes_of(node)}
