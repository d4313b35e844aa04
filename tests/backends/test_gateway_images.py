"""Images that outside agents send: where they stand in a sample, that the engine looks at them, what is refused."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import pytest
from gateway_bench import WAIT_S, Ended, GatewayBench
from msgspec.structs import replace
from PIL import Image
from vision_cases import PAD, model_folder, picture

from penstock.backends.data.options import DataOptions
from penstock.backends.engines.options import SamplingOptions
from penstock.backends.episodes.options import EpisodeOptions
from penstock.backends.episodes.playing import ImageRules
from penstock.messages.arrays import floats_view, tokens_view
from penstock.messages.samples import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.episodes.api import SessionTaken
    from penstock.messages.samples import Media

IMAGE_ID = 81
MAX_BYTES = 4096
MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that sees, with weights so large that it matters what."""
    return model_folder(tmp_path_factory.mktemp("model"))


def opened(model: Path, folder: Path, *, shows: bool = True, max_kept_bytes: int | None = None) -> GatewayBench:
    rules = ImageRules(
        folder=str(folder / "images"), max_bytes=MAX_BYTES, max_pixels=4096, max_kept_bytes=max_kept_bytes
    )
    bench = GatewayBench(
        model, folder, EpisodeOptions(kind="gateway"), DataOptions(path="rows.jsonl", chat_template=True),
        sampling=SamplingOptions(max_response_tokens=3), images=rules if shows else None,
    )  # fmt: skip
    bench.serve(0)
    return bench


@pytest.fixture(scope="module")
def bench(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayBench]:
    bench = opened(model, tmp_path_factory.mktemp("run"))
    yield bench
    bench.close()


def file_of(colour: str, size: tuple[int, int] = (16, 8)) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", size, colour).save(written, format="PNG")
    return written.getvalue()


def part_of(data: bytes) -> dict[str, Any]:
    return url_part(f"data:image/png;base64,{base64.b64encode(data).decode()}")


def url_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def user(*content: str | dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]}


def post(bench: GatewayBench, taken: SessionTaken, messages: list[Any], path: str = "chat/completions",
         **more: object) -> httpx.Response:  # fmt: skip
    body: dict[str, object] = {"model": "any", "messages": messages, "max_tokens": 3, **more}
    headers = {"Authorization": f"Bearer {bench.key}"}
    return httpx.post(f"{taken.base_url}/{path}", json=body, headers=headers, timeout=WAIT_S)


def asked(bench: GatewayBench, taken: SessionTaken, messages: list[Any], n: int = 1) -> list[Any]:
    """The messages with the model's answer."""
    reply = post(bench, taken, messages, n=n)
    assert reply.status_code == 200, reply.text
    return [*messages, reply.json()["choices"][0]["message"]]


def begun(bench: GatewayBench, index: int = 0, media: tuple[Media, ...] = ()) -> SessionTaken:
    bench.issue(index, prompt=f"user: {PAD * len(media)}what?assistant: ", media=media,
                messages=json.dumps(MESSAGES).encode() if media else b"")  # fmt: skip
    return bench.take()


def finished(bench: GatewayBench, taken: SessionTaken) -> Ended:
    bench.finish(taken, reward=1.0)
    return bench.ended()


def check_places(ended: Ended, prompt: Prompt, sent: list[tuple[bytes, int]]) -> None:
    """These images stand in the sample, each with so many tokens, which nobody trains; no other token is one."""
    part = ended.event.part
    context = part.context_tokens or prompt.tokens
    ids, media = tokens_view(context + part.tokens).tolist(), part.media_after(prompt)
    assert [(each.digest, each.num_tokens) for each in media] == [
        (hashlib.sha256(data).hexdigest(), count) for data, count in sent
    ]
    places = [place for each in media for place in range(each.at, each.at + each.num_tokens)]
    num_before = len(context) // 4
    foreign = {place for place in range(len(ids)) if place < num_before or not ended.mask[place - num_before]}
    assert places == [place for place, token in enumerate(ids) if token == IMAGE_ID and place in foreign]
    for each in media:
        assert hashlib.sha256(Path(each.reference).read_bytes()).hexdigest() == each.digest


