"""What builds are told of the operator's network, and what of it no image may keep: proxies and authorities."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import EnvironmentUnusable

# What Docker hands to the steps of a build and keeps out of the image and its history.
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY")
# Where programs look for a file of authorities: OpenSSL and Python, requests, curl, pip, git, Node, cargo, AWS.
_CA_FILES = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "CARGO_HTTP_CAINFO",
    "AWS_CA_BUNDLE",
)
CA_PLACE = "/.orchestrator-ca.pem"  # of the file, while a build runs
_CA_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Site:
    """`proxies`: by variable. `ca`: a file of authorities; `ca_variables`: those that named it."""

    proxies: Mapping[str, str]
    ca: Path | None
    ca_variables: tuple[str, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Site:
        """As the environment says it. Of several files of authorities the first one holds for all."""
        names = [name for upper in _PROXIES for name in (upper, upper.lower())]
        proxies = {name: environment[name] for name in names if environment.get(name)}
        variables = tuple(name for name in _CA_FILES if environment.get(name))
        return cls(proxies, Path(environment[variables[0]]) if variables else None, variables)

    @property
    def instruction(self) -> str:
        """What in a Dockerfile sets the variables; `without_ca` takes them away again."""
        return f"ENV {' '.join(f'{name}={CA_PLACE}' for name in self.ca_variables)}"

    def certificates(self) -> bytes:
        """What the file of authorities holds. Blocks. Raises EnvironmentUnusable."""
        assert self.ca is not None
        try:
            with self.ca.open("rb") as file:
                return file.read(_CA_BYTES)
        except OSError as error:
            name = self.ca_variables[0]
            raise EnvironmentUnusable(
                f"{name}: no certificates can be read from {self.ca}: {error.strerror}"
            ) from None
