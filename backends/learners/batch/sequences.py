"""From groups of samples to sequences of tokens with what each trained token needs.

Axis letters: ``L`` tokens of a sequence (context and response), ``R`` tokens of a response, ``T`` trained tokens.

Invariants:

* A sequence is the prompt (or the context of an episode's part) and the response, as the ids that the engine saw and
  made; nothing is tokenised again.
* A token is trained if the model made it (loss mask) with a version of at least ``min_token_version``, and, with
  ``mask_old_tokens``, with the newest version of its sample; every other token is context and has no part in the loss,
  in its denominator, or in any figure under ``train/``.
* A sample that a filter dropped after the group's statistics is a sample without a sequence: its reward counts in the
  mean and spread of its group, as that of any sample none of whose tokens is trained.
* Every sample of a batch has a reward, except those that are imitated; the Scorer lets no other pass without. Theirs
  counts as 0 here, and nothing reads it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.backends.learners.batch.kept_sets import read_kept
from penstock.messages.arrays import TOKEN_BYTES
from penstock.messages.errors import UserFault
from penstock.messages.samples import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.backends.learners.batch.kept_sets import KeptSets
    from penstock.messages.samples import ExpertChoices, Group, Media, Part, Sample
    from penstock.messages.top_logprobs import TopLogprobs


class TeacherTop(NamedTuple):
    """What a teacher finds likeliest in the place of each trained token."""

    ids: NDArray[np.int64]
    """``[T, k]``"""
    logprobs: NDArray[np.float32]
    """``[T, k]``; NaN where it was not asked, −∞ where it has named fewer than k."""


class TrainSequence(NamedTuple):
    """One sequence that is trained on."""

    tokens: NDArray[np.int32]
    """``[L]``; ends with the last trained token, as nothing after it can matter."""
    num_context: int
    """Tokens that stand before the response, at least 1."""
    prompt: int
    """Sequences of a batch with the same number here have the same context and share its computation."""
    trained: NDArray[np.int64]
    """Places ``[T]`` of the trained tokens in ``tokens``, ascending and at least 1: place ``t`` is predicted at
    ``t − 1``."""
    rollout_logprobs: NDArray[np.float32]
    """``[T]``, as the engine reported them, NaN where nobody knows them; zeros for demonstrations of a warm start."""
    positions: NDArray[np.int64]
    """``[T]``: of each trained token among the response tokens of its sample, all parts of an episode in order."""
    versions: NDArray[np.int64]
    """``[T]``: which weights made each trained token; zeros for demonstrations."""
    sample: int
    """Index of its sample in the batch; the parts of an episode share it."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """``[T]``, as the teacher reported them; None where none was asked."""
    teacher_top: TeacherTop | None = None
    """None where none was asked."""
    is_recorded: bool = False
    """Its row held it: nobody knows of weights of this run that have made it."""
    is_imitated: bool = False
    """It is trained by likelihood, whatever the objective is."""
    experts: NDArray[np.int16] | None = None
    """``[N, layers with experts, k]``: the experts that its first N inputs went to when it was generated, N at most
    L − 1, −1 where nobody knows; None where nobody recorded them."""
    first: int = 0
    """Index of its first trained token among those of the batch, sequence after sequence."""
    part: int = 0
    """Which part of its sample it is."""
    is_of_one_version: bool = True
    """The same weights made the whole sample, all its parts, so none of its tokens was drawn over a cache of others."""
    media: tuple[Media, ...] = ()
    """Images among its tokens, in their order."""
    kept: KeptSets | None = None
    """Which tokens each trained token was drawn from; None: from all of the vocabulary."""

    @property
    def places(self) -> NDArray[np.int64]:
        """Of its trained tokens among those of the batch ``[T]``."""
        return np.arange(self.first, self.first + len(self.trained), dtype=np.int64)


class TrainBatch(NamedTuple):
    """One batch, sample by sample and part by part."""

    sequences: tuple[TrainSequence, ...]
    """Without those that have no trained token."""
    rewards: NDArray[np.float64]
    """``[S]`` by sample."""
    group_ids: NDArray[np.int64]
    """``[S]`` by sample."""
    num_masked_tokens: int
    """Tokens that the model made and that are too old to be trained, or that the user leaves out."""
    groups: tuple[Group, ...] = ()
    """Groups that the batch was read from."""

    @property
    def num_trained_tokens(self) -> int:
        return sum(len(sequence.trained) for sequence in self.sequences)

    def tokens_per_sample(self) -> NDArray[np.float32]:
        """Trained tokens of each sample ``[S]``."""
        counts = np.zeros(len(self.rewards), dtype=np.float32)
        for sequence in self.sequences:
            counts[sequence.sample] += len(sequence.trained)
        return counts


def read_groups(groups: Sequence[Group], *, min_token_version: int, mask_old_tokens: bool = False) -> TrainBatch:
    """Lay out a batch for training.

    Args:
        groups: of the batch.
        min_token_version: tokens of older versions are not trained.
        mask_old_tokens: nor are those of a sample that are older than its newest ones.

    Raises:
        ValueError: a sample has no reward, a part has no context at all, so that nothing predicts its first token, or a
            token is not among those that it was drawn from.
    """
    sequences: list[TrainSequence] = []
    rewards: list[float] = []
    group_ids: list[int] = []
    num_masked = num_trained = 0
    contexts: dict[tuple[bytes, tuple[Media, ...]], int] = {}
    for group in groups:
        for sample in group.samples:
            num_before = 0
            least = max(min_token_version, sample.newest_version or 0) if mask_old_tokens else min_token_version
            for index, part in enumerate(sample.parts):
                made, versions = _made_by_model(part), _versions(part)
                trained = np.flatnonzero(made & (versions >= least))
                num_masked += int(np.count_nonzero(made)) - len(trained)
                if len(trained):
                    context = part.context_tokens or group.prompt.tokens
                    media = group.prompt.media
                    if part.media or part.context_tokens:
                        media = part.media_after(group.prompt)
                    num_context = len(context) // TOKEN_BYTES
                    seen = tuple(each for each in media if each.at < num_context)
                    number = contexts.setdefault((context, seen), len(contexts))
                    sequence = _sequence(sample, part, context, number, trained, versions, len(rewards))
                    sequences.append(
                        sequence._replace(
                            positions=trained + num_before,
                            is_recorded=group.prompt.is_recorded and not group.prompt.pushed,
                            first=num_trained,
                            part=index,
                            media=tuple(each for each in media if each.at < len(sequence.tokens)),
                        )
                    )
                    num_trained += len(trained)
                num_before += part.num_tokens
            rewards.append(_reward(sample))
            group_ids.append(group.group_id)
        rewards += [counted.reward for counted in group.counted]
        group_ids += [group.group_id] * len(group.counted)
    return TrainBatch(
        sequences=tuple(sequences),
        rewards=np.asarray(rewards, dtype=np.float64),
        group_ids=np.asarray(group_ids, dtype=np.int64),
        num_masked_tokens=num_masked,
        groups=tuple(groups),
    )


def demonstration_sequence(prompt: Sequence[int], response: Sequence[int], *, sample: int) -> TrainSequence:
    """A demonstration: every token of ``response`` is trained.

    Raises:
        UserFault: the prompt or the response is empty.
    """
    if not prompt or not response:
        empty = "response" if prompt else "prompt"
        raise UserFault(f"demonstration {sample}: the {empty} has no tokens; both need at least one")
    return TrainSequence(
        tokens=np.asarray([*prompt, *response], dtype=np.int32),
        num_context=len(prompt),
        prompt=sample,
        trained=np.arange(len(prompt), len(prompt) + len(response), dtype=np.int64),
        rollout_logprobs=np.zeros(len(response), dtype=np.float32),
        positions=np.arange(len(response), dtype=np.int64),
        versions=np.zeros(len(response), dtype=np.int64),
        sample=sample,
    )


def open_ended_sequence(tokens: Sequence[int]) -> TrainSequence:
    """To ask a model what it says after each of ``tokens [T]``: that many tokens are trained."""
    # The appended id stands for what comes after the last; it is a target only and no input.
    return demonstration_sequence(tokens[:1], [*tokens[1:], 0], sample=0)


def demonstration_sequences(
    demonstrations: Iterable[tuple[Sequence[int], Sequence[int]]], check_length: Callable[[TrainSequence, str], None]
) -> list[TrainSequence]:
    """Those of a warm start.

    Args:
        demonstrations: prompts and responses.
        check_length: refuses one that the model cannot take, given what to call it.

    Raises:
        UserFault: a prompt or a response is empty, or too long.
    """
    sequences = [
        demonstration_sequence(prompt, response, sample=index)
        for index, (prompt, response) in enumerate(demonstrations)
    ]
    for index, sequence in enumerate(sequences):
        check_length(sequence, f"demonstration {index}")
    return sequences


def teacher_top_of(sequences: Sequence[TrainSequence]) -> TeacherTop | None:
    """Of all their trained tokens, sequence after sequence; None where no teacher was asked about any."""
    known = [sequence.teacher_top for sequence in sequences if sequence.teacher_top is not None]
    if not known:
        return None
    count, width = sum(len(sequence.trained) for sequence in sequences), max(top.ids.shape[1] for top in known)
    whole = TeacherTop(np.zeros((count, width), dtype=np.int64), np.full((count, width), np.nan, dtype=np.float32))
    start = 0
    for sequence in sequences:
        end = start + len(sequence.trained)
        if (top := sequence.teacher_top) is not None:
            whole.ids[start:end, : top.ids.shape[1]] = top.ids
            whole.logprobs[start:end] = -np.inf
            whole.logprobs[start:end, : top.ids.shape[1]] = top.logprobs
        start = end
    return whole


def joined(arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """End to end; of no arrays, nothing."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])


