"""Images of rows that engine and learner compute: where they may come from, what is checked, and what travels."""

# pyarrow has types in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import write_lines
from PIL import Image
from transformers import AutoModelForImageTextToText

from penstock.backends.checkpoint.make import make_model
from penstock.backends.checkpoint.vision_config import read_vision_part
from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.images import ImageIntake
from penstock.backends.data.options import DataOptions, MediaKeys
from penstock.backends.data.problems import DataError
from penstock.backends.data.streamed import StreamedRows
from penstock.backends.vision.pictures import thumbnail
from penstock.backends.vision.places import placed
from penstock.messages.arrays import tokens_view
from penstock.messages.errors import UserFault
from penstock.messages.samples import Media
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.media_rules import are_placed_here, image_rules

OPTIONS = DataOptions(
    path="x", label_key=None, chat_template=True, multimodal_keys=MediaKeys(image="prompt"), max_image_pixels=2000
)


def png(width: int, height: int, shade: int = 90) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 0, 0)).save(written, format="PNG")
    return written.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("vlm_xs", folder, 0)
    return folder


def intake(folder: Path, kept: Path) -> ImageIntake:
    part = read_vision_part(folder)
    assert part is not None
    return ImageIntake(part, kept)


def test_images_in_messages_become_files_and_tokens(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "dog.png").write_bytes(png(24, 16))
    inside = png(16, 16, 7)
    address = "data:image/png;base64," + base64.b64encode(inside).decode()
    messages = [
        {"role": "user", "content": [{"type": "image", "image": "dog.png"}, {"type": "text", "text": "and"},
                                     {"type": "image_url", "image_url": {"url": address}}]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image", "path": "dog.png"}]},
    ]  # fmt: skip
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": messages}, {"prompt": "no picture"})
    options = msgspec.structs.replace(OPTIONS, path=path)
    looks = intake(folder, tmp_path / "kept")
    dataset = load_dataset(options, folder, seed=0, max_context=128, images=looks)
    prompt = dataset.prompt(0, 0)
    assert prompt.text.count("<|image_pad|>") == 3
    assert list(tokens_view(prompt.tokens)).count(81) == 6 + 4 + 6, "as many as squares of 8 by 8 pixels"
    assert [Path(each.reference).read_bytes() for each in prompt.media] == [png(24, 16), inside, png(24, 16)]
    assert [tokens_view(prompt.tokens)[m.at : m.at + m.num_tokens].tolist() for m in prompt.media] == [
        [81] * 6, [81] * 4, [81] * 6
    ]  # fmt: skip
    assert prompt.media[1].reference == str(tmp_path / "kept" / hashlib.sha256(inside).hexdigest())
    assert dataset.prompt(1, 0).media == ()
    streamed = StreamedRows(msgspec.structs.replace(options, stream=True), folder, max_context=128, images=looks)
    assert streamed.prompt(0, 0) == prompt
    streamed.close()


def test_bytes_in_parquet_are_kept_once(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"<image>{n}", "images": {"bytes": png(16, 16), "path": None}} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    options = msgspec.structs.replace(
        OPTIONS, path=str(tmp_path / "rows.parquet"), multimodal_keys=MediaKeys(image="images")
    )
    dataset = load_dataset(options, folder, seed=0, max_context=64, images=intake(folder, tmp_path / "kept"))
    assert len({each.reference for each in dataset.media()}) == len(list((tmp_path / "kept").iterdir())) == 1


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("https://example.org/cat.png", "nothing is fetched from example.org; download it"),
        ("../secret.png", "is not in .*, the folder of the rows, which no row may leave"),
        ("/etc/passwd", "is not in .*, the folder of the rows"),
        ("link.png", "is not in .*, the folder of the rows"),
        ("page.svg", "no image of the kinds PNG, JPEG"),
        ("cut.png", "an image that cannot be decoded"),
        ("facts.png", "an image that cannot be decoded"),
        ("bomb.png", "an image of 400 x 300 pixels; at most 2000 are allowed"),
        ("thin.png", "the model's image processor refuses 999 x 1 pixels"),
        ("large.bmp", "at most 5000 are allowed"),
    ],
)
def test_an_image_that_cannot_be_used_names_its_line(folder: Path, tmp_path: Path, image: str, message: str) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    (tmp_path / "secret.png").write_bytes(png(16, 16))
    (rows / "link.png").symlink_to(tmp_path / "secret.png")
    (rows / "page.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    (rows / "cut.png").write_bytes(png(30, 30)[:-30])
    # A height that is a text, and that it lies on its side: who turns it writes both again.
    height, lies = b"\x01\x01\0\x02\0\0\0\x02a\0\0\0", b"\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"
    facts = b"Exif\0\0MM\0*\0\0\0\x08\0\x02" + height + lies + bytes(4)
    Image.new("RGB", (30, 30)).save(rows / "facts.png", exif=facts)
    (rows / "bomb.png").write_bytes(png(400, 300))
    (rows / "thin.png").write_bytes(png(999, 1))
    (rows / "large.bmp").write_bytes(b"BM" + b"0" * 6000)
    content = [{"type": "image", "image": image}]
    path = write_lines(rows / "rows.jsonl", {"prompt": [{"role": "user", "content": content}]})
    options = msgspec.structs.replace(OPTIONS, path=path, max_media_bytes=5000)
    with pytest.raises(DataError, match=f"rows.jsonl:1: .*{message}"):
        load_dataset(options, folder, seed=0, max_context=64, images=intake(folder, tmp_path))


def test_images_that_nobody_would_look_at_are_refused(folder: Path, tmp_path: Path) -> None:
    content = [{"type": "image", "image": "a.png"}]
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": [{"role": "user", "content": content}]})
    options = msgspec.structs.replace(OPTIONS, path=path, multimodal_keys=MediaKeys())
    with pytest.raises(DataError, match=r"nobody would look at; set data.multimodal_keys: \{image: prompt\}"):
        load_dataset(options, folder, seed=0, max_context=64)


def test_positions_are_those_of_transformers(folder: Path) -> None:
    import torch

    model = AutoModelForImageTextToText.from_pretrained(folder)
    grids = [(1, 4, 6), (1, 8, 2), (1, 2, 2)]
    ids = np.asarray([5, 79, *[81] * 6, 80, 7, 79, *[81] * 4, 80, *[81] * 1, 9, 9], dtype=np.int32)
    at = zip((2, 11, 16), (6, 4, 1), strict=True)
    media = [Media("image", "", "", begin, count) for begin, count in at]
    found = placed(ids, 81, media, grids, 2)
    rows = torch.from_numpy(ids.astype(np.int64))[None]
    expected, delta = model.model.get_rope_index(rows, (rows == 81).int(), image_grid_thw=torch.tensor(grids))
    assert found.positions.tolist() == expected[:, 0].tolist()
    assert found.shift == int(delta)


def test_a_thumbnail_is_small_and_of_the_very_image(tmp_path: Path) -> None:
    data = png(300, 100, 7)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    media = Media("image", str(path), hashlib.sha256(data).hexdigest())
    found = thumbnail(media)
    assert found is not None
    assert found[:2] == (64, 21)
    assert found[2] == bytes((7, 0, 0, 255)) * 64 * 21
    path.write_bytes(png(300, 100, 8))
    assert thumbnail(media) is None, "another image now"
    assert thumbnail(Media("image", "/dev/zero", media.digest)) is None


MODEL = "run: {name: a}\nmodel: {make: vlm_xs}\nreward: {function: f1}\n"
PUBLISHED = MODEL.replace("make: vlm_xs", "path: Qwen2.5-VL-3B-Instruct")
DATA = "data: {path: rows.jsonl, chat_template: true, multimodal_keys: {image: images}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learner: {backend: megatron}\n", "learner.backend: rows have images .*, and megatron computes text only"),
        ("learner: {num_ranks: 2, tensor_parallel: 2}\n", "learner.tensor_parallel: .*no ranks compute a vision tower"),
        ("learner: {true_on_policy: true}\n", "learner.true_on_policy: .*the bits of two vision towers differ"),
        ("learner: {lora: {}}\n", "learner.lora: .*is for text only"),
        ("learner: {warm_start: {path: 'lines:9'}}\n", "learner.warm_start: .*no images"),
        ("learner: {objective: {estimator: gae, critic: own}}\n", "critic: .*sees no images; set it to shared"),
        ("engines: {backend: sglang}\n", "model.make: .* patches of 14 pixels, .* name a model"),
        ("engines: {backend: simulated}\n", "data.multimodal_keys: engines of the backend simulated take text only"),
    ],
)
def test_who_would_not_see_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "a.yaml"
    model = MODEL if message.startswith("model.make") else PUBLISHED
    file.write_text(f"{model}{DATA}{text}")
    with pytest.raises(UserFault, match=message):
        load_scenario(file)


