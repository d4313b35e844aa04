"""The reward ``reward_model``: the score of the run's own reward model.

Invariants:

* A reward model that is not there, or has no score, gives no reward; it is asked again until the deadline, as the
  supervisor replaces one that is lost.

| waits for | who ends it |
|---|---|
| the score | see :mod:`penstock.backends.rewards.service_client` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.run_endpoints import RunEndpoints
from penstock.backends.rewards.service_client import Endpoint, ServiceClient

if TYPE_CHECKING:
    from penstock.backends.engines.surroundings import Surroundings
    from penstock.backends.rewards.service_options import ModelScoreOptions

ROUTE: Final = "/score"


class ModelReward:
    """An ``async`` reward function with what it asks for, and how many calls run side by side."""

    names = ("messages", "prompt", "response", "group_id", "index")

    def __init__(self, options: ModelScoreOptions, surroundings: Surroundings) -> None:
        self.concurrency = options.max_concurrent
        self._run = RunEndpoints("reward_model", surroundings)
        self._client = ServiceClient(options, self._now, what="reward.reward_model", returns=True)

    def _now(self) -> list[Endpoint]:
        return [Endpoint(each.url + ROUTE, each.key) for each in self._run.now()]

    async def __call__(
        self, *, messages: list[dict[str, object]] | None, prompt: str, response: str, group_id: int, index: int
    ) -> object:
        """The score of one sample."""
        asked = {"messages": messages, "prompt": prompt, "response": response}
        return await self._client.ask(asked, request_id=f"{group_id}/{index}")
