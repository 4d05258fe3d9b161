"""Frames per second and memory of the web console: `python bench/console.py` on a quiet machine with Chromium and playwright.

It needs no model: the files come from a small server, and a made-up network of many nodes and jobs changes every second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock.doors.app.console.files import FOLDER, HEADERS

DAY_S = 86_400
COUNT_FRAMES = """async ([state, seconds]) => {
  const { live } = await import(new URL("console/live.js", document.baseURI));
  live.take({ type: "snapshot", time: Date.now() / 1000, state });
  const timer = setInterval(() => {
    const jobs = Object.fromEntries(Object.entries(live.state.jobs).map(([id, job]) => [id, { generated: job.generated + 7 }]));
    const model = { queued: Math.floor(Math.random() * 9) };
    live.take({ type: "delta", time: Date.now() / 1000, changes: { jobs, models: { model } } });
  }, 1000);
  const start = performance.now();
  let frames = 0;
  let worst = 0;
  for (let last = start; performance.now() - start < seconds * 1000; frames += 1) {
    await new Promise(requestAnimationFrame);
    worst = Math.max(worst, performance.now() - last);
    last = performance.now();
  }
  clearInterval(timer);
  return { fps: (frames * 1000) / (performance.now() - start), worst };
}"""
LIVE_A_DAY = """async ([state, seconds]) => {
  const { live } = await import(new URL("console/live.js", document.baseURI));
  const start = Date.now() / 1000;
  live.take({ type: "snapshot", time: start, state });
  for (let second = 1; second <= seconds; second += 1) {
    const model = { rates: { generated_tokens: second % 90 } };
    live.take({ type: "delta", time: start + second, changes: { models: { model } } });
    if (second % 1000 === 0) await new Promise(requestAnimationFrame);
  }
}"""


class Files(SimpleHTTPRequestHandler):
    """Serves the console below /console/ and its page at /; any other path is not found."""

    def translate_path(self, path: str) -> str:
        name = "index.html" if path == "/" else path.removeprefix("/console/")
        return str(FOLDER / name.lstrip("/"))

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *args: object) -> None:
        pass


def made_up(nodes: int, jobs: int) -> dict[str, Any]:
    """A made-up state: many nodes, each with one layer of a model, and many jobs."""
    names = [f"node-{i:03}" for i in range(nodes)]
    kv = {"kv_tokens": 8192, "kv_leased": 4096, "kv_used": 1000}
    segments = {
        f"{name} {i}:{i + 1}": {"node": name, "layers": [i, i + 1], "device": "cpu", "dtype": "float32", "draining": False, **kv}
        for i, name in enumerate(names)
    }
    route = {"state": "open", "hops": [{"node": one["node"], "layers": one["layers"]} for one in segments.values()]}
    route |= {"in_flight": 4, "window": 8, "round_trip": 0.2, "between_nodes": 0.1, "recoveries": 0, "last_pause": 0}
    model = {"num_layers": nodes, "complete": True, "missing": [], "loading": {}, "segments": segments, "route": route}
    model |= {"running": 4, "queued": 0, "kv_tokens": 8192, "kv_used": 4096, "counters": {}, "rates": {"steps": 9}}
    job = {"model": "model", "source": "interactive", "state": "running", "arrived": 0, "outputs": 1, "priority": 0}
    job |= {"prompt_tokens": 100, "prefilled": 100, "generated": 0, "max_tokens": 10_000, "preemptions": 0, "stale": False}
    return {
        "scope": "all",
        "node": names[0],
        "version": "0",
        "draining": False,
        "network": {"name": "made-up", "open": False},
        "nodes": {
            name: {"here": name == names[0], "version": "0", "state": "ready", "serves": [], "links": {}} for name in names
        },
        "models": {"model": model},
        "jobs": {f"job_{i}": job for i in range(jobs)},
        "ended": {},
    }


def busy_seconds(session: Any) -> float:
    """CPU time of the page's main thread, independent of other load on the machine."""
    return next(one["value"] for one in session.send("Performance.getMetrics")["metrics"] if one["name"] == "TaskDuration")


def main() -> None:
    from playwright.sync_api import sync_playwright

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--nodes", type=int, default=200)
    options.add_argument("--jobs", type=int, default=500)
    options.add_argument("--seconds", type=float, default=10.0)
    args = options.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(FOLDER)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state, found = made_up(args.nodes, args.jobs), {}
    with sync_playwright() as playwright:
        sandbox = [] if os.getuid() else ["--no-sandbox"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=sandbox)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        session = page.context.new_cdp_session(page)
        for name in ("pipes", "jobs"):
            page.goto(f"http://127.0.0.1:{server.server_port}/#/{name}")
            page.wait_for_selector("main")
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            before = busy_seconds(session)
            frames = page.evaluate(COUNT_FRAMES, [state, args.seconds])
            found[f"{name}_page"] = {**frames, "main_thread_busy": (busy_seconds(session) - before) / args.seconds}
        page.goto(f"http://127.0.0.1:{server.server_port}/#/metrics")
        page.evaluate(LIVE_A_DAY, [made_up(3, 3), DAY_S])
        session.send("HeapProfiler.collectGarbage")
        found["heap_after_a_day_mb"] = session.send("Runtime.getHeapUsage")["usedSize"] / 1e6
        browser.close()
    print(json.dumps({"nodes": args.nodes, "jobs": args.jobs, **found}, indent=1))


if __name__ == "__main__":
    main()
