"""Rows that hold their responses: what becomes of each form, and what a user is told about bad ones."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock.backends.checkpoint.make import END_ID, END_TOKEN, SYMBOLS, character_tokenizer
from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.options import PUSHED, DataOptions
from penstock.backends.data.problems import DataError
from penstock.backends.data.pushed.forms import PushedGroup
from penstock.backends.data.pushed.reading import open_reader
from penstock.backends.data.recorded_rows import RecordedSettings
from penstock.backends.data.row import BadColumnError
from penstock.messages.arrays import floats_view, tokens_view
from penstock.messages.samples import Loss, Reward, VersionSpan

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.data.dataset import Dataset

MAX_CONTEXT = 48
TOKENIZER = character_tokenizer()
END = END_TOKEN
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% if m.role == 'assistant' %}</s>+{% else %}+{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The character tokenizer with a chat template: ``uQ+aANSWER</s>+``, where ``</s>`` ends a turn."""
    path = tmp_path_factory.mktemp("model")
    TOKENIZER.save(str(path / "tokenizer.json"))
    config = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE.replace("</s>", END)}))
    return path


def load(
    tmp_path: Path, folder: Path, *rows: object, size: int = 1, settings: dict[str, Any] | None = None, **data: object
) -> Dataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = RecordedSettings(size, 24, are_all_recorded=True, imitates=False)._replace(**(settings or {}))
    options = msgspec.convert({"path": str(path), **data}, DataOptions)
    return load_dataset(options, folder, seed=0, max_context=MAX_CONTEXT, recorded=given, keeps_responses=True)


def text_of(tokens: bytes) -> str:
    return "".join(SYMBOLS[token] for token in tokens_view(tokens))


def test_a_text_ends_with_the_end_token_and_nobody_knows_its_log_probs(tmp_path: Path, folder: Path) -> None:
    dataset = load(tmp_path, folder, {"prompt": "ab=", "response": "ba"}, settings={"imitates": True})
    prompt = dataset.prompt(0, 0)
    assert (prompt.is_recorded, prompt.loss, text_of(prompt.tokens)) == (True, Loss.SUPERVISED, "ab=")
    (sample,) = dataset.responses(0)
    assert text_of(sample.part.tokens) == f"ba{END}"
    assert all(math.isnan(value) for value in floats_view(sample.part.logprobs))
    assert (sample.reward, sample.is_truncated, sample.part.loss_mask) == (None, False, b"")


def test_token_ids_keep_their_log_probs_and_their_reward_and_are_not_ended(tmp_path: Path, folder: Path) -> None:
    row = {"prompt": "a=", "response": [[5, 6, END_ID], [7, 8]], "lp": [[-1.0, -2.0, -0.5], [-3, -4]], "r": [1, 0.25]}
    keys = {"logprobs_key": "lp", "reward_key": "r"}
    dataset = load(tmp_path, folder, row, size=2, recorded=keys, settings={"ratio_objective": "grpo"})
    first, second = dataset.responses(0)
    assert [*tokens_view(first.part.tokens)] == [5, 6, END_ID]
    assert [*floats_view(first.part.logprobs)] == [-1.0, -2.0, -0.5]
    assert (first.reward is not None and first.reward.value, first.is_truncated) == (1.0, False)
    assert (second.reward is not None and second.reward.value, second.is_truncated) == (0.25, True)
    assert dataset.prompt(0, 0).loss is Loss.OBJECTIVE


def test_a_verdict_is_a_reward_of_one_or_zero(tmp_path: Path, folder: Path) -> None:
    rows = [{"prompt": "a=", "response": "b", "good": True}, {"prompt": "b=", "response": "c", "good": False}]
    dataset = load(tmp_path, folder, *rows, recorded={"reward_key": "good"})
    assert [dataset.responses(row)[0].reward for row in range(2)] == [Reward(value=1.0), Reward(value=0.0)]


def test_a_pair_is_a_group_of_two_with_rewards_one_and_zero(tmp_path: Path, folder: Path) -> None:
    dataset = load(tmp_path, folder, {"prompt": "a=", "chosen": "b", "rejected": "c"}, size=2)
    samples = dataset.responses(0)
    assert [text_of(sample.part.tokens) for sample in samples] == [f"b{END}", f"c{END}"]
    assert [sample.reward and sample.reward.value for sample in samples] == [1.0, 0.0]