def _sequence(
    sample: Sample,
    part: Part,
    context: bytes,
    prompt: int,
    trained: NDArray[np.int64],
    versions: NDArray[np.int64],
    index: int,
) -> TrainSequence:
    if not context:
        raise ValueError(f"sample {sample.key}: the prompt has no tokens, so nothing predicts the first response token")
    before = np.frombuffer(context, dtype=np.int32)
    response: NDArray[np.int32] = np.frombuffer(part.tokens, dtype=np.int32)[: trained[-1] + 1]
    return TrainSequence(
        tokens=np.concatenate([before, response]),
        num_context=len(before),
        prompt=prompt,
        trained=trained + len(before),
        rollout_logprobs=np.frombuffer(part.logprobs, dtype=np.float32)[trained],
        positions=trained,
        versions=versions[trained],
        sample=index,
        is_of_one_version=len(sample.versions) < 2,
        is_imitated=sample.loss is Loss.SUPERVISED,
        teacher_logprobs=np.frombuffer(part.teacher_logprobs, dtype=np.float32)[trained]
        if part.teacher_logprobs
        else None,
        teacher_top=None if part.teacher_top is None else _teacher_top(part.teacher_top, trained),
        experts=None if part.experts is None else _experts(part.experts, len(before) + int(trained[-1])),
        kept=None if part.kept is None else read_kept(part.kept, trained, response[trained]),
    )


