"""What a run needs before its actors start: the model, the length of the dataset, the way of the weights.

It runs as a process of its own, beside the start of the host: it needs torch and a tokenizer, which the driver never
does, and both together take as long as the longer of them.

```
driver ── DriverJob, msgpack ──► this process ── one JSON object a line ──► driver
```
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.engines.options import kinds
from penstock.backends.engines.spec import ENGINES, are_modelled
from penstock.backends.learners.spec import is_modelled
from penstock.backends.processes.process_facts import end_with_parent
from penstock.backends.weights.spec import SHARED_MEMORY
from penstock.messages.base import Value
from penstock.messages.errors import UserFault
from penstock.runtime.hosts.processes.job import DriverJob
from penstock.runtime.run.choosing import has_recorded_rows
from penstock.runtime.run.plan import RunPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.data.demonstrations import Demonstration
    from penstock.messages.rows import RowSource

MODEL_FOLDER: Final = "model"
TEACHER_FOLDER: Final = "teacher"


class PhaseBegun(Value, frozen=True, tag=True):
    """What is being done now, for the terminal."""

    text: str


class Prepared(Value, frozen=True, tag=True):
    """All done."""

    plan: RunPlan


class PreparationFailed(Value, frozen=True, tag=True):
    """The user has to change something."""

    message: str


Preparation = PhaseBegun | Prepared | PreparationFailed


def prepare(job: DriverJob, tell: Callable[[str], None]) -> RunPlan:
    """Do it.

    Raises:
        UserFault: the scenario cannot be run here.
    """
    scenario = job.scenario
    needs_model = not is_modelled(scenario.learner)
    folder = Path(scenario.model.path) if scenario.model.path else Path(job.run_folder) / MODEL_FOLDER
    if needs_model and scenario.model.make is not None:
        tell("making the model")
        from penstock.backends.checkpoint.kept_model import make_model_or_kept

        if refusal := make_model_or_kept(scenario.model.make, folder, scenario.run.seed):
            tell(f"making the model: {refusal}")
    rows = _rows(job, folder, tell)
    return RunPlan(
        scenario=scenario,
        run_id=job.run_id,
        run_folder=job.run_folder,
        model_folder=str(folder) if needs_model else "",
        teacher_folder=_teacher_folder(job, folder, tell),
        num_rows=rows.num_rows,
        sources=rows.sources,
        data_digest=rows.digest,
        notices=rows.notices,
        engine_notices=_engine_notices(job, folder),
        num_evaluation_prompts=_num_evaluation_prompts(job, folder, tell),
        has_recorded_rows=has_recorded_rows(Path(job.run_folder)),
        transport=_transport(job, folder),
    )


def _teacher_folder(job: DriverJob, student: Path, tell: Callable[[str], None]) -> str:
    """Where the teacher's model is; made now where the scenario wants that."""
    scenario = job.scenario
    teacher = scenario.teacher
    if teacher is None or are_modelled(scenario.engines) or scenario.run.only == "learner":
        return ""
    folder = Path(teacher.model.path) if teacher.model.path else Path(job.run_folder) / TEACHER_FOLDER
    if teacher.model.make is not None:
        from penstock.backends.data.demonstrations import load_demonstrations
        from penstock.backends.learners.torch.made_teacher import make_teacher

        block, data, max_tokens = teacher.model.warm_start, scenario.data, scenario.model.max_context

        def load(tokenizer_folder: Path) -> Sequence[Demonstration]:
            assert block is not None, "asked for with a warm start only"
            return load_demonstrations(
                block.path,
                data.prompt_key,
                block.response_key,
                tokenizer_folder,
                seed=scenario.run.seed,
                chat_template=data.chat_template,
                template_arguments=data.template_arguments,
                system_prompt=data.system_prompt,
                max_tokens=max_tokens,
            )

        tell("making the teacher")
        make_teacher(
            teacher.model.make,
            folder,
            scenario.run.seed,
            block=block,
            load_demonstrations=load,
            report=lambda done, loss: tell(f"the teacher imitates: {done:.0%}, loss {loss:.2f}"),
        )
    from penstock.backends.data.same_tokens import check_same_tokens

    check_same_tokens(student, folder)
    return str(folder)


