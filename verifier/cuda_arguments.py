"""The argument block, grid and tensor maps of a CUDA launch, from its description and a call's tensors. Touches no device.

What the description (`CudaFacts`) holds is told in docs/cuda_translator.md.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from generator.translate.facts import CUDA_REQUIRED, CudaFacts, ParameterField, SecondEntry, TensorMapFacts
from generator.translate.records import Launch, TensorParameter
from verifier.launch import LaunchError, TensorLike

ITEM_BYTES = {"f32": 4, "i32": 4, "f16": 2, "bf16": 2}
FORMATS = {"pointer": "<Q", "i64": "<q", "i32": "<i", "f32": "<f"}
#: Functions of scalar expressions in a launch description. Division by 0 gives 0: nothing there is to be done.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": lambda a, b: a // b if b else 0,
    "%": lambda a, b: a % b if b else 0,
    "ceildiv": lambda a, b: -(-a // b) if b else 0,
    "max": max,
    "min": min,
    "neg": operator.neg,
    "where": lambda condition, a, b: a if condition else b,
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    ">": lambda a, b: int(a > b),
    ">=": lambda a, b: int(a >= b),
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
}
#: TMA counts strides in units of 16 bytes and takes at most five axes.
TMA_ALIGNMENT = 16
#: Blocks along each axis of a grid, at most.
GRID_LIMITS = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor as the kernel addresses it; strides in elements. Holds no memory."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def data_ptr(self) -> int:
        return self.pointer

    def stride(self) -> tuple[int, ...]:
        return self.strides


@dataclass(frozen=True, slots=True)
class TensorMap:
    """What `cuTensorMapEncodeTiled` takes: innermost axis first; strides in bytes, without the innermost."""

    offset: int
    dtype: str
    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 128


@dataclass(frozen=True, slots=True)
class Call:
    """One launch: the parameter block with tensor maps still to be written in, the grid, and what to launch."""

    block: bytearray
    maps: tuple[TensorMap, ...]
    grid: tuple[int, int, int]

    @property
    def is_empty(self) -> bool:
        return 0 in self.grid


def evaluate(e: Any, values: Mapping[str, Any]) -> Any:
    """A scalar expression of a launch description: a number, a scalar's name, or [function, arguments...]."""
    if isinstance(e, (int, float)):
        return e
    if isinstance(e, str):
        return values[e]
    name, *arguments = e
    if (function := FUNCTIONS.get(name)) is None:
        raise LaunchError(f"launch: expected a function, one of {' '.join(FUNCTIONS)}, found {name!r}")
    return function(*(evaluate(argument, values) for argument in arguments))


def cuda_facts(launch: Launch) -> CudaFacts:
    """What a CUDA kernel's launch holds. Raises LaunchError for the launch of another kind of kernel."""
    if missing := CUDA_REQUIRED - launch.target_facts.keys():
        found = f"{launch.entry or 'an empty launch'} for {launch.target_facts.get('isa', 'no target')}"
        raise LaunchError(f"target_facts: expected those of a CUDA kernel, found {found} without {', '.join(sorted(missing))}")
    return cast(CudaFacts, launch.target_facts)


def second_entry(launch: Launch) -> SecondEntry | None:
    """What is another for the kernel's second entry point, which takes rows that begin anywhere; None where there is none."""
    return cuda_facts(launch).get("unaligned")


def unaligned_entry(launch: Launch) -> Launch | None:
    """How the kernel's second entry point is launched; None where there is none."""
    other = second_entry(launch)
    if other is None:
        return None
    return Launch(other["entry"], launch.tensors, launch.scalars, cast(CudaFacts, {**launch.target_facts, **other}))


def entry_for(launch: Launch, tensors: Sequence[TensorLike]) -> Launch:
    """The launch of the entry point that takes these tensors: the second where some cannot be read 16 bytes at a time."""
    other = unaligned_entry(launch)
    return other if other is not None and misaligned(launch, tensors) else launch


def too_narrow(launch: Launch, tensors: Sequence[TensorLike]) -> list[int]:
    """Positions of tensors that are copied first, so that the kernel's first entry point can take them: all that it cannot take
    as they lie, or none of them. All, where the second entry point would take some in too small pieces, or where every matrix
    is so long that pieces, which are moved again for each block of rows, cost more than a copy.
    """
    positions, other = misaligned(launch, tensors), second_entry(launch)
    if other is None or not positions:
        return positions
    narrow = any(_row_bytes(launch.tensors[i], tensors[i]) < other["least_bytes"] for i in positions)
    most = other.get("most_rows")
    return positions if narrow or (most is not None and _fewest_rows(launch, tensors) > most) else []


def _fewest_rows(launch: Launch, tensors: Sequence[TensorLike]) -> int:
    """Rows of the shortest matrix that the kernel reads by 16 bytes; 0 where a shape is not known."""
    wanted = cuda_facts(launch)["aligned_16"]
    shapes = [getattr(t, "shape", None) for p, t in zip(launch.tensors, tensors, strict=True) if p.name in wanted]
    return min((shape[-2] if shape else 0 for shape in shapes), default=0)


def _row_bytes(parameter: TensorParameter, tensor: TensorLike) -> int:
    """The power of two, at most 16, that address and strides are multiples of."""
    bits = TMA_ALIGNMENT | tensor.data_ptr()
    for stride in _strides(parameter, tensor)[:-1]:
        bits |= stride * ITEM_BYTES[parameter.dtype]
    return bits & -bits


