"""Converts a configuration of Language Pipes to a node file, with a note for everything that is not carried over.

0.x has [[hosted_models]] with load_ends; 1.x [[layer_models]] and a list end_models; 2.x the same with other names inside, and
job_port for the port of the API, which 0.x used for a port between nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config.checks import is_address
from penstock.config.old_names import LANGUAGE_PIPES_KEYS, replacement
from penstock.config.table import BY_KEY, MODELS, OWNERS, in_table
from penstock.errors import ConfigError

SAME_NAME = ("node_id", "max_pipes", "model_validation", "prefill_chunk_size", "print_times")
LAYER_TABLES = (MODELS, "layer_models")
CLOSED_BY = ("network_key", "whitelist_ips", "whitelist_node_ids")  # an open network would let more machines in
NETWORK_NAMES = ("peer_port", "bootstrap_address", "bootstrap_port", "bootstrap_nodes", *CLOSED_BY)
PORTS = ("oai_port", "openai_port", "job_port")
CONVERTED = {*SAME_NAME, *LAYER_TABLES, "end_models", "num_local_layers", *PORTS, *NETWORK_NAMES, "logging_level"}
MODEL_NAMES = {"id": "id", "model_id": "id", "device": "device", "max_memory": "max_memory", "memory": "max_memory"}
PEER_PORT = 5000  # the default of Language Pipes
LOCAL_LAYERS = 1  # the same
FULL_PRECISION = 16  # bits, of data_type
SMALL_CHUNK = 64


class Converted(NamedTuple):
    text: str
    notes: list[str]


def convert(found: Mapping[str, Any], file: Path) -> Converted:
    if not found.keys() & {*CONVERTED, *LANGUAGE_PIPES_KEYS}:
        raise ConfigError(
            f"{file} has no setting of Language Pipes.", hint="Name the TOML file that `language-pipes --config` took."
        )
    conversion = _Conversion(found)
    conversion.run()
    return Converted("\n".join(conversion.lines(file)), conversion.notes)


class _Conversion:
    def __init__(self, found: Mapping[str, Any]) -> None:
        self._found = {key: value for key, value in found.items() if value not in (None, "", [], {})}
        self._settings: dict[str, Any] = {}
        self._models: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def run(self) -> None:
        for key in SAME_NAME:
            if key in self._found:
                self._set(key, self._found[key])
        self._convert_models()
        self._convert_server()
        self._convert_network()
        if "logging_level" in self._found:
            self._set("log.level", str(self._found["logging_level"]).lower())
        self._note_defaults()
        for key, value in self._found.items():
            if key not in CONVERTED:
                self._note(key, replacement(key, value) or "This is not a known setting of Language Pipes; it was left out.")

    def lines(self, file: Path) -> Iterator[str]:
        yield f"# A Penstock node, converted from {file.name}, a configuration of Language Pipes."
        if self.notes:
            yield "# Not carried over, or different here:"
            yield from (f"#   {note}" for note in self.notes)
        for table in OWNERS:
            for values in self._models if table == MODELS else [self._settings]:
                rows = [(setting, values[setting.key]) for setting in in_table(table) if setting.key in values]
                if rows:
                    yield ""
                    yield from [f"[[{table}]]" if table == MODELS else f"[{table}]"] if table else []
                    yield from (f"{setting.name} = {setting.kind.write(value)}" for setting, value in rows)
        yield ""

    # ---- models ----

    def _convert_models(self) -> None:
        ends = dict(self._end_models())
        for table in LAYER_TABLES:
            for entry in self._list(table):
                model = self._layer_model(table, entry)
                if model is None:
                    continue
                name = model["id"]
                load_ends = name in ends or (table == MODELS and _is_true(_fields(entry).get("load_ends", False)))
                private = ends.pop(name, {}).get("num_local_layers", 0)
                self._add_model(model | {"load_ends": load_ends} | ({"private_layers": f"{private},0"} if private else {}))
        for name, options in ends.items():
            first = options["num_local_layers"]
            held = {"layers": f"0:{first}", "private_layers": f"{first},0"} if first else {"layers": "ends"}
            device = {"device": options["device"]} if "device" in options else {}
            self._add_model({"id": name, **device, "load_ends": True, **held})
        if not self._models:
            self._note("models", "None is named. Penstock hosts the model that the network runs, or its default model.")

    def _end_models(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The ids of end models, each with its options."""
        first = self._found.get("num_local_layers", LOCAL_LAYERS)
        for entry in self._list("end_models"):
            options = {"model_id": entry} if isinstance(entry, str) else dict(entry) if isinstance(entry, Mapping) else {}
            name = options.get("model_id")
            if not isinstance(name, str) or type(options.setdefault("num_local_layers", first)) is not int:
                self._note("end_models", f"{entry!r} cannot be read and was left out.")
            else:
                yield name, options

    def _layer_model(self, table: str, entry: Any) -> dict[str, Any] | None:
        fields = _fields(entry)
        model = {MODEL_NAMES[name]: value for name, value in fields.items() if name in MODEL_NAMES}
        if not isinstance(model.get("id"), str):
            self._note(table, f"{entry!r} cannot be read and was left out.")
            return None
        memory = model.get("max_memory")
        if isinstance(memory, int | float) and memory <= 0:
            del model["max_memory"]
        for name, value in fields.items():
            if name == "data_type" and value != FULL_PRECISION:
                self._note(f"{model['id']}: data_type", replacement("data_type"))
            elif name not in (*MODEL_NAMES, "load_ends", "data_type"):
                self._note(f"{model['id']}: {name}", "This is not a known setting of Language Pipes; it was left out.")
        return model

    def _add_model(self, model: dict[str, Any]) -> None:
        key = f"{MODELS}.id"
        if any(model["id"] == other[key] for other in self._models):
            self._note(model["id"], "It is hosted twice. A node hosts a model once: run a second node for the second device.")
            return
        values: dict[str, Any] = {}
        for name, value in model.items():
            self._set(f"{MODELS}.{name}", value, values)
        if key in values:
            self._models.append(values)

    # ---- server and network ----

    def _convert_server(self) -> None:
        found = self._found
        api = next((key for key in PORTS if key in found), None)
        if "job_port" in found and (api != "job_port" or MODELS in found):
            self._note("job_port", "Leave it out: nodes have one port, in listen under [network].")
            api = None if api == "job_port" else api
        if api is not None:
            self._set("server.port", found[api])
            self._note(
                api,
                "Language Pipes answered every machine; this server answers only its own. To open it, create a key "
                '(penstock keys add NAME) and write host = "0.0.0.0" under [server].',
            )
        elif any(model.get(f"{MODELS}.load_ends") for model in self._models):
            self._note("API", "Language Pipes opened none here; Penstock serves it at http://127.0.0.1:8000.")

    def _convert_network(self) -> None:
        found = self._found
        port = found.get("peer_port", PEER_PORT)
        nodes = [node for node in self._list("bootstrap_nodes") if isinstance(node, Mapping)]
        if "bootstrap_address" in found:
            nodes.insert(0, {"address": found["bootstrap_address"], "port": found.get("bootstrap_port", PEER_PORT)})
        if closed := [key for key in CLOSED_BY if key in found]:
            self._note(
                ", ".join(closed),
                "Networks have certificates instead, so [network] is left out. On one machine, run: penstock network create home "
                f"--listen tls/0.0.0.0:{port}; and there, for each other node: penstock network invite NODE. "
                "On that node, before it starts: penstock network join TOKEN",
            )
            return
        self._set("network.listen", [f"tcp/0.0.0.0:{port}"])
        if nodes:
            self._set("network.connect", [f"tcp/{_host(node.get('address'))}:{node.get('port', PEER_PORT)}" for node in nodes])
        self._set("network.open", True)
        self._note(
            "network",
            "It has no network_key, so everyone who can reach it may join (open = true), as before. "
            "Better: penstock network create NAME, and no [network] here.",
        )

    def _note_defaults(self) -> None:
        if "model_validation" not in self._found:
            self._note("model_validation", "It was off by default and is on here: all nodes must have the same weights.")
        chunk = self._found.get("prefill_chunk_size", SMALL_CHUNK)
        if isinstance(chunk, int) and chunk < SMALL_CHUNK:
            self._note("prefill_chunk_size", f"{chunk} makes long prompts slow: without it, 512 tokens are read at once.")

    # ---- inside ----

    def _list(self, key: str) -> list[Any]:
        value = self._found.get(key, [])
        return value if isinstance(value, list) else [value]

    def _set(self, key: str, value: Any, values: dict[str, Any] | None = None) -> None:
        """Take a value over, or note why it cannot be used."""
        try:
            read = BY_KEY[key].read(value, key)
        except ConfigError as error:
            self._note(key, f"{error.message} It was left out. {error.hint}")
        else:
            (self._settings if values is None else values)[key] = read

    def _note(self, subject: str, text: str) -> None:
        line = " ".join(f"{subject}: {text}".split())  # one line of a comment
        if line not in self.notes:
            self.notes.append(line)


def _fields(entry: Any) -> dict[str, Any]:
    """The fields of a model: a table, or a text such as `id=Qwen/Qwen3-1.7B,device=cpu,memory=4`."""
    if isinstance(entry, Mapping):
        return dict(entry)
    if not isinstance(entry, str):
        return {}
    return {name.strip(): value.strip() for name, equals, value in (pair.partition("=") for pair in entry.split(",")) if equals}


def _is_true(value: object) -> bool:
    return value is True or str(value).lower() == "true"


def _host(address: object) -> str:
    """An address as an endpoint has it."""
    text = str(address)
    return f"[{text}]" if ":" in text and is_address(text) else text
