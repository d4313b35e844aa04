"""``tokenizer.json`` of a model whose tokenizer is a ``tiktoken.model``, as those of Kimi are.

That file says which pieces there are; how a text is cut before is a pattern, ``pat_str``, in Python code beside it.

Invariants:

* That code is read and never run: a pattern that is no plain text, or texts joined, is not found.
* Every token has the number that it had, or nothing is written. Numbers that nothing names, up to the vocabulary of
  ``config.json``, are reserved tokens.
"""

# tokenizers and transformers are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import ast
import base64
import binascii
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from tokenizers import AddedToken, Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from penstock.backends.checkpoint.hf_config import CONFIG_FILE, TOKENIZER_CONFIG_FILE, HfConfig, find_config
from penstock.backends.checkpoint.tokenizer_files import TIKTOKEN_FILE, TOKENIZER_FILE, has_tiktoken_only
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

PATTERN: Final = "pat_str"


class _NamedToken(msgspec.Struct):
    content: str
    special: bool = True


class _TokenizerConfig(msgspec.Struct):
    added_tokens_decoder: dict[int, _NamedToken] = {}


def tiktoken_problem(folder: Path) -> str | None:
    """Why ``tokenizer.json`` cannot be made of a folder's ``tiktoken.model``; None: it can, or need not."""
    if not has_tiktoken_only(folder) or _find_pattern(folder) is not None:
        return None
    return (
        f"{folder}: has {TIKTOKEN_FILE} and no {TOKENIZER_FILE}, and no tokenization*.py with a plain {PATTERN}, which "
        f"says how text is cut; copy the model's own tokenization file, or a {TOKENIZER_FILE}, beside it"
    )


def complete_tokenizer(source: Path, target: Path) -> None:
    """Write ``tokenizer.json``, and a configuration that names no code, for a model that has ``tiktoken.model`` only.

    Raises:
        UserFault: its pieces, its pattern and its numbers do not fit together.
        OSError: the disk refuses.
    """
    if not has_tiktoken_only(source):
        return
    pattern = _find_pattern(source)
    assert pattern is not None, "tiktoken_problem() was asked before"
    try:
        converter: Any = _Converter
        tokenizer: Tokenizer = converter(str(source / TIKTOKEN_FILE), pattern=pattern).converted()
        config_file = source / TOKENIZER_CONFIG_FILE
        said = config_file.read_bytes() if config_file.is_file() else b"{}"
        named = msgspec.json.decode(said, type=_TokenizerConfig, strict=False).added_tokens_decoder
    except (ValueError, binascii.Error) as error:
        raise UserFault(f"{source}: {TIKTOKEN_FILE} or {TOKENIZER_CONFIG_FILE} cannot be read: {error}") from error
    _add(source, tokenizer, named)
    tokenizer.save(str(target / TOKENIZER_FILE))
    config = cast("dict[str, Any]", msgspec.json.decode(said))
    config.pop("auto_map", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (target / TOKENIZER_CONFIG_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(config)) + b"\n")


class _Converter(TikTokenConverter):
    """That of transformers, which would read the file through a cache that goes by its name."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        with open(tiktoken_url, "rb") as file:
            rows = [line.split() for line in file if line.strip()]
        return {base64.b64decode(piece): int(rank) for piece, rank in rows}


def _add(source: Path, tokenizer: Tokenizer, named: dict[int, _NamedToken]) -> None:
    first = tokenizer.get_vocab_size(with_added_tokens=False)
    config = find_config(source / CONFIG_FILE, HfConfig)
    end = max(config.vocab_size if config is not None else 0, *(number + 1 for number in named), first)
    for number in range(first, end):
        token = named.get(number, _NamedToken(f"<|reserved_token_{number}|>"))
        tokenizer.add_tokens([AddedToken(token.content, special=token.special, normalized=False)])
        if tokenizer.token_to_id(token.content) != number:
            raise UserFault(
                f"{source}: token {token.content!r} of {TOKENIZER_CONFIG_FILE} has number {number}, and "
                f"{tokenizer.token_to_id(token.content)} as well; fetch both tokenizer files anew"
            )


def _find_pattern(folder: Path) -> str | None:
    for file in sorted(folder.glob("tokenization*.py")):
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two: nested too deeply
            continue
        for node in ast.walk(tree):
            names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
            if isinstance(node, ast.Assign) and PATTERN in names and (text := _text(node.value)) is not None:
                return text
    return None


def _text(node: ast.expr) -> str | None:
    """A text, or texts joined by one."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(by)), attr="join"), args=[ast.List(elts=parts)]):
            texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            return by.join(texts) if len(texts) == len(parts) else None
        case _:
            return None
