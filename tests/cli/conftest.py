"""Fixtures for tests of the command with a hub."""

from tests.hub.fixtures import cache, hub

__all__ = ["cache", "hub"]
