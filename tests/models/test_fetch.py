"""Names in a configuration become files."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from tests.hub.server import Hub
from trioserve.config import Config
from trioserve.errors import HubError, InvalidRequestError, ModelLoadError
from trioserve.models import BUNDLED, hub_reference, resolve, resolve_projector
from trioserve.models.fetch import fetch, is_local
from trioserve.models.speech import SpeechFiles, resolve_speech


@pytest.fixture(autouse=True)
def _full_hub(hub: Hub) -> None:
    hub.add("user/repo", {"m-Q4_K_M.gguf": b"four" * 500, "m-Q8_0.gguf": b"eight" * 500})
    hub.add("user/draft", {"d-Q8_0.gguf": b"draft" * 500})


async def test_files_stay_as_they_are(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "user" / "repo"
    folder.mkdir(parents=True)
    for config in (Config(), Config(model="x/y.gguf"), Config(model=str(folder))):
        assert is_local(config)
        assert await fetch(config) is config
    assert hub.asked == []


async def test_a_model_of_the_hub_becomes_a_file_with_an_alias() -> None:
    config = await fetch(Config(hf_repo="user/repo", port=1))
    assert config.model is not None
    assert Path(config.model).read_bytes() == b"four" * 500
    assert (config.alias, config.hf_repo, config.port) == ("user/repo:Q4_K_M", None, 1)
    assert is_local(config)
    assert (await fetch(Config(hf_repo="user/repo", alias="mine"))).alias == "mine"


@pytest.mark.parametrize(
    "fields",
    [
        {"hf_repo": "user/repo:Q8_0"},
        {"hf_repo": "user/repo", "hf_file": "m-Q8_0.gguf"},
        {"model": "user/repo:q8_0"},
        {"model": "hf.co/user/repo:Q8_0"},
    ],
)
async def test_the_ways_to_name_a_model(fields: dict[str, str]) -> None:
    config = await fetch(Config(**fields))
    assert (config.model or "").endswith("m-Q8_0.gguf")


async def test_the_projector_that_comes_with_a_model(hub: Hub, tmp_path: Path) -> None:
    hub.add("user/sees", {"m-Q8_0.gguf": b"eight" * 500, "mmproj-F16.gguf": b"see" * 500})
    text = await fetch(Config(hf_repo="user/sees", mmproj_auto=False))
    assert text.mmproj is None
    hub.asked.clear()
    assert (await fetch(Config(hf_repo="user/sees"))).mmproj is None  # as it is in the cache
    assert hub.asked == []
    hub.add("user/new", {"m-Q8_0.gguf": b"nine" * 500, "mmproj-F16.gguf": b"see" * 500})
    config = await fetch(Config(model="user/new"))
    assert Path(config.mmproj or "").read_bytes() == b"see" * 500
    assert resolve_projector(config) == Path(config.mmproj or "")
    assert resolve_projector(Config(model="user/new")) == Path(config.mmproj or "")
    assert (await fetch(Config(model="user/new", mmproj="mine.gguf"))).mmproj == "mine.gguf"
    assert (await fetch(Config(model="user/new", embeddings=True))).mmproj == config.mmproj
    assert (await fetch(Config(model="user/new", reranking=True))).mmproj is None
    assert resolve_projector(Config(model=config.model)) is None


async def test_a_projector_at_an_address(hub: Hub, tmp_path: Path) -> None:
    hub.add("user/sees", {"mmproj-F16.gguf": b"see" * 500})
    url = f"{hub.url}/user/sees/resolve/main/mmproj-F16.gguf"
    place = tmp_path / "projector.gguf"
    config = await fetch(Config(mmproj_url=url, mmproj=str(place)))
    assert (config.model, config.mmproj, config.mmproj_url) == (None, str(place), None)
    assert place.read_bytes() == b"see" * 500


async def test_a_draft_model_of_the_hub() -> None:
    config = await fetch(Config(spec_draft_hf="user/draft"))
    assert config.model is None
    assert (config.spec_draft_model or "").endswith("d-Q8_0.gguf")
    assert config.draft_types == ("draft-simple",)
    assert (await fetch(Config(spec_draft_model="user/draft"))).spec_draft_model == (
        config.spec_draft_model
    )


VOICE = {"v-Q8_0.gguf": b"voice" * 500, "mmproj-v-F16.gguf": b"sound" * 500}


def contents(*paths: str | None) -> list[bytes]:
    return [Path(path or "").read_bytes() for path in paths]


async def test_a_speech_model_of_the_hub_comes_with_its_projector(hub: Hub) -> None:
    hub.add("user/voice", {"v-Q8_0.gguf": VOICE["v-Q8_0.gguf"]})
    alone = await fetch(Config(model="x.gguf", tts="user/voice"))
    assert (alone.model, alone.tts_mmproj) == ("x.gguf", None)
    hub.add("user/voice", VOICE)
    assert (await fetch(Config(tts="user/voice", offline=True))).tts_mmproj is None
    found = await fetch(Config(tts="user/voice"))  # which has the model already
    assert contents(found.tts, found.tts_mmproj) == [*VOICE.values()]
    hub.asked.clear()
    assert await fetch(Config(tts="user/voice:Q8_0")) == found
    assert hub.asked == []
    assert resolve_speech(found) == SpeechFiles(Path(found.tts or ""), Path(found.tts_mmproj or ""))
    own = await fetch(Config(tts="user/voice", tts_mmproj="p.gguf"))
    assert (own.tts, own.tts_mmproj) == (found.tts, "p.gguf")


async def test_a_speech_model_at_an_address(hub: Hub) -> None:
    hub.add("user/voice", VOICE)
    urls = (f"{hub.url}/user/voice/resolve/main/{name}" for name in VOICE)
    config = Config(**dict(zip(("tts", "tts_mmproj"), urls, strict=True)))
    assert not is_local(config)
    found = await fetch(config)
    assert contents(found.tts, found.tts_mmproj) == [*VOICE.values()]
    assert is_local(found)
    assert await fetch(attrs.evolve(config, offline=True)) == attrs.evolve(found, offline=True)
    with pytest.raises(ModelLoadError, match="There is no file user/none, and no such model"):
        await fetch(Config(tts="user/none"))


async def test_what_is_in_the_cache_is_taken_without_asking(hub: Hub) -> None:
    first = await fetch(Config(hf_repo="user/repo"))
    hub.asked.clear()
    assert await fetch(Config(hf_repo="user/repo")) == first
    assert (await fetch(Config(hf_repo="user/repo", offline=True))).model == first.model
    assert hub.asked == []


@pytest.mark.parametrize("by_variable", [True, False])
async def test_nothing_is_downloaded_offline(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    if by_variable:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for fields in ({"hf_repo": "user/repo"}, {"model_url": f"{hub.cdn_url}/user/repo/m.gguf"}):
        with pytest.raises(ModelLoadError, match=r"is not in the cache, and nothing is downloaded"):
            await fetch(Config(**fields, offline=not by_variable))
    assert hub.asked == []


async def test_a_model_at_an_address(hub: Hub, tmp_path: Path) -> None:
    url = f"{hub.cdn_url}/user/repo/m-Q8_0.gguf"
    config = await fetch(Config(model_url=url))
    assert Path(config.model or "").read_bytes() == b"eight" * 500
    again = await fetch(Config(model_url=url, offline=True))
    assert again.model == config.model
    there = await fetch(Config(model_url=url, model=str(tmp_path / "x.gguf")))
    assert there.model == str(tmp_path / "x.gguf")


async def test_names_that_are_wrong() -> None:
    with pytest.raises(InvalidRequestError, match="is not a model on the hub"):
        await fetch(Config(hf_repo="nonsense"))
    with pytest.raises(HubError, match="has no user/nothing"):
        await fetch(Config(hf_repo="user/nothing"))
    with pytest.raises(ModelLoadError, match=r"There is no file user/nothing, and .* has no user"):
        await fetch(Config(model="user/nothing"))


async def test_resolving_finds_what_is_in_the_cache() -> None:
    with pytest.raises(ModelLoadError, match="run trioserve pull user/repo"):
        resolve("user/repo")
    config = await fetch(Config(hf_repo="user/repo"))
    assert str(resolve("user/repo")) == config.model
    assert resolve("models/qwen.gguf") == Path("models/qwen.gguf")
    assert resolve(None) == BUNDLED


def test_what_may_be_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "x").touch()
    for text in ("models/x", "models/y.gguf", "/models/y", "./models/y", "y"):
        assert hub_reference(text) is None
    assert hub_reference("models/y") is not None


async def test_the_head_for_drafts_that_comes_with_a_model(hub: Hub) -> None:
    files = {"m-Q8_0.gguf": b"eight" * 500, "mtp-m-Q8_0.gguf": b"head" * 500}
    hub.add("user/plain", files)
    hub.add("user/drafts", {**files, "eagle3-m-Q8_0.gguf": b"other" * 500})

    async def beside(repo: str, *spec_type: str) -> list[str]:
        config = await fetch(Config(hf_repo=repo, spec_type=spec_type))
        folder = Path(config.model or "").parent
        return sorted(path.name for path in folder.iterdir())

    assert await beside("user/plain", "none") == ["m-Q8_0.gguf"]
    assert await beside("user/plain", "auto") == ["m-Q8_0.gguf"]  # as it is in the cache
    assert await beside("user/drafts", "draft-eagle3") == ["eagle3-m-Q8_0.gguf", "m-Q8_0.gguf"]
    hub.add("user/auto", files)
    assert await beside("user/auto", "auto") == ["m-Q8_0.gguf", "mtp-m-Q8_0.gguf"]


async def test_a_repository_of_heads_for_drafts(hub: Hub) -> None:
    hub.add("user/heads", {"eagle3-m-Q8_0.gguf": b"head" * 500})
    named = Config(model="x.gguf", spec_draft_hf="user/heads", spec_type=("draft-eagle3",))
    for _ in range(2):  # the second time from the cache
        config = await fetch(named)
        assert Path(config.spec_draft_model or "").name == "eagle3-m-Q8_0.gguf"
    with pytest.raises(HubError, match="user/heads"):
        await fetch(Config(model="x.gguf", spec_draft_hf="user/heads"))
