"""Samples and Ledger in a browser: a long table, one sample and its life, the SQL box; texts of models stay texts."""

from __future__ import annotations

import shutil
from contextlib import closing
from typing import TYPE_CHECKING, Any

import ledger_entries as make
import pytest
from dashboard_runs import MARKUP, finished_run
from sample_runs import EVIL_REASON, dump_sample, small_run
from serving import Serving, browser_path
from test_dashboard_page import PHONE, Tab, axe, expect
from test_dashboard_page import browser as browser_fixture

from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.benchmarks.sample_table import make_ledger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(not browser_path(), reason="no Chromium is installed; PENSTOCK_BROWSER may name one")

Browser = Any
browser = browser_fixture
"""One for all tests of this file too."""
ROW = ".grid .rows .row"
LIVE_MS = 5000


@pytest.fixture(
    scope="module", params=[40_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def num_samples(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory, num_samples: int) -> Path:
    folder = finished_run(tmp_path_factory.mktemp("big") / "run")
    make_ledger(folder / LEDGER_FILE, num_samples)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_run(tmp_path_factory.mktemp("small") / "run")
    dump_sample(folder, 0, 1)
    return folder


@pytest.fixture
def tab(browser: Browser, small: Path) -> Iterator[Tab]:
    with Serving([small]) as serving:
        opened = Tab(browser, serving)
        yield opened
        opened.close()
        assert opened.complaints == []


def has_no_markup(tab: Tab) -> None:
    assert tab.page.evaluate("window.broken === undefined")
    assert tab.page.locator("main img, main script").count() == 0


def rows(tab: Tab) -> list[list[str]]:
    """Texts of the cells that are in the page. In one go, as a row that is drawn anew between being found and being
    read has no lines any more."""
    texts: list[str] = tab.page.evaluate("row => [...document.querySelectorAll(row)].map(each => each.innerText)", ROW)
    return [text.split("\n") for text in texts]


def test_a_long_table_is_filtered_sorted_and_walked_without_loading_it(
    browser: Browser, big: Path, num_samples: int
) -> None:
    with Serving([big]) as serving:
        tab = Tab(browser, serving)
        page = tab.page
        page.evaluate("hash => { location.hash = hash }", "#/samples")
        expect(page.locator("progress[aria-label='index of samples']")).to_be_visible()
        told = page.locator("main [role=status]").first
        expect(told).to_contain_text(f"{num_samples:,} of {num_samples:,}", timeout=600_000)
        assert 0 < len(rows(tab)) < 60
        newest = num_samples // 8 - 1
        assert rows(tab)[0][0] == f"{newest}/7"

        page.select_option(".filters select >> nth=0", label=next(
            text for text in page.locator(".filters option").all_inner_texts() if text.startswith("– failed: deadline")
        ))  # fmt: skip
        expect(page.locator(f"{ROW} .fate").first).to_have_text("failed: deadline")
        assert {row[1] for row in rows(tab)} == {"failed: deadline"}
        page.click("text=clear")

        page.fill("[aria-label='tokens from']", "1000")
        page.click("[data-sort=tokens]")
        page.click("[data-sort=tokens]")  # now the shortest first
        expect(page.locator("[aria-sort=ascending]")).to_have_text("tokens")
        expect(page.locator(f"{ROW} .n").nth(2)).to_have_text("1,000")
        lengths = [int(row[4].replace(",", "")) for row in rows(tab)]
        assert lengths == sorted(lengths)
        page.click("text=clear")

        page.click("[data-sort=group]")
        expect(told).to_contain_text(f"{num_samples:,} of {num_samples:,}")
        page.focus(".grid")
        page.keyboard.press("End")
        expect(page.locator(f"{ROW}.current a")).to_have_text("0/0")
        page.keyboard.press("PageUp")
        page.keyboard.press("Home")
        expect(page.locator(f"{ROW}.current a")).to_have_text(f"{newest}/7")
        page.evaluate("() => { const grid = document.querySelector('.grid'); grid.scrollTop = grid.scrollHeight / 2 }")
        middle = page.locator(f"{ROW} a").first
        expect(middle).not_to_have_text(f"{newest}/7")
        assert abs(int(middle.inner_text().split("/")[0]) / newest - 0.5) < 0.02
        assert len(rows(tab)) < 60
        assert tab.complaints == []
        tab.close()


def test_a_sample_is_opened_and_its_life_followed(tab: Tab) -> None:
    page = tab.page
    tab.look("samples")
    page.locator(ROW, has_text="0/0").first.click()
    expect(page.locator("article h2")).to_contain_text("Sample 0/0")
    assert "sample=0%2F0" in page.url
    assert page.locator(".said.response pre").inner_text().startswith(f"{MARKUP} \\x1b]0;title\\x07 \\u202e")
    expect(page.locator(".token")).to_have_count(3)
    page.click("text=weight version")
    expect(page.locator("[data-strip=version]")).to_have_attribute("aria-pressed", "true")
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-detail")).to_contain_text("log-prob -0.5 · weights of version 0")
    life = page.locator(".lanes svg")
    expect(life.locator("text=attempt 1")).to_be_visible()
    assert life.locator("path.again").count() == 1
    assert [each.inner_html() for each in life.locator("rect.made title").all()] == [
        "version 0: 1 token",
        "version 1: 2 tokens",
    ]
    page.click("text=as a table")
    expect(page.locator("[aria-label=stages] tr", has_text="attempt 1").first).to_be_visible()
    has_no_markup(tab)
    page.click("nav.crumbs >> text=0/1")
    expect(page.locator("article h2")).to_contain_text("Sample 0/1")
    page.click("[data-strip=ratio]")
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-detail")).to_contain_text("learner -0.75 · ratio 1.25 · advantage 2 ·")
    shades = page.locator(".token").evaluate_all("all => all.map((one) => one.style.background)")
    assert "var(--c0)" in shades[0]
    assert shades[-1] == "transparent"
    page.go_back()
    expect(page.locator("article h2")).to_contain_text("Sample 0/0")
    page.click("text=← all samples")
    expect(page.locator(ROW).first).to_be_visible()


def test_a_sample_is_opened_at_once_though_the_table_took_long(browser: Browser, small: Path) -> None:
    """Views rest nine times as long as they worked; whoever clicks does not wait for that."""
    with Serving([small]) as serving:
        tab = Tab(browser, serving)
        page, held = tab.page, list[Any]()
        page.clock.install()

        def hold(route: Any) -> None:  # noqa: ANN401 - of Playwright, which may not be installed
            held.append(route)

        page.route("**/api/samples/choices*", hold)
        page.evaluate("hash => { location.hash = hash }", "#/samples")
        expect(page.locator("progress[aria-label='index of samples']")).not_to_be_visible()
        while not held:
            page.wait_for_timeout(10)
        page.clock.run_for(60_000)
        for route in held:
            route.continue_()
        page.locator(ROW, has_text="0/0").first.click()
        expect(page.locator("article h2")).to_contain_text("Sample 0/0")
        assert tab.complaints == []
        tab.close()


def test_a_row_that_is_drawn_anew_while_it_is_pressed_is_clicked_nevertheless(tab: Tab) -> None:
    page = tab.page
    tab.look("samples")
    row = page.locator(ROW, has_text="0/0").first
    row.hover()
    page.mouse.down()
    page.evaluate("""() => new Promise((resolve) => {
        document.querySelector(".grid").dispatchEvent(new Event("scroll"));
        requestAnimationFrame(() => requestAnimationFrame(resolve));
    })""")
    page.mouse.up()
    expect(page.locator("article h2")).to_contain_text("Sample 0/0")


def test_a_cause_of_death_is_told_and_what_was_not_kept(tab: Tab) -> None:
    tab.look("samples?sample=1%2F0")
    assert tab.page.locator(".death h3").inner_text() == "Cause: reward_timeout"
    assert MARKUP in tab.page.locator(".death pre").inner_text()
    assert "run.keep_samples=true" in tab.page.locator("article").inner_text()
    has_no_markup(tab)


def test_the_text_of_models_is_text_in_the_table_and_in_answers(tab: Tab) -> None:
    tab.look("samples")
    expect(tab.page.locator(f"{ROW} .text", has_text="<script>").first).to_be_visible()
    has_no_markup(tab)
    tab.look("ledger")
    expect(tab.page.locator("[aria-label='reasons of failures']")).to_contain_text(MARKUP)
    tab.page.fill("#sql", "SELECT reason, char(60) || 'b>' AS \"<i>x</i>\" FROM reasons")
    tab.page.keyboard.press("Control+Enter")
    answer = tab.page.locator(".answer")
    expect(answer.locator("td").first).to_contain_text(EVIL_REASON[: len(MARKUP)])
    assert answer.locator("th").all_inner_texts() == ["reason", "<i>x</i>"]
    expect(answer).to_contain_text("1 row in")
    has_no_markup(tab)


def test_a_question_that_is_refused_says_why(browser: Browser, small: Path) -> None:
    with Serving([small]) as serving:
        tab = Tab(browser, serving)
        tab.look("ledger")
        tab.page.fill("#sql", "PRAGMA writable_schema = ON")
        tab.page.click(".sql button.primary")
        expect(tab.page.locator(".answer [role=alert]")).to_contain_text("only SELECT")
        tab.page.get_by_role("button", name="why samples failed").click()
        expect(tab.page.locator(".answer td").first).to_have_text("reward_timeout")
        assert all("422" in told for told in tab.complaints)  # the browser's own line about the answer
        tab.close()


def test_what_comes_to_the_ledger_comes_to_the_table(browser: Browser, tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "live")
    entries = make.whole_run()
    with closing(SqliteStore(folder / LEDGER_FILE)) as store, Serving([folder]) as serving:
        store.claim(1)
        store.commit(entries[:4])
        tab = Tab(browser, serving)
        tab.look("samples")
        expect(tab.page.locator(f"{ROW} .fate").first).to_have_text("in the system")
        expect(tab.page.locator("#live.on")).to_be_visible()
        store.commit(entries[4:9])
        expect(tab.page.locator(f"{ROW} .fate", has_text="trained at step 1").first).to_be_visible(timeout=LIVE_MS)
        expect(tab.page.locator("main [role=status]").first).to_contain_text("9 of 9 samples")
        assert tab.complaints == []
        tab.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["samples", "samples?sample=0%2F0", "ledger"])
def test_axe_finds_nothing_serious_and_a_phone_scrolls_down_only(
    browser: Browser, small: Path, view: str, scheme: str
) -> None:
    with Serving([small]) as serving:
        tab = Tab(browser, serving, color_scheme=scheme, bypass_csp=True)
        tab.look(view)
        found = axe.Axe().run(tab.page).response["violations"]
        serious = [
            (each["id"], [node["html"][:200] for node in each["nodes"]][:3])
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        assert not serious
        tab.page.set_viewport_size(PHONE)
        tab.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        tab.close()


def test_a_copy_without_a_ledger_says_so(browser: Browser, small: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(small, tmp_path / "copied")
    for name in (LEDGER_FILE, f"{LEDGER_FILE}-wal", f"{LEDGER_FILE}-shm"):
        (copied / name).unlink(missing_ok=True)
    with Serving([copied]) as serving:
        tab = Tab(browser, serving)
        for view in ("samples", "ledger"):
            tab.look(view)
            assert "Buffer has not started" in tab.page.locator("main").inner_text()
        assert tab.complaints == []
        tab.close()
