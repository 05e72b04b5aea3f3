"""Services in real sandboxes: who is reached by whom, what becomes of those that end, and who is to blame."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.engine.hosts_file import with_hosts
from orchestrator.engine.service_images import of_image
from orchestrator.launch.base import Command
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.workspaces import Workspaces
from orchestrator.rules.outcome import ServiceEnd
from orchestrator.services.control import ServiceControl
from orchestrator.services.life import Services, Unready, services
from orchestrator.types import Healthcheck, Need, Service, Task
from tests.fakes import oci_images
from tests.fakes.plans import WAIVED_WITHOUT_ROOT, a_writable_sandbox

_WHY_NOT = oci_images.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(300),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
DEADLINE_S = 120.0
# Answers each line with the name, the line and where it seems to come from; a line `end N` ends it so.
ECHO = r"""
import os, socketserver, sys
class Line(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            word = line.decode().strip()
            print("asked", word, flush=True)
            if word.startswith("end "): os._exit(int(word[4:]))
            if word == "fill": held = bytearray(1 << 30)
            if word.startswith("ask "):
                import socket
                host, port = word[4:].split(":")
                with socket.create_connection((host, int(port))) as other:
                    other.sendall(b"hello\n"); word = other.makefile().readline().strip()
            self.wfile.write(f"{sys.argv[1]} {word} {self.client_address[0]}\n".encode())
class Server(socketserver.ThreadingTCPServer): allow_reuse_address = True
print("key sk-abcdefgh12345678", flush=True)
Server(("0.0.0.0", int(sys.argv[2])), Line).serve_forever()
"""
ASK = r"""
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 30) as there:
    there.sendall((" ".join(sys.argv[3:]) + "\n").encode()); print(there.makefile().readline().strip())
