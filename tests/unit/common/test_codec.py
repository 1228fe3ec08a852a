"""The codec: what arrives is what was sent within the stated bound, the same bits everywhere, and nothing hostile."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import reference
import torch
from decoupled_diloco.common import codec as codec_module
from decoupled_diloco.common.codec import (
    apply_step,
    decode_delta,
    digest,
    encode_delta,
    encode_step,
    encoded_bytes,
    model_hash,
)
from decoupled_diloco.common.config import CODECS
from decoupled_diloco.common.errors import Malformed
from decoupled_diloco.common.fragments import ALIGN, Fragment, Layout, TensorSpec, balanced_plan
from hypothesis import example, given, settings
from hypothesis import strategies as st
from searching import examples
from torch import Tensor

QUANTIZED = ("int8", "int4")
BLOCKS = [0, 1, 2, 3, 7, 255, 256, 257, 511, 513, 2047, 2049, 4101]
"""Around the sizes that one operation and one band of scales handle, odd and even, and none at all."""


def noise(length: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)) * size


def carried(codec: str, values: Tensor) -> tuple[bytes, Tensor]:
    """What a delta of exactly `values` looks like on the wire, and after it; not for f32, which carries theta."""
    payload = encode_delta(codec, values, torch.zeros_like(values)).numpy().tobytes()
    return payload, decode_delta(codec, values, payload)


def array(values: Tensor) -> npt.NDArray[np.float64]:
    return values.numpy().astype(np.float64)


def set_scale(payload: bytes, block: int, bits: int) -> bytes:
    return payload[: 2 * block] + bits.to_bytes(2, "little") + payload[2 * block + 2 :]


# --- sizes and format ------------------------------------------------------------------------------------------------
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


# --- any values ------------------------------------------------------------------------------------------------------
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


@given(values=wild_blocks(), codec=st.sampled_from(QUANTIZED))
@example(values=torch.full((ALIGN,), 1e-30), codec="int4")
@example(values=torch.full((ALIGN,), 1e-28), codec="int8")
@example(values=torch.tensor([1e30] + [1e-3] * 127), codec="int4")
@example(values=torch.tensor([1e-3] * 255 + [-1e30]), codec="int8")
@settings(max_examples=examples(150))
def test_no_element_is_further_off_than_half_its_blocks_scale(values: Tensor, codec: str) -> None:
    payload, delta = carried(codec, values)
    assert delta.isfinite().all()
    assert (np.abs(array(delta) - array(values)) <= reference.error_bound(codec, array(values))).all()
    assert np.array_equal(array(delta), reference.decode(codec, payload, len(values)))
    assert (delta[values == 0] == 0).all()


@given(values=wild_blocks())
@settings(max_examples=examples(60))
def test_what_four_bits_carried_once_they_carry_again_without_a_loss(values: Tensor) -> None:
    payload, once = carried("int4", values)
    again, twice = carried("int4", once)
    assert torch.equal(twice, once)
    assert again == payload


@pytest.mark.parametrize("codec", CODECS)
def test_a_delta_of_exactly_zero_stays_exactly_zero(codec: str) -> None:
    theta = noise(5 * ALIGN)
    assert not decode_delta(codec, theta, encode_delta(codec, theta, theta)).any()


@pytest.mark.parametrize("codec", QUANTIZED)
def test_an_outlier_costs_its_own_block_and_no_other(codec: str) -> None:
    values = torch.full((3 * ALIGN,), 1e-3)
    values[ALIGN + 5] = 1e30
    _, delta = carried(codec, values)
    assert torch.equal(delta[:ALIGN], delta[2 * ALIGN :])
    assert delta[0] == pytest.approx(1e-3, rel=0.01)
    assert delta[ALIGN + 5] == pytest.approx(1e30, rel=0.01)
    assert delta[ALIGN] == 0


@given(
    shapes=st.lists(
        st.sampled_from([(), (1,), (0, 8), (2,), (127,), (131,), (521,), (7, 37), (128,), (4, 32), (33_013,)]),
        min_size=1,
        max_size=6,
    ).filter(lambda shapes: any(math.prod(shape) for shape in shapes)),
    codec=st.sampled_from(CODECS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=examples(60))
def test_tensors_of_any_shape_come_through_and_the_holes_between_them_stay_zero(
    shapes: list[tuple[int, ...]], codec: str, seed: int
) -> None:
    specs = tuple(TensorSpec(name=f"t{i}", shape=shape, dtype="float32") for i, shape in enumerate(shapes))
    plan = balanced_plan(Layout(specs), 1)
    tensors = {spec.name: noise(spec.numel, seed + i).view(spec.shape) for i, spec in enumerate(plan.layout.trainable)}
    public = torch.zeros(plan.fragments[0].length)
    target = flat(plan.fragments[0], tensors)
    payload, new = encode_step(codec, public, target)
    assert torch.equal(new, apply_step(codec, public, payload))
    holes = torch.ones(len(new), dtype=torch.bool)
    for slot in plan.fragments[0].slots:
        holes[slot.offset : slot.stop] = False
        back, sent = new[slot.offset : slot.stop].view(slot.tensor.shape), tensors[slot.tensor.name]
        assert torch.allclose(back, sent, rtol=0, atol=float(sent.abs().max()) / 13)
    assert not new[holes].any()


def flat(fragment: Fragment, tensors: dict[str, Tensor]) -> Tensor:
    vector = torch.zeros(fragment.length)
    for slot in fragment.slots:
        vector[slot.offset : slot.stop] = tensors[slot.tensor.name].reshape(-1)
    return vector


# --- the same bits everywhere ----------------------------------------------------------------------------------------
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


def test_the_sender_may_go_on_writing_where_it_encoded_from() -> None:
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


# --- what must not enter ---------------------------------------------------------------------------------------------
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
