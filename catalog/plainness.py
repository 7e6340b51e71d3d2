"""Whether a call is ordinary: plain tensors, no gradients, nothing that transforms or watches operations. Gives no reasons."""

from __future__ import annotations

import torch
from torch import Tensor

from catalog.calls import PLAIN_TYPES

_autocast = torch._C._is_any_autocast_enabled
_functorch = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_grad_enabled = torch.is_grad_enabled


def is_plain(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a key of shapes, strides, dtypes and devices says all about these tensors and this context."""
    if type(query) not in PLAIN_TYPES or type(key) not in PLAIN_TYPES or type(value) not in PLAIN_TYPES:
        return False
    if _grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    if _function_modes() or _dispatch_modes() or _autocast() or _functorch() is not None:
        return False
    return not (query.is_neg() or key.is_neg() or value.is_neg() or query.is_nested)
