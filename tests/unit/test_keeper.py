"""The keeper of a launcher's containers, as a process, with a runtime that cannot be started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import orchestrator.launch.oci.keeper as keeper

# Each look of the keeper finds the line readable and handles it first, whatever else there is.
LINE_FIRST = f"""
import select, selectors, socket, sys

class LineFirst(selectors.DefaultSelector):
    def select(self, timeout=None):
        lines = [key for key in self.get_map().values() if isinstance(key.fileobj, socket.socket)]
        if lines:
            select.select([key.fd for key in lines], [], [])
        ready = super().select(timeout)
        return sorted(ready, key=lambda it: it[0] not in lines)

selectors.DefaultSelector = LineFirst
sys.path.insert(0, {str(Path(keeper.__file__).parent)!r})
from keeper import Keeper
Keeper(socket.socket(fileno=0), ["/no/such/runtime"]).run()
"""


def test_an_output_that_ends_while_its_container_is_removed_is_read_no_more() -> None:
    ours, its = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-c", LINE_FIRST], stdin=its, stderr=subprocess.PIPE)
    its.close()
    with ours, ours.makefile("r") as answers:
        ours.settimeout(60)
        for call in range(0, 20, 2):
            for told in ({"start": f"box{call}", "bundle": "/no"}, {"remove": f"box{call}"}):
                ours.sendall(json.dumps({"call": call, **told}).encode() + b"\n")
                assert "cannot start /no/such/runtime" in json.loads(answers.readline())["error"]
    ours.close()
    assert process.stderr is not None
    with process.stderr as said:
        assert said.read() == b""
    assert process.wait(60) == 0
