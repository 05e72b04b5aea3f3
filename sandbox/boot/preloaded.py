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
    from typing import NoReturn

# Of `sys`, what modules may change when they are imported.
_HOOKS = ("displayhook", "excepthook", "unraisablehook")
_STREAMS = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
_CHUNK_BYTES = 64 * 1024


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
    """Python as it is with modules imported, and nothing of ours. `printed`: by them, to either output."""

    def __init__(self, names: "Sequence[str]", printed: "Mapping[int, bytes]") -> None:
        import builtins
        import signal

        self.names, self._printed = tuple(names), printed
        self._modules, self._builtins = dict(sys.modules), dict(vars(builtins))
        self._path, self._finders, self._hooks = sys.path[:], sys.meta_path[:], sys.path_hooks[:]
        self._of_sys = {name: getattr(sys, name) for name in (*_HOOKS, *_STREAMS)}
        self._depth = sys.getrecursionlimit()
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def set_aside(self) -> None:
        """From here on modules that are not Python's own are imported anew, from where ours lie."""
        standard = f"{os.path.dirname(os.__file__)}/"
        for name, module in self._modules.items():
            spec = getattr(module, "__spec__", None)
            origin = spec.origin if spec is not None else "built-in"
            if not (origin in ("built-in", "frozen") or (origin or "").startswith(standard)):
                del sys.modules[name]
        theirs = {"", *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
        sys.path[:] = [_package_folder(), *(path for path in sys.path if path not in theirs)]

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
        import builtins
        import signal

        signal.set_wakeup_fd(-1)
        for which, handler in self._signals.items():
            if handler is not None and signal.getsignal(which) is not handler:
                signal.signal(which, handler)
        vars(builtins).update(self._builtins)
        sys.modules.clear()
        sys.modules.update(self._modules)
        sys.path[:], sys.meta_path[:], sys.path_hooks[:] = self._path, self._finders, self._hooks
        vars(sys).update(self._of_sys)
        sys.setrecursionlimit(self._depth)
        os.environ.clear()
        os.environ.update(environment)
        time.tzset()
        for number, printed in self._printed.items():
            _write(number, printed)
        if (numpy := sys.modules.get("numpy")) is not None and "numpy.random" in sys.modules:
            numpy.random.seed()  # what it was seeded with at its import, all siblings know


held: "Held | None" = None  # in a sandbox that was forked from where modules were imported


def hold(names: "Sequence[str]") -> Held:
    """Imports these modules. Raises Unheld."""

    def failed(name: str, error: BaseException) -> None:
        raise Unheld(f"{name} cannot be imported: {type(error).__name__}: {error}") from error

    outputs = {number: _Output(number) for number in (1, 2)}
    try:
        _import(names, failed)
    finally:
        printed = {number: output.take() for number, output in outputs.items()}
    return Held(names, printed)


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
