"""The messages between an app and the process of a model, in frames of msgpack.

The app sends one message in a frame. The process sends its reports (`trioserve.children.reports`),
and lists of what it says of calls and tasks: those of a step are one frame. It may be in a
stranger's hands, so what it sends is checked by these types.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

import attrs
import msgspec
import numpy as np
import trio
from msgspec import Meta, Raw, Struct

from trioserve import errors
from trioserve.chat.messages import Messages
from trioserve.chat.template.render import ChatTemplate
from trioserve.children.frames import FrameError
from trioserve.children.reports import Report
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, TrioServeError, UnsupportedFieldError
from trioserve.server.adapters import AdapterNames
from trioserve.server.context import RequestContext
from trioserve.server.generation.text import ChatOpening
from trioserve.server.model import LoadedModel, VocabFacts, template_of
from trioserve.server.prompts.media import MixedPrompt
from trioserve.server.prompts.text import AnyPrompt
from trioserve.server.transcription.transcript import Segment, Summary, Text, TranscriptEvent
from trioserve.types import (
    AdapterInfo,
    CancelReason,
    Candidates,
    Chunk,
    DocumentSource,
    Finished,
    MediaChunk,
    MediaKind,
    MediaSource,
    Progress,
    Prompt,
    PromptScores,
    Sound,
    Spoken,
    TokenId,
    TokenProb,
)

_T = TypeVar("_T")

# -- what an order has in place of classes that have no form in msgpack


class _Mixed(Struct, frozen=True):
    """A `MixedPrompt`."""

    parts: list[str | MediaPart]


class MediaPart(Struct, frozen=True):
    """A `MediaSource` that is not decoded."""

    kind: MediaKind | None
    data: bytes | None
    url: str | None
    path: str | None
    param: str

    @classmethod
    def of(cls, source: MediaSource) -> MediaPart:
        """Take what a source says."""
        if source.decoded is not None:
            raise UnsupportedFieldError.at(source.param, "cannot be sent to another process.")
        return cls(source.kind, source.data, source.url, source.path, source.param)

    @property
    def source(self) -> MediaSource:
        """The same as a source."""
        return MediaSource(**msgspec.structs.asdict(self))


SentPrompt: TypeAlias = str | list[TokenId | str] | _Mixed


def sent_prompt(prompt: AnyPrompt) -> SentPrompt:
    """Write a prompt."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, MixedPrompt):
        return _Mixed([p if isinstance(p, str) else MediaPart.of(p) for p in prompt.parts])
    return list(prompt.tokens if isinstance(prompt, Prompt) else prompt)


def prompt_in(sent: SentPrompt) -> AnyPrompt:
    """Read a prompt."""
    if isinstance(sent, _Mixed):
        return MixedPrompt(part if isinstance(part, str) else part.source for part in sent.parts)
    return sent


def sent_prompts(prompts: str | Sequence[AnyPrompt]) -> str | list[SentPrompt]:
    """Write prompts; a text is one."""
    return prompts if isinstance(prompts, str) else [*map(sent_prompt, prompts)]


def prompts_in(sent: str | list[SentPrompt]) -> Any:
    """Read prompts."""
    return sent if isinstance(sent, str) else [*map(prompt_in, sent)]


def sent_context(context: RequestContext) -> RequestContext:
    """Write a context: its times are seconds from now, as the clocks of processes differ."""
    now = trio.current_time()
    arrived = None if context.arrived is None else context.arrived - now
    return attrs.evolve(context, deadline=context.deadline - now, arrived=arrived, tally=None)


def context_in(sent: RequestContext) -> RequestContext:
    """Read a context."""
    now = trio.current_time()
    arrived = None if sent.arrived is None else sent.arrived + now
    return attrs.evolve(sent, deadline=sent.deadline + now, arrived=arrived)


def messages_in(sent: Sequence[dict[str, Any]]) -> Messages:
    """Read messages, which are in normal form."""
    sources = {"media": MediaSource, "document": DocumentSource}
    for message in sent:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if (make := sources.get(kind := part["type"])) is not None:
                part[kind] = make(**part[kind])
    return Messages(sent)


# -- what the app says


class Call(Struct, tag=True, frozen=True):
    """Call a method of `ModelServer`; the number is for what is said of it."""

    id: int
    name: str
    fields: Raw


class Cancel(Struct, tag=True, frozen=True):
    """End a call. Nothing more is said of it."""

    id: int


class EndTask(Struct, tag=True, frozen=True):
    """Cancel a task, and continue the others of its call."""

    id: int
    reason: CancelReason


class Pause(Struct, tag=True, frozen=True):
    """Send no output of a task: its reader is slow."""

    id: int


class Resume(Struct, tag=True, frozen=True):
    """Send the output of a task again."""

    id: int


class Took(Struct, tag=True, frozen=True):
    """A `Spoke` of a call was read: another one may be sent."""

    id: int


FromApp: TypeAlias = Call | Cancel | EndTask | Pause | Resume | Took


# -- what the process says


class _Said(Struct, frozen=True, array_like=True):
    pass


