"""A program's review in a killable child: text from strangers may loop for ever or ask for any memory.

Reviews nothing itself, and imports neither torch nor numpy: `verifier.review` does, in the process that forks the children.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from generator.spec import AttentionSpec
from verifier.children import Limits
from verifier.nursery import nursery_for
from verifier.own_folder import own_folder

#: A child is forked from a process that has imported torch already: that costs more than a review.
_PROGRAM, _ENVIRONMENT = "verifier.review", {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
ASKED, RESULT = "asked.json", "review: "
_START_S = 120.0
#: A function by its module and name, and the text that it is called with.
Call: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Wrong:
    """What is wrong first. line: of the program's text, 0 where unknown; input_name: the smallest input that shows it."""

    message: str
    line: int = 0
    input_name: str = ""


def review_apart(text: str, spec: AttentionSpec, limits: Limits | None = None, first: Sequence[Call] = ()) -> Wrong | None:
    """`verifier.review` of a program's text; what exceeds the limits is Wrong, too. The text has to pass the checker first.

    first: calls made in the child before that; they make rules known that the package does not define.
    """
    limits = limits or Limits(wall_s=60.0, memory_bytes=8 << 30)
    with own_folder("review") as folder, tempfile.TemporaryFile() as log:
        (folder / ASKED).write_text(json.dumps({"text": text, "spec": json.loads(spec.to_json()), "first": list(first)}))
        facts = {"cpu_s": int(limits.wall_s) + 1, "memory_bytes": limits.memory_bytes}
        child = nursery_for(_PROGRAM, _ENVIRONMENT).spawn(facts, (), log.fileno(), str(folder), _START_S)
        try:
            code = child.wait(limits.wall_s)
        except BaseException as error:
            child.kill()
            child.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            within = f"within {limits.wall_s:g} s on inputs of a few hundred tokens"
            return Wrong(f"the interpreter did not finish {within}: loops are too long.")
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    line = lines[-1] if lines else ""
    if code or not line.startswith(RESULT):
        return Wrong(f"the interpreter could not run the program: {line[:300] or f'exit status {code}'}")
    found = json.loads(line.removeprefix(RESULT))
    return Wrong(**found) if found else None
