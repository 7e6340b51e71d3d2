"""A program for the process that forks children: it leaves a process in its group, says its number, ends or waits. A test's."""

from __future__ import annotations

import os
import time
from typing import Any


def main(facts: dict[str, Any]) -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    os.write(1, f"{pid}\n".encode())
    time.sleep(facts["seconds"])
