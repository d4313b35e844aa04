"""What a scenario with a teacher has to say, and what its model has to have in common with the student's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.backends.checkpoint.make import character_tokenizer, make_model
from penstock.backends.data.problems import DataError
from penstock.backends.data.same_tokens import check_same_tokens
from penstock.backends.engines.spec import ENGINES, EngineSpec
from penstock.messages.errors import UserFault
from penstock.messages.names import LEARNER, Role, is_engine, is_teacher, role_of, teacher_index, teacher_name
from penstock.runtime.preflight.checkpoints import check_teacher
from penstock.runtime.run.gpu_needs import NodeGpus
from penstock.runtime.run.placement import place
from penstock.runtime.run.process_table import placement
from penstock.runtime.run.wiring import actor_names, engine_names
from penstock.runtime.scenario import Scenario, load_scenario

DISTILL = Path(__file__).parents[2] / "scenarios" / "distill.yaml"
MADE = ("teacher.model.make=null", "teacher.model.warm_start=null")


def scenario(*overrides: str) -> Scenario:
    return load_scenario(DISTILL, overrides)


def test_teachers_are_actors_and_no_engines() -> None:
    found = scenario("teacher.count=2")
    assert engine_names(found) == ("engine/0",)
    assert [name for name in actor_names(found) if is_teacher(name)] == ["teacher/0", "teacher/1"]
    assert (role_of("teacher/1"), teacher_index("teacher/1"), teacher_name(1)) == (Role.TEACHER, 1, "teacher/1")
    assert not is_engine("teacher/0")
    assert "teacher/0 … teacher/1" in [row.name for row in placement(found)]


def test_recorded_batches_need_no_teacher() -> None:
    found = scenario("run.only=learner", "run.batches_from=/runs/one")
    assert not [name for name in actor_names(found) if is_teacher(name)]


def test_a_teacher_takes_a_gpu_as_engines_do() -> None:
    nodes = [NodeGpus("here", 3)]
    blocks = place(scenario("learner.device=cuda", "engines.device=cuda", "teacher.device=cuda"), nodes).blocks
    assert sorted(block.members for block in blocks) == [("engine/0",), (LEARNER,), ("teacher/0",)]
    assert place(scenario(), [NodeGpus("here", 0)]).blocks == ()
    with pytest.raises(UserFault, match="teacher: "):
        place(
            scenario("learner.device=cpu", "engines.device=cpu", *_sglang("teacher.device=cuda")), [NodeGpus("here", 0)]
        )


def _sglang(*more: str) -> tuple[str, ...]:
    return (*MADE, "teacher.backend=sglang", "teacher.model.path=/models/big", *more)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("teacher=null",),
            r"opd_kl_coef: the distance to a teacher is asked for, and there is none; add a block teacher",
        ),
        (("learner.objective=gkd",), r"teacher\.top_logprobs: gkd learns from the teacher's likeliest tokens"),
        (("teacher.top_logprobs=8",), r"teacher\.top_logprobs: has no effect with policy_loss: ppo"),
        (("learner.objective=gkd", "teacher=null"), r"policy_loss: the distance to a teacher's distribution is asked"),
        (
            ("learner.objective={name: gkd, estimator: grpo}", "teacher.top_logprobs=8"),
            r"estimator: a distance to a teacher is made smaller, and grpo may make it larger",
        ),
        (("learner.objective.distill_beta=0",), r"distill_beta: has no effect with policy_loss: ppo"),
        (("learner.objective=grpo",), r"teacher: has no effect with learner\.objective\.opd_kl_coef: 0"),
        (
            ("filter.drop_zero_spread=true",),
            r"drop_zero_spread: distill learns from a group whose rewards are all equal",
        ),
        (("teacher.backend=simulated",), r"teacher\.backend: a simulated teacher says nothing of real tokens"),
        (("teacher.model.path=/models/big",), r"teacher\.model: exactly one of"),
        ((MADE[0], "teacher.model.path=/models/big"), r"teacher\.model\.warm_start: only a teacher that is made"),
        (
            ("model.make=null", "model.path=/m", "model.max_context=600"),
            r"model\.max_context: the models of teacher\.model",
        ),
        (
            _sglang("sampling.temperature=0.7"),
            r"teacher\.backend: teachers of the backend sglang give .* at temperature 1 only, .* teacher\.backend: ",
        ),
        (_sglang("teacher.addresses=[http://a:1, http://b:2]"), r"teacher\.count: there are 2 addresses; set it to 2"),
        (
            _sglang("teacher.addresses=[http://a:1]", "teacher.sglang.tp_size=2"),
            r"teacher\.sglang: servers that run already have their options",
        ),
        (("teacher.addresses=[http://a:1]",), r"teacher\.(addresses|model\.make): "),
        (_sglang("teacher.sglang.no_such_option=1"), r"teacher\.sglang\.no_such_option"),
        (("teacher.device=tpu",), r"teacher\.device: must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserFault, match=message):
        scenario(*overrides)


def test_a_teacher_that_names_no_likeliest_tokens_teaches_no_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    likeliest = ("learner.objective=gkd", "teacher.top_logprobs=8")
    assert scenario(*_sglang(*likeliest)).teacher is not None
    registered = ENGINES.spec
    spec = registered("sglang")
    assert spec.teacher is not None
    without = replace(spec, teacher=replace(spec.teacher, has_likeliest=False))

    def changed(name: str) -> EngineSpec:
        return without if name == "sglang" else registered(name)

    monkeypatch.setattr(ENGINES, "spec", changed)
    with pytest.raises(UserFault, match=r"teachers of the backend sglang do not name .*; set it to torch$"):
        scenario(*_sglang(*likeliest))


def test_rewards_and_a_teacher_go_together() -> None:
    found = scenario("learner.objective={name: grpo, opd_kl_coef: 0.1}", "filter.drop_zero_spread=true")
    assert (found.learner.objective.estimator, found.learner.objective.opd_kl_coef) == ("grpo", 0.1)
    assert scenario(*_sglang("teacher.addresses=[http://a:1]")).teacher is not None


# --- the same tokens ----------------------------------------------------------------------------------------------


def write_tokenizer(folder: Path, *, swapped: bool = False, more: bool = False) -> Path:
    folder.mkdir()
    data = json.loads(character_tokenizer().to_str())
    vocabulary = data["model"]["vocab"]
    if swapped:
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    if more:
        vocabulary["é"] = len(vocabulary)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def test_a_teacher_with_the_students_tokens_may_know_more(tmp_path: Path) -> None:
    student, teacher = write_tokenizer(tmp_path / "student"), write_tokenizer(tmp_path / "teacher", more=True)
    check_same_tokens(student, student)
    check_same_tokens(student, teacher)
    with pytest.raises(
        DataError, match=r"1 tokens of the student .* 'é' first, which is 79 here and is not known there"
    ):
        check_same_tokens(teacher, student)


def test_a_teacher_that_calls_tokens_otherwise_is_refused(tmp_path: Path) -> None:
    student, teacher = write_tokenizer(tmp_path / "student"), write_tokenizer(tmp_path / "teacher", swapped=True)
    with pytest.raises(
        DataError, match=r"2 tokens .* 'a' first, which is 12 here and is 13 there; take a teacher of the"
    ):
        check_same_tokens(student, teacher)


def test_a_teachers_folder_is_looked_at_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=r"teacher\.model\.path: .*: no such folder; .* or set teacher\.model\.make"):
        check_teacher(scenario(*MADE, f"teacher.model.path={tmp_path / 'none'}"))
    make_model("xs", tmp_path / "xs", 0)
    path = f"teacher.model.path={tmp_path / 'xs'}"
    check_teacher(scenario(*MADE, path))
    long = ("model.make=null", f"model.path={tmp_path / 'xs'}", "model.max_context=600")
    with pytest.raises(UserFault, match=r"samples of 512 tokens are the longest .* model\.max_context is 600"):
        check_teacher(scenario(*MADE, path, *long))
    with pytest.raises(UserFault, match="samples of 504 tokens are the longest"):
        check_teacher(scenario(*MADE, path, "teacher.backend=sglang"))
    other = write_tokenizer(tmp_path / "other", swapped=True)
    (tmp_path / "xs" / "tokenizer.json").rename(tmp_path / "kept.json")
    (other / "tokenizer.json").rename(tmp_path / "xs" / "tokenizer.json")
    make_model("xs", tmp_path / "student", 0)
    with pytest.raises(UserFault, match="has another tokenizer than"):
        check_teacher(scenario(*MADE, path, "model.make=null", f"model.path={tmp_path / 'student'}"))
