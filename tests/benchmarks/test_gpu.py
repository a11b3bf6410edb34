"""Everything about a GPU: what is measured, what is drawn, and how llama.cpp is compiled."""

from __future__ import annotations

import argparse
import json
import os
import xml.etree.ElementTree as ET
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks import cuda_build, gpu, pictures
from benchmarks.cuda_build import Build, read_architecture
from benchmarks.rows import BASE, OURS
from benchmarks.scenarios import Settings
from benchmarks.stats import Sample
from benchmarks.targets import TargetError
from trioserve.models import BUNDLED


def options(tmp_path: Path, *more: str) -> argparse.Namespace:
    model, server = tmp_path / "m.gguf", tmp_path / "llama-server"
    model.touch()
    server.touch(mode=0o755)
    argv = ["--model", str(model), "--out", str(tmp_path), "--llama-server", str(server)]
    return gpu.parse([*argv, *more])


def test_all_that_is_to_be_known_is_measured(tmp_path: Path) -> None:
    parts = {part.key: part for part in gpu.parts(options(tmp_path))}
    assert list(parts) == ["streams", "sampling", "long-prompt", "cancel", "drafts"]
    names = [one.name for part in parts.values() for one in part.scenarios(Settings())]
    for count in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        assert any(name.startswith(f"{count} stream") for name in names)
    assert {"memory", "cancel in prefill", "cancel in decode", "edit, 8 streams"} <= set(names)
    assert {"4 streams, then a prompt of 3000 tokens", "8 requests sharing 1000 tokens"} <= {*names}
    for part in parts.values():
        servers = [command.name for command in part.commands]
        assert len(servers) == len(set(servers))
        assert any(name.startswith(BASE) for name in servers)
    sampling = {one.name: "-bs" in one.more for one in parts["sampling"].commands}
    assert sampling == {
        f"{OURS}, {gpu.SAMPLING}": True, f"{BASE}, {gpu.SAMPLING}": True, OURS: False,
    }  # fmt: skip
    assert all("none" not in one.more for one in parts["streams"].commands)


def test_a_cpu_stands_for_a_gpu(tmp_path: Path) -> None:
    tried = options(tmp_path, "--device", "cpu", "--draft", str(tmp_path / "m.gguf"))
    for part in gpu.parts(tried):
        for command in part.commands:
            assert command.more[:2] == ("-dev", "none")
    drafts = {one.name: "-md" in one.more for one in gpu.parts(tried)[-1].commands}
    assert drafts[f"{OURS}, {gpu.DRAFTED}"] and not drafts[OURS]


def samples(**numbers: float) -> list[Sample]:
    return [Sample(numbers={name.replace("_", " "): n for name, n in numbers.items()})] * 2


def found() -> dict[str, gpu.Found]:
    def streams(*servers: str) -> gpu.Found:
        return {
            f"{n} stream{'s' * (n > 1)}, 128 tokens": {
                server: [Sample(numbers={"tokens/s": 10.0 * n, "ttft p50": 5.0 * n})]
                for server in servers
            }
            for n in (1, 2, 4)
        }

    return {
        "streams": streams(OURS, BASE) | {"memory": {OURS: samples(RAM=5), BASE: samples(RAM=6)}},
        "sampling": streams(f"{OURS}, {gpu.SAMPLING}", f"{BASE}, {gpu.SAMPLING}", OURS),
        "cancel": {"cancel in decode": {OURS: samples(slot_free_p99=9), BASE: []}},
    }


def test_pictures_show_all_servers() -> None:
    drawn = {name: ET.fromstring(svg) for name, svg in gpu.pictures(found(), "c").items()}
    svg = "{http://www.w3.org/2000/svg}"
    texts = {
        name: {"".join(one.itertext()) for one in root.iter(f"{svg}text")}
        for name, root in drawn.items()
    }
    assert set(texts) == {"gpu-streams.svg", "gpu-sampling.svg", "gpu.svg"}
    assert {OURS, BASE, "Throughput, tokens/s"} <= texts["gpu-streams.svg"]
    assert f"{BASE}, {gpu.SAMPLING}" in texts["gpu-sampling.svg"]
    assert len(list(drawn["gpu-sampling.svg"].iter(f"{svg}circle"))) == 2 * 3 * 3
    assert {"memory", "cancel in decode", pictures.TITLES["slot free p99"]} <= texts["gpu.svg"]
    assert gpu.pictures({}, "c") == {}


def test_the_share_of_python_is_of_a_step_as_long_as_the_devices(tmp_path: Path) -> None:
    tried = options(tmp_path, "--device", "cpu", "-np", "4")
    share = gpu.python_share(tried, {
        "1 stream, 128 tokens": {OURS: [Sample(numbers={"tokens/s": 1000.0})]},
        "4 streams, 128 tokens": {OURS: [Sample(numbers={"tokens/s": 2000.0})]},
        "8 streams, 128 tokens": {OURS: []},
        "memory": {OURS: [Sample(numbers={"RAM": 1.0})]},
    })  # fmt: skip
    assert (share["slots"], share["step ms"]) == (4, 2.0)
    assert share["share"] == pytest.approx(share["python us"] / 2000)
    assert share["python us"] > 0
    with pytest.raises(TargetError, match="no streams were measured"):
        gpu.python_share(tried, {})


