"""FlashAttention-like calls on dense tensors and kernels: from arguments to a frame, and its run. The fallbacks are elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from catalog import serving
from catalog.calls import AttentionCall
from catalog.describe import describe_flash
from catalog.flash_checks import check_dense
from catalog.flash_fallback import FlashArguments
from catalog.frames import bound_kernel
from catalog.loader import LoadedKernel
from catalog.operands import NOTHING, flash_output
from catalog.plainness import is_plain
from catalog.reasons import RunFailed
from catalog.server import Frame, Server, per_thread
from catalog.settings import override as _override
from generator.spec import AttentionSpec

_deterministic = torch.are_deterministic_algorithms_enabled


def answer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: FlashArguments,
    need_lse: bool,
    out: Tensor | None,
    name: str = "flash_attn_func",
) -> tuple[Tensor, Tensor | None] | None:
    """Output and LSE from a kernel; None where torch has to answer (counted). name: the function that was called."""
    server = serving.server()
    frame, options = server.latest, (name, arguments, need_lse, _override(), _deterministic())
    simple = out is None and not arguments.captured
    if not simple or frame is None or frame.options != options or not frame.check(q, k, v):
        frame = _frame(server, q, k, v, options, out, simple)
    if frame is None:
        check_dense(q, k, v, arguments)
        server.miss(describe_flash(q, k, v, arguments, need_lse, name=name), _override())
        return None
    if frame.run is not None:
        try:
            answered: tuple[Tensor, Tensor | None] = frame.run(q, k, v, arguments, out)
        except RunFailed as failure:
            server.failed(frame, failure.reason, failure.broken)
            return None
    per_thread.decision = frame.decision
    frame.outcome.tick()
    return None if frame.run is None else answered


def _frame(
    server: Server, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], out: Tensor | None, simple: bool
) -> Frame | None:
    """The frame for these tensors and options, found or made; None where no key describes them.

    simple: there are no tensors but q, k and v.
    """
    name, arguments, need_lse, override, _ = options
    captured = tuple(arguments.captured.values())
    if server.off or arguments.dropout_p or not is_plain(q, k, v) or not all(is_plain(q, k, x) for x in captured):
        return None
    plain = arguments._replace(alibi_slopes=None, sinks=None, lengths=None, documents=None)
    identity = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        name, plain, need_lse, override, options[-1],
        tuple((label, x.shape, x.stride(), x.dtype, x.device) for label, x in arguments.captured.items()),
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
    )  # fmt: skip
    frame = server.frames.get(identity)
    if frame is None:
        check_dense(q, k, v, arguments)
        call = describe_flash(q, k, v, arguments, need_lse, name=name)
        frame = server.frame(identity, call, override, partial(_bind, call, q, arguments, out))
    if simple:
        server.remember(frame, options, q, k, v)
    return frame


def _bind(
    call: AttentionCall, q: Tensor, arguments: FlashArguments, out: Tensor | None, loaded: LoadedKernel, spec: AttentionSpec
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    output = flash_output(q, call.head_dim_v, out)
    kernel = bound_kernel(loaded.entry, call, spec, output, arguments.captured)

    def run(q: Tensor, k: Tensor, v: Tensor, arguments: FlashArguments, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if out is None:
            out = q.new_empty(output.shape)
        else:
            torch.autograd.graph.increment_version(out)  # as any operation in place does
        if call.need_lse:
            return out, kernel.run_with_lse(q, k, v, out, arguments.captured)
        kernel.run(q, k, v, out, arguments.captured if call.captured else NOTHING)
        return out, None

    return run
