"""What the farm itself costs: CPU of all its processes for an attempt, how busy devices are, memory against the plan's length.

    python benchmarks/farm_scale.py nodes --nodes 1 2 4 8 16 32 --attempts 40     # a stand-in node each, 50 ms candidates
    python benchmarks/farm_scale.py nodes --nodes 4 --candidate-ms 1000           # how busy devices are
    python benchmarks/farm_scale.py overhead --devices 1 4                        # devices of one machine
    python benchmarks/farm_scale.py memory --attempts 10000 100000 1000000        # plans stream
    python benchmarks/farm_scale.py author --attempts 200                         # what the rule author costs the driver

Candidates are pauses (farm.standin), so that all CPU time that is seen is the farm's. Nodes are those of Ray's own test cluster,
on this one machine. Measures no kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from catalog import store
from farm import standin
from farm.authors import Author
from farm.jobs import Job, Row, Shop
from farm.places import Place
from farm.plan import Plan, Tuning
from farm.progress import PlainDisplay, Tally
from farm.scheduler import Counts, Search, Sweep
from farm.search import Versions
from farm.sweep import _solve
from generator.canonical import digest_text
from generator.spec import AttentionSpec

#: A process's name -> what it is; workers are named by Ray for what they run.
KINDS = {"raylet": "raylets", "gcs_server": "control store"}
WARM_S = 3.0  # for workers that Ray starts ahead


def job(number: int, words: str, target: str = "cpu-avx2", device_key: str = digest_text("cpu")) -> Job:
    spec = AttentionSpec(1, 1, 8, 8, 1, 1 + number % 100_000, 4, name=words)
    return Job(digest_text(str(number)), spec, target, f"program {number}", device_key=device_key)


async def _one(made: Job, attempt: Any) -> None:
    await attempt(made)


def searches(count: int, words: str) -> Iterator[Search]:
    for number in range(count):
        yield partial(_one, job(number, words))


class Nothing:
    """No attempt ended before."""

    def get(self, key: str) -> None:
        return None


def cpu_by_kind() -> Counter[str]:
    """CPU seconds of all processes below this one that live, by what they are."""
    found = Counter[str]()
    for process in psutil.Process().children(recursive=True):
        try:
            times, name = process.cpu_times(), process.name()
        except psutil.Error:
            continue
        kind = KINDS.get(name, "workers" if name.startswith("ray::") else "Ray's agents")
        found["author" if name.startswith("ray::AuthorAct") else kind] += times.user + times.system
    return found


def overhead(num_devices: int, attempts: int, candidate_s: float) -> dict[str, Any]:
    """One sweep of pauses on so many devices of one machine, each with a worker of its own."""
    from farm.nodes import DeviceWish
    from farm.ray_executor import RayExecutor
    from farm.session import start_session

    with tempfile.TemporaryDirectory() as folder:
        shop, builders = Shop(f"{folder}/catalog", folder, stages="farm.standin"), max(2, num_devices // 4)
        start_session("local", builders)
        wishes = tuple(DeviceWish("cpu", ("cpu-avx2",)) for _ in range(num_devices))
        executor = RayExecutor(shop, wishes, builders)
        return {"devices": num_devices} | swept(executor, shop, "cpu-avx2", "cpu", num_devices, attempts, candidate_s)


def nodes(num_nodes: int, attempts: int, candidate_s: float, far_author: bool) -> dict[str, Any]:
    """The same on a cluster: a head with builders, and so many nodes with a stand-in A100 each; the author an actor, too."""
    from ray.cluster_utils import Cluster

    from farm.ray_executor import RayExecutor
    from farm.session import LEAN, start_session

    os.environ.update(LEAN)  # as a session of the farm's own has it, and without a dashboard; a cluster may be started so, too
    builders = max(2, num_nodes // 4)
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": builders, "include_dashboard": False, "resources": {"class_head": 1}}
    )
    for _ in range(num_nodes):
        cluster.add_node(num_cpus=1, num_gpus=1, resources={"class_a100": 1}, object_store_memory=80 << 20)
    cluster.wait_for_nodes()
    try:
        with tempfile.TemporaryDirectory() as folder:
            shop = Shop(f"{folder}/catalog", folder, stages="farm.standin")
            start_session(cluster.address, 0)
            executor = RayExecutor(shop, targets=("sm_80",))
            while not executor.settled or len(executor.state()["devices"]) < num_nodes:
                time.sleep(0.1)
            args = (executor, shop, "sm_80", "a100", num_nodes, attempts * num_nodes, candidate_s, far_author)
            return {"nodes": num_nodes, "author": "actor" if far_author else "driver"} | swept(*args)
    finally:
        cluster.shutdown()


def swept(
    executor: Any,
    shop: Shop,
    target: str,
    device_class: str,
    num_devices: int,
    attempts: int,
    candidate_s: float,
    far_author: bool = False,
) -> dict[str, Any]:
    """Runs a sweep after a short one that brings every worker up; what it took, a dict for the results."""
    from farm.author_actor import author_on_ray
    from farm.far_author import AHEAD

    key, opened = digest_text(device_class), store.open(shop.catalog, create=True)

    def problems(author: Author | None, first: int, count: int, words: str) -> Iterator[Search]:
        for number in range(first, first + count):
            made = job(number, words, target, key)
            place = Place(target, key, device_class)
            yield partial(_solve, author, made.spec, place) if author else partial(_one, made)

    async def run(author: Author | None, first: int, count: int, words: str, writer: Any) -> Counts:
        more = {"width": author.width, "ahead": AHEAD} if author else {}
        sweep = Sweep(executor, writer, Nothing(), PlainDisplay(Tally(), lambda line: None), **more)
        return await sweep.run(problems(author, first, count, words))

    async def both(writer: Any, author: Author | None) -> tuple[Counts, Counter[str], float, float]:
        await run(author, 0, 4 * num_devices, "prove=0.3", writer)
        await asyncio.sleep(WARM_S)
        before, busy, started = cpu_by_kind(), executor.busy_s(), time.monotonic()
        own_s = time.process_time()  # after the look at all processes, which is none of the farm's work
        counts = await run(author, 1_000_000, attempts, f"prove={candidate_s}", writer)
        wall_s, used = time.monotonic() - started, Counter({"driver": time.process_time() - own_s})
        return counts, used + cpu_by_kind() - before, executor.busy_s() - busy, wall_s

    async def whole(writer: Any) -> tuple[Counts, Counter[str], float, float]:
        if not far_author:
            return await both(writer, None)
        plan, versions = Plan("scale", (), tuning=Tuning(candidates=1)), Versions(*standin.versions())
        async with author_on_ray(plan, shop, versions, None, print, standin.author_of) as author:
            return await both(writer, author)

    with opened.writer("scale") as writer:
        counts, used, busy, wall_s = asyncio.run(whole(writer))
    executor.close()
    executor.end_session()
    assert counts.by_reason["ok"] == attempts == counts.planned, counts
    return {
        "attempts": attempts,
        "candidate_ms": 1e3 * candidate_s,
        "wall_s": round(wall_s, 2),
        "attempts_per_s": round(attempts / wall_s, 1),
        "cpu_ms_an_attempt": round(1e3 * used.total() / attempts, 2),
        "cpu_ms_by_process": {kind: round(1e3 * s / attempts, 2) for kind, s in used.most_common()},
        "busy_share": round(busy / (wall_s * num_devices), 3),
        "driver_mib": round(psutil.Process().memory_info().rss / 2**20),
    }


class Instant:
    """Ends every job at once: what is left is the driver's own work."""

    capacity = 64

    def submit(self, made: Job) -> Future[Row]:
        future: Future[Row] = Future()
        future.set_result(standin.row_without_verdict(made, "ok", ""))
        return future

    def close(self) -> None: ...


