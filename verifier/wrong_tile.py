"""Where an interpreted attention program goes wrong first: the tile that breaks a rule which holds for every attention.

Says nothing about whether a program is right: `verifier.review` compares its outputs with the oracle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from generator.spec import AttentionSpec
from generator.tl.interpreter import Step, run
from generator.tl.ir import Copy, For, Gemm, Program, walk_statements
from verifier import oracle
from verifier.reviewer import Wrong

#: Share of the largest value by which the program, run in exact arithmetic, may differ: constants are written to 16 digits.
TOLERANCE = 1e-6


class _Found(Exception):
    def __init__(self, wrong: Wrong) -> None:
        self.wrong = wrong


@dataclass
class _Place:
    """What is known inside one block: which rows of which matrix each tile holds, found by content."""

    block: Mapping[str, int]
    q_from: int | None = None
    k_from: int | None = None
    height: int = 0  # keys in one tile of K
    v_from: int | None = None
    seen_k: list[int] = field(default_factory=list)
    score_tiles: set[str] = field(default_factory=set)
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    normalizer: str | None = None
    normalized_at: int = 0


class FirstWrongTile:
    """Watches a run and stops at the first tile that is wrong by a rule that holds for every attention.

    Tiles are recognised by what they hold, not by name: inputs are random, so a tile's first row tells where it came from.
    """

    def __init__(self, spec: AttentionSpec, values: Mapping[str, torch.Tensor], scalars: Mapping[str, int | float]) -> None:
        self.spec, self.values, self.scalars = spec, values, scalars
        self.arrays = {n: values[n].double().numpy() for n in ("q", "k", "v")}
        self.place: _Place | None = None

    def find(self, program: Program, tensors: Mapping[str, np.ndarray]) -> Wrong | None:
        """What is wrong of the first such tile, with its line; None where no rule is broken in the tiles themselves."""
        try:
            run(program, tensors, self.scalars, precision="exact", trace=self._look)
        except _Found as found:
            return found.wrong
        return self._never_copied(program)

    def _look(self, step: Step) -> None:
        if self.place is None or self.place.block != step.block:
            self.place = _Place(dict(step.block))
        match step.statement:
            case Copy(source=source, into_level="shared"):
                self._look_at_copy(step, source)
            case Gemm():
                self._look_at_gemm(step, step.statement)
            case _ if step.value.ndim == 2 and step.written in self.place.score_tiles:
                self._look_at_mask(step)
        if step.value.ndim == 2 and step.value.shape[1] == 1:
            self.place.columns[step.written] = step.value[:, 0]

    def _head(self) -> tuple[int, int]:
        """(batch, query head) of the block, by the names that bindings use; decode blocks count key heads."""
        assert self.place is not None
        block = self.place.block
        if "h" in block:
            return block.get("b", 0), block["h"]
        return block.get("b", 0), block.get("hk", 0) * self.spec.group

    def _look_at_copy(self, step: Step, source: str) -> None:
        assert self.place is not None
        role = {"Q": "q", "K": "k", "V": "v"}.get(source)
        if role is None:
            return
        batch, head = self._head()
        matrix = self.arrays[role][batch, head if role == "q" else head // self.spec.group]
        first = _row_of(matrix, step.value)
        if role == "q":
            self.place.q_from = first
        elif role == "k":
            self.place.k_from, self.place.height = first, step.value.shape[0]
            if first is not None:
                self.place.seen_k.append(first)
        else:
            self.place.v_from = first
            if first is not None and self.place.k_from is not None and first != self.place.k_from:
                where = f"the tile of V starts at key {first} where the tile of K starts at key {self.place.k_from}"
                raise _Found(Wrong(f"{where}: their coordinates differ.", step.statement.span.line))

    def _look_at_gemm(self, step: Step, gemm: Gemm) -> None:
        place = self.place
        assert place is not None
        if gemm.accumulate and gemm.b == "V":
            self._look_at_state(step, gemm)
        if gemm.accumulate or place.q_from is None or place.k_from is None or step.value.ndim != 2:
            return
        batch, head = self._head()
        q = _tile(self.arrays["q"][batch, head], place.q_from, step.value.shape[0])
        k = _tile(self.arrays["k"][batch, head // self.spec.group], place.k_from, step.value.shape[1])
        want = q @ k.T
        limit = TOLERANCE * max(1.0, float(np.abs(want).max()))
        if not (np.abs(step.value - want) <= limit).all():
            at = tuple(int(i) for i in np.argwhere(~(np.abs(step.value - want) <= limit))[0])
            message = f"{gemm.into} is not Q K^T: element {list(at)} is {step.value[at]:.6g}, expected {want[at]:.6g}."
            raise _Found(Wrong(message, gemm.span.line))
        place.score_tiles = {gemm.into}

    def _look_at_mask(self, step: Step) -> None:
        """-inf has to stand exactly where a key is hidden, as soon as any stands there."""
        place = self.place
        assert place is not None and place.k_from is not None
        hidden = np.isneginf(step.value)
        if not hidden.any() or place.q_from is None or self.spec.phase == "decode":
            return
        rows, cols = step.value.shape
        q_index, k_index = place.q_from + np.arange(rows), place.k_from + np.arange(cols)
        inside = q_index < self.spec.seqlen_q
        batch, head = self._head()
        want_hidden = np.ones((rows, cols), bool)
        keys = k_index < self.spec.seqlen_k
        seen = self._visible(batch, head, torch.from_numpy(q_index[inside]))
        want_hidden[np.ix_(inside, keys)] = ~seen[:, k_index[keys]]
        differs = (hidden != want_hidden) & inside[:, None]
        if differs.any():
            r, c = (int(i) for i in np.argwhere(differs)[0])
            what, should = ("hidden", "visible") if hidden[r, c] else ("visible", "hidden")
            message = (
                f"in {step.written}, key {k_index[c]} is {what} for query {q_index[r]} but has to be {should} "
                f"({int(differs.sum())} elements of this tile; queries {self.spec.seqlen_q}, keys {self.spec.seqlen_k})."
            )
            raise _Found(Wrong(message, step.statement.span.line))

    def _look_at_state(self, step: Step, gemm: Gemm) -> None:
        """The accumulator over the row sum has to stay the weighted mean of the values seen so far."""
        place = self.place
        assert place is not None
        if (
            place.q_from is None
            or not place.seen_k
            or self.spec.phase == "decode"
            or any(r.name in oracle.DENSE_LOGITS for r in self.spec.scores)
        ):
            return
        want, some = self._mean_so_far(step.value.shape[0])
        fits = [n for n, c in place.columns.items() if _is_multiple(step.value[: len(want)], c[: len(want)], want, some)]
        if place.normalizer is None:
            place.normalizer = next(iter(fits), None)
        elif place.normalizer not in fits:
            message = (
                f"after the tile from key {place.seen_k[-1]} on, {gemm.into} over {place.normalizer} is no longer the weighted "
                f"mean of the values seen so far; it was right after the tile from key {place.normalized_at} on. When the "
                f"reference of a row moves, both have to be rescaled by the same factor."
            )
            raise _Found(Wrong(message, gemm.span.line))
        place.normalized_at = place.seen_k[-1]

    def _block(self, batch: int, head: int, rows: torch.Tensor) -> oracle.Block:
        keys = torch.arange(self.spec.seqlen_k).view(1, 1, -1)
        return oracle.Block(self.spec, batch, head // self.spec.group, rows.view(1, -1, 1), keys, self.values)

    def _visible(self, batch: int, head: int, rows: torch.Tensor) -> np.ndarray:
        """Which keys each row sees, (R, Sk)."""
        seen = oracle.visible(self._block(batch, head, rows)).expand(self.spec.group, len(rows), self.spec.seqlen_k)
        return seen[head % self.spec.group].numpy()

    def _mean_so_far(self, height: int) -> tuple[np.ndarray, np.ndarray]:
        """softmax over the visible keys brought so far, times V, for the block's rows in the matrix; and which rows see any."""
        place = self.place
        assert place is not None and place.q_from is not None
        batch, head = self._head()
        rows = torch.arange(place.q_from, min(place.q_from + height, self.spec.seqlen_q))
        keys = sorted({k for first in place.seen_k for k in range(first, min(first + place.height, self.spec.seqlen_k))})
        q = torch.from_numpy(self.arrays["q"][batch, head])[rows]
        k, v = (torch.from_numpy(self.arrays[name][batch, head // self.spec.group]) for name in ("k", "v"))
        scores = (q @ k.T * oracle.as_f32(self.spec.scale)).expand(self.spec.group, -1, -1)
        scores = oracle.apply_scores(self._block(batch, head, rows), scores)[0][head % self.spec.group]
        scores = scores.masked_fill(~torch.from_numpy(self._visible(batch, head, rows)), -torch.inf)[:, keys]
        some = scores.isfinite().any(1)
        return (torch.softmax(scores, 1).nan_to_num() @ v[keys]).numpy(), some.numpy()

    def _never_copied(self, program: Program) -> Wrong | None:
        """Keys that somebody sees and no tile of K brought (looked at in the last block)."""
        place = self.place
        if place is None or self.spec.phase == "decode" or place.q_from is None:
            return None
        brought = {k for first in place.seen_k for k in range(first, first + place.height)}
        batch, head = self._head()
        last = self.spec.seqlen_q - 1
        wanted = np.flatnonzero(self._visible(batch, head, torch.tensor([last]))[0])
        missing = [int(k) for k in wanted if int(k) not in brought]
        if missing:
            line = next((s.span.line for s in walk_statements(program.body) if isinstance(s, For)), 0)
            return Wrong(f"key {missing[0]} is visible to query {last} but no tile of K with it is ever copied.", line)
        return None


def _row_of(matrix: np.ndarray, tile: np.ndarray) -> int | None:
    """Which row of the matrix the tile starts with."""
    if tile.ndim != 2:
        return None
    hits = np.flatnonzero((np.abs(matrix - tile[0]) <= 1e-6 * (1 + np.abs(matrix))).all(1))
    return int(hits[0]) if len(hits) else None


def _tile(matrix: np.ndarray, first: int, rows: int) -> np.ndarray:
    tile = np.zeros((rows, matrix.shape[1]))
    part = matrix[first : first + rows]
    tile[: len(part)] = part
    return tile


def _is_multiple(acc: np.ndarray, column: np.ndarray, mean: np.ndarray, some: np.ndarray) -> bool:
    """acc = column * mean, on the rows that see something."""
    if acc.shape != mean.shape or not some.any():
        return acc.shape == mean.shape
    got, want = acc[some], column[some, None] * mean[some]
    return bool(np.isfinite(want).all() and (np.abs(got - want) <= TOLERANCE * (1e-6 + np.abs(want).max(1, keepdims=True))).all())
