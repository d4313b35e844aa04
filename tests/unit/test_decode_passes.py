"""What engines count of their decode passes, and what is fitted to it."""

from __future__ import annotations

import pytest

from penstock.backends.engines.decode_passes import (
    DISTURBED,
    READING,
    READING_DISTURBED,
    DecodeBand,
    DecodePasses,
    added_up,
    bands_in,
)
from penstock.runtime.prediction.passes_fit import fit_passes, fit_reading, slowed


def told(passes: DecodePasses) -> dict[str, float | None]:
    return {metric.name: metric.value for metric in passes.metrics()}


def timed(*loads: tuple[int, int, float, int]) -> list[DecodeBand]:
    """Of so many passes each, with so many requests, each of which holds so many tokens: by a known law."""
    passes = DecodePasses()
    for num_running, held, seconds, count in loads:
        for _ in range(count + 1):  # the first one does not count
            passes.add(num_running, num_running * held, seconds, seconds)
    return bands_in(told(passes))


def test_passes_are_counted_by_powers_of_two_without_the_first_of_each_number() -> None:
    passes = DecodePasses()
    assert passes.metrics() == ()
    for num_running, context_tokens, seconds in ((1, 10, 9.0), (3, 30, 9.0), (3, 33, 0.3), (2, 20, 9.0), (2, 22, 0.2)):
        passes.add(num_running, context_tokens, seconds, seconds)
    assert told(passes) == {
        "engine/decode/2/passes": 2.0,
        "engine/decode/2/passes_s": pytest.approx(0.5),
        "engine/decode/2/requests": 5.0,
        "engine/decode/2/context_tokens": 55.0,
        "engine/decode/2/wall_s": pytest.approx(0.5),
    }
    assert bands_in(told(passes)) == [DecodeBand(2, 2.0, 0.3 + 0.2, 5.0, 55.0, 0.3 + 0.2)]
    of_before = {name: value for name, value in told(passes).items() if "wall" not in name}
    assert bands_in(of_before) == [DecodeBand(2, 2.0, 0.3 + 0.2, 5.0, 55.0, 0.0)], "runs from before it was told"


def test_passes_that_waited_for_a_core_and_the_next_ones_are_counted_apart() -> None:
    passes = DecodePasses()
    for cpu_s, wall_s in ((9.0, 9.0), (0.3, 0.3), (0.6, 3.0), (0.5, 0.5), (0.3, 0.32), (0.3, 0.3)):
        passes.add(4, 40, cpu_s, wall_s)
    (alone,), (disturbed,) = bands_in(told(passes)), bands_in(told(passes), DISTURBED)
    assert alone == pytest.approx((4, 3, 0.9, 12, 120, 0.92, 0))
    assert disturbed == pytest.approx((4, 2, 1.1, 8, 80, 3.5, 0))


def test_passes_that_read_are_counted_apart_once_a_plain_one_with_as_many_requests_has_been() -> None:
    passes = DecodePasses()
    passes.add(4, 40, 9.0, 9.0, read_tokens=70)
    passes.add(4, 40, 9.0, 9.0)
    passes.add(4, 40, 0.5, 0.5, read_tokens=7)
    passes.add(4, 44, 0.6, 3.0, read_tokens=8)
    passes.add(4, 48, 0.4, 0.4)
    assert bands_in(told(passes), READING) == [DecodeBand(4, 1, 0.5, 4, 40, 0.5, 7)]
    assert bands_in(told(passes), READING_DISTURBED) == [DecodeBand(4, 1, 0.6, 4, 44, 3.0, 8)]
    assert bands_in(told(passes), DISTURBED) == [DecodeBand(4, 1, 0.4, 4, 48, 0.4)], "it came after one that waited"
    assert bands_in(told(passes)) == []


def test_what_reading_costs_is_what_passes_took_beyond_plain_ones_whichever_of_them_nothing_disturbed() -> None:
    fit = fit_passes(timed((1, 300, 0.4e-3, 60), (2, 90, 0.412e-3, 50), (32, 40, 0.772e-3, 90)))
    assert fit is not None
    # Those that admit a whole batch are disturbed; a pass has a price of its own, so theirs is dearer by the token.
    few = DecodeBand(32, 10, 10 * (0.772e-3 + 0.4e-3), 320, 12_800, 0.0, 10 * 8)
    batch = DecodeBand(32, 30, 30 * 1.5 * (0.772e-3 + 0.6e-3), 960, 38_400, 0.0, 30 * 120)
    slow = [DecodeBand(32, 100, 100 * 1.5 * 0.772e-3, 3200, 128_000)]
    assert fit_reading(fit, slow, [few], [batch]) == pytest.approx((10 * 0.4e-3 + 30 * 0.6e-3) / 3680, rel=0.02)
    assert fit_reading(fit, slow, [few], []) is None, "ten passes are too few"
    quick = few._replace(passes=30, seconds=0.0, requests=960, context_tokens=38_400)
    assert fit_reading(fit, [], [quick], []) == 0.0


