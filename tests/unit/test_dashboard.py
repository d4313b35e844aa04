"""The dashboard's server: who is answered, what is answered of runs in every state, and when a page is told of news."""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
import shutil
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import numpy as np
import pytest
from dashboard_runs import MARKUP, Asker, crashed_run, finished_run, recorder_of, report_actors, report_step, served
from test_observability_report import spans

from penstock.messages.errors import UserFault
from penstock.messages.training import Activity, ActorReported
from penstock.runtime.dashboard import server
from penstock.runtime.dashboard.book import RunBook
from penstock.runtime.dashboard.devices_view import FULL, MAX_LANES, NUM_WORST, Window, answer_devices
from penstock.runtime.dashboard.flow_view import FLOW, Flow, answer_flow
from penstock.runtime.dashboard.routes import Query, Route, View
from penstock.runtime.dashboard.server import ASSETS, Dashboard
from penstock.runtime.dashboard.views import VIEWS
from penstock.runtime.dashboard.watching import Change, Client, Watch
from penstock.runtime.observability.shares import LABELS
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

TOLD_S = 2.0
ROUTES = [route.path for view in VIEWS for route in view.routes]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("dashboard") / "finished")


# --- who is answered -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/api/overview", "/api/changes"])
@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({"Host": "evil.example"}, "own machine"),
        ({"Host": "127.0.0.1.evil.example:80"}, "own machine"),
        ({"Origin": "http://evil.example"}, "other sites"),
        ({"Origin": "http://localhost:1"}, "other sites"),
        ({"Origin": "null"}, "other sites"),
    ],
)
def test_other_hosts_and_pages_of_other_sites_are_refused(
    finished: Path, path: str, headers: dict[str, str], word: str
) -> None:
    async def ask() -> None:
        async with served([finished]) as asker:
            told = await asker.get(path, status=403, headers=headers)
            assert word in told["error"]

    asyncio.run(ask())


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer wrong", "Basic {token}", "{token}"])
def test_without_the_token_nothing_is_said_of_a_run(finished: Path, given: str) -> None:
    async def ask() -> None:
        async with served([finished]) as asker:
            for path in ("/api/overview", "/api/changes", *(f"/api/{route}" for route in ROUTES)):
                headers = {"Authorization": given.replace("{token}", asker.token)}
                told = await asker.get(path, status=401, headers=headers)
                assert "penstock dashboard" in told["error"]
                assert finished.name not in told["error"]
            async with asker.session.post(f"{asker.url}/api/command", headers={"Origin": asker.url}) as answer:
                assert answer.status == 401

    asyncio.run(ask())


def test_every_answer_has_the_policy_and_none_may_be_taken_for_something_else(finished: Path) -> None:
    async def ask() -> None:
        async with served([finished]) as asker:
            for path in ("/", "/app.js", "/uplot/uPlot.iife.min.js", "/palette.css", "/nothing", "/api/overview"):
                async with asker.session.get(asker.url + path) as answer:
                    policy = answer.headers["Content-Security-Policy"]
                    assert answer.headers["X-Content-Type-Options"] == "nosniff"
                    assert "default-src 'none'" in policy
                    assert "unsafe" not in policy
                    assert "http" not in policy
                    assert answer.headers["Cache-Control"] == "no-store"

    asyncio.run(ask())


