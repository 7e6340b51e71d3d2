"""What a language-model author costs besides its model: from recorded answers to a kernel, hundreds of slow answers, kills.

    python benchmarks/author_bars.py kernel --runs 3      # seconds from a request to a verified, measured CPU kernel
    python benchmarks/author_bars.py waiting --requests 200 --delay 30
    python benchmarks/author_bars.py kills --kills 60

A server of this file plays answers that lie in tests/responses. Measures no model and judges no kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import psutil

import catalog
from generator.authors.answers import extract
from generator.authors.clients import OpenAIClient
from generator.authors.endpoint import Endpoint
from generator.authors.exchange import Message, Request
from generator.authors.transcripts import TranscriptStore
from generator.canonical import to_plain
from verifier.environment import environment

ROOT = Path(__file__).parents[1]
#: First answers of a model as they came (tests/responses), one block a stage; and the problem that they answer.
RECORDED = (ROOT / "tests/responses/prefix_mla.answer.md").read_text()
PLAN = """
name: recorded
author: llm
author_options: {model: recorded, repairs: 2, improvements: 0}
tuning: {candidates: 1, measure_s: 0.2}
targets: [cpu]
models:
  - {name: MLA with a prefix, num_heads: 4, num_kv_heads: 2, head_dim: 192, head_dim_v: 128, dtypes: [bf16],
     masks: [{prefix: {length: 40}}], seqlens: [100]}
"""


#: Seconds that the server takes for an answer where sweeps are killed, and kills of one sweep before it may end.
ANSWER_S, KILLS_A_SWEEP = 0.3, 4
PARTS = ("queue_s", "compile_s", "verify_s", "measure_s")


def completion(text: str) -> bytes:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 100, "completion_tokens": 50}
    return json.dumps({"object": "chat.completion", "model": "recorded", "choices": [choice], "usage": usage}).encode()


def serve(answer: Callable[[str], str], delay_s: float, ports: Queue[int], seen: Path) -> None:
    """Answers every request after a delay; writes to `seen` what each one asked, a line each, as soon as it is read."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = int(head.split("content-length:")[1].split("\r\n")[0])
                request = json.loads(await reader.readexactly(size))
                log.write(json.dumps(request["messages"]) + "\n")
                await asyncio.sleep(delay_s)
                body = completion(answer(request["messages"][-1]["content"]))
                reply = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                writer.write(reply.encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(one, "127.0.0.1", 0, backlog=1024, limit=1 << 24)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    with seen.open("a", buffering=1) as log:
        asyncio.run(main())


class Server:
    """`serve` in a process of its own, so that its CPU time is not ours."""

    def __init__(self, answer: Callable[[str], str], delay_s: float = 0.0) -> None:
        context = multiprocessing.get_context("fork")
        ports: Queue[int] = context.Queue()
        self._folder = tempfile.TemporaryDirectory()
        self._seen, self._read = Path(self._folder.name) / "seen", 0
        self._process = context.Process(target=serve, args=(answer, delay_s, ports, self._seen), daemon=True)
        self._process.start()
        self.url = f"http://127.0.0.1:{ports.get(timeout=30)}/v1"

    def asked(self) -> list[str]:
        """What was asked since the last call."""
        lines = self._seen.read_text().rpartition("\n")[0].splitlines()  # the last one may be on its way
        found, self._read = lines[self._read :], len(lines)
        return found

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()
        self._folder.cleanup()


def recorded(_: str) -> str:
    return RECORDED


def echo(question: str) -> str:
    return f"answer to {question}"


def two_wrong_then_right(question: str) -> str:
    """A sketch; then a program with a fault, told of it another one with another fault, and at last the right one."""
    right = extract(RECORDED).get("tl") or ""
    if "tagged `sketch`" in question:
        return RECORDED
    if "PA is no tile" in question:
        return f"```tl\n{right}```"
    if "What was found" in question:
        return "```tl\n" + "\n".join(line for line in right.split("\n") if "Reshape" not in line) + "```"
    return "```tl\n" + right.replace("Compute", "Komputiere", 1) + "```"


def sweep(folder: Path, url: str, cache: Path) -> subprocess.Popen[str]:
    (folder / "plan.yaml").write_text(PLAN)
    command = [sys.executable, "-m", "farm", "sweep", str(folder / "plan.yaml"), "--catalog", str(folder / "catalog")]
    command += ["--base-url", url, "--executor", "local", "--json"]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "FARM_CACHE": str(cache), "OPENAI_API_KEY": "sk-benchmark-0123456789"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)


def kernel(runs: int) -> dict[str, Any]:
    """Wall seconds of `farm sweep` on recorded answers: the first run tests the machine too, the others find that done.

    `queue_s` of it went by while other processes of this machine measured: the bar is held against the rest.
    """
    found = []
    with tempfile.TemporaryDirectory() as name, Server(recorded) as server:
        for run in range(runs):
            folder = Path(name) / str(run)
            folder.mkdir()
            start, before = time.monotonic(), cpu_of_children_s()
            process = sweep(folder, server.url, Path(name) / "cache")
            out, err = process.communicate(timeout=600)
            wall_s = time.monotonic() - start
            [best] = json.loads(out)["best"]
            assert best["verdict"] == "verified" and best["ours_ms"] > 0, err
            [row] = catalog.open(folder / "catalog").rows(PARTS).to_pylist()
            found.append(
                {"wall_s": round(wall_s, 2), "cpu_s": round(cpu_of_children_s() - before, 2)}
                | {name: round(row[name] or 0.0, 2) for name in PARTS}
            )
    return {"runs": found, "bar_s": 20.0, "met": all(r["wall_s"] - r["queue_s"] < 20.0 for r in found)}


