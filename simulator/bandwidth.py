"""Bandwidth model: the Gbit/s between sites at which chips compute a given share of the time.

Two forms, which answer different questions. `published`: closed forms that reproduce arXiv 2604.21428, Table 13 (a ring
all-reduce among sites; its figures for the decoupled system behave like H = 100, whatever the text says of H).
`this system`: the size of our own messages, header for header, through our own broker, broadcast included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..common.codec import encoded_bytes
from ..common.config import BEAT_SECONDS, RunSettings, TaskSettings
from ..common.fragments import ALIGN
from ..common.wire import (
    Alive,
    Beat,
    Call,
    Chunked,
    Delta,
    Keyframe,
    Message,
    Update,
    chunk_count,
    encode,
)
from .settings import LinkModel

Method = Literal["data-parallel", "diloco", "streaming", "decoupled"]
METHODS: tuple[Method, ...] = ("data-parallel", "diloco", "streaming", "decoupled")
BITS: dict[str, int] = {"f32": 32, "bf16": 16, "int8": 8, "int4": 4}
PUBLISHED_SYNC_EVERY, PUBLISHED_HIDDEN_STEPS = 100.0, 36.5
"""What the paper's decoupled figures imply: one model in a number of steps, of which a part hides its transfer."""
BACKWARD_SHARE = 2 / 3
"""Of a step: the backward pass, behind which data-parallel hides its all-reduce."""

TABLE_13: dict[tuple[int, int, str], tuple[float, ...]] = {
    (1, 2, "data-parallel"): (49, 81, 104, 113),
    (1, 2, "bf16"): (0.58, 1.2, 1.7, 1.9),
    (1, 2, "int4"): (0.15, 0.29, 0.43, 0.49),
    (5, 2, "data-parallel"): (9.5, 16, 21, 23),
    (5, 2, "bf16"): (0.12, 0.23, 0.34, 0.39),
    (5, 2, "int4"): (0.03, 0.06, 0.08, 0.10),
    (1, 8, "data-parallel"): (85, 140, 183, 198),
    (1, 8, "bf16"): (1.0, 2.0, 3.0, 3.3),
    (1, 8, "int4"): (0.26, 0.51, 0.75, 0.84),
    (5, 8, "data-parallel"): (17, 28, 37, 40),
    (5, 8, "bf16"): (0.21, 0.40, 0.59, 0.68),
    (5, 8, "int4"): (0.05, 0.10, 0.15, 0.17),
}
"""arXiv 2604.21428, Table 13: (step seconds, sites, method or codec) -> Gbit/s at UTILIZATIONS."""
UTILIZATIONS = (0.50, 0.75, 0.90, 0.95)


def _ring_bits(params: float, bits: float, sites: int) -> float:
    """Bits that a ring all-reduce among `sites` sends over each link: 2 (D - 1) / D times the vector."""
    return params * bits * 2 * (sites - 1) / sites


def published(link: LinkModel, method: Method, bits: float) -> float:
    """Gbit/s by the paper's model, for gradients of `bits` bits (data-parallel always sends bf16).

    data-parallel: V / (e + 2/3 T). diloco: all at once every H steps, nothing hidden: V / (H e). streaming: a fragment
    at a time, tau steps hidden: V / (H (e + min(1, tau P / H) T)). decoupled: as the paper's figures imply.
    """
    e, T, H = link.exposed_seconds, link.step_seconds, link.sync_every
    volume = _ring_bits(link.params, 16 if method == "data-parallel" else bits, link.sites)
    seconds = {
        "data-parallel": e + BACKWARD_SHARE * T,
        "diloco": H * e,
        "streaming": H * (e + min(1.0, link.overlap * link.parts / H) * T),
        "decoupled": PUBLISHED_SYNC_EVERY * e + PUBLISHED_HIDDEN_STEPS * T,
    }[method]
    return volume / seconds / 1e9


@dataclass(frozen=True)
class Traffic:
    """Bytes of one learner as its sockets count them: frames, without the overhead of ZeroMQ and TCP."""

    up_a_round: float
    """One answered call: the delta."""
    down_a_round: float
    """The call, and the merged fragment."""
    up_a_second: float
    """Alives."""
    down_a_second: float
    """Beats, on both planes."""
    keyframes: float
    """The whole model in f32, sent at a join and at the end of a run."""

    def up(self, *, rounds: float, seconds: float) -> float:
        return rounds * self.up_a_round + seconds * self.up_a_second

    def down(self, *, rounds: float, seconds: float, keyframes: int = 2) -> float:
        return rounds * self.down_a_round + seconds * self.down_a_second + keyframes * self.keyframes


