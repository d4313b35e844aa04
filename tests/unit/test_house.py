"""The rules of the house: who imports whom, what is linked and generated, and that links in the docs lead somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.runtime.cli.docs import GENERATED

if TYPE_CHECKING:
    from collections.abc import Iterator

HOUSE = Path(__file__).parents[2]
PACKAGES = ("actors", "backends", "benchmarks", "messages", "runtime", "scenarios")
MODULES = ("api.py",)
"""That are linked and packed as the packages are."""
MAY_IMPORT = {
    "messages": {"messages"},
    "actors": {"actors", "messages"},
    "backends": {"backends", "messages"},
}
"""Of our own packages. The others may import all of them."""
IMPURE = {"ray", "zmq", "torch", "aiohttp", "time", "random", "asyncio", "threading", "socket", "subprocess"}
NO_INPUT_OR_OUTPUT = {"actors": IMPURE, "messages": IMPURE}

FOREIGN = re.compile(
    r"/(?:work|root|opt|home|Users)/\w"  # a path of somebody's machine
    r"|pypi\.org|pythonhosted|download\.pytorch|registry\.npmjs"  # where packages come from is pip's business
)
CATCHES_EVERYTHING = {
    "backends/data/own_source/child.py": "the user's class may raise anything, and that is its answer",
    "backends/data/tokenizer.py": "the tokenizers library raises Exception itself",
    "backends/episodes/functions/worker.py": "the user's code may raise anything, and that is how its episode ends",
    "runtime/preflight/function_trial.py": "the user's code may raise anything while it loads: that is what is told",
    "backends/processes/user_code.py": "an exception of the user's may not even be able to say what it is",
    "backends/rewards/worker.py": "the user's code may raise anything, and that is its answer",
    "runtime/contracts/checks.py": "the user's code may raise anything, and that is what a contract finds",
    "runtime/contracts/playing.py": "the user's code may raise anything, and that is how its episode ends",
    "runtime/observability/tracker_process.py": "a tracker may raise anything, which is counted and told",
    "runtime/run/replay.py": "whatever a machine raises is what its user looks for, and the answer",
    "runtime/hosts/driver/main.py": "the edge of a process: the launcher tells where the story is",
    "runtime/hosts/processes/actor_process.py": "the edge of a process: whatever it is, the supervisor hears the story",
}
"""Where a broad handler that neither raises nor hands the error on has a reason."""

UNPICKLES = {
    "backends/learners/megatron/checkpoint/dist_format.py": "a file of megatron-core's format, and only by a list of "
    "classes that describe tensors: tests/megatron/test_megatron_checkpoints.py has one that names another",
}
"""Where something is unpickled for a reason."""


def sources(folder: str) -> list[Path]:
    return sorted((HOUSE / folder).rglob("*.py"))


def tracked_files() -> list[Path]:
    """What is in the repository, or would be: tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=HOUSE, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return [file for line in listed.stdout.splitlines() if (file := HOUSE / line).is_file() and not file.is_symlink()]


@cache
def imports(file: Path) -> tuple[tuple[int, str], ...]:
    """Line and full name of everything that a file imports, also inside functions; read once for all tests."""
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            yield from ((node.lineno, f"{dots}{node.module or ''}.{alias.name}") for alias in node.names)


def own_package(name: str) -> str:
    """``actors`` for ``penstock.actors.buffer``; empty for what is not ours, ``penstock`` for the bare package."""
    parts = name.split(".")
    if parts[0] != "penstock":
        return ""
    return parts[1] if len(parts) > 1 and (HOUSE / parts[1]).is_dir() else "penstock"


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_packages_import_only_what_lies_below_them(package: str) -> None:
    allowed = MAY_IMPORT[package]
    wrong = [
        f"{file.relative_to(HOUSE)}:{line} imports {name}"
        for file in sources(package)
        for line, name in imports(file)
        if own_package(name) not in ("", *allowed)
    ]
    assert not wrong


@pytest.mark.parametrize("package", sorted(NO_INPUT_OR_OUTPUT))
def test_state_machines_and_messages_know_no_clock_chance_or_framework(package: str) -> None:
    forbidden = NO_INPUT_OR_OUTPUT[package]
    wrong = [
        f"{file.relative_to(HOUSE)}:{line} imports {name}"
        for file in sources(package)
        for line, name in imports(file)
        if name.split(".")[0] in forbidden
    ]
    assert not wrong


def test_imports_are_absolute_and_go_through_the_one_name() -> None:
    wrong = [
        f"{file.relative_to(HOUSE)}:{line} imports {name}"
        for folder in (*PACKAGES, "tests")
        for file in sources(folder)
        for line, name in imports(file)
        if name.startswith(".") or name.split(".")[0] in PACKAGES
    ]
    assert not wrong


