"""Weights from engine to engine: the learner sends each piece about once, and whatever an engine gives or does not,
what lands is the learner's."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import pytest
from changing_weights import export_after, weights_after

from penstock.backends.weights import gathered
from penstock.backends.weights.digest import PIECE_BYTES, digest_of
from penstock.backends.weights.keyed_service import Client
from penstock.backends.weights.landed import Landed, PieceService
from penstock.backends.weights.network import Landing
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.pushing import PushExporter
from penstock.backends.weights.service_messages import PublishId, Read, ServiceAddress, location_of
from penstock.messages.weights import WeightSource

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from penstock.backends.weights.service_messages import Changed, Piece
    from penstock.messages.weights import WeightManifest

NUM_WEIGHTS = 16 * (1 << 20)
"""Four pieces and a little."""
NUM_PIECES = 5


@pytest.fixture
def exporter() -> Generator[PushExporter]:
    opened = PushExporter("network", 1, "127.0.0.1")
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def long_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with other work nobody is late for that."""
    monkeypatch.setattr(gathered, "LEAST_GRACE_S", 60.0)


weights = partial(weights_after, num_weights=NUM_WEIGHTS)
export = partial(export_after, num_weights=NUM_WEIGHTS)


class Giving(PieceService):
    """A source that has some pieces, and ends when it has given one."""

    def __init__(self, manifest: WeightManifest, right: Landed, num_pieces: int) -> None:
        self._gave = threading.Event()
        landed = Landed(right.publish, manifest.size_bytes)
        landed.mapping[:] = right.mapping[:]
        landed.here.update(range(0, num_pieces * PIECE_BYTES, PIECE_BYTES))
        super().__init__("127.0.0.1", lambda _: landed)
        self.source = WeightSource("engine/9", 0, location_of(self.address))
        self._ending = threading.Thread(target=self._end)
        self._ending.start()

    def _pass_on(self, client: Client, reply: Piece | Changed, data: memoryview[int] | bytes) -> None:
        super()._pass_on(client, reply, data)
        self._gave.set()

    def _end(self) -> None:
        assert self._gave.wait(10.0)
        self.close()


class Swarm:
    """Engines that pass on to each other; a context manager."""

    def __init__(self, num_engines: int) -> None:
        self.landings = [Landing() for _ in range(num_engines)]
        self.sources = tuple(
            WeightSource(f"engine/{index}", 0, landing.pass_on(f"engine/{index}", "127.0.0.1"))
            for index, landing in enumerate(self.landings)
        )

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_: object) -> None:
        for landing in self.landings:
            landing.stop()

    def told(self, manifest: WeightManifest, *names: int) -> WeightManifest:
        """With these sources; all, if none is named."""
        sources = [self.sources[index] for index in names] or self.sources
        return msgspec.structs.replace(manifest, sources=tuple(sources))

    def take(self, manifest: WeightManifest, engines: Sequence[int]) -> list[Landed]:
        """These engines at once."""
        with ThreadPoolExecutor(len(engines)) as pool:
            under_way = [pool.submit(self.landings[index].land, manifest) for index in engines]
            return [each.result() for each in under_way]


def learner_bytes(caplog: pytest.LogCaptureFixture) -> list[int]:
    """What came from the learner, for each fetch."""
    logged = [record.args for record in caplog.records if "from the learner and" in record.msg]
    return [size for args in logged if isinstance(args, tuple) and isinstance(size := args[1], int)]


def is_version(landed: Landed, manifest: WeightManifest) -> bool:
    return digest_of(memoryview(landed.mapping)) == manifest.digest == landed.digest


