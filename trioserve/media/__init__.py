"""Images, sound and video of clients: recognized, and decoded under limits in another process."""

from __future__ import annotations

from trioserve.media.answer import Order
from trioserve.media.decoder import Decoder, DecoderError
from trioserve.media.limits import MediaLimits
from trioserve.media.sniff import Format, sniff

__all__ = ["Decoder", "DecoderError", "Format", "MediaLimits", "Order", "sniff"]
