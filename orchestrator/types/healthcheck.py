"""What has to succeed in a sandbox before its agent begins."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Healthcheck:
    """A command for the shell that is run until it succeeds. It may set things up and start services.

    Failures of runs that begin in the start period do not count; `retries` in a row that count end it. `as_root`:
    whether it is run as root; else as the image's user. Times in seconds: `timeout_s` of one run, intervals
    between two.
    """

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    start_interval_s: float = 5.0
    retries: int = 3
    as_root: bool = False

    @property
    def longest_s(self) -> float:
        """That it can take."""
        first_s = self.start_period_s + self.timeout_s + self.start_interval_s
        return first_s + self.retries * (self.timeout_s + self.interval_s)
