from __future__ import annotations

import gc
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trioserve import llama
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama import library, machine, model
from trioserve.llama.model import LlamaModel
from trioserve.models import BUNDLED
from trioserve.models.gguf import check_file


@pytest.fixture(scope="module")
def gguf() -> bytes:
    return BUNDLED.read_bytes()


def load_error(path: Path | str, **fields: object) -> str:
    """Load a file that cannot be loaded; returns the sentence."""
    with pytest.raises(ModelLoadError) as caught:
        LlamaModel.load(Config(model=str(path), **fields))
    message = caught.value.message
    assert str(path) in message
    assert "\n" not in message
    assert message.endswith(".")
    return message


# -- files that are no model


def test_a_missing_file(tmp_path: Path) -> None:
    assert load_error(tmp_path / "none.gguf") == f"No such file: {tmp_path}/none.gguf."
    for name in ("nine.gguf", "zebra.gguf", "none.txt"):
        (tmp_path / name).touch()
    told = load_error(tmp_path / "none.gguf")
    assert told == f"No such file: {tmp_path}/none.gguf; there is {tmp_path}/nine.gguf."
    assert (
        load_error(tmp_path / "none")
        == f"No such file: {tmp_path}/none; there is {tmp_path}/nine.gguf, {tmp_path}/zebra.gguf."
    )
    assert load_error(tmp_path / "no" / "none.gguf").endswith(f"there is no folder {tmp_path}/no.")


def test_a_directory(tmp_path: Path) -> None:
    assert "is a directory" in load_error(tmp_path)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "mine.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(Path, "open", refuse)
    assert "cannot be read: Permission denied" in load_error(path)


