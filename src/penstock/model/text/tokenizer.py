"""Tokenizer: text to tokens and back, chat templates, and decoding of streamed tokens."""

from __future__ import annotations

import datetime
import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RustTokenizer

from penstock.errors import CorruptWeights, RequestError
from penstock.model.text.text_stream import ByteStream, Streams, TextStream
from penstock.model.text.token_bytes import TokenBytes, token_bytes

logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 300
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
MESSAGES_HINT = "Each message needs a role (system, user, assistant) and a content."


class TemplateRefusal(TemplateError):
    """Raised by a chat template on purpose, with a reason for the client."""


class Tokenizer:
    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self._rust = RustTokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises bare exceptions
            raise CorruptWeights(f"{path} cannot be read: {error}.", hint="Fetch the model again.") from None
        self._path = path
        self._rust.no_padding()
        self._rust.no_truncation()
        settings = _read_settings(folder / "tokenizer_config.json")
        self.special_tokens = {name: _content(settings.get(name)) for name in SPECIAL_TOKENS}
        eos = self.special_tokens["eos_token"]
        self.eos_id = self._rust.token_to_id(eos) if eos else None
        self.chat_template = _chat_template(folder, settings)
        self._streams = Streams(self._rust)
        self._compiled: Any = None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        # as a batch of one: `encode` holds the GIL, and a long text would stop every other thread for seconds
        return list(self._rust.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether a text certainly has more tokens than that, judged by its length alone."""
        return len(text) > tokens and self._token_bytes is not None and self._token_bytes.exceeds(text, tokens)

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        return token_bytes(self._path)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self._rust.decode(list(ids), skip_special_tokens=skip_special))

    def stream(self, skip_special: bool = True) -> ByteStream | TextStream:
        return self._streams.open(skip_special)

    def render(self, messages: Sequence[Mapping[str, Any]], **extra: Any) -> str:
        """Format a conversation with the model's chat template, up to the start of the assistant's answer."""
        if self.chat_template is None:
            raise RequestError(
                "This model has no chat template.", field="messages", hint="Send a plain prompt instead of messages."
            )
        special = {name: value for name, value in self.special_tokens.items() if value}
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.chat_template)
            return str(self._compiled.render(messages=messages, add_generation_prompt=True, **special, **extra))
        except TemplateRefusal as error:
            reason = f"The chat template rejects these messages: {str(error)[:MAX_REASON_CHARS].rstrip('.')}."
            raise RequestError(reason, field="messages", hint=MESSAGES_HINT) from None
        except Exception as error:  # a template is a program that came with the model and can fail in any way
            _log_failure(error)
            raise RequestError(
                "The model's chat template cannot format these messages.", field="messages", hint=MESSAGES_HINT
            ) from None

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **extra: Any) -> list[int]:
        return self.encode(self.render(messages, **extra), special=False)


def _environment() -> ImmutableSandboxedEnvironment:
    """A sandbox for templates, which come with the model; with the settings of the reference implementation."""

    def refuse(message: str) -> None:
        raise TemplateRefusal(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _log_failure(error: Exception) -> None:
    """Log where a template failed. The message of an error that is not Jinja's may contain text of a client."""
    what = f"{type(error).__name__}: {error}" if isinstance(error, TemplateError) else type(error).__name__
    logger.warning("a chat template failed: %s\n%s", what, "".join(traceback.format_tb(error.__traceback__)).rstrip())


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise CorruptWeights(f"{path} is not valid JSON: {error}.", hint="Fetch the model again.") from None


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.exists():
        return separate.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("default")
    return found


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token
