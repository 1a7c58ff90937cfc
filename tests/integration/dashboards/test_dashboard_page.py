"""Tests the live page and the report in a headless Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from dashboard_results import write_examples, write_trial
from dashboard_server import running_server

for module in ("streamlit", "plotly"):
    pytest.importorskip(module, reason="the extra polopt[dashboard] is not installed")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.timeout(900),
]

TABS = [
    "Experiments", "Compare", "AsyncGradients", "AsyncSamples", "DecentralizedAllReduce",
    "SyncGradients", "SyncSamples", "Faults", "Learner",
]  # fmt: skip
HOSTILE = '<img src=x onerror="window.attacked=1"><script>window.attacked=1</script>'
LOOKS = [(1280, "light"), (800, "dark"), (1280, "dark"), (800, "light")]
#: The usual tests have each width and each colour once.
every_look = pytest.mark.parametrize(
    "looks", [LOOKS[:2], pytest.param(LOOKS[2:], marks=pytest.mark.slow)], ids=["two", "others"]
)
# The number of traces with data in each plot, or -1 for a plot that is not drawn yet.
POINTS = """[...document.querySelectorAll('.js-plotly-plot')].map(plot => !plot._fullData ? -1 :
    (plot.data || []).reduce((n, t) => n + ((t.x && (t.x.length || t.x.bdata)) ? 1 : 0), 0))"""
# Pairs of panels, or of parts of a plot, that overlap by more than 2 px.
OVERLAPS = """(() => {
  const hits = [], box = e => e.getBoundingClientRect();
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
      Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
  const check = (parts, what) => parts.forEach((a, i) => parts.slice(i + 1).forEach(b => {
    if (meet(box(a), box(b))) hits.push(what + ': ' + a.textContent.slice(0, 40) + ' / ' +
        b.textContent.slice(0, 40)); }));
  check([...document.querySelectorAll(PANELS)], 'panels');
  document.querySelectorAll('.js-plotly-plot').forEach(plot => check(
      ['.legend', '.g-xtitle', '.g-ytitle', '.draglayer .xy .nsewdrag', '.colorbar'].map(
          s => plot.querySelector(s)).filter(e => e && box(e).width > 0), 'plot'));
  if (document.documentElement.scrollWidth > innerWidth + 1) hits.push('page is too wide');
  return hits; })()"""
PAGE_OVERLAPS = OVERLAPS.replace("PANELS", "'.st-key-panels > *'")
REPORT_OVERLAPS = OVERLAPS.replace("PANELS", "'section'")
# The number of tables that are wider than the page and have no visible scroll bar.
CUT_TABLES = """[...document.querySelectorAll('[data-testid=stDataFrame] *')].filter(e => {
    const style = getComputedStyle(e);
    return e.clientWidth > 200 && e.scrollWidth > e.clientWidth + 2 && style.overflowX === 'auto' &&
        (e.getBoundingClientRect().right > innerWidth ||
         style.scrollbarColor.startsWith('rgba(0, 0, 0, 0)')); }).length"""
SETTLED = """!document.querySelector('[data-testid="stStatusWidget"]') &&
    !document.querySelector('[data-stale="true"]')"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    write_examples(root / "sweep", seeds=5, iterations=40)
    for seed in range(2):
        write_trial(root / "ranks", "decentralized_allreduce", seed, 40, num_workers=1)
    write_trial(root / "odd", "async_gradients", 0, 9, params={"env": HOSTILE, HOSTILE: HOSTILE})
    write_trial(root / "live", "sync_samples", 9, 20, finished=False)
    return root


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


@pytest.fixture(scope="module")
def address(results: Path, environment: dict[str, str]) -> Iterator[str]:
    with running_server(results, environment) as address:
        yield address


