"""Reads a scenario from a TOML file; errors name the line."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from penstock.config.engine import EngineConfig
from penstock.config.kinds import SIZE, format_value
from penstock.domain.hidden_format import HiddenFormat
from penstock.errors import ConfigError
from penstock.simulate.machines import MachineRow, place
from penstock.simulate.model_shape import shape_of
from penstock.simulate.scenario import (
    Amount,
    EventKind,
    JobLoad,
    LinkRow,
    LinkSpeed,
    ModelShape,
    NetworkEvent,
    Scenario,
)
from penstock.simulate.toml_lines import TomlLines

SHIPPED = Path(__file__).parent / "scenarios"
MAX_NODES = 5000
MAX_TOKENS = 1 << 20  # of a prompt or an answer
MAX_EVENTS = 100_000
MAX_STREAMS = 100_000  # of one load
FORMATS: dict[str, HiddenFormat] = {"auto": "bfloat16", "fp32": "float32", "bf16": "bfloat16", "int8": "int8"}


def shipped() -> list[str]:
    """The names of the scenarios that come with Penstock."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def read_scenario(name: str) -> Scenario:
    """Read a file, or a shipped scenario by its name."""
    path = Path(name)
    if not path.exists() and name in shipped():
        path = SHIPPED / f"{name}.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(shipped())
        raise ConfigError(
            f"The scenario {name} cannot be read: {getattr(error, 'strerror', None) or error}.",
            hint=f"Name a TOML file, or one of: {known}.",
        ) from None
    return parse_scenario(text, path.name.removesuffix(".toml"), str(path))


def parse_scenario(text: str, name: str = "scenario", file: str = "scenario.toml") -> Scenario:
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not TOML: {error}.") from None
    return _Reader(file, TomlLines(text)).scenario(name, content)


# ---- values; each raises ValueError, and its text says what is expected ----


