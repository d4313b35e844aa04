"""The Filter: whether a group is complete, and whether it is worth training on.

Invariants:

* Every group of which something has come in goes out once, admitted or rejected, with every one of its samples.
* A place of a group goes out with one sample at most, also after the loss of a Filter and of a Scorer, who both knew
  that a sample had failed and is replaced.
* No group waits for a sample that will not come: a failed one is replaced, left out, or closes the group.
* Groups are told apart by their id, never by position.
* Samples that are imitated are compared with none: equal rewards turn no group of them away.
* Groups of an evaluation go out as they are: nothing of them is judged, shown, dropped or replaced; one without a
  single sample left goes out too.
* A complete group is judged in this order: each of its samples by a user's function, the group by length, number and
  spread, the group by a user's function. What was judged is not judged again, and nothing joins a group that is
  being judged.
* Where a function scores whole groups, a Scorer that took another's place is shown the samples of unfinished groups.
* Whether a group that is turned away is kept after all is for the Buffer to decide; here it has gone out.

State: the groups being put together, those that a user's filter is judging, and the ids of those that have gone out.
A group is forgotten when it is settled.

| waits for | who ends it |
|---|---|
| the other samples of a group | the engines and the Scorer; what fails travels here as ``SampleFailed`` |
| a replacement | PromptSource, which is told the whole list of what is missing |
| the user's filters | their backend; a sweep rejects what it was asked when it has not answered for a whole period |
| the user's hook, and what keeps samples | nobody waits for them |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never, final

from msgspec.structs import replace

from penstock.actors.filter.assembly import SCORING_FAILED, Assembly
from penstock.actors.settled import KnownSettled
from penstock.actors.waits import MAX_NAMED, several
from penstock.messages.commands import JudgeGroup, JudgeSamples, KeepSamples, Send, ShowGroup, StartTimer
from penstock.messages.flow import (
    FailuresTold,
    GroupAdmitted,
    GroupRejected,
    PlacesGivenUp,
    RefillAsked,
    SampleFailed,
    SampleGenerated,
    SampleScored,
    SamplesSettled,
    ScoringFailed,
)
from penstock.messages.local import GroupJudged, SamplesJudged, Started, TimerFired
from penstock.messages.membership import ActorReturned, HeldLease, LeaseStage
from penstock.messages.names import BUFFER, PROMPT_SOURCE, SCORER
from penstock.messages.reasons import MAX_REASON_CHARACTERS
from penstock.messages.samples import Group, Loss, Purpose, SampleEnd, SampleKey, TerminalState, is_evaluation
from penstock.messages.waits import OWN_BACKEND, Wait

if TYPE_CHECKING:
    from penstock.actors.filter.settings import FilterSettings
    from penstock.messages.base import Metric
    from penstock.messages.commands import AnyCommand
    from penstock.messages.flow import SettledState
    from penstock.messages.inboxes import FilterEvent
    from penstock.messages.samples import Prompt

SWEEP_TIMER: Final = "sweep"
SMALLEST_SPREAD: Final = 1e-9
"""Rewards that differ by less count as equal."""
TOO_FEW: Final = "too_few_samples"
NO_VERDICT: Final = "the filter did not answer in time"


@final
class Filter:
    """The Filter's state machine."""

    def __init__(self, settings: FilterSettings) -> None:
        self.settings, self._options = settings, settings.options
        self.assemblies: dict[int, Assembly] = {}
        self.judging: dict[int, int] = {}
        """Sweep in which the user's filter was asked, by group id."""
        self._gone: set[int] = set()
        """Admitted or rejected, and not settled yet: what else arrives of them is too late."""
        self._missing: dict[int, tuple[SampleKey, ...]] = {}
        """The replacements that are waited for, by group id."""
        self._missing_changed = False
        self._gives_up = False
        """Places that the Scorer has not been told of."""
        self._sweep = 0
        self._has_judged = False
        """Since the last sweep."""
        self._out: list[AnyCommand] = []

    @property
    def state(self) -> str:
        """For people."""
        return "assembling" if self.assemblies else "idle"

    def leases(self) -> tuple[HeldLease, ...]:
        """Every sample of the groups that are here."""
        held: list[HeldLease] = []
        for assembly in self.assemblies.values():
            held.extend(
                HeldLease(s.key, s.attempt, LeaseStage.PASSED_ON, s.num_tokens) for s in assembly.samples.values()
            )
            held.extend(HeldLease(e.key, 0, LeaseStage.PASSED_ON, e.num_tokens) for e in assembly.failed.values())
        return tuple(held)

    def waits(self) -> tuple[Wait, ...]:
        """Samples of groups that are not complete, and the verdicts of a user's filter."""
        open_ones = [a for group_id, a in self.assemblies.items() if group_id not in self.judging]
        lacking = [(key, assembly.num_here) for assembly in open_ones for key in assembly.lacking(MAX_NAMED)]
        verdicts = several("verdict on group", OWN_BACKEND, [(group_id, 0) for group_id in self.judging])
        return (*several("sample", PROMPT_SOURCE, lacking), *verdicts)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Nothing: what it turns away is in the ledger."""
        return ()

    def handle(self, event: FilterEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        match event:
            case SampleScored():
                self._on_scored(event)
            case ScoringFailed():
                self._on_failed(event, SCORING_FAILED)
            case SampleFailed():
                self._on_failed(event, "generation_failed")
            case GroupJudged():
                if event.group_id in self.judging:
                    self._has_judged = True
                    self._on_judged(event)
            case SamplesJudged():
                if event.group_id in self.judging:
                    self._has_judged = True
                    self._on_sifted(event)
            case SamplesSettled():
                self._on_settled(event.settled)
            case ActorReturned():
                if event.name == SCORER and self.settings.tells_scorer:
                    self._show_scorer()
            case TimerFired():
                self._on_sweep()
            case Started():
                self._out.append(StartTimer(SWEEP_TIMER, self.settings.judge_timeout_s))
            case _:
                assert_never(event)
        if self._missing_changed:
            self._missing_changed = False
            missing = tuple(key for keys in self._missing.values() for key in keys)
            self._out.append(Send(PROMPT_SOURCE, RefillAsked(missing=missing)))
        if self._gives_up:
            self._gives_up = False
            open_ones = ((a.group_id, place) for a in self.assemblies.values() for place in sorted(a.given_up))
            self._out.append(Send(SCORER, PlacesGivenUp(places=tuple(SampleKey(*place) for place in open_ones))))
        out, self._out = self._out, []
        return out

    # --- groups -----------------------------------------------------------------------------------------------

    def _assembly(self, key: SampleKey, size: int, prompt: Prompt) -> Assembly | None:
        """The group of a sample; None when it is complete: being judged, or gone out."""
        if key.group_id in self.judging or key.group_id in self._gone:
            return None
        if key.group_id not in self.assemblies:
            self.assemblies[key.group_id] = Assembly(key.group_id, size, prompt)
        return self.assemblies[key.group_id]

    def _forget(self, group_id: int) -> None:
        del self.assemblies[group_id]
        self.judging.pop(group_id, None)
        self._note_missing(group_id, ())

    def _on_settled(self, settled: SettledState) -> None:
        known = KnownSettled(settled)
        for group_id in [g for g in self.assemblies if g in known]:
            self._forget(group_id)
        self._gone = {group_id for group_id in self._gone if group_id not in known}

    def _on_scored(self, event: SampleScored) -> None:
        assembly = self._assembly(event.sample.key, event.group_size, event.prompt)
        if assembly is not None and assembly.add(event.sample):
            self._complete(assembly)

    def _on_failed(self, event: ScoringFailed | SampleFailed, cause: str) -> None:
        assembly = self._assembly(event.key, event.group_size, event.prompt)
        reason = event.reason[:MAX_REASON_CHARACTERS]
        end = SampleEnd(
            key=event.key,
            state=TerminalState.FAILED,
            cause=cause,
            num_tokens=event.num_tokens,
            num_given_tokens=event.num_given_tokens,
            reason=reason,
        )
        if assembly is None or not assembly.fail(end):
            return
        has_scored = any(each.samples for each in self.assemblies.values())
        self._out.append(Send(BUFFER, FailuresTold(ends=(end,), has_scored=has_scored)))
        if self.settings.keeps_samples:  # at once: its group may never be complete
            came = event.sample if isinstance(event, ScoringFailed) else None
            samples = () if came is None else (came,)
            failed = Group(group_id=assembly.group_id, prompt=assembly.prompt, samples=samples, ended=(end,))
            self._out.append(KeepSamples(failed))
        place = event.key.index % assembly.size
        match "shrink" if is_evaluation(assembly.group_id) else self._options.on_failed_sample:
            case "reject":
                self._reject(assembly, cause)
                return
            case "refill" if assembly.num_refills < self._options.max_refills:
                assembly.num_refills += 1
            case _:
                assembly.given_up.add(place)
                self._gives_up = self.settings.tells_scorer
        self._complete(assembly)

    def _complete(self, assembly: Assembly) -> None:
        if assembly.failed:
            self._note_missing(assembly.group_id, assembly.missing())
        if not assembly.is_complete:
            return
        if is_evaluation(assembly.group_id):
            self._admit(assembly)
            return
        if self._options.sample_function is not None and not assembly.is_sifted and assembly.samples:
            self.judging[assembly.group_id] = self._sweep
            self._out.append(JudgeSamples(assembly.group()))
            return
        group = self._group(assembly)
        cause = self._cause_to_reject(group)
        if cause:
            self._reject(assembly, cause, is_verdict=cause != TOO_FEW)
        elif self._options.function is not None:
            self.judging[assembly.group_id] = self._sweep
            self._out.append(JudgeGroup(group))
        else:
            self._admit(assembly)

    def _group(self, assembly: Assembly) -> Group:
        return assembly.group(counts_dropped=self._options.drop_samples == "after_statistics")

    def _cause_to_reject(self, group: Group) -> str:
        options = self._options
        lengths = [sample.num_tokens for sample in group.samples]
        compared = [sample for sample in group.samples if sample.loss is Loss.OBJECTIVE]
        rewards = [reward for sample in compared if (reward := sample.reward) is not None]
        rewards += [sample.reward for sample in group.counted]
        if not lengths or len(lengths) + len(group.counted) < options.min_group_size:
            return TOO_FEW
        if max(lengths) < options.min_response_tokens:
            return "too_short"
        if options.max_response_tokens is not None and max(lengths) > options.max_response_tokens:
            return "too_long"
        if options.drop_zero_spread and rewards and max(rewards) - min(rewards) < SMALLEST_SPREAD:
            return "zero_spread"
        return ""

    def _on_sifted(self, event: SamplesJudged) -> None:
        assembly = self.assemblies[event.group_id]
        if not assembly.is_sifted:
            del self.judging[event.group_id]
            assembly.sift(event.dropped)
            self._complete(assembly)

    def _on_judged(self, event: GroupJudged) -> None:
        del self.judging[event.group_id]
        assembly = self.assemblies[event.group_id]
        if event.keep:
            self._admit(assembly)
        else:
            cause = event.cause or "user_filter"
            self._reject(assembly, cause, event.reason, is_verdict=not event.is_failure)

    def _admit(self, assembly: Assembly) -> None:
        self._go_out(assembly, "")
        self._out.append(Send(BUFFER, GroupAdmitted(group=self._group(assembly))))

    def _go_out(self, assembly: Assembly, cause: str, reason: str = "") -> None:
        self._forget(assembly.group_id)
        self._gone.add(assembly.group_id)
        if self.settings.keeps_samples and assembly.samples:
            self._out.append(KeepSamples(assembly.came(cause, reason), cause))
        if self._options.all_samples_hook is not None and not is_evaluation(assembly.group_id):
            self._out.append(ShowGroup(assembly.all_samples(), cause))

    def _reject(self, assembly: Assembly, cause: str, reason: str = "", *, is_verdict: bool = False) -> None:
        """``is_verdict``: on the contents of a complete group that could be trained as well."""
        self._go_out(assembly, cause, reason)
        rewards = [reward for sample in assembly.samples.values() if (reward := sample.reward) is not None]
        rejected = GroupRejected(
            group_id=assembly.group_id,
            cause=cause,
            ended=assembly.rejected(cause, reason[:MAX_REASON_CHARACTERS]),
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            group=self._group(assembly) if is_verdict and self._options.keep_when_insufficient is not None else None,
        )
        self._out.append(Send(BUFFER, rejected))

    def _show_scorer(self) -> None:
        """One that took another's place has not seen what that one had passed on here, and would wait for it: whoever
        has it else may be gone. It scores the whole group; what comes back of these is known here already."""
        for assembly in self.assemblies.values():
            purpose = Purpose.EVALUATE if is_evaluation(assembly.group_id) else Purpose.TRAIN
            for sample in assembly.samples.values():
                unscored = replace(sample, outcome=replace(sample.outcome, reward=None))
                shown = SampleGenerated(
                    sample=unscored, group_size=assembly.size, purpose=purpose, prompt=assembly.prompt
                )
                self._out.append(Send(SCORER, shown))

    # --- replacements and deadlines ---------------------------------------------------------------------------

    def _note_missing(self, group_id: int, missing: tuple[SampleKey, ...]) -> None:
        if missing != self._missing.get(group_id, ()):
            self._missing_changed = True
            if missing:
                self._missing[group_id] = missing
            else:
                del self._missing[group_id]

    def _on_sweep(self) -> None:
        """A backend that was asked before the last sweep and has answered nothing since has lost it all. One that
        answers is only behind."""
        if not self._has_judged:
            for group_id in [group_id for group_id, sweep in self.judging.items() if sweep < self._sweep]:
                del self.judging[group_id]
                self._reject(self.assemblies[group_id], "filter_did_not_answer", NO_VERDICT)
        self._sweep += 1
        self._has_judged = False
        self._out.append(StartTimer(SWEEP_TIMER, self.settings.judge_timeout_s))

    def validate(self) -> None:
        """Assert the invariants."""
        for group_id, assembly in self.assemblies.items():
            assert group_id == assembly.group_id
            assert not assembly.is_complete or group_id in self.judging, f"group {group_id} is complete and still here"
            assert not (assembly.samples.keys() & assembly.failed.keys())
            known = assembly.samples.keys() | assembly.failed.keys()
            replaced = {index - assembly.size for index in known} & assembly.samples.keys()
            assert not replaced, f"group {group_id} has replacements for {replaced}, which count too"
            assert assembly.dropped.keys() <= assembly.samples.keys()
            assert assembly.is_sifted or not assembly.dropped
            assert self._missing.get(group_id, ()) == assembly.missing()
        assert self.judging.keys() <= self.assemblies.keys()
        assert self._missing.keys() <= self.assemblies.keys()
        assert not (self._gone & self.assemblies.keys())
