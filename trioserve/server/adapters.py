"""LoRA adapters: which of them a request gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trioserve.errors import InvalidRequestError
from trioserve.types import AdapterInfo, Adapters


class AdapterScales:
    """The adapters of a server, and the scales of requests that name none. On the event loop.

    Args:
        infos: the adapters that were loaded; their ids are their places.
    """

    def __init__(self, infos: Sequence[AdapterInfo]) -> None:
        self.infos = infos
        self._scales = [info.scale for info in infos]

    @property
    def scales(self) -> tuple[float, ...]:
        """The scale of each adapter, for requests that name none."""
        return tuple(self._scales)

    @property
    def current(self) -> Adapters:
        """The adapters of requests that name none."""
        return _in_use(enumerate(self._scales))

    def set(self, scales: Mapping[int, float]) -> None:
        """Change them for requests from now on; an adapter that is not named gets 0.

        Raises:
            InvalidRequestError: there is no such adapter; nothing has changed.
        """
        self._check(scales)
        self._scales = [scales.get(id_, 0.0) for id_ in range(len(self.infos))]

    def choose(self, given: Sequence[tuple[int, float]]) -> Adapters:
        """Say what a request gets that asks for these; for none, the ones that all get.

        Raises:
            InvalidRequestError: there is no such adapter.
        """
        if not given:
            return self.current
        scales = dict(given)
        self._check(scales)
        return _in_use(sorted(scales.items()))

    def _check(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            if not 0 <= id_ < len(self.infos):
                n = len(self.infos)
                known = f"ids run from 0 to {n - 1}" if n else "the server was started without"
                raise InvalidRequestError(f"There is no LoRA adapter {id_}: {known}.", param="lora")


def _in_use(scales: Iterable[tuple[int, float]]) -> Adapters:
    return tuple((id_, float(scale)) for id_, scale in scales if scale)
