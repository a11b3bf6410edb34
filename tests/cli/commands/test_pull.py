"""`trioserve pull`, `list` and `rm`."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.hub.server import Hub
from trioserve.cli.main import main
from trioserve.models import BUNDLED
from trioserve.models.hub import cached_models

REPO = "user/repo"
MODEL = b"eight" * 500


@pytest.fixture(autouse=True)
def _full_hub(hub: Hub) -> None:
    hub.add(REPO, {"m-Q8_0.gguf": MODEL, "m-F16.gguf": b"half" * 500, "mmproj-F16.gguf": b"see"})
    hub.add("user/draft", {"d-Q8_0.gguf": b"draft" * 500})


def said(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    return tuple(capsys.readouterr())  # type: ignore[return-value]


def test_models_are_pulled_listed_and_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", REPO, "user/repo:f16", "user/draft"]) == 0
    out, _ = said(capsys)
    model, projector, half, again, _draft = out.splitlines()
    assert projector == again == "with its projector, mmproj-F16.gguf"
    assert model.startswith("user/repo:Q8_0: 2.4 KiB in /")
    assert half.startswith("user/repo:F16: ")
    assert main(["list"]) == 0
    out, _ = said(capsys)
    head, *rows = [line.split() for line in out.splitlines()]
    assert head == ["NAME", "SIZE", "MODIFIED", "SOURCE"]
    assert rows.pop()[0] == "bundled"
    assert [row[:3] for row in rows] == [
        ["user/draft:Q8_0", "2.4", "KiB"],
        ["user/repo:F16", "2.0", "KiB"],
        ["user/repo:Q8_0", "2.4", "KiB"],
    ]
    assert main(["rm", "user/repo:q8_0", "user/draft"]) == 0
    assert said(capsys)[0] == "deleted user/repo:Q8_0: 2.4 KiB\ndeleted user/draft:Q8_0: 2.4 KiB\n"
    assert [model.name for model in cached_models()] == ["user/repo:F16"]


def test_a_file_an_address_and_a_draft_model(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.gguf"
    assert main(["pull", "-mu", f"{hub.cdn_url}/user/repo/m-Q8_0.gguf", "-m", str(path)]) == 0
    assert path.read_bytes() == MODEL
    assert main(["pull", REPO, "--hf-file", "m-F16.gguf", "-hfd", "user/draft"]) == 0
    assert [model.name for model in cached_models()] == ["user/draft:Q8_0", "user/repo:F16"]


def test_a_speech_model_comes_with_its_projector(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("user/voice", {"v-Q8_0.gguf": MODEL, "mmproj-F16.gguf": b"sound"})
    assert main(["pull", "--tts", "user/voice"]) == 0
    assert said(capsys)[0].splitlines()[1] == "with its projector, mmproj-F16.gguf"
    url = f"{hub.cdn_url}/user/repo/m-Q8_0.gguf"
    assert main(["pull", REPO, "--tts", url]) == 0
    path, repo, _ = said(capsys)[0].splitlines()
    assert Path(path).read_bytes() == MODEL
    assert repo.startswith("user/repo:Q8_0")


def test_a_head_for_drafts_comes_along(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"m-Q8_0.gguf": MODEL, "mtp-m-Q8_0.gguf": b"head", "eagle3-m-Q8_0.gguf": b"other"}
    hub.add("user/drafts", files)
    assert main(["pull", "user/drafts"]) == 0
    assert said(capsys)[0].splitlines()[1] == "with its head for drafts, mtp-m-Q8_0.gguf"
    assert main(["pull", "user/drafts", "--spec-type", "draft-eagle3"]) == 0
    (model,) = (one for one in cached_models() if one.name.startswith("user/drafts"))
    assert model.files[0].with_name("eagle3-m-Q8_0.gguf").exists()
    assert main(["rm", "user/drafts"]) == 0
    assert not list(model.files[0].parent.glob("*.gguf"))


def test_a_list_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("list", "-cl"):
        assert main([command]) == 0
        _head, *rows = said(capsys)[0].splitlines()
        assert [row.split()[0] for row in rows] == ["bundled"]


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["pull"], 2, "name a model, such as"),
        (["pull", "--offline", REPO], 2, "pull is there to download"),
        (["pull", REPO, "--offline"], 2, "pull is there to download"),
        (["pull", "nonsense"], 1, "'nonsense' is not a model on the hub"),
        (["pull", "user/nothing"], 1, "has no user/nothing"),
        (["pull", "user/repo:Q2_K"], 1, "no model with the quantization Q2_K; it has Q8_0, F16"),
        (["list", "x"], 2, "list does not take 'x'; usage: trioserve list"),
        (["rm"], 2, "rm needs MODEL ..."),
        (["rm", "--all"], 2, "--all is not a flag of trioserve rm"),
        (["rm", "user/repo"], 1, "user/repo is not in the cache"),
    ],
)
def test_what_goes_wrong_is_a_sentence(
    argv: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    out, err = said(capsys)
    assert out == ""
    assert err.startswith("trioserve: ") and text in err and err.count("\n") == 1


@pytest.mark.system
def test_run_downloads_a_model_and_tells_how_far_it_is(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("user/real", {"real-Q8_0.gguf": BUNDLED.read_bytes()})
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("trioserve.cli.progress._PLAIN_INTERVAL", 0.0)
    argv = ["run", "user/real", "What is the capital of Japan?", "--temp", "0", "--port", "1"]
    assert main(argv) == 0
    out, err = said(capsys)
    assert "Tokyo" in out
    lines = [line for line in err.splitlines() if "Downloading" in line]
    assert lines and "of 2.5 MiB, " in lines[-1]
    assert main(argv) == 0
    assert "Downloading" not in said(capsys)[1]
