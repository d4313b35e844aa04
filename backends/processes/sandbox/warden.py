"""The process that builds a sandbox, runs one program in it, and makes sure that nothing of it outlives the two.

```
caller ── one line of JSON (WardenJob), then nothing until the end ──► warden's stdin
warden ── one line of JSON (WardenReport) ──► warden's stderr
program's stdout and stderr ──► warden's stdout, which the warden itself never writes
```

The warden shuts itself in, and starts the inner warden, which starts the program. With namespaces the inner warden is
the first process of a process namespace: when it ends, the kernel kills all that is in there. Without, the warden
adopts whatever is orphaned below it, and kills all of it.

Invariants:

* When the caller ends, however that happens, or closes the pipe, the program and all that it started are killed.
* The program is begun only after every protection is in force; whatever fails before is reported as ``failure``.
* The program has three descriptors of ours: what it is given to read, its output, and its own text.
* Nothing but the standard library is imported, without site-packages, so that this starts in hundredths of a second.

Waits: the warden's ``poll`` ends with the caller, the inner warden, or the program's deadline; the inner warden's with
the warden or the program. The caller waits for the warden with a deadline.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import struct
import sys
from typing import Final, NamedTuple, NoReturn

from penstock.backends.processes.process_facts import be_subreaper, descendants_of, end_with_parent
from penstock.backends.processes.sandbox import kernel
from penstock.backends.processes.sandbox.syscalls import filter_program

NAMESPACES: Final = "namespaces"
FILTER: Final = "filter"
NONE: Final = "none"

NOBODY: Final = 65534
"""Whom root's programs run as."""
ROOT_PLACE: Final = "/sys"
"""Where the new root is put together: a folder that is there everywhere, of which the sandbox needs nothing."""
DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
MAX_TASKS: Final = 32
"""Processes and threads of one program together."""
MAX_OPEN_FILES: Final = 64
STACK_BYTES: Final = 8 << 20
PROGRAM_FD: Final = 3
_STATUS: Final = struct.Struct("=idq")
"""Wait status, seconds of CPU, bytes of memory at the peak."""
_F_ADD_SEALS: Final = 1033
_ALL_SEALS: Final = 15

_RUNNER: Final = """
import sys
with open(PROGRAM_FD, encoding="utf-8", errors="replace") as file:
    source = file.read()
def run(source, name):
    import _ast
    scope = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        tree = compile(source, name, "exec", 1024)
        last = tree.body.pop() if SHOWS_VALUE and tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        exec(compile(tree, name, "exec"), scope)
        if last is not None:
            value = eval(compile(_ast.Expression(last.value), name, "eval"), scope)
            if value is not None:
                print(repr(value))
    except SystemExit:
        raise
    except BaseException as error:
        import linecache, traceback
        sys.stdout.flush()
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        where = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(type(error), error, where, limit=-8)
        sys.stderr.flush()
        sys.exit(1)
run(source, "program.py")
"""
"""Runs the program's text, shows the value of an expression at its end, and tells errors without lines of ours."""


def runner(*, shows_value: bool) -> str:
    """What the interpreter is told to run."""
    return _RUNNER.replace("PROGRAM_FD", str(PROGRAM_FD)).replace("SHOWS_VALUE", str(shows_value))


class WardenJob(NamedTuple):
    """What is to be run, and how it is shut in."""

    caller_pid: int
    isolation: str
    source: str
    python: str
    """Path of the interpreter, with all links followed."""
    readable: tuple[str, ...]
    """Files and folders that the program can read."""
    packages: tuple[str, ...]
    """Those of the folders that are on the path for imports."""
    wall_s: float
    cpu_s: int
    memory_bytes: int
    """Address space that each process may have."""
    disk_bytes: int
    may_start_processes: bool
    stdin: str = ""
    """What the program reads from its standard input."""
    is_plain: bool = False
    """Its output is what it writes to stdout, and nothing else: no value of a last expression, no stderr."""


class WardenReport(NamedTuple):
    """How it went."""

    failure: str = ""
    """The sandbox could not be built; nothing was run."""
    is_overdue: bool = False
    """It was killed at the deadline."""
    is_stopped: bool = False
    """It was killed because the caller wanted it."""
    exit_code: int | None = None
    """Minus the signal's number when one has ended it; None: it was killed from here."""
    cpu_s: float = 0.0
    peak_bytes: int = 0


