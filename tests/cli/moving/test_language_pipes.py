"""`penstock import language-pipes`: a configuration of each generation becomes a node file that loads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.config.old_names import LANGUAGE_PIPES_KEYS
from penstock.config.settings import load_settings
from tests.jobs import Run, cli
from tests.server import free_port

SECRETS = ("9f86d081884c7d659a2feaa0c55ad015", "test_key", "hf_abcdefgh")

EVERY_KEY_OF_0 = """
node_id = "node-1"
oai_port = 8123
peer_port = 5051
job_port = 5050
network_ip = "192.168.0.1"
bootstrap_address = "127.0.0.1"
bootstrap_port = 5052
app_dir = "~/.config/language_pipes"
model_dir = "~/.cache/language_pipes/models"
logging_level = "DEBUG"
max_pipes = 2
model_validation = true
ecdsa_verification = true
https = false
print_times = true
prefill_chunk_size = 6

[[hosted_models]]
id = "a/with-ends"
device = "cpu"
max_memory = 4
load_ends = true

[[hosted_models]]
id = "a/layers-only"
device = "cuda:0"
max_memory = 0.5
"""

EVERY_KEY_OF_1 = """
node_id = "node-1"
openai_port = 8000
api_keys = ["test_key"]
end_models = ["a/with-ends", "a/ends-only"]
num_local_layers = 2
peer_port = 5000
network_ip = "192.168.0.1"
bootstrap_address = "192.168.0.2"
bootstrap_port = 5000
network_key = "9f86d081884c7d659a2feaa0c55ad015"
whitelist_ips = ["192.168.0.2"]
whitelist_node_ids = ["node-2"]
huggingface_token = "hf_abcdefgh"
logging_level = "INFO"
max_pipes = 1
model_validation = false
prefill_chunk_size = 256
app_dir = "~/.config/language_pipes"
model_dir = "~/.cache/language_pipes/models"

[[layer_models]]
id = "a/with-ends"
device = "cpu"
max_memory = 4
"""

EVERY_KEY_OF_2 = """
node_id = "node-1"
job_port = 8001
api_keys = ["test_key"]
max_node_jobs = 10
max_api_jobs = 5
peer_port = 5061
network_ip = "192.168.0.1"

[[layer_models]]
model_id = "a/layers"
device = "cpu"
memory = 4.0
data_type = 8

[[end_models]]
model_id = "a/ends"
num_local_layers = 0
device = "cuda:1"

[[bootstrap_nodes]]
address = "192.168.0.2"
port = 5000

