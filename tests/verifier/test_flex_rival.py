"""What children compile for their rivals: found by the next child, in nobody else's folder, out of a candidate's reach."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from generator.spec import AttentionSpec
from verifier import confine, figures, nursery, sandbox
from verifier.benchmark import measure
from verifier.compile import compile_translated
from verifier.flex_rival import COMPILER_MODULES, compiled_in, compiler_environment
from verifier.patience import Patience
from verifier.records import Binary, Measurement
from verifier.timing import TimingSandbox
from verifier.traps import kernel

SPEC = AttentionSpec(2, 2, 64, 64, 1, 96, 96)

#: A right kernel that tries to leave files where the rivals of later children are looked for.
POISONER = """
#define attention_kernel right_kernel
{good}
#undef attention_kernel
#include <fcntl.h>
#include <stdlib.h>
#include <string>
extern "C" int32_t attention_kernel(const FarmCall* call) {{
  for (const char* name : {{"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}})
    if (const char* folder = getenv(name))
      if (open((std::string(folder) + "/slow.so").c_str(), O_CREAT | O_WRONLY, 0600) >= 0) return 77;
  return right_kernel(call);
}}
"""


def folders() -> list[Path]:
    return [Path(folder) for name, folder in compiler_environment().items() if name.endswith("_CACHE_DIR")]


def test_the_folder_is_this_processs_own_and_ends_with_it() -> None:
    assert compiler_environment() == compiler_environment()
    kept = {folder.parent for folder in folders()}
    assert len(kept) == 1
    about = kept.pop().stat()
    assert about.st_uid == os.getuid() and stat.S_IMODE(about.st_mode) == 0o700
    code = "from verifier.flex_rival import compiler_environment; print(compiler_environment()['TRITON_CACHE_DIR'])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other and Path(other) not in folders() and not Path(other).parent.exists()


def test_a_child_by_fork_has_a_folder_of_its_own_and_leaves_its_parents() -> None:
    ours = folders()
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, str(folders()[0]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 4096).decode() != str(ours[0]) and ours[0].parent.exists()
    os.close(read)
    os.close(write)


@pytest.mark.skipif(not confine.can_keep_files_away(), reason="no fences for files here")
def test_a_candidate_cannot_leave_anything_for_the_next_childs_rivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "DISTURBED", 1e9)
    right = kernel(SPEC, "good")
    binary = compile_translated(replace(right, source=POISONER.format(good=right.source)), tmp_path)
    assert isinstance(binary, Binary), binary
    for folder in folders():
        folder.mkdir(exist_ok=True)
    patience = Patience(min_rounds=3, max_rounds=3, budget_s=0.2)
    result = measure(binary, right.launch, SPEC, num_threads=1, patience=patience, rivals=("torch-sdpa",))
    assert isinstance(result, Measurement), result
    assert [list(folder.rglob("slow.so")) for folder in folders()] == [[], []]


def test_without_fences_a_child_keeps_what_it_compiles_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from verifier import timing_child

    seen: list[str] = []
    monkeypatch.setattr(confine, "can_keep_files_away", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: seen.append(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    for name in ("bound_to_parent", "limit", "no_network"):
        monkeypatch.setattr(confine, name, lambda *a: True)
    for name, value in compiler_environment().items():
        monkeypatch.setenv(name, value)

    class Ended(Exception):
        pass

    def end(*_: object) -> None:
        raise Ended

    monkeypatch.setattr(torch, "set_grad_enabled", end)
    facts = {"parent": 0, "cpu_s": 1, "memory_bytes": 1, "num_threads": 1}

    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with pytest.raises(Ended):
        timing_child.main({**facts, "handles": (there.detach(), 0, 0)})
    here.close()
    assert seen == [compiled_in(Path.cwd())["TORCHINDUCTOR_CACHE_DIR"]]


def test_the_compiler_is_imported_before_children_are_forked_where_one_of_them_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    translated = kernel(SPEC, "good")
    assert TimingSandbox(b"", translated.launch, SPEC, 1).imports == ()
    assert TimingSandbox(b"", translated.launch, SPEC, 1, compiles=True).imports == COMPILER_MODULES
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as folder:
        forking = nursery.nursery_for("imports_child", {"PATH": "/usr/bin:/bin"})
        said = []
        for imports in ((), ("no_such_module", "colorsys"), ()):
            began = os.fstat(log.fileno()).st_size
            child = forking.spawn({"module": "colorsys"}, (), log.fileno(), folder, 60, imports)
            assert child.wait(60) == 0
            said.append(os.pread(log.fileno(), 100, began).decode().strip())
    assert said == ["False", "True", "True"], "from then on for every child"


def test_a_nursery_that_cannot_hold_the_compiler_is_replaced_and_children_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason: here a module that ends the process which imports it."""
    (tmp_path / "ends_its_process.py").write_text("import os\nos._exit(86)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sandbox, "_IMPORT_THEMSELVES", set())
    translated = kernel(SPEC, "good")
    binary = compile_translated(translated, tmp_path)
    assert isinstance(binary, Binary)

    class Child(sandbox.Sandbox):
        environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "OF": "this test"}  # noqa: RUF012 - a nursery of its own
        imports = ("ends_its_process",)

    for _ in range(2):
        with Child(Path(binary.path).read_bytes(), translated.launch, 1) as child:
            assert child.fences and {Child.program} == sandbox._IMPORT_THEMSELVES


def test_a_driver_that_was_started_is_noticed(tmp_path: Path) -> None:
    """With a library of that name in a process of its own: not loaded, loaded, initialised."""
    if shutil.which("gcc") is None:
        pytest.skip("no compiler")
    source = (
        "int up = 0; int cuInit(unsigned f) { up = 1; return 0; } int cuDeviceGetCount(int* n) { *n = 1; return up ? 0 : 3; }"
    )
    (tmp_path / "cuda.c").write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"], cwd=tmp_path, check=True)
    code = (
        "import ctypes; from verifier.nursery import driver_is_up; said = [driver_is_up()]; "
        "d = ctypes.CDLL('libcuda.so.1'); said.append(driver_is_up()); d.cuInit(0); print([*said, driver_is_up()])"
    )
    env = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, False, True]"
