"""How a learner's time is divided between training, other work and waiting."""

from __future__ import annotations

import pytest

from penstock.backends.learners.training.metrics import StepTimes


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_step_is_training_other_work_and_waiting() -> None:
    clock = Clock()
    times = StepTimes(clock, lambda: clock.now_s / 2)
    clock.now_s += 50
    with times.at_work():
        clock.now_s += 7  # loads the model, which is no step's time
        times.begin()
    for wait_s, train_s, publish_s in ((2.0, 3.0, 1.0), (0.0, 4.0, 0.0)):
        clock.now_s += wait_s
        with times.at_work():
            clock.now_s += publish_s
        clock.now_s += wait_s
        with times.at_work():
            clock.now_s += train_s
            figures = times.end()
        step_s = 2 * wait_s + publish_s + train_s
        assert figures == {
            "perf/train_time": train_s,
            "perf/train_cpu_time": train_s / 2,
            "perf/train_wait_time": 2 * wait_s,
            "perf/step_time": step_s,
            "perf/wait_time_ratio": pytest.approx(2 * wait_s / step_s),
        }


def test_what_failed_counts_as_work_as_well() -> None:
    clock = Clock()
    times = StepTimes(clock, lambda: clock.now_s / 2)

    def fail() -> None:
        with times.at_work():
            clock.now_s += 5
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    clock.now_s += 1
    with times.at_work():
        assert times.end()["perf/train_wait_time"] == 1.0
