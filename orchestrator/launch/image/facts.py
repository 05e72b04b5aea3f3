"""Whether an image can be used for sandboxes, by the Engine's description and by what `probe` finds inside. Pure.

Only a launch shows whether it starts and parks under the whole hardening: `image check` makes one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import __version__
from orchestrator.launch.names import (
    CHANNEL_GID,
    DEFAULT_IMAGE,
    LABEL_CONTEXT,
    LABEL_PROJECT,
    LABEL_VERSION,
    PROJECT,
)
from orchestrator.rules.text import printable

PYTHON = "/opt/sandbox/bin/python"
PACKAGES = "/opt/sandbox/packages"
APP = "/opt/sandbox/app"
ENTRYPOINT = [PYTHON, "-P", f"{APP}/sandbox/__main__.py"]
PROBE = Path(__file__).with_name("probe.py")


@dataclass(frozen=True, slots=True)
class Fact:
    """The result of one check. `cure`: what to do; None: it is as it must be."""

    name: str
    result: str
    cure: str | None = None


def engine_facts(image: Mapping[str, Any], context_digest: str) -> Iterator[Fact]:
    """Checks the Engine's inspect answer `image`. `context_digest`: that of this installation's own image."""
    config = image.get("Config") or {}
    labels = config.get("Labels") or {}
    if labels.get(LABEL_PROJECT) == PROJECT and LABEL_VERSION in labels:
        other = "" if labels.get(LABEL_CONTEXT) == context_digest else f", not as {__version__} here makes it"
        yield Fact("made from ours", f"orchestrator {labels[LABEL_VERSION]}{other}")
    else:
        yield Fact("made from ours", "no", f"begin its Dockerfile with FROM {DEFAULT_IMAGE}")
    entry = config.get("Entrypoint") or []
    cure = None if entry == ENTRYPOINT else f"leave ENTRYPOINT out; it must be {json.dumps(ENTRYPOINT)}"
    yield Fact("entry point", json.dumps(entry), cure)
    volumes = ", ".join(sorted(config.get("Volumes") or ()))
    yield Fact("volumes", volumes or "none", "leave VOLUME out: volumes have no size limit" if volumes else None)
    path = dict(entry.partition("=")[::2] for entry in config.get("Env") or ()).get("PYTHONPATH")
    cure = None if path == APP else f"leave ENV PYTHONPATH out; it must be {APP}"
    yield Fact("PYTHONPATH", path or "none", cure)


def inside_facts(output: bytes, contract: int) -> Iterator[Fact]:
    """Checks `output`, the output of PROBE or of whatever ran in its place. Untrusted."""
    try:
        report = json.loads(output)
        version, broken, owned = ".".join(map(str, report["python"])), dict(report["broken"]), report["channel"]
        hidden, missing, setuid = report["unreadable"], ", ".join(report["missing"]), report["setuid"]
    except (ValueError, KeyError, TypeError):
        lines = output.decode("utf-8", "replace").strip().splitlines() or ["nothing"]
        yield Fact("python", _short(lines[-1]), f"{PYTHON} must work: leave /opt/sandbox and /usr as they are")
        return
    yield Fact("python", version)
    for name, why in list(broken.items())[:1]:
        in_the_way = f"something stands in the way of our packages: put yours into {PACKAGES}"
        yield Fact("packages", _short(f"{name}: {why}"), in_the_way)
    if not broken:
        yield Fact("packages", "smolagents, grpc and ours can be imported")
        cure = None if report["contract"] == contract else f"build it again on {DEFAULT_IMAGE}"
        yield Fact("contract", f"{report['contract']}, ours is {contract}", cure)
    cure = f"only its owner may read it: RUN chmod -R a+rX {PACKAGES}" if hidden else None
    yield Fact("readable", _short(hidden) if hidden else "by every user", cure)
    right = owned == [0, CHANNEL_GID, 0o710]
    cure = None if right else f"leave /run/channel alone: owner 0:{CHANNEL_GID}, mode 0710"
    yield Fact("channel", "the runner's alone" if right else f"/run/channel is {owned}", cure)
    yield Fact("places", f"no {missing}" if missing else "there", f"RUN mkdir -p {missing}" if missing else None)
    cure = "RUN chmod ug-s it: nothing in a sandbox may change who it is" if setuid else None
    yield Fact("setuid", _short(setuid) if setuid else "none", cure)


def _short(text: object) -> str:
    return printable(str(text), "?")[:300]
