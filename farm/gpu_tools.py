"""NVIDIA's tools that look at a kernel besides judging and timing it: its sanitizer and its profiler. Nothing runs on a CPU.

Both tell what they found as columns of the row, and add their seconds to `gpu_s`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from farm import rows
from farm.devices import slot_of
from farm.jobs import Built, Shop
from farm.quiet import working
from farm.rows import Columns
from generator.canonical import to_plain
from verifier.records import Binary, Failed


def sanitized(binary: Binary, built: Built, device: str, columns: Columns) -> Failed | None:
    """What NVIDIA's sanitizer says of a kernel that passed, into `columns`; its fault where it finds one."""
    if device == "cpu":
        columns["sanitizer"] = "not run: it looks at CUDA kernels"
        return None
    from verifier.cuda_sanitize import Clean, NoSanitizer, sanitize

    try:
        with _timed(columns):
            found = sanitize(binary, built.launch, built.job.spec, device)
    except NoSanitizer as error:
        columns["sanitizer"] = f"not run: {error}"
        return None
    if isinstance(found, Clean):
        columns["sanitizer"] = found.words
        return None
    columns |= rows.of_witness(found.witness) | {"sanitizer": found.witness.message}
    return found


def profiled(binary: Binary, built: Built, device: str, shop: Shop, columns: Columns) -> Columns:
    """What the kernel's warps wait for, among its resources; nothing without NVIDIA's profiler."""
    if device == "cpu":
        return {}
    from verifier.cuda_stalls import stalls_of

    with working(slot_of(device), shop.slot_wait_s), _timed(columns):
        found = stalls_of(binary, built.launch, built.job.spec, device)
    return {} if found is None else {"resources": columns["resources"] | {"stalls": to_plain(found)}}


@contextlib.contextmanager
def _timed(columns: Columns) -> Iterator[None]:
    """Its seconds go into the columns."""
    started = time.monotonic()
    try:
        yield
    finally:
        columns["gpu_s"] = columns.get("gpu_s", 0.0) + time.monotonic() - started