def main() -> None:
    """The warden's process."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # whoever starts this may block signals, and children inherit that
    line = b""
    while not line.endswith(b"\n"):  # nothing comes behind it
        more = os.read(0, 1 << 20)
        if not more:
            return
        line += more
    job = WardenJob(**json.loads(line))
    end_with_parent(signal.SIGKILL)
    if os.getppid() != job.caller_pid:
        return
    try:
        report = _supervise(job)
    except OSError as error:
        report = WardenReport(failure=str(error))
    os.write(2, json.dumps(report).encode() + b"\n")


def _supervise(job: WardenJob) -> WardenReport:
    os.umask(0o022)
    program, given = _memory_file(job.source), _memory_file(job.stdin)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when the machine runs out of memory, this goes first
    be_subreaper()
    if job.isolation == NAMESPACES:
        _enter_namespaces(job)
    status_read, status_write = os.pipe()
    failure_read, failure_write = os.pipe()
    lifeline_read, lifeline_write = os.pipe()
    inner = os.fork()
    if inner == 0:
        os.close(lifeline_write)
        _inner_warden(job, (given, program, lifeline_read, status_write, failure_write))
    for descriptor in (status_write, failure_write, lifeline_read, program, given):
        os.close(descriptor)
    os.dup2(2, 1)  # the output is the program's alone: it ends when they all have ended
    is_overdue, is_stopped = _wait(inner, job.wall_s)
    _kill_all(inner, in_namespace=job.isolation == NAMESPACES)
    if failure := os.read(failure_read, 4096):
        return WardenReport(failure=failure.decode(errors="replace"))
    status = os.read(status_read, _STATUS.size)
    if len(status) < _STATUS.size:
        return WardenReport(is_overdue=is_overdue, is_stopped=is_stopped)
    code, cpu_s, peak_bytes = _STATUS.unpack(status)
    return WardenReport(exit_code=os.waitstatus_to_exitcode(code), cpu_s=cpu_s, peak_bytes=peak_bytes)


def _memory_file(source: str) -> int:
    """A text that cannot be changed any more, to be read from the beginning."""
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(source.encode("utf-8", errors="replace"))
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _ALL_SEALS)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _wait(inner: int, wall_s: float) -> tuple[bool, bool]:
    """Until the inner warden ends, the time is up, or the caller closes the pipe: whether the latter two."""
    handle = os.pidfd_open(inner)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(0, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(wall_s * 1000)}
    return not ready, 0 in ready and handle not in ready


def _kill_all(inner: int, *, in_namespace: bool) -> None:
    if in_namespace:
        with contextlib.suppress(ProcessLookupError):
            os.kill(inner, signal.SIGKILL)
        os.waitpid(inner, 0)  # the kernel reaps the first process after all the others
        return
    while True:
        for pid in descendants_of(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


# --- with namespaces ------------------------------------------------------------------------------------------


def _enter_namespaces(job: WardenJob) -> None:
    user, group = os.geteuid(), os.getegid()
    apart = (
        kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    )  # fmt: skip
    try:
        if user != 0:
            raise PermissionError
        kernel.unshare(apart)
    except PermissionError:
        kernel.unshare(apart | kernel.CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    _build_root(job)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _build_root(job: WardenJob) -> None:
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", ROOT_PLACE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    room = f"size={job.disk_bytes},nr_inodes=4096,mode=1777"
    os.mkdir(ROOT_PLACE + "/tmp")
    # Before what can be read is put in: an interpreter may lie below /tmp.
    kernel.mount("tmpfs", ROOT_PLACE + "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, room)
    for path in (*job.readable, *DEVICES):
        inside = ROOT_PLACE + path
        if os.path.isdir(path):
            os.makedirs(inside, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            with open(inside, "w"):
                pass
        kernel.mount(path, inside, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.enter_root(ROOT_PLACE)
    kernel.make_read_only("/")
    kernel.make_writable("/tmp")
    os.chdir("/tmp")


def _become_nobody() -> None:
    """Root gives up being root, in a user namespace of its own in which its processes are counted from none."""
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        except OSError:  # in a namespace that knows no other user, or without the capability: all of them go anyway
            return
        with contextlib.suppress(OSError):  # where user namespaces are forbidden, the count is nobody's of the machine
            kernel.unshare(kernel.CLONE_NEWUSER)


# --- below the warden -----------------------------------------------------------------------------------------


def _inner_warden(job: WardenJob, descriptors: tuple[int, int, int, int, int]) -> NoReturn:
    """Start the program, wait for it or for the warden's end, and say how it ended."""
    given, program, lifeline, status, failure = descriptors
    code = 1
    try:
        end_with_parent(signal.SIGKILL)
        if job.isolation == NAMESPACES:
            _become_nobody()
            kernel.drop_capabilities()
            end_with_parent(signal.SIGKILL)  # the kernel forgets it with a change of user
        warden = os.getpid()
        child = os.fork()
        if child == 0:
            os.close(lifeline)
            os.close(status)
            _become_program(job, given, program, failure, warden)
        os.close(failure)
        handle = os.pidfd_open(child)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.register(lifeline, select.POLLIN)
        if handle in {descriptor for descriptor, _ in poll.poll()}:
            _, ended, usage = os.wait4(child, 0)
            os.write(status, _STATUS.pack(ended, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024))
            code = 0
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(failure, str(error).encode()[:4096])
    finally:
        os._exit(code)


