"""The user's cache of results: whole or not at all, digests, eviction, keys."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from penstock.backends import result_cache
from penstock.backends.result_cache import CACHE_VARIABLE, Kept, ResultCache, key_of, open_cache

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_kept_is_read_and_nothing_else(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path / "kind")
    assert cache.read("a") == Kept()
    assert not cache.has("a")
    cache.keep("a", b"content")
    assert cache.read("a") == Kept(b"content", tmp_path / "kind" / "a.bin")
    assert cache.has("a")
    assert cache.read("b") == Kept()
    assert [file.name for file in (tmp_path / "kind").iterdir()] == ["a.bin"]


@pytest.mark.parametrize("damage", ["a bit", "its end", "everything", "its name"])
def test_a_damaged_entry_is_refused_with_a_sentence(tmp_path: Path, damage: str) -> None:
    cache, file = ResultCache(tmp_path), tmp_path / "a.bin"
    cache.keep("a", b"content")
    data = file.read_bytes()
    match damage:
        case "a bit":
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "its end":
            file.write_bytes(data[:-1])
        case "everything":
            file.write_bytes(b"")
        case _:  # an entry that belongs to another key
            cache.keep("other", b"content")
            (tmp_path / "other.bin").rename(file)
    found = cache.read("a")
    assert found.content is None
    assert found.refusal == f"{file} is damaged (its digest is another), so what it kept is computed again"


def test_those_go_first_that_were_used_longest_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_cache, "MAX_TOTAL_BYTES", 2 * (result_cache.DIGEST_BYTES + 10))
    cache = ResultCache(tmp_path)
    for age_s, key in ((300, "a"), (200, "b")):
        cache.keep(key, bytes(10))
        os.utime(tmp_path / f"{key}.bin", (1e9 - age_s, 1e9 - age_s))
    assert cache.read("a").content == bytes(10)  # used now
    cache.keep("c", bytes(10))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.bin", "c.bin"]


def test_what_is_too_large_or_has_no_place_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    ResultCache(tmp_path / "file" / "kind").keep("a", b"content")
    assert ResultCache(tmp_path / "file" / "kind").read("a").content is None
    monkeypatch.setattr(result_cache, "MAX_ENTRY_BYTES", 6)
    ResultCache(tmp_path).keep("a", b"content")
    assert not ResultCache(tmp_path).has("a")


def test_the_variable_names_the_folder_or_switches_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert open_cache("kind") is None
    for variable, folder in ((CACHE_VARIABLE, tmp_path / "a"), ("XDG_CACHE_HOME", tmp_path / "b")):
        monkeypatch.delenv(CACHE_VARIABLE)
        monkeypatch.setenv(variable, str(folder))
        cache = open_cache("kind")
        assert cache is not None
        cache.keep("k", b"")
        assert [file.name for file in folder.rglob("k.bin")] == ["k.bin"]
        monkeypatch.setenv(CACHE_VARIABLE, "")


def test_a_key_is_of_all_its_parts_and_of_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_of({"a": "1", "b": b"2"})
    assert key == key_of({"b": "2", "a": b"1"})
    others = [key_of({"a": "1"}), key_of({"a": "1", "b": "3"}), key_of({"a": "1b", "": "2"})]
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    others.append(key_of({"a": "1", "b": b"2"}))
    monkeypatch.delenv("MKL_CBWR")
    for name in ("_code", "_processor"):
        with monkeypatch.context() as patched:
            patched.setattr(result_cache, name, lambda: "another")
            others.append(key_of({"a": "1", "b": b"2"}))
    with monkeypatch.context() as patched:
        patched.setattr(result_cache, "_version", str.upper)
        others.append(key_of({"a": "1", "b": b"2"}))
    assert len({key, *others}) == 1 + len(others)
