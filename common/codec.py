"""The only codec: flat f32 vectors to bytes and back, with the same bits on every device and in every build of torch.

A payload holds first one bf16 scale (little endian) for each block of 128 elements, then the codes:

    f32    no scales; the values themselves, 4 bytes each
    bf16   no scales; each value rounded to the nearest bf16, 2 bytes each
    int8   codes -127..127, one byte each
    int4   codes -7..7, two to a byte: byte i of a block carries element i (low nibble) and element i + 64 (high)

Scales are rounded up to bf16, so that `code * scale` is exact in f32: eager, compiled and fused kernels on any device
then agree to the bit. For the same reason nothing here divides elementwise, and what is inexact is computed once a
block in f64. A block whose scale would be below 2^-100 is zero. A holder's error is at most scale / 2 an element
(times 1 + 2^-15, for the rounding of f32 products), where scale <= 1.008 * max|block| / 7 (or / 127).

The papers (Decoupled DiLoCo, D.3; Streaming DiLoCo) state neither block size, nor scale format, nor rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .errors import Malformed
from .fragments import ALIGN

Buffer = bytes | bytearray | memoryview | Tensor
"""What a payload arrives in: any contiguous bytes, or a 1-D uint8 tensor."""

LEVELS = {"int8": 127, "int4": 7}
"""Largest code of each quantized codec."""
VALUE_BYTES = {"f32": 4, "bf16": 2}
SMALLEST_SCALE = 2.0**-100
"""Below this a block is zero: products with it would come near the subnormal numbers, which some devices flush."""
SCALE_LIMIT = 2.0**120
"""Scales stay below this, so that no code times scale can overflow; a block beyond it counts as not finite."""
SLAB = 32_768
"""Elements worked on at a time on a CPU: fits the second-level cache, and is the most that torch does not spread over
a pool of threads (a link's thread must not compete with the training thread for all cores)."""
DEVICE_SLAB = 2**26
"""The same on an accelerator, where only the size of temporaries matters."""

_BF16_BITS_SMALLEST, _BF16_BITS_LIMIT = 0x0D80, 0x7B80
"""Bit patterns of SMALLEST_SCALE and SCALE_LIMIT as bf16; patterns of positive numbers are ordered like the numbers."""


def encoded_bytes(codec: str, length: int) -> int:
    """Payload bytes for a flat vector of `length` elements, a multiple of ALIGN. ValueError otherwise."""
    if length < 0 or length % ALIGN:
        raise ValueError(f"a flat vector has a multiple of {ALIGN} elements, not {length}")
    if codec in VALUE_BYTES:
        return length * VALUE_BYTES[codec]
    if codec not in LEVELS:
        raise ValueError(f"no codec is named {codec!r}")
    return length // ALIGN * 2 + (length if codec == "int8" else length // 2)


@torch.no_grad()
def encode_delta(codec: str, anchor: Tensor, theta: Tensor) -> Tensor:
    """The outer gradient anchor - theta of one fragment as a payload (1-D uint8, on the inputs' device).

    Both inputs: 1-D f32, a multiple of ALIGN elements. Codec f32 carries theta itself (a copy). Malformed
    ("nonfinite") if a value is NaN, infinite or beyond what the codec can carry.
    """
    _check_pair(anchor, theta)
    if codec == "f32":
        return _bytes_of_finite(theta)
    payload = theta.new_empty(encoded_bytes(codec, len(theta)), dtype=torch.uint8)
    for part in slabs(theta):
        _encode(codec, payload, part, anchor[part] - theta[part])
    _check_encoded(codec, payload)
    return payload


@torch.no_grad()
def decode_delta(codec: str, anchor: Tensor, payload: Buffer) -> Tensor:
    """The outer gradient that a payload carries: 1-D, f64 for codec f32 (anchor - theta, formed in f64), else f32.

    Malformed ("size", "nonfinite", "scale", "code") for a payload that `encode_delta` cannot have made.
    """
    data = _data(codec, len(anchor), payload, anchor.device)
    if codec == "f32":
        return anchor.double() - data.view(torch.float32)
    delta = torch.empty_like(anchor)
    for part in slabs(anchor):
        _decode(codec, data, part, delta[part])
    return delta


@torch.no_grad()
def encode_step(codec: str, public: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The step from the public fragment towards `target`: (payload, the new public fragment that it leads to).

    Both inputs and the new public fragment: 1-D f32; the payload as in `encode_delta`. Whoever holds `public` gets
    the same bits from `apply_step`. target - new_public is what the step left over. Codec f32 carries the target.
    Malformed ("nonfinite") as in `encode_delta`, and if the new public fragment is not finite.
    """
    _check_pair(public, target)
    if codec == "f32":
        return _bytes_of_finite(target), target.clone()
    payload = public.new_empty(encoded_bytes(codec, len(public)), dtype=torch.uint8)
    for part in slabs(public):
        _encode(codec, payload, part, target[part] - public[part])
    _check_encoded(codec, payload)
    return payload, _step(codec, public, payload)


@torch.no_grad()
def apply_step(codec: str, public: Tensor, payload: Buffer) -> Tensor:
    """The public fragment after a step: a new 1-D f32 tensor, the same bits as the sender's. Malformed as in
    `decode_delta`, and if a value overflows.
    """
    data = _data(codec, len(public), payload, public.device)
    return data.view(torch.float32).clone() if codec == "f32" else _step(codec, public, data)


def digest(vector: Buffer) -> str:
    """sha256 (hex) of a vector's little-endian bytes, or of a payload."""
    return hashlib.sha256(_bytes_view(vector)).hexdigest()


def model_hash(vectors: Sequence[Tensor]) -> str:
    """sha256 (hex) over the little-endian bytes of all fragments, in order."""
    running = hashlib.sha256()
    for vector in vectors:
        running.update(_bytes_view(vector))
    return running.hexdigest()


# --- one slab --------------------------------------------------------------------------------------------------------
def quantize(blocks: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """(codes, scales) of an f32 matrix whose rows are blocks: codes int8 of the same shape, scales f32 of one column.

    The matrix is overwritten. A block that is not finite, or whose scale reaches SCALE_LIMIT, gets scale infinity.
    """
    top = blocks.abs().amax(1, keepdim=True).double().mul_(1 / levels).float()
    raised = top.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000).view(torch.float32)
    scales = raised.masked_fill_(~(top < SCALE_LIMIT), torch.inf).masked_fill_(top < SMALLEST_SCALE, 0.0)
    inverse = scales.double().reciprocal_().float().masked_fill_(scales == 0, 0.0)
    return blocks.mul_(inverse).round_().to(torch.int8), scales


def _encode(codec: str, payload: Tensor, part: slice, values: Tensor) -> None:
    """Write the scales and codes of `values` (overwritten) where part number `part` belongs in the payload."""
    if codec == "bf16":
        payload.view(torch.bfloat16)[part].copy_(values)
        return
    codes, scales = quantize(values.view(-1, ALIGN), LEVELS[codec])
    scale_bits, code_bytes = _sections(codec, payload, part)
    scale_bits.view(torch.bfloat16).copy_(scales.view(-1))
    if codec == "int8":
        code_bytes.copy_(codes.view(-1))
    else:
        low, high = codes.view(-1, 2, ALIGN // 2).unbind(1)
        torch.add(low.bitwise_and_(15), high, alpha=16, out=code_bytes.view(-1, ALIGN // 2))


def _decode(codec: str, payload: Tensor, part: slice, out: Tensor) -> None:
    """Write the values of part number `part` into `out`. The payload's scales and values were checked before."""
    if codec == "bf16":
        out.copy_(payload.view(torch.bfloat16)[part])
        return
    scale_bits, code_bytes = _sections(codec, payload, part)
    blocks = out.view(-1, ALIGN)
    if codec == "int8":
        out.copy_(code_bytes)
    else:
        packed = code_bytes.view(-1, ALIGN // 2)
        blocks[:, : ALIGN // 2] = packed.bitwise_left_shift(4).bitwise_right_shift_(4)
        blocks[:, ALIGN // 2 :] = packed.bitwise_right_shift(4)
    if out.numel() and not out.amin() >= -LEVELS[codec]:
        raise Malformed("code", f"a code below -{LEVELS[codec]} in a payload of codec {codec}")
    blocks.mul_(scale_bits.view(torch.bfloat16).unsqueeze(1))


def _step(codec: str, public: Tensor, payload: Tensor) -> Tensor:
    new = torch.empty_like(public)
    for part in slabs(public):
        _decode(codec, payload, part, new[part])
        new[part].add_(public[part])
        _check_finite(new[part])
    return new


def _sections(codec: str, payload: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """The part's scales (int16 bits) and codes (int8) as views of the payload."""
    blocks = len(payload) // (ALIGN + 2 if codec == "int8" else ALIGN // 2 + 2)
    first, last = part.start // ALIGN, part.stop // ALIGN
    codes = payload[blocks * 2 :].view(torch.int8)
    row = ALIGN if codec == "int8" else ALIGN // 2
    return payload[: blocks * 2].view(torch.int16)[first:last], codes[first * row : last * row]


def slabs(vector: Tensor) -> Iterator[slice]:
    step = SLAB if vector.device.type == "cpu" else DEVICE_SLAB
    for start in range(0, len(vector), step):
        yield slice(start, min(start + step, len(vector)))


# --- checks ----------------------------------------------------------------------------------------------------------
def _data(codec: str, length: int, payload: Buffer, device: torch.device) -> Tensor:
    """A payload as a 1-D uint8 tensor, after its size and everything but its codes were checked."""
    size = payload.numel() if isinstance(payload, Tensor) else memoryview(payload).nbytes
    if size != encoded_bytes(codec, length):
        raise Malformed("size", f"{size} bytes where {encoded_bytes(codec, length)} belong (codec {codec})")
    data = _tensor_of(payload).to(device)
    if codec in LEVELS:
        _check_scales(_sections(codec, data, slice(0, length))[0])
    else:
        values = data.view(torch.float32 if codec == "f32" else torch.bfloat16)
        for part in slabs(values):
            _check_finite(values[part])
    return data


def _tensor_of(payload: Buffer) -> Tensor:
    if isinstance(payload, Tensor):
        return payload
    view = memoryview(payload).cast("B")
    if len(view) and not view.readonly:
        return torch.frombuffer(view, dtype=torch.uint8)
    copy = torch.empty(len(view), dtype=torch.uint8)  # torch wants to be able to write where it reads
    copy.numpy()[:] = np.frombuffer(view, dtype=np.uint8)
    return copy


def _check_scales(bits: Tensor) -> None:
    """Malformed unless each is zero or a number from SMALLEST_SCALE to below SCALE_LIMIT, without a sign bit."""
    fine = (bits == 0) | ((bits >= _BF16_BITS_SMALLEST) & (bits < _BF16_BITS_LIMIT))
    if not fine.all():
        wrong = bits[~fine].view(torch.bfloat16)[0].item()
        raise Malformed("scale", f"a block's scale is {wrong}")


def _check_encoded(codec: str, payload: Tensor) -> None:
    """Malformed if what was just encoded is not finite."""
    length = len(payload) // 2
    if codec == "bf16":
        for part in slabs(payload.view(torch.bfloat16)):
            _check_finite(payload.view(torch.bfloat16)[part])
        return
    length = len(payload) // (ALIGN + 2 if codec == "int8" else ALIGN // 2 + 2) * ALIGN
    bits = _sections(codec, payload, slice(0, length))[0]
    if len(bits) and not bits.amax() < _BF16_BITS_LIMIT:
        raise Malformed("nonfinite", f"a value is NaN, infinite or beyond {SCALE_LIMIT:.0e}")


def _check_finite(values: Tensor) -> None:
    if values.numel():
        low, high = torch.aminmax(values)  # NaN wins in both; five times as fast as isfinite().all()
        if not (low > -torch.inf and high < torch.inf):
            raise Malformed("nonfinite", "a value is NaN or infinite")


def _check_pair(first: Tensor, second: Tensor) -> None:
    for vector in (first, second):
        if vector.dtype != torch.float32 or vector.ndim != 1 or not vector.is_contiguous():
            raise ValueError(f"a flat contiguous f32 vector is wanted, not {vector.dtype} {list(vector.shape)}")
    if len(first) != len(second):
        raise ValueError(f"vectors of {len(first)} and {len(second)} elements do not go together")


def _bytes_of_finite(vector: Tensor) -> Tensor:
    for part in slabs(vector):
        _check_finite(vector[part])
    return vector.clone().view(torch.uint8)


def _bytes_view(vector: Buffer) -> memoryview:
    if not isinstance(vector, Tensor):
        return memoryview(vector).cast("B")
    flat = vector.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())
