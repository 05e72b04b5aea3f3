"""What a process has in memory before it is forked: children copy little of it, and all of it still works."""

from __future__ import annotations

import json
from contextlib import closing

import docker
import pytest

from orchestrator.launch.contents import APP, PYTHON
from orchestrator.launch.names import DEFAULT_IMAGE

pytestmark = pytest.mark.docker
BEGINNING = """
import json, os, sys
from sandbox.boot.settling import settle
def private_kib():
    with open("/proc/self/smaps_rollup") as file:
        return int(next(line for line in file if line.startswith("Private_Dirty")).split()[1])
"""
PROGRAM = """
things = [[str(number) * 3, (number, float(number)), {number: "x"}, object()] for number in range(30_000)]
del things[::3]
def double(text):
    return text * 2
if sys.argv[1] == "settled":
    settle()
reader, writer = os.pipe()
if os.fork() == 0:
    looked = sum(len(text) + pair[0] for text, pair, _, _ in things)
    kept = [each for thing in things for each in thing]
    made = [str(number) for number in range(1000)]
    del kept
    os.write(writer, json.dumps([private_kib(), looked]).encode())
    os._exit(0)
os.wait()
things.append(1)
told = json.loads(os.read(reader, 100))
print(json.dumps([*told, len(things), double("ab"), sys.getrefcount(double) > 1 << 30, len(sys.modules) > 10]))
"""


HOLES = """
things = [bytes(800) for _ in range(8_000)]  # too large for Python's own pools
del things[::15]  # one of three pages
if sys.argv[1] == "settled":
    settle()
reader, writer = os.pipe()
if os.fork() == 0:
    before = private_kib()
    made = [bytes(800) for _ in range(500)]
    os.write(writer, str(private_kib() - before).encode())
    os._exit(0)
os.wait()
print(json.dumps([int(os.read(reader, 100))]))
"""


def run(how: str, program: str = PROGRAM) -> list[object]:
    """By the image's Python: ours may be too old to have immortal objects."""
    with closing(docker.from_env(timeout=300)) as engine:
        said = engine.containers.run(
            DEFAULT_IMAGE,
            ["-c", BEGINNING + program, how],
            entrypoint=PYTHON,
            environment={"PYTHONPATH": APP},
            network_mode="none",
            remove=True,
        )
    told: list[object] = json.loads(said)
    return told


def test_a_child_that_looks_at_everything_copies_little_of_it() -> None:
    plain, settled = run("plain"), run("settled")
    assert settled[1:4] == plain[1:4]
    assert (settled[4], settled[5]) == (True, True)
    assert int(str(settled[0])) < 0.5 * int(str(plain[0])), (settled, plain)


def test_what_a_child_makes_lies_together_in_memory() -> None:
    """And not in places that have become free here and there, each in a page to be copied."""
    plain, settled = run("plain", HOLES), run("settled", HOLES)
    assert int(str(settled[0])) < 0.5 * int(str(plain[0])), (settled, plain)
