"""A pytest plugin that runs llama-server's own tests with trioserve's models.

It replaces the downloads in the tests' module `utils`: a model of a hub becomes its stand-in
file, and an image becomes a local one, in base64. It skips tests whose model has no stand-in, and
tests of features that trioserve lacks. Text that a model with random weights cannot produce is
noted, not failed: `match_regex` is then true, and the rest of the test counts. Each test writes a
line of JSON.

It runs under another Python than trioserve's, and so imports nothing but pytest.
"""

from __future__ import annotations

import json
import os
import re
import sys
from base64 import b64decode, b64encode
from typing import Any

import pytest

#: The settings of the runner, as JSON: "models", "later", "strict", "results".
VARIABLE = "PEER_TESTS_PLAN"
_HUB = "https://huggingface.co/"
MODEL, LATER = "needs a model: ", "later: "

_plan: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))
_texts: list[str] = []
_strict = [False]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Replace what downloads."""
    utils: Any = sys.modules["utils"]
    start, match = utils.ServerProcess.start, utils.match_regex
    request = utils.ServerProcess.make_request

    def start_with_file(server: Any, timeout_seconds: int = 60) -> None:
        if server.model_hf_repo:
            names = (server.model_hf_repo, server.model_hf_file)
            server.model_file = _file("/".join(name for name in names if name))
            server.model_hf_repo = server.model_hf_file = None
        server.offline = False
        projector = _plan["projectors"].get(str(server.model_file))
        with pytest.MonkeyPatch.context() as patch:
            if projector is not None and not getattr(server, "no_mmproj", False):
                patch.setenv("LLAMA_ARG_MMPROJ", projector)
            if server.server_tools:  # which is when llama-server no longer lets all pages in
                patch.setenv("LLAMA_ARG_CORS_ORIGINS", "localhost")
            start(server, timeout_seconds)

    def match_or_note(regex: str, text: str) -> bool:
        if match(regex, text) or _strict[0]:
            return bool(match(regex, text))
        _texts.append(f"{regex} in {text!r}")
        return True

    def request_any_case(server: Any, *args: Any, **named: Any) -> Any:
        result = request(server, *args, **named)
        result.headers = _AnyCase(result.headers)
        return result

    utils.ServerProcess.start = start_with_file
    utils.ServerProcess.make_request = request_any_case
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.match_regex = match_or_note
    utils.download_file = lambda url, path=None: _file(url.rpartition("/")[2])
    get = utils.requests.get
    utils.requests.get = lambda url, **named: _image_at(url) or get(url, **named)


class _Image:
    """The answer of the hub to a request for an image."""

    def __init__(self, data: str) -> None:
        self.content = b64decode(data)

    def raise_for_status(self) -> None:
        """Report success."""


def _image_at(url: str) -> _Image | None:
    data = _plan["images"].get(url.rpartition("/")[2]) if url.startswith(_HUB) else None
    return None if data is None else _Image(data)


class _AnyCase(dict[str, str]):
    """Headers by their names in lower case, as HTTP/2 has them, and trioserve."""

    def __init__(self, headers: dict[str, str]) -> None:
        super().__init__((name.lower(), value) for name, value in headers.items())

    def __contains__(self, name: object) -> bool:
        return super().__contains__(str(name).lower())

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def get(self, name: str, default: Any = None) -> Any:
        """Like that of a dict."""
        return super().get(name.lower(), default)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Replace addresses of images that the server would have to fetch from the hub."""
    for module in {item.module for item in items}:
        if (url_of := getattr(module, "get_img_url", None)) is not None:
            module.get_img_url = lambda name, url_of=url_of: _as_data_url(url_of(name))


def _as_data_url(url: str) -> str:
    """Write the address of an image of the hub as the image itself: nothing is fetched here."""
    image = _image_at(url)
    return url if image is None else f"data:image/png;base64,{b64encode(image.content).decode()}"


def _file(name: str) -> str:
    found = _plan["models"].get(name)
    if found is None:
        pytest.skip(MODEL + name)
    return str(found)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is for later, and what only a real model can do."""
    _texts.clear()
    _strict[0] = any(re.search(pattern, item.nodeid) for pattern in _plan["strict"])
    for pattern, why in _plan["later"]:
        if re.search(pattern, item.nodeid):
            pytest.skip(LATER + why)
    if item.get_closest_marker("slow"):
        pytest.skip(MODEL + "one of several billion parameters")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Hand on which texts were not as a real model writes them."""
    report = (yield).get_result()
    if call.when == "call":
        report.user_properties.append(("texts", list(_texts)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down the result of a test."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # the controller has all of them
        return
    if report.when != "call" and report.passed:
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash else str(report.longrepr or "")
    if report.skipped and isinstance(report.longrepr, tuple):
        message = str(report.longrepr[2]).removeprefix("Skipped: ")
    texts = dict(report.user_properties).get("texts", [])
    row = {"id": report.nodeid, "outcome": report.outcome, "message": message, "texts": texts}
    with open(_plan["results"], "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