def test_the_learner_sends_each_piece_once_to_engines_that_fetch_together(
    exporter: PushExporter, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = export(exporter, 0)
    with Swarm(4) as swarm, caplog.at_level("INFO"):
        landed = swarm.take(swarm.told(manifest), range(4))
        assert all(is_version(each, manifest) for each in landed)
        assert sum(learner_bytes(caplog)) == manifest.size_bytes
        passed_on = sum(landing.passed_on_bytes for landing in swarm.landings)
        assert passed_on == 3 * manifest.size_bytes
        assert not any(landing.detours_of(0) for landing in swarm.landings)


def test_changes_are_passed_on_as_they_came(exporter: PushExporter, caplog: pytest.LogCaptureFixture) -> None:
    with Swarm(3) as swarm, caplog.at_level("INFO"):
        swarm.take(swarm.told(export(exporter, 0)), range(3))
        whole = sum(learner_bytes(caplog))
        caplog.clear()
        manifest = export(exporter, 1)
        assert all(is_version(each, manifest) for each in swarm.take(swarm.told(manifest), range(3)))
        assert 0 < sum(learner_bytes(caplog)) < 0.01 * whole
        assert sum(landing.passed_on_bytes for landing in swarm.landings) < 2.1 * whole


def test_who_comes_later_takes_most_from_those_who_have_it(
    exporter: PushExporter, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = export(exporter, 0)
    with Swarm(3) as swarm, caplog.at_level("INFO"):
        swarm.landings[0].land(manifest)  # all from the learner
        swarm.landings[1].land(swarm.told(manifest, 0, 1))
        assert is_version(swarm.landings[2].land(swarm.told(manifest, 0, 1, 2)), manifest)
        second, third = learner_bytes(caplog)
        assert second == 2 * PIECE_BYTES
        assert third <= PIECE_BYTES


def test_who_had_another_version_takes_the_changes_from_the_learner(
    exporter: PushExporter, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = export(exporter, 0), export(exporter, 1)
    with Swarm(2) as swarm, caplog.at_level("INFO"):
        swarm.landings[0].land(second)  # it knows of no changes
        swarm.landings[1].land(first)
        assert is_version(swarm.landings[1].land(swarm.told(second, 0, 1)), second)
        assert learner_bytes(caplog) == [pytest.approx(0, abs=0.01 * second.size_bytes)]
        assert swarm.landings[1].detours_of(1) == ()  # nobody is at fault


def test_what_a_source_that_has_ended_was_to_give_comes_from_the_learner(exporter: PushExporter) -> None:
    manifest = export(exporter, 0)
    with Swarm(3) as swarm:
        swarm.landings[1].stop()
        landed = swarm.take(swarm.told(manifest), (0, 2))
        assert all(is_version(each, manifest) for each in landed)
        for index in (0, 2):
            (detour,) = swarm.landings[index].detours_of(0)
            assert (detour.engine, detour.epoch, detour.is_wrong) == ("engine/1", 0, False)
            assert "the connection to it broke" in detour.cause
        assert swarm.landings[0].detours_of(0) == ()  # told once


def test_a_source_that_ends_in_the_middle_is_done_without(exporter: PushExporter) -> None:
    manifest = export(exporter, 0)
    with Swarm(2) as swarm:
        giving = Giving(manifest, swarm.landings[1].land(manifest), num_pieces=1)
        told = msgspec.structs.replace(manifest, sources=(giving.source, swarm.sources[0]))
        assert is_version(swarm.landings[0].land(told), manifest)
        (detour,) = swarm.landings[0].detours_of(0)
        assert (detour.engine, giving.num_bytes) == ("engine/9", PIECE_BYTES)
        assert "the connection to it broke" in detour.cause


def test_a_source_that_says_nothing_has_its_grace_and_no_more(
    exporter: PushExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "LEAST_GRACE_S", 1.0)
    manifest = export(exporter, 0)
    with Swarm(2) as swarm:  # the other has not been told, and never fetches
        assert is_version(swarm.landings[0].land(swarm.told(manifest)), manifest)
        (detour,) = swarm.landings[0].detours_of(0)
        assert detour.engine == "engine/1"
        assert "late with its pieces" in detour.cause


def test_wrong_bytes_of_a_source_are_not_used_and_not_passed_on(
    exporter: PushExporter, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = export(exporter, 0)
    with Swarm(3) as swarm, caplog.at_level("INFO"):
        spoilt = swarm.landings[0].land(manifest)
        for start in range(0, manifest.size_bytes, PIECE_BYTES):
            spoilt.piece(start)[-1] ^= 1
        landed = swarm.take(swarm.told(manifest), (1, 2))
        assert all(is_version(each, manifest) for each in landed)
        for index in (1, 2):
            (detour,) = swarm.landings[index].detours_of(0)
            assert (detour.engine, detour.is_wrong) == ("engine/0", True)


def test_wrong_changes_of_a_source_are_told_from_a_wrong_version_of_ones_own(exporter: PushExporter) -> None:
    first, second = export(exporter, 0), export(exporter, 1)
    with Swarm(2) as swarm:
        swarm.take(swarm.told(first), (0, 1))
        changed = swarm.landings[0].land(swarm.told(second, 0))
        start = next(iter(changed.changes))
        changed.changes[start] = changed.changes[NUM_PIECES // 2 * PIECE_BYTES]  # of another piece
        assert is_version(swarm.landings[1].land(swarm.told(second, 0, 1)), second)
        assert [detour.is_wrong for detour in swarm.landings[1].detours_of(1)] == [True]


def test_a_version_of_ones_own_that_was_written_into_is_nobody_elses_fault(exporter: PushExporter) -> None:
    first, second = export(exporter, 0), export(exporter, 1)
    with Swarm(2) as swarm:
        _, mine = swarm.take(swarm.told(first), (0, 1))
        swarm.landings[0].land(swarm.told(second, 0))
        for start in range(0, first.size_bytes, PIECE_BYTES):
            mine.piece(start)[-1] ^= 1
        assert is_version(swarm.landings[1].land(swarm.told(second, 0, 1)), second)
        assert swarm.landings[1].detours_of(1) == ()


def test_a_service_that_is_none_is_done_without(exporter: PushExporter) -> None:
    manifest = export(exporter, 0)
    with Swarm(1) as swarm:
        told = msgspec.structs.replace(manifest, sources=(*swarm.sources, WeightSource("engine/7", 3, "nowhere")))
        assert is_version(swarm.landings[0].land(told), manifest)
        (detour,) = swarm.landings[0].detours_of(0)
        assert (detour.engine, detour.epoch) == ("engine/7", 3)


def test_without_the_key_nobody_is_answered(exporter: PushExporter) -> None:
    manifest = export(exporter, 0)
    with Swarm(3) as swarm:
        swarm.landings[1].land(manifest)
        addresses = [msgspec.json.decode(source.location, type=ServiceAddress) for source in swarm.sources]
        keys = {"client_public": addresses[2].client_public, "client_secret": addresses[2].client_secret}
        stranger = location_of(msgspec.structs.replace(addresses[1], **keys))
        sources = (swarm.sources[0], WeightSource("engine/1", 0, stranger))
        landed = swarm.landings[0].land(msgspec.structs.replace(manifest, sources=sources))
        assert is_version(landed, manifest)
        assert swarm.landings[1].passed_on_bytes == 0


def test_pieces_that_are_none_are_refused() -> None:
    landed = Landed(PublishId(1, 0, 0), PIECE_BYTES + 3)
    service = PieceService("127.0.0.1", lambda _: landed)
    try:
        none = ((1, PIECE_BYTES), (0, PIECE_BYTES - 1), (-PIECE_BYTES, PIECE_BYTES), (PIECE_BYTES, 4))
        for start, size_bytes in none:
            request = Read(publish=landed.publish, start=start, size_bytes=size_bytes)
            with pytest.raises(WeightFetchError, match="are no piece"):
                service._is_answered(Client(b"", b""), request)
    finally:
        service.close()


def test_the_end_of_the_learner_ends_the_fetch_and_says_so(exporter: PushExporter) -> None:
    manifest = export(exporter, 0)
    exporter.close()
    with (
        Swarm(2) as swarm,
        pytest.raises(WeightFetchError, match="connection to the learner's weight service broke"),
    ):
        swarm.landings[0].land(swarm.told(manifest))
