"""Deferred packages: absent while smolagents is imported, real for whoever asks later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_smolagents_is_imported_without_the_deferred_packages() -> None:
    printed = python(
        "import sys\nfrom sandbox.boot.diet import DEFERRED, deferred_imports\n"
        "with deferred_imports():\n    import smolagents.agents\n"
        "print([name for name in DEFERRED if name in sys.modules])"
    )
    assert printed == "[]\n"


def test_the_real_packages_can_be_imported_afterwards() -> None:
    printed = python(
        "from sandbox.boot.diet import DEFERRED, deferred_imports\n"
        "with deferred_imports():\n    import smolagents.agents\n"
        "import importlib\n"
        "print(all(importlib.import_module(name).__file__ for name in DEFERRED))\n"
        "from PIL import Image\nfrom rich.markdown import Markdown\n"
        "print(Image.new('1', (2, 3)).size, Markdown.__init__.__code__.co_argcount > 2)"
    )
    assert printed == "True\n(2, 3) True\n"


def test_what_others_hold_is_the_real_module_and_is_loaded_when_it_is_looked_at() -> None:
    printed = python(
        "import sys\nfrom sandbox.boot.diet import LATE, deferred_imports\n"
        "with deferred_imports():\n    import grpc, google.protobuf.descriptor_pool as pool, asyncio as held\n"
        "print({name for name in sys.modules if name.startswith(LATE)} <= {*LATE})\n"
        "import asyncio, importlib\n"
        "print(held is asyncio, asyncio.run(asyncio.sleep(0, 'ran')), 'asyncio.events' in sys.modules)\n"
        "print(grpc.aio.insecure_channel.__module__, pool.python_message.GeneratedProtocolMessageType.__name__)\n"
        "print(all(importlib.import_module(name).__spec__.name == name for name in LATE))"
    )
    assert printed == "True\nTrue ran True\ngrpc.aio._channel GeneratedProtocolMessageType\nTrue\n"


def test_two_threads_that_look_at_a_late_module_at_once_find_it_whole() -> None:
    printed = python(
        "import threading\nfrom sandbox.boot.diet import deferred_imports\n"
        "with deferred_imports():\n    import grpc\n"
        "import asyncio\nfound = []\ngate = threading.Barrier(8)\n"
        "def look():\n    gate.wait()\n    found.append(asyncio.run)\n"
        "threads = [threading.Thread(target=look) for _ in range(8)]\n"
        "[thread.start() for thread in threads]\n[thread.join() for thread in threads]\nprint(len(found))"
    )
    assert printed == "8\n"


def test_no_module_of_ours_keeps_a_stand_in() -> None:
    printed = python(
        "import sys\nfrom sandbox.boot.imported import imported\nfrom sandbox.boot.diet import _StandIn\n"
        "imported()\n"
        "ours = {name: vars(module) for name, module in sys.modules.items() if name.startswith('sandbox')}\n"
        "kept = [(name, k) for name, names in ours.items() for k, v in names.items() if type(v) is _StandIn]\n"
        "print(len(ours) > 20, kept)"
    )
    assert printed == "True []\n"


def test_nobody_took_a_name_from_a_module_that_becomes_real_later() -> None:
    """It would stay a stand-in's."""
    printed = python(
        "import sys\nfrom sandbox.boot.imported import imported\nfrom sandbox.boot.diet import LATE, _Empty\n"
        "imported()\n"
        "late = [name for name in LATE if type(sys.modules[name]).__name__ == '_LazyModule']\n"
        "names = [(module, *pair) for module in sys.modules.values()\n"
        "         for pair in object.__getattribute__(module, '__dict__').copy().items()]\n"
        "taken = [(module, name) for module, name, it in names\n"
        "         if isinstance(it, type) and issubclass(it, _Empty) and it.__module__.startswith(LATE)]\n"
        "print(len(late) > 1, taken)"
    )
    assert printed == "True []\n"


def test_no_agent_compiles_the_usual_prompt_again() -> None:
    printed = python(
        "from sandbox.boot.imported import imported\nimported()\n"
        "import jinja2, smolagents.agents\nfrom sandbox.runner import agent\n"
        "jinja2.Environment.compile = None\n"
        "known = dict(tools={}, managed_agents={}, authorized_imports='', custom_instructions='',\n"
        "             code_block_opening_tag='<code>', code_block_closing_tag='</code>')\n"
        "prompt = agent._own_templates('code')['system_prompt']\n"
        "print(len(smolagents.agents.populate_template(prompt, known)) > 1000)"
    )
    assert printed == "True\n"
