"""Peers that replay, make things up, or are not who they say: no actor dies, nothing enters, counters tell.

Strangers without keys, garbage and given-up incarnations are in ``test_host_wire.py``. Whoever holds the keys of the
run may speak for anybody in it: the keys are the border, and what lies within it is checked against mistakes.
"""

from __future__ import annotations

import signal
import socket
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import msgspec
import pytest
from host_echo import ENGINE, NAMES, RunPlan, inbox_union, prompt_of, sample_of
from host_harness import EchoRun
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.messages.flow import SampleGenerated
from penstock.messages.names import BUFFER, FILTER, LEARNER, PROMPT_SOURCE, SCORER, SUPERVISOR
from penstock.messages.wire import Header, InboxDecoder, WireError, encode_pack
from penstock.runtime.hosts.processes.control import Address, DirectoryChanged, ProcessControl
from penstock.runtime.hosts.processes.links import Links
from penstock.runtime.hosts.processes.ports import OutcomeKind
from penstock.runtime.observability.metrics_server import TOKEN_FILE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from host_launched import Launched

    from penstock.messages.base import Event
    from penstock.runtime.hosts.processes.ports import ProcessHost


ENDLESS = RunPlan(num_groups=10_000_000)
TARGETS = (SCORER, FILTER, BUFFER, PROMPT_SOURCE, LEARNER, ENGINE)
NUM_FUZZED = 250
NUM_REPLAYS = 40
FORGED_GROUP = 9_999_999
CONNECT_TIMEOUT_S = 10.0


def generated(group_id: int) -> SampleGenerated:
    return SampleGenerated(sample=sample_of(group_id, 8), group_size=1, prompt=prompt_of(group_id))


def frame(event: Event, *, sender: str = ENGINE, epoch: int = 1, message_id: int = 1) -> bytes:
    return encode_pack([(Header(sender, epoch, message_id, message_id, 0), event)])


def play(run: EchoRun, attack: Callable[[EchoRun], None], is_counted: Callable[[EchoRun], bool]) -> None:
    """Let some groups through, attack once, wait until the counters tell, let twenty more groups through."""
    steps_when_counted = 0
    has_attacked = False

    def act(run: EchoRun) -> None:
        nonlocal steps_when_counted, has_attacked
        everyone = all(run.process(name, 1) is not None for name in NAMES)
        if not has_attacked and everyone and run.num_steps >= 5:
            has_attacked = True
            attack(run)
        if has_attacked and not steps_when_counted and is_counted(run):
            steps_when_counted = run.num_steps
        if steps_when_counted and run.num_steps > steps_when_counted + 20:
            run.stop()

    outcome = run.play(act)
    assert outcome.kind is OutcomeKind.STOPPED
    assert run.witness.losses == [], "nobody died"
    assert set(run.groups().values()) == {1}, "nothing came twice"
    assert FORGED_GROUP not in run.groups(), "nothing forged got in"
    assert outcome.finished is not None


def address_of(run: EchoRun, name: str) -> Address:
    process = run.process(name, 1)
    assert process is not None
    return process.address


def send(run: EchoRun, name: str, frames: list[bytes]) -> None:
    """As a peer that holds the keys of the run."""
    client = Links(client_keys=run.keys, has_inbox=False)
    client.connect(address_of(run, name))
    for one in frames:
        client.send(name, one)
    client.close(linger_ms=5000)


def test_a_frame_that_is_replayed_again_and_again_is_heard_once(host: ProcessHost, tmp_path: Path) -> None:
    """By somebody with the keys: of a group that is settled, and of one that is on its way."""
    run = EchoRun(host, tmp_path, ENDLESS)

    def replay(run: EchoRun) -> None:
        settled = min(run.groups())
        send(run, SCORER, [frame(generated(settled))] * NUM_REPLAYS)

    play(run, replay, lambda run: run.metric(SCORER, "delivery/late") >= NUM_REPLAYS)


def test_the_recorded_bytes_of_a_connection_open_no_second_one(host: ProcessHost, tmp_path: Path) -> None:
    """Somebody on the wire has recorded every byte of a friend's connection, and sends them again."""
    run = EchoRun(host, tmp_path, ENDLESS)
    doors: list[socket.socket] = []

    def replay(run: EchoRun) -> None:
        address = address_of(run, SCORER)
        wiretap = Wiretap(address.endpoint)
        friend = Links(client_keys=run.keys, has_inbox=False)
        friend.connect(Address(SCORER, 1, wiretap.endpoint, address.server_key))
        friend.send(SCORER, frame(generated(min(run.groups()))))
        friend.close(linger_ms=5000)
        recorded = wiretap.close()
        assert len(recorded) > 300, "a handshake and a message"
        for _ in range(3):
            door = socket.create_connection(wiretap.target, CONNECT_TIMEOUT_S)
            door.sendall(recorded)
            doors.append(door)

    refused = 3
    play(run, replay, lambda run: run.metric(SCORER, "wire/refused") >= refused)
    assert run.metric(SCORER, "wire/malformed") == 0, "not one byte got as far as the decoder"
    assert run.metric(SCORER, "delivery/late") == 1, "only the friend was heard"
    for door in doors:
        door.close()


