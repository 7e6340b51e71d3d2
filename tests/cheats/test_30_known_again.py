"""Knows a call again by less than all of it, its queries: every part of a call is new once while the rest is the same."""

from dataclasses import replace

import torch

from generator.spec import AttentionSpec, Rule
from verifier.input_values import make_values
from verifier.inputs import suite


def test_answers_remembered_by_the_queries(refused):
    assert refused("knows_by_q", "wrong_value", "max_abs").input_name == "other keys, all else the same"


def test_exactly_one_part_is_new():
    spec = AttentionSpec(4, 2, 16, 16, 2, 100, 100, masks=(Rule.make("document"),), scores=(Rule.make("alibi"),))
    cases = suite(spec, 5)
    first = next(c for c in cases if c.name == "odd lengths")
    same = make_values(first)
    found = {}
    for case in (c for c in cases if c.new):
        assert (case.shape, case.layout, case.place) == (first.shape, first.layout, first.place), "the same memory"
        values = make_values(case)
        found[case.new] = {name for name in values if not torch.equal(values[name], same[name])}
    assert found == {"q": {"q"}, "k": {"k"}, "v": {"v"}, "rules": {"DocStart", "DocEnd", "Slopes"}}
    assert [c.new for c in suite(replace(spec, masks=(), scores=()), 5) if c.new] == ["q", "k", "v"]
