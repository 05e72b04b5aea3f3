"""Runs inside an image, with its Python and without privileges. Prints what it finds as JSON.

Uses the standard library only and nothing of this package, which the image does not have.
"""

from __future__ import annotations

import importlib
import json
import os
import stat
import sys

_NEEDED = ("smolagents", "grpc", "rollout_api.v1.sandbox_pb2", "sandbox.runner.wire")
_BINARIES = ("/bin", "/usr/bin", "/usr/local/bin", "/sbin", "/usr/sbin")
_PLACES = ("/attachments", "/workspace")


def _broken() -> dict[str, str]:
    """Needed module → why it cannot be imported."""
    broken = {}
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except BaseException as error:  # the image may hold any module under that name
            broken[name] = f"{type(error).__name__}: {error}"
    return broken


def _unreadable() -> str | None:
    """The first path below the import path that this user cannot read; None: there is none."""
    for root in {path for path in sys.path if path.startswith("/opt/sandbox/")}:
        for folder, folders, files in os.walk(root, onerror=lambda error: None):
            for name in folders + files:
                path = os.path.join(folder, name)
                if not os.access(path, os.R_OK | (os.X_OK if name in folders else 0)):
                    return path
    return None


def _owned(path: str) -> list[int] | None:
    """Owner, group, mode; None: no such path."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)]


def _setuid() -> str | None:
    """The first setuid or setgid program; None: there is none."""
    for folder in filter(os.path.isdir, _BINARIES):
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            owned = _owned(path)
            if owned is not None and owned[2] & (stat.S_ISUID | stat.S_ISGID):
                return path
    return None


if __name__ == "__main__":
    broken = _broken()
    print(
        json.dumps(
            {
                "python": list(sys.version_info[:3]),
                "broken": broken,
                "contract": getattr(sys.modules.get("sandbox.runner.wire"), "CONTRACT", None),
                "unreadable": _unreadable(),
                "channel": _owned("/run/channel"),
                "missing": [place for place in _PLACES if not os.path.isdir(place)],
                "setuid": _setuid(),
            }
        )
    )
