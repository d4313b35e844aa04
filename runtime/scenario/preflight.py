"""Whether this machine has what a scenario needs, asked before anything is started or written.

Every check raises :class:`PreflightError` with the key of the scenario, what was looked for and what to do.
"""

from __future__ import annotations

import ast
import errno
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.data.mixture import named_sources
from penstock.backends.data.problems import DataError, Problems, RowProblem
from penstock.backends.data.reading import RowReader
from penstock.backends.data.recorded_rows import dataset_columns, dataset_paths, is_recorded_row, recorded_row
from penstock.backends.data.row import BadColumnError, prompt_of, text_of
from penstock.backends.data.sources import parse_source, read_rows
from penstock.backends.engines.options import engine_groups, kinds
from penstock.backends.engines.sglang.environment import SglangEnvironmentError, find_environment, has_cuda_gpu
from penstock.backends.extras import missing_extra
from penstock.backends.rewards.builtin import REASONING_GYM
from penstock.backends.user_code import UserCodeError, split_spec
from penstock.backends.weights.preflight import check_transport, model_size_bytes, sites_of
from penstock.runtime.errors import PreflightError
from penstock.runtime.scenario.episode_preflight import check_episode, episode_functions
from penstock.runtime.scenario.evaluation_rules import evaluation_functions, sets_of
from penstock.runtime.scenario.hook_rules import hooks_of
from penstock.runtime.scenario.hub_names import not_yet_paths, read_hub_name
from penstock.runtime.scenario.megatron_preflight import check_megatron
from penstock.runtime.scenario.paths import MADE_DATA, is_user_code
from penstock.runtime.scenario.recorded_rules import recorded_settings
from penstock.runtime.scenario.reward_preflight import check_rewards
from penstock.runtime.scenario.sampling_rules import sampling_functions
from penstock.runtime.scenario.source import dotted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.backends.data.mixture import NamedSource
    from penstock.backends.data.options import DataOptions
    from penstock.backends.data.recorded_rows import RecordedSettings
    from penstock.backends.data.row import RawRow
    from penstock.backends.engines.options import EngineGroupOptions
    from penstock.backends.engines.teacher_options import TeacherOptions
    from penstock.backends.learners.options import WarmStartOptions
    from penstock.runtime.scenario.structure import Scenario

MADE_MODEL_BYTES: Final = {"xs": 415_232, "s": 1_213_440, "m": 3_191_808, "moe_xs": 765_184}
"""Weights of the models of ``model.make`` in float32."""
FLOAT32_BYTES: Final = 4
BFLOAT16_BYTES: Final = 2

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")


class _WeightIndex(msgspec.Struct):
    weight_map: dict[str, str]


class MachineCheck(NamedTuple):
    """One question about this machine."""

    subject: str
    ask: Callable[[], None]
    """Raises PreflightError with what is missing."""
    needs: str = ""
    """Subject of an earlier check, without which this one cannot be asked."""
    is_elsewhere: bool = False
    """It is about machines of a cluster, which cannot be asked from here."""


def check_machine(scenario: Scenario, run_parent: Path) -> None:
    """Run every check that concerns this scenario. ``run_parent`` is the folder that the run's folder will be made in.

    Raises:
        PreflightError: the first thing that is missing.
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
    if awaited := list(_awaited(scenario)):
        hub = "the hub"
        yield MachineCheck(hub, lambda: _refuse_unfetched(awaited))
    if path is not None:
        model = "model.path"
        yield MachineCheck(model, lambda: check_checkpoint(Path(path)), needs=hub)
        if generates:
            yield MachineCheck(
                "the model's architecture", lambda: check_architecture(scenario, Path(path)), needs=model
            )
    if scenario.teacher is not None and scenario.teacher.model.path is not None:
        yield MachineCheck("the teacher's model", lambda: check_teacher(scenario), needs=model)
    yield MachineCheck("functions of the user", lambda: check_user_code(scenario))
    if generates and scenario.episode.kind == "function":
        yield MachineCheck("the episode's function", lambda: check_episode(scenario), needs="functions of the user")
    if generates or scenario.learner.warm_start is not None:
        yield MachineCheck("data", lambda: check_data(scenario), needs=hub)
    if generates:
        yield MachineCheck("rewards", lambda: check_rewards(scenario), needs="data")
    if port:
        yield MachineCheck("observability.metrics_port", lambda: check_port("observability.metrics_port", port))
    yield MachineCheck("devices", lambda: check_devices(scenario), is_elsewhere=on_cluster)
    if scenario.learner.backend == "megatron":
        yield MachineCheck("megatron-core", lambda: check_megatron(scenario), is_elsewhere=on_cluster)
    if generates and _server_devices(scenario):
        yield MachineCheck("SGLang's environment", lambda: check_servers(scenario), is_elsewhere=on_cluster)
    if generates:
        yield MachineCheck("room for weights", lambda: check_weights(scenario, run_parent), needs=model)


def _awaited(scenario: Scenario) -> Iterator[str]:
    for key, path, _, value in not_yet_paths(msgspec.to_builtins(scenario)):
        if read_hub_name(value, key):
            yield f"{dotted(path)}: {value}"


def _refuse_unfetched(awaited: Sequence[str]) -> None:
    raise PreflightError(f"{', '.join(awaited)}: on the hub, and fetched when the run starts; not looked at here")


def check_checkpoint(folder: Path, key: str = "model.path", *, needs_weights: bool = True) -> None:
    """The folder has a config, a tokenizer and every file of its weights."""
    if not folder.is_dir():
        what = "a file, not a folder" if folder.exists() else "no such folder"
        raise PreflightError(
            f"{key}: {folder}: {what}; expected what transformers' save_pretrained writes, or set "
            f"{key.removesuffix('path')}make"
        )
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append("tokenizer.json")
    missing += _missing_weights(folder, key) if needs_weights else []
    if missing:
        raise PreflightError(
            f"{key}: {folder}: missing {', '.join(missing)}; expected what save_pretrained of a transformers "
            "model and of its tokenizer write"
        )


def check_architecture(scenario: Scenario, folder: Path) -> None:
    """The embedded engine computes this model, and the model was made for contexts this long."""
    if "torch" not in kinds(scenario.engines):
        return
    from penstock.backends.engines.torch.config import ModelFolderError, read_model_config

    try:
        config = read_model_config(folder)
    except ModelFolderError as error:
        raise PreflightError(f"model.path: {error}") from None
    if scenario.model.max_context > config.max_positions:
        raise PreflightError(
            f"model.max_context: {scenario.model.max_context} tokens are more than {folder} was made for: "
            f"max_position_embeddings is {config.max_positions}; lower it to that"
        )


def check_teacher(scenario: Scenario) -> None:
    """The teacher's model can be asked about samples as long as these, and calls tokens as the student does."""
    teacher = scenario.teacher
    if teacher is None or teacher.model.path is None:
        return
    folder, max_context = Path(teacher.model.path), scenario.model.max_context
    check_checkpoint(folder, "teacher.model.path", needs_weights=not teacher.addresses)
    try:
        if teacher.backend == "torch":
            from penstock.backends.engines.torch.config import read_model_config

            limit = read_model_config(folder).max_positions
        elif teacher.addresses:
            limit = max_context  # the server is asked when it is there
        else:
            from penstock.backends.engines.sglang.teacher import longest_sample

            limit = longest_sample(folder) or max_context
        if scenario.model.path is not None:
            from penstock.backends.data.same_tokens import check_same_tokens

            check_same_tokens(Path(scenario.model.path), folder)
    except ValueError as error:
        raise PreflightError(f"teacher.model.path: {error}") from None
    if max_context > limit:
        raise PreflightError(
            f"teacher.model.path: samples of {limit} tokens are the longest that {folder} can be asked about, and "
            f"model.max_context is {max_context}; lower that, or take another teacher"
        )


def check_user_code(scenario: Scenario) -> None:
    """Each ``file.py:name`` of the scenario names a file that can be parsed and defines that name; what a built-in
    reward needs is installed."""
    for key, value in (
        ("reward.function", scenario.reward.function),
        *(("reward.components", each.function) for each in scenario.reward.components),
        *(("reward.functions", each.function) for each in scenario.reward.functions),
        ("filter.function", scenario.filter.function),
        ("staleness.policy", scenario.staleness.policy),
        ("learner.objective", scenario.learner.objective.name),
        *episode_functions(scenario),
        *evaluation_functions(scenario),
        *((".".join(map(str, key)), value) for key, value in hooks_of(scenario).items()),
        *((".".join(map(str, key)), value) for key, value in sampling_functions(scenario).items()),
    ):
        if value is not None and is_user_code(value):
            _check_definition(key, value)
        elif value in REASONING_GYM and (missing := missing_extra("reasoning_gym")):
            raise PreflightError(f"{key}: {value}: {missing}")


def check_data(scenario: Scenario) -> None:
    """Every row of the files can be read and has its columns. (Tokens are for the run itself to count.)"""
    if scenario.learner.backend == "simulated":
        return
    data, warm_start = scenario.data, scenario.learner.warm_start
    if scenario.run.only != "learner" and not data.stream:  # the index of a stream is made by the run itself
        _check_prompts(data, recorded_settings(scenario))
        for index, each in enumerate(sets_of(scenario)):
            _check_prompts(each.data, None, key=f"evaluation.datasets[{index}].path")
    if warm_start is not None:
        _check_demonstrations(data, warm_start)


def _check_prompts(data: DataOptions, recorded: RecordedSettings | None, *, key: str = "") -> None:
    """``key``: of the path of the only source, where it is not the run's own."""
    for named in named_sources(data):
        _check_source(named, recorded, keys=(key or named.key, "data.recorded.path"))


def _check_source(named: NamedSource, recorded: RecordedSettings | None, *, keys: Sequence[str]) -> None:
    data, reader = named.options, RowReader(named, None)

    def check_row(row: RawRow, source: int) -> None:
        if is_recorded_row(row, data, recorded, source=source):
            assert recorded is not None
            recorded_row(row, data, recorded)
            return
        reader.parsed(row)

    for source, (key, path) in enumerate(zip(keys, dataset_paths(data, recorded), strict=False)):
        columns, optional = dataset_columns(data, recorded, source=source)
        problems = Problems(skip=data.skip_bad_rows, skip_key="data.skip_bad_rows")
        _check_rows(key, path, columns, partial(check_row, source=source), problems, optional)


def _check_demonstrations(data: DataOptions, warm_start: WarmStartOptions) -> None:
    def check_demonstration(row: RawRow) -> None:
        prompt_of(row, data.prompt_key, chat_template=data.chat_template, block="learner.warm_start")
        text_of(row, warm_start.response_key, "Set learner.warm_start.response_key")

    columns = [data.prompt_key, warm_start.response_key]
    _check_rows(
        "learner.warm_start.path", warm_start.path, columns, check_demonstration, Problems(skip=False, skip_key="")
    )


def check_port(key: str, port: int) -> None:
    """The port can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a closing connection is no one
        try:
            probe.bind(("", port))
        except OSError as error:
            what = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise PreflightError(f"{key}: port {port} {what}; choose another, or 0 for any that is free") from None


def check_devices(scenario: Scenario) -> None:
    """A GPU that is asked for by name exists, and torch's build can use it."""
    engine_devices = [
        (f"engines.more[{index - 1}].device" if index else "engines.device", group.device)
        for index, group in enumerate(engine_groups(scenario.engines))
    ]
    wanted = {
        key: device
        for key, device in (*engine_devices, ("learner.device", scenario.learner.device), *_teacher_device(scenario))
        if device.startswith("cuda")
    }
    if not wanted or scenario.runtime.ray_address is not None:  # a cluster's GPUs are elsewhere
        return
    import torch  # seconds, and only a scenario that names a GPU needs it

    count = torch.cuda.device_count()
    for key, device in wanted.items():
        if int(device.partition(":")[2] or 0) >= count:
            raise PreflightError(
                f"{key}: {device} is not there: torch {torch.__version__} sees {count} GPUs; set it to cpu or auto, "
                "or install the build of torch for this machine's GPU"
            )


def check_servers(scenario: Scenario) -> None:
    """The environment that SGLang's servers run in has been built."""
    for key, device in _server_devices(scenario):
        try:
            find_environment(is_cpu=device == "cpu" or (device == "auto" and not has_cuda_gpu()))
        except SglangEnvironmentError as error:
            raise PreflightError(f"{key}.backend: sglang: {error}") from None


def _teacher_device(scenario: Scenario) -> list[tuple[str, str]]:
    return [] if scenario.teacher is None else [("teacher.device", scenario.teacher.device)]


def _server_devices(scenario: Scenario) -> list[tuple[str, str]]:
    """Block and device of each kind of server that is started here."""
    blocks = [("engines", group.device) for group in engine_groups(scenario.engines) if _starts_servers(group)]
    teacher = scenario.teacher
    return [*blocks, ("teacher", teacher.device)] if teacher is not None and _starts_servers(teacher) else blocks


def _starts_servers(group: EngineGroupOptions | TeacherOptions) -> bool:
    return group.backend == "sglang" and not group.addresses


def check_weights(scenario: Scenario, run_parent: Path) -> None:
    """There is room for the weights that are on their way from learner to engines."""
    model = scenario.model
    if scenario.learner.backend == "simulated":
        return
    there = next(folder for folder in (run_parent, *run_parent.parents) if folder.is_dir())
    try:
        if model.path is not None:
            size_bytes = model_size_bytes(Path(model.path), model.dtype)
        else:
            assert model.make is not None, "a scenario's rules ask for one of them"
            width = FLOAT32_BYTES if model.dtype == "float32" else BFLOAT16_BYTES
            size_bytes = MADE_MODEL_BYTES[model.make] * width // FLOAT32_BYTES
        sites = sites_of(scenario.engines)
        check_transport(scenario.weights.transport, size_bytes=size_bytes, folder=there, engines=sites)
    except ValueError as error:
        raise PreflightError(str(error)) from None


def _check_rows(
    key: str,
    path: str,
    columns: list[str],
    check: Callable[[RawRow], None],
    problems: Problems,
    optional: Sequence[str] = (),
) -> None:
    source = parse_source(path)
    is_made = path.startswith(MADE_DATA)
    num_good = 0
    try:
        for row in read_rows(source, columns, seed=0, optional=optional):
            if isinstance(row, RowProblem):
                problems.add(row)
                continue
            try:
                check(row)
            except BadColumnError as error:
                problems.add(error.at(row.place))
            else:
                num_good += 1
                if is_made:  # one row says that they can be made
                    break
        problems.settle(num_good=num_good, source=str(source))
    except DataError as error:
        raise PreflightError(f"{key}: {error}") from None


def _missing_weights(folder: Path, key: str) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [] if any(folder.glob("*.safetensors")) else ["model.safetensors"]
    try:
        shards = set(msgspec.json.decode(index.read_bytes(), type=_WeightIndex).weight_map.values())
    except msgspec.DecodeError as error:
        raise PreflightError(f"{key}: {index}: no index of weights: {error}") from None
    return sorted(name for name in shards if not (folder / name).is_file())


def _check_definition(key: str, spec: str) -> None:
    try:
        file, name = split_spec(spec)
    except UserCodeError as error:
        raise PreflightError(f"{key}: {error}") from None
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise PreflightError(f"{key}: {file}:{error.lineno}: not valid Python: {error.msg}") from None
    except OSError as error:
        raise PreflightError(f"{key}: {file}: cannot read this file: {(error.strerror or '').lower()}") from None
    except ValueError as error:  # a null byte
        raise PreflightError(f"{key}: {file}: not valid Python: {error}") from None
    names = set(_names_bound_in(tree))
    if name.split(".")[0] not in names and "*" not in names:
        public = sorted(found for found in names if not found.startswith("_"))
        raise PreflightError(f"{key}: {file}: defines no '{name}'; it has {', '.join(public[:8]) or 'nothing'}")


def _names_bound_in(tree: ast.Module) -> Iterator[str]:
    """Every name that some statement binds, in whatever block; ``*`` where it cannot be told without running it."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield "*" if name == "__getattr__" else name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=given):
                yield given or name.split(".")[0]
            case _:
                pass
