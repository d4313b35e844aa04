"""Objectives by name, options that do not go together, and objectives of the user's own."""

from __future__ import annotations

import math
import re
from pathlib import Path  # noqa: TC003  # pytest reads the annotations
from typing import Any

import pytest
import torch

from penstock.backends.learners.hooks.protocols import Segments
from penstock.backends.learners.objectives.asked import couples_tokens
from penstock.backends.learners.objectives.objective import checked_terms, policy_objective
from penstock.backends.learners.objectives.open import open_objective
from penstock.backends.learners.objectives.protocol import ObjectiveTerms, PolicyTokens
from penstock.backends.learners.objectives.spec import OBJECTIVES, loss_of, objective
from penstock.backends.learners.objectives.token_advantages import RewardedSamples, token_estimates
from penstock.backends.learners.objectives.validity import learns_from_equals, objective_problem
from penstock.backends.learners.options import ObjectiveOptions
from penstock.backends.processes.user_code import UserCodeError
from penstock.messages.errors import UserFault
from penstock.runtime.preflight.functions import check_user_code
from penstock.runtime.scenario.load import dump_scenario, load_scenario
from penstock.runtime.scenario.schema import scenario_schema

LOGPROBS = torch.tensor([-0.5, -1.5, -0.5])
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5])
WEIGHTS = torch.tensor([0.2, 0.5, 0.3])
COMPONENTS = "reward.components=[{name: right, function: lines}, {name: short, function: length_penalty, weight: 0.5}]"
MINIMAL = "run: {name: t, num_steps: 1}\ndata: {path: lines:10}\nmodel: {make: xs}\n"


ROLLED = sorted(
    name
    for name, given in ((name, objective(name)) for name in OBJECTIVES.builtin)
    if loss_of(given).has_ratio and not given.opd_kl_coef and given.estimator != "gdpo"
)
"""Those that take a ratio to whatever drew the tokens, and need no teacher and no components of the reward; the others
have tests of their own."""


def tokens_with(logprobs: torch.Tensor) -> PolicyTokens:
    return PolicyTokens(
        logprobs=logprobs,
        entropy=torch.ones(3),
        rollout_logprobs=torch.tensor([-1.0, -1.4, -0.6]),
        reference_logprobs=None,
        advantages=ADVANTAGES,
        weights=WEIGHTS,
        figure_weights=WEIGHTS,
        staleness=torch.tensor([0, 1, 2]),
        samples=Segments(torch.tensor([0, 0, 1]), 2),
    )


@pytest.mark.parametrize("name", ROLLED)
def test_every_preset_makes_sense_and_has_a_loss(name: str) -> None:
    options = objective(name)
    assert objective_problem(options) is None
    logprobs = LOGPROBS.clone().requires_grad_()
    torch.autograd.backward(policy_objective(tokens_with(logprobs), options).loss)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("name", sorted({*ROLLED} - {"cispo"}))  # whose loss is no integral of its gradient
def test_the_gradient_of_a_preset_is_that_of_finite_differences(name: str) -> None:
    """With the ratio to the engine's log-probs, KL in the loss and entropy, in float64."""
    options = objective(name, kl_coef=0.2, kl_in="loss", kl_estimator="k3", entropy_coef=0.1, dual_clip=None)
    draw = torch.Generator().manual_seed(3)
    columns = torch.randn(7, 6, generator=draw, dtype=torch.float64)
    samples = Segments(torch.tensor([0, 1, 1, 0, 2, 2]), 3)
    advantages, weights = columns[4], columns[5]
    if name in ("gspo", "gmpo"):  # an integral of its gradient where the tokens of a sample share these
        advantages, weights = (samples.spread(samples.means(values)) for values in (advantages, weights))

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        tokens = PolicyTokens(
            logprobs, entropy, columns[2] / 5, columns[3], advantages, weights, weights, samples.index, samples
        )
        return policy_objective(tokens, options).loss

    arguments = ((columns[0] / 5).requires_grad_(), columns[1].clone().requires_grad_())
    gradcheck: Any = torch.autograd.gradcheck  # has no types
    assert gradcheck(loss, arguments)


def test_the_default_is_the_preset_that_its_name_says() -> None:
    assert objective(ObjectiveOptions().name) == ObjectiveOptions()


