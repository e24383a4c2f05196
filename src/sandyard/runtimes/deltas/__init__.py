"""Images of numbered blocks, kept as what differs from an earlier one: a sandbox's disk, a guest's memory."""

from sandyard.runtimes.deltas.chain import Chain, materialise, merged
from sandyard.runtimes.deltas.compare import differing
from sandyard.runtimes.deltas.format import Delta, DeltaDamaged, Placed, Run, index_delta, write_delta

__all__ = [
    "Chain",
    "Delta",
    "DeltaDamaged",
    "Placed",
    "Run",
    "differing",
    "index_delta",
    "materialise",
    "merged",
    "write_delta",
]
