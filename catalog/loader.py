"""Brings kernels into the process: verified bytes, a golden case in a child, then the very same bytes. Chooses none.

What was loaded stays for the life of the process; what failed is under quarantine for as long. Both outlive a change of settings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from catalog.counting import Outcomes
from catalog.cuda_frames import CudaEntry
from catalog.errors import CatalogError, DamagedFile
from catalog.kernels import CatalogKernel
from catalog.reasons import Reason, reason
from generator.canonical import digest_bytes
from verifier.fork_lock import ForkLock
from verifier.launch import CpuKernel, LaunchError, load_cpu

log = logging.getLogger("catalog")


class LoadFailed(RuntimeError):
    """A kernel that cannot be used. lasting: it is under quarantine from now on; else its bytes could not be had this time."""

    def __init__(self, why: Reason, lasting: bool = True) -> None:
        super().__init__(str(why))
        self.reason, self.lasting = why, lasting


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel in this process. num_bytes: size of its binary."""

    kernel_id: str
    binary_hash: str
    num_bytes: int
    probed: bool
    entry: CpuKernel | CudaEntry

    def to_plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("kernel_id", "binary_hash", "num_bytes", "probed")}


class Loader:
    """The kernels of this process by binary hash. Safe for threads: each binary is probed and loaded once."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self._lock = ForkLock()
        self._loaded: dict[str, LoadedKernel] = {}
        self._quarantine: dict[str, Reason] = {}
        self.loads = 0

    def loaded(self, binary_hash: str) -> LoadedKernel | None:
        return self._loaded.get(binary_hash)

    @property
    def hashes(self) -> frozenset[str]:
        return frozenset(self._loaded)

    @property
    def quarantined(self) -> dict[str, Reason]:
        """Binary hash -> why it may not run any more in this process."""
        return dict(self._quarantine)

    def all(self) -> tuple[LoadedKernel, ...]:
        return tuple(self._loaded.values())

    def load(
        self, kernel: CatalogKernel, read: Callable[[str], bytes], probe_timeout_s: float | None, device: str = "cpu"
    ) -> LoadedKernel:
        """The kernel, loaded now or before. read: gives the bytes of an artifact. probe_timeout_s: None for no golden case.
        device: where the golden case runs; a cubin is loaded on every device that it is called on.

        Raises LoadFailed with a reason of digest, load_failed, probe_failed or quarantined.
        """
        with self._lock:
            if (why := self._quarantine.get(kernel.binary_hash)) is not None:
                raise LoadFailed(reason("quarantined", f"{why.code}: {why.message}"))
            if (found := self._loaded.get(kernel.binary_hash)) is not None:
                return found
            try:
                made = self._load(kernel, read, probe_timeout_s, device)
            except LoadFailed as failure:
                if failure.lasting:
                    self._put_away(kernel.binary_hash, failure.reason)
                raise
            self._loaded[kernel.binary_hash] = made
            self.loads += 1
            return made

    def quarantine(self, binary_hash: str, why: Reason) -> None:
        """The kernel failed at a call: it does not run again in this process."""
        with self._lock:
            self._put_away(binary_hash, why)

    def _put_away(self, binary_hash: str, why: Reason) -> None:
        if binary_hash not in self._quarantine:
            self._quarantine[binary_hash] = why
            self._outcomes.get("error", "quarantined").tick()
            log.warning("kernel %s is under quarantine: %s", binary_hash[:12], why)

    def _load(
        self, kernel: CatalogKernel, read: Callable[[str], bytes], probe_timeout_s: float | None, device: str
    ) -> LoadedKernel:
        binary = self._verified_bytes(kernel, read)
        if probe_timeout_s is not None:
            from catalog.probe import probe

            if (why := probe(kernel, binary, probe_timeout_s, device)) is not None:
                raise LoadFailed(why)
        try:
            entry: CpuKernel | CudaEntry
            if kernel.target == "cpu":
                entry = load_cpu(binary, kernel.launch, expected_hash=kernel.binary_hash)
            else:
                entry = CudaEntry(kernel.launch, binary, kernel.binary_hash)
        except LaunchError as error:
            raise LoadFailed(reason("load_failed", str(error))) from None
        return LoadedKernel(kernel.kernel_id, kernel.binary_hash, len(binary), probe_timeout_s is not None, entry)

    @staticmethod
    def _verified_bytes(kernel: CatalogKernel, read: Callable[[str], bytes]) -> bytes:
        """Read once: what is hashed here is what is probed and mapped."""
        try:
            binary = read(kernel.binary_hash)
        except DamagedFile as error:
            raise LoadFailed(reason("digest", str(error))) from None
        except (OSError, CatalogError) as error:
            raise LoadFailed(reason("load_failed", str(error)), lasting=False) from None
        if (found := digest_bytes(binary)) != kernel.binary_hash:
            raise LoadFailed(reason("digest", f"the row names SHA-256 {kernel.binary_hash}, the bytes have {found}"))
        return binary
