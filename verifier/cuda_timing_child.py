"""The program of a child that is timed on a GPU: a cubin and its rivals in one context, on one stream, on the same buffers.

PyCUDA holds the context and the stream; torch joins both. Device events take the time; the supervisor compares them with its own
clock over whole batches. Values are made on the device from seeds that the supervisor gives, and what it wants to check is copied
into the arena. Judges nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from generator.spec import AttentionSpec, spec_from_plain
from verifier.arena import POISON
from verifier.cuda_child import CudaChild, DeviceRoom, fence, load, open_device, say, told_by
from verifier.cuda_rivals import OUT_OF_MEMORY, prepare_cuda
from verifier.dtypes import DTYPES
from verifier.records import Unsupported
from verifier.sandbox_child import read_all

OURS = "ours"
#: Cycles that the device spins before a timed call that is not a graph, so that the host has queued all of it by then.
HEAD_START_CYCLES = 800_000
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
COPY_BYTES, PRODUCT_SIZE = 512 << 20, 4096
INTEGERS = {2: torch.int16, 4: torch.int32}


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cuda")


@dataclass(slots=True)
class Contestant:
    """One that is timed: a call on the buffers of a set, and the replay of a whole batch where there is one."""

    call: Callable[[int], object]
    graph: Any = None
    why_no_graph: str = ""
    kept: list[object] = field(default_factory=list)


class Buffers:
    """Sets of device buffers, each a copy of the arena's layout: bands around every tensor, the same places inside."""

    def __init__(self, handle: int, size: int, tensors: list[dict[str, Any]], num_sets: int) -> None:
        self._file = torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)
        self.tensors = tensors
        self.extents = [{t["name"]: _bytes(t["last"] - t["first"]) for t in tensors} for _ in range(num_sets)]
        for index in range(num_sets):
            for t in tensors:
                self.extents[index][t["name"]].view(torch.int16).fill_(POISON)
        self.views = [{t["role"]: self._view(t, extents) for t in tensors} for extents in self.extents]

    @staticmethod
    def _view(t: Mapping[str, Any], extents: Mapping[str, Tensor]) -> Tensor:
        dtype = DTYPES[t["dtype"]]
        flat = extents[t["name"]][t["start"] - t["first"] :]
        return flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(t["shape"], t["strides"])

    def qkv(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        views = self.views[index]
        return views["q"], views["k"], views["v"]

    def captured(self, index: int) -> dict[str, Tensor]:
        return {role: x for role, x in self.views[index].items() if role not in ("q", "k", "v", "o", "lse")}

    def upload_captured(self) -> None:
        for t in self.tensors:
            if t["role"] not in ("q", "k", "v", "o", "lse"):
                for extents in self.extents:
                    extents[t["name"]].copy_(self._file[t["first"] : t["last"]])

    def download(self, index: int, written: bool) -> None:
        """Outputs, or everything else, of a set into the arena."""
        for t in self.tensors:
            if t["written"] or not written:
                self._file[t["first"] : t["last"]].copy_(self.extents[index][t["name"]])

    def poison(self, index: int) -> None:
        for t in self.tensors:
            if t["written"]:
                self.extents[index][t["name"]].view(torch.int16).fill_(POISON)

    def unwritten(self, index: int) -> int:
        """Elements of outputs that still hold the poison."""
        count = 0
        for t in self.tensors:
            if t["written"]:
                view = self.views[index][t["role"]]
                poison = POISON if view.element_size() == 2 else POISON << 16 | POISON
                count += int((view.view(INTEGERS[view.element_size()]) == poison).sum())
        return count


class CudaTimingChild(CudaChild):
    """Times contestants when told to; every batch is some calls on different sets after the cache was flushed."""

    def __init__(self, channel: socket.socket, cuda: Any, stream: Any, arena: int, spec: AttentionSpec, l2_bytes: int) -> None:
        super().__init__(channel, cuda, stream, DeviceRoom(cuda, arena, 0))
        self._arena_handle, self._spec = arena, spec
        self._buffers: Buffers | None = None
        self._contestants: dict[str, Contestant] = {}
        self._rivals: dict[str, Any] = {}
        self._count = 1
        self._flush = _bytes(max(2 * l2_bytes, 32 << 20))
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    @property
    def buffers(self) -> Buffers:
        assert self._buffers is not None, "prepare comes first"
        return self._buffers

    def _do(self, question: dict[str, Any]) -> dict[str, Any]:
        match question["do"]:
            case "prepare":
                self._buffers = Buffers(self._arena_handle, question["size"], question["tensors"], question["sets"])
                self._buffers.upload_captured()
                return {"free_bytes": torch.cuda.mem_get_info()[0]}
            case "values":
                return self._values(question["seed"], question["keep"])
            case "rivals":
                return self._make_rivals(tuple(question["names"]), question["rates"])
            case "candidate":
                return self._make_candidate(question)
            case "batch":
                return self._choose_batch(question["count"], question["graphs"])
            case "time":
                return self._time(question["who"], question["first"])
            case "steady":
                return self._steady(question["who"], question["count"])
            case "answer":
                return self._answer(question["who"], question["set"])
            case "download":
                self.buffers.download(question["set"], written=False)
                return {}
            case "compare":
                return {"difference": self._compare(question["who"], question["set"])}
            case _:
                return super()._do(question)

    def _values(self, seed: int, keep: int | None) -> dict[str, Any]:
        """New numbers in every set's q, k and v. keep: the set whose buffers are copied into the arena."""
        generator = torch.Generator(device="cuda")
        generator.manual_seed(seed)
        for index in range(len(self.buffers.views)):
            for x in self.buffers.qkv(index):
                x.normal_(generator=generator)
        if keep is not None:
            self.buffers.poison(keep)
            self.buffers.download(keep, written=False)
        torch.cuda.synchronize()
        return {}

    def _make_rivals(self, names: tuple[str, ...], rates: bool) -> dict[str, Any]:
        """Each made, run and warm; seconds of one call, or why it takes no part. rates: of this device are measured as well."""
        seconds, why_not = {}, {}
        for name in names:
            try:
                rival = prepare_cuda(self._spec, self.buffers.captured(0), (name,))[name]
                if isinstance(rival, Unsupported):
                    why_not[name] = rival.why
                    continue
                self._rivals[name] = rival
                self._contestants[name] = Contestant(lambda index, rival=rival: rival(*self.buffers.qkv(index)))  # type: ignore[misc]
                seconds[name] = self._estimate(name)
            except torch.OutOfMemoryError:
                why_not[name] = OUT_OF_MEMORY
            except Exception as error:  # a rival that cannot run is a result, whatever it says
                why_not[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            if name in why_not:
                self._contestants.pop(name, None)
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        return {"seconds": seconds, "unsupported": why_not, **(self._machine_rates() if rates else {})}

    def _make_candidate(self, question: dict[str, Any]) -> dict[str, Any]:
        """The kernel on every set's buffers, arguments packed once."""
        forms = list(zip(question["roles"], question["shapes"], question["strides"], strict=True))
        calls = []
        for views in self.buffers.views:
            tensors = [views[role].as_strided(shape, strides) for role, shape, strides in forms]
            calls.append(self._kernel.prepare(tensors, question["scalars"]))
        self._contestants[OURS] = Contestant(lambda index: calls[index].run(torch.cuda.current_stream().cuda_stream))
        return {"seconds": self._estimate(OURS), "attributes": self._kernel.attributes}

    def _estimate(self, who: str) -> float:
        contestant = self._contestants[who]
        for _ in range(2):
            contestant.call(0)
        torch.cuda.synchronize()
        return self._time(who, 0, count=1)["device_s"]

    def _machine_rates(self) -> dict[str, float]:
        """Matrix product and copy of this device as torch does them: what it gives to others; and events around nothing."""
        a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda").to(self.buffers.qkv(0)[0].dtype) for _ in range(2))
        product_s = min(self._seconds(lambda: torch.mm(a, b)) for _ in range(6))
        empty_s = min(self._seconds(lambda: None) for _ in range(6))
        copied = 2 * COPY_BYTES / self._copy_seconds()
        return {"matmul_flops": 2 * PRODUCT_SIZE**3 / product_s, "copy_bytes_per_s": copied, "empty_s": empty_s}

    def _copy_seconds(self) -> float:
        source, target = _bytes(COPY_BYTES), _bytes(COPY_BYTES)
        return min(self._seconds(lambda: target.copy_(source)) for _ in range(4))

    def _seconds(self, call: Callable[[], object]) -> float:
        start, end = self._events
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _choose_batch(self, count: int, graphs: bool) -> dict[str, Any]:
        """Calls in a batch, and whether batches are replayed as graphs; what could not be captured is called one by one."""
        self._count = count
        for contestant in self._contestants.values():
            contestant.graph = None
            if graphs:
                self._capture(contestant)
        return {"without_graph": {n: c.why_no_graph for n, c in self._contestants.items() if graphs and c.graph is None}}

    def _capture(self, contestant: Contestant) -> None:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
                contestant.kept = [contestant.call(i) for i in self._sets_from(0, self._count)]
            graph.replay()
            torch.cuda.synchronize()
            contestant.graph = graph
        except Exception as error:
            contestant.why_no_graph = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            torch.cuda.synchronize()

    def _sets_from(self, first: int, count: int) -> list[int]:
        return [(first + i) % len(self.buffers.views) for i in range(count)]

    def _time(self, who: str, first: int, count: int | None = None) -> dict[str, Any]:
        """Seconds of one call, by device events around a batch that starts with a cold cache."""
        contestant = self._contestants[who]
        graph = contestant.graph if count is None else None
        sets = self._sets_from(0 if graph is not None else first, count or self._count)
        if who == OURS:
            for index in set(sets):
                self.buffers.poison(index)
        start, end = self._events
        self._flush.fill_(1)
        if graph is None:
            torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        if graph is not None:
            graph.replay()
        else:
            for index in sets:
                contestant.call(index)
        end.record()
        end.synchronize()
        answer: dict[str, Any] = {"device_s": float(start.elapsed_time(end)) / 1e3 / len(sets), "sets": sets}
        if who == OURS:
            answer["unwritten"] = sum(self.buffers.unwritten(index) for index in set(sets))
        return answer

    def _steady(self, who: str, count: int) -> dict[str, Any]:
        """Many calls back to back on warm caches: device and host clock over all of it. calls: how many they were."""
        contestant = self._contestants[who]
        runs: list[Callable[[], object]]
        runs = [lambda i=i: contestant.call(i) for i in self._sets_from(0, count)]  # type: ignore[misc]
        if contestant.graph is not None:
            runs = [contestant.graph.replay] * max(1, count // self._count)
            count = len(runs) * self._count
        start, end = self._events
        torch.cuda.synchronize()
        began = time.perf_counter()
        start.record()
        for run in runs:
            run()
        end.record()
        end.synchronize()
        device_s = float(start.elapsed_time(end)) / 1e3
        return {"device_s": device_s, "host_s": time.perf_counter() - began, "calls": count}

    def _answer(self, who: str, index: int) -> dict[str, Any]:
        """A rival's answer on a set, into the arena in the place of ours."""
        self.buffers.poison(index)
        self.buffers.views[index]["o"].copy_(self._rivals[who](*self.buffers.qkv(index)))
        self.buffers.download(index, written=True)
        return {}

    def _compare(self, who: str, index: int) -> float:
        """The largest relative distance, over heads, of what lies in a set's output and a rival's answer on the same inputs."""
        ours, theirs = self.buffers.views[index]["o"].float(), self._rivals[who](*self.buffers.qkv(index)).float()
        return float(((ours - theirs).norm(dim=(2, 3)) / theirs.norm(dim=(2, 3)).clamp(min=1e-30)).max())


def main(facts: dict[str, Any]) -> None:
    """As `cuda_child.main`, with the spec among the facts; the candidate is loaded when the first part is told to stop."""
    channel_handle, arena, binary = facts["handles"]
    channel = socket.socket(fileno=channel_handle)
    fences = fence(facts)
    if (opened := open_device(channel, fences)) is None:
        os._exit(0)
    cuda, device, _context = opened
    told = told_by(cuda, device) | {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version() or 0}
    torch.set_grad_enabled(False)
    torch.cuda.init()
    stream = cuda.Stream(NON_BLOCKING)  # as torch's own are: nothing on the default stream holds it up, or its capture
    torch.cuda.set_stream(torch.cuda.ExternalStream(stream.handle, device="cuda:0"))
    child = CudaTimingChild(channel, cuda, stream, arena, spec_from_plain(facts["spec"]), told["l2_bytes"])
    say(channel, {"fences": fences, "facts": told})
    with contextlib.suppress(ConnectionError):
        child.serve()  # until told to stop: all that happens before the candidate is in the process
        try:
            child.take(load(facts, read_all(binary)))
        except Exception as error:
            say(channel, {"fences": fences, "error": str(error)})
            os._exit(0)
        say(channel, {"fences": fences, "facts": told})
        child.serve()
    os._exit(0)