[[bootstrap_nodes]]
address = "::1"
port = 5001
"""


def converted(text: str, tmp_path: Path, quickly: Run) -> tuple[Path, list[str]]:
    """The node file and the notes of a configuration."""
    source, target = tmp_path / "config.toml", tmp_path / "node.toml"
    source.write_text(text, encoding="utf-8")
    code, out, err = quickly("import", "language-pipes", source, "--output", target)
    assert (code, out) == (0, "")
    *notes, last = err.splitlines()
    assert last == f"Next: penstock serve --config {target} --dry-run"
    assert all(note.startswith("note: ") for note in notes)
    written = target.read_text(encoding="utf-8")
    assert not [secret for secret in SECRETS if secret in written + err]
    return target, [note.removeprefix("note: ") for note in notes]


def subjects(notes: list[str]) -> set[str]:
    return {name for note in notes for name in note.partition(":")[0].split(", ")}


def test_a_configuration_of_0_with_every_key(tmp_path: Path, quickly: Run) -> None:
    target, notes = converted(EVERY_KEY_OF_0, tmp_path, quickly)
    node = load_settings(target, {}, {}).node
    assert (node.node_id, node.server.port, node.log.level, node.max_pipes) == ("node-1", 8123, "debug", 2)
    assert (node.model_validation, node.engine.print_times, node.engine.chunk) == (True, True, 6)
    assert (node.network.listen, node.network.connect) == (("tcp/0.0.0.0:5051",), ("tcp/127.0.0.1:5052",))
    assert node.network.open
    first, second = node.models
    assert (first.id, first.device, first.max_memory, first.load_ends) == ("a/with-ends", "cpu", 4 * 10**9, True)
    assert (second.id, second.device, second.max_memory, second.load_ends) == ("a/layers-only", "cuda:0", 5 * 10**8, False)
    assert {first.private_layers, second.private_layers} == {None}
    without = {"job_port", "oai_port", "network", "prefill_chunk_size", "app_dir", "model_dir", "network_ip"}
    assert subjects(notes) == without | {"ecdsa_verification", "https"}


def test_a_configuration_of_1_with_every_key(tmp_path: Path, quickly: Run) -> None:
    target, notes = converted(EVERY_KEY_OF_1, tmp_path, quickly)
    text = target.read_text(encoding="utf-8")
    assert "\n[network]\n" not in text, "an open network would let in more than the key and the lists did"
    (note,) = [note for note in notes if note.startswith("network_key, whitelist_ips, whitelist_node_ids:")]
    assert "penstock network create home --listen tls/0.0.0.0:5000" in note
    network = {"PENSTOCK_LISTEN": "tcp/127.0.0.1:7000", "PENSTOCK_OPEN_NETWORK": "true"}  # in place of one that was joined
    node = load_settings(target, network, {}).node
    assert (node.server.port, node.model_validation, node.engine.chunk, node.log.level) == (8000, False, 256, "info")
    first, second = node.models
    assert (first.id, first.load_ends, first.private_layers, first.layers) == ("a/with-ends", True, "2,0", None)
    assert (second.id, second.load_ends, second.private_layers, second.layers) == ("a/ends-only", True, "2,0", "0:2")
    assert {"api_keys", "huggingface_token", "app_dir", "model_dir", "network_ip", "openai_port"} <= subjects(notes)


def test_a_configuration_of_2_with_every_key(tmp_path: Path, quickly: Run) -> None:
    target, notes = converted(EVERY_KEY_OF_2, tmp_path, quickly)
    node = load_settings(target, {}, {}).node
    assert node.server.port == 8001
    assert node.network.connect == ("tcp/192.168.0.2:5000", "tcp/[::1]:5001")
    first, second = node.models
    assert (first.id, first.max_memory, first.load_ends) == ("a/layers", 4 * 10**9, False)
    assert (second.id, second.device, second.layers, second.load_ends) == ("a/ends", "cuda:1", "ends", True)
    without = {"job_port", "network", "api_keys", "max_node_jobs", "max_api_jobs", "network_ip", "model_validation"}
    assert subjects(notes) == without | {"a/layers"}
    assert "penstock keys add NAME --jobs 5" in " ".join(notes)


def test_the_samples_have_every_key_of_language_pipes() -> None:
    together = EVERY_KEY_OF_0 + EVERY_KEY_OF_1 + EVERY_KEY_OF_2
    assert [key for key in LANGUAGE_PIPES_KEYS if f"{key} = " not in together and f"[[{key}]]" not in together] == [
        "hf_token"  # of globals.toml, which holds nothing else
    ]


@pytest.mark.parametrize(
    "text, note",
    [
        ('node_id = "node 1"', 'node_id: node_id = "node 1" cannot be used. It was left out. Use up to 64 letters'),
        ('node_id = "a"\ncolour = "red"', "colour: This is not a known setting of Language Pipes; it was left out."),
        ('node_id = "a"\nend_models = [7]', "end_models: 7 cannot be read and was left out."),
        ('node_id = "a"\n[[layer_models]]\ndevice = "cpu"', "layer_models: {'device': 'cpu'} cannot be read and was left out."),
        ('node_id = "a"\nhosted_models = ["Qwen"]', "hosted_models: 'Qwen' cannot be read and was left out."),
        ('node_id = "a"\n[[layer_models]]\nid = "m"\ndevice = "tpu"', 'hosted_models.device: hosted_models.device = "tpu"'),
        ('node_id = "a"\n' + '[[layer_models]]\nid = "m"\n' * 2, "m: It is hosted twice."),
        ('node_id = "a"\n[[layer_models]]\nid = "m"\nseed = 3', "m: seed: This is not a known setting of Language Pipes"),
        ('node_id = "a"', "models: None is named. Penstock hosts the model that the network runs, or its default model."),
        (
            'node_id = "a"\nend_models = ["m"]',
            "API: Language Pipes opened none here; Penstock serves it at http://127.0.0.1:8000.",
        ),
    ],
)
def test_what_cannot_be_carried_over_is_told_in_the_file_and_on_stderr(
    text: str, note: str, tmp_path: Path, quickly: Run
) -> None:
    target, notes = converted(text, tmp_path, quickly)
    (found,) = [one for one in notes if one.startswith(note)]
    assert f"#   {found}\n" in target.read_text(encoding="utf-8")
    load_settings(target, {}, {})


def test_models_written_as_text_are_read_too(tmp_path: Path, quickly: Run) -> None:
    text = 'node_id = "a"\nhosted_models = ["id=m,device=cpu,memory=4,load_ends=true", "id=n,device=cpu,memory=2"]'
    target, _ = converted(text, tmp_path, quickly)
    found = [(model.id, model.max_memory, model.load_ends) for model in load_settings(target, {}, {}).node.models]
    assert found == [("m", 4 * 10**9, True), ("n", 2 * 10**9, False)]


def test_the_node_file_goes_to_stdout_and_an_existing_file_stays(tmp_path: Path, quickly: Run) -> None:
    source, target = tmp_path / "config.toml", tmp_path / "node.toml"
    source.write_text(EVERY_KEY_OF_0, encoding="utf-8")
    target.write_text("mine", encoding="utf-8")
    code, out, err = quickly("import", "language-pipes", source)
    assert code == 0
    assert out.startswith("# A Penstock node, converted from config.toml, a configuration of Language Pipes.\n")
    assert 'id = "a/with-ends"' in out
    assert "Next:" not in err
    code, out, err = quickly("import", "language-pipes", source, "-o", target)
    assert (code, out) == (1, "")
    assert err == f"error: {target} exists already.\nhint: Name another file with --output, or remove this one.\n"
    assert target.read_text(encoding="utf-8") == "mine"


def test_a_saved_configuration_is_found_by_its_name(tmp_path: Path, quickly: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/node4.toml").write_text('node_id = "four"\n', encoding="utf-8")
    monkeypatch.setenv("LP_APP_DIR", str(tmp_path))
    code, out, _ = quickly("import", "language-pipes", "node4")
    assert code == 0
    assert 'node_id = "four"' in out


@pytest.mark.parametrize(
    "text, error",
    [
        (
            None,
            "error: The configuration {file} does not exist.\nhint: Name the TOML file that `language-pipes --config` took.\n",
        ),
        ("[server]\nport = 1\n", "error: {file} has no setting of Language Pipes.\n"),
        ("node_id = ", "error: {file} is not valid TOML"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text: str | None, error: str, tmp_path: Path, quickly: Run) -> None:
    file = tmp_path / "config.toml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    code, out, err = quickly("import", "language-pipes", file)
    assert (code, out) == (1, "")
    assert err.startswith(error.format(file=file))


def test_a_converted_node_starts_a_dry_run(tmp_path: Path, tiny_chat_model: Path) -> None:
    text = f'node_id = "a"\njob_port = {free_port()}\npeer_port = {free_port()}\nend_models = ["{tiny_chat_model}"]\n'
    text += f'[[layer_models]]\nmodel_id = "{tiny_chat_model}"\ndevice = "cpu"\nmemory = 1\n'
    source, target = tmp_path / "config.toml", tmp_path / "node.toml"
    source.write_text(text, encoding="utf-8")
    home = {"PENSTOCK_HOME": str(tmp_path / "home"), "LP_PEER_PORT": "5000"}
    assert cli("import", "language-pipes", source, "-o", target, **home).returncode == 0
    done: subprocess.CompletedProcess[bytes] = cli("serve", "--config", target, "--dry-run", **home)
    assert done.returncode == 0, done.stderr.decode()
    assert "has 6 layers. This node would load:" in done.stdout.decode()
    (warning,) = [line for line in done.stderr.decode().splitlines() if "LP_" in line]
    assert " warning penstock.cli.node.old_variables LP_PEER_PORT is a variable of Language Pipes and has no effect. " in warning
