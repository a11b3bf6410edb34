from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from trioserve import llama
from trioserve.config import Config
from trioserve.errors import BackendMismatchError, ModelLoadError
from trioserve.llama import library
from trioserve.llama.media import library as mtmd
from trioserve.models import BUNDLED

PACKAGE = Path(llama.__file__).parent


# -- the check


def test_the_list_names_what_the_sources_call() -> None:
    sources = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    called = set(re.findall(r"\b(?:lib|short|library)\.(llama_\w+)", sources))
    structures = {
        "llama_batch",
        "llama_chat_message",
        "llama_model_kv_override",
        "llama_logit_bias",
        "llama_token_data",
        "llama_token_data_array",
    }
    callbacks = {"llama_log_callback", "llama_progress_callback"}
    assert called - structures - callbacks == set(library.FUNCTIONS)
    assert list(library.FUNCTIONS) == sorted(set(library.FUNCTIONS))
    assert set(library.SHORT) <= set(library.FUNCTIONS)


def test_the_list_of_libmtmd_names_what_the_sources_call() -> None:
    sources = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    called = set(re.findall(r"\b_?mtmd\.(mtmd_\w+)", sources))
    structures = {"mtmd_input_part", "mtmd_decoder_pos", "mtmd_gen_out"}
    assert called - structures == set(mtmd.FUNCTIONS)
    assert list(mtmd.FUNCTIONS) == sorted(set(mtmd.FUNCTIONS))


def test_only_this_package_imports_llama_cpp() -> None:
    for path in PACKAGE.parent.rglob("*.py"):
        if PACKAGE not in path.parents:
            assert not re.search(r"^\s*(import|from) llama_cpp", path.read_text(), re.MULTILINE)


def imitation(**changes: Any) -> SimpleNamespace:
    """A library that has everything, with changes."""
    functions: dict[str, Any] = dict.fromkeys(library.FUNCTIONS)
    params = SimpleNamespace(type_k=1, type_v=1, n_samplers=0)
    functions["llama_context_default_params"] = lambda: params
    return SimpleNamespace(**{**functions, **changes})


def test_missing_functions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = imitation()
    monkeypatch.setattr(library, "lib", old)
    library.check_library()
    del old.llama_decode
    del old.llama_n_ctx_seq
    with pytest.raises(
        BackendMismatchError,
        match=rf"lacks llama_decode, llama_n_ctx_seq; .* {library.MIN_VERSION}",
    ):
        library.check_library()


def test_other_structures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SimpleNamespace(type_k=0, type_v=1, n_samplers=1)
    other = imitation(llama_context_default_params=lambda: params)
    monkeypatch.setattr(library, "lib", other)
    with pytest.raises(BackendMismatchError, match="structures"):
        library.check_library()


def test_no_library_at_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "lib", None)
    monkeypatch.setattr(library, "_import_error", OSError("undefined symbol: llama_decode"))
    with pytest.raises(BackendMismatchError, match="undefined symbol: llama_decode"):
        library.check_library()


def test_without_a_library_there_are_no_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "lib", None)
    assert vars(library._keep_gil()) == {}


# -- log lines


