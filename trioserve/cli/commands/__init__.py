"""The commands of ``trioserve``: the first argument, if it is not a flag.

Each is a function of ``(argv, environ)`` in a module here, which returns the exit code; the module
is imported only when its command is given. ``serve`` has none: it is what ``trioserve`` does
without a command.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import attrs

from trioserve.cli.agents import AGENTS
from trioserve.config import Config, logs
from trioserve.config.flags import as_flags
from trioserve.config.parse import Parsed, parse
from trioserve.config.unsupported import did_you_mean
from trioserve.errors import ConfigError, TrioServeError

SERVE = "serve"


@attrs.frozen
class Command:
    """A command: its usage, a line of help, and details."""

    usage: str
    help: str
    details: str = ""
    function: str = ""  # MODULE.FUNCTION; by default ``run`` in the module of that name


COMMANDS: Mapping[str, Command] = {
    SERVE: Command("[flags]", "serve a model, or several; the same as without a command"),
    "run": Command(
        "[MODEL] [PROMPT] [--url URL] [flags]",
        "chat with a model in the terminal",
        "MODEL is a name in the list of models or a part of one, the path of a GGUF file, or a\n"
        "model of the hub, which is downloaded. With PROMPT or input from a file or a pipe, it\n"
        "prints one answer. It uses the server that the flags and variables describe, or the one\n"
        "at URL. If none has the model, a server is started with these flags, and ends with the\n"
        "chat.\n\n"
        "  --url URL    address of a server, such as http://127.0.0.1:8080; --api-key is its key\n",
        function="terminal.run",
    ),
    "pull": Command(
        "[MODEL ...] [flags]",
        "download models from the hub into the cache, or what is new of them",
        "MODEL is USER/REPO or USER/REPO:QUANT. The flags that name a model work, too: --hf-file,\n"
        "--model-url, or --gpt-oss-20b-default and the like. What was begun is continued.\n",
        function="cache.pull",
    ),
    "list": Command("", "list the models in the cache", function="cache.list_models"),
    "rm": Command(
        "MODEL ...",
        "delete models from the cache",
        "MODEL is a name that trioserve list has. Without a quantization, it must be the only one\n"
        "of its repository. What unfinished downloads of the repository have left goes, too.\n",
        function="cache.rm",
    ),
    "ps": Command(
        "[--url URL] [--all] [flags]",
        "list the models that a running server has loaded",
        "Asks the server that the flags and variables describe, or the one at URL.\n\n"
        "  --url URL    address of the server, such as http://127.0.0.1:8080\n"
        "  --all        list the other models of the server, too\n",
    ),
    "show": Command(
        "[MODEL] [--json] [--template] [--fit] [flags]",
        "tell what is in a model file, and how much memory it will need here",
        "MODEL is the path of a GGUF file, or the name of a model as the server would list it.\n"
        "Flags such as --ctx-size and --parallel change how much memory is needed.\n\n"
        "  --json       print an object in JSON\n"
        "  --template   print the chat template only\n"
        "  --fit        print what a server would choose to fit the free memory\n",
    ),
    "config": Command(
        "init FILE | show [--all] [flags] | schema",
        "write a commented configuration, or tell where each setting comes from",
        "init writes a TOML file for --config, with every setting in a comment.\n"
        "show prints the settings that differ from their defaults, each with its source.\n"
        "schema prints a JSON Schema of the file, for editors.\n\n"
        "  --all        print the settings with their default, too\n",
    ),
    "mcp": Command(
        "[--url URL] [--http [HOST:]PORT] [flags]",
        "offer models to other programs, as an MCP server on standard input and output",
        "A program such as an editor starts this. It offers the models of the server at URL or,\n"
        "without one, those that the flags name. Each of these is loaded when it is needed.\n\n"
        "  --http [HOST:]PORT\n"
        "               serve streamable HTTP at http://HOST:PORT/mcp, in place of standard input\n"
        "               and output (default host 127.0.0.1). Clients need a key of --api-key\n"
        "  --url URL    address of a server, such as http://127.0.0.1:8080, or the path of its\n"
        "               Unix socket; --api-key is its key\n",
    ),
    "launch": Command(
        "AGENT [--model MODEL] [--url URL] [flags] [-- ARGUMENTS]",
        "start a coding agent that uses a local model",
        f"AGENT is one of {', '.join(AGENTS)}.\n"
        "It uses the server that the flags and variables describe, or the one at URL. If none has\n"
        "the model, a server is started with these flags, and ends with the agent.\n"
        "The settings hold for this run: no file of the agent's configuration is changed.\n"
        "ARGUMENTS are passed to the agent.\n\n"
        "  --url URL    address of a server, such as http://127.0.0.1:8080; --api-key is its key\n",
    ),
    "batch": Command(
        "INPUT -o OUTPUT [--url URL] [flags]",
        "answer the requests of a file, as OpenAI's batches do",
        "INPUT has a request in JSON on each line: custom_id, url and body. Each answer is\n"
        "appended to OUTPUT when it comes. Lines that OUTPUT has an answer to are left out, so\n"
        "the same command continues after Ctrl-C or a crash. It uses the server at URL, or starts\n"
        "one with the flags. It ends with the lines that have failed; then the exit code is 1.\n\n"
        "  -o, --output FILE\n"
        "               where the answers go\n"
        "  --url URL    address of a server, such as http://127.0.0.1:8080; --api-key is its key\n",
    ),
    "store": Command(
        "check FILE | compact FILE | export FILE TARGET | erase FILE [--api-key KEY] [--name NAME]",
        "check, compact or copy the file of --store, or erase a key's data",
        "check looks for damage, and prints what is in the file. It runs beside a server.\n"
        "compact gives back the space of what was deleted. No server may use the file.\n"
        "export copies the file, consistently, also while a server uses it.\n"
        "erase deletes what a client with this API key has stored; without a key, what was stored\n"
        "while the server had no keys. No server may use the file.\n\n"
        "  --api-key KEY    the key, or LLAMA_API_KEY in the environment\n"
        "  --name NAME      the name of the key: delete its usage, too, or without a key alone\n",
    ),
    "usage": Command(
        "[--store FILE | --url URL] [--since DAYS] [--by NAMES] [--json] [flags]",
        "tell what API keys have used, by day and model",
        "Asks the server that the flags and variables describe, or the one at URL, with its first\n"
        "key; one that may not manage the server shows its own usage only.\n\n"
        "  --store FILE    read the file of --store, also while a server uses it\n"
        "  --url URL       address of the server, such as http://127.0.0.1:8080\n"
        "  --since DAYS    days to count, today included (default 30)\n"
        "  --by NAMES      what to sum by: day, key or model, or several with commas between them\n"
        "                  (default day,key,model)\n"
        "  --json          print a list in JSON\n",
    ),
    "keys": Command(
        "add NAME [--file FILE] [flags] | list [--file FILE] | remove NAME [--file FILE]",
        "add API keys to the file of --api-keys, list them, or remove one",
        "add makes a random key, prints it, and writes its hash to the file. It cannot be shown\n"
        "again. A server that uses the file takes the key, or refuses it, within a second.\n\n"
        "  --file FILE                 the file, or TRIOSERVE_API_KEYS in the environment\n"
        "  --manage                    let the key manage the server: models, adapters, slots\n"
        "  --models NAME,NAME          the only models that it may use; * and ? as in file names\n"
        "  --requests-per-minute N     its requests a minute; 0 = no limit (default: those of\n"
        "                              --rate-limit-requests)\n"
        "  --tokens-per-minute N       its tokens a minute, of prompts and outputs\n"
        "  --tokens-per-day N          its tokens a day\n"
        "  --priority N                the highest priority that it may ask for (default 0)\n"
        "  --weight X                  its share of the queue (default 1)\n",
    ),
    "rpc": Command(
        "build [--sources PATH] | serve [flags]",
        "compute a part of a model for another machine's trioserve --rpc",
        "build makes the library that both machines need, with a C++ compiler. PATH is the source\n"
        "distribution of llama-cpp-python, which pip downloads otherwise.\n\n"
        "serve is what runs on the other machine. Nothing is authenticated or encrypted.\n\n"
        "  --host HOST           address to listen on (default 127.0.0.1)\n"
        "  --port PORT           port to listen on (default 50052)\n"
        "  --device NAME,NAME    devices to offer (default: the GPUs, or else the CPU)\n"
        "  --threads N           threads of the CPU (default: one per physical core)\n"
        "  --cache FOLDER        keep large tensors here, so that they need not be sent again\n"
        "  --rpc-allow-public    listen on an address of the public internet, or on all\n",
    ),
    "bench": Command(
        "[--url URL] [--against URL] [-p N] [-n N] [-d N] [-npl N] [flags]",
        "measure the speed of prompts and of generation, by depth and by number of clients",
        "Measures the server at URL or, without one, a server that is started with the flags.\n"
        "Numbers may have commas between them; all of them are combined.\n\n"
        "  -p, -npp, --n-prompt N\n"
        "                        tokens of a prompt; 0 leaves prompts out (default 512)\n"
        "  -n, -ntg, --n-gen N   tokens of an output; 0 leaves outputs out (default 128)\n"
        "  -d, --n-depth N       tokens in the KV cache before (default 0)\n"
        "  -npl, --clients N     clients at once (default 1)\n"
        "  -r, --repetitions N   rounds of each test (default 5)\n"
        "  -o, --output {md,csv,json,jsonl}\n"
        "                        form of what is printed (default md)\n"
        "  --json FILE           write all samples to a file\n"
        "  --svg FILE            draw a picture\n"
        "  --url URL             address of a server, such as http://127.0.0.1:8080\n"
        "  --against URL         another server with OpenAI's API, measured in turn with this one\n"
        "                        (--api-key is the key of both)\n",
    ),
    "tune": Command(
        "[--seconds N] [--json FILE] [flags]",
        "find the flags that are the fastest for a model on this machine",
        "Starts servers with the flags and different numbers of threads, layouts of the KV cache,\n"
        "batch sizes and drafts, with flash attention and without, and measures them in turn.\n"
        "What the flags set stays as it is.\n\n"
        "  --seconds N    time for all measurements (default 120)\n"
        "  --json FILE    write all results to a file\n",
    ),
    "doctor": Command(
        "[flags]",
        "look for what would keep a server with these flags from working well",
        "Exit code 1 if there is a problem, and 0 otherwise.\n",
    ),
}


def check(name: str) -> None:
    """Check that a command exists.

    Raises:
        ConfigError: it does not.
    """
    if name in COMMANDS:
        return
    if Path(name).suffix == ".gguf" or Path(name).exists():
        raise ConfigError(f"{name!r} is not a command; name a model with -m")
    hint = did_you_mean(name, COMMANDS) or "; see trioserve --help"
    raise ConfigError(f"{name!r} is not a command{hint}")


def run(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command other than `SERVE`, and return its exit code.

    Args:
        name: the command.
        argv: its arguments.
        environ: the environment variables.
    """
    ours = argv[: argv.index("--")] if "--" in argv else argv
    if "--help" in ours or "-h" in ours:
        print(help_of(name), end="")
        return 0
    try:
        module, _, function = (COMMANDS[name].function or f"{name}.run").partition(".")
        code: int = getattr(import_module(f"{__name__}.{module}"), function)(argv, environ)
    except TrioServeError as error:
        is_usage = isinstance(error, ConfigError)
        message = as_flags(error.message) if is_usage else error.message
        print(f"trioserve: {message}", file=sys.stderr)
        return 2 if is_usage else 1
    return code


