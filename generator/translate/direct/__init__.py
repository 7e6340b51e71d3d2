"""Device code that somebody else wrote, with its launch description as data: the same record as our translators give.

Reads and refuses; what the source itself may hold is the verifier's to say (`verifier.source_rules`).
"""

from __future__ import annotations

from dataclasses import dataclass

from generator.binding import BindingError, bind
from generator.canonical import digest_text
from generator.spec import AttentionSpec
from generator.targets import Target
from generator.translate.direct.cpu_launch import CPU_FIELDS, cpu_launch
from generator.translate.direct.cuda_launch import CUDA_FIELDS, cuda_launch
from generator.translate.direct.reading import Problem, read_json
from generator.translate.records import Launch, Translated

__all__ = ["CPU_FIELDS", "CUDA_FIELDS", "NotALaunch", "language_of", "read_direct", "read_launch"]


@dataclass(frozen=True, slots=True)
class NotALaunch:
    """Every wrong field of a launch description."""

    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


def language_of(target: Target) -> str:
    return "c++" if target.family == "cpu" else "cuda"


def read_launch(text: str, spec: AttentionSpec, target: Target) -> Launch | NotALaunch:
    """A launch description for one spec and target; each wrong field is one problem. Raises SpecError for unknown rules only."""
    root = read_json(text, "launch")
    if isinstance(root, Problem):
        return NotALaunch((root,))
    launch = (cpu_launch if target.family == "cpu" else cuda_launch)(root, spec, target)
    if launch is None:
        return NotALaunch(tuple(dict.fromkeys(root.problems)))
    try:
        bind(launch, spec)
    except BindingError as error:
        return NotALaunch((Problem("launch", str(error)),))
    return launch


def read_direct(source: str, launch_text: str, spec: AttentionSpec, target: Target) -> Translated | NotALaunch:
    """Source and launch description as what a compiler and a launcher take. The source is not looked at."""
    launch = read_launch(launch_text, spec, target)
    if isinstance(launch, NotALaunch):
        return launch
    notes = {"notes": ["written by its author; no translator"]}
    return Translated(target.name, language_of(target), source, launch, digest_text(source), notes)
