"""The command line and the environment, read into a `Config`."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest
from hypothesis import given, strategies as st

from trioserve.cli.help import completion_text, help_text
from trioserve.config import Config, foreign
from trioserve.config.parse import ACTIONS, config_from, from_environment, parse
from trioserve.config.table import (
    BY_NAME,
    FALSE_WORDS,
    FLAGS,
    GROUPS,
    SAMPLING,
    TRUE_WORDS,
    Flag,
)
from trioserve.errors import ConfigError
from trioserve.types import DEFAULT_SAMPLERS, SamplingParams


def read(*argv: str, **environ: str) -> Config:
    return config_from(argv, environ)


def refused(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from(argv, environ)
    return caught.value.message


# -- flags


def test_nothing_gives_the_defaults() -> None:
    assert read() == Config()


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["-m", "a.gguf"], "model", "a.gguf"),
        (["--model", "a.gguf"], "model", "a.gguf"),
        (["-c", "4096"], "ctx_size", 4096),
        (["--ctx-size=4096"], "ctx_size", 4096),
        (["--ctx_size", "4096"], "ctx_size", 4096),
        (["-np", "8"], "parallel", 8),
        (["-np", "-1"], "parallel", 4),
        (["-t", "3"], "threads", 3),
        (["-tb", "3"], "threads_batch", 3),
        (["-b", "64"], "batch_size", 64),
        (["-ub", "32"], "ubatch_size", 32),
        (["-ngl", "99"], "n_gpu_layers", 99),
        (["-ngl", "all"], "n_gpu_layers", -1),
        (["-ngl", "auto"], "n_gpu_layers", -1),
        (["-fa", "on"], "flash_attn", "on"),
        (["-fa", "0"], "flash_attn", "off"),
        (["-kvu"], "kv_unified", True),
        (["-no-kvu"], "kv_unified", False),
        (["--no-kv-unified"], "kv_unified", False),
        (["--no-cache-prompt"], "cache_prompt", False),
        (["--check-tensors"], "check_tensors", True),
        (["-n", "-1"], "n_predict", -1),
        (["--host", "0.0.0.0"], "host", "0.0.0.0"),
        (["--port", "0"], "port", 0),
        (["-a", "name"], "alias", "name"),
        (["--api-key", "one, two,"], "api_keys", ("one", "two")),
        (["--api-key", "one", "--api-key", "two"], "api_keys", ("one", "two")),
        (["--api-key", "-starts-with-a-dash"], "api_keys", ("-starts-with-a-dash",)),
        (["--no-slots"], "slots_endpoint", False),
        (["--host", "127.0.0.1,::1"], "host", "127.0.0.1,::1"),
        (["--override-kv", 'a=int:1,"b=str:x,y"'], "override_kv", ("a=int:1", "b=str:x,y")),
        (["-ts", "3,1/2"], "tensor_split", (3.0, 1.0, 2.0)),
        (["-nkvo"], "kv_offload", False),
        (["-nr"], "repack", False),
        (["--no-host"], "no_host", True),
        (["-cram", "-1"], "cache_ram", 2**40),
        (["--tags", "a, b"], "tags", ("a", "b")),
        (["--skip-chat-parsing"], "skip_chat_parsing", True),
        (["--rope-scale", "4"], "rope_freq_scale", 0.25),
        (["-r", r"a\n\x41\\n", "-r", "b"], "stop", ("a\nA\\n", "b")),
        (["--keep", "-1"], "n_keep", -1),
        (["--api-prefix", "/llm/"], "api_prefix", "/llm"),
        (["--no-webui"], "ui", False),
        (["--log-disable"], "log_level", "off"),
        (["--no-log-prefix"], "log_prefix", False),
        (["--drain-timeout", "0.5"], "drain_timeout", 0.5),
        (["--log-jsonl"], "log_format", "json"),
        (["-v"], "log_level", "debug"),
        (["-lv", "0"], "log_level", "error"),
        (["-lv", "2"], "log_level", "warning"),
        (["-lv", "3"], "log_level", "info"),
        (["-lv", "9"], "log_level", "debug"),
    ],
)
def test_a_flag_sets_its_field(argv: list[str], field: str, value: object) -> None:
    assert read(*argv) == attrs.evolve(Config(), **{field: value})


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--temp", "-0.5"], "temperature", -0.5),
        (["--temperature", "1"], "temperature", 1.0),
        (["-s", "7"], "seed", 7),
        (["--top-k", "5"], "top_k", 5),
        (["--typical", "0.5"], "typical_p", 0.5),
        (["--mirostat-ent", "2"], "mirostat_tau", 2.0),
        (["--ignore-eos"], "ignore_eos", True),
        (["--samplers", "top_k;temperature"], "samplers", ("top_k", "temperature")),
        (["--samplers", "top-k; min-p"], "samplers", ("top_k", "min_p")),
        (["--sampler-seq", "edskypmxt"], "samplers", DEFAULT_SAMPLERS),
        (["--dry-sequence-breaker", "."], "dry_sequence_breakers", (".",)),
        (["--dry-sequence-breaker", "none"], "dry_sequence_breakers", ()),
        (["-l", "15043+1"], "logit_bias", ((15043, 1.0),)),
        (["-l", "3-inf", "-l", "4-0.5"], "logit_bias", ((3, -math.inf), (4, -0.5))),
    ],
)
def test_a_flag_sets_its_sampling_field(argv: list[str], field: str, value: object) -> None:
    assert read(*argv) == Config(sampling=attrs.evolve(SamplingParams(), **{field: value}))


@pytest.mark.parametrize(
    ("argv", "variables"),
    [
        ([], {"preserve_reasoning": True}),
        (["--reasoning", "enabled"], {"enable_thinking": True, "preserve_reasoning": True}),
        (["-rea", "0"], {"enable_thinking": False, "preserve_reasoning": True}),
        (["-rea", "-1", "--no-reasoning-preserve"], {"preserve_reasoning": False}),
        (["--reasoning-effort", "low"], {"reasoning_effort": "low", "preserve_reasoning": True}),
        (
            ["--chat-template-kwargs", '{"enable_thinking": true, "x": [1]}', "--reasoning", "off"],
            {"enable_thinking": True, "preserve_reasoning": True, "x": [1]},
        ),
    ],
)
def test_what_the_template_is_told(argv: list[str], variables: dict[str, object]) -> None:
    assert read(*argv).template_variables == variables


def test_how_long_a_model_may_think() -> None:
    config = read("--reasoning-budget", "0", "--reasoning-budget-message", "So.")
    assert (config.reasoning_budget, config.reasoning_budget_message) == (0, "So.")
    assert read(LLAMA_ARG_THINK="none", LLAMA_ARG_THINK_BUDGET="-1").reasoning_format == "none"
    assert not read("--no-prefill-assistant").prefill_assistant
    assert refused("--reasoning-budget", "-2").startswith("--reasoning-budget: ")


def test_keys_and_templates_come_from_files(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\nalpha\n beta \n", encoding="utf-8")
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}", encoding="utf-8")
    config = read("--api-key-file", str(keys), "--chat-template-file", str(template))
    assert config.api_keys == ("alpha", "beta")
    assert config.chat_template == "{{ messages }}"
    assert refused("--api-key-file", str(tmp_path / "no")).startswith("--api-key-file: ")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refused("--api-key-file", str(tmp_path / "bytes"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "70000"], "--port: port must be at most 65535, not 70000"),
        (["--port", "x"], "--port: 'x' is not an integer"),
        (["--port", "1.5"], "--port: '1.5' is not an integer"),
        (["-np", "0"], "-np: parallel must be at least 1, not 0"),
        (["--drain-timeout", "x"], "--drain-timeout: 'x' is not a number"),
        (["--drain-timeout", "nan"], "--drain-timeout: drain_timeout must be finite, not nan"),
        (["--port"], "--port needs a value"),
        (["--slots=1"], "--slots takes no value"),
        (["model.gguf"], "'model.gguf' is not a flag; name a model with -m"),
        (["-lm", "x"], "-lm: load_mode must be one of auto, none, mmap"),
        (["--top-k", "1e3"], "--top-k: '1e3' is not an integer"),
        (["--top-p", "-1"], "--top-p: 'top_p' must be at least 0.0"),
        (["--samplers", "magic"], "--samplers: 'samplers' holds 'magic'"),
        (["--sampler-seq", "kq"], "--sampler-seq: 'q' is not a sampler"),
        (["-l", "x+1"], "-l: 'x+1' must be a token id"),
        (["-l", "5+x"], "-l: '+x' is not a number"),
        (["-lv", "x"], "-lv: 'x' is not an integer"),
        (["-a", ", ,"], "alias must be a name, or several separated by commas, not ', ,'"),
        (["--host", "::1,"], "host must be a name, an IP address or a path"),
        (["--override-kv", "a=int:x"], "override_kv: a must be of type int, not 'x'"),
        (["--override-kv", "a=b"], "override_kv must be KEY=TYPE:VALUE with the type"),
        (["--override-kv", "a=bool:1"], "override_kv: a must be true or false, not '1'"),
        (["--override-kv", f"a=str:{'x' * 200}"], "override_kv: the key and the value of 'a' must"),
        (["--override-kv", '"a"b'], "--override-kv: '\"a\"b' cannot be read"),
        (["-ot", "blk"], "override_tensor must be PATTERN=BUFFER, not 'blk'"),
        (["--rope-scale", "0"], "--rope-scale: '0' must be greater than 0"),
        (["-ts", "1,x"], "-ts: 'x' is not a number"),
        (["--ssl-key-file", "key.pem"], "ssl_key_file and ssl_cert_file must be given together"),
        (["--api-prefix", "llm"], "api_prefix is 'llm', but must begin with /"),
        (["--cors-origins", "a\nb"], "cors_origins is 'a\\nb', which cannot be the value of a"),
        (["-j", "{"], "json_schema is not valid JSON"),
        (["-j", "{}", "--grammar", "root ::= x"], "grammar and json_schema cannot be used"),
        (["--config"], "--config needs a value"),
        (["--chat-template-kwargs", "[1]"], "chat_template_kwargs must be a JSON object"),
        (["--chat-template-kwargs", "{"], "chat_template_kwargs is not valid JSON"),
        (["--reasoning", "maybe"], "--reasoning: reasoning must be one of on, off, auto, not"),
        (["--threads-http"], "--threads-http needs a value"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_flag(argv: list[str], message: str) -> None:
    assert refused(*argv).startswith(message)


@pytest.mark.parametrize(
    ("flag", "near"),
    [("--prot", "--port"), ("--modle", "--model"), ("--flash-atn", "--flash-attn")],
)
def test_an_unknown_flag_gets_a_suggestion(flag: str, near: str) -> None:
    assert refused(flag) == f"{flag} is not a flag of trioserve; did you mean {near}?"


def test_an_unknown_flag_with_nothing_near_points_to_the_help() -> None:
    assert (
        refused("--zzzzzzzzzz") == "--zzzzzzzzzz is not a flag of trioserve; see trioserve --help"
    )


def test_a_flag_given_twice_is_noted() -> None:
    parsed = parse(["--port", "1", "--port", "2"], {})
    assert parsed.config.port == 2
    assert parsed.notes == ("--port is given more than once: the last one counts",)


@pytest.mark.parametrize(("flag", "action"), ACTIONS.items())
def test_some_flags_are_not_for_serving(flag: str, action: str) -> None:
    assert parse([flag], {}).action == action


# -- flags of llama-server that are not ours


@pytest.mark.parametrize("flag", ["-nocb", "--no-jinja", "--control-vector"])
def test_what_is_not_there_yet_is_refused(flag: str) -> None:
    wanted = f"{flag} is a flag of llama-server that trioserve does not have yet"
    assert refused(flag, "x") == wanted


def test_what_is_not_there_yet_is_refused_with_the_reason() -> None:
    assert refused("--mmproj", "x").endswith("does not have yet: only text is read")
    assert refused(LLAMA_ARG_MODELS_DIR="x").endswith("does not have yet: a server has one model")


@pytest.mark.parametrize("flag", sorted(foreign.NO_EFFECT))
def test_what_cannot_matter_is_noted(flag: str) -> None:
    value = ["2"] if flag in foreign.TAKES_VALUE else []
    parsed = parse([flag, *value, "--port", "1"], {})
    assert parsed.config == Config(port=1)
    assert parsed.notes == (f"{flag} has no effect: {foreign.NO_EFFECT[flag]}",)


def test_the_table_of_foreign_flags_is_sound() -> None:
    theirs = foreign.flags()
    own = {flag for one in FLAGS for flag in (*one.names, *one.negative)}
    assert len(theirs) == sum(len(one.names) + len(one.negative) for one in foreign.table())
    assert not set(theirs) & own
    assert set(theirs) >= set(foreign.NO_EFFECT)
    assert set(foreign.NO_EFFECT) >= foreign.TAKES_VALUE
    assert all(flag.startswith("-") for flag in theirs)
    assert not set(foreign.variables()) & {one.variable for one in FLAGS}


def test_a_note_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trioserve"):
        read("--jinja")
    assert caplog.messages == ["--jinja has no effect: chat templates are always run as Jinja"]


# -- variables


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"LLAMA_ARG_MODEL": "a.gguf"}, "model", "a.gguf"),
        ({"LLAMA_ARG_MODEL": ""}, "model", None),
        ({"LLAMA_ARG_PORT": "90"}, "port", 90),
        ({"LLAMA_API_KEY": "a,b"}, "api_keys", ("a", "b")),
        ({"LLAMA_ARG_ENDPOINT_SLOTS": "off"}, "slots_endpoint", False),
        ({"LLAMA_ARG_NO_CACHE_PROMPT": "true"}, "cache_prompt", False),
        ({"LLAMA_ARG_FLASH_ATTN": "enabled"}, "flash_attn", "on"),
        ({"LLAMA_ARG_LOG_JSONL": "1"}, "log_format", "json"),
        ({"TRIOSERVE_DRAIN_TIMEOUT": "3"}, "drain_timeout", 3.0),
        ({"HOME": "/", "LLAMA_CACHE": "/tmp"}, "port", 8080),
    ],
)
def test_a_variable_sets_its_field(environ: Mapping[str, str], field: str, value: object) -> None:
    assert from_environment(environ) == attrs.evolve(Config(), **{field: value})


def test_a_sampling_variable() -> None:
    assert read(LLAMA_ARG_TOP_K="3").sampling.top_k == 3


@pytest.mark.parametrize("word", sorted(TRUE_WORDS | FALSE_WORDS))
def test_the_words_for_on_and_off(word: str) -> None:
    assert read(LLAMA_ARG_KV_UNIFIED=word).kv_unified is (word in TRUE_WORDS)


def test_the_command_line_wins() -> None:
    config = read("--port", "1", "--api-key", "mine", LLAMA_ARG_PORT="2", LLAMA_API_KEY="theirs")
    assert (config.port, config.api_keys) == (1, ("mine",))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("LLAMA_ARG_PORT", "x", "LLAMA_ARG_PORT: 'x' is not an integer"),
        ("LLAMA_ARG_KV_UNIFIED", "maybe", "LLAMA_ARG_KV_UNIFIED must be true or false, not"),
        ("LLAMA_ARG_PROT", "1", "LLAMA_ARG_PROT is not a variable of trioserve; did you mean LLAM"),
        ("TRIOSERVE_QQQQ", "1", "TRIOSERVE_QQQQ is not a variable of trioserve"),
        ("LLAMA_ARG_JINJA", "0", "LLAMA_ARG_JINJA is a variable of llama-server that trioserve "),
        ("LLAMA_ARG_RPC", "1", "LLAMA_ARG_RPC is a variable of llama-server that trioserve doe"),
        ("LLAMA_ARG_NO_JINJA", "1", "LLAMA_ARG_NO_JINJA is a variable of llama-server that tri"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(name: str, text: str, message: str) -> None:
    assert refused(**{name: text}).startswith(message)


def test_variables_that_cannot_matter() -> None:
    environ = {
        "LLAMA_ARG_JINJA": "1",
        "LLAMA_ARG_MMPROJ_AUTO": "0",
        "LLAMA_ARG_NO_AGENT": "1",
        "LLAMA_ARG_BACKEND_SAMPLING": "0",  # says no to what is not there
    }
    parsed = parse((), environ)
    assert parsed.config == Config()
    assert [note.partition(" ")[0] for note in parsed.notes] == list(environ)[:3]


def test_where_to_listen_is_not_for_an_embedded_app(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trioserve"):
        from_environment({"LLAMA_ARG_PORT": "1"})
    assert caplog.messages == [
        "LLAMA_ARG_PORT has no effect here: it is for the program that opens the socket"
    ]


# -- the file


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "trioserve.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_sets_fields(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        # the same names as the flags
        ctx-size = 4096
        cache_prompt = false
        temp = 0.5
        samplers = "top_k;temperature"
        api-key = ["one", "two"]
        "log-level" = "debug"
        """,
    )
    assert read("--config", path) == Config(
        ctx_size=4096,
        cache_prompt=False,
        api_keys=("one", "two"),
        log_level="debug",
        sampling=SamplingParams(temperature=0.5, samplers=("top_k", "temperature")),
    )
    assert read(TRIOSERVE_CONFIG=path).ctx_size == 4096


