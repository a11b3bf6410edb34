"""Finds the files of the model that speaks, and has the bundled voice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from trioserve.config.checks import NO_SPEECH
from trioserve.config.extras import has_extra
from trioserve.errors import ModelLoadError
from trioserve.models import gguf, resolve
from trioserve.models.hub.reference import projector_beside

if TYPE_CHECKING:
    from trioserve.config import Config


@attrs.frozen
class SpeechFiles:
    """The files of a model that speaks. The projector makes sound of what the model computes."""

    model: Path
    projector: Path

    @property
    def are_there(self) -> bool:
        return self.model.exists() and self.projector.exists()


#: What speaks for the bundled model, if it is there.
BUNDLED_VOICE = SpeechFiles(
    Path(__file__).with_name("bundled-voice.gguf"),
    Path(__file__).with_name("bundled-voice-mmproj.gguf"),
)


def resolve_speech(config: Config) -> SpeechFiles | None:
    """Return the files of the model that `Config.tts` names; None: the server does not speak.

    Without `Config.tts_mmproj`, the projector is the one that came with the model from the hub, or
    the one in the folder of its file. Reads headers of files, so it blocks.

    Raises:
        ModelLoadError: it is a model of the hub that is not in the cache, or there is no projector.
    """
    if config.tts == NO_SPEECH:
        return None
    if config.tts is None:
        is_bundled = config.model_named is None and not config.serves_embeddings
        if is_bundled and BUNDLED_VOICE.are_there and has_extra("speech"):
            return BUNDLED_VOICE
        if any((config.tts_voices, config.tts_speaker_file, config.tts_lang)):
            raise ModelLoadError("The bundled model has no voice; name a model that speaks, --tts.")
        return None
    model = resolve(config.tts)
    if config.tts_mmproj is not None:
        return SpeechFiles(model, Path(config.tts_mmproj))
    gguf.check_file(model)
    if (projector := _projector_of(model)) is None:
        raise ModelLoadError(
            f"There is no projector of a speech model in {model.parent}; name the one of "
            f"{model.name} with --tts-mmproj."
        )
    return SpeechFiles(model, projector)


def _projector_of(model: Path) -> Path | None:
    """Find the projector in the model's folder that makes sound."""
    names = [one.name for one in model.parent.glob("*mmproj*.gguf") if makes_sound(one)]
    found = projector_beside(sorted(names), model.name)
    return None if found is None else model.with_name(found)


def makes_sound(projector: Path) -> bool:
    """Return True if a file is the projector of a model that speaks. Blocks."""
    try:
        with gguf.read(projector) as header:
            return header.flag("clip.has_gen_audio_encoder")
    except ModelLoadError:
        return False  # it may be another model's
