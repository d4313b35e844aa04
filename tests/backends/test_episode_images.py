"""Images that functions, tools and environments show: where they stand in a sample, what is kept, what is refused, and
episodes that go on elsewhere."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from episode_functions_bench import END, FunctionBench
from msgspec.structs import replace
from played_images import PADDED, user
from played_images import part as shown
from tokenizers import Tokenizer
from vision_cases import PAD, picture

from penstock.backends.checkpoint.make import make_model
from penstock.backends.episodes.dialogue import MalformedError
from penstock.backends.episodes.interfaces import Task
from penstock.backends.episodes.options import EpisodeOptions
from penstock.backends.episodes.play import Play
from penstock.backends.episodes.playing import ImageRules, PlayRules
from penstock.messages.arrays import tokens_view
from penstock.messages.local import GenerationAdvanced
from penstock.messages.parts import join
from penstock.messages.samples import Completed, InfraError, Prompt, SampleKey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.episodes.playing import ModelLink, Words
    from penstock.messages.samples import Media, Part

PLAYED = str(Path(__file__).parent / "played_images.py")
IMAGE_ID = 81
CALL = '<tool_call>{"name": "crop", "arguments": {}}</tool_call>'
ASKED = f"user: {PAD}what?assistant: "
MESSAGES = json.dumps([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]).encode()
KEY = SampleKey(7, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that sees, whose tokenizer has what tool calls are written with."""
    folder = tmp_path_factory.mktemp("model")
    make_model("vlm_xs", folder, 0)
    tokenizer = cast("Any", Tokenizer).from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([*'<>{}"_'])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "images"


def opened(model: Path, kept: Path | None, max_kept_bytes: int | None = None, **options: object) -> FunctionBench:
    rules = None
    if kept is not None:
        rules = ImageRules(folder=str(kept), max_bytes=PADDED, max_pixels=4096, max_kept_bytes=max_kept_bytes)
    given = EpisodeOptions(kind="function", **{"generate": f"{PLAYED}:episode", **options})  # type: ignore[arg-type]
    return FunctionBench(model, given, uses_chat=True, max_context=400, max_new=80, images=rules)


@pytest.fixture(scope="module")
def bench(model: Path, kept: Path) -> Iterator[FunctionBench]:
    bench = opened(model, kept)
    yield bench
    bench.close()


def of_prompt(folder: Path) -> Media:
    """24 by 16 pixels, so six tokens."""
    return replace(picture(folder, 1), num_tokens=6)


def issue(
    bench: FunctionBench, folder: Path, *, attempt: int = 0, prefix: Part | None = None, **metadata: object
) -> None:
    bench.engine.asked.clear()
    bench.issue_again(
        KEY, ASKED, attempt=attempt, label="", prefix=prefix, media=(of_prompt(folder),), messages=MESSAGES, **metadata
    )


def check_places(part: Part, context: bytes, counts: list[int]) -> None:
    """The images stand where they are said to, masked, and nothing else in there is one."""
    ids, num_before = tokens_view(context + part.tokens).tolist(), len(context) // 4
    media = part.media_after(Prompt(row=0, epoch=0, tokens=context))
    at = [place for each in media for place in range(each.at, each.at + each.num_tokens)]
    assert [each.num_tokens for each in media] == counts
    assert at == [place for place, token in enumerate(ids) if token == IMAGE_ID and place >= num_before]
    assert not any(part.loss_mask[place - num_before] for place in at)
    for each in media:
        assert hashlib.sha256(Path(each.reference).read_bytes()).hexdigest() == each.digest


def test_images_of_every_form_become_tokens_that_nobody_trains(
    bench: FunctionBench, tmp_path: Path, kept: Path
) -> None:
    issue(bench, tmp_path, do="shows")
    ended = bench.ended()
    assert isinstance(ended.outcome, Completed)
    first, _, last = bench.engine.asked
    assert first.prompt.media == (replace(of_prompt(tmp_path), at=7),)
    assert not ended.part.context_tokens, "it begins with the very prompt and its image"
    check_places(ended.part, first.prompt.tokens, [4, 6, 3])
    assert bench.text(ended.part) == "yesuser: so?assistant: yesuser: abassistant: yes"
    seen = ended.part.media_after(first.prompt)
    assert last.prompt.media == seen, "the engine is told of all of them"
    assert {each.reference for each in seen[1:]} == {str(kept / each.digest) for each in seen[1:]}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("path", "no file is opened and nothing is fetched"),
        ("address", "no file is opened and nothing is fetched"),
        ("reference", "that is not there: a reference is the SHA-256"),
        ("unknown", "that is not there: .*No such file"),
        ("damaged", "an image that cannot be decoded|no image of the kinds"),
        ("svg", "no image of the kinds"),
        ("large", r"from 1 to 40960 are allowed \(data.max_media_bytes\)"),
        ("pixels", r"100 x 100 pixels are too many \(data.max_image_pixels\)"),
        ("base64", "not in base64"),
        ("number", "found int; expected bytes"),
        ("nothing", r"messages\[2\]: a part of type image holds no image"),
    ],
)
def test_what_is_no_image_or_would_be_fetched_is_never_shown(
    bench: FunctionBench, tmp_path: Path, what: str, message: str
) -> None:
    issue(bench, tmp_path, do="shows_wrongly", what=what)
    outcome = bench.ended().outcome
    assert isinstance(outcome, InfraError)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(outcome.detail)
    assert len(bench.engine.asked) == 1


