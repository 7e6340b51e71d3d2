"""The cells of the prefill benchmark: calls, their rivals, their bars, and the order in which they are timed. Times nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import gpu_cases as cases
from gpu_cases import spec

from generator.spec import AttentionSpec, Rule

SHORT, LONG = 2048, 8192  # lengths of the search: cells take the winner of the nearer one
VARIANTS: dict[str, tuple[tuple[Rule, ...], tuple[Rule, ...]]] = {
    "window": ((Rule.make("window", left=1023),), ()),
    "softcap": (cases.CAUSAL, (Rule.make("softcap", cap=20.0),)),
    "alibi": (cases.CAUSAL, (Rule.make("alibi"),)),
    "document": ((Rule.make("document"),), ()),
    "prefix": ((Rule.make("prefix", length=1024),), ()),
}
#: Row -> (lowest ratio of every cell, lowest geometric mean): rival's time over ours.
BARS = {
    "sm_90a": (1.0, 1.15), "sm_80": (0.95, 1.05), "sm_75": (1.3, 1.3),
    "variants sm_90a": (1.8, 1.8), "variants sm_80": (1.2, 1.2),
}  # fmt: skip
#: Variants that are timed on a row's line, and have no bar there.
WITHOUT_BAR = {"variants sm_90a": ("document", "prefix")}
RIVALS = {"sm_90a": "cudnn", "sm_80": "flash", "sm_75": "efficient"}
Job = tuple[tuple[str, AttentionSpec], bool]  # a kind of call, and whether it is long


@dataclass(frozen=True)
class Cell:
    """One line of the table: a call, on one target's instructions, against a rival whose ratio has a bar."""

    row: str
    target: str
    spec: AttentionSpec
    rival: str
    beside: tuple[str, ...] = ()  # other rivals that take their turns with it

    @property
    def kind(self) -> tuple[str, AttentionSpec]:
        """Target and what a kernel is made for; lengths, batch and heads apart."""
        return self.target, cases.sized(self.spec, 1, 4, 2, 256, 256)

    @property
    def name(self) -> str:
        s, rules = self.spec, [r.name for r in self.spec.masks + self.spec.scores]
        dims = f"d{s.head_dim}" + (f"/{s.head_dim_v}" if s.head_dim != s.head_dim_v else "")
        heads = f"{s.num_heads}/{s.num_kv_heads}"
        return f"{self.row} {s.dtype} {dims} {'+'.join(rules) or 'full'} {s.batch}x{heads}x{s.seqlen_q}"

    @property
    def has_bar(self) -> bool:
        return not any(rule.name in WITHOUT_BAR.get(self.row, ()) for rule in self.spec.masks)

    @property
    def job(self) -> Job:
        """The search that decides its kernel: the kind, and whether the call is long."""
        return self.kind, self.spec.seqlen_q > SHORT


def tokens(dtype: str, d: int, dv: int, masks: tuple[Rule, ...], seqlen: int, group: int = 1) -> AttentionSpec:
    """16,384 tokens of 2,048 = heads x head_dim_v."""
    heads = 2048 // dv
    return cases.sized(spec(dtype, d, dv, masks), 16384 // seqlen, heads, heads // group, seqlen, seqlen)


def cells(rows: Sequence[str]) -> list[Cell]:
    """All cells, the rows mixed, each row's kinds in turn: whatever time ends a run, it says something of every group.

    A variant's cells on either target stand together, since they share inputs and the rival's compiled form.
    """
    bundles = [bundle for row in rows for bundle in _placed(_bundles_of(row))]
    return [cell for _, bundle in sorted(bundles, key=lambda x: x[0]) for cell in bundle]


def _placed(bundles: Sequence[Sequence[Cell]]) -> Iterator[tuple[float, Sequence[Cell]]]:
    """Each bundle with its place between 0 and 1, by which rows are mixed."""
    return ((i / len(bundles), bundle) for i, bundle in enumerate(bundles))


def _bundles_of(row: str) -> list[list[Cell]]:
    if row == "variants":
        shaped = [cases.sized(spec("bf16", 128, 128, m, x), 4, 16, 16, 4096, 4096) for m, x in VARIANTS.values()]
        beside = {"sm_90a": (), "sm_80": ("flex-mma",)}
        return [[Cell(f"variants {t}", t, s, "flex", b) for t, b in beside.items()] for s in shaped]
    if row not in RIVALS:
        raise SystemExit(f"--rows: expected some of {', '.join([*RIVALS, 'variants'])}, found {row!r}")
    lengths = (8192, 2048, 16384, 4096) if row == "sm_90a" else (8192, 1024, 16384, 2048, 4096)
    return [[Cell(row, row, made, RIVALS[row])] for made in in_rotation(_groups_of(row), lengths)]


def _groups_of(row: str) -> list[tuple[str, int, int, tuple[Rule, ...], int]]:
    """dtype, head dims, masks and queries a key head; neighbours differ in as much as they can."""
    dims = [(128, 128), (64, 64), (192, 128), (256, 256)] if row == "sm_90a" else [(128, 128), (64, 64)]
    dtypes = ("fp16",) if row == "sm_75" else ("bf16", "fp16")
    return [
        (dtype, d, dv, masks, group)
        for group in ((1, 8) if row == "sm_90a" else (1,))
        for masks in ((), cases.CAUSAL)
        for dtype in dtypes
        for d, dv in dims
    ]


def in_rotation(groups: Sequence[tuple[str, int, int, tuple[Rule, ...], int]], lengths: Sequence[int]) -> Iterator[AttentionSpec]:
    """Every group at every length: first each group at one length, neighbours at different ones, then each at another."""
    for turn in range(len(lengths)):
        for i, group in enumerate(groups):
            dtype, d, dv, masks, queries = group
            n = lengths[(i + i // len(lengths) + turn) % len(lengths)]
            yield tokens(dtype, d, dv, masks, n, queries)
