"""The reward ``remote``: a service that is sent samples as JSON and answers with rewards.

One sample is an object with the fields that the scenario names, the answer a number or an object with the reward under
``reward`` or ``score`` (or ``reward.key``). A batch is a list of such objects, the answer a list of as many results. A
group (``reward.per_group``) is one object with lists, the answer a list too.

Invariants:

* Samples of a batch that fails all have the same reason.

| waits for | who ends it |
|---|---|
| further samples of a batch | ``batch_wait_s`` after the first one |
| the service | see :mod:`penstock.backends.rewards.service_client` |
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.rewards.functions import NAMES, REWARD, SAMPLE_LISTS, NoRewardError
from penstock.backends.rewards.service_client import Endpoint, ServiceClient

if TYPE_CHECKING:
    from penstock.backends.rewards.service_options import RemoteOptions

LISTS: Final = {one: many for many, one in SAMPLE_LISTS.items()}
WHICH: Final = ("group_id", "index")
"""Asked for so that a request has a name of its own."""


class RemoteReward:
    """An ``async`` reward function with what it asks for, and how many calls run side by side."""

    def __init__(self, options: RemoteOptions, *, is_group: bool) -> None:
        if not options.url:
            raise UserCodeError("reward.remote.url: the reward 'remote' needs the address that samples are posted to")
        unknown = [name for name in options.fields if name not in NAMES[REWARD]]
        if unknown:
            raise UserCodeError(
                f"reward.remote.fields: expected any of {', '.join(NAMES[REWARD])}, got {', '.join(unknown)}"
            )
        self._options = options
        self._is_group = is_group
        self._fields = tuple(LISTS.get(name, name) if is_group else name for name in options.fields)
        which = tuple(LISTS.get(name, name) if is_group else name for name in WHICH)
        self.names = tuple(dict.fromkeys((*self._fields, *which)))
        self._client = ServiceClient(options, lambda: (Endpoint(options.url),), what="reward.remote")
        self.concurrency = options.max_concurrent * (1 if is_group else options.batch_size)
        self._waiting: list[tuple[dict[str, object], str, asyncio.Future[object]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, **given: object) -> object:
        """The result for one sample, or for one group."""
        body = {name: given[name] for name in self._fields}
        if self._is_group:
            return await self._client.ask(body, request_id=str(given["group_id"]))
        request_id = f"{given['group_id']}/{given['index']}"
        if self._options.batch_size == 1:
            return await self._client.ask(body, request_id=request_id)
        loop = asyncio.get_running_loop()
        result: asyncio.Future[object] = loop.create_future()
        self._waiting.append((body, request_id, result))
        if len(self._waiting) >= self._options.batch_size:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(self._options.batch_wait_s, self._send)
        return await result

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        if batch:
            task = asyncio.create_task(self._ask_all(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask_all(self, batch: list[tuple[dict[str, object], str, asyncio.Future[object]]]) -> None:
        request_id = f"{batch[0][1]} and {len(batch) - 1} others"
        try:
            answer = await self._client.ask([body for body, _, _ in batch], request_id=request_id)
        except NoRewardError as error:
            _settle(batch, [error] * len(batch))
            return
        results: list[object] = cast("list[object]", answer) if isinstance(answer, list) else []
        if len(results) != len(batch):
            found = f"{len(results)} results" if isinstance(answer, list) else "no list"
            problem = NoRewardError(f"reward.remote: {found} for {len(batch)} samples; expected a list of as many")
            _settle(batch, [problem] * len(batch))
            return
        _settle(batch, results)


def _settle(batch: list[tuple[dict[str, object], str, asyncio.Future[object]]], results: list[object]) -> None:
    for (_, _, waiting), result in zip(batch, results, strict=True):
        if waiting.done():  # its own time was up
            continue
        if isinstance(result, NoRewardError):
            waiting.set_exception(result)
        else:
            waiting.set_result(result)
