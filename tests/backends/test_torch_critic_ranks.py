"""A critic on ranks of its own trains what it trains beside the policy, while the policy is computed, and holds nothing
of it; checkpoints pass from either layout to the other."""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar, cast

import pytest
import torch
from checkpoint_cases import digests_of
from learner_cases import learner_plan, make_groups, train_command
from rank_cases import CPU, open_ranks
from torch import nn
from worker_host import Host

from penstock.backends.checkpoint.make import make_model
from penstock.backends.learners.checkpoints.record import STATE_FOLDER, read_record
from penstock.backends.learners.checkpoints.shards import local_of
from penstock.backends.learners.checkpoints.state import load_state
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch.model import CheckpointError, PackedModel
from penstock.backends.learners.torch.parallel import parallelize, replica, whole
from penstock.backends.learners.torch.roles import roles_of
from penstock.backends.learners.torch.rounds import Rounds
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.learners.torch.worker import TorchWorker
from penstock.messages.commands import OpenLearner, PublishWeights, SaveCheckpoint
from penstock.messages.local import BatchTrained, CheckpointWritten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.backends.learners.torch.rounds import MicroBatch
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.messages.commands import LearnerCommand
    from penstock.messages.samples import Group

pytestmark = pytest.mark.long_run

TOLERANCE = 1e-6
NUM_BATCHES = 3
PPO: dict[str, Any] = {"whiten": True, "kl_coef": 0.05, "gae_lambda": 0.9, "critic_lambda": 1.0}


class Layout(NamedTuple):
    """What lies where."""

    num_ranks: int
    critic_ranks: int = 0
    parallel: Literal["fsdp", "ddp"] = "fsdp"
    tensor_parallel: int = 1
    shard_size: int | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """Ranks of the policy and of the critic."""
        return self.num_ranks - self.critic_ranks, self.critic_ranks

    def options(self, **keys: Any) -> LearnerOptions:  # noqa: ANN401 - of the objective
        return LearnerOptions(
            learning_rate=1e-3,
            num_ranks=self.num_ranks,
            critic_ranks=self.critic_ranks,
            parallel=self.parallel,
            tensor_parallel=self.tensor_parallel,
            shard_size=self.shard_size,
            num_updates=2,
            max_tokens_per_micro_batch=64,
            objective=objective("ppo", **PPO | keys),
        )


class Trained(NamedTuple):
    """What one rank knows after some batches."""

    figures: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    """Those of the models that it holds, whole."""
    num_held: int
    """Elements of parameters that lie in its memory."""


P = ParamSpec("P")
ResultT = TypeVar("ResultT")


def run(
    num_ranks: int, job: Callable[Concatenate[WorkerGroup, P], ResultT], *args: P.args, **keys: P.kwargs
) -> list[ResultT]:
    """In processes of its own: torch keeps what it found out about the groups of a mesh for equal meshes, whatever
    their groups are, so one process can be a part of one learner only."""
    with open_ranks(num_ranks if num_ranks > 1 else 0) as ranks:
        return ranks.run(num_ranks, job, *args, **keys)


