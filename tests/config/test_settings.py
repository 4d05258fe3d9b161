"""File, environment and flags become one set of settings, each with its source; mistakes are told by name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config.engine import EngineConfig
from penstock.config.example import example
from penstock.config.node import DEFAULT_MODEL, NodeConfig
from penstock.config.settings import Settings, load_settings
from penstock.config.table import BY_KEY, MODELS, OTHER_VARIABLES, OWNERS, SETTINGS, Setting
from penstock.errors import ConfigError

# What a file, a variable and a flag say, for every setting: where there is a choice at all, never twice the same in a row.
THREE: dict[str, tuple[Any, Any, Any]] = {
    "hosted_models.id": ("one", "org/two", "./three.gguf"),
    "hosted_models.device": ("cpu", "cuda:0,cuda:1", "mps"),
    "hosted_models.dtype": ("float32", "bfloat16", "float32"),
    "hosted_models.quant": ("int8", "int4", "none"),
    "hosted_models.layers": ("0:30", "0:10,10:30", "0:1,1:30"),
    "hosted_models.private_layers": ("1,1", "2,0", "0,3"),
    "hosted_models.max_memory": (10**9, 800 * 10**6, 2 << 30),
    "hosted_models.kv_memory": (10**8, 1 << 20, 3 * 10**9),
    "hosted_models.load_ends": (True, True, True),  # false needs a network
    "server.api": (True, True, True),  # false goes with few others; tests/cli/node/test_no_api.py has it
    "server.host": ("localhost", "127.0.0.2", "::1"),
    "server.port": (1, 2, 0),
    "server.api_key_file": (Path("/keys/a"), Path("/keys/b"), Path("/keys/c")),
    "server.keys": (Path("/keys/a"), Path("/keys/b"), Path("/keys/c")),
    "server.allow_insecure": (True, False, True),
    "server.tls_cert": (Path("/tls/a"), Path("/tls/b"), Path("/tls/c")),
    "server.tls_key": (Path("/tls/a"), Path("/tls/b"), Path("/tls/c")),
    "server.cors_origins": (("https://a.example",), ("https://b.example", "http://localhost:3000"), ("*",)),
    "server.max_body": (10**6, 1 << 10, 1001),
    "server.max_upload": (10**6, 1 << 10, 1001),
    "server.keep_alive": (1.0, 2.5, 0.1),
    "server.ready_within": (1.0, 2.5, 0.1),
    "network.name": ("home", "lab", "home"),
    "network.listen": (("tcp/127.0.0.1:1",), ("udp/a:1", "tcp/[::1]:0"), ("tcp/b.example:3",)),
    "network.connect": (("tcp/127.0.0.1:1",), ("udp/a:1", "tcp/[::1]:2"), ("tcp/b.example:3",)),
    "network.mode": ("router", "client", "peer"),
    "network.router": ("in-process", "zenoh", "my-router"),
    "network.multicast": (True, False, True),
    "network.lease_ms": (200, 500, 10_000),
    "network.open": (True, False, True),
    "network.ca_file": (Path("/keys/a"), Path("/keys/b"), Path("/keys/c")),
    "network.certificate_file": (Path("/keys/a"), Path("/keys/b"), Path("/keys/c")),
    "network.key_file": (Path("/keys/a"), Path("/keys/b"), Path("/keys/c")),
    "network.revocations_file": (Path("/keys/a"), Path("/keys/b"), Path("/keys/c")),
    "network.trusted_file": (Path("/keys/a"), Path("/keys/b"), Path("/keys/c")),
    "network.accept_weights": (("any",), ("0" * 64, "any"), ("f" * 64,)),
    "network.peers_file": (Path("/keys/a"), Path("/keys/b"), Path("/keys/c")),
    "network.share_weights": (False, True, False),
    "network.weights_rate": (10**6, 1 << 20, 2 * 10**8),
    "network.wire": ("fp32", "int8", "bf16"),
    "network.recovery_timeout": (0.0, 1.5, 120.0),
    "aliases": ({"a": DEFAULT_MODEL}, {"b": DEFAULT_MODEL, "c": DEFAULT_MODEL}, {"d": DEFAULT_MODEL}),
    "limits.max_jobs": (1, 2, 3),
    "limits.max_tokens": (1, 2, 3),
    "limits.drain_timeout": (0.0, 1.5, 60.0),
    "limits.max_connections": (1, 2, 3),
    "limits.max_waiting_per_address": (1, 2, 3),
    "limits.header_timeout": (0.5, 1.5, 60.0),
    "limits.idle_timeout": (0.5, 1.5, 60.0),
    "limits.share_prefixes": (True, False, True),
    "limits.key_disk": (10**9, 2 * 10**6, 3 << 30),
    "limits.key_batches": (1, 8, 100),
    "workspace.path": (Path("/jobs/a"), Path("/jobs/b"), Path("/jobs/c")),
    "workspace.jobs": (1, 2, 3),
    "workspace.deaths": (1, 2, 4),
    "workspace.keep_responses": (60.0, 3600.0, 0.5),
    "scheduler.policy": ("edf", "lrs", "fcfs"),
    "prefill_chunk_size": (1, 2, 3),
    "scheduler.idle_chunk": (1, 2, 3),
    "scheduler.crowd_chunk": (1, 2, 3),
    "scheduler.step_target": (0.1, 0.2, 1.0),
    "gpu_memory": (0.5, 0.75, 1.0),
    "kv_dtype": ("fp8", "auto", "fp8"),
    "scheduler.max_sequences": (1, 2, 3),
    "scheduler.block_size": (8, 32, 64),
    "scheduler.prefix_cache": (False, True, False),
    "scheduler.window": (1, 2, 3),
    "node_id": ("kitchen", "cellar", "attic"),
    "max_pipes": (1, 2, 3),
    "model_validation": (False, True, False),
    "print_times": (True, False, True),
    "log.format": ("json", "text", "json"),
    "log.level": ("debug", "warning", "error"),
}

# These alone would need certificates; a name alone would lead nowhere.
JOINING = {
    "network.listen": {"network.open": True},
    "network.connect": {"network.open": True},
    "network.multicast": {"network.open": True},
    "network.name": {"network.open": True, "network.multicast": True},
}
# Each of these is refused without the other.
PAIRED = {"server.tls_cert": {"server.tls_key": "key.pem"}, "server.tls_key": {"server.tls_cert": "cert.pem"}}


@pytest.fixture(autouse=True)
def readable_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it does not matter what key files hold."""
    monkeypatch.setattr("penstock.config.api_key._read_key_file", lambda file: "a-long-enough-key")


