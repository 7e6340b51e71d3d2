"""What runs on Ray's workers: builder and device actors, and a node's look at itself. Knows no queue and starts no session."""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farm.devices import LocalDevice
from farm.executors import stages_of, trouble_of
from farm.head import HeadWatch
from farm.jobs import Built, Job, Row, Shop
from farm.quiet import StillBusy
from farm.rows import fetched_path
from farm.session import ray


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


def installed() -> dict[str, str]:
    """What else is told of a node: it may differ without harm to pickles, and rows record it."""
    from verifier.compile import NoCompiler, find_compiler
    from verifier.compile_cuda import NoCudaCompiler, find_cuda_compiler
    from verifier.environment import package_version

    found = {name: package_version(name) for name in ("torch", "kernel-farm")}
    try:
        found["C++ compiler"] = find_compiler().version
    except NoCompiler:
        found["C++ compiler"] = ""
    try:
        found["CUDA compiler"] = str(find_cuda_compiler().version)
    except NoCudaCompiler:
        found["CUDA compiler"] = ""
    return found


#: Of these a preflight prints the versions; translator and harness are digests, and told where they differ.
SHOWN = ("python", "ray", "torch", "kernel-farm", "C++ compiler", "CUDA compiler")


@ray.remote(num_cpus=0, max_retries=0)
def told() -> dict[str, str]:
    """What a node has."""
    return versions() | installed()


@dataclass(frozen=True, slots=True)
class Packed:
    """A built job on its way through the driver, which only wants to know of its binary: the hash, and whether bytes go along."""

    binary_hash: str
    sent: bool
    parcel: bytes


def pack(record: Any) -> bytes:
    """How records travel: Ray passes bytes on as they are, and its own way of packing a record costs twice as much."""
    return pickle.dumps(record, pickle.HIGHEST_PROTOCOL)


def unpack(parcel: bytes) -> Any:
    return pickle.loads(parcel)


def _built(job: Job, shop: Shop) -> Built | Row:
    stages = stages_of(shop)
    try:
        made: Built | Row = stages.build(job, shop)
        return made
    except Exception as error:
        row: Row = stages.row_without_verdict(job, "not_run", trouble_of(error))
        return row


def _answer(result: Built | Row, sent: bool) -> bytes:
    return pack(Packed(result.binary.hash, sent, pack(result)) if isinstance(result, Built) else result)


@ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)
class Builder:
    """Compiles, for every class of device; runs no candidate. Jobs come packed, and so goes back what came of them: `Packed`, or
    the row of a failure.
    """

    def __init__(self, shop: Shop) -> None:
        self._shop = here(shop)
        self._watch = end_with_head(shop)

    def build(self, job: bytes) -> bytes:
        """One job up to its binary."""
        return _answer(_built(unpack(job), self._shop), sent=False)

    @ray.method(num_returns=2)
    def build_to_send(self, job: bytes) -> tuple[bytes, bytes]:
        """The same with the binary's bytes, which stay in this node's object store until a device's node wants them."""
        result = _built(unpack(job), self._shop)
        path = Path(result.binary.path) if isinstance(result, Built) and result.binary.path else None
        data = path.read_bytes() if path is not None and path.is_file() else b""
        return _answer(result, bool(data)), data


#: By so much an actor is more patient than its driver, whose last letters it may still take.
LONGER_S = 5.0


def end_with_head(shop: Shop) -> HeadWatch | None:
    """For an actor's process: it ends, its children with it, when the head is lost. Who would end it knows of it no more.
    None where an actor's code runs without a session.
    """
    if not ray.is_initialized():
        return None
    return HeadWatch(ray.get_runtime_context().gcs_address, shop.head_s + LONGER_S, lambda why: os._exit(1))


def here(shop: Shop) -> Shop:
    """The shop on this node: where its driver named no cache, the one of this node's own settings."""
    if shop.cache:
        return shop
    from farm.config import load_config, usable_cache

    return replace(shop, cache=str(usable_cache(load_config())))


def bring(built: Built, data: Any, cache: str) -> None:
    """Puts a binary of another node where `rows.present` looks for it. What fails here, that gets from the catalog."""
    path = fetched_path(cache, built.binary.hash)
    if not built.binary.path or Path(built.binary.path).is_file() or path.is_file():
        return
    try:
        content = ray.get(data, timeout=30)
    except Exception:
        return  # the node that built it is gone, or no store had room
    if hashlib.sha256(content).hexdigest() == built.binary.hash:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_bytes(content)
        fresh.replace(path)


@ray.remote(max_restarts=0, max_task_retries=0)
class Device:
    """Owns the measuring slot of one device. Holds no CUDA context and no candidate: both live in killable children."""

    def __init__(self, device: str, expected_class: str, shop: Shop) -> None:
        self._device, self._expected, self._shop = device, expected_class, here(shop)
        self._node = ray.get_runtime_context().get_node_id()
        self._watch = end_with_head(shop)

    def hello(self, driver: dict[str, str]) -> Hello:
        own = versions()
        differing = tuple(
            f"{name} is {own[name]} here and {driver[name]} at the driver" for name in driver if own[name] != driver[name]
        )
        found, problems = stages_of(self._shop).inspect_device(self._device, self._shop, self._expected)
        return Hello(self._node, os.getpid(), found, differing + problems)

    def prove(self, parcel: bytes, data: tuple[Any, ...] = ()) -> bytes:
        """Packed: the row, and the seconds that the device was busy; or who kept it from being measured on, and how long it
        waited.

        parcel: a built job, packed. data: a reference to the binary's bytes, where they may travel; within a tuple Ray does not
        resolve it, so that one whose node is gone does not fail the call.
        """
        start = time.monotonic()
        built: Built = unpack(parcel)
        row = self._proved(built, data)
        return pack((row, time.monotonic() - start))

    def _proved(self, built: Built, data: tuple[Any, ...]) -> Row | str:
        stages = stages_of(self._shop)
        if data:
            bring(built, data[0], self._shop.cache)
        try:
            row: Row = stages.prove(built, self._shop, self._device)
        except StillBusy as busy:
            return str(busy)
        except Exception as error:
            row = stages.row_without_verdict(built.job, "not_run", trouble_of(error))
        row["ray_node_id"] = self._node
        return row