def misaligned(launch: Launch, tensors: Sequence[TensorLike]) -> list[int]:
    """Positions of tensors that the kernel's first entry point cannot take as they lie: 16 byte loads need addresses and strides
    in steps of 16 bytes, and a kernel may be written for compact tensors only.
    """
    out = []
    facts = cuda_facts(launch)
    compact = facts.get("compact", ())
    for i, (parameter, tensor) in enumerate(zip(launch.tensors, tensors, strict=True)):
        if parameter.name in compact and not _is_compact(tensor):
            out.append(i)
        elif parameter.name in facts["aligned_16"]:
            strides = [s * ITEM_BYTES[parameter.dtype] for s in _strides(parameter, tensor)[:-1]]
            repeats = facts["tensor_maps"] and _repeats(tensor)
            if repeats or any(x % TMA_ALIGNMENT for x in (tensor.data_ptr(), *strides)):
                out.append(i)
    return out


def _is_compact(tensor: TensorLike) -> bool:
    """Whether the elements lie one after the other; an axis of one element may carry any stride."""
    step, shape = 1, getattr(tensor, "shape", None)
    for n, stride in zip(reversed(shape or ()), reversed(tensor.stride()), strict=shape is not None):
        if n > 1 and stride != step:
            return False
        step *= max(1, n)
    return True


def _repeats(tensor: TensorLike) -> bool:
    """Whether an axis of several elements has stride 0 (an expanded view), which tensor maps do not take."""
    shape = getattr(tensor, "shape", None)
    return shape is not None and any(n > 1 and s == 0 for n, s in zip(shape, tensor.stride(), strict=True))


def _strides(parameter: TensorParameter, tensor: TensorLike) -> tuple[int, ...]:
    """Strides in elements; an axis of one element may carry any, and counts as 0 where the extent is known."""
    strides = tuple(tensor.stride())
    shape = getattr(tensor, "shape", None)
    if shape is None:
        return strides
    return tuple(0 if n == 1 and i < len(strides) - 1 else s for i, (s, n) in enumerate(zip(strides, shape, strict=True)))


def make_call(
    launch: Launch,
    tensors: Sequence[TensorLike | None],
    scalars: Sequence[int | float],
    workspace: int = 0,
    num_sms: int = 0,
    zeros: int = 0,
) -> Call:
    """Fills the parameter block. tensors: None leaves an output out. workspace: a device address, where the kernel asks for one.

    zeros: the address of 16 byte aligned memory that stands for empty tensors.
    """
    facts = cuda_facts(launch)
    values: dict[str, Any] = {s.name: v for s, v in zip(launch.scalars, scalars, strict=True)}
    values |= {"$sms": num_sms}
    by_name = {p.name: (p, t) for p, t in zip(launch.tensors, tensors, strict=True)}
    block = bytearray(facts["parameters"]["bytes"])
    maps = []
    for f in facts["parameters"]["fields"]:
        if f["type"] == "tensor_map":
            maps.append(_tensor_map(facts["tensor_maps"][f["map"]], f["offset"], by_name, values, zeros))
            continue
        value = _field(f, by_name, values, workspace)
        try:
            struct.pack_into(FORMATS[f["type"]], block, f["offset"], value)
        except (struct.error, OverflowError):
            raise LaunchError(f"parameters: {value} does not fit {f['type']} at byte {f['offset']}") from None
    return Call(block, tuple(maps), _grid(facts, values))


def _grid(facts: CudaFacts, values: Mapping[str, Any]) -> tuple[int, int, int]:
    x, y, z = (int(evaluate(e, values)) for e in facts["grid"])
    for axis, n, limit, step in zip("xyz", (x, y, z), GRID_LIMITS, facts.get("cluster", (1, 1, 1)), strict=True):
        if not 0 <= n <= limit:
            raise LaunchError(f"grid: expected 0 to {limit} blocks along {axis}, found {n}")
        if n % step:
            raise LaunchError(f"grid: expected blocks along {axis} in whole clusters of {step}, found {n}")
    return x, y, z


def _field(f: ParameterField, by_name: Mapping[str, Any], values: Mapping[str, Any], workspace: int) -> int | float:
    if "scalar" in f:
        return values[f["scalar"]]
    if "value" in f:
        return evaluate(f["value"], values)
    if f.get("workspace"):
        return workspace
    parameter, tensor = by_name[f["tensor"]]
    if tensor is None:
        return 0
    return int(_strides(parameter, tensor)[f["stride"]]) if "stride" in f else int(tensor.data_ptr())


def _tensor_map(m: TensorMapFacts, offset: int, by_name: Mapping[str, Any], values: Mapping[str, Any], zeros: int) -> TensorMap:
    parameter, tensor = by_name[m["tensor"]]
    item, strides = ITEM_BYTES[parameter.dtype], _strides(parameter, tensor)
    extents = tuple(int(tensor.shape[e["shape"]]) if isinstance(e, dict) else evaluate(e, values) for e in m["extents"])
    empty = any(n <= 0 for n in extents)
    if empty:  # one element of zeros; everything else lies outside
        extents = (1,) * len(extents)
    # an axis of one element may carry any stride, but TMA wants a multiple of 16 bytes that is not 0
    wide = tuple(
        (strides[a] * item if isinstance(a, int) else int(evaluate(a["bytes"], values))) or TMA_ALIGNMENT for a in m["strides"]
    )
    return TensorMap(
        offset,
        parameter.dtype,
        zeros if empty else int(tensor.data_ptr()),
        tuple(max(1, n) for n in extents),
        wide,
        tuple(m["box"]),
        int(m.get("swizzle_bytes", 128)),
    )