"""


def an_echo(name: str, port: int = 7000, **fields: object) -> Service:
    check = f"python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}))'"
    service = Service(
        name,
        image=DEFAULT_IMAGE,
        entrypoint=("python3", "-c", ECHO, name, str(port)),
        healthcheck=Healthcheck(check, interval_s=1.0, timeout_s=20.0, retries=60),
        ports=(port,),
        memory_bytes=256 << 20,
    )
    return of_image(replace(service, **fields), DEFAULT_IMAGE, {})  # type: ignore[arg-type]


@pytest.fixture
async def launcher() -> AsyncIterator[OciLauncher]:
    oci_images.stored_image()
    launcher = OciLauncher(f"test-{os.getpid()}", max_sandboxes=2, waived=WAIVED_WITHOUT_ROOT)
    yield launcher
    await launcher.aclose()
    assert not launcher._live


@asynccontextmanager
async def running(launcher: OciLauncher, folder: Path, *those: Service) -> AsyncIterator[tuple[Services, Task]]:
    workspaces = Workspaces(folder / "workspaces")
    task = with_hosts(Task("t", "q", services=those), workspaces)
    async with asyncio.timeout(DEADLINE_S), services(task, spec_of(task), launcher) as found:
        yield found, task


def spec_of(task: Task):  # type: ignore[no-untyped-def]
    spec = a_writable_sandbox(DEFAULT_IMAGE)
    return replace(spec, layers=() if task.hosts is None else (task.hosts,))


async def asked(launcher: OciLauncher, task: Task, found: Services, *questions: Sequence[str]) -> list[str]:
    """What a command says that finds the services as an agent does."""
    lines = [f"python3 -c '{ASK}' {' '.join(words)}" for words in questions]
    command = Command(("/bin/sh", "-c", "\n".join(lines)), 60.0, "/srv", ways=found.ways)
    async with launcher.run(spec_of(task), command) as box:
        await box.command_end()
        with box.written() as top:
            there = os.open("logs/verifier/test-stdout.txt", os.O_RDONLY, dir_fd=top)
            with open(there) as file:
                return file.read().splitlines()


async def test_services_are_found_by_name_and_find_each_other(launcher: OciLauncher, tmp_path: Path) -> None:
    db, web = an_echo("db"), an_echo("web", 8080, needs=(Need("db", "service_healthy"),), aliases=("www",))
    async with running(launcher, tmp_path, web, db) as (found, task):
        said = await asked(
            launcher, task, found, ("db", "7000", "hi"), ("www", "8080", "hi"), ("web", "8080", "ask", "db:7000")
        )
        assert said == ["db hi 127.0.3.1", "web hi 127.0.3.1", "web db hello 127.0.2.2 127.0.3.1"]
        records = await found.records()
        assert [one.name for one in records] == ["db", "web"]
        assert all(one.healthy_s is not None and not one.ended for one in records)
        assert records[1].started_s >= (records[0].healthy_s or 0)
        assert "asked hi" in records[0].log
        assert "sk-" not in records[0].log


async def test_a_service_that_never_gets_healthy_is_the_tasks_doing(launcher: OciLauncher, tmp_path: Path) -> None:
    sick = an_echo("db", healthcheck=Healthcheck("echo no table; false", interval_s=0.2, retries=2))
    with pytest.raises(Unready, match=r"db is not there: .*printed: no table") as unready:
        async with running(launcher, tmp_path, sick):
            pass
    (record,) = unready.value.records
    assert record.healthy_s is None
    gone = an_echo("db", entrypoint=("/bin/sh", "-c", "echo no room >&2; exit 3"))
    with pytest.raises(Unready, match="it ended with 3 and printed: no room"):
        async with running(launcher, tmp_path, gone):
            pass
    absent = an_echo("db", entrypoint=("/no/such/program",))
    with pytest.raises(Unready, match="No such file"):
        async with running(launcher, tmp_path, absent):
            pass


async def test_what_is_to_end_may_end(launcher: OciLauncher, tmp_path: Path) -> None:
    once = of_image(
        Service("fill", image=DEFAULT_IMAGE, command=("/bin/sh", "-c", "echo filled")), DEFAULT_IMAGE, {}
    )
    db = an_echo("db", needs=(Need("fill", "service_completed_successfully"),))
    async with running(launcher, tmp_path, once, db) as (found, task):
        assert await asked(launcher, task, found, ("db", "7000", "hi")) == ["db hi 127.0.3.1"]
        assert not found.has_ended


async def test_an_end_that_requests_cause_is_the_policys(launcher: OciLauncher, tmp_path: Path) -> None:
    async with running(launcher, tmp_path, an_echo("db")) as (found, task):
        await asked(launcher, task, found, ("db", "7000", "end", "4"))
        end = await found.ended()
        assert (end.name, end.out_of_memory) == ("db", False)
        assert "it ended with 4" in end.detail
        control = ServiceControl(launcher)
        assert await control.excuse(end, task, spec_of(task)) == ""
        assert await control.excuse(replace(end, lived_s=end.lived_s / 2), task, spec_of(task)) == ""
        assert control.questions == 1  # it was seen to live as long


@pytest.mark.slow
async def test_an_end_without_the_policy_is_nobodys(launcher: OciLauncher, tmp_path: Path) -> None:
    dies = an_echo("db", entrypoint=("/bin/sh", "-c", "exec sleep 2"), healthcheck=Healthcheck("true"))
    async with running(launcher, tmp_path, dies) as (found, task):
        end = await found.ended()
        excuse = await ServiceControl(launcher).excuse(replace(end, lived_s=end.lived_s + 5), task, spec_of(task))
        assert "left alone, db ends too" in excuse


async def test_memory_is_the_policys(launcher: OciLauncher, tmp_path: Path) -> None:
    async with running(launcher, tmp_path, an_echo("db")) as (found, task):
        await asked(launcher, task, found, ("db", "7000", "fill"))
        end: ServiceEnd = await found.ended()
        assert end.out_of_memory, end
        control = ServiceControl(launcher)
        assert await control.excuse(end, task, spec_of(task)) == ""
        assert control.questions == 0


async def test_nothing_of_them_outlives_a_killed_orchestrator(tmp_path: Path) -> None:
    oci_images.stored_image()
    program = (
        "import asyncio; from pathlib import Path; from tests.integration.services import test_life as life\n"
        "from orchestrator.launch.oci.launcher import OciLauncher\n"
        "async def main():\n"
        "    launcher = OciLauncher('killed', max_sandboxes=1, waived=life.WAIVED_WITHOUT_ROOT)\n"
        f"    async with life.running(launcher, Path({str(tmp_path)!r}), life.an_echo('db')) as (found, task):\n"
        "        print(found.sandbox('db').pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        ended = os.pidfd_open(int(await process.stdout.readline()))
        process.kill()
        await process.wait()
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(ended, gone.set)
        try:
            await gone.wait()  # pid 1 of the service, and with it all that ran there
        finally:
            asyncio.get_running_loop().remove_reader(ended)
            os.close(ended)
