"""Makes the modules beside these tests importable: pytest's importlib mode leaves their folder off the path; and what
several files test with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def gateway_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that calls a tool, and then answers."""
    from gateway_cases import make_model

    folder = tmp_path_factory.mktemp("gateway_model")
    make_model(folder)
    return folder
