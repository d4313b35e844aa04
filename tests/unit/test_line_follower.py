"""A file that is read as it grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.runtime.observability.following import LineFollower

if TYPE_CHECKING:
    from pathlib import Path


def test_a_torn_line_that_is_cut_off_leaves_nothing_behind(tmp_path: Path) -> None:
    """As on a full disk: the run ends within a line, and the one that goes on cuts it off before it writes."""
    file = tmp_path / "metrics.jsonl"
    lines = LineFollower(file)
    assert lines.more() == []
    file.write_bytes(b'{"version": 1}\n{"vers')
    assert lines.more() == [b'{"version": 1}']
    file.write_bytes(b'{"version": 1}\n')
    assert lines.more() == []
    file.write_bytes(b'{"version": 1}\n{"version": 2}\n')
    assert lines.more() == [b'{"version": 2}']
