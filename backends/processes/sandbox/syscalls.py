"""The filter that judges the system calls of a program in the sandbox.

Invariants:

* A refused call fails as if it were forbidden (``EPERM``): a program gets an exception that it can print. Only calls of
  another instruction set end it.
* Calls that nobody has looked at are refused, by their number: what is not known is not there.
* What is refused: the network, looking into or signalling processes that are not its own, mounting, namespaces, memory
  that no limit counts, and parts of the kernel that no program of this kind needs.
* Nothing but the standard library is imported.
"""

from __future__ import annotations

import errno
import platform
import struct
from typing import Final

from penstock.backends.processes.sandbox import kernel

_NEW_NAMESPACES: Final = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWCGROUP | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | 0x80
)  # fmt: skip
_PR_SET_PDEATHSIG: Final = 1

_X86_64: Final = 0xC000003E
_AARCH64: Final = 0xC00000B7

REFUSED: Final = {
    # name: number on x86-64, on AArch64
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "quotactl": (179, 60), "acct": (163, 89),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "fanotify_init": (300, 262), "personality": (135, 92), "syslog": (103, 116),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170), "adjtimex": (159, 171),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191),
    "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184), "mq_getsetattr": (245, 185), "open_tree_attr": (467, 467),
    "lsm_set_self_attr": (460, 460), "process_mrelease": (448, 448), "vhangup": (153, 58), "nfsservctl": (180, 42),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
"""Never needed by a program that computes."""

REFUSED_IN_SHARED_VIEW: Final = {
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "inotify_add_watch": (254, 27),
}  # fmt: skip
"""Where the program sees the processes and the files that everybody sees: signals to others, and changes to files that
Landlock does not judge."""

LAST_REVIEWED: Final = 467
"""The highest number of a call that somebody has looked at, on both machines. What newer kernels have above it
(``file_setattr``, …) is not there."""

_CLONE: Final = (56, 220)
_CLONE3: Final = (435, 435)
_FORK: Final = (57, None)
_VFORK: Final = (58, None)
_PRCTL: Final = (157, 167)
_KILL: Final = (62, 129)
_TGKILL: Final = (234, 131)
_PRLIMIT: Final = (302, 261)
_SOCKETPAIR: Final = (53, 199)
_FCNTL: Final = (72, 25)
_IOCTL: Final = (16, 29)
_SOCK_STREAM: Final = 1
_F_SIGNALS: Final = (8, 10, 15)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX: who is signalled about a file."""
_TERMINAL: Final = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: what Python asks of any file."""

_LOAD: Final = 0x20
_EQUAL: Final = 0x15
_AT_LEAST: Final = 0x35
_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_KILL_PROCESS: Final = 0x80000000
_ERRNO: Final = 0x00050000
_AT_NUMBER: Final = 0
_AT_MACHINE: Final = 4
_AT_ARGUMENTS: Final = 16
"""Low half of the first; eight bytes each. All that are looked at are int."""


class _Filter:
    """Instructions, one after the other."""

    def __init__(self) -> None:
        self.is_x86 = platform.machine() == "x86_64"
        self._code: list[bytes] = []

    def put(self, code: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        self._code.append(struct.pack("=HBBI", code, if_true, if_false, value))

    def refuse(self, numbers: tuple[int, int | None], error: int = errno.EPERM) -> None:
        """This call, whatever its arguments."""
        if (number := self._number(numbers)) is not None:
            self.put(_EQUAL, number, 0, 1)
            self.put(_RETURN, _ERRNO | error)

    def refuse_if(self, numbers: tuple[int, int | None], code: int, value: int, argument: int = 0) -> None:
        """This call when an argument (the first) is, or has, this."""
        if (number := self._number(numbers)) is not None:
            self.put(_EQUAL, number, 0, 4)
            self.put(_LOAD, _AT_ARGUMENTS + 8 * argument)
            self.put(code, value, 0, 1)
            self.put(_RETURN, _ERRNO | errno.EPERM)
            self.put(_LOAD, _AT_NUMBER)

    def refuse_unless(
        self, numbers: tuple[int, int | None], code: int, values: tuple[int, ...], argument: int = 0
    ) -> None:
        """This call when an argument (the first) is, or has, none of these."""
        if (number := self._number(numbers)) is not None:
            self.put(_EQUAL, number, 0, len(values) + 3)
            self.put(_LOAD, _AT_ARGUMENTS + 8 * argument)
            for place, value in enumerate(values):
                self.put(code, value, len(values) - place, 0)
            self.put(_RETURN, _ERRNO | errno.EPERM)
            self.put(_LOAD, _AT_NUMBER)

    def _number(self, numbers: tuple[int, int | None]) -> int | None:
        return numbers[0] if self.is_x86 else numbers[1]

    def encoded(self) -> bytes:
        return b"".join(self._code)


def _stream_types() -> tuple[int, ...]:
    nonblocking, on_exec = 0o4000, 0o2000000
    return tuple(_SOCK_STREAM | flags for flags in (0, nonblocking, on_exec, nonblocking | on_exec))


def filter_program(*, may_start_processes: bool, shares_view: bool, own_pid: int) -> bytes:
    """Of one program, to be installed by itself.

    Args:
        may_start_processes: whether it may fork.
        shares_view: it sees the processes and files that everybody sees.
        own_pid: the only process that it may signal then.
    """
    made = _Filter()
    made.put(_LOAD, _AT_MACHINE)
    made.put(_EQUAL, _X86_64 if made.is_x86 else _AARCH64, 1, 0)
    made.put(_RETURN, _KILL_PROCESS)
    made.put(_LOAD, _AT_NUMBER)
    if made.is_x86:  # the calls of the x32 instruction set have other numbers
        made.put(_AT_LEAST, 0x40000000, 0, 1)
        made.put(_RETURN, _KILL_PROCESS)
    made.put(_AT_LEAST, LAST_REVIEWED + 1, 0, 1)
    made.put(_RETURN, _ERRNO | errno.ENOSYS)
    for numbers in REFUSED.values():
        made.refuse(numbers)
    made.refuse(_CLONE3, errno.ENOSYS)  # its flags cannot be seen here; the C library falls back on clone
    made.refuse_if(_CLONE, _ANY_BIT, _NEW_NAMESPACES)
    made.refuse_if(_PRCTL, _EQUAL, _PR_SET_PDEATHSIG)
    made.refuse_unless(_SOCKETPAIR, _EQUAL, _stream_types(), argument=1)  # others send to any address
    for command in _F_SIGNALS:
        made.refuse_if(_FCNTL, _EQUAL, command, argument=1)
    made.refuse_unless(_IOCTL, _EQUAL, _TERMINAL, argument=1)
    if not may_start_processes:
        if shares_view:  # nothing counts this program's threads alone
            made.refuse(_CLONE)
        else:
            made.refuse_unless(_CLONE, _ANY_BIT, (kernel.CLONE_THREAD,))
        made.refuse(_FORK)
        made.refuse(_VFORK)
    if shares_view:
        for maybe in REFUSED_IN_SHARED_VIEW.values():
            made.refuse(maybe)
        made.refuse_unless(_KILL, _EQUAL, (own_pid,))
        made.refuse_unless(_TGKILL, _EQUAL, (own_pid,))
        made.refuse_unless(_PRLIMIT, _EQUAL, (0, own_pid))
    made.put(_RETURN, _ALLOW)
    return made.encoded()
