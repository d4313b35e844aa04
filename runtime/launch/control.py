"""What a run that goes on can be told, from any process of its user: another policy, a pause, a checkpoint, more or
fewer engines, one that runs already, to stop.

The answer is that of the run's Buffer, and not merely that something was sent.

| waits for | who ends it |
|---|---|
| the answer | the run; else ``timeout_s``, and ``GRACE_S`` for a driver that does not even say that it is late |
| answers of an engine that is to join | their deadlines (:attr:`.EngineSpec.check_joining`) |
"""

from __future__ import annotations

import difflib
import fcntl
import socket
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.actors.buffer.policies import BUILTIN
from penstock.backends.engines.options import most_engines
from penstock.backends.engines.run_endpoints import attached_address, write_joined
from penstock.backends.engines.spec import ENGINES
from penstock.backends.engines.transport_preflight import check_transport, sites_of
from penstock.messages.errors import UserFault
from penstock.messages.names import engine_index
from penstock.messages.operator import EnginesAsked, GrantsPaused, PolicyChanged, SaveAsked
from penstock.messages.texts import counted
from penstock.runtime.hosts.processes.operator_door import (
    MAX_BYTES,
    MAX_TIMEOUT_S,
    CommandAnswer,
    OperatorRequest,
    socket_address,
)
from penstock.runtime.hosts.processes.prepare import MODEL_FOLDER
from penstock.runtime.launch.runs import SCENARIO_NAME, check_own, is_alive, read_record, stop_run
from penstock.runtime.observability.operations import engines_in_force, policy_in_force, read_operations
from penstock.runtime.run.wiring import engine_names
from penstock.runtime.scenario import load_scenario
from penstock.runtime.shell.engine_membership import resized

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.backends.engines.options import EnginesOptions
    from penstock.messages.operator import OperatorEvent
    from penstock.runtime.scenario import Scenario

ANSWER_S: Final = 20.0
"""A Buffer that is replaced meanwhile answers within it."""
SAVE_S: Final = 600.0
"""For a checkpoint: the step at hand comes first."""
GRACE_S: Final = 5.0
JOINING_LOCK: Final = "joining.lock"
"""File in the run's folder; the kernel lets go when its holder ends."""
OPTIONS: Final = ("max_staleness", "update_mode", "on_stale")


class SwitchPolicy(msgspec.Struct, frozen=True, tag=True):
    """Another staleness policy for what is granted from now on."""

    policy: str
    options: dict[str, int | float | str] = {}
    """``max_staleness``, ``update_mode``, ``on_stale``. What is missing: the policy's own, ``on_stale`` as it is."""


class PauseGrants(msgspec.Struct, frozen=True, tag=True):
    """Start no more groups; what is under way comes to its end."""


class ResumeGrants(msgspec.Struct, frozen=True, tag=True):
    """Start groups again."""


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Write a checkpoint as soon as the step at hand allows."""


class ScaleEngines(msgspec.Struct, frozen=True, tag=True):
    """So many engines more or fewer, or without these, within ``engines.min`` and ``engines.max``."""

    change: int = 0
    """Who leaves is who came last, by the numbers in their names."""
    leaving: tuple[str, ...] = ()
    """Those of these names leave."""


class JoinEngine(msgspec.Struct, frozen=True, tag=True):
    """An engine that runs already becomes one of the run's, within ``engines.max``."""

    address: str
    """``http://10.0.0.7:30000``."""


class StopRun(msgspec.Struct, frozen=True, tag=True):
    """End it, as Ctrl-C does."""


RunCommand = SwitchPolicy | PauseGrants | ResumeGrants | SaveCheckpoint | ScaleEngines | JoinEngine | StopRun


def send_command(run_folder: Path, command: RunCommand, timeout_s: float = ANSWER_S) -> CommandAnswer:
    """Tell a run something, and wait for what it answers.

    Args:
        run_folder: of the run.
        command: what it is told.
        timeout_s: for so long at most. What takes longer, and is begun, is accepted.

    Raises:
        UserFault: there is no such run, it does not go on here, the folder is a copy of one that does, or the command
            cannot be read.
    """
    folder = run_folder.expanduser().absolute()
    record = read_record(folder)
    check_own(folder, record)
    if not is_alive(folder, record):
        raise UserFault(
            f"{folder}: the run does not go on, on this machine at least, so it cannot be told anything; penstock "
            "status says how it ended"
        )
    match command:
        case StopRun():
            has_ended = stop_run(folder, record, timeout_s)
            return CommandAnswer(accepted=True, text="it has ended" if has_ended else "it was asked to, and is ending")
        case SwitchPolicy():
            try:
                event: OperatorEvent = _switch(folder, command)
            except UserFault as error:
                return CommandAnswer(accepted=False, text=str(error))
        case PauseGrants() | ResumeGrants():
            event = GrantsPaused(is_paused=isinstance(command, PauseGrants))
        case SaveCheckpoint():
            event = SaveAsked()
        case ScaleEngines():
            event = _scale(folder, command)
        case JoinEngine():
            with _joining(folder):  # two at once would take the same place
                return _ask(folder, OperatorRequest(_join(folder, command.address), timeout_s))
    return _ask(folder, OperatorRequest(event, timeout_s))