def cpu_of_children_s() -> float:
    """CPU seconds of processes that have ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def waiting(requests: int, delay_s: float) -> dict[str, Any]:
    """CPU of this process while so many requests wait at a time, from before the first is sent to after the last is stored."""
    texts = [f"question {i} " + "word " * 3000 for i in range(requests)]

    async def ask(url: str, store: TranscriptStore) -> list[str]:
        endpoint = Endpoint(url, "sk-benchmark-0123456789", timeout_s=10 * delay_s + 60, concurrency=requests)
        async with OpenAIClient(endpoint, store) as client:
            exchanges = await asyncio.gather(*(client.ask(Request("m", (Message("user", t),), 100)) for t in texts))
        return [e.answer.text for e in exchanges]

    with tempfile.TemporaryDirectory() as name, Server(echo, delay_s) as server:
        store = TranscriptStore(name)
        start, before = time.monotonic(), time.process_time()
        answers = asyncio.run(ask(server.url, store))
        cpu_s, wall_s = time.process_time() - before, time.monotonic() - start
        asked = len(server.asked())
        stored = sum(1 for _ in store.exchanges())
    lost = sum(a != echo(t) for a, t in zip(answers, texts, strict=True))
    return {
        "requests": requests,
        "delay_s": delay_s,
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 3),
        "share_of_a_core": round(cpu_s / wall_s, 4),
        "lost": lost,
        "sent": asked,
        "stored": stored,
        "bar": 0.05,
        "met": cpu_s / wall_s < 0.05 and not lost and asked == stored == requests,
    }


@dataclass(frozen=True)
class Moment:
    """When a sweep is killed: so long after it was started or, after > 0, after so many of its questions have arrived."""

    wait_s: float
    after: int = 0

    def __str__(self) -> str:
        return f"{self.wait_s:.2f} s after {f'question {self.after}' if self.after else 'the start'}"


def kills(count: int) -> dict[str, Any]:
    """Sweeps killed at random moments and started again until they end: half of the moments anywhere, half around an answer.

    What was on record before a start must not be asked in it, and of what was asked without an answer nothing may be forgotten.
    """
    again, forgotten, perhaps_paid, generator = 0, 0, 0, random.Random(0)
    moments: list[str] = []
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, Server(two_wrong_then_right, ANSWER_S) as server:
        cache, folders = Path(name) / "cache", (Path(name) / str(i) for i in range(10**6))
        run(next(folders), server, cache, None)  # the machine's self-test, once
        start = time.monotonic()
        run(next(folders), server, cache, None)
        whole_s = time.monotonic() - start
        while len(moments) < count:
            folder, sent = next(folders), 0
            store = TranscriptStore(folder / "catalog" / "transcripts")
            for moment in (*(_moment(generator, whole_s) for _ in range(KILLS_A_SWEEP)), None):
                known = {json.dumps(to_plain(e.request.messages)) for e in store.exchanges()}
                out, asked, killed = run(folder, server, cache, moment)
                moments += [str(moment)] if killed else []
                sent += len(asked)
                again += sum(question in known for question in asked)
                if out and not killed:
                    break
            verdicts[json.loads(out)["best"][0]["verdict"]] += 1
            answered = sum(1 for _ in store.exchanges())
            forgotten += max(0, sent - answered - store.unsettled())
            perhaps_paid += store.unsettled()
            assert f"perhaps paid: {store.unsettled()}" in out or not store.unsettled()
    return {
        "kills": len(moments),
        "moments": moments,
        "whole_s": round(whole_s, 2),
        "asked_again": again,
        "forgotten": forgotten,
        "perhaps_paid": perhaps_paid,
        "verdicts": dict(verdicts),
        "met": not again and not forgotten and set(verdicts) <= {"verified", "throttled"},
    }


def _moment(generator: random.Random, whole_s: float) -> Moment:
    if generator.random() < 0.5:
        return Moment(generator.uniform(0.1, 1.0) * whole_s)
    return Moment(generator.uniform(0.0, 2 * ANSWER_S), generator.randint(1, 3))


def run(folder: Path, server: Server, cache: Path, kill_at: Moment | None) -> tuple[str, list[str], bool]:
    """A sweep to its end, or killed: what it printed, what it asked, and whether it was killed."""
    folder.mkdir(exist_ok=True)
    process, killed = sweep(folder, server.url, cache), False
    asked = server.asked()
    while kill_at is not None and len(asked) < kill_at.after and process.poll() is None:
        time.sleep(0.005)
        asked += server.asked()
    try:
        out, _ = process.communicate(timeout=kill_at.wait_s if kill_at is not None else 600)
    except subprocess.TimeoutExpired:
        process.kill()
        killed, (out, _) = True, process.communicate()
    time.sleep(0.2)  # what was sent and not read yet
    return out, asked + server.asked(), killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("kernel", "waiting", "kills"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--delay", type=float, default=30.0)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    match given.what:
        case "kernel":
            found = kernel(given.runs)
        case "waiting":
            found = waiting(given.requests, given.delay)
        case _:
            found = kills(given.kills)
    about = environment()
    machine = {name: about.get(name) for name in ("cpu", "os", "python", "torch")} | {"cores": psutil.cpu_count()}
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    result = {given.what: found, "machine": machine | {"load_before": round(load, 2), "date": date}}
    text = json.dumps(result, indent=1)
    print(text)
    if given.output:
        given.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
