"""The requests at one engine: those that wait, those that run, and the attempts that are over here.

Invariants:

* A request waits or runs. Those that wait are submitted in the order in which they came, interrupted ones first; but an
  interrupted one of an evaluation goes to the end, and gives its slot to training. Whatever comes later stands behind
  it, so it comes to its turn.
* An attempt that is over here is remembered until its group is settled; nothing is remembered of settled groups.
* What is known of a response here is what PromptSource was told of it, token for token.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.actors.engine_worker.phases import RequestState
from penstock.actors.settled import KnownSettled
from penstock.messages.commands import Generate
from penstock.messages.flow import GenerationClosed, GenerationProgressed, SampleGenerated, SampleIssued
from penstock.messages.membership import HeldLease, LeaseStage
from penstock.messages.parts import join
from penstock.messages.samples import Cancelled, Part, Sample, is_evaluation

if TYPE_CHECKING:
    from penstock.actors.transitions import Steps
    from penstock.messages.flow import SettledState
    from penstock.messages.local import GenerationEnded
    from penstock.messages.samples import ModelOutcome, SampleKey

_WAITING: Final = RequestState.WAITING
_RUNNING: Final = RequestState.RUNNING
"""See :data:`penstock.messages.base.LOSSY`."""


class Request(msgspec.Struct):
    """One sample at this engine."""

    issued: SampleIssued
    prefix: Part | None
    num_tokens: int
    """Tokens of the response that PromptSource knows of."""
    chunks: list[Part]
    """They, in order, as they came."""
    state: RequestState = RequestState.WAITING
    """The last one that it had here."""

    @property
    def key(self) -> SampleKey:
        return self.issued.key

    @property
    def is_running(self) -> bool:
        return self.state is _RUNNING

    def generate(self) -> Generate:
        """What the engine is asked for."""
        issued = self.issued
        return Generate(
            key=issued.key,
            attempt=issued.attempt,
            purpose=issued.purpose,
            prompt=issued.prompt,
            seed=issued.seed,
            deadline_version=issued.deadline_version,
            prefix=self.prefix,
        )

    def generated(self, parts: tuple[Part, ...], outcome: ModelOutcome, engine: str) -> SampleGenerated:
        """What the Scorer hears when it is complete."""
        issued = self.issued
        sample = Sample(
            key=issued.key,
            attempt=issued.attempt,
            engine=engine,
            parts=parts,
            outcome=outcome,
            loss=issued.prompt.loss,
        )
        return SampleGenerated(
            sample=sample, group_size=issued.group_size, purpose=issued.purpose, prompt=issued.prompt
        )

    def reported(self, from_token: int, chunk: Part, engine: str) -> GenerationProgressed:
        """What PromptSource is told of these tokens."""
        assert from_token == self.num_tokens, f"{self.key}: tokens from {from_token} on, {self.num_tokens} are known"
        self.num_tokens += chunk.num_tokens
        self.chunks.append(chunk)
        return GenerationProgressed(
            engine=engine,
            key=self.key,
            attempt=self.issued.attempt,
            from_token=from_token,
            chunk=chunk,
            num_tokens=self.num_tokens,
        )

    def response(self) -> Part | None:
        """What PromptSource was told of, as one part."""
        if not self.chunks:
            return None
        if len(self.chunks) > 1:
            self.chunks = [join(self.chunks)]
        return self.chunks[0]


def closed(event: GenerationEnded, engine: str) -> GenerationClosed:
    """What PromptSource is told of a request that is over."""
    return GenerationClosed(
        engine=engine,
        key=event.key,
        attempt=event.attempt,
        outcome=event.outcome,
        num_tokens=event.part.num_tokens,
    )


class RequestTable:
    """All requests of one engine by key."""

    __slots__ = (
        "_ended", "_engine", "_failed", "_keys", "_num_training", "_requests", "_running", "_settled", "_steps",
        "_waiting", "num_running", "num_waiting",
    )  # fmt: skip

    def __init__(self, engine: str, steps: Steps) -> None:
        self._engine, self._steps = engine, steps
        self._requests: dict[SampleKey, Request] = {}
        self._waiting: OrderedDict[SampleKey, None] = OrderedDict()
        self._running: set[SampleKey] = set()
        self.num_running = 0
        """Of them; asked several times for each event, as is the number of those that wait."""
        self.num_waiting = 0
        self._num_training = 0
        """Of these."""
        self._ended: dict[SampleKey, int] = {}
        """The last attempt that is over here."""
        self._failed: dict[SampleKey, HeldLease] = {}
        """Those of them that ended as ``infra_error``, were revoked or handed back, for the census."""
        self._keys: dict[int, dict[SampleKey, None]] = {}
        """Everything above, by group."""
        self._settled = KnownSettled()

    # --- moves ------------------------------------------------------------------------------------------------

    def is_news(self, issued: SampleIssued) -> bool:
        """Whether this is a later attempt than any that is or was here, of a group that is not settled."""
        key = issued.key
        known = self._requests.get(key)
        latest = self._ended.get(key, -1) if known is None else known.issued.attempt
        return issued.attempt > latest and key.group_id not in self._settled

    def add(self, issued: SampleIssued) -> None:
        """A request comes in, and waits."""
        key, prefix = issued.key, issued.prefix
        self._failed.pop(key, None)
        num_tokens = 0 if prefix is None else prefix.num_tokens
        self._requests[key] = Request(issued, prefix, num_tokens, [] if prefix is None else [prefix])
        self._waiting[key] = None
        self.num_waiting += 1
        self._steps.take(None, _WAITING)
        self._keys.setdefault(key.group_id, {})[key] = None

    def take(self, num_places: int, version: int) -> list[Request]:
        """The next requests that this version may serve; they run from now on."""
        servable = (key for key in self._waiting if self._requests[key].issued.min_version <= version)
        taken: list[Request] = []
        for key in list(islice(servable, num_places)):
            del self._waiting[key]
            self.num_waiting -= 1
            self._run(key)
            request = self._requests[key]
            self._turn(request, _RUNNING)
            taken.append(request)
        return taken

    def interrupt(self, request: Request, part: Part | None) -> None:
        """It goes on from here: what is trained before those that have not begun, what is evaluated after them."""
        self._stand(request.key)
        self._turn(request, RequestState.WAITING)
        request.prefix = part
        self._waiting[request.key] = None
        self.num_waiting += 1
        self._waiting.move_to_end(request.key, last=is_evaluation(request.key.group_id))

    def end(self, request: Request, state: RequestState = RequestState.ENDED) -> None:
        """This attempt is over here."""
        self._take_out(request.key)
        self._turn(request, state)
        self._ended[request.key] = request.issued.attempt

    def fail(self, request: Request, num_tokens: int) -> None:
        """It is, without a response, and PromptSource decides what next."""
        self.end(request, RequestState.FAILED)
        self._failed[request.key] = HeldLease(request.key, request.issued.attempt, LeaseStage.FAILED, num_tokens)

    def hand_back(self, request: Request) -> GenerationClosed:
        """It goes on elsewhere; what PromptSource is told. A PromptSource that is new asks for its tokens."""
        issued, num_tokens = request.issued, request.num_tokens
        self.end(request, RequestState.HANDED_BACK)
        stage = LeaseStage.HANDED_BACK
        self._failed[request.key] = HeldLease(request.key, issued.attempt, stage, num_tokens, request.response())
        return GenerationClosed(
            engine=self._engine,
            key=request.key,
            attempt=issued.attempt,
            outcome=Cancelled(cause="handed back"),
            num_tokens=num_tokens,
        )

    def remove(self, key: SampleKey) -> Request | None:
        """A request leaves, if it is here, in the state that it was in."""
        request = self._take_out(key)
        if request is not None:
            self._steps.take(request.state, None)
        return request

    def _take_out(self, key: SampleKey) -> Request | None:
        if key in self._running:
            self._stand(key)
        elif key in self._waiting:
            del self._waiting[key]
            self.num_waiting -= 1
        return self._requests.pop(key, None)

    def _turn(self, request: Request, state: RequestState) -> None:
        self._steps.take(request.state, state)
        request.state = state

    def _run(self, key: SampleKey) -> None:
        self._running.add(key)
        self.num_running += 1
        self._num_training += not is_evaluation(key.group_id)

    def _stand(self, key: SampleKey) -> None:
        self._running.remove(key)
        self.num_running -= 1
        self._num_training -= not is_evaluation(key.group_id)

    def settle(self, state: SettledState) -> list[Request]:
        """Forget the groups that are settled now; those of their requests that ran."""
        ran: list[Request] = []
        for group_id in self._settled.newly(state, self._keys):
            for key in self._keys.pop(group_id):
                self._ended.pop(key, None)
                self._failed.pop(key, None)
                request = self.remove(key)
                if request is not None and request.is_running:
                    ran.append(request)
        return ran

    # --- looks ------------------------------------------------------------------------------------------------

    def current(self, key: SampleKey, attempt: int) -> Request | None:
        """This attempt, if it is here."""
        request = self._requests.get(key)
        return request if request is not None and request.issued.attempt == attempt else None

    @property
    def runs_only_evaluation(self) -> bool:
        """Whether something runs, and nothing of it is trained."""
        return bool(self._running) and not self._num_training

    def running(self) -> list[Request]:
        """In the order in which they came."""
        return [request for request in self._requests.values() if request.is_running]

    def waiting(self) -> list[Request]:
        """In the order in which they will be submitted."""
        return [self._requests[key] for key in self._waiting]

    def leases(self, *, are_paused: bool) -> tuple[HeldLease, ...]:
        """As the census hears of them; ``are_paused``: those that run stand still until new weights are there."""
        held = [
            HeldLease(
                key,
                request.issued.attempt,
                LeaseStage.RUNNING if request.is_running and not are_paused else LeaseStage.WAITING,
                request.num_tokens,
                request.response(),
            )
            for key, request in self._requests.items()
        ]
        return (*held, *self._failed.values())

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._running == {key for key, request in self._requests.items() if request.is_running}
        assert self.num_running == len(self._running)
        assert self._waiting.keys() == self._requests.keys() - self._running
        assert self.num_waiting == len(self._waiting)
        assert self._num_training == sum(1 for key in self._running if not is_evaluation(key.group_id))
        assert not (self._requests.keys() & self._failed.keys())
        assert self._failed.keys() <= self._ended.keys()
        for request in self._requests.values():
            assert request.num_tokens == sum(chunk.num_tokens for chunk in request.chunks), request
        known = {key for keys in self._keys.values() for key in keys}
        assert known == self._requests.keys() | self._ended.keys()
        assert not any(group_id in self._settled for group_id in self._keys)
