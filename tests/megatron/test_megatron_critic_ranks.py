"""A critic on ranks of its own trains what it trains beside the policy, and holds nothing of it; checkpoints pass from
either layout to the other."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pytest
import trainer_plan as plan
from critic_rank_plan import Short, Told
from ranks import Ranks

from penstock.backends.learners.checkpoints.record import read_record
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import WarmStartOptions
from penstock.backends.learners.plan import ExportPlan, LearnerPlan, pack_demonstrations
from penstock.messages.commands import OpenLearner, PublishWeights, SaveCheckpoint, Train

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.messages.commands import LearnerCommand

pytestmark = pytest.mark.megatron

TOLERANCE = 1e-5
BATCHES = plan.make_batches(3)
TRAINING: list[LearnerCommand] = [
    Train(version=version, groups=groups, min_token_version=0) for version, groups in enumerate(BATCHES, start=1)
]
# With a smaller one AdamW makes steps of full size of what rounding leaves of gradients of 0.
EPSILON: dict[str, Any] = {"optimizer": {"adam_eps": 1e-5}}
PPO: dict[str, Any] = {"whiten": True, "kl_coef": 0.05, "gae_lambda": 0.9, "critic_lambda": 1.0}
DEMONSTRATIONS = [([3, 4, 5], [6, 7, 8, 9]), ([11, 12], [13, 14, 15]), ([21, 22, 23, 24], [25])]
WARM = WarmStartOptions(path="given", num_steps=2, batch_size=2, warmup_steps=1)


class Layout(NamedTuple):
    """What lies where."""

    num_ranks: int
    critic_ranks: int = 0
    family: str = "qwen3"
    megatron: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    critic_only_steps: int = 0
    warm_start: WarmStartOptions | None = None

    @property
    def beside(self) -> Layout:
        """As many ranks as the policy has, with both."""
        return self._replace(num_ranks=self.num_ranks - self.critic_ranks, critic_ranks=0)

    def plan(self, model: Path, folder: Path, epoch: int = 1) -> LearnerPlan:
        options = plan.learner_options(
            objective("ppo", critic_only_steps=self.critic_only_steps, **PPO),
            self.megatron | EPSILON,
            num_updates=2,
            num_ranks=self.num_ranks,
            critic_ranks=self.critic_ranks,
            device="cpu",
            warm_start=self.warm_start,
        )
        return LearnerPlan(
            model_folder=str(model),
            checkpoints_folder=str(folder),
            options=options,
            temperature=plan.TEMPERATURE,
            dtype="float32",
            seed=plan.SEED,
            num_steps=plan.NUM_STEPS,
            epoch=epoch,
            export=ExportPlan(transport="disk", run_id="", folder="", host="127.0.0.1"),
            demonstrations=None if self.warm_start is None else pack_demonstrations(DEMONSTRATIONS),
        )


class Run(Protocol):
    """See :func:`run`."""

    def __call__(
        self, layout: Layout, commands: Sequence[LearnerCommand], epoch: int = 1, short: Short | None = None
    ) -> list[Told]: ...


@pytest.fixture
def run(tiny_family: Callable[[str], Path], tmp_path: Path) -> Run:
    """Carries out commands in processes of their own: one has one default group of torch, that of its part."""

    def carry_out(
        layout: Layout, commands: Sequence[LearnerCommand], epoch: int = 1, short: Short | None = None
    ) -> list[Told]:
        learner = layout.plan(tiny_family(layout.family), tmp_path / "checkpoints", epoch)
        with closing(Ranks(layout.num_ranks)) as ranks:
            return ranks.run("critic_rank_cases:carried_out", learner, layout.num_ranks, commands, short)

    return carry_out


@pytest.fixture(scope="module")
def both(tiny_family: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """What two ranks find out in all batches that hold policy and critic."""
    learner = TWO_AND_ONE.beside.plan(tiny_family("qwen3"), tmp_path_factory.mktemp("both"))
    with closing(Ranks(2)) as ranks:
        return ranks.run("critic_rank_cases:carried_out", learner, 2, [OpenLearner(), *TRAINING])


def compared(figures: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if not name.startswith(("perf/", "time/"))}


def check_figures(found: dict[str, float], expected: dict[str, float], what: object) -> None:
    found, expected = compared(found), compared(expected)
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=TOLERANCE, rel=1e-4, nan_ok=True), (what, name)


def check_weights(found: dict[str, Any], expected: dict[str, Any], what: object) -> None:
    assert found.keys() == expected.keys(), what
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=TOLERANCE, err_msg=f"{what}: {name}")


TWO_AND_ONE = Layout(3, 1)
CASES = {
    "2 + 1, critic alone at first": TWO_AND_ONE._replace(critic_only_steps=1, warm_start=WARM),
    "1 + 2, with overlaps": Layout(3, 2, megatron=plan.OVERLAPS),
    "tensor 2 + 2": Layout(4, 2, megatron=plan.TP2),
    "pipeline 2 + 2, tied": Layout(4, 2, "qwen3 tied", plan.PP2),
    "virtual pipeline 2 + 2": Layout(4, 2, "qwen3", plan.VIRTUAL),
    "expert 2 + 2": Layout(4, 2, "qwen3_moe", {"expert_parallel": 2}),
}
IN_CI = "2 + 1, critic alone at first"
"""The groups of megatron-core are those of its own world in either case; their axes are the nightly's."""


