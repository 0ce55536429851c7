"""How one module runs on several ranks: the mesh, the splits, and the check of both."""

from raymod.parallel.context import apply_context, place, remove
from raymod.parallel.mesh import Mesh
from raymod.parallel.sequence import SequenceContext, TooFewTokensError
from raymod.parallel.split import Share, Splitter
from raymod.parallel.ways import Mechanism, Split

__all__ = [
    "Mechanism",
    "Mesh",
    "SequenceContext",
    "Share",
    "Split",
    "Splitter",
    "TooFewTokensError",
    "apply_context",
    "place",
    "remove",
]
