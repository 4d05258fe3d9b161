"""`llm` and LangChain hold a streamed conversation with a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import Server


@pytest.mark.client(
    "langchain-openai",
    apis="chat",
    ran="a streamed conversation",
)
def test_langchain_streams_a_conversation(server: Server) -> None:
    langchain = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is installed by `make test`, not by `pip install`"
    )
    model = langchain.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="smollm2-135m", temperature=0, max_tokens=40)
    messages: list[tuple[str, str]] = [("user", "What is the capital of France?")]
    first = list(model.stream(messages))
    assert len(first) > 4
    text = "".join(str(chunk.content) for chunk in first)
    assert text == "The capital of France is Paris."
    messages += [("assistant", text), ("user", "What is the capital of Italy?")]
    second = "".join(str(chunk.content) for chunk in model.stream(messages))
    assert "Rome" in second


@pytest.mark.client(
    "langchain-openai",
    apis="chat",
    ran="typed answers",
)
def test_langchain_gets_an_object_of_the_right_shape(server: Server) -> None:
    langchain = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is installed by `make test`, not by `pip install`"
    )
    model = langchain.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="smollm2-135m", temperature=0, max_tokens=60)
    schema = {
        "title": "Capital",
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(schema, method=method).invoke("What is the capital of France?")
        assert set(found) == {"city", "country"}, method


@pytest.mark.client(
    "llm",
    apis="chat",
    ran="a conversation from the command line",
)
@pytest.mark.slow
def test_llm_streams_a_conversation(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("llm", reason="llm is installed by `make test`, not by `pip install`")
    (tmp_path / "extra-openai-models.yaml").write_text(
        json.dumps([{"model_id": "penstock", "model_name": "smollm2-135m", "api_base": f"{server.url}/v1", "api_key_name": "x"}])
    )
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}

    def llm(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    llm("keys", "set", "x", "--value", "none")
    assert "The capital of France is Paris." in llm("-m", "penstock", "-o", "temperature", "0", "What is the capital of France?")
    assert "Rome" in llm("-m", "penstock", "-o", "temperature", "0", "-c", "What is the capital of Italy?")
    chunks = json.loads(llm("logs", "-n", "1", "--json"))
    assert chunks[0]["model"] == "penstock"