@pytest.mark.parametrize(
    ("keys", "key", "story"),
    [
        ({"name": "ppo", "critic": "none"}, "critic", "set critic: own or shared"),
        ({"name": "grpo", "critic": "own"}, "critic", "estimator: grpo, which needs no values"),
        ({"name": "grpo", "gae_lambda": 0.9}, "gae_lambda", "or set estimator: gae"),
        (
            {"name": "grpo", "critic_learning_rate": 1e-5},
            "critic_learning_rate",
            "set critic: own or shared",
        ),
        (
            {"name": "dapo", "critic_only_steps": 3},
            "critic_only_steps",
            "set critic: own or shared",
        ),
        ({"name": "ppo", "value_coef": 0.5}, "value_coef", "set critic: shared"),
        ({"name": "dapoo"}, "name", "did you mean 'dapo'"),
        ({"name": "xyz"}, "name", "there are grpo, dapo"),
        ({"name": "reinforce_plus_plus", "whiten": False}, "whiten", "set whiten: true"),
        ({"name": "grpo", "discount": 0.9}, "discount", "set estimator: reinforce_plus_plus or gae"),
        ({"name": "grpo", "constant_tokens": 5}, "constant_tokens", "reduction: constant"),
        ({"name": "cispo", "dual_clip": 7.0}, "dual_clip", "remove it, or set policy_loss: ppo or gspo"),
        ({"name": "dapo", "dual_clip": 1.2}, "dual_clip", "above 1 \\+ clip_high = 1.28"),
        ({"name": "dapo", "clip_low": 0.0, "clip_high": 0.0}, "clip_high", "no token that has moved"),
        ({"name": "dppo", "old_logprobs": "recompute"}, "policy_loss", "engine or interpolate"),
        ({"name": "dapo", "max_ratio": 5.0}, "max_ratio", "remove it, or set policy_loss: dppo_tv or dppo_kl"),
        ({"name": "dapo", "kl_coef": 0.1, "kl_in": "reward"}, "kl_in", "set kl_in: loss"),
        ({"name": "dapo", "kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator", "expected gradient of 0"),
        ({"name": "maxrl", "kl_coef": 0.1, "kl_in": "reward"}, "kl_in", "estimator: maxrl normalizes"),
        ({"name": "dapo", "unbiased_kl": True}, "unbiased_kl", "kl_coef: 0"),
        ({"name": "sft", "behaviour_kl_coef": 0.1}, "behaviour_kl_coef", "takes no ratio"),
        ({"name": "dpo", "behaviour_kl_coef": 0.1}, "behaviour_kl_coef", "takes no ratio"),
        ({"name": "sapo", "clip_high": 0.2}, "clip_high", "no effect with policy_loss: sapo; remove it"),
        ({"name": "sapo", "dual_clip": 3.0}, "dual_clip", "remove it, or set policy_loss: ppo or gspo"),
        ({"name": "dapo", "tau_neg": 2.0}, "tau_neg", "or set policy_loss: sapo"),
        ({"name": "gmpo", "clip_low": 0.0, "clip_high": 0.0}, "clip_high", "no token that has moved"),
        ({"name": "gdpo", "postprocess_function": "a.py:f"}, "postprocess_function", "reads its components"),
        ({"name": "gdpo", "component_weights": {}}, "component_weights", "names no component"),
        ({"name": "gdpo", "component_weights": {"a": 0.0}}, "component_weights", "a weight of 0 for 'a'"),
        ({"name": "gdpo", "component_weights": {"a": math.inf}}, "component_weights", "a weight of inf for 'a'"),
        ({"name": "grpo", "component_weights": {"a": 1.0}}, "component_weights", "set estimator: gdpo"),
        ({"name": "vapo", "gae_lambda": 0.9}, "gae_lambda", "gae_length_alpha takes its place"),
        ({"name": "grpo", "gae_length_alpha": 0.1}, "gae_length_alpha", "or set estimator: gae"),
        ({"name": "grpo", "critic_lambda": 0.9}, "critic_lambda", "or set estimator: gae"),
        ({"name": "dapo", "correction": "icepop"}, "correction", "old_logprobs: recompute"),
        ({"name": "dapo", "correction": "mis"}, "correction", "old_logprobs: recompute"),
        ({"name": "dapo", "mis": {"upper": 3.0}}, "mis", "set correction: mis"),
        ({"name": "dapo", "icepop_high": 5.0}, "icepop_high", "set correction: icepop"),
        ({"name": "dapo", "tis_clip_low": 3.0}, "tis_clip_low", "below tis_clip = 2"),
        (
            {"old_logprobs": "recompute", "correction": "icepop", "icepop_low": 2.5, "name": "dapo"},
            "icepop_low",
            "below icepop_high",
        ),
        (
            {
                "name": "dapo",
                "old_logprobs": "recompute",
                "correction": "mis",
                "mis": {"level": "geometric", "normalize": True},
            },
            "mis",
            "geometric mean",
        ),
        (
            {"name": "dapo", "old_logprobs": "recompute", "correction": "mis", "mis": {"lower": 0.5}},
            "mis",
            "no effect with mode: truncate",
        ),
        (
            {"name": "dapo", "old_logprobs": "recompute", "correction": "mis", "mis": {"mode": "clip", "upper": 0.5}},
            "mis",
            "must be below upper",
        ),
        (
            {"name": "dapo", "old_logprobs": "recompute", "correction": "mis", "mis": {"veto": 2.0}},
            "mis",
            "far below 1",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_key_and_remedy(keys: dict[str, Any], key: str, story: str) -> None:
    options = objective(**keys)
    problem = objective_problem(options)
    assert problem is not None
    assert problem[0] == key
    assert re.search(story, problem[1])
    with pytest.raises(UserFault, match=rf"learner\.objective\.{key}: "):
        open_objective(options)


@pytest.mark.parametrize("keys", [{"name": "dppo"}, {"name": "dppo", "policy_loss": "dppo_kl"}])
def test_a_recomputed_policy_is_one_to_measure_from_with_several_steps_a_batch(keys: dict[str, Any]) -> None:
    options = objective(**keys, old_logprobs="recompute")
    assert objective_problem(options, num_steps=2) is None
    assert objective_problem(options) is not None
    with pytest.raises(UserFault, match="one optimizer step a batch"):
        open_objective(options)
    open_objective(options, num_steps=2)


def test_the_ratio_is_taken_to_the_policy_that_opened_the_batch() -> None:
    for place in ("recompute", "interpolate"):
        options = objective("dapo", old_logprobs=place, correction="none")
        opening = torch.tensor([-0.8, -1.0, -0.9])
        tokens = tokens_with(LOGPROBS.clone().requires_grad_())._replace(opening_logprobs=opening)
        rollout = tokens.rollout_logprobs
        old = opening if place == "recompute" else torch.stack([opening[0], rollout[1], (opening[2] + rollout[2]) / 2])
        figures = policy_objective(tokens, options).figures
        assert float(figures["train/ppo_kl"]) == pytest.approx(float((WEIGHTS * (old - LOGPROBS)).sum()), abs=1e-6)


@pytest.mark.parametrize("name", sorted(OBJECTIVES.builtin))
def test_a_group_of_equal_rewards_is_turned_away_where_it_teaches_nothing(scenario_file: Path, name: str) -> None:
    """Two groups: one of ones, of components that differ, one of zeros, each with what a teacher thinks."""
    given = objective(name)
    is_summed = given.estimator == "gdpo"
    options = objective(name, component_weights={"a": 1.0, "b": 2.0}) if is_summed else given
    rewarded = RewardedSamples(
        rewards=torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64),
        group_ids=torch.tensor([0, 0, 1, 1]),
        samples=Segments(torch.tensor([0, 0, 1, 2, 3]), 4),
        positions=torch.tensor([0, 1, 0, 0, 0]),
        components=torch.tensor([[1.0, 0.0], [0.0, 0.5], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64),
    )
    values = torch.full((5,), 0.3) if options.estimator == "gae" else None
    taught = torch.tensor([0.1, -0.2, 0.3, 0.1, 0.4]) if options.opd_kl_coef else None
    found = token_estimates(rewarded, options, values=values, reverse_kl=taught)
    if name != "sft" and loss_of(options).unit != "pair":  # these read no advantages
        assert learns_from_equals(options) == bool(found.advantages.any())
    scenario_file.write_text(MINIMAL)
    text = f"learner.objective={name}"
    model, num_top = "model: {make: xs, warm_start: {path: lines:10}}", 8 if name == "gkd" else 0
    has_teacher = bool(options.opd_kl_coef or num_top)
    teacher = (f"teacher={{{model}, top_logprobs: {num_top}}}",) if has_teacher else ()
    if is_summed:
        teacher = (COMPONENTS,)
    if name != "sft":
        scenario = load_scenario(scenario_file, (text, *teacher))
        assert scenario.filter.drop_zero_spread is not learns_from_equals(options)
        assert (
            load_scenario(scenario_file, (text, *teacher, "filter.drop_zero_spread=false")).filter.drop_zero_spread
            is False
        )


def test_what_may_learn_from_equal_rewards_keeps_them_by_default() -> None:
    assert learns_from_equals(objective("grpo", opd_kl_coef=0.1))
    assert learns_from_equals(objective("grpo", advantage_function="mine.py:advantages"))
    assert learns_from_equals(objective("grpo", postprocess_function="mine.py:rewards"))


@pytest.mark.parametrize(
    ("objective_text", "is_refused"),
    [
        ("{name: grpo, policy_loss: likelihood, correction: none}", True),
        ("{name: grpo, old_logprobs: recompute, correction: none}", True),
        ("{name: grpo, old_logprobs: recompute, tis_clip: null}", True),
        ("{name: grpo, old_logprobs: recompute, correction: none, allow_unbounded: true}", False),
        ("{name: grpo, old_logprobs: recompute}", False),
        ("{name: grpo, old_logprobs: recompute, correction: none, opsm_delta: 0.1}", False),
        ("grpo", False),
        ("rejection_sampling", False),
        *((name, False) for name in ("sapo", "gmpo", "maxrl", "vapo")),
        *((f"{{name: {n}, old_logprobs: recompute, correction: none}}", True) for n in ("sapo", "gmpo", "maxrl")),
        # It pulls tokens back, and bounds none.
        ("{name: grpo, old_logprobs: recompute, correction: none, behaviour_kl_coef: 0.1}", True),
    ],
)
def test_old_tokens_without_any_bound_are_refused_unless_asked_for(
    scenario_file: Path, objective_text: str, *, is_refused: bool
) -> None:
    text = f"learner: {{objective: {objective_text}}}\n"
    loaded(scenario_file, text + "staleness: {policy: sync}\n")
    late = text + "staleness: {policy: fully_async}\n"
    if is_refused:
        with pytest.raises(UserFault, match=r"allow_unbounded: tokens of up to \d+ policies ago"):
            loaded(scenario_file, late)
    else:
        loaded(scenario_file, late)


def test_only_objectives_that_couple_tokens_pay_for_a_second_pass() -> None:
    coupled = {name for name in OBJECTIVES.builtin if couples_tokens(objective(name))}
    assert coupled == {"gspo", "gmpo", "dpo", "ln_dpo", "ipo", "kto"}
    # The KL in the reward is known before the first step of a batch.
    assert not couples_tokens(objective("rloo", kl_coef=0.1, kl_in="reward"))
    assert couples_tokens(objective("dapo", opsm_delta=1e-4))
    assert couples_tokens(objective("dapo", old_logprobs="recompute", correction="mis"))
    assert couples_tokens(objective("mine.py:loss"))


USER_FILE = """
from penstock.backends.learners.objectives.protocol import ObjectiveTerms

def squared(tokens, options):
    error = (tokens.logprobs - options.clip_high * tokens.advantages) ** 2
    return ObjectiveTerms(loss=(tokens.weights * error).sum(), figures={"train/error": error.mean()})

def number(tokens, options):
    return 3.0

def table(tokens, options):
    return ObjectiveTerms(loss=tokens.logprobs, figures={})

constant = 3
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


def test_an_objective_of_the_users_own_is_called_with_tokens_and_options(user_file: Path) -> None:
    options = objective(f"{user_file}:squared", clip_high=0.5)
    logprobs = LOGPROBS.clone().requires_grad_()
    tokens = tokens_with(logprobs)
    terms = open_objective(options)(tokens, options)
    torch.testing.assert_close(terms.loss.detach(), (WEIGHTS * (LOGPROBS - 0.5 * ADVANTAGES) ** 2).sum())
    assert {"train/error", "train/loss", "train/train_rollout_logprob_abs_diff"} <= set(terms.figures)
    assert all(not value.requires_grad for value in terms.figures.values())


@pytest.mark.parametrize(
    ("name", "story"),
    [
        ("number", "returned float; expected ObjectiveTerms"),
        ("table", r"shape \[3\] with a gradient; expected a scalar"),
    ],
)
def test_what_a_users_objective_returns_is_checked(user_file: Path, name: str, story: str) -> None:
    options = objective(f"{user_file}:{name}")
    tokens = tokens_with(LOGPROBS.clone().requires_grad_())
    with pytest.raises((TypeError, ValueError), match=story):
        open_objective(options)(tokens, options)


def test_a_users_objective_must_be_a_function(user_file: Path) -> None:
    with pytest.raises(UserCodeError, match=r"learner\.objective: .*: expected a function, found"):
        open_objective(objective(f"{user_file}:constant"))
    with pytest.raises(UserCodeError, match="no file"):
        open_objective(objective("nowhere.py:loss"))


def test_a_figure_that_is_no_number_is_refused() -> None:
    tokens = tokens_with(LOGPROBS)
    loss = LOGPROBS.clone().requires_grad_().sum()
    with pytest.raises(ValueError, match="'train/wide' that is no scalar"):
        checked_terms(ObjectiveTerms(loss, {"train/wide": LOGPROBS}), tokens, name="mine")


# --- in a scenario ------------------------------------------------------------------------------------------------


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(MINIMAL)
    return path


def loaded(file: Path, text: str, *overrides: str) -> ObjectiveOptions:
    file.write_text(MINIMAL + text)
    return load_scenario(file, overrides).learner.objective


def test_one_word_is_the_whole_preset(scenario_file: Path) -> None:
    for name in ROLLED:
        options = loaded(scenario_file, f"learner: {{objective: {name}}}\n")
        constant = 256 if options.reduction == "constant" else None
        assert options == objective(name, constant_tokens=constant)
        assert loaded(scenario_file, "", f"learner.objective={name}") == options


def test_the_weights_of_components_are_those_of_the_reward_unless_set(scenario_file: Path) -> None:
    loaded_options = loaded(scenario_file, "learner: {objective: gdpo}\n", COMPONENTS)
    assert loaded_options == objective("gdpo", component_weights={"right": 1.0, "short": 0.5})
    scenario = load_scenario(scenario_file, [COMPONENTS])
    scenario_file.write_text(dump_scenario(scenario))
    assert load_scenario(scenario_file) == scenario
    text = "learner: {objective: {name: gdpo, component_weights: {right: 2, short/tokens: 1}}}\n"
    assert loaded(scenario_file, text, COMPONENTS).component_weights == {"right": 2.0, "short/tokens": 1.0}
    alone = loaded(scenario_file, "learner: {objective: {name: gdpo, component_weights: {format: 1}}}\n")
    assert alone.component_weights == {"format": 1.0}
    assert loaded(scenario_file, "", COMPONENTS) == ObjectiveOptions()


def test_components_that_nobody_gives_are_told_before_anything_starts(scenario_file: Path) -> None:
    with pytest.raises(UserFault, match=r"component_weights: estimator: gdpo needs the components of the reward"):
        loaded(scenario_file, "learner: {objective: gdpo}\n")
    wrong = "learner: {objective: {name: gdpo, component_weights: {rihgt: 1}}}\n"
    with pytest.raises(UserFault, match=r"no component 'rihgt'; reward.components has right, short"):
        loaded(scenario_file, wrong, COMPONENTS)
    with pytest.raises(UserFault, match=r"component_weights: estimator: gdpo needs it"):
        open_objective(objective("gdpo"))


def test_a_key_goes_over_its_preset(scenario_file: Path) -> None:
    options = loaded(scenario_file, "learner: {objective: {name: gspo, clip_high: 0.001}}\n")
    assert options == objective("gspo", clip_high=0.001)
    assert loaded(scenario_file, "learner: {objective: gspo}\n", "learner.objective.clip_high=0.001") == options
    assert loaded(scenario_file, "learner: {objective: {clip_low: 0.1}}\n") == ObjectiveOptions(clip_low=0.1)


def test_the_constant_denominator_is_the_longest_response(scenario_file: Path) -> None:
    text = "sampling: {max_response_tokens: 100}\n"
    assert loaded(scenario_file, text, "learner.objective=dr_grpo").constant_tokens == 100
    set_by_hand = loaded(scenario_file, text, "learner.objective=dr_grpo", "learner.objective.constant_tokens=7")
    assert set_by_hand.constant_tokens == 7


@pytest.mark.parametrize("name", ROLLED)
def test_what_is_dumped_loads_again_as_it_was(scenario_file: Path, name: str) -> None:
    scenario = load_scenario(scenario_file, [f"learner.objective={name}"])
    scenario_file.write_text(dump_scenario(scenario))
    assert load_scenario(scenario_file) == scenario


def test_an_objective_of_the_users_own_is_found_beside_the_scenario(scenario_file: Path) -> None:
    options = loaded(scenario_file, "learner: {objective: mine.py:loss}\n")
    assert options.name == f"{scenario_file.parent / 'mine.py'}:loss"


def test_a_missing_objective_of_the_users_own_is_told_before_anything_starts(scenario_file: Path) -> None:
    scenario = load_scenario(scenario_file, [f"learner.objective={scenario_file.parent / 'mine.py'}:loss"])
    with pytest.raises(UserFault, match=r"learner\.objective: .*there is no file"):
        check_user_code(scenario)
    (scenario_file.parent / "mine.py").write_text("def lose(tokens, options): ...")
    with pytest.raises(UserFault, match="defines no 'loss'; it has lose"):
        check_user_code(scenario)


@pytest.mark.parametrize(
    ("text", "story"),
    [
        ("learner:\n  objective: {name: ppo, critic: none}\n", r":5: learner\.objective\.critic: estimator: gae needs"),
        ("learner:\n  objective: {name: ppo, critic_only_steps: 1}\n", r":5: .*critic_only_steps: .* never trained"),
        ("learner:\n  num_updates: 33\n", r":5: learner\.num_updates: 33 optimizer steps .* 32 groups of a batch"),
        ("learner:\n  objective: ppo\n  num_updates: 500\n", r":6: learner\.num_updates: .* the 256 samples"),
        ("learner:\n  objective: {name: cispo, dual_clip: 7}\n", r":5: learner\.objective\.dual_clip: has no effect"),
        ("learner: {objective: 3}\n", r"learner\.objective: must be a block of keys; found 3"),
        ("learner: {objective: {name: dapo, mis: {upperr: 3}}}\n", "did you mean 'upper'"),
        (
            "learner: {lora: {}, num_ranks: 2}\nengines: {placement: colocate, backend: sglang}\n",
            r"learner\.parallel: a checkpoint of a learner that sleeps",
        ),
        ("learner: {lora: {}, objective: ppo}\n", r"learner\.objective\.critic: own would train a whole second model"),
        ("learner: {lora: {}, objective: {kl_coef: 1, reference_every: 5}}\n", r"reference_every: the reference of"),
        (
            "learner: {lora: {publish: adapter}}\nengines: {backend: sglang, device: cpu}\n",
            r"engines\.device: SGLang's layers for adapters want pinned memory .* set learner\.lora\.publish: merged",
        ),
        (
            "learner: {lora: {publish: adapter}}\nengines: {more: [{backend: sglang, count: 1, device: cpu}]}\n",
            r"engines\.more\[0\]\.device: SGLang's layers for adapters want pinned memory",
        ),
        (
            "learner: {lora: {publish: adapter}}\nengines: {backend: sglang, addresses: ['http://10.0.0.1:1']}\n",
            r"engines\.addresses: servers that run already were not started for the adapters",
        ),
        (
            "learner: {lora: {publish: adapter}}\nengines: {backend: sglang, placement: colocate}\n",
            r"engines\.placement: a server on the learner.s GPUs lets go of its adapters",
        ),
        (
            "learner: {lora: {publish: adapter}}\nengines: {backend: sglang, sglang: {speculative_algorithm: NGRAM}}\n",
            r"engines\.sglang\.speculative_algorithm: drafts are made without the adapters",
        ),
        (
            "learner: {lora: {publish: adapter}}\nengines: {backend: recorded}\n",
            r"learner\.lora\.publish: recorded engines hold no weights",
        ),
        (
            "learner: {lora: {publish: adapter}}\nweights: {transport: tensor}\n",
            r"weights\.transport: tensor does not keep the model .* set it to auto, or to shared_memory or disk",
        ),
        (
            "learner: {lora: {publish: adapter}}\nweights: {names_function: 'names.py:rename'}\n",
            r"weights\.names_function: names whole weights",
        ),
        (
            "learner: {lora: {publish: adapter}}\nengines: {quantization: fp8}\n",
            r"learner\.lora\.publish: engines with engines\.quantization .* set it to merged",
        ),
        ("learner: {objective: {estimator: gae}}\n", r"learner\.objective\.critic: estimator: gae needs"),
        (
            "sampling: {samples_per_group: 1}\nfilter: {drop_zero_spread: false, min_group_size: 1}\n",
            "nothing to compare; draw at least 2, or set learner.objective=reinforce_plus_plus",
        ),
    ],
)
def test_a_scenario_with_a_wrong_objective_is_refused_with_its_place(
    scenario_file: Path, text: str, story: str
) -> None:
    with pytest.raises(UserFault, match=story):
        loaded(scenario_file, text)


def test_the_schema_for_editors_takes_one_word_too() -> None:
    found = scenario_schema()["$defs"]["LearnerOptions"]["properties"]["objective"]["anyOf"]
    assert {"type": "string"} in found
