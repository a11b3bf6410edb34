"""`Decoders`: the processes that decode files, which all requests share."""

from __future__ import annotations

import math
import signal

import trio

from trioserve.children.child import ChildError, how
from trioserve.concurrency import Gate, alongside, run_in_worker
from trioserve.errors import InvalidMediaError, TrioServeError, UnavailableError
from trioserve.fair_limiter import FairLimiter
from trioserve.log import get_logger
from trioserve.media.orders import MediaLimits, Order
from trioserve.media.process import MEDIA_CHILD, Decoder
from trioserve.types import DecodedDocument, DecodedMedia

_log = get_logger("trioserve.media")

#: Decoder processes, and those that one client may have. Each decodes one file at a time.
_N_PROCESSES, _N_PROCESSES_EACH = 3, 2

#: Ends a process that has computed for longer than it may.
_SIGPROF = getattr(signal, "SIGPROF", math.inf)

#: Seconds of the clock that decoding may take, for each second of the CPU.
_PATIENCE = 3.0

#: Seconds after which a client may send a file again that was not decoded in time.
_RETRY_AFTER = 5.0


class Decoders:
    """Decodes files in child processes. A process starts on demand, and stays for later files."""

    def __init__(self, limits: MediaLimits, module: str = MEDIA_CHILD) -> None:
        self._limits, self._module = limits, module
        self._places = FairLimiter(_N_PROCESSES, _N_PROCESSES_EACH)
        self._idle: list[Decoder] = []
        self._gate = Gate()

    async def decode(self, data: bytes, order: Order) -> DecodedMedia | DecodedDocument:
        """Decode a file. When cancelled, ends the process and waits for its end.

        Raises:
            InvalidMediaError: the file cannot be used. The message is a part of a sentence.
            ServerClosingError: the server was closed.
            UnavailableError: no process is available, or other work has the CPU.
            QueueFullError: too many files of the client wait.
        """
        with self._gate.open():
            async with self._places.place():
                return await self._decode(await self._take(), data, order)

    async def aclose(self) -> None:
        """End the processes, and wait until they have ended. No further files can be decoded."""
        self._gate.end()
        with trio.CancelScope(shield=True):
            await self._gate.drained()
            while self._idle:
                await run_in_worker(self._idle.pop().end)

    async def _take(self) -> Decoder:
        """Take an idle process, or start one."""
        while self._idle:
            decoder = self._idle.pop()
            if decoder.is_alive:
                return decoder
            await self._keep(decoder)  # it died while idle
        try:
            return await trio.to_thread.run_sync(Decoder.start, self._limits, self._module)
        except OSError as error:
            raise self._refusal(ChildError(f"none can be started: {error.strerror}")) from error

    async def _decode(
        self, decoder: Decoder, data: bytes, order: Order
    ) -> DecodedMedia | DecodedDocument:
        is_over = has_timed_out = False

        async def end_in_time() -> None:
            """End the process at the time limit or when cancelled, unless it is done."""
            nonlocal has_timed_out
            try:
                await trio.sleep(_PATIENCE * self._limits.timeout)
                has_timed_out = True
            finally:
                if not is_over:
                    decoder.kill()

        try:
            async with alongside(end_in_time):  # only this can end the thread
                try:
                    media = await _decoded(decoder, data, order)
                finally:
                    is_over = True
        except ChildError as error:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise self._refusal(error, has_timed_out) from error
        finally:
            await self._keep(decoder)
        return media

    async def _keep(self, decoder: Decoder) -> None:
        """Keep an idle process, unless it has ended or there are enough of them."""
        if decoder.is_alive and len(self._idle) < _N_PROCESSES_EACH:
            self._idle.append(decoder)
            return
        with trio.CancelScope(shield=True):
            await run_in_worker(decoder.end)

    def _refusal(self, error: ChildError, has_timed_out: bool = False) -> TrioServeError:
        if has_timed_out:
            return UnavailableError(
                "Media are not decoded in time now, because of other work.",
                retry_after=_RETRY_AFTER,
            )
        if error.code == -_SIGPROF:
            return InvalidMediaError(f"takes more than {self._limits.timeout:g} seconds to decode")
        reason = f"{error}: it {how(error.code)}" if error.code else str(error)
        if error.code < 0:  # it did what it must not, or took too much
            _log.warning("a file has ended the process that decodes it", reason=reason)
            return InvalidMediaError("takes too much time or memory to decode")
        _log.error("media cannot be decoded", reason=reason)
        return UnavailableError("Media cannot be decoded now.")


async def _decoded(decoder: Decoder, data: bytes, order: Order) -> DecodedMedia | DecodedDocument:
    media: DecodedMedia | DecodedDocument
    with trio.CancelScope(shield=True):
        media = await trio.to_thread.run_sync(decoder.decode, data, order)
    return media
