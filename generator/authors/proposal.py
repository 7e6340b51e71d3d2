"""A proposal: text that an author wants judged, and where it came from. Whether it is right is not its matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from generator.canonical import digest

Kind = Literal["tl", "source"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """One program proposed for a spec on a target.

    text: TL code, or device source where kind is "source" (then `launch` is its launch description as JSON text).
    program: the TL that the source translates, "" where there is none.
    sketch: the sketch that came before, "" in one-pass generation. parent: hash of the proposal that this repairs or speeds up.
    transcript: hashes of the requests that led to it, the last one being its own. round counts repairs and improvements from 0.
    """

    author: str
    kind: Kind
    text: str
    sketch: str = ""
    launch: str = ""
    program: str = ""
    parent: str | None = None
    transcript: tuple[str, ...] = ()
    prompt_hash: str = ""
    round: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cost_usd: float = 0.0
    model_s: float = 0.0
    remarks: tuple[str, ...] = ()

    @property
    def hash(self) -> str:
        """Identity is what is proposed, not how it came about: the same program twice is one."""
        return digest({"kind": self.kind, "text": self.text, "launch": self.launch})
