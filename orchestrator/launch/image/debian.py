"""Makes a Debian 13 root file system with mmdebstrap, for machines that reach no container registry.

Knows apt and mmdebstrap, not Docker: `debian_root` writes a tar, which `base` imports.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
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
    # apt's settings for reaching this host's mirror: proxy, certificates, checks that are switched off.
    lines = await _apt("apt-config", "dump", "Acquire")
    options.write_text("".join(f"{line}\n" for line in lines if _LENT_OPTIONS.match(line)))
    mirror = await find_mirror()
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


async def find_mirror() -> str | None:
    """The URI that this host gets Debian itself from; None: use mmdebstrap's default.

    Other publishers use Debian's suite names too, but have neither a folder named `debian` nor a suite with
    `-updates` at the end.
    """
    form = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    options = ("--no-release-info", "--format", form)  # what is configured, not only what was downloaded
    suites: dict[str, set[str]] = {}
    for line in await _apt("apt-get", "indextargets", *options, "Created-By: Packages"):
        match line.split():
            case [uri, suite, "main"]:
                suites.setdefault(uri.rstrip("/"), set()).add(suite)
    for uri, names in suites.items():
        own = names & _DEBIAN_SUITES
        if own and (uri.endswith("/debian") or any(f"{name}-updates" in names for name in own)):
            return _first_listed(uri) if uri.startswith(_LIST_SCHEME) else uri
    return None


async def _apt(program: str, *arguments: str) -> list[str]:
    """What a program of apt prints; nothing where there is none."""
    lines: list[str] = []
    if shutil.which(program) is not None:
        await run_program([program, *arguments], timeout_s=30, progress=lines.append)
    return lines


def _first_listed(uri: str) -> str | None:
    """The first mirror in the file that Debian's cloud images name in place of a URI."""
    path = Path("/" + unquote(uri).removeprefix(_LIST_SCHEME).lstrip("/"))
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return next((line.split()[0] for line in lines if line.startswith("http")), None)