def traffic(settings: RunSettings, lengths: Sequence[int], learners: int, task: TaskSettings | None = None) -> Traffic:
    """Message sizes of a run. lengths: elements of each fragment's flat vector; learners: number of contributors."""
    P = len(lengths)
    counter = 2**20  # a typical counter in a long run
    names = [f"learner-{number + 1}" for number in range(learners)]
    incarnations = [(name, 2**52) for name in names]
    header: dict[str, Any] = {"run": settings.run, "sequence": counter, "epoch": 1}
    chunked: dict[str, Any] = {"fragment": P - 1, "crc": 2**31, "payload": b""}
    call = Call(**header, slot=counter, t=counter, fragment=P - 1, version=counter, attempt=1,
                contributors=tuple(incarnations), received=tuple(names))  # fmt: skip
    digest = "0" * 64

    def message_bytes(message: Message) -> int:
        return sum(len(frame) for frame in encode(message))

    def chunks(kind: type[Chunked], size: int, **more: Any) -> int:
        count = chunk_count(size)
        heading = message_bytes(kind(size=size, chunk=count - 1, chunks=count, **chunked, **header, **more))
        return count * heading + size  # the numbers in the headers of large payloads are about equally long

    up = [
        chunks(
            Delta, encoded_bytes(settings.codec_up, length), name=names[0], incarnation=2**52, slot=counter, attempt=1,
            base_version=counter, tokens_from=2**30, tokens_to=2**30, steps_from=counter, steps_to=counter,
            codec=settings.codec_up,
        )
        for length in lengths
    ]  # fmt: skip
    down = [
        chunks(
            Update, encoded_bytes(settings.codec_down, length), slot=counter, t=counter, version=counter,
            base_version=counter, contributors=tuple((name, 2**52, counter, 2**30) for name in names),
            codec=settings.codec_down, digest=digest,
        )
        for length in lengths
    ]  # fmt: skip
    keyframes = sum(chunks(Keyframe, 4 * length, t=counter, version=counter, digest=digest) for length in lengths)
    alive = Alive(
        **header, name=names[0], incarnation=2**52, local_steps=counter, tokens=2**30, step_seconds=0.1,
        last_step_age_seconds=0.1, inner_seconds=1e3, session_seconds=1.0, since_first_step_seconds=1e3, loss=2.0,
        versions=(counter,) * P, digests=("0" * 16,) * P, digest_versions=(counter,) * P, bytes_up=2**30,
        bytes_down=2**30,
    )  # fmt: skip
    beat = Beat(
        **header, state="running", t=counter, steps=counter, step_seconds=0.1, versions=(counter,) * P, calls=(call,),
        settings=settings.to_map(), task=task.to_map() if task else {}, fingerprint=digest, data_hash=digest,
        syncer=2**52,
    )  # fmt: skip
    return Traffic(
        up_a_round=sum(up) / P,
        down_a_round=sum(down) / P + message_bytes(call),
        up_a_second=message_bytes(alive) / BEAT_SECONDS,
        down_a_second=2 * message_bytes(beat) / BEAT_SECONDS,
        keyframes=keyframes,
    )


def this_system(link: LinkModel) -> dict[str, float]:
    """Gbit/s needed in each direction of a learner's link and of the syncer's: one learner per site, all contribute.

    A fragment's transfer may overlap with `overlap` steps and use the waiting time that utilization allows; links are
    full duplex, so the larger direction counts. Never less than the average traffic.
    """
    P, H = link.parts, link.sync_every
    length = -(-int(link.params / P) // ALIGN) * ALIGN
    settings = RunSettings(sync_every=H, codec_up=link.codec_up, codec_down=link.codec_down)
    weights = traffic(settings, [length] * P, link.sites)
    round_seconds = H / P * (link.step_seconds + link.exposed_seconds)
    transfer_seconds = link.overlap * link.step_seconds + H / P * link.exposed_seconds

    def gbit(round_bytes: float, second_bytes: float) -> float:
        return 8e-9 * (round_bytes / min(round_seconds, transfer_seconds) + second_bytes)

    up = gbit(weights.up_a_round, weights.up_a_second)
    down = gbit(weights.down_a_round, weights.down_a_second)
    return {
        "learner_up": up,
        "learner_down": down,
        "syncer_down": link.sites * up,
        "syncer_up": gbit(weights.down_a_round, weights.down_a_second),
        "broker_out": link.sites * (down + up),
        "bytes_a_cycle_up": P * weights.up_a_round,
        "bytes_a_cycle_down": P * weights.down_a_round,
    }


def table_13() -> list[dict[str, Any]]:
    """The paper's 50 to 95 % cells and the closed forms."""
    cells = []
    for (seconds, sites, what), row in TABLE_13.items():
        for utilization, paper in zip(UTILIZATIONS, row, strict=True):
            link = LinkModel(step_seconds=seconds, sites=sites, utilization=utilization)
            method: Method = "data-parallel" if what == "data-parallel" else "decoupled"
            ours = published(link, method, BITS.get(what, 16))
            cells.append({"step_seconds": seconds, "sites": sites, "method": method, "bits": BITS.get(what, 16),
                          "utilization": utilization, "gbit": ours, "paper_gbit": paper})  # fmt: skip
    return cells


def agrees(ours: float, paper: float) -> bool:
    """Whether they are within 5 %, or equal in the digits that the paper prints."""
    digits = len(f"{paper:g}".partition(".")[2])
    return abs(ours / paper - 1) <= 0.05 or round(ours, digits) == paper
