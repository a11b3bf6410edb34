"""The configuration: its class, and how flags, environment variables and files set it."""

from trioserve.config.config import Config as Config
