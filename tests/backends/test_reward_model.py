"""The embedded reward model: its scores by hand, alone and beside others, and what becomes of those that it has not."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
import torch
from planted_reward_model import plant_reward_model, planted_score

from penstock.backends.checkpoint.characters import PAD_ID, character_tokenizer
from penstock.backends.checkpoint.make import make_model
from penstock.backends.engines.reward_model_options import RewardModelOptions
from penstock.backends.engines.run_endpoints import FOLDER, RunEndpoints
from penstock.backends.engines.spec import RewardModelContext
from penstock.backends.engines.surroundings import Surroundings
from penstock.backends.engines.torch.reward_model import TorchScorer, open_torch_reward_model
from penstock.backends.rewards.functions import NoRewardError
from penstock.backends.rewards.reward_model import ModelReward
from penstock.backends.rewards.service_options import ModelScoreOptions
from penstock.messages.commands import OpenEngine
from penstock.messages.errors import UserFault
from penstock.messages.local import EngineOpened, ScoringMoved

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.backends.engines.served.base.reward_model import Conversation

WAIT_S = 60.0
TOLERANCE = 1e-4
TEXTS = ("see the bee", "e", "no such letter", "0e1e2e", "x" * 60 + "e", "abc")


def ids(text: str) -> list[int]:
    return list(character_tokenizer().encode(text).ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    plant_reward_model(folder, "e")
    return folder


def scorer(folder: Path, *, slots: int = 64, max_tokens: int = 4096) -> TorchScorer:
    options = RewardModelOptions(path=str(folder), slots=slots, max_tokens=max_tokens)
    return TorchScorer(folder, options, torch.device("cpu"))


async def all_scores(opened: TorchScorer, texts: list[list[int]]) -> list[float]:
    await opened.open()
    found = list(await asyncio.gather(*map(opened.score, texts)))
    await opened.close(1.0)
    return found


@pytest.mark.parametrize("options", [{}, {"slots": 1}, {"max_tokens": 13}])
def test_a_score_is_what_it_is_by_hand_whatever_else_is_in_its_pass(model: Path, options: dict[str, int]) -> None:
    found = asyncio.run(all_scores(scorer(model, **options), [ids(text) for text in TEXTS]))
    assert found == pytest.approx([planted_score(text, "e") for text in TEXTS], abs=TOLERANCE)


def test_a_text_that_ends_in_the_padding_token_is_read_to_its_end(model: Path) -> None:
    ending, longer = [*ids("ee"), PAD_ID], ids("see the bee")
    (alone,) = asyncio.run(all_scores(scorer(model), [ending]))
    beside, _ = asyncio.run(all_scores(scorer(model), [ending, longer]))
    assert alone == pytest.approx(beside, abs=TOLERANCE)
    assert alone == pytest.approx(planted_score("ee?", "e"), abs=TOLERANCE)


def test_a_language_model_without_the_head_is_refused(tmp_path: Path) -> None:
    make_model("xs", tmp_path, 0)
    with pytest.raises(
        UserFault, match=r"reward_model\.path: .* has no weights for score\.weight, so its scores would"
    ):
        asyncio.run(scorer(tmp_path).open())


class Opened:
    """A reward model that listens, and the reward function that asks it."""

    def __init__(self, model: Path, run: Path, *, max_context: int | None = None, chat_template: bool = True) -> None:
        self.run = run
        self.said: SimpleQueue[Any] = SimpleQueue()
        settings = RewardModelOptions(
            path=str(model), device="cpu", max_context=max_context, chat_template=chat_template
        )
        self.backend = open_torch_reward_model(
            RewardModelContext(
                name="reward_model/0", model_folder=model, run_folder=run, options=settings, host="127.0.0.1"
            )
        )
        self.backend.start(self.said.put, self.said.put)
        self.backend.execute(OpenEngine())
        assert self.said.get(timeout=WAIT_S) == EngineOpened(num_slots=settings.slots)

    def ask(self, response: str, messages: list[dict[str, object]] | None = None, timeout_s: float = WAIT_S) -> object:
        asked = ModelScoreOptions(timeout_s=timeout_s, num_retries=0)
        reward = ModelReward(asked, Surroundings(run_folder=str(self.run)))

        async def asking() -> object:
            try:
                return await reward(messages=messages, prompt="so: ", response=response, group_id=1, index=0)
            finally:
                if (session := reward._client._session) is not None:
                    await session.close()

        return asyncio.run(asking())


@pytest.fixture(scope="module")
def opened(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    found = Opened(model, tmp_path_factory.mktemp("run"), max_context=64)
    yield found
    found.backend.close(10.0)
    assert not list((found.run / FOLDER).iterdir())


def test_a_response_is_scored_behind_its_messages_in_the_models_own_template(opened: Opened) -> None:
    messages: list[dict[str, object]] = [{"role": "system", "content": "hey"}, {"role": "user", "content": "see?"}]
    whole = "system: hey\nuser: see?\nassistant: eeee\n"
    assert opened.ask("eeee", messages) == pytest.approx(planted_score(whole, "e"), abs=TOLERANCE)
    plain = "user: so: \nassistant: bee\n"
    assert opened.ask("bee") == pytest.approx(planted_score(plain, "e"), abs=TOLERANCE)
    gauges = {each.name: each.value for each in opened.backend.gauges()}
    assert (gauges["reward_model/running"], gauges["reward_model/scored"]) == (0, 2)
    moves = [opened.said.get(timeout=WAIT_S) for _ in range(4)]
    assert moves == [ScoringMoved(num_open=count) for count in (1, 0, 1, 0)]


def test_what_cannot_be_scored_has_a_reason_and_no_reward(opened: Opened) -> None:
    with pytest.raises(NoRewardError, match=r"it has 87 tokens for the reward model, which takes 64"):
        opened.ask("e" * 64)
    with pytest.raises(NoRewardError, match="the reward model's tokenizer refuses it"):
        opened.ask("é")


def test_without_a_template_the_response_stands_behind_the_prompt(model: Path, tmp_path: Path) -> None:
    found = Opened(model, tmp_path, chat_template=False)
    try:
        assert found.ask("bee") == pytest.approx(planted_score("so: bee", "e"), abs=TOLERANCE)
    finally:
        found.backend.close(10.0)


def test_a_number_that_is_none_is_no_reward(tmp_path: Path) -> None:
    plant_reward_model(tmp_path / "model", "e", factor=float("inf"))
    found = Opened(tmp_path / "model", tmp_path)
    try:
        with pytest.raises(NoRewardError, match="the reward model says inf"):
            found.ask("abc")
    finally:
        found.backend.close(10.0)


def test_a_pass_that_fails_ends_the_process_and_another_model_is_waited_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(asked: Conversation) -> list[int]:
        return [5, 1000]

    found = Opened(model, tmp_path)
    monkeypatch.setattr(found.backend._tokens, "of", broken)
    with pytest.raises(NoRewardError, match="HTTP 500"):
        found.ask("bee", timeout_s=2.0)
    found.said.get(timeout=WAIT_S)
    assert isinstance(found.said.get(timeout=WAIT_S), IndexError)
    found.backend.close(10.0)
    assert not RunEndpoints("reward_model", Surroundings(run_folder=str(tmp_path))).now()
    with pytest.raises(NoRewardError, match="there is no engine to ask at the moment"):
        found.ask("bee", timeout_s=0.5)
