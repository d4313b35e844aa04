"""Rows of reasoning-gym keep their exact form on the way to its own scorer."""
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import msgspec
import pytest

from penstock.backends.data.generated import marked, reasoning_gym_rows, unmarked
from penstock.backends.data.problems import DataError

AS_MANY = 3


@pytest.mark.parametrize("name", ["arc_agi", "rearc", "chain_sum", "sudoku", "countdown", "word_ladder"])
def test_a_checker_judges_the_carried_entry_as_the_original(name: str) -> None:
    """``arc_agi`` and ``rearc`` compare with tuples, which JSON does not have."""
    pytest.importorskip("reasoning_gym")
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    original = create_dataset(name, size=AS_MANY, seed=5)
    dataset, config = DATASETS[name]
    score = dataset(config=config()).score_answer
    rows = list(reasoning_gym_rows(f"reasoning_gym:{name}:{AS_MANY}", f"{name}:{AS_MANY}", seed=5))
    assert len(rows) == AS_MANY
    for index, row in enumerate(rows):
        entry = original[index]
        carried = unmarked(msgspec.json.decode(msgspec.json.encode(row.metadata["entry"])))
        assert isinstance(carried, dict)
        assert carried == entry
        assert row.columns == {"prompt": entry["question"], "label": entry["answer"]}
        assert score(entry["answer"], carried) == original.score_answer(entry["answer"], entry) == 1.0


def test_without_the_extra_the_rows_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> None:
        del name

    monkeypatch.setattr("importlib.util.find_spec", find_nothing)
    wanted = r"^reasoning_gym:chain_sum:2: reasoning-gym is not installed; .*: pip install -e \"\.\[reasoning-gym\]\"$"
    with pytest.raises(DataError, match=wanted):
        next(reasoning_gym_rows("reasoning_gym:chain_sum:2", "chain_sum:2", seed=5))


@pytest.mark.parametrize(
    "value",
    [
        {"a": (1, (2, 3)), "b": [{"c": ()}]},
        {1: "x", (1, 2): [None, 2.5, True]},
        {"s": {1, 2}, "t": set()},
        {},
        [],
        {"plain": {"nested": ["text"]}},
    ],
)
def test_marking_survives_json(value: object) -> None:
    assert unmarked(msgspec.json.decode(msgspec.json.encode(marked(value)))) == value
