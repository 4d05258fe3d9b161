"""Answers for tests of pipes: streamed to real clients, and compared token by token with those of one process."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.lazy_module import LazyModule
from tests.pipes_live.nodes import MODEL, PATIENCE, until

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

CLOSE = 1e-3  # what the best two tokens may be apart where a sum in another order may choose the other one

SUBJECTS = ("the miller", "a heron", "my aunt", "the night train", "an old clock", "the tax inspector", "a small dog", "the sea")
DEEDS = ("counted", "sold", "forgot", "painted", "followed", "repaired", "admired", "carried home", "dreamt of", "lost")
THINGS = ("seven lamps", "a green door", "the last letter", "two barrels", "a map of Norway", "the piano", "nothing at all")
QUESTIONS = (
    "What is the capital of France?",
    "Count from one to twenty in words.",
    "Explain why the sky is blue to a child.",
    "Write a short poem about rivers.",
    "List five uses of a brick.",
    "Who wrote Hamlet, and when?",
    "How do I boil an egg?",
    "Tell me a story about a lighthouse keeper.",
)


def question(number: int) -> str:
    """A short prompt; no two are the same."""
    return f"{QUESTIONS[number % len(QUESTIONS)]} (Number {number}.)"


def long_text(number: int, sentences: int = 60) -> str:
    """A prompt of ten to eleven tokens per sentence; no two are the same, not even at the beginning."""
    draw = random.Random(number)
    lines = [
        f"{draw.choice(SUBJECTS)} {draw.choice(DEEDS)} {draw.choice(THINGS)} on day {draw.randint(1, 99)}."
        for _ in range(sentences)
    ]
    return f"Text {number}. {' '.join(lines)} Continue this text."


def mixed(count: int, first: int = 0, sentences: int = 60) -> list[str]:
    """Prompts of very different lengths: every eighth is a long one."""
    return [long_text(number, sentences) if number % 8 == 2 else question(number) for number in range(first, first + count)]


@dataclass(eq=False)
class Stream:
    """One client that reads one streamed answer, in a thread of its own."""

    url: str
    prompt: str
    max_tokens: int = 24
    model: str = MODEL
    tokens: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""
    status: int = 0
    finished: list[str] = field(default_factory=list)  # every reason that was given for the end: one, if all is well

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read, daemon=True)

    def start(self) -> Stream:
        self._thread.start()
        return self

    def join(self) -> None:
        self._thread.join()

    @property
    def done(self) -> bool:
        return self._thread.ident is not None and not self._thread.is_alive()

    def pause_at(self, moment: float) -> float:
        """How long it stood still then, as its reader saw it."""
        before = [seen for seen in self.times if seen <= moment]
        after = [seen for seen in self.times if seen > moment]
        return after[0] - before[-1] if before and after else 0.0

    def _read(self) -> None:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=2 * PATIENCE)
        try:
            with client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": self.prompt}],
                temperature=0,
                max_tokens=self.max_tokens,
                stream=True,
                logprobs=True,
                top_logprobs=2,
                extra_body={"ignore_eos": True, "repetition_penalty": 1.0},  # logprobs are of what the model said, before it
            ) as chunks:
                for chunk in chunks:
                    self._take(chunk)
        except openai.APIError as error:
            self.error, self.status = error.message, getattr(error, "status_code", 0)
        except Exception as error:  # of the connection: a test says whether it may
            self.error = f"{type(error).__name__}: {error}"
        finally:
            client.close()

    def _take(self, chunk: Any) -> None:
        for choice in chunk.choices:
            self.text += choice.delta.content or ""
            if choice.finish_reason:
                self.finished.append(choice.finish_reason)
            for found in (choice.logprobs.content or ()) if choice.logprobs else ():
                best = [top.logprob for top in found.top_logprobs]
                self.tokens.append(found.token)
                self.margins.append(best[0] - best[1])
                self.times.append(time.monotonic())


def start_streams(url: str, prompts: Iterable[str], max_tokens: int = 24, model: str = MODEL) -> list[Stream]:
    return [Stream(url, prompt, max_tokens, model).start() for prompt in prompts]


def wait_for_tokens(streams: Sequence[Stream], least: int) -> None:
    """Until every answer is under way."""
    until(lambda: all(len(stream.tokens) >= least or stream.done for stream in streams), f"{least} tokens of each stream")


def wait_for_all(streams: Sequence[Stream], patience: float = 2 * PATIENCE) -> None:
    until(lambda: all(stream.done for stream in streams), "all streams to end", patience=patience)


class Traffic:
    """Clients of one node who ask again as soon as they are answered, until the block ends; then the last answers are awaited."""

    def __init__(self, url: str, prompts: Sequence[str], *, clients: int = 8, max_tokens: int = 24) -> None:
        self._url, self._prompts, self._max_tokens = url, prompts, max_tokens
        self._clients = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(clients)]
        self._enough = threading.Event()
        self.streams: list[Stream] = []

    @property
    def tokens(self) -> int:
        return sum(len(stream.tokens) for stream in list(self.streams))

    def __enter__(self) -> Traffic:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        deadline = time.monotonic() + 2 * PATIENCE
        for client in self._clients:
            client.join(max(0.0, deadline - time.monotonic()))
        hanging = [stream.prompt[:60] for stream in self.streams if not stream.done]
        assert not hanging, f"never ended: {hanging}"

    def _ask(self, number: int) -> None:
        while not self._enough.is_set():
            stream = Stream(self._url, self._prompts[number % len(self._prompts)], self._max_tokens)
            self.streams.append(stream)
            stream.start().join()
            number += len(self._clients) + 1  # not always the same
            if stream.error:
                self._enough.wait(0.2)


class Oracle:
    """One lone process in float32, and what it answered: each question is asked once."""

    def __init__(self, url: str, model: str = MODEL) -> None:
        self._url = url
        self._model = model
        self._known: dict[tuple[str, int], Stream] = {}

    def prepare(self, prompts: Iterable[str], max_tokens: int) -> None:
        """Ask together what will be asked: that is quicker."""
        unknown = [prompt for prompt in prompts if (prompt, max_tokens) not in self._known]
        fresh = {prompt: Stream(self._url, prompt, max_tokens, self._model) for prompt in unknown}
        for stream in fresh.values():
            stream.start()
        wait_for_all(list(fresh.values()))
        self._known |= {(prompt, max_tokens): stream for prompt, stream in fresh.items()}

    def check(self, streams: Sequence[Stream]) -> None:
        """Every one has ended well, once, with the same tokens."""
        for max_tokens in {stream.max_tokens for stream in streams}:
            self.prepare([stream.prompt for stream in streams if stream.max_tokens == max_tokens], max_tokens)
        for stream in streams:
            assert not stream.error, f"{stream.prompt[:60]!r}: {stream.error}"
            assert stream.finished == ["length"], f"{stream.prompt[:60]!r} ended with {stream.finished}"
            self.check_tokens(stream)
            assert len(stream.tokens) == stream.max_tokens

    def check_tokens(self, stream: Stream) -> None:
        """What came is how the right answer begins. Where the two best tokens are all but equal, either may be next."""
        self.prepare([stream.prompt], stream.max_tokens)
        right = self._known[stream.prompt, stream.max_tokens]
        assert not right.error
        for place, (token, expected) in enumerate(zip(stream.tokens, right.tokens, strict=False)):
            if token != expected:
                margin = right.margins[place]
                output = f"token {place} of {stream.prompt[:60]!r} is {token!r}, not {expected!r} (margin {margin:.2g})"
                assert margin < CLOSE, output
                print("a near tie:", output)
                return
        assert len(stream.tokens) <= len(right.tokens)