def test_a_path_with_a_nul_character() -> None:
    with pytest.raises(ModelLoadError, match="cannot be read"):
        check_file(Path("a\0b.gguf"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: b"", "is empty"),
        (
            lambda data: b"hello, this is no model",
            "is not a GGUF file: it does not begin with GGUF",
        ),
        (lambda data: b"GG", "is cut short: it has 2 bytes"),
        (lambda data: data[:20], "is cut short: it has 20 bytes"),
        (lambda data: data[:24], "is cut short at 24 bytes"),
        (lambda data: data[:20_000], "is cut short at 20000 bytes"),
        (lambda data: data[: len(data) // 2], "is cut short at"),
        (lambda data: data[:-1], "is cut short at"),
        (lambda data: b"GGUF" + struct.pack("<I", 1) + data[8:], "version 1 of GGUF"),
        (lambda data: b"GGUF" + struct.pack("<I", 9) + data[8:], "is version 9"),
        (lambda data: b"GGUF" + struct.pack(">I", 3) + data[8:], "big-endian"),
        (
            lambda data: data.replace(b"general.architecture", b"general.architectur_", 1),
            "cannot be loaded: unknown model architecture: ''.",
        ),
    ],
)
def test_a_file_that_is_not_a_whole_model(
    tmp_path: Path, gguf: bytes, change: Callable[[bytes], bytes], expected: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(change(gguf))
    assert expected in load_error(path)


def test_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "free_memory", lambda: 1000)
    assert "load_mode 'mmap' needs less" in load_error(BUNDLED, load_mode="none")
    LlamaModel.load(Config(model=str(BUNDLED), load_mode="mmap")).close()


# -- progress


def test_progress_grows_to_one() -> None:
    shares: list[float] = []

    def progress(share: float) -> bool:
        shares.append(share)
        return True

    LlamaModel.load(Config(), progress=progress).close()
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_progress_may_give_up() -> None:
    calls: list[float] = []

    def progress(share: float) -> bool:
        calls.append(share)
        return len(calls) < 3

    with pytest.raises(ModelLoadError, match="was cancelled"):
        LlamaModel.load(Config(), progress=progress)
    assert len(calls) == 3


def test_what_progress_raises_passes_through() -> None:
    def progress(_share: float) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LlamaModel.load(Config(), progress=progress)


# -- what is known of the model


def test_the_info_is_that_of_the_file() -> None:
    with LlamaModel.load(Config()) as loaded:
        info = loaded.info
        assert loaded.can_cut
    assert info.name == "bundled.gguf"
    assert info.path == str(BUNDLED)
    assert info.n_ctx_train == 4096
    assert 1_000_000 < info.n_params < 4_000_000
    assert 0 < info.size < BUNDLED.stat().st_size
    assert info.modified == int(BUNDLED.stat().st_mtime)
    assert info.description.startswith("llama")
    assert info.ftype == "Q8_0"
    assert info.metadata["general.architecture"] == "llama"
    assert info.chat_template is not None
    assert len(info.chat_template) > 256  # longer than the first buffer
    assert info.eos_token == "<|im_end|>"
    assert info.vocab_type == 2


def test_a_model_that_does_not_generate_text_is_refused_and_freed() -> None:
    for function, answer, kind in (
        ("llama_model_has_encoder", True, "has an encoder"),
        ("llama_model_has_decoder", False, "has an encoder"),
        ("llama_model_is_diffusion", True, "is a diffusion model"),
        ("llama_vocab_type", 0, "has no vocabulary"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library.lib, function, lambda _handle, answer=answer: answer)
            assert kind in load_error(BUNDLED)
    gc.collect()  # one that was not freed would warn


def test_a_vocabulary_without_the_token_it_wants_added_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library.lib, "llama_vocab_get_add_bos", lambda _handle: True)
    monkeypatch.setattr(library.lib, "llama_vocab_bos", lambda _handle: -1)
    with pytest.raises(ModelLoadError, match="adds a BOS token to texts, but has none"):
        LlamaModel.load(Config())


# -- release


def test_a_forgotten_model_warns() -> None:
    loaded = LlamaModel.load(Config())
    with pytest.warns(ResourceWarning, match="was not closed"):
        loaded.__del__()
    loaded.close()
    loaded.close()
    assert loaded.handle is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.system
def test_twenty_loads_leave_nothing_behind() -> None:
    def cycle() -> None:
        with llama.load(Config(threads=1, ctx_size=512, parallel=2)) as backend:
            backend.batch.extend((1, 2, 3), 0, 0)
            backend.decode()

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    for _ in range(10):  # until the allocator has what it needs
        cycle()
    memory, files = resident(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        cycle()
    assert resident() - memory < 20 * 2**20  # one model with its context takes 15 MiB
    assert len(os.listdir("/proc/self/fd")) == files


# -- the machine


def test_hardware_threads_of_a_core_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cpu in range(4):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings").write_text(f"{3 << (cpu // 2 * 2):x}\n")
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    monkeypatch.setattr(machine, "allowed_cpus", lambda: (0, 1, 2, 3))
    assert machine.physical_cores() == 2
    monkeypatch.setattr(machine, "allowed_cpus", lambda: (0, 1))
    assert machine.physical_cores() == 1
    monkeypatch.setattr(machine, "allowed_cpus", lambda: tuple(range(8)))  # /sys knows 4
    assert machine.physical_cores() == 4


def quota_of(cgroups: str, files: dict[str, str], tmp_path: Path) -> float | None:
    """Return the quota of a process in these cgroups, on a system that has these files."""
    own = tmp_path / "own"
    own.write_text(cgroups)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_OWN_CGROUPS", own)
        patch.setattr(machine, "_CGROUPS", tmp_path)
        return machine.cpu_quota()


def test_a_quota_is_the_least_of_a_cgroup_and_those_that_it_is_in(tmp_path: Path) -> None:
    files = {"a/cpu.max": "350000 100000\n", "a/b/cpu.max": "max 100000\n"}
    assert quota_of("0::/a/b\n", files, tmp_path) == 3.5
    assert quota_of("0::/a/b/c\n", {"a/b/c/cpu.max": "20000 10000\n"}, tmp_path) == 2
    assert quota_of("0::/\n", {}, tmp_path) is None
    # In a container, the root is that of the container, and the path may be one outside.
    assert quota_of("0::/outside/x\n", {"cpu.max": "50000 100000\n"}, tmp_path) == 0.5


def test_a_quota_of_the_first_version_of_cgroups(tmp_path: Path) -> None:
    cgroups = "5:memory:/a\n4:cpu,cpuacct:/a\n1:name=systemd:/a\n0::/\n"
    files = {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}
    assert quota_of(cgroups, files, tmp_path) is None
    files = {"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert quota_of(cgroups, files, tmp_path) == 1.5
    assert quota_of("4:cpuset:/a\n", {}, tmp_path) is None


def test_without_cgroups_there_is_no_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "none")
    assert machine.cpu_quota() is None


def test_free_memory_is_what_the_system_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   64 kB\nSwapFree:  6 kB\n")
    monkeypatch.setattr(machine, "_MEMINFO", meminfo)
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    assert machine.free_memory() == 70 * 1024


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_what_its_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    home = tmp_path / "memory" if version == 1 else tmp_path
    home.mkdir(exist_ok=True)
    limit, usage, cache = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    (home / limit).write_text("1000\n")
    (home / usage).write_text("700\n")
    (home / "memory.stat").write_text(f"anon 5\n{cache} 100\n")
    own = tmp_path / "own"
    own.write_text("4:memory:/outside\n0::/\n" if version == 1 else "0::/outside\n")
    monkeypatch.setattr(machine, "_OWN_CGROUPS", own)
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    assert machine.free_memory() == 400
    assert machine.memory_limit() == 1000
    (home / limit).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    assert (machine.free_memory() or 0) > 1000
    assert machine.memory_limit() is None


def test_the_smallest_limit_of_a_cgroup_and_of_those_around_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.write_text("0::/slice/unit\n")
    monkeypatch.setattr(machine, "_OWN_CGROUPS", own)
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    for folder, limits in (
        ("slice", {"memory.max": "5000", "memory.high": "max"}),
        ("slice/unit", {"memory.max": "max", "memory.high": "3000"}),
    ):
        (tmp_path / folder).mkdir()
        for name, text in {**limits, "memory.current": "1000", "memory.stat": "anon 1"}.items():
            (tmp_path / folder / name).write_text(f"{text}\n")
    assert machine.memory_limit() == 3000
    assert machine.free_memory() == 2000


LIMITED = """
import resource, sys
from trioserve.llama import lazy_pages, machine

free = machine.free_memory()
kind = getattr(resource, sys.argv[1])
resource.setrlimit(kind, (2**30, resource.getrlimit(kind)[1]))
print(free > machine.free_memory() > 0, machine.free_memory() < 2**30, lazy_pages.is_supported())
print(machine.free_memory(for_files=True) < 2**30)
"""


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_the_process_count(kind: str) -> None:
    command = [sys.executable, "-c", LIMITED, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = ["True", "True", "False", str(kind == "RLIMIT_AS")]
    assert done.stdout.split() == expected, done.stderr


def test_without_proc_it_is_all_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "none")
    assert (machine.free_memory() or 0) > 2**20
    monkeypatch.delattr(os, "sysconf")
    assert machine.free_memory() is None


def test_a_file_whose_name_is_no_unicode(tmp_path: Path) -> None:
    """The name is in each answer, which could not be sent."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.gguf"))
    shutil.copy(BUNDLED, path)
    with LlamaModel.load(Config(model=str(path))) as loaded:
        assert loaded.info.name == "bad\\xff.gguf"