NO_PROMPT = Prompt(row=0, epoch=0, tokens=b"")


def test_images_of_both_protocols_stand_in_the_sample_and_are_not_trained(bench: GatewayBench) -> None:
    red, blue, green = file_of("red"), file_of("blue", (24, 16)), file_of("green", (8, 8))
    taken = begun(bench)
    talk = asked(bench, taken, [user("a", part_of(red), "b", part_of(blue))])
    talk = asked(bench, taken, [*talk, user(part_of(green), "c")])
    blocks = [
        *[{"role": m["role"], "content": _blocks(m["content"])} for m in talk],
        {"role": "user", "content": [_block(red), {"type": "text", "text": "so?"}]},
    ]
    reply = post(bench, taken, blocks, "messages")
    assert reply.status_code == 200, reply.text
    assert reply.json()["penstock"].get("conversation", 0) == 0, "it goes on with what was said in the other protocol"
    check_places(finished(bench, taken), NO_PROMPT, [(red, 2), (blue, 6), (green, 1), (red, 2)])


def _blocks(content: Any) -> list[Any]:  # noqa: ANN401 - of the protocol
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_block(_data(part)) if part["type"] == "image_url" else part for part in content]


def _data(part: dict[str, Any]) -> bytes:
    return base64.b64decode(part["image_url"]["url"].partition(",")[2])


def _block(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def test_the_engine_looks_at_what_the_agent_sends(bench: GatewayBench) -> None:
    found: list[list[float]] = []
    for colour in ("red", "red", "blue"):
        taken = begun(bench)
        asked(bench, taken, [user(part_of(file_of(colour)), "what?")])
        found.append(list(floats_view(finished(bench, taken).event.part.logprobs)))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0], "a blind engine would give the same"


def test_an_agent_gets_the_images_of_its_prompt_and_may_send_them_back(bench: GatewayBench, tmp_path: Path) -> None:
    media = (replace(picture(tmp_path, 1), num_tokens=6),)
    taken = begun(bench, media=media)
    messages = json.loads(bytes(taken.messages))
    given = Path(media[0].reference).read_bytes()
    assert _data(messages[0]["content"][0]) == given
    refused = httpx.post(f"{taken.base_url}/completions", json={"prompt": taken.prompt}, timeout=WAIT_S,
                         headers={"Authorization": f"Bearer {bench.key}"})  # fmt: skip
    assert (refused.status_code, "has images" in refused.text) == (400, True)
    asked(bench, taken, messages)
    ended = finished(bench, taken)
    assert not ended.event.part.context_tokens, "it begins with the very prompt and its image"
    assert not ended.event.part.media


