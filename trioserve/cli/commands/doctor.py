"""``trioserve doctor``: finds problems of a server with these flags.

Each check covers one thing, and reports its state and, if needed, a remedy.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from logging.handlers import BufferingHandler
from pathlib import Path
from urllib.request import getproxies, proxy_bypass

import attrs

from trioserve._version import __version__
from trioserve.cli.commands.show import on_disk
from trioserve.cli.named import with_files
from trioserve.cli.options import Arguments, hush
from trioserve.cli.output import GREEN, RED, YELLOW, styled
from trioserve.cli.serving import open_sockets
from trioserve.config import Config
from trioserve.config.extras import EXTRAS, has_extra
from trioserve.config.parse import parse
from trioserve.errors import ConfigError, ModelLoadError, TrioServeError
from trioserve.hosts import is_local
from trioserve.llama.rpc import library
from trioserve.llama.rpc.peers import Peer, greet, locate
from trioserve.models import resolve
from trioserve.models.catalog import Catalog, Source, describe
from trioserve.models.gguf import check_file
from trioserve.models.hub.cache import default_cache_dir, default_endpoint
from trioserve.models.hub.client import proxy_of
from trioserve.models.speech import resolve_speech
from trioserve.units import bytes_text, duration_text, rate_text

if sys.platform != "win32":
    import resource

#: Descriptors that a server needs at least; each connection takes one.
_ENOUGH_DESCRIPTORS = 1024

#: Threads and processes that a server needs at least, in addition to those for computing.
_ENOUGH_THREADS = 64

#: Less free memory is too little for a model with a billion parameters.
_LITTLE_MEMORY = 2**30

#: Wheels of llama-cpp-python, in a folder for each kind of hardware, and the versions of CUDA among
#: them (as the driver counts). They are for Python up to 3.12.
_WHEELS = "https://abetlen.github.io/llama-cpp-python/whl"
_CUDA_VERSIONS = (11080, 12010, 12020, 12030, 12040, 12050, 13000, 13020)
_HAVE_WHEELS = sys.version_info < (3, 13)

_DEVICES = Path("/dev")
_CLASSES = Path("/sys/class")
_VENDORS = {"0x10de": "an NVIDIA", "0x1002": "an AMD", "0x8086": "an Intel"}

#: Most users need neither, and each installs hundreds of megabytes.
_LARGE_EXTRAS = ("ray", "whisper")

_CPUS = Path("/sys/devices/system/cpu")
_CPU_STATS = (Path("/sys/fs/cgroup/cpu.stat"), Path("/sys/fs/cgroup/cpu/cpu.stat"))

#: More time than this share in which cores are stopped or slowed down is worth a warning, and so is
#: a lower share of their frequency.
_SOME, _MOST = 0.05, 0.8

#: Bytes of a model that are read to measure the disk, and how many a second are few.
_SAMPLE = 64 * 2**20
_SLOW_DISK = 100e6

_PIDS = (Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids/pids.max"))


#: Severities: works, could be better, does not work.
_COLORS = {"ok": GREEN, "warning": YELLOW, "problem": RED}


@attrs.frozen
class Finding:
    """The result of a check: a thing, a sentence about it, and a remedy."""

    level: str
    about: str
    text: str
    advice: str = ""

    def print(self) -> None:
        level = styled(self.level.ljust(9), _COLORS[self.level])
        print(f"{level}{self.about.ljust(14)}{self.text}")
        if self.advice:
            print(f"{'':9}{'':14}-> {self.advice}")


_ok, _warning, _problem = (partial(Finding, level) for level in _COLORS)


def _judged(about: str, text: str, advice: str) -> Finding:
    return (_warning if advice else _ok)(about, text, advice)


def run(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`."""
    argv, environ = with_files(given.flags, given.environ), given.environ
    config = parse(argv, environ).config
    hush(config)
    findings = []
    for check in CHECKS:
        for one in check(config, argv, environ):
            findings.append(one)
            if not given["json"]:
                one.print()
    if given["json"]:
        print(json.dumps([attrs.asdict(one) for one in findings], indent=2, ensure_ascii=False))
    return int(any(one.level == "problem" for one in findings))


_Check = Callable[[Config, Sequence[str], Mapping[str, str]], Iterator[Finding]]


def _versions(*_others: object) -> Iterator[Finding]:
    python = f"Python {platform.python_version()} on {platform.machine()} {platform.system()}"
    yield _ok("trioserve", f"{__version__}, {python}")
    from trioserve.llama.library import check_library

    try:
        check_library()
    except TrioServeError as error:
        yield _problem("llama.cpp", error.message, "pip install -U llama-cpp-python")
        return
    from trioserve.llama import devices

    installed = version("llama-cpp-python")
    yield _ok("llama.cpp", f"llama-cpp-python {installed}: {devices.versions()}")


