"""Ray itself, and the session of it that this process is in: started, joined, watched, left. Runs no job and knows no actor.

Every module that needs Ray takes it from here, so that Ray's variables are set before it reads them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Ray reads these on import and on start. Workers at niceness 15 would be timed beside whatever else runs at 0.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from farm.console import InputError, library_is_broken
from farm.head import HeadWatch
from farm.jobs import Shop
from farm.knock import TurnedAway, knock

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
    """Connects to a running cluster, once. Raises InputError where none is at the address, it wants a token that this process has
    not, or another was joined before.
    """
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
    except TurnedAway:
        raise InputError("--address", f"{address!r} {_wanted_token(address)}") from None
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        wanted = "expected local, or a running cluster: auto, HOST:PORT or ray://HOST:PORT"
        raise InputError("--address", f"{wanted}; {address!r}: {_first_sentence(str(error))}") from None
    _SESSION["address"] = address  # which Ray may know by another name: a host's for its number
    _SESSION["dashboard"] = str(context.dashboard_url or "")
    if address.startswith("ray://"):
        _SESSION["client"] = address.removeprefix("ray://")


def _first_sentence(text: str) -> str:
    """Of what Ray says; where that holds a server's traceback, of its last line."""
    if "Traceback (most recent call last)" in text:
        text = text.strip().splitlines()[-1]
    return re.split(r"\. (?=[A-Z])", " ".join(text.split()))[0].rstrip(".")


def _check_joined(address: str) -> None:
    """Raises ValueError in a process that has joined another cluster than the one at the address."""
    here = ray.get_runtime_context().gcs_address
    if address not in ("auto", here, _SESSION.get("address")):
        raise ValueError(f"this process is connected to {here}")


def _knock(address: str) -> None:
    """As `farm.knock.knock`; "auto" is where Ray would look."""
    named = address if address != "auto" else os.environ.get("RAY_ADDRESS") or _last_head()
    try:
        knock(named, _token() if _shows_token(address) else "")
    except TurnedAway:
        raise
    except OSError:
        if address != "auto" or not _head_runs_here():  # which Ray finds itself, wherever it listens
            raise


def _last_head() -> str:
    """Where the head that was started last on this machine listened, living or not; "" where none is known."""
    with contextlib.suppress(OSError):
        return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").read_text("utf-8").strip()
    return ""


def _head_runs_here() -> bool:
    return any(p.info["name"] == "gcs_server" for p in psutil.process_iter(["name"]))


def _shows_token(address: str) -> bool:
    """Whether Ray shows a token there: where it is told to; where it is told nothing, only to a cluster that it finds itself."""
    mode = os.environ.get("RAY_AUTH_MODE")
    return mode.lower() == "token" if mode is not None else address == "auto"


def _token() -> str:
    """The token that Ray has at hand; "" where it has none, or is of a version that knows none."""
    with contextlib.suppress(ImportError, RuntimeError):
        from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # an extension without types

        loader = AuthenticationTokenLoader.instance()
        if loader.has_token(ignore_auth_mode=True):
            return str(loader.get_raw_token(ignore_auth_mode=True))
    return ""


def _wanted_token(address: str) -> str:
    """What is the matter where this process was turned away, and the cure."""
    place = "the cluster's token into ~/.ray/auth_token, or into RAY_AUTH_TOKEN"
    if not _token():
        return f"asks for a token, and there is none here: put {place}, and set RAY_AUTH_MODE=token"
    if not _shows_token(address):
        return "asks for a token: set RAY_AUTH_MODE=token here too"
    return f"asks for another token than the one here: put {place}"


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


def on_node(node_id: str, soft: bool = False) -> Any:
    """Where an actor or a task is to run. soft: on another node where this one is gone."""
    return NodeAffinitySchedulingStrategy(node_id, soft=soft)


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
