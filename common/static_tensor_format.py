"""Payload format of the static tensors that training has changed: a bit map of the tensors, then their values.

ceil(n / 8) bytes   bit i (lowest first) is set if static tensor i of the layout's n is included
the rest            the values of those tensors, little endian, concatenated in layout order
"""

from __future__ import annotations

from collections.abc import Mapping

from .errors import Malformed
from .fragments import Layout


def sizes(layout: Layout) -> range:
    """Permitted payload sizes in bytes, from no tensor to all of them."""
    head = _head(layout)
    return range(head, head + layout.static_bytes + 1)


def pack(layout: Layout, moved: Mapping[int, bytes]) -> bytes:
    """The payload with the values in `moved`, by index into `layout.static`."""
    marks = bytearray(_head(layout))
    for index in moved:
        marks[index // 8] |= 1 << index % 8
    return bytes(marks) + b"".join(moved[index] for index in sorted(moved))


def unpack(layout: Layout, payload: memoryview) -> dict[int, memoryview]:
    """The values in `payload`, by index into `layout.static`; Malformed if its length does not match its bit map."""
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
    """The static tensors `static`, with the values in `moved` replaced."""
    parts, offset = [], 0
    for index, spec in enumerate(layout.static):
        parts.append(moved.get(index, static[offset : offset + spec.bytes]))
        offset += spec.bytes
    return b"".join(parts)


def _head(layout: Layout) -> int:
    return -(-len(layout.static) // 8)
