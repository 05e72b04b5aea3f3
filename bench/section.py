"""One section of the benchmark, measured in a process of its own: memory and threads of the others stay out."""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from bench import machine
from bench.report import Findings, Scale, Section


def run(name: str, scale: Scale) -> Section:
    """The section `name`, whatever becomes of it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(measured, name, scale).result()


def measured(name: str, scale: Scale) -> Section:
    """One section, in this process."""
    logging.disable(logging.WARNING)
    module = importlib.import_module(f"bench.{name}")
    before, started = machine.load(), time.monotonic()
    findings, error = Findings(), ""
    try:
        findings = asyncio.run(module.measure(scale))
    except Exception as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    wall_s = time.monotonic() - started
    return Section(name, module.TITLE, findings, wall_s, (before, machine.load()), error)
