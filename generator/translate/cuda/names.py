"""Names of the program in emitted code: each kind has its own prefix, so that none meets another or a name of the runtime."""

from __future__ import annotations

import re


def _safe(name: str) -> str:
    return re.sub(r"\W", "_", name)


def entry(program_name: str) -> str:
    """The kernel's symbol."""
    return f"tl_{_safe(program_name)}"


def scalar(name: str) -> str:
    """A scalar argument, in the parameter block."""
    return f"p.a_{name}"


def axis(name: str) -> str:
    return f"g_{name}"


def loop_variable(name: str) -> str:
    return f"j_{name}"


def tile(name: str) -> str:
    return f"t_{name}"


def matrix(name: str) -> str:
    """A tensor's base address in the parameter block; strides are `s_NAME_AXIS`."""
    return f"p.m_{name}"


def stride(name: str, axis_index: int) -> str:
    return f"p.s_{name}_{axis_index}"


def lead(name: str) -> str:
    """The address of element (0, 0) of the matrix that this block sees."""
    return f"m_{name}"


def width(name: str) -> str:
    """The widest access, in bytes, that a matrix's address and pitch allow."""
    return f"width_{name}"


def extent(name: str, axis_index: int) -> str:
    return f"n_{name}_{axis_index}"


def shared(name: str) -> str:
    """A shared tile's address (of its first slot)."""
    return f"s_{name}"