@pytest.mark.parametrize(
    "path", ["/../server.py", "/%2e%2e/server.py", "/..%2fserver.py", "//etc/passwd", "/uplot/LICENSE"]
)
def test_only_the_assets_are_served(finished: Path, path: str) -> None:
    async def ask() -> None:
        async with served([finished]) as asker:
            reader, writer = await asyncio.open_connection("127.0.0.1", asker.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{asker.port}\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 404")

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"command": {"type": "PauseGrants"}}, {}, 403),  # no Origin: no page sent it
        ({"command": {"type": "PauseGrants"}}, {"Origin": "http://evil.example"}, 403),
        ({"command": {"type": "Format"}}, None, 400),
        ({"command": {"type": "SwitchPolicy"}}, None, 400),
        ({"command": {"type": "PauseGrants"}, "more": 1}, None, 400),
        ({"command": {"type": "PauseGrants"}}, None, 422),  # this run does not go on
    ],
)
def test_a_command_needs_the_page_and_a_run_that_goes_on(
    finished: Path, body: dict[str, Any], headers: dict[str, str] | None, status: int
) -> None:
    async def ask() -> None:
        async with served([finished]) as asker:
            given = {
                "Authorization": f"Bearer {asker.token}",
                **({"Origin": asker.url} if headers is None else headers),
            }
            async with asker.session.post(f"{asker.url}/api/command", json=body, headers=given) as answer:
                assert answer.status == status, await answer.text()
            async with asker.session.get(f"{asker.url}/api/command", headers=given) as answer:
                assert answer.status in (403, 404)  # a link cannot tell a run anything

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("run=1", "1 runs"),
        ("run=-1", "1 runs"),
        ("run=x", "1 runs"),
        ("nonsense=1", "nonsense"),
        ("columns=9999999", "2000"),
    ],
)
def test_a_query_that_cannot_be_answered_is_refused_with_the_reason(finished: Path, query: str, word: str) -> None:
    async def ask() -> None:
        async with served([finished]) as asker:
            told = await asker.get(f"/api/devices?{query}", status=404 if query.startswith("run") else 400)
            assert word in told["error"]

    asyncio.run(ask())


# --- bounds ----------------------------------------------------------------------------------------------------------


class Word(msgspec.Struct):
    text: str


def _view(answer: Any, limit_s: float = 5.0) -> View:  # noqa: ANN401
    return View(name="v", title="V", files=(), routes=(Route(path="v", query=Query, answer=answer, limit_s=limit_s),))


def _asked(folder: Path, view: View) -> tuple[int, dict[str, str]]:
    async def ask() -> tuple[int, dict[str, str]]:
        dashboard = Dashboard([folder], [view])
        listener = await dashboard.open(0)
        headers = {"Authorization": f"Bearer {dashboard.token}"}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{listener.port}/api/v", headers=headers) as answer,
            ):
                return answer.status, await answer.json()
        finally:
            await listener.close()

    return asyncio.run(ask())


def test_a_users_fault_is_told_as_it_is_and_controls_in_it_are_spelled_out(finished: Path) -> None:
    def fails(_folder: Path, _query: Query) -> Word:
        raise UserFault(f"metrics.jsonl, line 3 \x1b[31m {MARKUP}")

    status, told = _asked(finished, _view(fails))
    assert status == 422
    assert told["error"].startswith("metrics.jsonl, line 3 \\x1b[31m")


def test_an_answer_that_takes_too_long_is_given_up(finished: Path) -> None:
    def waits(_folder: Path, _query: Query) -> Word:
        time.sleep(1.0)
        return Word("late")

    status, told = _asked(finished, _view(waits, limit_s=0.05))
    assert (status, "0.05 s" in told["error"]) == (504, True)


