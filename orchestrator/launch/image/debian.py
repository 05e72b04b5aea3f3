"""Makes a Debian 13 root file system with mmdebstrap, for machines that reach no container registry.

Knows apt and mmdebstrap, not Docker: `debian_root` writes a tar, which `base` imports.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.image.program import run_program

SUITE = "trixie"
MAKE_TIMEOUT_S = 900.0
_PACKAGES = ("libstdc++6", "python3", "python3-venv")  # libstdc++6: for grpcio
# Traces of the host: its proxy (perhaps with a password), mirror, name servers, host name.
_HOST_TRACES = (
    "etc/apt/apt.conf.d/99mmdebstrap etc/apt/sources.list etc/apt/sources.list.d/* etc/resolv.conf etc/hostname"
)
_RECIPE = (
    "--variant=essential",
    f"--include={','.join(_PACKAGES)}",
    f'--customize-hook=cd "$1" && rm -f {_HOST_TRACES}',
)
RECIPE_HASH = hashlib.sha256("\0".join((SUITE, *_RECIPE)).encode()).hexdigest()[:12]

_DEBIAN_NAMES = {"bullseye", "bookworm", "trixie", "forky", "duke", "sid"}
_DEBIAN_SUITES = _DEBIAN_NAMES | {"oldstable", "stable", "testing", "unstable"}
_LIST_SCHEME = "mirror+file:"
_INSTALL = "sudo apt-get install -y mmdebstrap debian-archive-keyring"
_BUILD_AS_ROOT = 'sudo "$(command -v orchestrator)" image build'
_LENT_OPTIONS = re.compile(r"Acquire::(https?|Check-Valid-Until|Check-Date|ForceIPv[46])(::|\s)")


async def debian_root(out: Path, progress: Callable[[str], None], *, rootless: bool = False) -> None:
    """Writes the tar of a root file system with Python to `out`. `rootless`: this user has subordinate ids. Raises
    EnvironmentUnusable."""
    require_means(installed=shutil.which("mmdebstrap") is not None, root=rootless or os.geteuid() == 0)
    options = out.with_suffix(".apt.conf")  # a file, as arguments can be read by every user
    options.touch(mode=0o600)
    options.write_text(await _apt_options())
    mirror = find_mirror(_apt_sources(Path("/etc/apt")))
    argv = ["mmdebstrap", *_RECIPE, f"--aptopt={options}", SUITE, str(out), *([mirror] if mirror else [])]
    # The scratch folder holds a whole root. It is beside the tar, so that both are removed together; but a user's
    # home may be closed to the subordinate ids that work there.
    scratch = {} if rootless else {"TMPDIR": str(out.parent)}
    code, tail = await run_program(
        argv,
        timeout_s=MAKE_TIMEOUT_S,
        progress=progress,
        env={**scratch, "LC_ALL": "C.UTF-8"},
    )
    if code != 0:
        reasons = [line for line in tail if line.startswith("E: ")] or ["it said nothing"]
        raise EnvironmentUnusable(f"mmdebstrap could not make a Debian base: {reasons[0].removeprefix('E: ')}")


def require_means(*, installed: bool, root: bool) -> None:
    """Raises EnvironmentUnusable, which names the one command that helps."""
    commands = ([] if installed else [_INSTALL]) + ([] if root else [_BUILD_AS_ROOT])
    if commands:
        raise EnvironmentUnusable(
            "no container registry can be reached, and making a Debian base needs mmdebstrap and root: "
            f"run `{' && '.join(commands)}`"
        )


async def _apt_options() -> str:
    """apt's settings for reaching this host's mirror: proxy, certificates, checks that are switched off."""
    if shutil.which("apt-config") is None:
        return ""
    lines: list[str] = []
    await run_program(["apt-config", "dump", "Acquire"], timeout_s=30, progress=lines.append)
    return "".join(f"{line}\n" for line in lines if _LENT_OPTIONS.match(line))


def _apt_sources(etc_apt: Path) -> Iterator[tuple[str, str]]:
    """(URI, suite) of every binary source with the component `main`."""
    for path in (etc_apt / "sources.list", *sorted(etc_apt.glob("sources.list.d/*"))):
        if path.suffix == ".list" and path.is_file():
            yield from parse_list(path.read_text(errors="replace"))
        elif path.suffix == ".sources" and path.is_file():
            yield from parse_deb822(path.read_text(errors="replace"))


def parse_list(text: str) -> Iterator[tuple[str, str]]:
    """The one-line format: `deb [options] URI suite component…`."""
    for line in text.splitlines():
        match = re.match(r"deb\s+(?:\[[^\]]*\]\s+)?(\S+)\s+(\S+)\s+([^#]+)", line.strip())
        if match and "main" in match[3].split():
            yield match[1], match[2]


def parse_deb822(text: str) -> Iterator[tuple[str, str]]:
    """The stanza format of `*.sources`."""
    for stanza in re.split(r"\n\s*\n", "\n".join(ln for ln in text.splitlines() if not ln.startswith("#"))):
        fields: dict[str, list[str]] = {}
        name = ""
        for line in stanza.splitlines():
            if not line[:1].isspace():
                name, _, line = line.partition(":")
                name = name.strip().lower()
            fields.setdefault(name, []).extend(line.split())
        if fields.get("enabled") == ["no"] or "deb" not in fields.get("types", []):
            continue
        if "main" in fields.get("components", []):
            yield from ((uri, suite) for uri in fields.get("uris", []) for suite in fields.get("suites", []))


def find_mirror(sources: Iterable[tuple[str, str]]) -> str | None:
    """The URI that this host gets Debian itself from; None: use mmdebstrap's default.

    Other publishers use Debian's suite names too, but have neither a folder named `debian` nor a suite with
    `-updates` at the end.
    """
    suites: dict[str, set[str]] = {}
    for uri, suite in sources:
        suites.setdefault(uri, set()).add(suite)
    for uri, names in suites.items():
        own = names & _DEBIAN_SUITES
        if own and (uri.rstrip("/").endswith("/debian") or any(f"{name}-updates" in names for name in own)):
            return _first_listed(uri) if uri.startswith(_LIST_SCHEME) else uri
    return None


def _first_listed(uri: str) -> str | None:
    """The first mirror in the file that Debian's cloud images name in place of a URI."""
    path = Path("/" + unquote(uri).removeprefix(_LIST_SCHEME).lstrip("/"))
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return next((line.split()[0] for line in lines if line.startswith("http")), None)
