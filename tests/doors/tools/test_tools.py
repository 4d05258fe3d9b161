"""Tool calling: what is offered, how it is put to each family of models, and that calls are always well-formed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from penstock.doors.generation.output_format import OutputFormat
from penstock.doors.grammar.grammars import Grammars
from penstock.doors.tools import AnswerRule, ArgumentsDelta, CallFinished, CallStarted, TextDelta, ToolCalling
from penstock.doors.tools.formats import DESCRIBED, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, MISTRAL_TEKKEN, format_of
from penstock.errors import RequestError
from penstock.model.text.tokenizer import Tokenizer
from tests.doors.conftest import EOS_IDS, PATIENT
from tests.doors.grammar.answers import accepts, any_answer

CALL = "{{ '<tool_call>' }}{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
EACH = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}%CALL%{% endfor %};{% endfor %}"
TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }}{% endif %}" + EACH.replace("%CALL%", CALL),
    "llama": "{% if tools %}{{ tools | tojson }}{% endif %}<|start_header_id|>"
    + EACH.replace("%CALL%", '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'),
    "mistral": "{% if tools %}{{ tools | tojson }}{% endif %}"
    + EACH.replace("%CALL%", "{{ '[TOOL_CALLS] [' }}{{ c.function | tojson }}{{ c.id }}]"),
    "mistral-tekken": "{% if tools %}{{ tools | tojson }}{% endif %}"
    + EACH.replace("%CALL%", "[TOOL_CALLS][{{ c.function | tojson }}]"),
    "mistral-args": "{% if tools %}{{ tools | tojson }}{% endif %}"
    + EACH.replace("%CALL%", "[TOOL_CALLS]{{ c.function.name }}[ARGS]"),
    "described": "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}",
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": parameters, **more}}


TOOLS = [tool("get_weather", WEATHER), tool("get"), tool("find", {"$ref": "#/$defs/q", "$defs": {"q": WEATHER}}, strict=True)]
SCHEMAS = {"get_weather": WEATHER, "get": {"maxProperties": 0}, "find": WEATHER}
USER = [{"role": "user", "content": "Weather?"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


# ---- which format ----


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_seen_from_the_template(name: str) -> None:
    assert format_of(TEMPLATES[name]).name == name


@pytest.mark.parametrize(
    "template",
    [None, "{{ tools }}<tool_call><function=x>arguments", "{{ tools }}<|tool_call|>", "{% oops", "{% set tools = 1 %}"],
)
def test_a_template_that_we_cannot_read_back_gets_tools_described(template: str | None) -> None:
    assert format_of(template) is DESCRIBED


# ---- calls follow the grammar, and are read back ----


@pytest.fixture(scope="module")
def with_special_markers(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """A tokenizer of single bytes in which all markers are special tokens."""
    folder = tmp_path_factory.mktemp("special")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = RustTokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    rust.add_special_tokens(["<eos>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"])
    rust.save(str(folder / "tokenizer.json"))
    return Grammars(folder / "tokenizer.json", vocab=300, eos_ids={256}, limits=PATIENT)


def checked_calls(events: list[Any]) -> list[str]:
    """The names called. Each call is whole, and its arguments follow their schema."""
    names: list[str] = []
    given: dict[int, str] = {}
    for event in events:
        match event:
            case CallStarted(index, _, name):
                assert index == len(names)
                names.append(name)
                given[index] = ""
            case ArgumentsDelta(index, text):
                given[index] += text
            case CallFinished(index):
                jsonschema.validate(json.loads(given.pop(index)), SCHEMAS[names[index]])
    assert not given
    return names


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_always_parses(
    grammars: Grammars, with_special_markers: Grammars, name: str, choice: Any, special: bool
) -> None:
    tokens, eos = (with_special_markers, frozenset({256})) if special else (grammars, EOS_IDS)
    plan = ToolCalling(TEMPLATES[name]).plan(USER, TOOLS, choice)
    factory, rng = plan.grammar.compile(tokens), random.Random(1)
    assert plan.skip_special is False
    for _ in range(5):
        answer = any_answer(tokens, factory, rng, eos, limit=4000)
        reader = plan.parser()
        events = reader.push(answer.text) + reader.finish()
        assert answer.finished
        assert not [event for event in events if isinstance(event, TextDelta)]
        names = checked_calls(events)
        assert names == ["get_weather"] if choice is NAMED else names


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_parallel_calls_the_answer_ends_with_the_first(grammars: Grammars, name: str) -> None:
    plan = ToolCalling(TEMPLATES[name]).plan(USER, TOOLS, "required", False)
    factory, rng = plan.grammar.compile(grammars), random.Random(2)
    for _ in range(10):
        reader = plan.parser()
        assert len(checked_calls(reader.push(any_answer(grammars, factory, rng, EOS_IDS).text))) == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_auto_allows_text_and_well_formed_calls_and_nothing_between(
    grammars: Grammars, default_model_folder: Path, name: str
) -> None:
    encode = Tokenizer(default_model_folder).encode
    calling = ToolCalling(TEMPLATES[name])
    form = calling.format
    factory = calling.plan(USER, TOOLS, "auto").grammar.compile(grammars)
    call = form.written([("get", "{}")])

    def whole(text: str) -> bool:
        return accepts(grammars, factory, encode(text), eos=2)

    assert whole("It is sunny, 3 < 5 {really} [yes].")
    assert whole(call)
    assert whole("Let me see.\n" + call) == form.anywhere or not form.anywhere  # elsewhere it is text
    assert whole(form.written([("get", "{}"), ("get_weather", '{"city": "Rome"}')])) == form.parallel
    assert not whole(call.replace('get"', 'got"').replace("]get[", "]got["))
    assert not whole(call[:-1])
    assert not whole(call + " And more text.")
    assert not whole(form.written([("get_weather", "{}")]))


def test_a_special_marker_can_only_be_the_token(with_special_markers: Grammars) -> None:
    text = ToolCalling(TEMPLATES["mistral"]).plan(USER, TOOLS).grammar.lark(with_special_markers.special_tokens)
    assert "[TOOL_CALLS]" not in text
    assert f"<[{with_special_markers.special_tokens['[TOOL_CALLS]']}]>" in text


def test_what_a_function_without_strict_cannot_have_enforced_is_left_out(grammars: Grammars) -> None:
    loose = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True}, "u": {"type": "string", "format": "x"}},
    }
    loose["properties"]["o"] = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    ToolCalling(None).plan(USER, [tool("f", loose)], "required").grammar.compile(grammars)
    with pytest.raises(RequestError, match="'uniqueItems'") as caught:
        ToolCalling(None).plan(USER, [tool("f"), tool("g", loose, strict=True)]).grammar.compile(grammars)
    assert caught.value.field == "tools[1].function.parameters"


def test_the_tool_at_fault_is_named(grammars: Grammars) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}, "required": ["a"]}
    with pytest.raises(RequestError, match="look-around") as caught:
        ToolCalling(None).plan(USER, [tool("f"), tool("g", bad)]).grammar.compile(grammars)
    assert caught.value.field == "tools[1].function.parameters"


# ---- what is offered ----


@pytest.mark.parametrize(
    "tools, choice, field",
    [
        ([{"type": "custom", "custom": {"name": "x"}}], None, "tools[0].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([tool("get"), tool("no spaces")], None, "tools[1].function.name"),
        ([tool("x" * 65)], None, "tools[0].function.name"),
        ([tool("get"), tool("get")], None, "tools[1].function.name"),
        ([tool("get", {"type": "string"})], None, "tools[0].function.parameters.type"),
        ([tool("get", [])], None, "tools[0].function.parameters"),
        ([tool("get", strict="yes")], None, "tools[0].function.strict"),
        ([tool(f"t{i}") for i in range(129)], None, "tools"),
        ([tool("get")], {"type": "function", "function": {"name": "other"}}, "tool_choice.function.name"),
        ([tool("get")], "always", "tool_choice"),
        ([tool("get")], {"type": "function"}, "tool_choice"),
        ([], "required", "tool_choice"),
        (None, NAMED, "tool_choice"),
    ],
)
def test_an_offer_that_makes_no_sense_is_refused(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        ToolCalling(None).plan(USER, tools, choice)
    assert caught.value.field == field


def test_128_tools_are_not_too_many(grammars: Grammars) -> None:
    ToolCalling(None).plan(USER, [tool(f"t{i}", WEATHER) for i in range(128)]).grammar.compile(grammars)


@pytest.mark.parametrize("tools, choice", [(None, None), ([], "auto"), (TOOLS, "none")])
def test_without_tools_to_call_the_answer_is_plain_text(tools: Any, choice: Any) -> None:
    for template in TEMPLATES.values():
        plan = ToolCalling(template).plan(USER, tools, choice)
        assert (plan.messages, plan.template, plan.grammar, plan.parser, plan.skip_special) == (USER, {}, None, None, True)


# ---- the conversation ----


def said(name: str, given: str, call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


HISTORY = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [said("get_weather", '{"city": "Rome"}', "call_1"), said("get", "{}", "call_2")],
    },
    {"role": "tool", "tool_call_id": "call_2", "content": "two"},
    {"role": "tool", "tool_call_id": "call_1", "content": "one"},
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": "Thanks."},
]


def rendered(default_model_folder: Path, name: str, messages: list, tools: list | None = None) -> str:
    tokenizer = Tokenizer(default_model_folder)
    tokenizer.chat_template = TEMPLATES[name]
    plan = ToolCalling(TEMPLATES[name]).plan(messages, tools)
    return tokenizer.render(plan.messages, **plan.template)


def test_arguments_become_objects_for_templates_that_know_tools(default_model_folder: Path) -> None:
    text = rendered(default_model_folder, "hermes", HISTORY, TOOLS)
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}' in text
    assert '"name": "find"' in text
    assert "strict" not in text


def test_mistral_gets_ids_of_nine_characters_that_still_match(default_model_folder: Path) -> None:
    plan = ToolCalling(TEMPLATES["mistral"]).plan(HISTORY)
    ids = [call["id"] for call in plan.messages[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in plan.messages[2:4]] == ids[::-1]
    assert all(len(i) == 9 and i.isalnum() for i in ids)


def test_llama_gets_one_call_in_a_message_each_with_its_result() -> None:
    plan = ToolCalling(TEMPLATES["llama"]).plan(HISTORY)
    shape = [(m["role"], [c["id"] for c in m.get("tool_calls", [])] or m["content"]) for m in plan.messages]
    assert shape == [
        ("user", "Weather?"),
        ("assistant", ["call_2"]),
        ("tool", "two"),
        ("assistant", ["call_1"]),
        ("tool", "one"),
        ("assistant", "Sunny."),
        ("user", "Thanks."),
    ]


def test_a_call_that_was_cut_off_stays_as_it_is() -> None:
    cut = [{"role": "assistant", "content": "", "tool_calls": [said("get", '{"a": ')]}]
    assert ToolCalling(TEMPLATES["hermes"]).plan(cut).messages[0]["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_a_template_without_tools_reads_them_as_text(default_model_folder: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    plan = ToolCalling(TEMPLATES["described"]).plan([system, *HISTORY], TOOLS)
    first, asked, called, results, *rest = plan.messages
    assert first["role"] == "system"
    assert first["content"].startswith("Be brief.\n\n# Tools")
    assert '"name": "find"' in first["content"]
    assert asked == HISTORY[0]
    assert called == {"role": "assistant", "content": HERMES.written([("get_weather", '{"city": "Rome"}'), ("get", "{}")])}
    assert results == {
        "role": "user",
        "content": "<tool_response>\ntwo\n</tool_response>\n<tool_response>\none\n</tool_response>",
    }
    assert rest == HISTORY[4:]
    assert plan.template == {}


def test_a_template_that_refuses_a_system_message_hears_of_tools_from_the_user() -> None:
    template = TEMPLATES["described"] + "{{ raise_exception('System role not supported') }}"
    plan = ToolCalling(template).plan(USER, TOOLS)
    assert [message["role"] for message in plan.messages] == ["user"]
    assert plan.messages[0]["content"].endswith("Weather?")


def test_the_conversation_of_the_request_is_not_changed() -> None:
    before = json.dumps(HISTORY)
    for template in TEMPLATES.values():
        ToolCalling(template).plan(HISTORY, TOOLS)
    assert json.dumps(HISTORY) == before


def test_all_formats_are_told_apart() -> None:
    assert len({form.name for form in (HERMES, LLAMA, MISTRAL, MISTRAL_TEKKEN, MISTRAL_ARGS, DESCRIBED)}) == 6


# ---- an answer that follows a rule, or a call ----

ANSWERS = [
    (OutputFormat("json_schema", "f", {"enum": [{"name": "get", "parameters": {}}, "<tool_call>"]}), '"<tool_call>"', "{}"),
    (OutputFormat("json_object", "f"), '{"name": "a"}', "7"),
    (OutputFormat("regex", "f", "yes/no|\n(?i:OK)"), "\noK", "yes"),
    (
        OutputFormat("grammar", "f", 'start: a | "}"\na: %json {"enum": ["[TOOL_CALLS]f[ARGS]{}"]}'),
        '"[TOOL_CALLS]f[ARGS]{}"',
        "{",
    ),
    (OutputFormat("choice", "f", ["left", 'to the "right"']), 'to the "right"', "right"),
]


@pytest.fixture(scope="module")
def tokenizer(default_model_folder: Path) -> RustTokenizer:
    return RustTokenizer.from_file(str(default_model_folder / "tokenizer.json"))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("form, answer, other", ANSWERS, ids=[form.kind for form, _, _ in ANSWERS])
def test_beside_a_rule_an_answer_follows_it_or_is_a_call(
    grammars: Grammars, tokenizer: RustTokenizer, name: str, form: OutputFormat, answer: str, other: str
) -> None:
    calling = ToolCalling(TEMPLATES[name])
    plan = calling.plan(USER, TOOLS, "auto")
    plan = plan.with_answer(AnswerRule(form.rule(len(TOOLS) + 1), "f"))
    factory = plan.grammar.compile(grammars)
    call = calling.format.tag + calling.format.written([("get_weather", '{"city": "Rome"}')])
    for text, fits in ((answer, True), (call, True), (other, False), (f"Sure. {call}", False), (f"{answer}{call}", False)):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert accepts(grammars, factory, ids, min(EOS_IDS)) == fits, text
    for text in (answer, call):
        reader = plan.parser()
        events = [event for letter in text for event in reader.push(letter)] + reader.finish()
        output = "".join(event.text for event in events if isinstance(event, TextDelta))
        assert (output, checked_calls(events)) == ((answer, []) if text is answer else ("", ["get_weather"]))


def test_beside_a_tag_an_answer_may_look_like_a_call(with_special_markers: Grammars) -> None:
    """Llama's calls are JSON, as an answer may be."""
    form = OutputFormat("json_schema", "f", {"enum": [{"name": "get", "parameters": {}}]})
    plan = ToolCalling(TEMPLATES["llama"]).plan(USER, TOOLS, "auto")
    plan = plan.with_answer(AnswerRule(form.rule(len(TOOLS) + 1), "f"))
    factory, rng = plan.grammar.compile(with_special_markers), random.Random(3)
    seen = set()
    for _ in range(20):
        answer = any_answer(with_special_markers, factory, rng, frozenset({256}), limit=4000)
        reader = plan.parser()
        events = reader.push(answer.text) + reader.finish()
        is_call = answer.text.startswith("<|python_tag|>")
        assert bool(checked_calls(events)) == is_call
        assert is_call or json.loads(answer.text) == {"name": "get", "parameters": {}}
        seen.add(is_call)
    assert seen == {False, True}


def test_the_format_at_fault_is_named_beside_tools(grammars: Grammars) -> None:
    plan = ToolCalling(TEMPLATES["hermes"]).plan(USER, TOOLS, "auto")
    with pytest.raises(RequestError) as refused:
        plan.with_answer(AnswerRule(OutputFormat("regex", "regex", "(").rule(3), "regex")).grammar.compile(grammars)
    assert refused.value.field == "regex"
