"""The events of a response, and the whole response combined from them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import InitVar, dataclass
from typing import Any

from msgspec.structs import replace

from penstock.domain.updates import FinishReason, JobUpdate, OutputFinished, TokensOut, Usage
from penstock.doors.generation.logprobs import ContentLogprob, TokenBytes, chat_logprobs
from penstock.doors.generation.output_parser import OutputParser
from penstock.doors.http.framing import NAMED_EVENTS
from penstock.doors.openai.errors import openai_body
from penstock.doors.openai.responses import wire
from penstock.doors.openai.responses.store import item_id, response_id
from penstock.doors.tools import ArgumentsDelta, CallFinished, CallStarted, TextDelta, ToolEvent
from penstock.errors import PenstockError, PromptTooLong


@dataclass
class ResponseAnswer:
    """begun: the response before any output, without an id."""

    framing = NAMED_EVENTS
    job_id: str
    begun: InitVar[wire.Response]
    parser: OutputParser
    token_bytes: TokenBytes
    hidden: frozenset[int]
    logprobs: bool

    def __post_init__(self, begun: wire.Response) -> None:
        self._response = replace(begun, id=response_id(self.job_id))
        self._numbers = itertools.count()
        self._output: list[wire.OutputItem] = []
        self._item: wire.OutputItem | None = None  # the open item, and its text so far
        self._pieces: list[str] = []
        self._logprob_items: list[ContentLogprob] = []  # of the open item
        self._pending_logprobs: list[ContentLogprob] = []  # whose text has not been sent yet

    # ---- as events ----

    def begin(self) -> Iterable[wire.Event]:
        for kind in ("response.created", "response.in_progress"):
            yield wire.ResponseEvent(type=kind, sequence_number=next(self._numbers), response=self._response)

    def take(self, number: int, update: JobUpdate) -> Iterable[wire.Event]:
        match update:
            case TokensOut(_, text, _, logprobs):
                if self.logprobs:
                    visible = [one for one in logprobs if one.token_id not in self.hidden]
                    self._pending_logprobs += chat_logprobs(visible, self.token_bytes)
                for event in self.parser.feed(text):
                    yield from self._item_events(event)
            case OutputFinished(_, reason, _):
                for event in self.parser.close(reason):
                    yield from self._item_events(event)
                yield from self._finish(cut=reason is FinishReason.LENGTH)

    def end(self, usage: Usage) -> Iterable[wire.Event]:
        whole = self.whole(usage)
        yield wire.ResponseEvent(type=f"response.{whole.status}", sequence_number=next(self._numbers), response=whole)

    def failed(self, error: PenstockError) -> Iterable[wire.Event]:
        body = openai_body(error)["error"]
        code = body["code"] if isinstance(error, PromptTooLong) else "server_error"
        error_out = wire.ErrorOut(code=code, message=body["message"])
        failed = replace(self._response, status="failed", output=self._output, error=error_out)
        yield wire.ResponseEvent(type="response.failed", sequence_number=next(self._numbers), response=failed)
        yield wire.ErrorEvent(
            type="error",
            sequence_number=next(self._numbers),
            code=body["code"],
            message=body["message"],
            param=body["param"],
            error=body,
        )

    def whole(self, usage: Usage) -> wire.Response:
        return replace(
            self._response,
            output=self._output,
            usage=wire.ResponseUsageOut(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=wire.InputDetails(cached_tokens=usage.cached_tokens),
                output_tokens=usage.completion_tokens,
                output_tokens_details=wire.OutputDetails(),
                total_tokens=usage.prompt_tokens + usage.completion_tokens,
            ),
        )

    # ---- one item after the other ----

    def _item_events(self, event: ToolEvent) -> Iterable[wire.Event]:
        match event:
            case TextDelta(text):
                yield from self._write(text)
            case CallStarted(_, call_id, name):
                yield from self._close("completed")
                item = wire.FunctionCall(
                    id=self._new_id(wire.FunctionCall), call_id=call_id, name=name, arguments="", status="in_progress"
                )
                yield self._open(item)
            case ArgumentsDelta(_, text):
                self._pending_logprobs = []  # calls have no logprobs
                yield wire.ArgumentsDeltaEvent(type="response.function_call_arguments.delta", **self._place(), delta=text)
                self._pieces.append(text)
            case CallFinished():
                yield from self._close("completed")

    def _write(self, text: str) -> Iterable[wire.Event]:
        if not isinstance(self._item, wire.MessageItem):
            item = wire.MessageItem(id=self._new_id(wire.MessageItem), role="assistant", status="in_progress", content=[])
            yield self._open(item)
            yield wire.PartEvent(type="response.content_part.added", **self._place(), part=wire.OutputTextPart(text=""))
        logprobs, self._pending_logprobs = self._pending_logprobs, []
        yield wire.TextDeltaEvent(type="response.output_text.delta", **self._place(), delta=text, logprobs=logprobs)
        self._pieces.append(text)
        self._logprob_items += logprobs

    def _finish(self, *, cut: bool) -> Iterable[wire.Event]:
        if not isinstance(self._item, wire.FunctionCall) and (self._pending_logprobs or not (self._output or self._item)):
            yield from self._write("")  # an empty answer is a message, too
        # An open call was cut off, by the limit or by a stop string.
        yield from self._close("incomplete" if cut or isinstance(self._item, wire.FunctionCall) else "completed")
        if cut:
            self._response = replace(self._response, status="incomplete", incomplete_details=wire.Incomplete())
        else:
            self._response = replace(self._response, status="completed", completed_at=int(time.time()))

    def _open(self, item: wire.OutputItem) -> wire.Event:
        self._item, self._pieces, self._logprob_items = item, [], []
        return self._item_event("added", item)

    def _close(self, status: wire.ItemStatus) -> Iterable[wire.Event]:
        text = "".join(self._pieces)
        done: wire.OutputItem
        match self._item:
            case None:
                return
            case wire.MessageItem() as item:
                part = wire.OutputTextPart(text=text, logprobs=self._logprob_items)
                done = replace(item, status=status, content=[part])
                yield wire.TextDoneEvent(
                    type="response.output_text.done", **self._place(), text=text, logprobs=self._logprob_items
                )
                yield wire.PartEvent(type="response.content_part.done", **self._place(), part=part)
            case wire.FunctionCall() as item:
                done = replace(item, status=status, arguments=text)
                yield wire.ArgumentsDoneEvent(
                    type="response.function_call_arguments.done", **self._place(), name=item.name, arguments=text
                )
        yield self._item_event("done", done)
        self._output.append(done)
        self._item = None

    def _item_event(self, kind: str, item: wire.OutputItem) -> wire.Event:
        return wire.ItemEvent(
            type=f"response.output_item.{kind}", sequence_number=next(self._numbers), output_index=len(self._output), item=item
        )

    def _place(self) -> dict[str, Any]:
        """The fields of an event that say what it is about."""
        assert self._item is not None
        return {"sequence_number": next(self._numbers), "item_id": self._item.id, "output_index": len(self._output)}

    def _new_id(self, kind: type[wire.OutputItem]) -> str:
        return item_id(kind, self.job_id, len(self._output))