def test_every_turn_of_the_assistant_is_trained_up_to_its_end_and_nothing_else(tmp_path: Path, folder: Path) -> None:
    turns = [("user", "1"), ("assistant", "xy"), ("user", "2"), ("assistant", "z")]
    row = {"prompt": [{"role": role, "content": content} for role, content in turns]}
    dataset = load(tmp_path, folder, row, chat_template=True, settings={"imitates": True})
    assert text_of(dataset.prompt(0, 0).tokens) == "u1+a"
    (sample,) = dataset.responses(0)
    tokens = [SYMBOLS[token] for token in tokens_view(sample.part.tokens)]
    assert "".join(tokens) == f"xy{END}+u2+az{END}"
    trained = [token for token, made in zip(tokens, sample.part.loss_mask, strict=True) if made]
    assert trained == ["x", "y", END, "z", END]


def test_messages_that_are_pushed_are_trained_as_those_of_rows_with_the_version_that_made_them(folder: Path) -> None:
    options = DataOptions(source=PUSHED, chat_template=True, label_key=None)
    settings = RecordedSettings(1, 24, are_all_recorded=True, imitates=False)
    reader = open_reader(options, settings, folder, max_context=MAX_CONTEXT)
    turns = [{"role": "assistant", "content": "xy"}, {"role": "user", "content": "2"}]
    group = {"key": "k", "version": 7, "prompt": [{"role": "user", "content": "1"}]}
    given = {**group, "samples": [{"messages": [*turns, {"role": "assistant", "content": "z"}]}]}
    row = reader.row(msgspec.convert(given, PushedGroup), "digest")
    (sample,) = row.samples
    tokens = [SYMBOLS[token] for token in tokens_view(sample.part.tokens)]
    assert (text_of(row.tokens), "".join(tokens)) == ("u1+a", f"xy{END}+u2+az{END}")
    trained = [token for token, made in zip(tokens, sample.part.loss_mask, strict=True) if made]
    assert trained == ["x", "y", END, "z", END]
    assert sample.part.spans == (VersionSpan(7, len(tokens)),)
    with pytest.raises(BadColumnError, match=r"samples\[0\].messages: they follow"):
        reader.row(msgspec.convert({**group, "samples": [{"messages": turns}]}, PushedGroup), "digest")


def test_single_imitated_rows_fill_the_groups_of_the_run_each_after_its_own_prompt(
    tmp_path: Path, folder: Path
) -> None:
    rows = [{"prompt": f"{letter}=", "response": letter * 2} for letter in "abcde"]
    dataset = load(tmp_path, folder, *rows, size=3, recorded={"loss": "sft"})
    assert dataset.num_rows == 2
    found = [
        (text_of(sample.part.context_tokens or dataset.prompt(row, 0).tokens), text_of(sample.part.tokens))
        for row in range(2)
        for sample in dataset.responses(row)
    ]
    assert found == [(f"{letter}=", f"{letter * 2}{END}") for letter in "abcdea"]  # the first one fills the last group


def test_rows_without_a_response_are_for_the_engines_that_generate(tmp_path: Path, folder: Path) -> None:
    rows = [{"prompt": "a=", "label": "x"}, {"prompt": "b=", "response": "y", "loss": "sft"}]
    settings = {"are_all_recorded": False, "ratio_objective": "grpo"}
    dataset = load(tmp_path, folder, *rows, recorded={"loss_key": "loss"}, settings=settings)
    assert [dataset.prompt(row, 0).is_recorded for row in range(2)] == [False, True]
    assert [dataset.prompt(row, 0).label for row in range(2)] == ["x", ""]
    assert dataset.responses(0) == ()


def test_rows_of_a_second_file_are_all_recorded_and_those_of_the_first_are_not(tmp_path: Path, folder: Path) -> None:
    second = tmp_path / "second.jsonl"
    second.write_text('{"prompt": "b=", "response": "y"}\n')
    dataset = load(
        tmp_path,
        folder,
        {"prompt": "a=", "label": "x", "response": "ignored"},
        recorded={"path": str(second), "loss": "sft"},
        settings={"are_all_recorded": False},
    )
    assert [dataset.prompt(row, 0).is_recorded for row in range(2)] == [False, True]


