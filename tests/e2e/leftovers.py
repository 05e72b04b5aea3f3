"""What a process has left behind: containers with its label, socket directories below its TMPDIR."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
from docker.utils import kwargs_from_env

from orchestrator.launch.names import LABEL_OWNER, LABEL_PROJECT
from orchestrator.launch.owner import Owner
from tests.fakes.runs import DEADLINE_S, Ended, running


@contextmanager
def engine() -> Iterator[docker.APIClient]:
    client = docker.APIClient(**kwargs_from_env())
    try:
        yield client
    finally:
        client.close()


def containers_of(pid: int) -> list[str]:
    """Names of the containers that an orchestrator with this pid made."""
    with engine() as client:
        labelled = client.containers(all=True, filters={"label": LABEL_PROJECT})
    owners = {c["Names"][0]: Owner.parse(c["Labels"].get(LABEL_OWNER, "")) for c in labelled}
    return [name for name, owner in owners.items() if owner is not None and owner.pid == pid]


async def run_cleanly(*arguments: str, directory: Path, **how: object) -> Ended:
    """The command from start to end, after which nothing of it may be left."""
    async with running(*arguments, directory=directory, **how) as started:  # type: ignore[arg-type]
        ended = await started.ended()
        pid = started.process.pid
    assert await asyncio.wait_for(asyncio.to_thread(containers_of, pid), DEADLINE_S) == []
    assert list(started.temporary.glob("orchestrator-*")) == []
    assert not ended.traceback, ended.stderr
    return ended
