"""The configuration: its classes, and how flags, environment variables and files set it."""

from trioserve.config.config import Config
from trioserve.config.model import ModelConfig

__all__ = ["Config", "ModelConfig"]
