"""What the house knows of each objective before one is opened, and the registry of all of them.

An objective is a name that stands for keys of ``learner.objective``. Two of these keys choose how a batch is learnt
from: ``estimator``, what becomes of rewards, and ``policy_loss``, what is minimised. Nobody asks for one of the names:
they ask for a field of :class:`EstimatorSpec`, of :class:`LossSpec` or of :class:`ObjectiveSpec`.

Invariants:

* What an objective stands for is plain data: keys that differ from the defaults of the block. What a scenario says
  itself goes over it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgspec

from penstock.backends.learners.options import ObjectiveOptions
from penstock.backends.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.backends.learners.objective_names import Estimator, PolicyLoss
    from penstock.backends.learners.objectives.protocol import ObjectiveFunction
    from penstock.messages.base import Options

Problem = tuple[str, str]
"""The key of ``learner.objective`` to change, and one sentence with the remedy."""


@dataclass(frozen=True, slots=True)
class EstimatorSpec:
    """How rewards become advantages, or weights of a likelihood."""

    keys: tuple[str, ...] = ()
    """Of the block: those that only this estimator, and others that name them as well, take heed of."""
    compares: bool = False
    """It compares the samples of a group with each other."""
    normalizes: bool = False
    """It divides by what the rewards of a group are like."""
    is_weighting: bool = False
    """It gives weights of a likelihood, not advantages: never negative."""
    equals: Literal["useless", "useful", "usual"] = "useless"
    """A group whose rewards are all equal teaches nothing; or may teach something; or is one like any other."""
    whitens: bool = False
    """It is defined with advantages that are whitened over the batch."""
    needs_critic: bool = False
    """It needs the values of a critic."""
    components: bool = False
    """It reads the named components of a reward, not their sum."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What is minimised."""

    keys: tuple[str, ...] = ()
    """Of the block: those that only this loss, and others that name them as well, take heed of."""
    has_ratio: bool = True
    """It compares the policy with whatever drew a response, so the log-probs of that have to be known."""
    couples_tokens: bool = False
    """The loss of a token depends on the log-probs of others, so that all of a step must be known first."""
    unit: Literal["token", "response", "pair"] = "token"
    """What the loss is a mean over."""
    needs_reference: bool = False
    """It asks the policy as it was before the first step, whatever ``kl_coef`` is."""
    needs_reference_point: bool = False
    """It compares responses with the KL to the reference, for which it needs several prompts."""
    needs_teacher_top: bool = False
    """It is the distance to a teacher's distribution."""
    is_function: bool = False
    """It is a function of somebody else's: believed to know what it is given, and free to heed any key of the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSpec:
    """One name. It is looked at in the command line, so its module imports nothing heavy: that is for :attr:`open`."""

    keys: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of ``learner.objective``, where they differ from its defaults."""
    open: Callable[[ObjectiveOptions], ObjectiveFunction] | None = None
    """The loss; None: that of ``policy_loss``. Raises UserFault."""
    loss: LossSpec | None = None
    """What is known of the loss that :attr:`open` gives; None: that of ``policy_loss``."""
    options: type[Options] | None = None
    """What ``learner.objective.options`` holds; None: there is no such block."""
    imitates: bool = False
    """It imitates every response alike, and reads no reward."""
    rules: Callable[[ObjectiveOptions], Iterator[Problem]] = lambda options: iter(())
    """What is wrong with these options, beside what is wrong with any."""


def _of_a_file(options: ObjectiveOptions) -> ObjectiveFunction:
    from penstock.backends.processes.hook_calling import Hook

    return cast("ObjectiveFunction", Hook(options.name, "learner.objective"))  # what it returns is checked


