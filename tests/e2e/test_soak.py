"""A hundred rollouts through one process leave nothing in it, and nothing on the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fakes.runs import ROOT

pytestmark = pytest.mark.full

ROLLOUTS = 100
HANG_S = 1200


@pytest.mark.docker
@pytest.mark.timeout(1500)
def test_100_rollouts_leave_nothing() -> None:
    command = [sys.executable, "-m", "bench.soak", str(ROLLOUTS), "--turns", "2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{ROLLOUTS} of {ROLLOUTS}" in ended.stdout
