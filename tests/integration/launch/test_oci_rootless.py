"""Sandboxes that an ordinary user makes: the suites that root passes, with and without own control groups."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import docker
import pytest
from docker.utils import kwargs_from_env

from orchestrator.launch.names import DEFAULT_IMAGE
from tests.fakes import oci_images, ordinary_user
from tests.fakes.foreign_images import workshop
from tests.fakes.ordinary_user import OrdinaryUser
from tests.fakes.runs import ROOT
from tests.integration.launch.test_root_inside import IMAGE as WORKSHOP

_WHY_NOT = oci_images.why_not() or ordinary_user.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
PUT = """
import sys; from pathlib import Path
from orchestrator.launch.oci.store import ImageStore
ImageStore().put(Path(sys.argv[1]), sys.argv[2])
"""
LIMITS = '["memory","swap","cpus","pids"]'


@pytest.fixture(scope="module")
def archive() -> Iterator[Path]:
    """The sandbox image as a file that everybody may read."""
    with (
        tempfile.NamedTemporaryFile(suffix=".tar") as file,
        closing(docker.APIClient(**kwargs_from_env())) as engine,
    ):
        for chunk in engine.get_image(DEFAULT_IMAGE):
            file.write(chunk)
        file.flush()
        Path(file.name).chmod(0o644)
        yield Path(file.name)


@pytest.fixture(scope="module")
def user(archive: Path) -> Iterator[OrdinaryUser]:
    """With control groups of its own."""
    if (reason := ordinary_user.why_not(delegated=True)) is not None:
        pytest.skip(reason)
    with ordinary_user.ordinary_user(delegated=True) as user:
        carried_out(user, sys.executable, "-c", PUT, str(archive), DEFAULT_IMAGE)
        place = workshop(user.home)
        place.chmod(0o644)
        carried_out(user, sys.executable, "-c", PUT, str(place), WORKSHOP)
        yield user


def carried_out(user: OrdinaryUser, *argv: str) -> str:
    done = subprocess.run(user.command(*argv), cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("suite", "chosen"),
    [
        ("launch/test_launchers.py", "oci and not runsc and not crun"),  # gVisor wants root
        ("launch/test_oci_launcher.py", "oci"),
        ("launch/test_confinement.py", "oci"),
        (
            "launch/test_forked.py",
            "cancelled or closed or lost or stands_still or killed_keeper or renewed or threads",
        ),
        ("launch/test_forked_preload.py", "forked"),
        ("launch/test_writable_root.py", "not (docker_refuses or auto_without or more_storage or crun)"),
        ("launch/test_root_inside.py", "root"),
        ("test_inside_the_container.py", "oci"),
        ("attacks/test_attacks.py", "oci and not writable"),
        ("attacks/test_attacks.py", "oci-writable"),
        ("grading/test_scopes.py", "scopes and not (True or cannot_close)"),  # root alone has disks and such roots
        ("grading/test_attacks.py", "honest or cases"),
        ("grading/test_dry_run.py", "plants"),
        ("services/test_life.py", "not long"),
        ("services/test_tasks.py", "beside_services"),
        ("test_oci_run.py", "groups_are or keeper_killed or ended_by_somebody"),
    ],
)
def test_an_ordinary_user_passes_what_root_passes(user: OrdinaryUser, suite: str, chosen: str) -> None:
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not long", "-rs", "-k", chosen)
    told = carried_out(user, *command, f"tests/integration/{suite}")
    assert " passed" in told
    assert " skipped" not in told, told


def test_limits_that_cannot_be_set_are_told_by_name_and_can_be_waived(archive: Path) -> None:
    with ordinary_user.ordinary_user(delegated=False) as user:
        carried_out(user, sys.executable, "-c", PUT, str(archive), DEFAULT_IMAGE)
        doctor = (sys.executable, "-m", "orchestrator", "doctor", "--env.launcher", "oci")
        doctor = (*doctor, "--env.run_dir", str(user.home / "runs"))
        asked = user.command(*doctor)
        refused = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=800)
        assert refused.returncode == 3
        for measure in ("memory", "swap", "cpus", "pids"):
            line = rf"fail  limits +{measure}: cannot be limited here: .*: let it be delegated"
            assert re.search(line, refused.stdout), refused.stdout
        told = carried_out(user, *doctor, "--env.waive_hardening", LIMITS)
        assert "warn  limits      not limited, as you waived it: memory, swap, cpus, pids" in told
        assert "ok    sandbox     started, confined as it must be, and removed" in told
        told = carried_out(user, *doctor, "--env.waive_hardening", LIMITS, "--env.start", "fork")
        assert "ok    sandbox     forked from a parent, confined as it must be, and removed" in told
