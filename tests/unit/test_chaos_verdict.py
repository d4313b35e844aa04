"""What a chaos run tells of its faults."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.runtime.chaos.verdict import EventLogs

if TYPE_CHECKING:
    from pathlib import Path


def test_an_engine_whose_responses_are_short_works_from_its_first_that_ends(tmp_path: Path) -> None:
    """It reports progress after ``engines.progress_tokens``, which a short response never comes to."""
    (tmp_path / "events").mkdir()
    rows = [(7.2, "EngineOpened", ""), (7.3, "SampleIssued", "120/0"), (7.9, "GenerationEnded", "120/0")]
    lines = [json.dumps([at_s, "engine/0", 2, event, subject]) for at_s, event, subject in rows]
    (tmp_path / "events" / "engine-0-2.jsonl").write_text("\n".join(lines) + "\n")
    assert EventLogs(tmp_path).works_from_s("engine/0", 7.0) == 7.9
