"""Settings and variables of other systems are named with what replaces them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.config.old_names import LANGUAGE_PIPES_KEYS, LANGUAGE_PIPES_VARIABLES, NRVNA_VARIABLES, old_variables
from penstock.config.settings import load_settings
from penstock.config.table import BY_KEY, OTHER_VARIABLES, SETTINGS
from penstock.errors import ConfigError

SECRET = "9f86d081884c7d659a2feaa0c55ad015"


def refusal(text: str, tmp_path: Path) -> ConfigError:
    file = tmp_path / "node.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_settings(file, {}, {})
    return raised.value


@pytest.mark.parametrize(
    "text, hint",
    [
        ("peer_port = 5001", 'Write listen = ["tls/0.0.0.0:5001"] under [network] (tcp/ in an open network).'),
        ("oai_port = 8080", "Write port = 8080 under [server]."),
        ("job_port = 8080", "Write port = 8080 under [server]; if it was the port between nodes (before 1.0), leave it out."),
        ("model_dir = '/models'", "Set the variable PENSTOCK_CACHE. A model in /models is used by its folder"),
        ("bootstrap_address = '10.0.0.2'", 'Write connect = ["tls/10.0.0.2:PORT"] under [network]'),
        ("logging_level = 'DEBUG'", 'Write level = "debug" under [log].'),
        ("num_local_layers = 2", 'Write private_layers = "2,0" in [[hosted_models]].'),
        ("[[hosted_models]]\nmodel_id = 'a/b'", 'Write id = "a/b" in [[hosted_models]].'),
        ("[[hosted_models]]\nmemory = 4.5", "Write max_memory = 4.5 in [[hosted_models]]."),
        ("[[layer_models]]\nmodel_id = 'a/b'", "Write [[hosted_models]] with id, device and max_memory"),
        ("[[bootstrap_nodes]]\naddress = 'a'", 'Write connect = ["tls/ADDRESS:PORT"] under [network]'),
        ("[network]\npeer_port = 5001", 'Write listen = ["tls/0.0.0.0:5001"] under [network]'),
    ],
)
def test_a_setting_of_language_pipes_in_a_node_file_is_named_with_its_new_place(text: str, hint: str, tmp_path: Path) -> None:
    error = refusal(text, tmp_path)
    assert error.message.endswith(" is a setting of Language Pipes.")
    assert error.hint.startswith(hint)
    assert error.hint.endswith(f"`penstock import language-pipes {tmp_path / 'node.toml'}` converts a whole file.")


@pytest.mark.parametrize("key", LANGUAGE_PIPES_KEYS)
def test_every_old_setting_is_refused_with_a_hint_and_none_is_a_setting_here(key: str, tmp_path: Path) -> None:
    assert key not in BY_KEY
    error = refusal(f"{key} = 1\n", tmp_path)
    assert error.message.endswith(f"{key} is a setting of Language Pipes.")
    assert "{" not in error.hint


@pytest.mark.parametrize("key", ["network_key", "api_keys", "huggingface_token", "hf_token"])
def test_a_secret_is_not_repeated(key: str, tmp_path: Path) -> None:
    assert SECRET not in str(refusal(f'{key} = "{SECRET}"\n', tmp_path))
    assert SECRET not in "".join(old_variables({"LP_NETWORK_KEY": SECRET, "LP_API_KEYS": SECRET, "LP_HUGGINGFACE_TOKEN": SECRET}))


def test_each_variable_of_another_system_is_one_sentence_with_its_replacement() -> None:
    environ = {"LP_OAI_PORT": "8000", "NRVNA_TEMP": "0.2", "NRVNA_WARMUP": "1", "LP_PEER_PORT": "", "LPDEST": "laser", "A": "1"}
    assert list(old_variables(environ)) == [
        "LP_OAI_PORT is a variable of Language Pipes and has no effect. Use PENSTOCK_PORT.",
        "NRVNA_TEMP is a variable of nrvna-ai and has no effect. Use penstock work --temperature T.",
        "NRVNA_WARMUP is a variable of nrvna-ai and has no effect. It has no equivalent here.",
    ]


def test_what_the_replacements_name_exists() -> None:
    variables = {setting.variable for setting in SETTINGS} | set(OTHER_VARIABLES)
    texts = [*LANGUAGE_PIPES_KEYS.values(), *LANGUAGE_PIPES_VARIABLES.values(), *NRVNA_VARIABLES.values()]
    named = set(re.findall(r"PENSTOCK_\w+", " ".join(texts)))
    assert named
    assert named <= variables
    names = {setting.name for setting in SETTINGS}
    assert {name for text in texts for name in re.findall(r"(\w+) = ", text)} <= names
