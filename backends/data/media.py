"""What belongs to a prompt and is no text: images, videos, sounds, each by a reference.

| in the row | what travels |
|---|---|
| ``https://…`` of a host in ``data.media_hosts`` | the address: the engine fetches it and hands it to its server |
| a path in the folder of the rows | the absolute path: the server has to see the same files |
| ``data:…;base64,…`` | itself |
| bytes, or ``datasets``' ``{bytes, path}`` | ``data:…;base64,…`` |

Invariants:

* A reference that travels names one thing, and is not larger than the scenario allows.
* No row says whom an engine asks: what stands behind its firewall (a cloud's metadata, other services of the cluster)
  is fetched only from a host that the scenario names. The host is read off a form so narrow that every reader of
  addresses reads the same one.
* A prompt has as many places for images, videos and sounds as it has of them: nothing is put where nobody said.
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

from penstock.backends.data.options import HOST_FORM
from penstock.backends.data.row import BadColumnError, shown, value_of
from penstock.messages.samples import Media

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.backends.data.options import MediaKeys
    from penstock.backends.data.row import Message, RawRow

Kind = Literal["image", "video", "audio"]
KINDS: Final[tuple[Kind, ...]] = ("image", "video", "audio")
KEPT_FOLDER: Final = "images"
"""Of a run's folder: images that stood in rows, or came in episodes."""
MAX_ADDRESS_LENGTH: Final = 8192
_HELD: Final = ("image", "image_url", "url", "path", "bytes")
_MARK: Final = re.compile(r"<(image|video|audio)>")
_DATA: Final = re.compile(r"data:[\w.+-]*(?:/[\w.+-]*)?(?:;[\w=.+-]+)*;base64,", re.IGNORECASE)
_ADDRESS: Final = re.compile(rf"https?://({HOST_FORM})(?::\d{{1,5}})?(?:/\S*)?", re.IGNORECASE)
"""Its host. A user, a backslash or another letter before the path is where parsers differ on it."""
_MAGIC: Final = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)


def media_of(
    row: RawRow,
    keys: MediaKeys,
    *,
    folder: Path,
    max_bytes: int,
    hosts: Sequence[str] = (),
    inline: Mapping[str, Sequence[object]] | None = None,
) -> tuple[Media, ...]:
    """All that the columns refer to, kind after kind, in the order of the row.

    Args:
        row: of which.
        keys: which columns.
        folder: that paths begin at, and that they do not leave.
        max_bytes: of each.
        hosts: that addresses may have.
        inline: what a column holds in place of its value.

    Raises:
        BadColumnError: a column or a file is missing, too large, or not what it should be.
    """
    found: list[Media] = []
    for kind, key in media_columns(keys).items():
        value = (inline or {}).get(key, value_of(row, key))
        if value is None or value == "":
            continue
        items = cast("list[object]", value) if isinstance(value, list) else [value]
        found += [Media(kind, _reference(item, key, folder=folder, max_bytes=max_bytes, hosts=hosts)) for item in items]
    return tuple(found)


def media_columns(keys: MediaKeys) -> dict[Kind, str]:
    """Kind → column, of those that the scenario names."""
    named: dict[Kind, str | None] = {"image": keys.image, "video": keys.video, "audio": keys.audio}
    return {kind: column for kind, column in named.items() if column is not None}


def taken_out(
    prompt: str | list[Message], keys: MediaKeys, prompt_key: str
) -> tuple[str | list[Message], list[object]]:
    """The prompt with bare places for images, and what its messages hold there: ``{"type": "image", "image": …}``, also
    ``url``, ``path`` or ``bytes``, and ``{"type": "image_url", "image_url": {"url": …}}``.

    Raises:
        BadColumnError: they hold images that nobody would look at.
    """
    if isinstance(prompt, str):
        return prompt, []
    found: list[object] = []
    messages = [{**message, "content": taken_from(message.get("content"), found)} for message in prompt]
    if found and keys.image != prompt_key:
        raise BadColumnError(
            "messages hold images",
            f"{prompt_key!r} holds messages with {len(found)} images, which nobody would look at; set "
            f"data.multimodal_keys: {{image: {prompt_key}}}, and remove other columns with images",
        )
    return messages, found


def taken_from(content: object, found: list[object]) -> object:
    """The content of a message with bare places for images; what it holds there is added to ``found``."""
    if not isinstance(content, list):
        return content
    parts: list[object] = []
    for part in cast("list[object]", content):
        form = _form(part)
        held = None
        if form.get("type") in ("image", "image_url"):
            held = next((form[name] for name in _HELD if form.get(name) is not None), None)
        if held is not None:
            found.append(held)
        parts.append(part if held is None else {"type": "image"})
    return parts


def data_address(data: bytes) -> str:
    """``data:…;base64,…`` of a file's bytes."""
    kind = next((name for magic, name in _MAGIC if data.startswith(magic)), "application/octet-stream")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def host_of(address: str) -> str | None:
    """In small letters; None for what is no address that every reader reads alike."""
    found = _ADDRESS.fullmatch(address)
    return None if found is None or len(address) > MAX_ADDRESS_LENGTH else found[1].lower()


