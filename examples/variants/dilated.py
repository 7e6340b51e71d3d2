"""A mask of one's own, without editing the package: a causal window that looks at every `step`-th key only.

Name this file in a plan (`variants: dilated.py`), and `masks: [{dilated: {reach: 256, step: 2}}]` is a rule like any other: the
rule author writes its kernel, the judge holds it against REFERENCES, and the tiles beyond the window are skipped.
"""

from __future__ import annotations

from generator.masks import MaskRule
from generator.rule_parts import ALIGN, Parameter, Scalar

# In TL: `q` is the query's position on the key axis, `kv` the key's index; `Reach` and `Step` are the scalars below.
MASKS = {
    "dilated": MaskRule(
        "dilated",
        "a query sees itself and every `step`-th of the `reach` keys before it",
        "kv <= q and kv >= q - Reach and (q - kv) % Step == 0",
        (
            Parameter("reach", "int", "keys back that are looked at", minimum=0),
            Parameter("step", "int", "distance", minimum=1),
            ALIGN,
        ),
        (
            Scalar("Reach", "i32", "keys back that are looked at", lambda p: p["reach"], positive=False),
            Scalar("Step", "i32", "distance of the keys that are seen", lambda p: p["step"], positive=True),
        ),
        hides_future=True,
    )
}


def dilated(rule, block):
    """The same once more, dense: True where row (R, 1) may see key (1, Sk). Shares nothing with the text above."""
    distance = block.position(rule) - block.keys
    return (distance >= 0) & (distance <= rule["reach"]) & (distance % rule["step"] == 0)


REFERENCES = {"dilated": dilated}
