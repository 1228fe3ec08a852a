"""Memory overlap between tensors, or between the elements of one: a write into it changes others, too. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class _Place:
    """A tensor's bytes: all are in [start, stop), possibly with others in between."""

    name: str
    tensor: Tensor
    changes: bool
    start: int
    stop: int


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements are the same memory, as after expand(); such a tensor cannot be written in place."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                place, needed = _place("", tensor, changes=True), tensor.numel() * tensor.itemsize
                return needed > place.stop - place.start or _occupied(place) < needed
            reach += stride * (size - 1)
    return False


def first_overlap(rows: Iterable[tuple[str, Tensor, bool]]) -> tuple[str, str] | None:
    """The names of two tensors that have memory in common; None if there are none.

    rows: (name, tensor, whether it changes); two that never change may share memory. None of the tensors may overlap
    itself. Views in each other's gaps, such as the columns of a matrix, do not overlap.
    """
    devices: defaultdict[torch.device, list[_Place]] = defaultdict(list)
    for name, tensor, changes in rows:
        if tensor.numel():
            devices[tensor.device].append(_place(name, tensor, changes=changes))
    for places in devices.values():
        for cluster in _clusters(sorted(places, key=lambda place: (place.start, place.stop))):
            if (found := _collision(cluster)) is not None:
                return found
    return None


def _place(name: str, tensor: Tensor, *, changes: bool) -> _Place:
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    start = tensor.data_ptr()
    return _Place(name, tensor, changes, start, start + (last + 1) * tensor.itemsize)


def _clusters(places: Iterable[_Place]) -> Iterator[list[_Place]]:
    """Groups of two or more whose ranges overlap; `places` are in order of their starts."""
    cluster: list[_Place] = []
    stop = 0
    for place in places:
        if place.start >= stop:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(place)
        stop = max(stop, place.stop)
    if len(cluster) > 1:
        yield cluster


def _collision(cluster: list[_Place]) -> tuple[str, str] | None:
    start, stop = cluster[0].start, max(place.stop for place in cluster)
    owner = torch.full((stop - start,), -1, dtype=torch.int32, device="cpu")
    for number, place in enumerate(cluster):
        own = _bytes_of(owner, place, start)
        numbers = own.unique().tolist()  # type: ignore[no-untyped-call]
        for other in (cluster[n] for n in numbers if n >= 0):
            if place.changes or other.changes:
                return other.name, place.name
        own.fill_(number)
    return None


def _occupied(place: _Place) -> int:
    """Number of distinct bytes that the tensor occupies."""
    extent = place.stop - place.start
    used = torch.zeros(extent, dtype=torch.bool, device="cpu")
    index = _bytes_of(torch.arange(extent, dtype=torch.int64, device="cpu"), place, place.start)
    used[index.reshape(-1)] = True
    return int(used.sum())


def _bytes_of(memory: Tensor, place: _Place, start: int) -> Tensor:
    """The tensor's bytes in `memory`, which has one element for each byte from address `start` on."""
    size = place.tensor.itemsize
    return memory.as_strided(
        (*place.tensor.shape, size), (*(s * size for s in place.tensor.stride()), 1), place.start - start
    )
