"""What the commands share: the program, its groups, arguments that several take.

Exit codes: 0 done, 1 the run failed or is not well, 2 the user has to change something, 130 and 143 after SIGINT
and SIGTERM. What the user has to change is one message on stderr, never a stack trace.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from penstock.runtime.run_folder import RUNS
from penstock.runtime.terminal import TerminalConsole

if TYPE_CHECKING:
    from typer._click.core import Command, Context, Parameter

HELP: Final = frozenset(("--help", "-h"))


def _plain(found: list[Parameter]) -> list[Parameter]:
    """Parameters for the help, which names the type of what is to be given: with a flag that is nothing."""
    for each in found:
        if isinstance(each, TyperOption) and each.is_flag:
            each.metavar = ""
    return found


class PlainCommand(TyperCommand):
    """Shows no types behind flags."""

    def get_params(self, ctx: Context) -> list[Parameter]:
        return _plain(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """Likewise."""

    def get_params(self, ctx: Context) -> list[Parameter]:
        return _plain(super().get_params(ctx))


class TwoWords(PlainGroup):
    """Where a second word says which command is meant."""

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """``convert scenario`` is a command, unless there is a model of that name; and who asks for help after the name
        of a benchmark means the benchmark's."""
        first, *rest = args
        word = next((each for each in rest if not each.startswith("-")), "")
        if f"{first} {word}" in self.commands and not Path(word).exists():
            rest.remove(word)
            first = f"{first} {word}"
        elif first == "bench" and rest[:1] == [word]:
            rest[1:1] = ["--"] * (not HELP.isdisjoint(rest))
        return super().resolve_command(ctx, [first, *rest])


app = typer.Typer(
    name="penstock",
    cls=TwoWords,
    help="Asynchronous reinforcement-learning post-training of language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": sorted(HELP)},
)
environments = typer.Typer(
    cls=PlainGroup, help="Environments of their own, for what cannot share Penstock's.", no_args_is_help=True
)
app.add_typer(environments, name="env")
data_commands = typer.Typer(
    cls=PlainGroup, help="A look at the rows of a scenario before any run.", no_args_is_help=True
)
app.add_typer(data_commands, name="data")
check_commands = typer.Typer(cls=PlainGroup, help="Functions of yours, tried before any run.", no_args_is_help=True)
app.add_typer(check_commands, name="check")
engine_commands = typer.Typer(
    cls=PlainGroup, help="Engines that run already, and a run that goes on.", no_args_is_help=True
)
app.add_typer(engine_commands, name="engine")
console = TerminalConsole()
errors = TerminalConsole(stderr=True, soft_wrap=True)
OWN_PROCESS: Final = object()
"""Commands have it as ``context.obj`` where the process is theirs alone, and no test's or notebook's."""
NICE: Final = 10
"""A tenth of the weight of others. With 19 the page is seconds late where five processes want each core."""


def find_scenario_file(given: Path | None) -> Path | None:
    from penstock.runtime.scenario.shipped import find_scenario

    return None if given is None else find_scenario(given)


def output_option(*names: str, text: str) -> Any:  # noqa: ANN401 - as typer has it
    """Of a file to write: that it can be is seen before the command's work, which may take hours."""

    def check(parameter: typer.CallbackParam, given: Path | None) -> Path | None:
        from penstock.runtime.output_file import check_output

        if given is not None:
            check_output(given, parameter.opts[0])
        return given

    return typer.Option(*names, metavar="FILE", callback=check, help=text)


def scenario_names(incomplete: str) -> list[str]:
    """For the shell, which completes files itself where none of these is meant."""
    from penstock.runtime.scenario.shipped import shipped_scenarios

    return [name for name in shipped_scenarios() if name.startswith(incomplete)]


ScenarioFile = Annotated[
    Path,
    typer.Argument(
        metavar="SCENARIO",
        help="A YAML or TOML file, or the name of one that comes with Penstock, such as quickstart.",
        callback=find_scenario_file,
        autocompletion=scenario_names,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys to set over the file, such as staleness.max_staleness=4."),
]


RunFolder = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="A run's folder; without it the newest one under ./runs.")
]


def run_folder(run: Path | None) -> Path:
    from penstock.runtime.launch.runs import newest_run
    from penstock.runtime.run_folder import folder_of_run

    return folder_of_run(run.expanduser()) if run is not None else newest_run(RUNS)


def give_way() -> None:
    """Have other processes go before this one, and before what it starts."""
    os.nice(NICE)
    if os.getsid(0) == os.getpid():  # Linux divides time among sessions before it looks at the processes in them
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(NICE))
