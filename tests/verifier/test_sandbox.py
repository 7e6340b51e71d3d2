"""A child is alone, limited, and gone when it should be: after a limit, a kill, or the death of whoever started it."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from generator.spec import AttentionSpec, Rule
from verifier import nursery
from verifier.compile import compile_translated
from verifier.judge import judge, set_up
from verifier.records import Binary, Failed, Passed
from verifier.sandbox import CannotStart, Died, Ran, Sandbox, SandboxLimits, TimedOut
from verifier.traps import kernel, launch_of
from verifier.trial import trials_for

SPEC = AttentionSpec(2, 1, 32, 32, 1, 20, 20, masks=(Rule.make("causal"),))


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    cache = tmp_path_factory.mktemp("binaries")

    def compiled(name: str) -> Binary:
        binary = compile_translated(kernel(SPEC, name), cache)
        assert isinstance(binary, Binary), binary
        return binary

    return compiled


def sandbox_of(binary: Binary, **limits) -> Sandbox:
    return Sandbox(Path(binary.path).read_bytes(), launch_of(SPEC), 2, SandboxLimits(**limits))


def run_once(sandbox: Sandbox):
    setting = set_up(sandbox, launch_of(SPEC), trials_for(SPEC, 1).trials[1])
    assert isinstance(sandbox.lay_out(setting.arena), Ran)
    return sandbox.run(setting.arena, setting.tensors, setting.scalars)


def gone(pid: int, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_the_child_leads_a_session_of_its_own_and_is_gone_afterwards(build):
    with sandbox_of(build("good")) as sandbox:
        pid, folder = sandbox.pid, sandbox._folder
        assert os.getsid(pid) == pid != os.getsid(0) and os.getpgid(pid) == pid
        assert isinstance(run_once(sandbox), Ran)
        assert sandbox.extra_threads() == 0
    assert gone(pid) and not Path(folder).exists()


def test_an_endless_call_is_killed_at_its_limit(build):
    with sandbox_of(build("endless"), run_s=0.5) as sandbox:
        started = time.monotonic()
        assert isinstance(run_once(sandbox), TimedOut)
        assert time.monotonic() - started < 20 and gone(sandbox.pid)


def test_cpu_time_is_limited_too(build):
    with sandbox_of(build("endless"), run_s=30, cpu_s=1) as sandbox:
        outcome = run_once(sandbox)
        assert isinstance(outcome, Died) and outcome.signal in (signal.SIGKILL, signal.SIGXCPU)


def test_address_space_is_limited(tmp_path):
    good = kernel(SPEC, "good")
    reserve = "mmap(0, (size_t)6 << 30, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED"
    source = good.source.replace("{ return attention(Call(raw)); }", f"{{ return {reserve} ? 1 : attention(Call(raw)); }}")
    binary = compile_translated(replace(good, source="#include <sys/mman.h>\n" + source), tmp_path)
    with sandbox_of(binary) as sandbox:
        outcome = run_once(sandbox)
        assert isinstance(outcome, Ran) and outcome.result.startswith("MemoryError")
    with sandbox_of(binary, memory_bytes=12 << 30) as sandbox:
        assert run_once(sandbox).result == "done"


def test_a_child_that_dies_says_how(build):
    with sandbox_of(build("null_pointer")) as sandbox:
        outcome = run_once(sandbox)
        assert isinstance(outcome, Died) and outcome.bad_access and str(outcome) == "killed by SIGSEGV"


def test_a_binary_that_is_none_cannot_start():
    with pytest.raises(CannotStart, match="cannot be loaded"):
        Sandbox(b"rubbish", launch_of(SPEC), 1).__enter__()


def test_an_entry_that_is_missing_is_a_crash_with_words(build):
    verdict = judge(build("good"), replace(launch_of(SPEC), entry="other"), SPEC)
    assert isinstance(verdict, Failed) and verdict.reason == "crash" and "no entry point named other" in verdict.witness.message


def test_a_nursery_that_was_killed_is_replaced(build):
    first = nursery.nursery_for(Sandbox.program, Sandbox.environment)
    with sandbox_of(build("good")) as sandbox:
        os.kill(first._process.pid, signal.SIGKILL)
        first._process.wait()
        assert gone(sandbox.pid), "children die with the nursery"
        assert isinstance(run_once_or_died(sandbox), Died)
    assert isinstance(judge(build("good"), launch_of(SPEC), SPEC), Passed)


def run_once_or_died(sandbox: Sandbox):
    setting = set_up(sandbox, launch_of(SPEC), trials_for(SPEC, 1).trials[1])
    mapped = sandbox.lay_out(setting.arena)
    return mapped if not isinstance(mapped, Ran) else sandbox.run(setting.arena, setting.tensors, setting.scalars)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_whatever_kills_the_supervisor_kills_its_children(build, how):
    """A candidate that spins is inside its child when the process that judges dies."""
    script = textwrap.dedent(f"""
        from pathlib import Path
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_sandbox import SPEC, launch_of, set_up, trials_for
        from verifier.sandbox import Sandbox, SandboxLimits
        with Sandbox(Path({build("endless").path!r}).read_bytes(), launch_of(SPEC), 2, SandboxLimits(run_s=600)) as sandbox:
            setting = set_up(sandbox, launch_of(SPEC), trials_for(SPEC, 1).trials[1])
            sandbox.lay_out(setting.arena)
            print(sandbox.pid, flush=True)
            sandbox.run(setting.arena, setting.tensors, setting.scalars)
    """)
    supervisor = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pid = int(supervisor.stdout.readline())
    nursery_pid = psutil.Process(pid).ppid()
    time.sleep(0.2)
    supervisor.send_signal(how)
    supervisor.wait(30)
    assert gone(pid) and gone(nursery_pid)


@pytest.mark.parametrize("seconds", [0, 600], ids=["ended", "killed"])
def test_a_child_takes_its_group_along_before_its_number_is_free(seconds):
    """And whoever has the number afterwards is not killed for it."""
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as folder:
        forking = nursery.nursery_for("group_child", {"PATH": "/usr/bin:/bin"})
        child = forking.spawn({"seconds": seconds}, (), log.fileno(), folder, 60)
        while not os.pread(log.fileno(), 20, 0).endswith(b"\n"):
            time.sleep(0.01)
        left = int(os.pread(log.fileno(), 20, 0))
        if seconds:
            child.kill()
        assert child.wait(20) == (-signal.SIGKILL if seconds else 0)
        assert gone(left)
        child.kill()
        assert forking.alive


def test_a_process_id_that_the_system_gives_again_is_another_child():
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as folder:
        forking = nursery.nursery_for("group_child", {"PATH": "/usr/bin:/bin"})
        first = forking.spawn({"seconds": 0}, (), log.fileno(), folder, 60)
        assert first.wait(20) == 0
        second = forking.spawn({"seconds": 600}, (), log.fileno(), folder, 60)
        replace(first, pid=second.pid).kill()
        with pytest.raises(subprocess.TimeoutExpired):
            replace(second, pid=first.pid).wait(0.5)
        second.kill()
        assert second.wait(20) == -signal.SIGKILL


def test_nothing_is_left_open_after_many_sandboxes(build):
    binary = build("good")
    for _ in range(2):
        with sandbox_of(binary) as sandbox:
            run_once(sandbox)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with sandbox_of(binary) as sandbox:
            run_once(sandbox)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_threads_may_judge_at_once(build):
    from concurrent.futures import ThreadPoolExecutor

    good, bad = build("good"), build("zeros")
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda b: judge(b, launch_of(SPEC), SPEC, num_threads=1), [good, bad, good, bad]))
    assert [isinstance(v, Passed) for v in verdicts] == [True, False, True, False]
    assert torch.get_num_threads() == threads


@pytest.mark.soak
def test_hundreds_of_kills_leave_nothing_behind(build):
    binary = build("endless")
    for _ in range(300):
        with sandbox_of(binary, run_s=0.02) as sandbox:
            assert isinstance(run_once(sandbox), TimedOut)
            pid = sandbox.pid
        assert gone(pid)
    assert isinstance(judge(build("good"), launch_of(SPEC), SPEC), Passed)
