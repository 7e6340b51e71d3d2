"""Whether Ray's head lives, by connections to its control store: without it most calls of Ray wait for ever. Ends nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

EVERY_S = 2.0
ANSWER_S = 2.0  # for a connection; a busy head's is made by its kernel


class HeadWatch:
    """address: HOST:PORT of the control store. lost: called once, from the watch's own thread, with one sentence, after
    `patience_s` in which no connection came about. A head that is started again meanwhile is the same head.
    """

    def __init__(self, address: str, patience_s: float, lost: Callable[[str], None]) -> None:
        host, _, port = address.rpartition(":")
        self._place, self._patience_s, self._lost = (host.strip("[]"), int(port)), patience_s, lost
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="head-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        """Silence is what was waited for here, not what the clock says: this process may have been stopped for a while."""
        silent_s, why = 0.0, ""
        while silent_s < self._patience_s:
            if self._closed.wait(min(EVERY_S, self._patience_s / 3)):
                return
            asked = time.monotonic()
            why = self._problem()
            silent_s = silent_s + min(EVERY_S, self._patience_s / 3) + time.monotonic() - asked if why else 0.0
        where = f"{self._place[0]}:{self._place[1]}"
        self._lost(f"Ray's head at {where} was lost: no connection for {silent_s:.0f} s ({why})")

    def _problem(self) -> str:
        try:
            socket.create_connection(self._place, ANSWER_S).close()
        except OSError as error:
            return (error.strerror or str(error)).lower()
        return ""
