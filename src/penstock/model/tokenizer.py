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
from tokenizers.decoders import DecodeStream

from penstock.errors import CorruptWeights, RequestError
from penstock.model.token_bytes import TokenBytes, token_bytes

logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 300
MAX_CHARACTER_BYTES = 4
MAX_HELD = 8  # tokens without text, after which no character is waited for
REPLACEMENT = "\ufffd"
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

    def stream(self, skip_special: bool = True) -> TextStream:
        return TextStream(self._rust, skip_special)

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


class TextStream:
    """Decodes tokens as they come. Bytes of an incomplete character are held back.

    The tokenizer's own stream decodes all that it holds back again with each token, and fails on bytes that are not UTF-8. After
    `MAX_HELD` tokens without text, which no character has, or such a failure, this one decodes a short window itself.
    """

    def __init__(self, rust: RustTokenizer, skip_special: bool) -> None:
        self._rust = rust
        self._skip = skip_special
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=skip_special)
        self._window: list[int] = []  # the last tokens
        self._held = 0  # of them, those since the last text
        self._sent = 0  # characters of the window's text that were returned, once it is decoded here

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        self._held += 1
        if self._stream is None:
            return self._decode()
        try:
            text: str = self._stream.step(self._rust, token_id) or ""
        except Exception:
            return self._leave_stream()
        if text:
            self._held = 0
            if len(self._window) > 2 * MAX_HELD:
                del self._window[:MAX_HELD]
        return text if text or self._held <= MAX_HELD else self._leave_stream()

    def flush(self) -> str:
        """Return what was held back; a character that was never completed becomes a replacement character."""
        text = "" if self._stream is None else self._leave_stream()
        return text + self._text()[self._sent :]

    def _leave_stream(self) -> str:
        self._stream = None
        self._sent = len(self._text(end=len(self._window) - self._held))
        return self._decode()

    def _decode(self) -> str:
        """Return what is new in the text of the window, without its end if a later token may complete a character there."""
        text = self._text()
        settled = len(text)
        if text.endswith(REPLACEMENT):
            if self._held <= MAX_HELD:
                return ""
            settled -= MAX_CHARACTER_BYTES - 1
        else:
            self._held = 0
        new, self._sent = text[self._sent : settled], max(self._sent, settled)
        if len(self._window) > 2 * MAX_HELD:
            self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Forget the first tokens of the window, if possible not in the middle of a character."""
        cuts = range(MAX_HELD, MAX_HELD - MAX_CHARACTER_BYTES, -1)
        cut = next((cut for cut in cuts if text.endswith(self._text(cut))), MAX_HELD)
        unsent = len(text) - self._sent
        del self._window[:cut]
        self._sent = max(0, len(self._text()) - unsent)

    def _text(self, start: int = 0, end: int | None = None) -> str:
        return str(self._rust.decode(self._window[start:end], skip_special_tokens=self._skip))


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