def test_hosts_are_named_only_where_servers_fetch(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    data = DATA.replace("}\n", "}, media_hosts: [a.org]}\n", 1).replace("}, media", ", media", 1)
    file.write_text(f"{PUBLISHED}{data}")
    with pytest.raises(UserFault, match=r"data.media_hosts: engines and learner .* fetch none; remove it"):
        load_scenario(file)
    file.write_text(f"{PUBLISHED.replace('a}', 'a, only: rollout}', 1)}{data}engines: {{backend: sglang}}\n")
    assert load_scenario(file).data.media_hosts == ("a.org",)


@pytest.mark.parametrize(
    ("engines", "is_placed"),
    [
        ("engines: {backend: sglang}\n", True),
        ("engines: {more: [{backend: sglang}]}\n", True),
        ("run: {name: a, only: rollout}\nengines: {backend: sglang}\n", False),
        ("run: {name: a, only: rollout}\nengines: {more: [{backend: sglang}]}\n", True),
        ("run: {name: a, only: rollout}\n", True),
        ("run: {name: a, only: rollout}\nepisode: {kind: gateway}\nengines: {backend: sglang}\n", True),
        ("episode: {kind: function, generate: 'a.py:b'}\nengines: {backend: sglang}\n", True),
    ],
)
def test_prompts_hold_the_tokens_of_images_where_somebody_here_looks_at_them(
    tmp_path: Path, engines: str, is_placed: bool
) -> None:
    file = tmp_path / "a.yaml"
    model = PUBLISHED.replace("run: {name: a}\n", "") if engines.startswith("run") else PUBLISHED
    file.write_text(f"{model}{DATA}{engines}")
    assert are_placed_here(load_scenario(file)) == is_placed


@pytest.mark.parametrize("division", ["parallel: ddp", "parallel: fsdp", "parallel: fsdp, shard_size: 2"])
def test_ranks_see(tmp_path: Path, division: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"{MODEL}{DATA}learner: {{num_ranks: 4, {division}}}\n")
    assert load_scenario(file).learner.num_ranks == 4


def test_a_learner_that_would_see_images_alone_is_given_no_videos(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    data = DATA.replace("{image: images}", "{image: images, video: clips}")
    file.write_text(f"{PUBLISHED}{data}engines: {{backend: sglang}}\n")
    with pytest.raises(UserFault, match=r"not at video; .* run\.only: rollout and episode\.kind: single"):
        load_scenario(file)


SHOWS = "data: {path: rows.jsonl}\nepisode: {kind: function, generate: 'a.py:b', images: true}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"{SHOWS}learner: {{lora: {{}}}}\n",
            r"learner.lora: episodes have images \(episode.images\), .*is for text only",
        ),
        ("data: {path: rows.jsonl}\nepisode: {images: true}\n", "episode.images: is of episode.kind: function"),
    ],
)
def test_episodes_that_show_images_are_checked_as_rows_are(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"{PUBLISHED}{text}")
    with pytest.raises(UserFault, match=message):
        load_scenario(file)


@pytest.mark.parametrize("episode", ["kind: function, generate: 'a.py:b'", "kind: gateway"])
def test_episodes_show_images_behind_servers(tmp_path: Path, episode: str) -> None:
    file = tmp_path / "a.yaml"
    shows = f"episode: {{{episode}, images: true}}\nengines: {{backend: sglang}}\n"
    file.write_text(f"{PUBLISHED}data: {{path: rows.jsonl, chat_template: true}}\n{shows}")
    assert are_placed_here(load_scenario(file))


@pytest.mark.parametrize("limit", ["0.5", "null"])
def test_agents_may_show_images_with_engines_that_see(tmp_path: Path, limit: str) -> None:
    file = tmp_path / "a.yaml"
    shows = f"episode: {{kind: gateway, images: true, max_images_gb: {limit}}}\n"
    file.write_text(f"{MODEL}data: {{path: rows.jsonl, chat_template: true}}\n{shows}")
    rules = image_rules(load_scenario(file), str(tmp_path))
    assert rules is not None
    assert rules.max_kept_bytes == (None if limit == "null" else 500_000_000)
