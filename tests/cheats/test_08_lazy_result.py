"""Computes only when the answer is looked at: outputs are the supervisor's own memory, which it reads through its own pages."""


def test_pages_that_fill_themselves_when_touched(refused):
    refused("lazy_pages", "unwritten_output", "written")


def test_a_kernel_returns_nothing_but_a_code(compiled, spec):
    """There is no result object that could be anything but numbers: the entry point gives 32 bits, and 0 is the only good one."""
    import ctypes

    from verifier.judge import read_binary
    from verifier.launch import load_cpu
    from verifier.traps import launch_of

    loaded = load_cpu(read_binary(compiled("good", spec)), launch_of(spec))
    assert loaded._entry.restype is ctypes.c_int32 and loaded._entry.argtypes == [ctypes.c_void_p]
