"""Right for the shapes that tests like: judged on odd lengths, on grouped heads, on unequal lengths, on strided memory."""


def test_lengths_that_are_no_multiple_of_a_tile(refused):
    refused("whole_tiles_only", "wrong_value", "max_abs")


def test_heads_in_groups(refused):
    refused("wrong_kv_head", "wrong_value", "max_abs")


def test_unequal_lengths_under_the_other_alignment(refused):
    refused("mask_start_aligned", "wrong_value", "max_abs")


def test_one_key_too_few(refused):
    refused("causal_off_by_one", "wrong_value", "max_abs")


def test_memory_that_is_not_aligned(refused):
    assert "SIGSEGV" in refused("needs_alignment", "crash", "crash").message


def test_offsets_beyond_31_bits(refused):
    assert refused("offsets_32_bit", "crash", "crash").input_name == "offsets beyond 31 bits"


def test_even_lengths_that_are_no_corner(refused):
    """Corners are odd or powers of two, and one point inside is odd: the other is even, and no multiple of a tile's edge."""
    lengths = refused("no_even_lengths", "wrong_value", "max_abs").input_name.split(", ")
    assert all(int(word.split()[0]) % 2 == 0 and int(word.split()[0]) % 16 for word in lengths)
