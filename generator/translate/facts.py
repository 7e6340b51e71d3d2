"""What only one kind of target needs of a launch, field by field: the shape of `Launch.target_facts`. Reads and fills in nothing.

These are dictionaries because they are a column of the catalog: a row of an older start has the fields that were known then, so a
reader takes every field of a `NotRequired` kind by `get`. What they mean is told in docs/cuda_translator.md.
"""

from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

#: A number, the name of a scalar argument, "$sms" (multiprocessors of the device), or [function, formula, ...].
Formula: TypeAlias = Any
FieldType = Literal["pointer", "i64", "i32", "f32", "tensor_map"]


class LaunchFacts(TypedDict, total=False):
    """What may be asked of any launch.

    isa: what the code is compiled for. view: "standard" or "grouped", how a decode kernel takes Q, O, LSE (`generator.binding`).
    foreign: somebody else wrote the code, so it is fenced in. every_output: none may be left out. alignment_bytes, max_offset (in
    elements), batch_invariant: what a kernel asks for and promises where it says so.
    """

    isa: str
    family: str
    view: str
    foreign: bool
    every_output: bool
    alignment_bytes: int
    max_offset: int
    batch_invariant: bool


class ParameterField(TypedDict):
    """One member of the parameter block, `offset` bytes from its beginning, with one source.

    tensor: its address, or with `stride` the stride of that axis in elements. scalar: that argument. value: a formula.
    workspace: the workspace's address. map: the tensor map of that number.
    """

    offset: int
    type: FieldType
    tensor: NotRequired[str]
    stride: NotRequired[int]
    scalar: NotRequired[str]
    value: NotRequired[Formula]
    workspace: NotRequired[bool]
    map: NotRequired[int]


class ParameterBlock(TypedDict):
    """bytes, alignment: of the whole. parts: where each of the kernel's parameters begins; left out, there is one."""

    bytes: int
    alignment: int
    fields: list[ParameterField]
    parts: NotRequired[list[int]]


class TensorMapFacts(TypedDict):
    """What `cuTensorMapEncodeTiled` is told, innermost axis first.

    extents: formulas, or {"shape": axis of the tensor}. strides: of all axes but the innermost, an axis of the tensor or
    {"bytes": formula}. box: elements that one copy takes.
    """

    tensor: str
    dtype: str
    extents: list[Any]
    strides: list[Any]
    box: list[int]
    swizzle_bytes: NotRequired[int]


class Workspace(TypedDict):
    """Device memory that is zero before the first launch and left zero. exclusive: one launch at a time may use it."""

    bytes: int
    zeroed: bool
    exclusive: bool


class SecondEntry(TypedDict):
    """What is another for the entry point that takes rows beginning anywhere; the rest is as for the first.

    least_bytes: tensors whose rows allow only narrower pieces are copied first. most_rows: so are all where each matrix has more.
    """

    entry: str
    shared_bytes: int
    aligned_16: list[str]
    least_bytes: int
    most_rows: NotRequired[int | None]
    parameters: NotRequired[ParameterBlock]
    tensor_maps: NotRequired[list[TensorMapFacts]]
    workspace: NotRequired[Workspace | None]


class CudaFacts(LaunchFacts):
    """grid, cluster: blocks. threads: of a block; block: along x, y and z. shared_bytes: dynamic shared memory of a block.

    aligned_16: tensors whose address and strides are multiples of 16 bytes. compact: tensors that have to be contiguous.
    repack, unpack: entry points that copy a tensor into compact form and back.
    """

    grid: list[Formula]
    threads: int
    shared_bytes: int
    aligned_16: list[str]
    tensor_maps: list[TensorMapFacts]
    workspace: Workspace | None
    parameters: ParameterBlock
    block: NotRequired[list[int]]
    cluster: NotRequired[list[int]]
    compact: NotRequired[list[str]]
    repack: NotRequired[str | None]
    unpack: NotRequired[str]
    unaligned: NotRequired[SecondEntry]


#: Without these no CUDA kernel can be launched.
CUDA_REQUIRED: frozenset[str] = frozenset(CudaFacts.__required_keys__)
