"""Static tensors of a learner (frozen parameters and persistent buffers): which of them its training changes, and which
a joiner keeps. For the training thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from ..common.fragments import Layout
from ..common.static_tensor_format import pack
from .replica import Replica

EXACT_BYTES = 2**20
"""Up to this size the checksum covers all bytes of a tensor, on the host. For a larger one it covers the sums of its
rows, computed on the tensor's device: a change that only swaps 8-byte words within a row is not detected.
"""
ROW_BYTES = 4096


@dataclass(frozen=True)
class StaticChanges:
    """Static tensors that training has changed, as the learner offers them at the end of a run."""

    count: int
    """Number of tensors."""
    payload: bytes
    """Their values, packed by `common.static_tensor_format`."""


class StaticChecksums:
    """Checksums of the static tensors as of the construction of this object. No copy is kept."""

    def __init__(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        """tensors: those of `layout.static`, in its order."""
        self._layout, self._tensors = layout, tensors
        self._before = [_checksum(tensor) for tensor in tensors]

    def changes(self) -> StaticChanges:
        """Copies of the tensors whose values have changed."""
        changed = [i for i, tensor in enumerate(self._tensors) if _checksum(tensor) != self._before[i]]
        values = {i: _octets(self._tensors[i]).cpu().numpy().tobytes() for i in changed}
        return StaticChanges(len(values), pack(self._layout, values))


@torch.no_grad()
def _octets(tensor: Tensor) -> Tensor:
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return octets.clone() if octets.storage_offset() % 8 else octets  # only aligned bytes can be viewed as int64


@torch.no_grad()
def _checksum(tensor: Tensor) -> int:
    octets = _octets(tensor)
    if len(octets) <= EXACT_BYTES:
        return zlib.crc32(octets.cpu().numpy().data)
    whole = len(octets) // ROW_BYTES * ROW_BYTES
    rows = octets[:whole].view(torch.int64).view(-1, ROW_BYTES // 8).sum(dim=1)
    return zlib.crc32(octets[whole:].cpu().numpy().data, zlib.crc32(rows.cpu().numpy().data))


def own_statistics(replica: Replica) -> list[str]:
    """Names of the running statistics that a joiner keeps: those of normalization layers that have counted batches and
    are in training mode, since the run has no newer ones. A layer that has counted nothing, or is frozen in eval(),
    takes the run's.
    """
    name_of = {id(entry.tensor): entry.name for entry in replica.all_entries() if entry.kind == "buffer"}
    names = []
    for module in replica.model.modules():
        if isinstance(module, _NormBase) and module.training and module.num_batches_tracked:
            tensors = (module.running_mean, module.running_var, module.num_batches_tracked)
            names += [name_of[id(tensor)] for tensor in tensors if id(tensor) in name_of]
    return names