def test_an_episode_whose_image_finds_no_room_is_tried_again_and_says_why(model: Path, tmp_path: Path) -> None:
    bench = opened(model, tmp_path / "images", max_kept_bytes=1)
    try:
        issue(bench, tmp_path, do="shows")
        outcome = bench.ended().outcome
    finally:
        bench.close()
    assert isinstance(outcome, InfraError)
    assert "have come to episode.max_images_gb (1e-09)" in outcome.detail
    assert not (tmp_path / "images").exists()


def test_a_run_that_shows_no_images_says_what_to_set() -> None:
    task = Task(prompt="", messages=[], label="", group_id=0, index=0, attempt=0, seed=0)
    rules = PlayRules(options=EpisodeOptions(), max_context=9, max_response_tokens=9)
    play = Play(task, 0, rules, cast("Words", None), cast("ModelLink", None))
    assert asyncio.run(play.kept([user("text")])) == [user("text")]
    with pytest.raises(MalformedError, match=r"messages\[1\]: the run shows no images; set episode.images: true"):
        asyncio.run(play.kept([user("text"), user(shown(b""))]))


def test_an_episode_goes_on_elsewhere_with_its_images(
    bench: FunctionBench, model: Path, kept: Path, tmp_path: Path
) -> None:
    issue(bench, tmp_path, do="shows")
    chunks: list[Part] = []
    while not chunks or chunks[-1].save_point is None:
        chunks.append(bench.hear(GenerationAdvanced).chunk)
    whole = bench.ended().part
    prefix = join(chunks)
    assert [each.num_tokens for each in prefix.media] == [4]
    prompt = asked_first(bench)
    issue(bench, tmp_path, attempt=1, prefix=prefix, do="shows")
    again = bench.ended().part
    (asked,) = bench.engine.asked
    assert (again.tokens, again.media, again.loss_mask) == (whole.tokens, whole.media, whole.loss_mask)
    assert asked.prompt.media == again.media_after(prompt), "the engine sees those of the turns before"


def asked_first(bench: FunctionBench) -> Prompt:
    return bench.engine.asked[0].prompt


def test_a_branch_has_the_images_of_where_it_begins(bench: FunctionBench, tmp_path: Path) -> None:
    issue(bench, tmp_path, do="branches")
    main, branch = bench.ended().parts
    prompt = asked_first(bench)
    assert main.media == ()
    assert [each.num_tokens for each in branch.media] == [6, 4]
    assert branch.media_after(prompt)[0] == prompt.media[0], "the prompt's own, in its place"
    own = replace(branch, media=tuple(each for each in branch.media if each.at >= 0))
    assert not own.media, "what was shown before the first answer is context"
    assert bench.engine.asked[1].prompt.media == branch.media_after(prompt)


def test_a_choice_that_is_taken_brings_its_images(bench: FunctionBench, tmp_path: Path) -> None:
    issue(bench, tmp_path, do="chooses")
    ended = bench.ended()
    (part,) = ended.parts
    check_places(part, asked_first(bench).tokens, [4])
    assert bench.engine.asked[-1].prompt.media == part.media_after(asked_first(bench))


@pytest.fixture(scope="module")
def views(model: Path, kept: Path) -> Iterator[FunctionBench]:
    bench = opened(model, kept, generate="multi_turn", tools=(f"{PLAYED}:Crop",), environment=f"{PLAYED}:Views")
    yield bench
    bench.close()


def test_tool_and_world_show_images_and_are_put_back(views: FunctionBench, tmp_path: Path) -> None:
    told = itertools.chain([f"{CALL}{END}"], itertools.repeat(f"red{END}"))
    views.engine.reply = lambda text: next(told)
    issue(views, tmp_path)
    chunks: list[Part] = []
    while not chunks or chunks[-1].save_point is None:
        chunks.append(views.hear(GenerationAdvanced).chunk)
    whole = views.ended()
    prompt = asked_first(views)
    assert isinstance(whole.outcome, Completed), whole.outcome
    assert [each.num_tokens for each in whole.part.media] == [6, 1, 2, 2, 4]
    assert [each.at < 0 for each in whole.part.media] == [True] * 2 + [False] * 3, "what is shown first is context"
    assert prompt.media == whole.part.media_after(prompt)[:2]
    assert "tool: look assistant: red" in views.text(whole.part)
    issue(views, tmp_path, attempt=1, prefix=join(chunks))
    again = views.ended()
    assert (again.part.tokens, again.part.media) == (whole.part.tokens, whole.part.media)
