"""Global model: merges, payloads, version numbers, and the model file."""

from __future__ import annotations

import hashlib
import json
import weakref
from pathlib import Path

import pytest
import torch
from decoupled_diloco.common.codec import apply_step, digest, encode_delta
from decoupled_diloco.common.config import CODECS
from decoupled_diloco.common.errors import Malformed, SettingError
from decoupled_diloco.common.fragments import Layout, TensorSpec, balanced_plan
from decoupled_diloco.syncer.global_model import GlobalModel, cast_through
from decoupled_diloco.syncer.model_file import model_tensors, read_model, save_model
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from states import LAYOUT, PLAN, STATIC, advance, delta, fresh, settings, vectors
from torch import nn


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


# --- a merge and what it sends ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_receiver_of_every_update_holds_the_same_bits_as_the_syncer(
    codec: str, momentum: float, generator: torch.Generator
) -> None:
    state = fresh(codec_down=codec, outer_momentum=momentum, outer_lr=0.7)
    held = [vector.clone() for vector in vectors()]
    for round_ in range(5):
        for p in range(PLAN.P):
            merged = state.merge(p, [delta(state, p, generator), delta(state, p, generator)], [1.0, 2.0])
            assert (merged.base_version, merged.version) == (round_, round_ + 1)
            held[p] = apply_step(codec, held[p], merged.payload)
            assert digest(held[p]) == merged.digest
            version, keyframe, keyframe_digest = state.keyframe(p)
            assert (version, keyframe_digest) == (merged.version, merged.digest)
            assert held[p].numpy().tobytes() == bytes(keyframe)
            assert state.last_update(p) is merged


@pytest.mark.parametrize("codec", CODECS)
def test_what_the_code_could_not_carry_is_carried_later(codec: str, generator: torch.Generator) -> None:
    state = fresh(codec_down=codec)
    exact = [vector.double() for vector in vectors()]
    for _ in range(30):
        for p in range(PLAN.P):
            step = delta(state, p, generator)
            exact[p] -= step.double()
            state.merge(p, [step], [1.0])
    for p in range(PLAN.P):
        assert torch.allclose(state.public[p].double() + state.residual[p].double(), exact[p], rtol=0, atol=1e-5)
        assert (state.public[p].double() - exact[p]).abs().max() < 0.02, "the residual must not add up"


def test_with_one_learner_and_f32_both_ways_the_global_model_is_the_learners(generator: torch.Generator) -> None:
    state = fresh(codec_up="f32", codec_down="f32")
    for p, part in enumerate(PLAN.fragments):
        anchor = state.anchor(p, 0)
        assert anchor is not None
        theta = cast_through(part, anchor + 1e-3 * vectors(seed=3)[p])
        payload = encode_delta("f32", anchor, theta).numpy().tobytes()
        state.merge(p, [state.decode(p, "f32", payload, 0)], [5.0])
        assert torch.equal(state.public[p], theta)
        assert not state.residual[p].any()


def test_payloads_and_keyframes_are_read_only_and_never_change_after_they_were_handed_out(
    generator: torch.Generator,
) -> None:
    for codec in CODECS:
        state = fresh(codec_down=codec, outer_momentum=0.9)
        handed_out: list[tuple[memoryview, bytes]] = []
        for _ in range(4):
            for p in range(PLAN.P):
                merged = state.merge(p, [delta(state, p, generator), delta(state, p, generator)], [1.0, 2.0])
                for view in (merged.payload, state.keyframe(p)[1]):
                    assert (view.readonly, view.format, view.ndim) == (True, "B", 1)
                    handed_out.append((view, bytes(view)))
        state.finalize()
        state.renumber([9] * PLAN.P)
        advance(state)
        assert all(view == copy for view, copy in handed_out)


def test_a_snapshot_stays_what_it_was_while_merges_continue(generator: torch.Generator) -> None:
    state = fresh(outer_momentum=0.9, codec_up="f32")
    advance(state, rounds=2)
    snapshot = state.snapshot()
    groups = (snapshot.public, snapshot.residual, snapshot.momentum or ())
    assert all(len(group) == PLAN.P for group in groups)
    before = [tensor.clone() for group in groups for tensor in group]
    advance(state, rounds=3)
    state.finalize()
    state.renumber([50, 50, 50])
    assert snapshot.versions == (2, 2, 2)
    after = [tensor for group in groups for tensor in group]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    held = [*state.public, *state.residual, *(state.momentum or [])]
    assert not any(torch.equal(old, new) for old, new in zip(before, held, strict=True) if old.any())


