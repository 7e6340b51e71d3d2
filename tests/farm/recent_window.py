"""A user's rule as the recorded answer `window_softcap` was asked for it: a window of `size` keys that counts the query's own."""

from generator.masks import MaskRule
from generator.rule_parts import Parameter, Scalar

MASKS = {
    "recent": MaskRule(
        "recent",
        "a query sees a key when q - Window < kv <= q",
        "kv <= q and kv > q - Window",
        (Parameter("size", "int", "keys seen, the query's own included", minimum=1),),
        (Scalar("Window", "i32", "keys seen, the query's own included", lambda p: p["size"]),),
        hides_future=True,
    )
}


def recent(rule, block):
    distance = block.position(rule) - block.keys
    return (distance >= 0) & (distance < rule["size"])


REFERENCES = {"recent": recent}
