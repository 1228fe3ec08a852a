"""The same bits on every machine, whatever the number of threads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import reference
import torch
from codec_values import noise, wild_blocks
from decoupled_diloco.common import codec as codec_module
from decoupled_diloco.common.codec import (
    apply_step,
    decode_delta,
    digest,
    encode_delta,
    encode_step,
    model_hash,
)
from decoupled_diloco.common.config import CODECS
from decoupled_diloco.common.fragments import ALIGN
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples
from torch import Tensor


@given(step=wild_blocks(), seed=st.integers(0, 2**31), codec=st.sampled_from(CODECS))
@settings(max_examples=examples(60))
def test_sender_and_receiver_of_a_step_hold_the_same_bits(step: Tensor, seed: int, codec: str) -> None:
    public = noise(len(step), seed)
    public[::5] = -0.0
    before = public.clone()
    payload, new = encode_step(codec, public, public + step)
    assert new.dtype == torch.float32
    sent = payload.numpy().tobytes()
    for received in (sent, bytearray(sent), memoryview(sent), memoryview(bytearray(sent)), payload):
        assert digest(apply_step(codec, public, received)) == digest(new)
    assert digest(public) == digest(before)
    assert digest(payload) == hashlib.sha256(sent).hexdigest()


@pytest.mark.parametrize("codec", CODECS)
def test_neither_the_threads_nor_the_size_of_the_pieces_change_a_bit(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    public, target = noise(1_031 * ALIGN, 5), noise(1_031 * ALIGN, 6)

    def outcome() -> list[str]:
        payload, new = encode_step(codec, public, target)
        delta = encode_delta(codec, public, target)
        return [digest(payload), digest(new), digest(delta), digest(decode_delta(codec, public, delta))]

    expected, threads = outcome(), torch.get_num_threads()
    try:
        for slab, band, count in ((ALIGN, ALIGN, 1), (ALIGN * 3, ALIGN * 9, 2), (2**20, 2**20, 2)):
            monkeypatch.setattr(codec_module, "SLAB", slab)
            monkeypatch.setattr(codec_module, "BAND", band)
            torch.set_num_threads(count)
            assert outcome() == expected
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def compiler(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile with a cache of its own; the test is skipped where no C++ compiler is."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        pytest.skip("torch.compile needs a C++ compiler, and this machine has none")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    yield
    torch._dynamo.reset()


@pytest.mark.tools
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore")  # what torch's compiler warns of is not ours
def test_compiled_and_fused_code_gives_the_same_bits() -> None:
    def quantize(public: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blocks = (target - public).view(-1, ALIGN)
        scales = codec_module.block_scales(blocks.abs().amax(1), 7).unsqueeze(1)
        codes = codec_module.block_codes(blocks.clone(), codec_module.inverse_scales(scales))
        return codes, scales, public + (codes.float() * scales).view(-1)

    public, target = noise(301 * ALIGN, 7), noise(301 * ALIGN, 8) * torch.logspace(-36, 30, 301 * ALIGN)
    target[:ALIGN] = public[:ALIGN]
    compiled = torch.compile(quantize, fullgraph=True)(public, target)
    payload, new = encode_step("int4", public, target)
    codes, scales, fused = (value.contiguous() for value in compiled)
    assert torch.equal(payload[: 2 * 301].view(torch.bfloat16).float(), scales.view(-1))
    assert codes.view(-1).tolist() == reference.read_payload("int4", payload.numpy().tobytes(), 301 * ALIGN)[1]
    assert digest(fused) == digest(new)


def test_digests_are_those_of_the_little_endian_bytes() -> None:
    vectors = [noise(ALIGN, 1), noise(0), noise(3 * ALIGN, 2)]
    whole = b"".join(v.numpy().astype("<f4").tobytes() for v in vectors)
    assert model_hash(vectors) == hashlib.sha256(whole).hexdigest()
    assert digest(vectors[0]) == hashlib.sha256(vectors[0].numpy().astype("<f4").tobytes()).hexdigest()
    assert digest(b"abc") == digest(memoryview(b"abc")) == hashlib.sha256(b"abc").hexdigest()
    assert digest(torch.ones(2, dtype=torch.bfloat16)) == hashlib.sha256(bytes([0x80, 0x3F] * 2)).hexdigest()


def test_the_sender_may_continue_writing_where_it_encoded_from() -> None:
    theta, anchor = noise(ALIGN), noise(ALIGN, 1)
    payload = encode_delta("f32", anchor, theta)
    _, new = encode_step("f32", anchor, theta)
    expected = theta.clone()
    theta.zero_()
    assert torch.equal(payload.view(torch.float32), expected)
    assert torch.equal(new, expected)


def test_a_received_fragment_does_not_lie_in_the_buffer_it_came_in() -> None:
    values = noise(ALIGN)
    buffer = bytearray(values.numpy().tobytes())
    new = apply_step("f32", torch.zeros(ALIGN), memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert torch.equal(new, values)
