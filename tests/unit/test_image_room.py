"""What a run's folder of images may take of the disk."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from penstock.backends.vision.room import RECOUNTED, ImageRoom, NoRoomError

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 640
SHARE = round(LIMIT * RECOUNTED)


def test_what_lies_there_counts_and_what_is_refused_does_not(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(bytes(LIMIT - 10))
    room = ImageRoom(tmp_path, LIMIT)
    with pytest.raises(NoRoomError, match=re.escape("episode.max_images_gb (6.4e-07)")):
        room.add(11)
    room.add(10)
    (tmp_path / "new").write_bytes(bytes(10))
    with pytest.raises(NoRoomError):
        room.add(1)


def test_room_that_a_person_made_is_found(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(bytes(LIMIT))
    room = ImageRoom(tmp_path, LIMIT)
    with pytest.raises(NoRoomError):
        room.add(1)
    (tmp_path / "old").unlink()
    room.add(LIMIT)


def test_processes_that_do_not_know_of_each_other_go_over_by_their_share_at_most(tmp_path: Path) -> None:
    rooms = [ImageRoom(tmp_path / "images", LIMIT) for _ in range(3)]
    number = total = 0
    full = set[ImageRoom]()
    (tmp_path / "images").mkdir()
    while len(full) < len(rooms):
        number += 1
        room = rooms[number % len(rooms)]
        try:
            room.add(1)
        except NoRoomError:
            full.add(room)
            continue
        (tmp_path / "images" / str(number)).write_bytes(b"1")
        total += 1
    assert LIMIT <= total <= LIMIT + len(rooms) * SHARE


def test_a_folder_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    room = ImageRoom(tmp_path / "images", LIMIT)
    room.add(LIMIT)
    with pytest.raises(NoRoomError):
        room.add(LIMIT + 1)
