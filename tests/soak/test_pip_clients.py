"""Clients from PyPI, in environments of their own. The calls of tools are scripted, since the model is tiny."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.scripted import CHAT, RESPONSES, Call, Script, scripted
from tests.server import Server
from tests.soak.client_programs import MODEL, PROGRAMS, keep_requests, pip_install, run_client

PACKAGES = {
    "openai-agents": "0.24.0",
    "pydantic-ai-slim": "2.66.0",
    "agno": "3.1.10",
    "autogen-agentchat": "0.7.5",
    "autogen-ext": "0.7.5",
    "agent-framework-openai": "1.17.0",
    "litellm": "1.106.2",
    "instructor": "1.17.0",
    "anthropic": "1.8.0",  # the tests outside the soak run the newest one
    "lm-eval": "0.4.13",
    "guidellm": "0.8.1",
    "mcp": "2.3.0",  # litellm imports it for tools, and does not require it
}
EXTRAS = {"pydantic-ai-slim": "[openai]", "lm-eval": "[api]", "agno": "[openai]", "autogen-ext": "[openai]"}
TORCH = Path(__file__).parents[2] / "requirements/torch.txt"  # guidellm needs some PyTorch, and this one may be here already
CAPITALS = [
    {"country": "France", "cities": ["Paris", "Rome"], "answer": 0},
    {"country": "Italy", "cities": ["Paris", "Rome"], "answer": 1},
]
TASK = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": "capitals.jsonl"},
    "test_split": "train",
    "doc_to_text": "The capital of {{country}} is",
}
TASKS = {
    "chosen": {"output_type": "multiple_choice", "doc_to_choice": "{{cities}}", "doc_to_target": "{{answer}}"},
    "said": {
        "output_type": "generate_until",
        "doc_to_target": "{{cities[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}
TOGETHER = (
    ("openai-agents", "pydantic-ai-slim"),
    ("agno", "autogen-agentchat", "autogen-ext"),
    ("agent-framework-openai",),
    ("litellm", "mcp", "instructor"),
    ("anthropic",),
    ("lm-eval",),
    ("guidellm",),
)  # need the same versions of others

pytestmark = pytest.mark.timeout(1800)  # with the installation


def client(package: str) -> str:
    """Package and version, as in `litellm@1.106.2`."""
    return f"{package}@{PACKAGES[package]}"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the programs of a package, which is installed on first use."""

    @functools.cache
    def install(names: tuple[str, ...]) -> Path:
        packages = [f"{name}{EXTRAS.get(name, '')}=={PACKAGES[name]}" for name in names]
        return pip_install([*packages, "--constraint", str(TORCH)], tmp_path_factory.mktemp("pip"))

    return lambda package: install(next(names for names in TOGETHER if package in names))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    "program, package, names",
    [
        pytest.param(
            *("openai_agents", "openai-agents", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"]),
            marks=pytest.mark.client(client("openai-agents"), apis="responses, chat", ran="a tool loop with a typed answer"),
        ),
        pytest.param(
            *("pydantic_agents", "pydantic-ai-slim", ["OpenAIResponsesModel", "OpenAIChatModel"]),
            marks=pytest.mark.client(client("pydantic-ai-slim"), apis="responses, chat", ran="a tool loop with a typed answer"),
        ),
        pytest.param(
            *("agno_agents", "agno", ["OpenAIResponses", "OpenAIChat"]),
            marks=pytest.mark.client(client("agno"), apis="responses, chat", ran="a tool loop with a typed answer"),
        ),
        pytest.param(
            *("autogen_agents", "autogen-agentchat", ["OpenAIChatCompletionClient"]),
            marks=pytest.mark.client(client("autogen-agentchat"), apis="chat", ran="a tool loop with a typed answer"),
        ),
        pytest.param(
            *("agent_framework_agents", "agent-framework-openai", ["OpenAIChatClient", "OpenAIChatCompletionClient"]),
            marks=pytest.mark.client(
                client("agent-framework-openai"),
                apis="responses, chat",
                ran="a tool loop with a typed answer",
                cannot="Responses on a server with `--workspace none`, unless it asks with `store: false`",
            ),
        ),
        pytest.param(
            *("litellm_calls", "litellm", ["openai/tiny", "anthropic/tiny"]),
            marks=pytest.mark.client(
                client("litellm"),
                apis="chat, messages, responses, completions, embeddings",
                ran="a streamed tool call, then a typed answer; a text, a response, a vector",
                cannot="tools without the package `mcp`, which it does not install",
            ),
        ),
        pytest.param(
            *("anthropic_calls", "anthropic", ["whole", "streamed"]),
            marks=pytest.mark.client(
                client("anthropic"), apis="messages", ran="a message, a stream, the tool runner with a typed answer"
            ),
        ),
    ],
)
def test_a_tool_loop_ends_with_a_typed_answer(
    tiny_server: Server, programs: Callable[[str], Path], folder: Path, package: str, program: str, names: list[str]
) -> None:
    script = Script([Call("clock", {"zone": "UTC"})])
    with scripted(tiny_server.url, script) as url:
        output = run_client(
            [programs(package) / "python", PROGRAMS / f"{program}.py", url], folder, LITELLM_LOCAL_MODEL_COST_MAP="True"
        )
    found = [json.loads(line) for line in output.splitlines()]
    assert [one["name"] for one in found] == names
    assert all(one["calls"] == 1 and one["output"]["city"] in ("Paris", "Rome") for one in found), found
    assert {request["status"] for request in script.requests} == {200}
    keep_requests(program, client(package), script, folder)


