"""Whether a call is ordinary: plain tensors, no gradients, nothing that transforms or watches operations. Gives no reasons."""

from __future__ import annotations

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

#: Whether three tensors, here and now, are all that a key would say they are.
Check = Callable[[Tensor, Tensor, Tensor], bool]


def is_plain(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a key of shapes, strides, dtypes and devices says all about these tensors and this context."""
    if type(query) not in PLAIN_TYPES or type(key) not in PLAIN_TYPES or type(value) not in PLAIN_TYPES:
        return False
    if _grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    if not nothing_watches() or _autocast() or _functorch() is not None:
        return False
    return not any(x.layout is not torch.strided or x.is_nested or x.is_neg() for x in (query, key, value))


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


# torch.compile's own guard on tensors compares type, dispatch keys (so subclasses, autocast, functorch, lazy negation), dtype,
# device, need of gradients, shape and strides in one C++ call, several times faster than a key can be made. It is no public
# interface: it is used only where a trial at import shows that it tells apart what has to be told apart; elsewhere the key is
# made in every call.


def check_like(query: Tensor, key: Tensor, value: Tensor) -> Check | None:
    """A check that holds for plain tensors like these; None where torch's guard cannot be used.

    The guard knows whether tensors want gradients, not whether gradients are on: it is made from tensors that want none. It never
    holds for one tensor given twice.
    """
    if not _USABLE or query is key or key is value or query is value:
        return None
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return None
    return _guard(query, key, value)


def never(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """The check of a frame that has none."""
    return False


def nothing_watches() -> bool:
    """What torch's guard does not look at: modes that see every operation, a trace, tangents that travel with tensors."""
    return not (_function_modes() or _dispatch_modes() or _jit_traces() or forward_ad._current_level >= 0)


def _guard(*tensors: Tensor) -> Check:
    from torch._C._dynamo.guards import TensorGuards

    sizes, strides = [list(x.size()) for x in tensors], [list(x.stride()) for x in tensors]
    guard: Check = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[arg-type]

    def check(query: Tensor, key: Tensor, value: Tensor) -> bool:
        try:
            if query.is_nested or key.is_nested or value.is_nested:  # asked for their strides, they would end the process
                return False
        except AttributeError:  # no tensor
            return False
        return guard(query, key, value)

    return check


def _is_usable() -> bool:
    """The trial: the guard holds for equal tensors, and for none that differs in what matters."""
    a, b, c = (torch.zeros(1, 2, 3, 4) for _ in range(3))
    try:
        check = _guard(a, b, c)
        others = [
            torch.zeros(1, 2, 5, 4),
            torch.zeros(1, 2, 3, 8)[..., ::2],
            torch.zeros(1, 3, 2, 4).transpose(1, 2),
            torch.zeros(1, 2, 3, 4, dtype=torch.float64),
            torch.zeros(1, 2, 3, 4, device="meta"),
            torch.zeros(1, 2, 3, 4, requires_grad=True),
            torch.nn.Parameter(a, requires_grad=False),
            torch._neg_view(torch.zeros(1, 2, 3, 4)),
        ]
        with torch.enable_grad():
            holds = check(a, b, c) and check(torch.zeros_like(a), b, c)
            apart = not any(check(*(x if n == at else y for n, y in enumerate((a, b, c)))) for x in others for at in range(3))
        with torch.no_grad():
            apart = apart and not check(others[5], b, c)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            apart = apart and not check(a, b, c)
        return bool(holds and apart and not _holds_under_vmap(check, a, b, c))
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return False


def _holds_under_vmap(check: Check, a: Tensor, b: Tensor, c: Tensor) -> bool:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(check(x, b, c) or check(a, b, c))
        return x

    torch.vmap(look)(torch.zeros(2, *a.shape))
    return seen[0]


_USABLE = _is_usable()
