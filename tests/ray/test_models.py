import pytest

from trioserve.config import Config
from trioserve.errors import ConfigError
from trioserve.ray.models import Model, Served, read_models


def read(models, settings=(), environ=None, **options) -> tuple[Served, ...]:
    options = {"replicas": 1, "autoscaling": None, **options}
    return read_models(models, settings, environ or {}, **options)


@pytest.mark.parametrize(
    "settings",
    [
        Config(model="m.gguf", ctx_size=2048, ui=False),
        ["-m", "m.gguf", "-c", "2048", "--no-ui"],
        {"model": "m.gguf", "ctx-size": 2048, "ui": False},
    ],
    ids=["config", "flags", "mapping"],
)
def test_a_model_can_be_described_in_three_ways(settings) -> None:
    (served,) = read({"qwen": settings})
    assert (served.name, served.deployment_name) == ("qwen", "model-qwen")
    config = served.config
    assert (config.model, config.ctx_size, config.ui) == ("m.gguf", 2048, False)
    assert config.aliases == ("qwen",)


def test_what_a_model_says_wins_over_what_is_set_for_all_and_that_over_variables() -> None:
    first, second = read(
        {"a": {"ctx-size": 1024}, "b": []},
        ["--ctx-size", "2048", "--parallel", "3"],
        {"LLAMA_ARG_CTX_SIZE": "4096", "LLAMA_ARG_THREADS": "2"},
    )
    assert (first.config.ctx_size, second.config.ctx_size) == (1024, 2048)
    assert (first.config.parallel, first.config.threads) == (3, 2)


def test_a_list_in_a_mapping_is_as_many_flags() -> None:
    (served,) = read({"a": {"lora": ["one.gguf", "two.gguf"]}})
    assert served.config.lora == ("one.gguf", "two.gguf")


def test_numbers_of_replicas() -> None:
    one, two, three = read(
        {
            "one": {"replicas": 3},
            "two": Model(settings=[], autoscaling={"max_replicas": 4}),
            "three": [],
        },
        replicas=2,
    )
    assert (one.replicas, one.autoscaling) == (3, None)
    assert two.autoscaling == {"max_replicas": 4}
    assert (three.replicas, three.autoscaling) == (2, None)


def test_a_number_of_replicas_wins_over_scaling_for_all() -> None:
    one, two = read({"one": {"replicas": 3}, "two": []}, autoscaling={"max_replicas": 4})
    assert one.autoscaling is None
    assert two.autoscaling == {"max_replicas": 4}


def test_the_cores_that_ray_counts_are_the_threads_unless_it_is_said() -> None:
    deployment = {"ray_actor_options": {"num_cpus": 3}}
    one, two = read(
        {"one": {"deployment": deployment}, "two": {"deployment": deployment, "threads": 1}}
    )
    assert (one.config.threads, two.config.threads) == (3, 1)


def test_keys_are_those_of_all_models() -> None:
    first, second = read({"a": [], "b": []}, environ={"LLAMA_API_KEY": "k1,k2"})
    assert first.config.api_keys == second.config.api_keys == ("k1", "k2")


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({}, "nothing to serve"),
        ({"": []}, "name of a model"),
        ({"a,b": []}, "name of a model"),
        ({"a": "m.gguf"}, "a must be a Config"),
        ({"a": 3}, "a must be a Config"),
        ({"a": ["--nonsense"]}, "a: --nonsense is not a flag"),
        ({"a": {"nonsense": 1}}, "a: nonsense is not a flag"),
        ({"a": {"ctx-size": "many"}}, "a: ctx-size"),
        ({"a": ["--port", "80"]}, "port has no meaning"),
        ({"a": Config(host="0.0.0.0")}, "host has no meaning"),
        ({"a": {"models-dir": "/m"}}, "models_dir has no meaning"),
        ({"a": ["--help"]}, "does not say how to serve"),
        ({"a": {"replicas": 0}}, "replicas must be an integer"),
        ({"a": {"replicas": "2"}}, "replicas must be an integer"),
        ({"a": {"deployment": 2}}, "deployment must be a mapping"),
        ({"a": {"replicas": 1, "autoscaling": {}}}, "cannot be given together"),
        ({"a": ["--alias", "b"], "b": []}, "'b' is a name of two models"),
        ({"x/y": [], "x#y": []}, "too much alike"),
        ({"a": ["--api-key", "k"], "b": []}, "api_keys must be the same"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(models, message) -> None:
    with pytest.raises(ConfigError, match=message):
        read(models)
