"""The keeper's part in forked sandboxes: it starts parents, asks them for sandboxes, and hears how these end.

Only the standard library is imported.
"""

import contextlib
import json
import math
import os
import select
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.launch.oci import groups, mounts
from orchestrator.launch.oci.kept import Container, Keeping, complaint
from orchestrator.launch.oci.parent_line import PARENT_ENDED, Forked, ParentLine, Wish

ROOT = "root.json"  # the configuration of the sandboxes whose image a parent has as its root
_RUNTIME = "/opt/sandbox"  # which the parent has itself
_SHARED = ("inotify_instances", "inotify_watches")
# Requests that a parent has and has not answered: it carries out one at a time. So few always fit into its line:
# were both sides of that full, each would wait until the other one reads.
MOST_ASKED = 4
STARTING_S = 60.0  # as long as a call of the runtime may take
_TELLING_S = 20.0  # a parent tells at once that a process has ended


class Fork:
    """One forked sandbox. `sealed`: becomes readable when it is sealed or has ended; -1: it did. `due_s`: when its
    parent must have told what is awaited of it, if anything is."""

    def __init__(self, parent: str, bundle: str) -> None:
        self.parent, self.bundle = parent, bundle
        self.sealed = self.pidfd = -1
        self.due_s = math.inf
        self.is_sealed = self.is_seen_ended = False

    def kill(self) -> None:
        """Its parent, which waits for it, tells of its end."""
        self.due_s = min(self.due_s, time.monotonic() + _TELLING_S)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Whoever was told of it."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Idempotent."""
        for number in (self.sealed, self.pidfd):
            if number >= 0:
                os.close(number)
        self.sealed = self.pidfd = -1


