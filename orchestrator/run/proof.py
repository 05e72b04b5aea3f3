"""The proof in run.json that a run directory is the user's own.

A run directory may come from anybody: from an archive, a colleague, a hub. Its addresses, code and confinement are
taken over only if this user wrote run.json on this machine and it was not edited since. So run.json holds an HMAC
of its content, made with a key that stays in this user's account. Whoever can write there can run anything as this
user anyway.
"""

import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

FIELD = "proof"
_PURPOSE = b"rollout-orchestrator run.json\n"  # so that other uses of the key give other HMACs
_KEY_BYTES = 32


def prove(description: Mapping[str, Any]) -> str | None:
    """The proof for the content of a run.json, as read from JSON; None if no key can be stored."""
    key = _key() or _new_key()
    return None if key is None else _proof(key, description)


def is_own(description: Mapping[str, Any]) -> bool:
    """Whether the run.json holds a valid proof: this user wrote it on this machine and it was not edited."""
    signature, key = description.get(FIELD), _key()
    if key is None or not isinstance(signature, str):
        return False
    return hmac.compare_digest(signature.encode(), _proof(key, description).encode())


def _proof(key: bytes, description: Mapping[str, Any]) -> str:
    content = {name: value for name, value in description.items() if name != FIELD}
    text = orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
    return hmac.digest(key, _PURPOSE + text, "sha256").hex()


def state_folder() -> Path | None:
    """The user's folder for what outlasts runs and is no cache; None for an account without a home."""
    base = os.environ.get("XDG_STATE_HOME", "")
    with suppress(RuntimeError):
        folder = Path(base) if base.startswith("/") else Path.home() / ".local" / "state"
        return folder / "rollout-orchestrator"
    return None


def _path() -> Path | None:
    folder = state_folder()
    return None if folder is None else folder / "run-key"


def _key() -> bytes | None:
    """The user's key; None if there is none, or the file is another user's or readable by others."""
    path = _path()
    with suppress(OSError):
        if path is not None:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                how = os.fstat(file.fileno())
                private = stat.S_ISREG(how.st_mode) and how.st_uid == os.geteuid() and not how.st_mode & 0o077
                key = file.read(_KEY_BYTES) if private else b""
            return key if len(key) == _KEY_BYTES else None
    return None


def _new_key() -> bytes | None:
    """Makes the key, unless another process was faster."""
    path = _path()
    if path is None:
        return None
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            os.link(draft, path)  # atomic, and does not replace an existing key
        finally:
            draft.unlink(missing_ok=True)
    return _key()
