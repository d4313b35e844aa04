"""What the Scorer's workers have to do: the calls of reward functions that the backend has not answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.samples import SampleKey
from penstock.messages.training import Activity

if TYPE_CHECKING:
    from penstock.actors.settled import KnownSettled


class Workload:
    """Open calls, and how many workers they keep busy. A worker has at most one of them."""

    def __init__(self, workers: tuple[int, ...]) -> None:
        """``workers``: of each function, how many calls it takes at once; a sample is a call of each."""
        self._workers = workers
        self._num_workers = max(1, sum(workers))
        self.calls: set[SampleKey | int] = set()
        """Samples, and ids of groups that are scored whole."""
        self.has_started = False

    @property
    def activity(self) -> Activity:
        """What the time of the workers, taken together, is spent on."""
        if not self.has_started:
            return Activity.STARTING
        return Activity.WORKING if self.calls else Activity.WAITING_FOR_SAMPLES

    @property
    def occupancy(self) -> float:
        """Workers that have a call ÷ all workers."""
        num_calls = len(self.calls)
        return sum([min(number, num_calls) for number in self._workers]) / self._num_workers

    def forget(self, settled: KnownSettled) -> None:
        """These groups are settled: nobody waits for what is still computed about them."""
        group_ids = ((call, call.group_id if isinstance(call, SampleKey) else call) for call in self.calls)
        self.calls -= {call for call, group_id in group_ids if group_id in settled}
