"""`MediaConfig`: the projector of a model, and what images, sound and video may be sent."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import attrs

from trioserve.config.option import option
from trioserve.config.readers import parse_host
from trioserve.config.source import SourceConfig
from trioserve.errors import ConfigError
from trioserve.types.params import INT32_MAX

_media = partial(option, group="Media")


def _check_projector(config: MediaConfig) -> None:
    lowest, highest = config.image_min_tokens, config.image_max_tokens
    if 0 < highest < lowest:
        raise ConfigError(f"image_min_tokens must be at most image_max_tokens, which is {highest}")


def _check_media_path(config: MediaConfig) -> None:
    if config.media_path is not None and not Path(config.media_path).is_dir():
        raise ConfigError(f"media_path is {config.media_path!r}, which is not a directory")


def _check_transcription(config: MediaConfig) -> None:
    if (name := config.transcription_model) is None:
        return
    if not name or (name[0] in "./~" and not (Path(name) / "model.bin").is_file()):
        raise ConfigError(f"transcription_model is {name!r}, which is not a directory with a model "
                          "that faster-whisper reads")  # fmt: skip
    if importlib.util.find_spec("faster_whisper") is None:
        raise ConfigError("transcription_model needs faster-whisper: install trioserve[whisper]")


def _check_media_urls(config: MediaConfig) -> None:
    for text in config.media_urls:
        parse_host(text)


# fmt: off


@attrs.frozen(kw_only=True)
class MediaConfig(SourceConfig):
    """What makes of images and sound what the model takes. Names are llama-server's.

    Raises:
        ConfigError: a value cannot be used; the message names the field.
    """

    CHECKS = (
        *SourceConfig.CHECKS, _check_projector, _check_media_path, _check_media_urls,
        _check_transcription,
    )

    mmproj: str | None = _media(None, "-mm --mmproj LLAMA_ARG_MMPROJ",
        help="path of a GGUF file with the model's projector, which takes images or sound; by "
        "default the one that comes with a model from the hub")
    mmproj_url: str | None = _media(None, "-mmu --mmproj-url LLAMA_ARG_MMPROJ_URL",
        help="address of such a file to download, unless it is in the cache and has not changed; "
        "with --mmproj, to that path")
    mmproj_auto: bool = _media(True,
        "--mmproj-auto | --no-mmproj --no-mmproj-auto LLAMA_ARG_MMPROJ_AUTO",
        help="use the projector that comes with a model")
    mmproj_offload: bool = _media(True,
        "--mmproj-offload | --no-mmproj-offload LLAMA_ARG_MMPROJ_OFFLOAD",
        help="run the projector on the GPU")
    mmproj_device: str | None = _media(None, "-mmdev --mmproj-device MTMD_BACKEND_DEVICE",
        help="device to run the projector on (see --list-devices); none = the CPU; by default the "
        "first of --device")
    image_min_tokens: int = _media(-1,
        "--image-min-tokens LLAMA_ARG_IMAGE_MIN_TOKENS", min=-1, max=INT32_MAX,
        help="minimum number of tokens for an image, where it follows from the image's size; "
        "-1 = as the model says")
    image_max_tokens: int = _media(-1,
        "--image-max-tokens LLAMA_ARG_IMAGE_MAX_TOKENS", min=-1, max=INT32_MAX,
        help="maximum number of tokens for an image, where it follows from the image's size; "
        "-1 = as the model says")
    video_fps: float = _media(4.0, "--video-fps LLAMA_ARG_VIDEO_FPS", min=0, max=1000,
        help="frames to take of each second of a video; 0 = all")
    video_timestamp_interval: int = _media(5000,
        "--video-timestamp-interval LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL", min=0, max=INT32_MAX,
        help="milliseconds of a video after which the model is told the time again; 0 = never")
    media_path: str | None = _media(None, "--media-path",
        help="directory of files that requests may name, as file:// and their path in it")
    media_urls: tuple[str, ...] = _media((), "--media-urls TRIOSERVE_MEDIA_URLS",
        help="hosts, separated by commas, that requests may have files fetched from, over http and "
        "https; .example.org = all names below it; all = any host; HOST:PORT = at this port too; "
        "HOST=10.0.0.0/8 = a host whose addresses are in this range, where they would have to be "
        "public ones; by default none")
    media_max_bytes: int = _media(64 * 2**20, "--media-max-bytes TRIOSERVE_MEDIA_MAX_BYTES", min=1,
        help="maximum size in bytes of a file with an image, sound or a video")
    media_max_pixels: int = _media(64 * 2**20,
        "--media-max-pixels TRIOSERVE_MEDIA_MAX_PIXELS", min=1,
        help="maximum number of pixels in an image or a frame")
    media_max_seconds: float = _media(3600.0,
        "--media-max-seconds TRIOSERVE_MEDIA_MAX_SECONDS", min=0.001,
        help="maximum length of sound or a video in seconds")
    media_max_frames: int = _media(256, "--media-max-frames TRIOSERVE_MEDIA_MAX_FRAMES", min=1,
        help="maximum number of frames that are taken of a video")
    media_cache: int = _media(256, "--media-cache TRIOSERVE_MEDIA_CACHE", min=0,
        help="MiB of RAM for the embeddings of the latest images and sound, which need not be "
        "encoded again where the KV cache does not have them any more; 0 = none")
    media_timeout: float = _media(30.0, "--media-timeout TRIOSERVE_MEDIA_TIMEOUT", min=0.001,
        help="seconds that fetching a file may take, and decoding one")
    transcription_model: str | None = _media(None,
        "--transcription-model TRIOSERVE_TRANSCRIPTION_MODEL",
        help="Whisper model that transcribes recordings in a process of its own, instead of the "
        "loaded model: a directory, or a name such as small, which is downloaded; it needs "
        "trioserve[whisper]")
    transcription_prompt: str = _media("Transcribe audio to text",
        "--transcription-prompt TRIOSERVE_TRANSCRIPTION_PROMPT",
        help="what the loaded model is told to do with a recording that it transcribes")
    # fmt: on
