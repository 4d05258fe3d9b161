"""What the server itself does with the text of a grammar, before another process compiles it."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from penstock.doors.grammar.constraint import short_reason
from penstock.doors.tools import ToolCalling
from penstock.doors.tools.offer import Function
from penstock.errors import RequestError
from tests.hostile.bombs import fork_server_of, tools_of
from tests.hostile.conftest import MakeGrammars


@pytest.mark.parametrize("text", ["\n" * 65_000, "a[x\n" * 16_000, '%json {"a' * 7000, "%json " * 10_000, "stop=" * 13_000])
def test_checking_a_grammar_takes_no_time(make_grammars: MakeGrammars, text: str) -> None:
    grammars = make_grammars()
    fork_server_of(grammars)
    began = time.process_time()
    with suppress(RequestError):
        grammars.lark(f"start: {text}", field="grammar")
    assert time.process_time() - began < 2  # a pattern that tries every line break takes a minute


def test_neither_does_an_error_of_the_compiler() -> None:
    began = time.process_time()
    assert len(short_reason("\n" * 100_000)) < 300
    assert time.process_time() - began < 2


def test_tools_are_read_only_until_they_are_too_large(make_grammars: MakeGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "string", "enum": ["x" * 50_000]}
    tools = [tools_of(schema, name=f"tool_{i}")[0] for i in range(100)]
    read: list[int] = []
    plan = ToolCalling(None).plan([{"role": "user", "content": "x"}], tools)
    assert plan.grammar is not None
    monkeypatch.setattr(Function, "schema", lambda *args, real=Function.schema: read.append(1) or real(*args))
    with pytest.raises(RequestError, match="All tools together have more than"):
        plan.grammar.compile(make_grammars())
    assert len(read) == 3