def _extras(*_others: object) -> Iterator[Finding]:
    missing = [name for name in EXTRAS if name not in _LARGE_EXTRAS and not has_extra(name)]
    if names := ",".join(missing):
        yield _ok("extras", f"not installed: {names}", f"install trioserve[{names}]")
    else:
        yield _ok("extras", "all are installed")


def _devices(*_others: object) -> Iterator[Finding]:
    from trioserve.llama import devices

    try:
        found = devices.devices()
    except TrioServeError:
        return  # reported above
    for one in found:
        free, total = devices.memory_of(one)
        memory = "" if one.is_cpu else f", {bytes_text(free)} of {bytes_text(total)} free"
        yield _ok("device", f"{one.name}: {one.description}{memory}")
    if all(one.is_cpu for one in found) and (gpu := _unused_gpu()) is not None:
        kind, index, setting = gpu
        yield _warning(
            "device",
            f"there is {kind} GPU here, but llama.cpp is not built for it",
            f"pip install --force-reinstall --no-deps --prefer-binary --extra-index-url "
            f"{_WHEELS}/{index} llama-cpp-python"
            if index and _HAVE_WHEELS
            else f'CMAKE_ARGS="-D{setting}=on" pip install --force-reinstall --no-deps '
            "--no-cache-dir --no-binary llama-cpp-python llama-cpp-python",
        )


def _unused_gpu() -> tuple[str, str, str] | None:
    """A GPU of this machine: its kind, the folder of its wheels, and its setting for a build."""
    if (supported := _cuda_version()) or (_DEVICES / "nvidiactl").exists():
        fitting = [one for one in _CUDA_VERSIONS if one <= (supported or 0)]
        index = f"cu{fitting[-1] // 1000}{fitting[-1] % 1000 // 10}" if fitting else ""
        return "an NVIDIA", index, "GGML_CUDA"
    if (_DEVICES / "kfd").exists():
        return "an AMD", "rocm72", "GGML_HIP"
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "an Apple", "metal", "GGML_METAL"
    for path in sorted(_CLASSES.glob("drm/renderD*/device/vendor")):
        if (_DEVICES / "dri" / path.parts[-3]).exists():
            with suppress(OSError, KeyError):
                return _VENDORS[path.read_text().strip()], "vulkan", "GGML_VULKAN"
    return None


def _cuda_version() -> int | None:
    """The newest version of CUDA that the driver supports, such as 12040; None: no driver."""
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        failed = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value


def _cores(config: Config, *_others: object) -> Iterator[Finding]:
    from trioserve.llama import machine

    cores, quota = machine.physical_cores(), machine.cpu_quota()
    granted = "" if quota is None else f", and the container's limit is {quota:g} CPUs"
    text = f"{cores} physical cores may be used{granted}"
    advice = ""
    if quota is not None and quota < 1:
        advice = "grant at least 1 CPU, or each token waits for its turn"
    elif config.threads > (most := len(machine.allowed_cpus())):
        text += f"; --threads {config.threads} is more than there are"
        advice = f"set --threads to {min(cores, most)} or less, or leave it out"
    yield _judged("cores", text, advice)


def _throttling(*_others: object) -> Iterator[Finding]:
    """Limits of the cores: the quota of a container, heat, and a mode that saves power."""
    if (share := _stopped_share()) is not None and share > _SOME:
        yield _warning("cores", f"the container's limit stops them in {share:.0%} of its periods",
                       "raise the limit of CPUs, or set --threads to it, rounded down")  # fmt: skip
    heat = _most_of("cpu*/thermal_throttle/core_throttle_total_time_ms")
    if heat > _SOME * time.clock_gettime(time.CLOCK_BOOTTIME) * 1000:
        yield _warning(
            "cores",
            f"heat has slowed them down for {duration_text(heat / 1000)} since boot",
            "look at the cooling, or set a lower --threads",
        )
    allowed = _most_of("cpu*/cpufreq/scaling_max_freq")
    possible = _most_of("cpu*/cpufreq/cpuinfo_max_freq")
    if 0 < allowed < _MOST * possible:
        yield _warning(
            "cores",
            f"they are limited to {allowed / 1e6:.1f} of {possible / 1e6:.1f} GHz",
            "end the mode that saves power, as with powerprofilesctl set performance",
        )


def _stopped_share() -> float | None:
    """In how many of its periods the quota of the container stopped it; None: it has none."""
    for path in _CPU_STATS:
        with suppress(OSError, KeyError, ValueError, ZeroDivisionError):
            fields = dict(line.split() for line in path.read_text().splitlines())
            return int(fields["nr_throttled"]) / int(fields["nr_periods"])
    return None


