"""Jobs: one planned attempt each, and what stands between its stages. Decides nothing and runs nothing."""

from __future__ import annotations

import datetime as dt
import secrets
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from generator.spec import AttentionSpec
from generator.translate.records import Launch
from verifier.records import Binary

#: A catalog row as `catalog.schema.make_row` gives it.
Row: TypeAlias = dict[str, Any]


#: The module whose stages are the real ones.
STAGES = "farm.stages"

#: How the message of a candidate begins that a search put aside unmeasured.
ASIDE = "put aside: "


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt: one program for one spec on one target.

    key: what resuming goes by. program: TL code with every hole filled; "" when the author gave none, and then `trouble` says
    why, as (reason, message). rivals: of `verifier.records.RIVAL_GROUPS`; None: whatever may be the fastest. arch: what CUDA
    source is compiled for instead of its target, to be checked on a newer card. device_key: of the devices that may judge it;
    None: it is only built. prune: it ends as `does_not_fit` where its binary spills or leaves most of a multiprocessor idle: the
    search that asks has others. source, launch: device code that the author wrote itself, and its launch description; `program`
    is then what it should compute, or "". profile: a GPU kernel that is right is looked at with NVIDIA's profiler, for who wants
    to write a faster one. texts: `sketch`, and `code` with its holes, as the author gave them. columns: what is
    already known of the row (author, hashes, tokens).
    """

    key: str
    spec: AttentionSpec
    target: str
    program: str
    measure_s: float = 0.5
    rivals: tuple[str, ...] | None = None
    attempt_no: int = 1
    trouble: tuple[str, str] | None = None
    arch: str | None = None
    device_key: str | None = None
    profile: bool = False
    prune: bool = False
    source: str = ""
    launch: str = ""
    texts: dict[str, str] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.spec.name or 'spec'} {self.spec} on {self.target}"


@dataclass(frozen=True, slots=True)
class Shop:
    """Where and within which limits jobs are worked on: the same for every job of a sweep, and small enough to travel.

    catalog: its location, artifacts included. cache: the folder of binaries; "": on each node the one that its settings name.
    variants: the user's own rules. sanitize: whether cubins that pass are run under NVIDIA's compute-sanitizer as well.
    head_s: how long Ray's head may be silent before the sweep ends.
    slot_wait_s: how long `prove` waits for others to leave a device alone before it says so and is asked again.
    stages: the module whose `build`, `prove` and `row_without_verdict` do the work; tests and benchmarks put stand-ins here.
    """

    catalog: str
    cache: str
    sweep_id: str = ""
    variants: str | None = None
    compile_wall_s: float = 120.0
    prove_wall_s: float = 300.0
    sanitize: bool = False
    slot_wait_s: float = 20.0
    head_s: float = 20.0
    stages: str = STAGES


@dataclass(frozen=True, slots=True)
class Built:
    """A job with its binary, on its way to a device."""

    job: Job
    launch: Launch
    binary: Binary
    columns: dict[str, Any]


def device_seconds(row: Row) -> float:
    """How long an attempt had its device: judging, measuring, and measuring again."""
    return sum(row.get(part) or 0.0 for part in ("verify_s", "measure_s", "again_s"))


def new_run_id() -> str:
    """Unlike that of every other start; in order of time where clocks agree."""
    return dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S-") + secrets.token_hex(4)
