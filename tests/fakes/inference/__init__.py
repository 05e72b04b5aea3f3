"""A scripted inference server: a real tokenizer, real HTTP, five dialects, every fault on demand."""

from tests.fakes.inference.faults import Fault, FaultPlan
from tests.fakes.inference.log import Log, Served
from tests.fakes.inference.model import ChatMessage, Model, logprob
from tests.fakes.inference.sampling import CLUMSY, TIDY, Awkward
from tests.fakes.inference.script import Call, Reply, Script, always, by_task, load_script, read_script
from tests.fakes.inference.server import ScriptedServer

__all__ = [
    "CLUMSY",
    "TIDY",
    "Awkward",
    "Call",
    "ChatMessage",
    "Fault",
    "FaultPlan",
    "Log",
    "Model",
    "Reply",
    "Script",
    "ScriptedServer",
    "Served",
    "always",
    "by_task",
    "load_script",
    "logprob",
    "read_script",
]