def _become_program(job: WardenJob, given: int, program: int, failure: int, warden: int) -> NoReturn:
    """Turn this process into the program."""
    try:
        for number in range(1, signal.NSIG):  # what is ignored here would be ignored there
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        # Above those that the program gets, then down into their places.
        errors = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC) if job.is_plain else 1
        given, program, output, errors = (
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (given, program, 1, errors)
        )
        failure = fcntl.fcntl(failure, fcntl.F_DUPFD_CLOEXEC, 32)
        for source, target in ((given, 0), (output, 1), (errors, 2), (program, PROGRAM_FD)):
            os.dup2(source, target)
        os.closerange(PROGRAM_FD + 1, failure)
        os.closerange(failure + 1, 1 << 16)
        if job.isolation == FILTER:
            os.chdir("/")
        end_with_parent(signal.SIGKILL)
        if os.getppid() != warden:  # it ended before the line above
            os._exit(127)
        _limit(job)
        _shut_in(job)
        environment = {
            "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0", "PYTHONPATH": ":".join(job.packages),
        }  # fmt: skip
        options = ["-S", "-s", "-B", "-P", *([] if job.is_plain else ["-u"]), "-X", "utf8"]
        os.execve(job.python, [job.python, *options, "-c", runner(shows_value=not job.is_plain)], environment)
    except OSError as error:
        os.write(failure, str(error).encode()[:4096])
    finally:
        os._exit(127)


def _limit(job: WardenJob) -> None:
    limits = {
        resource.RLIMIT_CPU: (job.cpu_s, job.cpu_s + 1),  # first a signal that a program may handle, then SIGKILL
        resource.RLIMIT_AS: (job.memory_bytes, job.memory_bytes),
        resource.RLIMIT_FSIZE: (job.disk_bytes, job.disk_bytes),
        resource.RLIMIT_NOFILE: (MAX_OPEN_FILES, MAX_OPEN_FILES),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_STACK: (STACK_BYTES, STACK_BYTES),
        resource.RLIMIT_MEMLOCK: (0, 0),
    }
    if job.isolation == NAMESPACES:  # elsewhere all processes of this user would count
        limits[resource.RLIMIT_NPROC] = (MAX_TASKS, MAX_TASKS)
    for which, (soft, hard) in limits.items():
        now = resource.getrlimit(which)[1]
        cap = hard if now == resource.RLIM_INFINITY else min(hard, now)
        resource.setrlimit(which, (min(soft, cap), cap))


def _shut_in(job: WardenJob) -> None:
    kernel.set_process_option(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if job.isolation == NONE:
        return
    kernel.drop_capabilities()
    if job.isolation == FILTER:
        kernel.allow_only_reading((*job.readable, "/dev/urandom"))
    may_start = job.may_start_processes and job.isolation == NAMESPACES
    shares_view = job.isolation == FILTER
    kernel.install_filter(filter_program(may_start_processes=may_start, shares_view=shares_view, own_pid=os.getpid()))


def boot(root: str) -> list[str]:
    """The command that starts a warden; ``root`` is the folder that this package is imported from."""
    text = (
        f"import sys; sys.path.insert(0, {root!r}); from penstock.backends.processes.sandbox.warden import main; main()"
    )
    return [sys.executable, "-I", "-S", "-B", "-c", text]
