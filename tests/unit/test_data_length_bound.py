"""What is said of a text's tokens without tokenising it is never more than there are."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
import unicodedata
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from penstock.backends.checkpoint.characters import character_tokenizer
from penstock.backends.data import length_bound
from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.length_bound import COMPOSED, LONG_CHARACTERS, LengthBound
from penstock.backends.data.options import DataOptions
from penstock.backends.data.problems import LONG_PROMPT, DataError
from penstock.backends.data.streamed import StreamedRows
from penstock.backends.data.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.backends.data.dataset import Dataset

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa"), ("Ġ", "Ġ"), ("ĠĠ", "a")]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def pairs(letters: list[str], merges: list[tuple[str, str]]) -> dict[str, int]:
    return {text: index for index, text in enumerate([*letters, *("".join(pair) for pair in merges)])}


def byte_level(*, letters: list[str] = LETTERS, behavior: str = "isolated") -> Tokenizer:
    """As of Qwen, small; one token of it takes the whitespace around it along."""
    merges = [pair for pair in MERGES if set(pair[0] + pair[1]) <= set(letters)]
    tokenizer = Tokenizer(models.BPE(vocab=pairs(letters, merges), merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\s?\w+|\s+"), behavior=behavior),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.add_special_tokens([AddedToken("<|end|>", lstrip=True, rstrip=True, special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As of Llama 2, small."""
    merges = [("a", "a"), ("▁", "aa")]
    vocabulary = pairs([*BYTES, "<unk>", "a", "▁"], merges)
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def unknown_words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocab={"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


BOUNDED = {"bytes": byte_level(), "fallback": byte_fallback()}
UNBOUNDED = {
    "a missing byte is dropped": byte_level(letters=LETTERS[1:]),
    "what is between matches is removed": byte_level(behavior="removed"),
    "unknown words": unknown_words(),
    "unigram": Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)),
    "no byte level": Tokenizer(models.BPE(vocab=pairs(LETTERS, MERGES), merges=MERGES)),
}

TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(["a" * 9, " " * 9, "  a", "<|end|>", "\u1f82", "\u03b1\u0313\u0300\u0345", "각", "é", "▁"]),
    ),
    max_size=24,
).map("".join)


@pytest.mark.parametrize("kind", BOUNDED)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_there_are_never_fewer_tokens(kind: str, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(length_bound, "LONG_CHARACTERS", 0)
        tokenizer = BOUNDED[kind]
        assert LengthBound(tokenizer).min_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", BOUNDED)
def test_of_a_long_text_much_is_known_and_of_a_short_one_nothing_is_said(kind: str) -> None:
    bound = LengthBound(BOUNDED[kind])
    assert bound.min_tokens("a" * (LONG_CHARACTERS - 1)) == 0
    assert bound.min_tokens("a" * 80_000) == 10_000 if kind == "bytes" else 80_000 // 6
    assert bound.min_tokens("é" * 80_000) == (80_000 // 8 // COMPOSED if kind == "bytes" else 80_000 // 6)


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_of_a_tokenizer_that_may_drop_or_fuse_nothing_is_said(kind: str) -> None:
    assert LengthBound(UNBOUNDED[kind]).min_tokens("a" * 1_000_000) == 0


def test_no_character_is_composed_of_more() -> None:
    assert max(len(unicodedata.normalize("NFD", chr(code))) for code in range(sys.maxunicode + 1)) == COMPOSED


@pytest.mark.parametrize("stream", [False, True])
def test_a_row_that_is_far_too_long_is_refused_before_it_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    character_tokenizer().save(str(tmp_path / "tokenizer.json"))
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"".join(msgspec.json.encode({"prompt": text}) + b"\n" for text in ("a", "b" * 2_200_000)))
    encoded: list[str] = []
    encode = TextTokenizer.encode

    def noted(self: TextTokenizer, texts: Sequence[str], *, special: bool) -> list[list[int] | str]:
        encoded.extend(texts)
        return encode(self, texts, special=special)

    def read(options: DataOptions) -> Dataset | StreamedRows:
        if stream:
            return StreamedRows(options, tmp_path, max_context=512, folder=tmp_path / "index")
        return load_dataset(options, tmp_path, seed=0, max_context=512)

    monkeypatch.setattr(TextTokenizer, "encode", noted)
    options = DataOptions(path=str(rows), stream=stream, label_key=None)
    told = r"rows\.jsonl:2: the prompt has 2200000 characters, which are 440000 tokens or more; at most 511 fit"
    with pytest.raises(DataError, match=told):
        read(options)
    assert read(msgspec.structs.replace(options, skip_long_prompts=True)).skipped == {f"{LONG_PROMPT} ({rows}:2)": 1}
    assert set(encoded) == {"a"}
