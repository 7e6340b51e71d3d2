"""What the catalog knows of each kernel that could serve, from its rows. Reads no artifact, chooses nothing.

A kernel is one binary for one family of specs; its rows (one for each shape that was verified and measured) are merged. Rows
become kernels only for the dtype and head dimensions that are asked for, so that a large catalog costs a process little.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from catalog.envelope import Lengths, Shape, lengths_bucket, verified_lengths
from catalog.keys import power_bucket
from generator.masks import mask_parameters
from generator.scores import score_parameters
from generator.spec import AttentionSpec, Rule, SpecError, spec_from_plain
from generator.translate.records import Launch, launch_from_plain
from verifier.fork_lock import ForkLock

log = logging.getLogger("catalog")

#: (dtype, head_dim, head_dim_v): rows are looked up by it.
Group = tuple[str, int, int]
#: A rule without its numbers: its name, and the parameters that choose another kernel.
RuleShape = tuple[str, tuple[tuple[str, str], ...]]

#: Names of rivals begin so when torch answers at once, without compiling: what a kernel has to beat.
TORCH = "torch "
#: The columns of a row that serving needs.
COLUMNS = (
    "row_id", "status", "revoked_at", "revoked_reason", "spec", "verified_shapes", "target", "binary_hash", "launch", "isa",
    "device_key", "device_name", "deterministic", "p50_s", "baseline_p50_s", "rivals", "dtype", "head_dim", "head_dim_v",
    "cuda_toolkit", "ptx_isa",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement: seconds a call of ours and of torch's answer to the same call, at one shape."""

    num_heads: int
    shape: Shape
    ours_s: float
    torch_s: float

    @property
    def lengths(self) -> Lengths:
        return lengths_bucket(*self.shape[1:])

    @property
    def grid(self) -> int:
        """Sequences times query heads, each rounded up to a power of two: what fills the device apart from lengths."""
        return power_bucket(self.shape[0]) * power_bucket(self.num_heads)


@dataclass(frozen=True, slots=True)
class CatalogKernel:
    """One binary for one family.

    masks, scores: shapes of the rules. device_key: what it was verified on. verified: shapes; lengths: whole buckets of them.
    max_batch: of all rows. max_heads: for a group (query heads for each key head) the most query heads that ran with it.
    unavailable: why no row of it may serve ("revoked" or "unverified", with a sentence); None when one may.
    """

    kernel_id: str
    binary_hash: str
    launch: Launch
    target: str
    isa: tuple[str, ...]
    device_key: str
    device_name: str
    masks: frozenset[RuleShape]
    scores: tuple[RuleShape, ...]
    positive_scale: bool
    max_heads: tuple[tuple[int, int], ...]
    max_batch: int
    verified: tuple[Shape, ...]
    lengths: frozenset[Lengths]
    measured: tuple[Measured, ...]
    deterministic: bool
    row_ids: tuple[str, ...]
    example: AttentionSpec
    unavailable: tuple[str, str] | None = None
    cuda_toolkit: str | None = None
    ptx_isa: str | None = None

    @property
    def is_ptx(self) -> bool:
        """Whether its binary is text that a driver would compile: rows name virtual architectures then."""
        return any(name.startswith("compute_") for name in self.isa)

    @property
    def has_lse(self) -> bool:
        return any(t.name == "LSE" for t in self.launch.tensors)


def rule_shape(rule: Rule, parameters: Mapping[str, Any]) -> RuleShape:
    return rule.name, tuple(sorted((name, value) for name, value in parameters.items() if isinstance(value, str)))


def mask_shapes(masks: Iterable[Rule]) -> frozenset[RuleShape]:
    """Masks hold all at once: their order says nothing. Raises SpecError for a rule that is not registered."""
    return frozenset(rule_shape(rule, mask_parameters(rule)) for rule in masks)


def score_shapes(scores: Iterable[Rule]) -> tuple[RuleShape, ...]:
    """Scores apply in order. Raises SpecError for a rule that is not registered."""
    return tuple(rule_shape(rule, score_parameters(rule)) for rule in scores)


class KernelIndex:
    """The kernels of a catalog, by group. fetch: gives the rows of a group (None: all) with at least COLUMNS, in every state."""

    def __init__(self, fetch: Callable[[Group | None], list[dict[str, Any]]]) -> None:
        self._fetch = fetch
        self._groups: dict[Group, tuple[CatalogKernel, ...]] = {}
        self._lock = ForkLock()

    def group(self, group: Group) -> tuple[CatalogKernel, ...]:
        """The kernels for a dtype and head dimensions, those that may not serve among them."""
        with self._lock:
            if group not in self._groups:
                self._groups[group] = kernels_from_rows(self._fetch(group))
            return self._groups[group]

    def all(self) -> tuple[CatalogKernel, ...]:
        """Every kernel. Reads every row, so not for call paths."""
        return kernels_from_rows(self._fetch(None))


