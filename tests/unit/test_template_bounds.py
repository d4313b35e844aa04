"""A chat template cannot keep an actor busy for ever, and what templates write is not changed by the bound."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from data_cases import TEMPLATE, make_tokenizer, write_lines

from penstock.backends.checkpoint.characters import CHAT_TEMPLATE
from penstock.backends.data.chat import ChatTemplate, EndlessTemplateError
from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.folder_template import FolderTemplate
from penstock.backends.data.options import DataOptions
from penstock.backends.data.problems import DataError
from penstock.backends.data.row import BadColumnError
from penstock.backends.data.template_bounds import MAX_WORK, STEP_WORK

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.backends.data.row import Message

R = "range(100000)"
TOO_MUCH = f"does more than {MAX_WORK // STEP_WORK} rounds of loops or {MAX_WORK} characters"
ENDLESS = {
    "loops in loops": f"{{% for i in {R} %}}{{% for j in {R} %}}{{% endfor %}}{{% endfor %}}",
    "what loops leave out": f"{{% for i in {R} %}}{{% for j in {R} if j < 0 %}}{{% endfor %}}{{% endfor %}}",
    "a recursive loop": "{% for i in [1, 2] recursive %}{% if loop.depth < 40 %}{{ loop([1, 2]) }}{% endif %}"
    "{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "long rounds": f"{{% for i in {R} %}}{{% for j in {R} %}}{'{% if i == j + 1 %}{% endif %}' * 999}{{% endfor %}}"
    "{% endfor %}",
    "blocks": "{% set ns = namespace(d=0) %}{% block b %}{% set ns.d = ns.d + 1 %}{% if ns.d < 40 %}{{ self.b() }}"
    "{{ self.b() }}{% endif %}{% set ns.d = ns.d - 1 %}{% endblock %}",
    "calls": "{% macro m(n) %}{{ caller() }}{{ caller() }}{% endmacro %}"
    f"{{% for i in {R} %}}{{% call m(1) %}}{{% for j in {R} %}}{{% endfor %}}{{% endcall %}}{{% endfor %}}",
    "what it writes": f"{{% set a = 'a' * 65536 %}}{{% for i in {R} %}}{{{{ a }}}}{{% endfor %}}",
    "its own text": f"{{% for i in {R} %}}{{% for j in range(10) %}}{'a' * 1000}{{% endfor %}}{{% endfor %}}",
    "sums": "{% set ns = namespace(a='aa') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "joins": "{% set ns = namespace(a='aa') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "lists": "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "products": "{{ 'a' * 10000000000 }}",
    "what costs less than nothing": f"{{% for i in {R} %}}{{% for j in {R} %}}{{{{ 2 ** -99999 }}}}{{{{ 'a' * -9 }}}}"
    "{% endfor %}{% endfor %}",
    "powers": "{{ 10 ** 1000000000 }}",
    "squares": "{% set ns = namespace(a=3) %}{% for i in range(60) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
}
HONEST = {
    "a template": TEMPLATE,
    "of this project": CHAT_TEMPLATE,
    "a bit of everything": """
{%- macro shown(m, last=false) -%}
  <{{ m.role }}>{{ m.content | trim }}{{ caller() if caller }}{% if not last %} {{ '-' * 3 ~ loop_index }}{% endif %}
{%- endmacro -%}
{% set ns = namespace(text='', seen=[]) -%}
{% for m in messages if m.role != 'system' -%}
  {% if loop.first %}{{ bos_token }}{% endif %}
  {%- set loop_index = loop.index -%}
  {%- set ns.text = ns.text + m.role -%}
  {%- set ns.seen = ns.seen + [loop.revindex * 2] -%}
  {{ shown(m, loop.last) }}
  {%- if loop.previtem is defined and loop.index > 2 %}{% break %}{% endif -%}
{% else %}none{% endfor -%}
{% call shown(messages[0]) %}!{% endcall -%}
{% for part in [[1, [2]], 3] recursive %}{{ loop(part) if part is iterable else part }}{% endfor -%}
{% generation %}{{ ns.text ~ ns.seen ~ none ~ missing }}{% endgeneration %}
{{- messages | tojson }} {{ 2 ** 3 * 2 }} {{ [1] * 2 }} {{ 3 * 'ab' }}{{ missing }}{{ 1.5 + 1 }}
{% block b %}{{ add_generation_prompt }}{% endblock %}""",
}
CHATS: tuple[Sequence[Message], ...] = (
    [{"role": "user", "content": " 1+1= "}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
    [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user", "user", "user")],
)


def folder_with(tmp_path: Path, template: str) -> Path:
    folder = make_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("how", ENDLESS)
def test_what_does_not_end_is_ended(tmp_path: Path, how: str) -> None:
    folder = folder_with(tmp_path, ENDLESS[how])
    with pytest.raises(EndlessTemplateError) as raised:
        ChatTemplate(folder, None, FolderTemplate(folder)).render("a")
    assert raised.value.message.startswith(f"{folder}: the chat template {TOO_MUCH}")


def test_transformers_tokenizer_is_bounded_too(tmp_path: Path) -> None:
    template = ChatTemplate(folder_with(tmp_path, ENDLESS["loops in loops"]))
    for _ in range(2):  # each with all of the work
        with pytest.raises(EndlessTemplateError, match=re.escape(TOO_MUCH)):
            template.render("a")


def test_each_conversation_has_all_of_the_work(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "{% for i in range(90000) %}{% for j in range(7) %}{% endfor %}{% endfor %}.")
    template = ChatTemplate(folder, None, FolderTemplate(folder))
    assert [template.render("a") for _ in range(3)] == ["."] * 3


def test_a_long_conversation_is_rendered(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, TEMPLATE)
    tools: list[Message] = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(1000)]
    messages: list[Message] = [{"role": "user", "content": "x" * 1000}] * 20_000
    text = ChatTemplate(folder, None, FolderTemplate(folder)).render_messages(messages, tools)
    assert text.count("x") == 20_000_000


@pytest.mark.parametrize("name", HONEST)
def test_what_is_written_stays_the_same(tmp_path: Path, name: str) -> None:
    from transformers.utils import chat_template_utils

    source: Any = chat_template_utils
    plain = source._cached_compile_jinja_template(HONEST[name])
    folder = folder_with(tmp_path, HONEST[name])
    template = ChatTemplate(folder, {"bos_token": "<s>"}, FolderTemplate(folder))
    for messages in CHATS:
        expected = plain.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, bos_token="<s>"
        )
        assert template.render_messages(messages) == expected


@pytest.mark.parametrize(
    "template", ["{{ range(10 ** 9) }}", "{{ 1 // 0 }}", "{{ [].pop(3) }}", "{{ messages[9].a.b }}"]
)
def test_what_a_template_raises_is_a_refusal(tmp_path: Path, template: str) -> None:
    folder = folder_with(tmp_path, template)
    with pytest.raises(BadColumnError, match="the chat template refuses the messages: "):
        ChatTemplate(folder, None, FolderTemplate(folder)).render("a")


def test_rows_end_with_the_first(tmp_path: Path) -> None:
    """The others would take as long each; so bad rows that are skipped do not include it."""
    folder = folder_with(tmp_path, ENDLESS["macros"])
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "a", "label": "1"}, {"prompt": "b", "label": "1"})
    options = DataOptions(path=path, chat_template=True, skip_bad_rows=True)
    with pytest.raises(DataError, match=re.escape(f"rows.jsonl:1: {folder}: the chat template {TOO_MUCH}")):
        load_dataset(options, folder, seed=0, max_context=64)