def _form(part: object) -> Message:
    return cast("Message", part) if isinstance(part, dict) else {}


def with_places(messages: Sequence[Message], media: Sequence[Media]) -> list[Message]:
    """The messages with each ``<image>`` in a text as a part of its own, as chat templates want it.

    Raises:
        BadColumnError: there are more or fewer places than media of a kind.
    """
    placed = [_with_parts(message) for message in messages]
    kinds = [kind for message in placed for kind in _kinds_in(message)]
    for kind in KINDS:
        given, places = sum(each.kind == kind for each in media), kinds.count(kind)
        if given != places:
            raise BadColumnError(
                f"places and {kind} inputs differ",
                f"the prompt has {places} places for {kind} inputs and the row {given} of them; write <{kind}> into "
                f'the text where each belongs, or a part {{"type": "{kind}"}} into the content of its message',
            )
    return placed


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or not _MARK.search(content):
        return message
    pieces = _MARK.split(content)  # texts at even places, kinds between them
    parts: list[object] = [
        {"type": piece} if index % 2 else {"type": "text", "text": piece}
        for index, piece in enumerate(pieces)
        if index % 2 or piece
    ]
    return {**message, "content": parts}


def _kinds_in(message: Message) -> list[str]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    types = [cast("Message", part).get("type") for part in cast("list[object]", content) if isinstance(part, dict)]
    return [str(kind).removesuffix("_url") for kind in types if isinstance(kind, str) and kind != "text"]


def _reference(value: object, key: str, *, folder: Path, max_bytes: int, hosts: Sequence[str]) -> str:
    if isinstance(value, dict):
        form = cast("Mapping[str, object]", value)
        inner = next((form[name] for name in ("bytes", "url", "path") if form.get(name) is not None), None)
        value = cast("object", form) if inner is None or isinstance(inner, dict) else inner
    if isinstance(value, bytes):
        _check_size(len(value), key, max_bytes)
        return data_address(value)
    if not isinstance(value, str) or not value.strip():
        raise BadColumnError(
            f"{key!r} has the wrong type",
            f"{key!r} holds {shown(value)}; expected an http(s) address, a path, data:…;base64,… or bytes",
        )
    if value[:5].lower() == "data:":
        return _checked_data(value, key, max_bytes)
    if "://" in value[:12] and not value.startswith("file://"):
        return _checked_address(value, key, hosts)
    return _checked_file(value.removeprefix("file://"), key, folder, max_bytes)


def _checked_address(value: str, key: str, hosts: Sequence[str]) -> str:
    if (host := host_of(value)) is None:
        raise BadColumnError(
            f"{key!r} is no address",
            f"{key!r} holds {shown(value)}, which is no http(s) address of a host, a port if need be, and a path",
        )
    if host not in hosts:
        raise BadColumnError(
            f"{key!r} is at a host that is not allowed",
            f"{key!r} holds {shown(value)}, and nothing is fetched from {host}; download it and name its file, beside "
            "the rows, or, where servers look at images by themselves (docs/data.md), allow the host: "
            f"data.media_hosts: [{host}]",
        )
    return value


def _checked_data(value: str, key: str, max_bytes: int) -> str:
    head = _DATA.match(value)
    try:
        if head is None:
            raise binascii.Error("it does not begin with data:…;base64,")
        size = len(base64.b64decode(value[head.end() :], validate=True))
    except ValueError as error:
        raise BadColumnError(
            f"{key!r} is no base64", f"{key!r} holds {shown(value)}, which is not data in base64: {error}"
        ) from None
    _check_size(size, key, max_bytes)
    return value


def _checked_file(value: str, key: str, folder: Path, max_bytes: int) -> str:
    try:
        path = folder / Path(value).expanduser()
        is_outside = not path.resolve().is_relative_to(folder.resolve())
        size = path.stat().st_size if path.is_file() and not is_outside else None
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, an unknown user
        raise BadColumnError(f"{key!r} names no file", f"{key!r} holds {shown(value)}: {error}") from None
    if is_outside:
        raise BadColumnError(
            f"{key!r} names a file elsewhere",
            f"{key!r}: {path} is not in {folder}, the folder of the rows, which no row may leave; put the file there",
        )
    if size is None:
        raise BadColumnError(f"{key!r} names no file", f"{key!r}: there is no file {path}")
    _check_size(size, key, max_bytes)
    return str(path)


def _check_size(size: int, key: str, max_bytes: int) -> None:
    if not size:
        raise BadColumnError(f"{key!r} is empty", f"{key!r} holds something of 0 bytes")
    if size > max_bytes:
        raise BadColumnError(
            f"{key!r} is too large",
            f"{key!r} holds something of {size} bytes; at most {max_bytes} are allowed (data.max_media_bytes)",
        )
