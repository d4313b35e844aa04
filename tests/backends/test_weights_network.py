"""Weights over the network: only what has changed comes, and whatever goes wrong on the way, they are the learner's."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import os
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec
import pytest
import torch
from changing_weights import export_after, weights_after

from penstock.backends.weights import network, pulled
from penstock.backends.weights.changes_kept import ChangesKept
from penstock.backends.weights.fetched import checked_digest
from penstock.backends.weights.network import Landing
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.pushing import PushExporter
from penstock.backends.weights.service_messages import (
    ReadChanges,
    ServiceAddress,
    address_in,
    location_of,
    publish_of,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping


NUM_WEIGHTS = 3_000_000
PIECE_BYTES = 1 << 20


@pytest.fixture
def exporter() -> Generator[PushExporter]:
    opened = PushExporter("network", 1, "127.0.0.1")
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulled, "READ_BYTES", PIECE_BYTES)


weights = partial(weights_after, num_weights=NUM_WEIGHTS)
export = partial(export_after, num_weights=NUM_WEIGHTS)


def check(found: Mapping[str, torch.Tensor], version: int) -> None:
    assert found.keys() == weights(version).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(version).items())


def bytes_logged(caplog: pytest.LogCaptureFixture) -> list[int]:
    """What came for each version."""
    return [cast("tuple[int, int, int]", record.args)[1] for record in caplog.records if "came over" in record.msg]


def test_a_version_comes_whole_and_the_next_ones_as_what_has_changed(
    exporter: PushExporter, caplog: pytest.LogCaptureFixture
) -> None:
    landing = Landing()
    with caplog.at_level("INFO", logger=network.__name__):
        for version in range(3):
            check(landing.fetch(export(exporter, version)).tensors, version)
    whole, *changed = bytes_logged(caplog)
    assert whole >= 2 * NUM_WEIGHTS
    assert max(changed) < 0.01 * whole


def test_what_has_landed_already_is_not_asked_for_again(
    exporter: PushExporter, caplog: pytest.LogCaptureFixture
) -> None:
    landing, manifest = Landing(), export(exporter, 0)
    with caplog.at_level("INFO", logger=network.__name__):
        assert landing.land(manifest) is landing.land(manifest)
    assert len(bytes_logged(caplog)) == 1


def test_an_engine_that_slept_past_a_release_takes_all(
    exporter: PushExporter, caplog: pytest.LogCaptureFixture
) -> None:
    landing = Landing()
    landing.fetch(export(exporter, 0))
    export(exporter, 1)
    manifest = export(exporter, 2)
    exporter.release(2)
    with caplog.at_level("INFO", logger=network.__name__):
        check(landing.fetch(manifest).tensors, 2)
    assert bytes_logged(caplog) == [manifest.size_bytes]


def test_the_first_version_of_the_next_learner_comes_whole(exporter: PushExporter) -> None:
    landing = Landing()
    landing.fetch(export(exporter, 0))
    second = PushExporter("network", 2, "127.0.0.1")
    try:
        check(landing.fetch(export(second, 1)).tensors, 1)
    finally:
        second.close()


def test_bytes_that_somebody_wrote_into_are_found_and_all_is_taken_again(
    exporter: PushExporter, caplog: pytest.LogCaptureFixture
) -> None:
    landing = Landing()
    landing.fetch(export(exporter, 0)).tensors["model.norm.weight"].fill_(9.0)
    check(landing.fetch(export(exporter, 1)).tensors, 1)
    assert "version 1 is taken whole, as its changes did not do" in caplog.text
    assert "they were changed on the way" in caplog.text


def test_a_version_lives_as_long_as_somebody_has_it_open(exporter: PushExporter) -> None:
    landing = Landing()
    first = landing.land(export(exporter, 0))
    descriptor, digest = first.opened(), first.digest
    kept = landing.fetch(export(exporter, 1)).tensors
    landing.land(export(exporter, 2))
    del first
    assert os.fstat(descriptor).st_size > 2 * NUM_WEIGHTS
    with os.fdopen(descriptor, "rb") as file:
        assert checked_digest(export(exporter, 0), memoryview(file.read())) == digest
    check(kept, 1)


def test_a_line_that_breaks_is_made_anew_and_goes_on_with_what_is_missing(exporter: PushExporter) -> None:
    manifest = export(exporter, 0)
    with Cutting(address_in(manifest), after_bytes=3 * PIECE_BYTES // 2, num_cuts=2) as cutting:
        manifest = msgspec.structs.replace(manifest, location=location_of(cutting.address))
        data = memoryview(bytearray(manifest.size_bytes))
        came = pulled.pull(manifest, data)
        assert cutting.num_connections == 3
    assert came.size_bytes == manifest.size_bytes  # nothing twice
    assert checked_digest(manifest, data) == manifest.digest


def test_a_line_that_breaks_again_and_again_is_given_up(exporter: PushExporter) -> None:
    manifest = export(exporter, 0)
    with Cutting(address_in(manifest), after_bytes=PIECE_BYTES, num_cuts=100) as cutting:
        manifest = msgspec.structs.replace(manifest, location=location_of(cutting.address))
        with pytest.raises(WeightFetchError, match="the connection to the learner's weight service broke"):
            pulled.pull(manifest, memoryview(bytearray(manifest.size_bytes)))
        assert cutting.num_connections == pulled.MAX_LINES


def test_changes_are_worked_out_once_for_all_engines(exporter: PushExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    worked_out: list[int] = []
    plain = ChangesKept._worked_out

    def counted(kept: ChangesKept, request: ReadChanges, after: torch.Tensor) -> object:
        worked_out.append(request.start)
        return plain(kept, request, after)

    monkeypatch.setattr(ChangesKept, "_worked_out", counted)
    landings = [Landing(), Landing()]
    first, second = export(exporter, 0), export(exporter, 1)
    for landing in landings:
        landing.fetch(first)
    for landing in landings:
        check(landing.fetch(second).tensors, 1)
    assert sorted(worked_out) == sorted(set(worked_out))


def test_changes_from_the_middle_of_a_word_are_refused(exporter: PushExporter) -> None:
    manifest = export(exporter, 1)
    request = ReadChanges(publish=publish_of(manifest), since=publish_of(manifest), start=1, size_bytes=2)
    with pytest.raises(WeightFetchError, match="from byte 1 on, which no word begins at"):
        ChangesKept(exporter._shelf).of(request, torch.zeros(2, dtype=torch.uint8))


class Cutting:
    """A relay to the service that cuts its first connections after so many bytes; a context manager."""

    def __init__(self, address: ServiceAddress, *, after_bytes: int, num_cuts: int) -> None:
        host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
        self._service = (host, int(port))
        self._after_bytes = after_bytes
        self._num_cuts = num_cuts
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.num_connections = 0
        endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.address = msgspec.structs.replace(address, endpoint=endpoint)

    def __enter__(self) -> Cutting:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            self.num_connections += 1
            far = socket.create_connection(self._service)
            is_cut = self.num_connections <= self._num_cuts
            threading.Thread(target=_relay, args=(near, far, None), daemon=True).start()
            left = self._after_bytes if is_cut else None
            threading.Thread(target=_relay, args=(far, near, left), daemon=True).start()


def _relay(source: socket.socket, target: socket.socket, left: int | None) -> None:
    with contextlib.suppress(OSError):  # of a cut
        while data := source.recv(65536):
            target.sendall(data)
            left = None if left is None else left - len(data)
            if left is not None and left <= 0:
                break
    for each in (source, target):
        with contextlib.suppress(OSError):  # the other end may have done so
            each.shutdown(socket.SHUT_RDWR)
