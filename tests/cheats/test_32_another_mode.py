"""Leaves the caller's thread in another floating-point mode: what that computes next is flushed or rounded differently."""


def test_subnormals_flushed_for_good(refused):
    assert "MXCSR" in refused("leaves_flushing", "crash", "return code").message
