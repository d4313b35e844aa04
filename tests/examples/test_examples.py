"""Every example runs as it stands, shortened by overrides: it ends well, loses nothing, and shows what it is about.

An example is one line in :data:`EXAMPLES`: its scenario, what makes it short enough for a test, and what its steps or
its folder have to show. ``docs/examples.md`` has the same list for people; a test keeps the two together.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
from live_run import SCENARIOS, LiveRun
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]  # typed in part only

from penstock.backends.data.shapes import SIDE, shapes_row
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.evaluation_answers import answers_file
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.dashboard.sample_page import SampleQuery, answer_sample
from penstock.runtime.observability.evaluations import read_evaluations
from penstock.runtime.observability.samples import shown_samples
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAGE = Path(__file__).parents[2] / "docs" / "examples.md"

Figures = dict[str, float]
"""Of a step, those that are numbers."""


class Shown(NamedTuple):
    """What a run of an example left."""

    steps: Sequence[Figures]
    folder: Path

    def samples(self) -> list[dict[str, Any]]:
        """Those that were trained, where the run keeps them."""
        reader = cast("Any", pq)  # which is typed in part only
        rows: list[dict[str, Any]] = []
        for file in sorted((self.folder / "samples").rglob("*.parquet")):
            rows.extend(reader.read_table(file).to_pylist())
        return rows

    def of(self, name: str) -> list[float]:
        """One figure over the steps that have it."""
        return [step[name] for step in self.steps if name in step]


class Example(NamedTuple):
    """One example and how it is tested."""

    scenario: str
    """In ``scenarios/``."""
    overrides: tuple[str, ...]
    """What makes it short."""
    num_steps: int
    check: Callable[[Shown], None]
    """Asserts what the example is about."""
    marks: tuple[pytest.MarkDecorator, ...] = (pytest.mark.long_run,)
    """Where it is run: none is `make test`."""


def imitates(shown: Shown) -> None:
    losses = shown.of("train/sft_loss")
    assert losses[-1] < losses[0] - 0.5
    assert not shown.of("rollout/raw_reward")


def prefers(shown: Shown) -> None:
    losses = shown.of("train/loss")
    assert losses[0] == pytest.approx(0.693147, abs=1e-5)  # nothing is preferred yet: log 2
    assert losses[-1] < 0.69
    assert shown.of("train/dpo_accuracy")[-1] > 0.5


def imitates_the_best(shown: Shown) -> None:
    shares = shown.of("train/imitated_ratio")
    assert all(0.0 <= share < 1.0 for share in shares)
    assert any(share > 0.0 for share in shares)


def comes_nearer_to_the_teacher(shown: Shown) -> None:
    distances = shown.of("train/opd_reverse_kl")
    assert min(distances[-2:]) < distances[0], distances


def uses_a_tool_and_trains_only_its_own_tokens(component: str) -> Callable[[Shown], None]:
    def check(shown: Shown) -> None:
        samples = shown.samples()
        with_tool = [sample for sample in samples if dict(sample["reward_components"]).get(component)]
        assert len(with_tool) > len(samples) / 20
        for sample in with_tool:  # what the tool has said is there, and masked
            assert 0 < sum(sample["loss_mask"]) < len(sample["response_tokens"])
            assert not any(p for p, kept in zip(sample["logprobs"], sample["loss_mask"], strict=True) if not kept)

    return check


def asks_before_it_acts(shown: Shown) -> None:
    uses_a_tool_and_trains_only_its_own_tokens("asked")(shown)
    samples = [(sample["reward"], dict(sample["reward_components"])) for sample in shown.samples()]
    asked = [reward for reward, parts in samples if parts["asked"]]
    unasked = [reward for reward, parts in samples if not parts["asked"]]
    assert sum(asked) / len(asked) > 0.2 > sum(unasked) / len(unasked)  # what the user wants is not to be guessed


def finds(shown: Shown) -> None:
    uses_a_tool_and_trains_only_its_own_tokens("searches")(shown)
    rewards = {bool(dict(sample["reward_components"])["hits"]): sample["reward"] for sample in shown.samples()}
    hits = [sample["reward"] for sample in shown.samples() if dict(sample["reward_components"])["hits"]]
    assert set(rewards) == {True, False}
    assert sum(hits) / len(hits) > 0.5  # who finds it knows it, and most others guess wrong


def keeps_each_image_once(shown: Shown) -> None:
    kept = {file.name for file in (shown.folder / "images").iterdir()}
    assert {hashlib.sha256(shapes_row(0, n).image).hexdigest() for n in range(256)} <= kept
    assert len(kept) <= 256 + 128, "and those of the evaluation, no more"
    assert max(shown.of("train/train_rollout_logprob_abs_diff")[:1]) < 1e-5, "engine and learner see the same"
    page = answer_sample(shown.folder, SampleQuery(sample=shown_samples(shown.folder)[0].name))
    assert [(image.width, image.height) for image in page.images] == [(SIDE, SIDE)], "the dashboard shows it"
    was, now = (load_file(next(folder.rglob("model.safetensors"))) for folder in _models(shown.folder))
    same = {name for name in was if was[name].equal(now[name])}
    assert same == {name for name in was if name.startswith("visual.")}, "what is frozen stays"


def looks_closer(shown: Shown) -> None:
    samples = shown.samples()
    for sample in samples:  # one letter, what is shown next, one letter
        mask = sample["loss_mask"]
        assert sum(mask) == 2, mask
        assert mask[0] == mask[-1] == 1
    assert max(shown.of("train/train_rollout_logprob_abs_diff")[:1]) < 1e-5, "engine and learner see the same"
    assert [row.version for row in read_evaluations(shown.folder)] == [2], "the evaluation is played too"
    page = answer_sample(shown.folder, SampleQuery(sample=shown_samples(shown.folder)[0].name))
    row, without_colours, closer = page.images
    assert (without_colours.width, without_colours.height) == (row.width, row.height) == (SIDE, SIDE)
    grey, coloured = np.frombuffer(without_colours.pixels, "u1"), np.frombuffer(closer.pixels, "u1")
    assert (grey.reshape(-1, 4)[:, 0] == grey.reshape(-1, 4)[:, 1]).all()
    assert not (coloured.reshape(-1, 4)[:, 0] == coloured.reshape(-1, 4)[:, 1]).all(), "the dashboard shows what it saw"


def _models(folder: Path) -> tuple[Path, Path]:
    """As it was made, and the last checkpoint."""
    return folder / "model", max((folder / "checkpoints").glob("version-*"))


def sees_colours(shown: Shown) -> None:
    rewards = shown.of("rollout/raw_reward")
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5]), rewards
    assert [row.version for row in read_evaluations(shown.folder)] == [20]


def argues_before_a_judge(shown: Shown) -> None:
    for sample in shown.samples():
        num_claim_and_reply, num_objection, num_verdict = sample["part_lengths"]
        assert min(num_claim_and_reply, num_objection, num_verdict) > 0
        assert not any(sample["loss_mask"][-num_verdict:])  # the judge is not trained
        assert all(sample["loss_mask"][num_claim_and_reply : num_claim_and_reply + num_objection])
    assert any(sample["reward"] > 0 for sample in shown.samples())


def evaluates_three_datasets(shown: Shown) -> None:
    evaluations = read_evaluations(shown.folder)
    assert [row.version for row in evaluations] == [0, 4]  # before the first step and after the last
    for row in evaluations:
        figures = row.datasets()
        assert set(figures) == {"lines", "greedy", "sums"}
        assert {"reward_mean", "pass@1", "pass@4"} <= figures["lines"].keys()
        assert figures["sums"]["response_len/max"] <= 24  # a limit of its own
        assert all(each["missing"] == 0 for each in figures.values())
        answers = answers_file(shown.folder, row.evaluation, "greedy").read_text().splitlines()
        assert len(answers) == figures["greedy"]["num_answers"]


EXAMPLES: tuple[Example, ...] = (
    Example(
        "sft.yaml",
        ("model.make=xs", "data.path=lines:500", "learner.warmup_steps=2"),
        12,
        imitates,
        marks=(),
    ),
    Example(
        "dpo.yaml",
        ("model.make=xs", "data.path=lines:500", "learner.warm_start.num_steps=30", "learner.learning_rate=1e-3"),
        8,
        prefers,
    ),
    Example(
        "rejection_sampling.yaml",
        (
            "model.make=xs",
            "data.path=lines:500",
            "learner.objective.min_reward=0.1",
            "learner.warm_start.num_steps=100",
        ),
        3,
        imitates_the_best,
    ),
    Example(
        "distill.yaml",
        (
            "data.path=lines:500",
            "sampling.max_response_tokens=64",
            "teacher.model.make=xs",
            "teacher.model.warm_start.num_steps=80",
            "learner.warm_start.num_steps=30",
            "learner.warmup_steps=0",
        ),
        5,
        comes_nearer_to_the_teacher,
    ),
    Example(
        "examples/search.yaml",
        ("run.keep_samples=true", "learner.warm_start.num_steps=250"),
        3,
        finds,
    ),
    Example(
        "examples/retool.yaml",
        ("run.keep_samples=true", "learner.warm_start.num_steps=250"),
        3,
        uses_a_tool_and_trains_only_its_own_tokens("programs"),
        marks=(pytest.mark.slow,),  # search has a tool too, and the sandbox tests of its own
    ),
    Example(
        "examples/desk.yaml",
        ("run.keep_samples=true", "learner.warm_start.num_steps=250"),
        3,
        asks_before_it_acts,
        marks=(pytest.mark.slow,),
    ),
    Example(
        "examples/debate.yaml",
        (
            "run.keep_samples=true",
            "model.make=xs",
            "learner.warm_start.num_steps=250",
            "learner.warm_start.learning_rate=4e-3",
        ),
        2,
        argues_before_a_judge,
        marks=(pytest.mark.slow,),
    ),
    Example(
        "examples/vlm.yaml",
        ("learner.groups_per_batch=16", "learner.learning_rate=3e-3"),
        25,
        sees_colours,
    ),
    Example(
        "examples/vlm.yaml",
        ("data.path=shapes:256", "learner.freeze=['visual\\.']", "learner.learning_rate=3e-3"),
        3,
        keeps_each_image_once,
    ),
    Example(
        "examples/vlm_zoom.yaml",
        (
            "learner.groups_per_batch=2",
            "evaluation.every=2",
            "evaluation.datasets=[{name: shapes, path: 'shapes:8', samples_per_prompt: 1}]",
        ),
        2,
        looks_closer,
        marks=(pytest.mark.long_run,),
    ),
    Example(
        "examples/multi_task_evaluation.yaml",
        ("model.make=xs", "learner.warm_start.num_steps=30", "evaluation.every=4", "evaluation.max_running=16"),
        4,
        evaluates_three_datasets,
    ),
)
ELSEWHERE = {
    "examples/reproducible.yaml": "test_reproducible.py",
    "calculator.yaml": "test_calculator_learns.py",
    "true_on_policy.yaml": "test_true_on_policy_run.py",
}
"""Examples that have a test of their own."""
SHORT = ("learner.groups_per_batch=8", "runtime.heartbeat_timeout_s=60")
"""For all of them; a test machine may be busy with other things."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "example",
    [pytest.param(each, marks=each.marks) for each in EXAMPLES],
    ids=lambda example: Path(example.scenario).stem,
)
def test_an_example_runs_loses_nothing_and_shows_what_it_is_about(example: Example, tmp_path: Path) -> None:
    overrides = (*SHORT, f"run.num_steps={example.num_steps}", *example.overrides)
    with LiveRun(example.scenario, tmp_path, overrides) as live:
        summary = live.finish()
        folder = live.folder
    assert summary.completed
    assert summary.balance.in_system == 0
    assert audit_ledger(folder / LEDGER_FILE).findings == ()
    steps = [{name: value for name, value in step.metrics.items() if value is not None} for step in read_steps(folder)]
    assert len(steps) == example.num_steps
    example.check(Shown(steps, folder))


def test_every_example_is_in_the_table_of_the_page_and_is_tested() -> None:
    on_page = set(re.findall(r"penstock run scenarios/(\S+\.yaml)", PAGE.read_text()))
    tested = {example.scenario for example in EXAMPLES}
    dry = set(re.findall(r"penstock run scenarios/(\S+\.yaml) --dry-run", PAGE.read_text()))
    assert on_page - dry == tested | ELSEWHERE.keys()
    assert {f"examples/{file.name}" for file in (SCENARIOS / "examples").glob("*.yaml")} <= on_page


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: Path(example.scenario).stem)
def test_an_example_is_a_short_scenario_and_at_most_one_file_beside_it(example: Example) -> None:
    scenario = SCENARIOS / example.scenario
    keys = [line for line in scenario.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(keys) <= 45
    named = set(re.findall(r"[\w./]+\.py(?=:)", "\n".join(keys)))
    assert named <= {f"{scenario.stem}.py"}, named
