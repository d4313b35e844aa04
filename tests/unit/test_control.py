"""What a run can be told: what is refused before anything is sent, and the words of the commands."""

from __future__ import annotations

import select
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from typer.testing import CliRunner

from penstock.backends.checkpoint.make import make_model
from penstock.backends.engines.run_endpoints import joined_address
from penstock.backends.engines.served.sglang import joining
from penstock.backends.ledger.sqlite import open_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.messages.ledger import PauseRecorded, PolicyRecorded
from penstock.messages.operator import EnginesAsked, PolicyChanged
from penstock.messages.training import OnStale, UpdateMode
from penstock.runtime.cli.app import app
from penstock.runtime.hosts.processes.operator_door import MAX_BYTES, CommandAnswer, OperatorRequest, socket_address
from penstock.runtime.launch.control import JoinEngine, PauseGrants, ScaleEngines, SwitchPolicy, send_command
from penstock.runtime.launch.launch import write_scenario
from penstock.runtime.launch.runs import close_record, open_record
from penstock.runtime.observability.operations import pause_in_force, policy_in_force, read_operations
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.shipped import find_scenario

if TYPE_CHECKING:
    from collections.abc import Generator


TIMEOUT_S = 20.0


class Played:
    """A run that this process drives by its record, and a driver that answers one request in a thread."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        write_scenario(folder, load_scenario(find_scenario(Path("quickstart")), overrides))
        self.record = open_record(folder, "quickstart")
        self.heard: list[OperatorRequest] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(TIMEOUT_S)
        with socket_address(folder) as address:
            self._listener.bind(address)
        self._listener.listen()

    def answers(self, answer: CommandAnswer | None) -> None:
        """To the next one who asks; None: it hangs up."""

        def serve() -> None:
            peer, _ = self._listener.accept()
            with peer:
                self.heard.append(msgspec.msgpack.decode(peer.recv(MAX_BYTES), type=OperatorRequest))
                if answer is not None:
                    peer.send(msgspec.msgpack.encode(answer))

        threading.Thread(target=serve, daemon=True).start()

    def dies(self) -> None:
        """When the next one has asked: it has taken the connection, and reads nothing any more."""

        def serve() -> None:
            peer, _ = self._listener.accept()
            with peer:
                asked = select.poll()
                asked.register(peer, select.POLLIN)
                assert asked.poll(1000 * TIMEOUT_S)

        threading.Thread(target=serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def played(tmp_path: Path) -> Generator[Played]:
    run = Played(tmp_path)
    yield run
    run.close()


YES = CommandAnswer(accepted=True, text="new grants follow it")
NO = CommandAnswer(accepted=False, text="publish_every is \x1b[31m3")


def test_a_policy_is_sent_in_full_and_the_answer_is_that_of_the_run(played: Played) -> None:
    played.answers(YES)
    assert send_command(played.folder, SwitchPolicy("fully_async", {"max_staleness": 4}), 5.0) == YES
    assert played.heard == [
        OperatorRequest(PolicyChanged(policy="fully_async", max_staleness=4, update_mode=UpdateMode.IN_FLIGHT), 5.0)
    ]


ATTACHED = ("engines.backend=sglang", "engines.count=1", "engines.max=2", "engines.addresses=[http://127.0.0.1:9]")
OTHER = "http://127.0.0.1:10"


def test_a_server_that_joins_is_noted_for_its_engine_and_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[tuple[str, Path]] = []

    def look(address: str, folder: Path, *, dtype: str, max_context: int) -> None:
        looked.append((address, folder))

    monkeypatch.setattr(joining, "check_joining", look)
    run = Played(tmp_path, *ATTACHED)
    run.answers(YES)
    try:
        assert send_command(run.folder, JoinEngine(f"{OTHER}/"), 5.0) == YES
    finally:
        run.close()
    (request,) = run.heard
    assert request.event == EnginesAsked(engines=("engine/0", "engine/1"))
    assert looked == [(OTHER, tmp_path / "model")]
    assert joined_address(tmp_path, "engine/1") == OTHER
    assert joined_address(tmp_path, "engine/0") is None


@pytest.mark.parametrize(
    ("overrides", "command", "reason"),
    [
        ((), JoinEngine(OTHER), "the run starts its engines itself"),
        (("engines.backend=sglang",), JoinEngine(OTHER), "for one more: penstock scale"),
        (ATTACHED, JoinEngine("http://127.0.0.1:9/"), "is engine/0 of this run already"),
        (ATTACHED, JoinEngine(OTHER), "does not answer as a SGLang server does"),
        ((*ATTACHED[:2], ATTACHED[3]), JoinEngine(OTHER), "engines.max is 1"),
        (ATTACHED, ScaleEngines(1), "penstock engine join ADDRESS"),
    ],
)
def test_a_server_that_cannot_join_is_refused_with_the_reason(
    tmp_path: Path, overrides: tuple[str, ...], command: JoinEngine | ScaleEngines, reason: str
) -> None:
    run = Played(tmp_path, *overrides)
    make_model("xs", tmp_path / "model", 0)
    try:
        with pytest.raises(UserFault, match=reason):
            send_command(run.folder, command, 5.0)
    finally:
        run.close()
    assert joined_address(tmp_path, "engine/1") is None


def test_what_holds_about_old_groups_stays_unless_it_is_said(played: Played) -> None:
    store = open_ledger(played.folder)
    store.claim(0)
    before = PolicyRecorded(policy="sync", max_staleness=0, update_mode=UpdateMode.DRAIN, on_stale=OnStale.DROP)
    store.commit([before])
    store.close()
    played.answers(YES)
    send_command(played.folder, SwitchPolicy("one_step_off"), 5.0)
    (request,) = played.heard
    assert isinstance(request.event, PolicyChanged)
    assert (request.event.max_staleness, request.event.on_stale) == (1, OnStale.DROP)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (SwitchPolicy("fuly_async"), "did you mean fully_async?"),
        (SwitchPolicy("file.py:Mine"), "a run can be switched to sync, one_step_off, fully_async"),
        (SwitchPolicy("fully_async", {"max_stalenes": 4}), "did you mean max_staleness?"),
        (SwitchPolicy("sync", {"max_staleness": 1}), "the policy sync means 0, found 1"),
        (SwitchPolicy("sync", {"update_mode": "in_flight"}), "the policy sync can have drain"),
        (SwitchPolicy("fully_async", {"max_staleness": "many"}), "max_staleness"),
    ],
)
def test_what_no_run_could_take_is_refused_with_the_reason(played: Played, command: SwitchPolicy, reason: str) -> None:
    answer = send_command(played.folder, command, 5.0)
    assert (answer.accepted, reason in answer.text) == (False, True), answer.text


def test_what_this_scenario_cannot_take_is_refused_with_the_reason(tmp_path: Path) -> None:
    run = Played(tmp_path, "staleness.policy=fully_async", "staleness.max_staleness=3", "weights.publish_every=3")
    answer = send_command(tmp_path, SwitchPolicy("sync"), 5.0)
    run.close()
    assert not answer.accepted
    assert "needs staleness.max_staleness of at least 2" in answer.text


def test_a_run_that_is_gone_or_not_there_is_the_user_s_fault(played: Played, tmp_path: Path) -> None:
    played.answers(None)
    assert "has ended" in send_command(played.folder, PauseGrants(), 5.0).text
    played.dies()
    assert "has ended" in send_command(played.folder, PauseGrants(), 5.0).text
    with pytest.raises(UserFault, match="the time to wait"):
        send_command(played.folder, PauseGrants(), 0.0)
    played.close()
    assert "starting, or ending" in send_command(played.folder, PauseGrants(), 5.0).text
    close_record(played.folder, played.record, 0)
    with pytest.raises(UserFault, match="no such folder"):
        send_command(tmp_path / "nowhere", PauseGrants(), 5.0)


def penstock(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, f"{done.output}{done.exception or ''}"


def test_the_commands_print_the_answer_or_fail_with_it(played: Played) -> None:
    played.answers(YES)
    code, text = penstock("policy", str(played.folder), "fully_async", "staleness.max_staleness=4")
    assert (code, "new grants follow it" in text) == (0, True), text
    played.answers(NO)
    code, text = penstock("pause", str(played.folder), "--off")
    assert (code, "publish_every is" in text) == (1, True), "raised; main() makes it exit code 2"
    played.answers(CommandAnswer(accepted=True, text="saved \x1b[31m"))
    assert "\x1b" not in penstock("save", str(played.folder))[1]
    assert len(played.heard) == 3


@pytest.mark.parametrize("words", [["max_staleness=4"], ["a", "b", "sync"]])
def test_a_policy_needs_its_name(words: list[str]) -> None:
    assert "expected [RUN] POLICY" in penstock("policy", *words)[1]


def test_what_an_operator_did_is_read_from_the_ledger_and_told_by_the_status(played: Played) -> None:
    assert read_operations(played.folder) == []
    store = open_ledger(played.folder)
    store.claim(0)
    switched = PolicyRecorded(
        policy="fully_async", max_staleness=4, update_mode=UpdateMode.IN_FLIGHT, on_stale=OnStale.WAIT
    )
    store.commit([switched, PauseRecorded(is_paused=True)])
    operations = read_operations(played.folder)
    assert [each.label for each in operations] == ["fully_async, η = 4", "grants paused"]
    assert policy_in_force(operations) == operations[0]
    assert pause_in_force(operations) == operations[1]
    _, text = penstock("status", str(played.folder))
    assert "policy since step 0: fully_async, max_staleness 4" in text
    assert "new grants are paused for" in text
    store.commit([PauseRecorded(is_paused=False)])
    store.close()
    assert pause_in_force(read_operations(played.folder)) is None
    assert "paused" not in penstock("status", str(played.folder))[1]


def test_a_ledger_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / LEDGER_FILE).write_bytes(b"no database" * 100)
    with pytest.raises(UserFault, match="the ledger cannot be read"):
        read_operations(tmp_path)
