"""The torch learner on prompts with images: log-probs, gradients and positions against transformers' own forward pass,
and training that would not see its images."""

# torch and transformers are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText
from vision_cases import model_folder, picture, prompt_of, sequence_of

from penstock.backends.checkpoint.vision_config import read_vision_part
from penstock.backends.learners.batch.packing import pack, split_into_micro_batches
from penstock.backends.learners.batch.sequences import TrainBatch, TrainSequence, read_groups
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.sight import BlindModelError, check_sight
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.vision.processor import ImageProcessor
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.samples import Completed, Group, Part, Prompt, Reward, Sample, SampleKey, VersionSpan

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from penstock.messages.samples import Media


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def sequences(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[TrainSequence]:
    """Two samples of a prompt of two turns with three images, one of the same text with other images, whose answer has
    the token that stands for images, and one of text alone. Then samples of two turns, between which a tool has shown
    an image: two of the first prompt with images of their own, and one of the prompt without."""
    images = tmp_path_factory.mktemp("images")
    first = tuple(picture(images, seed, size) for seed, size in enumerate([(24, 16), (16, 16), (40, 24)]))
    other = tuple(picture(images, seed, size) for seed, size in enumerate([(24, 16), (16, 16), (40, 24)], start=5))
    text = "user: # and # differ?\nassistant: yes\nuser: and #?\nassistant: "
    ids, first = prompt_of(folder, text, first)
    _, other = prompt_of(folder, text, other)
    part = read_vision_part(folder)
    assert part is not None
    return [
        sequence_of(ids, [12, 13, 14, 15, 1], first, number=0, sample=0),
        sequence_of(ids, [20, 1], first, number=0, sample=1),
        sequence_of(ids, [20, part.image_token_id, 30], other, number=1, sample=2),
        sequence_of(prompt_of(folder, "user: hm\nassistant: ", ())[0], [40, 41, 1], (), number=2, sample=3),
        *as_read(groups_with_tool_images(folder, images, text, first)),
    ]


def groups_with_tool_images(folder: Path, images: Path, text: str, media: tuple[Media, ...]) -> list[Group]:
    groups: list[Group] = []
    for number, (shown, own, sizes) in enumerate(
        [(text, media, [(32, 24), (16, 40)]), ("user: hm\nassistant: ", (), [(24, 24)])]
    ):
        ids, at = prompt_of(folder, shown, own)
        samples: list[Sample] = []
        for index, size in enumerate(sizes):
            tool, seen = prompt_of(folder, "user: look #\nassistant: ", (picture(images, 10 + index, size),))
            made = [20, seen_id(folder), 30]  # the model has drawn the token that stands for images
            tokens = [*made, *tool, 31, 32, 1]
            mask = bytes([1] * len(made) + [0] * len(tool) + [1] * 3)
            part = Part(
                tokens=pack_tokens(tokens), logprobs=pack_floats([0.0] * len(tokens)), loss_mask=mask,
                spans=(VersionSpan(0, len(tokens)),), media=tuple(each.moved(len(made)) for each in seen),
            )  # fmt: skip
            outcome = Completed(reward=Reward(value=0.0))
            samples.append(Sample(key=SampleKey(number, index), parts=(part,), outcome=outcome))
        prompt = Prompt(row=0, epoch=0, tokens=pack_tokens(ids), media=at)
        groups.append(Group(group_id=number, prompt=prompt, samples=tuple(samples)))
    return groups


def as_read(groups: list[Group]) -> list[TrainSequence]:
    """As the learner reads them."""
    read = read_groups(groups, min_token_version=0).sequences
    assert [each.prompt for each in read] == [0, 0, 1]
    return [each._replace(prompt=(0, 2)[each.prompt], sample=4 + each.sample) for each in read]


def seen_id(folder: Path) -> int:
    part = read_vision_part(folder)
    assert part is not None
    return part.image_token_id


def loaded(folder: Path) -> PackedModel:
    return PackedModel.load(folder, dtype="float32", device=torch.device("cpu"))


def plain_logprobs(plain: torch.nn.Module, folder: Path, sequence: TrainSequence) -> Tensor:
    """Of one sequence alone, by transformers' own processor, positions and mask."""
    model, part = cast("Any", plain), read_vision_part(folder)
    assert part is not None
    ids = torch.from_numpy(sequence.tokens.astype(np.int64))[None]
    kinds = torch.zeros_like(ids).int()  # where no image stands, its token is text
    for each in sequence.media:
        kinds[:, each.at : each.at + each.num_tokens] = 1
    if not sequence.media:
        logits = model(input_ids=ids).logits
    else:
        patches = [ImageProcessor(part).patches(each) for each in sequence.media]
        values = torch.cat([torch.from_numpy(each.values) for each in patches])
        grids = torch.tensor([each.grid for each in patches])
        positions, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=grids)
        seen = torch.cat(model.model.get_image_features(values, grids).pooler_output)
        embedded = model.get_input_embeddings()(ids)
        embedded = embedded.masked_scatter(kinds[..., None].bool(), seen)
        logits = model(inputs_embeds=embedded, position_ids=positions).logits
    places = torch.from_numpy(sequence.trained)
    return cast("Tensor", logits[0].log_softmax(-1)[places - 1, ids[0, places]])


