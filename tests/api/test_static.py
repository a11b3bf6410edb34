"""The files of `--path`."""

from __future__ import annotations

from pathlib import Path

from tests.support.http_server import connected, serving_script


async def test_files_of_a_folder_and_nothing_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "public"
    (folder / "sub").mkdir(parents=True)
    (folder / "page.html").write_text("a page")
    (tmp_path / "secret.txt").write_text("a secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "inside.html").symlink_to("page.html")
    paths = {
        "/page.html": b"200",
        "/inside.html": b"200",
        "/link.txt": b"404",
        "/../secret.txt": b"404",
        "/%2e%2e/secret.txt": b"404",
        "/sub": b"404",
        "/" + "a" * 300: b"404",
        "/a%00b": b"404",
    }
    for keys in ((), ("right",)):
        async with serving_script(static_path=str(folder), api_keys=keys) as (url, _):
            for path, status in paths.items():
                answer = await get(url, path, *(f"Authorization: bearer {key}" for key in keys))
                assert answer[9:12] == status, path
                assert b"a secret" not in answer
                if path == "/page.html":
                    assert b"\r\ncontent-type: text/html; charset=utf-8\r\n" in answer
            if keys:
                for path in (
                    "/page.html",
                    "/v1/stream/../../page.html",
                    "/v1/stream/x/../page.html",
                ):
                    assert (await get(url, path))[9:12] == b"401", path


async def get(url: str, path: str, *headers: str) -> bytes:
    """Ask for a path as it is: a client would tidy it up."""
    head = [f"GET {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""]
    answer = b""
    async with connected(url) as stream:
        await stream.send_all("\r\n".join(head).encode())
        while part := await stream.receive_some(65536):
            answer += part
    return answer
