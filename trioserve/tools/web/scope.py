"""`WebScope`: what a request lets the tools of the web do: domains, numbers and a place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from posixpath import normpath
from urllib.parse import unquote

import attrs

from trioserve.errors import FetchError, InvalidRequestError, WebToolError
from trioserve.media.fetch import Target, parse_url

#: Domains of a request, and characters of one.
MAX_DOMAINS, MAX_DOMAIN = 100, 300

#: The number of results of a search: the default, and the most.
N_RESULTS, MAX_RESULTS = 5, 20


@attrs.frozen
class Domain:
    """A host with all names below it, and what the paths there begin with."""

    host: str
    path: str = "/"

    @classmethod
    def parse(cls, text: str, param: str) -> Domain:
        """Read ``example.org`` or ``example.org/blog``; a path may have one ``*``.

        Raises:
            InvalidRequestError: it has another form.
        """
        host, slash, path = text.strip().lower().removeprefix("*.").partition("/")
        try:
            if len(text) > MAX_DOMAIN or path.count("*") > 1 or not host:
                raise FetchError("", reason="")
            target = parse_url(f"http://{host}/")
        except FetchError:
            raise InvalidRequestError.at(
                param, "must be a domain such as example.org, or one with a path."
            ) from None
        return cls(target.host, slash + path or "/")

    def has(self, target: Target) -> bool:
        if f".{target.host}".endswith(f".{self.host}"):
            path = unquote(self.path).replace("[", "[[]").replace("?", "[?]")
            return fnmatchcase(_as_read(target.path), f"{path}*")
        return False


def _as_read(path: str) -> str:
    """A path as servers read it, without escapes and ``..``; and a query."""
    path, mark, query = path.lower().partition("?")
    parts = unquote(path).split("/")
    end = "/" if parts[-1] in ("", ".", "..") else ""
    return f"/{normpath('/'.join(parts)).strip('/')}{end}".replace("//", "/") + mark + query


def read_domains(values: Iterable[str], param: str) -> tuple[Domain, ...]:
    """Read domains as requests have them. Raises InvalidRequestError."""
    given = list(values)
    if len(given) > MAX_DOMAINS:
        raise InvalidRequestError.at(param, f"may have {MAX_DOMAINS} domains at most.")
    return tuple(Domain.parse(each, f"{param}[{i}]") for i, each in enumerate(given))


class Uses:
    """Counts calls, up to a number; None: any number."""

    def __init__(self, most: int | None = None) -> None:
        self._left = most

    def take(self) -> None:
        """Count one. Raises WebToolError: there were as many as there may be."""
        if self._left is None:
            return
        if not self._left:
            raise WebToolError(
                "This tool has been called as often as it may be.", reason="max_uses_exceeded"
            )
        self._left -= 1


@attrs.frozen(kw_only=True)
class WebScope:
    """The permissions and limits of a web tool in one request."""

    allowed: Sequence[Domain] = ()  # none: all
    blocked: Sequence[Domain] = ()
    uses: Uses = attrs.field(factory=Uses)
    n_results: int = N_RESULTS
    #: The location of the user in words, and the country as two letters.
    place: str = ""
    country: str = ""
    #: Characters of a page that a call returns at most; None: as many as any call.
    max_chars: int | None = None

    def allows(self, url: str) -> bool:
        try:
            self.check(parse_url(url))
        except FetchError:
            return False
        return True

    def check(self, target: Target) -> None:
        """Check that an address may be reached. Raises FetchError."""
        is_in = any(each.has(target) for each in self.allowed) or not self.allowed
        if not is_in or any(each.has(target) for each in self.blocked):
            raise FetchError(
                f"is at {target.netloc}, which this request does not allow",
                reason="url_not_allowed",
            )
