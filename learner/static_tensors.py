"""Frozen parameters and persistent buffers in a learner: which of them its training changes. The training thread's."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from ..common.fragments import Layout
from ..common.static_tensors import pack
from .replica import Replica

EXACT_BYTES = 2**20
"""Up to so many bytes the checksum covers all of a tensor, on the host. Of a larger one it covers the sums of its rows,
taken where it lies: a change that only swaps words of 8 bytes within a row is not seen.
"""
ROW_BYTES = 4096


@dataclass(frozen=True)
class Moved:
    """What training has made of the static part, as the learner offers it at the end of a run."""

    count: int
    """Tensors."""
    payload: bytes
    """As `common.static_tensors` has it."""


class StaticPart:
    """Remembers a checksum of each static tensor from when it is made: no copy is kept."""

    def __init__(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        """tensors: of `layout.static`, in its order."""
        self._layout, self._tensors = layout, tensors
        self._before = [_checksum(tensor) for tensor in tensors]

    def moved(self) -> Moved:
        """Copies of the tensors that hold other values than at first."""
        changed = [i for i, tensor in enumerate(self._tensors) if _checksum(tensor) != self._before[i]]
        values = {i: _octets(self._tensors[i]).cpu().numpy().tobytes() for i in changed}
        return Moved(len(values), pack(self._layout, values))


@torch.no_grad()
def _octets(tensor: Tensor) -> Tensor:
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return octets.clone() if octets.storage_offset() % 8 else octets  # only aligned ones can be summed in eights


@torch.no_grad()
def _checksum(tensor: Tensor) -> int:
    octets = _octets(tensor)
    if len(octets) <= EXACT_BYTES:
        return zlib.crc32(octets.cpu().numpy().data)
    whole = len(octets) // ROW_BYTES * ROW_BYTES
    rows = octets[:whole].view(torch.int64).view(-1, ROW_BYTES // 8).sum(dim=1)
    return zlib.crc32(octets[whole:].cpu().numpy().data, zlib.crc32(rows.cpu().numpy().data))


def own_statistics(replica: Replica) -> list[str]:
    """Names of the running statistics that a joiner keeps: those of normalisation layers that have counted batches, and
    go on. The run has none that are newer; those of a layer that has seen nothing, or is frozen in eval(), are the
    run's.
    """
    name_of = {id(entry.tensor): entry.name for entry in replica.all_entries() if entry.kind == "buffer"}
    names = []
    for module in replica.model.modules():
        if isinstance(module, _NormBase) and module.training and module.num_batches_tracked:
            tensors = (module.running_mean, module.running_var, module.num_batches_tracked)
            names += [name_of[id(tensor)] for tensor in tensors if id(tensor) in name_of]
    return names
