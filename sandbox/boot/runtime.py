"""Makes the runtime with the image: a Python that needs nothing of the image it is mounted into. Run as a script.

    python3 runtime.py python PATCHELF      by the base's Python: copies it to HOME, in an environment at ROOT
    python3 runtime.py libraries PATCHELF   by the same: adds what all that is installed by now needs
    /opt/sandbox/bin/python runtime.py check    whether anything comes from elsewhere

The loader is Python's own: its path is in the program, and so is that of the libraries (DT_RPATH, which goes
before LD_LIBRARY_PATH). Places that the loader and the libraries look at by themselves are texts in them; in the
copies these are overwritten with texts of the same length. So no library of an image gets into a process of ours.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path("/opt/sandbox")
HOME = ROOT / "python"
LIBRARIES = ROOT / "lib"
_ELF = b"\x7fELF"
_UNUSED = ("__pycache__", "site-packages", "dist-packages", "sitecustomize.py", "config-*", "EXTERNALLY-MANAGED")
_NEVER_USED = ("test", "ensurepip", "idlelib", "turtledemo", "tkinter", "lib2to3", "_*test*.so")
# Files of the base that libraries look for, and where the copies lie: names of the same length.
_FILES = {"/usr/lib/locale": ROOT / "lc", "/usr/share/zoneinfo": ROOT / "tzdata"}
_OPENSSL = b"/usr/lib/ssl"  # as long as ROOT, where cert.pem is
_CERTIFICATES = "libraries/certifi/cacert.pem"
_FOLDER = re.compile(rb"(?:/usr)?/lib(?:64)?/(?:[\w-]+-linux-\w+/)?")  # of libraries
# Names without a folder: of a loader the path is shown, and behind the arrow the loader that lists it.
_LISTED = re.compile(r"^\s*([^\s/]+) => (.+?)(?: \(0x\w+\))?$", re.MULTILINE)
_HELP = b"Do not use /etc/ld.so.cache"
_NOT_THERE = "not found"


def copy_python(patchelf: str) -> None:
    """The interpreter, its standard library and the files of `_FILES`."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    program = HOME / "bin" / version
    program.parent.mkdir(parents=True)
    shutil.copy2(os.path.realpath(sys.executable), program)
    for folder, name in ((HOME / "bin", version), (ROOT / "bin", f"../python/bin/{version}")):
        folder.mkdir(exist_ok=True)
        (folder / "python3").symlink_to(name)
        (folder / "python").symlink_to("python3")
    modules = HOME / "lib" / version
    unused = shutil.ignore_patterns(*_UNUSED, *_NEVER_USED)
    shutil.copytree(sysconfig.get_path("stdlib"), modules, symlinks=True, ignore=unused)
    for source, target in _FILES.items():
        shutil.copytree(source, target, symlinks=True)
        for build in modules.glob("_sysconfigdata*.py"):  # zoneinfo asks it
            build.write_text(build.read_text().replace(source, str(target)))
    (ROOT / "cert.pem").symlink_to(_CERTIFICATES)
    (ROOT / "pyvenv.cfg").write_text(f"home = {HOME}/bin\ninclude-system-site-packages = false\n")
    (LIBRARIES / version / "site-packages").mkdir(parents=True)
    loader = _output(patchelf, "--print-interpreter", str(program))
    copy_libraries(patchelf)
    _rewrite(Path(loader), LIBRARIES / os.path.basename(loader), _without_places)
    options = ("--force-rpath", "--set-rpath", str(LIBRARIES))
    _output(patchelf, "--set-interpreter", str(LIBRARIES / os.path.basename(loader)), *options, str(program))


def copy_libraries(patchelf: str) -> None:
    """All that the programs and libraries below ROOT load, and what these load. Raises SystemExit."""
    loader = _output(patchelf, "--print-interpreter", os.path.realpath(sys.executable))
    own = {path.name: path for path in _elf_files()}
    for path in list(own.values()):
        if path.name == os.path.basename(loader):
            continue
        for name, source in _LISTED.findall(_output(loader, "--list", str(path))):
            if source == _NOT_THERE and name not in own:
                sys.exit(f"{path} needs {name}, which the base does not have")
            if source != _NOT_THERE and name not in own and not source.startswith(f"{ROOT}/"):
                own[name] = LIBRARIES / name
                _rewrite(Path(source), own[name], _with_our_places)


def check() -> None:
    """Loads all that is compiled. Raises SystemExit if a file of the base was loaded for it, or could be."""
    for loader in LIBRARIES.glob("ld-*"):
        if b"/etc/ld.so." in loader.read_bytes().replace(_HELP, b""):
            sys.exit(f"{loader} is not ours: it looks at the files of an image")
    for path in ROOT.rglob("*.cpython-*.so"):
        ctypes.CDLL(str(path))
    maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    if foreign := sorted(name for name in maps if not name.startswith(f"{ROOT}/")):
        sys.exit(f"the runtime uses files of the base: {', '.join(foreign)}")


def _elf_files() -> Iterator[Path]:
    for folder, _, names in os.walk(ROOT):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    if file.read(4) == _ELF:
                        yield path


def _rewrite(source: Path, target: Path, change: Callable[[bytes], bytes]) -> None:
    content = source.read_bytes()
    changed = change(content)
    assert len(changed) == len(content), f"{source} would change its length"
    target.write_bytes(changed)
    target.chmod(0o755)


def _without_places(loader: bytes) -> bytes:
    """The loader: it preloads nothing, has no cache, and its usual folder is ours."""
    for name in (b"/etc/ld.so.preload\0", b"/etc/ld.so.cache\0"):
        if loader.count(name) != 1:
            sys.exit(f"this loader does not look for {name[:-1].decode()}: another C library than glibc?")
        loader = loader.replace(name, b"/none" + name[5:])
    changed, count = re.subn(_FOLDER.pattern + rb"(?=\0)", _our_folder, loader)
    if not count:
        sys.exit("this loader names no usual folders")
    return changed


def _with_our_places(library: bytes) -> bytes:
    """Modules of OpenSSL and of iconv, locales, time zones and certificates are ours."""
    for name, place in _FILES.items():
        library = library.replace(name.encode(), str(place).encode().ljust(len(name), b"/"))
    library = re.sub(rb"(?<=\0)" + _OPENSSL + rb"(?=[/\0])", str(ROOT).encode(), library)
    modules = rb"(?<=\0)" + _FOLDER.pattern + rb"(?=(?:gconv|engines-3|ossl-modules)[/\0])"
    return re.sub(modules, _our_folder, library)


def _our_folder(match: re.Match[bytes]) -> bytes:
    """Of the same length; a name that nobody has where ours does not fit."""
    name = match[0]
    ours = str(LIBRARIES).encode()
    return ours.ljust(len(name), b"/") if len(name) > len(ours) else name.replace(b"lib", b"nil")


def _output(*argv: str) -> str:
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()  # noqa: S603


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["python", patchelf]:
            copy_python(patchelf)
        case ["libraries", patchelf]:
            copy_libraries(patchelf)
        case _:
            check()