def test_logprobs_and_gradients_are_those_of_a_plain_loop(folder: Path, sequences: list[TrainSequence]) -> None:
    model = loaded(folder)
    plain = cast("Any", AutoModelForImageTextToText.from_pretrained(folder)).eval()
    expected = [plain_logprobs(plain, folder, sequence) for sequence in sequences]
    weights = [torch.linspace(-1.0, 2.0, len(each)) for each in expected]
    torch.autograd.backward(torch.stack([(w * each).sum() for w, each in zip(weights, expected, strict=True)]).sum())
    by_sample = {sequence.sample: index for index, sequence in enumerate(sequences)}
    parts = split_into_micro_batches(sequences, 90)
    assert len(parts) > 1, "several micro-batches, of which one has two samples of a prompt"
    for part in parts:
        found = model.logprobs(pack(part), temperature=1.0)
        wanted = torch.cat([expected[by_sample[each.sample]] for each in part])
        assert torch.allclose(found, wanted, atol=1e-5)
        torch.autograd.backward((torch.cat([weights[by_sample[each.sample]] for each in part]) * found).sum())
    own = dict(model.model.named_parameters())
    for name, parameter in plain.named_parameters():
        trained = own[name].grad
        assert parameter.grad is not None, name
        assert trained is not None, name
        assert torch.allclose(trained, parameter.grad, atol=1e-5), name
        assert parameter.grad.abs().max() > 0, name


def batch_of(sequences: list[TrainSequence]) -> TrainBatch:
    return TrainBatch(tuple(sequences), np.zeros(4), np.zeros(4, dtype=np.int64), 0)


def as_rolled_out(model: PackedModel, sequences: list[TrainSequence], *, is_blank: bool) -> list[TrainSequence]:
    """The same with the log-probs of an engine that saw the images, or none of them."""
    assert model.eyes is not None
    model.eyes.is_blank = is_blank
    made = [
        each._replace(rollout_logprobs=model.logprobs(pack([each]), temperature=1.0).detach().numpy())
        for each in sequences
    ]
    model.eyes.is_blank = False
    return made


@pytest.fixture
def model(folder: Path) -> PackedModel:
    return loaded(folder)


def test_a_model_that_looks_is_trained(model: PackedModel, sequences: list[TrainSequence]) -> None:
    batch = batch_of(as_rolled_out(model, sequences, is_blank=False))
    assert check_sight(model, batch, version=0, temperature=1.0)
    assert not check_sight(model, batch, version=1, temperature=1.0), "made by other weights: not known yet"
    assert not check_sight(model, batch_of(sequences[3:4]), version=0, temperature=1.0), "no image"


def test_a_learner_that_does_not_look_is_refused(
    model: PackedModel, sequences: list[TrainSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(as_rolled_out(model, sequences, is_blank=False))
    eyes = model.eyes
    assert eyes is not None
    look = eyes._features  # pyright: ignore[reportPrivateUsage]

    def blind(values: Tensor, grids: Tensor) -> Tensor:
        return torch.zeros_like(look(values, grids))

    monkeypatch.setattr(eyes, "_features", blind)
    with pytest.raises(BlindModelError, match="the learner does not look at its images: over 3 prompts"):
        check_sight(model, batch, version=0, temperature=1.0)


@pytest.mark.parametrize("is_blind", [True, False])
def test_the_first_step_of_a_learner_looks_before_it_trains(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_blind: bool
) -> None:
    model = loaded(folder)
    looks: list[int] = []
    eyes = model.eyes
    assert eyes is not None
    look = eyes._features  # pyright: ignore[reportPrivateUsage]

    def features(values: Tensor, grids: Tensor) -> Tensor:
        looks.append(len(grids))
        return look(values, grids) * (0.0 if is_blind else 1.0)

    monkeypatch.setattr(eyes, "_features", features)
    trainer = PolicyTrainer(
        model, LearnerOptions(), temperature=1.0, num_steps=2, reference=None, check_stop=lambda: None
    )
    before = {name: tensor.clone() for name, tensor in model.named_tensors().items()}
    media = (picture(tmp_path, 0),)
    groups = tuple(groups_with_tool_images(folder, tmp_path, "user: #\nassistant: ", media))

    if is_blind:
        with pytest.raises(BlindModelError, match="the learner does not look at its images"):
            trainer.train(groups, version=1, min_token_version=0)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_tensors().items())
        return
    with pytest.raises(BlindModelError, match="the engine does not look"):  # whose log-probs are all 0
        trainer.train(groups, version=1, min_token_version=0)
    assert len(looks) == 2, "with the images and with blank ones, and nothing was trained"


def test_an_engine_that_does_not_look_is_refused(model: PackedModel, sequences: list[TrainSequence]) -> None:
    batch = batch_of(as_rolled_out(model, sequences, is_blank=True))
    with pytest.raises(BlindModelError, match="the engine does not look at its images"):
        check_sight(model, batch, version=0, temperature=1.0)


def test_the_part_that_sees_is_left_as_it_is_by_its_name(model: PackedModel) -> None:
    model.freeze(LearnerOptions(freeze=(r"visual\.",)))
    trained = {name for name, weight in model.model.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in model.model.named_parameters() if ".visual." not in f".{name}"}
    assert len(trained) < len(list(model.model.parameters()))