class Counting:
    """A sink that keeps nothing."""

    def append(self, row: Row) -> str:
        return ""


def memory(attempts: int, with_catalog: bool) -> dict[str, Any]:
    """A plan of so many attempts past an executor that answers at once; in a fresh process, since memory never shrinks."""
    started, used = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        writer = store.open(f"{folder}/catalog", create=True).writer("scale") if with_catalog else Counting()
        sweep = Sweep(Instant(), writer, Nothing(), PlainDisplay(Tally(), lambda line: None))  # type: ignore[arg-type]
        counts = asyncio.run(sweep.run(searches(attempts, "")))
        assert counts.balanced and counts.planned == attempts
    return {
        "attempts": attempts,
        "rows": "written to a catalog" if with_catalog else "dropped",
        "wall_s": round(time.monotonic() - started, 1),
        "cpu_ms_an_attempt": round(1e3 * (time.process_time() - used) / attempts, 3),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def author(attempts: int) -> dict[str, Any]:
    """CPU of the driver for an attempt's program: sketch, code, choices of tile sizes, filled and printed; by the rule author."""
    from farm.authors import RuleSearch
    from farm.plan_file import load_plan
    from farm.search import Versions

    plan, made = load_plan(), 0

    async def count(one: Job) -> Row:
        nonlocal made
        made += 1
        return standin.row_without_verdict(one, "ok", "")

    async def solve() -> float:
        search, used = RuleSearch(plan, Versions("t", "h")), time.process_time()
        while made < attempts:
            for spec in plan.specs():
                await search.solve(spec, "sm_80" if spec.dtype != "fp32" else "cpu-avx2", count)
        return time.process_time() - used

    used = asyncio.run(solve())
    return {"attempts": made, "cpu_ms_an_attempt": round(1e3 * used / made, 2)}


def machine() -> dict[str, Any]:
    """Where and when a result was measured."""
    from verifier.environment import cores_given, cpu_name, package_version

    busy = round(os.getloadavg()[0], 1)
    about = {"cpu": cpu_name(), "cores": cores_given(), "load_average": busy, "ray": package_version("ray")}
    return {"date": dt.datetime.now(dt.UTC).date().isoformat(), "machine": about}


def in_child(work: Any, *args: Any) -> dict[str, Any]:
    """The result of a function in a fresh process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, json.dumps(work(*args)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    result: dict[str, Any] = json.loads(text)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("overhead")
    one.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    one.add_argument("--attempts", type=int, default=400)
    many = commands.add_parser("nodes")
    many.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    many.add_argument("--attempts", type=int, default=40, help="for each node")
    many.add_argument("--author", choices=("actor", "driver"), default="actor", help="where problems become attempts")
    for parser_ in (one, many):
        parser_.add_argument("--candidate-ms", type=float, default=50)
    two = commands.add_parser("memory")
    two.add_argument("--attempts", type=int, nargs="+", default=[10_000, 100_000])
    two.add_argument("--catalog", action="store_true", help="write real rows")
    commands.add_parser("author").add_argument("--attempts", type=int, default=200)
    parser.add_argument("-o", "--output", type=Path, help="where the results go, as JSON lines")
    args = parser.parse_args()
    match args.command:
        case "overhead":
            runs = (in_child(overhead, n, args.attempts, args.candidate_ms / 1e3) for n in args.devices)
        case "nodes":
            runs = (in_child(nodes, n, args.attempts, args.candidate_ms / 1e3, args.author == "actor") for n in args.nodes)
        case "author":
            runs = (in_child(author, args.attempts) for _ in range(1))
        case _:
            runs = (in_child(memory, n, args.catalog) for n in args.attempts)
    for result in runs:
        line = json.dumps({"what": args.command} | result | machine())
        print(line, flush=True)
        if args.output:
            with args.output.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