def test_an_answer_that_is_too_large_is_not_sent(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_ANSWER_BYTES", 1000)

    def says(_folder: Path, _query: Query) -> Word:
        return Word("x" * 1001)

    status, told = _asked(finished, _view(says))
    assert (status, "1,000 bytes" in told["error"]) == (413, True)


def test_so_many_pages_may_listen_and_no_more(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CLIENTS", 2)

    async def ask() -> None:
        async with served([finished]) as asker:
            headers = {"Authorization": f"Bearer {asker.token}"}
            first, second = [await asker.session.get(f"{asker.url}/api/changes", headers=headers) for _ in range(2)]
            assert await first.content.readline() == await second.content.readline() == b": listening\n"
            assert "close one" in (await asker.get("/api/changes", status=503))["error"]
            first.close()
            second.close()

    asyncio.run(ask())


# --- runs in every state ---------------------------------------------------------------------------------------------


async def _everything(asker: Asker, run: int = 0) -> dict[str, Any]:
    return {path: await asker.get(f"/api/{path}?run={run}") for path in ("flow", "devices", "learning")}


def test_a_finished_run_a_killed_one_and_a_copy_of_another_machine_are_shown(finished: Path, tmp_path: Path) -> None:
    crashed = crashed_run(tmp_path / "crashed")
    copied = shutil.copytree(finished, tmp_path / "copied")

    async def ask() -> None:
        async with served([finished, crashed, copied]) as asker:
            overview = await asker.get("/api/overview")
            states = [(head["state"], head["version"], head["num_steps"]) for head in overview["runs"]]
            assert states == [("completed", 25, 25), ("vanished", 5, 25), ("completed", 25, 25)]
            assert overview["runs"][0]["story"] == f"25 batches trained {MARKUP}"
            first, second, third = [await _everything(asker, run) for run in range(3)]
            assert first == third
            assert second["learning"]["num_steps"] == 5
            (reward,) = first["learning"]["groups"][0]["charts"][0]["lines"]
            assert reward["y"] == [round(version / 25, 6) for version in range(1, 26)]

    asyncio.run(ask())


def test_a_folder_where_nothing_was_reported_yet_is_shown_too(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path / "new")

    async def ask() -> None:
        async with served([tmp_path / "new"]) as asker:
            told = await _everything(asker)
            assert told["learning"]["groups"] == []
            assert told["devices"]["lanes"] == []
            assert told["flow"]["at_s"] is None
            assert [node["name"] for node in told["flow"]["nodes"]][:2] == ["prompt_source", "engines"]

    asyncio.run(ask())
    recorder.abandon()


def test_a_damaged_file_is_named(finished: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(finished, tmp_path / "damaged")
    (damaged / "activity.jsonl").write_text("{}\n")

    async def ask() -> None:
        async with served([damaged]) as asker:
            assert "activity.jsonl" in (await asker.get("/api/devices", status=422))["error"]
            assert (await asker.get("/api/learning"))["num_steps"] == 25

    asyncio.run(ask())


# --- what changes ----------------------------------------------------------------------------------------------------


async def _next_change(stream: aiohttp.ClientResponse) -> dict[str, Any]:
    while True:
        line = await stream.content.readline()
        assert line, "the stream goes on"
        if line.startswith(b"data: "):
            change: dict[str, Any] = msgspec.json.decode(line.removeprefix(b"data: "))
            return change


def test_a_page_is_told_within_two_seconds_of_a_line_that_was_added(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path / "live")
    report_step(recorder, 1)

    async def ask() -> None:
        async with served([tmp_path / "live"]) as asker:
            assert (await asker.get("/api/learning"))["num_steps"] == 1
            headers = {"Authorization": f"Bearer {asker.token}"}
            async with asker.session.get(f"{asker.url}/api/changes", headers=headers) as stream:
                assert await stream.content.readline() == b": listening\n"
                for version in (2, 3):
                    report_step(recorder, version)
                    async with asyncio.timeout(TOLD_S):
                        change = await _next_change(stream)
                        assert change == {"run": 0, "files": ["metrics.jsonl"]}
                        assert (await asker.get("/api/learning"))["num_steps"] == version

    asyncio.run(ask())
    recorder.abandon()


def test_pages_that_ask_the_same_share_an_answer_until_a_file_of_it_changes(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    made: list[Path] = []

    def counted(path: Path, query: Query) -> Flow:
        made.append(path)
        return answer_flow(path, query)

    shared = Route(path="flow", query=Query, answer=counted, is_shared=True)
    alone = Route(path="alone", query=Query, answer=counted)

    async def ask() -> None:
        async with served(
            [finished, folder], [View(name="flow", title="", files=FLOW.files, routes=(shared, alone))]
        ) as asker:
            first, *others = await asyncio.gather(*(asker.get("/api/flow?run=1") for _ in range(5)))
            assert (others, made) == ([first] * 4, [folder])
            await asker.get("/api/flow")
            assert made == [folder, finished]
            (folder / "actors.json").touch()
            assert await asker.get("/api/flow?run=1") == first
            assert made == [folder, finished, folder]
            await asker.get("/api/alone")
            await asker.get("/api/alone")
            assert made == [folder, finished, folder, finished, finished]

    asyncio.run(ask())


def test_an_answer_that_failed_is_not_shared(finished: Path) -> None:
    answers = iter([UserFault("not now")])

    def fails_once(path: Path, query: Query) -> Flow:
        for fault in answers:
            raise fault
        return answer_flow(path, query)

    route = Route(path="flow", query=Query, answer=fails_once, is_shared=True)

    async def ask() -> None:
        async with served([finished], [View(name="flow", title="", files=FLOW.files, routes=(route,))]) as asker:
            assert (await asker.get("/api/flow", status=422))["error"] == "not now"
            await asker.get("/api/flow")

    asyncio.run(ask())


def test_nothing_is_looked_at_while_no_page_listens(tmp_path: Path) -> None:
    watch = Watch([tmp_path], ["metrics.jsonl"], interval_s=0.0)

    async def listen() -> None:
        looks = 0
        look = watch.look

        def counted() -> set[tuple[int, str]]:
            nonlocal looks
            looks += 1
            return look()

        watch.look = counted  # type: ignore[method-assign]
        watching = asyncio.create_task(watch.run())
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        for _ in range(100):
            await asyncio.sleep(0)
        assert looks == 0
        client = Client()
        watch.clients.add(client)
        assert await client.changes(TOLD_S) == [Change(0, ("metrics.jsonl",))]
        watching.cancel()

    asyncio.run(listen())


def test_a_file_that_became_shorter_is_read_anew(finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "copied")
    book = RunBook(folder)
    assert len(book.steps()) == 25
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
    assert [row.version for row in book.steps()] == [1, 2, 3]
    assert book.lanes().keys() == RunBook(folder).lanes().keys()


# --- flow and lanes --------------------------------------------------------------------------------------------------


def test_flow_says_who_does_what_what_is_held_up_and_who_was_lost(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path / "live")
    for version in (1, 2, 3):
        report_actors(recorder, 3, version)
        report_step(recorder, version)
    recorder.lost("engine/1", f"engine/1 was lost: its process was killed {MARKUP}")
    flow = answer_flow(tmp_path / "live", Query())
    recorder.abandon()
    nodes = {node.name: node for node in flow.nodes}
    assert (nodes["engines"].states, nodes["engines"].num_down, nodes["engines"].num_restarts) == ({"working": 2}, 1, 1)
    assert nodes["engines"].pressure == "27 requests wait for a slot"
    assert {figure.label: figure.value for figure in nodes["engines"].figures}["running"] == 9
    assert nodes["learner"].states == {"working": 1}
    rates = {edge.what.label: edge.what.value for edge in flow.edges}
    assert rates["generated"] == pytest.approx(300.0)  # each of three engines 100 tokens a second
    assert rates["versions"] == pytest.approx(60.0)
    assert flow.waits.splitlines()[0] == f"engine/0 waits for reward of 12/3 {MARKUP} from scorer, for 3 s"
    assert [loss.name for loss in flow.losses] == ["engine/1"]
    assert flow.actors[0].name == "engine/1"  # who is down comes first
    assert flow.num_actors == len(flow.actors) == 10


def test_lanes_add_up_whatever_part_of_the_time_is_asked_for(finished: Path) -> None:
    whole = answer_devices(finished, Window(columns=100))
    assert [lane.name for lane in whole.lanes] == ["learner", "engine/0"]
    for window in (Window(columns=100), Window(columns=10), Window(start_s=11.0, end_s=12.5, columns=40)):
        told = answer_devices(finished, window)
        for lane in told.lanes:
            assert sum(lane.percentages.values()) == pytest.approx(100.0)
            columns = [sum(each) for each in zip(*lane.shares.values(), strict=True)]
            assert all(abs(total - FULL) <= len(lane.shares) for total in columns), lane.name
    lane = answer_devices(finished, Window(start_s=13.25, end_s=14.0, columns=10)).lanes[0]
    assert lane.percentages["working"] == lane.percentages["empty"] == 50.0  # a span of work, half of its slots in use


def test_many_engines_are_one_band_and_the_worst_have_lanes(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path / "large")
    report_actors(recorder, 100, 1)
    idle = msgspec.structs.replace(spans(2, 1.0)[0], end_s=2.0, activity=Activity.WAITING_FOR_DEMAND)
    for number in range(100):
        activities = (idle,) if number in (7, 42) else spans(2, 1.0)
        recorder.actor(ActorReported(name=f"engine/{number}", epoch=1, state="g", activities=activities), 2.0)
    report_step(recorder, 1)
    told = answer_devices(tmp_path / "large", Window(start_s=1.0, end_s=2.0, columns=10))
    recorder.abandon()
    names = [lane.name for lane in told.lanes]
    assert len(names) <= MAX_LANES
    assert names[:4] == ["learner", "all 100 engines", "engine/7", "engine/42"]
    assert len(names) == 2 + NUM_WORST
    assert told.num_lanes == 101
    assert told.band is not None
    assert told.band.p50[-1] == told.band.p90[-1] == 50.0
    mean = told.lanes[1]
    assert mean.percentages["waiting_for_demand"] == pytest.approx(2.0, abs=0.2)


# --- assets ----------------------------------------------------------------------------------------------------------


def test_every_view_has_its_script_and_no_script_makes_markup_of_text() -> None:
    assert {view.name for view in VIEWS} == {path.stem for path in (ASSETS / "views").glob("*.js")}
    for path in [*ASSETS.glob("*.js"), *ASSETS.glob("views/*.js")]:
        code = re.sub(r"(?m)^\s*//.*$|/\*\*.*?\*/", "", path.read_text())
        words = "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\\(|new Function|srcdoc|setHTML"
        assert not re.search(words, code), path.name
        assert "http://" not in code.replace("http://www.w3.org/2000/svg", ""), path.name


def test_the_palette_is_the_reports_in_light_and_dark() -> None:
    style = server.REPORT_STYLE.read_text()
    made = server._palette()  # pyright: ignore[reportPrivateUsage]
    for colour in re.findall(r"--working: (#\w+)", style):
        assert f"--working: {colour}" in made
    assert made.count("--down:") == 3  # light, dark by the browser, dark by the button
    assert all(f"--{state.value}:" in made for state in LABELS)


SEEN = {
    "as most people": np.eye(3),
    "without red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "without green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "without blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
"""Linear sRGB as people see it who lack a kind of cones (Machado, Oliveira and Fernandes 2009, severity 1)."""
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
LEAST_DIFFERENCE = 12.0
"""In CIELAB; neighbours that differ by 2.3 are just told apart."""


def _lab(colour: str, seen: NDArray[np.float64]) -> NDArray[np.float64]:
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(np.maximum(TO_XYZ @ np.clip(seen @ linear, 0, 1) / TO_XYZ.sum(axis=1), 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_states_of_a_lane_are_told_apart_by_colour_or_by_hatching(scheme: int, seen: str) -> None:
    hatched = re.search(r"(?s)const HATCHES = \{(.*?)\};", (ASSETS / "views" / "devices.js").read_text())
    assert hatched is not None
    nothing = Activity.ABSENT  # an engine that is not in the run is not drawn
    rows = [row for row in (*LABELS, "empty") if row is not nothing]
    plain = [row for row in rows if row not in re.findall(r"(\w+):", hatched[1])]
    palette = server._LIGHT_AND_DARK.search(server.REPORT_STYLE.read_text())  # pyright: ignore[reportPrivateUsage]
    assert palette is not None
    colours = dict(re.findall(r"--(\w+): (#\w{6})", palette[scheme + 1]))
    for one, other in itertools.combinations(plain, 2):
        difference = _lab(colours[one], SEEN[seen]) - _lab(colours[other], SEEN[seen])
        assert np.linalg.norm(difference) > LEAST_DIFFERENCE, f"{one} and {other} look alike"


def test_base64_of_a_lane_is_what_the_page_reads(finished: Path) -> None:
    lane = answer_devices(finished, Window(columns=20)).lanes[0]
    sent = msgspec.json.decode(msgspec.json.encode(lane))
    assert {name: base64.b64decode(text) for name, text in sent["shares"].items()} == lane.shares
    assert terminal_text(lane.name) == lane.name
