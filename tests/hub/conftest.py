"""Tests with a hub, some of which run the command in this process."""

from tests.hub.fixtures import cache, hub
from tests.support.forgetful_logs import forgetful_logs

__all__ = ["cache", "forgetful_logs", "hub"]
