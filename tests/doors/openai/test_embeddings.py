"""POST /v1/embeddings: the real server, the real default model, the real `openai` client; compared with the engine itself."""

from __future__ import annotations

import base64
import json
import queue
from collections.abc import Iterator, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from penstock.domain.request import JobRequest
from penstock.domain.updates import Embedded, JobDone, JobFailed
from penstock.doors.api_config import ApiConfig
from penstock.doors.generation.catalog import ModelCatalog
from penstock.doors.generation.embedding import MAX_INPUTS
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.jobs.engine_runner import EngineRunner
from penstock.doors.openai.job_operations import OPENAI_JOBS
from penstock.engine.hosted_model import HostedModel
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.workspace.store.request import WorkRequest
from tests.lazy_module import LazyModule
from tests.server import Api, ServerThread, server_thread

if TYPE_CHECKING:
    import openai
    from openai import OpenAI
else:
    openai = LazyModule("openai")

MODEL = "smollm2-135m"
WIDTH = 576
TEXTS = ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Quarterly revenue fell by four percent."]


@pytest.fixture(scope="module")
def server(loaded_model: LoadedModel) -> Iterator[ServerThread]:
    """With little KV memory, so that what is too long need not be long, and with few places for jobs."""
    with server_thread(loaded_model, "--kv-memory", "22MB", config="[limits]\nmax_jobs = 4\n") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Api) -> OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def hosted(server: ServerThread) -> HostedModel:
    """The model behind the server, asked without it."""
    return server.hosted


def vectors(client: OpenAI, texts: Any, **more: Any) -> np.ndarray:
    answer = client.embeddings.create(model=MODEL, input=texts, **more)
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return np.array([one.embedding for one in answer.data])


def engine_vectors(hosted: HostedModel, texts: Sequence[str]) -> np.ndarray:
    found = []
    for text in texts:
        (one,) = [update for update in hosted.jobs.start_job(JobRequest(prompt=text, embed=True)) if isinstance(update, Embedded)]
        found.append(np.array(one.vector) / np.linalg.norm(one.vector))
    return np.array(found)


def test_embeddings_are_the_engines_in_their_order_and_of_length_one(client: OpenAI, hosted: HostedModel) -> None:
    found = vectors(client, TEXTS)
    assert found.shape == (3, WIDTH)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1, abs=1e-6)
    assert np.sum(found * engine_vectors(hosted, TEXTS), axis=1) == pytest.approx(1, abs=1e-5)


def test_texts_that_say_the_same_are_nearer_than_others(client: OpenAI) -> None:
    cat, kitten, revenue = vectors(client, TEXTS)
    assert cat @ kitten > cat @ revenue


def test_numbers_and_base64_are_the_same_numbers(client: OpenAI, server: Api) -> None:
    """Without `encoding_format` the client asks for base64 itself, and decodes it."""
    as_numbers = vectors(client, TEXTS[0], encoding_format="float")
    body = {"model": MODEL, "input": TEXTS[0], "encoding_format": "base64"}
    raw = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).json()["data"][0]["embedding"]
    as_bytes = np.frombuffer(base64.b64decode(raw), "<f4")
    assert as_bytes == pytest.approx(as_numbers[0], abs=1e-6)
    assert vectors(client, TEXTS[0])[0] == pytest.approx(as_numbers[0], abs=1e-6)
    assert np.all(as_numbers == as_numbers.astype(np.float32))  # not a digit more than fp32 has


def test_token_ids_are_taken_as_they_are(client: OpenAI, hosted: HostedModel) -> None:
    ids = [hosted.tokenizer.encode(text) for text in TEXTS]
    assert np.sum(vectors(client, ids) * vectors(client, TEXTS), axis=1) == pytest.approx(1, abs=1e-5)
    assert vectors(client, ids[0]).shape == (1, WIDTH)


def test_usage_counts_the_tokens_of_all_texts(client: OpenAI, hosted: HostedModel) -> None:
    usage = client.embeddings.create(model=MODEL, input=TEXTS, user="somebody", dimensions=WIDTH).usage
    assert usage.prompt_tokens == usage.total_tokens == sum(len(hosted.tokenizer.encode(text)) for text in TEXTS)


def test_more_texts_than_there_are_places_take_turns(client: OpenAI, hosted: HostedModel) -> None:
    words = [f"number {i}" for i in range(10)]
    assert np.sum(vectors(client, words) * engine_vectors(hosted, words), axis=1) == pytest.approx(1, abs=1e-5)


def test_who_was_prepared_early_does_not_go_before_who_was_there_first(hosted: HostedModel) -> None:
    late, early = (hosted.jobs.prepare(JobRequest(prompt=text, embed=True)) for text in TEXTS[:2])
    handles = [hosted.jobs.submit(early), hosted.jobs.submit(late)]
    assert early.job.arrival <= late.job.arrival
    for handle in handles:
        list(handle)


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"input": ""}, "input", "input is empty"),
        ({"input": []}, "input", "wrong type"),
        ({"input": ["a", ""]}, "input", r"input\[1\] is empty"),
        ({"input": ["a", 3]}, "input", "wrong type"),
        ({"input": [99_999]}, "input", "do not exist"),
        ({"input": ["a", "word " * 1000]}, "input", r"input\[1\] has 1\d+ tokens"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", f"at most {MAX_INPUTS}"),
        ({"input": "a", "dimensions": 256}, "dimensions", f"have {WIDTH}"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "a", "extra_body": {"temperature": 0}}, "temperature", "not a known parameter"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(client: OpenAI, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.embeddings.create(model=MODEL, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS])
def test_embeddings_can_be_jobs_on_disk(hosted: HostedModel, texts: list[str]) -> None:
    runner = EngineRunner(ApiConfig(ModelCatalog({MODEL: ServedModel(hosted)})), OPENAI_JOBS.endpoints)
    task = runner.prepare(WorkRequest(endpoint="/v1/embeddings"), json.dumps({"model": MODEL, "input": texts}), Event())
    assert not task.resumable
    updates: queue.SimpleQueue[Any] = queue.SimpleQueue()
    task.start("1_2_3", 7, (), updates.put)
    while not isinstance(update := updates.get(timeout=60), JobDone | JobFailed):
        task.writer.take(update)
    assert isinstance(update, JobDone)
    answer = json.loads(task.writer.result(update.usage))
    found = np.array([one["embedding"] for one in answer["data"]])
    assert np.sum(found * engine_vectors(hosted, texts), axis=1) == pytest.approx(1, abs=1e-5)
