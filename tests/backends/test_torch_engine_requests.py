"""Whatever one request does, the embedded engine ends that request and goes on with the others."""

# tokenizers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import random
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest
from engine_cases import (
    VOCAB_SIZE,
    Case,
    open_engine,
    random_tokens,
    request,
    run_all,
    tokens_of,
    weights_of,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.backends.checkpoint.make import character_tokenizer
from penstock.backends.engines.options import EnginesOptions, SamplingOptions
from penstock.backends.engines.torch.factory import open_torch_engine
from penstock.backends.engines.torch.sampling import Sampler
from penstock.backends.engines.torch.stopping import EndReason, StopStrings, StopStringWatch
from penstock.backends.weights.transports import open_exporter, open_fetcher
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.commands import ApplyWeights, FetchWeights, Generate, OpenEngine
from penstock.messages.local import (
    GenerationAdvanced,
    GenerationEnded,
    LocalEvent,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import InfraError, Part, Prompt, Purpose, SampleKey, Truncated, VersionSpan
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

WAIT_S = 60.0
WORDS = ["▁", "▁Hello", "▁END", "END", "a", "b", "c", "E", "N", "D", "€", "▁stop", "日本"]


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama's: what has no token of its own is written byte by byte."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {name: token for token, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def byte_level_tokenizer() -> Tokenizer:
    """As GPT-2's and Qwen's: every token is bytes, some of several letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("E", "N"), ("EN", "D"), ("Ġ", "a"), ("Ġa", "b")]
    names = [*letters, *(left + right for left, right in merges)]
    vocab = {name: token for token, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_piece_tokenizer() -> Tokenizer:
    """As BERT's: it tidies the text up as it decodes, so a token may change what stands before it."""
    names = ["[UNK]", *"abcdeEND.,!?'", *(f"##{letter}" for letter in "abcdEND"), "n't", "do", "END"]
    tokenizer = Tokenizer(models.WordPiece(vocab={name: token for token, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "characters": character_tokenizer,
    "byte_fallback": byte_fallback_tokenizer,
    "byte_level": byte_level_tokenizer,
    "word_piece": word_piece_tokenizer,
}


def first_stop(stops: StopStrings, tokens: Sequence[int]) -> int | None:
    """After how many tokens the watch says so."""
    watch = StopStringWatch(stops)
    return next((count for count, token in enumerate(tokens, start=1) if watch.push(token)), None)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_response_is_an_error_for_a_stop_string(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    size = tokenizer.get_vocab_size() + 20  # embeddings often have more rows than the tokenizer has tokens
    chance = random.Random(0)
    for _ in range(300):
        stops = StopStrings(["END", "\n\nQ:", "€"][: chance.randint(1, 3)], tokenizer)
        first_stop(stops, [chance.randrange(size) for _ in range(chance.randint(1, 80))])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_token_that_completes_the_string_in_the_text_ends_the_response(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    chance, num_ended = random.Random(1), 0
    for _ in range(300):
        tokens = _tokens_of_text(tokenizer, chance)
        texts = [tokenizer.decode(tokens[:count], skip_special_tokens=False) for count in range(len(tokens) + 1)]
        begin = chance.randrange(max(1, len(texts[-1]) - 1))
        stop = texts[-1][begin : begin + chance.randint(1, 5)]
        if not stop:
            continue
        found = next((count for count, text in enumerate(texts) if stop in text), None)
        assert first_stop(StopStrings([stop], tokenizer), tokens) == found, (tokens, stop)
        num_ended += found is not None
    assert num_ended > 200


def _tokens_of_text(tokenizer: Tokenizer, chance: random.Random) -> list[int]:
    """Of a text with characters of one to four bytes, as the tokenizer writes it; or of its words in any order."""
    if type(tokenizer.model) is models.BPE and chance.random() < 0.7:
        text = "".join(chance.choice("abEND €日😀é") for _ in range(chance.randint(2, 30)))
        names: list[str] = []
        for char in text:
            if tokenizer.token_to_id("<0x00>") is None:
                names += [_byte_letter(byte) for byte in char.encode()]
            elif char == " ":
                names.append("▁")
            elif tokenizer.token_to_id(char) is not None:
                names.append(char)
            else:
                names += [f"<0x{byte:02X}>" for byte in char.encode()]
        return [token for name in names if (token := tokenizer.token_to_id(name)) is not None]
    names = [name for name in tokenizer.get_vocab() if not name.startswith("<0x") and name.isascii()]
    return [token for _ in range(30) if (token := tokenizer.token_to_id(chance.choice(sorted(names)))) is not None]


def _byte_letter(byte: int) -> str:
    """The letter by which byte-level tokenizers write a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [other for other in range(256) if other not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def test_a_stop_string_behind_bytes_that_are_no_text_is_found() -> None:
    tokenizer = byte_fallback_tokenizer()
    chance = random.Random(2)
    word = tokenizer.token_to_id("▁END")
    assert word is not None
    for _ in range(200):
        # 0x80 … 0xFF without order: hardly ever a character.
        noise = [3 + chance.randrange(0x80, 0x100) for _ in range(chance.randint(1, 60))]
        assert first_stop(StopStrings([" END"], tokenizer), [*noise, word, word]) == len(noise) + 1


def test_a_stop_string_that_the_last_allowed_token_completes_is_a_stop(case: Case) -> None:
    tokenizer = character_tokenizer()
    whole = tokens_of(run_all(open_engine(case), [request(0, [4, 5, 6], 12)])[0].part)
    stop = tokenizer.decode(whole[9:12], skip_special_tokens=False)
    engine = open_engine(case, stop_strings=StopStrings([stop], tokenizer))
    end = run_all(engine, [request(0, [4, 5, 6], 12)])[0]
    assert tokens_of(end.part) == whole
    assert end.reason is EndReason.STOP_STRING


POISON = 70
"""A token that the model below cannot compute."""


def poisoned(case: Case) -> dict[str, torch.Tensor]:
    """Weights under which a context with that token has no finite log-probs, and every other one has."""
    weights = weights_of(case.model)
    weights["model.embed_tokens.weight"][:, 0] = 0.0
    weights["model.embed_tokens.weight"][POISON, 0] = 1.0
    first = "model.layers.0."
    weights[first + "self_attn.o_proj.weight"][0] = 0.0
    for name in ("gate_proj", "up_proj"):
        weights[f"{first}mlp.{name}.weight"][0] = 0.0
        weights[f"{first}mlp.{name}.weight"][0, 0] = 1e30
    return weights


def test_a_request_whose_logits_are_no_numbers_fails_alone(case: Case) -> None:
    engine = open_engine(case, num_slots=3, sampler=Sampler(top_p=0.9))
    engine.load(poisoned(case), 1)
    # The token itself is drawn now and then too, and then whoever drew it fails: those are left out.
    healthy = {tag: request(tag, random_tokens(5, seed=tag), 12) for tag in range(30)}
    healthy = {tag: wanted for tag, wanted in healthy.items() if POISON not in (*_prompt(wanted.prompt),)}
    alone: dict[int, list[int]] = {}
    for tag, wanted in healthy.items():
        fresh = open_engine(case, num_slots=3, sampler=Sampler(top_p=0.9))
        fresh.load(poisoned(case), 1)
        end = run_all(fresh, [wanted])[tag]
        if end.reason is EndReason.LENGTH:
            alone[tag] = tokens_of(end.part)
    assert len(alone) > 10
    bad = [request(1000 + number, [4, POISON, 5, 6][: 2 + number % 3], 12) for number in range(15)]
    mixed = [wanted for pair in zip(bad, (healthy[tag] for tag in alone), strict=False) for wanted in pair]
    ended = run_all(engine, mixed)
    for wanted in mixed:
        end = ended[int(str(wanted.tag))]
        if wanted in bad:
            assert end.reason is EndReason.FAILED
            assert not end.part.tokens
        else:
            assert tokens_of(end.part) == alone[int(str(wanted.tag))]


def _prompt(data: bytes) -> list[int]:
    return tokens_of(Part(tokens=data, logprobs=bytes(len(data)), spans=(VersionSpan(0, len(data) // 4),)))


def _odd_generate(chance: random.Random, index: int) -> Generate:
    """A request as nobody should send it, or a good one."""
    tokens = pack_tokens(
        chance.randrange(-2, VOCAB_SIZE + 2) if chance.random() < 0.02 else chance.randrange(VOCAB_SIZE)
        for _ in range(chance.choice([0, 1, 2, 5, 20, 63, 64, 65, 300]))
    )
    num_prefix = chance.choice([0, 0, 1, 5, 60, 200])
    prefix = Part(
        tokens=pack_tokens(chance.randrange(VOCAB_SIZE) for _ in range(num_prefix)),
        logprobs=pack_floats([chance.choice([-1.0, float("nan"), float("-inf")])] * num_prefix),
        spans=(VersionSpan(chance.choice([0, 10**9]), num_prefix),),
        context_tokens=chance.choice([b"", b"", tokens]),
    )
    return Generate(
        key=SampleKey(0, index),
        attempt=0,
        purpose=Purpose.TRAIN,
        prompt=Prompt(row=0, epoch=0, tokens=tokens, dataset=chance.choice([None, None, None, 0, -5, 7])),
        seed=chance.choice([0, 2**63, 2**64 - 1, -1]),
        deadline_version=9,
        prefix=chance.choice([None, prefix]),
        max_new_tokens=chance.choice([None, 1, 0, -3, 10**12]),
    )


def _wait_for(said: SimpleQueue[LocalEvent | BaseException], kind: type[LocalEvent]) -> None:
    while not isinstance(event := said.get(timeout=WAIT_S), kind):
        assert not isinstance(event, BaseException), event


def test_any_request_is_answered_once_and_a_good_one_after_it_is_served(case: Case, tmp_path: Path) -> None:
    said: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()
    engine = open_torch_engine(
        model_folder=case.folder,
        options=EnginesOptions(slots=4, device="cpu", progress_tokens=8),
        sampling=SamplingOptions(max_response_tokens=10**9, stop=("ab", "E")),
        max_context=64,
        dtype="float32",
        fetcher=open_fetcher(),
    )
    exporter = open_exporter("disk", run_id="engine", learner_epoch=0, folder=tmp_path)
    engine.start(said.put, said.put)
    try:
        engine.execute(OpenEngine())
        manifest = exporter.export(weights_of(case.model), version=0, publish=1, canary=None)
        engine.execute(FetchWeights(manifest))
        _wait_for(said, WeightsStagedLocally)
        engine.execute(ApplyWeights(manifest, UpdateMode.DRAIN))
        _wait_for(said, WeightsSwapped)
        chance = random.Random(3)
        for index in range(400):
            engine.execute(_odd_generate(chance, index))
        last = Generate(
            key=SampleKey(0, 400),
            attempt=0,
            purpose=Purpose.TRAIN,
            prompt=Prompt(row=0, epoch=0, tokens=pack_tokens([5])),
            seed=1,
            deadline_version=9,
            max_new_tokens=1,
        )
        engine.execute(last)
        ends: dict[int, GenerationEnded] = {}
        while len(ends) < 401:
            event = said.get(timeout=WAIT_S)
            if isinstance(event, GenerationEnded):
                assert event.key.index not in ends
                ends[event.key.index] = event
            else:
                assert isinstance(event, GenerationAdvanced), event
        assert sum(isinstance(end.outcome, InfraError) for end in ends.values()) > 50
        assert isinstance(ends[400].outcome, Truncated) or ends[400].part.num_tokens == 1
    finally:
        engine.close(timeout_s=WAIT_S)
        exporter.close()
