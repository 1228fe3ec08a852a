"""Values for tests of the codecs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from decoupled_diloco.common.codec import (
    decode_delta,
    encode_delta,
)
from decoupled_diloco.common.fragments import ALIGN, Fragment
from hypothesis import strategies as st
from torch import Tensor

QUANTIZED = ("int8", "int4")


def noise(length: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)) * size


def carried(codec: str, values: Tensor) -> tuple[bytes, Tensor]:
    """What a delta of exactly `values` looks like on the wire, and after it; not for f32, which carries theta."""
    payload = encode_delta(codec, values, torch.zeros_like(values)).numpy().tobytes()
    return payload, decode_delta(codec, values, payload)


def array(values: Tensor) -> npt.NDArray[np.float64]:
    return values.numpy().astype(np.float64)


def wild_blocks() -> st.SearchStrategy[Tensor]:
    """Blocks of every size a float can have, with zeros, equal values, and outliers beside small ones."""

    def build(rows: list[tuple[int, str]], seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        blocks = []
        for exponent, kind in rows:
            block = torch.randn(ALIGN, generator=generator).clamp(-7, 7) * 2.0**exponent
            if kind == "zero":
                block = torch.zeros(ALIGN)
            elif kind == "equal":
                block = torch.full((ALIGN,), 2.0**exponent)
            elif kind == "outlier":
                block[int(torch.randint(ALIGN, (1,), generator=generator))] = 2.0 ** min(exponent + 40, 119)
            elif kind == "ties":
                block = torch.randint(-14, 15, (ALIGN,), generator=generator) * 2.0**exponent / 2
                block[0] = 7 * 2.0**exponent
            blocks.append(block)
        return torch.cat(blocks) if blocks else torch.zeros(0)

    kinds = st.sampled_from(["noise", "zero", "equal", "outlier", "ties"])
    return st.builds(build, st.lists(st.tuples(st.integers(-149, 116), kinds), max_size=9), st.integers(0, 2**31))


def flat(fragment: Fragment, tensors: dict[str, Tensor]) -> Tensor:
    vector = torch.zeros(fragment.length)
    for span in fragment.spans:
        vector[span.offset : span.stop] = tensors[span.tensor.name].reshape(-1)
    return vector
