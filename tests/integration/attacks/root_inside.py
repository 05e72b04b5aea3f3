"""The attacks on a sandbox whose root may be written to, by an agent that is root in it: those of the catalogue
that mean the same there, some of them in other words, and new ones. What root may do inside is no attack: it is in
`launch/test_writable_root.py`."""

from __future__ import annotations

from collections.abc import Mapping

from tests.integration.attacks.catalogue import (
    ATTACKS,
    FILL,
    RUNNER,
    Attack,
    one,
    past_its_limit,
    refused,
)

STORAGE = "128MiB"
LIBC = "libc = ctypes.CDLL(None, use_errno=True)\n"
SYSCALL = LIBC + (
    "def syscall(*arguments):\n    if libc.syscall(*arguments) < 0:\n"
    "        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
)
# As a uid of its own that is none of root's.
AS_ANOTHER = """\
def as_another(uid, call):
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([990, uid]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
            call()
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise OSError('refused to another')
"""
MANY_FILES = """\
import os
try:
    for n in range(10**6):
        os.makedirs(f'/srv/{n // 1000}', exist_ok=True)
        open(f'/srv/{n // 1000}/{n}', 'x').close()
except OSError as error:
    print(error, n > 90_000)"""
NAMES = """\
import os
made = 0
for n in range(1, 256):
    if n != 47:
        open(b'/srv/' + bytes([n]) * 3, 'xb').close()
        made += 1
for name in ('\\u202egnp.exe', 'e\\u0301', '\\u00e9', '\\ud800'.encode('utf-8', 'surrogatepass'), 'x' * 255):
    open(os.path.join(b'/srv', os.fsencode(name) if isinstance(name, str) else name), 'xb').close()
    made += 1
deep = os.open('/srv', os.O_RDONLY)
for _ in range(300):
    os.mkdir('d' * 200, dir_fd=deep)
    below = os.open('d' * 200, os.O_RDONLY, dir_fd=deep)
    os.close(deep)
    deep = below
print('made', made)"""
LINKS = """\
import os
os.link('/etc/passwd', '/etc/linked')
with open('/etc/linked', 'a') as linked:
    linked.write('#')
os.symlink('/proc/1/root', '/srv/up'), os.symlink('../' * 40 + 'etc/shadow', '/srv/out')
print('own copy', os.stat('/etc/linked').st_nlink, open('/etc/passwd').read().endswith('#'))"""
HIDING = """\
import os, time
for uid in (0, 1, 990, 1000, 20000, 20001, 65535):
    if os.fork() == 0:
        os.setsid(); os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
        for name in ('/proc/self/oom_score_adj',):
            try: open(name, 'w').write('-1000')
            except OSError: pass
        while True: time.sleep(1)
os._exit(0)"""
FOUND = """\
import os
mine = [p for p in os.listdir('/proc') if p.isdecimal() and os.stat(f'/proc/{p}').st_uid not in (65534,)]
print('hidden:', sorted({int(p) for p in mine} - {os.getpid()}))"""

