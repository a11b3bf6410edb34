"""Tests of the command, some of which run it in this process, and some with a hub."""

from tests.hub.fixtures import cache, hub
from tests.support.forgetful_logs import forgetful_logs

__all__ = ["cache", "forgetful_logs", "hub"]
