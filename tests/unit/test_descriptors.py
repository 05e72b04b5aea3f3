"""Open files for many sandboxes, in processes of their own: a limit once lowered cannot be raised again."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource
from orchestrator.launch.descriptors import make_room
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(make_room({sandboxes}))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "sandboxes", "said", "then"),
    [
        (1024, 4096, 8, "None", 1024),
        (1024, 4096, 200, "None", 256 + 6 * 200),
        (512, 1024, 200, "ulimit -Hn 1456", 1024),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_it_may_and_no_further(
    soft: int, hard: int, sandboxes: int, said: str, then: int
) -> None:
    code = CODE.format(soft=soft, hard=hard, sandboxes=sandboxes)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    text, limit = done.stdout.splitlines()
    assert said in text
    assert int(limit) == then