class Wiretap:
    """Passes one connection on and keeps what the client has sent."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(CONNECT_TIMEOUT_S)
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._recorded = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self.target, CONNECT_TIMEOUT_S)
        back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
        back.start()
        self._recorded = self._pump(near, far)
        far.shutdown(socket.SHUT_WR)
        back.join(CONNECT_TIMEOUT_S)
        near.close()
        far.close()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> bytes:
        passed = b""
        while data := source.recv(65536):
            passed += data
            target.sendall(data)
        return passed

    def close(self) -> bytes:
        """What the client has sent, once it has closed its connection."""
        self._thread.join(CONNECT_TIMEOUT_S)
        assert not self._thread.is_alive()
        self._listener.close()
        return self._recorded


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Frames that began as good ones."""
    data = bytearray(frame(generated(draw(st.integers(0, 2**40))), sender=draw(st.sampled_from(NAMES))))
    for _ in range(draw(st.integers(1, 6))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(1, len(data)))])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20) | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)
FRAMES = st.one_of(
    st.binary(max_size=300),
    damaged(),
    VALUES.map(msgspec.msgpack.encode),
    st.lists(VALUES, max_size=4).map(lambda items: msgspec.msgpack.encode((1, items))),
    st.dictionaries(st.text(max_size=8), VALUES, max_size=5).map(
        lambda body: msgspec.msgpack.encode((1, [(Header(ENGINE, 1, 1, 1, 0), body | {"type": "SampleGenerated"})]))
    ),
)


class Fuzzed:
    """Frames for one inbox of which nothing may be heard, and how many complaints they are worth."""

    def __init__(self, name: str) -> None:
        self.frames: list[bytes] = []
        self.num_complaints = 0
        self._decoder: InboxDecoder[Event] = InboxDecoder(inbox_union(name) | ProcessControl)

    def take(self, one: bytes) -> None:
        try:
            events, errors = self._decoder.decode(one)
        except WireError:
            events, errors = [], [WireError()]
        if any(header.sender in (*NAMES, SUPERVISOR) for header, _ in events):
            return  # still a good event of a known sender: that is not what this is about
        self.frames.append(one)
        self.num_complaints += len(errors) + len(events)


def fuzzed(name: str) -> Fuzzed:
    made = Fuzzed(name)

    @settings(
        max_examples=NUM_FUZZED,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    @given(FRAMES)
    def generate(one: bytes) -> None:
        made.take(one)

    generate()
    return made


def test_fuzzed_frames_are_counted_one_by_one_by_every_actor(host: ProcessHost, tmp_path: Path) -> None:
    attacks = {name: fuzzed(name) for name in TARGETS}
    assert all(attack.num_complaints > NUM_FUZZED // 2 for attack in attacks.values())
    run = EchoRun(host, tmp_path, ENDLESS)

    def attack(run: EchoRun) -> None:
        for name, one in attacks.items():
            send(run, name, one.frames)

    def is_counted(run: EchoRun) -> bool:
        return all(run.metric(name, "wire/malformed") >= one.num_complaints for name, one in attacks.items())

    play(run, attack, is_counted)
    for name, one in attacks.items():
        assert run.metric(name, "wire/malformed") == one.num_complaints


def test_who_takes_a_name_that_is_nobodys_or_an_epoch_that_is_over_is_not_heard(
    host: ProcessHost, tmp_path: Path
) -> None:
    run = EchoRun(host, tmp_path, ENDLESS)
    strangers = ["engine/77", "", "SCORER", "scorer\x00", "buffer ", "x" * 10_000]
    orders = DirectoryChanged(sequence=10**6, is_whole=True, members=(), fences=())

    def attack(run: EchoRun) -> None:
        forged = generated(FORGED_GROUP)
        send(run, SCORER, [frame(forged, sender=name) for name in strangers])
        send(run, SCORER, [frame(forged, epoch=epoch) for epoch in (0, -1, -(2**62))])
        send(run, SCORER, [frame(orders, sender=ENGINE)])

    def is_counted(run: EchoRun) -> bool:
        is_strange = run.metric(SCORER, "wire/malformed") >= len(strangers) + 1
        return is_strange and run.metric(SCORER, "delivery/fenced") >= 3

    play(run, attack, is_counted)
    assert "x" * 200 not in (tmp_path / "logs" / "scorer-1.log").read_text(), "a stranger does not fill the log"


def test_metrics_beyond_this_machine_want_a_token_that_stands_in_one_file_alone(
    launched: Callable[..., Launched], unused_port: Callable[[], int]
) -> None:
    port = unused_port()
    run = launched(ENDLESS, f'{{"observability": {{"metrics_port": {port}, "metrics_host": "0.0.0.0"}}}}')
    run.wait_for_steps()
    path = run.folder / TOKEN_FILE
    token = path.read_text().strip()
    url = f"http://127.0.0.1:{port}/metrics"
    assert path.stat().st_mode & 0o777 == 0o600
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})) as answer:
        assert b"penstock_policy_version" in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(url)
    refused.value.close()
    run.process.send_signal(signal.SIGINT)
    stdout, stderr = run.process.communicate(timeout=30)
    assert token not in stdout + stderr
    holders = [file for file in run.folder.rglob("*") if file.is_file() and token.encode() in file.read_bytes()]
    assert holders == [path]
