"""What runs on Ray's workers (builder and device actors, a node's look at itself), and the session. Knows no queue."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import pickle
import platform
import re
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# Ray reads these on import and on start. Workers at niceness 15 would be timed beside whatever else runs at 0.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import psutil
import ray

from farm.console import InputError, library_is_broken
from farm.devices import LocalDevice
from farm.executors import stages_of, trouble_of
from farm.head import HeadWatch
from farm.jobs import Built, Job, Row, Shop
from farm.quiet import StillBusy
from farm.rows import fetched_path


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


KNOCK_S = 10.0  # for a cluster's head to take a connection

#: What is known of the session that this process is in.
_SESSION: dict[str, str] = {}
_QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": True}


#: In a session of our own nobody looks at Ray's records of tasks and its metrics, which cost a millisecond of CPU an attempt.
LEAN = {"RAY_task_events_report_interval_ms": "0", "RAY_enable_metrics_collection": "0"}


def start_session(address: str, num_cpus: int, folder: str = "") -> None:
    """Connects to a cluster, or starts one on this machine for "local", whose files are then all below `folder` ("": Ray's own).

    The address is always explicit: Ray on its own joins any cluster that is announced on the machine.
    """
    if address != "local":
        join_cluster(address)
        return
    os.environ.update(LEAN)
    where: dict[str, Any] = {"_temp_dir": folder} if folder else {}
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, object_store_memory=256 << 20, **where, **_QUIET)


def join_cluster(address: str) -> None:
    """Connects to a running cluster, once. Raises InputError where none is at the address, or another was joined before."""
    if address.startswith("ray://") and find_spec("grpc") is None:
        raise InputError("--address", f"{address!r} needs Ray's client, not installed here: pip install 'kernel-farm[client]'")
    try:
        if ray.is_initialized() and not address.startswith("ray://"):
            _check_joined(address)
            return
        _knock(address)
        if ray.is_initialized():
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Ray Client connection timed out", UserWarning)  # the error says so too
            context = ray.init(address=address, **_QUIET)
    except (OSError, RuntimeError, ValueError) as error:
        said = re.split(r"\. (?=[A-Z])", " ".join(str(error).split()))[0].rstrip(".")
        wanted = "expected local, or a running cluster: auto or ray://HOST:PORT"
        token = (
            "" if os.environ.get("RAY_AUTH_MODE") == "token" else "; one that asks for a token wants RAY_AUTH_MODE=token here too"
        )
        raise InputError("--address", f"{wanted}; {address!r}: {said}{token}") from None
    _SESSION["dashboard"] = str(context.dashboard_url or "")
    if address.startswith("ray://"):
        _SESSION["client"] = address.removeprefix("ray://")


def _check_joined(address: str) -> None:
    """Raises ValueError in a process that has joined another cluster than the one at the address."""
    here = ray.get_runtime_context().gcs_address
    if address not in ("auto", here):
        raise ValueError(f"this process is connected to {here}")


def _knock(address: str) -> None:
    """Raises ValueError or OSError where nobody listens: Ray would wait for half a minute or longer, and say it in many lines."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or _last_head()
    parts = urlsplit(address if "://" in address else f"//{address}")
    if not parts.hostname or parts.port is None:
        if parts.scheme == "ray":
            raise ValueError("names no host and port, such as ray://head:10001")
        return  # Ray has its own words for it
    try:
        socket.create_connection((parts.hostname, parts.port), KNOCK_S).close()
    except socket.gaierror as error:
        raise OSError(f"{parts.hostname}: no such host ({error.strerror})") from None
    except OSError as error:
        raise OSError(f"nobody listens at {parts.hostname}:{parts.port} ({error.strerror or error})") from None


def _last_head() -> str:
    """Where the head that was started last on this machine listened; "" if there is none, or one runs: Ray finds it itself."""
    if any(p.info["name"] == "gcs_server" for p in psutil.process_iter(["name"])):
        return ""
    with contextlib.suppress(OSError):
        return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").read_text("utf-8").strip()
    return ""


def stop_session() -> None:
    if not abandoned():
        ray.shutdown()
    _SESSION.clear()


def watch_head(shop: Shop, lost: Callable[[str], None]) -> HeadWatch:
    """For a driver. Of a ray:// address it is the client's server that is watched, on the same machine."""
    place = _SESSION.get("client") or ray.get_runtime_context().gcs_address
    return HeadWatch(place, shop.head_s, lost)


def own_node() -> str:
    """Of this process; of a client, that of its server."""
    return str(ray.get_runtime_context().get_node_id())


def abandoned() -> bool:
    return "lost" in _SESSION


def abandon() -> None:
    """The head is lost: nothing is asked of Ray any more, which would wait for it, and at last end this process."""
    _SESSION["lost"] = "yes"
    atexit.unregister(ray.shutdown)
    library_is_broken()


def kill(actor: Any) -> None:
    """Ends an actor, whatever it is doing. Without a head it ends by itself (`end_with_head`)."""
    if not abandoned():
        with contextlib.suppress(Exception):  # it may be gone
            ray.kill(actor, no_restart=True)


def dashboard() -> str:
    """The address of the cluster's dashboard; "" where it has none."""
    url = _SESSION.get("dashboard", "")
    return url if not url or "://" in url else f"http://{url}"