def test_the_import_rules_see_a_violation(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def f():\n    from penstock.runtime import options\n    import torch.nn\nfrom . import x\n")
    found = dict(imports(file))
    assert own_package(found[2]) == "runtime"
    assert found[3] == "torch.nn"
    assert found[4].startswith(".")


def test_every_package_is_linked_and_packed() -> None:
    links = {link.name: link for link in (HOUSE / "src" / "penstock").iterdir() if link.is_symlink()}
    for name, link in links.items():
        assert link.readlink() == Path("../..") / name
        assert (link / "__init__.py").is_file() or link.suffix == ".py"
    pyproject = tomllib.loads((HOUSE / "pyproject.toml").read_text())
    # Through the links. What is included by force is copied beside an editable install as well, and gets old there.
    assert pyproject["tool"]["hatch"]["build"]["targets"]["wheel"] == {
        "only-include": ["src/penstock"], "sources": ["src"],
    }  # fmt: skip
    top_level = {file.parent.name for file in HOUSE.glob("*/__init__.py")}
    assert top_level == set(PACKAGES)
    assert set(links) == {*PACKAGES, *MODULES}


@pytest.mark.parametrize("folder", PACKAGES)
def test_every_folder_with_code_is_a_package(folder: str) -> None:
    missing = {
        str(file.parent.relative_to(HOUSE)) for file in sources(folder) if not (file.parent / "__init__.py").exists()
    }
    assert not missing


UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
PICKLING_CALLS = {"recv_pyobj", "send_pyobj", "recv_serialized", "load_pickle"}


def pickling(file: Path) -> Iterator[str]:
    """Where a file could turn bytes into objects of any kind."""
    for line, name in imports(file):
        if UNPICKLERS & set(name.split(".")):
            yield f"{file.name}:{line} imports {name}"
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in PICKLING_CALLS:
            yield f"{file.name}:{node.lineno} calls {node.attr}"


def test_no_pickle_crosses_the_network() -> None:
    files = [file for folder in PACKAGES for file in sources(folder) if str(file.relative_to(HOUSE)) not in UNPICKLES]
    assert not [found for file in files for found in pickling(file)]


def test_the_rule_for_pickles_sees_a_violation(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "def f(socket):\n    from cloudpickle import loads\n    socket.recv_pyobj()\nimport ray.cloudpickle\n"
    )
    assert sorted(pickling(file)) == [
        "bad.py:2 imports cloudpickle.loads",
        "bad.py:3 calls recv_pyobj",
        "bad.py:4 imports ray.cloudpickle",
    ]


def test_what_is_caught_without_a_name_is_raised_again_or_handed_on() -> None:
    wrong = [
        f"{file.relative_to(HOUSE)}:{handler.lineno}"
        for folder in PACKAGES
        for file in sources(folder)
        if "supervis" not in file.name and str(file.relative_to(HOUSE)) not in CATCHES_EVERYTHING
        for handler in ast.walk(ast.parse(file.read_text()))
        if isinstance(handler, ast.ExceptHandler) and catches_everything(handler) and not hands_on(handler)
    ]
    assert not wrong


def catches_everything(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(part is None or getattr(part, "id", "") in ("Exception", "BaseException") for part in caught)


def hands_on(handler: ast.ExceptHandler) -> bool:
    """Whether it raises, or calls something named ``fail`` with the error."""
    for node in ast.walk(handler):
        match node:
            case ast.Raise():
                return True
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Name(id=error)]):
                if name in ("fail", "_fail") and error == handler.name:
                    return True
            case _:
                pass
    return False


def test_the_rule_for_handlers_sees_a_violation() -> None:
    def handlers(text: str) -> list[ast.ExceptHandler]:
        return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ExceptHandler)]

    swallowed = handlers("try: f()\nexcept: pass\ntry: f()\nexcept (OSError, Exception) as e: log(e)")
    assert [catches_everything(handler) for handler in swallowed] == [True, True]
    assert not any(hands_on(handler) for handler in swallowed)
    handed_on = handlers("try: f()\nexcept BaseException as e: self._fail(e)\ntry: f()\nexcept Exception: raise")
    assert all(hands_on(handler) for handler in handed_on)


SERVER_WORDS = re.compile(
    r"\bweb\.(?:Application|AppRunner|TCPSite|run_app)\(|\bwsgiref\b|\bhttp\.server\b|\bmake_wsgi_app\b|\buvicorn\.run\("
)
SERVERS = {"backends/processes/http_server.py"}
"""Where the bounds of every HTTP server are."""


def test_every_http_server_has_the_same_bounds() -> None:
    found = {
        str(path.relative_to(HOUSE))
        for package in ("actors", "backends", "messages", "runtime")
        for path in (HOUSE / package).rglob("*.py")
        if SERVER_WORDS.search(path.read_text())
    }
    assert found == SERVERS


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_generated_pages_are_up_to_date(name: str) -> None:
    there = (HOUSE / "docs" / name).read_text(encoding="utf-8")
    assert there == GENERATED[name](HOUSE / "docs"), f"docs/{name} is out of date: run `make docs`"


def test_links_in_the_documentation_lead_somewhere() -> None:
    pages = [file for file in tracked_files() if file.suffix == ".md"]
    assert HOUSE / "README.md" in pages
    broken = [
        f"{page.relative_to(HOUSE)}: {target}"
        for page in pages
        for target in links(page.read_text(encoding="utf-8"))
        if not leads_somewhere(page, target)
    ]
    assert not broken


def links(text: str) -> Iterator[str]:
    """Everything that a page links to inside this repository, code blocks left out."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for markdown, html in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", prose):
        target = markdown or html
        if not re.match(r"https?://", target):
            yield target


def leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    if not file.exists():
        return False
    if not anchor:
        return True
    headings = re.findall(r"^#+ +(.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_what_the_readme_names_exists() -> None:
    readme = (HOUSE / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*##", (HOUSE / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", readme)) | set(re.findall(r"^make ([a-z-]+)", readme, re.M)) <= targets
    for scenario in re.findall(r"scenarios/\w+\.yaml", readme):
        assert (HOUSE / scenario).is_file(), scenario


def test_no_file_names_a_machine_or_a_package_index() -> None:
    wrong: list[str] = []
    for file in set(tracked_files()) - {Path(__file__).resolve()}:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        for number, line in enumerate(lines, start=1):
            if FOREIGN.search(line):
                wrong.append(f"{file.relative_to(HOUSE)}:{number}: {line.strip()}")
    assert not wrong
