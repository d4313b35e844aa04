"""A reward model on a stock server: its scores are those of transformers, and those of the next server."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))

from planted_reward_model import plant_reward_model, planted_score

from penstock.backends.checkpoint.characters import character_tokenizer
from penstock.backends.engines.reward_model_options import RewardModelOptions
from penstock.backends.engines.served.base.reward_model import UnscorableTextError
from penstock.backends.engines.served.sglang.reward_model import (
    BIAS_FILE,
    ServerLostError,
    SglangScorer,
    open_sglang_reward_model,
)
from penstock.backends.engines.spec import RewardModelContext
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
TEXTS = ("see the bee", "e", "no such letter", "x" * 60 + "e", "abc")
TOLERANCE = 1e-3


def context(folder: Path, run_folder: Path) -> RewardModelContext:
    options = RewardModelOptions(path=str(folder), backend="sglang", device="cpu", sglang={"max_total_tokens": 4096})
    return RewardModelContext(
        name="reward_model/0", model_folder=folder, run_folder=run_folder, options=options, host="127.0.0.1"
    )


def test_scores_of_a_server_are_those_of_transformers(environment: SglangEnvironment, tmp_path: Path) -> None:
    plant_reward_model(tmp_path / "model", "e")
    ids = [list(character_tokenizer().encode(text).ids) for text in TEXTS]

    async def whole() -> list[float]:
        scorer = SglangScorer(context(tmp_path / "model", tmp_path), 500)
        await scorer.open()
        try:
            watching = asyncio.create_task(scorer.watch())
            found = list(await asyncio.gather(*map(scorer.score, ids)))
            with pytest.raises(UnscorableTextError, match="/classify was answered 400"):
                await scorer.score(ids[0] * 60)
            assert scorer._server is not None
            os.kill(scorer._server._main_pid, signal.SIGKILL)
            with pytest.raises(ServerLostError, match=r"logs/reward_model-0-sglang\.log"):
                await asyncio.wait_for(watching, 60)
        finally:
            await scorer.close(30.0)
        return found

    found = asyncio.run(whole())
    assert found == pytest.approx([planted_score(text, "e") for text in TEXTS], abs=TOLERANCE)
    assert (tmp_path / "reward_model" / "reward_model-0" / BIAS_FILE).is_file()  # without it: a number of each server


def test_a_model_that_the_server_does_not_know_is_refused(tmp_path: Path) -> None:
    plant_reward_model(tmp_path, "e")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForSequence", "MistralForSequence"))
    with pytest.raises(
        UserFault, match=r"reward_model\.backend: .* is MistralForSequenceClassification; set it to torch"
    ):
        open_sglang_reward_model(context(tmp_path, tmp_path))