def test_the_prompt_source_numbers_the_rows_as_the_engine_does(tmp_path: Path, folder: Path) -> None:
    rows: list[object] = [{"prompt": "a=", "response": "x" * 40}, {"prompt": "b=", "response": "y"}]
    dataset = load(tmp_path, folder, *rows, skip_bad_rows=True, settings={"imitates": True})
    assert (dataset.num_rows, dataset.num_skipped) == (1, 1)
    assert text_of(dataset.prompt(0, 0).tokens) == "b="
    assert text_of(dataset.responses(0)[0].part.tokens) == f"y{END}"


@pytest.mark.parametrize(
    ("row", "size", "story"),
    [
        ({"prompt": "a="}, 1, "there is no response: neither 'response' nor 'chosen' and 'rejected'"),
        ({"prompt": "a=", "response": ""}, 1, "'response' is empty"),
        (
            {"prompt": "a=", "response": {"text": "b"}},
            1,
            "'response' is an object.*expected a text, a list of token ids",
        ),
        ({"prompt": "a=", "response": ["b", "c"]}, 3, "holds 2 responses, and a group has 3 samples"),
        ({"prompt": "a=", "chosen": "b"}, 2, "'rejected' is missing"),
        ({"prompt": "a=", "response": [5, 4096]}, 1, "the token id 4096; the tokenizer knows those below"),
        ({"prompt": "a=", "response": "b" * 30}, 1, "the response has 31 tokens; at most 24 are allowed"),
        ({"prompt": "a" * 30, "response": "b" * 20}, 1, "prompt and response have 51 tokens; at most 48 fit"),
        ({"prompt": "a=", "response": "b", "lp": [-1.0]}, 1, "'lp' is given for a response that is a text"),
        ({"prompt": "a=", "response": [5, 6], "lp": [-1.0]}, 1, "'lp' has 1 values for 2 tokens"),
        ({"prompt": "a=", "response": [5], "lp": [0.5]}, 1, "a log-prob is at most 0"),
        ({"prompt": "a=", "response": "b", "r": [1, 2]}, 1, "'r' holds 2 rewards, and the row 1 responses"),
        ({"prompt": "a=", "response": "b", "r": "good"}, 1, "'r' is a list.*expected numbers from -1e"),
        ({"prompt": "a=", "response": "b", "r": 1e200}, 1, "'r' is a list.*expected numbers from -1e"),
        ({"prompt": "a=", "response": "b", "r": 10**400}, 1, "'r' is a list.*expected numbers from -1e"),
        (
            {"prompt": "a=", "response": "b", "loss": "dpo"},
            1,
            "'loss' is a text .*expected 'sft', 'objective' or nothing",
        ),
    ],
)
def test_a_bad_row_is_told_with_its_file_and_line(
    tmp_path: Path, folder: Path, row: object, size: int, story: str
) -> None:
    keys = {"logprobs_key": "lp", "reward_key": "r", "loss_key": "loss"}
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{story}"):
        load(tmp_path, folder, row, size=size, recorded=keys, label_key=None)


def test_a_ratio_to_what_nobody_knows_is_refused_and_imitation_is_not(tmp_path: Path, folder: Path) -> None:
    row = {"prompt": "a=", "response": "b"}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the response has no log-probs, and learner\.objective: grpo"):
        load(tmp_path, folder, row, settings={"ratio_objective": "grpo"})
    settings = {"ratio_objective": "grpo"}
    assert load(tmp_path, folder, row, settings=settings, recorded={"loss": "sft"}).num_rows == 1


def test_a_template_that_rewrites_earlier_turns_is_told(tmp_path: Path, folder: Path) -> None:
    rewriting = tmp_path / "model"
    rewriting.mkdir()
    for file in folder.iterdir():
        (rewriting / file.name).write_text(file.read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages | length }}" + config["chat_template"]
    (rewriting / "tokenizer_config.json").write_text(json.dumps(config))
    row = {"prompt": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "x"}]}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the chat template writes what stands before a turn"):
        load(tmp_path, rewriting, row, chat_template=True, settings={"imitates": True})
