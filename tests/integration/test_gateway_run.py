"""A real run whose samples are sessions: the agent of the documentation and one of a framework play them through
``penstock gateway``, and what they played is trained."""

# pyarrow is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx2 as httpx
import pyarrow.parquet as pq
import pytest
from live_run import LiveRun
from PIL import Image
from pydantic_ai import Agent
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

HOUSE = Path(__file__).parents[2]
MAKES_MODEL = HOUSE / "tests" / "backends" / "gateway_cases.py"
"""Run with a folder it writes a model that knows this conversation by heart."""
QUESTION = "What is 6 times 7?"

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]
NUM_STEPS = 3


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class ThreadedAgent(ABC):
    """Plays on a thread, session after session."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=120)
        self.key = key
        self.played: list[str] = []
        """Samples that it brought to their end."""
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def work(self) -> None:
        try:
            while (reply := self.http.post("/sessions", json={"wait_s": 60})).status_code in (200, 204):
                if reply.status_code == 200:
                    self.play(cast("dict[str, Any]", reply.json()))
        except httpx.TransportError:
            return  # the run is over, and so is the front door

    @abstractmethod
    def play(self, session: dict[str, Any]) -> None:
        """One session, to its end."""


class FrameworkAgent(ThreadedAgent):
    """pydantic-ai."""

    def play(self, session: dict[str, Any]) -> None:
        provider = OpenAIProvider(base_url=session["base_url"], api_key=self.key)
        agent = Agent(OpenAIChatModel(session["model"], provider=provider), tools=[multiply], retries=0)
        try:
            result = agent.run_sync(session["messages"][0]["content"])
            end: dict[str, object] = {"reward": float("42" in result.output), "metadata": {"by": "pydantic-ai"}}
        except AgentRunError as error:
            end = {"outcome": "infra_error", "detail": str(error)}
        reply = self.http.post(f"/sessions/{session['id']}/finish", json=end)
        if reply.status_code == 200 and "reward" in end:
            self.played.append(session["sample"])


@pytest.fixture
def door_of() -> Iterator[Any]:
    """Starts ``penstock gateway`` for a run; its address and key as it prints them."""
    doors: list[subprocess.Popen[str]] = []

    def open_door(folder: Path) -> tuple[str, str]:
        command = [sys.executable, "-m", "penstock.runtime.cli", "gateway", str(folder), "--port", "0"]
        door = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        doors.append(door)
        assert door.stdout is not None
        lines = [door.stdout.readline() for _ in range(2)]
        url, key = re.search(r"(http://\S+)", lines[0]), re.search(r"(penstock-\S+)", lines[1])
        assert url, lines
        assert key, lines
        return url[1], key[1]

    yield open_door
    for door in doors:
        output = door.communicate(timeout=60)[0]
        assert door.returncode == 0, output
        assert "the run has ended" in output


def agent_of_the_documentation(folder: Path) -> Path:
    page = (HOUSE / "docs" / "gateway.md").read_text()
    code = re.search(r"```python\n(# agent\.py.*?)```", page, re.DOTALL)
    assert code is not None
    file = folder / "agent.py"
    file.write_text(code[1])
    return file


def test_what_agents_play_is_trained_token_for_token(tmp_path: Path, door_of: Any) -> None:  # noqa: ANN401
    model, rows, parent = tmp_path / "model", tmp_path / "tasks.jsonl", tmp_path / "runs"
    model.mkdir()
    parent.mkdir()
    subprocess.run([sys.executable, str(MAKES_MODEL), str(model)], check=True, timeout=200)
    rows.write_text("".join(json.dumps({"prompt": QUESTION, "label": "42"}) + "\n" for _ in range(16)))
    overrides = (
        f"model.path={model}",
        f"data.path={rows}",
        "model.max_context=512",
        "sampling.max_response_tokens=64",
        "sampling.samples_per_group=2",
        "filter.drop_zero_spread=false",
        "engines.slots=4",
        "engines.count=2",
        "learner.groups_per_batch=2",
        f"run.num_steps={NUM_STEPS}",
        "run.keep_samples=true",
    )
    with LiveRun("gateway_tools.yaml", parent, overrides) as run:
        run.await_file("gateway/token")
        url, key = door_of(run.folder)
        command = [sys.executable, str(agent_of_the_documentation(tmp_path)), url, key]
        documented = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        framework = FrameworkAgent(url, key)
        summary = run.finish()
        folder = run.folder
    framework.thread.join(120)
    output = documented.communicate(timeout=120)[0]
    assert documented.returncode == 0, output
    assert "the run is over" in output
    assert framework.played
    assert summary.num_steps == NUM_STEPS
    check_samples(folder, model, set(framework.played))
    audit = [sys.executable, "-m", "penstock.runtime.cli", "audit", str(folder)]
    assert subprocess.run(audit, capture_output=True, timeout=60, check=False).returncode == 0


def check_samples(folder: Path, model: Path, by_framework: set[str]) -> None:
    """Every trained sample is a conversation: the model's tokens are trained, the tool's are masked."""
    tokenizer = TextTokenizer(model)
    files = sorted((folder / "samples").glob("*.parquet"))
    trained = [row for file in files for row in cast("list[dict[str, Any]]", pq.read_table(file).to_pylist())]
    assert len(trained) == NUM_STEPS * 4
    whole = [row for row in trained if row["loss_mask"] is not None]
    assert whole, "no conversation of two turns was trained"
    assert by_framework & {f"{row['group_id']}/{row['sample_index']}" for row in whole}
    for row in whole:
        pairs = list(zip(row["response_tokens"], row["logprobs"], row["loss_mask"], strict=True))
        own = tokenizer.decode([token for token, _, mask in pairs if mask])
        foreign = tokenizer.decode([token for token, _, mask in pairs if not mask])
        assert "<tool_response>" in foreign
        assert "<tool_response>" not in own
        assert {logprob for _, logprob, mask in pairs if not mask} == {0.0}
        assert all(logprob < 0 for _, logprob, mask in pairs if mask)
        assert row["part_contexts"] is not None, "tools stand in the context, and not in the dataset's prompt"
        assert sum(span["num_tokens"] for span in row["spans"]) == len(pairs)
    right = [row for row in whole if row["reward"] == 1.0]
    assert right, "the model knows its part by heart"


class LookingAgent(ThreadedAgent):
    """Sends the drawing of its prompt without colours, and then a closer look at it, in Anthropic's protocol."""

    def play(self, session: dict[str, Any]) -> None:
        (given,) = (part["image_url"]["url"] for part in session["messages"][0]["content"] if "image_url" in part)
        with Image.open(io.BytesIO(base64.b64decode(given.partition(",")[2]))) as drawing:
            colours = drawing.convert("RGB")
        first = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(colours.convert('L'))}"}}
        asked = {"role": "user", "content": [first, {"type": "text", "text": "colour?"}]}
        reply = self.http.post(f"{session['base_url']}/chat/completions", json={"messages": [asked]})
        if reply.status_code != 200:
            return  # its engine died: the sample is issued again
        answer = reply.json()["choices"][0]["message"]["content"]
        talk = [
            {"role": "user", "content": [block(colours.convert("L")), {"type": "text", "text": "colour?"}]},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": [block(colours.resize((48, 48))), {"type": "text", "text": "closer"}]},
        ]
        reply = self.http.post(f"{session['base_url']}/messages", json={"messages": talk, "max_tokens": 1})
        if reply.status_code == 200:
            self.http.post(f"/sessions/{session['id']}/finish", json={})


