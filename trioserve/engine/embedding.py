"""The embedding engine: texts of several requests, packed into one batch a step.

Requests share each batch in round robin: each adds one text at a time until the batch is full, and
the next step starts with another request. So a request with a thousand texts does not hold up the
others.

A text with media is computed in parts: the text before a chunk, the chunk, and the text after it.
While it waits for a chunk to be encoded, other texts are computed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

import attrs
import numpy as np

from trioserve.engine.backend import EmbeddingBackend, Embeddings, Matrix, MediaPiece
from trioserve.engine.encoder import Encoded, needs
from trioserve.engine.loop import Cancel, Command, Pause, Submit
from trioserve.engine.slotted import SlottedEngine, SlottedRequest
from trioserve.errors import (
    DecodeError,
    DecodeInterruptedError,
    InputTooLongError,
    InvalidRequestError,
    KVCacheFullError,
    NotSupportedError,
    OutputError,
    TrioServeError,
)
from trioserve.types import (
    AnyTask,
    Embedded,
    EmbeddingTask,
    MediaChunk,
    Prompt,
    SlotStatus,
    Timings,
    place_of,
)


@attrs.define(eq=False)
class Piece:
    """Cells ``start <= i < stop`` of one text of a request, in a batch: tokens, or of one chunk.

    They are rows ``first_row, first_row + 1, …`` of it, and of the sequence `seq`.
    """

    request: EmbeddingState
    index: int  # of the text
    start: int
    stop: int
    seq: int
    first_row: int = 0
    #: Of its chunk; None: it has tokens.
    embeddings: Embeddings | None = attrs.field(default=None, repr=False)

    @property
    def text(self) -> Prompt:
        return self.request.task.texts[self.index]

    @property
    def n_cells(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """True if the text ends here."""
        return self.stop == len(self.text)

    def media(self) -> MediaPiece:
        """Describe the cells of a chunk to compute."""
        assert self.embeddings is not None
        return MediaPiece.of(
            self.text, self.start, self.stop, self.embeddings, self.seq, logits=True
        )


@attrs.define
class Room:
    """The room that a batch still has while it is filled."""

    rows: int
    cells: int  # of the KV cache
    seqs: list[int]
    takes_long: bool  # a text that comes in parts may begin


@attrs.define(eq=False)
class EmbeddingState(SlottedRequest):
    """The state of a task in the engine.

    The next cell for a batch is number `start` of text `index`.
    """

    task: EmbeddingTask
    index: int = 0
    start: int = 0
    n_done: int = 0  # cells
    n_missing: int = attrs.field(init=False)  # texts
    awaits_media: bool = False  # the next one is of a chunk that is not encoded yet
    _parts: list[list[Matrix]] = attrs.field(init=False)
    #: Its chunks, each with its text, and where it ends there. Those that are done go first.
    _media: deque[tuple[int, int, MediaChunk]] = attrs.field(init=False, factory=deque)

    def __attrs_post_init__(self) -> None:
        texts = self.task.texts
        self.n_missing, self._parts = len(texts), [[] for _ in texts]
        if self.task.prompt.media:
            self._media.extend(
                (index, start + chunk.n_cells, chunk)
                for index, text in enumerate(texts)
                for start, chunk in text.spans
            )

    def media_now(self) -> MediaChunk | None:
        """Return the chunk that the next cell is of, unless that is a token."""
        if not self._media or self.index == len(self.task.texts):
            return None
        return self.task.texts[self.index].part_from(self.start)[1]

    def media_ahead(self) -> list[MediaChunk]:
        """List the chunks that are not computed whole, in their order."""
        while self._media and self._media[0][:2] <= (self.index, self.start):
            self._media.popleft()
        return [chunk for _, _, chunk in self._media]

    def advance(self, piece: Piece) -> None:
        self.index, self.start = (
            (piece.index + 1, 0) if piece.is_last else (piece.index, piece.stop)
        )

    def add(self, piece: Piece, embeddings: Matrix, pooling: str) -> None:
        """Take the embeddings of a piece.

        The embeddings of a text's parts are combined by the kind of pooling: a weighted mean of the
        parts, the embedding of the first part, or that of the last one.
        """
        parts = self._parts[piece.index]
        self.n_done += piece.n_cells
        if pooling == "mean" and not (piece.start == 0 and piece.is_last):
            share = embeddings * np.float32(piece.n_cells / len(piece.text))
            parts[:] = [parts[0] + share] if parts else [share]
        elif pooling == "none":
            parts.append(embeddings)
        elif pooling != "cls" or not parts:
            parts[:] = [embeddings]
        self.n_missing -= piece.is_last

    def embeddings(self) -> tuple[Matrix, ...]:
        """Return a matrix for each text, once all are there.

        Raises OutputError: the model made something that is not a number.
        """
        if not all(bool(np.isfinite(part).all()) for parts in self._parts for part in parts):
            raise OutputError("The model made embeddings with numbers that are not finite.")
        return tuple(
            parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in self._parts
        )

    def timings(self) -> Timings:
        assert self.admitted_at is not None
        return Timings(
            queue_ms=self.queue_ms,
            prompt_n=self.n_done,
            prompt_ms=(monotonic() - self.admitted_at) * 1e3,
        )


def _go_back(pieces: Sequence[Piece]) -> None:
    """Undo what `EmbeddingState.advance` did: nothing was computed."""
    for piece in reversed(pieces):
        piece.request.index, piece.request.start = piece.index, piece.start


class EmbeddingEngine(SlottedEngine[EmbeddingState]):
    """Makes embeddings of texts.

    Args:
        backend: the model. The engine owns it, and closes it when its thread ends.
        notify: see `EngineLoop`.
    """

    def __init__(self, backend: EmbeddingBackend, notify: Callable[[], None]) -> None:
        super().__init__(backend, notify)
        self.pooling = backend.pooling
        self.width = backend.width  # numbers in an embedding
        self.labels, self.scores_are_probs = backend.labels, backend.scores_are_probs
        self._backend = backend
        #: Combines a query and a document for a ranking model; see `EmbeddingBackend`.
        self.pair = backend.pair
        #: The one text that comes in parts, from its first part to its last.
        self._long: Piece | None = None
        #: The request whose text waits for the end of it. No other long one begins before that.
        self._next_long: EmbeddingState | None = None
        self._max_pieces = backend.n_seqs
        self._was_media = False  # the last batch
        self._is_blocked = False  # until a command comes: all that runs waits for media

    @property
    def longest(self) -> int:
        """The most tokens that a text may have."""
        backend = self._backend
        return backend.n_ctx_seq if backend.can_split else min(backend.n_ctx_seq, backend.n_batch)

    # -- from any thread

    def check(self, task: AnyTask) -> None:
        self.check_works()
        if not isinstance(task, EmbeddingTask):
            raise NotSupportedError("This engine makes embeddings, and no text.")
        if not task.texts:
            raise InvalidRequestError.at(task.param, "has no texts.")
        for index, text in enumerate(task.texts):
            self._check_text(text, place_of(index, task.texts, task.param))

    def _check_text(self, text: Prompt, param: str) -> None:
        backend, n_tokens = self._backend, len(text)
        if not n_tokens:
            raise InvalidRequestError.at(param, "has no tokens.")
        start = f"'{param}' is too large: a text of {n_tokens} tokens, "
        if n_tokens > (most := backend.n_ctx_seq):
            why = f"where the context of the model holds {most}."
            raise InputTooLongError(n_tokens, most, start + why, param=param)
        if n_tokens > (most := backend.n_batch) and not backend.can_split:
            why = (
                f"and this model takes a text as a whole, of at most {most} tokens; --ubatch-size "
                "raises that, with --batch-size where that is smaller."
            )
            raise InputTooLongError(n_tokens, most, start + why, param=param)
        self.check_media(text, param)
        text.check(self.vocab.n_tokens, param)

    # -- on the inference thread

    @property
    def has_work(self) -> bool:
        return not self._is_blocked and bool(self._running or len(self._waiting))

    def _obey(self, command: Command) -> None:
        self._is_blocked = False
        match command:
            case Submit(EmbeddingTask() as task):
                self._waiting.push(EmbeddingState(task))
            case Cancel(task_id):
                self._drop(task_id)
                self._ask_for_media()
            case Encoded(chunk, TrioServeError() as error):
                for request in list(self._running):
                    if needs(request, chunk):
                        self._fail(request, error)
                self._ask_for_media()
                assert self.encoder is not None
                self.encoder.settle(chunk)
            case Pause():
                pass  # no reader can leave tokens unread

    def _remove(self, request: EmbeddingState) -> None:
        super()._remove(request)
        if self._long is not None and self._long.request is request:
            self._backend.forget(self._long.seq)
            self._long = None
        if self._next_long is request:
            self._next_long = None

    def _step(self) -> bool:
        counters = self._counters
        counters.steps += 1
        self._admit()
        self._n_readers = len(self._running)
        self._ask_for_media()
        pieces = self._pack()
        if not pieces:
            assert any(request.awaits_media for request in self._running), (
                "what was let in does not fit"
            )
            self._is_blocked = True
            return False
        self._running.rotate(-1)
        if self._compute(pieces):
            n_cells = sum(piece.n_cells for piece in pieces)
            self._count_batch((piece.request for piece in pieces), 0, n_cells)
            self._collect(pieces)
        counters.step_s += monotonic() - self.heartbeat
        counters.prompt_s = counters.step_s
        return self.has_work

    def _rest(self) -> None:
        if not self._is_blocked:
            self._ask_for_media()
        super()._rest()

    def _ask_for_media(self) -> None:
        if self.encoder is not None:
            self.encoder.serve({request.task.id: request for request in self._running})

    # -- one step: pack

    def _pack(self) -> list[Piece]:
        """Fill a batch, with tokens or with media: by turns, where there are both."""
        kinds = [self._pack_media, self._pack_tokens]
        for pack in reversed(kinds) if self._was_media else kinds:
            if pieces := pack():
                self._was_media = pieces[0].embeddings is not None
                return pieces
        return []

    def _room(self) -> Room:
        backend, long = self._backend, self._long
        seqs = [seq for seq in reversed(range(backend.n_seqs)) if long is None or seq != long.seq]
        # All cells that the long text will need are reserved for it.
        n_cells = backend.n_ctx - (0 if long is None else len(long.text))
        return Room(backend.n_batch, n_cells, seqs, takes_long=long is None)

    def _pack_media(self) -> list[Piece]:
        """Take as much of one encoded chunk as fits."""
        for request in self._running:
            chunk = request.media_now()
            if self.encoder is None or chunk is None or request.awaits_media:
                continue
            piece = self._next_piece(request, self._room())
            if piece is not None:
                piece.embeddings = self.encoder.get(chunk)
                request.advance(piece)
                return [piece]
        return []

    def _pack_tokens(self) -> list[Piece]:
        """Fill the batch with texts from one request after another."""
        batch, pieces, room = self._backend.batch, list[Piece](), self._room()
        batch.clear()
        turns = deque(self._running)
        while turns and len(pieces) < self._max_pieces:
            request = turns.popleft()
            is_media = request.media_now() is not None
            piece = None if is_media else self._next_piece(request, room)
            if piece is None:
                continue
            if piece.start == 0:
                room.cells -= len(piece.text)
            room.takes_long = room.takes_long and piece.is_last
            piece.first_row = self._backend.n_batch - room.rows
            tokens = piece.text.keys[piece.start : piece.stop]
            batch.extend(tokens, piece.text.position(piece.start), piece.seq)
            room.rows -= piece.n_cells
            request.advance(piece)
            pieces.append(piece)
            turns.append(request)
        return pieces

    def _next_piece(self, request: EmbeddingState, room: Room) -> Piece | None:
        """Choose what a request adds to a batch: a text, a part of one, or nothing."""
        if request.index == len(request.task.texts) or not room.rows:
            return None
        text = request.task.texts[request.index]
        stop = min(request.start + room.rows, text.part_from(request.start)[0])
        if request.start:  # the long text is continued
            assert self._long is not None and self._long.stop == request.start
            return Piece(request, request.index, request.start, stop, self._long.seq)
        if not room.seqs:
            return None
        is_long = len(text) > self._backend.n_batch or bool(text.media)
        if len(text) > room.rows and not is_long:
            return None
        if is_long and self._next_long not in (None, request):
            return None
        if len(text) > room.cells or (is_long and not room.takes_long):
            self._next_long = self._next_long or request
            return None
        if self._next_long is request:
            self._next_long = None
        return Piece(request, request.index, 0, stop, room.seqs.pop())

    # -- one step: run

    def _compute(self, pieces: list[Piece]) -> bool:
        compute = self._backend.compute
        if pieces[0].embeddings is not None:
            compute = partial(self._backend.compute_media, pieces[0].media())
        sizes = Counter[int]()
        for piece in pieces:
            sizes[piece.request.task.id] += piece.n_cells
        (task_id, largest), n_cells = sizes.most_common(1)[0], sizes.total()
        try:
            with self._interrupts.watching():
                self._interrupts.begin(task_id, largest, n_cells - largest)
                self._threads.run(n_cells, compute)
        except DecodeInterruptedError:
            _go_back(pieces)
            return False
        except KVCacheFullError as error:
            if len(pieces) > 1:
                self._max_pieces = len(pieces) // 2  # nothing was computed: try with less
                _go_back(pieces)
            else:
                self._fail(pieces[0].request, error)
            return False
        except DecodeError as error:
            for piece in pieces:
                self._backend.forget(piece.seq)
            for request in {id(piece.request): piece.request for piece in pieces}.values():
                self._fail(request, error)
            return False
        self._max_pieces = self._backend.n_seqs
        return True

    # -- one step: collect

    def _collect(self, pieces: list[Piece]) -> None:
        """Collect the embeddings, and finish the requests that are complete."""
        backend = self._backend
        for piece in pieces:
            if backend.pooling == "none":
                embeddings = backend.rows(piece.first_row, piece.first_row + piece.n_cells)
            else:
                embeddings = backend.pooled(piece.seq)
            piece.request.add(piece, embeddings, backend.pooling)
            if piece.is_last:
                backend.forget(piece.seq)
                if piece.start:
                    self._long = None
            else:
                self._long = piece
        for request in [request for request in self._running if request.n_missing == 0]:
            self._finish(request)

    def _finish(self, request: EmbeddingState) -> None:
        try:
            embedded = Embedded(
                task_id=request.task.id,
                embeddings=request.embeddings(),
                timings=request.timings(),
                slot_id=request.slot,
            )
        except OutputError as error:
            self._fail(request, error)
            return
        self._remove(request)
        self._emit(embedded)

    # -- a look at it

    def _n_held(self) -> int:
        return 0 if self._long is None else self._long.stop

    def _slot_status(self, request: EmbeddingState) -> SlotStatus:
        return SlotStatus(
            id=request.slot,
            state="prefill",
            n_ctx=self.n_ctx_seq,
            task_id=request.task.id,
            n_prompt=len(request.task.prompt),
            n_past=request.n_done,
            encoding=request.awaits_media,
        )