class Told:
    """A run as a Python program tells it something while it goes on; each call returns what the run answers.

    Each raises ``UserFault`` where the run refuses, or does not go on.
    """

    folder: Path

    def switch_policy(self, policy: str, *, timeout_s: float = ANSWER_S, **options: float | str) -> str:
        """Switch to another staleness policy for what is granted from now on, as ``penstock policy``.

        Args:
            policy: ``sync``, ``one_step_off`` or ``fully_async``.
            timeout_s: wait so long for the answer, here and below.
            options: ``max_staleness``, ``update_mode``, ``on_stale``.
        """
        return self._told(SwitchPolicy(policy, dict(options)), timeout_s)

    def pause_grants(self, *, timeout_s: float = ANSWER_S) -> str:
        """Start no more groups, as ``penstock pause``."""
        return self._told(PauseGrants(), timeout_s)

    def resume_grants(self, *, timeout_s: float = ANSWER_S) -> str:
        """Start groups again, as ``penstock pause --off``."""
        return self._told(ResumeGrants(), timeout_s)

    def save(self, *, timeout_s: float = SAVE_S) -> str:
        """Have a checkpoint written of what is trained by now, and wait for it, as ``penstock save``."""
        return self._told(SaveCheckpoint(), timeout_s)

    def scale_engines(self, change: int = 0, *, leaving: tuple[str, ...] = (), timeout_s: float = ANSWER_S) -> str:
        """Have engines join or leave, as ``penstock scale``.

        Args:
            change: so many more, or fewer.
            leaving: those of these names leave, such as ``engine/2``.
            timeout_s: wait so long for the answer; who joins has to start after it, and who leaves to finish.
        """
        return self._told(ScaleEngines(change, leaving), timeout_s)

    def join_engine(self, address: str, *, timeout_s: float = ANSWER_S) -> str:
        """Have a server that runs already join, as ``penstock engine join``.

        Args:
            address: of a SGLang server, ``http://10.0.0.7:30000``.
            timeout_s: wait so long for the answer; it takes the newest weights after it.
        """
        return self._told(JoinEngine(address), timeout_s)

    def _told(self, command: RunCommand, timeout_s: float) -> str:
        answer = send_command(self.folder, command, timeout_s)
        if not answer.accepted:
            raise UserFault(f"{self.folder}: {answer.text}")
        return answer.text


