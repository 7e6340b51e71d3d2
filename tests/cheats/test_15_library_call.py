"""Leaves the work to a library, at once or when its own code fails: none can be opened, and imports are on the label."""


def test_no_library_is_found(refused):
    refused("calls_a_library", "unwritten_output", "written")


def test_the_label_names_what_is_imported(compiled, spec):
    assert "dlopen" in compiled("calls_a_library", spec).resources["imports"]
    assert "dlopen" not in compiled("good", spec).resources["imports"]
