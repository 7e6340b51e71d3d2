"""The program of a child that is timed: a candidate and its rivals on the same torch, threads and memory, run when told to.

It measures nothing that counts: the clock is the supervisor's. Its own clock is reported, to be compared with that one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from generator.spec import AttentionSpec, spec_from_plain
from verifier import confine
from verifier.dtypes import DTYPES
from verifier.flex_rival import Call, compiled_in
from verifier.launch import CallBlock, parallel_pointer
from verifier.records import Unsupported
from verifier.rivals import prepare
from verifier.sandbox_child import Child, fenced_kernel, read_all

OURS = "ours"
#: Files that a compiler of rivals may write; from the candidate on, as little as in any sandbox.
COMPILED_BYTES = 1 << 30


class TimingChild(Child):
    """Holds the sets of buffers that the calls of one batch go through, for the candidate and for each rival."""

    def __init__(self, channel: socket.socket, arena: int, spec: AttentionSpec) -> None:
        super().__init__(channel, arena)
        self._spec = spec
        self._blocks: list[CallBlock] = []
        self._sets: list[dict[str, Tensor]] = []
        self._rivals: dict[str, Call] = {}
        self._calls: list[Callable[[], object]] = []

    def _do(self, question: dict[str, Any]) -> dict[str, Any]:
        match question["do"]:
            case "sets":
                self._sets = [{name: self._tensor(**place) for name, place in one.items()} for one in question["sets"]]
                return {}
            case "rivals":
                return self._make_rivals(question["groups"])
            case "candidate":
                self._make_blocks(question)
                return {}
            case "line up":
                self._calls = self._line_up(question["who"], question["first"], question["count"])
                return {}
            case "go":
                return self._go()
            case "answer":
                index = question["set"]
                self._sets[index]["o"].copy_(self._rivals[question["who"]](*self._qkv(index)))
                return {}
            case _:
                return super()._do(question)

    def _tensor(self, address: int, dtype: str, shape: list[int], strides: list[int]) -> Tensor:
        kind = DTYPES[dtype]
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        raw = (ctypes.c_char * (span * kind.itemsize)).from_address(self._room.address(address))
        return torch.frombuffer(raw, dtype=kind).as_strided(shape, strides) if span else torch.empty(shape, dtype=kind)

    def _make_rivals(self, groups: list[str] | None) -> dict[str, Any]:
        """Ready, warm, or the reason why not. Everything that torch opens or starts on a first call, it does here."""
        prepared = prepare(self._spec, self._sets[0], groups)
        why_not = {name: rival.why for name, rival in prepared.items() if isinstance(rival, Unsupported)}
        for name, rival in prepared.items():
            if not isinstance(rival, Unsupported):
                try:
                    rival(*self._qkv(0))
                    self._rivals[name] = rival
                except (RuntimeError, NotImplementedError) as error:
                    why_not[name] = str(error).splitlines()[0]
        return {"rivals": list(self._rivals), "unsupported": why_not, "matmul_flops": self._matmul_rate()}

    def _make_blocks(self, question: dict[str, Any]) -> None:
        assert self._kernel is not None
        self._blocks = []
        for addresses in question["addresses"]:
            block = self._kernel.block()
            self.fill(block, addresses, question)
            self._blocks.append(block)

    def _qkv(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        one = self._sets[index]
        return one["q"], one["k"], one["v"]

    def _line_up(self, who: str, first: int, count: int) -> list[Callable[[], object]]:
        """One call on each of the sets first, first + 1, ..."""
        indices = range(first, first + count)
        if count == 0:  # the way to the child and back is timed
            return []
        if who == OURS:
            assert self._kernel is not None
            return [partial(self._kernel.run, self._blocks[i]) for i in indices]
        return [partial(self._rivals[who], *self._qkv(i)) for i in indices]

    def _go(self) -> dict[str, Any]:
        started = own_clock()
        try:
            for call in self._calls:
                call()
        except (MemoryError, RuntimeError) as error:
            return {"result": f"{type(error).__name__}: {error}"}
        return {"clock_s": own_clock() - started}

    def _matmul_rate(self) -> float:
        """Floating-point operations a second of torch's matrix product, the best of a few: what this machine gives to others."""
        dtype = self._sets[0]["q"].dtype
        a, b = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
        best = float("inf")
        for _ in range(6):
            started = time.perf_counter()
            torch.mm(a, b)
            best = min(best, time.perf_counter() - started)
        return 2 * 1024**3 / best


def own_clock() -> float:
    """This process's clock, which a candidate may have broken; nothing that counts depends on it."""
    try:
        return time.perf_counter()
    except (OSError, OverflowError):
        return 0.0


def main(facts: dict[str, Any]) -> None:
    """As `sandbox_child.main`, with the spec among the facts; the candidate is loaded when the first part is told to stop."""
    confine.bound_to_parent(facts["parent"])
    confine.limit(facts["cpu_s"], facts["memory_bytes"], COMPILED_BYTES)
    channel_handle, arena, binary = facts["handles"]
    channel = socket.socket(fileno=channel_handle)
    fences = {"no_network": confine.no_network()}
    if not confine.can_keep_files_away():  # a candidate could write where the next child's rivals are found
        os.environ.update(compiled_in(Path.cwd()))
    torch.set_num_threads(facts["num_threads"])
    torch.set_grad_enabled(False)
    channel.send(json.dumps({"nonce": "start", "fences": fences}).encode())
    child = TimingChild(channel, arena, spec_from_plain(facts["spec"]))
    with contextlib.suppress(ConnectionError):
        child.serve()  # until told to stop: all that happens before the candidate is in the process
        gc.collect()
        gc.freeze()
        confine.limit(facts["cpu_s"], facts["memory_bytes"])
        parallel = parallel_pointer()
        kernel = fenced_kernel(facts, read_all(binary), channel, parallel, fences)
        if kernel is not None:
            child.take(kernel, parallel)
            child.serve()
    os._exit(0)
