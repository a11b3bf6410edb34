"""Images, sound and video of clients: recognized, and decoded under limits in another process."""

from __future__ import annotations

from trioserve.media.limits import MediaLimits

__all__ = ["MediaLimits"]
