"""What live HTTP streams add to a step: the real server, engine and text in one process, over a model that only waits.

A pass of the layers takes --pass-ms without holding Python's lock, as the kernels of a real model do. The clients are another
process, which reads its streams and does nothing with them.

  quiet      the same engine without a server; text is not made, and updates go nowhere
  streams    all sequences are streams of the HTTP API, with the text of a real tokenizer
  no text    the same streams, but each token is the letter x: what moving text off the compute thread could win at most

The figure is the wall time of a step besides its pass, with the compute thread's own time in brackets. Each is the median of
several rounds, taken in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from host_cost import BLOCK_SIZE, NoEnds, NoLayers, NoText
from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.domain.topology import LayerRange
from penstock.doors.api_config import ApiConfig
from penstock.doors.app.listener import Listener, bind_port, start_listening
from penstock.doors.app.server import OAIHttpServer
from penstock.doors.generation.catalog import ModelCatalog
from penstock.doors.generation.served_model import ServedModel
from penstock.engine.engine import Engine
from penstock.engine.hosted_model import HostedModel, host_standalone
from penstock.model.sources import resolve
from penstock.model.text.tokenizer import Tokenizer
from penstock.pipes.loading.model_manager import FoundModel, LoadedModel, ModelManager

NAME = "none"
PROMPT = list(range(1, 17))
MAX_TOKENS = 8000  # more than a round takes, so that no stream ends in it
START_S, WARM_UP_S, ROUND_S = 60.0, 1.0, 2.0


class WaitingLayers(NoLayers):
    def __init__(self, layers: LayerRange, kv_blocks: int, seconds: float) -> None:
        super().__init__(kv_blocks)
        self.layers = layers
        self._seconds = seconds

    def process(self, hidden: Tensor, pieces: Any, layers: LayerRange | None = None) -> Tensor:
        time.sleep(self._seconds)
        return hidden


class SilentTokenizer(Tokenizer):
    def stream(self, skip_special: bool) -> Any:
        return NoText()


class StepTime(NamedTuple):
    """Seconds of a step: on the clock, and of the compute thread."""

    clock: float
    thread: float


def hosted(folder: Path, streams: int, pass_seconds: float, *, text: bool) -> HostedModel:
    config = EngineConfig(max_sequences=streams, block_size=BLOCK_SIZE)
    found = ModelManager(config).find(NAME, folder, dtype="float32", device="cpu")
    blocks = streams * (found.spec.context // BLOCK_SIZE + 1)
    ends: Any = NoEnds()
    ends.tokenizer = (Tokenizer if text else SilentTokenizer)(folder)
    segment: Any = WaitingLayers(LayerRange(0, found.spec.num_layers), blocks, pass_seconds)
    known = {field.name: getattr(found, field.name) for field in fields(FoundModel)}
    return host_standalone(LoadedModel(**known, segments=(segment,), ends=ends), config)


def step_times(engine: Engine, streams: int) -> StepTime:
    """Measure steps once all streams have their first tokens."""
    until = time.monotonic() + START_S
    while len(engine.sequences.holders) < streams:
        assert time.monotonic() < until, "the streams did not start"
        time.sleep(0.05)
    time.sleep(WARM_UP_S)
    (thread,) = [one for one in threading.enumerate() if one.name == "penstock-compute"]
    assert thread.ident is not None
    cpu = time.pthread_getcpuclockid(thread.ident)
    steps, clock, used = engine.stats.steps, time.perf_counter(), time.clock_gettime(cpu)
    time.sleep(ROUND_S)
    done = engine.stats.steps - steps
    assert len(engine.sequences.holders) == streams, "some streams have ended"
    return StepTime((time.perf_counter() - clock) / done, (time.clock_gettime(cpu) - used) / done)


def quiet(folder: Path, streams: int, pass_seconds: float) -> StepTime:
    model = hosted(folder, streams, pass_seconds, text=False)
    model.start()
    try:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=MAX_TOKENS)
        for _ in range(streams):
            model.jobs.start_job(JobRequest(prompt=PROMPT, sampling=params), lambda update: None)
        return step_times(model.engine, streams)
    finally:
        model.stop()


def served(folder: Path, streams: int, pass_seconds: float, *, text: bool) -> StepTime:
    model = hosted(folder, streams, pass_seconds, text=text)
    with _server(model) as port, _clients(port, streams):
        return step_times(model.engine, streams)


@contextmanager
def _server(model: HostedModel) -> Iterator[int]:
    api = ApiConfig(ModelCatalog({NAME: ServedModel(model)}))
    ready = threading.Event()
    door = OAIHttpServer(api, node_id="bench")
    listener = Listener(door, api.limits, tls=None, on_ready=ready.set, on_leaving=lambda: None, abort=model.stop)
    taken = bind_port("127.0.0.1", 0)
    start_listening(taken)
    thread = threading.Thread(target=listener.run, kwargs={"sockets": [taken]}, daemon=True)
    model.start()
    thread.start()
    try:
        assert ready.wait(60)
        yield taken.getsockname()[1]
    finally:
        model.stop()
        listener.handle_exit(signal.SIGTERM, None)
        thread.join(60)
        taken.close()


@contextmanager
def _clients(port: int, streams: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, __file__, "--client", str(port), "--streams", str(streams)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def read_streams(port: int, streams: int) -> None:
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": MAX_TOKENS}
    body = json.dumps({"model": NAME, "prompt": PROMPT, "stream": True, **sampling})
    headers = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}")
    request = "\r\n".join(("POST /v1/completions HTTP/1.1", *headers, "", body))

    async def read_one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request.encode())
        status = await reader.readline()
        assert b" 200 " in status, status + await reader.read(2000)
        while await reader.read(1 << 16):
            pass

    await asyncio.gather(*(read_one() for _ in range(streams)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="default 64")
    parser.add_argument("--pass-ms", type=float, default=5.0, help="of the layers; default 5")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--json", metavar="FILE", help="write the results to this file; - prints them instead of the lines")
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        asyncio.run(read_streams(args.client, args.streams))
        return
    torch.set_num_threads(1)
    folder, seconds = resolve("smollm2-135m"), args.pass_ms / 1e3
    ways = {
        "quiet": lambda: quiet(folder, args.streams, seconds),
        "streams": lambda: served(folder, args.streams, seconds, text=True),
        "no text": lambda: served(folder, args.streams, seconds, text=False),
    }
    rounds: dict[str, list[StepTime]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, measure in ways.items():
            rounds[way].append(measure())
            clock, thread = rounds[way][-1]
            print(f"{way}: {1e3 * (clock - seconds):.2f} ({1e3 * thread:.2f})", file=sys.stderr)
    results = {
        way: StepTime(statistics.median(one.clock for one in times) - seconds, statistics.median(one.thread for one in times))
        for way, times in rounds.items()
    }
    if args.json == "-":
        print(json.dumps({way: found._asdict() for way, found in results.items()}, indent=1))
        return
    if args.json:
        Path(args.json).write_text(json.dumps({way: found._asdict() for way, found in results.items()}) + "\n", encoding="utf-8")
    print(f"A step of {args.streams} sequences besides its pass of {args.pass_ms} ms, on the clock (thread time), milliseconds")
    for way, found in results.items():
        print(f"  {way:8} {1e3 * found.clock:.2f} ({1e3 * found.thread:.2f})")


if __name__ == "__main__":
    main()
