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

# All that /proc tells of pid 1 and the runner, and whether any of it takes a write.
WATCHED = """\
told = {'arch_status', 'attr', 'autogroup', 'cgroup', 'cmdline', 'comm', 'coredump_filter', 'cpu_resctrl_groups',
        'cpuset', 'gid_map', 'ksm_merging_pages', 'ksm_stat', 'limits', 'loginuid', 'mountinfo', 'mounts', 'net',
        'oom_adj', 'oom_score', 'oom_score_adj', 'patch_state', 'projid_map', 'sched', 'schedstat', 'sessionid',
        'setgroups', 'stat', 'statm', 'status', 'task', 'timens_offsets', 'uid_map', 'wchan'}
seen = set()
for pid in (1, runner):
    for name in os.listdir(f'/proc/{pid}'):
        path = f'/proc/{pid}/{name}'
        try:
            seen |= {name} if (os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(1)) else set()
        except OSError:
            pass
        try:
            os.write(os.open(path, os.O_WRONLY), b'1')
        except OSError:
            continue
        seen.add(f'{name}, written')
print('more than it may:', sorted(seen - told))"""
# Calls by number, of x86-64: none is for an agent, whatever it is inside.
NEVER = """\
calls = {'io_uring_setup': 425, 'bpf': 321, 'perf_event_open': 298, 'userfaultfd': 323, 'keyctl': 250,
         'add_key': 248, 'request_key': 249, 'fsopen': 430, 'open_tree': 428, 'move_mount': 429,
         'mount_setattr': 442, 'fspick': 433, 'pivot_root': 155, 'name_to_handle_at': 303,
         'open_by_handle_at': 304, 'process_vm_readv': 310, 'process_vm_writev': 311, 'kcmp': 312,
         'pidfd_getfd': 438, 'process_madvise': 440, 'process_mrelease': 448, 'move_pages': 279,
         'seccomp': 317, 'swapon': 167, 'reboot': 169, 'sethostname': 170, 'settimeofday': 164, 'acct': 163,
         'quotactl': 179, 'init_module': 175, 'kexec_load': 246, 'iopl': 172, 'syslog': 103, 'fanotify_init': 300,
         'io_setup': 206, 'mq_open': 240, 'shmget': 29, 'semget': 64, 'msgget': 68, 'clock_settime': 227}
answers = {}
for name, number in calls.items():
    libc.syscall(number, 0, 0, 0, 0, 0, 0)
    answers[name] = ctypes.get_errno()
print('answered otherwise:', {name: told for name, told in answers.items() if told != 1})"""
# Who is root owns the folders on the way to all that pid 1 and the runner need.
CLOSED = """\
import os
for name in ('/run', '/opt', '/tmp', '/workspace', '/'):
    os.chmod(name, 0)
print('closed')"""
TERMINALS = """\
import os
held = []
for uid in (0, 1, 990, 1000):
    ours, its = os.pipe()
    if os.fork() == 0:
        try:
            os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
            while True: held.append(os.open('/dev/ptmx', os.O_RDWR))
        except OSError as error:
            os.write(its, f'{len(held)} {error.errno},'.encode())
        __import__('time').sleep(3)
        os._exit(0)
    print('held', os.read(ours, 99).decode(), end=' ')"""
# Bytes that are no file's: attributes, names, and what lies in sockets and pipes.
UNCOUNTED = """\
import os, socket
open('/srv/f', 'x').close()
count = 0
try:
    for n in range(10**6):
        name = f'/srv/{n}'
        open(name, 'x').close()
        for m in range(100):
            os.setxattr(name, f'user.{m}', bytes(4000)); count += 1
except OSError as error:
    print('attributes end:', error.errno, count * 4000 < 256 << 20)
held = []
try:
    while True:
        held.append(socket.socketpair())
        held[-1][0].setblocking(False)
        while True:
            try: held[-1][0].send(bytes(1 << 16))
            except BlockingIOError: break
except OSError as error:
    print('sockets end:', error.errno)"""