def test_the_file_in_the_documentation_can_be_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    text = page.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    config = read("--config", written(tmp_path, text))
    assert (config.parallel, config.kv_unified) == (8, False)
    assert config.api_keys == ("first", "second")


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "port = 1\nparallel = 1\nthreads = 1\n")
    config = read(f"--config={path}", "-t", "3", LLAMA_ARG_THREADS="2", LLAMA_ARG_N_PARALLEL="2")
    assert (config.port, config.parallel, config.threads) == (1, 2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nprot = 1", ":2: prot is not a key of the configuration; did you mean port?"),
        ("[server]\nport = 1", ":1: server is not a key of the configuration"),
        ("port = [1]", ":1: port must be text or a number, not [1]"),
        ("port.x = 1", ":1: port must be text or a number, not a table"),
        ("port = 99999", ":1: port: port must be at most 65535, not 99999"),
        ("slots = 1", ":1: slots must be true or false, not 1"),
        ("no-slots = true", ":1: no-slots: write slots = true or slots = false instead"),
        ("mmproj = 'x'", ":1: mmproj is a flag of llama-server that trioserve does not have"),
        ("port = ", " is not valid TOML: Invalid value (at end of document)"),
    ],
)
def test_a_wrong_file_is_refused_by_the_place(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    assert refused("--config", path).startswith(path + message)


def test_what_cannot_matter_in_a_file_is_noted(tmp_path: Path) -> None:
    path = written(tmp_path, "jinja = true")
    (note,) = parse(["--config", path], {}).notes
    assert note == f"{path}:1: jinja has no effect: chat templates are always run as Jinja"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert refused("--config", str(tmp_path / "no")).endswith("cannot be read: No such file or "
                                                              "directory")  # fmt: skip
    (tmp_path / "bytes").write_bytes(b"\xff")
    assert refused("--config", str(tmp_path / "bytes")).endswith("cannot be read: not UTF-8")


# -- the table


def test_every_field_can_be_set() -> None:
    fields = {one.field for one in FLAGS}
    assert fields >= {field.name for field in attrs.fields(Config)} - {"sampling"}
    assert fields >= {f"sampling.{name}" for name in SAMPLING}


def test_no_flag_and_no_variable_is_there_twice() -> None:
    flags = [flag for one in FLAGS for flag in (*one.names, *one.negative)]
    variables = [one.variable for one in FLAGS if one.variable]
    assert len(flags) == len(set(flags))
    assert len(variables) == len(set(variables))


_WORDS = st.sampled_from([*BY_NAME, *sorted(foreign.flags()), "-", "--", "=", "4"])


@given(st.lists(_WORDS | st.text(max_size=8), max_size=6))
def test_any_command_line_gives_a_config_or_an_error(argv: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse(argv, {}).config, Config)


@given(st.sampled_from([one for one in FLAGS if one.variable]), st.text(max_size=12))
def test_any_variable_gives_a_config_or_an_error(flag: Flag, text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse((), {flag.variable or "": text}).config, Config)


# -- the class itself


@pytest.mark.parametrize(
    "fields",
    [
        {"port": "80"},
        {"port": True},
        {"slots_endpoint": 1},
        {"model": 3},
        {"api_keys": "one"},
        {"api_keys": ("",)},
        {"drain_timeout": math.inf},
        {"log_level": "loud"},
        {"host": ""},
        {"alias": " "},
    ],
)
def test_a_config_refuses_what_it_cannot_use(fields: Mapping[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Config(**fields)  # type: ignore[arg-type]


def test_help_has_every_flag() -> None:
    text = help_text(100)
    for one in FLAGS:
        assert one.group in GROUPS
        for flag in one.names:
            assert f" {flag}" in text
    assert "--config FILE" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_completion_has_every_flag() -> None:
    words = completion_text().split("'")[1].split()
    assert set(words) >= {flag for one in FLAGS for flag in (*one.names, *one.negative)}
    assert {"--help", "--config"} <= set(words)


def test_every_flag_of_llama_server_is_known_once() -> None:
    own = {flag for one in FLAGS for flag in (*one.names, *one.negative)}
    known = [*own, *ACTIONS, *foreign.flags()]
    assert len(known) == len(set(known))
