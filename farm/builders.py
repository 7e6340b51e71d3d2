"""The builders of a sweep on Ray: actors that compile, one CPU each, opened when there is work for them. Knows no queue, no job.

Each is put on a node with a CPU that no device's actor needs, so that a compiler never keeps a device from coming into service.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farm import actors
from farm.jobs import Shop
from farm.session import kill, on_node


@dataclass(frozen=True, slots=True)
class Builder:
    """node_id: "" on this machine."""

    actor: Any
    node_id: str


class Builders:
    """rooms: node -> CPUs that builders may have there; {"": n} for this machine alone."""

    def __init__(self, shop: Shop, rooms: Mapping[str, int]) -> None:
        self._shop = shop
        self._free: list[Builder] = []
        self._open = Counter[str]()
        self._starting: list[Builder] = []
        self.rooms = dict(rooms)

    @property
    def room(self) -> int:
        return sum(self.rooms.values())

    @property
    def num_open(self) -> int:
        return self._open.total()

    @property
    def any_starting(self) -> bool:
        """Whether one has still to build its first job."""
        return bool(self._starting)

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def may_open(self, starting: int) -> bool:
        """Whether a CPU has none yet, while fewer than `starting` have still to build their first job."""
        return len(self._starting) < starting and any(self._open[node] < room for node, room in self.rooms.items())

    def take(self) -> Builder:
        """One that has nothing to do, or a new one on the node with the most room; only where there is one."""
        if self._free:
            return self._free.pop()
        node = max(self.rooms, key=lambda name: self.rooms[name] - self._open[name])
        self._open[node] += 1
        there = {"scheduling_strategy": on_node(node)} if node else {}
        self._starting.append(Builder(actors.Builder.options(**there).remote(self._shop), node))  # type: ignore[attr-defined]
        return self._starting[-1]

    def give_back(self, builder: Builder) -> None:
        self._started(builder)
        if self._open[builder.node_id] > self.rooms.get(builder.node_id, 0):
            self.drop(builder)
        else:
            self._free.append(builder)

    def drop(self, builder: Builder) -> None:
        """Of one that died, is stuck, or is one too many."""
        self._started(builder)
        self._open[builder.node_id] -= 1
        kill(builder.actor)

    def _started(self, builder: Builder) -> None:
        self._starting = [other for other in self._starting if other is not builder]

    def set_rooms(self, rooms: Mapping[str, int]) -> None:
        """After nodes joined or left: those that wait on a node that is gone, or are too many there now, are let go."""
        self.rooms = dict(rooms)
        waiting, self._free = self._free, []
        for builder in waiting:
            self.give_back(builder)

    def close(self) -> None:
        while self._free:
            self.drop(self._free.pop())
