"""Memory that the supervisor owns and a candidate's child maps: tensors between guard bands, poisoned, compared before and after.

Layout of the file: for each tensor a guard band, its pages, a guard band. The child maps the bands as pages that nobody may
touch, or, to find out what a crash was, as ordinary memory. Runs nothing, and knows no attention.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from verifier.dtypes import DTYPES

GUARD_BYTES = 64 << 10
#: Two bytes that read as a NaN in f32, f16 and bf16 and as a huge number in i32; an output that still holds them was not written.
POISON = 0x7FA5
POISONED_WORD = np.uint64(POISON * 0x0001_0001_0001_0001)

#: Where tensors with far strides are mapped: nothing else lies within terabytes of it.
FAR_BASE = 0x2000_0000_0000
#: The distance of two rows, in elements: the third row's offset does not fit into 31 bits.
FAR_STRIDE = (1 << 30) + 64

Place = Literal["start", "end"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's memory: a view (shape, strides and offset in elements) of `storage` elements.

    place: which end of its pages the storage touches; the first byte beyond that end is out of bounds. far: the third axis has
    FAR_STRIDE, each of its rows lies in pages of its own, and nothing lies between them; `storage` counts one row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: int
    written: bool
    place: Place = "end"
    far: bool = False

    @property
    def element_size(self) -> int:
        return DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Segment:
    """`length` bytes of the file at `offset`; `address` is their offset in the child's range of addresses, or lies at
    FAR_BASE.
    """

    offset: int
    length: int
    kind: Literal["guard", "in", "out"]
    address: int


@dataclass(frozen=True, slots=True)
class Trespass:
    """Bytes that changed outside an output's elements, or inside an input: where the first one lies, in words."""

    tensor: str
    where: str
    num_bytes: int