def node_file(folder: Path, text: str) -> Path:
    file = folder / "node.toml"
    file.write_text(text, encoding="utf-8")
    return file


def one_setting(setting: Setting, value: Any) -> str:
    heading = {"": "", MODELS: f"[[{MODELS}]]\n"}.get(setting.table, f"[{setting.table}]\n")
    return f"{heading}{setting.name} = {setting.kind.write(value)}\n"


def key_in_sources(setting: Setting) -> str:
    return f"{MODELS}[0].{setting.name}" if setting.table == MODELS else setting.key


def value_in_node(node: NodeConfig, setting: Setting) -> Any:
    if setting.owner is EngineConfig:
        return getattr(node.engine, setting.attribute)
    if setting.table == MODELS:
        return getattr(node.models[0], setting.name)
    return getattr(getattr(node, setting.table) if setting.table else node, setting.name)


def refusal(text: str, folder: Path, environ: dict[str, str] | None = None, flags: dict[str, Any] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        load_settings(node_file(folder, text), environ or {}, flags or {})
    return refused.value


# ---- every setting, from every source ----


def test_without_anything_all_settings_are_defaults() -> None:
    found = load_settings(None, {}, {})
    assert found.node == NodeConfig()
    assert found.file is None
    assert {source for _, source in found.sources.values()} == {"default"}
    assert list(found.sources) == [key_in_sources(setting) for setting in SETTINGS]


@pytest.mark.parametrize("key", BY_KEY)
def test_a_flag_comes_before_a_variable_and_that_before_the_file(key: str, tmp_path: Path) -> None:
    setting = BY_KEY[key]
    in_file, in_environment, in_flag = THREE[key]
    for use_file, use_environment, use_flag in itertools.product([False, True], repeat=3):
        path = node_file(tmp_path, one_setting(setting, in_file)) if use_file else None
        environ = {setting.variable: setting.kind.show(in_environment)} if use_environment else {}
        flags = {key: setting.kind.show(in_flag) if use_flag else None} | JOINING.get(key, {})
        flags |= PAIRED.get(key, {}) if use_file or use_environment or use_flag else {}
        expected, source = setting.default, "default"
        if use_file:
            expected, source = in_file, f"file {path}"
        if use_environment:
            expected, source = in_environment, f"environment {setting.variable}"
        if use_flag:
            expected, source = in_flag, f"flag {setting.flag}"
        found = load_settings(path, environ, flags)
        assert found.sources[key_in_sources(setting)] == (expected, source)
        assert value_in_node(found.node, setting) == expected
        others = {other for name, (_, other) in found.sources.items() if name != key_in_sources(setting)}
        assert others - {"flag --open-network", "flag --multicast", "flag --tls-cert", "flag --tls-key"} == {"default"}


@pytest.mark.parametrize("key", [setting.key for setting in SETTINGS if setting.optional])
def test_none_takes_back_what_the_file_sets(key: str, tmp_path: Path) -> None:
    setting = BY_KEY[key]
    path = node_file(tmp_path, one_setting(setting, THREE[key][0]))
    by_flag = load_settings(path, {}, {key: "none"})  # also where the file alone would be refused
    by_variable = load_settings(path, {setting.variable: "None"}, {})
    assert value_in_node(by_flag.node, setting) == value_in_node(by_variable.node, setting) == setting.default


@given(chosen=st.dictionaries(st.sampled_from(sorted(THREE)), st.tuples(*[st.booleans()] * 3)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_settings_of_several_sources_do_not_disturb_each_other(chosen: dict[str, Any], tmp_path: Path) -> None:
    chosen.pop("aliases", None)  # they would point to a model that another setting replaces
    for key in (*JOINING, *PAIRED):
        chosen.pop(key, None)  # whether they may be used depends on the others
    if "hosted_models.quant" in chosen:
        chosen.pop("hosted_models.dtype", None)  # any but auto means PyTorch, which does not quantise
    tables: dict[str, list[str]] = {table: [] for table in OWNERS}
    environ, flags, expected = {}, {}, {}
    for key, (in_file, in_environment, in_flag) in chosen.items():
        setting, values = BY_KEY[key], THREE[key]
        if in_file:
            tables[setting.table].append(f"{setting.name} = {setting.kind.write(values[0])}")
        if in_environment:
            environ[setting.variable] = setting.kind.show(values[1])
        if in_flag:
            flags[key] = setting.kind.show(values[2])
        last = [value for value, used in zip(values, chosen[key], strict=True) if used]
        expected[key] = last[-1] if last else setting.default
    text = "\n".join(
        line
        for table, lines in tables.items()
        for line in ([f"[[{table}]]" if table == MODELS else f"[{table}]"] * bool(table) + lines)
    )
    found = load_settings(node_file(tmp_path, text), environ, flags)
    assert all(value_in_node(found.node, BY_KEY[key]) == value for key, value in expected.items())


def test_flags_may_be_values_as_well_as_text() -> None:
    found = load_settings(None, {}, {"server.port": 0, "scheduler.prefix_cache": False, "hosted_models.kv_memory": 2})
    assert (found.node.server.port, found.node.engine.prefix_cache, found.node.models[0].kv_memory) == (0, False, 2 * 10**9)


def test_names_of_flags_and_variables_are_unique_and_mean_nothing_else() -> None:
    flags, variables = [s.flag for s in SETTINGS], [s.variable for s in SETTINGS]
    assert len(set(flags)) == len(set(variables)) == len(SETTINGS)
    assert not set(variables) & set(OTHER_VARIABLES)
    assert BY_KEY["server.port"].variable == "PENSTOCK_PORT"
    assert BY_KEY["hosted_models.kv_memory"].variable == "PENSTOCK_KV_MEMORY"


# ---- the node file ----


def test_the_example_says_what_would_be_so_without_it(tmp_path: Path) -> None:
    found = load_settings(node_file(tmp_path, example()), {}, {})
    assert found.node == NodeConfig()


def test_the_samples_of_the_example_can_be_used(tmp_path: Path) -> None:
    lines = [line[2:] if line.startswith("# ") and " = " in line else line for line in example().splitlines()]
    found = load_settings(node_file(tmp_path, "\n".join(lines)), {}, {})
    unset = {key for key, (_, source) in found.sources.items() if source == "default"}
    assert unset == set()
    assert found.node.network.enabled
    assert found.node.aliases == {"gpt-4o": DEFAULT_MODEL}


def test_penstock_config_names_the_file_where_no_path_is_given(tmp_path: Path) -> None:
    file = node_file(tmp_path, "[server]\nport = 7\n")
    other = tmp_path / "other.toml"
    other.write_text("[server]\nport = 8\n", encoding="utf-8")
    environ = {"PENSTOCK_CONFIG": str(file)}
    assert load_settings(None, environ, {}).sources["server.port"] == (7, f"file {file}")
    assert load_settings(other, environ, {}).node.server.port == 8
    assert load_settings(None, {"PENSTOCK_CONFIG": ""}, {}).file is None


def test_a_path_in_the_file_is_meant_from_its_folder(tmp_path: Path) -> None:
    file = node_file(tmp_path, '[server]\napi_key_file = "keys/a.txt"\n')
    assert load_settings(file, {}, {}).node.server.api_key_file == tmp_path / "keys/a.txt"
    absolute = node_file(tmp_path, '[server]\napi_key_file = "/keys/a.txt"\n')
    assert load_settings(absolute, {}, {}).node.server.api_key_file == Path("/keys/a.txt")


def test_the_files_of_a_network_are_meant_from_the_files_folder_too(tmp_path: Path) -> None:
    files = "ca_file = 'ca.pem'\ncertificate_file = '/a.pem'\nkey_file = 'k/a.key'"
    network = load_settings(node_file(tmp_path, f"[network]\nlisten = ['tls/0.0.0.0:7447']\n{files}"), {}, {}).node.network
    assert (network.ca_file, network.certificate_file) == (tmp_path / "ca.pem", Path("/a.pem"))
    assert network.key_file == tmp_path / "k/a.key"


def test_a_file_of_a_windows_editor_is_read(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_bytes(b"\xef\xbb\xbf[server]\r\nport = 7\r\n")
    assert load_settings(file, {}, {}).node.server.port == 7


def misspelt(key: str) -> list[str]:
    table, dot, name = key.rpartition(".")
    middle = len(name) // 2
    return [f"{table}{dot}{wrong}" for wrong in (name[:middle] + name[middle + 1 :], name[:middle] + "x" + name[middle:])]


@pytest.mark.parametrize("key", [setting.key for setting in SETTINGS if setting.table != MODELS])
def test_a_misspelt_setting_is_named_with_the_nearest(key: str, tmp_path: Path) -> None:
    for wrong in misspelt(key):
        error = refusal(f"{wrong} = 1\n", tmp_path)
        assert error.message == f"{tmp_path / 'node.toml'}: there is no setting '{wrong}'."
        assert error.hint.startswith(f"Did you mean '{key}'?")


@pytest.mark.parametrize(
    "text, message",
    [
        ("port = 1", "no setting 'port'. Did you mean 'server.port'?"),
        ("[server]\nnode_id = 'a'", "no setting 'server.node_id'. Did you mean 'node_id'?"),
        ("[server]\nnode_id = 'a'", "Settings without a table go before the first [table]."),
        ("[sever]\nport = 1", "no setting 'sever'. Did you mean 'server'?"),
        ("[[hosted_models]]\ndevcie = 'cpu'", "no setting 'hosted_models.devcie'. Did you mean 'hosted_models.device'?"),
        ("[server]\napi_key = 'my-secret-key'", "no setting 'server.api_key'. Did you mean 'server.api_key_file'?"),
        ("zebra = 1", "no setting 'zebra'. `penstock config --example` shows all settings."),
        ("[hosted_models]\nid = 'a'", "Write [[hosted_models]], with two brackets."),
        ("hosted_models = []", "the node hosts no model"),
        ("hosted_models = ['a']", "hosted_models is not a list of models"),
        ("server = 1", "server is a table of settings, not a value. Write [server] on a line alone."),
        ("[server]\nport = '80'", 'server.port = "80" cannot be used. Give a whole number.'),
        ("[server]\nport = 99999", "server.port = 99999 cannot be used. Give a whole number from 1 to 65535"),
        ("[server]\nport = true", "server.port = true cannot be used."),
        ("[server]\nmax_body = 8388608", "a number alone means GB"),
        ("prefill_chunk_size = 0", "prefill_chunk_size = 0 cannot be used. Give a whole number from 1 up."),
        ("[scheduler]\npolicy = 'fifo'", 'scheduler.policy = "fifo" cannot be used. Give one of: fcfs, edf, lrs.'),
        ("[scheduler]\nprefix_cache = 1", "scheduler.prefix_cache = 1 cannot be used. Give true or false."),
        ("[[hosted_models]]\n[[hosted_models]]\nid = 'b'\nlayers = '5'", "hosted_models[1].layers: '5' is not a layer range."),
        ("[aliases]\na = 1", "aliases = "),
        ("[aliases]\na = 'x'", "The alias 'a' points to 'x', which this node does not host."),
        ("[[hosted_models]]\nid = 'a'\n[[hosted_models]]\nid = 'a'", "The model 'a' is hosted twice."),
        ("max_pipes = 0", "max_pipes = 0 cannot be used."),
        ("model_validation = 1", "model_validation = 1 cannot be used."),
        ("[[hosted_models]]\nload_ends = false", "load_ends = false of 'smollm2-135m' needs a network"),
        ("[network]\nname = 'at home'", 'network.name = "at home" cannot be used. Use up to 64 letters'),
        ("[network]\nlisten = 'tcp/a:1'", 'network.listen = "tcp/a:1" cannot be used. Give a list of texts'),
        ("[network]\nconnect = ['a:1']", 'connect = "a:1" cannot be used. Write an endpoint as tcp/a:1.'),
        ("[network]\nlease_ms = 100", "network.lease_ms = 100 cannot be used. Give a whole number from 200 up."),
        ("[workspace]\njobs = 0", "workspace.jobs = 0 cannot be used. Give a whole number from 1 up."),
        ("[workspace]\npaht = 'jobs'", "there is no setting 'workspace.paht'. Did you mean 'workspace.path'?"),
        ("[server]\nport 80", "node.toml is not valid TOML: expected '=' after a key in a key/value pair (at line 2, column 6)."),
        ("[server]\nport = 1\nport = 2", "is not valid TOML: cannot overwrite a value (at line 3, column 9)."),
    ],
)
def test_a_mistake_in_the_file_is_told_plainly(text: str, message: str, tmp_path: Path) -> None:
    error = refusal(text, tmp_path)
    assert message in str(error)
    assert "my-secret-key" not in str(error)


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"The node file .*none.toml does not exist\. Create one with: penstock config --example"
    ):
        load_settings(tmp_path / "none.toml", {}, {})
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory\."):
        load_settings(tmp_path, {}, {})
    (tmp_path / "node.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(.* at byte 5\)"):
        load_settings(tmp_path / "node.toml", {}, {})


# ---- several models ----


TWO_MODELS = '[[hosted_models]]\nid = "a"\ndevice = "cpu"\n[[hosted_models]]\nid = "b"\nkv_memory = 1\n'


def test_several_models_keep_their_own_settings(tmp_path: Path) -> None:
    found = load_settings(node_file(tmp_path, TWO_MODELS), {}, {"aliases": "x=a,y=b"})
    assert [(m.id, m.device, m.kv_memory) for m in found.node.models] == [("a", "cpu", None), ("b", "auto", 10**9)]
    assert found.sources["hosted_models[1].device"] == ("auto", "default")


def test_a_flag_for_one_model_is_refused_beside_several(tmp_path: Path) -> None:
    by_flag = refusal(TWO_MODELS, tmp_path, flags={"hosted_models.device": "cuda"})
    assert by_flag.message == f"--device is for a node with one model, but {tmp_path / 'node.toml'} hosts 2."
    assert "Set device in the [[hosted_models]] that you mean" in by_flag.hint
    assert "PENSTOCK_MODEL is for a node with one model" in str(refusal(TWO_MODELS, tmp_path, {"PENSTOCK_MODEL": "c"}))


def test_another_model_keeps_the_rest_of_what_the_file_says(tmp_path: Path) -> None:
    file = node_file(tmp_path, '[[hosted_models]]\nid = "a"\ndevice = "cpu"\n')
    (model,) = load_settings(file, {"PENSTOCK_MODEL": "b"}, {}).node.models
    assert (model.id, model.device) == ("b", "cpu")


# ---- the environment ----


@pytest.mark.parametrize(
    "variable, expected",
    [
        ("PENSTOCK_PROT", "Did you mean PENSTOCK_PORT?"),
        ("PENSTOCK_APIKEY", "Did you mean PENSTOCK_API_KEY?"),
        ("PENSTOCK_SERVER_PORT", "Did you mean PENSTOCK_PORT?"),
        ("PENSTOCK_SCHEDULER_POLICY", "Did you mean PENSTOCK_POLICY?"),
        ("PENSTOCK_HOSTED_MODELS_ID", "Did you mean PENSTOCK_MODEL?"),
        ("PENSTOCK_ZZZZZZZZ", "is not a setting of Penstock. Otherwise unset it"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest_and_its_value_stays_hidden(variable: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(None, {variable: "perhaps-a-secret"}, {})
    assert variable in refused.value.message
    assert expected in str(refused.value)
    assert "perhaps-a-secret" not in str(refused.value)


def test_variables_of_others_and_empty_ones_are_let_be() -> None:
    environ = dict.fromkeys(OTHER_VARIABLES, "") | {"PENSTOCK_API_KEY": "a-long-enough-key", "PENSTOCK_PORT": ""}
    assert load_settings(None, environ, {}).node == NodeConfig()


def test_a_server_that_was_told_no_workspace_has_its_own() -> None:
    at_home = Path("/home/ann/.local/state/penstock/workspace")
    for environ, flags, expected in (
        ({"HOME": "/home/ann"}, {}, at_home),
        ({"HOME": "/home/ann", "XDG_STATE_HOME": "/var/ann"}, {}, Path("/var/ann/penstock/workspace")),
        ({}, {}, None),
        ({"HOME": "/home/ann"}, {"workspace.path": "jobs"}, Path("jobs")),
        ({"HOME": "/home/ann"}, {"workspace.path": "none"}, None),
        ({"HOME": "/home/ann"}, {f"{MODELS}.load_ends": "false", "network.open": "true", "network.listen": "tcp/[::]:0"}, None),
    ):
        workspace = load_settings(None, environ, flags).node.workspace
        assert workspace.path == expected
        assert workspace.by_default == ("workspace.path" not in flags)


def test_a_file_can_say_that_there_is_no_workspace(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('[workspace]\npath = "none"\n')
    assert load_settings(tmp_path / "node.toml", {"HOME": "/home/ann"}, {}).node.workspace.path is None


def test_what_kubernetes_says_of_a_service_named_penstock_is_let_be() -> None:
    environ = {
        "PENSTOCK_PORT": "tcp://10.0.0.1:8000",
        "PENSTOCK_SERVICE_HOST": "10.0.0.1",
        "PENSTOCK_SERVICE_PORT": "8000",
        "PENSTOCK_SERVICE_PORT_HTTP": "8000",
        "PENSTOCK_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PENSTOCK_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert load_settings(None, environ, {}).node == NodeConfig()


def test_a_wrong_variable_is_told_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r'PENSTOCK_PORT = "eighty" cannot be used\. Give a whole number\.'):
        load_settings(None, {"PENSTOCK_PORT": "eighty"}, {})
    with pytest.raises(ConfigError, match=r"PENSTOCK_PREFILL_CHUNK_SIZE = 0 cannot be used\."):
        load_settings(None, {"PENSTOCK_PREFILL_CHUNK_SIZE": "0"}, {})


# ---- the key ----


def test_a_server_that_others_can_reach_needs_a_key(tmp_path: Path) -> None:
    assert "without an API key" in str(refusal("[server]\nhost = '0.0.0.0'", tmp_path))
    load_settings(None, {"PENSTOCK_API_KEY": "a-long-enough-key"}, {"server.host": "0.0.0.0"})
    load_settings(None, {}, {"server.host": "0.0.0.0", "server.allow_insecure": True})


def test_two_keys_side_by_side_are_refused(tmp_path: Path) -> None:
    environ = {"PENSTOCK_API_KEY": "a-long-enough-key"}
    file = node_file(tmp_path, "[server]\napi_key_file = 'a.txt'")
    load_settings(file, environ, {})  # the environment comes before the file
    with pytest.raises(ConfigError, match="PENSTOCK_API_KEY and --api-key-file both give an API key"):
        load_settings(file, environ, {"server.api_key_file": "b.txt"})
    with pytest.raises(ConfigError, match="PENSTOCK_API_KEY and PENSTOCK_API_KEY_FILE both"):
        load_settings(file, environ | {"PENSTOCK_API_KEY_FILE": "b.txt"}, {})


def test_settings_do_not_hold_the_key() -> None:
    found: Settings = load_settings(None, {"PENSTOCK_API_KEY": "a-long-enough-key"}, {})
    assert "a-long-enough-key" not in repr(found)