def _teacher_top(top: TopLogprobs, trained: NDArray[np.int64]) -> TeacherTop:
    shape = (-1, top.per_token)
    ids, logprobs = np.frombuffer(top.ids, dtype="<i4"), np.frombuffer(top.logprobs, dtype="<f4")
    return TeacherTop(ids.reshape(shape)[trained].astype(np.int64), logprobs.reshape(shape)[trained])


def _experts(record: ExpertChoices, num_inputs: int) -> NDArray[np.int16]:
    """``[N, layers, k]``, of the inputs of a sequence that ends with its last trained token."""
    ids: NDArray[np.uint8 | np.uint16] = np.frombuffer(record.ids, dtype=f"<u{record.id_bytes}")
    is_known = ids != np.iinfo(ids.dtype).max
    known: NDArray[np.int16] = np.where(is_known, ids, -1).astype(np.int16)
    return known.reshape(-1, record.num_layers, record.per_token)[:num_inputs]


def _made_by_model(part: Part) -> NDArray[np.bool_]:
    """``[R]``"""
    if not part.loss_mask:
        return np.ones(part.num_tokens, dtype=np.bool_)
    mask: NDArray[np.bool_] = np.frombuffer(part.loss_mask, dtype=np.uint8) != 0
    return mask


def _versions(part: Part) -> NDArray[np.int64]:
    """``[R]``"""
    versions = np.asarray([span.version for span in part.spans], dtype=np.int64)
    return np.repeat(versions, [span.num_tokens for span in part.spans])


def _reward(sample: Sample) -> float:
    if sample.reward is None and sample.loss is Loss.SUPERVISED:
        return 0.0
    if sample.reward is None:
        raise ValueError(f"sample {sample.key} came to the learner without a reward; every trained sample needs one")
    if not math.isfinite(sample.reward):
        raise UserFault(
            f"sample {sample.key} came to the learner with a reward of {sample.reward}, which must be finite; mend the "
            "reward function (reward.function)"
        )
    return sample.reward
