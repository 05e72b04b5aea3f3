"""The weight of each measured part in `combined`, unless `env.combined_weights` says otherwise."""

from collections.abc import Mapping

COMBINED_WEIGHTS: Mapping[str, float] = {
    "correctness": 0.50,
    "format": 0.20,
    "final_answer": 0.10,
    "execution": 0.10,
    "efficiency": 0.10,
}
