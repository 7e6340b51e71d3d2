"""Every statement counts on the device too: a program with one statement changed gives other bits, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_programs import run_once, spec

from farm.devices import arch_for, device_for
from generator.authors.rules import RuleAuthor
from generator.spec import Rule
from generator.targets import find_target
from generator.tl.checker import parse_and_check
from generator.tl.fill import fill, hole_choices
from generator.tl.printer import print_program
from generator.translate import translate
from generator.translate.records import Translated
from verifier.compile import compile_translated
from verifier.records import Binary

pytestmark = pytest.mark.gpu
SPEC = spec("fp16", 64, scores=(Rule.make("softcap", cap=20.0),))
#: A piece of the rule author's program -> what stands there instead. Every one leaves a program that can be run.
ALTERATIONS = {
    "scale": ("(scale / cap)", "(1.0009765625 * scale / cap)"),
    "mask": ("kv <= q", "kv < q + 2"),
    "softcap": ("tanh(", "tanh(1.0009765625 * "),
    "sum": ("row_sum * ", "row_sum * 1.0009765625 * "),
    "lse": ("+ log(row_sum)", "+ log(row_sum) + 0.125"),
}


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
def test_an_altered_program_gives_other_bits(device: str, cache: Path, target: str) -> None:
    if device_for(target) is None:
        pytest.skip(f"no device here runs {target}")
    code = RuleAuthor().code(SPEC, target)
    text = print_program(fill(code, next(hole_choices(code))))
    whole, again = outputs(text, target, cache, device), outputs(text, target, cache, device)
    assert all(torch.equal(whole[name].view(torch.uint8), again[name].view(torch.uint8)) for name in whole)
    for name, (old, new) in ALTERATIONS.items():
        assert old in text, f"{name}: no {old!r} in\n{text}"
        altered = outputs(text.replace(old, new), target, cache, device)
        changed = [n for n in whole if not torch.equal(whole[n].view(torch.uint8), altered[n].view(torch.uint8))]
        assert changed, f"{name}: the device gave the same bits"


def outputs(text: str, target: str, cache: Path, device: str) -> dict[str, torch.Tensor]:
    parsed = parse_and_check(text, filled=True)
    assert parsed.program is not None, parsed.diagnostics
    translated = translate(parsed.program, find_target(target))
    assert isinstance(translated, Translated), translated
    binary = compile_translated(translated, cache, arch=arch_for(target))
    assert isinstance(binary, Binary), binary
    return run_once(binary, translated.launch, SPEC, device)
