"""All models that there are: what wins over what, and what a reload changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.support.gguf_models import write_flags
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import ConfigError
from trioserve.models import BUNDLED, BUNDLED_PROJECTOR, speech
from trioserve.models.catalog import (
    Catalog,
    CatalogChanges,
    ModelEntry,
    OneModel,
    Source,
    catalog as module,
    environment_of_children,
)
from trioserve.models.hub import HubModel
from trioserve.models.speech import SpeechFiles


@pytest.fixture(autouse=True)
def cached(monkeypatch: pytest.MonkeyPatch) -> list[HubModel]:
    """The content of the hub's cache; a test may add to it."""
    models: list[HubModel] = []

    def find(reference: Any) -> HubModel | None:
        return next((one for one in models if one.name == str(reference)), None)

    monkeypatch.setattr(module, "cached_models", lambda: models)
    monkeypatch.setattr(module, "find", find)
    return models


def hub_model(tmp_path: Path, name: str) -> HubModel:
    path = tmp_path / "cache" / f"{name.replace('/', '-')}.gguf"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"12345")
    return HubModel(name=name, files=(path,), mmproj=None, size=5)


def catalog(tmp_path: Path, *argv: str, preset: str = "", **environ: str) -> Catalog:
    (tmp_path / "models").mkdir(exist_ok=True)
    (tmp_path / "models.ini").write_text(preset, encoding="utf-8")
    where = Config(models_dir=str(tmp_path / "models"), models_preset=str(tmp_path / "models.ini"))
    return Catalog(where, argv, environ)


def local(tmp_path: Path, name: str) -> Path:
    path = tmp_path / "models" / f"{name}.gguf"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"123")
    return path


def config(entry: ModelEntry, environ: Mapping[str, str] = {}) -> Config:
    """Parse the flags of an entry."""
    return parse(entry.args, environ).config


def test_the_bundled_model_is_always_there() -> None:
    made = Catalog(Config())
    assert list(made.entries) == ["bundled"]
    entry = made.find(None)
    assert (entry.source, entry.path, entry.size) == (
        Source.BUNDLED,
        BUNDLED,
        BUNDLED.stat().st_size,
    )
    own = ("--model", str(BUNDLED), "--alias", "bundled", "--mmproj", str(BUNDLED_PROJECTOR))
    voice = speech.BUNDLED_VOICE
    speaks = ("--tts", str(voice.model), "--tts-mmproj", str(voice.projector))
    assert entry.args == (*own, *speaks)


def test_every_source(tmp_path: Path, cached: list[HubModel]) -> None:
    cached.append(hub_model(tmp_path, "org/x-GGUF:Q8_0"))
    path = local(tmp_path, "own")
    made = catalog(tmp_path, preset="[special]\nmodel = /m/special.gguf\nalias = a, b\ntags = t")
    assert [(one.name, one.source) for one in made.entries.values()] == [
        ("org/x-GGUF:Q8_0", Source.CACHE),
        ("own", Source.DIRECTORY),
        ("special", Source.PRESET),
        ("bundled", Source.BUNDLED),
    ]
    own, special = made.entries["own"], made.entries["special"]
    assert (own.path, own.size) == (path, 3)
    assert own.args == ("--model", str(path), "--alias", "own")
    assert (special.path, special.size, special.version) == (Path("/m/special.gguf"), 0, None)
    assert (special.aliases, special.tags) == (("a", "b"), ("t",))
    assert config(special).aliases == ("special", "a", "b")
    assert made.entries["org/x-GGUF:Q8_0"].path == cached[0].files[0]


def test_what_wins_over_what(tmp_path: Path) -> None:
    local(tmp_path, "m")
    preset = "[*]\nc = 2\nub = 2\nb = 2\nnp = 2\n[m]\nub = 3\nb = 3\nnp = 3\n"
    file = tmp_path / "config.toml"
    file.write_text("ctx-size = 1\ntop-k = 1\nthreads = 1\njinja = false\nport = 99\n")
    environ = {"LLAMA_ARG_TOP_K": "4", "LLAMA_ARG_BATCH": "4", "LLAMA_ARG_CTX_SIZE": "4"}
    made = catalog(
        tmp_path, "--config", str(file), "-np", "5", "--port", "80", preset=preset, **environ
    )
    found = config(made.entries["m"])
    assert (found.threads, found.jinja) == (1, False)  # the file
    assert found.sampling.top_k == 4  # a variable
    assert found.ctx_size == 2  # of all presets
    assert (found.ubatch_size, found.batch_size) == (3, 3)  # of the section
    assert found.parallel == 5  # the command line
    assert found.port == Config().port
    assert config(made.entries["bundled"]).ubatch_size == 2


