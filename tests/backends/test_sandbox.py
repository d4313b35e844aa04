"""Programs that mean harm: what each gets to do, under each isolation, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.backends.episodes.interfaces import EpisodeInfraError, ToolError
from penstock.backends.episodes.tools import PythonTool
from penstock.backends.processes.process_facts import descendants_of, facts_of
from penstock.backends.processes.sandbox import kernel, warded
from penstock.backends.processes.sandbox.sandbox import Sandbox, SandboxLimits
from penstock.backends.processes.sandbox.syscalls import LAST_REVIEWED
from penstock.backends.processes.sandbox.warded import KeptOutput, SandboxFailedError
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from penstock.backends.processes.sandbox.sandbox import Isolation
    from penstock.backends.processes.sandbox.warded import ProgramRun

LIMITS = SandboxLimits(wall_s=60.0, cpu_s=1, memory_bytes=256 << 20, disk_bytes=1 << 20, output_bytes=4096)
PROTECTING: tuple[Isolation, ...] = ("namespaces", "filter")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Generator[None]:
    yield
    left = [
        pid for pid in descendants_of(os.getpid()) if "warden" in _command_of(pid) or "program.py" in _command_of(pid)
    ]
    assert left == []


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture(scope="module", params=PROTECTING)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    try:
        return Sandbox(LIMITS, isolation=request.param, max_running=2)
    except UserFault as error:  # a machine that has only one of the two
        pytest.skip(str(error))


def run(sandbox: Sandbox, source: str) -> ProgramRun:
    return asyncio.run(sandbox.run(textwrap.dedent(source)))


# --- what programs are for ------------------------------------------------------------------------------------


def test_one_of_the_two_isolations_that_protect_is_there() -> None:
    assert Sandbox(LIMITS).isolation in PROTECTING


def test_a_program_prints_and_shows_its_last_expression(sandbox: Sandbox) -> None:
    result = run(sandbox, "import math\nprint('hi')\nmath.factorial(5)")
    assert (result.output, result.exit_code) == ("hi\n120\n", 0)
    assert run(sandbox, "None").output == ""
    assert run(sandbox, "").exit_code == 0


def test_an_error_is_shown_with_lines_of_the_program_and_none_of_ours(sandbox: Sandbox) -> None:
    result = run(sandbox, "def f():\n    return 1 / 0\nprint('before')\nf()\n")
    assert result.exit_code == 1
    assert result.output.startswith('before\nTraceback (most recent call last):\n  File "program.py", line 4')
    assert "return 1 / 0" in result.output
    assert result.output.endswith("ZeroDivisionError: division by zero\n")
    assert "<string>" not in result.output
    assert "SyntaxError" in run(sandbox, "a b").output


def test_what_is_installed_can_be_imported_unless_it_may_not(sandbox: Sandbox) -> None:
    assert run(sandbox, "import numpy; print(int(numpy.arange(4).sum()))").output == "6\n"
    bare = Sandbox(LIMITS, isolation=sandbox.isolation, packages=False)  # type: ignore[arg-type]
    assert "ModuleNotFoundError" in run(bare, "import numpy").output


def test_a_program_reads_its_stdin_and_a_plain_one_prints_what_it_writes(sandbox: Sandbox) -> None:
    source = "import sys\nprint(input(), file=sys.stderr)\nprint(input())\nsys.stdout.write('x')"
    read = asyncio.run(sandbox.run(source, stdin="one\ntwo\n"))
    assert (read.output, read.exit_code) == ("one\ntwo\nx1\n", 0)
    plain = asyncio.run(sandbox.run(source, stdin="one\ntwö", is_plain=True))
    assert (plain.output, plain.exit_code) == ("twö\nx", 0)
    long = asyncio.run(sandbox.run("import sys\nlen(sys.stdin.read())", stdin="x" * 3_000_000))
    assert long.output == "3000000\n"
    assert "EOFError" in run(sandbox, "input()").output


def test_the_same_program_prints_the_same(sandbox: Sandbox) -> None:
    source = "print({f'{i}' for i in range(50)}, hash('a'))"
    assert run(sandbox, source).output == run(sandbox, source).output


# --- programs that mean harm ----------------------------------------------------------------------------------


def test_a_loop_ends_with_its_cpu_time(sandbox: Sandbox) -> None:
    assert run(sandbox, "while True: pass").exit_code == -signal.SIGXCPU


def test_a_loop_that_handles_the_signal_ends_too(sandbox: Sandbox) -> None:
    result = run(
        sandbox,
        """
        import signal
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: pass
    """,
    )
    assert result.exit_code == -signal.SIGKILL


def test_a_sleeper_ends_at_the_deadline(sandbox: Sandbox) -> None:
    short = Sandbox(
        SandboxLimits(wall_s=0.5, cpu_s=1, memory_bytes=256 << 20),
        isolation=sandbox.isolation,  # type: ignore[arg-type]
    )
    assert run(short, "import time; time.sleep(1000)").is_overdue


def test_memory_is_bounded(sandbox: Sandbox) -> None:
    result = run(sandbox, "x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert result.output.endswith("MemoryError\n")
    assert result.peak_bytes < LIMITS.memory_bytes
    assert "PermissionError" in run(sandbox, "import os; os.memfd_create('x')").output


def test_a_fork_bomb_does_not_get_off_the_ground(sandbox: Sandbox) -> None:
    result = run(sandbox, "import os\nwhile True: os.fork()")
    assert "PermissionError" in result.output
    for start in ("import subprocess; subprocess.run(['/bin/true'])", "import os; os.system('true') and 1/0"):
        assert run(sandbox, start).exit_code == 1


def test_a_fork_bomb_is_bounded_where_processes_may_be_started() -> None:
    limits = SandboxLimits(wall_s=60.0, cpu_s=1, memory_bytes=128 << 20, may_start_processes=True)
    bounded = run(
        Sandbox(limits, isolation="namespaces"),
        """
        import os, time
        num_children = 0
        try:
            while True:
                if os.fork() == 0: time.sleep(1000)
                num_children += 1
        except OSError as error:
            print(num_children < 40, error.errno, flush=True)
    """,
    )
    assert (bounded.output, bounded.exit_code) == ("True 11\n", 0)
    short = Sandbox(msgspec.structs.replace(limits, wall_s=1.5), isolation="namespaces")
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(short, bomb).exit_code != 0
    family = "import os, time\nos.fork()\ntime.sleep(1000)"
    assert run(short, family).is_overdue


def test_children_that_outlive_the_program_are_killed() -> None:
    limits = SandboxLimits(wall_s=60.0, memory_bytes=128 << 20, may_start_processes=True)
    sandbox = Sandbox(limits, isolation="namespaces")
    result = run(
        sandbox,
        """
        import os, signal, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                print('away', flush=True)
                time.sleep(1000)
            os._exit(0)
        os.wait()
    """,
    )
    assert result.exit_code == 0
    assert not result.is_overdue


def test_there_is_no_network(sandbox: Sandbox) -> None:
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
        assert "PermissionError" in run(sandbox, f"import socket; socket.socket(socket.{family})").output
    assert "PermissionError" in run(sandbox, "import urllib.request as r; r.urlopen('http://127.0.0.1:1')").output
    assert "42" in run(sandbox, "import asyncio\nasync def f(): return 42\nasyncio.run(f())").output


def test_the_environment_has_no_secret(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "swordfish")
    assert "swordfish" not in run(sandbox, "import os; print(dict(os.environ), os.environb)").output
    assert (
        "swordfish"
        not in run(
            sandbox,
            """
        import os
        for pid in range(1, 1 << 22):
            try: print(open(f'/proc/{pid}/environ').read())
            except FileNotFoundError: break
            except PermissionError: break
    """,
        ).output
    )


def test_files_of_the_run_cannot_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("swordfish")
    secret.chmod(0o644)
    tmp_path.chmod(0o755)
    places = (secret, "/etc/passwd", f"/proc/{os.getpid()}/environ", "/proc/self/environ", "/proc/1/cmdline", __file__)
    for path in places:
        result = run(sandbox, f"print(open({str(path)!r}).read())")
        assert result.exit_code == 1
        assert "FileNotFoundError" in result.output or "PermissionError" in result.output
    assert (
        "swordfish"
        not in run(sandbox, f"import os; os.link({str(secret)!r}, '/tmp/a'); print(open('/tmp/a').read())").output
    )
    assert run(sandbox, f"import os; print(os.listdir({str(tmp_path)!r}))").exit_code == 1


def test_nothing_outside_can_be_changed(sandbox: Sandbox, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("before")
    mine.chmod(0o666)
    tmp_path.chmod(0o777)
    mode = mine.stat().st_mode
    for attempt in (
        f"open({str(mine)!r}, 'w').write('x')", f"os.chmod({str(mine)!r}, 0)", f"os.utime({str(mine)!r}, (0, 0))",
        f"os.remove({str(mine)!r})", f"os.truncate({str(mine)!r}, 0)", f"os.setxattr({str(mine)!r}, 'user.a', b'b')",
        f"os.rename({str(mine)!r}, {str(mine)!r} + '2')", f"os.mkdir({str(tmp_path / 'new')!r})",
        "open(os.__file__, 'a')", "os.chmod(os.__file__, 0o777)", "os.chroot('/tmp')",
    ):  # fmt: skip
        assert run(sandbox, f"import os\n{attempt}").exit_code == 1, attempt
    assert mine.read_text() == "before"
    assert mine.stat().st_mode == mode
    assert sorted(tmp_path.iterdir()) == [mine]


def test_huge_files_are_cut_short() -> None:
    sandbox = Sandbox(LIMITS, isolation="namespaces")
    assert "File too large" in run(sandbox, "open('/tmp/a', 'wb').write(bytes(2 << 20))").output
    assert "No space left" in run(sandbox, "for i in range(99): open(f'/tmp/{i}', 'wb').write(bytes(1 << 19))").output
    assert "No space left" in run(sandbox, "for i in range(9999): open(f'/tmp/{i}', 'w').close()").output
    assert run(sandbox, "open('/tmp/a', 'w').write('abc'); print(open('/tmp/a').read())").output == "abc\n"
    assert "FileNotFoundError" in run(sandbox, "open('/tmp/a').read()").output  # of the program before


def test_huge_output_is_cut_and_a_flood_is_ended(sandbox: Sandbox) -> None:
    result = run(sandbox, "print('a' * 9000); print('the end')")
    assert result.exit_code == 0
    assert result.output.startswith("aaa")
    assert result.output.endswith("the end\n")
    assert len(result.output) < LIMITS.output_bytes + 100
    assert result.num_left_out_bytes == 9000 + 1 + 8 - LIMITS.output_bytes
    flood = run(sandbox, "while True: print('a' * 1000)")
    assert flood.is_flood
    assert len(flood.output) < LIMITS.output_bytes + 100


def test_others_cannot_be_signalled(sandbox: Sandbox) -> None:
    for target in ("os.getppid()", "1", str(os.getpid()), "-1", "0"):
        result = run(sandbox, f"import os, signal\nos.kill({target}, signal.SIGKILL)\nprint('alive')")
        # In a namespace of its own pid 1 takes no signal from inside, and 0 and −1 reach the program itself.
        assert result.exit_code in (0, 1, -signal.SIGKILL), (target, result)
    assert facts_of(os.getpid()) is not None
    assert run(sandbox, "import os; os.kill(os.getpid(), 9)").exit_code == -signal.SIGKILL


def test_others_cannot_be_looked_into(sandbox: Sandbox) -> None:
    trace = "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.ptrace(16, {0}, 0, 0), ctypes.get_errno())"
    assert run(sandbox, trace.format(os.getpid())).output == "-1 1\n"
    unshare = "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.unshare(0x10000000), ctypes.get_errno())"
    assert run(sandbox, unshare).output == "-1 1\n"
    death = "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.prctl(1, 0, 0, 0, 0), ctypes.get_errno())"
    assert run(sandbox, death).output == "-1 1\n"


LIBC = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"


def test_sockets_that_can_send_to_any_address_are_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    path = tmp_path / "listener"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.setblocking(False)
        for kind in ("SOCK_DGRAM", "SOCK_SEQPACKET", "SOCK_RAW"):
            source = f"import socket\none, _ = socket.socketpair(type=socket.{kind})\none.sendto(b'x', {str(path)!r})"
            assert "PermissionError" in run(sandbox, source).output
        with pytest.raises(BlockingIOError):
            listener.recv(1)
    stream = "import socket\none, other = socket.socketpair()\none.sendall(b'hi')\nother.recv(2)"
    assert run(sandbox, stream).output == "b'hi'\n"


def test_system_v_objects_of_others_cannot_be_reached(sandbox: Sandbox) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    segment, queue = libc.shmget(0, ctypes.c_size_t(4096), 0o1666), libc.msgget(0, 0o1666)
    assert segment >= 0
    assert queue >= 0
    try:
        source = f"""{LIBC}