@pytest.fixture(scope="module")
def source_with_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That two ranks can divide."""
    path = tmp_path_factory.mktemp("m")
    make_model("m", path, seed=0)
    return path


def batch(version: int) -> tuple[Group, ...]:
    step = (version * 0.37) % 1.0
    return make_groups(((step, 0.0, 1.0), (0.5, step / 2, 0.0), (0.2, 0.9)))


def _parameters_in_memory() -> list[nn.Parameter]:
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    found = [each for each in tensors if isinstance(each, nn.Parameter) and not each.is_meta]
    return [each for each in found if local_of(each).untyped_storage().size()]


def open_trainer(workers: WorkerGroup, source: Path, options: LearnerOptions) -> PolicyTrainer:
    """In float64, so that what is compared is no rounding; the head of the critic is no longer 0."""
    roles = roles_of(workers, options)
    model = PackedModel.load(source, dtype="float32", device=CPU)
    model.model.double()
    parallelize(model, roles.own, options)
    reference = replica(model, roles.own, options) if roles.has_policy else None
    return PolicyTrainer(
        model, options, temperature=0.9, num_steps=9, reference=reference, check_stop=lambda: None, workers=workers,
        roles=roles,
    )  # fmt: skip


def train(workers: WorkerGroup, source: Path, options: LearnerOptions) -> Trained:
    before = _parameters_in_memory()
    trainer = open_trainer(workers, source, options)
    known = {id(each) for each in before}
    num_held = sum(local_of(each).numel() for each in _parameters_in_memory() if id(each) not in known)
    figures: list[dict[str, float]] = []
    for version in range(1, NUM_BATCHES + 1):
        result = trainer.train(batch(version), version=version, min_token_version=0)
        figures.append({metric.name: metric.value for metric in result.metrics})
    state = trainer.state()
    weights = {name: whole(each) for name, each in state.items() if name.startswith("critic/weight/")}
    if trainer.roles.has_policy:
        weights |= {name: whole(each) for name, each in trainer.model.model.named_parameters()}
    return Trained(figures, {name: weight.detach().clone() for name, weight in weights.items()}, num_held)


def beside(layout: Layout, source: Path, num_ranks: int) -> Trained:
    """What the same learner trains where each of so many ranks holds both."""
    if num_ranks == 1:
        layout = Layout(1)
    return run(num_ranks, train, source, layout._replace(num_ranks=num_ranks, critic_ranks=0).options())[0]


def compared(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if not name.startswith(("perf/", "time/"))}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 1),
        Layout(3, 1),
        Layout(3, 2),
        Layout(3, 1, "ddp"),
        Layout(4, 2, tensor_parallel=2),
        pytest.param(Layout(4, 2, shard_size=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_critic_on_its_own_ranks_trains_what_it_trains_beside_the_policy(
    layout: Layout, model_folder: Path, source_with_heads: Path
) -> None:
    """Against both on as many ranks as each has: gradients of more ranks are added up in another order."""
    source = model_folder if layout.tensor_parallel == 1 else source_with_heads
    of_policy, of_critic = (beside(layout, source, count) for count in layout.counts)
    weights = {name: weight for name, weight in of_policy.weights.items() if not name.startswith("critic/")}
    critic_weights = {name: weight for name, weight in of_critic.weights.items() if name.startswith("critic/")}
    for rank, each in enumerate(run(layout.num_ranks, train, source, layout.options())):
        for version, found in enumerate(each.figures):
            expected = of_policy.figures[version] | {
                name: value for name, value in of_critic.figures[version].items() if "critic" in name
            }
            assert compared(found) == pytest.approx(compared(expected), abs=TOLERANCE), rank
        mine = weights if rank < layout.counts[0] else critic_weights
        assert set(each.weights) == set(mine), "a rank has the weights of its own part and no other"
        for name, weight in each.weights.items():
            torch.testing.assert_close(weight, mine[name], rtol=0, atol=TOLERANCE, msg=f"rank {rank}: {name}")
    assert of_critic.figures[-1]["train/value_loss"] > 0
    assert critic_weights["critic/weight/head.weight"].abs().max() > 1e-3, "it was trained"


def test_no_rank_of_the_policy_holds_the_critic_and_none_of_the_critic_the_policy(model_folder: Path) -> None:
    both, _ = run(2, train, model_folder, Layout(2, parallel="ddp").options())
    policy, critic = run(2, train, model_folder, Layout(2, 1).options())
    first, second, sharded = run(3, train, model_folder, Layout(3, 1).options())
    sizes = {name: weight.numel() for name, weight in both.weights.items()}
    of_critic = sum(size for name, size in sizes.items() if name.startswith("critic/"))
    of_policy = sum(sizes.values()) - of_critic
    assert both.num_held == 2 * of_policy + of_critic, "the reference too"
    assert policy.num_held == 2 * of_policy
    assert critic.num_held == sharded.num_held == of_critic
    assert first.num_held + second.num_held == 2 * of_policy


def test_the_critic_trains_alone_at_first_where_that_is_asked_for(model_folder: Path) -> None:
    keys: dict[str, Any] = {"critic_only_steps": 2, "critic_warmup_steps": 2}
    [expected] = run(1, train, model_folder, Layout(1).options(**keys))
    policy, _, critic = run(3, train, model_folder, Layout(3, 1).options(**keys))
    assert ["train/loss" in found for found in policy.figures] == [False, False, True]
    for mine, theirs in zip(policy.figures, expected.figures, strict=True):
        assert compared(mine) == pytest.approx(compared(theirs), abs=TOLERANCE)
    for name, weight in (policy.weights | critic.weights).items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=0, atol=TOLERANCE)


# --- at the same time -----------------------------------------------------------------------------------------------


def train_where_runs_meet(workers: WorkerGroup, source: Path, options: LearnerOptions) -> list[str]:
    """Every run of micro-batches for gradients waits, in its middle, for one of the other part."""
    trainer = open_trainer(workers, source, options)
    met: list[str] = []

    def meeting(
        self: Rounds,
        kind: str,
        batches: Sequence[MicroBatch],
        spare: MicroBatch,
        work: Callable[[MicroBatch], object],
    ) -> list[object]:
        def work_and_meet(each: MicroBatch) -> object:
            result = work(each)
            if kind != "opening" and each is batches[0]:
                workers.barrier(timeout_s=60.0)
                met.append(kind)
            return result

        return cast("list[object]", unchanged(self, kind, batches, spare, work_and_meet))

    unchanged: Any = Rounds.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rounds, "run", meeting)
        trainer.train(batch(1), version=1, min_token_version=0)
    return met


def test_policy_and_critic_are_computed_at_the_same_time(model_folder: Path) -> None:
    policy, critic = run(2, train_where_runs_meet, model_folder, Layout(2, 1).options())
    assert policy == ["apart False"] * 2
    assert critic == ["values"] * 2


# --- memory ---------------------------------------------------------------------------------------------------------


def train_where_one_runs_out(workers: WorkerGroup, source: Path, options: LearnerOptions, failing: int) -> Trained:
    """A rank has no memory for its second micro-batches of gradients, once."""
    calls: list[str] = []
    tried: Any = Rounds._tried

    def try_it(self: Rounds, kind: str, each: MicroBatch, work: Callable[[MicroBatch], object], found: Any) -> bool:  # noqa: ANN401
        def refuse(_each: MicroBatch) -> object:
            raise torch.OutOfMemoryError

        calls.append(kind)
        is_short = workers.rank == failing and kind != "opening" and sum(one != "opening" for one in calls) == 2
        return bool(tried(self, kind, each, refuse if is_short else work, found))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rounds, "_tried", try_it)
        return train(workers, source, options)


@pytest.mark.parametrize("failing", [0, 1])
def test_memory_that_does_not_suffice_on_one_side_is_found_again_by_both(failing: int, model_folder: Path) -> None:
    [expected] = run(1, train, model_folder, Layout(1).options())
    for each in run(2, train_where_one_runs_out, model_folder, Layout(2, 1).options(), failing):
        for mine, theirs in zip(each.figures, expected.figures, strict=True):
            assert compared(mine) == pytest.approx(compared(theirs), abs=TOLERANCE)


# --- checkpoints ----------------------------------------------------------------------------------------------------


class Done(NamedTuple):
    losses: list[tuple[float, float]]
    """Of policy and critic, for each batch."""
    saved: list[str]
    digests: dict[str, str]
    """Of the whole tensors of the trainer's state on this rank, at the end."""


