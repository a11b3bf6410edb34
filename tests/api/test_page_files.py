"""The files of the page, as `make ui` built them: what a browser gets, and may keep."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import httpx
import pytest

import trioserve
from tests.support.clients import client_of
from tests.support.configs import read
from tests.support.fake_fleet import routed
from trioserve.config import Config
from trioserve.errors import ConfigError

BUILT = Path(trioserve.__file__).parent / "ui" / "dist"
SETTINGS = '{"theme": "dark", "temperature": 0.2}'
INDEX = (BUILT / "index.html").read_text(encoding="utf-8")
NAMED = re.findall(r'"(assets/[^"]+)"', INDEX)


def test_the_page_names_files_that_are_there_and_nothing_else() -> None:
    assert len(NAMED) >= 3
    assert [name for name in NAMED if not (BUILT / name).is_file()] == []
    # The policy forbids all of this, so it would not work.
    assert not re.search(r"\sstyle=|\son\w+=", INDEX)
    inline = [tag for tag in re.findall(r"<(?:script|style)[^>]*>", INDEX) if "src=" not in tag]
    assert inline == ["<script>", "<style>", "<script>"], "the policy names their hashes"


async def test_the_page_is_asked_for_each_time_and_its_files_never_again() -> None:
    async with client_of(api_keys=("secret",)) as client:  # the page needs no key
        page = await client.get("/")
        assert page.status_code == 200
        assert page.text == INDEX
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        assert page.headers["Cache-Control"] == "no-cache"
        for name in NAMED:
            answer = await client.get(f"/{name}")
            assert answer.status_code == 200, name
            assert answer.content == (BUILT / name).read_bytes()
            if name.startswith("assets/"):
                assert answer.headers["Cache-Control"] == "public, max-age=31536000, immutable"
        kinds = {name.rpartition(".")[2]: await kind_of(client, name) for name in NAMED}
        assert kinds["js"].startswith("text/javascript")
        assert kinds["css"].startswith("text/css")


async def kind_of(client: httpx.AsyncClient, name: str) -> str:
    return (await client.head(f"/{name}")).headers["Content-Type"]


async def test_a_worker_that_another_page_has_left_removes_itself() -> None:
    async with client_of(api_keys=("secret",)) as client:
        answer = await client.get("/sw.js")
        assert answer.headers["Content-Type"].startswith("text/javascript")
        assert answer.headers["Cache-Control"] == "no-cache"
        assert "registration.unregister()" in answer.text


async def test_a_browser_that_has_the_page_gets_no_second_copy() -> None:
    async with client_of() as client:
        first = await client.get("/")
        tag = {"If-None-Match": first.headers["ETag"]}
        second = await client.get("/", headers=tag)
        assert (second.status_code, second.content) == (304, b"")
        assert second.headers["ETag"] == first.headers["ETag"]
        other = await client.get("/", headers={"If-None-Match": '"another"'})
        assert other.status_code == 200


async def test_files_are_packed_for_those_who_take_them_packed() -> None:
    async with client_of() as client:
        del client.headers["Accept-Encoding"]
        for accepts, packed in (
            ("gzip, br", True), ("identity", False), ("gzip;q=0", False), ("*", True), (None, False)
        ):  # fmt: skip
            headers = {"Accept-Encoding": accepts} if accepts is not None else {}
            for path in ("/", "/licenses.txt"):
                async with client.stream("GET", path, headers=headers) as answer:
                    body = b"".join([part async for part in answer.aiter_raw()])
                assert ("Content-Encoding" in answer.headers) is packed, accepts
                plain = gzip.decompress(body) if packed else body
                assert plain == (BUILT / (path[1:] or "index.html")).read_bytes()
                assert "Accept-Encoding" in answer.headers["Vary"]


async def test_the_policy_lets_nothing_in_from_elsewhere() -> None:
    async with client_of() as client:
        for path in ("/", f"/{NAMED[0]}"):
            headers = (await client.get(path)).headers
            policy = dict(
                part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; ")
            )
            assert policy["default-src"] == "'none'"
            n_inline = {"/": {"script": 2, "style": 1}}.get(path, {"script": 0, "style": 0})
            for kind, count in n_inline.items():
                own = rf"'self'( 'sha256-[\w+/]{{43}}='){{{count}}}"
                assert re.fullmatch(own, policy[f"{kind}-src"])
            assert policy["connect-src"] == "'self'"
            assert policy["frame-src"] == "'self'"
            assert policy["require-trusted-types-for"] == "'script'"
            assert "unsafe" not in str(policy)
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"


async def test_a_sandbox_may_run_what_it_is_given_and_reach_nothing() -> None:
    (sandbox,) = (BUILT / "assets").glob("*.html")
    async with client_of(api_keys=("secret",)) as client:
        answer = await client.get(f"/assets/{sandbox.name}")
        policy = answer.headers["Content-Security-Policy"].split("; ")
        assert {"sandbox allow-scripts", "default-src 'none'", "frame-ancestors 'self'"} < {*policy}
        sources = {part.partition(" ")[0]: part.partition(" ")[2].split() for part in policy}
        named = {one for name, values in sources.items() if name.endswith("-src") for one in values}
        assert named == {"'none'", "'unsafe-inline'", "data:", "blob:"}


async def test_a_browser_can_install_the_page() -> None:
    (named,) = [name for name in NAMED if name.endswith(".webmanifest")]
    async with client_of(api_prefix="/llm", api_keys=("secret",)) as client:
        answer = await client.get(f"/llm/{named}")
        assert answer.headers["Content-Type"] == "application/manifest+json"
        manifest = answer.json()
        place = answer.url
        assert (await client.get(place.join(manifest["start_url"]))).text == INDEX
        assert place.join(manifest["scope"]).path == "/llm/"
        for icon in manifest["icons"]:
            found = await client.get(place.join(icon["src"]))
            assert (found.status_code, found.headers["Content-Type"]) == (200, icon["type"])


async def test_what_was_not_built_is_not_there() -> None:
    async with client_of() as client:
        for path in ("/assets/x.js", "/assets/", "/assets/..%2findex.html", "/assets/%2e%2e"):
            answer = await client.get(path)
            assert answer.status_code == 404, path
            assert answer.json()["error"]["type"] == "not_found_error"


async def test_without_a_page_there_are_no_files_of_it() -> None:
    async with client_of(ui=False) as client:
        for name in ("", *NAMED):
            assert (await client.get(f"/{name}")).status_code == 404
        assert (await client.get("/props")).json()["ui"] is False


async def test_a_folder_in_its_place_may_have_files_of_the_same_names(tmp_path: Path) -> None:
    (tmp_path / "assets" / "sub").mkdir(parents=True)
    for name in ("index.html", "licenses.txt", "assets/a.js", "assets/sub/b.js"):
        (tmp_path / name).write_text(name)
    async with client_of(static_path=str(tmp_path), api_keys=("key",)) as client:
        assert (await client.get("/")).text == "index.html"
        for name in ("licenses.txt", "assets/a.js", "assets/sub/b.js"):
            assert (await client.get(f"/{name}")).status_code == 401
            answer = await client.get(f"/{name}", headers={"Authorization": "Bearer key"})
            assert answer.text == name
            assert "Content-Security-Policy" not in answer.headers
        answer = await client.get(f"/{NAMED[-1]}", headers={"Authorization": "Bearer key"})
        assert answer.status_code == 404


async def test_below_a_prefix_and_at_a_router_it_is_the_same_page() -> None:
    async with client_of(api_prefix="/llm") as client:
        assert (await client.get("/llm/")).text == INDEX
        assert (await client.get(f"/llm/{NAMED[-1]}")).status_code == 200
    assert all(not name.startswith("/") for name in NAMED)
    async with routed(ui_config=SETTINGS) as router:
        assert (await router.client.get("/")).text == INDEX
        assert (await router.client.get(f"/{NAMED[-1]}")).status_code == 200
        assert (await router.client.get("/props")).json()["ui_settings"]["theme"] == "dark"


# -- the settings that the server has for it


async def test_settings_of_the_page_are_in_the_properties() -> None:
    async with client_of(ui_config=SETTINGS) as client:
        assert (await client.get("/props")).json()["ui_settings"] == {
            "theme": "dark",
            "temperature": 0.2,
        }
    async with client_of() as client:
        assert (await client.get("/props")).json()["ui_settings"] == {}


def test_settings_of_the_page_come_from_flags_and_files(tmp_path: Path) -> None:
    (tmp_path / "ui.json").write_text(SETTINGS)
    path = str(tmp_path / "ui.json")
    for config in (
        read("--ui-config", SETTINGS),
        read("--webui-config", SETTINGS),
        read("--ui-config-file", path),
        read(LLAMA_ARG_UI_CONFIG=SETTINGS),
        read(LLAMA_ARG_UI_CONFIG_FILE=path),
    ):
        assert json.loads(config.ui_config or "") == {"theme": "dark", "temperature": 0.2}


def test_settings_of_the_page_are_a_json_object() -> None:
    for text in ("[]", "null", '"dark"', "1"):
        with pytest.raises(ConfigError, match="ui_config must be a JSON object, not"):
            Config(ui_config=text)
    with pytest.raises(ConfigError, match="ui_config is not valid JSON"):
        Config(ui_config="{theme: dark}")
