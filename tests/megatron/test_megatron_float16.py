"""Training in float16 under every layout: the loss scale, what overflows and what is gone on with are those of the
torch learner."""

# transformers' models have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import math
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import pytest
import torch
import trainer_plan as plan
from float16_plan import Burst, Trained
from ranks import Ranks
from tiny_families import make_predicting

from penstock.backends.learners.checkpoints.record import read_record
from penstock.backends.learners.megatron_options import MtpOptions
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import WarmStartOptions
from penstock.backends.learners.plan import ExportPlan, LearnerPlan, pack_demonstrations
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.parallel import transformer_blocks
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.learners.training.alarms import LOSS_SCALE, OVERFLOWS
from penstock.backends.learners.training.loss_scale import INITIAL
from penstock.messages.commands import OpenLearner, SaveCheckpoint, Train

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.learners.options import LearnerOptions, ObjectiveOptions
    from penstock.messages.commands import LearnerCommand

pytestmark = pytest.mark.megatron

CPU = torch.device("cpu")
NORM = "train/grad_norm"
BATCHES = plan.make_batches(3)
TRAINING: list[LearnerCommand] = [
    Train(version=version, groups=groups, min_token_version=0) for version, groups in enumerate(BATCHES, start=1)
]
DEMONSTRATIONS = [([3, 4, 5], [6, 7, 8, 9]), ([11, 12], [13, 14, 15]), ([21, 22, 23, 24], [25])]
SHARED, OWN = objective("ppo", critic="shared"), objective("ppo")


class Case(NamedTuple):
    """A learner."""

    family: str = "qwen3"
    num_ranks: int = 2
    megatron: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    objective: ObjectiveOptions | None = None
    keys: dict[str, Any] = {}  # noqa: RUF012 - as above

    @property
    def options(self) -> LearnerOptions:
        # With a smaller one AdamW makes steps of full size of what rounding leaves of gradients of 0.
        megatron = self.megatron | {"optimizer": {"adam_eps": 1e-5}}
        return plan.learner_options(self.objective, megatron, num_ranks=self.num_ranks, device="cpu", **self.keys)

    def plan(self, model: Path, folder: Path, epoch: int) -> LearnerPlan:
        return LearnerPlan(
            model_folder=str(model),
            checkpoints_folder=str(folder),
            options=self.options,
            temperature=plan.TEMPERATURE,
            dtype="float16",
            seed=plan.SEED,
            num_steps=plan.NUM_STEPS,
            epoch=epoch,
            export=ExportPlan(transport="disk", run_id="", folder="", host="127.0.0.1"),
            demonstrations=pack_demonstrations(DEMONSTRATIONS) if self.options.warm_start else None,
        )


class Run(Protocol):
    """See :func:`run`."""

    def __call__(
        self, case: Case, commands: Sequence[LearnerCommand], burst: Burst | None = None, epoch: int = 1
    ) -> list[Trained]: ...


@pytest.fixture
def run(ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path) -> Run:
    """Carries out commands; in processes of their own where the critic has ranks of its own."""

    def carry_out(
        case: Case, commands: Sequence[LearnerCommand], burst: Burst | None = None, epoch: int = 1
    ) -> list[Trained]:
        if case.family.startswith("predicting"):
            model = tmp_path / "predicting"
            model = model if model.exists() else make_predicting("glm4_moe", model)
        else:
            model = tiny_family(case.family)
        given = (case.plan(model, tmp_path / "checkpoints", epoch), case.num_ranks, commands, burst)
        if not case.options.critic_ranks:
            return ranks(case.num_ranks).run("float16_cases:carried_out", *given)
        with closing(Ranks(case.num_ranks)) as own:
            return own.run("float16_cases:carried_out", *given)

    return carry_out


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    assert first.keys() == second.keys()
    return all(np.array_equal(first[name], second[name]) for name in first)


def compared(figures: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if not name.startswith(("perf/", "time/"))}


# --- against the torch learner ------------------------------------------------------------------------------------


def by_torch(folder: Path, options: LearnerOptions) -> list[dict[str, float]]:
    """Figures of three steps, in the second of which the gradient overflows."""
    model = PackedModel.load(folder, dtype="float16", device=CPU)
    trainer = PolicyTrainer(
        model, options, temperature=plan.TEMPERATURE, num_steps=plan.NUM_STEPS, reference=None,
        check_stop=lambda: None, seed=plan.SEED,
    )  # fmt: skip
    is_bad = False

    def burst(_block: object, _inputs: object, output: torch.Tensor) -> None:
        if is_bad and output.requires_grad:
            output.register_hook(lambda gradient: gradient * 2.0**30)  # type: ignore[no-untyped-call]

    transformer_blocks(model.model)[0].register_forward_hook(burst)
    figures: list[dict[str, float]] = []
    for version, groups in enumerate(BATCHES, start=1):
        is_bad = version == 2
        metrics = trainer.train(groups, version=version, min_token_version=0).metrics
        figures.append({metric.name: metric.value for metric in metrics})
    return figures


