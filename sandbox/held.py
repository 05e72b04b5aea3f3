"""Python as programs are to find it, with modules imported: what is kept of it, and how a process goes back to it.

Where sandboxes are forked from a process that has imported a program's modules (`boot.parent`), `python` is that
state. The worker forks the program's process, which `become`s the program. Nothing of ours is imported here, and
nothing that Python has not loaded itself: this is there before the modules are.
"""

import gc
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

# Of `sys`, what modules may change when they are imported.
_HOOKS = ("displayhook", "excepthook", "unraisablehook")
_STREAMS = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
# Of modules that are loaded, what reads a setting and what sets it: to None, where it was not loaded yet.
_SETTINGS = (
    *(("sys", f"get{name}", f"set{name}") for name in ("recursionlimit", "switchinterval", "trace", "profile")),
    ("_socket", "getdefaulttimeout", "setdefaulttimeout"),
)
_STANDARD = f"{os.path.dirname(os.__file__)}/"
_PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # where that of ours lies
_INTERRUPTED, _UNWRITTEN = -2, 120  # by Ctrl-C, as in `_status_of`; Python's exit code where output is lost
_CLOSING_S = 1.0  # that Python waits at its end for a file that another thread writes to
_LIVING = {"sys", "builtins", "__main__", "threading"}  # whose state is this process', or put back by name


class Held:
    """Python as it is with modules imported, and nothing of ours. `printed`: by them, to either output. `before`:
    as it was without them. `begun`: filled when a program begins."""

    def __init__(self, printed: "Mapping[int, bytes]", before: "PythonNow", begun: list[bool]) -> None:
        import warnings

        self._printed, self._before, self._begun = printed, before, begun
        self._now, self._modules = PythonNow(), dict(sys.modules)
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
        os.environ.clear()  # what the image tells its libraries is not for ours of the same name
        sys.path[:] = [_PACKAGES, *(path for path in found if path not in theirs)]

    def become(
        self, program: str, environment: "Mapping[str, str]", standard: "tuple[int, int, int]"
    ) -> "NoReturn":
        """Goes on in this process as `python PROGRAM` would, and ends it. `standard`: descriptors to have as the
        usual three; all others are closed."""
        status = 1
        try:
            gc.freeze()  # what is not the program's is not collected, and no descriptor of it closed
            for number, source in enumerate(standard):
                os.dup2(source, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            self._restore(environment)
            self._begun.append(True)
            status = _status_of(lambda: run_program(program))
            if status == _INTERRUPTED:
                _end_interrupted()
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
        was, now = self._before.environment, self._now.environment
        for name in {*was, *now}:
            if was.get(name) != now.get(name) and was.get(name) == environment.get(name):  # else it is the task's
                os.environ.pop(name, None)
                os.environ.update({name: now[name]} if name in now else {})
        time.tzset()
        for number, printed in self._printed.items():
            write_all(number, printed)
        if (numpy := sys.modules.get("numpy")) is not None and "numpy.random" in sys.modules:
            numpy.random.seed()  # what it was seeded with at its import, all siblings know


class PythonNow:
    """What modules may change of Python, and can be put back."""

    def __init__(self) -> None:
        import builtins
        import signal

        self._builtins = dict(vars(builtins))
        self._path, self._finders, self._hooks = sys.path[:], sys.meta_path[:], sys.path_hooks[:]
        self._of_sys = {name: getattr(sys, name) for name in (*_HOOKS, *_STREAMS)}
        loaded = [(set_it, vars(sys.modules[of])[get]) for of, get, set_it in _SETTINGS if of in sys.modules]
        self._settings = {set_it: get() for set_it, get in loaded}
        self._callbacks, self.environment = gc.callbacks[:], dict(os.environ)
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def restore(self) -> None:
        import builtins
        import signal

        vars(builtins).update(self._builtins)
        sys.path[:], sys.meta_path[:], sys.path_hooks[:] = self._path, self._finders, self._hooks
        vars(sys).update(self._of_sys)
        gc.callbacks[:] = self._callbacks
        for of, _, set_it in _SETTINGS:
            if of in sys.modules:
                vars(sys.modules[of])[set_it](self._settings.get(set_it))
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


python: "Held | None" = None  # in a sandbox that was forked from where modules were imported


def _status_of(run: "Callable[[], None]") -> int:
    """Runs it, and what Python does at its end. Returns the exit code, or _INTERRUPTED."""
    import atexit
    import contextlib
    import threading

    status = 0
    try:
        try:
            run()
        except SystemExit as end:
            status = _exit_code(end)
        except BaseException as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            status = _tell(error.with_traceback(trace))
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
        atexit._run_exitfuncs()
    finally:
        if not _flush_standard():
            status = _UNWRITTEN
        closing = threading.Thread(target=_close_files, daemon=True)
        with contextlib.suppress(RuntimeError):  # no room for a thread
            closing.start()
            closing.join(_CLOSING_S)
    return status


def _exit_code(end: SystemExit) -> int:
    """What is no number is printed."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF if -(1 << 63) <= end.code < 1 << 63 else 0xFF
    try:
        text = str(end.code)
    except BaseException:
        text = ""
    print(text, file=sys.stderr)
    return 1


def _tell(error: BaseException) -> int:
    """Has `sys.excepthook` print it. Returns the exit code, or _INTERRUPTED."""
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        print("sys.excepthook is missing, printing exception to stderr", file=sys.stderr)
        hook = sys.__excepthook__
    try:
        hook(type(error), error, error.__traceback__)
    except SystemExit as end:
        return _exit_code(end)
    except BaseException as another:
        another.__context__ = None
        print("Error in sys.excepthook:", file=sys.stderr)
        _show(another)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _flush_standard() -> bool:
    """Whether both outputs could be written. Says why, as Python does, if it is the first."""
    is_written = True
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name, None)
        try:
            if not getattr(stream, "closed", stream is None):
                stream.flush()
        except BaseException as error:
            if name == "stdout":
                print("Exception ignored on flushing sys.stdout:", file=sys.stderr)
                _show(error)
            is_written = False
    return is_written


def _show(error: BaseException) -> None:
    """Without the function that has caught it."""
    trace = error.__traceback__
    error = error.with_traceback(None if trace is None else trace.tb_next)
    sys.__excepthook__(type(error), error, error.__traceback__)


def _end_interrupted() -> None:
    """As Python ends that was interrupted: whoever waits for it learns that it was."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _close_files() -> None:
    """What the program has written to files that it left open is written."""
    import contextlib
    import io

    files = [thing for thing in gc.get_objects() if issubclass(type(thing), io.IOBase)]
    # These may be made of others, and write to them when they are closed.
    around = [file for file in files if type(file).__module__ != "_io"]
    for name, those in (("flush", files), ("close", around), ("flush", files)):
        for file in those:
            with contextlib.suppress(Exception):
                getattr(file, name)()


def write_all(number: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(number, rest) :]


def run_program(program: str) -> None:
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