@pytest.mark.parametrize(("codec", "kept"), [("int4", 1), ("f32", 3)])
def test_only_the_versions_that_a_late_delta_may_need_are_kept(codec: str, kept: int) -> None:
    state = fresh(codec_up=codec, codec_down=codec)
    seen = [weakref.ref(state.public[0])]
    for _ in range(10):
        advance(state)
        seen.append(weakref.ref(state.public[0]))
    assert [ref() is not None for ref in seen] == [False] * (11 - kept) + [True] * kept


def test_version_zero_is_copied_so_that_its_buffer_may_be_used_again() -> None:
    mine = vectors()
    state = GlobalModel.from_version_zero(PLAN, settings(), mine, memoryview(STATIC))
    before = state.model_hash()
    for vector in mine:
        vector.fill_(1)
    assert state.model_hash() == before


def test_the_holes_between_tensors_stay_zero_whatever_a_learner_sends(generator: torch.Generator) -> None:
    holes = 0
    for codec in CODECS:
        state = fresh(codec_up=codec, codec_down=codec, outer_momentum=0.5)
        for p, part in enumerate(PLAN.fragments):
            noisy = state.public[p] + torch.randn(part.length, generator=generator)
            payload = encode_delta(codec, state.public[p], noisy).numpy().tobytes()
            for _ in range(2):
                state.merge(p, [state.decode(p, codec, payload, 0), delta(state, p, generator)], [1.0, 1.0])
            hole = torch.ones(part.length, dtype=torch.bool)
            for span in part.spans:
                hole[span.offset : span.stop] = False
            holes += int(hole.sum())
            assert not state.public[p][hole].any()
            assert not state.residual[p][hole].any()
    assert holes


# --- what is refused, and changes nothing ----------------------------------------------------------------------------
def test_a_merge_that_leaves_the_finite_numbers_changes_nothing(generator: torch.Generator) -> None:
    f16 = next(p for p, part in enumerate(PLAN.fragments) if any(s.tensor.dtype == "float16" for s in part.spans))
    for codec in CODECS:
        for p, size in ((0, 3.3e38), (f16, 1e5)):
            state = fresh(codec_down=codec, outer_momentum=0.9, outer_lr=2.0)
            advance(state)
            before, hash_ = state.snapshot(), state.model_hash()
            part = PLAN.fragments[p]
            huge = torch.zeros(part.length)
            for span in part.spans:
                huge[span.offset : span.stop] = size
            with pytest.raises(Malformed, match="nonfinite"):
                state.merge(p, [huge], [1.0])
            after = state.snapshot()
            assert state.model_hash() == hash_
            assert after.versions == before.versions
            assert all(a is b for a, b in zip(after.public, before.public, strict=True))
            assert all(a is b for a, b in zip(after.residual, before.residual, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(after.momentum or (), before.momentum or (), strict=True))
            advance(state)
            assert state.versions == [2, 2, 2]


def test_a_delta_of_another_codec_size_or_value_is_malformed() -> None:
    state = fresh(codec_up="int8")
    good = encode_delta("int8", state.public[0], state.public[0] * 0.9).numpy().tobytes()
    state.decode(0, "int8", good, 0)
    for codec, payload, reason in (
        ("f32", good, "codec"),
        ("int8", good[:-1], "size"),
        ("int8", good + b"\0", "size"),
        ("int8", b"\x80\x7f" + good[2:], "scale"),
    ):
        with pytest.raises(Malformed) as caught:
            state.decode(0, codec, payload, 0)
        assert caught.value.reason == reason
    state = fresh(codec_up="f32")
    with pytest.raises(Malformed, match="nonfinite"):
        state.decode(0, "f32", (state.public[0] * float("nan")).numpy().tobytes(), 0)


def test_an_f32_delta_may_be_two_versions_late_and_no_more() -> None:
    state = fresh(codec_up="f32")
    history = {0: vectors()[0]}
    for _ in range(4):
        advance(state)
        history[state.versions[0]] = state.public[0]
    for version in (4, 3, 2):
        anchor = state.anchor(0, version)
        assert anchor is not None
        assert torch.equal(anchor, cast_through(PLAN.fragments[0], history[version]))
    for version in (0, 1, 5, 2**53):
        with pytest.raises(Malformed, match="stale"):
            state.anchor(0, version)
    assert fresh(codec_up="int4").anchor(0, 0) is None


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("nan", "nonfinite"), ("beyond f16", "nonfinite"), ("hole", "holes"), ("short", "size"), ("f64", "size"),
     ("one too few", "size"), ("static", "size")],
)  # fmt: skip
def test_a_version_zero_that_does_not_fit_is_malformed(fault: str, reason: str) -> None:
    bad, static = vectors(), STATIC
    span = next(s for part in PLAN.fragments for s in part.spans if s.tensor.dtype == "float16")
    p = next(p for p, part in enumerate(PLAN.fragments) if span in part.spans)
    if fault == "nan":
        bad[p][0] = float("nan")
    elif fault == "beyond f16":
        bad[p][span.offset] = 1e5
    elif fault == "hole":
        q = next(q for q, part in enumerate(PLAN.fragments) if part.spans[-1].stop < part.length)
        bad[q][-1] = 1
    elif fault == "short":
        bad[p] = bad[p][:-128]
    elif fault == "f64":
        bad[p] = bad[p].double()
    elif fault == "one too few":
        bad = bad[:-1]
    else:
        static = static[:-1]
    with pytest.raises(Malformed) as caught:
        GlobalModel.from_version_zero(PLAN, settings(), bad, static)
    assert caught.value.reason == reason


