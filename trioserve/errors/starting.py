"""What goes wrong before there is a request: the configuration, files, models from the hub."""

from __future__ import annotations

from trioserve.errors.root import TrioServeError

# -- before a request: configuration, files, the operating system


class ConfigError(TrioServeError):
    """A flag, an environment variable or a configuration field has a value that cannot be used."""


class ModelLoadError(TrioServeError):
    """The model file is missing, is not a GGUF, is cut short, or does not fit in memory."""

    type = "unavailable_error"
    status = 503


class BridgeError(TrioServeError):
    """The descriptor that wakes the event loop could not be made."""


# -- models from the hub, and the cache that they are kept in


class HubError(TrioServeError):
    """A model cannot be downloaded, or the cache of downloaded models cannot be used."""

    status = 502


class HubUnavailableError(HubError):
    """The hub cannot be reached, or does not answer now. `retry_after` is in seconds."""

    type = "unavailable_error"
    status = 503

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class HubNotFoundError(HubError):
    """The hub, or the cache, has no such repository or file."""

    type = "not_found_error"
    status = 404


class UnknownQuantError(HubNotFoundError):
    """The repository has no model with this quantization."""


class GatedModelError(HubError):
    """The hub gives the model only to those who have accepted its terms, and say who they are."""

    type = "permission_error"
    status = 403


class HashMismatchError(HubError):
    """What was downloaded is not what the hub says the file is."""


class DiskFullError(HubError):
    """There is no room for the model."""

    status = 507
    code = "disk_full"