def carry_out(
    workers: WorkerGroup, source: Path, folder: Path, layout: Layout, epoch: int, commands: Sequence[LearnerCommand]
) -> Done:
    host = Host()
    options = layout.options(critic_only_steps=1)
    plan = learner_plan(source, folder, options, seed=3, num_steps=9, epoch=epoch)
    worker = TorchWorker(plan, workers, host, None)
    losses: list[tuple[float, float]] = []
    for command in commands:
        answer = worker.carry_out(command)
        if isinstance(answer, BatchTrained):
            found = {metric.name: metric.value for metric in answer.metrics}
            losses.append((found.get("train/loss", 0.0), found["train/value_loss"]))
    worker.finish()
    assert not host.errors, host.errors
    opened = worker._opened
    assert opened is not None
    digests = digests_of({name: whole(tensor) for name, tensor in opened.trainer.state().items()})
    return Done(losses, [one.path for one in host.answers if isinstance(one, CheckpointWritten)], digests)


APART, TOGETHER = Layout(3, 1), Layout(2)


@pytest.mark.parametrize(
    ("writer", "readers"),
    [(APART, (TOGETHER, Layout(1), Layout(3, 2))), (TOGETHER, (APART, Layout(2, 1)))],
    ids=["apart", "together"],
)
def test_a_checkpoint_of_either_layout_is_gone_on_with_in_the_other(
    writer: Layout, readers: tuple[Layout, ...], model_folder: Path, tmp_path: Path
) -> None:
    batches = [train_command(version, groups=batch(version)) for version in (1, 2, 3)]
    saving: list[LearnerCommand] = [OpenLearner(), *batches[:2], SaveCheckpoint(version=2)]
    told = run(writer.num_ranks, carry_out, model_folder, tmp_path, writer, 1, saving)
    path = tmp_path / "version-0000002"
    assert told[0].saved == [str(path)]
    read_record(path, version=2)
    stored = digests_of(load_state(path / STATE_FOLDER, is_wanted=lambda name: not name.startswith("random/")))
    written = {name: digest for each in told for name, digest in each.digests.items()}
    assert stored == written
    going_on: list[LearnerCommand] = [OpenLearner(version=2, path=str(path)), batches[2]]
    [expected] = run(1, carry_out, model_folder, tmp_path, Layout(1), 2, going_on)
    reading: list[LearnerCommand] = [OpenLearner(version=2, path=str(path))]
    for epoch, reader in enumerate(readers, start=3):
        read = run(reader.num_ranks, carry_out, model_folder, tmp_path, reader, epoch, reading)
        assert {name: digest for each in read for name, digest in each.digests.items()} == written, "to the bit"
        for each in run(reader.num_ranks, carry_out, model_folder, tmp_path, reader, epoch, going_on):
            assert each.losses[0] == pytest.approx(expected.losses[0], abs=TOLERANCE), reader


