"""What people do as root, done by an agent with the programs of an image, without a network."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchestrator.launch.channels import Channels
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.oci.store import ImageStore
from tests.fakes import oci_images
from tests.fakes.foreign_images import workshop
from tests.fakes.plans import WAIVED_WITHOUT_ROOT, a_writable_sandbox
from tests.fakes.scripted_orchestrator import Script, ScriptedOrchestrator, action

_WHY_NOT = oci_images.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(900),  # the image is made once per machine
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]

IMAGE = "orchestrator-test-workshop:1"
DEADLINE_S = 300.0
STEP_S = 120.0
SH = """
import subprocess
def sh(script):
    done = subprocess.run(['sh', '-ec', script], stdout=-1, stderr=-2, stdin=-3, text=True)
    print(done.stdout[-4000:] if done.returncode == 0 else f'exit code {done.returncode}: {done.stdout[-4000:]}')
"""
DEB = """
mkdir -p /tmp/{name}/DEBIAN /tmp/{name}/usr/bin
printf '#!/bin/sh\\necho {name} runs\\n' > /tmp/{name}/usr/bin/{name}; chmod 755 /tmp/{name}/usr/bin/{name}
cat > /tmp/{name}/DEBIAN/control <<END
Package: {name}
Version: 1
Architecture: all
Maintainer: a <a@example.org>
Depends: {needs}
Description: x
END
printf '#!/bin/sh\\nset -e\\nchown games:games /usr/bin/{name}\\n' > /tmp/{name}/DEBIAN/postinst
chmod 755 /tmp/{name}/DEBIAN/postinst
dpkg-deb -b /tmp/{name} /tmp/{name}.deb
"""
WHEEL = """
import zipfile
with zipfile.ZipFile('/tmp/wheeled-1-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('wheeled.py', 'print("wheeled runs")')
    about = 'wheeled-1.dist-info/'
    wheel.writestr(about + 'METADATA', 'Metadata-Version: 2.1\\nName: wheeled\\nVersion: 1\\n')
    wheel.writestr(about + 'WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    wheel.writestr(about + 'RECORD', '')
"""
FETCH = """
python3 -c '
import time, urllib.request
for n in range(100):
    try: print(urllib.request.urlopen("http://localhost/page").read()); break
    except OSError: time.sleep(0.1)'
"""
# What is done, and lines that must be among what is printed.
WORK: dict[str, tuple[str, tuple[str, ...]]] = {
    "dpkg": (
        DEB.format(name="first", needs="git")
        + "dpkg -i /tmp/first.deb; first; stat -c '%U %a' /usr/bin/first; dpkg -s first | grep ^Status",
        ("first runs", "games 755", "Status: install ok installed"),
    ),
    "apt": (
        DEB.format(name="second", needs="first")
        + "apt-get install -y /tmp/second.deb; second; apt-get purge -y second; ! second 2>/dev/null",
        ("1 newly installed", "second runs", "Removing second"),
    ),
    "accounts": (
        "useradd --create-home --shell /bin/bash --groups games worker; echo worker:secret | chpasswd\n"
        "su - worker -c 'id; pwd; touch mine; ! touch /etc/mine 2>/dev/null; ! cat /etc/shadow 2>/dev/null'\n"
        "stat -c '%U:%G' ~worker/mine; groupadd crew; usermod -aG crew worker; id -nG worker; userdel -r worker\n"
        "! id worker 2>/dev/null",
        ("(worker)", "/home/worker", "worker:worker", "worker games crew"),
    ),
    "owners and archives": (
        "mkdir /srv/a /srv/b; echo x > /srv/a/f; chown 1234:4321 /srv/a/f; chmod 2750 /srv/a; chown games /srv/a\n"
        "ln /srv/a/f /srv/a/g; ln -s f /srv/a/l; tar -C /srv -cpf /srv/a.tar a; tar -C /srv/b -xpf /srv/a.tar\n"
        "cd /srv/b/a; stat -c '%n %u:%g %a %h' . f; readlink l",
        (". 5:0 2750 2", "f 1234:4321 644 2", "l"),
    ),
    "git": (
        "git config --global user.name me; git config --global user.email me@example.org; mkdir /srv/code\n"
        "cd /srv/code; git init -q; echo 1 > a; git add a; git commit -q -m one; git checkout -q -b other\n"
        "echo 2 > a; git commit -q -a -m two; git clone -q . /srv/copy; git -C /srv/copy log --format=%s\n"
        "git gc -q; git worktree add -q /srv/tree master; cat /srv/tree/a; git status --porcelain | wc -l",
        ("two", "one", "1", "0"),
    ),
    "pip": (
        "pip install --no-index --break-system-packages /tmp/wheeled-1-py3-none-any.whl\n"
        "python3 -c 'import wheeled, sys; print(sys.executable)'\n"
        "pip uninstall -y --break-system-packages wheeled",
        ("wheeled runs", "/usr/bin/python3", "Successfully uninstalled wheeled-1"),
    ),
    "tmux": (
        "export TERM=xterm\ntmux new-session -d -s work -x 80 -y 20 'exec sh'\n"
        "tmux send-keys -t work 'tty; echo su''m $((40+2)); stty size' Enter\n"
        "for n in $(seq 100); do tmux capture-pane -p -t work | grep -q '^20 80' && break; sleep 0.1; done\n"
        "tmux capture-pane -p -t work; tmux list-sessions; tmux kill-server",
        ("/dev/pts/", "sum 42", "20 80", "work: 1 windows"),
    ),
    "a terminal by hand": (
        "script -qec 'tty; stty size' /dev/null </dev/null; python3 -c 'import pty; pty.spawn(\"tty\")'",
        ("/dev/pts/",),
    ),
    "a server of another user": (
        "echo served > /srv/page; cd /srv\n"
        "su -s /bin/sh www-data -c 'exec python3 -m http.server 80' >/dev/null 2>&1 &\n" + FETCH + "kill $!",
        ("b'served\\n'",),
    ),
}
UDP = """
import socket, threading
server = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
server.bind(('::', 53))
threading.Thread(target=lambda: server.sendto(b'answer', server.recvfrom(99)[1])).start()
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.sendto(b'question', ('127.0.0.1', 53))
client.settimeout(10)
print(client.recv(99))
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """In the store, where it stays: unpacked once per machine."""
    if (store := ImageStore()).find(IMAGE) is None:
        store.put(workshop(tmp_path_factory.mktemp("workshop")), IMAGE)
    return IMAGE


@pytest.fixture
async def launcher(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OciLauncher]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    oci_images.stored_image()  # its runtime is every image's
    launcher = OciLauncher(run, max_sandboxes=1, waived=WAIVED_WITHOUT_ROOT)
    yield launcher
    await launcher.aclose()


@pytest.mark.slow
async def test_what_people_do_as_root_works(launcher: OciLauncher, image: str) -> None:
    codes = [SH + WHEEL, *(f"sh({script!r})" for script, _ in WORK.values()), UDP]
    script = Script([*map(action, codes), action("final_answer(1)")], max_steps=20, step_timeout_s=STEP_S)
    with Channels("workshop", Path("/tmp")) as channels, channels.directory() as channel:
        async with (
            ScriptedOrchestrator(channel, script) as served,
            launcher.launch(a_writable_sandbox(image), channel) as sandbox,
            asyncio.timeout(DEADLINE_S),
        ):
            ended = await sandbox.exited()
            assert ended.exit_code == 0, ended
            changes = await sandbox.changes()
    told = served.observations
    for (name, (_, expected)), observed in zip(WORK.items(), told[1:-1], strict=True):
        lines = observed.splitlines()
        assert [text for text in expected if not any(text in line for line in lines)] == [], (name, observed)
        assert "exit code" not in observed, (name, observed)
    assert "b'answer'" in told[-1]
    assert changes is not None
    seen = {change.path: change.kind for change in changes.changes}
    assert seen["/srv/code/a"] == "added"
    assert seen["/etc/group"] == "changed"