def test_a_snapshot_of_another_run_or_another_plan_is_refused() -> None:
    snapshot = fresh().snapshot()
    with pytest.raises(SettingError, match="tiny"):
        GlobalModel(PLAN, settings(run="other"), snapshot, STATIC)
    with pytest.raises(SettingError, match="number of fragments"):
        GlobalModel(balanced_plan(LAYOUT, 4), settings(fragments=4), snapshot, STATIC)


# --- finishing and numbering -----------------------------------------------------------------------------------------
def test_the_final_version_is_theta_and_what_was_left_over() -> None:
    state = fresh(codec_down="int4")
    advance(state, rounds=3)
    expected = [public + rest for public, rest in zip(state.public, state.residual, strict=True)]
    before = state.model_hash()
    state.finalize()
    assert state.versions == [4, 4, 4]
    assert all(torch.equal(public, want) for public, want in zip(state.public, expected, strict=True))
    assert not any(rest.any() for rest in state.residual)
    assert state.last_update(0) is None
    assert state.model_hash() != before
    running = hashlib.sha256()
    for p in range(PLAN.P):
        version, keyframe, keyframe_digest = state.keyframe(p)
        assert version == 4
        assert keyframe_digest == hashlib.sha256(keyframe).hexdigest()
        running.update(keyframe)
    assert state.model_hash() == running.hexdigest()


def test_the_static_part_is_a_keyframe_that_never_changes() -> None:
    state = fresh()
    advance(state, rounds=2)
    state.finalize()
    version, raw, raw_digest = state.keyframe(PLAN.static_index)
    assert (version, bytes(raw), raw_digest) == (0, STATIC, hashlib.sha256(STATIC).hexdigest())


def test_numbering_continues_above_everything_ever_seen_and_never_backwards() -> None:
    state = fresh(codec_up="f32")
    advance(state, rounds=2)
    contents = state.model_hash()
    state.renumber([10, 2, 7])
    assert state.model_hash() == contents
    assert [state.keyframe(p)[0] for p in range(3)] == [10, 2, 7]
    assert state.last_update(0) is None
    assert state.anchor(0, 10) is not None
    with pytest.raises(Malformed, match="stale"):
        state.anchor(0, 2)
    advance(state)
    assert state.versions == [11, 3, 8]
    for bad in ([10, 3, 8], [20, 20]):
        with pytest.raises(ValueError, match="cannot go"):
            state.renumber(bad)