@pytest.mark.parametrize("layout", plan.LAYOUTS)
def test_steps_and_overflows_are_those_of_the_torch_learner(
    layout: str, run: Run, tiny_family: Callable[[str], Path]
) -> None:
    """What overflows on one rank is left out on all; the scale is halved once."""
    family, num_ranks, keys = plan.LAYOUTS[layout]
    case = Case(family, num_ranks, keys)
    found = run(case, [OpenLearner(), *TRAINING], Burst(2, num_ranks - 1))
    wanted = by_torch(tiny_family(family), msgspec.structs.replace(case.options, num_ranks=1))
    for told in found:
        assert [figures[OVERFLOWS] for figures in told.figures] == [0, 1, 0]
        assert [figures[LOSS_SCALE] for figures in told.figures] == [INITIAL, INITIAL, INITIAL / 2]
        assert told.scale == [INITIAL / 2, 1]
        assert not same(told.weights[0], told.weights[1])
        assert same(told.weights[1], told.weights[2])
        assert not same(told.weights[2], told.weights[3])
        for mine, first in zip(told.figures, found[0].figures, strict=True):
            assert compared(mine) == pytest.approx(compared(first), abs=0, rel=0, nan_ok=True), "the same bits"
        assert len([text for text in told.notices if "gradients did not fit into float16" in text]) == 1
    for mine, theirs in zip(found[0].figures, wanted, strict=True):
        assert compared(mine).keys() == compared(theirs).keys()
        for name, value in compared(theirs).items():
            assert mine[name] == pytest.approx(value, abs=3e-3, rel=2e-2, nan_ok=True), name


# --- every optimizer, and layers beside the model's ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "of_critic"),
    [
        pytest.param(Case(objective=OWN), False, id="policy"),
        pytest.param(Case(objective=OWN, megatron=plan.PP2), True, id="critic"),
        pytest.param(Case(num_ranks=3, objective=OWN, keys={"critic_ranks": 1}), True, id="critic on its own rank"),
    ],
)
def test_what_overflows_in_one_of_two_models_is_left_out_there(case: Case, of_critic: bool, run: Run) -> None:
    """They have one scale."""
    found = run(case, [OpenLearner(), *TRAINING[:2]], Burst(2, case.num_ranks - 1, of_critic=of_critic))
    norms = {"train/critic-grad_norm", NORM}
    for told in found:
        assert [figures[OVERFLOWS] for figures in told.figures] == [0, 1]
        assert norms & told.figures[0].keys() == norms
        assert norms & told.figures[1].keys() == norms - {"train/critic-grad_norm" if of_critic else NORM}
        assert told.scale == [INITIAL / 2, 0]
        before, after = told.weights[1:]
        for model in ("policy", "critic"):
            share = {name for name in before if name.startswith(f"{model}/")}
            moved = any(not np.array_equal(before[name], after[name]) for name in share)
            assert not share or moved == ((model == "critic") != of_critic), model


def test_a_head_on_the_policys_trunk_has_its_scale(run: Run) -> None:
    """In the first step it is trained alone; an overflow beneath it leaves out the policy's step and not its own."""
    case = Case(objective=objective("ppo", critic="shared", critic_only_steps=1), megatron=plan.TP2)
    found = run(case, [OpenLearner(), *TRAINING], Burst(2, 1))
    exact = run(case._replace(megatron=plan.TP2 | {"precision": "float32"}), [OpenLearner(), TRAINING[0]])
    for told in found:
        assert [figures[OVERFLOWS] for figures in told.figures] == [0, 1, 0]
        heads = [weights["critic/weight/weight"] for weights in told.weights]
        assert all(not np.array_equal(*pair) for pair in itertools.pairwise(heads))
        policy = {name for name in told.weights[0] if name.startswith("policy/")}
        first, *_, last = told.weights
        assert all(np.array_equal(told.weights[2][name], first[name]) for name in policy)
        assert any(not np.array_equal(last[name], first[name]) for name in policy)
        norm = exact[0].figures[0]["train/critic-grad_norm"]
        assert told.figures[0]["train/critic-grad_norm"] == pytest.approx(norm, rel=5e-3)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(
            Case("predicting", 2, plan.PP2 | {"mtp": MtpOptions(loss_coef=0.3)}), "train/mtp_grad_norm", id="mtp"
        ),
        pytest.param(
            Case(
                "qwen3_moe",
                2,
                {
                    "expert_parallel": 2,
                    "transformer": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0},
                },
            ),
            NORM,
            id="balanced experts",
        ),
    ],
)
def test_losses_beside_the_objectives_are_scaled_with_it(case: Case, name: str, run: Run) -> None:
    found = run(case, [OpenLearner(), *TRAINING], Burst(2, 1))
    exact = run(case._replace(megatron=case.megatron | {"precision": "float32"}), [OpenLearner(), TRAINING[0]])
    bare = run(case._replace(megatron=case.megatron | {"transformer": {}, "mtp": None}), [OpenLearner(), TRAINING[0]])
    without = bare[0].figures[0].get(name, 0.0)
    assert exact[0].figures[0][name] != pytest.approx(without, rel=0.1), "there is something to see"
    for told in found:
        assert [figures[OVERFLOWS] for figures in told.figures] == [0, 1, 0]
        assert [name in figures for figures in told.figures] == [True, False, True]
        assert same(told.weights[1], told.weights[2])
        assert told.figures[0][name] == pytest.approx(exact[0].figures[0][name], rel=2e-2)


