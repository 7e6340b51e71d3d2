"""A program for `verifier.nursery`: says whether a module was there before it asked for it."""

import sys
from typing import Any


def main(facts: dict[str, Any]) -> None:
    print(facts["module"] in sys.modules, flush=True)
