"""Schemas of tools in the shapes that agents and MCP servers send: some 600, by name.

Most are made: each shape of an argument in each shape of the object around it. Others are those of
well-known tools, shortened, and those that the generators of schemas write for all their types.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
#: zod-to-json-schema's dialect.
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_INT53 = {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
_DOMAIN = r"^(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9][a-z0-9-]{0,61}[a-z0-9]$"
_UUID = (
    r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})$"
)


def obj(*required: str, **properties: Any) -> Schema:
    """An object, as most tools have it."""
    schema: Schema = {"type": "object", "properties": properties}
    return {**schema, "required": list(required)} if required else schema


def closed(schema: Schema) -> Schema:
    return {**schema, "additionalProperties": False}


def lists(items: Any, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


#: Arguments, by what is remarkable in them.
ARGUMENTS: dict[str, Any] = {
    # plain
    "text": {"type": "string", "description": "What to look for"},
    "number": {"type": "number", "description": "Page", "minimum": 1, "maximum": 100, "default": 1},
    "integer": _INT53,
    "flag": {"type": "boolean", "default": False},
    "choice": {"type": "string", "enum": ["open", "closed", "all"], "default": "open"},
    "texts": lists(TEXT, description="Labels"),
    "nothing": {},
    "any": True,
    "described": {"description": "Any value"},
    "null": {"type": "null"},
    # lengths and limits
    "oversized": {"type": "string", "maxLength": 524_288, "description": "A script"},
    "short": {"type": "string", "minLength": 1, "maxLength": 64},
    "filled": {"type": "string", "minLength": 1},
    "float length": {"type": "string", "maxLength": 100.0},
    "no length": {"type": "string", "maxLength": -1},
    "length as text": {"type": "string", "maxLength": "20"},
    "crossed": {"type": "string", "minLength": 9, "maxLength": 3},
    "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "draft 4 limit": {"type": "number", "minimum": 0, "exclusiveMinimum": True},
    "steps": {"type": "number", "multipleOf": 0.01},
    "huge": {"type": "number", "minimum": -1.7e308, "maximum": 1.7e308},
    "many items": lists(TEXT, minItems=1, maxItems=10_000),
    "unique": lists(TEXT, uniqueItems=True, minItems=1),
    # patterns
    "date": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
    "slug": {"type": "string", "pattern": "^[a-z0-9-]+$", "maxLength": 100},
    "domain": {"type": "string", "pattern": _DOMAIN},
    "domains": lists({"type": "string", "pattern": _DOMAIN}),
    "look-ahead": {"type": "string", "pattern": r"^(?!.*\.\.)(?=.*[a-z])[\w.-]+$"},
    "look-behind": {"type": "string", "pattern": r"(?<!\\)\$"},
    "back-reference": {"type": "string", "pattern": r"^(['\"]).*\1$"},
    "word boundary": {"type": "string", "pattern": r"\bfoo\b"},
    "not a pattern": {"type": "string", "pattern": "("},
    "javascript": {"type": "string", "pattern": r"^[\p{L}\p{N}_]+$"},
    "uuid": {"type": "string", "format": "uuid", "pattern": _UUID},
    "email": {
        "type": "string",
        "format": "email",
        "pattern": r"^(?!\.)(?!.*\.\.)([\w'+\-\.]*)[\w+-]@([A-Za-z0-9][\w\-]*\.)+[A-Za-z]{2,}$",
    },
    "time": {
        "type": "string",
        "format": "date-time",
        "pattern": r"^(?:\d\d(?:[2468][048]|0[48])-02-29|\d{4}-(?:0[1-9]|1[0-2])-\d\d)T.*Z$",
    },
    "pattern is a number": {"type": "string", "pattern": 5},
    # formats
    "url": {"type": "string", "format": "uri"},
    "int32": {"type": "integer", "format": "int32"},
    "json text": {"type": "string", "format": "json"},
    "cidr": {"type": "string", "format": "cidrv4"},
    "bytes": {"type": "string", "contentEncoding": "base64"},
    # alternatives
    "or null": {"anyOf": [TEXT, {"type": "null"}], "default": None},
    "types": {"type": ["string", "number", "boolean", "null"]},
    "text or texts": {"oneOf": [TEXT, lists(TEXT)]},
    "integer or number": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "literals": {"anyOf": [{"type": "string", "const": one} for one in ("a", "b", "c")]},
    "kinds": {
        "oneOf": [
            closed(obj("type", "page_id", type={"const": "page_id"}, page_id=TEXT)),
            closed(obj("type", "database_id", type={"const": "database_id"}, database_id=TEXT)),
        ]
    },
    "one needed": {
        **obj(id=TEXT, name=TEXT),
        "oneOf": [{"required": ["id"]}, {"required": ["name"]}],
    },
    "any needed": {
        **obj("kind", kind=TEXT, id=TEXT, name=TEXT),
        "anyOf": [{"required": ["id"]}, {"required": ["name"]}],
    },
    "limits beside": {"minLength": 2, "anyOf": [TEXT, {"type": "null"}]},
    "mixed enum": {"enum": ["auto", 0, None, True]},
    "typed enum": {"type": "string", "enum": ["a", 1]},
    "empty enum": {"type": "string", "enum": []},
    "no enum": {"type": "string", "enum": None},
    "empty choice": {"anyOf": []},
    "not": {"type": "string", "not": {"enum": ["", "null"]}},
    "if": {**obj(a=TEXT, b=TEXT), "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    # all of
    "all of one": {"allOf": [{"type": "string", "minLength": 1}], "description": "A name"},
    "all of two": {"allOf": [TEXT, {"maxLength": 20}]},
    "closed parts": {"allOf": [closed(obj("a", a=TEXT)), closed(obj(b={"type": "integer"}))]},
    "part and more": {"allOf": [obj("a", a=TEXT)], **obj(b={"type": "boolean"})},
    "contradiction": {"allOf": [TEXT, {"type": "integer"}]},
    # objects
    "object": {"type": "object"},
    "map": {"type": "object", "additionalProperties": TEXT},
    "record": {"type": "object", "propertyNames": TEXT, "additionalProperties": {}},
    "by pattern": {
        "type": "object",
        "patternProperties": {"^x-": TEXT},
        "additionalProperties": False,
    },
    "counted": {"type": "object", "additionalProperties": True, "minProperties": 1},
    "nested": obj("a", a=obj("b", b=obj(c=lists(obj("d", d={"enum": [1, 2]}))))),
    "rows": lists(closed(obj("id", id=TEXT, done={"type": "boolean"})), minItems=1, maxItems=4),
    "members without a type": {"properties": {"a": TEXT}, "required": ["a"]},
    "required null": {**obj(a=TEXT), "required": None},
    "required true": {**obj(a=TEXT), "required": True},
    "required elsewhere": {**obj(a=TEXT), "required": ["a", "missing"]},
    "required is a mixture": {**obj(a=TEXT), "required": ["a", 5, None]},
    "no properties": {"type": "object", "properties": None},
    "properties as a list": {"type": "object", "properties": []},
    "a property is null": {"type": "object", "properties": {"a": None, "b": TEXT}},
    "a property is false": {"type": "object", "properties": {"a": False, "b": TEXT}},
    "others null": {**obj(a=TEXT), "additionalProperties": None},
    # lists
    "pair": {"type": "array", "items": [TEXT, {"type": "number"}], "minItems": 2, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [TEXT, {"type": "number"}], "items": False},
    "no items": {"type": "array"},
    "items null": {"type": "array", "items": None},
    "contains": {"type": "array", "items": TEXT, "contains": {"const": "x"}},
    "crossed items": lists(TEXT, minItems=3, maxItems=2),
    # names
    "stages": lists(
        {
            "anyOf": [
                obj("$vectorSearch", **{"$vectorSearch": obj("index", index=TEXT)}),
                {"type": "object", "additionalProperties": {}},
            ]
        }
    ),
    "odd names": obj("$match", **{"$match": TEXT, "@type": TEXT, "a b": TEXT, "x/y": TEXT}),
    "header names": obj(**{"Content-Type": TEXT, "X-Api.Version": TEXT, "größe": TEXT}),
    # types
    "upper case": {"type": "STRING", "description": "as Google's SDK writes it"},
    "python type": {"type": "str"},
    "unknown type": {"type": "any"},
    "type null": {"type": None},
    "no types": {"type": []},
    "nullable": {"type": "string", "nullable": True},
    # references
    "nowhere": {"$ref": "#/$defs/nowhere"},
    "another file": {"$ref": "https://example.org/schema.json"},
    "itself": {"$ref": "#"},
    "reference and more": {"$ref": "#/$defs/Known", "description": "One", "minLength": 2},
    "known": {"$ref": "#/$defs/Known"},
    "a block": {"$ref": "#/$defs/Block"},
    "blocks": {"oneOf": [{"$ref": "#/$defs/Block"}, {"$ref": "#/$defs/Heading"}]},
    "sibling": {"$ref": "#/properties/other"},
    "dynamic": {"$dynamicRef": "#node"},
    "anchor": {"$ref": "#anchor"},
}

DEFINITIONS: Schema = {
    "Known": {"type": "string", "enum": ["on", "off"]},
    "Block": closed(
        obj(
            "type",
            type={"const": "block"},
            children=lists({"$ref": "#/$defs/Block"}, maxItems=100),
        )
    ),
    "Heading": closed(obj("type", "text", type={"const": "heading"}, text=TEXT)),
    "Loop": {"$ref": "#/$defs/Loop"},
}


def _around(name: str, schema: Any) -> dict[str, Schema]:
    """The objects that hold an argument."""
    other = {"type": "string"}
    root = {"$defs": DEFINITIONS} if "$" in str(schema) else {}
    return {
        f"{name}, needed": {**obj("a", a=schema, other=other), **root},
        f"{name}, closed": {"$schema": DRAFT_7, **closed(obj(a=schema, other=other)), **root},
        f"{name}, open": {**obj("other", a=schema, other=other), **root}
        | {"additionalProperties": True},
        f"{name}, in a list": {**closed(obj("l", l=lists(schema), other=other)), **root},
        f"{name}, in an object": {**obj("o", o=closed(obj("a", a=schema)), other=other), **root},
    }


_BASH = obj(
    "command",
    command={"type": "string"},
    timeout={"type": "number", "maximum": 600_000},
    run_in_background={"type": "boolean"},
)
#: Tools of agents and servers, shortened.
TOOLS: dict[str, Any] = {
    "nothing": {},
    "no properties": {"type": "object", "properties": {}},
    "closed and empty": closed({"type": "object", "properties": {}}),
    "open and empty": {"type": "object", "properties": {}, "additionalProperties": True},
    "an object": {"type": "object"},
    "a text": {"type": "string"},
    "a list": {"type": "array", "items": TEXT},
    "nullable object": {"type": ["object", "null"], "properties": {"a": TEXT}},
    "properties alone": {"properties": {"a": TEXT}},
    "title": {
        "title": "argumentsModel",
        **obj("query", query={"title": "Query", "type": "string"}),
    },
    "a reference": {"$ref": "#/$defs/Args", "$defs": {"Args": obj("a", a=TEXT)}},
    "definitions": {"$ref": "#/definitions/Args", "definitions": {"Args": obj("a", a=TEXT)}},
    "refers to itself": {"$ref": "#"},
    "all of": {"type": "object", "allOf": [obj("a", a=TEXT), obj(b={"type": "integer"})]},
    "any of": {"type": "object", "anyOf": [obj("a", a=TEXT), obj("b", b={"type": "integer"})]},
    "one of": {"oneOf": [closed(obj("a", a=TEXT)), closed(obj("b", b={"type": "integer"}))]},
    "one required": {
        **obj(path=TEXT, url=TEXT),
        "oneOf": [{"required": ["path"]}, {"required": ["url"]}],
    },
    "not both": {**obj(path=TEXT, url=TEXT), "not": {"required": ["path", "url"]}},
    "dependent": {**obj(a=TEXT, b=TEXT), "dependentRequired": {"a": ["b"]}},
    "at least one": {**obj(a=TEXT, b=TEXT), "minProperties": 1},
    "by pattern": {"type": "object", "patternProperties": {".*": {"type": "string"}}},
    "deep": {},  # made below
    "claude Bash": closed(_BASH),
    "claude Edit": closed(
        obj(
            "file_path",
            "old_string",
            "new_string",
            file_path=TEXT,
            old_string=TEXT,
            new_string=TEXT,
            replace_all={"type": "boolean", "default": False},
        )
    ),
    "claude Workflow": closed(
        obj(
            script={"type": "string", "maxLength": 524_288},
            name=TEXT,
            args={"description": "Any JSON value"},
            resumeFromRunId={"type": "string", "pattern": "^wf_[a-z0-9-]{6,}$"},
        )
    ),
    "claude TodoWrite": closed(
        obj(
            "todos",
            todos=lists(
                closed(
                    obj(
                        "content",
                        "status",
                        content={"type": "string", "minLength": 1},
                        status={"type": "string", "enum": ["pending", "in_progress", "completed"]},
                    )
                )
            ),
        )
    ),
    "claude AskUserQuestion": closed(
        obj(
            "questions",
            questions=lists(
                closed(
                    obj(
                        "question",
                        "options",
                        question=TEXT,
                        options=lists(
                            closed(obj("label", label=TEXT, preview=TEXT)), minItems=2, maxItems=4
                        ),
                        multiSelect={"type": "boolean", "default": False},
                    )
                ),
                minItems=1,
                maxItems=4,
            ),
            answers={
                "type": "object",
                "propertyNames": TEXT,
                "additionalProperties": {"type": "string"},
            },
        )
    ),
    "codex shell": closed(
        obj(
            "command",
            command=lists(TEXT),
            workdir=TEXT,
            timeout_ms={"type": "number"},
            with_escalated_permissions={"type": "boolean"},
        )
    ),
    "codex update_plan": closed(
        obj(
            "plan",
            explanation=TEXT,
            plan=lists(closed(obj("step", "status", step=TEXT, status=TEXT))),
        )
    ),
    "github create_or_update_file": closed(
        obj(
            "owner",
            "repo",
            "path",
            "content",
            owner=TEXT,
            repo=TEXT,
            path=TEXT,
            content=TEXT,
            sha=TEXT,
        )
    ),
    "github list_issues": closed(
        obj(
            "owner",
            owner=TEXT,
            direction={"type": "string", "enum": ["asc", "desc"]},
            labels=lists(TEXT),
            page={"type": "number"},
        )
    ),
    "notion post-page": {
        **obj(
            "parent",
            "properties",
            parent={
                "oneOf": [
                    {"$ref": "#/$defs/pageIdParentRequest"},
                    {"$ref": "#/$defs/databaseParentRequest"},
                ]
            },
            properties=obj(title=lists(closed(obj("text", text=obj("content", content=TEXT))))),
            children=lists(TEXT, format="json"),
            icon={"type": "string", "format": "json"},
        ),
        "$defs": {
            "pageIdParentRequest": closed(
                obj("page_id", page_id={"type": "string", "format": "uuid"})
            ),
            "databaseParentRequest": closed(
                obj("database_id", database_id={"type": "string", "format": "uuid"})
            ),
        },
    },
    "firecrawl scrape": closed(
        obj(
            "url",
            url={"type": "string", "format": "uri"},
            formats=lists(
                {
                    "anyOf": [
                        {"type": "string", "enum": ["markdown", "html", "links"]},
                        closed(obj("type", type={"const": "json"}, schema={"type": "object"})),
                    ]
                }
            ),
            includeDomains=lists({"type": "string", "pattern": _DOMAIN}),
            location=closed(obj(country=TEXT, languages=lists(TEXT))),
            headers={"type": "object", "additionalProperties": TEXT},
        )
    ),
    "mongodb aggregate": closed(
        obj(
            "database",
            "pipeline",
            database=TEXT,
            pipeline=ARGUMENTS["stages"],
            responseBytesLimit={"type": "number", "default": 1_048_576},
        )
    ),
    "mongodb find": closed(
        obj(
            "database",
            database=TEXT,
            filter={"type": "object", "additionalProperties": {}, "propertyNames": TEXT},
            sort={
                "type": "object",
                "additionalProperties": {"anyOf": [{"const": 1}, {"const": -1}]},
            },
        )
    ),
    "playwright fill_form": closed(
        obj(
            "fields",
            fields=lists(
                closed(
                    obj(
                        "name",
                        "type",
                        name=TEXT,
                        type={"type": "string", "enum": ["textbox", "checkbox", "combobox"]},
                    )
                )
            ),
        )
    ),
    "filesystem edit_file": {
        "$schema": DRAFT_7,
        **obj(
            "path",
            "edits",
            path=TEXT,
            edits=lists(closed(obj("oldText", "newText", oldText=TEXT, newText=TEXT))),
            dryRun={"type": "boolean", "default": False},
        ),
    },
    "stripe create_price": obj(
        "product", product=TEXT, unit_amount={"type": "integer"}, currency=TEXT
    ),
    "linear list_issues": closed(
        obj(
            limit={"type": "number", "maximum": 250, "default": 50},
            assignee={"anyOf": [TEXT, {"type": "null"}]},
            orderBy={"type": "string", "enum": ["createdAt", "updatedAt"]},
        )
    ),
    "slack post_message": obj("channel_id", "text", channel_id=TEXT, text=TEXT),
    "sentry search_events": closed(
        obj(
            "organizationSlug",
            organizationSlug=TEXT,
            regionUrl={"anyOf": [{"type": "string", "format": "uri"}, {"type": "null"}]},
            limit={"type": "number", "minimum": 1, "maximum": 100},
        )
    ),
    "atlassian createJiraIssue": closed(
        obj(
            "cloudId",
            cloudId=TEXT,
            additional_fields={"type": "object", "additionalProperties": {}},
        )
    ),
    "cloudflare kv": closed(
        obj("params", params=obj(per_page={"anyOf": [{"not": {}}, {"type": "number"}]}))
    ),
    "supabase apply_migration": closed(obj("name", "query", name=TEXT, query=TEXT)),
    "kubernetes get": obj(
        "resourceType", resourceType=TEXT, output={"enum": ["json", "yaml", "wide"]}
    ),
    "google type": {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}},
    "pydantic": {
        "$defs": {"Unit": {"enum": ["C", "F"], "title": "Unit", "type": "string"}},
        **obj(
            "city",
            city={"title": "City", "type": "string"},
            unit={"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}], "default": None},
        ),
        "title": "weatherArguments",
    },
    "home assistant": obj(
        area={"oneOf": [TEXT, lists(TEXT)]},
        color={"oneOf": [lists(_INT53, minItems=3, maxItems=3), TEXT]},
    ),
}
for _ in range(120):
    TOOLS["deep"] = obj(a=TOOLS["deep"])


#: Schemas by pydantic, zod, schemars, System.Text.Json, NJsonSchema and Go's packages, by name.
GENERATED: dict[str, Any] = json.loads(
    Path(__file__).with_name("generated_schemas.json").read_text(encoding="utf-8")
)


def corpus() -> dict[str, Schema]:
    """All of them, each a new object."""
    found = {f"tool: {name}": schema for name, schema in TOOLS.items()}
    for name, schema in GENERATED.items():
        is_object = schema.get("type") == "object"
        found[f"generated: {name}"] = schema if is_object else obj("a", a=schema)
    for name, schema in ARGUMENTS.items():
        found |= _around(name, schema)
    return copy.deepcopy(found)
