"""Images of services, as `docker save` writes them: made of Debian's packages, without a registry. One has
PostgreSQL, Redis and Python, and says of itself what the usual images of databases do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.fakes.archives import saved
from tests.fakes.foreign_images import ARCHITECTURE, _made

_PACKAGES = "postgresql,redis-server,python3"
# As the image `postgres`: a new cluster, one database, a password for who comes from elsewhere.
DATABASE = r"""
set -e
bin=$(echo /usr/lib/postgresql/*/bin)
$bin/initdb -D /srv/data -U postgres --auth-local=trust --auth-host=scram-sha-256 > /dev/null
printf "%s\n" "host all all 127.0.0.1/32 trust" "host all all all scram-sha-256" "local all all trust" \
  > /srv/data/pg_hba.conf
$bin/pg_ctl -D /srv/data -o "-c listen_addresses='' -k /tmp" -w start > /dev/null
psql -q -h /tmp -U postgres -c "ALTER USER postgres PASSWORD '$POSTGRES_PASSWORD'" -c "CREATE DATABASE app"
psql -q -h /tmp -U postgres -d app -c "$SCHEMA"
$bin/pg_ctl -D /srv/data -m fast -w stop > /dev/null
exec $bin/postgres -D /srv/data -c listen_addresses='*' -k /tmp
"""


def databases(folder: Path) -> Path:
    """The file of the image."""
    unused = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale", "man")]
    emptied = '--customize-hook=rm -rf "$1"/var/lib/apt/lists "$1"/var/cache/apt'
    made = _made("services-1", "--variant=apt", f"--include={_PACKAGES}", *unused, emptied, suite="bookworm")
    config = {"Cmd": ["redis-server", "--protected-mode", "no"], "ExposedPorts": {"6379/tcp": {}}}
    whole = {"architecture": ARCHITECTURE[os.uname().machine], "os": "linux", "config": config}
    return saved(folder / "databases.tar", made.read_bytes(), config=whole)


def postgresql(image: str, schema: str, **fields: Any) -> dict[str, Any]:
    """The fields of a service."""
    return {
        "image": image,
        "user": "postgres",
        "entrypoint": ["/bin/sh", "-c", DATABASE],
        "command": [],
        "environment": {"POSTGRES_PASSWORD": "secret", "SCHEMA": schema},
        "healthcheck": {"test": "pg_isready -q -h 127.0.0.1 -p 5432", "interval": "1s", "retries": 60},
        "tmpfs": ["/srv"],
        "mem_limit": "512m",
        **fields,
    }


def redis(image: str, **fields: Any) -> dict[str, Any]:
    """The fields of a service, the rest as its image has it."""
    check = {"test": ["CMD", "redis-cli", "ping"], "interval": "1s", "retries": 60}
    return {"image": image, "healthcheck": check, "mem_limit": "256m", **fields}
