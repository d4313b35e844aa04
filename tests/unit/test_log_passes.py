"""What the log of an SGLang server tells of its decode passes, and which stretches of it count."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from penstock.backends.engines.decode_passes import bands_in
from penstock.backends.engines.served.base.log_passes import UNREADABLE, LogPasses
from penstock.backends.engines.served.base.settings import Decoded, Told
from penstock.backends.engines.served.sglang import log_lines
from penstock.backends.engines.served.sglang.log_lines import passes_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.engines.decode_passes import DecodeBand
    from penstock.backends.engines.served.base.launched import LaunchedServer

RECORDED = Path(__file__).parents[1] / "backends" / "sglang_replies" / "passes.log"
"""Of SGLang 0.5.23 on a CPU with ``--decode-log-interval 10``, from when it was ready: a short request, a long one
alone, and then five."""
PER_LINE = 10
READ = (
    "[2026-11-28 05:20:11] Prefill batch, #new-seq: 1, #new-token: 24, #cached-token: 0, token usage: 0.00, "
    "#running-req: 0, #queue-req: 0, #pending-token: 0, cpu graph: False, input throughput (token/s): 3.21"
)


def decoded(num_running: int, num_tokens: int, pass_s: float) -> str:
    """As the server would say it of passes that took so long each."""
    return (
        f"[2026-11-28 05:20:11 TP0] Decode batch, #running-req: {num_running}, #token: {num_tokens}, "
        f"token usage: 0.01, cpu graph: False, gen throughput (token/s): {num_running / pass_s:.2f}, #queue-req: 0"
    )


class Log:
    """A log that is followed."""

    def __init__(self, held: Sequence[int] = ()) -> None:
        self.passes = LogPasses(lambda: held)
        self.server = cast("LaunchedServer", SimpleNamespace(settings=SimpleNamespace(log_words=log_lines)))
        self.passes.follow(self.server, PER_LINE)

    def say(self, *lines: str) -> None:
        assert self.server.on_line is not None
        for line in lines:
            self.server.on_line(line)

    @property
    def told(self) -> dict[str, float | None]:
        return {metric.name: metric.value for metric in self.passes.metrics()}

    @property
    def bands(self) -> list[DecodeBand]:
        return bands_in(self.told)


def test_a_stretch_between_two_lines_with_as_many_requests_counts() -> None:
    log = Log()
    log.say(READ, decoded(3, 300, 9.0), decoded(3, 330, 0.02), decoded(3, 360, 0.03))
    [band] = log.bands
    assert (band.least, band.passes, band.requests, band.context_tokens) == (2, 20, 60, 10 * 315 + 10 * 345)
    assert band.seconds == pytest.approx(0.5, rel=1e-3)
    log.say(decoded(2, 240, 0.5), decoded(2, 0, 0.01))
    [band] = log.bands
    assert (band.least, band.passes, band.requests, band.context_tokens) == (2, 30, 80, 10 * (315 + 345 + 250))
    assert band.seconds == pytest.approx(0.6, rel=1e-3)


@pytest.mark.parametrize(
    "between",
    [
        (READ,),
        (decoded(4, 400, 0.02), decoded(3, 300, 0.02), decoded(2, 200, 0.02)),
        ("[2026-11-28 05:20:11] Decode batch, #running-req: 3, in words of another version",),
        (decoded(0, 0, 1.0),),
    ],
)
def test_a_stretch_in_which_anything_else_went_on_does_not_count(between: tuple[str, ...]) -> None:
    log = Log()
    log.say(decoded(3, 300, 0.02), *between, decoded(3, 330, 0.02))
    assert log.bands == []
    log.say(decoded(3, 360, 0.02))
    assert [band.passes for band in log.bands] == [PER_LINE]


def test_a_stretch_in_which_few_of_many_ended_counts_with_the_mean() -> None:
    log = Log()
    log.say(decoded(32, 3200, 0.02), decoded(28, 2800, 0.02), decoded(32, 3200, 0.02), decoded(24, 2400, 0.02))
    [band] = log.bands
    assert (band.least, band.passes, band.requests, band.context_tokens) == (16, 10, 300, 10 * (3000 + 150))
    assert band.seconds == pytest.approx(10 * 30 / (28 / 0.02), rel=1e-3)


def test_lines_about_something_else_may_come_between() -> None:
    log = Log()
    log.say(decoded(3, 300, 0.02), "", "[2026-11-28 05:20:11] Cache flushed successfully!", decoded(3, 330, 0.02))
    assert [band.passes for band in log.bands] == [PER_LINE]


def test_neither_a_stretch_with_a_call_in_it_nor_one_that_began_before_it_counts() -> None:
    log = Log()
    log.say(decoded(3, 300, 0.02))
    with log.passes.held_up(), log.passes.held_up():
        log.say(decoded(3, 330, 7.0), decoded(3, 360, 7.0))
    log.say(decoded(3, 390, 7.0))
    assert log.bands == []
    log.say(decoded(3, 420, 0.02))
    assert [band.seconds for band in log.bands] == [pytest.approx(0.2)]


def test_prefixes_that_are_shared_count_for_each_request_that_is_known_here() -> None:
    log = Log(held=(300, 500, 100))
    log.say(decoded(3, 300, 0.02), decoded(3, 2000, 0.02), decoded(3, 0, 0.02))
    assert [band.context_tokens for band in log.bands] == [10 * (900 + 15) + 10 * (2000 + 15)]


def test_what_more_requests_have_told_than_a_late_line_names_does_not_count() -> None:
    log = Log(held=(300, 500, 100))
    log.say(decoded(2, 300, 0.02), decoded(2, 340, 0.02))
    assert [band.context_tokens for band in log.bands] == [10 * (300 + 10)]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (READ, Told.READ),
        ("[2024-11-30 05:10:04 TP0] Prefill batch. #new-seq: 1, #new-token: 4", Told.READ),
        (
            "[2024-11-30 05:10:04 TP0] Decode batch. #running-req: 1, #token: 234, token usage: 0.00, gen throughput "
            "(token/s): 147.64, #queue-req: 0",
            Decoded(1, 234, 147.64),
        ),
        (
            "[2026-09-27 00:15:25] Decode batch, #running-req: 10, #cached-token: 7, #full token: 685000, full token "
            "usage: 0.49, mamba num: 12, accept len: 2.77, gen throughput (token/s): 8.44, #queue-req: 0",
            Decoded(10, 685000, 8.44),
        ),
        ("[2026-09-27 00:15:25] Decode batch, #running-req: 2, gen throughput (token/s): 80", Decoded(2, 0, 80.0)),
        ("[2026-09-27 00:15:25] Decode batch, #running-req: 2", Told.UNREADABLE),
        ("[2026-09-27 00:15:25] Decode batch, gen throughput (token/s): 8.44", Told.UNREADABLE),
        ("[2026-09-27 00:15:25] Decode batch, #running-req: -1, gen throughput (token/s): 8.4", Told.UNREADABLE),
        ("[2026-09-27 00:15:25] Decode batch, #running-req: 2, gen throughput (token/s): nan", Told.UNREADABLE),
        ("[2026-09-27 00:15:25] Decode batch, #running-req: 2, gen throughput (token/s): 1.2.3", Told.UNREADABLE),
        (f"[2026-09-27 00:15:25] Decode batch, #running-req: {'9' * 400}", Told.UNREADABLE),
        (
            f"[2026-09-27 00:15:25] Decode batch, #running-req: 1, gen throughput (token/s): {'9' * 400}",
            Told.UNREADABLE,
        ),
        ("Decode batch, #running-req: 1, #token: 234, gen throughput (token/s): 147.64", None),
        ("[2026-09-27 00:15:25] Receive: 'Decode batch, #running-req: 1, gen throughput (token/s): 1.0'", None),
    ],
)
def test_lines_of_every_version_are_read_or_seen_to_be_unreadable(line: str, told: Decoded | Told | None) -> None:
    assert passes_in(line) == told
    log = Log()
    log.say(line)
    assert log.told == {UNREADABLE: float(told is Told.UNREADABLE)}


def test_what_a_server_has_written_is_read_whole() -> None:
    log = Log()
    lines = RECORDED.read_text().splitlines()
    log.say(*lines)
    told = [passes_in(line) for line in lines]
    assert (told.count(Told.READ), sum(isinstance(each, Decoded) for each in told)) == (4, 13)
    assert log.told[UNREADABLE] == 0
    alone, five = log.bands
    assert (alone.least, alone.passes, alone.requests) == (1, 60, 60)
    assert (five.least, five.passes, five.requests) == (4, 50, 250)
    rates = (312.29, 382.89, 399.89, 422.93, 342.67, 409.97), (1420.66, 1558.09, 1347.89, 1412.57, 1418.29)
    assert alone.seconds == pytest.approx(sum(10 / rate for rate in rates[0]))
    assert five.seconds == pytest.approx(sum(50 / rate for rate in rates[1]))
    assert alone.context_tokens == 10 * sum(held + 5 for held in (8, 18, 28, 38, 48, 58))


def test_an_engine_whose_log_is_not_followed_tells_nothing() -> None:
    assert LogPasses(list).metrics() == ()
