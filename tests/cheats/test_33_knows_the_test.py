"""Knows what only a test has: poisoned outputs, and the scale of the spec that is judged."""


def test_the_poison_of_outputs(refused):
    assert "where the outputs held other numbers" in refused("knows_the_poison", "wrong_value", "max_abs").message


def test_the_usual_scale(refused):
    assert refused("fixed_scale", "wrong_value", "max_abs").input_name == "another scale"
