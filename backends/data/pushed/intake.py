"""Which groups are wanted, which were taken, and what becomes of one that is pushed.

Invariants:

* A group is taken for one of the run's that waits, and only if no version that made it is older than that group was
  granted for: so the Buffer's bound holds for it as for what the run's own engines make, and nothing that was taken is
  too old to be trained.
* It is taken when it is on disk under its number, with the key of whoever pushed it. The key is answered the same from
  then on, whoever answers.
* Numbers follow each other. The number of a group that was settled before anything was pushed for it stays empty.

Nothing here waits for anybody: what cannot be taken now is refused, and whoever pushed it comes again.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.data.pushed.forms import PushAccepted, PushedHead, PushedRow, PushStanding
from penstock.backends.data.row import BadColumnError
from penstock.backends.processes.http_server import RequestError
from penstock.messages.local import FetchedPrompt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.backends.data.own_source.journal import Journal
    from penstock.backends.data.pushed.forms import PushedGroup
    from penstock.backends.data.pushed.reading import PushReader
    from penstock.messages.commands import PromptRequest, TellPushers

RETRY_AFTER_S: Final = 1
EMPTY: Final = b"null"
"""Stands in the journal for a number that nobody wants any more."""
_STATE: Final = b"null"
_HEAD: Final = msgspec.json.Decoder(PushedHead | None)
_ROW: Final = msgspec.json.Decoder(PushedRow)
_DIGESTED: Final = msgspec.json.Encoder(order="sorted")


class Intake:
    """Takes groups, one at a time."""

    def __init__(self, journal: Journal, reader: PushReader) -> None:
        self._journal, self._reader = journal, reader
        self._version = -1
        self._wanted: dict[int, PromptRequest] = {}
        """By number; none of them is in the journal."""
        self._known: dict[str, tuple[int, PushedHead]] = {}
        for number in range(journal.standing.num_rows):
            if (head := _HEAD.decode(journal.row(number))) is not None:
                self._known[head.key] = number, head

    @property
    def standing(self) -> PushStanding:
        """What is taken now."""
        first = self._first()
        return PushStanding(
            version=self._version,
            oldest_version=None if first is None else first.min_version,
            wanted=len(self._wanted),
            accepted=len(self._known),
        )

    def want(self, requests: Iterable[PromptRequest]) -> tuple[FetchedPrompt, ...]:
        """These groups wait for what is pushed; the prompts of those that were taken before."""
        found: list[FetchedPrompt] = []
        for request in requests:
            if request.row < self._journal.standing.num_rows:
                row = _ROW.decode(self._journal.row(request.row))
                found.append(FetchedPrompt(request.group_id, row.prompt(request.row)))
            else:
                self._wanted[request.row] = request
        return tuple(found)

    def tell(self, told: TellPushers) -> None:
        """What may be pushed has changed."""
        self._version = max(self._version, told.version)
        gone = frozenset(told.gone)
        self._wanted = {number: each for number, each in self._wanted.items() if each.group_id not in gone}

    def take(self, pushed: PushedGroup) -> tuple[PushAccepted, FetchedPrompt | None]:
        """Take a group for good; the prompt of the group of the run that it is for, the first time.

        Raises:
            RequestError: it is not taken, and why.
            OSError: the disk refuses.
        """
        digest = hashlib.sha256(_DIGESTED.encode(pushed)).hexdigest()
        if (known := self._known.get(pushed.key)) is not None:
            number, head = known
            if head.digest != digest:
                raise RequestError(
                    409, "key_reused", f"key: another group was pushed as {pushed.key}; choose another key"
                )
            return PushAccepted(key=head.key, row=number, version=head.version), None
        request = self._for(pushed)
        try:
            row = self._reader.row(pushed, digest)
        except BadColumnError as error:
            raise RequestError(400, "invalid_request", error.message) from None
        number = request.row
        gap = [EMPTY] * (number - self._journal.standing.num_rows)
        self._journal.commit([*gap, msgspec.json.encode(row)], _STATE, num_told=0)
        del self._wanted[number]
        self._known[pushed.key] = number, PushedHead(key=row.key, digest=digest, version=row.version)
        return PushAccepted(key=row.key, row=number, version=row.version), FetchedPrompt(
            request.group_id, row.prompt(number)
        )

    def _for(self, pushed: PushedGroup) -> PromptRequest:
        """The group of the run that it is for."""
        if self._version < 0:
            raise RequestError(503, "not_ready", "no version is announced yet; try again soon", RETRY_AFTER_S)
        if pushed.version > self._version:
            raise RequestError(
                409,
                "version_not_published",
                f"version: {pushed.version} is above the newest that is announced, {self._version}",
            )
        first = self._first()
        if first is None:
            raise RequestError(
                429,
                "demand_met",
                "every group that may start now has its samples; try again when a batch is trained",
                RETRY_AFTER_S,
            )
        oldest = min((v for s in pushed.samples for v, count in s.versions or () if count), default=pushed.version)
        if min(oldest, pushed.version) < first.min_version:
            raise RequestError(
                409,
                "version_too_old",
                f"version: {min(oldest, pushed.version)} is older than the oldest that is taken now, "
                f"{first.min_version} (staleness.max_staleness): it could be too old when its batch comes; make the "
                "group anew with newer weights",
            )
        return first

    def _first(self) -> PromptRequest | None:
        """The one that has waited longest, and so takes the oldest versions."""
        return self._wanted[min(self._wanted)] if self._wanted else None
