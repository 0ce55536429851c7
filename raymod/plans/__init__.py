"""Plans: where a model is cut, as plain data."""

from raymod.plans.sequence import (
    Cut,
    Gather,
    SequencePlan,
    by_batch_only,
    resolve,
    sequence_plan,
)

__all__ = ["Cut", "Gather", "SequencePlan", "by_batch_only", "resolve", "sequence_plan"]
