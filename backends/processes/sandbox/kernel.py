"""What the kernel is asked for to shut a program in, and the standard library has no function for.

Invariants:

* Each function does one thing to the calling process, and raises ``OSError`` with what it was when the kernel refuses.
* Nothing but the standard library is imported.
* Linux on x86-64 and AArch64; elsewhere the system calls have other numbers, so that nothing is begun there.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

CLONE_THREAD: Final = 0x00010000
CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2

PR_SET_NO_NEW_PRIVS: Final = 38
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_MOUNT_ATTR_RDONLY: Final = 1
_MOUNT_ATTR_NOSUID: Final = 2
_CAPABILITY_VERSION_3: Final = 0x20080522

# Landlock
_EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
LANDLOCK_NEEDED: Final = 6
"""The version of its interface that is used, on newer kernels too: before, files can be emptied (1, 2), devices told
what to do (4), and processes outside be signalled and reached by abstract sockets (5)."""
_HANDLED: Final = struct.pack("=QQQ", (1 << 16) - 1, 3, 3)
"""All rights over files, binding and connecting, abstract sockets and signals of others."""
_LANDLOCK_CREATE: Final = 444
_LANDLOCK_ADD: Final = 445
_LANDLOCK_RESTRICT: Final = 446
_MOUNT_SETATTR: Final = 442

_libc: Final = ctypes.CDLL(None, use_errno=True)


def is_known_machine() -> bool:
    """Whether the numbers of system calls are known here."""
    return platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2), with its arguments in its order.

    Raises:
        OSError: the kernel refuses.
    """
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    _check(_libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def enter_root(path: str) -> None:
    """Make this mount the root, and let go of the one that was."""
    os.chdir(path)
    number = 155 if platform.machine() == "x86_64" else 41
    _check(_libc.syscall(number, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def make_read_only(path: str) -> None:
    """All mounts from here down, without set-user-id programs."""
    _set_mount(path, set_bits=_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, clear_bits=0, flags=_AT_RECURSIVE)


def make_writable(path: str) -> None:
    """This mount alone."""
    _set_mount(path, set_bits=0, clear_bits=_MOUNT_ATTR_RDONLY, flags=0)


def _set_mount(path: str, *, set_bits: int, clear_bits: int, flags: int) -> None:
    attributes = struct.pack("=QQQQ", set_bits, clear_bits, 0, 0)
    result = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, attributes, ctypes.c_size_t(len(attributes))
    )
    _check(result, f"mount_setattr {path}")


def set_process_option(option: int, value: int) -> None:
    """As prctl(2)."""
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def drop_capabilities() -> None:
    """All of them; with no new privileges none comes back, not for user 0 either."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, bytes(24)), "capset")


def landlock_version() -> int:
    """Of its interface; 0 where the kernel has none."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))


def allow_only_reading(paths: Iterable[str]) -> None:
    """From here on files can be read and run below these paths, and nothing else can be done to any file.

    Needs that no new privileges can be had. What Landlock does not know (looking at names and dates, changing modes) is
    left to the system call filter.
    """
    ruleset = _check(_libc.syscall(_LANDLOCK_CREATE, _HANDLED, ctypes.c_size_t(len(_HANDLED)), 0), "landlock")
    try:
        for path in paths:
            rights = _EXECUTE | _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
            _allow(ruleset, path, rights)
        _allow(ruleset, "/dev/null", _READ_FILE | _WRITE_FILE)
        _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, descriptor)
        _check(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock {path}")
    finally:
        os.close(descriptor)


def install_filter(program: bytes) -> None:
    """Have every system call from here on judged by this; see :mod:`penstock.backends.processes.sandbox.syscalls`."""
    buffer = ctypes.create_string_buffer(program, len(program))

    class FilterProgram(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    described = FilterProgram(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    _check(_libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(described), 0, 0), "seccomp")
