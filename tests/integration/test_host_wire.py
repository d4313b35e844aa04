"""What strangers and broken peers can do to a process: be counted, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq
from host_echo import ENGINE, RunPlan, prompt_of, sample_of
from host_harness import EchoRun

from penstock.backends.processes.curve import make_keys
from penstock.messages.flow import SampleGenerated
from penstock.messages.names import BUFFER, FILTER, SCORER
from penstock.messages.wire import Header, encode_pack
from penstock.runtime.hosts.processes.control import DirectoryChanged, EndAsked
from penstock.runtime.hosts.processes.links import Links
from penstock.runtime.hosts.processes.ports import OutcomeKind
from penstock.runtime.hosts.ray.cluster import RayHost

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.runtime.hosts.processes.control import Address
    from penstock.runtime.hosts.processes.ports import ProcessHost


GENERATED = SampleGenerated(sample=sample_of(0, 8), group_size=1, prompt=prompt_of(0))
PACK = encode_pack([(Header(ENGINE, 1, 1, 1, 0), GENERATED)])
BAD_FRAMES = {
    "nothing": b"",
    "noise": bytes(range(256)) * 10,
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "a pickle": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "half a pack": PACK[: len(PACK) // 2],
    "another format": msgspec.msgpack.encode((99, [])),
    "an unknown tag": msgspec.msgpack.encode((1, [(Header(ENGINE, 1, 1, 1, 0), {"type": "SampleGeneratde"})])),
    "a missing field": msgspec.msgpack.encode((1, [(Header(ENGINE, 1, 1, 1, 0), {"type": "SampleGenerated"})])),
    "a sender of no run": encode_pack([(Header("engine/77", 1, 1, 1, 0), GENERATED)]),
}


class Meddler:
    """Does something to the Scorer once, when some groups are through; then waits for what the Scorer says."""

    def __init__(self, meddle: Callable[[EchoRun, Address], None], is_done: Callable[[EchoRun], bool]) -> None:
        self.meddle = meddle
        self.is_done = is_done
        self.has_meddled = False
        self.steps_when_done = 0

    def __call__(self, run: EchoRun) -> None:
        process = run.process(SCORER, 1)
        if not self.has_meddled and process is not None and run.num_steps >= 5:
            self.has_meddled = True
            self.meddle(run, process.address)
        if self.has_meddled and not self.steps_when_done and self.is_done(run):
            self.steps_when_done = run.num_steps


def endless(host: ProcessHost, folder: Path) -> EchoRun:
    """A run that goes on until ``Meddler`` is satisfied and 20 more groups are through."""
    return EchoRun(host, folder, RunPlan(num_groups=10_000_000))


def until_settled(meddler: Meddler) -> Callable[[EchoRun], None]:
    def act(run: EchoRun) -> None:
        meddler(run)
        if meddler.steps_when_done and run.num_steps > meddler.steps_when_done + 20:
            run.stop()

    return act


def play(run: EchoRun, meddler: Meddler) -> None:
    outcome = run.play(until_settled(meddler))
    assert outcome.kind is OutcomeKind.STOPPED
    assert meddler.steps_when_done
    assert run.witness.losses == []
    assert outcome.finished is not None
    assert set(run.groups().values()) == {1}


def test_what_cannot_be_read_is_counted_and_harms_nobody(host: ProcessHost, tmp_path: Path) -> None:
    run = endless(host, tmp_path)

    def send_garbage(run: EchoRun, address: Address) -> None:
        client = Links(client_keys=run.keys, has_inbox=False)
        client.connect(address)
        for frame in BAD_FRAMES.values():
            client.send(SCORER, frame)
        client.close(linger_ms=5000)

    play(run, Meddler(send_garbage, lambda run: run.metric(SCORER, "wire/malformed") >= len(BAD_FRAMES)))
    assert run.metric(SCORER, "wire/malformed") == len(BAD_FRAMES)
    log = (tmp_path / "logs" / "scorer-1.log").read_text()
    kinds = ("TruncatedFrameError", "UnknownFormatError", "UnknownEventError", "WrongTypeError")
    assert all(log.count(f"dropped ({kind})") == 1 for kind in kinds)


@pytest.mark.ray
def test_no_other_user_can_enter_the_folder_of_rays_session(host: ProcessHost) -> None:
    """Ray opens its own folder to everybody."""
    if not isinstance(host, RayHost):
        pytest.skip("about the folder of Ray's session: PENSTOCK_TEST_HOST=ray")
    folder = host.cluster.temp_folder
    sessions = [path for path in folder.rglob("session_latest") if path.is_symlink()]
    assert sessions
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.both_hosts
def test_who_has_no_key_is_refused_and_counted(host: ProcessHost, tmp_path: Path) -> None:
    run = endless(host, tmp_path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clients: list[zmq.Socket[bytes]] = []

    def knock(run: EchoRun, address: Address) -> None:
        for keys in (None, make_keys()):
            client = context.socket(zmq.DEALER)
            client.linger = 0
            if keys is not None:
                client.curve_publickey, client.curve_secretkey = keys.public, keys.secret
                client.curve_serverkey = address.server_key
            client.connect(address.endpoint)
            client.send(PACK)
            clients.append(client)

    play(run, Meddler(knock, lambda run: run.metric(SCORER, "wire/refused") >= 2))
    assert run.metric(SCORER, "wire/malformed") == 0
    for client in clients:
        client.close(0)
    context.term()


def test_what_an_incarnation_says_after_it_was_given_up_is_not_heard(host: ProcessHost, tmp_path: Path) -> None:
    """The engine is replaced; then somebody with its keys speaks for its first incarnation."""
    run = EchoRun(host, tmp_path, RunPlan(num_groups=10_000_000, replace_after=5))

    def speak_for_the_dead(run: EchoRun, address: Address) -> None:
        late = SampleGenerated(sample=sample_of(9_999_999, 8), group_size=1, prompt=prompt_of(9_999_999))
        client = Links(client_keys=run.keys, has_inbox=False)
        client.connect(address)
        client.send(SCORER, encode_pack([(Header(ENGINE, 1, 1, 1, 0), late)]))
        client.close(linger_ms=5000)

    has_spoken = False

    def act(run: EchoRun) -> None:
        nonlocal has_spoken
        scorer = run.process(SCORER, 1)
        if not has_spoken and scorer is not None and run.process(ENGINE, 2) is not None:
            has_spoken = True
            speak_for_the_dead(run, scorer.address)
        if has_spoken and run.metric(SCORER, "delivery/fenced") >= 1:
            run.stop()

    assert run.play(act).kind is OutcomeKind.STOPPED
    assert 9_999_999 not in run.groups()


def test_only_the_supervisor_gives_orders(host: ProcessHost, tmp_path: Path) -> None:
    """An actor that has gone mad cannot end another one, or make it believe that somebody is lost."""
    run = endless(host, tmp_path)
    orders = (
        EndAsked(grace_s=0.0),
        DirectoryChanged(sequence=1000, is_whole=True, members=(), fences=()),
    )

    def order(run: EchoRun, address: Address) -> None:
        client = Links(client_keys=run.keys, has_inbox=False)
        client.connect(address)
        for event in orders:
            client.send(SCORER, encode_pack([(Header(FILTER, 1, 1, 1, 0), event)]))
        client.close(linger_ms=5000)

    play(run, Meddler(order, lambda run: run.metric(SCORER, "wire/malformed") >= len(orders)))


def test_garbage_for_the_supervisor_is_counted(host: ProcessHost, tmp_path: Path) -> None:
    run = endless(host, tmp_path)

    def send_garbage(run: EchoRun, _: Address) -> None:
        client = Links(client_keys=run.keys, has_inbox=False)
        client.connect(run.boot_of(BUFFER, 1).supervisor)
        for frame in BAD_FRAMES.values():
            client.send("supervisor", frame)
        client.close(linger_ms=5000)

    def is_counted(run: EchoRun) -> bool:
        assert run.supervisor is not None
        return run.supervisor.num_malformed >= len(BAD_FRAMES) - 1  # a stranger's event is fenced, not malformed

    play(run, Meddler(send_garbage, is_counted))