def help_of(name: str) -> str:
    """The help of a command."""
    command = COMMANDS[name]
    sentence = f"{command.help[0].upper()}{command.help[1:]}.\n"
    return f"usage: trioserve {name} {command.usage}\n\n{sentence}{command.details}"


def hush(config: Config) -> None:
    """Disable the log, unless the flags set a level: commands print their output."""
    level = "off" if config.log_level == Config().log_level else config.log_level
    logs.configure(attrs.evolve(config, log_level=level, log_file=None))


def parse_flags(flags: Sequence[str], environ: Mapping[str, str]) -> Parsed:
    """Read the flags of a server, print notes about them, and `hush` the log. Raises as `parse`."""
    parsed = parse(flags, environ)
    hush(parsed.config)
    for note in parsed.notes:
        print(f"trioserve: {note}", file=sys.stderr)
    return parsed


def take(argv: Sequence[str], *switches: str) -> tuple[list[str], set[str]]:
    """Remove switches from the arguments; returns the other arguments, and the switches found."""
    return [word for word in argv if word not in switches], {*switches} & {*argv}


# -- output


def table(rows: Sequence[Sequence[str]], *, right: Container[int] = ()) -> str:
    """Format rows as a table; the columns with numbers in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "".join(f"{line.rstrip()}\n" for line in lines)


_BYTES = ("bytes", "KiB", "MiB", "GiB", "TiB")


def bytes_text(size: float) -> str:
    """Format a number of bytes, such as ``4.1 GiB``."""
    unit = 0
    while size >= 1024 and unit < len(_BYTES) - 1:
        size /= 1024
        unit += 1
    digits = 0 if unit == 0 or size >= 100 else 1
    return f"{size:.{digits}f} {_BYTES[unit]}"


def count_text(number: float) -> str:
    """Format a large number in three digits, such as ``268 M``."""
    for unit in ("", " K", " M", " B"):
        if number < 1000 or unit == " B":
            break
        number /= 1000
    return f"{number:.3g}{unit}"


def duration_text(seconds: float) -> str:
    """Format a duration in its largest unit, such as ``4 minutes``."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            number = round(seconds / size)
            return f"{number} {unit}{'s' if number > 1 else ''}"
    number = round(seconds)
    return f"{number} second{'s' if number != 1 else ''}"
