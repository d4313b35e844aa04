"""The dashboard's page in a browser: what a person sees and does there, and what the text of a run cannot do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from dashboard_runs import MARKUP, crashed_run, finished_run, recorder_of, report_actors, report_step
from live_run import LiveRun
from serving import Serving, browser_path
from typer.testing import CliRunner

from penstock.runtime.cli.app import app
from penstock.runtime.dashboard import controls
from penstock.runtime.dashboard.views import VIEWS
from penstock.runtime.hosts.processes.operator_door import CommandAnswer
from penstock.runtime.launch.runs import open_record
from penstock.runtime.observability.operations import PolicySwitch, read_operations

if TYPE_CHECKING:
    from collections.abc import Iterator

playwright: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not here; make browser adds it")
expect: Any = playwright.expect
axe: Any = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not here; make browser adds it")
pytestmark = pytest.mark.skipif(not browser_path(), reason="no Chromium is installed; PENSTOCK_BROWSER may name one")

NAMES = [view.name for view in VIEWS]
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
LIVE_MS = 2000
SHOWN_MS = 15_000
STOPPED_S = 30.0
MODELLED = Path(__file__).parents[1] / "chaos" / "modelled.yaml"
NO_EVALUATION = tuple(
    f"evaluation.{each}" for each in ("datasets=[]", "every=null", "before_first=false", "at_end=false")
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("browser")
    with Serving(
        [finished_run(folder / f"finished {MARKUP.replace('/', '')}"), crashed_run(folder / "crashed")]
    ) as one:
        yield one


class Tab:
    """A page, and everything that it complained of."""

    def __init__(self, browser: Any, serving: Serving, **options: Any) -> None:  # noqa: ANN401
        self.context = browser.new_context(viewport=WIDE, reduced_motion="reduce", **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(SHOWN_MS)
        self.complaints: list[str] = []
        self.serving = serving
        self.page.on("pageerror", self._complained)
        self.page.on("console", self._said)
        self.page.goto(serving.link())
        self.page.wait_for_selector("#tabs a")

    def _complained(self, error: object) -> None:
        self.complaints.append(str(error))

    def _said(self, told: Any) -> None:  # noqa: ANN401
        if told.type == "error":
            self.complaints.append(told.text)

    def look(self, view: str) -> None:
        """Open a view, and wait until it has drawn something and asks for nothing more."""
        self.page.evaluate("hash => { location.hash = hash }", f"#/{view}")
        self.page.wait_for_selector(f"#tabs a[href^='#/{view.split('?')[0]}'][aria-selected=true]")
        self.page.wait_for_selector("main[aria-busy=false]")

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def tab(browser: Any, serving: Serving) -> Iterator[Tab]:  # noqa: ANN401
    opened = Tab(browser, serving)
    yield opened
    opened.close()
    assert opened.complaints == []


@pytest.mark.parametrize("run", [0, 1])
@pytest.mark.parametrize("view", NAMES)
def test_every_view_is_drawn_without_a_complaint(tab: Tab, view: str, run: int) -> None:
    tab.look(f"{view}?run={run}")
    assert tab.page.locator("#trouble").is_hidden(), tab.page.locator("#trouble").inner_text()
    expect(tab.page.locator("#head .badge")).to_have_text("completed" if run == 0 else "vanished")
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("view", NAMES)
def test_a_phone_scrolls_down_only(tab: Tab, view: str) -> None:
    tab.page.set_viewport_size(PHONE)
    tab.look(view)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", NAMES)
def test_axe_finds_nothing_serious(browser: Any, serving: Serving, view: str, scheme: str) -> None:  # noqa: ANN401
    tab = Tab(browser, serving, color_scheme=scheme, bypass_csp=True)  # axe is a script of another origin
    tab.look(view)
    found = axe.Axe().run(tab.page).response["violations"]
    tab.close()
    serious = [
        (each["id"], [node["html"][:200] for node in each["nodes"]][:3])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    assert not serious


def test_what_a_run_says_never_becomes_markup(tab: Tab) -> None:
    for view in NAMES:
        tab.look(view)
        assert tab.page.evaluate("window.broken === undefined")
        assert tab.page.locator("main img, main script, header img, header script").count() == 0
    assert MARKUP in tab.page.locator("#head .story").inner_text()


def test_the_policy_stops_what_a_mistake_of_ours_would_let_in(browser: Any, serving: Serving) -> None:  # noqa: ANN401
    tab = Tab(browser, serving)
    make = "text => { document.querySelector('main').innerHTML = text; }"
    with pytest.raises(playwright.Error, match="TrustedHTML"):
        tab.page.evaluate(make, MARKUP)
    tab.close()


def test_a_step_that_is_recorded_is_on_the_page_within_two_seconds(browser: Any, tmp_path: Path) -> None:  # noqa: ANN401
    recorder = recorder_of(tmp_path / "live")
    report_actors(recorder, 2, 1)
    report_step(recorder, 1)
    with Serving([tmp_path / "live"]) as live:
        tab = Tab(browser, live)
        for view, number in (("learning", 2), ("devices", 3), ("flow", 4)):
            tab.look(view)
            tab.page.wait_for_selector("#live.on")
            tab.page.focus("#tabs [aria-selected=true]")
            report_actors(recorder, 2, number)
            report_step(recorder, number)
            expect(tab.page.locator("#head")).to_contain_text(f"step {number} of", timeout=LIVE_MS)
            expect(tab.page.locator("#tabs [aria-selected=true]")).to_be_focused()
        expect(tab.page.locator("[data-node=learner] dd").first).to_have_text("4", timeout=LIVE_MS)
        assert tab.complaints == []
        tab.close()
    recorder.abandon()


def test_a_run_that_goes_on_is_told_to_change_its_policy_to_save_and_to_stop(browser: Any, tmp_path: Path) -> None:  # noqa: ANN401
    options = ("run.num_steps=100000", "staleness.policy=sync", "staleness.max_staleness=null", *NO_EVALUATION)
    with LiveRun(MODELLED, tmp_path, ("runtime.host=local", *options)) as run:
        run.await_steps(1)
        with Serving([run.folder]) as live:
            tab = Tab(browser, live)
            head, said = tab.page.locator("#head"), tab.page.locator("#controls output")
            expect(head).to_contain_text("sync, staleness at most 0")
            tab.page.click("#controls summary")
            tab.page.select_option("#controls select", "sync")
            tab.page.fill("#controls input", "2")
            tab.page.click("text=Switch policy")
            expect(said).to_contain_text("the policy sync means 0, found 2")
            tab.page.select_option("#controls select", "fully_async")
            tab.page.fill("#controls input", "4")
            tab.page.click("text=Switch policy")
            expect(said).to_contain_text("new grants follow fully_async with max_staleness 4")
            expect(head).to_contain_text("fully_async, staleness at most 4, since version")
            tab.page.click("text=Save")
            expect(said).to_contain_text("is saved")
            tab.page.click("text=Stop")
            tab.page.click("text=Stop: sure?")
            expect(tab.page.locator("#head .badge")).to_have_text("stopped")
            assert tab.complaints == []
            tab.close()
        run.process.wait(STOPPED_S)
    (switch,) = [each for each in read_operations(run.folder) if isinstance(each, PolicySwitch)]
    assert (switch.policy, switch.max_staleness) == ("fully_async", 4)
    done = CliRunner().invoke(app, ["audit", str(run.folder)])
    assert done.exit_code == 0, done.output


def says_markup(_folder: Path, _told: controls.Told) -> CommandAnswer:
    return CommandAnswer(accepted=True, text=f"yes {MARKUP}")


def test_what_a_run_answers_is_shown_as_text(
    browser: Any,  # noqa: ANN401
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = recorder_of(tmp_path / "live")
    open_record(tmp_path / "live", "live")  # this process drives it
    with Serving([tmp_path / "live"]) as live:
        tab = Tab(browser, live)
        said = tab.page.locator("#controls output")
        tab.page.click("#controls summary")
        tab.page.click("text=Save")
        expect(said).to_contain_text("cannot be told anything")  # no driver listens there
        monkeypatch.setattr(controls, "tell_run", says_markup)
        tab.page.click("text=Save")
        expect(said).to_have_text(f"yes {MARKUP}")
        assert tab.complaints == []
        tab.close()
    recorder.abandon()


def test_tabs_and_lanes_can_be_used_with_keys_alone(tab: Tab) -> None:
    tab.look("flow")
    tab.page.focus("#tabs a[aria-selected=true]")
    for name in (*NAMES[1:], NAMES[0]):
        tab.page.keyboard.press("ArrowRight")
        tab.page.wait_for_selector(f"#tabs a[href^='#/{name}'][aria-selected=true]:focus")
    tab.look("devices")
    tab.page.focus("canvas")
    tab.page.keyboard.press("ArrowDown")
    assert tab.page.locator("output.where").inner_text().startswith("learner at ")
    tab.page.keyboard.press("ArrowDown")
    assert tab.page.locator("output.where").inner_text().startswith("engine/0 at ")
    tab.page.keyboard.press("+")
    tab.page.wait_for_url(re.compile("to="), wait_until="commit")
    tab.page.keyboard.press("Escape")
    tab.page.wait_for_url(re.compile("#/devices$"), wait_until="commit")


def test_a_drag_over_the_lanes_shows_that_part_of_the_time(tab: Tab) -> None:
    tab.look("devices")
    box = tab.page.locator("canvas").bounding_box()
    middle = box["x"] + box["width"] / 2
    tab.page.mouse.move(middle, box["y"] + 30)
    tab.page.mouse.down()
    tab.page.mouse.move(middle + 100, box["y"] + 30, steps=4)
    tab.page.mouse.up()
    tab.page.wait_for_url(re.compile("from=.*to="), wait_until="commit")


def test_light_and_dark_follow_the_browser_and_the_button_stays_pressed(browser: Any, serving: Serving) -> None:  # noqa: ANN401
    background = "getComputedStyle(document.body).backgroundColor"
    tab = Tab(browser, serving, color_scheme="dark")
    dark = tab.page.evaluate(background)
    tab.page.click("#theme")
    light = tab.page.evaluate(background)
    assert light != dark
    tab.page.reload()
    tab.page.wait_for_selector("#tabs a")
    assert tab.page.evaluate(background) == light
    tab.close()


def test_several_runs_share_the_charts_and_a_run_can_be_chosen(tab: Tab) -> None:
    tab.look("learning")
    keys = tab.page.locator("#part-learning .card").first.locator(".key")
    assert [text.split(":")[0] for text in keys.all_inner_texts()][1] == "crashed"
    tab.page.select_option("#runs select", "1")
    tab.page.wait_for_url(re.compile("run=1"), wait_until="commit")
    expect(tab.page.locator("#head")).to_contain_text("vanished")


def test_the_link_gives_the_token_to_this_tab_and_leaves_the_address(tab: Tab) -> None:
    assert tab.serving.dashboard.token not in tab.page.url
    stranger = tab.page.context.browser.new_page()
    stranger.goto(tab.serving.link("flow"))
    expect(stranger.locator("#trouble")).to_contain_text("penstock dashboard")
    assert stranger.locator("#tabs a").count() == 0
    stranger.close()


def test_a_server_that_is_gone_is_said_and_one_that_is_back_is_heard(browser: Any, tmp_path: Path) -> None:  # noqa: ANN401
    folder = finished_run(tmp_path / "finished")
    with Serving([folder]) as one:
        tab = Tab(browser, one)
        tab.page.wait_for_selector("#live.on")
    tab.page.wait_for_selector("#live.off")
    assert "penstock dashboard" in tab.page.locator("#live").inner_text()
    tab.close()
