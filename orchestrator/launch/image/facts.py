"""Whether an image can be used for sandboxes: by its description, and by the files that it adds for them. Pure.

Only a launch shows whether it starts and parks under the whole hardening: `image check` makes one.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator import __version__
from orchestrator.launch.contents import WITHHELD
from orchestrator.launch.names import (
    LABEL_CONTEXT,
    LABEL_PROJECT,
    LABEL_VERSION,
    PACKAGES,
    PROJECT,
    RUNTIME_MOUNT,
)
from orchestrator.rules.text import printable

OLD_PLACES = (f"{RUNTIME_MOUNT}/packages", f"{RUNTIME_MOUNT}/preload.packed")  # before there was a runtime
MOST_LAYERS = 256  # Docker makes 127
_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}  # of architectures: Linux' and Docker's
UNUSED = ("Cmd", "Healthcheck", "WorkingDir", "ExposedPorts", "StopSignal")  # and those that are looked at


@dataclass(frozen=True, slots=True)
class Fact:
    """The result of one check. `cure`: what to do; None: it is as it must be."""

    name: str
    result: str
    cure: str | None = None


def architecture() -> str:
    """This machine's, as images name it."""
    machine = os.uname().machine
    return _NAMES.get(machine, machine)


def unfit(name: str, image: Mapping[str, Any]) -> str | None:
    """Why no sandbox can be made from an image; None: it can. `image`: what Docker tells of it, of which Os,
    Architecture and RootFS may be missing."""
    ours = f"linux/{architecture()}"
    theirs = f"{image.get('Os') or 'linux'}/{image.get('Architecture') or ours[6:]}"
    if theirs != ours:
        return f"the image {printable(name)} is for {printable(theirs)}, this machine is {ours}"
    layers = image.get("RootFS", {"Layers": [""]}).get("Layers") or ()
    if not 0 < len(layers) <= MOST_LAYERS:
        what = f"{len(layers)} layers, at most {MOST_LAYERS} can be had" if layers else "no root file system"
        return f"the image {printable(name)} has {what}"
    return None


def image_facts(image: Mapping[str, Any], context_digest: str) -> Iterator[Fact]:
    """What Docker's description of an image tells. `context_digest`: that of this installation's own image."""
    config = image.get("Config") or {}
    labels = config.get("Labels") or {}
    if labels.get(LABEL_PROJECT) == PROJECT and LABEL_VERSION in labels:
        other = "" if labels.get(LABEL_CONTEXT) == context_digest else f", not as {__version__} here makes it"
        yield Fact("made from ours", f"orchestrator {_short(labels[LABEL_VERSION])}{other}")
    else:
        yield Fact("made from ours", "no, and need not be")
    unused = [name for name in ("Entrypoint", "Volumes", *UNUSED) if config.get(name)]
    unused += ["User (but with a writable root)"] if config.get("User") else []
    yield Fact("not used of it", ", ".join(unused) or "nothing")
    names = {entry.partition("=")[0] for entry in config.get("Env") or ()}
    held = ", ".join(sorted(names & WITHHELD))
    without = f", without {held}: they would end the sandbox's Python" if held else ""
    yield Fact("environment", f"the agent's{without}")


def package_facts(entries: Iterable[tuple[str, int]]) -> Iterator[Fact]:
    """`entries`: path and mode of all that the image has in PACKAGES and OLD_PLACES."""
    modules, unreadable, old = 0, "", ""
    for path, mode in entries:
        if path.startswith(f"{PACKAGES}/"):
            modules += path.endswith(".py")
        elif stat.S_ISREG(mode):
            old = old or path
        wanted = 0o005 if stat.S_ISDIR(mode) else 0o004
        if path.startswith(PACKAGES) and not stat.S_ISLNK(mode) and mode & wanted != wanted:
            unreadable = unreadable or path
    if old:
        cure = f"packages go to {PACKAGES} now: build it anew"
        yield Fact("packages", f"{_short(old)} is not seen in sandboxes", cure)
    elif unreadable:
        cure = f"only its owner may read it: RUN chmod -R a+rX {PACKAGES}"
        yield Fact("packages", _short(unreadable), cure)
    else:
        yield Fact("packages", f"{modules} modules in {PACKAGES}")


def _short(text: object) -> str:
    return printable(str(text), "?")[:300]
