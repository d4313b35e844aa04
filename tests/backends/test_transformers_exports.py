"""What transformers exports, kept: the same as it finds, and found again when a file of it is another."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

READS_ITS_MODELS = """
import os
from functools import lru_cache

@lru_cache
def define_import_structure(module_path, prefix=None):
    print("found", os.path.basename(str(module_path)), prefix)
    folder = os.path.dirname(module_path) if os.path.isfile(module_path) else module_path
    before = f"{prefix}." if prefix else ""
    files = [file for file in os.listdir(folder) if file.endswith(".py")]
    return {frozenset({"torch"}): {before + file[:-3]: {open(os.path.join(folder, file)).read()} for file in files}}
"""
IMPORTS = """
import penstock.backends.checkpoint.options
from transformers.utils.import_utils import define_import_structure as define
import transformers
folder = transformers.__path__[0]
whole = define(f"{folder}/models", prefix="models")
assert whole == {frozenset({"torch"}): {"models.__init__": {""}, "models.one": {CONTENT}}}, whole
whole[frozenset({"torch"})].clear()
assert define(f"{folder}/models/__init__.py") == {frozenset({"torch"}): {"__init__": {""}, "one": {CONTENT}}}
"""
TELLS = """
import penstock.backends.checkpoint.options
import transformers, transformers.models, transformers.models.qwen3
for module in (transformers, transformers.models, transformers.models.qwen3):
    missing = {name: sorted(backends) for name, backends in module._object_missing_backend.items()}
    print(sorted(module._class_to_module.items()), sorted(missing.items()))
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A transformers with one model, which says when it reads it."""
    files = {"__init__.py": "", "utils/__init__.py": "", "utils/import_utils.py": READS_ITS_MODELS}
    for name, content in (files | {"models/__init__.py": "", "models/one.py": "a"}).items():
        file = tmp_path / "small" / "transformers" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return tmp_path / "small"


def run(program: str, bytecode: Path, *paths: Path, **environment: str) -> str:
    """What a fresh process prints, with bytecode in this folder alone."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = inherited | {"PYTHONPYCACHEPREFIX": str(bytecode), "PYTHONPATH": path} | environment
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(small: Path, tmp_path: Path, content: str = "a", **environment: str) -> list[str]:
    """What of it was read, where a model has this content."""
    program = IMPORTS.replace("CONTENT", repr(content))
    return run(program, tmp_path / "bytecode", small, **environment).splitlines()


def test_the_models_are_read_once_and_then_no_more(small: Path, tmp_path: Path) -> None:
    assert imported(small, tmp_path) == ["found models None"]
    assert imported(small, tmp_path) == []


def test_a_model_that_is_another_is_read(small: Path, tmp_path: Path) -> None:
    imported(small, tmp_path)
    model = small / "transformers/models/one.py"
    facts = model.stat()
    model.write_text("b")
    os.utime(model, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert imported(small, tmp_path, "b") == ["found models None"]
    assert imported(small, tmp_path, "b") == []
    (small / "transformers/models/.two").write_text("no source")
    assert imported(small, tmp_path, "b") == []


@pytest.mark.parametrize("content", [b"", b"\xff", b'{"of": 1}', b'{"of": "0", "exports": []}'])
def test_what_is_damaged_or_of_other_files_is_found_anew(content: bytes, small: Path, tmp_path: Path) -> None:
    imported(small, tmp_path)
    [kept] = (tmp_path / "bytecode").rglob("*.exports")
    kept.write_bytes(content)
    assert imported(small, tmp_path) == ["found models None"]
    assert imported(small, tmp_path) == []


def test_it_is_kept_where_bytecode_is_and_only_there(small: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert imported(small, tmp_path, PYTHONDONTWRITEBYTECODE="1") == ["found models None"]
    assert list(tmp_path.rglob("*.exports")) == []


def test_a_transformers_without_such_a_function_is_imported_as_it_is(small: Path, tmp_path: Path) -> None:
    (small / "transformers/utils/import_utils.py").write_text("other = 1")
    program = "import penstock.backends.checkpoint.options\nfrom transformers.utils.import_utils import other"
    assert run(program, tmp_path / "bytecode", small) == ""


def test_the_installed_transformers_exports_what_it_did(tmp_path: Path) -> None:
    found, kept = (run(TELLS, tmp_path / "bytecode") for _ in range(2))
    assert list((tmp_path / "bytecode").rglob("*.exports"))
    without = run(TELLS.replace("import penstock.backends.checkpoint.options", ""), tmp_path / "bytecode")
    assert kept == found == without
    assert "Qwen3ForCausalLM" in without