def test_two_ranks_and_one_train_what_two_train_with_both(both: list[Told], run: Run) -> None:
    apart = run(TWO_AND_ONE, [OpenLearner(), *TRAINING, PublishWeights(version=3, publish=1)])
    check_parts(apart, both, 2)
    assert {each.num_held for each in apart[:2]} == {both[0].num_held - apart[2].num_held}, "the reference is its own"
    assert apart[2].num_held == sum(weight.size for weight in both[0].critic.values())
    assert np.abs(apart[0].opened[1][0]).max() > 1e-2, "the critic was trained"


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=() if each == IN_CI else pytest.mark.slow) for each in CASES]
)
def test_a_critic_on_its_own_ranks_trains_what_it_trains_beside_the_policy(case: str, run: Run) -> None:
    layout, commands = CASES[case], [OpenLearner(), *TRAINING[:2]]
    check_parts(run(layout, commands), run(layout.beside, commands), layout.beside.num_ranks)


def check_parts(apart: list[Told], beside: list[Told], num_policies: int) -> None:
    """Ranks of either part know and have what those that hold both do."""
    for rank, told in enumerate(apart):
        for number, figures in enumerate(beside[0].figures):
            check_figures(told.figures[number], figures, (rank, number))
            for found, wanted in zip(told.opened[number], beside[0].opened[number], strict=True):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
        has_policy = rank < num_policies
        assert (bool(told.policy), bool(told.critic)) == (has_policy, not has_policy), "what a rank has of the models"
    for told, expected in zip(apart, beside, strict=False):
        check_weights(told.policy, expected.policy, "policy")
    for told, expected in zip(apart[num_policies:], beside, strict=False):
        check_weights(told.critic, expected.critic, "critic")


def test_ranks_of_the_critic_keep_nothing_of_the_policy_that_they_have_trained_first(run: Run) -> None:
    layout = Layout(2, 1, warm_start=WARM)
    policy, critic = run(layout, [OpenLearner()])
    assert critic.num_held == sum(weight.size for weight in critic.critic.values())
    assert policy.num_held > critic.num_held


@pytest.mark.parametrize("failing", [pytest.param(0, marks=[pytest.mark.slow]), 2])
def test_memory_that_does_not_suffice_on_one_side_is_found_again_by_both(
    failing: int, both: list[Told], run: Run
) -> None:
    found = run(TWO_AND_ONE, [OpenLearner(), *TRAINING[:2]], 1, Short(failing, 27))
    for rank, told in enumerate(found):
        for mine, wanted in zip(told.figures, both[0].figures, strict=False):
            check_figures(mine, wanted, rank)
        is_short = (rank < 2) == (failing < 2)
        assert (told.max_tokens < plan.MAX_TOKENS) == is_short, "one side halves, the other only does it again"


def test_the_death_of_the_critics_rank_is_noticed_and_made_good(
    both: list[Told], run: Run, tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    commands = [OpenLearner(), TRAINING[0], SaveCheckpoint(1), TRAINING[1]]
    learner = TWO_AND_ONE.plan(tiny_family("qwen3"), tmp_path / "checkpoints")
    with closing(Ranks(3)) as ranks:
        with pytest.raises((EOFError, ConnectionError)):
            ranks.run("critic_rank_cases:with_one_that_dies", learner, 3, commands, 2)
        ranks.await_end()
    folder = tmp_path / "checkpoints"
    assert sorted(each.name for each in folder.glob("noticed-*")) == ["noticed-0", "noticed-1"]
    path = folder / "version-0000001"
    for rank, again in enumerate(run(TWO_AND_ONE, [OpenLearner(version=1, path=str(path)), TRAINING[1]], 2)):
        check_figures(again.figures[0], both[0].figures[1], rank)


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        (TWO_AND_ONE, (TWO_AND_ONE.beside,)),
        (TWO_AND_ONE.beside, (TWO_AND_ONE,)),
        pytest.param(
            Layout(4, 2, megatron=plan.TP2),
            (Layout(3, 2), Layout(2, megatron=plan.PP2)),
            marks=[pytest.mark.slow],
        ),
    ],
    ids=["apart", "beside", "apart, divided"],
)
def test_a_checkpoint_of_either_layout_is_gone_on_with_in_the_other(
    writer: Layout, readers: tuple[Layout, ...], both: list[Told], run: Run
) -> None:
    path = Path(run(writer, [OpenLearner(), *TRAINING[:2], SaveCheckpoint(2)])[0].saved[0])
    record = read_record(path, version=2)
    assert record.megatron is not None
    assert record.megatron.optimizer_steps == {"policy": 4, "critic": 4}
    for epoch, reader in enumerate(readers, start=2):
        commands = [OpenLearner(version=2, path=str(path)), TRAINING[2], SaveCheckpoint(3)]
        for rank, told in enumerate(run(reader, commands, epoch)):
            check_figures(told.figures[0], both[0].figures[2], (reader, rank))
        read_record(path.with_name(f"version-0000003-e{epoch}"), version=3)
    assert [each.name for each in path.parent.glob("reference*")] == ["reference"]
