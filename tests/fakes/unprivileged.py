"""Programs that root runs without being root to file permissions, as in a sandbox."""

from __future__ import annotations

import os

_CAPABILITIES = "-dac_override,-dac_read_search"


def without_override() -> tuple[str, ...]:
    """Put before a command."""
    if os.geteuid() != 0:
        return ()
    return ("setpriv", f"--inh-caps={_CAPABILITIES}", f"--bounding-set={_CAPABILITIES}")
