"""Names of models: the one that a request means."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from trioserve.config import Config
from trioserve.config.keys import Key
from trioserve.errors import AmbiguousModelError, UnknownModelError
from trioserve.models.catalog import Catalog, ModelEntry, Source, find_for
from trioserve.models.catalog.catalog import find_named
from trioserve.models.catalog.upstreams import Upstream

ALL = ("case", "part")


def entry(
    name: str, *aliases: str, source: Source = Source.CACHE, hidden: bool = False
) -> ModelEntry:
    return ModelEntry(
        name=name, source=source, args=(), path=Path("x"), aliases=aliases, hidden=hidden
    )


ENTRIES = {
    one.name: one
    for one in (
        entry("Qwen/Qwen3-4B-GGUF:Q4_K_M"),
        entry("Qwen/Qwen3-8B-GGUF:Q8_0"),
        entry("ggml-org/gemma-3-GGUF:Q2_K"),
        entry("ggml-org/gemma-3-GGUF:Q8_0"),
        entry("org/phi-GGUF:IQ4_XS"),
        entry("org/phi-GGUF:Q2_K"),
        entry("local", "gpt-4", "Small"),
        entry("bundled", source=Source.BUNDLED),
    )
}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("local", "local"),
        ("gpt-4", "local"),
        ("bundled", "bundled"),
        ("local:latest", "local"),
        ("LOCAL", "local"),
        ("small", "local"),
        ("qwen/qwen3-4b-gguf:q4_k_m", "Qwen/Qwen3-4B-GGUF:Q4_K_M"),
        ("ggml-org/gemma-3-GGUF", "ggml-org/gemma-3-GGUF:Q8_0"),
        ("org/phi-GGUF:latest", "org/phi-GGUF:IQ4_XS"),
        ("qwen3-8b", "Qwen/Qwen3-8B-GGUF:Q8_0"),
        ("phi-GGUF:Q2", "org/phi-GGUF:Q2_K"),
        ("undle", "bundled"),
    ],
)
def test_a_name_is_found(name: str, found: str) -> None:
    assert find_named(ENTRIES, name, ALL).name == found


@pytest.mark.parametrize(
    ("name", "steps"),
    [("LOCAL", ()), ("qwen3-8b", ("case",)), ("ORG/phi-GGUF", ()), ("qwen3-8b", ())],
)
def test_each_step_can_be_left_out(name: str, steps: tuple[str, ...]) -> None:
    assert find_named(ENTRIES, name, ALL)
    with pytest.raises(UnknownModelError):
        find_named(ENTRIES, name, steps)


def test_a_part_is_looked_for_without_case() -> None:
    assert find_named(ENTRIES, "QWEN3-8B", ("part",)).name == "Qwen/Qwen3-8B-GGUF:Q8_0"


def test_an_exact_name_wins_over_one_in_another_case() -> None:
    entries = {name: entry(name) for name in ("model", "MODEL", "Model")}
    assert find_named(entries, "MODEL", ALL).name == "MODEL"
    with pytest.raises(AmbiguousModelError, match="'mODEL' may be any of 3: model, MODEL, Model"):
        find_named(entries, "mODEL", ALL)


def test_a_part_of_several_names_is_refused() -> None:
    with pytest.raises(AmbiguousModelError) as caught:
        find_named(ENTRIES, "qwen3", ALL)
    assert caught.value.message == (
        "The model 'qwen3' may be any of 2: Qwen/Qwen3-4B-GGUF:Q4_K_M, Qwen/Qwen3-8B-GGUF:Q8_0."
    )
    assert (caught.value.status, caught.value.param) == (400, "model")


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    entries = {f"model-{i:02}": entry(f"model-{i:02}") for i in range(25)}
    with pytest.raises(UnknownModelError) as caught:
        find_named(entries, "none", ALL)
    assert caught.value.message.startswith("There is no model 'none'. The models are: model-00, ")
    assert caught.value.message.endswith("model-19, and 5 more.")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_the_default_is_for_unknown_names_and_for_none() -> None:
    for name in ("o3", "", None):
        assert find_named(ENTRIES, name, ALL, "gpt-4").name == "local"
    assert find_named(ENTRIES, "bundled", ALL, "local").name == "bundled"


def test_the_only_model_answers_to_any_name_of_a_client_that_may_use_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.gguf").touch()
    catalog = Catalog(Config(models_dir=str(tmp_path)))
    limited = Key(name="k", digest=b"", models=("bundled",))
    for name in ("dummy-1", "dummy-1", None):
        assert find_for(None, catalog, name, answers=True).name == "tiny"
        assert find_for(attrs.evolve(limited, models=("t*",)), catalog, name, answers=True)
    for key, answers in ((None, False), (limited, True)):
        with pytest.raises(UnknownModelError):
            find_for(key, catalog, "dummy-2", answers=answers)
    catalog.upstreams = {"a": Upstream(name="a", url="http://x/v1")}  # it has listed nothing yet
    with pytest.raises(UnknownModelError):
        find_for(None, catalog, "dummy-2", answers=True)
    (tmp_path / "tinier.gguf").touch()
    catalog.reload()
    with pytest.raises(UnknownModelError, match="The models are: tinier, tiny, bundled"):
        find_for(None, catalog, "dummy-2", answers=True)


def test_no_name_is_fine_if_there_is_one_model() -> None:
    bundled = entry("bundled", source=Source.BUNDLED)
    assert find_named({"bundled": bundled}, None, ALL) is bundled
    one = {"bundled": bundled, "a": entry("a"), "b": entry("b", hidden=True)}
    assert find_named(one, None, ALL).name == "a"
    with pytest.raises(UnknownModelError, match=r"names no model\. The models are: "):
        find_named(ENTRIES, None, ALL)


def test_a_hidden_model_is_found_by_its_whole_name_only() -> None:
    entries = {"preset": entry("preset"), "org/x:Q8_0": entry("org/x:Q8_0", hidden=True)}
    assert find_named(entries, "org/x:Q8_0", ALL).name == "org/x:Q8_0"
    with pytest.raises(UnknownModelError, match="The models are: preset"):
        find_named(entries, "org/x", ALL)
