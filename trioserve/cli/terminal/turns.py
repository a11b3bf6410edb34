"""`Turn`: a message of a chat in the terminal, with images by their paths; and saved chats."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from trioserve.chat.messages import Image
from trioserve.config.files import user_state
from trioserve.errors import ConfigError, InvalidMediaError

#: The path of an image in a message: in quotes, or with escaped spaces, as terminals drop files.
_IMAGE = re.compile(
    r"""'([^'\n]+\.(?:png|jpe?g|webp|gif))'|"([^"\n]+\.(?:png|jpe?g|webp|gif))"|"""
    r"""((?:\\.|[^\s\\'"])+\.(?:png|jpe?g|webp|gif))(?=[\s?!,;:)]|\.?$|\.\s)""",
    re.IGNORECASE,
)


class Turn(msgspec.Struct):
    """A message. `images` are paths."""

    role: Literal["user", "assistant"]
    content: str
    images: list[str] = []

    def message(self) -> dict[str, Any]:
        if not self.images:
            return {"role": self.role, "content": self.content}
        parts = [*map(Image, self.images), {"type": "text", "text": self.content}]
        return {"role": self.role, "content": parts}


class Saved(msgspec.Struct):
    """A chat in a file."""

    model: str
    messages: list[Turn]
    system: str = ""
    parameters: dict[str, Any] = {}


def begins_with_path(text: str) -> bool:
    """True if a message begins with the path of an image, and not with a command."""
    return _IMAGE.match(text) is not None


def typed(text: str) -> Turn:
    """Make a message of what is typed: the paths of images in it become images.

    Raises:
        InvalidMediaError: there is no such file.
    """
    images: list[str] = []

    def take(found: re.Match[str]) -> str:
        name = found[1] or found[2] or re.sub(r"\\(.)", r"\1", found[3])
        path = Path(os.path.expanduser(name))
        if path.is_file():
            images.append(str(path.absolute()))
            return ""
        is_path = name != path.name and "://" not in name
        if is_path:
            raise InvalidMediaError(f"There is no file {name}, so the message was not sent.")
        return found[0]  # a name in a sentence

    rest = _IMAGE.sub(take, text)
    return Turn("user", rest.strip() if images else text, images)


# -- saved chats


def chats() -> Path:
    """The folder of this user's chats. Raises ConfigError: the user has no home folder."""
    return user_state(os.environ) / "chats"


def file_of(name: str) -> Path:
    """The file of a saved chat: a path, or a name among the chats of this user.

    Raises:
        ConfigError: the user has no home folder.
    """
    if "/" in name or name.endswith(".json"):
        return Path(os.path.expanduser(name))
    return chats() / f"{name}.json"


def save(saved: Saved, path: Path) -> None:
    """Write a chat into a file, which no other user can read.

    Raises:
        ConfigError: it cannot be written.
    """
    data = msgspec.json.format(msgspec.json.encode(saved), indent=1)
    try:
        if path.parent == chats():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def load(path: Path) -> Saved:
    """Read a saved chat. Raises ConfigError if the file cannot be read as one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Saved)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no saved chat: {error}") from None


def saved_names() -> list[str]:
    """The names of the chats of this user."""
    return sorted(path.stem for path in chats().glob("*.json"))