# --- the file that people load ---------------------------------------------------------------------------------------
class Model(nn.Module):
    """A model whose layout is `LAYOUT`."""

    mask: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.hidden = nn.Linear(16, 48, bias=False, dtype=torch.bfloat16)
        self.narrow = nn.Linear(48, 16, bias=False, dtype=torch.float16)
        self.prime = nn.Parameter(torch.zeros(131))
        self.scalar = nn.Parameter(torch.tensor(0.0))
        self.one = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        self.nothing = nn.Parameter(torch.empty(0, 8))
        self.frozen = nn.Linear(3, 5, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("count", torch.tensor(0))


def test_plain_torch_loads_the_exported_file_and_tied_weights_stay_tied(tmp_path: Path) -> None:
    state = fresh()
    advance(state, rounds=2)
    path = tmp_path / "Modell für 🦙.safetensors"
    save_model(state, path)
    model = Model()
    model.load_state_dict(load_file(path))
    assert model.head.weight is model.embedding.weight
    expected = model_tensors(state)
    for name, tensor in model.state_dict().items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert torch.equal(tensor, expected[name]), name
    assert model.frozen.weight.view(torch.uint8).numpy().tobytes() == STATIC[:30]
    assert model.mask.tolist() == [True, False, True]
    assert int(model.count) == 77
    for part, public in zip(PLAN.fragments, state.public, strict=True):
        for span in part.spans:
            flat = expected[span.tensor.name].float().view(-1)
            assert torch.equal(flat, cast_through(part, public)[span.offset : span.stop])
    load_model(Model(), path, strict=False)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["tied"]) == [["embedding.weight", "head.weight"]]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode, "readable for whom the umask says"


def test_an_exported_model_seeds_a_run_with_the_same_bits(tmp_path: Path) -> None:
    state = fresh(codec_down="f32")
    save_model(state, tmp_path / "model.safetensors")
    read, static = read_model(PLAN, tmp_path / "model.safetensors")
    assert static == STATIC
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(read, vectors(), strict=True))


def test_a_model_file_may_come_from_a_wrapped_model_in_another_float_type(tmp_path: Path) -> None:
    tensors = {f"module._orig_mod.{name}": tensor for name, tensor in model_tensors(fresh()).items()}
    del tensors["module._orig_mod.embedding.weight"]
    wide = {name: t.double() if "weight" in name and "frozen" not in name else t for name, t in tensors.items()}
    save_file(wide, tmp_path / "model.safetensors")
    read, _ = read_model(PLAN, tmp_path / "model.safetensors")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(read, vectors(), strict=True))


@pytest.mark.parametrize("front", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_a_model_whose_own_modules_are_called_like_wrappers_is_read_from_any_file(tmp_path: Path, front: str) -> None:
    names = ("module.weight", "weight", "_orig_mod.weight", "a.module._orig_mod.weight", "module.module.weight")
    layout = Layout(tuple(TensorSpec(name=name, shape=(3,), dtype="float32") for name in names))
    plan = balanced_plan(layout, 1)
    tensors = {f"{front}{name}": torch.full((3,), float(i)) for i, name in enumerate(names)}
    save_file(tensors, tmp_path / "model.safetensors")
    (vector,), _ = read_model(plan, tmp_path / "model.safetensors")
    assert [vector[span.offset].item() for span in plan.fragments[0].spans] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [("missing", "has no prime"), ("shape", r"prime \[130\]"), ("type", "count"), ("nan", "prime that is not finite"),
     ("absent", "cannot read"), ("garbage", "cannot read")],
)  # fmt: skip
def test_a_model_file_that_does_not_fit_is_refused_by_name(tmp_path: Path, fault: str, sentence: str) -> None:
    tensors, path = model_tensors(fresh()), tmp_path / "model.safetensors"
    if fault == "missing":
        del tensors["prime"]
    elif fault == "shape":
        tensors["prime"] = torch.zeros(130)
    elif fault == "type":
        tensors["count"] = torch.tensor(7.0)
    elif fault == "nan":
        tensors["prime"][3] = float("inf")
    if fault == "garbage":
        path.write_bytes(b"x" * 100)
    elif fault != "absent":
        save_file(tensors, path)
    with pytest.raises(SettingError, match=sentence):
        read_model(PLAN, path)


def test_a_model_that_cannot_be_written_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot write the model to"):
        save_model(fresh(), tmp_path / "no such folder" / "model.safetensors")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(SettingError, match="cannot write the model to"):
        save_model(fresh(), tmp_path / "model.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