IN_OTHER_WORDS: Mapping[str, Attack] = {
    "exhaustion, disk": Attack(
        tuple((FILL.format(place=place), "No space left") for place in ("/workspace", "/tmp", "/var", "/dev/shm"))
    ),
    "exhaustion, inodes": one(MANY_FILES, "No space left on device: "),
    "authority, the network": refused(
        "socket.socket(40, socket.SOCK_STREAM)",  # AF_VSOCK
        "socket.socket(16, socket.SOCK_RAW)",  # AF_NETLINK
        "socket.socket(17, socket.SOCK_RAW)",  # AF_PACKET
        "socket.socket(38, socket.SOCK_SEQPACKET)",  # AF_ALG
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        "socket.create_connection(('169.254.169.254', 80), timeout=5)",
        "socket.create_connection(('192.0.2.1', 80), timeout=5)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
        "__import__('urllib.request').request.urlopen('http://169.254.169.254/', timeout=5)",
        "visit_page('http://169.254.169.254/latest/meta-data')",
        "visit_page('http://localhost:8000/')",
        "visit_page('file:///etc/passwd')",
    ),
    "authority, root": refused(
        "os.mknod('/workspace/null', 0o020666, os.makedev(1, 3))",
        "os.mknod('/workspace/disk', 0o060666, os.makedev(8, 0))",
        "os.mknod('/workspace/gone', 0o020000, 0)",  # a whiteout, as overlayfs writes them
        "os.nice(-1)",
        "resource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))",
        "os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000')",
        "open('/proc/sys/kernel/core_pattern', 'w')",
        "open('/proc/sys/kernel/hostname', 'w').write('x')",
        "open('/proc/sysrq-trigger', 'w')",
        "open('/dev/kmsg')",
        "open('/dev/mem')",
        "open('/dev/fresh', 'w')",
        "open('/var/run/docker.sock')",
        "open('/opt/sandbox/app/sandbox/runner/runner.py', 'a')",
        "os.unlink('/opt/sandbox/bin/python')",
        "os.rename('/opt/sandbox', '/opt/other')",
        "os.mkdir('/sys/fs/cgroup/pids/mine')",
        "open('/attachments/given.txt', 'a')",
        "os.unlink('/attachments/given.txt')",
        "os.chown('/attachments', 0, 0)",
        "os.setuid(65536)",
    ),
}
NEW: Mapping[str, Attack] = {
    "root inside, user namespaces": refused(
        "syscall(272, 0x10000000)",  # unshare
        "syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",  # clone
        "syscall(435, 0, 0)",  # clone3
        "syscall(308, os.open('/proc/self/ns/user', os.O_RDONLY), 0x10000000)",  # setns
        "syscall(308, os.open('/proc/self/ns/mnt', os.O_RDONLY), 0)",
        "syscall(308, os.pidfd_open(os.getpid()), 0x10000000)",
        "os.open('/proc/1/ns/user', os.O_RDONLY)",
        "os.open(f'/proc/{runner}/ns/user', os.O_RDONLY)",
        "os.write(os.open('/proc/self/uid_map', os.O_WRONLY), b'0 0 1')",
        "os.write(os.open('/proc/self/setgroups', os.O_WRONLY), b'deny')",
        also=SYSCALL + RUNNER,
    ),
    "root inside, the runner": refused(
        *(f"as_another({uid}, lambda: os.kill(runner, 9))" for uid in (1, 990, 20000, 20001)),
        "os.kill(runner, 9)",
        "as_another(990, lambda: os.listdir('/run/channel'))",
        "os.chmod('/run/channel', 0o777)",
        "os.chown('/run/channel', 0, 0)",
        "os.rename('/run/channel', '/run/other')",
        "os.rename('/run', '/other')",
        "os.mkdir('/run/channel/mine')",
        "syscall(165, b'tmpfs', b'/run/channel', b'tmpfs', 0, 0)",
        "syscall(166, b'/run/channel', 2)",
        "syscall(161, b'/')",  # chroot
        "syscall(101, 16, runner, 0, 0)",  # ptrace
        "open(f'/proc/{runner}/mem', 'rb').read(1)",
        "os.listdir(f'/proc/{runner}/root/')",
        "os.listdir(f'/proc/{runner}/cwd/')",
        also=SYSCALL + AS_ANOTHER + RUNNER,
    ),
    "root inside, what overlayfs reads": Attack(
        (
            *refused(
                "os.setxattr('/srv', 'trusted.overlay.opaque', b'y')",
                "os.setxattr('/srv', 'trusted.overlay.redirect', b'/root')",
                "os.setxattr('/srv', 'security.capability', bytes(20))",
                "os.mknod('/srv/passwd', 0o020000, os.makedev(0, 0))",
            ).steps,
            (
                "for name in ('opaque', 'redirect', 'metacopy', 'whiteout'):\n"
                "    try: os.setxattr('/srv', f'user.overlay.{name}', b'y')\n    except OSError: pass\n"
                "for name in ('.wh.passwd', '.wh..wh..opq', 'work', 'index'):\n"
                "    open(f'/etc/{name}', 'x').close()\n"
                "print('still', os.path.exists('/etc/passwd'), os.path.exists('/etc/.wh.passwd'))",
                "still True True",
            ),
        )
    ),
    "root inside, sparse": refused(
        "os.truncate(open('/srv/sparse', 'w').name, 1 << 40)",
        "os.posix_fallocate(os.open('/srv/sparse', os.O_RDWR | os.O_CREAT), 0, 1 << 30)",
    ),
    "root inside, names": one(NAMES, "made 259"),
    "root inside, links": one(LINKS, "own copy 2"),
    "root inside, hiding": Attack(((HIDING, "ended with exit code 0"), (FOUND, "hidden: []"))),
    "root inside, the accounts": Attack(
        (
            (
                "import os\nfor name in ('/etc/passwd', '/etc/group', '/etc/shadow', '/etc/ld.so.cache'):\n"
                "    if os.path.exists(name): os.unlink(name)\n"
                "open('/etc/ld.so.preload', 'w').write('/nowhere.so')\nprint('gone')",
                "gone",
            ),
            ("import os\nos._exit(3)", "ended with exit code 3"),
        )
    ),
    "root inside, all that can be deleted": Attack(
        (
            (
                "import os, shutil\nfor name in os.listdir('/'):\n"
                "    if name not in ('proc', 'sys', 'dev'): shutil.rmtree(f'/{name}', ignore_errors=True)\n"
                "print('usr' in os.listdir('/'), 'modules.packed' in os.listdir('/opt/sandbox'))",
                "False True",
            ),
        )
    ),
    "root inside, fork storm of other users": past_its_limit(
        "import os\nfor uid in range(1, 4):\n    if os.fork() == 0:\n        os.setresuid(uid, uid, uid)\n"
        "        while True:\n            try: os.fork()\n            except OSError: pass\nwhile True: pass"
    ),
    "root inside, killing the killers": past_its_limit(
        "import os, signal\nfor _ in range(30):\n    if os.fork() == 0:\n        while True:\n"
        "            for n in range(1, 400):\n                try: os.kill(n, signal.SIGSTOP)\n"
        "                except OSError: pass\nwhile True: pass"
    ),
}
ATTACKS_OF_ROOT: Mapping[str, Attack] = {**ATTACKS, **IN_OTHER_WORDS, **NEW}
