"""Identity in the catalog: attempt keys, row ids and shape buckets. Reads and writes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from generator.canonical import digest
from generator.spec import AttentionSpec


def attempt_key(
    *,
    spec_hash: str,
    target: str,
    translator_version: str,
    harness_version: str,
    program_hash: str | None = None,
    author: str | None = None,
    prompt_hash: str | None = None,
    proposal: int | None = None,
    device_key: str | None = None,
    tuning: dict[str, int] | None = None,
) -> str:
    """The content key of one planned attempt: the same work has the same key on every machine, whatever its name or its run.

    Two kinds of attempt: of a known program (`program_hash`), or of a text that an author has yet to write (`author`, with
    `prompt_hash` and `proposal` to tell its tries apart). `device_key` is None for an attempt that only builds.
    Raises ValueError when neither or both of program_hash and author are given.
    """
    if (program_hash is None) == (author is None):
        raise ValueError(
            "attempt_key: expected program_hash (the program is known) or author (it is yet to be written), exactly one of them"
        )
    return digest(
        {
            "spec_hash": spec_hash,
            "target": target,
            "translator_version": translator_version,
            "harness_version": harness_version,
            "program_hash": program_hash,
            "author": author,
            "prompt_hash": prompt_hash,
            "proposal": proposal,
            "device_key": device_key,
            "tuning": tuning,
        }
    )


def row_id(attempt: str, attempt_no: int, run_id: str) -> str:
    """32 hex digits. One attempt of one run that ends twice (a task that ran again) has one id, so that it counts once."""
    return digest([attempt, attempt_no, run_id])[:32]


def power_bucket(length: int) -> int:
    """The smallest power of two that is at least `length`; 0 for 0. A bucket b holds the lengths in (b / 2, b]."""
    return 0 if length == 0 else 1 << (length - 1).bit_length()


@dataclass(frozen=True, slots=True, order=True)
class ShapeBucket:
    """Batch and lengths rounded up to powers of two: the unit in which kernels are verified and ranked."""

    batch: int
    seqlen_q: int
    seqlen_k: int

    @staticmethod
    def of(batch: int, seqlen_q: int, seqlen_k: int) -> ShapeBucket:
        return ShapeBucket(power_bucket(batch), power_bucket(seqlen_q), power_bucket(seqlen_k))

    @staticmethod
    def of_spec(spec: AttentionSpec) -> ShapeBucket:
        return ShapeBucket.of(spec.batch, spec.seqlen_q, spec.seqlen_k)

    @staticmethod
    def parse(text: str) -> ShapeBucket:
        """The inverse of str(). Raises ValueError for other text."""
        parts = text.split("_")
        if len(parts) != 3 or [p[:1] for p in parts] != ["b", "q", "k"] or not all(p[1:].isdecimal() for p in parts):
            raise ValueError(f"shape_bucket: expected the form b1_q1024_k1024, found {text!r}")
        bucket = ShapeBucket(*(int(p[1:]) for p in parts))
        if bucket != ShapeBucket.of(bucket.batch, bucket.seqlen_q, bucket.seqlen_k):
            raise ValueError(f"shape_bucket: expected powers of two, found {text!r}")
        return bucket

    def __contains__(self, shape: tuple[int, int, int]) -> bool:
        return ShapeBucket.of(*shape) == self

    def __str__(self) -> str:
        return f"b{self.batch}_q{self.seqlen_q}_k{self.seqlen_k}"
