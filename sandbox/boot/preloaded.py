"""The process of a program, which finds modules imported.

`worker.program` starts this file as a script, with a socket's descriptor and the names of modules as arguments. It
imports them, waits, and is sent the program's path when there is one, with the task's working directory and
variables, NULs between them. It then goes on as `python PATH` would. Nothing is forked, so threads that a module
started are no danger.

Sandboxes may instead be forked from a process that has imported the modules (`boot.parent`). There the state of
Python with these modules and nothing else is `held`, and the worker forks the program's process, which `become`s
the program. This file imports nothing that Python has not loaded itself.
"""

import gc
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn

# Of `sys`, what modules may change when they are imported.
_HOOKS = ("displayhook", "excepthook", "unraisablehook")
_STREAMS = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
_CHUNK_BYTES = 64 * 1024
_STANDARD = f"{os.path.dirname(os.__file__)}/"
_LIVING = {"sys", "builtins", "__main__", "threading"}  # whose state is this process', or put back by name
# Of Python's modules, what pid 1, the runner and the worker cannot do without.
_NEEDED = (
    *("io", "json", "json.decoder", "json.encoder", "os", "posix", "queue", "select", "selectors", "signal"),
    *("socket", "socketserver", "struct", "subprocess", "tempfile", "threading", "time", "traceback"),
)
_OF_PROCESS = {"Umask", "Uid", "Gid", "SigBlk", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Cpus_allowed"}
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid_for_children", "user", "uts")


def main() -> None:
    """Imports the modules, waits, becomes the program."""
    line = int(sys.argv[1])
    os.set_inheritable(line, False)
    outputs = [_Output(1), _Output(2)]
    try:
        _import(sys.argv[2:], _print)
        os.write(line, b"\n")
        message = b"".join(iter(lambda: os.read(line, _CHUNK_BYTES), b""))
    finally:
        os.close(line)
        for stream in outputs:
            stream.release()
    if message:  # else the worker is gone
        program, folder, *variables = message.split(b"\0")
        os.chdir(folder)
        os.environb.update(variable.partition(b"=")[::2] for variable in variables)
        time.tzset()
        _run(os.fsdecode(program))


def _print(name: str, error: BaseException) -> None:
    """As the program's own failure would be; the import is left to it."""
    print(f"env.program_preload: {name} cannot be imported:", file=sys.stderr)
    sys.excepthook(type(error), error, error.__traceback__)


def _import(modules: "Sequence[str]", failed: "Callable[[str, BaseException], None]") -> None:
    """Out of the image's file of them, if it has one."""
    # A script's folder, which is first, makes way for that of the `sandbox` package, and that for the program's.
    if not sys.flags.safe_path:
        del sys.path[0]
    sys.path.insert(0, _package_folder())
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

    def release(self) -> None:
        """Prints it, and what comes from now on directly."""
        _write(self._usual, self._end())
        self._restore()

    def take(self) -> bytes:
        """It, which is not printed. What comes from now on is, directly."""
        printed = self._end()
        self._restore()
        return printed

    def _end(self) -> bytes:
        (sys.stdout if self._number == 1 else sys.stderr).flush()
        os.lseek(self._number, 0, os.SEEK_SET)
        return b"".join(iter(lambda: os.read(self._number, _CHUNK_BYTES), b""))

    def _restore(self) -> None:
        os.dup2(self._usual, self._number)
        os.close(self._usual)


class Unheld(Exception):
    """The modules cannot be imported ahead of all sandboxes; the message says why."""


class Held:
    """Python as it is with modules imported, and nothing of ours. `printed`: by them, to either output. `before`:
    as it was without them."""

    def __init__(self, names: "Sequence[str]", printed: "Mapping[int, bytes]", before: "_Now") -> None:
        import warnings

        self.names, self._printed, self._before = tuple(names), printed, before
        self._now, self._modules = _Now(), dict(sys.modules)
        self._filters = list(warnings.filters)
        self._own = {name for name, module in self._modules.items() if _is_own(name, module)}
        self._names = {name: dict(vars(self._modules[name])) for name in self._own - _LIVING}
        self._loggers: dict[str, Any] = {}

    def set_aside(self) -> None:
        """From here on modules that are not Python's own are imported anew, from where ours lie, and Python is
        what it was before."""
        found = [path for path in sys.path if isinstance(path, str)]
        for name in self._modules:
            if name not in self._own:
                del sys.modules[name]
        self._before.restore()
        _filter_warnings([("ignore", None, Warning, None, 0)])  # what the image makes an error is none of ours
        self._loggers = _swap_loggers({})
        theirs = {"", *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
        sys.path[:] = [_package_folder(), *(path for path in found if path not in theirs)]

    def become(
        self, program: str, environment: "Mapping[str, str]", standard: "tuple[int, int, int]"
    ) -> "NoReturn":
        """Goes on in this process as `python PROGRAM` would, and ends it. `standard`: descriptors to have as the
        usual three; all others are closed."""
        status = 1
        try:
            for number, source in enumerate(standard):
                os.dup2(source, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            self._restore(environment)
            status = _status_of(lambda: _run(program))
        finally:
            os._exit(status)

    def _restore(self, environment: "Mapping[str, str]") -> None:
        import signal

        signal.set_wakeup_fd(-1)
        sys.modules.clear()
        sys.modules.update(self._modules)
        self._now.restore()
        for name, held in self._names.items():
            names = vars(self._modules[name])
            for each in [each for each, value in names.items() if each not in held and type(value) is type(sys)]:
                del names[each]
            for each, value in held.items():
                if names.get(each, held) is not value:
                    names[each] = value
        _filter_warnings(self._filters)
        _swap_loggers(self._loggers)
        os.environ.clear()
        os.environ.update(environment)
        time.tzset()
        for number, printed in self._printed.items():
            _write(number, printed)
        if (numpy := sys.modules.get("numpy")) is not None and "numpy.random" in sys.modules:
            numpy.random.seed()  # what it was seeded with at its import, all siblings know


class _Now:
    """What modules may change of Python, and can be put back."""

    def __init__(self) -> None:
        import builtins
        import signal

        self._builtins = dict(vars(builtins))
        self._path, self._finders, self._hooks = sys.path[:], sys.meta_path[:], sys.path_hooks[:]
        self._of_sys = {name: getattr(sys, name) for name in (*_HOOKS, *_STREAMS)}
        self._depth = sys.getrecursionlimit()
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def restore(self) -> None:
        import builtins
        import signal

        vars(builtins).update(self._builtins)
        sys.path[:], sys.meta_path[:], sys.path_hooks[:] = self._path, self._finders, self._hooks
        vars(sys).update(self._of_sys)
        sys.setrecursionlimit(self._depth)
        for which, handler in self._signals.items():
            if handler is not None and signal.getsignal(which) is not handler:
                signal.signal(which, handler)


def _is_own(name: str, module: object) -> bool:
    """Whether it is one of Python's own modules, which this process and programs have in common."""
    if name == "__main__" or type(module) is not type(sys):
        return name == "__main__"
    spec = vars(module).get("__spec__")
    origin = getattr(spec, "origin", None)
    standard = isinstance(origin, str) and origin.startswith((_STANDARD, "built-in", "frozen"))
    return standard and name.partition(".")[0] in sys.stdlib_module_names


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


def _filter_warnings(filters: "list[Any]") -> None:
    import warnings

    warnings.filters[:] = filters  # type: ignore[index]
    getattr(warnings, "_filters_mutated", lambda: None)()  # it keeps which apply


def _swap_loggers(loggers: "dict[str, Any]") -> "dict[str, Any]":
    """Those that there have been, by name."""
    if (logging := sys.modules.get("logging")) is None:
        return {}
    manager = logging.Logger.manager
    before, manager.loggerDict = manager.loggerDict, loggers
    old: dict[str, Any] = before
    return old


held: "Held | None" = None  # in a sandbox that was forked from where modules were imported


def hold(names: "Sequence[str]") -> Held:
    """Imports these modules. Raises Unheld."""

    def failed(name: str, error: BaseException) -> None:
        raise Unheld(f"{name} cannot be imported: {type(error).__name__}: {error}") from error

    before, process = _Now(), _process()
    outputs = {number: _Output(number) for number in (1, 2)}
    try:
        _import(names, failed)
    finally:
        printed = {number: output.take() for number, output in outputs.items()}
    after = _process()
    if changed := [name for name in process if after.get(name) != process[name]]:
        raise Unheld(f"what it imports changes its process: {', '.join(changed)}")
    if name := _changed():
        raise Unheld(f"what it imports changes Python's own {name}")
    return Held(names, printed, before)


def _status_of(run: "Callable[[], None]") -> int:
    """Runs it, and what Python does at its end. Returns the exit code."""
    import atexit
    import threading

    status = 0
    try:
        try:
            run()
        except SystemExit as end:
            if isinstance(end.code, int):
                status = end.code & 0xFF
            elif end.code is not None:
                print(end.code, file=sys.stderr)
                status = 1
        except BaseException as error:
            status = 130 if isinstance(error, KeyboardInterrupt) else 1
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            sys.excepthook(type(error), error, trace)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return status


def _package_folder() -> str:
    """Of the `sandbox` package."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _write(number: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(number, rest) :]


def _run(program: str) -> None:
    """Does what Python does with a folder as its argument."""
    import runpy

    sys.argv[:] = [program]
    sys.orig_argv[:] = [sys.executable, program]
    sys.path.insert(0, program)
    old, fresh = vars(sys.modules["__main__"]), type(sys)("__main__")
    sys.modules["__main__"] = fresh
    # What every `__main__` has; runpy adds the rest.
    vars(fresh).update({"__builtins__": sys.modules["builtins"]})
    if "__annotations__" in old:
        vars(fresh).update({"__annotations__": {}})
    runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