def save_again_and_publish(workers: WorkerGroup, source: Path, folder: Path, path: str) -> bool:
    host = Host()
    plan = learner_plan(source, folder, APART.options(), seed=3, num_steps=9, epoch=2)
    worker = TorchWorker(plan, workers, host, None)
    worker.carry_out(OpenLearner(version=2, path=path))
    worker.carry_out(train_command(3, groups=batch(3)))
    is_silent = worker.carry_out(PublishWeights(version=3, publish=1)) is None
    worker.carry_out(SaveCheckpoint(version=3))
    worker.finish()
    return is_silent and not host.errors


def test_a_resumed_critic_on_its_own_ranks_saves_again_beside_the_first_reference(
    model_folder: Path, tmp_path: Path
) -> None:
    batches = [train_command(version, groups=batch(version)) for version in (1, 2)]
    saving: list[LearnerCommand] = [OpenLearner(), *batches, SaveCheckpoint(version=2)]
    told = run(3, carry_out, model_folder, tmp_path, APART, 1, saving)
    assert all(run(3, save_again_and_publish, model_folder, tmp_path, told[0].saved[0]))
    read_record(tmp_path / "version-0000003-e2", version=3)
    assert {entry.name for entry in tmp_path.iterdir()} == {"reference", "version-0000002", "version-0000003-e2"}


def open_without_critic(workers: WorkerGroup, source: Path, folder: Path, path: str) -> str:
    worker = TorchWorker(learner_plan(source, folder, APART.options(kl_coef=0.0), epoch=2), workers, Host(), None)
    try:
        worker.carry_out(OpenLearner(version=1, path=path))
    except CheckpointError as error:
        return str(error)
    return ""


def save_dapo(workers: WorkerGroup, source: Path, folder: Path) -> None:
    options = LearnerOptions(learning_rate=1e-3, objective=objective("dapo"))
    worker = TorchWorker(learner_plan(source, folder, options), workers, Host(), None)
    worker.carry_out(OpenLearner())
    worker.carry_out(train_command(1, groups=batch(1)))
    worker.carry_out(SaveCheckpoint(version=1))
    worker.finish()


def test_a_checkpoint_without_a_critic_is_refused_where_the_critic_would_be(model_folder: Path, tmp_path: Path) -> None:
    run(1, save_dapo, model_folder, tmp_path)
    *policies, critic = run(3, open_without_critic, model_folder, tmp_path, str(tmp_path / "version-0000001"))
    assert policies == ["", ""]
    assert "is a critic of" in critic
    assert "the checkpoint has none" in critic
