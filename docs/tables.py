"""Write the parts of the documentation that come from the code.

    python docs/tables.py [--check]

Also the manual pages, in `docs/man/`.

A page holds such a part between ``<!-- generated: NAME -->`` and ``<!-- end -->``. With `--check`,
nothing is written, and the exit code is 1 if a page is out of date.
"""

from __future__ import annotations

import ast
import configparser
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import manual

import trioserve
from trioserve import errors
from trioserve.api import openapi
from trioserve.api.base.generation_request import ACCEPTED, UNSUPPORTED, UNSUPPORTED_IN_CHAT
from trioserve.app import create_app, create_router
from trioserve.chat.grammar.keywords import KEYWORDS
from trioserve.chat.template.repairs import REPAIRS
from trioserve.cli.help import default_text, value_name
from trioserve.config import Config
from trioserve.config.flags import FLAGS, GROUPS, Flag
from trioserve.models.head_families import FAMILIES, Family

PACKAGE = Path(trioserve.__file__).parent


_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(page: str) -> str:
    """Return the text of a page with its generated parts as the code has them now."""
    return _PART.sub(lambda part: f"{part[1]}\n{GENERATORS[part[2]]().strip()}\n\n{part[3]}", page)


def main() -> None:
    """Write, or check, all pages."""
    outdated = []
    here = Path(__file__).parent
    pages = {path: written(path.read_text(encoding="utf-8")) for path in sorted(here.glob("*.md"))}
    pages |= {here / "man" / name: text for name, text in manual.pages().items()}
    for path, new in pages.items():
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            outdated.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if outdated and "--check" in sys.argv:
        sys.exit(f"run `python docs/tables.py`; out of date: {', '.join(outdated)}")


# -- configuration


def configuration() -> str:
    """A table for each group of flags."""
    parts = []
    for group in GROUPS:
        rows = [_row(one) for one in FLAGS if one.group == group]
        head = "| flag | variable | default | what it does |\n|---|---|---|---|\n"
        parts.append(f"## {group}\n\n{head}{''.join(rows)}")
    return "\n".join(parts)


