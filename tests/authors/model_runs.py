"""Searches of a language-model author for tests: a small plan, answers written by hand, a sweep as a process, one search in here.

No test of its own, and no measurement of any model: what is answered lies in tests/responses/written.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chat_server import ChatServer, Reply, completion
from farm_here import farm_here

import catalog
from catalog.artifacts import Artifacts
from catalog.locations import Location
from farm.jobs import Job
from farm.model_search import ModelSearch
from farm.model_settings import read_settings
from farm.plan import Budget
from farm.plan_file import read_plan
from farm.search import Versions
from generator.authors.answers import extract
from generator.authors.clients import OpenAIClient
from generator.authors.endpoint import Endpoint
from generator.authors.transcripts import TranscriptStore
from generator.spec import AttentionSpec, Rule
from generator.tl.fill import fill, hole_choices
from generator.tl.parser import parse_or_raise
from verifier.review import review
from verifier.reviewer import Wrong

RESPONSES = Path(__file__).parent.parent / "responses"
RIGHT = (RESPONSES / "written/right.md").read_text()
SKETCH = extract(RIGHT).get("sketch") or ""
PROGRAM = extract(RIGHT).get("tl") or ""
PLAN = """
name: model
author: llm
author_options: {model: test-model, repairs: 2, improvements: 0}
tuning: {candidates: 1, measure_s: 0.05}
rivals: [torch-sdpa]
targets: [cpu]
models:
  - {name: tiny, num_heads: 2, num_kv_heads: 1, head_dim: 32, masks: [causal], dtypes: [fp32], seqlens: [64]}
"""
SPEC = AttentionSpec(2, 1, 32, 32, 1, 64, 64, "fp32", (Rule.make("causal"),), name="tiny")
#: One folder of binaries and self-tests for all sweeps of the tests.
CACHE = Path(tempfile.gettempdir()) / f"farm-model-sweep-{os.getuid()}"


def fenced(program: str) -> str:
    return f"Here it is.\n\n```tl\n{program}```\nI hope that helps." if program else "I would rather talk about the weather."


def answering(*programs: str) -> Callable[[dict[str, Any], int], Reply]:
    """A server's behaviour: the sketch when asked for one, then the programs in turn."""
    queue = list(programs)

    def behave(request: dict[str, Any], _: int) -> Reply:
        if "tagged `sketch`" in request["messages"][-1]["content"]:
            return completion(f"```sketch\n{SKETCH}```")
        return completion(fenced(queue.pop(0)))

    return behave


def sweep_command(
    folder: Path, server: ChatServer | None, *flags: str, plan: str = PLAN, catalog_at: str | None = None
) -> list[str]:
    """`farm sweep` of a plan, its catalog in the folder unless it is said where."""
    path = folder / "plan.yaml"
    path.write_text(plan)
    where = ["--base-url", server.base_url] if server else []
    where += ["--catalog", catalog_at or str(folder / "catalog"), "--executor", "local", "--json"]
    return [sys.executable, "-m", "farm", "sweep", str(path), *where, *flags]


def environment(key: str) -> dict[str, str]:
    return os.environ | {"OPENAI_API_KEY": key, "FARM_CACHE": str(CACHE)}


def sweep(
    folder: Path,
    server: ChatServer | None,
    *flags: str,
    plan: str = PLAN,
    key: str = "sk-test-0123456789",
    catalog_at: str | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """A sweep to its end, in this process. variables: of its environment."""
    command = sweep_command(folder, server, *flags, plan=plan, catalog_at=catalog_at)
    return farm_here(*command[3:], OPENAI_API_KEY=key, FARM_CACHE=str(CACHE), **variables)


def sweep_apart(folder: Path, server: ChatServer, *, plan: str = PLAN) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    command = sweep_command(folder, server, plan=plan)
    return subprocess.run(command, capture_output=True, text=True, env=environment("sk-test-0123456789"), timeout=600)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Every row of the folder's catalog, in the order written."""
    return sorted(catalog.open(folder / "catalog").rows().to_pylist(), key=lambda r: r["sequence"])


def review_here(text: str, spec: AttentionSpec, first: object = ()) -> Wrong | None:
    """The review without a child of its own."""
    program = parse_or_raise(text)
    return review(fill(program, next(iter(hole_choices(program)))), spec)


def solve(
    folder: Path,
    server: ChatServer,
    spec: AttentionSpec = SPEC,
    rows_of: Callable[[Job], dict[str, Any]] | None = None,
    **options: Any,
) -> list[Job]:
    """One search with real review and no compiler: an attempt that reaches the stages is taken for right. Gives the jobs.

    rows_of: what an attempt that reaches the stages gives instead. options: `author_options` of the plan.
    """
    jobs: list[Job] = []

    async def attempt(job: Job) -> dict[str, Any]:
        jobs.append(job)
        reason, message = job.trouble or ("ok", "")
        row = {"reason_code": reason, "message": message, "p50_s": 1e-5, "row_id": f"row {len(jobs)}"}
        return row | (rows_of(job) if rows_of and not job.trouble else {})

    async def main() -> None:
        settings = read_settings("llm", {"model": "test-model", "repairs": 2, "improvements": 0} | options, Budget())
        store = TranscriptStore(folder / "transcripts")
        async with OpenAIClient(Endpoint(server.base_url, "sk-test"), store) as client:
            artifacts = Artifacts(Location.of(folder / "catalog"))
            search = ModelSearch(read_plan(PLAN, "plan.yaml"), Versions("1", "1"), settings, client, store, artifacts)
            await search.solve(spec, "cpu", attempt)

    asyncio.run(main())
    return jobs
