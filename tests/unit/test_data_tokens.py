"""Special tokens, demonstrations and chat templates, on folders as transformers writes them."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import string
from typing import TYPE_CHECKING

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.demonstrations import load_demonstrations
from penstock.backends.data.lines import lines_row, noisy_answer
from penstock.backends.data.options import DataOptions
from penstock.backends.data.problems import DataError
from penstock.backends.data.special_tokens import read_special_tokens
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.messages.arrays import tokens_view
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ("<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|end|>")
SYMBOLS = (*SPECIAL, *string.ascii_letters, *string.digits, " ", "\n", "=", "+")
PAD, EOS, END = 0, 1, 4

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel(vocab={symbol: i for i, symbol in enumerate(SYMBOLS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    path = tmp_path / "model"
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    write(path, "tokenizer_config", tokenizer_class="PreTrainedTokenizerFast", eos_token="<eos>", pad_token="<pad>")
    write(path, "config", model_type="qwen3", eos_token_id=EOS, pad_token_id=PAD)
    return path


def write(folder: Path, name: str, **document: object) -> None:
    (folder / f"{name}.json").write_text(json.dumps(document))


def write_rows(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_listed_end_token_stops_and_the_tokenizers_own_ends_demonstrations(folder: Path) -> None:
    write(folder, "generation_config", eos_token_id=[END, EOS], pad_token_id=3)
    tokens = read_special_tokens(folder)
    assert (tokens.eos_id, tokens.stop_ids, tokens.pad_id) == (EOS, (EOS, END), PAD)


def test_a_token_may_be_written_as_an_object(folder: Path) -> None:
    write(folder, "tokenizer_config", eos_token={"content": "<|end|>", "lstrip": False}, pad_token=None)
    write(folder, "config", eos_token_id=None)
    tokens = read_special_tokens(folder)
    assert (tokens.eos_id, tokens.stop_ids, tokens.pad_id) == (END, (END,), END)


def test_the_models_config_is_enough(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    write(folder, "config", text_config={"eos_token_id": [EOS, END], "pad_token_id": PAD})
    assert read_special_tokens(folder) == (EOS, (EOS, END), PAD)


def test_a_folder_without_an_end_token_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    write(folder, "config", model_type="qwen3")
    with pytest.raises(DataError, match="names no end-of-sequence token, so no response could ever end"):
        read_special_tokens(folder)


def test_a_damaged_config_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(UserFault, match=r"generation_config\.json: .*Expected .* got `str`.*eos_token_id"):
        read_special_tokens(folder)


def test_decoding_leaves_special_tokens_out(folder: Path) -> None:
    tokenizer = TextTokenizer(folder)
    (ids,) = tokenizer.encode(["ab=C"], special=False)
    assert isinstance(ids, list)
    assert tokenizer.decode([*ids, EOS, PAD]) == "ab=C"


def test_demonstrations_of_lines_are_noisy_answers_that_end(folder: Path) -> None:
    demonstrations = load_demonstrations("lines:30", "prompt", "response", folder, seed=4)
    tokenizer = TextTokenizer(folder)
    assert len(demonstrations) == 30
    for index, (prompt_ids, response_ids) in enumerate(demonstrations):
        row = lines_row(4, index)
        assert tokenizer.decode(list(prompt_ids)) == row.prompt
        assert tokenizer.decode(list(response_ids)) == noisy_answer(row.answer, 4, index)
        assert response_ids[-1] == EOS
    assert any(noisy_answer(lines_row(4, i).answer, 4, i) != lines_row(4, i).answer for i in range(30))


def test_demonstrations_come_from_files_and_end_once(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"q": "1+1=", "a": "2"}, {"q": "1+2=", "a": "3<eos>"})
    demonstrations = load_demonstrations(rows, "q", "a", folder, seed=0)
    assert [list(d.response_ids) for d in demonstrations] == [[SYMBOLS.index("2"), EOS], [SYMBOLS.index("3"), EOS]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a"},
            "rows.jsonl:2: 'response' is missing; columns here are 'prompt'. Set learner.warm_start.resp",
        ),
        ({"response": "a"}, "'prompt' is missing; columns here are 'response'. Set learner.warm_start.prompt_key"),
        ({"prompt": "a", "response": 3}, "'response' is a number (3); expected a text"),
        ({"prompt": "a", "response": ""}, "'response' is empty"),
        ({"prompt": "a", "response": "é"}, "a character that the model does not know"),
        ({"prompt": "aa", "response": "bbb"}, "prompt and response have 6 tokens; at most 5 fit (model.max_context)"),
    ],
)
def test_a_bad_demonstration_names_its_line(folder: Path, tmp_path: Path, row: dict[str, object], message: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "response": "b"}, row)
    with pytest.raises(DataError) as caught:
        load_demonstrations(rows, "prompt", "response", folder, seed=0, max_tokens=5)
    assert message in str(caught.value)
    assert "skip" not in str(caught.value)


def chat_dataset(path: str, folder: Path, *, skip_bad_rows: bool = False) -> list[str]:
    chosen = DataOptions(path=path, label_key=None, chat_template=True, skip_bad_rows=skip_bad_rows)
    dataset = load_dataset(chosen, folder, seed=0, max_context=100)
    return [dataset.prompt(row, 0).text for row in range(dataset.num_rows)]


def test_messages_and_texts_are_rendered_as_transformers_does(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (folder / "chat_template.jinja").write_text(TEMPLATE)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    rows = write_rows(tmp_path / "rows.jsonl", {"prompt": messages}, {"prompt": "1+1"})
    options = DataOptions(path=rows, label_key=None, chat_template=True)
    dataset = load_dataset(options, folder, seed=0, max_context=100)
    assert dataset.prompt(1, 0).text == "<|user|>1+1<|end|>\n<|assistant|>"
    reference = AutoTokenizer.from_pretrained(folder)
    for row, conversation in enumerate((messages, [{"role": "user", "content": "1+1"}])):
        expected = reference.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        assert list(tokens_view(dataset.prompt(row, 0).tokens)) == expected


def test_a_folder_without_a_template_is_refused(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"prompt": "a"})
    with pytest.raises(DataError, match=r"has no chat template .* set data\.chat_template: false"):
        chat_dataset(rows, folder)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "'prompt' is an empty list of messages"),
        (["a"], "message 0 of 'prompt' is a text ('a'); expected an object with 'role' and 'content'"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "message 1 of 'prompt' is an object"),
        ([{"role": "assistant", "content": "a"}], "the last message of 'prompt' is the assistant's own"),
        ([{"role": "tool", "content": "a"}], "the chat template refuses the messages: no tools here"),
    ],
)
def test_bad_messages_name_their_line(folder: Path, tmp_path: Path, messages: list[object], message: str) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    rows = write_rows(tmp_path / "rows.jsonl", {"prompt": "a"}, {"prompt": messages})
    with pytest.raises(DataError) as caught:
        chat_dataset(rows, folder)
    assert str(caught.value).startswith(f"{rows}:2: {message}")
    assert len(chat_dataset(rows, folder, skip_bad_rows=True)) == 1
