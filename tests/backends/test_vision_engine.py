"""The embedded engine on prompts with images: its log-probs are the learner's, whatever runs beside."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from vision_cases import model_folder, picture, prompt_of, sequence_of

from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.engines.torch.requests import GenerationRequest, RequestError
from penstock.backends.engines.torch.second_set import SecondSet
from penstock.backends.learners.batch.packing import pack
from penstock.backends.learners.torch.model import PackedModel
from penstock.messages.arrays import floats_view, pack_tokens, tokens_view
from penstock.messages.errors import UserFault
from penstock.messages.parts import cut

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.messages.samples import Media, Part


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def engine_of(folder: Path, num_slots: int) -> TorchEngine:
    engine = TorchEngine(read_model_config(folder), EngineSettings(num_slots=num_slots))
    with CheckpointTensors(folder) as tensors:
        engine.load(tensors, 0)
    return engine


def drawn(engine: TorchEngine, requests: list[GenerationRequest]) -> dict[object, Part]:
    for request in requests:
        assert engine.submit(request) is None
    ended: dict[object, Part] = {}
    while len(ended) < len(requests):
        ended |= {each.tag: each.part for each in engine.step().ended}
    return ended


def test_logprobs_are_those_of_the_learner(folder: Path, tmp_path: Path) -> None:
    sizes = [(24, 16), (16, 16), (40, 24)]
    many = tuple(picture(tmp_path, seed, size) for seed, size in enumerate(sizes))
    other = tuple(picture(tmp_path, seed, size) for seed, size in enumerate(sizes, start=5))
    text = "user: # and # differ?\nassistant: yes\nuser: and #?\nassistant: "
    prompts: list[tuple[str, tuple[Media, ...]]] = [(text, many), (text, other), ("user: hm\nassistant: ", ())]
    requests: list[GenerationRequest] = []
    for number, (shown, media) in enumerate(prompts):
        ids, at = prompt_of(folder, shown, media)
        requests += [
            GenerationRequest(
                tag=(number, index),
                prompt=pack_tokens(ids),
                media=at,
                seed=10 * number + index,
                max_new_tokens=12 + index,
            )
            for index in range(3)
        ]
    engine = engine_of(folder, num_slots=5)  # fewer than requests, so that slots are taken over and moved
    ended = drawn(engine, requests)
    again = GenerationRequest(
        tag="again",
        prompt=requests[0].prompt,
        media=requests[0].media,
        seed=0,
        max_new_tokens=12,
        prefix=cut(ended[0, 0], 0, 5),
    )
    assert drawn(engine, [again])["again"].tokens == ended[0, 0].tokens, "it goes on where it was cut off"
    model = PackedModel.load(folder, dtype="float32", device=torch.device("cpu"))
    for request in requests:
        part = ended[request.tag]
        sequence = sequence_of(
            tokens_view(request.prompt).tolist(), tokens_view(part.tokens).tolist(), request.media, number=0, sample=0
        )
        expected = model.logprobs(pack([sequence]), temperature=1.0).detach().numpy()
        assert np.allclose(floats_view(part.logprobs), expected, atol=2e-5), request.tag
        if request.media:
            assert model.eyes is not None
            model.eyes.is_blank = True
            blank = model.logprobs(pack([sequence]), temperature=1.0).detach().numpy()
            model.eyes.is_blank = False
            assert np.abs(blank - expected).max() > 1e-3, "and would be others without the images"


def test_a_second_set_of_weights_sees_with_its_own(folder: Path, tmp_path: Path) -> None:
    ids, media = prompt_of(folder, "user: #\nassistant: ", (picture(tmp_path, 0),))
    wanted = GenerationRequest(tag=0, prompt=pack_tokens(ids), media=media, seed=0, max_new_tokens=8)
    with CheckpointTensors(folder) as tensors:
        weights = {name: tensors[name].float() for name in tensors}
    other = {name: tensor + 0.05 * ("visual" in name) for name, tensor in weights.items()}
    loaded, swapped, before = (engine_of(folder, num_slots=4) for _ in range(3))
    loaded.load(other, 1)
    second = SecondSet(swapped, torch.device("cpu"))
    second.fill(other, lambda: False)
    second.offer("other")
    assert second.swap_in("other", 1)
    parts = [drawn(engine, [wanted])[0] for engine in (loaded, swapped, before)]
    assert parts[0] == parts[1]
    assert parts[0].logprobs != parts[2].logprobs


def test_what_cannot_be_seen_is_refused(folder: Path, tmp_path: Path) -> None:
    engine = engine_of(folder, num_slots=4)
    ids, media = prompt_of(folder, "user: #\nassistant: ", (picture(tmp_path, 0),))
    prompt = pack_tokens(ids)
    too_many = GenerationRequest(tag=0, prompt=prompt, media=media * 2, seed=0, max_new_tokens=4)
    with pytest.raises(RequestError, match="an image has 0 places among the tokens from 7 on, and 6 squares"):
        engine.submit(too_many)
    shutil.copyfile(picture(tmp_path, 1).reference, media[0].reference)
    changed = engine_of(folder, num_slots=4)
    with pytest.raises(RequestError, match="is not the image that it was when the rows were read"):
        changed.submit(GenerationRequest(tag=0, prompt=prompt, media=media, seed=0, max_new_tokens=4))
    with CheckpointTensors(folder) as tensors, pytest.raises(UserFault, match=r"lack visual\.merger"):
        engine.load({name: tensors[name] for name in tensors if "visual.merger.mlp" not in name}, 1)
