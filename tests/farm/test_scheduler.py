"""The scheduler without Ray and without kernels: counts, resuming, retries, budgets and stopping."""

from __future__ import annotations

import asyncio
import errno
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from catalog.errors import StorageError
from farm import standin
from farm.executors import LocalExecutor, NoExecutor, StartInterrupted
from farm.jobs import Job, Row, Shop, device_seconds
from farm.plan import Budget
from farm.progress import PlainDisplay, Tally
from farm.scheduler import Search, Stopped, Sweep
from generator.canonical import digest_text
from generator.spec import AttentionSpec

SPEC = AttentionSpec(1, 1, 8, 8, 1, 4, 4)


def job(number: int, words: str = "") -> Job:
    spec = AttentionSpec(1, 1, 8, 8, 1, 4, 4, name=words)
    return Job(digest_text(f"{number}"), spec, "cpu-avx2", f"program {number}", device_key=digest_text("cpu"))


class Rows(list[Row]):
    """A sink that keeps rows, and knows the ended ones as a catalog would."""

    def append(self, row: Row) -> str:  # type: ignore[override]
        super().append(row)
        return str(len(self))

    def get(self, key: str) -> Row | None:
        return next((row for row in reversed(self) if row["attempt_key"] == key), None)


def search_of(*jobs: Job) -> Search:
    async def search(attempt: Any) -> None:
        await asyncio.gather(*(attempt(j) for j in jobs))

    return search


def sweep(tmp_path: Path, rows: Rows, **options: Any) -> Sweep:
    shop = Shop(str(tmp_path), str(tmp_path), stages="farm.standin")
    executor = options.pop("executor", None) or LocalExecutor(shop)
    display = PlainDisplay(Tally(), lambda line: None)
    return Sweep(executor, rows, rows, display, interrupted_row=standin.row_without_verdict, **options)


def run(made: Sweep, *searches: Search) -> Sweep:
    asyncio.run(asyncio.wait_for(made.run(searches), 30))
    assert made.counts.balanced
    made.executor.close()
    return made


def test_every_planned_attempt_is_one_row(tmp_path: Path) -> None:
    rows = Rows()
    done = run(sweep(tmp_path, rows), search_of(job(1), job(2, "reason=wrong_value")), search_of(job(3)))
    assert (done.counts.planned, dict(done.counts.by_reason)) == (3, {"ok": 2, "wrong_value": 1})
    assert len(rows) == 3 and len({row["attempt_key"] for row in rows}) == 3
    told = [shown.row["row_id"] for shown in done.display.tally.best.values()]
    assert told and set(told) <= {"1", "2", "3"}, "the closing table names the rows as they were stored"


class Unstartable(LocalExecutor):
    asked, why = 0, NoExecutor("Ray did not start")

    def submit(self, job: Job) -> Future[Row]:
        self.asked += 1
        raise self.why


def test_where_nothing_can_run_jobs_the_sweep_ends_with_the_reason_and_is_gone_on_with(tmp_path: Path) -> None:
    rows, jobs = Rows(), [search_of(job(1), job(2)), search_of(job(3))]
    executor = Unstartable(Shop(str(tmp_path), str(tmp_path), stages="farm.standin"))
    broken = run(sweep(tmp_path, rows, executor=executor), *jobs)
    assert broken.stop_reason == "Ray did not start" and broken.is_stopped and executor.asked == 1
    assert {row["reason_code"] for row in rows} == {"not_run"} and "stopped: Ray did not start" in rows[0]["message"]
    again = run(sweep(tmp_path, rows), *jobs)
    assert again.counts.planned == 3 and again.counts.by_reason == {"ok": 3}


def test_a_signal_while_the_executor_starts_ends_the_sweep_at_once(tmp_path: Path) -> None:
    rows = Rows()
    executor = Unstartable(Shop(str(tmp_path), str(tmp_path), stages="farm.standin"))
    executor.why = StartInterrupted("SIGINT")
    done = run(sweep(tmp_path, rows, executor=executor), search_of(job(1), job(2)))
    assert done.stop_reason == "stopped by SIGINT" and executor.asked == 1
    assert [row["message"] for row in rows] == ["stopped: stopped by SIGINT"] * done.counts.planned


