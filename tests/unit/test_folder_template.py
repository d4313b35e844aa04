"""The chat template of a folder is rendered as transformers' tokenizer renders it, without the tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from data_cases import TEMPLATE, make_tokenizer

from penstock.backends.data.chat import ChatTemplate
from penstock.backends.data.folder_template import FolderTemplate
from penstock.backends.data.problems import DataError

if TYPE_CHECKING:
    from pathlib import Path

CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "1+1=<eos>"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
)
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
BOS = {
    "__type": "AddedToken", "content": "<bos>", "lstrip": False, "normalized": False, "rstrip": False,
    "single_word": False,
}  # fmt: skip
WITH_TOKENS = "{{ bos_token }}\n  {% for m in messages %}\n  {{ m.content }}\n  {% endfor %}\n{{ eos_token }}"


@pytest.mark.parametrize("how", ["file", "config", "named", "tokens"])
def test_it_is_the_text_of_transformers(tmp_path: Path, how: str) -> None:
    folder = make_tokenizer(tmp_path, template=how == "file")
    config = {**json.loads((folder / "tokenizer_config.json").read_text()), "bos_token": BOS}
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": TEMPLATE}]
    given = {"file": None, "config": TEMPLATE, "named": named, "tokens": WITH_TOKENS}[how]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **({"chat_template": given} if given else {})}))
    light, whole = ChatTemplate(folder, {"enable_thinking": False}, FolderTemplate(folder)), ChatTemplate(folder)
    for chat in CHATS:
        for tools in (None, TOOLS) if how != "named" else (None,):
            expected = whole.render_messages(chat, tools, arguments={"enable_thinking": False})
            assert light.render_messages(chat, tools) == expected


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: "):
        FolderTemplate(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"chat_template\.jinja: cannot be read"):
        FolderTemplate(folder)


def test_torch_is_not_imported_for_it(tmp_path: Path) -> None:
    """It is what makes the check quick."""
    folder = make_tokenizer(tmp_path, template=True)
    code = (
        "import sys; from pathlib import Path; from penstock.backends.data.chat import ChatTemplate;"
        "from penstock.backends.data.folder_template import FolderTemplate;"
        f"folder = Path({str(folder)!r}); ChatTemplate(folder, None, FolderTemplate(folder)).render('a');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
