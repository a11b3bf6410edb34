"""Fixtures for tests of the command in this process, and with a hub."""

from tests.hub.fixtures import cache, hub
from tests.support.forgetful_logs import forgetful_logs

__all__ = ["cache", "forgetful_logs", "hub"]