@pytest.mark.parametrize("count", [1, 2])
def test_what_branches_off_has_the_images_that_stood_there(bench: GatewayBench, count: int) -> None:
    red, blue, green = file_of("red"), file_of("blue"), file_of("green", (8, 8))
    taken = begun(bench)
    first = asked(bench, taken, [user(part_of(red), "a")])
    asked(bench, taken, [*first, user(part_of(blue), "b")])
    asked(bench, taken, [*first, user(part_of(green), "c")], n=count)
    event = finished(bench, taken).event
    assert len(event.parts) == 2
    for part, last in zip(event.parts, ((blue, 2), (green, 1)), strict=True):
        ids = tokens_view(part.tokens).tolist()
        check_places(Ended(replace(event, part=part), ids, list(part.loss_mask or b"\1" * len(ids))), NO_PROMPT,
                     [(red, 2), last])  # fmt: skip


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "address": (url_part("http://127.0.0.1:9/a.png"), "nothing is fetched; found 'http://127.0.0.1"),
    "file": (url_part("file:///etc/passwd"), "nothing is fetched"),
    "reference": (url_part(f"sha256:{'0' * 64}"), "nothing is fetched"),
    "other form": ({"type": "image", "image": f"sha256:{'0' * 64}"}, "expected image_url"),
    "base64": (url_part("data:image/png;base64,%%%"), "not in base64"),
    "damaged": (part_of(b"\x89PNG\r\n\x1a\n and no more"), "an image that cannot be decoded|no image of the kinds"),
    "svg": (part_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "no image of the kinds"),
    "bytes": (part_of(bytes(MAX_BYTES + 1)), "data.max_media_bytes"),
    "pixels": (part_of(file_of("red", (100, 100))), "data.max_image_pixels"),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_what_cannot_be_shown_is_refused_and_changes_nothing(bench: GatewayBench, what: str) -> None:
    part, reason = WRONG[what]
    taken = begun(bench)
    talk = asked(bench, taken, [user("a")])
    refused = post(bench, taken, [*talk, user(part, "b")])
    assert refused.status_code == 400, refused.text
    assert re.search(reason, refused.json()["error"]["message"])
    asked(bench, taken, [*talk, user("b")])
    assert not finished(bench, taken).event.part.media


def test_too_many_images_and_images_of_the_model_are_refused(bench: GatewayBench) -> None:
    taken = begun(bench)
    many = post(bench, taken, [user(*[part_of(b"no image")] * 513)])
    assert (many.status_code, "513 images are too many" in many.text) == (400, True), "none is looked at"
    own = post(bench, taken, [user("a"), {**user(part_of(file_of("red"))), "role": "assistant"}, user("b")])
    assert (own.status_code, "the model makes no images" in own.text) == (400, True)
    source = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    fetched = post(bench, taken, [{"role": "user", "content": [source]}], "messages")
    assert (fetched.status_code, "nothing is fetched; found 'url'" in fetched.text) == (400, True)
    bench.finish(taken, outcome="infra_error")
    bench.ended()


def test_a_run_without_images_and_a_template_without_places_refuse_them(model: Path, tmp_path: Path) -> None:
    blind = shutil.copytree(model, tmp_path / "blind")
    for file in (blind / "tokenizer_config.json", blind / "chat_template.jinja"):
        if file.name.endswith("jinja") or "chat_template" in file.read_text():
            _without_places(file)
    cases = ((model, False, "the run shows no images"), (blind, True, "wrote 0 places for 1 images"))
    for folder, shows, reason in cases:
        (tmp_path / str(shows)).mkdir()
        bench = opened(folder, tmp_path / str(shows), shows=shows)
        try:
            taken = begun(bench)
            refused = post(bench, taken, [user(part_of(file_of("red")), "a")])
            assert refused.status_code == 400, refused.text
            assert reason in refused.json()["error"]["message"]
            asked(bench, taken, [user("a")])
        finally:
            bench.close()


def test_a_full_folder_takes_no_further_image_and_goes_on_with_those_it_has(model: Path, tmp_path: Path) -> None:
    red, blue = file_of("red"), file_of("blue")
    bench = opened(model, tmp_path, max_kept_bytes=len(red))
    try:
        taken = begun(bench)
        talk = asked(bench, taken, [user(part_of(red), "a")])
        refused = post(bench, taken, [*talk, user(part_of(blue), "b")])
        assert (refused.status_code, refused.headers["x-should-retry"]) == (507, "false"), refused.text
        assert "episode.max_images_gb" in refused.json()["error"]["message"]
        assert [file.name for file in (tmp_path / "images").iterdir()] == [hashlib.sha256(red).hexdigest()]
        asked(bench, taken, [*talk, user(part_of(red), "b")])
        check_places(finished(bench, taken), NO_PROMPT, [(red, 2), (red, 2)])
    finally:
        bench.close()


def _without_places(file: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}"
    if file.suffix == ".jinja":
        file.write_text(template)
    else:
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "chat_template": template}))
