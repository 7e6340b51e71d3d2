"""The launch description of CUDA that somebody wrote: grid, block, cluster, shared memory, workspace, tensor maps, arguments.

Gives the same record as the translator does (docs/cuda_translator.md). Reads no source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from generator.spec import AttentionSpec
from generator.targets import Target
from generator.translate.direct.arguments import ARGUMENTS, Arguments, read_arguments
from generator.translate.direct.cpu_launch import ENTRY, ENTRY_WORDS, require_tensors
from generator.translate.direct.expressions import expression
from generator.translate.direct.parameters import call_scalars, call_tensors
from generator.translate.direct.reading import Field
from generator.translate.direct.tensor_maps import MAP_FIELDS, tensor_map
from generator.translate.facts import CudaFacts, TensorMapFacts, Workspace
from generator.translate.records import Launch

MAX_THREADS = 1024
MAX_CLUSTER = 8
MAX_WORKSPACE = 256 << 20

#: Field -> what it holds, for prompts, messages and docs/direct_author.md.
CUDA_FIELDS: dict[str, str] = {
    "entry": 'the kernel\'s name as the compiler knows it: declare it extern "C"',
    "arguments": f"the kernel's arguments in order, each one of {'; '.join(ARGUMENTS)}",
    "grid": "blocks along x, y, z: one to three expressions",
    "block": "threads of a block: a number, or one to three of them",
    "shared_bytes": "bytes of dynamic shared memory, 0 for none",
    "cluster": "optional, sm_90a: blocks of a cluster along x, y, z; the grid has to be whole clusters",
    "workspace": 'optional: {"bytes": N, "exclusive": true or false}: device memory that is zero before the first launch and '
    "that the kernel leaves zero; exclusive: only one launch at a time may use it",
    "tensor_maps": f"optional, sm_90a: a list of objects with {', '.join(MAP_FIELDS)}",
    "aligned_16": "optional: tensors whose address and strides have to be multiples of 16 bytes; others are copied first",
    "compact": "optional: tensors that have to be contiguous; others are copied first, outputs copied back",
    "positive": "optional: scalars that the kernel only works for when they are above 0",
}


@dataclass(frozen=True, slots=True)
class _Shape:
    """Grid, block, cluster and memory of a launch."""

    grid: list[Any]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    shared_bytes: int


def cuda_launch(root: Field, spec: AttentionSpec, target: Target) -> Launch | None:
    """The launch, or None with every problem added to the list of `root`."""
    fields = root.fields(CUDA_FIELDS, ("entry", "arguments", "grid", "block", "shared_bytes"))
    if fields is None:
        return None
    tensors, scalars = call_tensors(spec), call_scalars(spec)
    entry = fields["entry"].text(ENTRY, ENTRY_WORDS) if "entry" in fields else None
    shape = _shape(fields, {n for n, s in scalars.items() if s.dtype == "i32"} | {"$sms"}, target)
    maps = _maps(fields, spec, target)
    workspace = _workspace(fields.get("workspace"))
    arguments = None
    if "arguments" in fields and maps is not None:
        arguments = read_arguments(fields["arguments"], tensors, scalars, len(maps), "workspace" in fields)
    lists = {name: _names(fields, name, tensors) for name in ("aligned_16", "compact")}
    positive = _names(fields, "positive", scalars)
    if arguments is not None and maps is not None:
        require_tensors(fields["arguments"], (*arguments.tensors, *(m["tensor"] for m in maps)))
    if root.problems or entry is None or shape is None or arguments is None or maps is None:
        return None
    mapped = [m["tensor"] for m in maps]
    facts: CudaFacts = {
        "isa": target.isa,
        "family": "direct",
        "foreign": True,
        "grid": shape.grid,
        "threads": shape.block[0] * shape.block[1] * shape.block[2],
        "block": list(shape.block),
        "shared_bytes": shape.shared_bytes,
        "cluster": list(shape.cluster),
        "aligned_16": [name for name in tensors if name in (*lists["aligned_16"], *mapped)],
        "compact": list(lists["compact"]),
        "repack": "farm_repack",
        "unpack": "farm_unpack",
        "tensor_maps": maps,
        "workspace": workspace,
        "every_output": True,
        "parameters": arguments.facts(),
    }
    used = (*arguments.tensors, *mapped)
    return Launch(
        entry,
        tuple(parameter for name, parameter in tensors.items() if name in used),
        tuple(call_scalars(spec, frozenset(positive)).values()),
        facts,
    )


def _names(fields: dict[str, Field], name: str, known: dict[str, Any]) -> tuple[str, ...]:
    return (fields[name].names(known, "names") or ()) if name in fields else ()


def _shape(fields: dict[str, Field], names: set[str], target: Target) -> _Shape | None:
    grid = block = shared = None
    if "grid" in fields:
        grid = fields["grid"].each(1, 3, "expressions", lambda f: expression(f, names))
    if "block" in fields:
        block = _three(fields["block"], MAX_THREADS, "threads of a block")
    if "shared_bytes" in fields:
        shared = fields["shared_bytes"].whole(0, target.shared_bytes)
    cluster: tuple[int, ...] | None = (1, 1, 1)
    if "cluster" in fields:
        if target.compute_capability < 90:
            return fields["cluster"].wrong(f"{target.name} has no clusters; leave the field out")
        cluster = _three(fields["cluster"], MAX_CLUSTER, "blocks of a cluster")
    if grid is None or block is None or shared is None or cluster is None:
        return None
    return _Shape([*grid, *[1] * (3 - len(grid))], block, cluster, shared)


def _three(field: Field, most: int, what: str) -> tuple[int, ...] | None:
    """One to three numbers, filled up with ones; their product is bounded."""
    if isinstance(field.value, list):
        found = field.each(1, 3, "whole numbers", lambda f: f.whole(1, most))
    else:
        found = (n,) if (n := field.whole(1, most)) is not None else None
    if found is None:
        return None
    found = (*found, *[1] * (3 - len(found)))
    product = found[0] * found[1] * found[2]
    return found if product <= most else field.wrong(f"expected at most {most} {what} in all, found {product}")


def _workspace(field: Field | None) -> Workspace | None:
    if field is None:
        return None
    fields = field.fields({"bytes": "give its size", "exclusive": "say whether launches may not overlap"}, ("bytes", "exclusive"))
    if fields is None or len(fields) < 2:
        return None
    size, exclusive = fields["bytes"].whole(1, MAX_WORKSPACE), fields["exclusive"].truth()
    return None if size is None or exclusive is None else {"bytes": size, "zeroed": True, "exclusive": exclusive}


def _maps(fields: dict[str, Field], spec: AttentionSpec, target: Target) -> list[TensorMapFacts] | None:
    if "tensor_maps" not in fields:
        return []
    if target.compute_capability < 90:
        return fields["tensor_maps"].wrong(f"{target.name} has no tensor maps; leave the field out")
    found = fields["tensor_maps"].each(0, 8, "tensor maps", lambda f: tensor_map(f, spec))
    return None if found is None else list(found)


__all__ = ["CUDA_FIELDS", "Arguments", "cuda_launch"]