def test_a_section_adds_to_a_model_that_is_there(tmp_path: Path, cached: list[HubModel]) -> None:
    cached.append(hub_model(tmp_path, "org/x:Q8_0"))
    made = catalog(tmp_path, preset="[org/x:q8_0]\nc = 512\n[bundled]\nload-on-startup = true\n")
    entry = made.entries["org/x:Q8_0"]
    assert (entry.source, entry.path) == (Source.PRESET, cached[0].files[0])
    assert config(entry).ctx_size == 512
    assert made.entries["bundled"].load_on_startup
    assert made.entries["bundled"].source is Source.PRESET


def test_a_switch_that_is_on_for_all_can_be_off_for_one(tmp_path: Path) -> None:
    local(tmp_path, "m")
    made = catalog(tmp_path, preset="[*]\nmetrics = true\n[m]\nmetrics = false\n")
    assert not config(made.entries["m"]).metrics_endpoint
    assert config(made.entries["bundled"]).metrics_endpoint


def test_flags_that_add_up_are_kept_together(tmp_path: Path) -> None:
    made = catalog(tmp_path, "--lora", "a", "--lora", "b", "--no-jinja", "--keep=3")
    found = config(made.entries["bundled"])
    assert (found.lora, found.jinja, found.n_keep) == (("a", "b"), False, 3)


def test_a_model_of_the_command_line_is_not_that_of_all(tmp_path: Path) -> None:
    made = catalog(
        tmp_path, "-m", "x.gguf", "-a", "name", "--log-file", "x.log", LLAMA_ARG_ALIAS="y"
    )
    entry = made.entries["bundled"]
    assert (config(entry).model, config(entry).aliases) == (str(BUNDLED), ("bundled",))
    assert config(entry).log_file is None


def test_a_directory_wins_over_the_cache(tmp_path: Path, cached: list[HubModel]) -> None:
    cached.append(hub_model(tmp_path, "same"))
    path = local(tmp_path, "same")
    assert catalog(tmp_path).entries["same"].path == path


def test_a_model_of_the_hub_that_a_preset_names(tmp_path: Path, cached: list[HubModel]) -> None:
    cached.append(hub_model(tmp_path, "org/x:Q8_0"))
    preset = (
        "[*]\ndedup-cache-models = 1\n[here]\nhf-repo = org/x:Q8_0\n[missing]\nhf-repo = org/y\n"
        "[by-model]\nmodel = org/x:Q8_0\n[org/z:q4_0]\nc = 5\n[url]\nmodel-url = http://h/x.gguf\n"
    )
    made = catalog(tmp_path, preset=preset)
    assert made.entries["by-model"].path == cached[0].files[0]
    assert config(made.entries["org/z:Q4_0"]).hf_repo == "org/z:Q4_0"
    assert made.entries["org/z:Q4_0"].path is made.entries["url"].path is None
    here, missing = made.entries["here"], made.entries["missing"]
    assert here.path == cached[0].files[0]
    assert here.size == 5
    assert missing.path is None
    assert config(missing).hf_repo == "org/y"
    assert made.entries["org/x:Q8_0"].hidden
    assert not here.hidden


def test_a_preset_hides_its_draft_model_too(tmp_path: Path, cached: list[HubModel]) -> None:
    cached += [hub_model(tmp_path, name) for name in ("org/x:Q8_0", "org/d:Q8_0", "org/z:Q8_0")]
    preset = "[here]\nhf-repo = org/x:Q8_0\nspec-draft-hf = org/d:Q8_0\ndedup-cache-models = 1\n"
    entries = catalog(tmp_path, preset=preset).entries
    assert {name for name, one in entries.items() if one.hidden} == {"org/x:Q8_0", "org/d:Q8_0"}


