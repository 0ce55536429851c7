"""How one module runs on several ranks: the mesh, the splits, and the check of both."""

from raymod.parallel.context import apply_context, place, remove
from raymod.parallel.mesh import Mesh
from raymod.parallel.sequence import SequenceContext, TooFewTokensError
from raymod.parallel.split import Share, Splitter

__all__ = [
    "Mesh",
    "SequenceContext",
    "Share",
    "Splitter",
    "TooFewTokensError",
    "apply_context",
    "place",
    "remove",
]
