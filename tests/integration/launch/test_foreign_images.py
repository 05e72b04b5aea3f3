"""Agents in images that are nothing like ours: the runtime needs nothing of them, and they get nothing into it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import APIError
from docker.utils import kwargs_from_env

from orchestrator.launch.base import Launcher
from orchestrator.launch.channels import Channels
from orchestrator.launch.docker.launcher import DockerLauncher
from orchestrator.launch.docker.request import VOLUME
from orchestrator.launch.names import LABEL_PROJECT, PROJECT
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.oci.store import ImageStore
from orchestrator.types import SandboxSpec
from tests.fakes import oci_images
from tests.fakes.foreign_images import KINDS, SAYS, archive, loaded
from tests.fakes.plans import a_sandbox, a_writable_sandbox
from tests.fakes.scripted_orchestrator import Script, ScriptedOrchestrator, action
from tests.integration.launch.probes import containers_of

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

STEPS = (
    # The interpreter starts itself again, whatever the image's ENV says.
    ("import os, sys, subprocess\nsubprocess.check_output([sys.executable, '-c', 'print(6 * 7)'])", "b'42\\n'"),
    ("import multiprocessing\nmultiprocessing.get_context('spawn').Pool(1).map(abs, [-43])", "[43]"),
    ("multiprocessing.get_context('forkserver').Pool(1).map(abs, [-44])", "[44]"),
    # Nothing of the image is in its processes.
    (
        "import ctypes, curses, lzma, readline, sqlite3, ssl, grpc, xml.parsers.expat, decimal, zlib, bz2\n"
        "import hashlib, locale, zoneinfo, datetime, socket, time\n"
        "maps = [line.split()[-1] for line in open('/proc/self/maps') if '/' in line]\n"
        "sorted({path for path in maps if not path.startswith(('/opt/sandbox/', '/dev/zero'))})",
        "[]",
    ),
    ("locale.setlocale(locale.LC_ALL, 'C.UTF-8')", "C.UTF-8"),
    ("str(datetime.datetime(2026, 7, 1, tzinfo=zoneinfo.ZoneInfo('Europe/Berlin')))", "2026-07-01 00:00:00+02:00"),
    ("os.environ['TZ'] = 'Asia/Tokyo'\ntime.tzset()\ntime.tzname[0]", "JST"),
    ("ssl.create_default_context().cert_store_stats()['x509_ca'] > 100", "True"),
    ("[socket.gethostbyname('localhost'), 'localhost' in open('/etc/hosts').read()]", "['127.0.0.1', True]"),
    # The image's programs are its own.
    ("subprocess.check_output(['/say' if os.path.exists('/say') else '/bin/say'])", f"b'{SAYS}\\n'"),
    ("os.environ['FROM_IMAGE']", "yes"),
    ("[name for name, value in os.environ.items() if '/opt/sandbox' in value]", "[]"),
    ("os.listdir('/workspace')", "[]"),
    ("open('/opt/sandbox/x', 'w')", "Read-only file system"),
    ("os.mkdir('/x')", "Read-only file system"),
    ("open('note.txt', 'w').write('kept') and open('note.txt').read()", "kept"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@asynccontextmanager
async def docker_launcher(run: str, kind: str, files: Path) -> AsyncIterator[tuple[Launcher, str]]:
    path = await asyncio.to_thread(archive, kind, files)
    with loaded(path, f"foreign-{kind}:{run}") as image:
        launcher = DockerLauncher(run, max_sandboxes=2, allow_localhost_tcp=True)
        try:
            yield launcher, image
        finally:
            await launcher.aclose()
            assert containers_of(run) == []
            remove_image_volumes()


@asynccontextmanager
async def oci_launcher(run: str, kind: str, files: Path) -> AsyncIterator[tuple[Launcher, str]]:
    if why := oci_images.why_not():
        pytest.skip(why)
    await asyncio.to_thread(oci_images.stored_image)
    path = await asyncio.to_thread(archive, kind, files)
    store = ImageStore()
    image = await asyncio.to_thread(store.put, path, f"foreign-{kind}:{run}")
    launcher = OciLauncher(run, max_sandboxes=2, allow_localhost_tcp=True)
    try:
        yield launcher, f"foreign-{kind}:{run}"
    finally:
        await launcher.aclose()
        for link in (store.folder / "names").iterdir():
            if link.resolve() == image.folder:
                link.unlink()
        store.remove_unused()


def remove_image_volumes() -> None:
    with closing(docker.APIClient(**kwargs_from_env())) as engine:
        for volume in engine.volumes(filters={"label": f"{LABEL_PROJECT}={PROJECT}"})["Volumes"] or ():
            if volume["Name"].startswith(f"{VOLUME}image-"):
                with suppress(APIError):  # another test uses it
                    engine.remove_volume(volume["Name"])


LAUNCHERS: Any = {"docker": docker_launcher, "oci": oci_launcher}


async def lived(launcher: Launcher, spec: SandboxSpec, run: str, script: Script) -> ScriptedOrchestrator:
    """What a sandbox told, from its start to its orderly end."""
    await launcher.check(spec)
    await launcher.ready(spec)
    with Channels(run) as channels, channels.directory() as channel:
        async with (
            ScriptedOrchestrator(channel, script) as served,
            launcher.launch(spec, channel) as sandbox,
            asyncio.timeout(200),
        ):
            ended = await sandbox.exited()
    assert ended.exit_code == 0, ended
    return served


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("launched", LAUNCHERS)
async def test_an_agent_works_in_any_image(launched: str, kind: str, run: str, files: Path) -> None:
    steps = [*STEPS]
    if kind == "hostile":
        held = "[name in os.environ for name in ('LD_PRELOAD', 'LD_AUDIT', 'PYTHONHOME')]"
        shown = "[os.environ[name] for name in ('PATH', 'PYTHONPATH', 'MALLOC_CHECK_')]"
        steps += [(held, "[False, False, False]"), (shown, "['/hostile:/bin', '/hostile', '3']")]
    script = Script(
        [*(action(code) for code, _ in steps), action("final_answer('through')")],
        step_timeout_s=60.0,
        max_steps=len(steps) + 1,
    )
    async with LAUNCHERS[launched](run, kind, files) as (launcher, image):
        served = await lived(launcher, a_sandbox(image), run, script)
    for (code, expected), observed in zip(steps, served.observations, strict=True):
        assert expected in observed, f"{code}\n--> {observed}"
    assert served.answer == b"through"


# Command, and the end of what is seen. The shell is the image's own, whatever the image is.
COMMANDS = (
    ('cd /tmp; export A="1 2"; echo "$0"', "sh\n[exit code 0]"),
    ('pwd; echo "$A $FROM_IMAGE"; exit 3', "/tmp\n1 2 yes\n[exit code 3]"),
    ("/bin/say; cat no", f"{SAYS}\ncat: {{no}}No such file or directory\n[exit code 1]"),
    # Everything of it and of its sandbox is out of reach: the socket, the runner, pid 1.
    ("cat /run/channel/box/s", "Permission denied\n[exit code 1]"),
    ("kill -9 1; sleep 0; echo on", "on\n[exit code 0]"),
    ("sleep 100 & echo kept", "kept\n[exit code 0]"),
    ("echo once; sleep 100", "once\n[killed after 5 seconds, with what it had started]"),
    ("cat", "[exit code 0]"),
    # The shell has to live until its limit, so it forks once alone, before there is no room for processes. What it
    # leaves in the background goes on, as long as the rollout does.
    ("b() { (b | b) & }; b; while :; do :; done", "[killed after 5 seconds, with what it had started]"),
    ("true", "]"),
    ("echo over", "over\n[exit code 0]"),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["busybox", "musl", "bookworm"])
@pytest.mark.parametrize(("launched", "root"), [("docker", "read-only"), ("oci", "writable")])
async def test_a_shell_agent_has_the_image_s_own_shell(
    launched: str, root: str, kind: str, run: str, files: Path
) -> None:
    commands = [*COMMANDS]
    if root == "writable":
        commands.insert(0, ("echo changed > /etc-file && cat /etc-file", "changed\n[exit code 0]"))
    says = [f"```bash\n{command}\n```" for command, _ in commands]
    script = Script([*says, "through"], kind="shell", step_timeout_s=5.0, max_steps=len(says) + 1)
    async with LAUNCHERS[launched](run, kind, files) as (launcher, image):
        spec = a_writable_sandbox(image) if root == "writable" else a_sandbox(image)
        served = await lived(launcher, spec, run, script)
    for (command, expected), observed in zip(commands, served.observations, strict=True):
        no = "can't open 'no': " if kind != "bookworm" else "no: "
        assert observed.endswith(expected.replace("{no}", no)), f"{command}\n--> {observed}"
    assert served.answer == b"through"


@pytest.mark.parametrize("launched", LAUNCHERS)
async def test_a_shell_agent_gives_up_in_an_image_without_a_shell(launched: str, run: str, files: Path) -> None:
    async with LAUNCHERS[launched](run, "static", files) as (launcher, image):
        served = await lived(launcher, a_sandbox(image), run, Script([], kind="shell"))
    assert (served.stop_reason, served.completions) == ("NO_ANSWER", [])
    assert served.results[0].detail == "the image has neither bash nor sh, and env.agent is shell"
