"""Which job is built next: of the kind with the least in stock, and there the longest; nothing is lost on the way."""

from __future__ import annotations

from farm.jobs import Job
from farm.queues import Queues, Ready, kind_of
from generator.canonical import digest_text
from generator.spec import AttentionSpec

T4, A100 = ("sm_75", "t4"), ("sm_80", "a100")


def job(number: int, kind: tuple[str, str | None] = T4, length: int = 64, measure_s: float = 0.5) -> Job:
    spec = AttentionSpec(1, 1, 8, 8, 1, length, length)
    return Job(digest_text(str(number)), spec, kind[0], str(number), measure_s=measure_s, device_key=kind[1])


def drain(queues: Queues, devices: dict, most: int = 10**6) -> list[Job]:
    found = []
    while (made := queues.next_job(devices, most)) is not None:
        found.append(made)
    return found


def test_the_longest_stage_comes_first_and_equal_ones_in_their_order() -> None:
    queues = Queues()
    jobs = [job(1, length=64), job(2, length=512), job(3, length=64, measure_s=2.0), job(4, length=512)]
    for made in jobs:
        queues.add(made)
    assert drain(queues, {T4: 1}) == [jobs[2], jobs[1], jobs[3], jobs[0]]


def test_every_kind_gets_its_share_however_many_wait_for_another() -> None:
    queues = Queues()
    for number in range(100):
        queues.add(job(number, T4))
    for number in range(100, 108):
        queues.add(job(number, A100))
    first = [kind_of(made) for made in (queues.next_job({T4: 1, A100: 3}, 100) for _ in range(12)) if made]
    assert first.count(A100) == 8 and first.count(T4) == 4, "three devices need three times as much as one"


def test_a_kind_with_enough_in_stock_waits_and_holds_up_nobody() -> None:
    queues = Queues()
    for number in range(10):
        queues.add(job(number, T4))
    queues.add(job(10, A100))
    assert [kind_of(made) for made in drain(queues, {T4: 1, A100: 1}, 4)].count(T4) == 4
    assert queues.num_jobs == 6 and queues.waiting() == {T4: (6, 0)}
    queues.ended(job(0, T4))
    assert len(drain(queues, {T4: 1, A100: 1}, 4)) == 1


def test_what_is_only_built_comes_last() -> None:
    queues = Queues()
    queues.add(job(1, ("sm_90a", None)))
    queues.add(job(2, T4))
    assert [kind_of(made)[0] for made in drain(queues, {T4: 1}, 4)] == ["sm_75", "sm_90a"]


def test_what_a_device_gave_back_is_next() -> None:
    queues = Queues()
    ready = [Ready(job(n), b"") for n in range(4)]
    queues.ready[T4].extend(ready[2:])
    queues.put_back(ready[:2])
    assert list(queues.ready[T4]) == ready and queues.num_ready == 4