message = ctypes.create_string_buffer(b'\\1' + bytes(15), 16)
for call in (lambda: libc.shmctl({segment}, 0, None), lambda: libc.msgctl({queue}, 0, None),
             lambda: libc.msgsnd({queue}, message, ctypes.c_size_t(8), 0o4000), lambda: libc.shmdt(None)):
    print(call(), ctypes.get_errno())
"""
        assert run(sandbox, source).output == "-1 1\n" * 4
        assert libc.shmctl(segment, 2, ctypes.create_string_buffer(256)) == 0  # IPC_STAT: it is there
        assert libc.msgrcv(queue, ctypes.create_string_buffer(64), ctypes.c_size_t(8), 0, 0o4000) == -1
    finally:
        libc.shmctl(segment, 0, None)
        libc.msgctl(queue, 0, None)


def test_calls_that_nobody_has_looked_at_are_not_there(sandbox: Sandbox) -> None:
    numbers = [LAST_REVIEWED + 1, LAST_REVIEWED + 2, LAST_REVIEWED + 3, 500, 511, 1000]
    source = f"{LIBC}for number in {numbers}:\n    print(libc.syscall(number, -1, 0, 0, 0, 0), ctypes.get_errno())"
    assert run(sandbox, source).output == "-1 38\n" * len(numbers)


def test_nobody_is_signalled_about_a_file_and_no_file_is_told_anything(sandbox: Sandbox) -> None:
    asks = ["fcntl.fcntl(0, fcntl.F_SETOWN, 1)", "fcntl.fcntl(0, fcntl.F_SETSIG, 9)",
            "fcntl.ioctl(0, 0x8901, bytes(4))",
            "fcntl.ioctl(0, 0x40086602, bytes(8))", "fcntl.ioctl(0, 0x5412, b'x')"]  # fmt: skip
    for ask in asks:
        assert "PermissionError" in run(sandbox, f"import fcntl\n{ask}").output, ask
    assert run(sandbox, "import os; os.isatty(1)").output == "False\n"


def test_threads_are_bounded(sandbox: Sandbox) -> None:
    source = """
        import threading
        threading.stack_size(32 << 10)
        stop, number = threading.Event(), 0
        try:
            while number < 500:
                threading.Thread(target=stop.wait, daemon=True).start()
                number += 1
        except RuntimeError:
            pass
        print(number)
        stop.set()
    """
    most = 0 if sandbox.isolation == "filter" else 31
    assert int(run(sandbox, source).output) <= most


def test_there_are_no_capabilities_and_none_can_be_had(sandbox: Sandbox) -> None:
    source = """
        import ctypes, os, struct
        libc = ctypes.CDLL(None)
        data = ctypes.create_string_buffer(24)
        libc.capget(struct.pack('=Ii', 0x20080522, 0), data)
        print(data.raw == bytes(24), libc.prctl(39, 0, 0, 0, 0))
    """
    assert run(sandbox, source).output == "True 1\n"


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "def f(): f()\nf()",
        "import os\nos.close(0); os.close(1); os.close(2); os.closerange(0, 99)",
        "import os\nos.abort()",
        "import ctypes\nctypes.string_at(0)",
        "import sys\nsys.exit(77)",
        "raise KeyboardInterrupt",
        "import sys\nsys.stdout.close()\nprint(1)",
        "exec('(' * 100000 + ')' * 100000)",
        "(" * 1000 + ")" * 1000,
        "x = " + "-" * 60000 + "1",
        "\0",
        "import builtins\nbuiltins.print = None\nbuiltins.repr = None\n1 + 1",
        "import sys\nsys.modules.clear()\n1 / 0",
        "import os, threading, time\n"
        "try:\n    [threading.Thread(target=time.sleep, args=(1000,)).start() for _ in range(1000)]\n"
        "finally:\n    os._exit(5)",
        "class A:\n    def __repr__(self): raise SystemExit(3)\nA()",
        "class E(BaseException):\n    def __str__(self): return 'x' * 10**8\nraise E",
    ],
)
def test_a_program_that_breaks_is_a_run_that_ended(sandbox: Sandbox, source: str) -> None:
    result = run(sandbox, source)
    assert result.exit_code is not None


# --- the sandbox itself ---------------------------------------------------------------------------------------


def _wait_for_a_warden() -> None:
    while not any("warden" in _command_of(pid) for pid in descendants_of(os.getpid())):
        pass


def test_a_cancelled_run_leaves_nothing(sandbox: Sandbox) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(sandbox.run("import time; time.sleep(1000)"))
        await asyncio.to_thread(_wait_for_a_warden)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


@pytest.mark.parametrize("isolation", ["namespaces", "filter", "none"])
def test_nothing_outlives_a_caller_that_is_killed(isolation: str) -> None:
    script = f"""
