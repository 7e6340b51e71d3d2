"""Close to right, and never twice the same: two runs on the same input have to agree bit for bit."""


def test_sums_that_follow_the_clock(refused):
    assert "differ between two runs" in refused("racy", "nondeterministic", "two runs").message
