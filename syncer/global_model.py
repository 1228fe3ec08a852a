"""The syncer's global model: public Theta, residual e (error feedback), outer momentum, versions.

Theta is what every learner can reconstruct. The outer step starts from Theta + e, its result is encoded for the
learners, Theta moves by exactly what they decode, and the quantization error becomes the new e.

Tensors are never modified: a merge replaces them. So a snapshot is a list of references, and payloads and keyframes can
be sent without a copy while the next merge runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.codec import decode_delta, digest, encode_step, model_hash
from ..common.config import MAX_LAG, RunSettings
from ..common.errors import Malformed, SettingError
from ..common.fragments import Fragment, Plan
from .aggregate import merge as merge_deltas
from .aggregate import norm
from .outer_optimizer import outer_step


@dataclass(frozen=True, kw_only=True)
class MergeResult:
    """One merge, ready to be sent. The payload is read-only and never changes."""

    version: int
    base_version: int
    payload: memoryview
    """The step from `base_version` to `version`, encoded with the run's codec_down."""
    digest: str
    """sha256 (hex) of the public fragment after this step."""
    delta_norm: float
    """L2 norm of the merged outer gradient, before the outer step."""


@dataclass(frozen=True, kw_only=True)
class StaticOrigin:
    """Origin of static tensors that differ from version 0."""

    learner: str
    names: tuple[str, ...]
    """Tensors that this learner's training had changed."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The global model at one moment, as references to tensors that are never modified."""

    run: str
    plan_digest: str
    versions: tuple[int, ...]
    public: tuple[Tensor, ...]
    """One flat f32 vector per fragment, [fragment.length]; the same for residual and momentum."""
    residual: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...] | None


class GlobalModel:
    """The global model, fragment by fragment. Used by one thread; its results may be read by any thread."""

    def __init__(self, plan: Plan, settings: RunSettings, snapshot: Snapshot, static: bytes) -> None:
        """Take over the snapshot's tensors, which must not be modified afterwards. SettingError if the plan differs."""
        if (snapshot.run, snapshot.plan_digest) != (settings.run, plan.digest):
            raise SettingError(
                f"this global state belongs to run {snapshot.run!r} with another model or another number of fragments; "
                "resume with the run's original settings, or start a new run in another directory"
            )
        self.plan = plan
        self.settings = settings
        self.static = static
        self.static_origin: StaticOrigin | None = None
        """None: they are those of version 0."""
        self.versions = list(snapshot.versions)
        self.public = list(snapshot.public)
        self.residual = list(snapshot.residual)
        self.momentum: list[Tensor] | None = None
        if settings.outer_momentum > 0:
            self.momentum = list(snapshot.momentum or [torch.zeros_like(vector) for vector in self.public])
        self._digests: list[str] = []
        self._updates: list[MergeResult | None] = []
        self._anchors: list[dict[int, Tensor]] = []
        self._begin_numbering()

    @classmethod
    def from_version_zero(
        cls, plan: Plan, settings: RunSettings, vectors: Sequence[Tensor], static: bytes | memoryview
    ) -> GlobalModel:
        """Version 0 from flat f32 vectors [fragment.length], copied. Malformed if they do not match the plan."""
        check_model(plan, vectors, static)
        public = tuple(vector.clone() for vector in vectors)
        snapshot = Snapshot(
            run=settings.run,
            plan_digest=plan.digest,
            versions=(0,) * plan.P,
            public=public,
            residual=tuple(torch.zeros_like(vector) for vector in public),
            momentum=None,
        )
        return cls(plan, settings, snapshot, bytes(static))

    def anchor(self, fragment: int, base_version: int) -> Tensor | None:
        """The base of a learner's delta at `base_version`: Theta cast through the parameters' dtypes, flat f32.

        None unless codec_up is f32: only then learners send theta itself, and the difference is computed here.
        Malformed if that version is not available (any more, or yet).
        """
        if self.settings.codec_up != "f32":
            return None
        public = self._anchors[fragment].get(base_version)
        if public is None:
            raise Malformed("stale", f"version {base_version} of fragment {fragment}, now {self.versions[fragment]}")
        return cast_through(self.plan.fragments[fragment], public)

    def decode(self, fragment: int, codec: str, payload: bytes | memoryview, base_version: int) -> Tensor:
        """The outer gradient (anchor - theta) of a Delta's payload, flat [fragment.length]: f64 from f32, else f32.

        Malformed for a wrong codec, a wrong size, an unknown base version or a non-finite value.
        """
        if codec != self.settings.codec_up:
            raise Malformed("codec", f"{codec}, but the run uses {self.settings.codec_up}")
        anchor = self.anchor(fragment, base_version)
        return decode_delta(codec, self.public[fragment] if anchor is None else anchor, payload)

    def merge(self, fragment: int, deltas: Sequence[Tensor], weights: Sequence[float]) -> MergeResult:
        """Merge outer gradients (sorted by contributor), take the outer step, publish the next version
        (arXiv 2604.21428, section 3).

        Malformed, with the state unchanged, if the result is not finite, also after the cast to the parameters' dtypes.
        """
        part, settings = self.plan.fragments[fragment], self.settings
        delta = merge_deltas(part, deltas, weights)
        momentum = self.momentum[fragment].clone() if self.momentum is not None else None
        start = self.public[fragment] + self.residual[fragment]
        target = outer_step(start, delta, momentum, settings.outer_lr, settings.outer_momentum)
        _check_finite(cast_through(part, target))
        payload, public = encode_step(settings.codec_down, self.public[fragment], target)
        residual = target - public
        _check_finite(cast_through(part, public), residual, *([] if momentum is None else [momentum]))

        merged = MergeResult(
            version=self.versions[fragment] + 1,
            base_version=self.versions[fragment],
            payload=readable(payload),
            digest=digest(public),
            delta_norm=norm(delta),
        )
        self.residual[fragment] = residual
        if self.momentum is not None and momentum is not None:
            self.momentum[fragment] = momentum
        self._publish(fragment, merged.version, public, merged.digest)
        self._updates[fragment] = merged
        return merged

    def last_update(self, fragment: int) -> MergeResult | None:
        """The merge that made the current version; None after version 0, a checkpoint or `finalize`."""
        return self._updates[fragment]

    def keyframe(self, fragment: int) -> tuple[int, memoryview, str]:
        """Version, raw f32 bytes and their sha256 (hex); fragment P are the static tensors, with version 0."""
        if fragment == self.plan.static_index:
            return 0, memoryview(self.static), hashlib.sha256(self.static).hexdigest()
        if not self._digests[fragment]:
            self._digests[fragment] = digest(self.public[fragment])
        return self.versions[fragment], readable(self.public[fragment]), self._digests[fragment]

    def finalize(self) -> None:
        """Publish the final version of every fragment: Theta + e, rounded to f32, with zero residual."""
        for fragment in range(self.plan.P):
            public = self.public[fragment] + self.residual[fragment]
            self.residual[fragment] = torch.zeros_like(public)
            self._publish(fragment, self.versions[fragment] + 1, public, "")
            self._updates[fragment] = None

    def replace_static(self, learner: str, moved: Iterable[int], static: bytes) -> None:
        """Replace the static tensors by values of a learner whose training changed `moved` (indices in the layout)."""
        self.static = static
        names = tuple(self.plan.layout.static[index].name for index in sorted(moved))
        self.static_origin = StaticOrigin(learner=learner, names=names)

    def model_hash(self) -> str:
        """sha256 (hex) over the public fragments, in order."""
        return model_hash(self.public)

    def renumber(self, versions: Sequence[int]) -> None:
        """Continue from `versions` after a resume, above every version ever published. Contents stay.

        ValueError if a version would decrease.
        """
        if len(versions) != self.plan.P or any(new < old for new, old in zip(versions, self.versions, strict=True)):
            raise ValueError(f"versions cannot go from {self.versions} to {list(versions)}")
        self.versions = list(versions)
        self._begin_numbering()

    def snapshot(self) -> Snapshot:
        """The current state. Copies nothing: merges replace tensors, they do not modify them."""
        return Snapshot(
            run=self.settings.run,
            plan_digest=self.plan.digest,
            versions=tuple(self.versions),
            public=tuple(self.public),
            residual=tuple(self.residual),
            momentum=tuple(self.momentum) if self.momentum is not None else None,
        )

    def _begin_numbering(self) -> None:
        """Drop updates and anchors of all but the current versions."""
        keep = self.settings.codec_up == "f32"
        self._updates = [None] * self.plan.P
        self._digests = [""] * self.plan.P
        self._anchors = [{v: x} if keep else {} for v, x in zip(self.versions, self.public, strict=True)]

    def _publish(self, fragment: int, version: int, public: Tensor, digest_: str) -> None:
        self.versions[fragment] = version
        self.public[fragment] = public
        self._digests[fragment] = digest_
        if self.settings.codec_up == "f32":
            anchors = self._anchors[fragment]
            anchors[version] = public
            anchors.pop(version - MAX_LAG - 1, None)