def kernels_from_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[CatalogKernel, ...]:
    """Rows with a binary, merged to kernels, in the order of their ids. Rules that are not registered: left out.

    A row whose spec or launch is none is left out with a warning in the log: one row must not end the calls of a whole group.
    """
    merged: dict[tuple[Any, ...], list[tuple[Mapping[str, Any], AttentionSpec]]] = {}
    shapes: dict[tuple[Any, ...], tuple[frozenset[RuleShape], tuple[RuleShape, ...]]] = {}
    for row in rows:
        if row["status"] not in ("ok", "unverified"):
            continue
        try:
            spec = spec_from_plain(json.loads(row["spec"]))
            _launch_of(row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("row %s is left out: its spec or launch cannot be read (%r)", row["row_id"], error)
            continue
        try:
            rules = (mask_shapes(spec.masks), score_shapes(spec.scores))
        except SpecError:
            continue
        key = (row["binary_hash"], row["target"], row["device_key"], rules, spec.scale > 0)
        merged.setdefault(key, []).append((row, spec))
        shapes[key] = rules
    kernels = [_merge(found, *shapes[key]) for key, found in merged.items()]
    return tuple(sorted(kernels, key=lambda k: (k.kernel_id, k.device_key)))


def _merge(
    found: list[tuple[Mapping[str, Any], AttentionSpec]], masks: frozenset[RuleShape], scores: tuple[RuleShape, ...]
) -> CatalogKernel:
    usable = [(row, spec) for row, spec in found if row["status"] == "ok" and row["revoked_at"] is None]
    row, spec = (usable or found)[0]
    verified = [(s["batch"], s["seqlen_q"], s["seqlen_k"]) for r, _ in usable for s in r["verified_shapes"]]
    return CatalogKernel(
        kernel_id=row["binary_hash"][:12],
        binary_hash=row["binary_hash"],
        launch=_launch_of(row),
        target=row["target"],
        isa=tuple(row["isa"] or ()),
        device_key=row["device_key"] or "",
        device_name=row["device_name"] or "an unnamed device",
        masks=masks,
        scores=scores,
        positive_scale=spec.scale > 0,
        max_heads=tuple(sorted({s.group: s.num_heads for _, s in sorted(usable, key=lambda pair: pair[1].num_heads)}.items())),
        max_batch=max((s.batch for _, s in usable), default=0),
        verified=tuple(verified),
        lengths=verified_lengths(verified),
        measured=tuple(m for r, s in usable if (m := _measured(r, s)) is not None),
        deterministic=bool(usable) and all(bool(r["deterministic"]) for r, _ in usable),
        row_ids=tuple(r["row_id"] for r, _ in found),
        example=spec,
        unavailable=None if usable else _unavailable(row),
        cuda_toolkit=row["cuda_toolkit"],
        ptx_isa=row["ptx_isa"],
    )


def _launch_of(row: Mapping[str, Any]) -> Launch:
    return launch_from_plain(json.loads(row["launch"])) if row["launch"] else Launch("", (), ())


def _unavailable(row: Mapping[str, Any]) -> tuple[str, str]:
    if row["revoked_at"] is not None:
        return "revoked", f"row {row['row_id']} was revoked: {row['revoked_reason'] or 'no reason was given'}"
    return "unverified", f"row {row['row_id']} was compiled and never run"


def _measured(row: Mapping[str, Any], spec: AttentionSpec) -> Measured | None:
    """The row's time beside torch's own answer to the same call, or its best rival where torch's is not among the rivals."""
    baseline = _torch_time(row["rivals"]) or row["baseline_p50_s"]
    if not row["p50_s"] or not baseline:
        return None
    return Measured(spec.num_heads, (spec.batch, spec.seqlen_q, spec.seqlen_k), row["p50_s"], baseline)


def _torch_time(rivals: str | None) -> float | None:
    """The fastest of torch's eager answers among the rivals: what a fall-back would take."""
    found = json.loads(rivals) if rivals else {}
    times = [rival["p50_s"] for name, rival in found.get("measured", {}).items() if name.startswith(TORCH)]
    return min(times) if times else None