class Forking:
    """Of one keeper."""

    def __init__(self, keeper: Keeping) -> None:
        self._keeper = keeper
        self._shifted: int | None = None  # a user namespace with the ids of parents, where images are shown so
        self._base = ""  # a folder for mounts
        self._images: set[str] = set()  # that have all folders to mount something at

    def make_parent(
        self,
        container: Container,
        name: str,
        bundle: str,
        base: str,
        maps: Sequence[str],
        owner: int,
        shifts: bool,
        sharers: int,
        image: str | None = None,
    ) -> int:
        """The descriptor that the parent finds under the number 3; the caller closes it. `base`: a folder for
        mounts of this keeper's. `maps`, `owner`, `shifts`: as in `ParentIds`. `sharers`: how many sandboxes share
        what the kernel counts for the owner of their user namespace. `image`: the folder of its root, which ROOT
        in the bundle tells more of; None: it has none. Raises OSError."""
        self._keeper.own_mounts()
        mounts.make_parent_root(base)
        self._base = base
        if shifts and self._shifted is None:
            with mounts.user_namespace(mounts.AgentNamespace(owner, maps, 1)) as namespace:
                self._shifted = os.dup(namespace)
        each = [(f"max_{kind}", max(1, _most(kind) // sharers)) for kind in _SHARED]
        users = mounts.held_namespace(mounts.AgentNamespace(owner, maps, None, each))
        # runc 1.1.15 takes no other path together with the ids, which runc 1.1.5 wants.
        _enter_users(bundle, container.users.enter_context(users))
        container.forks = line = ParentLine()
        self._keeper.selector.register(line, selectors.EVENT_READ, lambda: self._hear(container, name))
        if image is not None:
            self._give_root(line, bundle, image)
        return line.theirs

    def _give_root(self, line: ParentLine, bundle: str, image: str) -> None:
        with open(os.path.join(bundle, ROOT), "rb") as file:
            trees = self._trees(json.load(file), bundle, image)
            try:
                line.give_root(file.fileno(), trees)
            finally:
                for tree in trees.values():
                    os.close(tree)

    def fork(
        self,
        container: Container,
        name: str,
        bundle: str,
        parent: str,
        image: str | None,
        agent: Mapping[str, Any] | None,
    ) -> None:
        """Asks the parent, in its turn; the sandbox is told of when it is sealed. `image`: the folder of its root;
        None: its root is that of the container. `agent`: as in `mounts.AgentNamespace`."""
        container.fork = Fork(parent, bundle)
        source = self._keeper.containers.get(parent)
        if source is None or not source.pid or source.forks.fileno() < 0:
            self._fail(container, name, PARENT_ENDED)
            return
        source.forks.waiting.append(Wish(name, bundle, image, agent))
        self._ask_next(source)

    def _ask_next(self, parent: Container) -> None:
        line = parent.forks
        while line.waiting and len(line.asked) < MOST_ASKED:
            wish: Wish = line.waiting.popleft()
            container = self._keeper.containers[wish.name]
            if container.removals:
                self._fail(container, wish.name, "it is not wanted any more")
                continue
            try:
                self._ask(line, container, wish)
            except OSError as error:
                self._fail(container, wish.name, complaint(error))
            else:
                line.asked.add(wish.name)

    def _ask(self, line: ParentLine, container: Container, wish: Wish) -> None:
        """Raises OSError."""
        fork, opened = container.fork, list[int]()
        try:
            with open(os.path.join(wish.bundle, "config.json"), "rb") as file:
                config = json.load(file)
                opened += (in_groups := groups.make_groups(config, os.path.join(self._keeper.state, wish.name)))
                trees = self._trees(config, wish.bundle, wish.image)
                opened += trees.values()
                container.output.readable, writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                opened.append(writable)
                os.set_blocking(writable, True)
                fork.sealed, tell_sealed = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                opened.append(tell_sealed)
                output, selector = container.output, self._keeper.selector
                selector.register(output.readable, selectors.EVENT_READ, lambda: self._keeper.read_output(output))
                selector.register(
                    fork.sealed, selectors.EVENT_READ, lambda: self._hear_sealed(container, wish.name)
                )
                line.ask(wish.name, wish.agent, trees, [file.fileno(), writable, tell_sealed, *in_groups])
        finally:
            for number in opened:
                os.close(number)
        fork.due_s = time.monotonic() + STARTING_S

    def _trees(self, config: Mapping[str, Any], bundle: str, image: str | None) -> dict[str, int]:
        """Detached mounts of all that the parent does not have itself, by place. Raises OSError."""
        trees: dict[str, int] = {}
        try:
            if image is None:
                trees["/"] = mounts.written_root(bundle)
            else:
                if image not in self._images:
                    mounts.make_places(image, mounts.first_places(config))
                    self._images.add(image)
                trees["/"] = mounts.image_root(image, self._shifted)
            trees["/dev"] = mounts.devices(self._base, ("pts", "shm"))
            for told in config["mounts"]:
                if told["type"] == "bind" and told["destination"] != _RUNTIME:
                    trees[told["destination"]] = mounts.sealed(told["source"])
        except OSError:
            for tree in trees.values():
                os.close(tree)
            raise
        return trees

    def lose(self, parent: Container, name: str) -> None:
        """The parent has ended, and the kernel all that was forked from it. What it told before counts."""
        parent.forks.waiting.clear()
        while parent.forks.fileno() >= 0:
            self._hear(parent, name)
        if not parent.forks.is_answered:
            self._answer(parent, error=parent.output.last_words() or "it ended before it was ready")
        for each, container in list(self._keeper.containers.items()):
            if container.fork is None or container.fork.parent != name or container.has_ended:
                continue
            if container.starting:
                self._fail(container, each, PARENT_ENDED)
            elif container.fork.pidfd >= 0:
                container.pid, container.has_ended = 0, True
                self._keeper.tell(lost=each, said="the process that it was forked from has ended")
                self._keeper.remove_if_wanted(each)

    def due_s(self) -> float:
        """When `look` must be called (as `time.monotonic`)."""
        forks = (container.fork for container in self._keeper.containers.values())
        return min((fork.due_s for fork in forks if fork is not None), default=math.inf)

    def look(self) -> None:
        """A start that takes too long is ended. A parent that has not forked by then, or does not tell of an end,
        is broken: it is ended, too."""
        for container in list(self._keeper.containers.values()):
            if (fork := container.fork) is None or fork.due_s > time.monotonic():
                continue
            self._hear_all(fork.parent)  # this process may be the one that is late
            if fork.due_s > time.monotonic():
                continue
            fork.due_s = math.inf
            if fork.pidfd < 0 or fork.is_seen_ended:
                self._keeper.kill(fork.parent)
            elif fork.has_ended():
                fork.is_seen_ended, fork.due_s = True, time.monotonic() + _TELLING_S
            else:
                fork.kill()

    def _hear_all(self, name: str) -> None:
        """What this parent has told by now."""
        parent, poll = self._keeper.containers.get(name), select.poll()
        if parent is not None and parent.forks.fileno() >= 0:
            poll.register(line := parent.forks.fileno(), select.POLLIN)
            while parent.forks.fileno() == line and poll.poll(0):
                self._hear(parent, name)

    def forget(self, container: Container) -> None:
        """It is removed."""
        if container.forks is not None:
            self._hang_up(container)
        if container.fork is not None:
            self._close(container.fork)

    # ------------------------------------------------------------ what is heard

    def _hear(self, parent: Container, name: str) -> None:
        match parent.forks.hear():
            case None:
                self._hang_up(parent)
                self._keeper.kill(name)
            case Forked() as told:
                forked = self._keeper.containers[told.name]
                forked.pid, forked.fork.pidfd = told.pid, told.pidfd
                parent.forks.names[told.inner] = told.name
                self._tell_if_started(forked, told.name)
                self._answered(parent, told.name)
            case {"ready": _}:
                parent.forks.is_ready = True
                self.answer_if_there(parent)
            case {"unfit": why}:
                self._answer(parent, error=f"nothing can be forked: {why}", unfit=True)
            case {"refused": refused, "why": why}:
                self._fail(self._keeper.containers[refused], refused, why)
                self._answered(parent, refused)
            case {"ended": ended, "status": status}:
                if ended in parent.forks.names:  # else it has not said its name, and nobody knows it
                    self._ended(parent.forks.names.pop(ended), status)

    def _answered(self, parent: Container, name: str) -> None:
        parent.forks.asked.discard(name)
        self._ask_next(parent)

    def answer_if_there(self, parent: Container) -> None:
        """It is ready; and the runtime, which may tell later than the parent itself, has told its number."""
        if parent.pid and parent.forks.is_ready and not parent.forks.is_answered:
            self._answer(parent, pid=parent.pid)

    def _answer(self, parent: Container, **answer: Any) -> None:
        parent.forks.is_answered = True
        self._keeper.tell(call=parent.call, **answer)

    def _hear_sealed(self, container: Container, name: str) -> None:
        """It is sealed; or it has ended before, which its parent tells."""
        fork = container.fork
        if fork.sealed < 0:
            return
        self._keeper.selector.unregister(fork.sealed)
        fork.is_sealed = bool(os.read(fork.sealed, 1))
        os.close(fork.sealed)
        fork.sealed = -1
        self._tell_if_started(container, name)

    def _tell_if_started(self, container: Container, name: str) -> None:
        """When it is known that it is sealed, and which process it is: before that, nobody can end it."""
        if container.fork.pidfd >= 0 and container.fork.is_sealed:
            container.starting, container.fork.due_s = False, math.inf
            try:
                with open(os.path.join(container.fork.bundle, "pid"), "w") as file:  # as runtimes do it
                    file.write(str(container.pid))
            except OSError as error:
                container.fork.kill()
                self._fail(container, name, f"no file for its process id: {error.strerror}")
                return
            self._keeper.tell(call=container.call, pid=container.pid)
            self._keeper.remove_if_wanted(name)  # its removal was asked for meanwhile

    def _ended(self, name: str, status: int) -> None:
        container = self._keeper.containers.get(name)
        if container is None:  # nobody could know that it was still there, and it was removed
            return
        container.fork.due_s = math.inf
        self._hear_sealed(container, name)  # what it said before it ended counts
        if container.starting:
            container.has_ended = True
            end = os.waitstatus_to_exitcode(status)
            self._fail(container, name, container.output.last_words() or f"it ended with {end}")
        else:
            self._keeper.ended(name, status)

    def _fail(self, container: Container, name: str, why: str) -> None:
        self._close(container.fork)
        self._keeper.fail(name, why)

    def _close(self, fork: Fork) -> None:
        fork.due_s = math.inf
        if fork.sealed >= 0:
            with contextlib.suppress(KeyError):  # nobody listened to it
                self._keeper.selector.unregister(fork.sealed)
        fork.close()

    def _hang_up(self, parent: Container) -> None:
        if parent.forks.fileno() >= 0:
            self._keeper.selector.unregister(parent.forks)
            parent.forks.close()


def _most(kind: str) -> int:
    """Of each user of this machine."""
    with open(f"/proc/sys/user/max_{kind}") as file:
        return int(file.read())


def _enter_users(bundle: str, namespace: str) -> None:
    """Has the runtime enter this user namespace instead of making one. Raises OSError."""
    with open(os.path.join(bundle, "config.json"), "r+") as file:
        config = json.load(file)
        (users,) = (told for told in config["linux"]["namespaces"] if told["type"] == "user")
        users["path"] = namespace
        file.seek(0)
        json.dump(config, file)  # it has become longer