def check_model(plan: Plan, vectors: Sequence[Tensor], static: bytes | memoryview) -> None:
    """Malformed unless `vectors` are the plan's flat f32 vectors, finite (also after the cast to the parameters' own
    dtypes) and zero between tensors, and `static` has the layout's size.
    """
    if len(vectors) != plan.P or len(static) != plan.layout.static_bytes:
        raise Malformed("size", f"{len(vectors)} of {plan.P} fragments, {len(static)} static bytes")
    for part, vector in zip(plan.fragments, vectors, strict=True):
        if vector.shape != (part.length,) or vector.dtype != torch.float32:
            raise Malformed("size", f"fragment {part.index} is {vector.dtype} {list(vector.shape)}, not {part.length}")
        _check_finite(cast_through(part, vector))
        stops = [span.stop for span in part.spans]
        starts = [span.offset for span in part.spans[1:]] + [part.length]
        if any(vector[stop:start].any() for stop, start in zip(stops, starts, strict=True)):
            raise Malformed("holes", f"fragment {part.index} is not zero between its tensors")


def cast_through(fragment: Fragment, public: Tensor) -> Tensor:
    """Flat f32 [fragment.length], each tensor rounded to its parameter's dtype and back to f32.

    `public` itself if every tensor is f32.
    """
    if all(span.tensor.dtype == "float32" for span in fragment.spans):
        return public
    rounded = public.clone()
    for span in fragment.spans:
        view = rounded[span.offset : span.stop]
        view.copy_(view.to(getattr(torch, span.tensor.dtype)))
    return rounded


def _check_finite(*tensors: Tensor) -> None:
    for tensor in tensors:
        low, high = torch.aminmax(tensor)  # both are NaN if any value is; much faster than isfinite().all()
        if not (low > -torch.inf and high < torch.inf):
            raise Malformed("nonfinite", "a parameter, a residual or a momentum")


def readable(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, read-only, without a copy."""
    return tensor.numpy().data.cast("B").toreadonly()
