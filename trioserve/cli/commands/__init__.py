"""The commands of ``trioserve``: the first argument, if it is not a flag.

Each is a function of `Arguments` in a module here, which returns the exit code; the module is
imported only when its command is given. ``serve`` has none: it is what ``trioserve`` does without a
command. This table is also what help, completions and the manual page are made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trioserve.cli.agents import AGENTS, CONFIGURED
from trioserve.cli.options import Command, Option, as_path, from_0, from_1, numbers, writable
from trioserve.config import readers
from trioserve.errors import ConfigError

SERVE = "serve"

_URL = Option(
    "--url URL", "address of a server, such as http://127.0.0.1:8080; --api-key is its key"
)
_JSON = Option("--json", "print JSON")

_KEYS_FILE = Option("--file FILE", "the file, or TRIOSERVE_API_KEYS in the environment")


def _reading(read: Callable[[str], Any]) -> Callable[[str, str], Any]:
    """Make the reader of an option from that of a flag."""

    def named(name: str, text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None

    return named


_INTEGER = _reading(readers.integer)

#: Of ``trioserve keys add``; the names are those of fields of a key.
KEY_OPTIONS = (
    Option("--manage", "let the key manage the server: models, adapters, slots"),
    Option("--models NAME,NAME", "the only models that it may use; * and ? as in file names",
           _reading(lambda text: list(readers.names(text)))),
    Option("--requests-per-minute N", "its requests a minute; 0 = no limit (default: those of "
           "--rate-limit-requests)", _INTEGER),
    Option("--tokens-per-minute N", "its tokens a minute, of prompts and outputs", _INTEGER),
    Option("--tokens-per-day N", "its tokens a day", _INTEGER),
    Option("--priority N", "the highest priority that it may ask for (default 0)", _INTEGER),
    Option("--weight X", "its share of the queue (default 1)", _reading(readers.number)),
)  # fmt: skip

# fmt: off
COMMANDS: Mapping[str, Command] = {
    SERVE: Command("[MODEL]", "serve a model, or several; the same as without a command"),
    "run": Command(
        "[MODEL] [PROMPT ...]",
        "chat with a model in the terminal",
        "MODEL is a name in the list of models or a part of one, the path of a GGUF file, or a\n"
        "model of the hub, which is downloaded; -m MODEL does the same. With PROMPT or input from\n"
        "a file or a pipe, it prints one answer. It uses the server that the flags and variables\n"
        "describe, or the one at URL, and sends it the flags of sampling. If none has the model,\n"
        "a server is started with these flags, and ends with the chat.\n",
        (_URL, Option("-v --verbose", "print the speeds of each answer")),
        function="terminal.run",
    ),
    "speak": Command(
        "[TEXT ...]",
        "speak a text: write a file with the sound",
        "Without TEXT, or with -, it is read from standard input. FILE ends with .mp3, .wav,\n"
        ".flac, .opus, .ogg, .aac or .pcm, its format; -o - writes WAV to standard output.\n"
        "It uses the server that the flags and variables describe, or the one at URL. If there is\n"
        "none, or the flags have --tts, a server is started with these flags, and ends with the\n"
        "command.\n",
        (
            Option("-o --output FILE", "the file where the sound goes",
                   lambda name, text: as_path(name, text) if text == "-" else writable(name, text)),
            Option("--voice NAME", "the voice: GET /v1/audio/voices lists those of a server "
                   "(default: its default)", default="default"),
            Option("--speed X", "how fast it is, from 0.25 to 4 (default 1)",
                   _reading(readers.number)),
            Option("--language CODE", "the language, such as en"),
            Option("--format {mp3,opus,aac,flac,wav,pcm}", "the format, whatever FILE ends with"),
            _URL,
        ),
    ),
    "pull": Command(
        "[MODEL ...]",
        "download models from the hub into the cache, or what is new of them",
        "MODEL is USER/REPO or USER/REPO:QUANT. The flags that name a model work, too: --hf-file,\n"
        "--model-url, --tts, or --gpt-oss-20b-default and the like. What was begun is continued.\n",
        function="cache.pull",
    ),
    "list": Command(
        "",
        "list the models that a server with these flags would offer",
        "They are those of the cache, of --models-dir and --models-preset, and the bundled one.\n",
        (_JSON,),
        function="cache.list_models",
    ),
    "rm": Command(
        "MODEL ...",
        "delete models from the cache",
        "MODEL is a name that trioserve list has. Without a quantization, it must be the only one\n"
        "of its repository. What unfinished downloads of the repository have left goes, too.\n",
        function="cache.rm",
        takes_flags=False,
    ),
    "ps": Command(
        "",
        "list the models that a running server has loaded",
        "Asks the server that the flags and variables describe, or the one at URL.\n",
        (_URL, Option("--all", "list the other models of the server, too"), _JSON),
    ),
    "stop": Command(
        "[MODEL]",
        "unload a model of a running server, which the next request loads again",
        "Asks the server that the flags and variables describe, or the one at URL. Ctrl-C or\n"
        "SIGTERM ends a server.\n",
        (_URL,),
        function="ps.stop",
    ),
    "show": Command(
        "[MODEL]",
        "tell what is in a model file, and how much memory it will need here",
        "MODEL is the path of a GGUF file, or the name of a model as the server would list it.\n"
        "Flags such as --ctx-size and --parallel change how much memory is needed.\n",
        (
            _JSON,
            Option("--template", "print the chat template only"),
            Option("--fit", "print what a server would choose to fit the free memory"),
        ),
    ),
    "config": Command(
        "ACTION",
        "write a commented configuration, or tell where each setting comes from",
        actions={
            "init": Command("FILE", "write a TOML file for --config, with every setting in a "
                            "comment", takes_flags=False),
            "show": Command("", "print the settings that differ from their defaults, each with "
                            "its source", "",
                            (Option("--all", "print the settings with their default, too"), _JSON)),
            "schema": Command("", "print a JSON Schema of the file, for editors",
                              takes_flags=False),
        },
    ),
    "mcp": Command(
        "[login] [SERVER]",
        "offer models to other programs, as an MCP server on standard input and output",
        "A program such as an editor starts this. It offers the models of the server at URL or,\n"
        "without one, those that the flags name. Each of these is loaded when it is needed.\n"
        "With login, it logs in to SERVER of --mcp-servers-config, by OAuth in a browser.\n",
        (
            Option("--http [HOST:]PORT", "serve streamable HTTP at http://HOST:PORT/mcp, in place "
                   "of standard input and output (default host 127.0.0.1). Clients need a key of "
                   "--api-key"),
            Option("--url URL", "address of a server, such as http://127.0.0.1:8080, or the path "
                   "of its Unix socket; --api-key is its key"),
        ),
    ),
    "launch": Command(
        "{" + ",".join((*AGENTS, *CONFIGURED)) + "}",
        "start a coding agent that uses a local model, or configure a program for it",
        "It uses the server that the flags and variables describe, or the one at URL. If none has\n"
        "the model, a server is started with these flags, and ends with the agent.\n"
        "The settings hold for this run: no file of the agent's configuration is changed.\n"
        "What stands behind -- is passed to the agent.\n"
        f"{', '.join(CONFIGURED)} are not started: launch changes their file of settings.\n",
        (
            _URL,
            Option("--dry-run", "print what would be started or changed, and do nothing"),
            Option("--undo", "undo what was changed in the program's file"),
        ),
        passes_on=True,
    ),
    "batch": Command(
        "INPUT",
        "answer the requests of a file, as OpenAI's batches do",
        "INPUT has a request in JSON on each line: custom_id, url and body. Each answer is\n"
        "appended to OUTPUT when it comes. Lines that OUTPUT has an answer to are left out, so\n"
        "the same command continues after Ctrl-C or a crash. It uses the server at URL, or starts\n"
        "one with the flags. It ends with the lines that have failed; then the exit code is 1.\n",
        (Option("-o --output OUTPUT", "the file where the answers go", as_path), _URL),
    ),
    "store": Command(
        "ACTION",
        "check, compact or copy the file of --store, or erase a key's data",
        actions={
            "check": Command("FILE", "look for damage, and print what is in the file, also beside "
                             "a server", "", (_JSON,), takes_flags=False),
            "compact": Command("FILE", "give back the space of what was deleted; no server may use "
                               "the file", takes_flags=False),
            "export": Command("FILE TARGET", "copy the file, consistently, also while a server "
                              "uses it", takes_flags=False),
            "erase": Command(
                "FILE", "delete what a client has stored; no server may use the file",
                "Without a key, it is what was stored while the server had no keys.\n",
                (
                    Option("--api-key KEY", "its key, or LLAMA_API_KEY in the environment"),
                    Option("--name NAME", "the name of the key: delete its usage, too, or without "
                           "a key alone"),
                ),
                takes_flags=False,
            ),
        },
    ),
    "usage": Command(
        "",
        "tell what API keys have used, by day and model",
        "Asks the server that the flags and variables describe, or the one at URL, with its first\n"
        "key; one that may not manage the server shows its own usage only.\n",
        (
            Option("--store FILE", "read the file of --store, also while a server uses it"),
            _URL,
            Option("--since DAYS", "days to count, today included (default 30)", default="30"),
            Option("--by NAMES", "what to sum by: day, key or model, or several with commas "
                   "between them (default day,key,model)", default="day,key,model"),
            _JSON,
        ),
    ),
    "keys": Command(
        "ACTION",
        "add API keys to the file of --api-keys, list them, or remove one",
        actions={
            "add": Command(
                "NAME", "make a random key, print it, and write its hash to the file",
                "It cannot be shown again. A server that uses the file takes the key within a\n"
                "second.\n",
                (_KEYS_FILE, *KEY_OPTIONS), takes_flags=False,
            ),
            "list": Command("", "list the keys", "", (_KEYS_FILE, _JSON), "keys.list_",
                            takes_flags=False),
            "remove": Command("NAME", "remove a key: within a second, servers refuse it", "",
                              (_KEYS_FILE,), takes_flags=False),
        },
    ),
    "rpc": Command(
        "ACTION",
        "compute a part of a model for another machine's trioserve --rpc",
        actions={
            "build": Command(
                "", "make the library that both machines need, with a C++ compiler", "",
                (Option("--sources PATH", "the source distribution of llama-cpp-python, which pip "
                        "downloads otherwise", as_path),),
                takes_flags=False,
            ),
            "serve": Command(
                "", "run on the other machine; nothing is authenticated or encrypted", "",
                (
                    Option("--host HOST", "address to listen on (default 127.0.0.1)",
                           default="127.0.0.1"),
                    Option("--port PORT", "port to listen on (default 50052)", from_1,
                           default=50052),  # as llama.cpp's own server
                    Option("--device NAME,NAME", "devices to offer (default: the GPUs, or else the "
                           "CPU)", lambda _name, text: text.split(","), default=()),
                    Option("--threads N", "threads of the CPU (default: one per physical core)",
                           from_0, default=0),
                    Option("--cache FOLDER", "keep large tensors here, so that they need not be "
                           "sent again", as_path),
                    Option("--rpc-allow-public", "listen on an address of the public internet, or "
                           "on all"),
                ),
                takes_flags=False,
            ),
        },
    ),
    "bench": Command(
        "",
        "measure the speed of prompts and of generation, by depth and by number of clients",
        "Measures the server at URL or, without one, a server that is started with the flags.\n"
        "Numbers may have commas between them; all of them are combined.\n",
        (
            Option("-p -npp --n-prompt N", "tokens of a prompt; 0 leaves prompts out (default 512)",
                   partial(numbers, 0), default=(512,)),
            Option("-n -ntg --n-gen N", "tokens of an output; 0 leaves outputs out (default 128)",
                   partial(numbers, 0), default=(128,)),
            Option("-d --n-depth N", "tokens in the KV cache before (default 0)",
                   partial(numbers, 0), default=(0,)),
            Option("-npl --clients N", "clients at once (default 1)",
                   partial(numbers, 1), default=(1,)),
            Option("-r --repetitions N", "rounds of each test (default 5)", from_1, default=5),
            Option("-o --output {md,csv,json,jsonl}", "form of what is printed (default md)",
                   default="md"),
            Option("--json FILE", "write all samples to a file", writable),
            Option("--svg FILE", "draw a picture", writable),
            Option("--url URL", "address of a server, such as http://127.0.0.1:8080"),
            Option("--against URL", "another server with OpenAI's API, measured in turn with this "
                   "one (--api-key is the key of both)"),
        ),
    ),
    "tune": Command(
        "",
        "find the flags that are the fastest for a model on this machine",
        "Starts servers with the flags and different numbers of threads, layouts of the KV cache,\n"
        "batch sizes and drafts, with flash attention and without, and measures them in turn.\n"
        "What the flags set stays as it is.\n",
        (
            Option("--seconds N", "time for all measurements (default 120)", from_1, default=120),
            Option("--json FILE", "write all results to a file", writable),
        ),
    ),
    "doctor": Command(
        "",
        "look for what would keep a server with these flags from working well",
        "Exit code 1 if there is a problem, and 0 otherwise.\n",
        (_JSON,),
    ),
    "completions": Command(
        "{bash,zsh,fish}",
        "print a script that completes commands, flags and names of models in a shell",
        'bash: eval "$(trioserve completions bash)" in ~/.bashrc\n'
        'zsh:  eval "$(trioserve completions zsh)" in ~/.zshrc, after compinit\n'
        "fish: trioserve completions fish | source, in ~/.config/fish/config.fish\n",
        takes_flags=False,
    ),
}
# fmt: on

#: Words of other programs, and the commands here that they mean.
ALIASES: Mapping[str, str] = {
    "benchmark": "bench", "chat": "run", "delete": "rm", "download": "pull", "get": "pull",
    "info": "show", "ls": "list", "remove": "rm", "start": SERVE, "status": "ps", "unload": "stop",
}  # fmt: skip

#: Words of other programs for what is not done by a command here, and how it is done.
ELSEWHERE: Mapping[str, str] = {
    "cp": "--alias gives a model other names",
    "create": "a section of the file of --models-preset makes a model of another and settings",
    "import": "-m takes the path of a file, and --models-dir a folder of them",
    "load": "the first request loads a model, such as trioserve run MODEL",
    "login": "set HF_TOKEN, or use hf auth login",
    "logs": "a server writes its log to standard error, or to the file of --log-file",
    "push": "nothing is uploaded",
    "restart": "end the server with Ctrl-C or SIGTERM, and start it again",
    "search": "trioserve pull USER/REPO downloads a model of https://huggingface.co",
    "server": "trioserve serve starts one",
    "signin": "set HF_TOKEN, or use hf auth login",
    "update": "trioserve pull MODEL downloads what is new of a model",
    "upgrade": "pip install -U trioserve",
}
