"""Metrics in a real browser: plots of what happens, in memory that does not grow."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.pipes.loading.model_manager import LoadedModel
from tests.console.conftest import Visitors
from tests.server import ServerThread, server_thread

pytestmark = pytest.mark.slow

DAY = 86_400
MAX_MEMORY = 200_000_000
POINTS = """async (count) => {
  const { histories } = await import(new URL("console/metrics/history.js", document.baseURI));
  return histories.of("smollm2-135m").length >= count;
}"""
# Whether the grid of the first plot has the colour that lines have in the present theme.
GRID_HAS_THE_THEME = """() => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = "var(--line)";
  const [red, green, blue] = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
  probe.remove();
  const canvas = document.querySelector(".plot canvas");
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < data.length; at += 4)
    if (data[at] === red && data[at + 1] === green && data[at + 2] === blue && data[at + 3] === 255) return true;
  return false;
}"""
# A day of events, as fast as the page takes them.
LIVE_A_DAY = """async ([state, seconds]) => {
  const { live } = await import(new URL("console/live.js", document.baseURI));
  const start = Date.now() / 1000;
  for (let second = 1; second <= seconds; second += 1) {
    const model = { rates: { generated_tokens: second % 90, prompt_tokens: 3, preemptions: 0 }, queued: second % 7 };
    live.take({ type: "delta", time: start + second, changes: { models: { [Object.keys(state.models)[0]]: model } } });
    if (second % 2000 === 0) await new Promise(requestAnimationFrame);
  }
}"""


@pytest.fixture(scope="module")
def server(small_model: LoadedModel) -> Iterator[ServerThread]:
    with server_thread(small_model) as server:
        yield server


def generate(server: ServerThread, stop: threading.Event) -> None:
    body = {"model": "smollm2-135m", "prompt": "The sea is", "max_tokens": 20, "ignore_eos": True}
    while not stop.wait(0.5):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_plots_follow_the_server(visitors: Visitors, server: ServerThread, pictures: Path, size: str) -> None:
    stop = threading.Event()
    load = threading.Thread(target=generate, args=(server, stop))
    load.start()
    try:
        with visitors.visit(server.url, size=size) as visit:
            page = visit.open("metrics")
            throughput = page.get_by_role("region", name="Throughput")
            page.wait_for_function("() => Number(document.querySelector('.plot strong')?.textContent) > 0")
            assert throughput.locator("canvas").is_visible()
            page.get_by_role("region", name="Time between tokens").get_by_text("ms").first.wait_for()
            while not page.evaluate(POINTS, 12):
                page.wait_for_timeout(100)
            for theme in visit.themes():
                page.wait_for_function(GRID_HAS_THE_THEME)
                page.screenshot(path=pictures / f"metrics-{theme}-{size}.png")
                assert not visit.faults()
    finally:
        stop.set()
        load.join()


def test_plots_follow_the_theme_that_is_chosen(visitors: Visitors, server: ServerThread) -> None:
    with visitors.visit(server.url) as visit:
        page = visit.open("metrics")
        page.wait_for_function(GRID_HAS_THE_THEME)
        page.get_by_role("button", name="Theme: as the system").last.click()
        page.wait_for_function(GRID_HAS_THE_THEME)


def test_a_day_of_metrics_takes_no_more_memory_than_an_hour(visitors: Visitors, server: ServerThread) -> None:
    state = server.get("/events?stream=false")["state"]
    with visitors.visit(server.url) as visit:
        page = visit.open("metrics")
        page.get_by_role("region", name="Throughput").wait_for()
        session = page.context.new_cdp_session(page)
        page.evaluate(LIVE_A_DAY, [json.loads(json.dumps(state)), DAY])
        session.send("HeapProfiler.collectGarbage")
        used = session.send("Runtime.getHeapUsage")["usedSize"]
        assert used < MAX_MEMORY
        assert page.evaluate(POINTS, 3600)
        assert not page.evaluate(POINTS, 3601)