def test_a_rerun_does_nothing_twice_and_failures_are_final_too(tmp_path: Path) -> None:
    rows = Rows()
    jobs = search_of(job(1), job(2, "reason=wrong_value"), job(3, "reason=missing_device"))
    run(sweep(tmp_path, rows), jobs)
    again = run(sweep(tmp_path, rows), jobs)
    assert (again.counts.known, again.counts.planned) == (2, 1), "only the transient one is tried again"
    assert [row["attempt_no"] for row in rows if row["attempt_key"] == job(3).key] == [1, 2]


def test_two_searches_for_one_attempt_make_it_once(tmp_path: Path) -> None:
    rows = Rows()
    run(sweep(tmp_path, rows), search_of(job(1, "prove=0.1")), search_of(job(1, "prove=0.1")))
    assert len(rows) == 1


def test_transient_failures_are_tried_again_up_to_a_cap(tmp_path: Path) -> None:
    rows = Rows()
    run(sweep(tmp_path, rows), search_of(job(1, "reason=lost_node")))
    assert [row["attempt_no"] for row in rows] == [1, 2, 3]


def test_a_fault_of_our_own_costs_one_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(job: Job, shop: Shop) -> Row:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(standin, "build", broken)
    rows = Rows()
    run(sweep(tmp_path, rows), search_of(job(1)))
    assert (
        rows[0]["reason_code"] == "not_run"
        and "ZeroDivisionError" in rows[0]["message"]
        and "test_scheduler" in rows[0]["message"]
    )


def test_budgets_stop_admission(tmp_path: Path) -> None:
    rows = Rows()
    done = run(sweep(tmp_path, rows, budget=Budget(attempts=3)), *(search_of(job(i)) for i in range(50)))
    assert len(rows) == 3 and done.stop_reason == "budget: 3 attempts are made"
    done = run(sweep(tmp_path, Rows(), budget=Budget(minutes=0)), search_of(job(1)))
    assert done.counts.planned == 0 and "minutes" in done.stop_reason


class Devices:
    """Two devices; each attempt has one for three seconds, if its row is to be believed."""

    capacity = 50

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)

    def submit(self, job: Job) -> Future[Row]:
        return self._pool.submit(self._prove, job)

    def _prove(self, job: Job) -> Row:
        time.sleep(0.01)
        return standin.row_without_verdict(job, "ok", "") | {"verify_s": 2.0, "measure_s": 1.0}

    def close(self) -> None:
        self._pool.shutdown()


def test_a_budget_of_device_seconds_is_overshot_by_an_attempt_a_device_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    rows = Rows()
    jobs = search_of(*(job(i) for i in range(40)))
    done = run(sweep(tmp_path, rows, executor=Devices(), budget=Budget(gpu_s=30)), jobs, jobs)
    spent = sum(map(device_seconds, rows))
    assert 30 <= spent <= 30 + 2 * 3 and done.stop_reason.startswith("budget: ")
    assert set(done.counts.by_reason) == {"ok", "budget_stopped"}
    again = run(sweep(tmp_path, rows, executor=Devices(), budget=Budget(gpu_s=60)), jobs)
    assert again.counts.known >= 10, "what was measured counts, and is not measured again"
    spent = sum(map(device_seconds, rows))
    assert 60 <= spent <= 60 + 2 * 3


def test_a_search_that_stops_the_sweep_says_why(tmp_path: Path) -> None:
    async def hopeless(attempt: Any) -> None:
        raise Stopped("model unavailable: nobody listens")

    done = run(sweep(tmp_path, Rows()), hopeless, *(search_of(job(i)) for i in range(50)))
    assert done.stop_reason == "model unavailable: nobody listens" and done.counts.planned < 5


def test_searches_that_wait_for_something_else_may_be_many(tmp_path: Path) -> None:
    waiting, most = 0, 0

    async def search(attempt: Any) -> None:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.05)
        waiting -= 1

    run(sweep(tmp_path, Rows(), width=20), *[search] * 60)
    assert most == 20


