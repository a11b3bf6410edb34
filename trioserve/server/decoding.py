"""`Decoders`: the processes that decode the media of requests, a few for all."""

from __future__ import annotations

import attrs
import structlog
import trio

from trioserve.errors import InvalidMediaError, ServerClosingError, TrioServeError, UnavailableError
from trioserve.media.answer import Order
from trioserve.media.decoder import Decoder, DecoderError
from trioserve.media.limits import MediaLimits
from trioserve.server.concurrency import alongside
from trioserve.types import DecodedDocument, DecodedMedia

_log = structlog.stdlib.get_logger("trioserve.server")

#: Files that are decoded at the same time, each in a process of its own.
_N_PROCESSES = 2


class Decoders:
    """Has files decoded. A process is started when it is needed, and kept for the next file."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._places = trio.CapacityLimiter(_N_PROCESSES)
        self._idle: list[Decoder] = []
        self._busy: set[Decoder] = set()
        self._is_closed = False

    async def decode(self, data: bytes, order: Order) -> DecodedMedia | DecodedDocument:
        """Decode a file. When cancelled, the process is ended, and waited for.

        Raises:
            InvalidMediaError: it cannot be used. The message is a part of a sentence.
            ServerClosingError: the server was closed.
            UnavailableError: there is no process to do it.
        """
        async with self._places:
            if self._is_closed:
                raise ServerClosingError
            decoder = await self._take()
            self._busy.add(decoder)
            try:
                return await self._decode(decoder, data, order)
            finally:
                self._busy.remove(decoder)
                if decoder.is_usable:
                    self._idle.append(decoder)

    async def aclose(self) -> None:
        """End the processes, and wait until they have ended. Nothing is decoded any more."""
        self._is_closed = True
        for decoder in self._busy:
            decoder.kill()
        with trio.CancelScope(shield=True):
            places = [object() for _ in range(_N_PROCESSES)]
            for place in places:
                await self._places.acquire_on_behalf_of(place)
            while self._idle:
                await trio.to_thread.run_sync(self._idle.pop().close)
        for place in places:
            self._places.release_on_behalf_of(place)

    async def _take(self) -> Decoder:
        """Take a process that waits, or one that is still to be started."""
        while self._idle:
            decoder = self._idle.pop()
            if decoder.is_usable:
                return decoder
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(decoder.close)  # it has died meanwhile
        return Decoder(self._limits)

    async def _decode(
        self, decoder: Decoder, data: bytes, order: Order
    ) -> DecodedMedia | DecodedDocument:
        watch = _Watch(decoder, self._limits.timeout)
        try:
            async with alongside(watch.run):
                media = await watch.decode(data, order)
        except DecoderError as error:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise self._refusal(error, watch.has_timed_out) from error
        return media

    def _refusal(self, error: DecoderError, has_timed_out: bool) -> TrioServeError:
        if self._is_closed:
            return ServerClosingError()
        if has_timed_out:
            return InvalidMediaError(f"takes more than {self._limits.timeout:g} seconds to decode")
        if error.by_signal:
            _log.warning("a file has ended the process that decodes it", reason=str(error))
            return InvalidMediaError("takes too much time or memory to decode")
        _log.error("media cannot be decoded", reason=str(error))
        return UnavailableError("Media cannot be decoded now.")


@attrs.define(eq=False)
class _Watch:
    """Has a file decoded, and ends the process if that takes too long or nobody waits for it."""

    _decoder: Decoder
    _timeout: float
    _is_over: bool = False
    has_timed_out: bool = False

    async def decode(self, data: bytes, order: Order) -> DecodedMedia | DecodedDocument:
        """Decode, with `run` alongside, which alone can end it."""
        try:
            with trio.CancelScope(shield=True):
                media = await trio.to_thread.run_sync(self._decoder.decode, data, order)
        finally:
            self._is_over = True
        return media

    async def run(self) -> None:
        """End the process in time, or when this is cancelled, unless it is done."""
        try:
            await trio.sleep(self._timeout)
            self.has_timed_out = True
        finally:
            if not self._is_over:
                self._decoder.kill()
