"""What reaches the driver through the real cuda.core and cuda-bindings: a child's process talks to a stub of libcuda."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from generator.canonical import to_plain
from generator.translate.records import Launch, ScalarParameter, TensorParameter

STUB = Path(__file__).parent / "stub_driver"
ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the stub needs g++"),
    pytest.mark.skipif(find_spec("cuda") is None or find_spec("cuda.core") is None, reason="needs cuda-core"),
]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stub") / "libcuda.so.1"
    command = ["g++", "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", str(out), str(STUB / "libcuda.cpp"), "-ldl"]
    subprocess.run(command, check=True)
    return out


def launched(stub: Path, **facts: Any) -> dict[str, Any]:
    """What the stub was told."""
    fields = [
        {"offset": 0, "type": "pointer", "tensor": "X"},
        {"offset": 8, "type": "i64", "tensor": "X", "stride": 0},
        {"offset": 16, "type": "i32", "scalar": "n"},
        {"offset": 64, "type": "i32", "value": "$sms"},
    ]
    plain = {
        "grid": [["*", 2, "n"], 4, 1], "threads": 96, "shared_bytes": 1000, "workspace": None,
        "tensor_maps": [], "aligned_16": [],
        "parameters": {"bytes": 72, "alignment": 8, "fields": fields},
    }  # fmt: skip
    launch = Launch(
        "kernel", (TensorParameter("X", "f16", 0, 2, False),), (ScalarParameter("n", "i32", False),), {**plain, **facts}
    )
    child = [sys.executable, str(STUB / "launch_child.py"), str(stub), json.dumps(to_plain(launch))]
    done = subprocess.run(child, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_kernel_is_loaded_and_launched_by_cuda_core(stub: Path) -> None:
    """The kernel, its code on the device before the first launch, grid, block, stream and the bytes of its one parameter."""
    told = launched(stub)
    assert (told["grid"], told["block"], told["cluster"]) == ([10, 4, 1], [96, 1, 1], [1, 1, 1])
    assert (told["stream"], told["shared"], told["num_launches"], told["loaded"]) == (77, 1000, 3, 1)
    assert told["function"] == 0x300, "the kernel of every context, not a function of one"
    assert bytes(told["block_bytes"][:20]) == struct.pack("<Qqi", 4096, 8, 5)
    assert told["attributes"] == {"registers": 1004, "local_bytes": 1003, "shared_bytes": 1001}


def test_clusters_and_large_shared_memory(stub: Path) -> None:
    told = launched(stub, shared_bytes=200_000, cluster=[2, 4, 1], block=[32, 3, 1])
    assert (told["grid"], told["block"], told["cluster"]) == ([10, 4, 1], [32, 3, 1], [2, 4, 1])
    assert (told["shared"], told["shared_limit"], told["num_launches"]) == (200_000, 200_000, 3)


def test_what_the_driver_refuses_is_told(stub: Path) -> None:
    other, missing = launched(stub)["errors"]
    assert other.startswith("kernel: loading: ") and missing.startswith("missing: loading: ")
    assert "the stub refuses" in other or "STUB" in other
