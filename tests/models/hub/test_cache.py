"""The cache: what other tools have left there is found, and nothing that is half there is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from filelock import FileLock

from tests.hub.server import sha256
from tests.support.homeless import be_homeless
from trioserve.errors import ConfigError, HubError, HubNotFoundError, UnknownQuantError
from trioserve.llama.rpc import library
from trioserve.models.hub import HubReference, cached_models, find, remove
from trioserve.models.hub.cache import (
    RepoFolder,
    default_cache_dir,
    default_endpoint,
    default_token,
    is_offline,
)

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the cache in the folder of the test."""
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))


def put(cache: Path, repo: str, files: Mapping[str, bytes], commit: str = OLD) -> Path:
    """Lay files down as huggingface_hub does; returns the folder of the repository."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    for path, content in files.items():
        blob = folder / "blobs" / sha256(content)
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = folder / "snapshots" / commit / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    return folder


def names() -> list[str]:
    return [model.name for model in cached_models()]


SPLIT = {f"big-BF16-0000{i}-of-00002.gguf": b"part%d" % i for i in (1, 2)}


def test_no_cache_has_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "nowhere"))
    assert cached_models() == []


def test_models_that_another_tool_has_left(tmp_path: Path) -> None:
    small = {"model-Q4_K_M.gguf": b"four", "mmproj-F16.gguf": b"see", "config.json": b"{}"}
    folder = put(tmp_path, "user/repo", small | SPLIT)
    (tmp_path / "datasets--user--repo").mkdir()
    (tmp_path / "models--odd").mkdir()
    (tmp_path / "version.txt").write_text("1")
    split, model = cached_models()
    snapshot = folder / "snapshots" / OLD
    assert (model.name, model.size) == ("user/repo:Q4_K_M", 4)
    assert model.files == (snapshot / "model-Q4_K_M.gguf",)
    assert model.mmproj == snapshot / "mmproj-F16.gguf"
    assert (split.name, split.size) == ("user/repo:BF16", 10)
    assert split.files == tuple(snapshot / name for name in SPLIT)


def test_a_name_without_a_quantization(tmp_path: Path) -> None:
    put(tmp_path, "user/repo", {"model.gguf": b"x"})
    assert names() == ["user/repo"]


def test_what_is_not_complete_is_no_model(tmp_path: Path) -> None:
    folder = put(tmp_path, "user/repo", SPLIT | {"model-Q8_0.gguf": b"eight"})
    (folder / "blobs" / sha256(b"part2")).unlink()
    (folder / "blobs" / f"{sha256(b'eight')}").rename(folder / "blobs" / "x.incomplete")
    assert names() == []
    assert find(HubReference("user/repo")) is None


def test_of_several_commits_the_newest_counts(tmp_path: Path) -> None:
    put(tmp_path, "user/repo", {"m-Q8_0.gguf": b"old", "m-F16.gguf": b"old16"})
    folder = put(tmp_path, "user/repo", {"m-Q8_0.gguf": b"new"}, NEW)
    half, eight = cached_models()
    assert (eight.name, eight.files[0].read_bytes()) == ("user/repo:Q8_0", b"new")
    assert (half.name, half.files[0].parent.name) == ("user/repo:F16", OLD)
    (folder / "refs" / "main").write_text(OLD)
    assert cached_models()[1].files[0].read_bytes() == b"old"


def test_finding_by_quantization_and_by_file(tmp_path: Path) -> None:
    put(tmp_path, "user/repo", {"m-F16.gguf": b"16", "m-Q8_0.gguf": b"8", "mmproj.gguf": b"p"})

    def found(quant: str | None = None, file: str | None = None) -> str | None:
        model = find(HubReference("user/repo", quant, file))
        return model and model.files[0].name

    assert (found(), found("f16"), found("Q4_0")) == ("m-Q8_0.gguf", "m-F16.gguf", None)
    assert (found(file="m-F16.gguf"), found(file="x.gguf")) == ("m-F16.gguf", None)
    assert found(file="mmproj.gguf") == "mmproj.gguf"
    assert find(HubReference("user/other")) is None


def test_removing_a_model_leaves_the_others(tmp_path: Path) -> None:
    folder = put(tmp_path, "user/repo", SPLIT | {"m-Q8_0.gguf": b"8", "config.json": b"{}"})
    removed = remove(HubReference("user/repo", "bf16"))
    assert (removed.name, removed.size) == ("user/repo:BF16", 10)
    assert names() == ["user/repo:Q8_0"]
    assert {one.name for one in (folder / "blobs").iterdir()} == {sha256(b"8"), sha256(b"{}")}


def test_removing_one_of_several_needs_its_name(tmp_path: Path) -> None:
    put(tmp_path, "user/repo", {"m-Q8_0.gguf": b"8", "m-F16.gguf": b"16"})
    with pytest.raises(UnknownQuantError, match="several models of user/repo: user/repo:F16, user"):
        remove(HubReference("user/repo"))
    with pytest.raises(UnknownQuantError, match="no model with the quantization Q2_K; it has F16"):
        remove(HubReference("user/repo", "Q2_K"))
    assert len(names()) == 2


@pytest.mark.parametrize("quant", ["Q4_XS", "4_XS", "S"])
def test_removing_takes_the_whole_name_of_a_quantization(tmp_path: Path, quant: str) -> None:
    put(tmp_path, "user/repo", {"m-IQ4_XS.gguf": b"4"})
    with pytest.raises(UnknownQuantError, match=f"no model user/repo:{quant}; those of user/repo"):
        remove(HubReference("user/repo", quant))
    assert names() == ["user/repo:IQ4_XS"]
    remove(HubReference("user/repo", "iq4_xs"))
    assert names() == []


def test_removing_the_last_model_removes_its_folder(tmp_path: Path) -> None:
    folder = put(tmp_path, "user/repo", {"m-Q8_0.gguf": b"8", "mmproj-F16.gguf": b"p"})
    (folder / "blobs" / "cut.incomplete").write_bytes(b"part")
    remove(HubReference("user/repo"))
    assert not folder.exists()
    with pytest.raises(HubNotFoundError, match="user/repo is not in the cache"):
        remove(HubReference("user/repo"))


def test_removing_leaves_what_is_not_ours(tmp_path: Path) -> None:
    folder = put(tmp_path, "user/repo", {"m-Q8_0.gguf": b"8", "model.safetensors": b"theirs"})
    remove(HubReference("user/repo"))
    assert (folder / "snapshots" / OLD / "model.safetensors").read_bytes() == b"theirs"


def test_removing_an_older_commit_keeps_what_both_share(tmp_path: Path) -> None:
    put(tmp_path, "user/repo", {"m-Q8_0.gguf": b"8"})
    folder = put_again(tmp_path, {"n-Q8_0.gguf": b"8"})
    remove(HubReference("user/repo", file="m-Q8_0.gguf"))
    assert (folder / "snapshots" / NEW / "n-Q8_0.gguf").read_bytes() == b"8"


def put_again(cache: Path, files: Mapping[str, bytes]) -> Path:
    return put(cache, "user/repo", files, NEW)


def test_removing_what_was_never_finished(tmp_path: Path) -> None:
    folder = tmp_path / "models--user--repo"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "abc.incomplete").write_bytes(b"part")
    removed = remove(HubReference("user/repo"))
    assert (removed.files, removed.size) == ((), 4)
    assert not folder.exists()


def test_a_model_that_is_being_downloaded_is_not_removed(tmp_path: Path) -> None:
    folder = RepoFolder(tmp_path, "user/repo")
    part = folder.blob("abc.incomplete")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"part")
    folder.lock("abc").parent.mkdir(parents=True)
    with (
        FileLock(folder.lock("abc")),
        pytest.raises(HubError, match="user/repo is being downloaded"),
    ):
        remove(HubReference("user/repo"))
    assert part.exists()


def test_where_there_are_no_links_files_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no links here")

    folder = RepoFolder(tmp_path, "user/repo")
    folder.blob("abc").parent.mkdir(parents=True)
    folder.blob("abc").write_bytes(b"x")
    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder.link(OLD, "m-Q8_0.gguf", "abc")
    assert not folder.blob("abc").exists()
    assert names() == ["user/repo:Q8_0"]


# -- what the environment says


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"LLAMA_CACHE": "/l", "HF_HUB_CACHE": "/h"}, "/l"),
        ({"HF_HUB_CACHE": "/h", "HF_HOME": "/home"}, "/h"),
        ({"HUGGINGFACE_HUB_CACHE": "/h"}, "/h"),
        ({"HF_HOME": "/home", "XDG_CACHE_HOME": "/x"}, "/home/hub"),
        ({"LLAMA_CACHE": "", "XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({}, str(Path.home() / ".cache/huggingface/hub")),
    ],
)
def test_where_the_cache_is(environ: Mapping[str, str], folder: str) -> None:
    assert default_cache_dir(environ) == Path(folder)


def test_where_the_hub_is() -> None:
    assert default_endpoint({}) == "https://huggingface.co"
    assert default_endpoint({"HF_ENDPOINT": "http://h"}) == "http://h"
    assert default_endpoint({"HF_ENDPOINT": "http://h", "MODEL_ENDPOINT": "http://m"}) == "http://m"


def test_whose_token_it_is(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-login\n")
    home = {"HF_HOME": str(tmp_path)}
    assert default_token(home) == "from-login"
    assert default_token(home | {"HUGGING_FACE_HUB_TOKEN": "old"}) == "old"
    assert default_token(home | {"HF_TOKEN": " new ", "HUGGING_FACE_HUB_TOKEN": "old"}) == "new"
    assert default_token({"HF_TOKEN_PATH": str(tmp_path / "token")}) == "from-login"
    assert default_token({"HF_HOME": str(tmp_path / "nowhere")}) is None


def test_whether_it_is_offline() -> None:
    assert is_offline({"HF_HUB_OFFLINE": "1"})
    assert not is_offline({"HF_HUB_OFFLINE": "0"})
    assert not is_offline({})


def test_a_user_without_a_home_folder_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    be_homeless(monkeypatch)
    assert cached_models() == []
    assert find(HubReference(repo="user/repo")) is None
    assert default_token({}) is None
    assert default_cache_dir({"LLAMA_CACHE": "/l"}) == Path("/l")
    for where in (default_cache_dir, library.folder):
        assert where({"XDG_CACHE_HOME": "/x"}).is_relative_to("/x")
        with pytest.raises(ConfigError, match=r"no home folder.*HF_HOME or LLAMA_CACHE"):
            where({})
    with pytest.raises(ConfigError, match="no home folder"):
        default_cache_dir({"LLAMA_CACHE": "~/l"})
