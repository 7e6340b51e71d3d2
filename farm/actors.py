"""What runs on Ray's workers: the builder task, the device actor, and the session. Knows no queue and no plan."""

from __future__ import annotations

import logging
import os
import platform
import re
import time
from dataclasses import dataclass
from typing import Any

# Ray reads these on import and on start. Workers at niceness 15 would be timed beside whatever else runs at 0.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray

from farm.console import InputError
from farm.devices import LocalDevice
from farm.executors import stages_of, trouble_of
from farm.jobs import Built, Job, Row, Shop
from farm.quiet import StillBusy


@dataclass(frozen=True, slots=True)
class Hello:
    """What a device actor says of itself on start: where it really is, what it really has, and why it cannot serve, if so."""

    node_id: str
    pid: int
    device: LocalDevice
    problems: tuple[str, ...] = ()


def versions() -> dict[str, str]:
    """What has to agree between a driver and its workers: they exchange pickles, and their rows name one translator."""
    from farm.versions import harness_version, translator_version

    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "ray": ray.__version__, "translator": translator_version(), "harness": harness_version()}


@ray.remote(num_cpus=1, max_retries=0)
def build(job: Job, shop: Shop) -> Built | Row:
    """One job up to its binary, or the row of its failure."""
    stages = stages_of(shop)
    try:
        return stages.build(job, shop)
    except Exception as error:
        return stages.row_without_verdict(job, "not_run", trouble_of(error))


@ray.remote(max_restarts=0, max_task_retries=0)
class Device:
    """Owns the measuring slot of one device. Holds no CUDA context and no candidate: both live in killable children."""

    def __init__(self, device: str, expected_class: str, shop: Shop) -> None:
        self._device, self._expected, self._shop = device, expected_class, shop

    def hello(self, driver: dict[str, str]) -> Hello:
        node, here = ray.get_runtime_context().get_node_id(), versions()
        differing = tuple(
            f"{name} is {here[name]} here and {driver[name]} at the driver" for name in driver if here[name] != driver[name]
        )
        found, problems = stages_of(self._shop).inspect_device(self._device, self._shop, self._expected)
        return Hello(node, os.getpid(), found, differing + problems)

    def prove(self, built: Built) -> tuple[Row | str, float]:
        """The row, and the seconds that the device was busy; or who kept it from being measured on, and how long it waited."""
        start = time.monotonic()
        stages = stages_of(self._shop)
        try:
            row = stages.prove(built, self._shop, self._device)
        except StillBusy as busy:
            return str(busy), time.monotonic() - start
        except Exception as error:
            row = stages.row_without_verdict(built.job, "not_run", trouble_of(error))
        row["ray_node_id"] = ray.get_runtime_context().get_node_id()
        return row, time.monotonic() - start


_QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": True}


def start_session(address: str, num_cpus: int) -> str:
    """Connects to a cluster, or starts one on this machine for "local". Returns the session's folder ("" for a foreign cluster).

    The address is always explicit: Ray on its own joins any cluster that is announced on the machine.
    """
    if address != "local":
        join_cluster(address)
        return ""
    context = ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, object_store_memory=256 << 20, **_QUIET)
    return str(context.address_info["session_dir"])


def join_cluster(address: str) -> None:
    """Connects to a running cluster, once. Raises InputError where there is none at the address."""
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, **_QUIET)
    except (OSError, RuntimeError, ValueError) as error:
        said = re.split(r"\. (?=[A-Z])", " ".join(str(error).split()))[0].rstrip(".")
        wanted = "expected local, or a running cluster: auto or ray://HOST:PORT"
        raise InputError("--address", f"{wanted}; {address!r}: {said}") from None


def stop_session() -> None:
    ray.shutdown()
