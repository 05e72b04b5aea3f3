"""The process of a program, which finds modules imported.

`worker.program` starts this file as a script, with a socket's descriptor and the names of modules as arguments. It
imports them, waits, and is sent the program's path when there is one, with the task's working directory and
variables, NULs between them. It then goes on as `python PATH` would. Nothing is forked, so threads that a module
started are no danger.

Sandboxes may instead be forked from a process that has imported the modules (`boot.parent`), by `hold`. This file
imports nothing that Python has not loaded itself.
"""

import gc
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sandbox.held import Held

_CHUNK_BYTES = 64 * 1024
_STANDARD = f"{os.path.dirname(os.__file__)}/"
# Of Python's modules, what pid 1, the runner and the worker cannot do without.
_NEEDED = (
    *("io", "json", "json.decoder", "json.encoder", "os", "posix", "queue", "select", "selectors", "signal"),
    *("socket", "socketserver", "struct", "subprocess", "tempfile", "threading", "time", "traceback"),
)
_OF_PROCESS = {"Umask", "Uid", "Gid", "SigBlk", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Cpus_allowed"}
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid_for_children", "user", "uts")


def main() -> None:
    """Imports the modules, waits, becomes the program."""
    _find_ours()
    from sandbox.held import run_program, write_all

    line = int(sys.argv[1])
    os.set_inheritable(line, False)
    outputs = {number: _Output(number) for number in (1, 2)}
    try:
        _import(sys.argv[2:], _print)
        os.write(line, b"\n")
        message = b"".join(iter(lambda: os.read(line, _CHUNK_BYTES), b""))
    finally:
        os.close(line)
        for number, output in outputs.items():
            write_all(number, output.take())
    if message:  # else the worker is gone
        program, folder, *variables = message.split(b"\0")
        os.chdir(folder)
        os.environb.update(variable.partition(b"=")[::2] for variable in variables)
        time.tzset()
        run_program(os.fsdecode(program))


def _print(name: str, error: BaseException) -> None:
    """As the program's own failure would be; the import is left to it."""
    print(f"env.program_preload: {name} cannot be imported:", file=sys.stderr)
    sys.excepthook(type(error), error, error.__traceback__)


def _find_ours() -> None:
    """A script's folder, which comes first, makes way for that of our package, and that for the program's."""
    if not sys.flags.safe_path:
        del sys.path[0]
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def _import(modules: "Sequence[str]", failed: "Callable[[str, BaseException], None]") -> None:
    """Out of the image's file of them, if it has one. Nothing of ours is found any more."""
    from sandbox.boot.packed import PRELOADED, PackedImports, forget_ours

    gc.disable()  # imports leave little garbage, and looking for it takes a fifth of their time
    with PackedImports(PRELOADED):
        del sys.path[0]
        forget_ours()
        for name in modules:
            try:
                __import__(name)
            except BaseException as error:  # a module may raise anything, SystemExit too
                failed(name, error)
    gc.freeze()  # what is imported lives as long as the process
    gc.enable()


class _Output:
    """What modules print while they are imported is the program's output, and is kept until that is read."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._usual = os.dup(number)
        buffer = os.memfd_create("held")
        os.dup2(buffer, number)
        os.close(buffer)

    def take(self) -> bytes:
        """What was printed. What comes from now on is printed directly."""
        (sys.stdout if self._number == 1 else sys.stderr).flush()
        os.lseek(self._number, 0, os.SEEK_SET)
        printed = b"".join(iter(lambda: os.read(self._number, _CHUNK_BYTES), b""))
        os.dup2(self._usual, self._number)
        os.close(self._usual)
        return printed


class Unheld(Exception):
    """The modules cannot be imported ahead of all sandboxes; the message says why."""


def _changed() -> str:
    """The first name of what this process lives on that a module has put something else behind. Empty: none."""
    function = type(_changed)

    def is_foreign(value: object) -> bool:
        if type(value) is function:
            return not value.__code__.co_filename.startswith((_STANDARD, "<", f"{sys.prefix}/"))
        of = getattr(value, "__module__", None) if callable(value) else None
        return isinstance(of, str) and of.partition(".")[0] not in (*sys.stdlib_module_names, "sitecustomize")

    for name in _NEEDED:
        for each, value in list(vars(sys.modules[name]).items()) if name in sys.modules else ():
            if is_foreign(value):
                return f"{name}.{each}"
            if type(value) is type and value.__module__ == name:
                for part, inner in list(vars(value).items()):
                    if is_foreign(inner):
                        return f"{name}.{each}.{part}"
    return ""


def _process() -> "dict[str, str]":
    """What modules may change of the process, and cannot all be put back."""
    told = {}
    with open("/proc/self/status") as status, open("/proc/self/limits") as limits:
        for line in status:
            name, _, value = line.partition(":")
            if name in _OF_PROCESS:
                told[name] = value
        told |= {line[:25].strip(): line for line in limits}
    for name in _NAMESPACES:
        told[f"namespace {name}"] = os.readlink(f"/proc/self/ns/{name}")
    return {**told, "root": os.readlink("/proc/self/root"), "nice value": str(os.getpriority(os.PRIO_PROCESS, 0))}


def _customize(path: str) -> None:
    """What Python does at its start with PYTHONPATH, while ours are not found."""
    import site

    ours = sys.path.pop(0)
    if path:
        os.environ["PYTHONPATH"] = path
        sys.path[:0] = path.split(os.pathsep)
        site.removeduppaths()
    site.execsitecustomize()
    sys.path.insert(0, ours)


def hold(names: "Sequence[str]", path: str) -> "Held":
    """Imports these modules. `path`: the value of PYTHONPATH. Raises Unheld."""
    _find_ours()
    from sandbox.held import Held, PythonNow

    def failed(name: str, error: BaseException) -> None:
        raise Unheld(f"{name} cannot be imported: {type(error).__name__}: {error}") from error

    before, process = PythonNow(), _process()
    outputs = {number: _Output(number) for number in (1, 2)}
    add, begun = sys.addaudithook, list[bool]()
    # A hook stays for good: it sleeps until there is a program to watch.
    sys.addaudithook = lambda hook: add(lambda event, about: hook(event, about) if begun else None)
    try:
        _customize(path)
        _import(names, failed)
    finally:
        sys.addaudithook = add
        printed = {number: output.take() for number, output in outputs.items()}
    monitoring = getattr(sys, "monitoring", None)
    if monitoring and any(map(monitoring.get_tool, range(6))):  # ours would be watched, too
        raise Unheld("what it imports watches what Python does")
    after = _process()
    if changed := [name for name in process if after.get(name) != process[name]]:
        raise Unheld(f"what it imports changes its process: {', '.join(changed)}")
    if name := _changed():
        raise Unheld(f"what it imports changes Python's own {name}")
    return Held(printed, before, begun)


if __name__ == "__main__":
    main()
