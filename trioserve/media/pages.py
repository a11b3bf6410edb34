"""PDFs to text and pictures of pages, with pypdfium2. Runs in the process of its own only."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from PIL import Image

from trioserve.errors import InvalidMediaError
from trioserve.media.limits import MAX_TEXT, MediaLimits

try:
    import pypdfium2
except ImportError:  # it is the extra trioserve[pdf], without which nobody asks for a PDF
    pypdfium2 = None

codecs.lookup("utf-16-le")  # Python imports it for the first text: too late

#: Pixels of the longer side of a picture. Models see little more of a page.
_SIDE = 1536

#: Characters of text that are handed over at once: at most 12 bytes each.
PIECE = 4096


def decode(
    data: bytes, with_images: bool, limits: MediaLimits
) -> Iterator[tuple[str, Image.Image | None]]:
    """Read the pages of a PDF, one after the other: the text of each, and a picture of it.

    Raises:
        InvalidMediaError: it has no pages, or too many, or too much text.
        Exception: of many kinds; the file cannot be read.
    """
    with pypdfium2.PdfDocument(data) as document:
        if not 0 < len(document) <= limits.max_frames:
            raise InvalidMediaError(f"has {len(document)} pages, and {limits.max_frames} at most")
        n_chars = 0
        for page in document:
            text = page.get_textpage().get_text_bounded().replace("\r\n", "\n")
            n_chars += len(text)
            if n_chars > MAX_TEXT:
                raise InvalidMediaError(f"has more than {MAX_TEXT} characters")
            yield text, _picture(page) if with_images else None
            page.close()


def _picture(page: pypdfium2.PdfPage) -> Image.Image | None:
    longest = max(page.get_size())
    if not longest > 0:
        return None
    image: Image.Image = page.render(scale=_SIDE / longest).to_pil()
    return image
