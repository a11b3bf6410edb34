"""`ActionParser`: the arguments of commands that have actions, such as ``store check FILE``."""

from __future__ import annotations

import argparse
from typing import NoReturn

from trioserve.errors import ConfigError


class ActionParser(argparse.ArgumentParser):
    """Reads arguments; the chosen action is `action` in the result. Raises `ConfigError`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=False)

    def actions(self) -> argparse._SubParsersAction[ActionParser]:
        """Make what adds actions."""
        return self.add_subparsers(dest="action", required=True, parser_class=ActionParser)

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser`."""
        command = self.prog.split()[0]
        raise ConfigError(f"{command}: {message}; see trioserve {command} --help")
