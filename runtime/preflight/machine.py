"""Whether this machine has what a scenario needs, asked before anything is started or written.

Every check raises :class:`UserFault` with the key of the scenario, what was looked for and what to do.
"""

from __future__ import annotations

import errno
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.engines.options import engine_groups
from penstock.backends.engines.spec import ENGINES
from penstock.backends.learners.spec import LEARNERS
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted, unexpanded
from penstock.runtime.preflight.checkpoints import (
    check_architecture,
    check_checkpoint,
    check_reward_model,
    check_teacher,
    check_tokenizer,
    check_weight_files,
    check_weights,
)
from penstock.runtime.preflight.fp8_model import check_fp8_model
from penstock.runtime.preflight.functions import check_episode, check_functions_load, check_user_code
from penstock.runtime.preflight.megatron import check_megatron
from penstock.runtime.preflight.rewards import check_rewards
from penstock.runtime.preflight.rows import check_data
from penstock.runtime.scenario.hub_names import not_yet_paths, read_hub_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.backends.engines.reward_model_options import RewardModelOptions
    from penstock.backends.engines.spec import EngineBlock
    from penstock.backends.engines.teacher_options import TeacherOptions
    from penstock.runtime.scenario.structure import Scenario


CODE: Final = "functions of the user"


class MachineCheck(NamedTuple):
    """One question about this machine."""

    subject: str
    ask: Callable[[], None]
    """Raises UserFault with what is missing."""
    needs: str = ""
    """Subject of an earlier check, without which this one cannot be asked."""
    is_elsewhere: bool = False
    """It is about machines of a cluster, which cannot be asked from here."""
    is_later: bool = False
    """It fails only of what the run itself brings here, and so is nothing to mend."""


def check_machine(scenario: Scenario, run_parent: Path) -> None:
    """Run every check that concerns this scenario. ``run_parent`` is the folder that the run's folder will be made in.

    Raises:
        UserFault: the first thing that is missing.
    """
    for check in machine_checks(scenario, run_parent):
        if not check.is_elsewhere:
            check.ask()


def machine_checks(scenario: Scenario, run_parent: Path) -> Iterator[MachineCheck]:
    """Everything that is asked before a run, in this order."""
    path, port = scenario.model.path, scenario.observability.metrics_port
    generates = scenario.run.only != "learner"
    on_cluster = scenario.runtime.ray_address is not None
    model, hub = "", ""
    yield MachineCheck("run.folder", lambda: check_run_parent(run_parent))
    if awaited := list(_awaited(scenario)):
        hub = "the hub"
        yield MachineCheck(hub, lambda: _refuse_unfetched(awaited), is_later=True)
    if path is not None:
        model = "model.path"
        yield MachineCheck(model, lambda: check_checkpoint(Path(path)), needs=hub)
        yield MachineCheck("the weights", lambda: check_weight_files(Path(path)), needs=model)
        if generates:
            yield MachineCheck(
                "the model's architecture", lambda: check_architecture(scenario, Path(path)), needs=model
            )
        yield MachineCheck("the tokenizer", lambda: check_tokenizer(Path(path)), needs=model)
    if path is not None and generates and (copy := scenario.engines.fp8_model) is not None:
        yield MachineCheck("the model in FP8", lambda: check_fp8_model(Path(path), Path(copy)), needs="the weights")
    if scenario.teacher is not None and scenario.teacher.model.path is not None:
        yield MachineCheck("the teacher's model", lambda: check_teacher(scenario), needs=model)
    if scenario.reward_model is not None and generates:
        yield MachineCheck("the reward model", lambda: check_reward_model(scenario), needs=hub)
    yield MachineCheck(CODE, lambda: check_user_code(scenario))
    yield MachineCheck("loading the functions", lambda: check_functions_load(scenario), needs=CODE)
    if generates and scenario.episode.kind == "function":
        yield MachineCheck("the episode's function", lambda: check_episode(scenario), needs=CODE)
    if generates or scenario.learner.warm_start is not None:
        yield MachineCheck("data", lambda: check_data(scenario), needs=hub)
    if generates:
        yield MachineCheck("rewards", lambda: check_rewards(scenario), needs="data")
    if port:
        yield MachineCheck("observability.metrics_port", lambda: check_port("observability.metrics_port", port))
    yield MachineCheck("devices", lambda: check_devices(scenario), is_elsewhere=on_cluster)
    if LEARNERS.spec(scenario.learner.backend).has_layout:
        yield MachineCheck("megatron-core", lambda: check_megatron(scenario), is_elsewhere=on_cluster)
    for needed in needed_environments(scenario) if generates else ():
        yield MachineCheck(needed, partial(check_engines, scenario, needed), is_elsewhere=on_cluster)
    if generates:
        yield MachineCheck("room for weights", lambda: check_weights(scenario, run_parent), needs=model)


def _awaited(scenario: Scenario) -> Iterator[str]:
    for each in not_yet_paths(scenario):
        if read_hub_name(each.value, each.names):
            yield f"{each.key}: {each.value}"


def _refuse_unfetched(awaited: Sequence[str]) -> None:
    raise UserFault(f"{', '.join(awaited)}: on the hub, and fetched when the run starts; not looked at here")


def check_run_parent(folder: Path) -> None:
    """It would be made as it is named: a folder called ``$DATA`` in the current one."""
    if not folder.exists() and (hint := unexpanded(str(folder))):
        raise UserFault(f"run.folder: {folder}: no such folder{hint}")


def check_port(key: str, port: int) -> None:
    """The port can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a closing connection is no one
        try:
            probe.bind(("", port))
        except OSError as error:
            what = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise UserFault(f"{key}: port {port} {what}; choose another, or 0 for any that is free") from None


def check_devices(scenario: Scenario) -> None:
    """A GPU that is asked for by name exists, and torch's build can use it."""
    engine_devices = [
        (f"engines.more[{index - 1}].device" if index else "engines.device", group.device)
        for index, group in enumerate(engine_groups(scenario.engines))
    ]
    wanted = {
        key: device
        for key, device in (*engine_devices, ("learner.device", scenario.learner.device), *_other_devices(scenario))
        if device.startswith("cuda")
    }
    if not wanted or scenario.runtime.ray_address is not None:  # a cluster's GPUs are elsewhere
        return
    import torch  # seconds, and only a scenario that names a GPU needs it

    count = torch.cuda.device_count()
    for key, device in wanted.items():
        if int(device.partition(":")[2] or 0) >= count:
            raise UserFault(
                f"{key}: {device} is not there: torch {torch.__version__} sees "
                f"{counted(count, 'GPU')}; set it to cpu or auto, "
                "or install the build of torch for this machine's GPU"
            )


def check_engines(scenario: Scenario, needed: str) -> None:
    """What kinds of engines need of this machine is there; of those that need this."""
    for key, block in _engine_blocks(scenario):
        spec = ENGINES.spec(block.backend)
        if spec.needs == needed:
            try:
                spec.check_machine(block)
            except ValueError as error:
                raise UserFault(f"{key}.backend: {block.backend}: {error}") from None


def _others(scenario: Scenario) -> Iterator[tuple[str, TeacherOptions | RewardModelOptions]]:
    """The blocks of models whose weights never change."""
    if scenario.teacher is not None:
        yield "teacher", scenario.teacher
    if scenario.reward_model is not None:
        yield "reward_model", scenario.reward_model


def _other_devices(scenario: Scenario) -> list[tuple[str, str]]:
    return [(f"{key}.device", block.device) for key, block in _others(scenario)]


def needed_environments(scenario: Scenario) -> tuple[str, ...]:
    """What engines that are started here need of a machine, each once."""
    needs = [ENGINES.spec(block.backend).needs for _, block in _engine_blocks(scenario) if not block.addresses]
    return tuple(dict.fromkeys(need for need in needs if need))


def _engine_blocks(scenario: Scenario) -> list[tuple[str, EngineBlock]]:
    return [*(("engines", group) for group in engine_groups(scenario.engines)), *_others(scenario)]
