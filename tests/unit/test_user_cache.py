"""Where a user's caches are, and what is said where there is no home folder for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backends.engines.served.sglang.environment import environments_folder
from penstock.backends.result_cache import open_cache
from penstock.backends.user_cache import user_cache
from penstock.messages.errors import UserFault


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container under a number that nobody has."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    for variable in ("XDG_CACHE_HOME", "PENSTOCK_CACHE", "PENSTOCK_ENVS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_nothing_is_cached_and_what_needs_one_says_what_to_set() -> None:
    assert open_cache("models") is None
    with pytest.raises(UserFault, match="this user has no home folder; set PENSTOCK_ENVS, or HOME, to a folder"):
        environments_folder()


@pytest.mark.usefixtures("homeless")
def test_a_cache_that_is_named_needs_no_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache("anything") == tmp_path / "penstock"
    assert open_cache("models") is not None
