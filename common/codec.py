"""Codecs f32, bf16, int8 and int4: flat f32 vectors to bytes and back, bit-identical on all devices and torch builds.

A payload begins with one bf16 scale (little endian) for each block of 128 elements, followed by the codes:

    f32    no scales; the values themselves, 4 bytes each
    bf16   no scales; each value rounded to the nearest bf16, 2 bytes each
    int8   codes -127..127, one byte each
    int4   codes -7..7, two to a byte: the low nibbles carry the first half of the blocks (the larger half, if their
           number is odd), the high nibbles the second half; both in two's complement

Scales are rounded up to bf16, so that `code * scale` is exact in f32: eager, compiled and fused kernels on any device
then agree to the bit. For the same reason no element is divided, and inexact values are computed once for each block,
in f64. A block whose scale would be below 2^-100 is zero. The error of an element is at most half its block's scale
(times 1 + 2^-15, since the product before rounding is in f32), and a scale is at most 1.008 * max|block| / 7 (int8:
/ 127).

The papers (arXiv 2604.21428, appendix D.3; Streaming DiLoCo, arXiv 2501.18512) give neither block size, nor scale
format, nor rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .errors import Malformed
from .fragments import ALIGN

Buffer = bytes | bytearray | memoryview | Tensor
"""Types of a payload: any contiguous bytes, or a 1-D uint8 tensor."""

LEVELS = {"int8": 127, "int4": 7}
"""Largest code of each quantized codec."""
VALUE_BYTES = {"f32": 4, "bf16": 2}
SMALLEST_SCALE = 2.0**-100
"""Below it a block is zero: products with it would approach the subnormal numbers, which some devices flush to zero."""
SCALE_LIMIT = 2.0**120
"""Scales are below it, so that no code times scale can overflow; a block beyond it counts as not finite."""
SLAB = 255 * ALIGN
"""Elements of one operation on a CPU. They fit the second-level cache, and torch does not spread fewer than 2^15 over
its threads (the network thread must not compete with the training thread for all cores)."""
BAND = 16 * SLAB
"""Elements whose scales are computed together on a CPU, so that operations on scales cost less than the rest."""
DEVICE_SLAB = 2**26
"""Replaces both on an accelerator, where only the size of temporaries matters."""

_SMALLEST_BITS, _LIMIT_BITS = 0x0D80, 0x7B80
"""SMALLEST_SCALE and SCALE_LIMIT as bf16; the bit patterns of positive numbers are ordered like the numbers."""

_ROUNDER = 1.5 * 2.0**23
"""f32 has no fractions at this magnitude: adding it to a small number rounds that number."""


def encoded_bytes(codec: str, length: int) -> int:
    """Payload bytes for a flat vector of `length` elements. ValueError unless it is a multiple of ALIGN."""
    if length < 0 or length % ALIGN:
        raise ValueError(f"a flat vector has a multiple of {ALIGN} elements, not {length}")
    if codec in VALUE_BYTES:
        return length * VALUE_BYTES[codec]
    if codec not in LEVELS:
        raise ValueError(f"there is no codec {codec!r}")
    blocks = length // ALIGN
    return blocks * 2 + (blocks if codec == "int8" else (blocks + 1) // 2) * ALIGN


@torch.no_grad()
def encode_delta(codec: str, anchor: Tensor, theta: Tensor) -> Tensor:
    """Encode the outer gradient anchor - theta of one fragment (arXiv 2604.21428, section 3); returns the payload (1-D
    uint8, on the inputs' device).

    Both inputs: 1-D f32, a multiple of ALIGN elements. With codec f32 the payload is a copy of theta itself. Malformed
    ("nonfinite") if a value is NaN, infinite, or too large for the codec.
    """
    _check_pair(anchor, theta)
    return _copy_of_finite(theta).view(torch.uint8) if codec == "f32" else _encode(codec, anchor, theta)


@torch.no_grad()
def decode_delta(codec: str, anchor: Tensor, payload: Buffer) -> Tensor:
    """Decode the outer gradient in a payload; returns 1-D f64 for codec f32 (anchor - theta in f64), else 1-D f32.

    Malformed ("size", "nonfinite", "scale", "code") for a payload that `encode_delta` cannot produce.
    """
    received = _checked(codec, len(anchor), payload, anchor.device)
    delta = torch.empty_like(anchor, dtype=torch.float64 if codec == "f32" else torch.float32)
    if codec == "f32":
        theta = received.view(torch.float32)
        for part in slabs(anchor):
            torch.sub(anchor[part].double(), theta[part].double(), out=delta[part])
        return delta
    for _ in _decode(codec, received, delta):
        pass
    return delta


@torch.no_grad()
def encode_step(codec: str, public: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Encode the step from the public fragment towards `target`; returns the payload and the resulting public fragment.

    Inputs and new public fragment: 1-D f32; payload: 1-D uint8. `apply_step` on the same `public` gives the same bits;
    target - new_public is the residual for error feedback. With codec f32 the payload is the target itself. Malformed
    ("nonfinite") as in `encode_delta`, and if the new public fragment would not be finite.
    """
    _check_pair(public, target)
    if codec == "f32":
        new = _copy_of_finite(target)
        return _copy_of_finite(new).view(torch.uint8), new
    payload = _encode(codec, target, public)
    return payload, _stepped(codec, public, payload)


@torch.no_grad()
def apply_step(codec: str, public: Tensor, payload: Buffer) -> Tensor:
    """The public fragment after a step, as a new 1-D f32 tensor with the same bits as returned by `encode_step`.

    Malformed as in `decode_delta`, and ("nonfinite") if a sum overflows.
    """
    received = _checked(codec, len(public), payload, public.device)
    return _copy_of_finite(received.view(torch.float32)) if codec == "f32" else _stepped(codec, public, received)


def digest(vector: Buffer) -> str:
    """sha256 (hex) of a vector's little-endian bytes, or of a payload."""
    return hashlib.sha256(_bytes_of(vector)).hexdigest()


def model_hash(vectors: Sequence[Tensor]) -> str:
    """sha256 (hex) over the little-endian bytes of all fragments, in order."""
    running = hashlib.sha256()
    for vector in vectors:
        running.update(_bytes_of(vector))
    return running.hexdigest()


def slabs(vector: Tensor) -> Iterator[slice]:
    """Slices that cover a flat vector; an operation on one stays in the cache and in the calling thread."""
    return _slices(0, len(vector), _size(vector, SLAB))


# --- quantizing ------------------------------------------------------------------------------------------------------
def block_scales(tops: Tensor, levels: int) -> Tensor:
    """The scales of blocks with largest magnitudes `tops` (f32, any shape), as f32 rounded up to bf16 precision.

    0 for a block encoded as zero, infinity for one that is not finite or reaches SCALE_LIMIT.
    """
    exact = (tops.double() * (1 / levels)).float()  # f64, so that a block made of codes * scale has that scale again
    raised = ((exact.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    scales = torch.where(exact < SMALLEST_SCALE, 0.0, raised)
    return torch.where(exact < SCALE_LIMIT, scales, torch.inf)  # NaN gives infinity, too


def block_codes(blocks: Tensor, inverse: Tensor) -> Tensor:
    """The int8 codes of an f32 matrix of blocks, one a row; it is overwritten. inverse: 1 / scale in one column.

    Rounded to the nearest, ties to even.
    """
    blocks.mul_(inverse)
    if blocks.device.type == "cpu":
        blocks.add_(_ROUNDER).sub_(_ROUNDER)  # equals round_(), which would start a pool of threads
    else:
        blocks.round_()  # a sum could be fused with the product there, and would then round once instead of twice
    return blocks.to(torch.int8)


def inverse_scales(scales: Tensor) -> Tensor:
    """1 / scale as f32, computed in f64; 0 for a scale of 0."""
    return torch.where(scales > 0, scales.double().reciprocal().float(), 0.0)


class _Stretch(NamedTuple):
    """Blocks of a payload whose codes are contiguous."""

    part: slice
    """Their elements of the flat vector."""
    scales: Tensor
    """Their scales: a bf16 view of the payload."""
    codes: Tensor
    """Their codes: an int8 view of the payload."""
    high: bool
    """int4 only: the codes are the high nibbles; the low ones belong to other blocks."""


def _stretches(codec: str, payload: Tensor, length: int, size: int) -> Iterator[_Stretch]:
    """Iterate over a quantized payload, at most `size` elements at a time; for int4 the low nibbles first."""
    blocks = length // ALIGN
    middle = length if codec == "int8" else (blocks + 1) // 2 * ALIGN
    scales, codes = payload[: blocks * 2].view(torch.bfloat16), payload[blocks * 2 :].view(torch.int8)
    size = _size(payload, size)
    for first, last in ((0, middle), (middle, length)):
        for part in _slices(first, last, size):
            own = scales[part.start // ALIGN : part.stop // ALIGN]
            yield _Stretch(part, own, codes[part.start - first : part.stop - first], first > 0)


def _encode(codec: str, minuend: Tensor, subtrahend: Tensor) -> Tensor:
    """The payload of minuend - subtrahend. Malformed ("nonfinite")."""
    payload = minuend.new_empty(encoded_bytes(codec, len(minuend)), dtype=torch.uint8)
    if codec == "bf16":
        values = payload.view(torch.bfloat16)
        for part in slabs(values):
            values[part] = minuend[part] - subtrahend[part]
            _check_finite(values[part])
        return payload
    values = torch.empty_like(minuend[: _size(minuend, BAND)])
    for stretch in _stretches(codec, payload, len(minuend), BAND):
        band = values[: stretch.part.stop - stretch.part.start]
        _encode_stretch(codec, stretch, minuend[stretch.part], subtrahend[stretch.part], band)
    return payload


def _encode_stretch(codec: str, stretch: _Stretch, minuend: Tensor, subtrahend: Tensor, values: Tensor) -> None:
    """Write scales and codes of minuend - subtrahend; `values` is scratch memory for the difference."""
    tops = minuend.new_empty(len(minuend) // ALIGN)
    sizes = torch.empty_like(minuend[: _size(minuend, SLAB)])
    for part in slabs(values):
        difference = torch.sub(minuend[part], subtrahend[part], out=values[part])
        magnitudes = torch.abs(difference, out=sizes[: len(difference)]).view(-1, ALIGN)
        torch.amax(magnitudes, 1, out=tops[part.start // ALIGN : part.stop // ALIGN])
    scales = block_scales(tops, LEVELS[codec])
    if not float(scales.amax()) < torch.inf:
        raise Malformed("nonfinite", "a value is NaN, infinite, or too large to be carried")
    stretch.scales.copy_(scales)
    inverse = inverse_scales(scales).unsqueeze(1)
    for part in slabs(values):
        codes = block_codes(values[part].view(-1, ALIGN), inverse[part.start // ALIGN : part.stop // ALIGN]).view(-1)
        if codec == "int8":
            stretch.codes[part] = codes
        elif stretch.high:
            stretch.codes[part].add_(codes, alpha=16)
        else:
            torch.bitwise_and(codes, 15, out=stretch.codes[part])


def _decode(codec: str, payload: Tensor, out: Tensor) -> Iterator[slice]:
    """Write the values of a payload into `out` (flat f32), yielding each slab when it is done. The scales are checked
    already. Malformed ("code") for a code that no encoder writes.
    """
    if codec == "bf16":
        for part in slabs(out):
            out[part] = payload.view(torch.bfloat16)[part]
            yield part
        return
    for part, scales, codes, high in _stretches(codec, payload, len(out), SLAB):
        if codec == "int4":
            codes = codes >> 4 if high else (codes << 4).bitwise_right_shift_(4)  # noqa: PLW2901
        if int(codes.amin()) < -LEVELS[codec]:
            raise Malformed("code", f"a code below -{LEVELS[codec]} in a payload of codec {codec}")
        out[part].copy_(codes).view(-1, ALIGN).mul_(scales.unsqueeze(1))
        yield part


def _stepped(codec: str, public: Tensor, payload: Tensor) -> Tensor:
    new = torch.empty_like(public)
    for part in _decode(codec, payload, new):
        _check_finite(new[part].add_(public[part]))
    return new


def _size(vector: Tensor, size: int) -> int:
    return size if vector.device.type == "cpu" else DEVICE_SLAB


def _slices(first: int, last: int, size: int) -> Iterator[slice]:
    for start in range(first, last, size):
        yield slice(start, min(start + size, last))


# --- checks ----------------------------------------------------------------------------------------------------------
def _checked(codec: str, length: int, payload: Buffer, device: torch.device) -> Tensor:
    """A payload as a 1-D uint8 tensor on `device`, with its size, scales and plain values checked."""
    received = _tensor_of(payload)
    if received.numel() != encoded_bytes(codec, length):
        raise Malformed("size", f"{received.numel()} bytes instead of {encoded_bytes(codec, length)} ({codec})")
    received = received.to(device)
    if codec in LEVELS:
        _check_scales(received[: length // ALIGN * 2].view(torch.int16))
    else:
        values = received.view(torch.float32 if codec == "f32" else torch.bfloat16)
        for part in slabs(values):
            _check_finite(values[part])
    return received


def _tensor_of(payload: Buffer) -> Tensor:
    if isinstance(payload, Tensor):
        return payload
    view = memoryview(payload).cast("B")
    if len(view) and not view.readonly:
        return torch.frombuffer(view, dtype=torch.uint8)
    copy = torch.empty(len(view), dtype=torch.uint8, device="cpu")  # torch accepts no read-only memory
    copy.numpy()[:] = np.frombuffer(view, dtype=np.uint8)
    return copy


def _bytes_of(vector: Buffer) -> memoryview:
    if not isinstance(vector, Tensor):
        return memoryview(vector).cast("B")
    return vector.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _check_scales(bits: Tensor) -> None:
    """Malformed unless each scale is zero, or positive and from SMALLEST_SCALE to below SCALE_LIMIT."""
    for part in slabs(bits):
        some = bits[part]
        least, most = torch.aminmax(some)
        if int(least) >= _SMALLEST_BITS and int(most) < _LIMIT_BITS:
            continue  # the usual case: no scale is zero
        fine = (some == 0) | ((some >= _SMALLEST_BITS) & (some < _LIMIT_BITS))
        if not fine.all():
            raise Malformed("scale", f"a block's scale is {some[~fine].view(torch.bfloat16)[0].item()}")


def _check_finite(values: Tensor) -> None:
    # A value that is not finite makes the sum not finite; checking each value takes twenty times as long.
    if not math.isfinite(float(values.sum())) and not values.isfinite().all():
        raise Malformed("nonfinite", "a value is NaN, infinite, or too large to be carried")


def _copy_of_finite(vector: Tensor) -> Tensor:
    copy = torch.empty_like(vector)
    for part in slabs(vector):
        _check_finite(copy[part].copy_(vector[part]))
    return copy


def _check_pair(first: Tensor, second: Tensor) -> None:
    for vector in (first, second):
        if vector.dtype != torch.float32 or vector.ndim != 1 or not vector.is_contiguous():
            raise ValueError(f"expected a flat contiguous f32 vector, not {vector.dtype} {list(vector.shape)}")
    if len(first) != len(second):
        raise ValueError(f"vectors of {len(first)} and {len(second)} elements have different lengths")
