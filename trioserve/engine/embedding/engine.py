"""The embedding engine: texts of several requests, packed into one batch a tick.

Requests that have their turn share the batches: each adds one text after another, round and
round, until the batch is full, and another one begins in the next tick. So a request with a
thousand texts does not hold up the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic

from trioserve.engine.embedding.backend import EmbeddingBackend
from trioserve.engine.embedding.run import EmbeddingRun, Piece
from trioserve.engine.inbox import Call, Cancel, Command, Pause, Resume, Stop, Submit
from trioserve.engine.loop import Loop
from trioserve.engine.queue import WaitingQueue
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
    Task,
    TokenId,
)


class EmbeddingEngine(Loop):
    """Makes embeddings of texts.

    Args:
        backend: the model. The engine owns it, and closes it when its thread ends.
        notify: called, from the engine's thread, once after each tick that left events in the
            outbox. It must not block.
    """

    def __init__(self, backend: EmbeddingBackend, notify: Callable[[], None]) -> None:
        super().__init__(backend, notify)
        self.pooling = backend.pooling
        self.width = backend.width  # numbers in an embedding
        self._backend = backend
        self._threads = Threads(backend)
        self._waiting: WaitingQueue[EmbeddingRun] = WaitingQueue()
        #: Those that share the batches; the first one begins the next batch.
        self._running: deque[EmbeddingRun] = deque()
        self._free_slots = list(reversed(range(backend.n_slots)))
        #: The one text that comes in parts, from its first part to its last.
        self._long: Piece | None = None
        #: Whose text waits for the end of it. No other long one begins before that.
        self._next_long: EmbeddingRun | None = None
        self._max_pieces = backend.n_seqs
        self._counts = dict.fromkeys(("ticks", "decodes", "busy_slots", "prompt_tokens"), 0)
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
        task.prompt.check(self.vocab.n_tokens, param)

    # -- on the inference thread

    @property
    def has_work(self) -> bool:
        """Whether a task runs or waits."""
        return bool(self._running or len(self._waiting))

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(EmbeddingTask() as task):
                if self.failure is None:
                    self._waiting.push(EmbeddingRun(task))
                else:
                    self._emit(Failed(task.id, self.failure))
            case Cancel(task_id):
                self._cancel(task_id)
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

    def _tick(self) -> None:
        self._counts["ticks"] += 1
        self._admit()
        pieces = self._pack()
        self._running.rotate(-1)
        if self._compute(pieces):
            self._counts["decodes"] += 1
            self._counts["busy_slots"] += len({id(piece.run) for piece in pieces})
            self._counts["prompt_tokens"] += sum(piece.n_tokens for piece in pieces)
            self._collect(pieces)
        self._seconds += monotonic() - self.heartbeat

    def _admit(self) -> None:
        for run in self._waiting:
            if not self._free_slots:
                return
            self._waiting.admit(run)
            run.admitted_at = self.heartbeat
            run.slot = self._free_slots.pop()
            self._running.append(run)
            self._emit(Admitted(run.task.id, (run.admitted_at - run.submitted_at) * 1e3))

    # -- one tick: pack

    def _pack(self) -> list[Piece]:
        """Put texts into the batch, from one run after another, until nothing more fits."""
        batch, pieces = self._backend.batch, list[Piece]()
        batch.clear()
        seqs = [
            seq
            for seq in reversed(range(self._backend.n_seqs))
            if self._long is None or seq != self._long.seq
        ]
        # What the long text has and will have is kept for it, so that it can go on.
        n_cells = self._backend.n_ctx - (0 if self._long is None else self._long.n_text)
        n_free = self._backend.n_batch
        turns = deque(self._running)
        while turns and len(pieces) < self._max_pieces:
            run = turns.popleft()
            piece = self._next_piece(run, n_free, n_cells, seqs)
            if piece is None:
                continue
            if piece.start == 0:
                n_cells -= piece.n_text
            tokens = run.task.texts[piece.index][piece.start : piece.stop]
            piece.first_row = self._backend.n_batch - n_free
            batch.extend(tokens, piece.start, piece.seq)
            n_free -= piece.n_tokens
            run.advance(piece)
            pieces.append(piece)
            turns.append(run)
        return pieces

    def _next_piece(
        self, run: EmbeddingRun, n_free: int, n_cells: int, seqs: list[int]
    ) -> Piece | None:
        """Choose what a run adds to a batch with `n_free` places: a text, a part, or nothing."""
        if run.index == len(run.task.texts) or not n_free:
            return None
        n_text = len(run.task.texts[run.index])
        if run.start:  # the long text goes on
            # A part that does not end the text fills the batch, so there is one in a batch.
            assert self._long is not None and self._long.stop == run.start
            return Piece(run, run.index, run.start, min(run.start + n_free, n_text), self._long.seq)
        if not seqs:
            return None
        is_long = n_text > self._backend.n_batch
        if n_text > n_free and not is_long:
            return None
        if is_long and self._next_long not in (None, run):
            return None
        if n_text > n_cells or (is_long and self._long is not None):
            self._next_long = self._next_long or run
            return None
        if self._next_long is run:
            self._next_long = None
        return Piece(run, run.index, 0, min(n_text, n_free), seqs.pop())

    # -- one tick: run

    def _compute(self, pieces: list[Piece]) -> bool:
        """Run the batch; returns whether there are results."""
        assert pieces, "a tick without work: what was let in does not fit"
        try:
            self._threads.run(sum(piece.n_tokens for piece in pieces), self._backend.compute)
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

    # -- one tick: collect

    def _collect(self, pieces: list[Piece]) -> None:
        """Take the embeddings out, and end the runs that have all of theirs."""
        backend = self._backend
        for piece in pieces:
            if backend.pooling == "none":
                embeddings = backend.rows(piece.first_row, piece.first_row + piece.n_tokens)
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
                tick_s=self._seconds,
                prompt_s=self._seconds,
                prompt_queries=self._counts["prompt_tokens"],
                n_cells=self._backend.n_ctx,
                n_cells_used=n_held,
                n_cells_running=n_held,
                **self._threads.counters(),
            ),
        )