class _Rows(NamedTuple):
    """What a run knows of its rows."""

    num_rows: int = 0
    sources: tuple[RowSource, ...] = ()
    digest: str = ""
    notices: tuple[str, ...] = ()


def _rows(job: DriverJob, folder: Path, tell: Callable[[str], None]) -> _Rows:
    scenario = job.scenario
    if scenario.run.only == "learner":
        return _Rows()  # its groups are recorded, and no prompt is read
    if are_modelled(scenario.engines):
        from penstock.runtime.run.modelled_rows import num_rows, row_sources

        return _Rows(num_rows(scenario), row_sources(scenario))  # so that a simulation of this scenario sees the same
    if scenario.data.source is not None:
        from penstock.runtime.run.modelled_rows import num_rows, row_sources

        return _Rows(num_rows(scenario), row_sources(scenario), f"rows of the class {row_sources(scenario)[0].name}")
    tell("reading the dataset")
    from penstock.runtime.run.rows import read_dataset, row_notices

    dataset = read_dataset(scenario, folder, run_folder=Path(job.run_folder), tell=tell)
    if not dataset.num_rows:
        raise UserFault("data: there is not one row to train on")
    notices = row_notices(scenario, folder, dataset)
    return _Rows(dataset.num_rows, dataset.sources, dataset.digest, notices)


def _num_evaluation_prompts(job: DriverJob, folder: Path, tell: Callable[[str], None]) -> tuple[int, ...]:
    scenario = job.scenario
    if scenario.run.only == "learner" or not scenario.evaluation.datasets:
        return ()
    if are_modelled(scenario.engines):
        from penstock.runtime.run.modelled_rows import num_evaluation_prompts

        return num_evaluation_prompts(scenario)
    tell("reading the datasets of the evaluation")
    from penstock.runtime.run.rows import read_evaluation

    return tuple(rows.num_prompts for rows in read_evaluation(scenario, folder))


def _engine_notices(job: DriverJob, folder: Path) -> tuple[str, ...]:
    """How engines serve this model, where people should know of it."""
    scenario = job.scenario
    if are_modelled(scenario.engines) or scenario.run.only == "learner":
        return ()
    texts = (ENGINES.spec(backend).notice(folder) for backend in sorted(kinds(scenario.engines)))
    return tuple(text for text in texts if text)


def _transport(job: DriverJob, folder: Path) -> str:
    scenario = job.scenario
    if is_modelled(scenario.learner) or scenario.run.only == "learner":
        return SHARED_MEMORY  # nothing is published
    from penstock.backends.engines.transport_preflight import check_transport, model_size_bytes, sites_of

    size_bytes = model_size_bytes(folder, scenario.model.dtype)
    return check_transport(
        scenario.weights.transport,
        size_bytes=size_bytes,
        folder=Path(job.run_folder),
        engines=sites_of(scenario.engines, scenario.runtime.ray_address),
    ).transport


def answer_job(job: DriverJob, out: IO[bytes]) -> None:
    """Prepare a job and say on ``out`` what is being done and what came of it, one JSON object a line.

    Raises:
        Exception: a mistake of ours; the reader finds the end of the line without a result.
    """

    def say(message: Preparation) -> None:
        out.write(msgspec.json.encode(message) + b"\n")

    try:
        plan = prepare(job, lambda text: say(PhaseBegun(text)))
    except UserFault as error:
        say(PreparationFailed(str(error)))
    else:
        say(Prepared(plan))


def main() -> None:
    """Prepare the job on stdin."""
    end_with_parent(signal.SIGKILL)
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print belongs to the log, not to the protocol
    answer_job(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=DriverJob), out)


if __name__ == "__main__":
    main()
