"""A configuration written as a command line."""

from __future__ import annotations

import pytest

from trioserve.config import Config
from trioserve.config.flags import FLAGS
from trioserve.config.parse import argv_of, parse
from trioserve.errors import ConfigError
from trioserve.types import SamplingParams


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
