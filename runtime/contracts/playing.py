"""The contract of a function that plays episodes.

It plays against models that answer well, nothing, nonsense, too long, and without end; each episode ends as the run
would have it end.

| wait | who ends it |
|---|---|
| for an episode | it; at the latest the deadline of the check |
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.backends.data.chat import ChatTemplate
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.episodes.functions.ends import end_of, failure_of
from penstock.backends.episodes.functions.loading import load_function
from penstock.backends.episodes.functions.wire import FunctionSpecs
from penstock.backends.episodes.interfaces import Task
from penstock.backends.episodes.options import EpisodeOptions
from penstock.backends.episodes.play import Play
from penstock.backends.episodes.playing import Answer, PlayRules
from penstock.backends.protocol import Capability
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.episodes.functions.loading import PlayFunction
    from penstock.backends.episodes.functions.wire import Ended
    from penstock.backends.episodes.playing import EndedBy, TurnAsked
    from penstock.backends.episodes.protocol import CallMade
    from penstock.runtime.contracts.checks import Checks

END_TOKEN: Final = "<|im_end|>"
TEMPLATE: Final = (
    "{%- if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template like those that are about."""
MAX_CONTEXT: Final = 4096
RULES: Final = PlayRules(
    options=EpisodeOptions(max_turns=8, tool_timeout_s=5.0),
    max_context=MAX_CONTEXT,
    max_response_tokens=512,
    uses_chat=True,
    can=(Capability.SAMPLES_PER_CALL, Capability.SEEDED_SAMPLING, Capability.CONSTRAINED),
)


class Script(NamedTuple):
    """A model that says these things in turn, and then the last one again and again."""

    name: str
    says: tuple[str, ...]
    is_cut: bool = False
    """Whether its turns end at the limit of tokens."""


SCRIPTS: Final = (
    Script("a model that answers at once", ("The answer is \\boxed{42}.",)),
    Script("a model that says nothing", ("",)),
    Script("a model whose turns are cut off", ("The answer might be " * 8,), is_cut=True),
    Script(
        "a model that calls tools",
        ('<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>', "\\boxed{42}"),
    ),
    Script("a model that calls a tool that there is not", ('<tool_call>{"name": "x", "arguments": {}}</tool_call>',)),
    Script("a model whose calls are malformed", ("<tool_call>{oops</tool_call>",)),
    Script("a model that never comes to an end", ("And then? " * 40,)),
)


def check_generate(checks: Checks) -> None:
    """Of a function that plays episodes."""
    with tempfile.TemporaryDirectory(prefix="penstock-contract-") as folder:
        words = _Words(Path(folder))
        found: list[PlayFunction] = []
        specs = FunctionSpecs(functions=())
        if not checks.run("it can be loaded", lambda: found.append(load_function(checks.spec, specs))):
            return
        for script in SCRIPTS:
            checks.run(script.name, partial(_check_played, found[0], script, _task(), words, checks.timeout_s))
        bare = dataclasses.replace(_task(), label="", metadata={})
        checks.run("a row without label", partial(_check_played, found[0], SCRIPTS[0], bare, words, checks.timeout_s))


def _check_played(function: PlayFunction, script: Script, task: Task, words: _Words, timeout_s: float) -> str | None:
    model = _Model(script, words)
    ended = asyncio.run(_played(function, task, words, model, timeout_s))
    if ended.outcome == "infra_error":
        raise UserFault(
            f"ended with infra_error: {ended.detail}; the sample would be tried again and then lost. Catch what the "
            "model can cause, or raise EpisodePolicyError"
        )
    if not model.num_turns:
        raise UserFault("ended without a single turn of the model, so there is nothing to train")
    if ended.outcome == "policy_error":
        return f"policy_error: {ended.detail}"
    return None


async def _played(function: PlayFunction, task: Task, words: _Words, model: _Model, timeout_s: float) -> Ended:
    """As a worker plays it."""
    prompt = words.template.render_messages(task.messages)
    play = Play(task, len(words.encoded(prompt)), RULES, words, model)
    try:
        async with asyncio.timeout(timeout_s):
            returned = await function.run(play)
        return end_of(0, returned, is_cut_off=play.is_cut_off)
    except (Exception, SystemExit) as error:  # foreign code may raise anything: that is its answer
        return failure_of(0, error, function.path)


def _task() -> Task:
    return Task(
        prompt="What is 6 * 7?",
        messages=[{"role": "user", "content": "What is 6 * 7?"}],
        label="42",
        metadata={"level": 3},
        group_id=3,
        index=0,
        attempt=0,
        seed=1,
        is_evaluation=False,
    )


class _Words:
    """Bytes as tokens, so that any text can be said; see :class:`~penstock.backends.episodes.playing.Words`."""

    def __init__(self, folder: Path) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|im_start|>", END_TOKEN])  # pyright: ignore[reportUnknownMemberType]
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TOKEN, "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        self._template = ChatTemplate(folder)
        self.tokenizer = TextTokenizer(folder)

    @property
    def template(self) -> ChatTemplate:
        return self._template

    def encoded(self, text: str) -> Sequence[int]:
        """Ids of a text."""
        (ids,) = self.tokenizer.encode([text], special=False)
        assert not isinstance(ids, str), ids
        return ids

    @property
    def end_id(self) -> int:
        """Of the token that ends a turn."""
        found = self.tokenizer.token_id(END_TOKEN)
        assert found is not None, "it was added"
        return found


class _Model:
    """See :class:`~penstock.backends.episodes.playing.ModelLink`."""

    def __init__(self, script: Script, words: _Words) -> None:
        self._script = script
        self._words = words
        self.num_turns = 0

    async def turn(self, asked: TurnAsked) -> Answer:
        """The next thing that the script says, within the limit of the request."""
        says = self._script.says[min(self.num_turns, len(self._script.says) - 1)]
        self.num_turns += 1
        ids = [*self._words.encoded(says), self._words.end_id]
        ended_by: EndedBy = "end_token"
        if self._script.is_cut or len(ids) > asked.max_new_tokens:
            ids, ended_by = ids[: min(len(ids) - 1, asked.max_new_tokens)], "length"
        await asyncio.sleep(0)  # an engine never answers in the same turn of the loop
        return Answer(tuple(ids), (-0.5,) * len(ids), ((1, len(ids)),) if ids else (), ended_by)

    def take(self, choice: int, into: int) -> None:
        """Nothing is trained here."""

    def save(self, saved: bytes) -> None:
        """Nothing goes on elsewhere here."""

    def called(self, call: CallMade) -> None:
        """Nothing is traced here."""
