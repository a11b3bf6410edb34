"""`Network`: the options of the HTTP side: addresses, certificates, other origins.

They are a part of `trioserve.config.Config`. The names are llama-server's.
"""

from __future__ import annotations

import attrs

from trioserve.config.option import option
from trioserve.errors import ConfigError


@attrs.frozen(kw_only=True, slots=False)  # `Config` has several such bases
class Network:
    """Options of the HTTP side."""

    ssl_key_file: str | None = option(
        None,
        "--ssl-key-file",
        group="Network",
        env="LLAMA_ARG_SSL_KEY_FILE",
        help="file with the private key, in PEM, for HTTPS",
    )
    ssl_cert_file: str | None = option(
        None,
        "--ssl-cert-file",
        group="Network",
        env="LLAMA_ARG_SSL_CERT_FILE",
        help="file with the certificate, in PEM, for HTTPS",
    )
    reuse_port: bool = option(
        False,
        "--reuse-port",
        group="Network",
        env="LLAMA_ARG_REUSE_PORT",
        help="let several servers listen on one port",
        off=(),
    )
    api_prefix: str = option(
        "",
        "--api-prefix",
        group="Network",
        env="LLAMA_ARG_API_PREFIX",
        help="path that comes before all routes, such as /llm",
    )
    static_path: str | None = option(
        None,
        "--path",
        group="Network",
        env="LLAMA_ARG_STATIC_PATH",
        help="directory whose files are served, instead of the page",
    )
    ui: bool = option(
        True,
        "--ui",
        "--webui",
        group="Network",
        env="LLAMA_ARG_UI",
        help="serve the page at /",
    )
    cors_origins: str = option(
        "localhost",
        "--cors-origins",
        group="Network",
        env="LLAMA_ARG_CORS_ORIGINS",
        help="origins whose pages may use the API, separated by commas; localhost: those on this "
        "machine; *: all, which llama-server has as its default",
    )
    cors_methods: str = option(
        "GET, POST, DELETE, OPTIONS",
        "--cors-methods",
        group="Network",
        env="LLAMA_ARG_CORS_METHODS",
        help="methods that they may use",
    )
    cors_headers: str = option(
        # The star is for those that SDKs send of themselves. It does not stand for the first.
        "Authorization, Content-Type, Prefer, X-Api-Key, X-Request-Id, X-Request-Timeout, *",
        "--cors-headers",
        group="Network",
        env="LLAMA_ARG_CORS_HEADERS",
        help="headers that they may send; *: any",
    )
    cors_credentials: bool = option(
        False,
        "--cors-credentials",
        group="Network",
        env="LLAMA_ARG_CORS_CREDENTIALS",
        help="let them send credentials",
    )
    timeout: float = option(
        60.0,
        "-to",
        "--timeout",
        group="Limits",
        env="LLAMA_ARG_TIMEOUT",
        least=0.001,
        help="seconds that a client may take to send the body of a request; how long it may take "
        "to read the answer is --stall-timeout",
    )

    def __attrs_post_init__(self) -> None:
        """Refuse what no single field can see. Raises ConfigError."""
        if (self.ssl_key_file is None) != (self.ssl_cert_file is None):
            raise ConfigError("ssl_key_file and ssl_cert_file must be given together")
        if self.api_prefix and (self.api_prefix[0] != "/" or self.api_prefix[-1] == "/"):
            raise ConfigError(
                f"api_prefix is {self.api_prefix!r}, and must begin with / and not end with it"
            )
        for name in ("cors_origins", "cors_methods", "cors_headers"):
            value = getattr(self, name)
            if not value.isascii() or not value.isprintable():
                raise ConfigError(f"{name} is {value!r}, which is not a value of a header")
