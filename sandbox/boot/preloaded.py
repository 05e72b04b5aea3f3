"""The process of a program, started before it knows which program: it imports modules and waits.

`worker.program` starts this file as a script, with a socket's descriptor and the names of modules as arguments,
and sends the program's path when there is one, with the task's working directory and variables, NULs between
them. This process then goes on as `python PATH` would. Nothing is
forked, so threads that a module started are no danger. It imports nothing else that Python has not loaded itself.
"""

import gc
import os
import sys
import time

_ALWAYS = ("__annotations__", "__builtins__")  # names that every `__main__` has; runpy adds the others
_CHUNK_BYTES = 64 * 1024


def main() -> None:
    """Imports the modules, waits, becomes the program."""
    line = int(sys.argv[1])
    os.set_inheritable(line, False)
    outputs = [_Output(1), _Output(2)]
    try:
        _import(sys.argv[2:])
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
        _become(os.fsdecode(program))


def _import(modules: "list[str]") -> None:
    """Out of the image's file of them, if it has one. A failure is printed as the program's own would be, and the
    import is left to the program."""
    # This file's folder makes way for that of the `sandbox` package, and that for the program's.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from sandbox.boot.packed import PRELOADED, PackedImports, forget_ours

    gc.disable()  # imports leave little garbage, and looking for it takes a fifth of their time
    with PackedImports(PRELOADED):
        del sys.path[0]
        forget_ours()
        for name in modules:
            try:
                __import__(name)
            except BaseException as error:  # a module may raise anything, SystemExit too
                print(f"env.program_preload: {name} cannot be imported:", file=sys.stderr)
                sys.excepthook(type(error), error, error.__traceback__)
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
        (sys.stdout if self._number == 1 else sys.stderr).flush()
        os.lseek(self._number, 0, os.SEEK_SET)
        while chunk := os.read(self._number, _CHUNK_BYTES):
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(self._usual, rest) :]
        os.dup2(self._usual, self._number)
        os.close(self._usual)


def _become(program: str) -> None:
    """Does what Python does with a folder as its argument."""
    import runpy

    sys.argv[:] = [program]
    sys.orig_argv[:] = [sys.executable, program]
    sys.path.insert(0, program)
    fresh = sys.modules["__main__"] = type(sys)("__main__")
    vars(fresh).update((name, value) for name, value in globals().items() if name in _ALWAYS)
    runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