def test_settings_of_the_router(tmp_path: Path) -> None:
    local(tmp_path, "m")
    local(tmp_path, "n")
    preset = "[*]\nstop-timeout = 1\n[m]\nstop-timeout = 7\nload-on-startup = 1\nmmproj = p.gguf\n"
    made = catalog(tmp_path, preset=preset)
    entry = made.entries["m"]
    assert (entry.stop_timeout, entry.load_on_startup) == (7, True)
    assert entry.mmproj == Path("p.gguf")
    assert (made.entries["n"].stop_timeout, made.entries["n"].load_on_startup) == (1, False)
    assert Catalog(Config()).entries["bundled"].stop_timeout == 10


def test_the_projector_beside_a_model_is_used(
    tmp_path: Path, cached: list[HubModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models" / "sees"
    folder.mkdir(parents=True)
    for name in ("sees.gguf", "mmproj-F16.gguf"):
        (folder / name).write_bytes(b"123")
    on_hub = hub_model(tmp_path, "org/x:Q8_0")
    cached.append(attrs.evolve(on_hub, mmproj=on_hub.files[0].with_name("mmproj.gguf")))
    local(tmp_path, "m")

    def projectors(preset: str = "", *argv: str) -> dict[str, str | None]:
        entries = catalog(tmp_path, *argv, preset=preset).entries
        found = {name: config(one).mmproj for name, one in entries.items() if name != "bundled"}
        assert found == {
            name: None if one.mmproj is None else str(one.mmproj)
            for name, one in entries.items()
            if name != "bundled"
        }
        return found

    both = {"sees": str(folder / "mmproj-F16.gguf"), "org/x:Q8_0": str(cached[0].mmproj)}
    assert projectors() == {**both, "m": None}
    assert projectors("", "--mmproj", "of-one-model.gguf") == {**both, "m": None}
    assert projectors("", "--no-mmproj") == dict.fromkeys((*both, "m"))
    assert projectors("[sees]\nembeddings = 1\n[m]\nmmproj = p.gguf\n") == {
        **both, "sees": None, "m": "p.gguf",
    }  # fmt: skip
    # A plain install could not start a model with a projector.
    monkeypatch.setattr("trioserve.models.catalog.catalog.has_extra", lambda name: False)
    assert projectors() == dict.fromkeys((*both, "m"))
    assert catalog(tmp_path).entries["bundled"].mmproj is None


@pytest.mark.parametrize(
    ("preset", "problem"),
    [
        ("[new]\nc = 1\n", r"\[new\] is no model that is here, so it needs one of the keys model"),
        ("[a]\nmodel = x\nalias = b\n[b]\nmodel = y\n", "'b' is a name of two models, 'a' and 'b'"),
        ("[a]\nmodel = x\nalias = z\n[b]\nmodel = y\nalias = z\n", "'z' is a name of two models"),
        ("[a]\nhf-repo = x y\n", r"\[a\] 'x y' is not a model on the hub"),
        ("[*]\nalias = z\n[a]\nmodel = x\n", "'z' is a name of two models"),
    ],
)
def test_presets_that_cannot_be(tmp_path: Path, preset: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        catalog(tmp_path, preset=preset)


def test_the_default_has_to_be_there(tmp_path: Path) -> None:
    assert Catalog(Config(models_default="bundled")).find("gpt-5").name == "bundled"
    with pytest.raises(ConfigError, match="models_default: there is no model 'none'"):
        Catalog(Config(models_default="none"))


def test_a_reload_tells_what_is_different(tmp_path: Path) -> None:
    gone, stays, replaced = (local(tmp_path, name) for name in ("gone", "stays", "replaced"))
    made = catalog(tmp_path, preset="[p]\nmodel = x\nalias = old\n[q]\nmodel = y\n")
    assert made.reload() == CatalogChanges()
    gone.unlink()
    local(tmp_path, "new")
    os.utime(replaced, (1, 1))
    preset = "[p]\nmodel = x\nalias = old\nc = 5\n[q]\nmodel = y\n"
    (tmp_path / "models.ini").write_text(preset, encoding="utf-8")
    assert made.reload() == CatalogChanges(
        added=frozenset({"new"}),
        changed=frozenset({"replaced", "p"}),
        removed=frozenset({"gone"}),
    )
    assert list(made.entries) == ["new", "p", "q", "replaced", "stays", "bundled"]
    assert stays.exists()


def test_a_reload_that_fails_changes_nothing(tmp_path: Path) -> None:
    made = catalog(tmp_path, preset="[p]\nmodel = x\n")
    before = made.entries
    (tmp_path / "models.ini").write_text("[p]\nmodel\n", encoding="utf-8")
    with pytest.raises(ConfigError):
        made.reload()
    assert made.entries == before


def test_it_is_made_of_a_configuration(tmp_path: Path) -> None:
    local(tmp_path, "m")
    flags = ("--models-dir", str(tmp_path / "models"), "--models-match", "exact", "-np", "3")
    parsed = parse((*flags, "--models-default", "m"), {}).config
    made = Catalog(parsed, flags, {"LLAMA_ARG_CTX_SIZE": "512"})
    assert made.find("M").name == made.find(None).name == "m"
    assert (config(made.find("m")).parallel, config(made.find("m")).ctx_size) == (3, 512)


def test_the_bundled_model_has_its_projector() -> None:
    for made in (Catalog(Config(), environ={}), one_model()):
        (entry,) = made.entries.values()
        assert config(entry).mmproj == str(BUNDLED_PROJECTOR)
    (entry,) = one_model("--no-mmproj").entries.values()
    assert config(entry).mmproj is None


def test_the_bundled_model_has_its_voice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    voice = SpeechFiles(tmp_path / "voice.gguf", tmp_path / "mmproj.gguf")
    monkeypatch.setattr(speech, "BUNDLED_VOICE", voice)

    def spoken_by(*argv: str) -> list[tuple[str | None, str | None]]:
        entries = [*Catalog(parse(argv, {}).config, argv, {}).entries.values()]
        entries += one_model(*argv).entries.values()
        return [(config(one).tts, config(one).tts_mmproj) for one in entries]

    assert spoken_by() == [(None, None)] * 2
    voice.model.touch()
    voice.projector.touch()
    files = str(voice.model), str(voice.projector)
    assert spoken_by() == [files] * 2
    assert spoken_by("--tts-lang", "de") == [files] * 2
    assert spoken_by("--tts", "none") == [("none", None)] * 2
    assert spoken_by("--tts", "v.gguf") == [("v.gguf", None)] * 2
    assert spoken_by("--embeddings") == [(None, None)] * 2
    local(tmp_path, "m")
    assert spoken_by("--models-dir", str(tmp_path / "models")).count((None, None)) == 1


def test_models_that_speak_are_not_among_those_that_write(
    tmp_path: Path, cached: list[HubModel]
) -> None:
    for name in ("chats", "speaks"):
        (folder := tmp_path / "models" / name).mkdir(parents=True)
        (folder / "m.gguf").touch()
        flag = "clip.has_gen_audio_encoder" if name == "speaks" else "clip.has_vision_encoder"
        write_flags(folder / "mmproj.gguf", flag)
    on_hub = hub_model(tmp_path, "org/voice:Q8_0")
    cached.append(attrs.evolve(on_hub, mmproj=tmp_path / "models/speaks/mmproj.gguf"))
    assert {*catalog(tmp_path).entries} == {"bundled", "chats"}
    preset = "[org/voice:Q8_0]\n[own]\nhf-repo = org/voice:Q8_0\n"
    assert {*catalog(tmp_path, preset=preset).entries} > {"org/voice:Q8_0", "own"}


def test_settings_of_speech_are_for_the_models_that_speak(tmp_path: Path) -> None:
    for name in ("dumb", "embeds", "speaks", "wrong"):
        local(tmp_path, name)
    preset = "[speaks]\ntts = v.gguf\n[wrong]\ntts-lang = fr\n[embeds]\nembeddings = 1\n"
    entries = catalog(tmp_path, "--tts-lang", "de", preset=preset).entries
    found = {name: config(one) for name, one in entries.items() if name != "wrong"}
    assert {name: (one.tts, one.tts_lang) for name, one in found.items()} == {
        "bundled": (str(speech.BUNDLED_VOICE.model), "de"),
        "dumb": (None, None),
        "embeds": (None, None),
        "speaks": ("v.gguf", "de"),
    }
    assert "--tts-lang" in entries["wrong"].args  # so that starting it says why it cannot be
    entries = catalog(tmp_path, "--tts", "w.gguf", "--tts-lang", "de", preset=preset).entries
    found = {name: config(one) for name, one in entries.items()}
    assert {name: (one.tts, one.tts_lang) for name, one in found.items()} == {
        "bundled": ("w.gguf", "de"),
        "dumb": ("w.gguf", "de"),
        "embeds": (None, None),
        "speaks": ("w.gguf", "de"),  # the command line wins
        "wrong": ("w.gguf", "de"),
    }


def one_model(*argv: str, **environ: str) -> OneModel:
    return OneModel(parse(argv, environ).config, argv, environ)


def test_a_catalog_of_one_model_has_its_flags_and_variables() -> None:
    flags = ("-m", "/models/m.gguf", "--alias", "big,small", "--port", "1", "-np", "3")
    others = ("--mmproj", "/models/p.gguf", "--log-file", "x.log", "--models-max", "1")
    made = one_model(*flags, *others, LLAMA_ARG_RPC="10.0.0.1:1,gpu-box:2", HF_TOKEN="secret")
    (entry,) = made.entries.values()
    assert (entry.name, entry.aliases, entry.path) == ("big", ("small",), Path("/models/m.gguf"))
    assert entry.load_on_startup
    own = config(entry)
    assert own == Config(
        model="/models/m.gguf",
        mmproj="/models/p.gguf",
        alias="big,small",
        parallel=3,
        rpc=("10.0.0.1:1", "gpu-box:2"),
    )
    assert made.environment["HF_TOKEN"] == "secret"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ((), "bundled.gguf"),
        (("-m", "/models/m.gguf"), "m.gguf"),
        (("-hf", "user/repo:Q8_0"), "user/repo:Q8_0"),
        (("-mu", "http://here/there/m.gguf"), "m.gguf"),
        (("-mu", "http://here/there/m.gguf", "-a", "mine"), "mine"),
    ],
)
def test_one_model_answers_to_every_name(argv: tuple[str, ...], name: str) -> None:
    made = one_model(*argv)
    assert list(made.entries) == [name]
    for asked in (name, "gpt-4", None):
        assert made.find(asked).name == name
    assert made.reload() == CatalogChanges()
    parsed = parse(argv, {}).config
    own = config(made.entries[name])
    assert (own.hf_repo, own.model_url) == (parsed.hf_repo, parsed.model_url)
    assert own.model == parsed.model or parsed.model_named is None


def test_variables_are_handed_on_once() -> None:
    environ = {
        "PATH": "/bin",
        "HF_ENDPOINT": "http://hub",
        "LLAMA_ARG_CTX_SIZE": "1",
        "LLAMA_ARG_NO_JINJA": "1",
        "LLAMA_API_KEY": "secret",
        "TRIOSERVE_CONFIG": "x.toml",
        "AIP_MODE": "PREDICTION",
    }
    kept = {"PATH": "/bin", "HF_ENDPOINT": "http://hub"}
    assert environment_of_children(environ) == kept
    assert environment_of_children({**environ, "HF_TOKEN": "t"}) == {**kept, "HF_TOKEN": "t"}
    secrets = Config(
        hf_token="u", api_keys=("a", "b"), keys_file="k.toml", api_key_weights=(1.0, 2.5)
    )
    assert environment_of_children({"HF_TOKEN": "t", "LLAMA_API_KEY": "c"}, secrets) == {
        "HF_TOKEN": "u",
        "LLAMA_API_KEY": "a,b",
        "TRIOSERVE_API_KEYS": "k.toml",
        "TRIOSERVE_API_KEY_WEIGHTS": "1.0,2.5",
    }
    made = Catalog(Config(), environ={"LLAMA_API_KEY": "secret", "LLAMA_ARG_NO_JINJA": "0"})
    assert "secret" not in made.entries["bundled"].args
    assert not config(made.entries["bundled"]).jinja
    for argv, name in (((), "HF_TOKEN"), (("-hft", "secret"), "OTHER")):
        made = Catalog(Config(), argv, {name: "secret"})
        assert "secret" not in made.entries["bundled"].args
        assert made.environment["HF_TOKEN"] == "secret"


def test_tools_are_those_of_the_router() -> None:
    servers = '{"mcpServers": {"a": {"command": "b", "env": {"KEY": "secret"}}}}'
    flags = ("--tools", "read_file,get_info", "--tools-dir", "/usr", "--mcp-servers-json", servers)
    made = Catalog(Config(), flags, {"LLAMA_ARG_TOOLS_RUNTIME": "ssh:a"})
    args = made.entries["bundled"].args
    assert not any("secret" in word for word in (*args, *made.environment.values()))
    assert not parse(args, made.environment).config.builtin_tools