class Recorder:
    """Stands in for the logger, whatever other tests have configured."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __getattr__(self, level: str) -> Callable[[str], None]:
        return lambda event: self.lines.append((level, event))


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(library, "_log", recorder)
    monkeypatch.setattr(structlog, "is_configured", lambda: True)
    library.take_errors()
    return recorder


def log(*parts: tuple[int, str]) -> None:
    for level, text in parts:
        library._on_log(level, text.encode(), None)
    library.take_errors()


@pytest.mark.parametrize(
    ("parts", "written"),
    [
        ([(1, "a\n"), (2, "b\n"), (3, "c\n")], [("debug", "a"), ("debug", "b"), ("warning", "c")]),
        ([(4, "d\n"), (0, "e\n"), (9, "f\n")], [("error", "d"), ("debug", "e"), ("debug", "f")]),
        ([(3, "one "), (5, "two "), (5, "three\n")], [("warning", "one two three")]),
        ([(4, "broken off"), (2, "next\n")], [("error", "broken off"), ("debug", "next")]),
        ([(2, "."), (5, "."), (5, "\n"), (2, "\n"), (3, "")], []),  # a progress bar
    ],
)
def test_lines_have_levels_and_are_whole(
    recorder: Recorder, parts: list[tuple[int, str]], written: list[tuple[str, str]]
) -> None:
    log(*parts)
    assert recorder.lines == written


def test_bytes_that_are_no_text_are_marked(recorder: Recorder) -> None:
    library._on_log(3, b"\xff\n", None)
    library._on_log(3, None, None)
    assert recorder.lines == [("warning", "\ufffd")]


def test_where_structlog_is_not_configured_only_warnings_are_written(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structlog, "is_configured", lambda: False)
    log((2, "much\n"), (3, "little\n"))
    assert recorder.lines == [("warning", "little")]


def test_errors_are_kept_for_the_thread_that_made_them() -> None:
    library._on_log(4, b"f: error loading model: it is bad.\n", None)
    library._on_log(3, b"only a warning\n", None)
    other: list[list[str]] = []
    thread = threading.Thread(target=lambda: other.append(library.take_errors()))
    thread.start()
    thread.join()
    errors = library.take_errors()
    assert other == [[]]
    assert errors == ["f: error loading model: it is bad."]
    assert library.take_errors() == []
    assert library.reason(errors) == "it is bad"
    assert library.reason([]) == "llama.cpp does not say why"


def test_one_can_listen_to_what_is_logged() -> None:
    library._on_log(2, b"before", None)
    heard: list[str] = []
    with library.listening(heard.append):
        log((2, "one "), (5, "line\n"), (4, "another"))
    log((2, "after\n"))
    assert heard == ["one line", "another"]


def test_a_load_that_fails_is_logged(recorder: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(BUNDLED.read_bytes()[:20_000])
    with pytest.raises(ModelLoadError):
        llama.load(Config(model=str(path)))
    assert [level for level, _ in recorder.lines if level == "error"]


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )


@pytest.mark.system
def test_nothing_is_printed() -> None:
    program = (
        "from trioserve import llama; from trioserve.config import Config, logs\n"
        "config = Config(threads=1, ctx_size=256, mmproj_auto=False, log_level='warning')\n"
        "logs.configure(config)\n"
        "with llama.load(config) as b: b.batch.extend((1, 2), 0, 0); b.decode()"
    )
    done = run(program)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.system
def test_importing_the_package_does_not_import_llama_cpp() -> None:
    done = run("import sys, trioserve.llama; print('llama_cpp' in sys.modules)")
    assert done.stdout == "False\n"


# -- ggml and its backends


def test_backends_that_are_libraries_of_their_own_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[bytes] = []
    shared = SimpleNamespace(
        _name="/somewhere/lib/libllama.so",
        ggml_backend_dev_count=lambda: len(loaded),
        ggml_backend_load_all_from_path=loaded.append,
    )
    monkeypatch.setattr(library, "lib", SimpleNamespace(_lib=shared))
    library._load_backends()
    library._load_backends()
    assert loaded == [b"/somewhere/lib"]


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_devices_are_those_of_the_ggml_that_llama_cpp_uses() -> None:
    """A second copy would have a separate list of backends, maybe an empty one."""
    program = (
        "from trioserve.llama.devices import devices; devices();"
        "lines = open('/proc/self/maps').read().split();"
        "print(len({line for line in lines if '/libggml.' in line}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"


BARE = """
import sys
from trioserve.llama import library
assert "llama_cpp" not in sys.modules and "llama_cpp.llama" not in sys.modules
import llama_cpp
assert llama_cpp.Llama and llama_cpp.llama_cpp is library.lib
assert library.bindings("_ggml") is sys.modules["llama_cpp._ggml"]
"""


@pytest.mark.system
def test_only_the_bindings_are_imported_and_a_program_may_import_the_rest() -> None:
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
