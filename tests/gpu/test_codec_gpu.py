"""A CUDA device encodes and decodes to the same bits as a CPU, in eager and in compiled, fused code."""

from __future__ import annotations

import math

import pytest
import torch
from decoupled_diloco.common import codec as codec_module
from decoupled_diloco.common.codec import apply_step, decode_delta, digest, encode_delta, encode_step
from decoupled_diloco.common.config import CODECS
from decoupled_diloco.common.errors import Malformed
from decoupled_diloco.common.fragments import ALIGN
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def pair(blocks: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two vectors on the CPU whose difference has every size, zero blocks, outliers and ties."""
    generator = torch.Generator().manual_seed(seed)
    public = torch.randn(blocks, ALIGN, generator=generator)
    step = torch.randn(blocks, ALIGN, generator=generator) * torch.logspace(-36, 30, blocks).unsqueeze(1)
    step[::7] = 0
    step[1::5, 3] *= 1e6
    public[2::5] = 0
    step[2::5] = torch.randint(-14, 15, (len(step[2::5]), ALIGN), generator=generator) / 2.0
    return public.view(-1), (public + step).view(-1)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("blocks", [0, 1, 2, 257, 2049, 20_011])
def test_a_cuda_device_gives_the_same_bits_as_a_cpu(codec: str, blocks: int) -> None:
    public, target = pair(blocks, blocks)
    there, here = (public.cuda(), target.cuda()), (public, target)
    delta, cuda_delta = encode_delta(codec, *here), encode_delta(codec, *there)
    assert cuda_delta.is_cuda
    assert digest(cuda_delta) == digest(delta)
    wire = delta.numpy().tobytes()
    assert digest(decode_delta(codec, there[0], wire)) == digest(decode_delta(codec, public, wire))

    (payload, new), (cuda_payload, cuda_new) = encode_step(codec, *here), encode_step(codec, *there)
    assert digest(cuda_payload) == digest(payload)
    assert digest(cuda_new) == digest(new)
    assert digest(apply_step(codec, there[0], payload.numpy().tobytes())) == digest(new)
    assert digest(apply_step(codec, public, cuda_payload.cpu())) == digest(new)


@pytest.mark.parametrize("slab", [ALIGN, 2**12])
def test_the_size_of_the_pieces_on_the_device_changes_no_bit(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    public, target = pair(101, 5)
    expected = [digest(part) for part in encode_step("int4", public, target)]
    monkeypatch.setattr(codec_module, "DEVICE_SLAB", slab)
    assert [digest(part) for part in encode_step("int4", public.cuda(), target.cuda())] == expected


def test_compiled_and_fused_code_on_the_device_gives_the_same_bits() -> None:
    def quantize(public: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        blocks = (target - public).view(-1, ALIGN)
        scales = codec_module.block_scales(blocks.abs().amax(1), 7).unsqueeze(1)
        codes = codec_module.block_codes(blocks.clone(), codec_module.inverse_scales(scales))
        return scales, public + (codes.float() * scales).view(-1)

    public, target = pair(2_049, 9)
    payload, new = encode_step("int4", public, target)
    scales, fused = torch.compile(quantize, fullgraph=True)(public.cuda(), target.cuda())
    assert torch.equal(scales.view(-1).cpu(), payload[: 2 * 2_049].view(torch.bfloat16).float())
    assert digest(fused) == digest(new)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("wrong", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_value_on_the_device_that_is_not_finite_is_not_sent(codec: str, wrong: float) -> None:
    public, target = (vector.cuda() for vector in pair(2_049, 3))
    target[1_000 * ALIGN + 17] = wrong
    for encode in (encode_delta, encode_step):
        with pytest.raises(Malformed) as caught:
            encode(codec, public, target)
        assert caught.value.reason == "nonfinite"


@pytest.mark.parametrize(("place", "byte", "reason"), [(0, 0xC0, "scale"), (1, 0xFF, "scale"), (-1, 0x88, "code")])
def test_a_hostile_payload_is_refused_on_the_device(place: int, byte: int, reason: str) -> None:
    public, target = pair(4, 1)
    payload = bytearray(encode_delta("int4", torch.zeros_like(public), target - public).numpy().tobytes())
    payload[place] = byte
    if reason == "scale":
        payload[1] = 0xFF
    for receive in (decode_delta, apply_step):
        with pytest.raises(Malformed) as caught:
            receive("int4", public.cuda(), bytes(payload))
        assert caught.value.reason == reason
