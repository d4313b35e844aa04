"""A tiny Qwen3 that knows one conversation by heart, with a byte-level BPE tokenizer and a template of Qwen's kind.

It calls a tool and then answers with what the tool said, whatever the system prompt and the tools' descriptions are: so
tests can hold a real conversation with a model that decides every token itself.
"""

# transformers and tokenizers are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from penstock.backends.checkpoint.terminal import quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTEXT: Final = 1024
MAX_LOSS: Final = 0.02
QUESTION: Final = "What is 6 times 7?"
CALL: Final = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
TOOL_RESULT: Final = "42"
ANSWER: Final = "It is 42."
MULTIPLY: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
TEMPLATE: Final = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last_query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
                {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
                {{- call.function.arguments | tojson }}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""With what makes Qwen's templates hard: thoughts of earlier turns vanish, an empty one appears at the end, results
of tools in a row become one turn of the user."""
WORDS: Final = "Use the tools. Be brief. You are kind! Answer; number type string description object title"
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS: Final = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def make_tokenizer(folder: Path) -> None:
    """A tokenizer and template in the folder; ``<|im_end|>`` ends a turn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = [
        QUESTION,
        CALL,
        ANSWER,
        json.dumps(MULTIPLY),
        WORDS,
        "user\nassistant\nsystem\n# Tools\n\n<tools>\n</tools>",
    ]
    tokenizer.train_from_iterator(texts * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(folder))


def make_model(folder: Path, *, num_steps: int = 300, num_threads: int = 1) -> None:
    """A model in the folder that has learned the conversation; seconds."""
    make_tokenizer(folder)
    tokenizer = cast("Any", AutoTokenizer.from_pretrained(str(folder)))
    vocab_size, end = len(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT,
                tie_word_embeddings=True, eos_token_id=end, pad_token_id=0,
                rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            )
        )  # fmt: skip
        _learn(model, tokenizer, num_steps)
        model.save_pretrained(folder)
    torch.set_num_threads(before)


def _learn(model: Qwen3ForCausalLM, tokenizer: Any, num_steps: int) -> None:  # noqa: ANN401 - transformers' own
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=num_steps)
    conversations, last_loss = _conversations(tokenizer), 0.0
    for _ in range(num_steps):
        rows = [next(conversations) for _ in range(2)]
        length = max(len(ids) for ids, _ in rows)
        inputs = torch.zeros(len(rows), length, dtype=torch.long)
        labels = torch.full((len(rows), length), -100)
        for row, (ids, learned) in enumerate(rows):
            inputs[row, : len(ids)] = torch.tensor(ids)
            labels[row, : len(ids)] = torch.tensor(
                [i if is_own else -100 for i, is_own in zip(ids, learned, strict=True)]
            )
        loss = cast("torch.Tensor", model(inputs, labels=labels).loss)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        last_loss = loss.item()
    assert last_loss < MAX_LOSS, f"it has not learned its part: the loss is {last_loss:.2g}"


def _conversations(tokenizer: Any) -> Iterator[tuple[list[int], list[bool]]]:  # noqa: ANN401
    """Token ids, and which of them the model learns: its own turns."""
    draw = random.Random(0)
    words = WORDS.split()

    def pieces() -> Iterator[tuple[str, bool]]:
        system = " ".join(draw.choices(words, k=draw.randrange(12)))
        tool = (
            {**MULTIPLY, "x": " ".join(draw.choices(words, k=draw.randrange(16)))} if draw.random() < 0.7 else MULTIPLY
        )
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": QUESTION})
        yield tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True), False
        yield f"{CALL}<|im_end|>", True
        yield f"\n<|im_start|>user\n<tool_response>\n{TOOL_RESULT}\n</tool_response><|im_end|>\n", False
        yield "<|im_start|>assistant\n", False
        yield f"{ANSWER}<|im_end|>", True

    while True:
        ids: list[int] = []
        learned: list[bool] = []
        for text, is_own in pieces():
            new = tokenizer(text, add_special_tokens=False).input_ids
            ids += new
            learned += [is_own] * len(new)
        yield ids, learned


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