def _number(value: Any, what: str, minimum: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value < 1e15:
        raise ValueError(what)
    return float(value)


def seconds(value: Any) -> float:
    return _number(value, "seconds")


def positive(value: Any) -> float:
    if not _number(value, "a number above 0"):
        raise ValueError("a number above 0")
    return float(value)


def share(value: Any) -> float:
    if _number(value, "a share from 0 to 1") > 1:
        raise ValueError("a share from 0 to 1")
    return float(value)


def whole(value: Any, minimum: int = 1) -> int:
    if type(value) is not int or not minimum <= value < 1 << 48:
        raise ValueError("a whole number" + (f" above {minimum - 1}" if minimum else ""))
    return value


def counted(value: Any) -> int:
    return whole(value, 0)


def streams(value: Any) -> int:
    if whole(value) > MAX_STREAMS:
        raise ValueError(f"at most {MAX_STREAMS:,}")
    return int(value)


def amount(value: Any) -> Amount:
    expects = "a number of tokens, or the least and the most: [100, 2000]"
    pair = value if isinstance(value, list) else [value, value]
    if len(pair) != 2 or any(type(one) is not int or not 1 <= one <= MAX_TOKENS for one in pair) or pair[0] > pair[1]:
        raise ValueError(expects)
    return pair[0], pair[1]


def text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a name")
    return value


def times(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("times in seconds: [0, 10, 20]")
    return tuple(map(seconds, value))


def pair(value: Any) -> tuple[str, str]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError('two names: ["attic", "cellar"]')
    return text(value[0]), text(value[1])


def size(value: Any) -> int:
    try:
        return int(SIZE.read(value))
    except ValueError:
        raise ValueError(SIZE.expects) from None


def switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def wire(value: Any) -> HiddenFormat:
    if not isinstance(value, str) or value not in FORMATS:
        raise ValueError(f"one of {', '.join(FORMATS)}")
    return FORMATS[value]


def layers(value: Any) -> tuple[tuple[int, int], ...]:
    expects = 'layers: "0:40", or "0:10,30:40"'
    if not isinstance(value, str):
        raise ValueError(expects)
    found = []
    for part in value.split(","):
        start, colon, end = part.strip().partition(":")
        if not (colon and start.isdecimal() and end.isdecimal() and int(start) < int(end)):
            raise ValueError(expects)
        found.append((int(start), int(end)))
    return tuple(found)


# ---- tables ----


class _Table:
    """One table of the file. `close` refuses keys that were not read."""

    def __init__(self, reader: _Reader, name: str, count: int, content: Any) -> None:
        self._reader, self.name, self._count = reader, name, count
        if not isinstance(content, dict):
            reader.refuse(f"{name} must be a table", name)
        self._left: dict[str, Any] = dict(content)
        self._asked: list[str] = []

    def take(self, key: str, read: Callable[[Any], Any], default: Any = ...) -> Any:
        self._asked.append(key)
        if key not in self._left:
            if default is ...:
                self.refuse(f"{self._title} needs {key}")
            return default
        value = self._left.pop(key)
        try:
            return read(value)
        except ValueError as error:
            self.refuse(f"{key} = {format_value(value)} is not {error}", key)

    def has(self, key: str) -> bool:
        return key in self._left

    def close(self) -> None:
        for key in self._left:
            self.refuse(f"{self._title} has no key '{key}'", key, hint=f"Known keys: {', '.join(sorted(self._asked))}.")

    def refuse(self, problem: str, key: str = "", hint: str = "") -> NoReturn:
        self._reader.refuse(problem, self.name, self._count, key, hint=hint)

    @property
    def _title(self) -> str:
        return f"[{self.name}]" if self.name else "The scenario"


class _Reader:
    def __init__(self, file: str, lines: TomlLines) -> None:
        self._file = file
        self._lines = lines

    def refuse(self, problem: str, table: str = "", count: int = 0, key: str = "", hint: str = "") -> NoReturn:
        line = self._lines.of(table, count, key)
        where = self._file if line is None else f"{self._file}, line {line}"
        raise ConfigError(f"{where}: {problem}.", hint=hint)

    def scenario(self, name: str, content: dict[str, Any]) -> Scenario:
        top = _Table(self, "", 0, content)
        length, seed = top.take("seconds", positive), top.take("seed", counted, 0)
        model = self._model(top.take("model", _any))
        engine = self._engine(top.take("engine", _any, {}))
        hidden_format = self._hidden_format(top.take("network", _any, {}))
        rows = self._rows("nodes", top.take("nodes", _any))
        links = self._rows("links", top.take("links", _any, []))
        loads = self._rows("load", top.take("load", _any))
        events = self._rows("events", top.take("events", _any, []))
        top.close()
        machines, groups, sites = self._machines(rows, model, engine)
        known = {machine.name for machine in machines} | {*groups}
        origins = {machine.name for machine in machines if machine.ends}
        origins |= {group for group, members in groups.items() if {*members} <= origins}
        return Scenario(
            name=name,
            seconds=length,
            seed=seed,
            model=model,
            engine=engine,
            hidden_format=hidden_format,
            machines=machines,
            groups=groups,
            sites=sites,
            links=tuple(self._link(row, known | {*sites.values()}) for row in links),
            loads=tuple(self._load(row, origins) for row in loads),
            events=tuple(event for row in events for event in self._events(row, known, length)),
        )

    def _rows(self, name: str, content: Any) -> list[_Table]:
        if not isinstance(content, list):
            self.refuse(f"{name} must be [[{name}]]", name)
        return [_Table(self, name, count, row) for count, row in enumerate(content)]

    def _model(self, content: Any) -> ModelShape:
        if isinstance(content, str):
            return shape_of(content)
        table = _Table(self, "model", 0, content)
        if table.has("name"):
            model = shape_of(table.take("name", text))
        else:
            model = ModelShape(
                layers=table.take("layers", whole),
                hidden=table.take("hidden", whole),
                layer_bytes=table.take("layer_bytes", size_or_bytes, 0),
                kv_bytes=table.take("kv_bytes", size_or_bytes, 0),
                ends_bytes=table.take("ends_bytes", size_or_bytes, 0),
            )
        table.close()
        return model

    def _engine(self, content: Any) -> EngineConfig:
        table = _Table(self, "engine", 0, content)
        names = [field.name for field in dataclasses.fields(EngineConfig)]
        given = {name: table.take(name, _any) for name in names if table.has(name)}
        table._asked = names
        table.close()
        try:
            return EngineConfig(**given)
        except ConfigError as error:
            table.refuse(str(error).rstrip("."), hint=error.hint)

    def _hidden_format(self, content: Any) -> HiddenFormat:
        table = _Table(self, "network", 0, content)
        found: HiddenFormat = table.take("wire", wire, FORMATS["auto"])
        table.close()
        return found

    def _machines(
        self, rows: Iterable[_Table], model: ModelShape, engine: EngineConfig
    ) -> tuple[Any, dict[str, tuple[str, ...]], dict[str, str]]:
        found: list[MachineRow] = []
        groups: dict[str, tuple[str, ...]] = {}
        sites: dict[str, str] = {}
        for row in rows:
            name, count = row.take("name", text), row.take("count", whole, 0)
            site = row.take("site", text, "")
            held = row.take("layers", layers, ())
            if any(end > model.layers for _, end in held):
                row.refuse(f"the model has {model.layers} layers", "layers")
            base = MachineRow(
                name=name,
                ranges=held,
                memory=row.take("memory", size, None),
                ends=row.take("ends", switch, False),
                layer_seconds=row.take("pass_ms", seconds, 0.0) / 1e3,
                layer_per_token=row.take("token_us", seconds, 0.0) / 1e6,
                head_seconds=row.take("head_ms", seconds, 0.0) / 1e3,
                head_per_row=row.take("head_token_us", seconds, 0.0) / 1e6,
                seconds=row.take("visit_ms", seconds, 0.0) / 1e3,
            )
            row.close()
            if base.memory is None and not held and not base.ends:
                row.refuse(f"{name} needs layers, or memory to place some in")
            if len(found) + max(1, count) > MAX_NODES:
                row.refuse(f"more than {MAX_NODES:,} nodes", "count")
            names = [f"{name}-{number}" for number in range(1, count + 1)] if count else [name]
            for number, each in enumerate(names, start=1):
                if any(each == one.name for one in found[-1:]) or each in sites:
                    row.refuse(f"there are two nodes {each}", "name")
                found.append(dataclasses.replace(base, name=each))
                sites[each] = site.replace("{n}", str(number))
            if count:
                groups[name] = tuple(names)
        if not found:
            self.refuse("no nodes", "nodes")
        if not any(one.ends for one in found):
            self.refuse("no node has ends = true, so none takes jobs", "nodes")
        return place(found, model, engine), groups, {name: site for name, site in sites.items() if site}

    def _link(self, row: _Table, known: set[str]) -> LinkRow:
        between = row.take("between", pair, None)
        within = row.take("same_site", switch, False)
        speed = LinkSpeed(
            round_trip=row.take("rtt_ms", seconds, 0.5) / 1e3,
            bytes_per_second=row.take("mbit", positive, 1000.0) * 1e6 / 8,
            loss=row.take("loss", share, 0.0),
        )
        row.close()
        for name in between or ():
            self._check(row, "between", name, known)
        if between and within:
            row.refuse("between and same_site exclude each other", "same_site")
        return LinkRow(speed, between, within)

    def _load(self, row: _Table, origins: set[str]) -> JobLoad:
        load = JobLoad(
            origin=row.take("origin", text),
            prompt=row.take("prompt", amount),
            answer=row.take("answer", amount),
            per_second=row.take("per_second", positive, 0.0),
            at=row.take("at", times, ()),
            streams=row.take("streams", streams, 0),
        )
        row.close()
        if sum(map(bool, (load.per_second, load.at, load.streams))) != 1:
            row.refuse("a load needs one of per_second, at and streams")
        if load.origin not in origins:
            row.refuse(f"{load.origin} is not a node with ends = true", "origin")
        return load

    def _events(self, row: _Table, known: set[str], length: float) -> list[NetworkEvent]:
        at = row.take("at", seconds)
        every, until = row.take("every", positive, 0.0), row.take("until", seconds, length)
        kinds = [what for what in EventKind if row.has(what.value)]
        given = {what: row.take(what.value, _names_of(what)) for what in kinds}
        row._asked += [what.value for what in EventKind]
        row.close()
        if len(kinds) != 1:
            row.refuse(f"an event needs one of {', '.join(what.value for what in EventKind)}")
        ((what, names),) = given.items()
        for name in names:
            self._check(row, what.value, name, known)
        repeats = (until - at) / every if every and until > at else 0.0
        if repeats >= MAX_EVENTS:
            row.refuse("too many events", "every")
        return [NetworkEvent(at + number * every, what, names) for number in range(int(repeats) + 1)]

    def _check(self, row: _Table, key: str, name: str, known: set[str]) -> None:
        if name not in known:
            row.refuse(f"there is no node {name}", key)


def size_or_bytes(value: Any) -> int:
    """A number is bytes here; text has a unit."""
    return whole(value, 0) if type(value) is int else size(value)


def _names_of(what: EventKind) -> Callable[[Any], tuple[str, ...]]:
    return pair if what in (EventKind.CUT, EventKind.HEAL) else lambda value: (text(value),)


def _any(value: Any) -> Any:
    return value
