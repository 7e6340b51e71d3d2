"""Right in the build that is tested, wrong in the one that is shipped: there is one build, named by its bytes."""

from pathlib import Path

from generator.canonical import digest_bytes
from verifier.launch import LaunchError, load_cpu
from verifier.traps import kernel


def test_the_bytes_that_are_mapped_are_the_bytes_that_were_hashed(compiled, spec):
    binary = compiled("good", spec)
    data = Path(binary.path).read_bytes()
    assert digest_bytes(data) == binary.hash
    load_cpu(data, kernel(spec, "good").launch, expected_hash=binary.hash)
    try:
        load_cpu(data[:-1] + b"?", kernel(spec, "good").launch, expected_hash=binary.hash)
    except LaunchError as error:
        assert "expected SHA-256" in str(error)
    else:
        raise AssertionError("changed bytes were loaded")