@pytest.fixture(scope="module")
def report(results: Path, environment: dict[str, str], tmp_path_factory: Any) -> Path:
    output = tmp_path_factory.mktemp("report") / "report.html"
    write = (
        "import sys; from pathlib import Path; from polopt.dashboards.report import write_report; "
        "write_report(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    command = python(write, results, output)
    subprocess.run(command, env=environment, check=True, timeout=300)
    return Path(output)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser


def click_tab(browser: Browser, title: str) -> None:
    """Shows a tab. Repeats the click, because Streamlit loses clicks while it redraws the page."""
    shows = f"document.querySelector('[role=tab][aria-selected=true]')?.textContent === {title!r}"
    click = (
        f"(() => {{ const tab = [...document.querySelectorAll('[role=tab]')].find("
        f"t => t.textContent === {title!r}); if (tab) tab.click(); return !!tab; }})()"
    )
    deadline = time.monotonic() + 120
    while not browser.run(shows):
        assert time.monotonic() < deadline, f"{title} is not shown"
        browser.wait_for(click)
        with contextlib.suppress(TimeoutError):
            browser.wait_for(shows, timeout_s=20.0)


def drawn_plots(browser: Browser) -> list[int]:
    """Waits until all plots are drawn. Returns the number of traces with data in each plot."""
    before: Any = None
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        points = browser.run(POINTS)
        if points and -1 not in points and points == before and browser.run(SETTLED):
            return list(points)
        before = points
        time.sleep(0.5)
    raise TimeoutError(f"plots are not drawn: {points}")


def look_for_overlaps(browser: Browser, script: str) -> list[str]:
    """Returns the overlaps that remain after the plots had time to resize."""
    deadline = time.monotonic() + 20
    while (found := browser.run(script)) and time.monotonic() < deadline:
        time.sleep(0.3)
    return list(found)


def brightness(browser: Browser, selector: str) -> int:
    """Returns the sum of red, green and blue of the background, from 0 (black) to 765 (white)."""
    color = browser.run(f"getComputedStyle(document.querySelector({selector!r})).backgroundColor")
    return sum(map(int, color.strip("rgba()").split(",")[:3]))


@every_look
def test_every_tab_has_plots_and_no_overlap(
    browser: Browser, address: str, looks: list[tuple[int, str]]
) -> None:
    browser.look(*looks[0])
    browser.open(address)
    browser.wait_for(f"document.querySelectorAll('[role=tab]').length === {len(TABS)}")
    for tab in TABS:
        click_tab(browser, tab)
        for look in looks:
            browser.look(*look)
            plots = drawn_plots(browser)
            assert len(plots) >= 2, tab
            assert min(plots) > 0, tab
            assert look_for_overlaps(browser, PAGE_OVERLAPS) == [], (tab, look)
            assert browser.run(CUT_TABLES) == 0, (tab, look)
            assert (brightness(browser, ".stApp") > 384) == (look[1] == "light")
        assert not browser.run("document.querySelector('[data-testid=stException]')?.textContent")
    assert browser.run("window.attacked") is None
    assert browser.errors == []
    outside = [url for url in browser.requests if not url.startswith((address, "data:", "blob:"))]
    assert outside == []


def test_running_experiment_grows(browser: Browser, address: str, results: Path) -> None:
    browser.look(*LOOKS[0])
    browser.open(address)
    click_tab(browser, "Experiments")
    drawn_plots(browser)
    write_trial(results / "live", "sync_samples", 9, 70, first=21, finished=False)
    # The run in `live` now has 90 iterations of 0.5 s, which are 45 s. All other runs have at most
    # 20 s.
    browser.wait_for(
        "[...document.querySelectorAll('.js-plotly-plot')].some(p => "
        "p._fullLayout && p._fullLayout.xaxis.range[1] > 44)"
    )
    assert browser.errors == []


def test_address_holds_what_is_shown_and_reload_keeps_it(browser: Browser, address: str) -> None:
    browser.look(*LOOKS[0])
    browser.open(address)
    click_tab(browser, "SyncSamples")
    drawn_plots(browser)
    browser.wait_for(
        "(() => { const steps = [...document.querySelectorAll('[data-testid=stSidebar] button')]"
        ".find(b => b.textContent === 'steps'); if (steps) steps.click(); return !!steps; })()"
    )
    browser.wait_for("location.search.includes('axis=steps')")
    # The address changes before the plots are drawn again.
    browser.wait_for(
        "[...document.querySelectorAll('.js-plotly-plot')].every("
        "p => !(p._fullLayout?.xaxis?.title?.text ?? 'seconds').includes('seconds'))"
    )
    seen = drawn_plots(browser)
    search = browser.run("location.search")
    assert "tab=SyncSamples" in search
    assert "focus-sync-samples=" in search
    state = """JSON.stringify([
        document.querySelector('[role=tab][aria-selected=true]')?.textContent,
        [...document.querySelectorAll('.js-plotly-plot')].map(
            p => p._fullLayout?.xaxis?.title?.text)])"""
    before = browser.run(state)
    for again in (address + "/" + search, address):
        browser.open(again)
        browser.wait_for("!!document.querySelector('[role=tab][aria-selected=true]')")
        assert drawn_plots(browser)
        if again != address:
            browser.wait_for(f"{state} === {json.dumps(before)}")
        else:
            assert browser.run(state) != before
    browser.open(address + "/" + search)
    assert drawn_plots(browser) == seen
    assert browser.run("location.search") == search
    assert "environment steps" in before
    assert browser.errors == []


def test_double_click_shows_what_leaves_the_range(
    browser: Browser, tmp_path: Path, environment: dict[str, str]
) -> None:
    for optimizer, level in (("sync_samples", 480.0), ("async_gradients", 480e4)):
        write_trial(tmp_path / "results", optimizer, 0, 20, level=level)
    plot = "document.querySelector('.js-plotly-plot')"
    top = f"{plot}?._fullLayout?.yaxis?.range[1]"
    with running_server(tmp_path / "results", environment) as address:
        browser.look(*LOOKS[0])
        browser.open(f"{address}/?tab=Compare")
        drawn_plots(browser)
        assert browser.run(top) < 1000.0
        assert "1 of 2 runs leaves the range" in browser.run("document.body.innerText")
        x, y = browser.run(
            f"(() => {{ const box = {plot}.querySelector('.nsewdrag').getBoundingClientRect(); "
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for count in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                browser.send(
                    "Input.dispatchMouseEvent",
                    type=kind, x=x, y=y, button="left", clickCount=count,
                )  # fmt: skip
        browser.wait_for(f"{top} > 1e6")
        browser.open(f"{address}/?tab=Compare&robust=false")
        browser.wait_for(f"{top} > 1e6")
        assert "leaves the range" not in browser.run("document.body.innerText")
    assert browser.errors == []


def test_server_listens_on_loopback_only(address: str) -> None:
    port = int(address.rsplit(":", 1)[1])
    with urllib.request.urlopen(address, timeout=30) as answer:
        assert answer.status == 200
    # 127.0.0.2 is also this machine. A server that listens on all addresses would answer there.
    with socket.socket() as other:
        other.settimeout(5)
        with pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.2", port))


@every_look
def test_report_opens_without_network(
    browser: Browser, report: Path, looks: list[tuple[int, str]]
) -> None:
    browser.send(
        "Network.emulateNetworkConditions",
        offline=True, latency=0, downloadThroughput=0, uploadThroughput=0,
    )  # fmt: skip
    for look in looks:
        browser.look(*look)
        browser.open(report.as_uri())
        browser.wait_for("document.readyState === 'complete'")
        plots = drawn_plots(browser)
        assert len(plots) > 60
        assert min(plots) > 0
        assert look_for_overlaps(browser, REPORT_OVERLAPS) == [], look
        assert (brightness(browser, "body") > 384) == (look[1] == "light")
    assert browser.run("window.attacked") is None
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
