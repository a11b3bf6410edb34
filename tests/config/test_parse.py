"""The command line, read into a `Config`, and a `Config` written as one."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import pytest

from tests.support.configs import read, refused
from trioserve.config import Config
from trioserve.config.flags import FLAGS
from trioserve.config.parse import ACTIONS, argv_of, parse
from trioserve.errors import ConfigError
from trioserve.types import DEFAULT_SAMPLERS, SamplingParams


def test_nothing_gives_the_defaults() -> None:
    assert read() == Config()


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["-m", "a.gguf"], "model", "a.gguf"),
        (["--store-size", "9" * 5000], "store_size", 2**63 - 1),
        (["--ctx-size=4096"], "ctx_size", 4096),
        (["--ctx_size", "4096"], "ctx_size", 4096),
        (["-np", "-1"], "parallel", 4),
        (["-ngl", "all"], "n_gpu_layers", -2),
        (["-fa", "on"], "flash_attn", "on"),
        (["-fa", "0"], "flash_attn", "off"),
        (["-no-kvu"], "kv_unified", False),
        (["--no-cache-prompt"], "cache_prompt", False),
        (["--check-tensors"], "check_tensors", True),
        (["-n", "-1"], "n_predict", -1),
        (["--api-key", "one, two,"], "api_keys", ("one", "two")),
        (["--api-key", "one", "--api-key", "two"], "api_keys", ("one", "two")),
        (["--api-key", "-starts-with-a-dash"], "api_keys", ("-starts-with-a-dash",)),
        (["--host", "127.0.0.1,::1"], "host", "127.0.0.1,::1"),
        (["--override-kv", 'a=int:1,"b=str:x,y"'], "override_kv", ("a=int:1", "b=str:x,y")),
        (["-ts", "3,1/2"], "tensor_split", (3.0, 1.0, 2.0)),
        (["-cram", "-1"], "cache_ram", 2**40),
        (["--tags", "a, b"], "tags", ("a", "b")),
        (["--rope-scale", "4"], "rope_freq_scale", 0.25),
        (["-r", r"a\n\x41\\n", "-r", "b"], "stop", ("a\nA\\n", "b")),
        (["--keep", "-1"], "n_keep", -1),
        (["--api-prefix", "/llm/"], "api_prefix", "/llm"),
        (["--log-disable"], "log_level", "off"),
        (["--drain-timeout", "0.5"], "drain_timeout", 0.5),
        (["--log-jsonl"], "log_format", "json"),
        (["-v"], "log_level", "debug"),
        (["-lv", "0"], "log_level", "error"),
        (["-lv", "9"], "log_level", "debug"),
    ],
)
def test_a_flag_sets_its_field(argv: list[str], field: str, value: object) -> None:
    assert read(*argv) == attrs.evolve(Config(), **{field: value})


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--temp", "-0.5"], "temperature", -0.5),
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
    assert refused("--reasoning-budget", "-2").startswith("--reasoning-budget must be")


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
        (["--port", "70000"], "--port must be at most 65535, not 70000"),
        (["--port", "x"], "--port: 'x' is not an integer"),
        (["--port", "1.5"], "--port: '1.5' is not an integer"),
        (["-np", "0"], "-np must be at least 1, not 0"),
        (["--drain-timeout", "x"], "--drain-timeout: 'x' is not a number"),
        (["--drain-timeout", "nan"], "--drain-timeout must be finite, not nan"),
        (["--port"], "--port needs a value"),
        (["--slots=1"], "--slots takes no value"),
        (["model.gguf"], "'model.gguf' is not a flag; name a model with -m"),
        (["-lm", "x"], "-lm must be one of auto, none, mmap"),
        (["--top-k", "1e3"], "--top-k: '1e3' is not an integer"),
        (["--top-p", "-1"], "--top-p must be at least 0.0"),
        (["--samplers", "magic"], "--samplers holds 'magic'"),
        (["--sampler-seq", "kq"], "--sampler-seq: 'q' is not a sampler"),
        (["-l", "x+1"], "-l: 'x+1' must be a token id"),
        (["-l", "5+x"], "-l: '+x' is not a number"),
        (["-lv", "x"], "-lv: 'x' is not an integer"),
        (["-a", ", ,"], "-a must be a name, or several separated by commas, not ', ,'"),
        (["--host", "::1,"], "--host must be a name, an IP address or a path"),
        (["--override-kv", "a=int:x"], "--override-kv: a must be of type int, not 'x'"),
        (["--override-kv", "a=b"], "--override-kv must be KEY=TYPE:VALUE with the type"),
        (["--override-kv", "a=bool:1"], "--override-kv: a must be true or false, not '1'"),
        (["--override-kv", f"a=str:{'x' * 200}"], "--override-kv: the key and the value of 'a'"),
        (["--override-kv", '"a"b'], "--override-kv: '\"a\"b' cannot be read"),
        (["-ot", "blk"], "-ot must be PATTERN=BUFFER, not 'blk'"),
        (["--rope-scale", "0"], "--rope-scale: '0' must be greater than 0"),
        (["-ts", "1,x"], "-ts: 'x' is not a number"),
        (
            ["--ssl-key-file", "key.pem"],
            "--ssl-key-file and --ssl-cert-file must be given together",
        ),
        (["--media-path", "/no/such"], "--media-path is '/no/such', which is not a"),
        (
            ["--image-min-tokens", "9", "--image-max-tokens", "4"],
            "--image-min-tokens must be at most",
        ),
        (["--mmproj", "p.gguf", "--reranking"], "--mmproj has no effect on reranking"),
        (["--media-max-bytes", "0"], "--media-max-bytes must be at least 1"),
        (["--zzzzzzzzzz"], "--zzzzzzzzzz is not a flag of trioserve; see trioserve --help-all"),
        (["--prot"], "--prot is not a flag of trioserve; did you mean --port?"),
        (["--flash-atn"], "--flash-atn is not a flag of trioserve; did you mean --flash-attn?"),
        (["--api-prefix", "llm"], "--api-prefix is 'llm', but must begin with /"),
        (["--cors-origins", "a\nb"], "--cors-origins is 'a\\nb', which cannot be the value of a"),
        (["-j", "{"], "-j is not valid JSON"),
        (["-j", "{}", "--grammar", "root ::= x"], "--grammar and -j cannot be used"),
        (["--config"], "--config needs a value"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs must be a JSON object"),
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs is not valid JSON"),
        (["--reasoning", "maybe"], "--reasoning must be one of on, off, auto, not"),
        (["--threads-http"], "--threads-http needs a value"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_flag(argv: list[str], message: str) -> None:
    assert refused(*argv).startswith(message)


def test_the_words_make_the_same_command_line_again() -> None:
    argv = ["-c", "512", "--lora=a", "--lora", "b,c", "-nr", "--jinja", "--keep", "1"]
    argv += ["--keep", "2", "--control-vector-layer-range", "2", "5", "--config", "/dev/null"]
    parsed = parse(argv, {})
    assert parsed.options == {
        "ctx_size": ("--ctx-size", "512"),
        "lora": ("--lora", "a", "--lora", "b,c"),
        "repack": ("--no-repack",),
        "jinja": ("--jinja",),
        "n_keep": ("--keep", "2"),
        "control_vector_layer_range": ("--control-vector-layer-range", "2,5"),
    }
    assert parsed.file == "/dev/null"
    again = [word for words in parsed.options.values() for word in words]
    assert parse(again, {}).config == parsed.config


def test_what_is_for_many_models_has_no_effect_on_one() -> None:
    environ = {"LLAMA_ARG_MODELS_MAX": "2"}
    assert parse(["--models-dir", "m"], environ).notes == ()
    assert parse(["-m", "x.gguf", "--models-dir", "m"], environ).notes == (
        "--models-max has no effect: x.gguf is the only model",
        "--models-dir has no effect: x.gguf is the only model",
    )


def test_a_flag_given_twice_is_noted() -> None:
    parsed = parse(["--port", "1", "--port", "2"], {})
    assert parsed.config.port == 2
    assert parsed.notes == ("--port is given more than once: the last one counts",)


@pytest.mark.parametrize(("flag", "action"), ACTIONS.items())
def test_some_flags_are_not_for_serving(flag: str, action: str) -> None:
    assert parse([flag], {}).action == action


def test_a_configuration_comes_back_from_its_words() -> None:
    config = Config(
        model="a model.gguf",
        ctx_size=4096,
        ui=False,
        api_keys=("one", 'two "2"'),
        lora=("a.gguf", "b, c.gguf"),
        cors_origins="https://a.example, https://b.example",
        sampling=SamplingParams(
            temperature=0.25,
            samplers=("top_k", "temperature"),
            dry_sequence_breakers=("a\n", "b,\\c"),
            logit_bias=((5, -1.5), (7, 2.0)),
        ),
    )
    assert parse(argv_of(config), {}).config == config


def test_the_defaults_need_no_words() -> None:
    assert argv_of(Config()) == ()


def test_every_switch_can_be_written() -> None:
    n_written = 0
    for flag in FLAGS:
        for name in (flag.names[-1], *flag.negative[-1:]):
            if flag.read is not None or flag.sets:
                continue
            try:
                config = parse([name], {}).config
            except ConfigError:
                continue  # it needs others, such as a draft model
            assert parse(argv_of(config), {}).config == config, name
            n_written += 1
    assert n_written > 40


def test_what_no_flag_sets_is_refused() -> None:
    with pytest.raises(ConfigError, match="api_keys"):
        argv_of(Config(api_keys=("one,two",)))
