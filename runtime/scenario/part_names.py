"""The keys of a scenario that name a part, and the blocks of options that only some parts have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from penstock.actors.weight_publisher.options import WeightsOptions
from penstock.backends.engines.options import EngineGroupOptions
from penstock.backends.engines.reward_model_options import RewardModelOptions
from penstock.backends.engines.spec import ENGINES, owners_of
from penstock.backends.engines.teacher_options import TeacherOptions
from penstock.backends.learners.objectives.spec import OBJECTIVES
from penstock.backends.learners.options import LearnerOptions, ObjectiveOptions
from penstock.backends.learners.spec import LEARNERS
from penstock.backends.registry import read_options
from penstock.backends.trackers.spec import TRACKERS, folder_name
from penstock.backends.weights.spec import AUTO, TRANSPORTS
from penstock.runtime.scenario.keys import misfit, shape_of, unknown_key
from penstock.runtime.scenario.objective import OBJECTIVE
from penstock.runtime.scenario.run_options import TrackerOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.backends.engines.spec import EngineBlock, EngineSpec
    from penstock.backends.registry import Registry
    from penstock.backends.weights.spec import TransportSpec
    from penstock.messages.base import Options
    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

Broken = tuple["KeyPath", str]


class Choice(NamedTuple):
    """What a key may name."""

    struct: type[msgspec.Struct]
    key: str
    registry: Registry[Any]
    others: tuple[str, ...] = ()
    """Words that are no part's."""
    is_good: Callable[[Any], bool] = lambda spec: True
    """Which entries of the registry the key may name."""

    def builtin(self) -> tuple[str, ...]:
        """The words for it that need no other package."""
        return (*self.others, *(name for name in self.registry.builtin if self.is_good(self.registry.spec(name))))


def _teaches(spec: EngineSpec) -> bool:
    return spec.teacher is not None


def _scores(spec: EngineSpec) -> bool:
    return spec.reward_model is not None


def _can_be_chosen(spec: TransportSpec) -> bool:
    return spec.is_chosen


FUNCTION: Final = "file.py:function"
"""What the reference says where a function of the user's own may stand."""
CHOICES: Final = (
    Choice(EngineGroupOptions, "backend", ENGINES),
    Choice(TeacherOptions, "backend", ENGINES, is_good=_teaches),
    Choice(RewardModelOptions, "backend", ENGINES, is_good=_scores),
    Choice(LearnerOptions, "backend", LEARNERS),
    Choice(ObjectiveOptions, "name", OBJECTIVES, (FUNCTION,)),
    Choice(TrackerOptions, "name", TRACKERS, (FUNCTION,)),
    Choice(WeightsOptions, "transport", TRANSPORTS, (AUTO,), is_good=_can_be_chosen),
)


def choice_at(struct: type, key: str) -> Choice | None:
    """What this key of this block may name; None where it names no part."""
    return next((each for each in CHOICES if issubclass(struct, each.struct) and key == each.key), None)


def unknown_part(s: Scenario) -> Broken | None:
    """The first key that names a part which is not there, and which there are."""
    blocks: list[tuple[KeyPath, msgspec.Struct]] = [(("engines",), s.engines), (("learner",), s.learner)]
    blocks += [(OBJECTIVE, s.learner.objective)]
    blocks += [(("engines", "more", index), group) for index, group in enumerate(s.engines.more)]
    blocks += [(("observability", "trackers", index), each) for index, each in enumerate(s.observability.trackers)]
    others = (("teacher", s.teacher), ("reward_model", s.reward_model))
    blocks += [(("weights",), s.weights), *(((key,), block) for key, block in others if block is not None)]
    for path, block in blocks:
        for choice in CHOICES:
            if isinstance(block, choice.struct):
                name: str = getattr(block, choice.key)
                if problem := choice.registry.unknown(name, choice.others, choice.is_good):
                    return (*path, choice.key), problem
    return None


def part_rules_of(s: Scenario) -> Iterator[Broken]:
    """What is wrong with the options of learner, objective, transport and trackers."""
    yield from _options(("learner",), LEARNERS.spec(s.learner.backend).options, s.learner.options, s.learner.backend)
    objective = s.learner.objective
    yield from _options(OBJECTIVE, OBJECTIVES.spec(objective.name).options, objective.options, objective.name)
    wanted = s.weights.transport
    struct = None if wanted == AUTO else TRANSPORTS.spec(wanted).options
    yield from _options(("weights",), struct, s.weights.options, wanted)
    yield from _trackers(s)


def _trackers(s: Scenario) -> Iterator[Broken]:
    folders: set[str] = set()
    for index, each in enumerate(s.observability.trackers):
        path: KeyPath = ("observability", "trackers", index)
        if folder_name(each.name) in folders:
            yield (*path, "name"), f"'{each.name}' is there already; remove one of the two"
        folders.add(folder_name(each.name))
        spec = TRACKERS.spec(each.name)
        if not spec.takes_any_options:
            yield from _options(path, spec.options, each.options, each.name)


def engine_keys(path: KeyPath, block: EngineBlock) -> Iterator[Broken]:
    """Keys of a block of engines, or of a teacher's or a reward model's, that its kind takes no heed of."""
    spec = ENGINES.spec(block.backend)
    is_model = isinstance(block, RewardModelOptions)
    who = "a {} reward model" if is_model else "a {} teacher" if isinstance(block, TeacherOptions) else "{} engines"
    owned = dict.fromkeys(key for name in ENGINES.builtin for key in ENGINES.spec(name).keys)
    for key in owned:
        if key not in spec.keys and getattr(block, key, None):
            owners = " or ".join(owners_of(key))
            yield (*path, key), f"has no effect with {who.format(block.backend)}; set backend: {owners} or remove it"
    if isinstance(block, EngineGroupOptions):
        yield from _options(path, spec.options, block.options, block.backend)


def _options(path: KeyPath, struct: type[Options] | None, given: dict[str, Any], name: str) -> Iterator[Broken]:
    key = (*path, "options")
    if struct is None:
        if given:
            yield key, f"is for parts of other packages, and {name} has none; remove it"
        return
    if found := unknown_key(given, shape_of(struct), key):
        yield found
        return
    try:
        read_options(struct, given)
    except msgspec.ValidationError as error:
        at, text = misfit(error, given, struct)
        yield (*key, *at), text
