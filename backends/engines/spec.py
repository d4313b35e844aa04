"""What the house knows of each kind of engine before one is opened, and the registry of all of them.

Nobody outside an engine's own folder asks for its name: they ask for a :class:`~penstock.backends.protocol.Capability`,
for its size, or for what it has to say against the options of its block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.backends.protocol import Capability
from penstock.backends.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from penstock.backends.checkpoint.options import ModelOptions
    from penstock.backends.data.options import DataOptions
    from penstock.backends.data.recorded_rows import RecordedSettings
    from penstock.backends.engines.options import EngineGroupOptions, EnginesOptions, SamplingOptions
    from penstock.backends.engines.reward_model_options import RewardModelOptions
    from penstock.backends.engines.teacher_options import TeacherOptions
    from penstock.backends.learners.options import LoraOptions
    from penstock.backends.processes.remote_ranks import RemoteRanks
    from penstock.backends.protocol import Backend, Timers
    from penstock.messages.base import Options
    from penstock.messages.commands import EngineCommand, OpenEngine, TeacherCommand

    EngineBlock = EngineGroupOptions | TeacherOptions | RewardModelOptions
    """Blocks of a scenario whose actors are engines of some kind."""

KeyPath = tuple[str | int, ...]
Broken = tuple[KeyPath, str]
"""The key of the scenario to change, and what is wrong with it."""


class EngineSize(NamedTuple):
    """The GPUs that one engine needs."""

    num_gpus: int
    node_counts: tuple[int, ...]
    """Over so many nodes it can be divided, fewest first; never empty."""


ONE_GPU: Final = EngineSize(1, (1,))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What an engine is started from."""

    name: str
    """Name of the actor that holds the engine."""
    place: int
    """Which engine of its kind it is, counted from 0."""
    model_folder: Path
    """A Hugging Face checkpoint, with its tokenizer."""
    run_folder: Path
    options: EnginesOptions
    """As of a run that has this kind of engine only."""
    max_context: int
    """Tokens of prompt and response together."""
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``."""
    lora: LoraOptions | None = None
    """The adapters that are published alone; None: none are."""
    sleeps: bool = False
    """It takes turns on its GPUs with the learner."""
    remote_ranks: RemoteRanks | None = None
    """The other nodes of an engine over several."""
    takes_over: bool = False
    """The incarnation before it was lost by its process alone: a server that it has left may be taken over."""
    data: DataOptions | None
    """Of its prompts; None: they are of text alone."""

    def log_path(self, kind: str) -> Path:
        """Where the log of its server is kept, in a folder that is there."""
        logs = self.run_folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return logs / f"{self.name.replace('/', '-')}-{kind}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext(EngineSetup):
    """Everything that an engine is opened with: it samples as well."""

    epoch: int
    """Incarnation of the actor."""
    sampling: SamplingOptions
    by_dataset: Sequence[SamplingOptions] = ()
    """How responses to prompts of the datasets of an evaluation are drawn."""
    data: DataOptions
    recorded: RecordedSettings | None = None
    """What is made of responses that rows hold; given to engines with ``FROM_ROWS``."""
    true_on_policy: bool = False
    """Its log-probs have the bits of the learner's."""
    seed: int
    """Seed of the run."""
    bucket_size_bytes: int
    """Weights that are pushed travel in pieces of about this size."""
    timers: Timers | None = None
    """The clock; given to engines with ``MODELLED``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherContext:
    """Everything that a teacher is opened with."""

    name: str
    """Name of the actor that holds the teacher."""
    index: int
    """Which teacher it is, counted from 0."""
    epoch: int
    model_folder: Path
    run_folder: Path
    options: TeacherOptions
    max_context: int
    temperature: float
    """At which student and teacher are compared."""
    seed: int
    timers: Timers | None = None
    """The clock; given where the engine has ``MODELLED``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelContext:
    """Everything that a reward model is opened with."""

    name: str
    """Name of the actor that holds it."""
    model_folder: Path
    run_folder: Path
    options: RewardModelOptions
    host: str
    """This machine's address as other processes of the run see it."""


def _no_rules(path: KeyPath, options: Any) -> Iterator[Broken]:  # noqa: ANN401 - of engines and teachers
    return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSpec:
    """What a kind of engine can do as a teacher, which says how likely it finds given tokens."""

    open: Callable[[TeacherContext], Backend[TeacherCommand]]
    has_likeliest: bool = False
    """It can say which tokens it finds likeliest, too."""
    temperature: float | None = None
    """The only temperature that its log-probs are of; None: any."""
    answers_judges: bool = False
    """It generates as well, for questions of a judge."""
    rules: Callable[[KeyPath, TeacherOptions], Iterator[Broken]] = _no_rules
    """What is wrong with the block at this path."""
    longest_sample: Callable[[Path], int | None] = lambda folder: None
    """Tokens of the longest sample that it can be asked about with this model; None: not known. May raise UserFault
    with the reason why the model cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSpec:
    """What a kind of engine can do as a reward model, which says how good a response is."""

    open: Callable[[RewardModelContext], Backend[OpenEngine]]
    """Raises UserFault where the model cannot be served."""
    rules: Callable[[KeyPath, RewardModelOptions], Iterator[Broken]] = _no_rules
    """What is wrong with the block at this path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One kind of engine. It is looked at in the command line and in every actor, so its module imports nothing heavy:
    that is for :attr:`open` to do."""

    open: Callable[[EngineContext], Backend[EngineCommand]]
    """An engine that is not started yet. Raises UserFault where it cannot be served; the message says why."""
    capabilities: frozenset[Capability]
    options: type[Options] | None = None
    """What ``options:`` of its block holds; None: there is no such block."""
    keys: tuple[str, ...] = ()
    """Of the block: those that only this kind, and others that name them as well, take heed of."""
    granted: Callable[[EngineGroupOptions], frozenset[Capability]] = lambda group: frozenset()
    """What it can do with these options besides."""
    size: Callable[[EngineBlock], EngineSize | None] = lambda options: ONE_GPU
    """GPUs of one; None: it takes none that we give. Raises UserFault."""
    rules: Callable[[KeyPath, EngineGroupOptions, EnginesOptions], Iterator[Broken]] = lambda path, group, options: (
        iter(())
    )
    """What is wrong with the block at this path."""
    true_on_policy: Callable[[KeyPath, EngineGroupOptions], Iterator[Broken]] | None = None
    """What is wrong with the block at this path if its log-probs are to have the learner's bits; None: they cannot."""
    adapter_rules: Callable[[KeyPath, EngineGroupOptions, EnginesOptions], Iterator[Broken]] = (
        lambda path, group, options: iter(())
    )
    """What is wrong with the block at this path if adapters are published alone, for engines that take them."""
    transports: tuple[str, ...] | None = None
    """The transports of weights that it takes; None: all that an engine's end can be opened for."""
    safe_transports: Callable[[EngineGroupOptions], tuple[str, ...] | None] = lambda group: None
    """With these options only these of them, by name and not by ``auto``; None: each."""
    longest_context: Callable[[Path], int | None] = lambda folder: None
    """Tokens that this model was made for; None: not looked at. Raises UserFault where it cannot be served."""
    notice: Callable[[Path], str] = lambda folder: ""
    """What people should know of how it serves this model; empty: nothing. Raises UserFault as above."""
    needs: str = ""
    """What :attr:`check_machine` looks at, in words; empty: there is nothing to look at."""
    check_machine: Callable[[EngineBlock], None] = lambda options: None
    """Raises UserFault with what this machine lacks."""
    check_joining: Callable[[str, Path, ModelOptions], None] | None = None
    """Looks at an engine that runs already, by its address, before it joins a run with this model in this folder.
    Raises UserFault with what does not fit. None: none runs by itself."""
    modules: tuple[str, ...] = ()
    """What its process imports first, so that a host can have it ready."""
    teacher: TeacherSpec | None = None
    """None: it is no teacher."""
    reward_model: RewardModelSpec | None = None
    """None: it is no reward model."""


ENGINES: Final = Registry(
    "engine",
    "penstock.engines",
    EngineSpec,
    {
        "torch": "penstock.backends.engines.torch.spec:TORCH",
        "sglang": "penstock.backends.engines.served.sglang.spec:SGLANG",
        "recorded": "penstock.backends.engines.recorded.spec:RECORDED",
        "simulated": "penstock.backends.simulated.spec:SIMULATED_ENGINE",
    },
)


def capabilities_of(group: EngineGroupOptions) -> frozenset[Capability]:
    """What engines with these options can do."""
    spec = ENGINES.spec(group.backend)
    return spec.capabilities | spec.granted(group)


def some_can(options: EnginesOptions, capability: Capability) -> bool:
    """Whether there are engines in a run that can."""
    return any(capability in capabilities_of(group) for group in (options, *options.more))


def all_can(options: EnginesOptions, capability: Capability) -> bool:
    """Whether every engine of a run can."""
    return all(capability in capabilities_of(group) for group in (options, *options.more))


def unable(options: EnginesOptions, capability: Capability) -> tuple[str, ...]:
    """The kinds of engines of a run that cannot, by name, each once."""
    return tuple(
        sorted({group.backend for group in (options, *options.more) if capability not in capabilities_of(group)})
    )


def are_modelled(options: EnginesOptions) -> bool:
    """Whether the engines of a run, of which either all or none are, only say how long things take."""
    return Capability.MODELLED in ENGINES.spec(options.backend).capabilities


def engines_that(capability: Capability) -> tuple[str, ...]:
    """Names of the kinds of engines that can, for messages."""
    return ENGINES.having(lambda spec: capability in spec.capabilities)


def owners_of(key: str) -> tuple[str, ...]:
    """Names of the kinds of engines that take heed of a key of their block, for messages."""
    return ENGINES.having(lambda spec: key in spec.keys or (key == "options" and spec.options is not None))
