"""Device code that an author wrote itself, on its way to the compiler: read, held to the rules, or refused. Compiles nothing."""

from __future__ import annotations

from dataclasses import dataclass

from farm.jobs import Job
from generator.spec import SpecError
from generator.targets import find_target
from generator.translate.direct import NotALaunch, language_of, read_direct
from generator.translate.records import Translated
from verifier.foreign import NO_HEADERS, toolkit_headers
from verifier.source_rules import toolkit_includes, violations


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a job has no source: a reason of `verifier.records.REASONS`, one sentence, and everything that was found."""

    reason: str
    message: str
    log: str = ""


def read_source(job: Job) -> Translated | Refused:
    """The job's source with its launch, or every rule that they break: the launch's fields first, then the source's lines."""
    target = find_target(job.target)
    found: list[str] = []
    try:
        translated = read_direct(job.source, job.launch, job.spec, target)
    except SpecError as error:
        return Refused("not_run", str(error))
    if isinstance(translated, NotALaunch):
        found += map(str, translated.problems)
    lines = job.source.split("\n")
    for violation in violations(job.source, "c++" if language_of(target) == "c++" else "cuda"):
        text = lines[violation.line - 1].strip()[:200] if violation.line <= len(lines) else ""
        found.append(f"source line {violation.line}: {violation.message}\n    {text}")
    if not found:
        assert isinstance(translated, Translated)
        missing = toolkit_includes(job.source) if translated.language == "cuda" and not toolkit_headers()[0] else ()
        return Refused("not_run", f"{', '.join(missing)}: {NO_HEADERS}") if missing else translated
    first = found[0].split("\n")[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Refused("source_rejected", first[:600] + more, "\n".join(found))
