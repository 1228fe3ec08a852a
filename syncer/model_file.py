"""Model file: the global model as one safetensors file with the names, shapes and dtypes of the user's model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..common.errors import SettingError
from ..common.fragments import WRAPPER_NAMES, Fragment, Plan, TensorSpec, strip_wrappers
from . import atomic_folder
from .global_model import GlobalModel


def model_tensors(model: GlobalModel) -> dict[str, Tensor]:
    """Every tensor of the model under each of its names, in layout order, in its own dtype and shape.

    Trained tensors come from public Theta, static ones from version 0 or the final buffers. Tied names get copies of
    their own, so that both `model.load_state_dict(load_file(path))` and the safetensors writer accept them.
    """
    found = _trained(model.plan, model.public) | _static(model.plan, model.static)
    tensors = {}
    for spec in model.plan.layout.tensors:
        tensor = found[spec.name] if spec.name in found else torch.empty(spec.shape, dtype=_dtype(spec), device="cpu")
        tensors[spec.name] = tensor
        tensors.update({name: tensor.clone() for name in spec.tied})
    return tensors


def save_model(model: GlobalModel, path: Path) -> None:
    """Write `model_tensors` to `path` atomically. SettingError, naming the path, if that fails.

    `load_state_dict` accepts the result of `load_file`; safetensors' `load_model` needs strict=False if names are tied
    (it expects each group under one name). The metadata entry `tied` is a JSON list of the groups.
    """
    tied = [[spec.name, *spec.tied] for spec in model.plan.layout.tensors if spec.tied]
    metadata = {"format": "pt", "run": model.settings.run, "tied": json.dumps(tied)}
    temporary = path.with_name(atomic_folder.WRITING + path.name)
    try:
        atomic_folder.write_tensors(temporary, model_tensors(model), metadata)
        atomic_folder.sync(temporary)
        temporary.replace(path)
        atomic_folder.sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise SettingError(f"cannot write the model to {path}: {error}") from error


def check_model_file(path: Path) -> None:
    """SettingError unless `path` is a readable safetensors file; does not check which model it holds."""
    try:
        with safe_open(path, framework="pt"):
            return
    except (OSError, SafetensorError) as error:
        raise SettingError(f"cannot read {path}: {error}") from error


def read_model(plan: Plan, path: Path) -> tuple[list[Tensor], bytes]:
    """Flat f32 vectors and static bytes for version 0 from a safetensors file with the layout's names.

    A tied tensor may have any of its names, a trained one any floating dtype. Names that the layout does not have and
    the prefixes of a wrapper in which the model was saved are ignored. SettingError names the file and the first wrong
    tensor.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = _names_in_file(plan, list(file.keys()))
            found = {}
            for spec in plan.layout.tensors:
                name = next((names[n] for n in (spec.name, *spec.tied) if n in names), None)
                if name is None:
                    raise SettingError(f"{path} has no {spec.describe()}; give a file of the same model")
                found[spec.name] = _checked(spec, file.get_tensor(name), path)
    except (OSError, SafetensorError) as error:
        raise SettingError(f"cannot read {path}: {error}") from error
    vectors = [_flatten(part, found) for part in plan.fragments]
    static = b"".join(found[spec.name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                      for spec in plan.layout.static if spec.numel)  # fmt: skip
    return vectors, static


def _names_in_file(plan: Plan, names: Sequence[str]) -> dict[str, str]:
    """Name in the layout -> name in the file. As little as possible is stripped as a wrapper's prefix, since the
    model's own modules may have such names: first nothing, then a prefix common to all, then each wrapper's name.
    """
    wanted = [(spec.name, *spec.tied) for spec in plan.layout.tensors]
    readings, shorter = [{name: name for name in names}], {name: name for name in names}
    while shorter and len(fronts := {name.partition(".")[0] for name in shorter}) == 1 and fronts <= WRAPPER_NAMES:
        shorter = {name.partition(".")[2]: full for name, full in shorter.items()}
        readings.append(shorter)
    readings.append({strip_wrappers(name): name for name in names})
    return max(readings, key=lambda found: sum(any(name in found for name in group) for group in wanted))


def _trained(plan: Plan, public: Sequence[Tensor]) -> dict[str, Tensor]:
    return {
        span.tensor.name: vector[span.offset : span.stop].to(_dtype(span.tensor), copy=True).view(span.tensor.shape)
        for part, vector in zip(plan.fragments, public, strict=True)
        for span in part.spans
    }


def _static(plan: Plan, static: bytes) -> dict[str, Tensor]:
    """The frozen parameters and buffers, concatenated in layout order."""
    tensors, offset = {}, 0
    for spec in plan.layout.static:
        part = bytearray(static[offset : offset + spec.bytes])
        flat = torch.frombuffer(part, dtype=_dtype(spec)) if part else torch.empty(0, dtype=_dtype(spec), device="cpu")
        tensors[spec.name] = flat.view(spec.shape)
        offset += spec.bytes
    return tensors


def _flatten(part: Fragment, found: dict[str, Tensor]) -> Tensor:
    vector = torch.zeros(part.length, dtype=torch.float32, device="cpu")
    for span in part.spans:
        vector[span.offset : span.stop] = found[span.tensor.name].reshape(-1)
    return vector


def _checked(spec: TensorSpec, tensor: Tensor, path: Path) -> Tensor:
    """`tensor` in the layout's dtype. SettingError if it does not match the layout, or is not finite."""
    actual = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    fits = tensor.dtype.is_floating_point if spec.kind == "trainable" else tensor.dtype == _dtype(spec)
    if tuple(tensor.shape) != spec.shape or not fits:
        raise SettingError(
            f"{path} has {spec.name} {actual}, the model {spec.describe()}; give a file of the same model"
        )
    tensor = tensor.to(_dtype(spec))
    if spec.kind == "trainable" and not torch.isfinite(tensor).all():
        raise SettingError(f"{path} has a value in {spec.name} that is not finite in {spec.dtype}")
    return tensor


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype
