"""Every objective through the trainer: as its formula says on one sequence at a time, however the tokens are packed.

The plain side runs transformers' own attention on single sequences and computes objectives with loops over samples; it
shares no code with the learner's objectives.
"""

# Transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from penstock.backends.learners.batch.packing import split_into_micro_batches
from penstock.backends.learners.batch.sequences import read_groups
from penstock.backends.learners.objectives.spec import OBJECTIVES as NAMED
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.objectives.validity import needs_reference, objective_problem
from penstock.backends.learners.options import LearnerOptions, ObjectiveOptions
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.messages.arrays import floats_view, pack_floats, pack_tokens, tokens_view
from penstock.messages.base import Metric
from penstock.messages.errors import UserFault
from penstock.messages.samples import Completed, Group, Loss, Part, Prompt, Reward, Sample, SampleKey, VersionSpan
from penstock.messages.top_logprobs import TopLogprobs

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.learners.training.batch_trainer import StepResult

AutoModel: Any = AutoModelForCausalLM  # transformers' factories have no types
CPU = torch.device("cpu")
VOCAB = 40
TEMPERATURE = 0.8
WITHOUT_RATIO = ("likelihood", "divergence", "dpo", "kto")
"""Losses that ask nobody how likely a token was when it was made."""
VERSION = 6
"""Of the policy that opens the step; tokens are made by versions 3 to 6."""
NUM_BATCHES = 4
NUM_QUICK = 2
"""Of them are computed by the formulas and in other micro-batches; nightly ten and fifty others are."""
NUM_TOP = 3

MIS_FIGURES = (
    "mis_tis_mask_fraction_low",
    "mis_rs_mask_fraction_low",
    "mis_rs_mask_fraction_high",
    "mis_rs_catastrophic_token_fraction",
    "mis_rs_catastrophic_seq_fraction",
)
MIS = {"old_logprobs": "recompute", "correction": "mis"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.1, "entropy_coef": 0.02},
    "dapo": {"dual_clip": 3.0},
    "dr_grpo": {"constant_tokens": 40, "kl_coef": 0.1, "kl_estimator": "k2"},
    "gspo": {"clip_low": 0.05, "clip_high": 0.05, "entropy_coef": 0.02},
    "gmpo": {"clip_low": 0.1, "clip_high": 0.2, "behaviour_kl_coef": 0.1},
    "sapo": {"tau_pos": 0.7, "tau_neg": 2.0, "entropy_coef": 0.02},
    "sapo recomputed": {"name": "sapo", "old_logprobs": "recompute", "behaviour_kl_coef": 0.2},
    "maxrl": {"constant_tokens": 40, "kl_coef": 0.1},
    "gdpo": {"component_weights": {"short": 0.5, "right": 1.0}},
    "cispo": {"clip_high": 1.0},
    "rloo": {"constant_tokens": 40, "kl_coef": 0.05, "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_plus_plus": {"kl_coef": 0.05, "discount": 0.95},
    "reinforce_plus_plus_baseline": {"kl_coef": 0.05},
    "reinforce": {"kl_coef": 0.05, "whiten": True},
    "dppo": {"clip_low": 0.01, "clip_high": 0.01},
    "dppo_kl": {"name": "dppo", "policy_loss": "dppo_kl", "clip_low": 1e-3, "clip_high": 1e-3},
    "tis": {"name": "dapo", "old_logprobs": "recompute", "tis_clip": 1.5, "tis_clip_low": 0.3},
    "icepop": {"name": "dapo", "old_logprobs": "recompute", "correction": "icepop"},
    "a3po": {"name": "dapo", "old_logprobs": "interpolate"},
    "mis sequence": {"name": "grpo", **MIS, "mis": {"level": "sequence", "mode": "clip", "upper": 5.0}},
    "mis rejecting": {
        "name": "dapo",
        **MIS,
        "mis": {
            "mode": "mask",
            "upper": 2.0,
            "reject_level": "geometric",
            "reject_upper": 1.2,
            "veto": 0.4,
            "normalize": True,
        },
    },
    "distill": {},
    "distill whitened": {"name": "distill", "opd_kl_coef": 0.5, "whiten": True, "old_logprobs": "recompute"},
    "grpo distilled": {"name": "grpo", "opd_kl_coef": 0.3, "old_logprobs": "interpolate", "kl_coef": 0.1},
    "gkd": {"entropy_coef": 0.02},
    "reverse KL to a teacher": {"name": "gkd", "distill_beta": 1.0, "kl_coef": 0.1},
    "opsm": {"name": "dapo", "opsm_delta": 0.05},
    "sft": {},
    "rejection_sampling": {"min_reward": 0.2, "kl_coef": 0.1},
    "threshold": {"name": "rejection_sampling", "estimator": "threshold", "min_reward": 0.5},
    "reward_weighted": {"reward_scale": 0.3, "max_weight": 2.0, "entropy_coef": 0.02},
    "dpo": {"dpo_beta": 0.3},
    "every pair": {"name": "dpo", "dpo_pairs": "all", "dpo_label_smoothing": 0.1},
    "ln_dpo": {"dpo_beta": 2.0},
    "ipo": {},
    "kto": {"desirable_weight": 1.3, "undesirable_weight": 0.8},
    "unbiased KL": {"name": "dapo", "kl_coef": 0.1, "unbiased_kl": True, "kl_estimator": "low_var_kl"},
}


def options_of(case: str) -> ObjectiveOptions:
    options = objective(**{"name": case, **OBJECTIVES[case]})
    assert objective_problem(options) is None
    return options


def random_policy(folder: Path) -> Path:
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=128, initializer_range=0.3, pad_token_id=0,
        bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_policy(tmp_path_factory.mktemp("model"))


def make_groups(seed: int, behaviour: PreTrainedModel) -> tuple[Group, ...]:
    """Groups of different sizes with loss masks, several versions, and samples of two parts; the engine's log-probs
    are those of the model and some noise."""
    draw = random.Random(seed)
    groups: list[Group] = []
    for group_id, size in ((40, 3), (41, 4), (38, 2)):
        prompt = Prompt(row=0, epoch=0, tokens=pack_tokens(draw.randrange(2, VOCAB) for _ in range(4 + group_id % 5)))
        samples: list[Sample] = []
        for index in range(size):
            parts = [make_part(draw, behaviour, prompt, masked=index % 2 == 1, context=False)]
            if index == 1:
                parts.append(make_part(draw, behaviour, prompt, masked=True, context=True))
            earned = random.Random(f"components {seed} {group_id} {index}")
            components = tuple(Metric(name, earned.random()) for name in ("right", "other", "short"))
            outcome = Completed(reward=Reward(value=draw.random(), components=components))
            samples.append(Sample(key=SampleKey(group_id, index), parts=tuple(parts), outcome=outcome))
        groups.append(Group(group_id=group_id, prompt=prompt, samples=tuple(samples)))
    return tuple(groups)


def make_part(draw: random.Random, behaviour: PreTrainedModel, prompt: Prompt, *, masked: bool, context: bool) -> Part:
    num_tokens = draw.randint(2, 20)
    tokens = [draw.randrange(2, VOCAB) for _ in range(num_tokens)]
    before = [draw.randrange(2, VOCAB) for _ in range(7)] if context else []
    with torch.no_grad():
        logprobs, _ = plain_scores(behaviour, before or list(tokens_view(prompt.tokens)), tokens)
    num_old = draw.randint(0, num_tokens)
    first = draw.randint(3, 5)
    taught = random.Random(f"teacher {tokens}")
    return Part(
        tokens=pack_tokens(tokens),
        logprobs=pack_floats(min(0.0, value + draw.gauss(0.0, 0.5)) for value in logprobs.tolist()),
        spans=(VersionSpan(first, num_old), VersionSpan(draw.randint(first, 6), num_tokens - num_old)),
        loss_mask=bytes([1, *(draw.randint(0, 1) for _ in range(num_tokens - 1))]) if masked else b"",
        context_tokens=pack_tokens(before),
        teacher_logprobs=pack_floats(value + taught.gauss(0.0, 0.7) for value in logprobs.tolist()),
        teacher_top=likeliest(taught, num_tokens),
    )


def likeliest(draw: random.Random, num_tokens: int) -> TopLogprobs:
    """Of a teacher with a larger vocabulary; for one place it has named two tokens only."""
    ids, logprobs = list[int](), list[float]()
    for place in range(num_tokens):
        ids += draw.sample(range(VOCAB + 2), NUM_TOP)
        shares = [draw.random() for _ in range(NUM_TOP + 1)]
        logprobs += [math.log(share / sum(shares)) for share in shares[:NUM_TOP]]
        if place == 1:
            logprobs[-1] = -math.inf
    return TopLogprobs(NUM_TOP, pack_tokens(ids), pack_floats(logprobs))


def plain_divergence(logs: Tensor, part: Part, beta: float) -> Tensor:
    """Place by place, and there token by token: those that both know, and all others together."""
    assert part.teacher_top is not None
    ids, taught = tokens_view(part.teacher_top.ids), floats_view(part.teacher_top.logprobs)
    found: list[Tensor] = []
    for place, own in enumerate(logs.double()):
        at = range(place * NUM_TOP, (place + 1) * NUM_TOP)
        named = [(math.exp(taught[i]), own[ids[i]].exp()) for i in at if ids[i] < VOCAB and taught[i] > -math.inf]
        named.append((1 - sum(p for p, _ in named), 1 - torch.stack([q for _, q in named]).sum()))
        total = torch.zeros((), dtype=torch.float64)
        for p, q in named:
            m = beta * p + (1 - beta) * q
            if beta in (0.0, 1.0):
                total = total + (p * (p / q).log() if beta == 0.0 else q * (q / p).log())
            else:
                total = total + beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()
        found.append(total)
    return torch.stack(found).float()


def plain_scores(model: PreTrainedModel, context: list[int], tokens: list[int]) -> tuple[Tensor, Tensor]:
    logits = model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1] / TEMPERATURE
    logs = logits.log_softmax(-1)
    return logs.gather(1, torch.tensor(tokens)[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def plain_logs(model: PreTrainedModel, context: list[int], tokens: list[int]) -> Tensor:
    logits = cast("Tensor", model(torch.tensor([context + tokens])).logits)[0, len(context) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


def plain_model(folder: Path, *, scale: float = 1.0) -> PreTrainedModel:
    model: PreTrainedModel = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


# --- the formulas, sample by sample -------------------------------------------------------------------------------


@dataclass
class PlainSample:
    """The trained tokens of a sample, ``[N]`` each."""

    group: int
    reward: float
    components: dict[str, float]
    new: Tensor
    entropy: Tensor
    rollout: Tensor
    reference: Tensor
    teacher: Tensor
    age: Tensor
    position: list[int]
    old: Tensor
    advantage: Tensor
    divergence: Tensor


def plain_samples(
    groups: tuple[Group, ...], model: PreTrainedModel, reference: PreTrainedModel, o: ObjectiveOptions
) -> list[PlainSample]:
    found: list[PlainSample] = []
    for group in groups:
        for sample in group.samples:
            columns: list[list[Tensor]] = [[], [], [], [], [], [], []]
            position: list[int] = []
            start = 0
            for part in sample.parts:
                tokens = list(tokens_view(part.tokens))
                context = list(tokens_view(part.context_tokens or group.prompt.tokens))
                kept = [i for i, m in enumerate(part.loss_mask or [1] * len(tokens)) if m]
                new, entropy = plain_scores(model, context, tokens)
                with torch.no_grad():
                    base, _ = plain_scores(reference, context, tokens)
                age = torch.tensor([VERSION - s.version for s in part.spans for _ in range(s.num_tokens)])
                rollout, teacher = (torch.tensor(list(floats_view(b))) for b in (part.logprobs, part.teacher_logprobs))
                far = torch.zeros_like(new)
                if o.policy_loss == "divergence":
                    far = plain_divergence(plain_logs(model, context, tokens), part, o.distill_beta)
                values = (new, entropy, rollout, base, teacher, age, far)
                for column, value in zip(columns, values, strict=True):
                    column.append(value[kept])
                position += [start + i for i in kept]
                start += len(tokens)
            new, entropy, rollout, base, teacher, age, far = (torch.cat(column) for column in columns)
            share = torch.tensor([1.0 / int(a) if a else 0.0 for a in age])
            now = new.detach()
            old = {"engine": rollout, "recompute": now, "interpolate": share * rollout + (1 - share) * now}
            reward = cast("float", sample.reward)
            given = cast("Reward", sample.outcome.reward)
            found.append(
                PlainSample(
                    group.group_id,
                    reward,
                    {component.name: component.value for component in given.components},
                    new,
                    entropy,
                    rollout,
                    base,
                    teacher,
                    age,
                    position,
                    old[o.old_logprobs],
                    new,
                    far,
                )
            )
    return found


def plain_kl(kind: str, new: Tensor, base: Tensor) -> Tensor:
    d = new - base
    k3 = (-d).exp() - 1 + d
    return {"k1": d, "k2": d * d / 2, "k3": k3, "low_var_kl": k3}[kind]


def set_advantages(samples: list[PlainSample], o: ObjectiveOptions) -> None:
    in_reward = o.kl_coef if o.kl_in == "reward" else 0.0
    kls = [in_reward * plain_kl(o.kl_estimator, s.old, s.reference) for s in samples]
    for sample, kl in zip(samples, kls, strict=True):
        mates = torch.tensor([s.reward for s in samples if s.group == sample.group], dtype=torch.float64)
        centred = sample.reward - float(mates.mean())
        match o.estimator:
            case "grpo":
                value = centred / (float(mates.std()) + 1e-6) if o.normalize_std else centred
                sample.advantage = torch.full_like(kl, value)
            case "maxrl":
                sample.advantage = torch.full_like(kl, centred / float(mates.mean()))
            case "gdpo":
                sample.advantage = torch.full_like(kl, decoupled(sample, samples, o))
            case "rloo":
                own = sample.reward - float(kl.sum())
                others = [
                    s.reward - float(k.sum())
                    for s, k in zip(samples, kls, strict=True)
                    if s.group == sample.group and s is not sample
                ]
                sample.advantage = torch.full_like(kl, own - sum(others) / len(others))
            case "reinforce_plus_plus":
                rewards = [-float(k) for k in kl]
                rewards[-1] += sample.reward
                sample.advantage = torch.tensor(
                    [
                        sum(o.discount**steps * r for steps, r in enumerate(rewards[begin:]))
                        for begin in range(len(rewards))
                    ]
                )
            case "reinforce_plus_plus_baseline":
                sample.advantage = centred - kl
            case "raw":
                sample.advantage = sample.reward - kl
            case "teacher":
                sample.advantage = torch.zeros_like(kl)
            case "uniform":
                sample.advantage = torch.ones_like(kl)
            case "best_of_group":
                least = -math.inf if o.min_reward is None else o.min_reward
                is_kept = sample.reward == float(mates.max()) and sample.reward >= least
                sample.advantage = torch.full_like(kl, float(is_kept))
            case "threshold":
                assert o.min_reward is not None
                sample.advantage = torch.full_like(kl, float(sample.reward >= o.min_reward))
            case "exponential":
                weight = min(math.exp(centred / o.reward_scale), o.max_weight)
                sample.advantage = torch.full_like(kl, weight)
            case "gae":
                raise AssertionError("needs a critic; its tests are beside those of the critic")
        sample.advantage = sample.advantage - o.opd_kl_coef * (sample.old - sample.teacher)
    if o.estimator == "gdpo":
        sums = torch.tensor([float(s.advantage[0]) for s in samples])
        for sample in samples:
            sample.advantage = (sample.advantage - sums.mean()) / sums.std()
    if o.whiten:
        every = torch.cat([s.advantage for s in samples])
        for sample in samples:
            sample.advantage = (sample.advantage - every.mean()) / every.std()


def decoupled(sample: PlainSample, samples: list[PlainSample], o: ObjectiveOptions) -> float:
    """The weighted sum of what each component is worth within the group."""
    total = 0.0
    for name, weight in cast("dict[str, float]", o.component_weights).items():
        mates = torch.tensor([s.components[name] for s in samples if s.group == sample.group], dtype=torch.float64)
        total += weight * (sample.components[name] - float(mates.mean())) / (float(mates.std()) + 1e-6)
    return total


def plain_policy_loss(s: PlainSample, o: ObjectiveOptions) -> Tensor:
    a, log_ratio = s.advantage, s.new - s.old
    low, high = 1 - o.clip_low, 1 + o.clip_high
    match o.policy_loss:
        case "likelihood":
            return -a * s.new
        case "sapo":
            tau = torch.where(a > 0, torch.tensor(o.tau_pos), torch.tensor(o.tau_neg))
            return -a * 4 / tau / (1 + (-tau * (log_ratio.exp() - 1)).exp())
        case "gmpo":
            up, down = log_ratio.clamp(max=o.clip_high), log_ratio.clamp(min=-o.clip_low)
            bounded = torch.where(a > 0, up, torch.where(a < 0, down, log_ratio))
            return -bounded.mean().detach().exp() * (bounded - bounded.detach()).exp() * a
        case "divergence":
            return a * s.divergence
        case "cispo":
            return -log_ratio.detach().exp().clamp(low, high) * a * s.new
        case "dppo_tv" | "dppo_kl":
            p, q = s.new.detach().exp(), s.old.exp()
            tv, kl = (p - q).abs(), q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
            far = tv if o.policy_loss == "dppo_tv" else kl
            gone = ((a > 0) & (p > q) & (far > o.clip_high)) | ((a < 0) & (p < q) & (far > o.clip_low))
            assert o.max_ratio is not None
            bounded = torch.where(
                log_ratio.exp() > o.max_ratio, o.max_ratio * (s.new - s.new.detach()).exp(), log_ratio.exp()
            )
            return -bounded * a * ~gone
        case _:
            ratio = log_ratio.exp()
            if o.policy_loss == "gspo":  # GSPO-token: the value of the whole sequence, the gradient of each token
                ratio = log_ratio.mean().detach().exp() * (s.new - s.new.detach()).exp()
            loss = torch.maximum(-ratio * a, -ratio.clamp(low, high) * a)
            if o.dual_clip is not None:
                loss = torch.where(a < 0, torch.minimum(loss, -o.dual_clip * a), loss)
            return loss


def plain_weights(samples: list[PlainSample], o: ObjectiveOptions) -> list[Tensor]:
    """Of the difference between engine and learner."""
    differences = [s.old - s.rollout for s in samples]
    if o.old_logprobs == "engine" or o.correction == "none":
        return [torch.ones_like(d) for d in differences]
    if o.correction == "tis":
        assert o.tis_clip is not None
        return [d.exp().clamp(o.tis_clip_low, o.tis_clip) for d in differences]
    if o.correction == "icepop":
        return [torch.where((d.exp() < o.icepop_low) | (d.exp() > o.icepop_high), 0.0, d.exp()) for d in differences]
    mis = o.mis
    weights: list[Tensor] = []
    low = 1 / mis.upper if mis.lower is None else mis.lower
    for d in differences:
        w = (d if mis.level == "token" else d.sum().expand_as(d)).exp()
        weights.append(w.clamp(low, mis.upper) if mis.mode == "clip" else w * ((w >= low) & (w <= mis.upper)))
    if mis.normalize:
        mean = torch.cat(weights).mean()
        weights = [w / mean for w in weights]
    if mis.reject_level == "geometric":
        means = [math.exp(float(d.mean())) for d in differences]
        kept = [1 / mis.reject_upper <= m <= mis.reject_upper for m in means]
        weights = [w * k for w, k in zip(weights, kept, strict=True)]
    if mis.veto is not None:
        weights = [w * bool(d.exp().min() >= mis.veto) for w, d in zip(weights, differences, strict=True)]
    return weights


def plain_pairs(samples: list[PlainSample], o: ObjectiveOptions) -> list[tuple[PlainSample, PlainSample]]:
    pairs: list[tuple[PlainSample, PlainSample]] = []
    for group in {s.group for s in samples}:
        mates = sorted((s for s in samples if s.group == group), key=lambda s: s.reward)
        every = [(a, b) for a in mates for b in mates if a.reward > b.reward]
        pairs += every if o.dpo_pairs == "all" else [(mates[-1], mates[0])]
    return pairs


def plain_dpo(samples: list[PlainSample], o: ObjectiveOptions) -> Tensor:
    losses: list[Tensor] = []
    for better, worse in plain_pairs(samples, o):
        gains = [(s.new - s.reference).sum() for s in (better, worse)]
        if o.dpo_normalize_length:
            gains = [(s.new - s.reference).mean() for s in (better, worse)]
        if o.dpo_loss == "ipo":
            losses.append((gains[0] - gains[1] - 0.5 / o.dpo_beta) ** 2)
            continue
        right = torch.sigmoid(o.dpo_beta * (gains[0] - gains[1]))
        losses.append(-(1 - o.dpo_label_smoothing) * right.log() - o.dpo_label_smoothing * (1 - right).log())
    return torch.stack(losses).mean()


def plain_kto(samples: list[PlainSample], o: ObjectiveOptions, point: float) -> Tensor:
    losses: list[Tensor] = []
    for s in samples:
        r = (s.new - s.reference).sum()
        assert o.min_reward is not None
        is_good = s.reward >= o.min_reward
        weight, side = (o.desirable_weight, r - point) if is_good else (o.undesirable_weight, point - r)
        losses.append(weight - weight / (1 + (-o.dpo_beta * side).exp()))
    return torch.stack(losses).mean()


def plain_reference_point(groups: tuple[Group, ...], model: PreTrainedModel, reference: PreTrainedModel) -> float:
    """Each prompt with the responses of the next group; of a sample of two parts both, each behind what comes before
    the part of the same number."""
    prompts = [list(tokens_view(group.prompt.tokens)) for group in groups]
    longest = max(
        len(tokens_view(p.context_tokens or g.prompt.tokens)) + 1 + max(i for i, m in enumerate(mask_of(p)) if m)
        for g in groups for s in g.samples for p in s.parts
    )  # fmt: skip
    total, count = 0.0, 0
    for number, group in enumerate(groups):
        others = groups[(number + 1) % len(groups)].samples
        for index, sample in enumerate(group.samples):
            count += 1
            for place, part in enumerate(others[index % len(others)].parts):
                own = sample.parts[min(place, len(sample.parts) - 1)]
                context = list(tokens_view(own.context_tokens)) or prompts[number]
                tokens = list(tokens_view(part.tokens))[: longest - len(context)]
                kept = [i for i, m in enumerate(mask_of(part)[: len(tokens)]) if m]
                with torch.no_grad():
                    ours, theirs = (plain_scores(m, context, tokens)[0] for m in (model, reference))
                total += float((ours - theirs)[kept].sum())
    return max(0.0, total / count)


def mask_of(part: Part) -> list[int]:
    return list(part.loss_mask) or [1] * part.num_tokens


def plain_loss(samples: list[PlainSample], o: ObjectiveOptions, point: float = 0.0) -> Tensor:
    if o.policy_loss == "kto":
        return plain_kto(samples, o, point)
    if o.policy_loss == "dpo":
        return plain_dpo(samples, o)
    set_advantages(samples, o)
    terms: list[Tensor] = []
    for sample, weight in zip(samples, plain_weights(samples, o), strict=True):
        loss = plain_policy_loss(sample, o) * weight
        if o.opsm_delta is not None and float((sample.rollout - sample.new.detach()).mean()) > o.opsm_delta:
            loss = loss * (sample.advantage >= 0)
        if o.kl_coef and o.kl_in == "loss":
            kl = plain_kl(o.kl_estimator, sample.new, sample.reference)
            if o.unbiased_kl:
                kl = kl * (sample.new - sample.old).exp()
            loss = loss + o.kl_coef * (kl.clamp(-10, 10) if o.kl_estimator == "low_var_kl" else kl)
        loss = loss + o.behaviour_kl_coef * (sample.new - sample.rollout) ** 2
        terms.append(loss - o.entropy_coef * sample.entropy)
    match o.reduction:
        case "token_mean":
            return torch.cat(terms).mean()
        case "sequence_mean":
            return torch.stack([term.mean() for term in terms]).mean()
        case "constant":
            assert o.constant_tokens is not None
            return torch.stack([term.sum() / o.constant_tokens for term in terms]).mean()


# --- the learner --------------------------------------------------------------------------------------------------


@dataclass
class Models:
    """Loaded once; tests leave no gradient behind."""

    packed: PackedModel
    packed_reference: PackedModel
    plain: PreTrainedModel
    plain_reference: PreTrainedModel
    batches: list[tuple[Group, ...]]


@pytest.fixture(scope="module")
def models(folder: Path) -> Models:
    plain = plain_model(folder)
    packed_reference = PackedModel.load(folder, dtype="float32", device=CPU)
    with torch.no_grad():
        for parameter in packed_reference.model.parameters():
            parameter.mul_(1.1)
    return Models(
        packed=PackedModel.load(folder, dtype="float32", device=CPU),
        packed_reference=packed_reference,
        plain=plain,
        plain_reference=plain_model(folder, scale=1.1),
        batches=[make_groups(seed, plain) for seed in range(NUM_BATCHES)],
    )


Gradient = dict[str, torch.Tensor]


def taken_gradients(model: PreTrainedModel) -> Gradient:
    taken = {name: cast("Tensor", parameter.grad).clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return taken


def packed_step(
    models: Models, options: ObjectiveOptions, groups: tuple[Group, ...], max_tokens: int
) -> tuple[dict[str, float], Gradient]:
    trainer = PolicyTrainer(
        models.packed,
        LearnerOptions(max_tokens_per_micro_batch=max_tokens, objective=options),
        temperature=TEMPERATURE,
        num_steps=10,
        reference=models.packed_reference if needs_reference(options) else None,
        check_stop=lambda: None,
    )
    figures = trainer.accumulate(read_groups(groups, min_token_version=0), version=VERSION)
    return figures, taken_gradients(models.packed.model)


def plain_step(models: Models, options: ObjectiveOptions, groups: tuple[Group, ...]) -> tuple[float, Gradient]:
    point = 0.0
    if options.policy_loss == "kto":
        point = plain_reference_point(groups, models.plain, models.plain_reference)
    loss = plain_loss(plain_samples(groups, models.plain, models.plain_reference, options), options, point)
    torch.autograd.backward(loss)
    return float(loss.detach()), taken_gradients(models.plain)


def distance(actual: Gradient, expected: Gradient) -> float:
    """Relative to the norm of the whole gradient."""
    difference = sum(float((actual[name] - expected[name]).double().square().sum()) for name in expected)
    return math.sqrt(difference / sum(float(g.double().square().sum()) for g in expected.values()))


@pytest.mark.parametrize("case", OBJECTIVES)
def test_loss_and_gradient_are_those_of_the_formula_on_single_sequences(case: str, models: Models) -> None:
    options = options_of(case)
    for groups in models.batches[:NUM_QUICK]:
        figures, gradient = packed_step(models, options, groups, max_tokens=64)
        loss, expected = plain_step(models, options, groups)
        assert figures["train/loss"] == pytest.approx(loss, abs=1e-6, rel=1e-5)
        assert distance(gradient, expected) < 5e-6


@pytest.mark.parametrize("case", OBJECTIVES)
def test_loss_gradient_and_figures_do_not_depend_on_micro_batches(case: str, models: Models) -> None:
    options = options_of(case)
    for groups in models.batches[:NUM_QUICK]:
        sequences = read_groups(groups, min_token_version=0).sequences
        counts = [len(split_into_micro_batches(sequences, size)) for size in (16, 64, 4096)]
        assert counts[0] > counts[1] > counts[2] == 1
        one, whole = packed_step(models, options, groups, max_tokens=4096)
        for max_tokens in (16, 64):
            figures, gradient = packed_step(models, options, groups, max_tokens)
            assert figures == pytest.approx(one, abs=1e-6, rel=1e-5)
            assert distance(gradient, whole) < 5e-6


def test_a_batch_without_the_likeliest_tokens_is_refused_with_what_to_set(models: Models) -> None:
    first, *others = models.batches[0]
    sample, *rest = first.samples
    parts = tuple(msgspec.structs.replace(part, teacher_top=None) for part in sample.parts)
    without = msgspec.structs.replace(first, samples=(msgspec.structs.replace(sample, parts=parts), *rest))
    with pytest.raises(UserFault, match=r"samples of this batch came without; set teacher\.top_logprobs"):
        packed_step(models, options_of("gkd"), (without, *others), max_tokens=64)


def imitated(group: Group) -> Group:
    """The same, to be imitated: without rewards, and nobody knows what drew it."""
    samples = [
        msgspec.structs.replace(
            sample,
            loss=Loss.SUPERVISED,
            outcome=Completed(),
            parts=tuple(
                msgspec.structs.replace(part, logprobs=pack_floats([math.nan] * part.num_tokens))
                for part in sample.parts
            ),
        )
        for sample in group.samples
    ]
    prompt = msgspec.structs.replace(group.prompt, is_recorded=True)
    return msgspec.structs.replace(group, samples=tuple(samples), prompt=prompt)


@pytest.mark.parametrize("case", ["dapo", "a3po", "gspo", "rejection_sampling"])
def test_a_step_of_both_kinds_is_the_sum_of_both_losses_under_one_denominator(case: str, models: Models) -> None:
    options = msgspec.structs.replace(options_of(case), sft_coef=0.5, entropy_coef=0.0, reduction="token_mean")
    groups = models.batches[0]
    given, *others = plain_samples(groups[:1], models.plain, models.plain_reference, options), groups[1:]
    own = plain_samples(tuple(others[0]), models.plain, models.plain_reference, options)
    num_own, num_given = (sum(len(s.new) for s in samples) for samples in (own, given))
    nll = -torch.cat([s.new for s in given]).sum()
    loss = (plain_loss(own, options) * num_own + 0.5 * nll) / (num_own + num_given)
    torch.autograd.backward(loss)
    expected = taken_gradients(models.plain)
    mixed = (imitated(groups[0]), *groups[1:])
    for max_tokens in (48, 4096):
        figures, gradient = packed_step(models, options, mixed, max_tokens)
        assert figures["train/loss"] == pytest.approx(float(loss.detach()), abs=1e-6, rel=1e-5)
        assert figures["train/sft_loss"] == pytest.approx(float(nll.detach()) / num_given, rel=1e-5)
        assert distance(gradient, expected) < 5e-6


@pytest.mark.slow
def test_ten_batches_of_each_objective_are_those_of_the_formula(models: Models) -> None:
    for seed in range(200, 210):
        groups = make_groups(seed, models.plain)
        for case in OBJECTIVES:
            figures, gradient = packed_step(models, options_of(case), groups, max_tokens=64)
            loss, expected = plain_step(models, options_of(case), groups)
            assert figures["train/loss"] == pytest.approx(loss, abs=1e-6, rel=1e-5), (case, seed)
            assert distance(gradient, expected) < 5e-6, (case, seed)


@pytest.mark.slow
def test_fifty_batches_of_each_objective_are_the_same_in_one_micro_batch_and_in_several(models: Models) -> None:
    for seed in range(100, 150):
        groups = make_groups(seed, models.plain)
        for case in OBJECTIVES:
            one, whole = packed_step(models, options_of(case), groups, max_tokens=4096)
            figures, gradient = packed_step(models, options_of(case), groups, max_tokens=48)
            # A weight of a whole sequence is the exponential of a sum, which carries the rounding of every log-prob.
            bound = 3e-6 if case == "mis sequence" else 1e-6
            assert figures["train/loss"] == pytest.approx(one["train/loss"], abs=bound, rel=1e-6), (case, seed)
            assert distance(gradient, whole) < 5e-6, (case, seed)


@pytest.mark.parametrize(
    ("case", "figure"),
    [
        *(
            (case, "pg_clipfrac")
            for case in ("grpo", "dapo", "gspo", "gmpo", "sapo", "cispo", "dppo", "dppo_kl", "a3po")
        ),
        *((case, "tis_clipfrac") for case in ("tis", "icepop", "a3po")),
        ("opsm", "opsm_clipfrac"),
        ("kto", "desirable_ratio"),
        ("mis sequence", "mis_tis_clip_fraction_low"),
        *(("mis rejecting", name) for name in MIS_FIGURES),
    ],
)
def test_the_cases_reach_the_bounds_that_they_are_about(case: str, figure: str, models: Models) -> None:
    shares = [packed_step(models, options_of(case), groups, 4096)[0][f"train/{figure}"] for groups in models.batches]
    assert 0.0 < sum(shares) / len(shares) < 1.0


def test_every_preset_is_among_the_cases() -> None:
    # Those with a critic are in test_torch_learner_updates.py.
    assert {name for name in NAMED.builtin if objective(name).critic == "none"} <= set(OBJECTIVES)


USER_FILE = """
from penstock.backends.learners.objectives.protocol import ObjectiveTerms

def per_sample(tokens, options):
    means = tokens.samples.means(tokens.logprobs - tokens.rollout_logprobs)
    spread = tokens.samples.spread(means.exp())
    loss = -(tokens.weights * spread * tokens.advantages).sum() - 0.1 * tokens.entropy.square().mean()
    return ObjectiveTerms(loss=loss, figures={"train/longest": means.max()})
"""


def test_an_objective_of_the_users_own_does_not_depend_on_micro_batches(models: Models, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_FILE)
    options = objective(f"{tmp_path / 'mine.py'}:per_sample")
    one, whole = packed_step(models, options, models.batches[0], 4096)
    samples = plain_samples(models.batches[0], models.plain, models.plain_reference, options)
    set_advantages(samples, options)
    spread = [(s.new - s.rollout).mean().exp() * s.advantage for s in samples]
    loss = -torch.cat(spread).mean() - 0.1 * torch.cat([s.entropy for s in samples]).square().mean()
    torch.autograd.backward(loss)
    assert one["train/loss"] == pytest.approx(float(loss.detach()), abs=1e-6, rel=1e-5)
    assert distance(whole, taken_gradients(models.plain)) < 5e-6
    figures, gradient = packed_step(models, options, models.batches[0], 16)
    assert figures == pytest.approx(one, abs=1e-6, rel=1e-5)
    assert "train/longest" in figures
    assert distance(gradient, whole) < 5e-6


# --- tripwires of a first step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in OBJECTIVES if options_of(case).policy_loss not in WITHOUT_RATIO])
def test_a_fresh_policy_has_no_kl_and_no_mismatch(case: str, models: Models) -> None:
    """The engine's log-probs are the learner's own, and the reference is the policy."""
    options = options_of(case)
    groups = tuple(with_own_logprobs(group, models.plain) for group in models.batches[0])
    trainer = PolicyTrainer(
        models.packed,
        LearnerOptions(max_tokens_per_micro_batch=64, objective=options),
        temperature=TEMPERATURE,
        num_steps=10,
        reference=models.packed if options.kl_coef else None,
        check_stop=lambda: None,
    )
    figures = trainer.accumulate(read_groups(groups, min_token_version=0), version=VERSION)
    models.packed.model.zero_grad()
    assert figures["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert abs(figures["train/ppo_kl"]) < 1e-6
    assert figures["train/ess_ratio"] == pytest.approx(1.0, abs=1e-6)
    assert figures["train/ois"] == pytest.approx(1.0, abs=1e-5)
    assert abs(figures.get("train/kl_loss", 0.0)) < 1e-8
    # This one compares with the engine, whose products have other shapes.
    assert abs(figures.get("train/kl_reward", 0.0)) < 1e-6


def test_an_engine_that_computes_another_model_is_told_of(models: Models, folder: Path) -> None:
    model = PackedModel.load(folder, dtype="float32", device=CPU)
    trainer = PolicyTrainer(
        model, LearnerOptions(), temperature=TEMPERATURE, num_steps=10, reference=None, check_stop=lambda: None
    )
    drawn = tuple(of_one_version(group) for group in models.batches[0])
    groups = tuple(with_own_logprobs(group, models.plain) for group in drawn)
    fresh = trainer.train(groups, version=VERSION + 1, min_token_version=0)
    assert dict(metric_pairs(fresh))["train/fresh_logprob_abs_diff"] < 1e-5
    assert not fresh.notices
    # The same tokens from an engine whose log-probs are noisy by half a nat; one version later they are all old.
    assert not trainer.train(drawn, version=VERSION + 2, min_token_version=0).notices
    noisy = trainer.train(drawn, version=VERSION + 1, min_token_version=0)
    assert dict(metric_pairs(noisy))["train/fresh_logprob_abs_diff"] > 0.1
    assert any("the log-probs of engine and learner differ by" in notice for notice in noisy.notices)


def of_one_version(group: Group) -> Group:
    """The same group, made by the policy that opens the step."""
    samples: list[Sample] = []
    for sample in group.samples:
        parts = [msgspec.structs.replace(p, spans=(VersionSpan(VERSION, p.num_tokens),)) for p in sample.parts]
        samples.append(msgspec.structs.replace(sample, parts=tuple(parts)))
    return msgspec.structs.replace(group, samples=tuple(samples))


def metric_pairs(result: StepResult) -> list[tuple[str, float]]:
    return [(metric.name, metric.value) for metric in result.metrics]


def with_own_logprobs(group: Group, model: PreTrainedModel) -> Group:
    samples: list[Sample] = []
    for sample in group.samples:
        parts: list[Part] = []
        for part in sample.parts:
            context = list(tokens_view(part.context_tokens or group.prompt.tokens))
            with torch.no_grad():
                logprobs, _ = plain_scores(model, context, list(tokens_view(part.tokens)))
            parts.append(msgspec.structs.replace(part, logprobs=pack_floats(logprobs.tolist())))
        samples.append(msgspec.structs.replace(sample, parts=tuple(parts)))
    return msgspec.structs.replace(group, samples=tuple(samples))
