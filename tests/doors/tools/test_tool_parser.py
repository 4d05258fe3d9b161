"""The parser of calls: the same events however the text is cut, and never a piece of a marker."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.doors.tools import ArgumentsDelta, CallFinished, CallStarted, TextDelta, ToolEvent, ToolParser
from penstock.doors.tools.formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, MISTRAL_TEKKEN, ToolFormat

FORMATS = [HERMES, LLAMA, MISTRAL, MISTRAL_TEKKEN, MISTRAL_ARGS]
NASTY = {"text": 'a "quoted\\" }] </tool_call> <tool_call>\n{"name": "x', "deep": [{"a": []}, {}], "é": "\n[ARGS]"}

arguments = st.dictionaries(
    st.text(max_size=5),
    st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)),
    max_size=3,
)
calls = st.lists(st.tuples(st.sampled_from(["get", "get_weather", "a-b"]), arguments.map(json.dumps)), max_size=3)


def parser(form: ToolFormat) -> ToolParser:
    return ToolParser(form, map(str, itertools.count()).__next__)


def joined(events: Iterable[ToolEvent]) -> list[ToolEvent]:
    """Neighbouring pieces as one."""
    out: list[ToolEvent] = []
    for event in events:
        match out[-1:], event:
            case [TextDelta(before)], TextDelta(text):
                out[-1] = TextDelta(before + text)
            case [ArgumentsDelta(index, before)], ArgumentsDelta(_, text):
                out[-1] = ArgumentsDelta(index, before + text)
            case _:
                out.append(event)
    return out


def read(form: ToolFormat, pieces: Iterable[str], *, cut: bool = False) -> list[ToolEvent]:
    reader = parser(form)
    return joined([event for piece in pieces for event in reader.push(piece)] + reader.finish(cut=cut))


def expected(before: str, made: list[tuple[str, str]]) -> list[ToolEvent]:
    events: list[ToolEvent] = [TextDelta(before)] if before else []
    for i, (name, text) in enumerate(made):
        events += [CallStarted(i, str(i), name), ArgumentsDelta(i, text), CallFinished(i)]
    return events


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@given(text=st.sampled_from(["", "Let me see.", "1 < 2 and [x]", "<tool_cal"]), made=calls, data=st.data())
def test_calls_are_read_however_the_text_is_cut(form: ToolFormat, text: str, made: list, data: st.DataObject) -> None:
    made = made if form.parallel else made[:1]
    text = "" if made and not form.anywhere else text
    whole = text + (form.written(made) if made else "")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)))))
    pieces = [whole[i:j] for i, j in itertools.pairwise([0, *cuts, len(whole)])]
    assert read(form, pieces) == expected(text, made)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_an_answer_that_ends_anywhere_shows_no_part_of_a_marker(form: ToolFormat) -> None:
    before = "Well. " if form.anywhere else ""
    made = [("get", json.dumps(NASTY)), ("get", "{}")][: 2 if form.parallel else 1]
    whole = before + form.written(made)
    for end in range(len(whole) + 1):
        events = read(form, whole[:end], cut=True)
        said = "".join(event.text for event in events if isinstance(event, TextDelta))
        assert before.startswith(said)
        for i, (_, text) in enumerate(made):
            assert text.startswith("".join(e.text for e in events if isinstance(e, ArgumentsDelta) and e.index == i))


def test_text_that_only_looks_like_a_marker_is_said_in_the_end() -> None:
    assert read(HERMES, ["is 3 ", "<", "tool"]) == [TextDelta("is 3 <tool")]
    assert read(LLAMA, ['{"na']) == [TextDelta('{"na')]
    assert read(LLAMA, ['{"answer": 1}']) == [TextDelta('{"answer": 1}')]
    assert read(LLAMA, ['see {"name": "x']) == [TextDelta('see {"name": "x')]


def test_text_streams_out_as_it_comes() -> None:
    reader = parser(HERMES)
    assert reader.push("Hello") == [TextDelta("Hello")]
    assert reader.push(" wor") == [TextDelta(" wor")]
    assert reader.push("ld. <") == [TextDelta("ld.")]
    assert reader.push("b>") == [TextDelta(" <b>")]


def test_arguments_stream_out_as_they_come() -> None:
    reader = parser(HERMES)
    assert reader.push('<tool_call>\n{"name": "get", "arguments": ') == []
    assert reader.push('{"a": "x') == [CallStarted(0, "0", "get"), ArgumentsDelta(0, '{"a": "x')]
    assert reader.push("yz") == [ArgumentsDelta(0, "yz")]
    assert reader.push('"}}\n</tool') == [ArgumentsDelta(0, '"}'), CallFinished(0)]
    assert reader.push("_call>") == reader.finish() == []


def test_the_tag_before_a_call_is_not_shown() -> None:
    whole = '<|python_tag|>{"name": "get", "parameters": {}}'
    assert read(LLAMA, whole) == read(LLAMA, [whole]) == expected("", [("get", "{}")])


def test_a_space_that_a_tokenizer_sets_does_not_matter() -> None:
    assert read(MISTRAL, '[TOOL_CALLS]  [{"name":"get", "arguments": {}}]') == expected("", [("get", "{}")])


@pytest.mark.parametrize("form, pattern", [(HERMES, r"call_[a-zA-Z0-9]{24}"), (MISTRAL, r"[a-zA-Z0-9]{9}")])
def test_ids_are_in_the_style_of_the_family(form: ToolFormat, pattern: str) -> None:
    started = ToolParser(form).push(form.written([("get", "{}")]))[0]
    assert isinstance(started, CallStarted)
    assert re.fullmatch(pattern, started.id)
