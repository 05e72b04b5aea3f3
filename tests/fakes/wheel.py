"""The project's wheel, installed in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.runs import ROOT


@dataclass(frozen=True, slots=True)
class InstalledWheel:
    """`site`: where its packages are."""

    wheel: Path
    python: Path
    site: Path


def installed_wheel(folder: Path) -> InstalledWheel:
    """The dependencies of this environment stand in for installed ones; the wheel's own files come first."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL, timeout=120)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv")  # without a pip of its own, which takes seconds
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, timeout=120)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in dependencies))
    return InstalledWheel(wheel, python, site)
