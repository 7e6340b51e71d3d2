"""What a device of this process is, as kernels were verified for it; asked once. Chooses nothing."""

from __future__ import annotations

import functools

from catalog.selection import Machine


@functools.cache
def this_machine(device: str) -> Machine:
    """What a device of this process is; asked once."""
    from verifier.environment import ISA_NEEDS, NoDevice, cpu_flags, device_key

    try:
        key = device_key(device)
    except NoDevice as error:
        return Machine("", f"{device} ({error})", cpu_flags(), ISA_NEEDS)
    if device == "cpu":
        return Machine(key.hash, str(key), cpu_flags(), ISA_NEEDS)
    from verifier.gpu import driver_cuda

    return Machine(key.hash, str(key), cpu_flags(), ISA_NEEDS, driver_cuda())
