"""Whether a call is ordinary: plain tensors, no gradients, nothing that transforms or watches operations. Gives no reasons."""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor
from torch.autograd import forward_ad

from catalog.calls import PLAIN_TYPES

_autocast = torch._C._is_any_autocast_enabled
_functorch = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_jit_traces = torch._C._is_tracing
_grad_enabled = torch.is_grad_enabled
_math_way, _flash_way = torch._C._get_math_sdp_enabled, torch._C._get_flash_sdp_enabled  # a choice leaves out one of them

#: Whether these tensors, here and now, are all that a key would say of the ones that the check was made from.
Check = Callable[..., bool]


def is_plain(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a key of shapes, strides, dtypes and devices says all about these tensors and this context."""
    if type(query) not in PLAIN_TYPES or type(key) not in PLAIN_TYPES or type(value) not in PLAIN_TYPES:
        return False
    if not _nothing_watches() or _autocast() or _functorch() is not None:  # first: a mode would see what is asked of tensors
        return False
    if _grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    return not any(x.layout is not torch.strided or x.is_nested or x.is_neg() for x in (query, key, value))


def torch_may_choose() -> bool:
    """Whether no way of torch's own is ruled out, as `torch.nn.attention.sdpa_kernel` does: who names one wants that one."""
    return _math_way() and _flash_way()


def torch_reads(is_causal: object, enable_gqa: object, scale: object, dropout_p: object) -> bool:
    """Whether torch's function takes arguments of these types: flags are bools, numbers of a type that it reads as a float.

    By value alone a key cannot tell: True == 1 and 0.25 == Fraction(1, 4), and torch raises TypeError for the right-hand sides.
    """
    return type(is_causal) is type(enable_gqa) is bool and (scale is None or _is_float(scale)) and _is_float(dropout_p)


def _is_float(x: object) -> bool:
    """Python's and numpy's real numbers, and a tensor without dimensions that wants no gradient."""
    if isinstance(x, Tensor):
        return type(x) is Tensor and x.dim() == 0 and not x.requires_grad and not x.is_complex()
    return isinstance(x, int | float) or (isinstance(x, Real) and type(x).__module__ == "numpy")


def _nothing_watches() -> bool:
    """Whether nothing has to see the operations on plain tensors: modes, a trace, tangents that travel with tensors."""
    return not (_function_modes() or _dispatch_modes() or _jit_traces() or forward_ad._current_level >= 0)


# torch.compile's own guard on tensors compares type, dispatch keys (so subclasses, autocast, functorch, lazy negation),
# dtype, device, need of gradients, shape and strides in one C++ call, several times faster than a key can be made. It is no
# public interface: it is used only where a trial shows that it tells apart what has to be told apart; elsewhere the key is made
# in every call.


def check_like(*tensors: Tensor) -> Check | None:
    """A check that holds for plain tensors like these three or four, where nothing watches; None where there can be none.

    The guard knows whether tensors want gradients, not whether gradients are on: it is made from tensors that want none. It never
    holds for one tensor given twice.
    """
    if not guard_is_usable() or len(set(map(id, tensors))) < len(tensors) or any(x.requires_grad for x in tensors):
        return None
    return _guard(*tensors)


def never(*tensors: Tensor) -> bool:
    """The check of what has none."""
    return False


def _guard(*tensors: Tensor) -> Check:
    """torch's guard, and what it does not look at. A call in C or Python is a twentieth of a microsecond: none is made twice."""
    from torch._C._dynamo.guards import TensorGuards

    sizes, strides = [list(x.size()) for x in tensors], [list(x.stride()) for x in tensors]
    guard: Check = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[arg-type]
    one, two, other, last = (*map(type, tensors), Tensor)[:4]

    # Types first: a subclass would see what is asked of it. Nested tensors, asked for their strides by the guard, would end the
    # process.
    def three(a: Tensor, b: Tensor, c: Tensor) -> bool:
        if type(a) is not one or type(b) is not two or type(c) is not other:
            return False
        if _function_modes() or _dispatch_modes() or _jit_traces() or forward_ad._current_level >= 0:
            return False
        return not (a.is_nested or b.is_nested or c.is_nested) and guard(a, b, c)

    def four(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> bool:
        if type(a) is not one or type(b) is not two or type(c) is not other or type(d) is not last:
            return False
        if _function_modes() or _dispatch_modes() or _jit_traces() or forward_ad._current_level >= 0:
            return False
        return not (a.is_nested or b.is_nested or c.is_nested or d.is_nested) and guard(a, b, c, d)

    return three if len(tensors) == 3 else four


@functools.cache
def guard_is_usable() -> bool:
    """The trial: the guard holds for equal tensors, and for none that differs in what matters. Made at the first plain call:
    modes around the import would spoil it.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad():
            return _tells_apart()
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return False


def _tells_apart() -> bool:
    a, b, c = (torch.zeros(1, 2, 3, 4, dtype=torch.float32, device="cpu") for _ in range(3))
    check = _guard(a, b, c)
    others = [
        a.new_zeros(1, 2, 5, 4),
        a.new_zeros(1, 2, 3, 8)[..., ::2],
        a.new_zeros(1, 3, 2, 4).transpose(1, 2),
        a.double(),
        a.to("meta"),
        a.clone().requires_grad_(),
        torch.nn.Parameter(a, requires_grad=False),
        torch._neg_view(a.clone()),
    ]
    holds = check(a, b, c) and check(torch.zeros_like(a), b, c)
    apart = not any(check(*(x if n == at else y for n, y in enumerate((a, b, c)))) for x in others for at in range(3))
    with torch.no_grad():
        apart = apart and not check(others[5], b, c)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        apart = apart and not check(a, b, c)
    return holds and apart and not _holds_under_vmap(check, a, b, c)


def _holds_under_vmap(check: Check, a: Tensor, b: Tensor, c: Tensor) -> bool:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(check(x, b, c) or check(a, b, c))
        return x

    torch.vmap(look)(a.new_zeros(2, *a.shape))
    return seen[0]
