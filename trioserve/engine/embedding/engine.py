"""The embedding engine: texts of several requests, packed into one batch a step.

Requests that have their turn share the batches: each adds one text after another, round and
round, until the batch is full, and another one begins in the next step. So a request with a
thousand texts does not hold up the others.

A text with media comes in parts: what is before a chunk, the chunk, and what is after it. While it
waits for a chunk to be encoded, other texts go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic

from trioserve.engine.embedding.backend import EmbeddingBackend
from trioserve.engine.embedding.run import EmbeddingRun, Piece, Room
from trioserve.engine.encoder import Encoded, Encoder
from trioserve.engine.inbox import Call, Cancel, Command, Pause, Resume, Stop, Submit
from trioserve.engine.loop import Loop
from trioserve.engine.queue import WaitingQueue
from trioserve.engine.task_check import check_media
from trioserve.engine.threads import Threads
from trioserve.errors import (
    DecodeError,
    EngineError,
    InputTooLongError,
    InvalidRequestError,
    KVCacheFullError,
    NotSupportedError,
    OutputError,
    TrioServeError,
)
from trioserve.types import (
    Admitted,
    Embedded,
    EmbeddingTask,
    EngineCounters,
    EngineStatus,
    Failed,
    MediaChunk,
    Task,
    TokenId,
)


class EmbeddingEngine(Loop):
    """Makes embeddings of texts.

    Args:
        backend: the model. The engine owns it, and closes it when its thread ends.
        notify: called, from the engine's thread, once after each step that left events in the
            outbox. It must not block.
    """

    def __init__(self, backend: EmbeddingBackend, notify: Callable[[], None]) -> None:
        super().__init__(backend, notify)
        self.pooling = backend.pooling
        self.width = backend.width  # numbers in an embedding
        self._backend = backend
        #: Makes embeddings of media; None: the model takes text only.
        self.encoder: Encoder | None = None
        if backend.projector is not None:
            self.encoder = Encoder(backend.projector, self.inbox.put)
        self._threads = Threads(backend, encoder=self.encoder)
        self._waiting: WaitingQueue[EmbeddingRun] = WaitingQueue()
        #: Those that share the batches; the first one begins the next batch.
        self._running: deque[EmbeddingRun] = deque()
        self._free_slots = list(reversed(range(backend.n_slots)))
        #: The one text that comes in parts, from its first part to its last.
        self._long: Piece | None = None
        #: Whose text waits for the end of it. No other long one begins before that.
        self._next_long: EmbeddingRun | None = None
        self._max_pieces = backend.n_seqs
        self._was_media = False  # the last batch
        self._is_blocked = False  # until a command comes: all that runs waits for media
        self._counts = dict.fromkeys(("steps", "decodes", "busy_slots", "prompt_tokens"), 0)
        self._seconds = 0.0

    # -- from any thread

    def pair(self, query: str, document: str) -> tuple[TokenId, ...]:
        """Make of a query and a document what a ranking model scores; see `EmbeddingBackend`."""
        return self._backend.pair(query, document)

    def check(self, task: Task | EmbeddingTask) -> None:
        """Refuse a task that can never run; raises what `submit` raises."""
        self.check_works()
        if not isinstance(task, EmbeddingTask):
            raise NotSupportedError("This engine makes embeddings, and no text.")
        backend, param = self._backend, task.param
        longest = task.max_length
        if not task.texts:
            raise InvalidRequestError(f"'{param}' has no texts.", param=param)
        if not task.min_length:
            raise InvalidRequestError(f"A text in '{param}' has no tokens.", param=param)
        if longest > backend.n_ctx_seq:
            raise InputTooLongError(
                longest,
                backend.n_ctx_seq,
                f"A text of {longest} tokens is too large: the context of the model holds "
                f"{backend.n_ctx_seq}.",
                param=param,
            )
        if longest > backend.n_batch and not backend.can_split:
            raise InputTooLongError(
                longest,
                backend.n_batch,
                f"A text has {longest} tokens, and this model takes a text as a whole, of "
                f"{backend.n_batch} tokens at most; --ubatch-size raises that, with --batch-size "
                "where that is smaller.",
                param=param,
            )
        check_media(task.prompt, backend.projector, backend.n_batch, param)
        task.prompt.check(self.vocab.n_tokens, param)

    # -- on the inference thread

    @property
    def has_work(self) -> bool:
        """Whether there is a task to go on with."""
        return not self._is_blocked and bool(self._running or len(self._waiting))

    def _obey(self, command: Command) -> None:
        self._is_blocked = False
        match command:
            case Submit(EmbeddingTask() as task):
                if self.failure is None:
                    self._waiting.push(EmbeddingRun(task))
                else:
                    self._emit(Failed(task.id, self.failure))
            case Cancel(task_id):
                self._cancel(task_id)
                self._ask_for_media()
            case Encoded(chunk, error):
                if error is not None:
                    self._fail_all_with(chunk, error)
            case Pause() | Resume():
                pass  # there are no tokens that a reader could leave unread
            case Call(function):
                function()
            case Stop():
                self._stopping = True

    def _cancel(self, task_id: int) -> None:
        self._waiting.remove(task_id)
        for run in self._running:
            if run.task.id == task_id:
                self._remove(run)
                break
        self._retract(task_id)

    def _remove(self, run: EmbeddingRun) -> None:
        """Take a run out of its slot, and what the context holds of it."""
        self._running.remove(run)
        self._free_slots.append(run.slot)
        if self._long is not None and self._long.run is run:
            self._backend.forget(self._long.seq)
            self._long = None
        if self._next_long is run:
            self._next_long = None

    def _step(self) -> None:
        self._counts["steps"] += 1
        self._admit()
        self._ask_for_media()
        pieces = self._pack()
        if not pieces:
            assert any(run.awaits_media for run in self._running), "what was let in does not fit"
            self._is_blocked = True
            self._threads.rest()
            return
        self._running.rotate(-1)
        if self._compute(pieces):
            n_slots = len({id(piece.run) for piece in pieces})
            n_cells = sum(piece.n_cells for piece in pieces)
            self._in_batch = (n_slots, 0, n_cells)
            self._counts["decodes"] += 1
            self._counts["busy_slots"] += n_slots
            self._counts["prompt_tokens"] += n_cells
            self._collect(pieces)
        self._seconds += monotonic() - self.heartbeat
        if not self.has_work:
            self._ask_for_media()
            self._threads.rest()

    def _admit(self) -> None:
        for run in self._waiting:
            if not self._free_slots:
                return
            self._waiting.admit(run)
            run.admitted_at = self.heartbeat
            run.slot = self._free_slots.pop()
            self._running.append(run)
            self._emit(Admitted(run.task.id, (run.admitted_at - run.submitted_at) * 1e3))

    # -- media

    def _ask_for_media(self) -> None:
        """Have the media of all runs encoded, and see who cannot go on without them."""
        if self.encoder is None:
            return
        self.encoder.want(
            {run.task.id: ahead for run in self._running if (ahead := run.media_ahead())}
        )
        for run in self._running:
            chunk = run.chunk
            run.awaits_media = chunk is not None and self.encoder.get(chunk) is None

    def _fail_all_with(self, chunk: MediaChunk, error: TrioServeError) -> None:
        """End the runs that need a chunk which cannot be encoded."""
        assert self.encoder is not None
        for run in list(self._running):
            if any(one.id == chunk.id for one in run.media_ahead()):
                self._fail(run, error)
        self._ask_for_media()
        self.encoder.settle(chunk)

    def _load(self) -> tuple[int, int]:
        return len(self._running), len(self._waiting)

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
        # What the long text has and will have is kept for it, so that it can go on.
        n_cells = backend.n_ctx - (0 if long is None else len(long.text))
        return Room(backend.n_batch, n_cells, seqs, takes_long=long is None)

    def _pack_media(self) -> list[Piece]:
        """Take what fits of one chunk that is encoded."""
        for run in self._running:
            chunk = run.chunk
            if self.encoder is None or chunk is None or run.awaits_media:
                continue
            piece = self._next_piece(run, self._room())
            if piece is not None:
                piece.embeddings = self.encoder.get(chunk)
                run.advance(piece)
                return [piece]
        return []

    def _pack_tokens(self) -> list[Piece]:
        """Put texts into the batch, from one run after another, until nothing more fits."""
        batch, pieces, room = self._backend.batch, list[Piece](), self._room()
        batch.clear()
        turns = deque(self._running)
        while turns and len(pieces) < self._max_pieces:
            run = turns.popleft()
            piece = None if run.chunk is not None else self._next_piece(run, room)
            if piece is None:
                continue
            if piece.start == 0:
                room.cells -= len(piece.text)
            room.takes_long = room.takes_long and piece.is_last
            piece.first_row = self._backend.n_batch - room.rows
            tokens = piece.text.keys[piece.start : piece.stop]
            batch.extend(tokens, piece.text.position(piece.start), piece.seq)
            room.rows -= piece.n_cells
            run.advance(piece)
            pieces.append(piece)
            turns.append(run)
        return pieces

    def _next_piece(self, run: EmbeddingRun, room: Room) -> Piece | None:
        """Choose what a run adds to a batch: a text, a part of one, or nothing."""
        if run.index == len(run.task.texts) or not room.rows:
            return None
        text = run.task.texts[run.index]
        stop = min(run.start + room.rows, text.part_from(run.start)[0])
        if run.start:  # the long text goes on
            assert self._long is not None and self._long.stop == run.start
            return Piece(run, run.index, run.start, stop, self._long.seq)
        if not room.seqs:
            return None
        is_long = len(text) > self._backend.n_batch or bool(text.media)
        if len(text) > room.rows and not is_long:
            return None
        if is_long and self._next_long not in (None, run):
            return None
        if len(text) > room.cells or (is_long and not room.takes_long):
            self._next_long = self._next_long or run
            return None
        if self._next_long is run:
            self._next_long = None
        return Piece(run, run.index, 0, stop, room.seqs.pop())

    # -- one step: run

    def _compute(self, pieces: list[Piece]) -> bool:
        """Run the batch; returns whether there are results."""
        compute = self._backend.compute
        if pieces[0].embeddings is not None:
            compute = partial(self._backend.compute_media, pieces[0].media())
        try:
            self._threads.run(sum(piece.n_cells for piece in pieces), compute)
        except KVCacheFullError as error:
            if len(pieces) > 1:
                self._max_pieces = len(pieces) // 2  # nothing was computed: try with less
                for piece in reversed(pieces):
                    piece.run.go_back(piece)
            else:
                self._fail(pieces[0].run, error)
            return False
        except DecodeError as error:
            for piece in pieces:
                self._backend.forget(piece.seq)
            for run in {id(piece.run): piece.run for piece in pieces}.values():
                self._fail(run, error)
            return False
        self._max_pieces = self._backend.n_seqs
        return True

    def _fail(self, run: EmbeddingRun, error: TrioServeError) -> None:
        self._remove(run)
        self._emit(Failed(run.task.id, error))

    # -- one step: collect

    def _collect(self, pieces: list[Piece]) -> None:
        """Take the embeddings out, and end the runs that have all of theirs."""
        backend = self._backend
        for piece in pieces:
            if backend.pooling == "none":
                embeddings = backend.rows(piece.first_row, piece.first_row + piece.n_cells)
            else:
                embeddings = backend.pooled(piece.seq)
            piece.run.take(piece, embeddings, backend.pooling)
            if piece.is_last:
                backend.forget(piece.seq)
                if piece.start:
                    self._long = None
            else:
                self._long = piece
        for run in [run for run in self._running if run.n_missing == 0]:
            self._finish(run)

    def _finish(self, run: EmbeddingRun) -> None:
        slot = run.slot
        self._remove(run)
        if run.is_finite():
            timings = run.timings()
            embedded = Embedded(
                task_id=run.task.id, embeddings=run.embeddings(), timings=timings, slot_id=slot
            )
            self._emit(embedded)
        else:
            error = OutputError("The model made embeddings with numbers that are not finite.")
            self._emit(Failed(run.task.id, error))

    # -- the end, and a look at it

    def _fail_all(self, error: EngineError) -> None:
        for run in (*self._running, *self._waiting):
            self._emit(Failed(run.task.id, error))
            self._waiting.remove(run.task.id)
        self._running.clear()

    def _close(self) -> None:
        if self.encoder is not None:
            self.encoder.close()
        self._backend.close()

    def status(self) -> EngineStatus:
        """Describe the slots and the queue. Use it through `call`."""
        n_ctx, now = self._backend.n_ctx_seq, monotonic()
        running = {run.slot: run for run in self._running}
        slots = range(self._backend.n_slots)
        n_held = 0 if self._long is None else self._long.stop
        return EngineStatus(
            slots=tuple(EmbeddingRun.slot_status(i, n_ctx, running.get(i)) for i in slots),
            waiting=tuple(
                run.waiting_status(position, now)
                for position, run in enumerate(self._waiting, start=1)
            ),
            counters=EngineCounters(
                **self._counts,
                step_s=self._seconds,
                prompt_s=self._seconds,
                prompt_queries=self._counts["prompt_tokens"],
                n_cells=self._backend.n_ctx,
                n_cells_used=n_held,
                n_cells_running=n_held,
                **self._threads.counters(),
            ),
        )
