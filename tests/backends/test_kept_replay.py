"""Tokens that cut-offs leave for a draw: recorded by the engine, and the only ones that the learner's log-probs are
taken over, so that a policy that has not moved has a ratio of 1."""

# transformers' factories have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pytest
import torch
from engine_cases import (
    VOCAB_SIZE,
    Case,
    logprobs_of,
    open_engine,
    random_tokens,
    request,
    run_all,
    run_steps,
    tokens_of,
    weights_of,
)
from test_torch_engine_generic import as_torch, open_generic

from penstock.backends.engines.torch.engine_settings import OtherSampling
from penstock.backends.engines.torch.sampling import Sampler, uniforms
from penstock.backends.episodes.transcript import Transcript
from penstock.backends.learners.batch.kept_sets import KeptSets, kept_of
from penstock.backends.learners.batch.packing import pack
from penstock.backends.learners.batch.sequences import read_groups
from penstock.backends.learners.options import LearnerOptions, ObjectiveOptions
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.learners.training.metrics import batch_metrics
from penstock.messages.arrays import pack_tokens
from penstock.messages.kept_tokens import KeptTokens
from penstock.messages.parts import cut
from penstock.messages.samples import Completed, Group, Part, Prompt, Reward, Sample, SampleKey
from penstock.messages.turn_sampling import TurnSampling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

CPU = torch.device("cpu")
TEMPERATURE = 0.9
TOP_P = Sampler(temperature=TEMPERATURE, top_p=0.7, num_recorded=64)
PROMPT = random_tokens(12, seed=5)


