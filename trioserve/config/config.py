"""`Config`: the whole configuration, frozen, from flags, the environment, a file or a program.

Each field carries its flags, its environment variable and its help text, so the command line,
``--help`` and the reference in ``docs/`` are all made from this class and its base.
"""

from __future__ import annotations

import importlib.util
import re
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from trioserve.config.option import option
from trioserve.config.readers import parse_json
from trioserve.config.tools import ToolsConfig
from trioserve.errors import ConfigError

_models = partial(option, group="Models")
_server = partial(option, group="Server")
_network = partial(option, group="Network")
_limit = partial(option, group="Limits")
_log = partial(option, group="Logs")


#: What `otel` needs to be installed.
_OTEL = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")

# -- checks of several fields, or of what is inside one


def _check_host(config: Config) -> None:
    if not all(name.strip() for name in config.host.split(",")):
        raise ConfigError(f"host must be a name, an IP address or a path that ends in .sock, or "
                          f"several separated by commas, not {config.host!r}")  # fmt: skip


def _check_api_keys(config: Config) -> None:
    if not all(isinstance(key, str) and key.strip() for key in config.api_keys):
        raise ConfigError("api_keys holds a key that is empty or not text")


def _check_api_key_priority(config: Config) -> None:
    priorities, n_keys = config.api_key_priority, len(config.api_keys)
    if len(priorities) > n_keys or not all(
        isinstance(one, int) and 0 <= one <= 100 for one in priorities
    ):
        raise ConfigError(f"api_key_priority must be integers between 0 and 100, at most one for "
                          f"each of {n_keys} API keys, not {priorities!r}")  # fmt: skip


def _check_models_match(config: Config) -> None:
    if not {"exact", "case", "part"}.issuperset(config.models_match):
        raise ConfigError(f"models_match must be some of exact, case and part, "
                          f"not {','.join(config.models_match)!r}")  # fmt: skip


def _check_slot_save_path(config: Config) -> None:
    if config.slot_save_path is not None and not Path(config.slot_save_path).is_dir():
        raise ConfigError(f"slot_save_path is {config.slot_save_path!r}, which is not a directory")


def _check_certificate(config: Config) -> None:
    if (config.ssl_key_file is None) != (config.ssl_cert_file is None):
        raise ConfigError("ssl_key_file and ssl_cert_file must be given together")


def _check_ping_interval(config: Config) -> None:
    if 0 < config.sse_ping_interval < 0.1:
        raise ConfigError(f"sse_ping_interval must be at least 0.1, or 0 or -1 for no pings, "
                          f"not {config.sse_ping_interval}")  # fmt: skip


def _check_sleep(config: Config) -> None:
    if config.sleep_idle_seconds != -1 and config.sleep_idle_seconds <= 0:
        raise ConfigError(f"sleep_idle_seconds must be more than 0, or -1 for never, "
                          f"not {config.sleep_idle_seconds}")  # fmt: skip


def _check_api_prefix(config: Config) -> None:
    prefix = config.api_prefix
    if prefix and (prefix[0] != "/" or prefix[-1] == "/"):
        raise ConfigError(f"api_prefix is {prefix!r}, but must begin with / and not end with it")


def _check_ui_config(config: Config) -> None:
    if not isinstance(config.ui_settings, dict):
        raise ConfigError(f"ui_config must be a JSON object, not {config.ui_config!r}")


def _check_routes(config: Config) -> None:
    for name in ("predict_route", "health_route"):
        path = getattr(config, name)
        if path and not re.fullmatch(r"(/[\w.~:-]+)+", path):
            raise ConfigError(f"{name} must be a path such as /predict, not {path!r}")


def _check_otel(config: Config) -> None:
    if config.otel_content and not config.otel:
        raise ConfigError("otel_content needs otel")
    if config.otel and not all(map(_is_installed, _OTEL)):
        raise ConfigError("otel needs OpenTelemetry: install trioserve[otel]")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def _check_cors(config: Config) -> None:
    for name in ("cors_origins", "cors_methods", "cors_headers"):
        value = getattr(config, name)
        if not value.isascii() or not value.isprintable():
            raise ConfigError(f"{name} is {value!r}, which cannot be the value of a header")


# -- the fields; not formatted, because a field reads best as its names above its help
# fmt: off


