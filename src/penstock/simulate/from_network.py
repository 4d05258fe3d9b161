"""Builds a scenario from a running network, as `GET /network` describes it, with machines added or removed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, get_args

from penstock.config.engine import EngineConfig
from penstock.config.kinds import SIZE
from penstock.domain.hidden_format import HiddenFormat
from penstock.domain.topology import LayerRange, contiguous_ranges
from penstock.errors import ConfigError
from penstock.pipes.loading.footprint import Budget
from penstock.pipes.loading.model_manager import CPU_KV_SHARE
from penstock.placement.plan import Member, decide
from penstock.simulate.machines import footprint
from penstock.simulate.node import MODEL, Machine
from penstock.simulate.scenario import JobLoad, LinkRow, LinkSpeed, ModelShape, Scenario
from penstock.simulate.scenario_file import MAX_STREAMS, MAX_TOKENS

DOUBLING_TOKENS = 32  # the cost of a token is not measured: assume that a pass with this many takes twice as long as an empty one
DEFAULT_LOAD = "1 stream, 200+100"
DEFAULT_SECONDS = 60.0
KNOWN_KEYS = ("name", "speed", "memory", "ends")

_LOAD = re.compile(
    r"(?P<count>\d{1,6}(?:\.\d{1,6})?)\s*(?P<kind>/s|streams?)\s*,\s*(?P<prompt>\d{1,9})\s*\+\s*(?P<answer>\d{1,9})"
)


def parse_load(text: str, origin: str) -> JobLoad:
    """Parse `"2/s, 500+200"` (two jobs a second: 500 prompt tokens, 200 new ones) or `"8 streams, 500+200"`."""
    found = _LOAD.fullmatch(text.strip())
    count = float(found["count"]) if found else 0.0
    prompt, answer = (int(found["prompt"]), int(found["answer"])) if found else (0, 0)
    whole = found is not None and (found["kind"] == "/s" or count.is_integer())
    if found is None or not (whole and count and prompt and answer):
        raise ConfigError(f"The load '{text}' is not understood.", hint='Write "2/s, 500+200" or "8 streams, 500+200".')
    if max(prompt, answer) > MAX_TOKENS or count > MAX_STREAMS:
        raise ConfigError(
            f"The load '{text}' is too large to simulate.",
            hint=f"At most {MAX_STREAMS:,} jobs, of at most {MAX_TOKENS:,} tokens.",
        )
    rate, streams = (count, 0) if found["kind"] == "/s" else (0.0, int(count))
    return JobLoad(origin=origin, prompt=(prompt, prompt), answer=(answer, answer), per_second=rate, streams=streams)


class RunningNetwork:
    """What a server reports about its network and one model in it.

    shape: of the model; the server does not report it.
    """

    def __init__(self, status: Mapping[str, Any], shape: ModelShape, engine: EngineConfig | None = None) -> None:
        self.engine = engine or EngineConfig()
        self.shape = shape
        self._status = status
        self._pipe = pipe_of(status)
        self.machines = self._machines()

    @property
    def origin(self) -> str:
        """The server that answered, if it takes jobs; else the first node that does."""
        here = [node["node"] for node in self._status["nodes"] if node["self"]]
        takers = [machine.name for machine in self.machines if machine.ends]
        if not takers:
            raise ConfigError(f"No node of the network takes jobs for {self._pipe['model']}.")
        return next((name for name in here if name in takers), takers[0])

    @property
    def room(self) -> dict[str, int]:
        """How many layers each node could hold in all."""
        held = {machine.name: sum(end - start for start, end in machine.ranges) for machine in self.machines}
        return {name: count + self._pipe.get("room", {}).get(name, 0) for name, count in held.items()}

    def scenario(
        self,
        *,
        load: str | None = None,
        seconds: float | None = None,
        without: Sequence[str] = (),
        added: Iterable[str] = (),
        machines: Sequence[Machine] | None = None,
        name: str = "network",
    ) -> Scenario:
        """Build the scenario. machines: used instead of the network's own."""
        there = list(self.machines if machines is None else machines)
        for gone in without:
            if gone not in {machine.name for machine in there}:
                raise ConfigError(f"There is no node {gone} in the network.")
        there = [machine for machine in there if machine.name not in without]
        for number, spec in enumerate(added, start=1):
            there.append(self._added(spec, number, there))
        takers = [machine.name for machine in there if machine.ends]
        if not takers:
            raise ConfigError("No node that takes jobs is left.")
        origin = self.origin if self.origin in takers else takers[0]
        return Scenario(
            name=name,
            seconds=DEFAULT_SECONDS if seconds is None else seconds,
            model=self.shape,
            engine=self.engine,
            machines=tuple(there),
            loads=(parse_load(load or DEFAULT_LOAD, origin),),
            links=tuple(self._links({machine.name for machine in there})),
            hidden_format=self._hidden_format,
        )

    # ---- inside ----

    @property
    def _hidden_format(self) -> HiddenFormat:
        """The wire format of hidden states of the server's own jobs; the default if it takes none."""
        found = (self._pipe.get("wire") or {}).get("format")
        return next((known for known in get_args(HiddenFormat) if known == found), "bfloat16")

    def _machines(self) -> list[Machine]:
        segments = self._pipe["segments"]
        rates = {one["node"]: one["seconds"] / _size(one) for one in segments if one["seconds"] > 0}
        if not rates:
            raise ConfigError(
                "No node has computed anything yet, so their speeds are unknown.", hint="Send the network a request first."
            )
        usual = fmean(rates.values())
        found = []
        for node in self._status["nodes"]:
            own = [one for one in segments if one["node"] == node["node"]]
            takes_jobs = self._pipe["model"] in node["serves"]
            if own or takes_jobs:
                found.append(self._machine(node["node"], own, rates.get(node["node"], usual), ends=takes_jobs))
        return found

    def _machine(self, name: str, segments: Sequence[Mapping[str, Any]], rate: float, *, ends: bool) -> Machine:
        layers = {layer for one in segments for layer in range(*one["layers"])}
        tokens = min((one["kv_tokens"] for one in segments), default=self.engine.block_size)
        return Machine(
            name,
            tuple((part.start, part.end) for part in contiguous_ranges(layers)),
            ends=ends,
            blocks=max(1, tokens // self.engine.block_size),
            layer_seconds=rate,
            layer_per_token=rate / DOUBLING_TOKENS,
        )

    def _links(self, names: set[str]) -> Iterable[LinkRow]:
        """The measured links; where two nodes disagree, the longer round trip and the slower direction."""
        speeds: dict[frozenset[str], LinkSpeed] = {}
        for node in self._status["nodes"]:
            for link in node.get("links", ()):
                pair = frozenset((node["node"], link["node"]))
                if len(pair) == 2 and pair <= names:
                    before = speeds.get(pair, LinkSpeed(0.0))
                    known = link["bytes_per_second"] or LinkSpeed().bytes_per_second
                    rate = min(before.bytes_per_second, known)
                    speeds[pair] = LinkSpeed(max(before.round_trip, link["round_trip"]), rate)
        for pair, speed in speeds.items():
            one, other = sorted(pair)
            yield LinkRow(speed, (one, other))
        if speeds:
            yield LinkRow(LinkSpeed(max(speed.round_trip for speed in speeds.values())))

    def _added(self, spec: str, number: int, there: Sequence[Machine]) -> Machine:
        """Parse an added machine: `"speed=2,memory=24GB"` is twice as fast as the average; placement chooses its layers."""
        given = _pairs(spec)
        name = given.get("name", f"new-{number}")
        rate = fmean(machine.layer_seconds for machine in self.machines) / _positive(given.get("speed", "1"), "speed", spec)
        if any(name == one.name for one in there):
            raise ConfigError(f"'{spec}' adds a node {name}, but there is one already.", hint="Give it another name.")
        if given.get("ends", "true") not in ("true", "false"):
            raise ConfigError(f"ends={given['ends']} in '{spec}' is not true or false.")
        base = Machine(name, ends=given.get("ends") == "true", layer_seconds=rate, layer_per_token=rate / DOUBLING_TOKENS)
        if "memory" not in given:
            raise ConfigError(f"'{spec}' does not say how much memory the node has.", hint='Add memory, such as "memory=24GB".')
        try:
            memory = SIZE.parse(given["memory"])
        except ValueError:
            raise ConfigError(f"memory={given['memory']} is not {SIZE.expects}.") from None
        budget = Budget(footprint(self.shape, self.engine), memory, ends=base.ends, kv_share=CPU_KV_SHARE)
        members = [Member(node=one.name, held=tuple(LayerRange(*layers) for layers in one.ranges)) for one in there]
        me = Member(node=name, room=budget.capacity)
        held = decide(name, [*members, me], self.shape.layers, MODEL).layers
        return replace(base, ranges=tuple((part.start, part.end) for part in held), blocks=max(1, budget.blocks))


def pipe_of(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model that the network runs: the first that has layers anywhere."""
    found = [pipe for pipe in status["pipes"] if pipe["segments"]]
    if not found:
        raise ConfigError("No node of the network holds layers of any model.")
    first: Mapping[str, Any] = found[0]
    return first


def _pairs(spec: str) -> dict[str, str]:
    given = {}
    for part in spec.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or key not in KNOWN_KEYS or not value:
            raise ConfigError(f"'{part.strip()}' in --with is not understood.", hint=f"Known keys: {', '.join(KNOWN_KEYS)}.")
        given[key] = value
    return given


def _positive(text: str, key: str, spec: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise ConfigError(f"{key}={text} in '{spec}' is not a number above 0.")
    return number


def _size(segment: Mapping[str, Any]) -> int:
    return int(segment["layers"][1]) - int(segment["layers"][0])
