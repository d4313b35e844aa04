"""Images, videos and sounds of a prompt: references, places, and what a server is sent."""

# pyarrow has types in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import SPECIAL, make_tokenizer, write_lines
from engine_bench import manifest

from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.options import DataOptions, MediaKeys
from penstock.backends.data.problems import DataError
from penstock.backends.engines.options import SamplingOptions
from penstock.backends.engines.served.base.generator import DrawnImageError
from penstock.backends.engines.served.base.requests import OpenRequest, RequestRules
from penstock.backends.engines.served.sglang.media import as_written, media_fields
from penstock.backends.engines.torch.sampling_parameters import SamplingParameters
from penstock.messages.arrays import pack_floats, pack_tokens, tokens_view
from penstock.messages.commands import Generate
from penstock.messages.samples import InfraError, Media, Part, PolicyError, Prompt, Purpose, SampleKey, VersionSpan

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n0000"
IN_BASE64 = "data:image/png;base64," + base64.b64encode(PNG).decode()
ADDRESS = "https://example.org/a%20cat.png?size=2"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=True)


def loaded(path: str, folder: Path, **changes: object) -> list[Prompt]:
    options = DataOptions(
        path=path, label_key=None, chat_template=True, multimodal_keys=MediaKeys(image="images", video="clips"),
        media_hosts=("example.org", "[::1]"),
    )  # fmt: skip
    dataset = load_dataset(msgspec.structs.replace(options, **changes), folder, seed=0, max_context=128)
    return [dataset.prompt(row, 0) for row in range(dataset.num_rows)]


def test_references_travel_in_the_order_of_their_places(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "dog.png").write_bytes(PNG)
    path = write_lines(
        tmp_path / "rows.jsonl",
        {"prompt": "compare <image> and <image>, then <video>", "images": [ADDRESS, "dog.png"], "clips": IN_BASE64},
        {"prompt": "no picture"},
    )
    first, second = loaded(path, tokenizer_folder)
    assert first.media == (
        Media("image", ADDRESS),
        Media("image", str(tmp_path / "dog.png")),
        Media("video", IN_BASE64),
    )
    assert first.text == "u:compare <image_pad> and <image_pad>, then <image_pad>|<|assistant|>"
    assert list(tokens_view(first.tokens)).count(SPECIAL.index("<image_pad>")) == 3
    assert second.media == ()


def test_bytes_in_a_row_become_data(tmp_path: Path, tokenizer_folder: Path) -> None:
    rows = [
        {"prompt": "<image>", "images": {"bytes": PNG, "path": "x.png"}},
        {"prompt": "<image>", "images": {"bytes": None, "path": ADDRESS}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    prompts = loaded(str(tmp_path / "rows.parquet"), tokenizer_folder, multimodal_keys=MediaKeys(image="images"))
    assert [prompt.media[0].reference for prompt in prompts] == [IN_BASE64, ADDRESS]


def test_parts_of_a_message_are_places_too(tmp_path: Path, tokenizer_folder: Path) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": [{"role": "user", "content": content}], "images": [ADDRESS]})
    (prompt,) = loaded(path, tokenizer_folder)
    assert prompt.text == "u:<image_pad>what is it?|<|assistant|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image>", "images": []}, "1 places for image inputs and the row 0"),
        ({"prompt": "a", "images": [ADDRESS]}, "0 places for image inputs and the row 1"),
        ({"prompt": "<image>", "images": ["nowhere.png"]}, "'images': there is no file"),
        ({"prompt": "<image>", "images": [7]}, r"'images' holds a number \(7\)"),
        ({"prompt": "<image>", "images": [""]}, "'images' holds a text"),
        ({"prompt": "<image>", "images": ["ftp://x/y.png"]}, "which is no http"),
        ({"prompt": "<image>", "images": ["http://x/" + "a" * 9000]}, "which is no http"),
        ({"prompt": "<image>", "images": ["http://169.254.169.254/a"]}, "nothing is fetched from 169.254.169.254; "),
        ({"prompt": "<image>", "images": ["http://EXAMPLE.org.evil/a"]}, r"data.media_hosts: \[example.org.evil\]"),
        ({"prompt": "<image>", "images": ["http://x.example.org/a"]}, r"nothing is fetched from x.example.org"),
        ({"prompt": "<image>", "images": ["http://example.org@evil/a"]}, "which is no http"),
        ({"prompt": "<image>", "images": ["http://evil\\@example.org/a"]}, "which is no http"),
        ({"prompt": "<image>", "images": ["http://evil#@example.org/a"]}, "which is no http"),
        ({"prompt": "<image>", "images": ["http://ex\u200bample.org/a"]}, "which is no http"),
        ({"prompt": "<image>", "images": {"url": "https://evil/a"}}, "nothing is fetched from evil"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "url": "http://x/"}]}]}, "data.multimodal_keys"),
        ({"prompt": "<image>", "images": ["data:image/png;base64,%%%"]}, "which is not data in base64"),
        ({"prompt": "<image>", "images": ["data:image/png,abc"]}, "which is not data in base64"),
        (
            {"prompt": "<image>", "images": [IN_BASE64 * 1 + "A" * 400]},
            "which is not data in base64|bytes; at most 100",
        ),
        ({"prompt": "<image>", "images": ["big.png"]}, "something of 200 bytes; at most 100 are allowed"),
        ({"prompt": "<image>", "images": ["none.png"]}, "something of 0 bytes"),
        ({"prompt": "<image>", "images": ["\u0000"]}, "'images'"),
        ({"prompt": "<image>", "images": {"url": {}}}, "'images' holds an object"),
    ],
)
def test_a_bad_reference_names_its_line(tmp_path: Path, tokenizer_folder: Path, row: object, message: str) -> None:
    (tmp_path / "big.png").write_bytes(b"x" * 200)
    (tmp_path / "none.png").touch()
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "a"}, row)
    with pytest.raises(DataError, match=rf"rows.jsonl:2: .*({message})"):
        loaded(path, tokenizer_folder, max_media_bytes=100)
    assert len(loaded(path, tokenizer_folder, max_media_bytes=100, skip_bad_rows=True)) == 1


