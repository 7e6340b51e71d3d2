"""Which lengths a kernel may serve: the buckets whose corners and inside were verified. Nothing is extrapolated.

A bucket of one axis is (b / 2, b]; lengths of queries and keys make a bucket of two axes. Its verification points are the four
corners and one ragged point inside: lengths that are no multiple of eight, wherever the bucket holds such lengths. Batch and
heads are axes of the grid, which the verifier tries apart from lengths: they are limited by the largest that ran.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from catalog.keys import power_bucket

#: (batch, seqlen_q, seqlen_k)
Shape = tuple[int, int, int]
#: Buckets of seqlen_q and seqlen_k, each named by its largest length.
Lengths = tuple[int, int]


def lengths_bucket(seqlen_q: int, seqlen_k: int) -> Lengths:
    return power_bucket(seqlen_q), power_bucket(seqlen_k)


def limits(bucket: int) -> tuple[int, int]:
    """The lowest and highest length of a bucket of one axis."""
    return bucket // 2 + 1 if bucket > 1 else bucket, bucket


def missing_points(bucket: Lengths, shapes: Iterable[Shape]) -> tuple[str, ...]:
    """What has to be verified yet for the bucket to be served; empty when nothing has."""
    inside = {(q, k) for _, q, k in shapes if lengths_bucket(q, k) == bucket}
    corners = set(itertools.product(*(set(limits(b)) for b in bucket)))
    missing = [f"corner {q} x {k}" for q, k in sorted(corners - inside)]
    wide = [(axis, b) for axis, b in enumerate(bucket) if limits(b)[1] - limits(b)[0] >= 2]
    if wide and not any(all(_is_ragged(point[axis], b) for axis, b in wide) for point in inside):
        missing.append("a ragged point inside")
    return tuple(missing)


def _is_ragged(length: int, bucket: int) -> bool:
    low, high = limits(bucket)
    return low < length < high and length % 8 != 0


def verified_lengths(shapes: Iterable[Shape]) -> frozenset[Lengths]:
    """The buckets that these verified shapes cover."""
    shapes = tuple(shapes)
    return frozenset(b for b in {lengths_bucket(q, k) for _, q, k in shapes} if not missing_points(b, shapes))


def verification_points(bucket: Lengths) -> tuple[Lengths, ...]:
    """Lengths to verify for a bucket: what `missing_points` asks for."""
    corners = itertools.product(limits(bucket[0]), limits(bucket[1]))
    return tuple(sorted({*corners, (_ragged(bucket[0]), _ragged(bucket[1]))}))


def _ragged(bucket: int) -> int:
    """An odd length inside, about three quarters up, where there is one."""
    low, high = limits(bucket)
    return high if high - low < 2 else min(high - 1, (3 * bucket // 4) | 1)
