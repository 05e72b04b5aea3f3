"""The table of a forward pass."""

import sys
from collections.abc import Sequence

from orchestrator.forward.compare import LEAST_TOKENS, SHIFTED_LABELS, SHIFTED_LOGPROBS, Comparison, Figures
from orchestrator.forward.weights import Weights
from orchestrator.rules.text import printable
from orchestrator.terminal.closing import print_wrapped
from orchestrator.terminal.console import Console, plain_table

_MEGA = 1e6


def print_comparison(compared: Comparison, weights: Weights, architecture: str, notes: Sequence[str]) -> bool:
    """Prints all rows, the controls, the limits and the verdict. Returns the verdict."""
    numbers = ("tokens", "mean |Δ|", "p99", "k3")
    table = plain_table(("log-probs", *numbers, ""), numbers, no_wrap=True)
    above = compared.above()
    for name, figures in compared.rows():
        few = figures is not compared.all and figures.count < LEAST_TOKENS
        table.add_row(*_cells(name, figures), "above" if name in above else "few" if few else "")
    for name, controls in (("log-probs", SHIFTED_LOGPROBS), ("labels", SHIFTED_LABELS)):
        if (nearest := compared.nearest(controls)) is not None:
            table.add_row(*_cells(f"control: {name} shifted by one", nearest), "")
    Console(sys.stdout, soft_wrap=True, width=1000).print(table)
    limits = compared.limits
    stored = f"{weights.parameters / _MEGA:,.0f} M numbers stored as {weights.stored}"
    for line in (
        f"model: {weights.path} ({architecture}, {stored}), recomputed in f32",
        *notes,
        f"limits for weights of this precision ({weights.precision}): mean {limits.mean:.3g}, k3 {limits.k3:.3g}",
        f"{_verdict(compared)}: {compared.says()}",
    ):
        print_wrapped(printable(line), sys.stdout)
    return compared.is_right


def _verdict(compared: Comparison) -> str:
    if compared.above():
        return "above the limits"
    return "within the limits" if compared.is_right else "within the limits, but wrong"


def _cells(name: str, figures: Figures) -> tuple[str, str, str, str, str]:
    return (
        printable(name),
        f"{figures.count:,}",
        f"{figures.mean:.4f}",
        f"{figures.p99:.3f}",
        f"{figures.k3:.6f}",
    )
