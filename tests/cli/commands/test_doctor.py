"""`trioserve doctor`: its findings, and its advice."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import attrs
import pytest

from tests.support.homeless import be_homeless
from tests.support.rpc_peer import answers, closes, listening
from trioserve.cli.commands import doctor
from trioserve.cli.main import main
from trioserve.llama import devices, machine
from trioserve.models import BUNDLED, BUNDLED_PROJECTOR


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("LLAMA_CACHE", raising=False)


@attrs.frozen
class Report:
    """The output of the command, by the things that it looks at."""

    code: int
    lines: list[str]

    def about(self, thing: str) -> list[str]:
        """The lines on a thing, each with its advice."""
        found: list[str] = []
        for line in self.lines:
            if line.startswith(" ") and found and found[-1]:
                found[-1] += f" {line.strip()}"
            else:
                is_ours = line[9:23].strip() == thing
                found.append(f"{line[:9].strip()}: {line[23:]}" if is_ours else "")
        return list(filter(None, found))


@pytest.fixture
def diagnose(capsys: pytest.CaptureFixture[str]):
    def run(*argv: str) -> Report:
        code = main(["doctor", "--port", "0", *argv])
        out, err = capsys.readouterr()
        assert err == ""
        return Report(code, out.splitlines())

    return run


def test_a_machine_that_is_fine(diagnose) -> None:
    report = diagnose("-c", "512")
    assert report.code == 0
    for thing in ("trioserve", "llama.cpp", "device", "cores", "memory", "model", "address"):
        assert report.about(thing), thing
    assert report.about("model")[0].startswith("ok: bundled.gguf needs ")
    assert report.about("models") == ["ok: 0 to choose from, and the bundled one"]


def test_a_model_that_does_not_fit(diagnose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 2**20)
    report = diagnose()
    assert report.code == 1
    (model,) = report.about("model")
    assert model.startswith("problem: ")
    assert "which is more than there is -> set a smaller --ctx-size" in model
    (memory,) = report.about("memory")
    assert memory.startswith("warning: 1.0 MiB are free -> a model with a billion parameters needs")


def test_a_model_that_is_read_again_and_again(diagnose, monkeypatch: pytest.MonkeyPatch) -> None:
    from trioserve.llama import estimate

    found = estimate.Estimate(weights=10 * 2**30, cache=2**20, compute=2**20, n_ctx=256)
    monkeypatch.setattr(estimate, "measure", lambda _: found)
    monkeypatch.setattr(machine, "free_memory", lambda: 2**30)
    report = diagnose()
    assert report.code == 0
    assert "the file will be read again and again" in report.about("model")[0]


def test_a_model_that_cannot_be_loaded(diagnose, tmp_path: Path) -> None:
    report = diagnose("-m", str(tmp_path / "none.gguf"))
    assert report.code == 1
    assert "No such file" in report.about("model")[0]
    report = diagnose("-hf", "org/none", "--load-mode", "mlock")
    assert report.code == 1
    assert report.about("model") == [
        "problem: The model org/none is not on this machine yet; trioserve pull downloads it."
    ]


def test_a_model_that_speaks(diagnose, tmp_path: Path) -> None:
    (tmp_path / "ada.wav").touch()
    argv = ("--tts", str(BUNDLED), "--tts-voices", str(tmp_path))
    report = diagnose(*argv, "--tts-mmproj", str(BUNDLED_PROJECTOR))
    assert report.about("speech") == [
        f"ok: bundled.gguf with {BUNDLED_PROJECTOR.name}; voices: default, ada"
    ]
    for more, message in (
        (["--tts-mmproj", str(tmp_path / "x.gguf")], "No such file"),
        (["--tts", "user/voice"], "is not on this machine yet"),
    ):
        (found,) = diagnose(*argv, *more).about("speech")
        assert found.startswith("problem: ") and message in found
    (tmp_path / "ada.mp3").touch()
    (found,) = diagnose(*argv, "--tts-mmproj", str(BUNDLED_PROJECTOR)).about("speech")
    assert found.startswith("problem: ") and "are both the voice 'ada'" in found


def test_a_port_that_is_taken(diagnose) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        report = diagnose("--port", str(port))
    assert report.code == 1
    (found,) = report.about("address")
    assert found.startswith(f"problem: cannot listen on 127.0.0.1:{port}: Address already in use")


def test_a_socket_is_removed_again(diagnose, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    assert diagnose("--host", str(path)).about("address") == [f"ok: {path} is free"]
    assert not path.exists()


def test_a_server_that_is_open_to_all(diagnose) -> None:
    report = diagnose("--host", "0.0.0.0")
    assert report.code == 0
    assert "any client that reaches this machine" in report.about("address")[1]
    assert len(diagnose("--host", "0.0.0.0", "--api-key", "x").about("address")) == 1


@pytest.fixture
def only_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """llama.cpp has a CPU; returns a folder for the files of devices."""
    cpu = devices.Device(devices.devices()[0].handle, "CPU", "a CPU", is_cpu=True)
    monkeypatch.setattr(devices, "devices", lambda: (cpu,))
    monkeypatch.setattr(doctor, "_DEVICES", tmp_path)
    monkeypatch.setattr(doctor, "_CLASSES", tmp_path)
    monkeypatch.setattr(doctor, "_cuda_version", lambda: None)
    monkeypatch.setattr(doctor, "_HAVE_WHEELS", True)
    return tmp_path


def test_a_gpu_that_is_not_used(diagnose, monkeypatch: pytest.MonkeyPatch, only_cpu: Path) -> None:
    def advice() -> str:
        cpu, found = diagnose().about("device")
        assert cpu == "ok: CPU: a CPU"
        assert found.startswith("warning: there is an NVIDIA GPU here, but llama.cpp is not built")
        return found.partition(" -> ")[2]

    assert diagnose().about("device") == ["ok: CPU: a CPU"]
    (only_cpu / "nvidiactl").touch()
    assert advice().startswith('CMAKE_ARGS="-DGGML_CUDA=on" pip install')  # of which version?
    monkeypatch.setattr(doctor, "_cuda_version", lambda: 12080)
    index = "https://abetlen.github.io/llama-cpp-python/whl/cu125 llama-cpp-python"
    assert advice().endswith(f"--prefer-binary --extra-index-url {index}")
    monkeypatch.setattr(doctor, "_cuda_version", lambda: 13020)
    assert "/whl/cu132 " in advice()
    monkeypatch.setattr(doctor, "_cuda_version", lambda: 10000)  # too old for any wheel
    assert "-DGGML_CUDA=on" in advice()
    monkeypatch.setattr(doctor, "_HAVE_WHEELS", False)
    monkeypatch.setattr(doctor, "_cuda_version", lambda: 12080)
    assert "-DGGML_CUDA=on" in advice()


def test_a_gpu_without_cuda(diagnose, only_cpu: Path) -> None:
    vendor = only_cpu / "drm" / "renderD128" / "device" / "vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x1af4\n")  # of a virtual machine
    (only_cpu / "dri" / "renderD128").mkdir(parents=True)
    assert len(diagnose().about("device")) == 1
    vendor.write_text("0x8086\n")
    found = diagnose().about("device")[1]
    assert "there is an Intel GPU" in found and "/whl/vulkan " in found
    (only_cpu / "kfd").touch()
    found = diagnose().about("device")[1]
    assert "there is an AMD GPU" in found and "/whl/rocm72 " in found
    (only_cpu / "kfd").unlink()
    (only_cpu / "dri" / "renderD128").rmdir()  # the container does not have the device
    assert len(diagnose().about("device")) == 1


def test_a_gpu_that_is_used(diagnose, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = devices.Device(0, "CUDA0", "a GPU", is_cpu=False)
    monkeypatch.setattr(devices, "devices", lambda: (gpu,))
    monkeypatch.setattr(devices, "memory_of", lambda _: (2**33, 2**34))
    assert diagnose().about("device") == ["ok: CUDA0: a GPU, 8.0 GiB of 16.0 GiB free"]


def test_a_container_with_little(diagnose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "cpu_quota", lambda: 0.5)
    monkeypatch.setattr(machine, "free_memory", lambda: 2**30)
    monkeypatch.setattr(machine, "memory_limit", lambda: 2**31)
    (tmp_path / "pids.max").write_text("20\n")
    monkeypatch.setattr(doctor, "_PIDS", (tmp_path / "none", tmp_path / "pids.max"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    report = diagnose("--load-mode", "mlock")
    assert report.code == 1
    assert report.about("memory") == ["ok: 1.0 GiB are free; the container's limit is 2.0 GiB"]
    assert report.about("cores")[0].startswith("warning: ")
    assert "the container's limit is 0.5 CPUs" in report.about("cores")[0]
    descriptors, threads, locked = report.about("limits")
    assert descriptors.startswith("warning: the process may have 100 descriptors")
    assert threads.startswith("problem: the container may have 20 threads")
    assert locked.startswith("problem: the process may lock 100 bytes, and the model has")


def test_cores_that_are_throttled(
    diagnose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "_CPUS", tmp_path)
    stats = tmp_path / "cpu.stat"
    monkeypatch.setattr(doctor, "_CPU_STATS", (tmp_path / "none", stats))

    def numbers(name: str, *values: int) -> None:
        for i, value in enumerate(values):
            file = tmp_path / f"cpu{i}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")

    stats.write_text("nr_periods 0\nnr_throttled 0\n")  # no quota
    numbers("thermal_throttle/core_throttle_total_time_ms", 0, 20)
    numbers("cpufreq/cpuinfo_max_freq", 4_000_000, 4_000_000)
    numbers("cpufreq/scaling_max_freq", 4_000_000, 4_000_000)
    assert len(diagnose().about("cores")) == 1
    stats.write_text("nr_periods 1000\nnr_throttled 300\n")
    numbers("thermal_throttle/core_throttle_total_time_ms", 0, 10**12)
    numbers("cpufreq/scaling_max_freq", 1_200_000, 1_200_000)
    report = diagnose()
    assert report.code == 0
    _, quota, heat, power = report.about("cores")
    assert quota.startswith("warning: the container's limit stops them in 30% of its periods -> ")
    assert heat.startswith("warning: heat has slowed them down for 11574 d")
    assert power.startswith("warning: they are limited to 1.2 of 4.0 GHz -> ")


def test_the_speed_of_the_disk(diagnose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SAMPLE", 2**20)
    monkeypatch.setattr(doctor, "_SLOW_DISK", 0)
    (fast,) = diagnose().about("disk")
    assert fast.startswith("ok: the disk reads ") and "bundled.gguf needs" in fast
    monkeypatch.setattr(doctor, "_SLOW_DISK", 1e15)
    (slow,) = diagnose().about("disk")
    assert slow.startswith("warning: ") and "-> move the model to a local disk" in slow


def test_proxies(diagnose, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.delenv("MODEL_ENDPOINT", raising=False)
    assert diagnose().about("proxy") == []
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy.example:3128")
    assert diagnose().about("proxy") == [
        "ok: models are downloaded through http://proxy.example:3128"
    ]
    monkeypatch.setenv("https_proxy", "socks5://proxy.example")
    (refused,) = diagnose().about("proxy")
    assert refused.startswith("warning: The proxy socks5://proxy.example is not one for HTTP.")
    monkeypatch.delenv("https_proxy")
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    (local,) = diagnose().about("proxy")
    assert local.endswith("-> export NO_PROXY=127.0.0.1,localhost")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    assert diagnose().about("proxy") == []


def test_more_threads_than_cores(diagnose) -> None:
    (cores,) = diagnose("-t", "500").about("cores")
    assert cores.startswith("warning: ")
    assert "-> set --threads to" in cores


def test_folders(diagnose, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    cache, found = diagnose("--slot-save-path", str(tmp_path)).about("folders")
    assert cache.startswith(f"ok: the cache of models {tmp_path}/hub: ")
    assert found.startswith(f"ok: --slot-save-path {tmp_path}: ")


def test_models_in_a_folder(diagnose, tmp_path: Path) -> None:
    report = diagnose("--models-dir", str(tmp_path / "none"))
    assert report.code == 1
    assert "cannot be read: No such file" in report.about("models")[0]
    (tmp_path / "big-00001-of-00002.gguf").touch()
    report = diagnose("--models-dir", str(tmp_path))
    assert report.code == 0
    left_out, others = report.about("models")
    assert left_out.endswith("is left out, for big-00002-of-00002.gguf is missing")
    assert others == "ok: 0 to choose from, and the bundled one"


def test_other_machines_are_asked(
    diagnose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "free_memory", lambda: 2**20)
    with listening(answers(n_devices=2, free=2**31)) as there, listening(closes) as other:
        report = diagnose("-c", "512", "--rpc", f"{there},{other}")
    assert report.code == 1
    missing, found, closed = report.about("rpc")
    assert missing.startswith("problem: rpc needs a library")
    assert found == (
        f"ok: {there}: 2.0 GiB of 4.0 GiB free and 2.0 GiB of 4.0 GiB free, "
        "version 7.0.0 of the protocol"
    )
    assert closed.startswith(f"problem: The RPC server {other} has closed the connection")
    assert report.about("model")[0].startswith("ok: ")  # there is room on another machine


def test_commands_of_a_user_without_a_home_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_homeless(monkeypatch)
    assert main(["list"]) == 0
    assert main(["doctor", "--port", "0"]) in (0, 1)
    assert "warning  folders       This user has no home folder" in capsys.readouterr().out