# --- checkpoints --------------------------------------------------------------------------------------------------

RESUMED = {
    "data 2 with overlaps": Case(megatron=plan.OVERLAPS),
    "plain optimizer": Case(megatron={"distributed_optimizer": False}),
    "pipeline 2, tied": Case("qwen3 tied", megatron=plan.PP2),
    "expert 2": Case("qwen3_moe", megatron={"expert_parallel": 2}),
    "a shared critic": Case(objective=SHARED, megatron=plan.TP2),
    "a critic of its own": Case(objective=OWN),
    "a critic on its own rank": Case(num_ranks=2, objective=OWN, keys={"critic_ranks": 1}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_is_resumed_goes_on_with_the_same_bits(name: str, run: Run) -> None:
    """After an overflow, so that neither the scale nor its steps are those of the beginning."""
    case = RESUMED[name]
    whole = run(case, [OpenLearner(), *TRAINING[:2], SaveCheckpoint(2), TRAINING[2]], Burst(1, 0))
    path = whole[0].saved[0]
    again = run(case, [OpenLearner(version=2, path=path), TRAINING[2]], epoch=2)
    for told, resumed in zip(whole, again, strict=True):
        assert told.scale == resumed.scale == [INITIAL / 2, 2]
        assert compared(resumed.figures[0]) == pytest.approx(compared(told.figures[2]), abs=0, rel=0, nan_ok=True)
        assert same(resumed.weights[0], told.weights[2])
        assert same(resumed.weights[1], told.weights[3])


@pytest.mark.parametrize("has_distributed", [True, False])
def test_a_checkpoint_before_the_first_step_that_was_applied_is_gone_on_with(has_distributed: bool, run: Run) -> None:
    """The optimizer has no moments yet; and the other layout has the scale."""
    keys = {"distributed_optimizer": has_distributed}
    case = Case(megatron=keys)
    whole = run(case, [OpenLearner(), TRAINING[0], SaveCheckpoint(1), TRAINING[1]], Burst(1, 1))
    path = whole[0].saved[0]
    record = read_record(Path(path), version=1)
    assert record.megatron is not None
    assert record.megatron.optimizer_steps == {"policy": 0}
    again = run(case, [OpenLearner(version=1, path=path), TRAINING[1]], epoch=2)
    assert all(same(mine.weights[1], told.weights[2]) for mine, told in zip(again, whole, strict=True))
    other = run(case._replace(megatron=keys | plan.TP2), [OpenLearner(version=1, path=path), TRAINING[1]], epoch=3)
    for told in other:
        assert told.scale == [INITIAL / 2, 1]
        assert told.figures[0][NORM] == pytest.approx(whole[0].figures[1][NORM], rel=5e-3)


def test_a_warm_start_learns_and_leaves_no_scale_behind(run: Run) -> None:
    warm = WarmStartOptions(path="given", num_steps=2, batch_size=2, warmup_steps=1)
    case = Case(keys={"warm_start": warm})
    first = run(case, [OpenLearner(), TRAINING[0]])
    assert first[0].scale == [INITIAL, 1]
    assert not same(first[0].weights[0], run(Case(), [OpenLearner()])[0].weights[0])


# --- memory -------------------------------------------------------------------------------------------------------


def test_a_step_that_is_tried_anew_for_want_of_memory_has_the_same_scale(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    options = plan.learner_options(SHARED, {"precision": "float16"}, num_updates=2)
    limit = plan.Limit(30, (1,), "backward", str(tmp_path))
    batches = msgspec.msgpack.encode(plan.make_batches(2))
    given = (str(tiny_family("qwen3")), msgspec.msgpack.encode(options), 2, batches)
    answers = ranks(2).run("trainer_cases:short_of_memory", *given, limit)
    smaller = msgspec.structs.replace(options, max_tokens_per_micro_batch=plan.MAX_TOKENS // 2)
    wanted = ranks(2).run("trainer_cases:trained", given[0], msgspec.msgpack.encode(smaller), *given[2:])[0][0]
    for figures, _, size, story in answers:
        assert (size, story) == (plan.MAX_TOKENS // 2, "")
        for mine, theirs in zip(figures, wanted, strict=True):
            assert (mine[LOSS_SCALE], mine[OVERFLOWS]) == (INITIAL, 0)
            assert mine[NORM] == pytest.approx(theirs[NORM], rel=1e-3)
            assert math.isfinite(mine[NORM])