def test_a_job_that_brings_the_end_that_is_known_is_not_written_again(tmp_path: Path) -> None:
    rows = Rows()
    for message, count in (("no program", 1), ("no program", 1), ("another trouble", 2)):
        run(sweep(tmp_path, rows), search_of(replace(job(1), trouble=("author_failed", message))))
        assert len(rows) == count


def test_stopping_leaves_a_row_for_what_was_in_hand(tmp_path: Path) -> None:
    rows = Rows()
    made = sweep(tmp_path, rows)

    async def stop_soon() -> None:
        running = asyncio.ensure_future(made.run([search_of(job(1), job(2, "prove=60"), job(3))]))
        while not rows:
            await asyncio.sleep(0.01)
        made.stop("interrupted")
        await running

    started = time.monotonic()
    asyncio.run(stop_soon())
    assert time.monotonic() - started < 30 and made.counts.balanced
    assert [row["reason_code"] for row in rows] == ["ok", "not_run", "not_run"]
    assert "interrupted" in rows[1]["message"]


def test_what_comes_before_the_first_attempt_is_not_waited_for_when_the_sweep_is_stopped(tmp_path: Path) -> None:
    """A cluster's devices may take minutes to say what they are, and so may an author to start."""
    made, ended = sweep(tmp_path, Rows()), []

    async def quick() -> int:
        return 7

    async def long() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("long")

    async def main() -> None:
        assert await made.unless_stopped(quick()) == 7
        asyncio.get_running_loop().call_later(0.05, made.stop, "stopped by SIGINT")
        assert await made.unless_stopped(long()) is None and ended == ["long"]

    asyncio.run(asyncio.wait_for(main(), 20))
    made.executor.close()


def test_a_long_plan_is_never_a_list(tmp_path: Path) -> None:
    """Searches are drawn from the generator only as fast as the executor ends them."""

    class Instant:
        capacity = 4

        def submit(self, job: Job) -> Future[Row]:
            future: Future[Row] = Future()
            future.set_result(standin.row_without_verdict(job, "ok", ""))
            return future

        def close(self) -> None: ...

    drawn = 0

    def searches() -> Any:
        nonlocal drawn
        for i in range(200):
            drawn += 1
            assert drawn - len(rows) <= 6
            yield search_of(job(i))

    rows = Rows()
    made = sweep(tmp_path, rows, executor=Instant())
    asyncio.run(made.run(searches()))
    assert len(rows) == 200 and made.counts.balanced


class Flaky(Rows):
    """A shared folder that is gone for some appends."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def append(self, row: Row) -> str:  # type: ignore[override]
        if self.failures:
            self.failures -= 1
            raise StorageError("no space left on device")
        return super().append(row)


def test_rows_wait_for_storage_that_comes_back(tmp_path: Path) -> None:
    rows = Flaky(3)
    run(sweep(tmp_path, rows, storage_patience_s=2.0), search_of(job(1), job(2)))
    assert sorted(row["attempt_key"] for row in rows) == sorted([job(1).key, job(2).key])


def test_storage_that_stays_away_ends_the_sweep_in_one_sentence(tmp_path: Path) -> None:
    made = sweep(tmp_path, Flaky(10**6), storage_patience_s=0.2)
    asyncio.run(asyncio.wait_for(made.run([search_of(job(1))]), 30))
    made.executor.close()
    assert made.stop_reason == "rows cannot be stored: no space left on device"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/cache/x.so"), "no space left for /cache/x.so: make room"),
        (StorageError("/shared/artifacts: disk full"), "no space left, or no way to the catalog: /shared/artifacts: disk full"),
    ],
)
def test_a_full_disk_ends_the_sweep_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def build(*args: object) -> None:
        raise error

    monkeypatch.setattr(standin, "build", build)
    rows = Rows()
    made = sweep(tmp_path, rows)
    asyncio.run(made.run([search_of(job(i)) for i in range(50)]))
    made.executor.close()
    assert made.stop_reason.startswith(words) and made.counts.balanced and len(rows) < 10
    assert rows[0]["reason_code"] == "not_run" and rows[0]["message"].startswith(words)
