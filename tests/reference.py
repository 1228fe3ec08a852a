"""An independent float64 reference of the numerics, written from the formulas with numpy alone; slow and plain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
BLOCK = 128
LEVELS = {"int8": 127, "int4": 7}


def floats_of_bf16(bits: npt.NDArray[np.uint16]) -> F64:
    """bf16 is the upper half of an f32."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def scale_of_block(block: npt.NDArray[Any], levels: int) -> float:
    """The smallest number with 8 significant bits that is not below max|block| / levels (in f32); 0 below 2^-100."""
    exact = float(np.float32(np.abs(block.astype(np.float64)).max() / levels))
    if exact < 2.0**-100:
        return 0.0
    mantissa, exponent = math.frexp(exact)  # mantissa in [0.5, 1)
    return math.ldexp(math.ceil(mantissa * 256), exponent - 8)


def read_payload(codec: str, payload: bytes, length: int) -> tuple[F64, list[int]]:
    """(scales, codes) of a quantized payload, one code an element, read byte by byte."""
    blocks = length // BLOCK
    scales = floats_of_bf16(np.frombuffer(payload[: 2 * blocks], dtype="<u2"))
    rest = payload[2 * blocks :]
    if codec == "int8":
        return scales, [byte - 256 if byte > 127 else byte for byte in rest]
    nibbles = [byte & 15 for byte in rest] + [byte >> 4 for byte in rest]
    return scales, [n - 16 if n > 7 else n for n in nibbles[:length]]


def decode(codec: str, payload: bytes, length: int) -> F64:
    """The values a payload carries, exactly (code times scale has at most 16 significant bits)."""
    if codec == "f32":
        return np.frombuffer(payload, dtype="<f4").astype(np.float64)
    if codec == "bf16":
        return floats_of_bf16(np.frombuffer(payload, dtype="<u2"))
    scales, codes = read_payload(codec, payload, length)
    return np.asarray(codes, dtype=np.float64) * np.repeat(scales, BLOCK)


def error_bound(codec: str, values: npt.NDArray[Any]) -> F64:
    """How far a decoded element may be from its value: half a scale; in a block taken as zero, the value itself."""
    blocks = values.reshape(-1, BLOCK)
    scales = np.array([scale_of_block(block, LEVELS[codec]) for block in blocks])
    bounds = np.where(scales > 0, scales / 2 * (1 + 2.0**-15), LEVELS[codec] * 2.0**-100)
    return np.repeat(bounds, BLOCK)


def unit(vector: F64) -> F64:
    """phi: a vector's direction; 0 has none and stays 0."""
    length = math.sqrt(float(np.sum(vector * vector)))
    return vector / length if length else vector


def mean(vectors: Sequence[F64], weights: Sequence[float]) -> F64:
    return np.asarray(sum(w * v for w, v in zip(weights, vectors, strict=True)) / sum(weights))


def rda(vectors: Sequence[F64], weights: Sequence[float]) -> F64:
    """(sum w_i |v_i| / sum w_i) * phi(sum w_i phi(v_i) / sum w_i); the mean where the directions cancel."""
    direction = mean([unit(v) for v in vectors], weights)
    if np.linalg.norm(direction) < 1e-6:
        return mean(vectors, weights)
    radius = mean([np.array(np.linalg.norm(v)) for v in vectors], weights)
    return np.asarray(radius * unit(direction))


def nesterov(start: F64, deltas: Sequence[npt.NDArray[Any]], learning_rate: float, momentum: float) -> tuple[F64, F64]:
    """(parameters, velocity) after SGD with Nesterov momentum on each delta in turn."""
    parameters, velocity = start.astype(np.float64), np.zeros(len(start))
    for delta in deltas:
        velocity = momentum * velocity + delta
        parameters = parameters - learning_rate * (delta + momentum * velocity)
    return parameters, velocity
