"""What a number of correct samples says about a model: pass@k and confidence intervals. Pure.

The n of every interval is the number of tasks, because tasks are drawn at random: k samples of one task are
not k independent observations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959964  # the normal distribution's 97.5 % quantile


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean share over tasks with its 95 % interval; `tasks` is the number of tasks, at least one."""

    value: float
    low: float
    high: float
    tasks: int


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that k samples of a task hold a correct one.

    1 - C(samples - correct, k) / C(samples, k), as in Chen et al., Evaluating Large Language Models Trained
    on Code, 2021, section 2.1. Raises ValueError where fewer than k were drawn.
    """
    if not 0 <= correct <= samples:
        raise ValueError(f"{correct} correct of {samples} samples")
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def wilson(share: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a share seen in n independent trials. n at least 1.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927. For a mean of
    values between 0 and 1 it is conservative: they vary no more than yes-or-no values of the same mean.
    Raises ValueError.
    """
    if n < 1 or not 0.0 <= share <= 1.0:
        raise ValueError(f"a share of {share} in {n} trials")
    square = z * z / n
    middle = (share + square / 2) / (1 + square)
    reach = z / (1 + square) * math.sqrt(share * (1 - share) / n + square / (4 * n))
    # Rounding must not exclude the share itself.
    return min(max(0.0, middle - reach), share), max(min(1.0, middle + reach), share)


def estimate_pass_at_k(tasks: Sequence[tuple[int, int]], k: int) -> Estimate | None:
    """The mean of pass@k over tasks, each (samples, correct). Tasks with fewer than k samples are left out; None
    where no task is left."""
    return estimate_share([pass_at_k(samples, correct, k) for samples, correct in tasks if samples >= k])


def estimate_share(values: Sequence[float]) -> Estimate | None:
    """The mean of values from 0 to 1 with Wilson's interval; None where there is none."""
    if not values:
        return None
    share = min(1.0, math.fsum(min(1.0, max(0.0, value)) for value in values) / len(values))
    return Estimate(share, *wilson(share, len(values)), len(values))


def estimate_difference(values: Sequence[float]) -> Estimate | None:
    """The mean of paired differences from -1 to 1; None for fewer than three, which tell nothing.

    Student's interval, taken on the scale of atanh (Fisher's), which has no ends: so it ends before -1 and 1, and
    is Student's own where the difference is small. No width: all values are the same.
    """
    if (n := len(values)) < 3:
        return None
    values = [min(1.0, max(-1.0, value)) for value in values]
    mean = math.fsum(values) / n
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    if not spread or abs(mean) == 1.0:
        return Estimate(mean, mean, mean, n)
    reach = _student_95(n - 1) * spread / math.sqrt(n) / (1 - mean * mean)
    return Estimate(mean, math.tanh(math.atanh(mean) - reach), math.tanh(math.atanh(mean) + reach), n)


def _student_95(freedom: int) -> float:
    """Student's 97.5 % quantile from the normal one, within 3 % from two degrees of freedom on, its least.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z, n = Z_95, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def at_least(successes: int, trials: int, chance: float) -> float:
    """How likely so many successes or more are in independent trials of this chance, between 0 and 1."""
    if successes <= 0:
        return 1.0
    total = 0.0
    for number in range(successes, trials + 1):
        ways = math.lgamma(trials + 1) - math.lgamma(number + 1) - math.lgamma(trials - number + 1)
        term = math.exp(ways + number * math.log(chance) + (trials - number) * math.log1p(-chance))
        total += term
        if number > trials * chance and term < total * 1e-9:
            break
    return min(1.0, total)


def chance_of_fall(before: tuple[int, int], now: tuple[int, int]) -> float:
    """How likely it is that so many of all the solved ones, or more, are among the first: Fisher's exact test, one
    sided. Both are (solved, samples)."""
    solved, samples = before[0] + now[0], before[1] + now[1]
    ways = [math.comb(now[1], n) * math.comb(before[1], solved - n) for n in range(min(now[0], solved) + 1)]
    return sum(ways) / math.comb(samples, solved)


def sizes_of_k(samples: int) -> tuple[int, ...]:
    """The values of k for which pass@k is given: 1, the powers of two below `samples`, and `samples` itself."""
    return tuple(sorted({*(1 << e for e in range(samples.bit_length()) if 1 << e < samples), 1, samples}))
