"""The configuration, and how flags, environment variables and files set it."""

from trioserve.config.config import GROUPS, Config
from trioserve.config.option import option

__all__ = ["GROUPS", "Config", "option"]
