"""A device of a sweep on Ray as its executor sees it: its actor, what it said of itself, what it has in hand. Schedules none."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from farm import actors
from farm.devices import LocalDevice
from farm.jobs import Shop
from farm.nodes import DeviceWish
from farm.queues import Ready
from farm.session import on_node

QUEUED_PER_DEVICE = 2  # one running, one waiting


@dataclass(slots=True)
class Slot:
    """tasks: reference of a call -> what it judges, in the order given."""

    wish: DeviceWish
    actor: Any
    hello: Any = None  # the reference, until the answer is there
    device: LocalDevice | None = None
    tasks: dict[Any, Ready] = field(default_factory=dict)
    deadline: float = 0.0
    strikes: int = 0
    out_of_service: str = ""
    busy_s: float = 0.0
    waits_for: str = ""
    num_ended: int = 0

    @property
    def ready(self) -> bool:
        return self.device is not None and self.hello is None and not self.out_of_service

    @property
    def device_class(self) -> str:
        return self.device.device_class if self.device else self.wish.expected_class

    def may_judge(self, target: str, device_key: str | None) -> bool:
        """Whether it is, or before it said what it is may be, of a job's kind."""
        return target in self.wish.targets and (self.device is None or self.device.key == device_key)

    def describe(self) -> dict[str, Any]:
        """For people and scripts, plain values."""
        known = self.device
        return {
            "device": self.wish.device,
            "node": self.wish.node_id[:8],
            "class": self.device_class,
            "about": known.name if known else self.wish.expected_class,
            "facts": dict(known.facts) if known else {},
            "out_of_service": self.out_of_service,
            "starting": self.hello is not None,
            "waits_for": self.waits_for,
            "in_hand": len(self.tasks),
            "ended": self.num_ended,
            "busy_s": round(self.busy_s, 3),
        }


def open_slot(wish: DeviceWish, shop: Shop, versions: dict[str, str], hello_s: float) -> Slot:
    """Starts the actor of a device, on its node where it has one, and asks it what it is."""
    options = dict(wish.options)
    if wish.node_id:
        options["scheduling_strategy"] = on_node(wish.node_id)
    actor = actors.Device.options(**options).remote(wish.device, wish.expected_class, shop)  # type: ignore[attr-defined]
    return Slot(wish, actor, hello=actor.hello.remote(versions), deadline=time.monotonic() + hello_s)


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
