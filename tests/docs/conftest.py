"""Makes the modules beside these tests importable, and gives each session the folder of a reader of the docs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import reader


@pytest.fixture(scope="session")
def readers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages speak of: a model, rows, functions, scenarios."""
    return reader.make_folder(tmp_path_factory.mktemp("reader"))


@pytest.fixture
def in_readers_folder(readers_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, as the current folder."""
    monkeypatch.chdir(readers_folder)
    return readers_folder
