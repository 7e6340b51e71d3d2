"""What the farm itself costs: CPU of all its processes for an attempt, how busy devices are, memory against the plan's length.

    python benchmarks/farm_scale.py overhead --devices 1 2 4 8 16 32 --attempts 400
    python benchmarks/farm_scale.py memory --attempts 10000 100000 1000000

Candidates are pauses (farm.standin), so that all CPU time that is seen is the farm's. Measures no kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from catalog import store
from farm import standin
from farm.jobs import Job, Row, Shop
from farm.progress import PlainDisplay, Tally
from farm.scheduler import Search, Sweep
from generator.canonical import digest_text
from generator.spec import AttentionSpec


def job(number: int, words: str) -> Job:
    spec = AttentionSpec(1, 1, 8, 8, 1, 1 + number % 100_000, 4, name=words)
    return Job(digest_text(str(number)), spec, "cpu-avx2", f"program {number}", device_key=digest_text("cpu"))


async def _one(made: Job, attempt: Any) -> None:
    await attempt(made)


def searches(count: int, words: str) -> Iterator[Search]:
    for number in range(count):
        yield partial(_one, job(number, words))


class Nothing:
    """No attempt ended before."""

    def get(self, key: str) -> None:
        return None


def cpu_s() -> float:
    """CPU seconds of this process and of all below it that live."""
    total = 0.0
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        try:
            times = process.cpu_times()
            total += times.user + times.system
        except psutil.Error:
            continue
    return total


def overhead(num_devices: int, attempts: int, candidate_s: float) -> dict[str, Any]:
    """One sweep of pauses on so many devices, each with a worker of its own."""
    from farm.actors import start_session
    from farm.nodes import DeviceWish
    from farm.ray_executor import RayExecutor

    with tempfile.TemporaryDirectory() as folder:
        start_session("local", max(2, num_devices // 4))
        shop = Shop(f"{folder}/catalog", folder, stages="farm.standin")
        executor = RayExecutor(
            shop, tuple(DeviceWish("cpu", ("cpu-avx2",)) for _ in range(num_devices)), max(2, num_devices // 4)
        )
        opened = store.open(shop.catalog, create=True)
        with opened.writer("scale") as writer:
            warm = Sweep(executor, writer, Nothing(), PlainDisplay(Tally(), lambda line: None))
            asyncio.run(warm.run(searches(4 * num_devices, "prove=0.3")))  # every worker is up before the clock starts
            before, busy, started = cpu_s(), executor.busy_s(), time.monotonic()
            sweep = Sweep(executor, writer, Nothing(), PlainDisplay(Tally(), lambda line: None))
            counts = asyncio.run(sweep.run(partial_searches(attempts, candidate_s)))
            wall_s = time.monotonic() - started
            used, busy = cpu_s() - before, executor.busy_s() - busy
        executor.close()
        executor.end_session()
        assert counts.by_reason["ok"] == attempts, counts
        return {
            "devices": num_devices,
            "attempts": attempts,
            "candidate_ms": 1e3 * candidate_s,
            "wall_s": round(wall_s, 2),
            "attempts_per_s": round(attempts / wall_s, 1),
            "cpu_ms_an_attempt": round(1e3 * used / attempts, 2),
            "busy_share": round(busy / (wall_s * num_devices), 3),
        }


def partial_searches(count: int, candidate_s: float) -> Iterator[Search]:
    for number in range(count):
        yield partial(_one, job(1_000_000 + number, f"prove={candidate_s}"))


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
    one.add_argument("--candidate-ms", type=float, default=50)
    two = commands.add_parser("memory")
    two.add_argument("--attempts", type=int, nargs="+", default=[10_000, 100_000])
    two.add_argument("--catalog", action="store_true", help="write real rows")
    parser.add_argument("-o", "--output", type=Path, help="where the results go, as JSON lines")
    args = parser.parse_args()
    if args.command == "overhead":
        runs = (in_child(overhead, n, args.attempts, args.candidate_ms / 1e3) for n in args.devices)
    else:
        runs = (in_child(memory, n, args.catalog) for n in args.attempts)
    for result in runs:
        line = json.dumps(result)
        print(line, flush=True)
        if args.output:
            with args.output.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
