"""Everything that a plan may choose, and each choice as a scenario: a real one to run, and a modelled one to play.

What a change of the scenario means is the scenario's own business: each choice is a few overrides, and what its rules
refuse is no choice.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from penstock.actors.buffer.policies import BUILTIN
from penstock.backends.engines.spec import ENGINES
from penstock.backends.learners.spec import is_modelled
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted
from penstock.runtime.prediction.planning.candidate import Candidate, Objective
from penstock.runtime.prediction.planning.scaling import LearnerScaling
from penstock.runtime.preflight.gpu_memory import memory_problems
from penstock.runtime.scenario.architecture import UnreadableModelError, find_architecture
from penstock.runtime.scenario.load import overridden_source, scenario_from
from penstock.runtime.scenario.modelled import modelled_from

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.backends.engines.options import EnginesOptions
    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.runtime.prediction.models import Models
    from penstock.runtime.prediction.planning.candidate import Asked
    from penstock.runtime.scenario import Scenario
    from penstock.runtime.scenario.source import Source

COLOCATE: Final = "colocate"
AGES: Final = (1, 2, 4, 8, 16, 32, 64)
SLOT_FACTORS: Final = (0.25, 0.5, 1, 2, 4)
SHARES_FOR_COST: Final = (1.0, 0.75, 0.5, 0.25)
"""Of the devices: for a given batch fewer of them may be cheaper."""


class Space:
    """What may be chosen for one scenario."""

    def __init__(self, source: Source, overrides: Sequence[str], models: Models | None, asked: Asked) -> None:
        """
        Args:
            source: what was read of the scenario; it stays as it is.
            overrides: of all that is chosen here.
            models: how long things take; None: as the scenario's own models have it.
            asked: what the plan is to be of.

        Raises:
            UserFault: the scenario cannot be planned, or not for so many devices.
        """
        self._source, self._overrides, self._models, self._asked = source, list(overrides), models, asked
        self.real = scenario_from(self._with(()))
        self._has_steady_lengths = False
        """Lengths change over the run, and are taken to be those in its middle."""
        _check(self.real)
        self.modelled = self._with_models(())
        self.engine_devices = devices_of(self.real.engines)
        self.scaling = LearnerScaling(self.real, self.modelled, models, asked.rank_efficiency)
        self.not_searched = list(self._left_out())
        self.slots = self._slots()
        self._sizes = {self.engine_devices: 1.0} | asked.engine_speeds
        self._architecture = _architecture_of(self.real)
        self._critics_of: dict[int, list[int]] = {}
        self.candidates = tuple(dict.fromkeys(self._all()))
        if not self.candidates:
            raise UserFault(
                f"--devices: {asked.num_devices} are too few for a learner of {self.scaling.least_ranks()} "
                f"and an engine of {min(self._sizes)}"
            )

    # --- a choice as a scenario ---------------------------------------------------------------------------------

    def overrides_of(self, candidate: Candidate) -> list[str]:
        """What the choice sets over the scenario."""
        engines, learner = self.real.engines, self.real.learner
        keeps_mode = candidate.policy == self.real.staleness.policy
        found = [
            f"engines.count={candidate.num_engines}",
            f"engines.slots={candidate.slots}",
            f"staleness.policy={candidate.policy}",
            f"staleness.max_staleness={candidate.max_staleness}",
            *([] if keeps_mode else ["staleness.update_mode=null"]),
            *([] if engines.scale == "fixed" else ["engines.scale=fixed"]),
            *(["engines.lent=0"] if engines.lent else []),
        ]
        if candidate.is_colocated != (engines.placement == COLOCATE):
            found.append(f"engines.placement={COLOCATE if candidate.is_colocated else 'auto'}")
        if candidate.engine_devices != self.engine_devices:
            speed = engines.simulated_speed * self._sizes[candidate.engine_devices]
            is_played = ENGINES.spec(engines.backend).size(engines) is None
            size = f"simulated_speed={speed:g}" if is_played else f"sglang.tp_size={candidate.engine_devices}"
            found.append(f"engines.{size}")
        if not is_modelled(learner):
            found.append(f"learner.num_ranks={candidate.learner_ranks}")
            if candidate.critic_ranks != learner.critic_ranks:
                found.append(f"learner.critic_ranks={candidate.critic_ranks}")
        elif candidate.learner_ranks != self.scaling.base_ranks:
            sized = self.scaling.sized(learner.simulated, candidate.learner_ranks, 0)
            found.append(f"learner.simulated.token_s={sized.token_s!r}")
            if sized.num_ranks != learner.simulated.num_ranks:
                found.append(f"learner.simulated.num_ranks={sized.num_ranks}")
        return found

    def real_of(self, candidate: Candidate) -> Scenario:
        """The scenario to run.

        Raises:
            UserFault: the scenario's rules refuse it, or it does not fit into the GPUs.
        """
        found = scenario_from(self._with(self.overrides_of(candidate)))
        if ENGINES.spec(found.engines.backend).size(found.engines) is not None:
            size = devices_of(found.engines)
            if size != candidate.engine_devices:
                raise UserFault(
                    f"an engine of {counted(candidate.engine_devices, 'device')} would take {size} with these options"
                )
        if problems := self._misfits(found):
            raise UserFault("; ".join(problems))
        return found

    def _misfits(self, scenario: Scenario) -> list[str]:
        """What does not fit into GPUs whose memory the scenario names, as its dry run has it."""
        gpu_gb = scenario.runtime.gpu_memory_gb
        if gpu_gb is None or self._architecture is None:
            return []
        return memory_problems(scenario, self._architecture, gpu_gb)

    def modelled_of(self, candidate: Candidate) -> Scenario:
        """The scenario to play."""
        return self._sized(self._with_models(self.overrides_of(candidate)), candidate)

    def sketch_of(self, candidate: Candidate) -> Scenario:
        """As :meth:`modelled_of`, in a hundredth of the time and with no rule asked: for estimates."""
        base = self.modelled
        built_in = BUILTIN.get(candidate.policy)
        own_mode = base.staleness.update_mode
        mode = own_mode if built_in is None or candidate.policy == base.staleness.policy else built_in.update_mode
        placement = COLOCATE if candidate.is_colocated else "auto"
        return self._sized(
            replace(
                base,
                staleness=replace(
                    base.staleness, policy=candidate.policy, max_staleness=candidate.max_staleness, update_mode=mode
                ),
                engines=replace(base.engines, count=candidate.num_engines, slots=candidate.slots, placement=placement),
            ),
            candidate,
        )

    def _sized(self, found: Scenario, candidate: Candidate) -> Scenario:
        """With the times of a learner and of engines of these sizes."""
        ranks, critic = candidate.learner_ranks, candidate.critic_ranks
        simulated = self.scaling.sized(found.learner.simulated, ranks, critic)
        speed = self.modelled.engines.simulated_speed * self._sizes[candidate.engine_devices]
        return replace(
            found,
            learner=replace(found.learner, simulated=simulated),
            engines=replace(found.engines, simulated_speed=speed),
        )

    def _with(self, overrides: Sequence[str]) -> Source:
        """A source of its own, as checking one fills it in."""
        return overridden_source(copy.deepcopy(self._source), (*self._overrides, *overrides))

    def _with_models(self, overrides: Sequence[str]) -> Scenario:
        scenario = modelled_from(self._with(overrides))[0]
        if self._models is not None:
            # Every device that is planned with is one of its own, however many shared a machine in the runs.
            scenario = replace(self._models, cores=None).applied(scenario)
        if not scenario.engines.simulated.response_tokens_course:
            return scenario
        self._has_steady_lengths = True  # a few steps stand for the whole run
        engines = scenario.engines
        return replace(
            scenario, engines=replace(engines, simulated=replace(engines.simulated, response_tokens_course=()))
        )

    def assumed(self, candidate: Candidate) -> list[str]:
        """What nothing has measured."""
        found = self.scaling.texts()
        if len(self._sizes) > 1:
            speeds = ", ".join(f"{counted(size, 'device')} {speed:g}" for size, speed in sorted(self._sizes.items()))
            found.append(f"speed of an engine, as given: {speeds}; what its memory holds stays as it is")
        if not self.modelled.engines.simulated.fetch_shared_byte_s:
            found.append("publishing and fetching take as long for any number of engines")
        if self._has_steady_lengths:
            found.append("lengths of responses, which change over the run: those in its middle (factor 1) throughout")
        found.append("what older samples cost in learning is not in it; only their age is shown")
        if self._models is None:
            found.append("all times are those of the scenario's own models: fit them to a run with: penstock calibrate")
        else:
            has_episodes = self.real.episode.kind != "single"
            doubts = self._models.doubts(self.modelled_of(candidate), has_episodes=has_episodes)
            found += [f"beyond what was recorded: {text}" for text in doubts]
        return found

    # --- the choices ----------------------------------------------------------------------------------------------

    def neighbours(self, candidate: Candidate, spacing: int) -> list[Candidate]:
        """Choices that differ in one thing; in the split of the devices by so many places in the list of splits, of
        those whose critic lies as in this one: with the policy, or not."""
        found: list[Candidate] = []
        splits: list[Candidate] = []
        for one in self.candidates:
            is_alike = one.engine_devices == candidate.engine_devices and one.is_colocated == candidate.is_colocated
            is_parted = bool(one.critic_ranks) == bool(candidate.critic_ranks)
            same_split = is_alike and one.num_engines == candidate.num_engines
            is_switched = one.is_colocated != candidate.is_colocated
            same_schedule = (one.policy, one.max_staleness) == (candidate.policy, candidate.max_staleness)
            same_slots = one.slots == candidate.slots
            if is_alike and is_parted and same_schedule and same_slots:
                splits.append(one)
            elif (same_split and (same_schedule, same_slots, is_parted).count(False) == 1) or (
                is_switched and is_parted and same_schedule and same_slots
            ):
                found.append(one)
        splits.sort(key=lambda one: (one.num_engines, one.learner_ranks))
        place = splits.index(candidate)
        return [splits[at] for at in (place - spacing, place + spacing) if 0 <= at < len(splits)] + found

    def _all(self) -> Iterator[Candidate]:
        for policy, eta, is_colocated in self._schedules():
            for size in self._sizes:
                for engines, ranks in self._splits(size, is_colocated=is_colocated):
                    for critic in self._critics(ranks):
                        for slots in self.slots:
                            yield Candidate(
                                policy=policy, max_staleness=eta, num_engines=engines, engine_devices=size,
                                slots=slots, learner_ranks=ranks, critic_ranks=critic, is_colocated=is_colocated,
                            )  # fmt: skip

    def _critics(self, ranks: int) -> list[int]:
        """Ranks of the critic alone: none, and where it can have some as many as make a step quickest, of those that
        fit into the GPUs. Any other number is slower on the same devices."""
        if ranks not in self._critics_of:
            counts = self.scaling.critics_of(ranks)
            apart = [count for count in counts if count]
            fitting = (count for count in apart if not self._misfits(self._parted(ranks, count)))
            best = next(fitting, apart[0] if apart else 0)
            self._critics_of[ranks] = [count for count in counts if count in (0, best)]
        return self._critics_of[ranks]

    def _parted(self, ranks: int, critic_ranks: int) -> Scenario:
        learner = replace(self.real.learner, num_ranks=ranks, critic_ranks=critic_ranks)
        return replace(self.real, learner=learner)

    def _schedules(self) -> Iterator[tuple[str, int, bool]]:
        most, own = self._asked.max_staleness, self.real.staleness
        if ":" in own.policy:
            assert own.max_staleness is not None, "scenarios are resolved"
            yield own.policy, own.max_staleness, self.real.engines.placement == COLOCATE
            return
        for is_colocated in (False, True):
            yield "sync", 0, is_colocated
            if most >= 1:
                yield "one_step_off", 1, is_colocated
        for eta in AGES:
            if eta <= most:
                yield "fully_async", eta, False

    def _splits(self, size: int, *, is_colocated: bool) -> Iterator[tuple[int, int]]:
        """Engines of so many devices, and ranks of the learner: for each number of ranks as many engines as fit."""
        is_for_cost = self._asked.objective is Objective.COST
        for share in SHARES_FOR_COST if is_for_cost else (1.0,):
            num_devices = int(self._asked.num_devices * share)
            most_ranks: dict[int, int] = {}
            for ranks in self.scaling.ranks_up_to(num_devices):
                engines = (num_devices if is_colocated else num_devices - ranks) // size
                if engines >= 1 and (not is_colocated or ranks <= engines * size):
                    most_ranks[engines] = max(ranks, most_ranks.get(engines, 0))
            yield from most_ranks.items()

    def _slots(self) -> tuple[int, ...]:
        asked, own = self._asked.slots, self.real.engines.slots
        if asked:
            return tuple(sorted(set(asked)))
        model = self.modelled.engines.simulated
        shown = own if self._models is None else max(own, self._models.most_running)
        most = 4 * own if model.kv_tokens is not None else shown
        if most < 4 * own:
            self.not_searched.append(
                f"engines.slots above {most:,}: no kv_tokens says how many fit, and nothing shows that more do "
                "(slots that are asked for are tried)"
            )
        found = {int(own * factor) for factor in SLOT_FACTORS} | {shown}
        return tuple(sorted(slots for slots in found if 1 <= slots <= most))

    def _left_out(self) -> Iterator[str]:
        yield "samples_per_group, groups_per_batch, learning rates: they change what is learnt, which is not modelled"
        if self.real.engines.scale != "fixed":
            yield f"engines.scale: {self.real.engines.scale}: a plan is of a fixed number of engines"
        if self.real.engines.lent:
            yield "engines.lent: a plan is of engines with devices of their own, or of turns of all (colocate)"
        yield "update modes: sync and one_step_off have their own, fully_async that of the scenario"
        if not self._asked.engine_speeds:
            yield (
                f"engines of other sizes than {counted(self.engine_devices, 'device')}: the models "
                "know no other; say how quick they are: --engine-speed DEVICES=SPEED, from Python engine_speeds"
            )
        if not self.scaling.is_known:
            yield (
                f"learners of other sizes than {self.scaling.base_ranks}: the models have no time per trained token "
                "(learner.token_s is 0), so nothing says what more ranks would shorten"
            )
        if ":" in self.real.staleness.policy:
            yield f"other policies and bounds than those of {self.real.staleness.policy}"
        if self.real.teacher is not None or self.real.reward_model is not None:
            yield "devices of teachers and reward models: they come beside the devices of the plan"


def devices_of(engines: EnginesOptions) -> int:
    """Of one engine; what runs on a CPU, or is modelled, counts as one."""
    size = ENGINES.spec(engines.backend).size(engines) if engines.device != "cpu" else None
    return 1 if size is None else size.num_gpus


def _architecture_of(scenario: Scenario) -> Architecture | None:
    """None where it is not known, so that nobody can say whether it fits."""
    try:
        found = find_architecture(scenario)
    except UnreadableModelError:
        return None  # as the dry run says
    return None if found is None else found.architecture


def _check(scenario: Scenario) -> None:
    engines, run = scenario.engines, scenario.run
    for is_so, text in (
        (run.only is not None, f"run.only: {run.only}: a part of a run is not planned; remove it"),
        (bool(engines.more), "engines.more: engines of several kinds are not planned; leave one kind"),
        (
            bool(engines.addresses) or engines.router is not None,
            "engines.addresses: servers that run already are as many as they are; remove it to plan those started here",
        ),
    ):
        if is_so:
            raise UserFault(text)