@pytest.mark.client(
    client("instructor"),
    apis="chat, responses",
    ran="typed answers through tools and through a schema, whole and in parts",
)
def test_instructor_gets_typed_answers(tiny_server: Server, programs: Callable[[str], Path], folder: Path) -> None:
    script = Script()
    with scripted(tiny_server.url, script) as url:
        output = run_client([programs("instructor") / "python", PROGRAMS / "instructor_calls.py", url], folder)
    found = [json.loads(line) for line in output.splitlines()]
    assert [one["name"] for one in found] == ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS", "partial"]
    assert all(one["output"]["city"] in ("Paris", "Rome") for one in found), found
    assert {request["status"] for request in script.requests} == {200}
    keep_requests("instructor", client("instructor"), script, folder)


@pytest.mark.client(
    client("lm-eval"),
    apis="completions, chat, `/tokenize`, `/tokenizer_info`",
    ran="a multiple choice by log-probabilities, and answers, with the server's tokenizer",
)
def test_lm_eval_scores_choices_and_answers(tiny_server: Server, programs: Callable[[str], Path], folder: Path) -> None:
    """Over completions with the server's tokenizer, and over chat. A random model is right by chance, so the score is any."""
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **TASK, **task}), encoding="utf-8")
    (folder / "capitals.jsonl").write_text("".join(json.dumps(one) + "\n" for one in CAPITALS), encoding="utf-8")
    script = Script()
    with scripted(tiny_server.url, script) as url:
        for kind, path, tasks in (("completions", "/v1/completions", TASKS), ("chat-completions", CHAT, ["said"])):
            run_client(
                [
                    *(programs("lm-eval") / "python", "-m", "lm_eval", "run", "--include_path", folder),
                    *("--model", f"local-{kind}", "--model_args", f"base_url={url}{path},model={MODEL},max_retries=1"),
                    *("--tasks", ",".join(tasks), "--output_path", folder / kind, "--log_samples"),
                    *(["--apply_chat_template"] if path == CHAT else []),
                ],
                folder,
                HF_HUB_OFFLINE="1",
                OPENAI_API_KEY="none",
            )
            (results,) = (folder / kind).rglob("results_*.json")
            found = json.loads(results.read_text(encoding="utf-8"))
            assert found["n-samples"] == {name: {"original": 2, "effective": 2} for name in tasks}
    assert {request["status"] for request in script.requests} == {200}
    script.requests[:] = [request for request in script.requests if request["path"] in ("/v1/completions", CHAT)]
    keep_requests("lm_eval", client("lm-eval"), script, folder)


@pytest.mark.client(
    client("guidellm"),
    apis="chat, completions, responses",
    ran="`guidellm run` measures streams, one by one and two at once",
)
def test_guidellm_measures_without_an_error(
    tiny_server: Server, programs: Callable[[str], Path], folder: Path, default_model_folder: Path
) -> None:
    """It makes its prompts with the model's tokenizer, and asks for a number of tokens past the end of a text."""
    script = Script()
    profiles = {CHAT: "kind=synchronous", "/v1/completions": "kind=concurrent,streams=2", RESPONSES: "kind=synchronous"}
    with scripted(tiny_server.url, script) as url:
        for path, profile in profiles.items():
            run_client(
                [
                    *(programs("guidellm") / "guidellm", "run", "--disable-console-interactive"),
                    *("--backend", f"kind=openai_http,target={url},model={MODEL},request_format={path}"),
                    *("--profile", profile, "--constraint", "kind=max_requests,count=3"),
                    *("--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8"),
                    *("--tokenizer", f"kind=huggingface_auto,model={default_model_folder}"),
                    *("--output", "kind=json,path=report.json"),
                ],
                folder,
                HF_HUB_OFFLINE="1",
            )
            (found,) = json.loads((folder / "report.json").read_text(encoding="utf-8"))["benchmarks"]
            assert found["metrics"]["request_totals"] == {"successful": 3, "errored": 0, "incomplete": 0, "total": 3}, path
            assert [one["output_metrics"]["text_tokens"] for one in found["requests"]["successful"]] == [8, 8, 8], path
    assert {request["status"] for request in script.requests} == {200}
    script.requests[:] = {request["path"]: request for request in script.requests}.values()
    assert [request["path"] for request in script.requests] == [*profiles]
    keep_requests("guidellm", client("guidellm"), script, folder)
