"""``penstock gateway``: serve one address for agents in front of a run's engines, until the run ends or Ctrl-C."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from rich.markup import escape

from penstock.backends.data.options import PUSHED
from penstock.backends.episodes.registry import run_token
from penstock.backends.processes.http_server import listen
from penstock.messages.errors import UserFault
from penstock.runtime.cli.run_end import end_of
from penstock.runtime.gateway.door import FrontDoor
from penstock.runtime.launch.runs import SCENARIO_NAME, check_own, is_alive, read_record
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

EXAMPLE: Final = """\
  session = requests.post("{url}/sessions", headers={{"Authorization": "Bearer {token}"}}).json()
  client = openai.OpenAI(base_url=session["base_url"], api_key="{token}")"""

PUSH_EXAMPLE: Final = """\
  requests.post("{url}/trajectories", headers={{"Authorization": "Bearer {token}"}}, json=group)"""


def serve_gateway(folder: Path, host: str, port: int, console: Console) -> int:
    """Serve until the run has ended.

    Raises:
        UserFault: the run has no gateway, is over, or the port cannot be had.
    """
    record = read_record(folder)
    check_own(folder, record)
    if not is_alive(folder, record):
        raise UserFault(f"{folder}: its process has ended, so there is nobody to talk to; resume it first")
    scenario = load_scenario(folder / SCENARIO_NAME, [])
    is_pushed = scenario.data.source == PUSHED
    if scenario.episode.kind != "gateway" and not is_pushed:
        raise UserFault(
            f"{folder}: its samples are no sessions (episode.kind: {scenario.episode.kind}), and none are pushed; "
            "start the run with episode.kind=gateway, or with data.source=pushed"
        )
    with suppress(asyncio.CancelledError):
        asyncio.run(_serve(folder, host, port, console, PUSH_EXAMPLE if is_pushed else EXAMPLE))
    return 0


async def _serve(folder: Path, host: str, port: int, console: Console, example: str) -> None:
    token = run_token(folder)
    try:
        listener = await listen(FrontDoor(folder, token).app(host), host, port)
    except OSError as error:
        raise UserFault(f"--host {host} --port {port}: cannot listen there: {error.strerror}") from None
    try:
        url = f"http://{host}:{listener.port}"
        console.print(f"agents of {escape(folder.name)} come to  {url}", soft_wrap=True)
        console.print(f"with the API key  {token}\n", soft_wrap=True)
        console.print(escape(example.format(url=url, token=token)), soft_wrap=True)
        await end_of(folder)
        console.print("the run has ended")
    finally:
        await listener.close()