def _switch(folder: Path, command: SwitchPolicy) -> PolicyChanged:
    """The policy in full, as a scenario that says the same would have it.

    Raises:
        UserFault: such a scenario would be refused.
    """
    if command.policy not in BUILTIN:
        near = difflib.get_close_matches(command.policy, BUILTIN, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserFault(f"a run can be switched to {', '.join(BUILTIN)}; {hint}given was {command.policy!r}")
    for key in command.options:
        if key not in OPTIONS:
            near = difflib.get_close_matches(key, OPTIONS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserFault(f"a policy is told {', '.join(OPTIONS)}; {hint}given was {key!r}")
    asked = {"max_staleness": "null", "update_mode": "null", **command.options}
    if before := policy_in_force(read_operations(folder)):
        asked.setdefault("on_stale", before.on_stale)
    overrides = [f"staleness.policy={command.policy}", *(f"staleness.{key}={value}" for key, value in asked.items())]
    staleness = load_scenario(folder / SCENARIO_NAME, overrides).staleness
    assert staleness.max_staleness is not None
    assert staleness.update_mode is not None
    return PolicyChanged(
        policy=staleness.policy,
        max_staleness=staleness.max_staleness,
        update_mode=staleness.update_mode,
        on_stale=staleness.on_stale,
    )


def _scale(folder: Path, command: ScaleEngines) -> EnginesAsked:
    """The engines that are to be there.

    Raises:
        UserFault: it asks for nothing, or for an engine to leave that is not there.
    """
    scenario = load_scenario(folder / SCENARIO_NAME)
    engines = _present(folder, scenario)
    if command.change > 0 and scenario.engines.addresses:
        raise UserFault(
            "the engines are servers that run already, of which the run starts none; start one, and then "
            "penstock engine join ADDRESS"
        )
    for name in command.leaving:
        if name not in engines:
            raise UserFault(f"{name} cannot leave: the engines of the run are {', '.join(engines)}")
    if not command.change and not command.leaving:
        raise UserFault("neither more nor fewer engines are asked for; give a change, or engines that are to leave")
    left = set(engines).difference(command.leaving)
    return EnginesAsked(engines=resized(left, max(0, len(left) + command.change)))


def _join(folder: Path, given: str) -> EnginesAsked:
    """The same engines and a server that runs already, whose address is noted for its EngineWorker.

    Raises:
        UserFault: it cannot be one of them.
    """
    scenario, address = load_scenario(folder / SCENARIO_NAME), given.rstrip("/")
    options, present = scenario.engines, _present(folder, scenario)
    check = ENGINES.spec(options.backend).check_joining
    if check is None or not options.addresses:
        raise UserFault(
            "the run starts its engines itself, so none joins by its address (engines.addresses names those of a run "
            "that starts none); for one more: penstock scale engines=+1"
        )
    for name in present:
        if attached_address(folder, name, options.addresses, engine_index(name)).rstrip("/") == address:
            raise UserFault(f"the server at {address} is {name} of this run already")
    if len(present) >= most_engines(options):
        raise UserFault(f"the run has {counted(len(present), 'engine')}, and engines.max is {most_engines(options)}")
    _check_reach(scenario, folder, address)
    model, made = options.fp8_model or scenario.model.path, folder / MODEL_FOLDER
    check(address, made if model is None else Path(model), scenario.model)
    engines = resized(present, len(present) + 1)
    (name,) = set(engines).difference(present)
    write_joined(folder, name, address)
    return EnginesAsked(engines=engines)


def _check_reach(scenario: Scenario, folder: Path, address: str) -> None:
    """Weights get to a server at this address as they get to the others.

    Raises:
        UserFault: they do not.
    """

    def transport_to(options: EnginesOptions) -> str:
        sites = sites_of(options, scenario.runtime.ray_address)
        return check_transport(scenario.weights.transport, size_bytes=0, folder=folder, engines=sites).transport

    options = scenario.engines
    used, needed = transport_to(options), transport_to(msgspec.structs.replace(options, addresses=(address,)))
    if used != needed:
        raise UserFault(
            f"the run's weights travel by {used}, which does not reach {address}; resume it with "
            f"weights.transport={needed}"
        )


@contextmanager
def _joining(folder: Path) -> Generator[None]:
    """Nobody else has an engine join meanwhile.

    Raises:
        UserFault: somebody does.
    """
    with (folder / JOINING_LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserFault(f"{folder}: another engine is about to join; try again when it has") from None
        yield


def _present(folder: Path, scenario: Scenario) -> tuple[str, ...]:
    """The engines of the run, as its ledger has them."""
    return engines_in_force(read_operations(folder)) or engine_names(scenario)


def _ask(folder: Path, request: OperatorRequest) -> CommandAnswer:
    if not 0 < request.timeout_s <= MAX_TIMEOUT_S:
        raise UserFault(f"the time to wait is {request.timeout_s} s; give one above 0 and up to {MAX_TIMEOUT_S:g}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door, socket_address(folder) as address:
        door.settimeout(request.timeout_s + GRACE_S)
        try:
            door.connect(address)
            door.send(msgspec.msgpack.encode(request))
            data = door.recv(MAX_BYTES)
        except (BrokenPipeError, ConnectionResetError):  # it was killed before it had read all of it, or even this
            data = b""
        except TimeoutError:
            return CommandAnswer(accepted=False, text="the run's driver does not answer; penstock status says more")
        except (FileNotFoundError, ConnectionRefusedError):
            return CommandAnswer(accepted=False, text="the run cannot be told anything: it is starting, or ending")
        except OSError as error:
            raise UserFault(f"{folder}: cannot reach the run: {error.strerror or error}") from None
    if not data:
        return CommandAnswer(accepted=False, text="the run has ended, or its driver takes no more requests")
    return msgspec.msgpack.decode(data, type=CommandAnswer)
