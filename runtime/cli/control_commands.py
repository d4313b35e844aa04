"""Commands that tell a run something while it goes on. The answer is the run's own; what it refuses exits with 2."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape

from penstock.messages.errors import UserFault
from penstock.runtime.cli.program import RunFolder, app, console, engine_commands, run_folder
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from penstock.runtime.launch.control import RunCommand

ENGINE: Final = re.compile(r"engine/[0-9]{1,5}")
ADDRESS: Final = re.compile(r"https?://[^\s/]{1,256}/?")
CHANGE: Final = re.compile(r"engines=[+-][0-9]{1,5}")
Timeout = Annotated[float, typer.Option(min=0.1, max=86400, help="Seconds to wait for the run's answer.")]


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock policy sync\n\n"
    "penstock policy runs/quickstart-20260801-120000 fully_async max_staleness=4\n\n"
    "penstock policy one_step_off update_mode=interrupt"
)
def policy(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] POLICY [KEY=VALUE]...",
            help="A run's folder, the newest one under ./runs without it; then sync, one_step_off or fully_async; then "
            "max_staleness, update_mode, on_stale where they are not to be the policy's own (on_stale: the run's).",
        ),
    ],
    timeout: Timeout = 20.0,
) -> None:
    """Switch a run that goes on to another staleness policy. It holds for every group that is granted from then on;
    what is under way keeps the bound that it was granted under."""
    from penstock.actors.buffer.policies import BUILTIN
    from penstock.runtime.launch.control import SwitchPolicy

    names = [word for word in arguments if "=" not in word or Path(word).is_dir()]
    if len(names) not in (1, 2):
        raise UserFault(f"expected [RUN] POLICY [KEY=VALUE]..., such as fully_async max_staleness=4; found {arguments}")
    if len(names) == 1 and Path(names[0]).is_dir() and names[0] not in BUILTIN:
        raise UserFault(
            f"{names[0]} is a run; say which policy it is to follow, also where only a key changes: penstock policy "
            f"{' '.join([names[0], 'fully_async', *(word for word in arguments if word != names[0])])}"
        )
    options: dict[str, int | float | str] = {}
    for word in arguments:
        if word not in names:
            key, _, value = word.partition("=")
            options[key.strip().removeprefix("staleness.")] = value.strip()
    _tell(run_folder(Path(names[0]) if len(names) == 2 else None), SwitchPolicy(names[-1], options), timeout)


@app.command(epilog="[bold]Examples[/]\n\npenstock pause\n\npenstock pause runs/quickstart-20260801-120000 --off")
def pause(
    run: RunFolder = None,
    off: Annotated[bool, typer.Option("--off", help="Let new groups start again.")] = False,
    timeout: Timeout = 20.0,
) -> None:
    """Start no new groups in a run that goes on. What is under way is generated and trained; then the run waits until
    [bold]penstock pause --off[/], also after [bold]penstock resume[/]. Evaluations go on."""
    from penstock.runtime.launch.control import PauseGrants, ResumeGrants

    _tell(run_folder(run), ResumeGrants() if off else PauseGrants(), timeout)


@app.command(epilog="[bold]Examples[/]\n\npenstock save\n\npenstock save runs/quickstart-20260801-120000 --timeout 60")
def save(run: RunFolder = None, timeout: Timeout = 600.0) -> None:
    """Have a run that goes on write a checkpoint of what is trained by now, and wait until it is written."""
    from penstock.runtime.launch.control import SaveCheckpoint

    _tell(run_folder(run), SaveCheckpoint(), timeout)


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock scale engines=+1\n\n"
    "penstock scale runs/quickstart-20260801-120000 engines=-1\n\n"
    "penstock scale runs/quickstart-20260801-120000 engine/2"
)
def scale(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] engines=±N | ENGINE...",
            help="A run's folder, the newest one under ./runs without it; then engines=+N for N more engines, "
            "engines=-N for N fewer, or the names of those that are to leave, such as engine/2.",
        ),
    ],
    timeout: Timeout = 20.0,
) -> None:
    """Have engines join or leave a run that goes on, within [bold]engines.min[/] and [bold]engines.max[/] of its
    scenario. Who joins takes load once it has the weights; who leaves hands back what it has, and other engines go on
    from its tokens. The run keeps the engines when it is resumed."""
    from penstock.runtime.launch.control import ScaleEngines

    leaving = tuple(word for word in arguments if ENGINE.fullmatch(word))
    changes = [word for word in arguments if CHANGE.fullmatch(word)]
    folders = [word for word in arguments if word not in (*leaving, *changes)]
    if len(folders) > 1 or len(changes) + bool(leaving) != 1:
        raise UserFault(f"expected [RUN] and engines=+N, engines=-N or names such as engine/2; found {arguments}")
    change = int(changes[0].partition("=")[2]) if changes else 0
    _tell(run_folder(Path(folders[0]) if folders else None), ScaleEngines(change, leaving), timeout)


@engine_commands.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock engine join http://10.0.0.7:30000\n\n"
    "penstock engine join runs/math-20260801-120000 http://10.0.0.7:30000"
)
def join(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] ADDRESS",
            help="A run's folder, the newest one under ./runs without it; then the address of a SGLang server.",
        ),
    ],
    timeout: Timeout = 20.0,
) -> None:
    """Have a server that runs already join a run that goes on, within [bold]engines.max[/]. The run's engines have to
    be such servers ([bold]engines.addresses[/]), and this one has to fit them: the same model, and no requests of
    others. It takes the newest weights, and then load. [bold]penstock scale engine/N[/] has it leave."""
    from penstock.runtime.launch.control import JoinEngine

    *folders, address = arguments
    if len(folders) > 1 or not ADDRESS.fullmatch(address):
        raise UserFault(f"expected [RUN] and an address such as http://10.0.0.7:30000; found {arguments}")
    _tell(run_folder(Path(folders[0]) if folders else None), JoinEngine(address), timeout)


def _tell(folder: Path, command: "RunCommand", timeout_s: float) -> None:
    from penstock.runtime.launch.control import send_command

    answer = send_command(folder, command, timeout_s)
    if not answer.accepted:
        raise UserFault(f"{folder}: {answer.text}")
    console.print(escape(terminal_text(answer.text)), soft_wrap=True)
