"""`read_recordings`: the voices of ``--tts-voices`` and ``--tts-speaker-file``, as samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import trio

from trioserve.config import Config
from trioserve.config.readers import unicode_name
from trioserve.errors import ConfigError, InvalidMediaError, PayloadTooLargeError
from trioserve.log import get_logger
from trioserve.media.orders import MediaLimits
from trioserve.server.limits.memory import MemoryBudget
from trioserve.server.media.loader import MediaLoader, Wanted
from trioserve.types import DecodedAudio, MediaSource

_log = get_logger("trioserve.server")

#: The name of the voice that a request without one gets.
DEFAULT_VOICE = "default"

#: The most recordings, and seconds of one: a model gets all of it before each text.
_MAX_VOICES = 100
_MAX_SECONDS = 60.0

#: The most bytes of the samples of all together.
_MAX_BYTES = 2**28

_ENDINGS = frozenset({
    ".wav", ".mp3", ".flac", ".ogg", ".oga", ".opus", ".aac", ".m4a", ".mp4", ".webm",
})  # fmt: skip


def find_recordings(config: Config) -> dict[str, Path]:
    """Find the recordings of a configuration, by the names of their voices. Blocks.

    Raises:
        ConfigError: the folder cannot be read, or two of them have one name, or they are too many.
    """
    found: dict[str, Path] = {}
    if config.tts_speaker_file is not None:
        found[DEFAULT_VOICE] = Path(config.tts_speaker_file)
    folder = config.tts_voices
    for path in () if folder is None else _recordings_in(Path(folder)):
        name = unicode_name(path.stem)
        if (other := found.setdefault(name, path)) != path:
            raise ConfigError(f"tts_voices: {other} and {path} are both the voice {name!r}")
    if len(found) > _MAX_VOICES:
        raise ConfigError(f"tts_voices: {len(found)} recordings are too many: {_MAX_VOICES} may be")
    return found


def _recordings_in(folder: Path) -> Iterator[Path]:
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"tts_voices: {folder} cannot be read: {error.strerror}") from None
    for path in paths:
        if path.suffix.lower() in _ENDINGS and path.name[0] != "." and path.is_file():
            yield path
        else:
            _log.info("this is no recording of a voice", path=str(path))


async def read_recordings(config: Config, rate: int) -> dict[str, DecodedAudio]:
    """Read and decode the recordings of a configuration, in a process that may die.

    When cancelled, ends the process and waits for its end.

    Args:
        config: names them.
        rate: of the samples, in Hz.

    Returns:
        the recordings by the names of their voices.

    Raises:
        ConfigError: one of them cannot be used; or as `find_recordings`.
        NotSupportedError: the server is installed without `trioserve[media]`.
        UnavailableError: no process is available now.
    """
    paths = await trio.to_thread.run_sync(find_recordings, config)
    if not paths:
        return {}
    loader = MediaLoader(MediaLimits(max_seconds=_MAX_SECONDS, timeout=config.media_timeout))
    wanted = Wanted(kinds=frozenset({"audio"}), rate=rate)
    sources = [
        MediaSource(kind="audio", path=str(path), param=str(path)) for path in paths.values()
    ]
    try:
        with MemoryBudget(_MAX_BYTES).hold() as hold:
            sounds = await loader.load(sources, wanted, hold)
    except InvalidMediaError as error:
        raise ConfigError(f"a voice cannot be used: {error.message}") from error
    except PayloadTooLargeError as error:
        most = _MAX_BYTES >> 20
        raise ConfigError(f"tts_voices: as samples, they are more than {most} MiB") from error
    finally:
        await loader.aclose()
    return {
        name: sound
        for name, sound in zip(paths, sounds, strict=True)
        if isinstance(sound, DecodedAudio)
    }
