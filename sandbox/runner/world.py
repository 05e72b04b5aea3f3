"""What the agent's processes find of what is outside: listeners, certificates, variables that name them."""

import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from sandbox.errors import EpisodeCrashed
from sandbox.runner.relay import Call, Relay
from sandbox.types import Assignment, Place

_OWN_NAMES = ("localhost", "127.0.0.1", "::1")  # a program's endpoint among them
_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
_CERTIFICATES = (
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT"),
    "NODE_EXTRA_CA_CERTS",
)
_BUNDLES = (  # where images have their own
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",
)
_MAX_BUNDLE_BYTES = 1 << 20
_HOSTS, _MAX_HOSTS_BYTES = "/etc/hosts", 64 << 10


def world(assignment: Assignment, call: Call, folder: Path) -> Place:
    """Listens as the assignment says, and returns the place with the variables by which processes find that; the
    task's own go before them. `folder`: the agent can read it and not write to it. Raises EpisodeCrashed."""
    ours: dict[str, str] = {}
    if assignment.listeners:
        try:
            relay = Relay([(one.address, one.port) for one in assignment.listeners], call)
        except OSError as error:
            raise EpisodeCrashed(f"cannot listen on the loopback device: {error.strerror}") from error
        relay.start()
        ours |= dict(_addresses(assignment, relay))
    if assignment.authorities:
        ours |= _certificates(assignment.authorities, folder)
    return replace(assignment.place, environment={**ours, **assignment.place.environment})


def _addresses(assignment: Assignment, relay: Relay) -> Iterator[tuple[str, str]]:
    places = zip(assignment.listeners, relay.addresses, strict=True)
    served = {host for listener, (host, _) in places if not listener.is_proxy}
    inside = dict.fromkeys((*_OWN_NAMES, *(host for host, _ in relay.addresses), *_names_of(served)))
    for listener, (host, port) in zip(assignment.listeners, relay.addresses, strict=True):
        if listener.is_proxy:
            yield from dict.fromkeys(_PROXIES, f"http://{host}:{port}").items()
            yield from dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(inside)).items()


def _names_of(addresses: Collection[str]) -> Iterator[str]:
    """What the sandbox calls these: no proxy is asked for them."""
    try:
        with open(_HOSTS, "rb") as file:
            lines = file.read(_MAX_HOSTS_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        address, *names = line.partition("#")[0].split() or [""]
        if address in addresses:
            yield from names


def _certificates(authorities: bytes, folder: Path) -> Mapping[str, str]:
    """Lays them down, together with the image's own."""
    try:
        place = Path(tempfile.mkdtemp(prefix=".world-", dir=folder))
        place.chmod(0o755)
        bundle, apt = place / "ca.pem", place / "apt.conf"
        bundle.write_bytes(b"\n".join((*_bundle_of_image(), authorities)))
        apt.write_text(f'Acquire::https::CaInfo "{bundle}";\n')
        for file in (bundle, apt):
            file.chmod(0o444)
    except OSError as error:
        raise EpisodeCrashed(f"certificates cannot be placed: {error.strerror}") from error
    return {**dict.fromkeys(_CERTIFICATES, str(bundle)), "APT_CONFIG": str(apt)}


def _bundle_of_image() -> Iterator[bytes]:
    for name in _BUNDLES:
        try:
            with open(name, "rb") as file:
                content = file.read(_MAX_BUNDLE_BYTES + 1)
        except OSError:
            continue
        if len(content) <= _MAX_BUNDLE_BYTES:
            yield content
            return
