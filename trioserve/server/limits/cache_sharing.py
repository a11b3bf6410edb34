"""Who may share what the caches hold: a prompt that another has sent is quicker, and that tells."""

from __future__ import annotations

import hashlib

from trioserve.config import Config
from trioserve.types import Adapters, CacheRoot


class CacheSharing:
    """Says under which root the text of a request stands.

    Where the configuration has API keys, each of them has roots of its own, unless all are to
    share. Keys and salts go no further: a root has digests of them, which are the same in every
    process, as files with saved slots need.

    Args:
        config: whether there are keys, and what they share.
    """

    def __init__(self, config: Config) -> None:
        self._by_key = bool(config.api_keys) and config.cache_sharing == "key"

    def owner(self, client: str) -> str:
        """Whose text it is that a client sends; empty: everybody's."""
        return _digest("owner", client) if self._by_key else ""

    def root(self, adapters: Adapters, client: str, salt: str) -> CacheRoot:
        """The root of a text."""
        return CacheRoot(adapters, self.owner(client), _digest("salt", salt))


def _digest(kind: str, value: str) -> str:
    if not value:
        return ""
    data = value.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16, person=kind.encode()).hexdigest()