def _row(one: Flag) -> str:
    flags = "<br>".join(f"`{flag}`" for flag in (*one.names, *one.negative[-1:]))
    choices = f"; one of {', '.join(one.choices)}" if one.choices else ""
    value = value_name(one) if not one.choices else ""
    cells = (
        f"{flags} {value}".strip(),
        f"`{one.variable}`" if one.variable else "",
        f"`{text}`" if (text := default_text(one)) else "",
        f"{one.help}{choices}",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def fields() -> str:
    """The fields of `Config` with their types and defaults, for programs."""
    lines = ["| field | type | default |", "|---|---|---|"]
    for field in attrs.fields(Config):
        default = "`SamplingParams()`" if field.name == "sampling" else f"`{field.default!r}`"
        kind = str(field.type).replace("|", "\\|")
        lines.append(f"| `{field.name}` | `{kind}` | {default} |")
    return "\n".join(lines)


# -- errors


def error_tree() -> str:
    """A row for each exception, children below their parents."""
    lines = ["| class | status | `type` | what it means |", "|---|---|---|---|"]
    for depth, kind in _tree(errors.TrioServeError, 0):
        name = "&nbsp;" * 4 * depth + f"`{kind.__name__}`"
        about = " ".join((kind.__doc__ or "").split())
        code = f" `code` is `{kind.code}`." if kind.code else ""
        lines.append(f"| {name} | {kind.status} | `{kind.type}` | {about}{code} |")
    return "\n".join(lines)


def _tree(
    kind: type[errors.TrioServeError], depth: int
) -> Iterator[tuple[int, type[errors.TrioServeError]]]:
    yield depth, kind
    for child in kind.__subclasses__():
        if child.__module__.startswith(errors.__name__):
            yield from _tree(child, depth + 1)


# -- the Python interface

#: The sections of the page, and the modules whose public names each has.
PYTHON = {
    "Servers": ("server", "remote.server", "router.models", "config"),
    "Parameters": (
        "types",
        "chat.params",
        "server.keywords",
        "server.prompts.media",
        "chat.messages",
    ),
    "Answers": ("server.stream", "chat.deltas", "server.generation.embeddings"),
    "Transcripts": ("server.transcription.transcript",),
    "Speech": ("server.speech.speech",),
    "Tools and agents": (
        "server.runs.run",
        "server.runs.params",
        "server.runs.events",
        "tools.functions",
        "tools.tool",
    ),
    "Telemetry": ("server.observers.telemetry", "server.observers.observer"),
}


def public_names() -> dict[str, list[str]]:
    """The public names of each module, as `__init__.pyi` imports them; errors have another page."""
    tree = ast.parse((PACKAGE / "__init__.pyi").read_bytes())
    return {
        node.module: [name.name for name in node.names]
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module not in (None, "_version", "errors")
    }


def python() -> str:
    """A directive for mkdocstrings for each public name."""
    names = public_names()
    return "\n\n".join(
        line
        for title, modules in PYTHON.items()
        for line in (
            f"## {title}",
            *(f"::: trioserve.{module}.{name}" for module in modules for name in names[module]),
        )
    )


# -- modules


def floors() -> list[str]:
    """The layers that import-linter checks, top first, as names below `trioserve`."""
    contracts = configparser.ConfigParser()
    contracts.read(PACKAGE.parent / ".importlinter", encoding="utf-8")
    layers = contracts["importlinter:contract:floors"]["layers"].split("\n")
    return [layer.replace("trioserve.", "") for layer in layers if layer]


def module_names() -> list[str]:
    """Every module of the package by its dotted name, packages by their own."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found.append(".".join(("trioserve", *parts)))
    return found


def folders() -> str:
    """A row for each floor and each folder in it, with its first sentence."""
    tops = [top for floor in floors() for top in floor.split(" | ") if not top.startswith("_")]
    rows = [
        f"| `{_path(module).relative_to(PACKAGE.parent)}` | {_first_sentence(module)} |"
        for top in tops
        for module in module_names()
        if module == f"trioserve.{top}"
        or (module.startswith(f"trioserve.{top}.") and _path(module).is_dir())
    ]
    return "\n".join(("| folder | what it holds |", "|---|---|", *rows))


def _path(module: str) -> Path:
    """The folder of a package, or the file of a module."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path if (path / "__init__.py").is_file() else path.with_suffix(".py")


def _first_sentence(module: str) -> str:
    path = _path(module)
    path = path / "__init__.py" if path.is_dir() else path
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s|\n\n", text, maxsplit=1)[0].replace("\n", " ")


# -- the HTTP interface


def accepted() -> str:
    """A table of the fields that are taken without effect."""
    rows = (f"| `{name}` | {why} |\n" for name, why in sorted(ACCEPTED.items()))
    return f"| field | why it has no effect |\n|---|---|\n{''.join(rows)}"


def left_out() -> str:
    """A table of the fields that are left out with some values."""
    whys = {
        name: only.harmless
        for each in (UNSUPPORTED_IN_CHAT, UNSUPPORTED)
        for name, only in each.items()
        if only.harmless
    }
    rows = (f"| `{name}` | {why} |\n" for name, why in sorted(whys.items()))
    return f"| field | why |\n|---|---|\n{''.join(rows)}"


def reference() -> dict[str, Any]:
    """What llama-server's HTTP interface has, and how ours compares."""
    return tomllib.loads((Path(__file__).parent / "reference.toml").read_text(encoding="utf-8"))


def described() -> Any:
    """Our HTTP interface, as OpenAPI: of a server with one model, and what a router has beside."""
    description = openapi.describe(create_app().state.routes)
    router = openapi.describe(create_router(Config(), nullcontext).state.routes)
    paths = description["paths"]
    for path, methods in router["paths"].items():
        paths[path] = methods | paths.get(path, {})
    description["components"]["schemas"] |= router["components"]["schemas"]
    return description


def own_fields(path: str, description: Any) -> Mapping[str, Any]:
    """The fields of the body that a route takes, such as "POST /completion", by name."""
    method, _, route = path.partition(" ")
    operation = description["paths"].get(route, {}).get(method.lower(), {})
    content = operation.get("requestBody", {}).get("content", {})
    if not content:
        return {}
    (body,) = content.values()  # JSON, or a form
    name = body["schema"]["$ref"].rpartition("/")[2]
    fields: Mapping[str, Any] = description["components"]["schemas"][name]["properties"]
    return fields


def api() -> str:
    """A table of llama-server's routes, then the fields of each, then the routes that are ours.

    Of these it has the fields that no table above has.
    """
    data, description = reference(), described()
    head = "| route | what it is | |\n|---|---|---|\n"
    rows = [
        f"| {_codes(one['paths'])} | {one['about']} | {one['status']}{_query(one)} |\n"
        for one in data["routes"]
    ]
    parts = ["## Routes\n\n" + head + "".join(rows)]
    parts += [_fields_of(one, data, description) for one in data["routes"] if "fields" in one]
    known = {path for one in data["routes"] for path in one["paths"]}
    told = set(re.findall(r"`([^`]+)`", "".join(parts)))
    ours = [
        f"| `{name}` | {operation['summary']} | "
        f"{', '.join(f'`{one}`' for one in own_fields(name, description) if one not in told)} |\n"
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
        if (name := f"{method.upper()} {path}") not in known
    ]
    head = "| route | what it is | fields that are not above |\n|---|---|---|\n"
    parts.append("## Routes that are ours\n\n" + head + "".join(ours))
    return "\n".join(parts)


def _query(route: Mapping[str, Any]) -> str:
    return "".join(f"; `?{name}` {text}" for name, text in route.get("query", {}).items())


def _codes(paths: list[str]) -> str:
    return "<br>".join(f"`{path}`" for path in paths)


def _fields_of(route: Mapping[str, Any], data: Mapping[str, Any], description: Any) -> str:
    first = route["paths"][0]
    known = {
        name: text for group in route["fields"] for name, text in data["fields"][group].items()
    }
    rows = [f"| `{name}` | {text} |\n" for name, text in known.items()]
    text = f"## {first.partition(' ')[2]}\n\n| field | |\n|---|---|\n{''.join(rows)}"
    if ours := sorted(own_fields(first, description).keys() - known.keys()):
        text += f"\nOurs: {', '.join(f'`{name}`' for name in ours)}.\n"
    return text


# -- structured output


def keywords() -> str:
    """A row for each keyword of JSON Schema; those that say the same share one."""
    rows: dict[tuple[str, str], list[str]] = {}
    for one in KEYWORDS.values():
        condition = one.about if one.about.startswith(":") else f" if {one.about}"
        effect = f"{one.effect.value}{condition if one.about else ''}"
        rows.setdefault((effect, one.silent), []).append(f"`{one.name}`")
    lines = ["| keyword | effect | says nothing, and is left out |", "|---|---|---|"]
    lines += [
        f"| {', '.join(names)} | {effect} | {silent} |" for (effect, silent), names in rows.items()
    ]
    return "\n".join(lines)


def repairs() -> str:
    """A table of the repairs of conversations, in their order."""
    rows = [f"| `{repair.name}` | {repair.about} |\n" for repair in REPAIRS]
    return f"| repair | what changes |\n|---|---|\n{''.join(rows)}"


# -- drafts


def drafts() -> str:
    """A row for each architecture whose models may have heads; the others in a sentence."""
    head = "| models | architecture | `draft-mtp` | the others |\n|---|---|---|---|\n"
    families = sorted(FAMILIES.values(), key=lambda one: one.models.lower())
    rows = "".join(_family_row(one) for one in families if not (one.lacks or one.is_untried))
    idle = ", ".join(f"{one.models} (`{one.arch}`)" for one in families if one.lacks)
    return f"{head}{rows}\nllama.cpp does not compute the MTP heads in files of {idle}."


def _family_row(one: Family) -> str:
    heads = "" if not one.n_mtp else "one head" if one.n_mtp == 1 else "several heads"
    mtp = "an assistant" if one.has_assistant else heads
    return f"| {one.models} | `{one.arch}` | {mtp} | {'yes' if one.gives_layers else ''} |\n"


GENERATORS: Mapping[str, Callable[[], str]] = {
    "accepted": accepted,
    "api": api,
    "configuration": configuration,
    "drafts": drafts,
    "fields": fields,
    "errors": error_tree,
    "folders": folders,
    "keywords": keywords,
    "left-out": left_out,
    "python": python,
    "repairs": repairs,
}

if __name__ == "__main__":
    main()