def _most_of(pattern: str) -> int:
    """The greatest number in files about cores; 0: none can be read."""
    most = 0
    for path in _CPUS.glob(pattern):
        with suppress(OSError, ValueError):
            most = max(most, int(path.read_text()))
    return most


def _model(config: Config, *_others: object) -> Iterator[Finding]:
    from trioserve.llama import machine
    from trioserve.llama.trial_process import measure

    free, limit = machine.free_memory(), machine.memory_limit()
    limited = "" if limit is None else f"; the container's limit is {bytes_text(limit)}"
    known = "unknown" if free is None else f"{bytes_text(free)} are free"
    is_little = free is not None and free < _LITTLE_MEMORY
    more = "a model with a billion parameters needs a GiB; end other programs, or add swap"
    yield _judged("memory", f"{known}{limited}", more if is_little else "")
    try:
        config = on_disk(config)
        need = measure(config)
    except TrioServeError as error:
        yield _problem("model", error.message)
        return
    path = resolve(config.model)
    if not (config.serves_embeddings or config.chat_template or describe(path).template):
        yield _warning(
            "model",
            f"{path.name} has no chat template",
            "for chats, take an instruction-tuned model, or set --chat-template",
        )
    free = _free_for_model(free, config)
    text = f"{path.name} needs {bytes_text(need.total)} for {need.n_ctx} tokens of context"
    smaller = "set a smaller --ctx-size, or take a file with a smaller quantization"
    if free is None or need.total <= free:
        yield _ok("model", text)
    elif need.cache + need.compute > free:
        yield _problem("model", f"{text}, which is more than there is", smaller)
    else:
        yield _warning("model", f"{text}; the file will be read again and again", smaller)


def _free_for_model(in_ram: int | None, config: Config) -> int | None:
    from trioserve.llama import devices

    gpus = [devices.memory_of(one)[0] for one in devices.devices() if not one.is_cpu]
    remote = [free for one in _peers(config) if isinstance(one, Peer) for free, _ in one.memory]
    return None if in_ram is None else in_ram + sum(gpus) + sum(remote)


def _speech(config: Config, *_others: object) -> Iterator[Finding]:
    from trioserve.server.speech.recordings import DEFAULT_VOICE, find_recordings

    try:
        files = resolve_speech(on_disk(config))
        if files is None:
            return
        for path in attrs.astuple(files):
            check_file(path)
        voices = ", ".join(dict.fromkeys((DEFAULT_VOICE, *find_recordings(config))))
    except TrioServeError as error:
        yield _problem("speech", error.message)
    else:
        yield _ok("speech", f"{files.model.name} with {files.projector.name}; voices: {voices}")


@cache
def _peers(config: Config) -> list[Peer | ModelLoadError]:
    """Connect to the machines in `--rpc`, once."""
    found: list[Peer | ModelLoadError] = []
    for named in config.rpc:
        try:
            found.append(greet(named, locate(named, allow_public=config.rpc_allow_public)))
        except ModelLoadError as error:
            found.append(error)
    return found


def _rpc(config: Config, *_others: object) -> Iterator[Finding]:
    if config.rpc:
        try:
            library.check()
        except TrioServeError as error:
            yield _problem("rpc", error.message)
    for one in _peers(config):
        if isinstance(one, ModelLoadError):
            yield _problem("rpc", one.message)
            continue
        memory = " and ".join(f"{bytes_text(f)} of {bytes_text(t)} free" for f, t in one.memory)
        protocol = ".".join(map(str, one.version))
        yield _ok("rpc", f"{one.named}: {memory}, version {protocol} of the protocol")


def _models(config: Config, argv: Sequence[str], environ: Mapping[str, str]) -> Iterator[Finding]:
    logger, handler = logging.getLogger("trioserve.models.catalog"), BufferingHandler(10_000)
    before = logger.level, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.propagate = False  # its warnings are findings
    logger.addHandler(handler)
    try:
        catalog = Catalog(config, argv, environ)
    except TrioServeError as error:
        yield _problem("models", error.message)
        return
    finally:
        logger.removeHandler(handler)
        level, logger.propagate = before
        logger.setLevel(level)
    for record in handler.buffer:
        yield _warning("models", record.getMessage())
    found = [one for one in catalog.entries.values() if one.source is not Source.BUNDLED]
    yield _ok("models", f"{len(found)} to choose from, and the bundled one")


def _port(config: Config, *_others: object) -> Iterator[Finding]:
    try:
        with open_sockets(config):
            pass
    except TrioServeError as error:
        yield _problem(
            "address",
            error.message,
            "end what listens there (ss -ltnp tells what it is), or set another --port",
        )
    else:
        where = config.host if config.host.endswith(".sock") else f"{config.host}:{config.port}"
        yield _ok("address", f"{where} is free")
    hosts = [one.strip() for one in config.host.split(",")]
    is_private = all(is_local(one) or one.endswith(".sock") for one in hosts)
    if not config.has_api_keys and not is_private:
        yield _warning("address", "any client that reaches this machine can use the server",
                       "set --api-key, or leave --host out")  # fmt: skip


