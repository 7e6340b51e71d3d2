"""Why a program has no code for a target, raised inside the translator and turned into an `Untranslatable` at its edge."""

from __future__ import annotations

from typing import Literal

Reason = Literal["translate_failed", "unsupported_dtype", "does_not_fit"]


class Refused(Exception):
    """A reason of the closed list and one sentence with the cure; `line` of the TL text where known."""

    def __init__(self, reason: Reason, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.message = message
        self.line = line