def test_parts_that_would_start_too_late_are_left_out(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    argv = ["--model", str(model), "--out", str(tmp_path), "--device", "cpu", "--quiet"]
    assert gpu.main([*argv, "--budget", "1e-9"]) == 1
    whole = json.loads((tmp_path / "gpu.json").read_text())
    assert whole["parts"] == {}
    assert len(whole["errors"]) == 5
    assert "--budget were used up before" in whole["errors"]["streams"]


def test_scenarios_are_left_out_when_the_time_of_their_part_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "all_running", lambda *_, **__: nullcontext([None]))
    monkeypatch.setattr(gpu, "tokens_per_word", lambda _: 1.0)
    monkeypatch.setattr(gpu, "warm_up", lambda *_: None)
    monkeypatch.setattr(gpu, "rounds_in_time", lambda *_: {OURS: []})
    given = options(tmp_path, "--device", "cpu", "-np", "4")
    streams, sampling = gpu.parts(given)[:2]
    assert list(gpu.measure_part(given, streams, 0.0)) == ["memory"]
    with pytest.raises(TargetError, match="time of this part was up"):
        gpu.measure_part(given, sampling, 0.0)


def test_what_nvidia_smi_prints() -> None:
    assert [read_architecture(text) for text in ("9.0\n", "12.0\n9.0\n")] == ["90", "120"]
    with pytest.raises(TargetError, match="no architecture"):
        read_architecture("No devices were found")
    text = "12, 1024 MiB\n7, 100 MiB\n12, 24 MiB\n9, [N/A]\n"
    assert gpu.read_gpu_memory(text, 12) == pytest.approx(1048 * 1.048576)
    assert gpu.read_gpu_memory(text, 9) is None
    assert gpu.read_gpu_memory("", 12) is None


# -- the build

#: Stands for cmake: writes its arguments, and makes what is built.
CMAKE = """#!/bin/sh
echo "$@" >> "$LOG"
case "$1" in --build)
    mkdir -p "$2/bin" && cd "$2/bin"
    echo program > llama-server && echo library > libllama.so.1 && ln -sf libllama.so.1 libllama.so
    echo archive > other.a;;
esac
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compilers that compile nothing; returns the log of cmake."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, script in (("cmake", CMAKE), ("nvcc", "#!/bin/sh\n"), ("strip", "#!/bin/sh\n")):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    (folder / "include").mkdir()
    (folder / "include" / "cublas_v2.h").touch()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("CUDA_HOME", str(folder))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def sources(tmp_path: Path) -> Path:
    (tmp_path / "sdist" / "vendor" / "llama.cpp" / "ggml" / "src" / "ggml-cuda").mkdir(parents=True)
    return tmp_path / "sdist"


@pytest.mark.system
def test_a_build_can_be_carried(tmp_path: Path, tools: Path) -> None:
    build, notes = Build(tmp_path / "cuda"), list[str]()
    assert not build.is_there
    cuda_build.build(build, "90", sources(tmp_path), 3, notes.append)
    configured, compiled = tools.read_text().splitlines()
    assert "-DGGML_CUDA=ON" in configured and "-DCMAKE_CUDA_ARCHITECTURES=90" in configured
    assert "--target llama-server mtmd" in compiled and "-j 3" in compiled
    assert build.is_there
    moved = Build((tmp_path / "cuda").rename(tmp_path / "elsewhere"))
    assert {path.name for path in (moved.folder / "bin").iterdir()} == {
        "llama-server", "libllama.so", "libllama.so.1",
    }  # fmt: skip
    package = moved.folder / "python" / "llama_cpp"
    assert (package / "llama_cpp.py").exists()
    assert (package / "lib" / "libllama.so").read_text() == "library\n"
    environ = moved.environ({"PYTHONPATH": "before", "HOME": "/h"})
    assert environ["PYTHONPATH"] == f"{moved.folder / 'python'}{os.pathsep}before"
    assert environ["HOME"] == "/h"
    assert "MiB to carry" in notes[-1]


@pytest.mark.system
def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = ["--build-only", "--build", str(tmp_path / "cuda")]
    assert gpu.main(argv) == 2
    assert "nvidia-smi finds no GPU; name the architecture with --arch" in capsys.readouterr().err
    assert gpu.main([*argv, "--arch", "90"]) == 2
    assert "no nvcc and cmake" in capsys.readouterr().err


@pytest.mark.system
def test_wrong_sources_and_broken_compilers(tmp_path: Path, tools: Path) -> None:
    build = Build(tmp_path / "cuda")
    with pytest.raises(TargetError, match="not the source distribution"):
        cuda_build.build(build, "90", tmp_path / "tools", 1, print)
    (tmp_path / "tools" / "cmake").write_text("#!/bin/sh\necho no such target\nexit 1\n")
    with pytest.raises(TargetError, match="cmake failed:\nno such target"):
        cuda_build.build(build, "90", sources(tmp_path), 1, print)
    assert not build.is_there


@pytest.mark.system
def test_the_bundled_model(tmp_path: Path) -> None:
    argv = ["--model", str(BUNDLED), "--out", str(tmp_path), "--device", "cpu", "--quick"]
    assert gpu.main([*argv, "-np", "4", "--rounds", "1", "--parts", "streams,cancel"]) == 0
    whole = json.loads((tmp_path / "gpu.json").read_text())
    streams = whole["parts"]["streams"]["4 streams, 16 tokens"][OURS]
    assert streams[0]["numbers"]["tokens/s"] > 0
    assert whole["parts"]["streams"]["memory"][OURS][0]["numbers"]["RAM"] > 0
    assert whole["python"]["share"] > 0
    assert whole["errors"] == {}
    assert {"gpu.svg", "gpu-streams.svg"} <= {path.name for path in tmp_path.iterdir()}