class Wrote(_Said, frozen=True, tag=0):
    """Output of a task: a `Chunk` without candidates."""

    task_id: int
    text: str
    tokens: tuple[TokenId, ...]
    pace: float = 0.0
    drafts: tuple[int, int] = (0, 0)


class Scored(_Said, frozen=True, tag=1):
    """Output of a task, with candidates."""

    chunk: Chunk


class Advanced(_Said, frozen=True, tag=2):
    """The progress of a prompt."""

    progress: Progress


class Moved(_Said, frozen=True, tag=3):
    """A task has got a slot, or lost it."""

    task_id: int
    queued: bool


class Ended(_Said, frozen=True, tag=4):
    """A task has ended well."""

    finished: Finished


class SentError(Struct, frozen=True):
    """An error: the name of its class, and its attributes."""

    kind: str
    fields: dict[str, str | float | int | None]

    @classmethod
    def of(cls, error: TrioServeError) -> SentError:
        """Write an error."""
        known = (str, float, int, type(None))
        fields = {k: v for k, v in vars(error).items() if isinstance(v, known)}
        fields["message"] = error.message.encode(errors="replace").decode()
        return cls(type(error).__name__, fields)

    @property
    def error(self) -> TrioServeError:
        """The same as an exception. Its class has its status and type."""
        cls = getattr(errors, self.kind, None)
        if not (isinstance(cls, type) and issubclass(cls, TrioServeError)):
            cls = TrioServeError
        message = str(self.fields.get("message", ""))
        made = cls.__new__(cls, message)
        own = {name: value for name, value in self.fields.items() if not hasattr(cls, name)}
        param, retry_after = own.get("param"), own.get("retry_after")
        vars(made).update(
            own,
            message=message,
            param=param if isinstance(param, str) else None,
            retry_after=retry_after if isinstance(retry_after, int | float) else None,
        )
        return made


class Erred(_Said, frozen=True, tag=5):
    """A task has ended badly."""

    task_id: int
    error: SentError


class Answered(_Said, frozen=True, tag=6):
    """The answer to a call, or a piece of one that is long."""

    id: int
    value: bytes
    is_last: bool = True


class Refused(_Said, frozen=True, tag=7):
    """A call has failed."""

    id: int
    error: SentError


class Heard(_Said, frozen=True, tag=8):
    """An event of a transcript, which is one of the three."""

    id: int
    text: Text | None = None
    segment: Segment | None = None
    summary: Summary | None = None

    @classmethod
    def of(cls, id_: int, event: TranscriptEvent) -> Heard:
        """Write an event."""
        told: dict[str, Any] = {type(event).__name__.lower(): event}
        return cls(id_, **told)

    @property
    def event(self) -> TranscriptEvent:
        """The event. Raises FrameError: it is missing."""
        if (event := self.text or self.segment or self.summary) is None:
            raise FrameError("an event of a transcript is missing")
        return event


#: Cells of the media in a prompt.
_MAX_CELLS = 2**22

_Count: TypeAlias = Annotated[int, Meta(ge=0)]


class PromptFacts(Struct, frozen=True):
    """A prompt, without what its media show."""

    tokens: bytes
    media: list[tuple[_Count, MediaKind, _Count, _Count]]

    def __post_init__(self) -> None:
        n_tokens, rest = divmod(len(self.tokens), 4)
        at = 0
        for n_before, *_ in self.media:
            if not at <= n_before <= n_tokens:
                raise ValueError("a prompt has media in no place")
            at = n_before
        if rest or sum(n_cells for _, _, n_cells, _ in self.media) > _MAX_CELLS:
            raise ValueError("a prompt has no such size")

    @classmethod
    def of(cls, prompt: Prompt) -> PromptFacts:
        """Write a prompt."""
        media = [(n, c.kind, c.n_cells, c.n_positions) for n, c in prompt.media]
        return cls(array("i", prompt.tokens).tobytes(), media)

    @property
    def prompt(self) -> Prompt:
        """The same as a prompt."""
        tokens = array("i")
        tokens.frombytes(self.tokens)
        chunks = [
            (n, MediaChunk(kind=kind, n_cells=cells, n_positions=positions, id="", content=None))
            for n, kind, cells, positions in self.media
        ]
        return Prompt(tokens, media=chunks)


class Opened(Struct, frozen=True):
    """The tasks of a call, which run from now on: the number of each, and its prompt."""

    tasks: list[tuple[int, PromptFacts]]
    opening: ChatOpening | None = None


class AdapterFacts(Struct, frozen=True):
    """The LoRA adapters of a model: see `AdapterNames` and `AdapterScales`."""

    paths: dict[str, str]
    infos: list[AdapterInfo]
    names: list[str]
    ids: dict[str, int]
    scales: list[float]

    @classmethod
    def of(cls, adapters: AdapterNames) -> AdapterFacts:
        """Write the adapters of a model that is in memory."""
        now = adapters.scales
        return cls(adapters.paths, now.infos, now.names, now.ids, list(now.scales))


