"""How large media may be."""

from __future__ import annotations

import attrs

#: Characters that a document may have.
MAX_TEXT = 2**22


@attrs.frozen(kw_only=True)
class MediaLimits:
    """What one file may be, and what decoding it may take. More is refused."""

    max_bytes: int = 64 * 2**20  # of the file
    max_pixels: int = 64 * 2**20  # of an image, width times height
    max_seconds: float = 3600.0  # of sound, or of a video
    max_frames: int = 256  # of those of a video that the model sees; pages of a document
    timeout: float = 30.0  # seconds, to fetch a file, and once more to decode it
    max_files: int = 100  # of a request

    @property
    def max_memory(self) -> int:
        """Bytes that decoding may take, beside those of the program itself."""
        # A progressive JPEG has 6 bytes for each pixel, and its image 4; turning it takes 4 more.
        return 14 * self.max_pixels + 2 * self.max_bytes + 64 * 2**20