def test_what_a_pass_costs_is_what_it_costs_undisturbed_and_all_of_them_say_how_much_slower_they_were() -> None:
    alone = [DecodeBand(1, 100, 0.1, 100, 1000, 0.1), DecodeBand(8, 50, 0.1, 400, 4000, 0.1)]
    disturbed = [DecodeBand(1, 100, 0.2, 100, 1000, 0.7), DecodeBand(8, 50, 0.2, 400, 4000, 0.9)]
    fit, found = fit_passes(alone, disturbed), slowed(alone, disturbed)
    assert fit is not None
    assert fit.values["token_s"] == pytest.approx(1e-3)
    assert found is not None
    assert (found.waits, found.cold) == pytest.approx((1.8 / 0.6, 0.6 / 0.4))
    # Where hardly any pass was undisturbed, all tell what one costs, so none of them was dearer than that.
    few = [alone[0], alone[1]._replace(passes=10, seconds=0.02, requests=80, context_tokens=800, wall_s=0.02)]
    fit, found = fit_passes(few, disturbed), slowed(few, disturbed)
    assert fit is not None
    assert fit.values["token_s"] == pytest.approx(1.5e-3)
    assert found is not None
    assert (found.waits, found.cold) == pytest.approx((1.72 / 0.52, 1.0))
    assert slowed([alone[0]._replace(wall_s=0.0)], disturbed) is None, "an engine did not tell"
    assert slowed([], []) is None


@pytest.mark.parametrize(
    "metrics",
    [
        {"engine/decode/2/passes": 2.0},
        {"engine/decode/x/passes": 2.0, "engine/running": 1.0},
        {"engine/decode/2/passes": 3.0, "engine/decode/2/passes_s": 1.0, "engine/decode/2/requests": 2.0},
        {"engine/decode/2/passes": None, "engine/decode/2/passes_s": 1.0, "engine/decode/2/requests": 2.0},
    ],
)
def test_bands_that_are_not_whole_are_left_out(metrics: dict[str, float | None]) -> None:
    assert bands_in(metrics) == []


def test_bands_of_several_engines_are_added_up() -> None:
    one, other = DecodeBand(4, 10, 1.0, 50, 500), DecodeBand(4, 30, 2.0, 130, 700)
    assert added_up([one, DecodeBand(1, 1, 1, 1, 1), other]) == [
        DecodeBand(1, 1, 1, 1, 1),
        DecodeBand(4, 40, 3.0, 180, 1200),
    ]


def test_a_known_law_is_found_though_nearly_all_passes_were_full() -> None:
    law = [(n, held, 0.4e-3 + (n - 1) * 12e-6) for n, held in ((1, 300), (2, 90), (5, 200), (32, 40))]
    counts = (60, 50, 40, 100_000)
    fit = fit_passes(timed(*((*each, count) for each, count in zip(law, counts, strict=True))))
    assert fit is not None
    assert fit.values["token_s"] == pytest.approx(0.4e-3, rel=0.01)
    assert fit.values["token_load_s"] == pytest.approx(12e-6, rel=0.01)
    assert (fit.fewest, fit.most) == (1, 32)
    assert fit.error < 0.001


def test_tokens_that_are_held_are_told_apart_where_they_decide() -> None:
    law = [(n, held, 0.4e-3 + n * held * 1e-6) for n, held in ((1, 4000), (2, 500), (5, 3000), (9, 100), (32, 900))]
    fit = fit_passes(timed(*((*each, 4000) for each in law)))
    assert fit is not None
    assert fit.values["context_token_s"] == pytest.approx(1e-6, rel=0.05)
    assert fit.values["token_load_s"] == pytest.approx(0.0, abs=5e-5)


def test_one_load_or_too_few_passes_tell_nothing() -> None:
    assert fit_passes([]) is None
    assert fit_passes(timed((32, 40, 1e-3, 9000))) is None
    assert fit_passes(timed((32, 40, 1e-3, 9000), (1, 40, 1e-3, 3))) is None


def test_passes_that_take_no_longer_with_more_requests_cost_the_same() -> None:
    fit = fit_passes(timed((1, 40, 1.1e-3, 100), (32, 40, 1e-3, 100)))
    assert fit is not None
    assert fit.values == {"token_s": pytest.approx(1.05e-3, rel=0.02), "token_load_s": 0, "context_token_s": 0}
    assert set(fit.dropped) == {"token_load_s", "context_token_s"}