class Introduced(_Said, frozen=True, tag=9):
    """The model is in memory: a `LoadedModel` without its template."""

    model: Raw

    @classmethod
    def of(cls, model: LoadedModel) -> Introduced:
        """Tell of a model."""
        told = msgspec.to_builtins(model.asleep(), enc_hook=_encode, builtin_types=(bytes,))
        return cls(Raw(write(_readable(told))))

    def learn(self, config: Config) -> LoadedModel:
        """Make the model as an app sees it. It is slow: it compiles the template.

        Raises:
            TemplateError: the template cannot be used.
            FrameError: the message has no valid model.
        """
        types = {**get_type_hints(LoadedModel), "vocab": VocabFacts, "template": None}
        try:
            told = msgspec.msgpack.decode(self.model)
            known = {
                name: msgspec.convert(told[name], types[name])
                for name in attrs.fields_dict(LoadedModel)
            }
            return LoadedModel(**{**known, "template": template_of(known["info"], config)})
        except (msgspec.MsgspecError, ValueError, TypeError, KeyError) as error:
            raise FrameError(f"what it says of its model is not understood: {error}") from None


def _readable(value: Any) -> Any:
    """Replace what is no Unicode in the texts of a value, as names of files may have it."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_readable(key): _readable(each) for key, each in value.items()}
    return [*map(_readable, value)] if isinstance(value, list | tuple) else value


class Adapted(_Said, frozen=True, tag=10):
    """The LoRA adapters have changed."""

    adapters: AdapterFacts


class Speaks(Struct, frozen=True):
    """A text is being spoken: see `SpeechStream`."""

    rate: Annotated[int, Meta(gt=0, le=768_000)]
    n_prompt: _Count


#: Messages with the sound of a call that may be unread, and the bytes in one of them.
MAX_UNREAD_SOUNDS, _MAX_SOUND = 4, 2**24


class Spoke(_Said, frozen=True, tag=11):
    """The next sound of a call, as float32, or how it has ended."""

    id: int
    samples: Annotated[bytes, Meta(max_length=_MAX_SOUND)] = b""
    piece: _Count = 0
    spoken: Spoken | None = None

    @classmethod
    def of(cls, id_: int, event: Sound | Spoken) -> Spoke:
        """Write an event."""
        if isinstance(event, Spoken):
            return cls(id_, spoken=event)
        return cls(id_, np.ascontiguousarray(event.samples, np.float32).tobytes(), event.piece)

    @property
    def event(self) -> Sound | Spoken:
        """The event. Raises FrameError: it is no sound."""
        if self.spoken is not None:
            return self.spoken
        if len(self.samples) % 4 or not np.isfinite(np.frombuffer(self.samples, np.float32)).all():
            raise FrameError("it sends what is no sound")
        return Sound(0, np.frombuffer(self.samples, np.float32), self.piece)


Said: TypeAlias = (
    Wrote | Scored | Advanced | Moved | Ended | Erred | Answered | Refused | Heard | Introduced
    | Adapted | Spoke
)  # fmt: skip


# -- msgpack


def _encode(value: object) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape, np.ascontiguousarray(value, np.float32).tobytes()
    if isinstance(value, Candidates):
        return [(one.id, one.piece, one.logprob) for one in value]
    if isinstance(value, ChatTemplate):
        return None
    if isinstance(value, PromptScores):
        return value.n_top, value.columns, value.pieces
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise NotImplementedError(type(value))


_Candidates: TypeAlias = list[tuple[TokenId, bytes, float]]
_Scores: TypeAlias = tuple[int, list[bytes], dict[TokenId, bytes]]


def _decode(kind: type, value: Any) -> Any:
    if kind is Candidates:
        return Candidates.of(*(TokenProb(*one) for one in msgspec.convert(value, _Candidates)))
    if kind is PromptScores:
        return PromptScores.of(*msgspec.convert(value, _Scores))
    shape, data = value
    return np.frombuffer(data, np.float32).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
_from_app: msgspec.msgpack.Decoder[FromApp] = msgspec.msgpack.Decoder(FromApp, dec_hook=_decode)
_from_process: msgspec.msgpack.Decoder[Report | list[Said]] = msgspec.msgpack.Decoder(
    Report | list[Said], dec_hook=_decode
)


def write(message: object) -> bytes:
    """Write a message, or a part of one.

    Raises:
        InvalidRequestError: it has a number, text or depth that no message has.
    """
    try:
        return _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError, RecursionError, NotImplementedError) as error:
        raise InvalidRequestError(f"The request cannot be sent to the model: {error}.") from None


def read_order(payload: bytes) -> FromApp:
    """Read what the app has sent."""
    return _from_app.decode(payload)


def read_said(payload: bytes) -> Report | list[Said]:
    """Read what the process has sent. Raises FrameError."""
    return _checked(_from_process, payload)


def read_value(value: bytes | bytearray, kind: Any) -> Any:
    """Read the value of an answer, of some type. Raises FrameError."""
    return _checked(msgspec.msgpack.Decoder(kind, dec_hook=_decode), value)


def _checked(decoder: msgspec.msgpack.Decoder[_T], payload: bytes | bytearray) -> _T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"what it says is not understood: {error}") from None
