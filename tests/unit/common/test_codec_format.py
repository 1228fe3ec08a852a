"""Format of the payloads, and payloads that are rejected."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from codec_values import QUANTIZED, array, carried, noise
from decoupled_diloco.common.codec import (
    apply_step,
    decode_delta,
    encode_delta,
    encode_step,
    encoded_bytes,
)
from decoupled_diloco.common.config import CODECS
from decoupled_diloco.common.errors import Malformed
from decoupled_diloco.common.fragments import ALIGN
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples
from torch import Tensor

BLOCKS = [0, 1, 2, 3, 7, 255, 256, 257, 511, 513, 2047, 2049, 4101]
"""Around the sizes that one operation and one band of scales handle, odd and even, and none at all."""


def set_scale(payload: bytes, block: int, bits: int) -> bytes:
    return payload[: 2 * block] + bits.to_bytes(2, "little") + payload[2 * block + 2 :]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_a_payload_has_the_size_that_was_promised_and_the_values_that_were_sent(codec: str, blocks: int) -> None:
    length = blocks * ALIGN
    anchor, theta = noise(length, 1), noise(length, 2)
    payload = encode_delta(codec, anchor, theta)
    assert payload.dtype == torch.uint8
    assert payload.shape == (encoded_bytes(codec, length),)

    delta = decode_delta(codec, anchor, payload)
    assert delta.dtype == (torch.float64 if codec == "f32" else torch.float32)
    difference = anchor.double() - theta.double()
    if codec == "f32":
        assert torch.equal(delta, difference)
    elif codec == "bf16":
        assert torch.equal(delta, (anchor - theta).bfloat16().float())
    else:
        bound = reference.error_bound(codec, array(anchor - theta))
        assert (np.abs(array(delta) - array(anchor - theta)) <= bound).all()


def test_payloads_are_as_small_as_promised() -> None:
    length = 2**20
    assert [encoded_bytes(codec, length) / length for codec in CODECS] == [4, 2, 1 + 2 / 128, 0.5 + 2 / 128]
    assert encoded_bytes("int4", 3 * ALIGN) == 3 * 2 + 2 * ALIGN  # an odd block has its low nibbles for itself


@pytest.mark.parametrize("length", [-128, 1, 127, 129])
def test_a_flat_vector_that_is_not_whole_blocks_is_a_mistake_of_the_caller(length: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 128 elements, not {length}"):
        encoded_bytes("int4", length)


def test_a_mistake_of_the_caller_is_named() -> None:
    flat = torch.zeros(ALIGN)
    with pytest.raises(ValueError, match="there is no codec 'int2'"):
        encode_delta("int2", flat, flat)
    with pytest.raises(ValueError, match=r"f32 vector, not torch\.float64"):
        encode_delta("int4", flat, flat.double())
    with pytest.raises(ValueError, match=r"vector, not torch.float32 \[2, 64\]"):
        encode_step("int4", flat.view(2, 64), flat)
    with pytest.raises(ValueError, match="128 and 256 elements have different lengths"):
        encode_step("int4", flat, torch.zeros(2 * ALIGN))


def test_the_bytes_of_a_payload_are_the_ones_of_the_protocol() -> None:
    values = torch.zeros(3 * ALIGN)
    values[0], values[1], values[2] = 3.5, -3.5, 0.5  # block 0: scale 0.5, low nibbles
    values[ALIGN] = 14.0  # block 1: scale 2, low nibbles
    values[2 * ALIGN], values[2 * ALIGN + 1] = -7.0, 2.0  # block 2: scale 1, high nibbles beside block 0
    expected = bytearray(2 * 3 + 2 * ALIGN)
    expected[0:6] = bytes([0x00, 0x3F, 0x00, 0x40, 0x80, 0x3F])
    expected[6:9] = bytes([0x97, 0x29, 0x01])
    expected[6 + ALIGN] = 0x07
    payload, delta = carried("int4", values)
    assert payload == bytes(expected)
    assert torch.equal(delta, values)

    payload, delta = carried("int8", torch.tensor([127.0, -127.0, 3.0] + [0.0] * 125))
    assert payload == bytes([0x80, 0x3F, 127, 129, 3]) + bytes(125)
    assert delta[:4].tolist() == [127.0, -127.0, 3.0, 0.0]


@pytest.mark.parametrize("codec", ["bf16", *QUANTIZED])
def test_what_is_read_from_the_bytes_one_by_one_is_what_the_codec_decodes(codec: str) -> None:
    values = noise(517 * ALIGN, 3) * torch.logspace(-20, 20, 517 * ALIGN)
    payload, delta = carried(codec, values)
    assert np.array_equal(array(delta), reference.decode(codec, payload, len(values)))
    if codec in QUANTIZED:
        levels = reference.LEVELS[codec]
        scales, codes = reference.read_payload(codec, payload, len(values))
        assert scales.tolist() == [reference.scale_of_block(b, levels) for b in values.view(-1, ALIGN).numpy()]
        assert (min(codes), max(codes)) == (-levels, levels)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("wrong", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 127, 128, 2 * 128 + 77, 1000 * 128, 2049 * 128 - 1])
def test_a_value_that_is_not_finite_is_not_sent(codec: str, wrong: float, place: int) -> None:
    anchor, theta = noise(2049 * ALIGN, 1), noise(2049 * ALIGN, 2)
    theta[place] = wrong
    for encode in (encode_delta, encode_step):
        with pytest.raises(Malformed) as caught:
            encode(codec, anchor, theta)
        assert caught.value.reason == "nonfinite"


@pytest.mark.parametrize("codec", QUANTIZED)
def test_a_value_too_large_to_be_carried_is_not_sent(codec: str) -> None:
    values = torch.zeros(ALIGN)
    values[3] = 3.4e38
    with pytest.raises(Malformed, match="too large"):
        carried(codec, values)
    values[3], values[4] = 3e38, -3e38  # the difference overflows
    with pytest.raises(Malformed, match="too large"):
        encode_step(codec, -values, values)


def test_finite_values_whose_sum_is_not_finite_are_still_finite() -> None:
    zero, large = torch.zeros(ALIGN), torch.full((ALIGN,), 3e38)
    for codec in ("f32", "bf16"):
        assert decode_delta(codec, zero, encode_delta(codec, zero, large)).isfinite().all()
        assert torch.allclose(encode_step(codec, zero, large)[1], large, rtol=0.01)


@pytest.mark.parametrize("codec", ["f32", "bf16"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_received_value_that_is_not_finite_is_refused(codec: str, wrong: float) -> None:
    values = noise(300 * ALIGN).to(torch.float32 if codec == "f32" else torch.bfloat16)
    values[-1] = wrong
    refused(codec, 300 * ALIGN, values.view(torch.uint8).numpy().tobytes(), "nonfinite")


def refused(codec: str, length: int, payload: bytes, reason: str) -> None:
    for receive in (decode_delta, apply_step):
        with pytest.raises(Malformed) as caught:
            receive(codec, torch.zeros(length), payload)
        assert caught.value.reason == reason


SCALES: dict[str, int] = {
    "NaN": 0x7FC0, "a NaN with a sign": 0xFFC0, "infinite": 0x7F80, "minus infinite": 0xFF80, "negative": 0xBF80,
    "minus zero": 0x8000, "subnormal": 0x0001, "just below 2^-100": 0x0D7F, "2^120": 0x7B80, "the largest": 0x7F7F,
}  # fmt: skip


@pytest.mark.parametrize("codec", QUANTIZED)
@pytest.mark.parametrize("wrong", SCALES)
def test_a_scale_that_no_encoder_writes_is_refused(codec: str, wrong: str) -> None:
    payload, _ = carried(codec, noise(5 * ALIGN))
    for block in (0, 4):
        refused(codec, 5 * ALIGN, set_scale(payload, block, SCALES[wrong]), "scale")


@pytest.mark.parametrize("codec", QUANTIZED)
def test_the_smallest_and_the_largest_scale_are_taken(codec: str) -> None:
    payload, _ = carried(codec, torch.full((ALIGN,), float(reference.LEVELS[codec])))
    for bits, scale in ((0x0D80, 2.0**-100), (0x7B7F, 2.0**120 * (1 - 2.0**-8))):
        delta = decode_delta(codec, torch.zeros(ALIGN), set_scale(payload, 0, bits))
        assert delta.tolist() == [scale * reference.LEVELS[codec]] * ALIGN


@pytest.mark.parametrize(("codec", "wrong"), [("int4", 0x08), ("int4", 0x80), ("int4", 0x88), ("int8", 0x80)])
def test_a_code_that_no_encoder_writes_is_refused(codec: str, wrong: int) -> None:
    length = 4 * ALIGN
    payload, _ = carried(codec, noise(length))
    for place in (8, len(payload) - 1):
        refused(codec, length, payload[:place] + bytes([wrong]) + payload[place + 1 :], "code")


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_of_another_size_is_refused(codec: str) -> None:
    payload = encode_delta(codec, noise(3 * ALIGN), noise(3 * ALIGN, 1)).numpy().tobytes()
    for wrong in (b"", payload[:-1], payload + b"\0", payload * 2):
        refused(codec, 3 * ALIGN, wrong, "size")
    refused(codec, 0, payload, "size")


@pytest.mark.parametrize("codec", QUANTIZED)
def test_values_between_two_codes_go_to_the_nearer_one_and_ties_to_the_even_one(codec: str) -> None:
    levels = reference.LEVELS[codec]
    values = torch.zeros(ALIGN)
    values[:8] = torch.tensor([levels, 0.5, 1.5, 2.5, -0.5, -1.5, 1.4999, -3.5001])
    assert carried(codec, values)[1][:8].tolist() == [levels, 0, 2, 2, 0, -2, 1, -4]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts a process's threads in /proc")
def test_encoding_and_decoding_start_no_threads_beside_those_that_train(tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    script.write_text(
        "import os, numpy, torch\n"
        "from decoupled_diloco.common import codec\n"
        "torch.set_num_threads(4)\n"
        "vector = torch.from_numpy(numpy.ones(5 * 2**20, dtype=numpy.float32))\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "before = count()\n"
        "for name in ('f32', 'bf16', 'int8', 'int4'):\n"
        "    codec.decode_delta(name, vector, codec.encode_delta(name, vector, vector))\n"
        "    codec.apply_step(name, vector, codec.encode_step(name, vector, vector)[0])\n"
        "print(count() - before)\n"
    )
    done = subprocess.run([sys.executable, "-P", script], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("0", "")


def test_a_payload_may_be_a_tensor_as_well_as_bytes() -> None:
    values = noise(3 * ALIGN)
    payload = encode_delta("int4", values, torch.zeros_like(values))
    assert torch.equal(decode_delta("int4", values, payload), decode_delta("int4", values, payload.numpy().tobytes()))


@given(data=st.data(), codec=st.sampled_from(CODECS), blocks=st.integers(0, 5))
@settings(max_examples=examples(150))
def test_any_bytes_give_finite_values_or_a_refusal_and_both_receivers_agree(
    data: st.DataObject, codec: str, blocks: int
) -> None:
    size = encoded_bytes(codec, blocks * ALIGN)
    payload = bytearray(data.draw(st.randoms(use_true_random=False)).randbytes(size))
    if codec in QUANTIZED and data.draw(st.booleans()):  # otherwise nearly every one fails at its scales
        for block in range(blocks):
            payload[2 * block : 2 * block + 2] = data.draw(st.integers(0x0D00, 0x7BFF)).to_bytes(2, "little")
    public = torch.zeros(blocks * ALIGN)
    outcomes: list[str] = []
    receivers: list[Callable[[str, Tensor, bytes], Tensor]] = [decode_delta, apply_step]
    for receive in receivers:
        try:
            assert receive(codec, public, bytes(payload)).isfinite().all()
            outcomes.append("taken")
        except Malformed as wrong:
            outcomes.append(wrong.reason)
    assert outcomes[0] == outcomes[1]


def test_a_step_that_would_overflow_is_refused_by_its_receiver() -> None:
    payload, _ = carried("int4", torch.full((ALIGN,), 7 * 2.0**119))
    with pytest.raises(Malformed, match="too large"):
        apply_step("int4", torch.full((ALIGN,), 3.4e38), payload)
