"""Which lengths a kernel may serve: the buckets whose corners and inside were verified. Nothing is extrapolated.

A bucket is (b / 2, b] on each axis. Its verification points are the corners over (seqlen_q, seqlen_k), each at some batch size
of the bucket, and one ragged point inside: lengths that are no multiple of eight, wherever the bucket holds such lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from catalog.keys import ShapeBucket

Shape = tuple[int, int, int]


def limits(bucket: int) -> tuple[int, int]:
    """The lowest and highest length of a bucket of one axis."""
    return bucket // 2 + 1 if bucket > 1 else bucket, bucket


def _is_ragged(length: int, bucket: int) -> bool:
    low, high = limits(bucket)
    return low < length < high and (length % 8 != 0 or high <= 8)


def missing_points(bucket: ShapeBucket, shapes: Iterable[Shape]) -> tuple[str, ...]:
    """What has to be verified yet for the bucket to be served; empty when nothing has."""
    inside = {(q, k) for batch, q, k in shapes if (batch, q, k) in bucket}
    corners = set(itertools.product(set(limits(bucket.seqlen_q)), set(limits(bucket.seqlen_k))))
    missing = [f"corner {q} x {k}" for q, k in sorted(corners - inside)]
    wide = [(axis, b) for axis, b in ((0, bucket.seqlen_q), (1, bucket.seqlen_k)) if limits(b)[1] - limits(b)[0] >= 2]
    if wide and not any(all(_is_ragged(point[axis], b) for axis, b in wide) for point in inside):
        missing.append("a ragged point inside")
    return tuple(missing)


def verified_buckets(shapes: Iterable[Shape]) -> frozenset[ShapeBucket]:
    """The buckets that these verified shapes cover."""
    shapes = tuple(shapes)
    return frozenset(b for b in {ShapeBucket.of(*shape) for shape in shapes} if not missing_points(b, shapes))


def verification_points(bucket: ShapeBucket) -> tuple[Shape, ...]:
    """The shapes to verify for a bucket: what `missing_points` asks for, at the bucket's largest batch."""
    ragged = tuple(_ragged(b) for b in (bucket.seqlen_q, bucket.seqlen_k))
    points = {*itertools.product(limits(bucket.seqlen_q), limits(bucket.seqlen_k)), ragged}
    return tuple((bucket.batch, q, k) for q, k in sorted(points))


def _ragged(bucket: int) -> int:
    """A length inside, about three quarters up, and odd where there is one."""
    low, high = limits(bucket)
    return high if high - low < 2 else min(high - 1, (3 * bucket // 4) | 1)