# Signals and the like, to all that are not the agent's, from all that it can be.
EACH = """\
def each(call):
    for uid in (0, 1, 990, 20000, 20001, 65534):
        pid = os.fork()
        if pid == 0:
            try: os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid); call()
            except OSError: os._exit(0)
            os._exit(1)
        if os.waitpid(pid, 0)[1]: yield uid
print('ready')"""
SIGNALS = """\
info = ctypes.create_string_buffer(bytes(8) + b'\\xff' * 4 + bytes(116))
kinds = {'pidfd': lambda pid: syscall(424, os.pidfd_open(pid), 9, 0, 0), 'tkill': lambda pid: syscall(200, pid, 9),
         'tgkill': lambda pid: syscall(234, pid, pid, 9), 'queue': lambda pid: syscall(129, pid, 9, info),
         'priority': lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
         'io': lambda pid: syscall(251, 1, pid, 3 << 13), 'limits': lambda pid: resource.prlimit(pid, 0, (1, 1))}
done = {(kind, pid): uids for kind, call in kinds.items() for pid in (1, runner)
        if (uids := list(each(lambda: call(pid))))}
print('reached:', done)"""
# By way of a descriptor whose owner the other one is said to be.
OWNED = """\
r, w = os.pipe()
for pid in (1, runner):
    for command, value in ((fcntl.F_SETOWN, pid), (fcntl.F_SETSIG, 9), (fcntl.F_SETFL, os.O_ASYNC)):
        try: fcntl.fcntl(r, command, value)
        except OSError: pass
    os.write(w, b'x')
print('there:', os.path.exists(f'/proc/{runner}'))"""

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
    "root inside, closed ways": Attack(
        (
            (CLOSED, "closed"),
            ("import os\nif os.fork() == 0:\n    while True: pass\nos._exit(3)", "ended with exit code 3"),
            ("import os\nprint(os.getcwd(), open('/proc/self/oom_score_adj').read())", "/workspace 1000"),
            ("held = b'x' * (2 << 30)", "memory"),
        )
    ),
    "root inside, what /proc tells": Attack(((f"import os\n{RUNNER}{WATCHED}", "more than it may: []"),)),
    "root inside, calls that nobody may make": Attack(
        ((f"import ctypes\n{LIBC}{NEVER}", "answered otherwise: {}"),)
    ),
    "root inside, another numbering of calls": Attack(
        ((f"import ctypes\n{LIBC}libc.syscall(0x40000000 | 308, 3, 0x10000000)", "signal SIGSYS"),)
    ),
    "root inside, signals": Attack(
        (
            (f"import ctypes, fcntl, os, resource\n{SYSCALL}{RUNNER}{EACH}", "ready"),
            (SIGNALS, "reached: {}"),
            (OWNED, "there: True"),
        )
    ),
    "root inside, terminals": one(TERMINALS, "held 8 28, held 0 28, held 0 28, held 0 28,"),
    "root inside, bytes of no file": one(UNCOUNTED, "attributes end: 28 True"),
    # A lease holds up all who open the file, in other sandboxes too. The kernel reads half of a command's bits.
    "root inside, leases": refused(
        "fcntl.fcntl(os.open('/srv/own', os.O_RDWR | os.O_CREAT), fcntl.F_SETLEASE, fcntl.F_WRLCK)",
        "syscall(72, os.open('/srv/own', os.O_RDWR), ctypes.c_long(1 << 32 | 1024), 1)",
        "fcntl.fcntl(os.open('/opt/sandbox/modules.packed', 0), fcntl.F_SETLEASE, fcntl.F_WRLCK)",
        "fcntl.fcntl(os.open('/opt/sandbox', 0), fcntl.F_NOTIFY, fcntl.DN_ACCESS)",
        also=SYSCALL + "import fcntl\n",
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