def encoded(image: Image.Image) -> str:
    written = io.BytesIO()
    image.save(written, format="PNG")
    return base64.b64encode(written.getvalue()).decode()


def block(image: Image.Image) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(image)}}


@pytest.mark.slow
def test_images_that_an_agent_sends_are_trained_through_the_death_of_an_engine(
    tmp_path: Path,
    door_of: Any,  # noqa: ANN401
) -> None:
    overrides = (
        "episode.kind=gateway", "episode.generate=null", "evaluation.datasets=[]", "evaluation.every=null",
        "sampling.samples_per_group=4", "filter.drop_zero_spread=false", "learner.groups_per_batch=2",
        f"run.num_steps={NUM_STEPS}", "runtime.heartbeat_timeout_s=60", "engines.slots=4",
    )  # fmt: skip
    with LiveRun("examples/vlm_zoom.yaml", tmp_path, overrides) as run:
        run.await_file("gateway/token")
        agents = [LookingAgent(*door) for door in [door_of(run.folder)] * 2]
        run.await_steps(1)
        os.kill(run.pid_of("engine/0"), signal.SIGKILL)
        summary = run.finish()
        folder = run.folder
    for agent in agents:
        agent.thread.join(120)
    assert summary.completed
    assert summary.balance.in_system == 0
    assert audit_ledger(folder / LEDGER_FILE).findings == ()
    rows = [
        row for file in (folder / "samples").glob("*.parquet") for row in cast("Any", pq).read_table(file).to_pylist()
    ]
    assert {row["version"] for row in rows} == set(range(1, NUM_STEPS + 1))
    for row in rows:
        (grey, closer) = row["part_media"][0]
        assert grey["at"] < 0 < closer["at"]
        assert not any(row["loss_mask"][closer["at"] : closer["at"] + closer["num_tokens"]])
        for each in (grey, closer):
            assert hashlib.sha256(Path(each["reference"]).read_bytes()).hexdigest() == each["digest"]
    for step in read_steps(folder):
        difference = step.metrics["train/train_rollout_logprob_abs_diff"]
        assert difference is not None
        assert difference < 1e-5, "engine and learner see the same"
