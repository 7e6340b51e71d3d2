"""Fences that a process puts around itself before it loads a candidate: limits, death with its parent, no files, few system
calls.

Each fence that the system lacks is left out and named in the answer; a fence, once up, cannot be taken down. Not a container:
what stays possible is written in `verifier.sandbox`. Imports nothing heavy, since every candidate's child starts here.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct

_PR_SET_PDEATHSIG, _PR_GET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 21, 38
_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
_SYS_SECCOMP, _SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_RESTRICT = 317, 444, 446
_SECCOMP_SET_MODE_FILTER, _TSYNC, _SPEC_ALLOW = 1, 1, 4
_AUDIT_ARCH_X86_64 = 0xC000003E
_KILL_PROCESS, _ALLOW, _EACCES = 0x80000000, 0x7FFF0000, 0x00050000 | 13

#: System calls by number (x86-64). A kernel that computes needs memory, futexes and time; the child's own code its channel.
_COMPUTE = {
    "read": 0, "write": 1, "close": 3, "poll": 7, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12,
    "rt_sigprocmask": 14, "rt_sigreturn": 15, "sched_yield": 24, "mremap": 25, "madvise": 28, "nanosleep": 35, "getpid": 39,
    "sendto": 44, "recvfrom": 45, "exit": 60, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "getppid": 110,
    "sigaltstack": 131, "arch_prctl": 158, "gettid": 186, "futex": 202, "sched_getaffinity": 204, "set_tid_address": 218,
    "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231,
    "get_mempolicy": 239, "ppoll": 271, "set_robust_list": 273, "prlimit64": 302, "getcpu": 309, "getrandom": 318,
    "membarrier": 324, "rseq": 334,
}  # fmt: skip
#: Besides, while the candidate is mapped, and in a child that holds torch: reading files, and a narrower filter.
_READ_FILES = {
    "fstat": 5, "stat": 4, "lstat": 6, "lseek": 8, "ioctl": 16, "pread64": 17, "access": 21, "uname": 63, "fcntl": 72,
    "getdents": 78, "getcwd": 79, "readlink": 89, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "statfs": 137,
    "getdents64": 217, "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "seccomp": 317, "statx": 332, "faccessat2": 439,
}  # fmt: skip
#: Harmless questions that libraries ask and can do without: refused, not punished.
_REFUSED = {
    "open": 2, "rt_sigaction": 13, "getsockname": 51, "mlock": 149, "prctl": 157, "sched_setaffinity": 203, "mbind": 237,
    "set_mempolicy": 238, "openat": 257, "memfd_create": 319, "openat2": 437,
}  # fmt: skip
_OPENAT, _TGKILL = 257, 234
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_libc = ctypes.CDLL(None, use_errno=True)


def bound_to_parent(parent: int) -> None:
    """Die when the parent dies, whatever kills it. Exits at once if it is gone already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def limit(cpu_s: int, memory_bytes: int, file_bytes: int = 1 << 20) -> None:
    """Hard limits of CPU seconds, address space and the size of files; no core dumps."""
    limit_processor(cpu_s)
    _set_limits(((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, file_bytes)))


def limit_processor(cpu_s: int) -> None:
    """A hard limit of CPU seconds, and no core dumps: for children that need any address space and write files."""
    _set_limits(((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, cpu_s)))


def _set_limits(limits: tuple[tuple[int, int], ...]) -> None:
    for what, value in limits:
        _, hard = resource.getrlimit(what)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (bound, bound))


def no_network() -> bool:
    """A network name space of its own, without any interface. Call before the first thread starts."""
    return bool(_libc.unshare(_CLONE_NEWNET) == 0 or _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0)


def no_new_privileges() -> bool:
    return bool(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0)


def can_keep_files_away() -> bool:
    """Whether a candidate can be kept from opening files here, by Landlock or by a filter of system calls."""
    version = _libc.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return bool(version >= 1 or (platform.machine() == "x86_64" and _libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0))


def no_files(readable: tuple[str, ...] = ()) -> bool:
    """Landlock: from now on no file can be opened, but for reading below the folders named. Threads started later inherit it."""
    version = _libc.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return False
    known_rights = {1: 13, 2: 14}.get(version, 15 if version < 5 else 16)
    rights = struct.pack("Q", (1 << known_rights) - 1)
    ruleset = _libc.syscall(_SYS_LANDLOCK_CREATE, rights, ctypes.c_size_t(len(rights)), ctypes.c_uint32(0))
    if ruleset < 0:
        return False
    for folder in readable:
        _landlock_allow_reading(ruleset, folder)
    done = bool(_libc.syscall(_SYS_LANDLOCK_RESTRICT, ruleset, ctypes.c_uint32(0)) == 0)
    os.close(ruleset)
    return done


def _landlock_allow_reading(ruleset: int, folder: str) -> None:
    execute, read_file, read_dir = 1 << 0, 1 << 2, 1 << 3
    try:
        handle = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    rights = execute | read_file | (read_dir if os.path.isdir(folder) else 0)
    _libc.syscall(_SYS_LANDLOCK_CREATE + 1, ruleset, ctypes.c_uint32(1), struct.pack("=Qi", rights, handle), ctypes.c_uint32(0))
    os.close(handle)


def few_system_calls(*, reading_files: bool) -> bool:
    """A filter for all threads: computing is allowed, writing files is refused; processes, threads, network and signals kill.

    Without `reading_files` opening anything is refused too. A second call can only take away. False where there is no seccomp.
    """
    if platform.machine() != "x86_64":
        return False
    code = _filter_program(reading_files)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    for flags in (_TSYNC | _SPEC_ALLOW, _TSYNC):
        if _libc.syscall(_SYS_SECCOMP, _SECCOMP_SET_MODE_FILTER, flags, program) == 0:
            return True
    return False


def _filter_program(reading_files: bool) -> bytes:
    """Classic BPF over struct seccomp_data: number at 0, architecture at 4, low halves of the arguments at 16, 24, 32."""

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def answer(value: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, value)

    def if_equal(value: int, then: bytes) -> bytes:
        return struct.pack("HBBI", 0x15, 0, len(then) // 8, value) + then

    # A foreign architecture's numbers mean other calls: with its own code still loaded, nothing below matches and the end kills.
    parts = [load(4), if_equal(_AUDIT_ARCH_X86_64, load(0))]
    parts.append(if_equal(_TGKILL, load(16) + if_equal(os.getpid(), answer(_ALLOW)) + answer(_KILL_PROCESS)))
    if reading_files:
        writes = struct.pack("HBBI", 0x45, 0, 1, _WRITING) + answer(_EACCES)
        parts.append(if_equal(_OPENAT, load(32) + writes + answer(_ALLOW)))
    allowed = {**_COMPUTE, **(_READ_FILES if reading_files else {})}
    refused = {**_REFUSED, **({} if reading_files else _READ_FILES)}
    parts += [if_equal(number, answer(_ALLOW)) for number in allowed.values()]
    parts += [if_equal(number, answer(_EACCES)) for number in refused.values()]
    return b"".join(parts) + answer(_KILL_PROCESS)
