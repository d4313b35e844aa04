"""What a census has found: samples that somebody holds, those that nobody does, and those that stand still."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.actors.prompt_source.census import ENDED
from penstock.actors.prompt_source.leases import LeaseState
from penstock.actors.prompt_source.stuck import note_running
from penstock.messages.commands import ReplaceActor, Send
from penstock.messages.flow import SampleRevoked
from penstock.messages.membership import LeaseStage
from penstock.messages.names import PROMPT_SOURCE, SUPERVISOR, is_engine
from penstock.messages.texts import counted, does
from penstock.messages.training import NoticeGiven

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.actors.prompt_source.census import Found
    from penstock.actors.prompt_source.issuing import Issuing
    from penstock.actors.prompt_source.leases import Lease, LeasedGroup, LeaseTable
    from penstock.actors.prompt_source.settings import PromptSourceSettings
    from penstock.actors.prompt_source.stuck import StuckEngine
    from penstock.messages.membership import HeldLease


class Recovering:
    """Adopts leases, and issues samples again."""

    def __init__(self, settings: PromptSourceSettings, table: LeaseTable, issuing: Issuing) -> None:
        self._settings, self._table, self._issuing = settings, table, issuing

    def adopt(self, group: LeasedGroup, lease: Lease, holder: str, found: HeldLease) -> None:
        """Somebody holds this sample, or says that it has failed there."""
        if found.attempt < lease.attempt:
            return
        # What has left its engine, or has failed there, since that engine answered, stays as it is.
        is_open = lease.state in (LeaseState.ISSUED, LeaseState.QUEUED)
        lease.catch_up(found.attempt)
        lease.sweep = self._issuing.sweep
        if is_open:
            lease.found_prefix(found.prefix)
        if found.stage is LeaseStage.FAILED:
            if is_open or lease.state is LeaseState.LEFT:  # left: word of the failure was lost with whoever had it
                self._issuing.failed(group, lease, "generation failed", found.num_tokens)
        elif found.stage is LeaseStage.HANDED_BACK:
            if is_open:
                self._issuing.handed_back(lease, found.num_tokens)
        elif is_engine(holder) and found.stage is not LeaseStage.PASSED_ON:
            if is_open:
                self._table.move(lease, LeaseState.ISSUED, holder)
                note_running(lease, found, self._issuing.sweep)
        elif lease.state is not LeaseState.FAILED:
            self._table.move(lease, LeaseState.LEFT)

    def reissue(self, missing: list[tuple[LeasedGroup, Lease]], lost: set[str]) -> None:
        """Nobody holds these; ``lost``: engines that are gone since the last census."""
        saved = self._issuing.num_salvaged_tokens
        for group, lease in reversed(missing):  # each goes to the front of the queue
            self._reissue_missing(group, lease, was_on_lost=lease.engine in lost)
        if missing:
            where = f" of {', '.join(sorted(lost))}" if lost else ""
            what = f"{counted(len(missing), 'sample')}{where} {does(len(missing), 'go')} on elsewhere"
            self._notice(what, self._issuing.num_salvaged_tokens - saved)

    def give_up_stuck(self, stuck: StuckEngine) -> None:
        """One of several that hang goes on elsewhere; an engine where nothing moves at all is given up."""
        engine, count, period_s = stuck.view, len(stuck.leases), self._settings.options.lease_timeout_s
        if not stuck.does_something:
            for _, lease in stuck.leases:
                lease.running_since = None  # its successor, or a later census, begins anew
            self._issuing.out.append(
                ReplaceActor(engine.name, engine.epoch, f"no progress on {counted(count, 'sample')} for {period_s:g} s")
            )
            return
        saved = self._issuing.num_salvaged_tokens
        for group, lease in reversed(stuck.leases):
            self._issuing.out.append(Send(engine.name, SampleRevoked(key=lease.key, attempt=lease.attempt)))
            lease.avoids = engine.name
            self._issuing.failed(group, lease, f"no progress for {period_s:g} s", lease.num_seen)
        num_saved = self._issuing.num_salvaged_tokens - saved
        what = f"{counted(count, 'sample')} of {engine.name} stood still and {does(count, 'go')} on elsewhere"
        self._notice(what, num_saved)

    def revoke_again(self, requests: Iterable[Found]) -> None:
        """Engines have these still. Where word was lost that one is given up, it takes a slot, and nobody looks for the
        attempt after it."""
        for engine, found in requests:
            lease = self._table.lease(found.key)
            if lease is not None and (found.attempt < lease.attempt or lease.state is LeaseState.FAILED):
                self._issuing.out.append(Send(engine, SampleRevoked(key=found.key, attempt=found.attempt)))

    def _reissue_missing(self, group: LeasedGroup, lease: Lease, *, was_on_lost: bool) -> None:
        lease.num_vanished += 1
        lease.num_engine_losses += was_on_lost
        if not was_on_lost and lease.num_tokens > lease.num_at_issue:
            self._table.note_cache(lease)
        if lease.num_engine_losses > self._settings.options.max_engine_losses:
            self._issuing.give_up(group, lease, f"{counted(lease.num_engine_losses, 'engine')} died with it")
        else:
            self._issuing.again(lease)

    def _notice(self, text: str, num_saved: int) -> None:
        text += f", {counted(num_saved, 'token')} saved" if num_saved else ""
        self._issuing.out.append(Send(SUPERVISOR, NoticeGiven(name=PROMPT_SOURCE, text=text)))


def is_outdated(lease: Lease, found: HeldLease) -> bool:
    """Whether this is only the record of an attempt that ended before the current one: nobody works on it."""
    return found.stage in ENDED and found.attempt < lease.attempt
