"""Building SGLang's environment, with wheels of a few lines in place of gigabytes; pip and venv are the real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from typing import TYPE_CHECKING

import pytest

from penstock.backends.engines.served.sglang import environment as places
from penstock.backends.engines.served.sglang.environment import (
    SGLANG_VERSION,
    build_command,
    default_folder,
    find_environment,
    has_cuda_gpu,
    lock_digest,
    pins,
    read_mark,
)
from penstock.backends.engines.served.sglang.environment_build import Progress, build_environment
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

SERVER = {
    "sglang/__init__.py": f"__version__ = {SGLANG_VERSION!r}\nimport sgl_kernel, stand_in_marker\n",
    "sglang/srt/__init__.py": "",
    "sglang/srt/entrypoints/__init__.py": "",
    "sglang/srt/entrypoints/http_server.py": "",
    "sglang/srt/managers/__init__.py": "",
    "sglang/srt/managers/scheduler.py": "import sys\nassert 'stand_in_marker' in sys.modules\n",
}
TORCH = """
__version__ = "2.13.0+cpu"
class version: cuda = {cuda!r}
class cuda: device_count = staticmethod(lambda: 0)
"""


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    information = f"{name}-{version}.dist-info"
    files = files | {
        f"{information}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: no-such-package\n"
        ),
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{information}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in (files | {f"{information}/RECORD": record}).items():
            wheel.writestr(file, text)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only packages that pip can find, and a lock that names them."""
    folder, locks = tmp_path / "wheels", tmp_path / "locks"
    folder.mkdir()
    locks.mkdir()
    make_wheel(folder, "sglang", SGLANG_VERSION, SERVER)
    make_wheel(folder, "torch", "2.13.0+cpu", {"torch/__init__.py": TORCH.format(cuda=None)})
    (locks / "cpu.txt").write_text(f"# two packages\nsglang=={SGLANG_VERSION}\ntorch==2.13.0+cpu\n")
    monkeypatch.setattr(places, "_LOCKS", locks)
    monkeypatch.setenv("PENSTOCK_ENVS", str(tmp_path / "envs"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    folder = tmp_path / "stand_ins"
    folder.mkdir()
    (folder / "sgl_kernel.py").write_text("")
    (folder / "stand_in_marker.py").write_text("")
    return folder


@pytest.mark.sglang
def test_an_environment_is_ready_once_the_server_could_be_imported(wheels: Path, stand_ins: Path) -> None:
    steps: list[Progress] = []
    built = build_environment(stand_ins=stand_ins, report=steps.append)
    assert not built.was_ready
    assert built.environment == find_environment(is_cpu=True) == (built.folder / "bin" / "python", True, SGLANG_VERSION)
    assert built.environment.variables["SGLANG_USE_CPU_ENGINE"] == "1"
    assert steps[0].text == "making a virtual environment"
    assert max(step.num_packages for step in steps) == len(pins(is_cpu=True)) == 2

    assert build_environment(stand_ins=stand_ins).was_ready
    (stand_ins / "stand_in_marker.py").write_text("changed = True\n")
    (stand_ins / "sgl_kernel.py").unlink()
    (stand_ins / "stand_in_kernel.py").write_text("import sys\nsys.modules['sgl_kernel'] = sys\n")
    steps.clear()
    assert not build_environment(stand_ins=stand_ins, report=steps.append).was_ready
    assert [step.text for step in steps] == ["installing the stand-ins", "importing the server in it"]
    (packages,) = built.folder.glob("lib/python*/site-packages")
    assert {file.name for file in packages.glob("s*.py")} == {"stand_in_kernel.py", "stand_in_marker.py"}
    assert build_environment(stand_ins=stand_ins).was_ready

    lock = places.lock_file(is_cpu=True)
    lock.write_text(lock.read_text().replace("torch==2.13.0+cpu", "torch==2.99.0+cpu"))
    with pytest.raises(UserFault, match=r"was built for another version of Penstock; build it anew with:"):
        find_environment(is_cpu=True)
    with pytest.raises(UserFault, match=r"pip finds no torch for the CPU: .*PIP_EXTRA_INDEX_URL"):
        build_environment(stand_ins=stand_ins)
    with pytest.raises(UserFault, match=r"is not whole: its building was cut off or goes on"):
        find_environment(is_cpu=True)


@pytest.mark.sglang
def test_torch_for_cuda_is_not_taken_for_the_cpu(wheels: Path, stand_ins: Path) -> None:
    make_wheel(wheels, "torch", "2.13.0+cpu", {"torch/__init__.py": TORCH.format(cuda="13.0")})
    with pytest.raises(UserFault, match=r"torch 2\.13\.0\+cpu .* is a build for CUDA, not for the CPU"):
        build_environment(stand_ins=stand_ins)
    with pytest.raises(UserFault, match="is not whole"):
        find_environment(is_cpu=True)


@pytest.mark.sglang
def test_a_build_that_is_killed_is_never_ready_and_the_next_waits_until_its_installer_is_gone(
    wheels: Path, stand_ins: Path, tmp_path: Path
) -> None:
    """pip finds its packages behind a pipe that nobody writes to, until the builder has been killed."""
    gate = wheels / "gate.txt"
    os.mkfifo(gate)
    locks = tmp_path / "locks"
    lock_text = (locks / "cpu.txt").read_text()
    (locks / "cpu.txt").write_text(lock_text + f"-r {gate}\n")
    program = f"""
        from pathlib import Path
        from penstock.backends.engines.served.sglang import environment
        from penstock.backends.engines.served.sglang.environment_build import build_environment
        environment._LOCKS = Path({str(locks)!r})
        build_environment(stand_ins=Path({str(stand_ins)!r}), report=lambda step: print(step.text, flush=True))
    """
    builder = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert builder.stdout is not None
    assert [builder.stdout.readline().strip() for _ in range(2)] == [
        "making a virtual environment", "asking the package index",
    ]  # fmt: skip
    builder.send_signal(signal.SIGKILL)
    builder.communicate(timeout=60)
    writer = gate.open("w")  # as soon as the installer reads
    (locks / "cpu.txt").write_text(lock_text)
    with pytest.raises(UserFault, match="is not whole"):
        find_environment(is_cpu=True)
    seen: list[str] = []

    def let_installer_go(step: Progress) -> None:
        seen.append(step.text)
        writer.close()

    assert not build_environment(stand_ins=stand_ins, report=let_installer_go).was_ready
    assert seen[0] == "waiting for another process that builds it"
    assert find_environment(is_cpu=True).version == SGLANG_VERSION


def test_nothing_that_is_not_ours_is_overwritten(wheels: Path, stand_ins: Path, tmp_path: Path) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.txt").write_text("three years")
    with pytest.raises(UserFault, match=r"there is something else at this place.*choose another"):
        build_environment(folder=folder, stand_ins=stand_ins, recreate=True)
    assert (folder / "thesis.txt").read_text() == "three years"


@pytest.mark.skipif(has_cuda_gpu(), reason="this machine has a GPU")
def test_without_a_gpu_the_builder_says_what_is_missing(wheels: Path) -> None:
    with pytest.raises(UserFault, match=r"has no NVIDIA GPU.*--stand-ins tests/sglang/stand_ins"):
        build_environment()
    assert read_mark(default_folder(is_cpu=True)) is None


def test_what_cannot_be_used_is_refused_with_what_to_do(
    wheels: Path, stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserFault, match=r"no environment .* for CUDA at .*: penstock env sglang$"):
        find_environment(is_cpu=False)
    with pytest.raises(UserFault, match=rf"--folder {tmp_path}/here --stand-ins tests/sglang/stand_ins$"):
        find_environment(tmp_path / "here", is_cpu=True)
    with pytest.raises(UserFault, match="no Python module in it"):
        build_environment(stand_ins=wheels)
    with pytest.raises(UserFault, match="is no Python that can make virtual environments"):
        build_environment(stand_ins=stand_ins, python=tmp_path / "python")
    (tmp_path / "a_file").write_text("")
    with pytest.raises(UserFault, match=r"a_file.*: not a directory; the environment needs a place"):
        build_environment(stand_ins=stand_ins, folder=tmp_path / "a_file" / "envs" / "cpu")
    monkeypatch.delenv("PENSTOCK_ENVS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder(is_cpu=False) == tmp_path / "penstock" / "envs" / f"sglang-{SGLANG_VERSION}-cuda"
    assert build_command(default_folder(is_cpu=False), is_cpu=False) == "penstock env sglang"


@pytest.mark.parametrize("is_cpu", [True, False])
def test_the_shipped_locks_pin_every_package_once_and_the_server_itself(is_cpu: bool) -> None:
    names = [pin.partition("==")[0] for pin in pins(is_cpu=is_cpu)]
    assert len(set(names)) == len(names)
    assert all("==" in pin and pin == pin.lower() for pin in pins(is_cpu=is_cpu))
    assert f"sglang=={SGLANG_VERSION}" in pins(is_cpu=is_cpu)
    assert any(pin.startswith("torch==") and pin.endswith("+cpu") == is_cpu for pin in pins(is_cpu=is_cpu))
    assert lock_digest(is_cpu=True) != lock_digest(is_cpu=False)
