"""Checks addresses of web pages: http(s), public hosts, no credentials.

The service that fetches the page resolves the name on another machine. So only the address itself is checked: IP
addresses in every spelling, and names that have a meaning within one machine or network only.
"""

import re
from urllib.parse import urlsplit, urlunsplit

from orchestrator.errors import ToolError
from orchestrator.network import is_public

MAX_ADDRESS_CHARS = 2_048
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\\u0085\u00a0\u2028\u2029\ud800-\udfff]")


def web_address(text: str) -> str:
    """The address, put together from its parsed parts, so that it can be read in one way only. Raises ToolError,
    which says what is wrong."""
    if len(text) > MAX_ADDRESS_CHARS:
        raise ToolError(f"the url has {len(text)} characters; at most {MAX_ADDRESS_CHARS} are accepted")
    if _UNSAFE.search(text):
        raise ToolError("the url holds a space, a backslash or a control character")
    try:
        parts = urlsplit(text)
        port, host = parts.port, (parts.hostname or "").rstrip(".")
        if ":" not in host:  # IPv6 otherwise
            host = host.encode("idna").decode("ascii").rstrip(".")
    except ValueError:
        raise ToolError("the url cannot be read") from None
    if parts.scheme not in ("http", "https"):
        raise ToolError("only urls that begin with http:// or https:// can be visited")
    if parts.username is not None or parts.password is not None:
        raise ToolError("a url with a user name or password cannot be visited")
    if not host or "%" in host:
        raise ToolError("the url names no host")
    if not is_public(host):
        raise ToolError("private, local and reserved addresses cannot be visited")
    place = (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
    return urlunsplit((parts.scheme, place, parts.path, parts.query, ""))