def _pages(num_bytes: int, page_bytes: int = mmap.PAGESIZE) -> int:
    return max(1, -(-num_bytes // page_bytes)) * page_bytes


class Memory:
    """An anonymous shared file that grows; one for each sandbox, laid out anew for each input."""

    def __init__(self) -> None:
        self.handle = os.memfd_create("farm-arena", os.MFD_CLOEXEC)
        self.capacity = 0
        self._map: mmap.mmap | None = None

    def reserve(self, num_bytes: int) -> mmap.mmap:
        if num_bytes > self.capacity or self._map is None:
            self.capacity = max(_pages(num_bytes), self.capacity)
            os.ftruncate(self.handle, self.capacity)
            self._map = mmap.mmap(self.handle, self.capacity)  # an older map lives as long as views of it
        return self._map

    def close(self) -> None:
        os.close(self.handle)


class Arena:
    """The slots of one input in a `Memory`. Fill the inputs through `views`, then `seal`; after a run, ask what changed.

    page_bytes: the smallest piece that can be mapped where the candidate runs (a GPU's is larger than a CPU's).
    """

    def __init__(
        self, memory: Memory, slots: Sequence[Slot], page_bytes: int = mmap.PAGESIZE, guard_bytes: int = GUARD_BYTES
    ) -> None:
        self.slots = tuple(slots)
        self._page_bytes, self._guard_bytes = page_bytes, guard_bytes
        self.segments: tuple[Segment, ...]
        self._starts: dict[str, int] = {}
        self._extents: dict[str, tuple[int, int]] = {}  # of a tensor's guards and pages together
        self._addresses: dict[str, int] = {}
        self._strides: dict[str, tuple[int, ...]] = {}  # in the file; the child's may be far
        self._place_all()
        self.size = self.segments[-1].offset + self.segments[-1].length if self.segments else 0
        buffer = memory.reserve(self.size)
        self.bytes = np.frombuffer(buffer, np.uint8)[: self.size]
        self.views = {slot.name: self._view(slot) for slot in self.slots}
        self._sealed: dict[str, np.ndarray] = {}

    def _place_all(self) -> None:
        segments: list[Segment] = []
        at = 0
        for slot in self.slots:
            placed = self._place_far(slot, at) if slot.far else self._place_near(slot, at)
            segments += placed
            self._extents[slot.name] = (at, at := placed[-1].offset + placed[-1].length)
        self.segments = tuple(segments)

    def _place_near(self, slot: Slot, at: int) -> list[Segment]:
        used = slot.storage * slot.element_size
        length, guard = _pages(used, self._page_bytes), self._guard_bytes
        start = at + guard + (length - used if slot.place == "end" else 0)
        self._starts[slot.name] = start
        self._addresses[slot.name] = start + slot.offset * slot.element_size
        self._strides[slot.name] = slot.strides
        kind: Literal["in", "out"] = "out" if slot.written else "in"
        ends = (at + guard, at + guard + length)
        return [
            Segment(at, guard, "guard", at),
            Segment(ends[0], length, kind, ends[0]),
            Segment(ends[1], guard, "guard", ends[1]),
        ]

    def _place_far(self, slot: Slot, at: int) -> list[Segment]:
        """Rows drift by 64 elements in their pages, as FAR_STRIDE makes them; in the file they drift alike."""
        rows, size = slot.shape[2], slot.element_size
        drift = FAR_STRIDE * size % self._page_bytes
        length = _pages(slot.storage * size + drift * max(0, rows - 1), self._page_bytes)
        number = sum(s.far for s in self.slots[: self.slots.index(slot)])
        address = FAR_BASE + (number << 38)  # 256 GiB apart
        self._starts[slot.name], self._addresses[slot.name] = at, address
        batch, head, _, last = slot.strides
        self._strides[slot.name] = (batch, head, (length + drift) // size, last)
        kind: Literal["in", "out"] = "out" if slot.written else "in"
        step = FAR_STRIDE * size - drift
        return [Segment(at + i * length, length, kind, address + i * step) for i in range(max(1, rows))]

    def _view(self, slot: Slot) -> Tensor:
        start, end = self._starts[slot.name], self._extents[slot.name][1]
        if not slot.far:
            end = start + slot.storage * slot.element_size
        raw = torch.from_numpy(self.bytes[start:end]).view(DTYPES[slot.dtype])
        return self._strided(slot, raw)

    def _strided(self, slot: Slot, flat: Tensor) -> Tensor:
        if 0 in slot.shape:
            return flat[:0].reshape(slot.shape)
        return torch.as_strided(flat, slot.shape, self._strides[slot.name], slot.offset)

    def address_of(self, name: str) -> int:
        """The first element's offset in the child's range of addresses; from FAR_BASE on, its address."""
        return self._addresses[name]

    def extent_of(self, name: str) -> tuple[int, int]:
        """First and last (exclusive) byte in the file of a tensor with the bands around it."""
        return self._extents[name]

    def poison(self) -> None:
        """Everything: guards, gaps between elements, outputs, inputs."""
        self.bytes.view(np.uint64)[:] = POISONED_WORD

    def poison_outputs(self) -> None:
        for slot in self.slots:
            if slot.written:
                self.poison_output(slot.name)

    def poison_output(self, name: str) -> None:
        first, last = self._extents[name]
        self.bytes[first:last].view(np.uint64)[:] = POISONED_WORD

    def seal(self) -> None:
        """Keep private copies of the inputs, to see later whether a candidate changed them."""
        self._sealed = {s.name: self._extent_bytes(s).copy() for s in self.slots if not s.written}

    def _extent_bytes(self, slot: Slot) -> np.ndarray:
        first, last = self._extents[slot.name]
        return self.bytes[first:last]

    def mutated(self) -> Trespass | None:
        """The first input whose elements are not what they were when sealed."""
        for slot in self.slots:
            if not slot.written and not _same(now := self._extent_bytes(slot), self._sealed[slot.name]):
                return self._trespass(slot, np.flatnonzero(now != self._sealed[slot.name]))
        return None

    def overrun(self) -> Trespass | None:
        """The first output around whose elements something was written: bands, the pages' slack, gaps between rows."""
        for slot in self.slots:
            if not slot.written:
                continue
            outside = self._extent_bytes(slot).copy()
            self._view_in(slot, outside).fill_(_poison_value(slot.dtype))
            if (outside.view(np.uint64) != POISONED_WORD).any():
                return self._trespass(slot, 2 * np.flatnonzero(outside.view(np.uint16) != POISON))
        return None

    def _view_in(self, slot: Slot, extent: np.ndarray) -> Tensor:
        start = self._starts[slot.name] - self._extents[slot.name][0]
        end = len(extent) if slot.far else start + slot.storage * slot.element_size
        return self._strided(slot, torch.from_numpy(extent[start:end].view(_INTEGERS[slot.element_size])))

    def _trespass(self, slot: Slot, changed: np.ndarray) -> Trespass:
        first = int(changed[0])
        start = self._starts[slot.name] - self._extents[slot.name][0]
        end = start + slot.storage * slot.element_size
        if first < start:
            where = f"{start - int(changed[changed < start][-1])} bytes before its start"
        elif first >= end:
            where = f"{first - end} bytes after its end"
        else:
            where = f"at byte {first - start} of its storage" + (", between its rows" if slot.written else "")
        return Trespass(slot.name, where, int(changed.size))

    def unwritten(self, name: str) -> Tensor:
        """Which elements of an output still hold the poison, bit for bit."""
        view = self.views[name]
        integers = torch.int16 if view.element_size() == 2 else torch.int32
        return view.view(integers) == _poison_value(next(s.dtype for s in self.slots if s.name == name))


_INTEGERS = {2: np.int16, 4: np.int32}


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Byte for byte; extents are whole pages."""
    return bool((a.view(np.uint64) == b.view(np.uint64)).all())


def _poison_value(dtype: str) -> int:
    return POISON if DTYPES[dtype].itemsize == 2 else POISON << 16 | POISON
