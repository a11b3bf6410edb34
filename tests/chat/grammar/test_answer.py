"""Grammars of tool calls: whatever they allow, the parser of the same format reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import families
from tests.support.message_writers import WRITERS
from tests.support.tool_grammars import (
    AUTO,
    NOTATIONS,
    REQUIRED,
    TOOLS,
    check_calls,
    compiled,
    read,
    split,
    tail_of,
    taking,
    texts,
    tool,
    walk,
)
from trioserve.chat.formats.syntax import (
    ChatFormat,
    JsonCall,
    Marker,
    Name,
    Parameters,
    ToolCalls,
)
from trioserve.chat.grammar import answer
from trioserve.chat.grammar.answer import constrain
from trioserve.chat.params import ToolChoice
from trioserve.llama.backend import LlamaBackend
from trioserve.types import Grammar

# -- grammar and parser agree


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "parallel"),
    [*((name, True) for name in sorted(WRITERS)), *((name, False) for name in NOTATIONS)],
)
def test_what_is_required_is_read(backend: LlamaBackend, name: str, parallel: bool) -> None:
    writer = WRITERS[name]
    tail = tail_of(writer)
    grammar = constrain(writer.format, TOOLS, REQUIRED, parallel=parallel, prompt_tail=tail)
    assert grammar is not None
    assert grammar.required
    assert grammar.triggers == ()
    for seed, text in enumerate(texts(backend, grammar, 3, writer.format)):
        message = read(text, writer.format, TOOLS, tail)
        assert message.content == "", text
        check_calls(message, TOOLS, parallel=parallel)
        assert read(text, writer.format, TOOLS, tail, list(text)) == message
        assert read(text, writer.format, TOOLS, tail, split(text, seed)) == message


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_what_follows_a_marker_is_read(backend: LlamaBackend, name: str) -> None:
    writer = WRITERS[name]
    tail = tail_of(writer)
    grammar = constrain(writer.format, TOOLS, AUTO, parallel=False, prompt_tail=tail)
    assert grammar is not None
    if not grammar.triggers:
        pytest.skip("this format has no marker")
    (triggers,) = grammar.triggers
    assert not grammar.required
    for trigger in triggers:
        for seed, rest in enumerate(texts(backend, grammar, 1, writer.format)):
            said = "Well.\n" if writer.format.channels is None else ""
            header = " to=f<|message|>" if name == "muse-glimmer" else ""
            text = said + header + trigger + rest
            message = read(text, writer.format, TOOLS, tail)
            assert message.content.strip() == said.strip(), text
            check_calls(message, TOOLS, parallel=False)
            assert read(text, writer.format, TOOLS, tail, split(text, seed)) == message


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_what_models_write_is_allowed(backend: LlamaBackend, name: str) -> None:
    """The grammar has room for what the writers of the format make."""
    writer = WRITERS[name]
    tail = tail_of(writer)
    for arguments in ({"city": "Oslo", "days": 3}, {"city": "a<b", "days": 0, "loud": True}):
        calls = [("get_weather", arguments), ("stop", {})][: writer.most]
        if writer.format is families.HARMONY:
            calls = calls[:1]
        text = writer.write_calls(calls)
        if name == "functionary-3.2":
            text = text.removeprefix(">>>")
        elif name.startswith(("lfm2", "llama-4")):
            text = text.replace("'", '"')
        elif name == "kimi-k3":  # whose writer calls all that is no text an object
            text = text.replace('"days" type="object"', '"days" type="number"')
            text = text.replace('"loud" type="object"', '"loud" type="boolean"')
        text = text.removeprefix("<|begin|>assistant").removesuffix("<|close|>message<|sep|>")
        text = text.removesuffix("\n</answer>")
        grammar = constrain(writer.format, TOOLS, REQUIRED, parallel=True, prompt_tail=tail)
        tokens = backend.vocab.tokenize(text.removesuffix("<|call|>").removesuffix("<|eom|>"))
        matcher = compiled(backend, grammar)._matcher.deep_copy()
        taken = matcher.validate_tokens([*tokens, min(backend.vocab.end_of_generation)])
        assert taken == len(tokens) + 1, text


@pytest.mark.parametrize("name", ["plain", "llama-3"])
def test_without_a_marker_one_call_can_be_told_by_its_first_character(
    backend: LlamaBackend, name: str
) -> None:
    format = WRITERS[name].format
    free = constrain(format, TOOLS, AUTO, parallel=True)
    assert free is None or free.triggers
    grammar = constrain(format, TOOLS, AUTO, parallel=False)
    matcher = compiled(backend, grammar)._matcher
    vocab = backend.vocab
    for text in ("Hello {", " \nHello", ""):
        tokens = [*vocab.tokenize(text), min(vocab.end_of_generation)]
        assert matcher.deep_copy().validate_tokens(tokens) == len(tokens)
    call = WRITERS[name].write_calls([("stop", {})])
    for text, fits in ((call, True), (call + call, False), ("{}", False)):
        tokens = [*vocab.tokenize(text), min(vocab.end_of_generation)]
        assert (matcher.deep_copy().validate_tokens(tokens) == len(tokens)) is fits


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_an_answer_is_calls_or_json(backend: LlamaBackend, name: str) -> None:
    writer = WRITERS[name]
    answer = Grammar("json_schema", json.dumps({"const": 5}), param="response_format")
    grammar = constrain(
        writer.format, TOOLS, AUTO, parallel=False, prompt_tail=tail_of(writer), answer=answer
    )
    ends = {
        "harmony": "<|channel|>final<|message|>5",
        "muse-glimmer": " to=user<|message|>5",
        "functionary-3.2": "all\n5",
    }
    matcher = compiled(backend, grammar)._matcher
    for text, fits in ((ends.get(name, "5"), True), (ends.get(name, "6"), name in ends)):
        tokens = [*backend.vocab.tokenize(text), min(backend.vocab.end_of_generation)]
        assert (matcher.deep_copy().validate_tokens(tokens) == len(tokens)) is fits


#: A format of every kind of value: JSON, text, text with its type, CDATA, elements, literals.
KINDS = ("hermes", "qwen3-coder", "kimi-k3", "minicpm-5", "minimax-m3", "lfm2", "gemma-4")


@pytest.mark.system
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"default": 3},
        {"type": "array", "minItems": 2, "maxItems": 3, "items": {"type": "integer"}},
        {"type": "object", "additionalProperties": {"type": "string", "maxLength": 3}},
        {"oneOf": [{"type": "string", "minLength": 2, "maxLength": 4}, {"type": "integer"}]},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        {"type": "integer", "multipleOf": 5},
        {"type": "string", "pattern": "^[a-z/]{2}$"},
        {"type": "string", "pattern": "a/b", "maxLength": 9},
        {"type": "string", "format": "int32", "maxLength": 3},
        {"enum": ["a", 1, None, "12", "true"]},
        {"enum": ["a ", "1", "", "[]"]},
        {"const": "null"},
        {"enum": [["x", 1], {"k": "v", "l": [True]}]},
        {"type": "array", "maxItems": 0},
        {"type": "object", "properties": {"x_y": {"type": "null"}}, "required": ["x_y"]},
        {"allOf": [{"$ref": "#/properties/b"}]},
        {"type": "array", "items": {"$ref": "#/properties/b"}, "maxItems": 2},
    ],
    ids=str,
)
def test_schemas(backend: LlamaBackend, name: str, schema: Any) -> None:
    writer = WRITERS[name]
    tools = taking(schema, b={"type": "integer", "maximum": 9})
    grammar = constrain(writer.format, tools, REQUIRED, parallel=False, prompt_tail=tail_of(writer))
    for text in texts(backend, grammar, 1, writer.format):
        message = read(text, writer.format, tools, tail_of(writer))
        assert message.content == "", text
        check_calls(message, tools, parallel=False)


@pytest.mark.parametrize("name", sorted({*KINDS, "harmony"} - {"minimax-m3"}))
@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, {"additionalProperties": True}])
def test_arguments_that_are_not_declared(
    backend: LlamaBackend, name: str, parameters: dict[str, Any]
) -> None:
    writer = WRITERS[name]
    tools = [tool("f", parameters)]
    grammar = constrain(writer.format, tools, REQUIRED, parallel=False, prompt_tail=tail_of(writer))
    for text in texts(backend, grammar, 1, writer.format):
        (call,) = read(text, writer.format, tools, tail_of(writer)).tool_calls
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("name", ["qwen3-coder", "seed-oss", "glm-4", "deepseek-v3.2", "kimi-k3"])
def test_json_may_hold_what_ends_it(backend: LlamaBackend, name: str) -> None:
    writer = WRITERS[name]
    tail = tail_of(writer)
    strings = [text + "\n" + text for text in sorted(writer.format.texts)]
    tools = taking({"type": "array", "items": {"enum": strings}, "minItems": 1, "maxItems": 2})
    grammar = constrain(writer.format, tools, REQUIRED, parallel=False, prompt_tail=tail)
    for text in texts(backend, grammar, 2, writer.format):
        message = read(text, writer.format, tools, tail)
        check_calls(message, tools, parallel=False)
        assert message.content == ""
        assert read(text, writer.format, tools, tail, list(text)) == message


# -- control tokens


@pytest.mark.system
@pytest.mark.parametrize("text_attribute", ["", 'string="true"'])
def test_markers_may_be_control_tokens(backend: LlamaBackend, text_attribute: str) -> None:
    """These markers are control tokens of the bundled model, and text too."""
    fim = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    parameters = Parameters(
        open="<p:",
        key_end=":" if text_attribute else ">",
        value_open=">" if text_attribute else "",
        close=f"</p>{fim[1]}",
        ends=(fim[2],),
        text_attribute=text_attribute,
        newlines=not text_attribute,
    )
    call = (Marker("<function="), Name(until=(">",)), Marker(">"), parameters)
    format = ChatFormat(tool_calls=ToolCalls(starts=(fim[0],), call=call, closing=(fim[2],)))
    tools = taking({"type": ["string", "integer"], "maxLength": 4, "maximum": 99})
    grammar = constrain(format, tools, REQUIRED, parallel=False)
    ready = compiled(backend, grammar)
    seen: set[bool] = set()
    special = backend.vocab.tokenize("".join(fim))
    assert len(special) == 3
    for seed in range(12):
        if (tokens := walk(backend, ready, seed)) is not None:
            check_calls(
                read(backend.vocab.detokenize(tokens).decode(), format, tools, ""),
                tools,
                parallel=False,
            )
            seen |= {token in tokens for token in special}
    assert seen == {True, False}
    # A control token that ends the output is the end of the text.
    ending = ToolCalls(starts=("<c>",), call=(JsonCall(),), closing=("</c><|im_end|>",))
    format = ChatFormat(tool_calls=ending)
    matcher = compiled(backend, constrain(format, tools, REQUIRED, parallel=False))._matcher
    text = '<c>{"name": "f", "arguments": {"a": 1}}</c>'
    tokens = list(backend.vocab.tokenize(text + "<|im_end|>"))
    assert matcher.validate_tokens(tokens) == len(tokens)


# -- where the grammar begins


@pytest.mark.parametrize(
    ("format", "triggers"),
    [
        (families.HERMES, ("<tool_call>",)),
        (families.QWEN3_CODER, ("<function=",)),
        (families.DEEPSEEK_V3_2, ('<｜DSML｜invoke name="',)),  # noqa: RUF001
        (families.FIREFUNCTION, ("functools[", "functools [", "functools\n[")),
        (families.LLAMA3, ("<|python_tag|>",)),
        (families.HARMONY, ("<|channel|>commentary to=functions.",)),
        (families.FUNCTIONARY_3_2, (">>>",)),
    ],
)
def test_a_marker_that_text_has_not(format: ChatFormat, triggers: tuple[str, ...]) -> None:
    grammar = constrain(format, TOOLS, AUTO, parallel=True)
    assert grammar is not None
    assert grammar.triggers == (triggers,)


def test_an_answer_that_is_free() -> None:
    answer = Grammar("json_object", param="response_format")
    assert constrain(families.PLAIN, TOOLS, AUTO, parallel=True) is None
    assert constrain(families.HERMES, (), AUTO, parallel=True, answer=answer) is answer
    none = ToolChoice("none")
    assert constrain(families.HERMES, TOOLS, none, parallel=True) is None
    assert constrain(families.HERMES, TOOLS, none, parallel=True, answer=answer) is answer
    no_calls = ChatFormat()
    assert constrain(no_calls, TOOLS, AUTO, parallel=True, answer=answer) is answer


def test_only_functions_that_are_chosen(backend: LlamaBackend) -> None:
    for mode in ("required", "auto"):
        choice = ToolChoice(mode, ("stop", "get"))  # type: ignore[arg-type]
        grammar = constrain(families.HERMES, TOOLS, choice, parallel=True)
        for text in texts(backend, grammar, 2, families.HERMES):
            text = text if mode == "required" else f"<tool_call>{text}"
            names = {call.name for call in read(text, families.HERMES, TOOLS, "").tool_calls}
            assert names
            assert names <= {"stop", "get"}


# -- any schema


# -- streams


def test_the_largest_tools_are_not_remembered() -> None:
    format = WRITERS[sorted(WRITERS)[0]].format

    def make(size: int) -> Grammar | None:
        schema = {"type": "object", "description": "x" * size}
        return constrain(format, [tool("large", schema)], AUTO, parallel=False)

    assert make(200_000) is make(200_000)
    assert make(answer._MAX_LARGE) is not make(answer._MAX_LARGE)