import asyncio
from penstock.backends.processes.sandbox.sandbox import Sandbox
sandbox = Sandbox(isolation={isolation!r})
print("began", flush=True)
asyncio.run(sandbox.run("import time; time.sleep(1000)"))
"""
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"began\n"
        below: list[int] = []
        while len(below) < 3:  # warden, inner warden, program
            below = descendants_of(caller.pid)
        handles = [os.pidfd_open(pid) for pid in below]
        caller.kill()
    for handle in handles:
        # Readable once the process has ended; a deadline in case it has not.
        assert _ends(handle)


def _ends(handle: int) -> bool:
    import select

    poll = select.poll()
    poll.register(handle, select.POLLIN)
    try:
        return bool(poll.poll(20_000))
    finally:
        os.close(handle)


def test_many_run_side_by_side_within_their_places(sandbox: Sandbox) -> None:
    async def all_of_them() -> list[str]:
        runs = await asyncio.gather(*(sandbox.run(f"print({i})") for i in range(12)))
        return [one.output for one in runs]

    assert asyncio.run(all_of_them()) == [f"{i}\n" for i in range(12)]


def test_an_isolation_that_is_not_there_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, said in ((0, "has no Landlock"), *((old, f"has version {old} of Landlock") for old in range(1, 6))):
        monkeypatch.setattr(kernel, "landlock_version", lambda version=version: version)
        with pytest.raises(UserFault, match=rf"{said}.*6 is needed.*Allow user namespaces \(sysctl"):
            Sandbox(LIMITS, isolation="filter")
    monkeypatch.undo()
    with pytest.raises(UserFault, match="one process"):
        Sandbox(SandboxLimits(may_start_processes=True), isolation="filter")


def test_no_isolation_at_all_has_to_be_said_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    sandbox = Sandbox(LIMITS, isolation="none")
    assert "unprotected" in caplog.text
    assert run(sandbox, "print(open('/etc/passwd').read()[:4])").output == "root\n"
    assert run(sandbox, "while True: pass").exit_code == -signal.SIGXCPU


def test_to_kill_the_warden_is_no_way_to_be_run_again() -> None:
    # Its own end comes with that of its warden, a moment later; what waits for it here would wait for good.
    kill = (
        "import os, signal\nfor pid in (os.getppid(), {0}): os.kill(pid, signal.SIGKILL)\n"
        "signal.pause()\nprint('alive')"
    )
    above = "int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])"
    result = run(Sandbox(LIMITS, isolation="none"), kill.format(above))
    assert result.exit_code is None
    assert "alive" not in result.output


def starts(*command: str) -> Callable[[str], list[str]]:
    return lambda root: list(command)


def test_a_sandbox_that_breaks_is_ours_and_not_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = PythonTool(isolation="auto")
    monkeypatch.setattr(warded, "boot", starts(sys.executable, "-c", "raise SystemExit('no')"))
    with pytest.raises(EpisodeInfraError, match="no"):
        asyncio.run(tool.run("print(1)"))
    monkeypatch.setattr(warded, "boot", starts("/nonexistent"))
    with pytest.raises(EpisodeInfraError, match="cannot be started"):
        asyncio.run(tool.run("print(1)"))


def test_a_warden_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox(SandboxLimits(wall_s=0.1))
    monkeypatch.setattr(warded, "GRACE_S", 0.3)
    monkeypatch.setattr(warded, "boot", starts("/bin/sleep", "1000"))
    with pytest.raises(SandboxFailedError, match="did not end"):
        asyncio.run(sandbox.run("print(1)"))


def test_an_interpreter_that_is_not_there_is_no_result(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/false\n")
    broken.chmod(0o755)
    with pytest.raises(UserFault, match="namespaces"):
        Sandbox(LIMITS, python=str(broken))


def test_a_user_who_is_not_root_has_the_same_protection(tmp_path: Path) -> None:
    """The system's interpreter stands in: this one may lie where only root can read."""
    if os.geteuid() != 0 or not Path("/usr/bin/python3").exists():
        pytest.skip("needs root to become somebody else, and an interpreter that everybody can read")
    script = textwrap.dedent("""
        import os, sys
        from penstock.backends.processes.sandbox.warded import WardedRun
        from penstock.backends.processes.sandbox.warden import WardenJob
        READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/bin", "/etc/ld.so.cache")
        for isolation in ("namespaces", "filter"):
            job = WardenJob(os.getpid(), isolation, "import os; print(os.getuid()); open('/etc/passwd')", sys.argv[1],
                            READABLE, (), 5.0, 1, 1 << 28, 4096, False)
            print(WardedRun(job, 4096).follow().output.split()[0::12])
    """)
    folder = Path(str(msgspec.__file__)).parents[1]
    if not os.access(folder, os.R_OK):
        pytest.skip("packages cannot be read by others")
    done = subprocess.run(
        ["/usr/bin/python3", "-c", script, os.path.realpath("/usr/bin/python3")],
        env={"PYTHONPATH": f"{Path(warded.IMPORT_ROOT)}:{folder}"},
        user=12345, group=12345, extra_groups=[], capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if "ModuleNotFoundError" in done.stderr or "ImportError" in done.stderr:
        pytest.skip("the system's interpreter is another version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'12345'") == 2


# --- the tool -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print(6 * 7)", "42"),
        ("```python\nprint(6 * 7)\n```", "42"),
        ("x = 1", "(the program ended without output)"),
        ("import sys; sys.exit(3)", "(the program ended with exit code 3)"),
        (
            "print('a', flush=True)\nwhile True: pass",
            "a\n(the program was ended: it used more than 1 seconds of CPU time)",
        ),
        ("import os; os.abort()", "(the program was ended by signal 6)"),
    ],
)
def test_the_model_reads_what_its_program_did(tool: PythonTool, code: str, says: str) -> None:
    assert asyncio.run(tool.call({"code": code})) == says


@pytest.fixture(scope="module")
def tool() -> PythonTool:
    return PythonTool(cpu_s=1, wall_s=60.0)


@pytest.mark.parametrize("arguments", [{}, {"code": 1}, {"code": ""}, {"program": "1"}, {"code": "1" * 70000}])
def test_malformed_arguments_are_told_to_the_model(tool: PythonTool, arguments: dict[str, object]) -> None:
    with pytest.raises(ToolError):
        asyncio.run(tool.call(arguments))


def test_the_middle_of_long_output_is_left_out() -> None:
    kept = KeptOutput(10)
    for _ in range(100):
        kept.add(b"abc")
    assert kept.text() == "abcab\n[... 290 bytes left out ...]\nbcabc"
    short = KeptOutput(10)
    short.add(b"0123456789")
    assert short.text() == "0123456789"
