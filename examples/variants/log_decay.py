"""A score rule of one's own: scores fall with the logarithm of the distance (the logarithmic form of KERPLE, arXiv 2205.09921).

Name this file in a plan (`variants: log_decay.py`), and `scores: [{log_decay: {rate: 0.5}}]` is a rule like any other.
"""

from __future__ import annotations

import torch

from generator.rule_parts import ALIGN, Parameter, Scalar
from generator.scores import ScoreRule

# In TL: `x` is the score so far, `q` the query's position on the key axis, `kv` the key's index, `decay_rate` the scalar below.
SCORES = {
    "log_decay": ScoreRule(
        "log_decay",
        "scores fall with the logarithm of the distance: - rate * log(1 + abs(position of query - key))",
        "x - decay_rate * log(1.0 + abs(q - kv))",
        parameters=(Parameter("rate", "float", "how fast scores fall", minimum=0.0), ALIGN),
        scalars=(Scalar("decay_rate", "f32", "how fast scores fall", lambda p: p["rate"]),),
    )
}


def log_decay(rule, block, scores):
    """The same once more, dense: new scores (heads, rows, keys) in float64 from the scores so far."""
    distance = (block.position(rule) - block.keys).abs().double()
    rate = float(torch.tensor(rule["rate"], dtype=torch.float32))  # as the kernel gets it
    return scores - rate * torch.log1p(distance)


REFERENCES = {"log_decay": log_decay}