@pytest.mark.parametrize("address", ["HTTPS://Example.ORG", "http://example.org:8080/", "http://[::1]:9/a%20b"])
def test_an_address_of_a_named_host_travels_as_it_is(tmp_path: Path, tokenizer_folder: Path, address: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "<image>", "images": [address]})
    assert loaded(path, tokenizer_folder)[0].media == (Media("image", address),)


def test_a_server_is_sent_lists_of_references_by_their_kind() -> None:
    fields: dict[str, Any] = {
        name: msgspec.json.decode(value)
        for name, value in media_fields(
            (Media("image", ADDRESS), Media("audio", "/a b/c#1.wav"), Media("image", IN_BASE64))
        )
    }
    assert fields == {"image_data": [ADDRESS, IN_BASE64], "audio_data": ["file:///a%20b/c%231.wav"]}
    assert media_fields(()) == ()


# --- tools, system prompts, template arguments --------------------------------------------------------------------

TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object"}}


def test_a_template_gets_tools_system_prompt_and_arguments(tmp_path: Path, tokenizer_folder: Path) -> None:
    system = {"role": "system", "content": "own"}
    path = write_lines(
        tmp_path / "rows.jsonl",
        {"prompt": "1+1", "tools": [TOOL]},
        {"prompt": [system, {"role": "user", "content": "2"}], "tools": msgspec.json.encode([TOOL]).decode()},
        {"prompt": "3", "tools": None},
    )
    prompts = loaded(
        path,
        tokenizer_folder,
        multimodal_keys=MediaKeys(),
        tools_key="tools",
        system_prompt="be brief",
        template_arguments={"enable_thinking": False},
    )
    assert [prompt.text for prompt in prompts] == [
        "<add;>s:be brief|u:1+1|<|assistant|>-",
        "<add;>s:own|u:2|<|assistant|>-",
        "s:be brief|u:3|<|assistant|>-",
    ]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("[", "'tools' is a text"),
        ({"name": "add"}, ".*expected a list of tools"),
        ([{"description": "x"}], "tool 0 of 'tools' is an object"),
        (["add"], "tool 0 of 'tools' is a text"),
        ([{"type": "function", "function": {"name": ""}}], "tool 0 of 'tools'"),
    ],
)
def test_malformed_tools_name_their_line(tmp_path: Path, tokenizer_folder: Path, tools: object, message: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "a", "tools": []}, {"prompt": "a", "tools": tools})
    with pytest.raises(DataError, match=f"rows.jsonl:2: {message}"):
        loaded(path, tokenizer_folder, multimodal_keys=MediaKeys(), tools_key="tools")


PLACED = (Media("image", "/a", "d", 1, 3), Media("image", "/b", "e", 6, 2))
IDS = [5, 9, 9, 9, 6, 7, 9, 9, 8]


def test_a_server_is_sent_one_placeholder_for_the_tokens_of_an_image() -> None:
    assert as_written(IDS, PLACED) == [5, 9, 6, 7, 9, 8]
    assert as_written(IDS[:5], PLACED[:1]) == [5, 9, 6]


@pytest.mark.parametrize("place", [0, 4, len(IDS)])
def test_a_token_for_an_image_that_the_model_has_drawn_is_not_sent_as_one(place: int) -> None:
    ids = [*IDS[:place], 9, *IDS[place:]]
    media = [each.moved(1) if each.at >= place else each for each in PLACED]
    with pytest.raises(DrawnImageError, match=rf"token {place} is the one that stands for an image \(9\)") as caught:
        as_written(ids, media)
    assert caught.value.place == place


@pytest.mark.parametrize(("made", "outcome"), [([], PolicyError), ([5, 9], InfraError)])
def test_what_stands_behind_a_drawn_image_is_the_models_doing_but_where_we_have_cut_it_off(
    made: list[int], outcome: type[PolicyError | InfraError]
) -> None:
    context = IDS if made else [*IDS, 9]
    parameters = SamplingParameters(sampling=SamplingOptions(), stop_token_ids=frozenset({1}), stop_strings=None)
    prefix = Part(
        tokens=pack_tokens(made), logprobs=pack_floats([-1.0] * len(made)), spans=(VersionSpan(0, len(made)),)
    )
    command = Generate(
        key=SampleKey(0, 0), attempt=0, prompt=Prompt(row=0, epoch=0, tokens=pack_tokens(context), media=PLACED),
        seed=1, deadline_version=9, purpose=Purpose.TRAIN, prefix=prefix if made else None,
    )  # fmt: skip
    request = OpenRequest(command, RequestRules(tag="t", sampling=parameters, max_context=64, timeout_s=9.0))
    call = request.call(manifest(1))
    with pytest.raises(DrawnImageError) as caught:
        as_written(tokens_view(call.input_ids).tolist(), call.media)
    found = request.behind_drawn_image(caught.value)
    assert isinstance(found, outcome)
    assert "sample 0/0: token" in found.detail
