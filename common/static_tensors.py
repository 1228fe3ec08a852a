"""The static tensors that training has changed, as one payload: which they are, then their bytes.

ceil(n / 8) bytes   bit i (lowest first) is set if static tensor i of the layout's n is here
the rest            the values of those tensors, little endian, one after the other in layout order
"""

from __future__ import annotations

from collections.abc import Mapping

from .errors import Malformed
from .fragments import Layout


def sizes(layout: Layout) -> range:
    """How many bytes a payload may have, from no tensor to all of them."""
    head = _head(layout)
    return range(head, head + layout.static_bytes + 1)


def pack(layout: Layout, moved: Mapping[int, bytes]) -> bytes:
    """The payload with these values, by index into `layout.static`."""
    marks = bytearray(_head(layout))
    for index in moved:
        marks[index // 8] |= 1 << index % 8
    return bytes(marks) + b"".join(moved[index] for index in sorted(moved))


def unpack(layout: Layout, payload: memoryview) -> dict[int, memoryview]:
    """The values in `payload`, by index into `layout.static`; Malformed if it is not as long as what it names."""
    offset, moved = _head(layout), {}
    marks = payload[:offset]
    for index, spec in enumerate(layout.static):
        if marks[index // 8] >> index % 8 & 1:
            moved[index] = payload[offset : offset + spec.bytes]
            offset += spec.bytes
    named = sum(mark.bit_count() for mark in marks)
    if offset != len(payload) or named != len(moved):
        raise Malformed("size", f"{len(payload)} bytes where {named} static tensors take {offset}")
    return moved


def replaced(layout: Layout, static: bytes, moved: Mapping[int, bytes | memoryview]) -> bytes:
    """The static part `static` with `moved` in the place of what stood there."""
    parts, offset = [], 0
    for index, spec in enumerate(layout.static):
        parts.append(moved.get(index, static[offset : offset + spec.bytes]))
        offset += spec.bytes
    return b"".join(parts)


def _head(layout: Layout) -> int:
    return -(-len(layout.static) // 8)
