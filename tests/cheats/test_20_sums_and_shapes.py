"""The right numbers in the wrong places, or in another unit: elements are compared, one by one."""


def test_swapped_rows(refused):
    refused("swapped_rows", "wrong_value", "max_abs")


def test_lse_in_base_2(refused):
    refused("lse_base_2", "wrong_value", "lse_max")
