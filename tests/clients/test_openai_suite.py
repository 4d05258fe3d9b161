"""The `openai` package's own tests, out of its source distribution and unmodified, against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.examples import with_examples
from tests.clients.suites import passed, unpacked
from tests.server import running_server

SUITES = [
    "tests/api_resources/test_models.py",
    "tests/api_resources/test_completions.py",
    "tests/api_resources/test_embeddings.py",
    "tests/api_resources/chat/test_completions.py",
    "tests/api_resources/test_responses.py",
    "tests/api_resources/responses/test_input_items.py",
    "tests/api_resources/test_files.py",
    "tests/api_resources/test_batches.py",
]

# What is left out, and why. tests/doors/test_openai_api.py has its own test with all the parameters that are supported.
DESELECTED = {
    "test_completions.py and with_all_params": "sends what is refused by rule: audio, functions, store, suffix, best_of",
    "test_responses.py and create_with_all_params": "the same: background, conversation, truncation, prompts, tools at OpenAI",
    "test_completions.py and (delete or retrieve or update or list)": "chats are not stored",
    "test_models.py and delete": "hosted models are not deleted over the API",
    "test_embeddings.py and with_all_params": "asks for one dimension, and the model has more",
    "aiohttp": "the same requests over another transport of the client",
    "test_embeddings.py and strict": "a strict client asks for base64 by itself, and then takes nothing but numbers",
    "test_responses.py and retrieve and (overload_2 or with_all_params)": "streams a response that is over",
    "list_with_all_params and not test_completions.py": "asks for the page behind an example's id",
    "test_responses.py and cancel and not path_params": "nothing runs in the background",
    "test_responses.py and compact": "a conversation is not made shorter here",
    "test_files.py and create": "files are for batches, and these are for assistants",
}
NAMES = ["smollm2-135m", "gpt-6-astra", "gpt-3.5-turbo-instruct", "text-embedding-3-small"]  # that the tests ask for


@pytest.mark.client(
    "openai",
    apis="chat, completions, embeddings, responses, files, batches, models",
    ran="its own test suite",
    cannot="audio, images, stored chats, background responses, `compact`, tools that OpenAI runs",
)
@pytest.mark.slow
def test_the_clients_own_tests_pass(tmp_path: Path, small_model_folder: Path) -> None:
    suite = unpacked("openai", tmp_path)
    aliases = "\n".join(["[aliases]", *(f'"{name}" = "{small_model_folder}"' for name in NAMES)])
    with (
        running_server("--model", str(small_model_folder), "--max-tokens", "24", config=aliases) as server,
        with_examples(server.url) as url,
    ):
        count = passed(suite, f"{url}/v1", SUITES, left_out=DESELECTED)
    assert count >= 200  # both clients, loose and strict, whole and streamed