@pytest.fixture(scope="module")
def groups(case: Case) -> tuple[Group, ...]:
    """Two groups as an engine made them, one sample of which went on from a prefix."""
    engine = open_engine(case, num_slots=3, sampler=TOP_P)
    prompts = [PROMPT, random_tokens(7, seed=6)]
    ended = run_all(engine, [request(tag, prompts[tag // 4], 6 + 3 * tag) for tag in range(8)])
    again = replace(request(1, PROMPT, 9), prefix=cut(ended[1].part, 0, 4))
    parts = {tag: end.part for tag, end in (ended | run_all(engine, [again])).items()}
    return tuple(group_of(number, prompts[number], [parts[4 * number + i] for i in range(4)]) for number in range(2))


def group_of(group_id: int, prompt: list[int], parts: list[Part]) -> Group:
    samples = tuple(
        Sample(
            key=SampleKey(group_id, index),
            parts=(part,),
            outcome=Completed(reward=Reward(value=(3 * index + group_id) % 4 / 3)),
        )
        for index, part in enumerate(parts)
    )
    return Group(group_id=group_id, prompt=Prompt(row=group_id, epoch=0, tokens=pack_tokens(prompt)), samples=samples)


def sets_of(part: Part) -> list[set[int]]:
    """The tokens that each was drawn from; empty: all."""
    kept = part.kept
    counts = [0] * part.num_tokens if kept is None else np.frombuffer(kept.counts, "<u2").tolist()
    ids = iter([] if kept is None else np.frombuffer(kept.ids, "<i4").tolist())
    return [{next(ids) for _ in range(count)} for count in counts]


def rows_of(model: PreTrainedModel, context: list[int], tokens: list[int]) -> torch.Tensor:
    """Logits ``[T, V]`` that predict each of ``tokens``, at the temperature."""
    return cast("torch.Tensor", model(torch.tensor([context + tokens])).logits)[0, len(context) - 1 : -1] / TEMPERATURE


def masked_logprobs(rows: torch.Tensor, tokens: list[int], sets: list[set[int]]) -> torch.Tensor:
    """The formula: logits outside of the set are −∞."""
    outside = torch.ones_like(rows, dtype=torch.bool)
    for row, own in enumerate(sets):
        outside[row, sorted(own or range(rows.shape[1]))] = False
    return rows.masked_fill(outside, float("-inf")).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


# --- the engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(top_p=0.7),
        Sampler(top_k=7),
        Sampler(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
        Sampler(temperature=0.7, min_p=0.1),
    ],
)
def test_what_is_recorded_is_what_was_left_and_changes_no_draw(sampler: Sampler) -> None:
    logits = torch.randn(100, 50, generator=torch.Generator().manual_seed(0)) * 2
    uniform = torch.as_tensor(uniforms(3, 100))[:, None]
    plain, _ = sampler(logits, uniform)
    tokens, logprobs, kept = replace(sampler, num_recorded=60).recorded(logits, uniform)
    assert kept is not None
    assert torch.equal(tokens, plain)
    left = sampler._truncated((logits / sampler.temperature).softmax(-1))  # pyright: ignore[reportPrivateUsage]
    expected = (left.gather(1, tokens) / left.sum(1, keepdim=True)).log()
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    for row, ids in zip(left, kept.tolist(), strict=True):
        assert {token for token in ids if token >= 0} == set(row.nonzero().flatten().tolist())


def test_no_more_than_the_bound_are_drawn_from_and_the_log_probs_know() -> None:
    logits = torch.zeros(4000, 30)  # all alike: no cut-off can tell them apart
    sampler = Sampler(top_p=0.9, num_recorded=8)
    tokens, logprobs, kept = sampler.recorded(logits, torch.as_tensor(uniforms(1, 4000))[:, None])
    assert kept is not None
    assert kept.shape == (4000, 8)
    assert (kept == tokens).any(1).all()
    assert len(set(tokens.flatten().tolist())) == 8
    torch.testing.assert_close(logprobs, torch.full_like(logprobs, -np.log(8)))


def test_the_likeliest_token_and_the_whole_vocabulary_have_no_record() -> None:
    logits, uniform = torch.randn(3, 20), torch.full((3, 1), 0.5, dtype=torch.float64)
    assert replace(TOP_P, temperature=0).recorded(logits, uniform).kept is None
    assert replace(TOP_P, num_recorded=0).recorded(logits, uniform).kept is None


@pytest.mark.parametrize("kind", ["ours", "transformers'"])
def test_responses_say_what_their_tokens_were_drawn_from_also_after_an_interruption(case: Case, kind: str) -> None:
    sampler = replace(TOP_P, num_recorded=VOCAB_SIZE)
    if kind == "ours":
        engine = open_engine(case, num_slots=2, sampler=sampler, progress_tokens=4)
    else:
        engine = as_torch(open_generic(case.folder, num_slots=2, sampler=sampler, progress_tokens=4))
    wanted = [request(tag, PROMPT, 20 + tag) for tag in range(5)]
    whole = run_all(engine, wanted)
    for each in wanted:
        engine.submit(each)
    _, advanced = run_steps(engine, 9)
    halves = {end.tag: end.part for end in engine.interrupt()}
    assert any(part.num_tokens for part in halves.values())
    resumed = run_all(engine, [replace(each, prefix=halves[each.tag]) for each in wanted])
    for tag, end in whole.items():
        part, sets = end.part, sets_of(end.part)
        assert (resumed[tag].part.kept, resumed[tag].part.tokens) == (part.kept, part.tokens)
        with torch.no_grad():
            rows = rows_of(case.model, PROMPT, tokens_of(part))
        left = sampler._truncated(rows.softmax(-1))  # pyright: ignore[reportPrivateUsage]
        assert sets == [set(row.nonzero().flatten().tolist()) for row in left]
        assert 1 < sum(map(len, sets)) / len(sets) < VOCAB_SIZE * 0.8, "something is cut off, and not all"
        torch.testing.assert_close(logprobs_of(part), masked_logprobs(rows, tokens_of(part), sets), atol=1e-5, rtol=0)
    for report in advanced:
        begin, num_tokens = report.from_token, report.chunk.num_tokens
        assert report.chunk.kept == cut(whole[cast("int", report.tag)].part, begin, begin + num_tokens).kept


def test_requests_that_are_drawn_otherwise_keep_no_record_of_others(case: Case) -> None:
    """An evaluation beside training, and a turn at temperature 0, in slots that had records before."""
    other = OtherSampling(sampler=Sampler(), stop_token_ids=frozenset(), stop_strings=None)
    engine = open_engine(case, num_slots=2, sampler=TOP_P, others=(other,))
    run_all(engine, [request(tag, PROMPT, 30) for tag in range(2)])
    ended = run_all(
        engine,
        [
            request(0, PROMPT, 20),
            replace(request(1, PROMPT, 20), sampling_index=1),
            replace(request(2, PROMPT, 20), sampler=TOP_P.turned(TurnSampling(temperature=0.0))),
        ],
    )
    assert all(sets_of(ended[0].part))
    assert ended[1].part.kept is ended[2].part.kept is None


def test_asleep_an_engine_holds_no_memory_for_records_and_awake_it_records_again(case: Case) -> None:
    plain = open_engine(case, num_slots=4, max_context=64, sampler=replace(TOP_P, num_recorded=0))
    engine = open_engine(case, num_slots=4, max_context=64, sampler=TOP_P)
    wanted = [request(tag, PROMPT, 20) for tag in range(3)]
    before = run_all(engine, wanted)
    assert engine.sleep() - plain.sleep() == 4 * 64 * TOP_P.num_recorded * 4
    engine.load(weights_of(case.model), 1)
    after = run_all(engine, wanted)
    assert [after[tag].part.kept for tag in range(3)] == [before[tag].part.kept for tag in range(3)]


def test_an_episode_keeps_the_record_of_its_turns_in_their_places(groups: tuple[Group, ...]) -> None:
    """Between them stand tokens that the model did not make, and a turn that was drawn otherwise."""
    [first, second] = (sample.parts[0] for sample in groups[0].samples[:2])
    script = Transcript(groups[0].prompt)
    script.add_model(first)
    script.add_foreign(pack_tokens([3, 4, 5]))
    script.add_model(msgspec.structs.replace(second, kept=None), is_trained=False)
    script.add_model(second)
    whole = script.whole()
    none = [set[int]()]
    expected = [*sets_of(first), *(none * (3 + second.num_tokens)), *sets_of(second)]
    assert sets_of(whole) == expected
    assert sets_of(script.slice(2, whole.num_tokens - 1)) == expected[2:-1]
    again = Transcript(groups[0].prompt)
    again.add_known(whole)
    assert again.whole().kept == whole.kept
    [sequence] = read_groups([group_of(0, PROMPT, [whole])], min_token_version=0).sequences
    assert sequence.kept is not None
    assert unpacked(sequence.kept) == [*sets_of(first), *sets_of(second)]


# --- the learner --------------------------------------------------------------------------------------------------


def test_with_equal_weights_the_ratio_is_1_with_replay_and_is_not_without(
    case: Case, groups: tuple[Group, ...]
) -> None:
    model = PackedModel.load(case.folder, dtype="float32", device=CPU)
    sequences = read_groups(groups, min_token_version=0).sequences
    with torch.no_grad():
        packed = pack(sequences)
        ratio = (model.logprobs(packed, temperature=TEMPERATURE) - model.tensor(packed.rollout_logprobs)).exp()
        whole = model.logprobs(packed._replace(kept_ids=None), temperature=TEMPERATURE)
    assert (ratio - 1).abs().max() < 3e-6
    assert ((whole - model.tensor(packed.rollout_logprobs)).exp() < 0.9).float().mean() > 0.5


@pytest.mark.parametrize("max_tokens", [16, 60, 4096])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_gradient_is_that_of_a_plain_loop(
    case: Case, groups: tuple[Group, ...], max_tokens: int, *, mixed: bool
) -> None:
    """With a KL to a reference over the same tokens and an entropy over the whole vocabulary; ``mixed``: with samples
    that have no record, which are taken over the whole vocabulary."""
    given = tuple(map(half_recorded, groups)) if mixed else groups
    objective = ObjectiveOptions(kl_coef=0.2, entropy_coef=0.01, clip_low=0.9, clip_high=0.9)
    model = PackedModel.load(case.folder, dtype="float32", device=CPU)
    reference = PackedModel.load(case.folder, dtype="float32", device=CPU)
    for parameter in reference.model.parameters():
        parameter.data.mul_(1.05)
    trainer = PolicyTrainer(
        model,
        LearnerOptions(max_tokens_per_micro_batch=max_tokens, objective=objective),
        temperature=TEMPERATURE,
        num_steps=10,
        reference=reference,
        check_stop=lambda: None,
    )
    loss = trainer.accumulate(read_groups(given, min_token_version=0), version=0)["train/loss"]

    plain, base = plain_model(case), plain_model(case, scale=1.05)
    expected = torch.stack(list(plain_losses(plain, base, given, objective))).sum()
    expected = expected / sum(sample.num_tokens for group in given for sample in group.samples)
    torch.autograd.backward(expected)
    assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
    for (name, found), (_, wanted) in zip(model.model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, atol=1e-5, rtol=1e-4, msg=name)


def half_recorded(group: Group) -> Group:
    samples = tuple(
        msgspec.structs.replace(each, parts=(msgspec.structs.replace(each.parts[0], kept=None),))
        if each.key.index % 2
        else each
        for each in group.samples
    )
    return msgspec.structs.replace(group, samples=samples)


def plain_losses(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    groups: tuple[Group, ...],
    objective: ObjectiveOptions,
) -> Iterator[torch.Tensor]:
    for group in groups:
        rewards = torch.tensor([cast("float", sample.reward) for sample in group.samples])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for sample, advantage in zip(group.samples, advantages, strict=True):
            [part] = sample.parts
            context, tokens = list(memoryview(group.prompt.tokens).cast("i")), tokens_of(part)
            rows = rows_of(model, context, tokens)
            new = masked_logprobs(rows, tokens, sets_of(part))
            ratio = (new - logprobs_of(part)).exp()
            clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
            loss = torch.maximum(-ratio * advantage, -clipped * advantage)
            with torch.no_grad():
                base = masked_logprobs(rows_of(reference, context, tokens), tokens, sets_of(part))
            loss = loss + objective.kl_coef * ((base - new).exp() - 1 + new - base)
            entropy = -(rows.softmax(-1) * rows.log_softmax(-1)).sum(-1)
            yield (loss - objective.entropy_coef * entropy).sum()


def plain_model(case: Case, scale: float = 1.0) -> PreTrainedModel:
    """Its weights times ``scale``."""
    factory: Any = type(case.model)
    model: PreTrainedModel = factory.from_pretrained(case.folder, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.mul_(scale)
    return model


def test_a_token_that_is_not_among_those_it_was_drawn_from_is_refused(groups: tuple[Group, ...]) -> None:
    part = groups[0].samples[0].parts[0]
    wrong = KeptTokens(b"\1\0" * part.num_tokens, pack_tokens((token + 1) % VOCAB_SIZE for token in tokens_of(part)))
    sample = msgspec.structs.replace(groups[0].samples[0], parts=(msgspec.structs.replace(part, kept=wrong),))
    group = msgspec.structs.replace(groups[0], samples=(sample,))
    with pytest.raises(ValueError, match="not among those that its engine says"):
        read_groups([group], min_token_version=0)


def test_sets_follow_the_tokens_that_are_trained(groups: tuple[Group, ...]) -> None:
    """A loss mask leaves tokens out, and a conversion some more."""
    sample = groups[0].samples[2]
    part = msgspec.structs.replace(sample.parts[0], loss_mask=bytes(i % 3 > 0 for i in range(sample.num_tokens)))
    group = msgspec.structs.replace(groups[0], samples=(msgspec.structs.replace(sample, parts=(part,)),))
    [sequence] = read_groups([group], min_token_version=0).sequences
    assert sequence.kept is not None
    wanted = [own for place, own in enumerate(sets_of(part)) if place % 3]
    assert unpacked(sequence.kept) == wanted
    taken = np.arange(0, len(wanted), 2)
    assert unpacked(sequence.kept.at(taken)) == wanted[::2]
    padded = kept_of([sequence, sequence._replace(kept=None)])
    assert padded is not None
    assert [set(row[row >= 0].tolist()) for row in padded] == wanted + [set[int]()] * len(wanted)


def unpacked(sets: KeptSets) -> list[set[int]]:
    ends = np.cumsum(sets.counts)
    return [set(sets.ids[end - count : end].tolist()) for count, end in zip(sets.counts, ends, strict=True)]


def test_the_run_is_told_how_many_were_left(groups: tuple[Group, ...]) -> None:
    counts = [len(own) for group in groups for sample in group.samples for own in sets_of(sample.parts[0])]
    assert batch_metrics(groups)["rollout/top_p_kept_vocab_per_token"] == pytest.approx(np.mean(counts))
    bare = [
        msgspec.structs.replace(half_recorded(group), samples=half_recorded(group).samples[1::2]) for group in groups
    ]
    assert "rollout/top_p_kept_vocab_per_token" not in batch_metrics(bare)
