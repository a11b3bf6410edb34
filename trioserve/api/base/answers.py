"""Answers as classes: functions write their objects, and ``/openapi.json`` describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

#: The place of named schemas in a description.
COMPONENTS = "#/components/schemas/"


class Answer(msgspec.Struct):
    """An object in an answer. Each of its fields is written, unless it is `UNSET`.

    The fields of an answer that is open are not all that it may have.
    """

    is_open: ClassVar[bool] = False
    known: ClassVar[dict[str, type[Answer]]] = {}  # all classes, by their names

    def __init_subclass__(cls) -> None:
        Answer.known[cls.__name__] = cls

    @classmethod
    def like(cls, source: object, **more: Any) -> Self:
        """Make one that has what an object has under the names of its fields, and more."""
        same = {each for each in cls.__struct_fields__ if hasattr(source, each)} - {*more}
        return cls(**{each: getattr(source, each) for each in same}, **more)


def schema_of(type_: Any, components: dict[str, Any]) -> Any:
    """The schema of the type of an answer; those of objects in it are added to the components.

    The schemas of private classes stand in the places where they are used.
    """
    schema, found = _schemas_of(type_)
    components |= found
    return schema


@cache
def _schemas_of(type_: Any) -> tuple[Any, Mapping[str, Any]]:
    (schema,), found = msgspec.json.schema_components([type_], ref_template=f"{COMPONENTS}{{name}}")
    for name, about in found.items():
        about["required"] = _required(Answer.known[name])
        about |= {"additionalProperties": True} if Answer.known[name].is_open else {}
        for one in (about, *about["properties"].values()):
            one.pop("title", None)
            one.pop("default", None)
    public = {name: _inlined(one, found) for name, one in found.items() if name[0] != "_"}
    return _inlined(schema, found), public


@cache
def _required(cls: type[Answer]) -> Sequence[str]:
    """The names of the fields that are always written."""
    tag, fields = cls.__struct_config__.tag_field, msgspec.structs.fields(cls)
    names = [each.encode_name for each in fields if UnsetType not in get_args(each.type)]
    return [tag, *names] if tag else names


def _inlined(value: Any, found: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_inlined(each, found) for each in value]
    if not isinstance(value, dict):
        return value
    name = value.get("$ref", "").removeprefix(COMPONENTS)
    if name.startswith("_"):
        return _inlined(found[name], found)
    return {key: _inlined(one, found) for key, one in value.items()}


#: A file, or what another server has answered.
Bytes: TypeAlias = Annotated[str, Meta(extra_json_schema={"format": "binary"})]


class Success(Answer):
    """The answer to a command."""

    success: bool
    message: str | UnsetType = UNSET


class Health(Answer):
    """The answer of a server that takes requests, or lives."""

    status: str = "ok"


class _BeforeEdits(Answer):
    original_input_tokens: int


class InputTokens(Answer):
    """The number of tokens of a prompt; the Responses API says what it counts."""

    input_tokens: int
    object: str | UnsetType = UNSET
    context_management: _BeforeEdits | UnsetType = UNSET

    @classmethod
    def edited(cls, n_tokens: int, n_before: int) -> Self:
        """The tokens of a conversation after its edits, and before them."""
        return cls(n_tokens, context_management=_BeforeEdits(n_before))


class Metrics(Answer):
    """Figures of the server, in groups, which the page about operations describes."""

    is_open = True
    object: Literal["metrics"]


class Guidance(Answer):
    """Advice to a user before the first chat with a model."""

    is_toy: bool | UnsetType = UNSET
    example_prompts: list[str] | UnsetType = UNSET
    has_chat_template: bool | UnsetType | None = UNSET
    context_advice: str | UnsetType | None = UNSET
    suggested_tools: list[str] | UnsetType = UNSET


class _Defaults(Answer):
    params: dict[str, Any]
    n_ctx: int


class Properties(Guidance):
    """The properties of a server. The page about llama-server's API lists more of them."""

    is_open = True
    default_generation_settings: _Defaults | UnsetType = UNSET
    total_slots: int | UnsetType = UNSET
    model_alias: str | UnsetType = UNSET
    model_path: str | UnsetType = UNSET
    chat_template: str | UnsetType = UNSET
    build_info: str | UnsetType = UNSET
    is_sleeping: bool | UnsetType = UNSET
