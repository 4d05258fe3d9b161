"""A chat template that refuses or fails: what the client is told, and what only the log says."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from penstock.errors import RequestError
from penstock.model.text.tokenizer import Tokenizer

SECRET = "the words of a prompt"


def tokenizer_with(template: str, folder: Path, default_model_folder: Path) -> Tokenizer:
    shutil.copy(default_model_folder / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Tokenizer(folder)


def test_a_template_that_refuses_gives_its_reason(tmp_path: Path, default_model_folder: Path) -> None:
    tokenizer = tokenizer_with("{{ raise_exception('Roles must alternate.') }}", tmp_path, default_model_folder)
    with pytest.raises(RequestError) as caught:
        tokenizer.render([{"role": "user", "content": SECRET}])
    assert caught.value.message == "The chat template rejects these messages: Roles must alternate."


@pytest.mark.parametrize(
    "template,logged",
    [
        ("{{ hidden_variable.attribute }}", "UndefinedError: 'hidden_variable' is undefined"),
        ("{% for hidden_variable in %}", "TemplateSyntaxError"),
        ("{{ messages[0].content | int + hidden_variable }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages[0]['content'].encode('utf-99') }}", "LookupError"),
        ("{{ messages[0] + 'hidden_variable' }}", "TypeError"),
        ("{{ messages[0].content.index('hidden_variable') }}", "ValueError"),
    ],
)
def test_a_template_that_fails_tells_clients_nothing_about_itself(
    template: str, logged: str, tmp_path: Path, default_model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizer_with(template, tmp_path, default_model_folder)
    with caplog.at_level(logging.WARNING), pytest.raises(RequestError) as caught:
        tokenizer.render([{"role": "user", "content": SECRET}])
    assert str(caught.value) == (
        "The model's chat template cannot format these messages. "
        "Each message needs a role (system, user, assistant) and a content."
    )
    assert caught.value.__cause__ is None
    assert logged in caplog.text
    assert SECRET not in caplog.text