_CLIPS: Final = ("clip_low", "clip_high")
_LAMBDAS: Final = ("gae_lambda", "gae_length_alpha", "critic_lambda")
ESTIMATORS: Final[Mapping[Estimator, EstimatorSpec]] = {
    "grpo": EstimatorSpec(compares=True, normalizes=True),
    "rloo": EstimatorSpec(compares=True),
    "maxrl": EstimatorSpec(compares=True, normalizes=True),
    "gdpo": EstimatorSpec(("component_weights",), compares=True, normalizes=True, equals="useful", components=True),
    "reinforce_plus_plus": EstimatorSpec(("discount",), equals="useful", whitens=True),
    "reinforce_plus_plus_baseline": EstimatorSpec(compares=True, whitens=True),
    "raw": EstimatorSpec(equals="useful"),
    "gae": EstimatorSpec(("discount", *_LAMBDAS), equals="useful", needs_critic=True),
    "teacher": EstimatorSpec(equals="usual"),
    "uniform": EstimatorSpec(equals="usual", is_weighting=True),
    "best_of_group": EstimatorSpec(("min_reward",), compares=True, equals="usual", is_weighting=True),
    "threshold": EstimatorSpec(("min_reward",), equals="usual", is_weighting=True),
    "exponential": EstimatorSpec(("reward_scale", "max_weight"), compares=True, equals="usual", is_weighting=True),
}
LOSSES: Final[Mapping[PolicyLoss, LossSpec]] = {
    "ppo": LossSpec((*_CLIPS, "dual_clip")),
    "gspo": LossSpec((*_CLIPS, "dual_clip"), couples_tokens=True),
    "gmpo": LossSpec(_CLIPS, couples_tokens=True),
    "sapo": LossSpec(("tau_pos", "tau_neg")),
    "cispo": LossSpec(_CLIPS),
    "dppo_tv": LossSpec((*_CLIPS, "max_ratio")),
    "dppo_kl": LossSpec((*_CLIPS, "max_ratio")),
    "likelihood": LossSpec(has_ratio=False),
    "divergence": LossSpec(("distill_beta",), has_ratio=False, needs_teacher_top=True),
    "dpo": LossSpec(
        ("dpo_beta", "dpo_loss", "dpo_pairs", "dpo_label_smoothing", "dpo_normalize_length"),
        has_ratio=False, couples_tokens=True, unit="pair", needs_reference=True,
    ),
    "kto": LossSpec(
        ("dpo_beta", "desirable_weight", "undesirable_weight", "min_reward"),
        has_ratio=False, couples_tokens=True, unit="response", needs_reference=True, needs_reference_point=True,
    ),
}  # fmt: skip
_LIKELIHOOD: Final[Mapping[str, Any]] = {"policy_loss": "likelihood", "correction": "none"}
_OF_PAIRS: Final[Mapping[str, Any]] = {"estimator": "uniform", "policy_loss": "dpo", "correction": "none"}
_IN_REWARD: Final[Mapping[str, Any]] = {"clip_high": 0.2, "kl_in": "reward", "kl_estimator": "k1"}
_KEYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "grpo": {"clip_high": 0.2, "reduction": "sequence_mean"},
    "dapo": {},
    "dr_grpo": {"clip_high": 0.2, "normalize_std": False, "reduction": "constant"},
    "gspo": {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "reduction": "sequence_mean"},
    "cispo": {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "rloo": {"estimator": "rloo", "clip_high": 0.2, "reduction": "constant"},
    "ppo": {"estimator": "gae", "critic": "own", **_IN_REWARD},
    "reinforce_plus_plus": {"estimator": "reinforce_plus_plus", "whiten": True, **_IN_REWARD},
    "reinforce_plus_plus_baseline": {"estimator": "reinforce_plus_plus_baseline", "whiten": True, **_IN_REWARD},
    "reinforce": {"estimator": "raw", **_IN_REWARD},
    "gmpo": {"policy_loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4, "reduction": "sequence_mean"},
    "sapo": {"policy_loss": "sapo", "reduction": "sequence_mean"},
    "maxrl": {"estimator": "maxrl", "clip_high": 0.2, "reduction": "constant"},
    "gdpo": {"estimator": "gdpo", "clip_high": 0.2, "reduction": "sequence_mean"},
    "vapo": {"estimator": "gae", "critic": "own", "gae_length_alpha": 0.05, "critic_lambda": 1.0},
    "dppo": {"policy_loss": "dppo_tv", "clip_high": 0.2},
    "rejection_sampling": {"estimator": "best_of_group", **_LIKELIHOOD},
    "reward_weighted": {"estimator": "exponential", **_LIKELIHOOD},
    "dpo": _OF_PAIRS,
    "ln_dpo": {**_OF_PAIRS, "dpo_normalize_length": True, "dpo_beta": 5.0},
    "ipo": {**_OF_PAIRS, "dpo_loss": "ipo"},
    "kto": {"estimator": "uniform", "policy_loss": "kto", "correction": "none", "min_reward": 0.5},
    "gkd": {"estimator": "uniform", "policy_loss": "divergence", "correction": "none"},
    "distill": {"estimator": "teacher", "opd_kl_coef": 1.0, "clip_high": 0.2},
}
OBJECTIVES: Final = Registry(
    "objective",
    "penstock.objectives",
    ObjectiveSpec,
    {name: ObjectiveSpec(keys=keys) for name, keys in _KEYS.items()}
    | {"sft": ObjectiveSpec(keys={"estimator": "uniform", **_LIKELIHOOD}, imitates=True)},
    own=ObjectiveSpec(open=_of_a_file, loss=LossSpec(is_function=True, has_ratio=False, couples_tokens=True)),
)
"""Sources in ``docs/objectives.md``."""


def loss_of(options: ObjectiveOptions) -> LossSpec:
    """What is known of the loss that these options mean."""
    return _loss(options.name, options.policy_loss)


@cache
def _loss(name: str, policy_loss: PolicyLoss) -> LossSpec:
    return OBJECTIVES.spec(name).loss or LOSSES[policy_loss]


def keys_of(name: str) -> Mapping[str, Any]:
    """What this name stands for; nothing where there is no such objective, which the rules say."""
    return OBJECTIVES.spec(name).keys if OBJECTIVES.problem(name) is None else {}


def objective(name: str, **keys: object) -> ObjectiveOptions:
    """The options that ``learner.objective: {name: NAME, KEY: VALUE, …}`` means; a function of the user's own starts
    from the defaults of the block.

    Raises:
        msgspec.ValidationError: a key that does not exist, or a value that it cannot have.
    """
    return msgspec.convert({"name": name, **keys_of(name), **keys}, ObjectiveOptions)
