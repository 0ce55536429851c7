"""Plans: where a model is cut, as plain data."""

from raymod.plans.sequence import Cut, Gather, SequencePlan, resolve, sequence_plan

__all__ = ["Cut", "Gather", "SequencePlan", "resolve", "sequence_plan"]