def _limits(config: Config, *_others: object) -> Iterator[Finding]:
    if sys.platform == "win32":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = "any number of" if hard == resource.RLIM_INFINITY else str(hard)
    text = f"the process may have {number} descriptors"
    advice = ""
    if hard != resource.RLIM_INFINITY and hard < _ENOUGH_DESCRIPTORS:
        text += ", and each connection takes one"
        advice = "ulimit -Hn 65536, LimitNOFILE=65536 (systemd) or --ulimit nofile=65536 (Docker)"
    yield _judged("limits", text, advice)
    if (threads := _max_threads()) is not None and threads < _ENOUGH_THREADS:
        yield _problem(
            "limits",
            f"the container may have {threads} threads and processes",
            f"--pids-limit {_ENOUGH_THREADS * 8} (Docker), or pids.max of the cgroup",
        )
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = 0 if (file := _file_of(config)) is None else file.stat().st_size
    if "mlock" in config.load_mode and locked != resource.RLIM_INFINITY and locked < size:
        yield _problem(
            "limits",
            f"the process may lock {bytes_text(locked)}, and the model has {bytes_text(size)}",
            "ulimit -l unlimited, LimitMEMLOCK=infinity (systemd), or another --load-mode",
        )


def _max_threads() -> int | None:
    for path in _PIDS:
        with suppress(OSError, ValueError):  # no such limit
            return int(path.read_text())
    return None


def _folders(config: Config, _argv: Sequence[str], environ: Mapping[str, str]) -> Iterator[Finding]:
    cache = None
    try:
        cache = str(default_cache_dir(environ))
    except ConfigError as error:
        yield _warning("folders", error.message)
    for flag, name in (
        ("the cache of models", cache),
        ("--slot-save-path", config.slot_save_path),
        ("--log-prompts-dir", config.log_prompts_dir),
    ):
        if name is None or not Path(name).is_dir():
            continue
        if os.access(name, os.W_OK | os.X_OK):
            free = bytes_text(shutil.disk_usage(name).free)
            yield _ok("folders", f"{flag} {name}: {free} are free")
        else:
            yield _problem("folders", f"{flag} {name} cannot be written to",
                           f"chmod u+wx {name}, or name another one")  # fmt: skip


def _disk(config: Config, *_others: object) -> Iterator[Finding]:
    path = _file_of(config)
    if path is None or (size := path.stat().st_size) < _SAMPLE:
        return
    try:
        speed = _speed_of(path, size)
    except OSError:
        return  # the model's check reports it
    seconds = size / speed
    text = (
        f"the disk reads {rate_text(speed)}, so {path.name} needs {duration_text(seconds)} to load"
    )
    local = "move the model to a local disk; a network is often slower"
    yield _judged("disk", text, local if speed < _SLOW_DISK else "")


def _file_of(config: Config) -> Path | None:
    """The file of the model; None if it is missing, which the model's check reports."""
    with suppress(TrioServeError):
        path = resolve(on_disk(config).model)
        return path if path.is_file() else None
    return None


def _speed_of(path: Path, size: int) -> float:
    """Read a part of a file that the system does not hold in memory; returns bytes a second."""
    with path.open("rb", buffering=0) as file:
        begin = (size - _SAMPLE) // 2
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), begin, _SAMPLE, os.POSIX_FADV_DONTNEED)
        file.seek(begin)
        started, left = time.perf_counter(), _SAMPLE
        while left > 0 and (n_read := len(file.read(2**20))):
            left -= n_read
        return (_SAMPLE - left) / (time.perf_counter() - started)


def _network(
    _config: Config, _argv: Sequence[str], environ: Mapping[str, str]
) -> Iterator[Finding]:
    try:
        proxy = proxy_of(default_endpoint(environ))
    except TrioServeError as error:
        yield _warning("proxy", error.message, "set HTTPS_PROXY to one, or download by hand")
    else:
        if proxy is not None:
            address = bytes(proxy.url).decode(errors="replace").rstrip("/")
            yield _ok("proxy", f"models are downloaded through {address}")
    if "http" in getproxies() and not proxy_bypass("127.0.0.1"):
        yield _warning("proxy", "programs may send requests for 127.0.0.1 to the proxy",
                       "export NO_PROXY=127.0.0.1,localhost")  # fmt: skip


#: In the order of the report.
CHECKS: tuple[_Check, ...] = (
    _versions, _extras, _devices, _cores, _throttling, _rpc, _model, _speech, _disk, _models,
    _network, _port, _limits, _folders,
)  # fmt: skip
