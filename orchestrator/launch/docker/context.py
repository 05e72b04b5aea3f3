"""Which Docker Engine is meant, found as Docker's own client finds it.

DOCKER_HOST wins, with DOCKER_TLS_VERIFY and DOCKER_CERT_PATH. Else it is the context of DOCKER_CONTEXT, or the
current one of `config.json` in DOCKER_CONFIG (`~/.docker`). The context `default` is Docker's usual socket.
"""

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

from docker.tls import TLSConfig
from docker.utils import kwargs_from_env

from orchestrator.errors import EnvironmentUnusable

DEFAULT = "default"


def engine_address() -> dict[str, Any]:
    """Arguments for a client of the Engine. Blocks. Raises EnvironmentUnusable, and what reading certificates
    raises."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    name = DEFAULT if os.environ.get("DOCKER_HOST") else os.environ.get("DOCKER_CONTEXT") or _current(folder)
    if name == DEFAULT:
        certificates = {"DOCKER_CERT_PATH": str(folder)} if os.environ.get("DOCKER_TLS_VERIFY") else {}
        return _with_ssh(dict(kwargs_from_env({**certificates, **os.environ})))
    key = sha256(name.encode()).hexdigest()
    data = _read(folder / "contexts" / "meta" / key / "meta.json", f"the Docker context {name!r}")
    try:
        engine = data["Endpoints"]["docker"]
        address, unverified = str(engine["Host"]), bool(engine.get("SkipTLSVerify"))
    except (KeyError, TypeError, AttributeError):
        raise EnvironmentUnusable(
            f"the Docker context {name!r} names no Engine: see `docker context ls`"
        ) from None
    return _with_ssh({"base_url": address, **_tls(folder / "contexts" / "tls" / key / "docker", unverified)})


def _current(folder: Path) -> str:
    config = folder / "config.json"
    name = _read(config, "Docker's configuration").get("currentContext") if config.exists() else None
    return name if isinstance(name, str) and name else DEFAULT


def _tls(folder: Path, unverified: bool) -> dict[str, TLSConfig]:
    """The context's certificates, of which some or all may be missing."""
    authority, certificate, key = (folder / f"{part}.pem" for part in ("ca", "cert", "key"))
    if not any(part.exists() for part in (authority, certificate, key)) and not unverified:
        return {}
    pair = (str(certificate), str(key)) if certificate.exists() and key.exists() else None
    ca = str(authority) if authority.exists() else None
    return {"tls": TLSConfig(client_cert=pair, ca_cert=ca, verify=not unverified)}


def _with_ssh(address: dict[str, Any]) -> dict[str, Any]:
    return {**address, "use_ssh_client": True} if str(address.get("base_url", "")).startswith("ssh:") else address


def _read(path: Path, what: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise EnvironmentUnusable(
            f"{what} cannot be read ({path}: {error.strerror}): see `docker context ls`, or set DOCKER_HOST"
        ) from None
    except (ValueError, RecursionError):
        raise EnvironmentUnusable(f"{what} cannot be read: {path} is not JSON") from None
    return data if isinstance(data, dict) else {}