@attrs.frozen(kw_only=True)
class Config(ToolsConfig):
    """A server and its model. The defaults serve the bundled model on this machine.

    Raises:
        ConfigError: a value cannot be used; the message names the field.
    """

    CHECKS = (
        *ToolsConfig.CHECKS, _check_host, _check_api_keys, _check_api_key_priority,
        _check_slot_save_path, _check_certificate, _check_api_prefix, _check_ui_config,
        _check_routes, _check_cors, _check_ping_interval, _check_models_match, _check_sleep,
        _check_otel,
    )

    # -- Models
    models_dir: str | None = _models(None, "--models-dir LLAMA_ARG_MODELS_DIR",
        help="directory of GGUF files to choose from, instead of one model; what belongs together "
        "is in a folder of its own")
    models_preset: str | None = _models(None, "--models-preset LLAMA_ARG_MODELS_PRESET",
        help="INI file with a section of flags for each model, and [*] for all of them")
    models_max: int = _models(4, "--models-max LLAMA_ARG_MODELS_MAX", min=0,
        help="number of models that are loaded at the same time; 0 = no limit")
    models_memory: int = _models(0, "--models-memory TRIOSERVE_MODELS_MEMORY", min=0,
        help="MiB of memory for all models that are loaded, by llama.cpp's estimate; 0 = no limit")
    models_autoload: bool = _models(True,
        "--models-autoload | --no-models-autoload LLAMA_ARG_MODELS_AUTOLOAD",
        help="load a model when a request names it")
    models_match: tuple[str, ...] = _models(("case", "part"),
        "--models-match TRIOSERVE_MODELS_MATCH",
        help="how a name in a request may differ from that of a model, separated by commas; case = "
        "in its case, part = by being a part of that name only, exact = not at all")
    models_default: str | None = _models(None, "--models-default TRIOSERVE_MODELS_DEFAULT",
        help="name of the model for requests that name none, or none that is there; without it, "
        "these are refused with status 400")

    # -- Server
    host: str = _server("127.0.0.1", "--host LLAMA_ARG_HOST",
        help="address to listen on, or the path of a Unix socket, which ends in .sock; several are "
        "separated by commas")
    port: int = _server(8080, "--port LLAMA_ARG_PORT", min=0, max=65535,
        help="port to listen on; 0 = any free port")
    api_keys: tuple[str, ...] = _server((), "--api-key LLAMA_API_KEY",
        help="API keys, separated by commas, one of which a client must send; by default no key is "
        "needed")
    api_key_weights: tuple[float, ...] = _server((), "--api-key-weights TRIOSERVE_API_KEY_WEIGHTS",
        help="relative share of the queue for each API key, in the same order; by default equal")
    api_key_priority: tuple[int, ...] = _server((), "--api-key-priority TRIOSERVE_API_KEY_PRIORITY",
        help="highest priority that each API key may ask for, in the same order; by default 0; "
        "without API keys, any client may ask for any priority")
    cache_sharing: str = _server("key", "--cache-sharing TRIOSERVE_CACHE_SHARING",
        choices=("key", "all"),
        help="who shares what the cache holds of prompts: key = requests with the same API key; "
        "all = all requests, so that a client can find out what others have sent. Without API keys "
        "all share")
    slots_endpoint: bool = _server(True, "--slots | --no-slots LLAMA_ARG_ENDPOINT_SLOTS",
        help="serve GET /slots")
    slot_save_path: str | None = _server(None, "--slot-save-path",
        help="directory for the files that POST /slots saves and restores; without it, both are "
        "refused")
    metrics_endpoint: bool = _server(False, "--metrics LLAMA_ARG_ENDPOINT_METRICS",
        help="serve GET /metrics, for Prometheus")
    props_endpoint: bool = _server(False, "--props LLAMA_ARG_ENDPOINT_PROPS",
        help="serve POST /props, which does not change anything yet")
    sleep_idle_seconds: float = _server(-1.0,
        "--sleep-idle-seconds TRIOSERVE_SLEEP_IDLE_SECONDS", min=-1,
        help="seconds without a request after which the model's memory is freed, until the next "
        "request loads it again; -1 = never. A request may have its own, in keep_alive")
    predict_route: str = _server("", "--predict-route TRIOSERVE_PREDICT_ROUTE",
        help="path of a route in the form of Google's Vertex AI, which takes several requests in "
        "one; with AIP_MODE=PREDICTION in the environment, AIP_PREDICT_ROUTE or /predict")
    health_route: str = _server("", "--health-route TRIOSERVE_HEALTH_ROUTE",
        help="another path for GET /health; with AIP_MODE=PREDICTION, AIP_HEALTH_ROUTE")
    sse_ping_interval: float = _server(30.0,
        "--sse-ping-interval LLAMA_ARG_SSE_PING_INTERVAL", min=-1,
        help="seconds of silence after which a stream sends a comment as a ping, at least 0.1; "
        "-1 = never")

    # -- Network
    ssl_key_file: str | None = _network(None, "--ssl-key-file LLAMA_ARG_SSL_KEY_FILE",
        help="PEM file with the private key, for HTTPS")
    ssl_cert_file: str | None = _network(None, "--ssl-cert-file LLAMA_ARG_SSL_CERT_FILE",
        help="PEM file with the certificate, for HTTPS")
    reuse_port: bool = _network(False, "--reuse-port LLAMA_ARG_REUSE_PORT",
        help="allow several servers to listen on the same port")
    api_prefix: str = _network("", "--api-prefix LLAMA_ARG_API_PREFIX",
        help="path in front of all routes, such as /llm")
    static_path: str | None = _network(None, "--path LLAMA_ARG_STATIC_PATH",
        help="directory of files to serve instead of the built-in page")
    ui: bool = _network(True, "--ui --webui | --no-ui --no-webui LLAMA_ARG_UI",
        help="serve the built-in page at /")
    ui_config: str | None = _network(None, "--ui-config --webui-config LLAMA_ARG_UI_CONFIG",
        help="JSON object with defaults for the settings of the page")
    cors_origins: str = _network("localhost", "--cors-origins LLAMA_ARG_CORS_ORIGINS",
        help="origins whose pages may use the API, separated by commas; localhost = those on this "
        "machine, * = all (llama-server's default)")
    cors_methods: str = _network("GET, POST, DELETE, OPTIONS",
        "--cors-methods LLAMA_ARG_CORS_METHODS",
        help="methods that pages of other origins may use")
    cors_headers: str = _network(
        # The star is for those that SDKs add by themselves. It does not stand for the first.
        "Authorization, Content-Type, Last-Event-ID, Prefer, X-Api-Key, X-Conversation-Id, "
        "X-Request-Id, X-Request-Timeout, *",
        "--cors-headers LLAMA_ARG_CORS_HEADERS",
        help="headers that pages of other origins may send; * = any")
    cors_credentials: bool = _network(False,
        "--cors-credentials | --no-cors-credentials LLAMA_ARG_CORS_CREDENTIALS",
        help="let pages of other origins send credentials")
    allowed_hosts: tuple[str, ...] = _network((), "--allowed-hosts TRIOSERVE_ALLOWED_HOSTS",
        help="names, separated by commas, that a server without API keys answers to on a loopback "
        "address, beside localhost; .example.org = all names below it; * = any name")

    # -- Limits
    timeout: float = _limit(60.0, "-to --timeout LLAMA_ARG_TIMEOUT", min=0.001,
        help="seconds that a client has to send the body of a request; for reading the response, "
        "see --stall-timeout")
    max_queue: int = _limit(1024, "--max-queue TRIOSERVE_MAX_QUEUE", min=0,
        help="maximum number of requests that wait for a slot; more are refused with status 429")
    max_queue_per_key: int = _limit(0, "--max-queue-per-key TRIOSERVE_MAX_QUEUE_PER_KEY", min=0,
        help="how many of them may be of the same API key; 0 = an equal share of --max-queue, at "
        "least 1")
    max_queue_tokens: int = _limit(0, "--max-queue-tokens TRIOSERVE_MAX_QUEUE_TOKENS", min=0,
        help="maximum number of prompt tokens in all waiting requests together, of which each API "
        "key has the same share as of --max-queue; 0 = no limit")
    rate_limit_requests: int = _limit(0, "--rate-limit-requests TRIOSERVE_RATE_LIMIT_REQUESTS",
        min=0, help="requests a minute for each API key, or without keys for each address; "
        "0 = no limit")
    rate_limit_tokens: int = _limit(0, "--rate-limit-tokens TRIOSERVE_RATE_LIMIT_TOKENS", min=0,
        help="tokens a minute, of prompts and outputs, for each API key, or without keys for each "
        "address; 0 = no limit")
    max_logprobs: int = _limit(20, "--max-logprobs TRIOSERVE_MAX_LOGPROBS", min=1, max=1024,
        help="maximum number of candidates that logprobs and top_logprobs ask for, for each token; "
        "n_probs of llama-server's own routes may be 1024 in any case")
    drain_timeout: float = _limit(30.0, "--drain-timeout TRIOSERVE_DRAIN_TIMEOUT", min=0,
        help="seconds that running requests have to finish after SIGTERM")
    unread_tokens: int = _limit(256,
        "--unread-tokens TRIOSERVE_UNREAD_TOKENS", min=1, max=2**20,
        help="number of tokens that a client may leave unread before its request is paused, and "
        "its slot free for others")
    stall_timeout: float = _limit(30.0, "--stall-timeout TRIOSERVE_STALL_TIMEOUT", min=0.001,
        help="seconds that a request may stay paused before it is cancelled")
    keep_alive_timeout: float = _limit(75.0,
        "--keep-alive-timeout TRIOSERVE_KEEP_ALIVE_TIMEOUT", min=0.001,
        help="seconds after which an idle connection is closed")
    watchdog_timeout: float = _limit(120.0,
        "--watchdog-timeout TRIOSERVE_WATCHDOG_TIMEOUT", min=0,
        help="seconds that a step of the engine may take before /health/live answers with status "
        "503; 0 = no limit")
    on_engine_failure: str = _limit("exit", "--on-engine-failure TRIOSERVE_ON_ENGINE_FAILURE",
        choices=("exit", "stay"),
        help="what to do when an exception has broken the engine; exit = end the process with exit "
        "code 1, stay = go on answering with errors")
    max_connections: int = _limit(0, "--max-connections TRIOSERVE_MAX_CONNECTIONS", min=0,
        help="connections that may be open; further ones get status 503; 0 = the limit of "
        "descriptors, less 64 for files")
    max_body_size: int = _limit(100 * 2**20, "--max-body-size TRIOSERVE_MAX_BODY_SIZE", min=1,
        help="maximum size of a request body in bytes; images and sound in it are in base64, "
        "which takes a third more")
    max_request_memory: int = _limit(512 * 2**20,
        "--max-request-memory TRIOSERVE_MAX_REQUEST_MEMORY", min=2**20,
        help="bytes that all requests together may hold, by estimate: bodies, what is made of "
        "them, and prompts; more are refused with status 503")

    stream_sessions: int = _limit(512, "--stream-sessions TRIOSERVE_STREAM_SESSIONS", min=1,
        help="streams that may be resumed, running or finished; beyond that the one that finished "
        "first is forgotten, or if none has, a new one is refused with status 429. Of several API "
        "keys, one has half of them at most")
    stream_bytes: int = _limit(4 * 2**20, "--stream-bytes TRIOSERVE_STREAM_BYTES", min=2**12,
        help="bytes that are kept of each such stream: its newest events")
    stream_total_bytes: int = _limit(256 * 2**20,
        "--stream-total-bytes TRIOSERVE_STREAM_TOTAL_BYTES", min=2**12,
        help="bytes that are kept of all such streams together")
    stream_keep_seconds: float = _limit(300.0,
        "--stream-keep-seconds TRIOSERVE_STREAM_KEEP_SECONDS", min=1,
        help="seconds after its end in which such a stream can still be read")

    # -- Logs
    log_format: str = _log("auto", "--log-format TRIOSERVE_LOG_FORMAT",
        choices=("auto", "pretty", "json"),
        help="format of log lines; auto = pretty on a terminal, JSON otherwise")
    log_level: str = _log("info", "--log-level TRIOSERVE_LOG_LEVEL",
        choices=("debug", "info", "warning", "error", "off"),
        help="lowest level to log; off = log nothing")
    log_file: str | None = _log(None, "--log-file LLAMA_ARG_LOG_FILE",
        help="file that log lines are appended to as well, as JSON")
    log_prompts_dir: str | None = _log(None, "--log-prompts-dir",
        help="directory in which each prompt is kept as a file of its own, for debugging")
    log_colors: str = _log("auto", "--log-colors LLAMA_ARG_LOG_COLORS",
        choices=("auto", "on", "off"),
        help="whether pretty log lines have colors; auto = on a terminal")
    log_prefix: bool = _log(True, "--log-prefix | --no-log-prefix LLAMA_ARG_LOG_PREFIX",
        help="begin each log line with its level and source")
    log_timestamps: bool = _log(True,
        "--log-timestamps | --no-log-timestamps LLAMA_ARG_LOG_TIMESTAMPS",
        help="begin each log line with its time")
    otel: bool = _log(False, "--otel | --no-otel TRIOSERVE_OTEL",
        help="send traces and metrics by OpenTelemetry, to where OTEL_EXPORTER_OTLP_ENDPOINT and "
        "the other variables of OpenTelemetry say")
    otel_content: bool = _log(False, "--otel-content | --no-otel-content TRIOSERVE_OTEL_CONTENT",
        help="with --otel, have prompts and outputs in the traces; anyone who can read these reads "
        "what people wrote")
    # fmt: on

    @property
    def ui_settings(self) -> dict[str, Any]:
        """The defaults that `ui_config` has for the settings of the page."""
        settings: dict[str, Any] = parse_json(self.ui_config or "{}", "ui_config")
        return settings
