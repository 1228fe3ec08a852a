"""Settings: frozen, keyword-only dataclasses, validated when constructed. Field names carry their unit.

`RunSettings` and `TaskSettings` belong to the run: the syncer sends them in every Beat, so that a learner needs only
the broker's address and cannot disagree with the syncer. Each `...Config` class belongs to one process on one machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

from .errors import Malformed, SettingError

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
DEFAULT_PORT = 5550
CHUNK_BYTES = 2**20
"""Most payload bytes of one bulk message."""
MESSAGE_BYTES = CHUNK_BYTES + 2**16
"""Most bytes of any message: a chunk and its header."""
MAX_FRAGMENTS = 16_384
"""Most fragments of a plan: an Alive, which is one message, holds 35 bytes for each."""
MAX_TENSORS = 100_000
"""Most tensors of a model."""
BEAT_SECONDS = 1.0
"""Time between two Beats of the syncer."""
MOMENTUM_ROUNDS = 200
"""Rounds per fragment in the longest runs that compare outer momentum with none. Up to here momentum was not shown to
end better; longer runs were not measured (docs/results.md)."""
MAX_LAG = 2
"""Most versions that a delta's anchor may lag behind. A stale delta does little harm; discarding it wastes its work."""
SILENT_BEATS = 3
"""A peer that is silent for this many beats is lost."""
FLAGS = {
    "directory": "--dir",
    "join_timeout_seconds": "--join-timeout",
    "orphan_timeout_seconds": "--orphan-timeout",
    "as_json": "--json",
    "exit_when_idle_seconds": "--exit-when-idle",
}
"""Settings whose option is not just their name with dashes."""

CodecName = Literal["f32", "bf16", "int8", "int4"]
CODECS: tuple[CodecName, ...] = ("f32", "bf16", "int8", "int4")
AdoptName = Literal["overwrite", "rebase", "mix"]
ADOPTS: tuple[AdoptName, ...] = ("overwrite", "rebase", "mix")
PresetName = Literal["decoupled", "streaming", "diloco"]
ALL_LEARNERS = -1
"""Quorum of a preset that waits for every learner of the run."""
PRESETS: Mapping[PresetName, Mapping[str, Any]] = {
    "decoupled": {},
    "streaming": {"quorum": ALL_LEARNERS, "grace_seconds": 0.0, "codec_down": "bf16"},
    "diloco": {
        "quorum": ALL_LEARNERS, "grace_seconds": 0.0, "fragments": 1, "overlap": 1,
        "codec_up": "f32", "codec_down": "f32",
    },
}  # fmt: skip
"""Changes that turn the defaults, which are Decoupled DiLoCo's (arXiv 2604.21428), into its predecessors: Streaming
DiLoCo sends fragments and waits for all learners; DiLoCo also sends the whole model at once. The outer step and the
adoption stay Decoupled DiLoCo's (learning rate 1, no momentum, overwrite), not the published ones: no other was shown
to end better (docs/results.md).
"""


def check_name(what: str, name: str) -> str:
    """Return `name` if it is valid for a run or a learner; SettingError otherwise."""
    if not NAME_PATTERN.fullmatch(name):
        raise SettingError(f"{what} {name!r} must match [a-z0-9][a-z0-9-]{{0,39}}: lower-case letters, digits, dashes")
    return name


def _positive(settings: object, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) > 0:
            raise SettingError(f"{flag(name)} must be greater than 0, not {getattr(settings, name)}")


def _within(settings: object, name: str, low: float, high: float) -> None:
    if not low <= getattr(settings, name) <= high:
        raise SettingError(f"{flag(name)} must lie between {low} and {high}, not {getattr(settings, name)}")


def flag(name: str) -> str:
    """The command-line option of a setting: `sync_every` -> `--sync-every`."""
    return FLAGS.get(name, "--" + name.replace("_", "-"))


def preset(name: PresetName, learners: int | None) -> dict[str, Any]:
    """Fields of RunSettings that this preset changes, for a run of `learners` learners (None: not known)."""
    changes = dict(PRESETS[name])
    if changes.get("quorum") == ALL_LEARNERS:
        if learners is None:
            raise SettingError(f"--preset {name} waits for all learners: give their number as --quorum")
        changes["quorum"] = learners
    return changes


class _FromMap:
    """Settings that are sent as a plain map, and validated on arrival as they are on the command line."""

    def to_map(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_map(cls, rows: Mapping[str, object]) -> Self:
        """Malformed if a key is missing or unknown, or a value has the wrong type or is out of range."""
        hints = get_type_hints(cls)
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        if sorted(rows) != sorted(names):
            raise Malformed("settings", f"expected exactly {', '.join(names)}")
        values = {}
        for name in names:
            value, hint = rows[name], hints[name]
            kinds = (float, int) if hint is float else (hint,) if hint in (int, str, bool) else (str,)
            if isinstance(value, bool) != (hint is bool) or not isinstance(value, kinds):
                raise Malformed("settings", f"{name} has the wrong type")
            values[name] = float(value) if hint is float else value
        try:
            return cls(**values)
        except SettingError as error:
            raise Malformed("settings", str(error)) from error


@dataclass(frozen=True, kw_only=True)
class RunSettings(_FromMap):
    """Settings of the algorithm (arXiv 2604.21428). The syncer gives the same ones to all learners of a run."""

    run: str = "run"
    """Name of the run, used in message topics, Redis keys and the run's folder: lower-case letters, digits, dashes."""
    seed: int = 0
    """Random seed of the initial model, of each learner's order of the text, and of the validation text."""
    steps: int = 432
    """T: length of the run in global steps. A global step lasts as long as a typical learner's inner step."""
    quorum: int = 1
    """K: least number of learners whose answers a merge needs. It is never lowered automatically."""
    grace_seconds: float = 10.0
    """Upper limit, in seconds, of the adaptive wait for further learners after the quorum. 0 = merge at the quorum."""
    gamma: float = 0.8
    """Share of the slack that the grace window may use (arXiv 2604.21428, equation 3): above 0, below 1."""
    sync_every: int = 24
    """H: global steps between two merges of the same fragment."""
    fragments: int = 0
    """P: number of fragments that the model is divided into. 0 = H, but no more than the model has tensors."""
    overlap: int = 2
    """tau: number of calls that may be open at the same time. Less than P, or 1 if P is 1."""
    codec_up: CodecName = "int4"
    """Encoding of the deltas that learners send. Bytes per parameter: f32 4, bf16 2, int8 1, int4 0.5."""
    codec_down: CodecName = "int4"
    """Encoding of the merged fragments that the syncer sends. Bytes per parameter: f32 4, bf16 2, int8 1, int4 0.5."""
    outer_lr: float = 1.0
    """Learning rate of the outer optimizer. 1 = the global model moves all the way to the merged one."""
    outer_momentum: float = 0.0
    """Nesterov momentum of the outer optimizer. 0 = none; no other value was shown to be better in up to 200 rounds."""
    adopt: AdoptName = "overwrite"
    """How a learner adopts a merged fragment. overwrite: replace its parameters. rebase: replace them, but a
    contributor keeps its steps since the merged delta. mix: blend both by --mix-alpha, as in Streaming DiLoCo."""
    mix_alpha: float = 0.5
    """Share, from 0 to 1, of its own parameters that a learner keeps with --adopt mix."""
    checkpoint_every: int = 100
    """Global steps between two checkpoints of the syncer. 0 = only one at the end."""

    def __post_init__(self) -> None:
        check_name("--run", self.run)
        _positive(self, "steps", "quorum", "sync_every", "overlap", "outer_lr")
        _within(self, "seed", 0, 2**53 - 1)
        _within(self, "steps", 1, 2**40)
        _within(self, "quorum", 1, 10_000)
        _within(self, "sync_every", 1, 1_000_000)
        _within(self, "fragments", 0, MAX_FRAGMENTS)
        _within(self, "grace_seconds", 0, 86_400)
        _within(self, "outer_lr", 0, 100)
        _within(self, "outer_momentum", 0, 0.999)
        _within(self, "mix_alpha", 0, 1)
        _within(self, "checkpoint_every", 0, 2**40)
        if not 0 < self.gamma < 1:
            raise SettingError(f"--gamma must lie between 0 and 1, both excluded, not {self.gamma}")
        for name, allowed in (("codec_up", CODECS), ("codec_down", CODECS), ("adopt", ADOPTS)):
            if getattr(self, name) not in allowed:
                raise SettingError(f"{flag(name)} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if self.fragments:
            check_schedule(self.sync_every, self.fragments, self.overlap)

    def advice(self) -> list[str]:
        """Sentences about settings that are valid but rarely a good choice."""
        rounds = self.steps // self.sync_every
        if self.outer_momentum > 0 and rounds <= MOMENTUM_ROUNDS:
            sentence = (
                f"--outer-momentum {self.outer_momentum} with {rounds} rounds per fragment is unlikely to help: in "
                f"comparisons of up to {MOMENTUM_ROUNDS} rounds no momentum ended better than none, and 0.9 ended "
                "worse at the same --inner-lr; leave it at 0, or compare both"
            )
            return [sentence]
        return []

    def resolved_overlap(self, fragments: int) -> int:
        """tau for a plan of `fragments` fragments: 1 if there is only one."""
        return 1 if fragments == 1 else min(self.overlap, fragments - 1)


def check_schedule(sync_every: int, fragments: int, overlap: int) -> None:
    """SettingError unless every fragment can be called equally often: tau < P <= H, or P = 1 with tau = 1."""
    if fragments > sync_every:
        raise SettingError(
            f"--fragments {fragments} is more than --sync-every {sync_every}: "
            "some fragments would never be merged; lower --fragments or raise --sync-every"
        )
    if fragments == 1 and overlap != 1:
        raise SettingError(f"--fragments 1 needs --overlap 1, not {overlap}")
    if fragments > 1 and overlap >= fragments:
        raise SettingError(f"--overlap {overlap} must be smaller than --fragments {fragments}")


@dataclass(frozen=True, kw_only=True)
class TaskSettings(_FromMap):
    """Settings of the built-in task: a byte-level decoder-only transformer, trained on text."""

    layers: int = 4
    """Number of transformer blocks."""
    width: int = 128
    """Channels of the residual stream: a multiple of 32, the size of an attention head."""
    sequence_length: int = 128
    """Length of a training sequence, in bytes of text."""
    batch_sequences: int = 16
    """Batch size of one learner's inner step, in sequences."""
    inner_lr: float = 1.5e-3
    """Peak learning rate of the inner AdamW optimizer (embeddings, head and gains: 5 times this). It rises over a
    learner's first 20 steps and decays to zero at the run's last global step."""

    def __post_init__(self) -> None:
        _positive(self, "layers", "width", "sequence_length", "batch_sequences", "inner_lr")
        _within(self, "layers", 1, 256)
        _within(self, "width", 32, 65_536)
        _within(self, "sequence_length", 1, 65_536)
        _within(self, "batch_sequences", 1, 65_536)
        if self.width % 32:
            raise SettingError(f"--width must be a multiple of 32, not {self.width}")

    @property
    def tokens_per_step(self) -> int:
        return self.batch_sequences * self.sequence_length


@dataclass(frozen=True, kw_only=True)
class BrokerConfig:
    """Configuration of a broker process, which listens on four consecutive ports of one interface."""

    host: str = "127.0.0.1"
    """Address of the interface to listen on. One that other machines can reach needs --keys or --insecure."""
    port: int = DEFAULT_PORT
    """First of four consecutive TCP ports: control in, control out, bulk in, bulk out."""
    queue_mib: int = 256
    """Most MiB of messages that the broker holds for one slow receiver."""
    keys: Path | None = None
    """The broker's key folder, created by `diloco keys new`. Without it: clients are not authenticated."""
    insecure: bool = False
    """Accept clients from other machines without authentication."""
    exit_when_idle_seconds: float = 0.0
    """Exit when, after the first client, no client has been subscribed for this many seconds. 0 = never."""

    def __post_init__(self) -> None:
        _positive(self, "queue_mib")
        _within(self, "port", 1, 65_532)
        _within(self, "exit_when_idle_seconds", 0, 1e9)
        if self.keys is None and not self.insecure and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise SettingError(
                f"--host {self.host} is reachable from other machines, but clients would not be authenticated; give "
                "--keys (see diloco keys new), listen on 127.0.0.1, or give --insecure on a network that you trust"
            )


@dataclass(frozen=True, kw_only=True)
class SyncerConfig:
    """Configuration of a syncer process."""

    settings: RunSettings
    task: TaskSettings | None
    """None where learners bring their own model (the API)."""
    broker: str
    """Address: tcp://HOST:PORT."""
    directory: Path
    """The folder `global` of the run's folder, for version 0 and checkpoints. model.safetensors and summary.json are
    written into the run's folder itself."""
    redis: str | None = None
    """URL of Redis or Valkey; None = the run is not published there."""
    init: Path | None = None
    """Safetensors file to take version 0 from, instead of from the first learner."""
    data_hash: str = ""
    """SHA-256 of the run's text; each learner's must be equal."""
    listen_seconds: float = 3.0
    """Seconds for which it listens for other syncers and higher versions before it chooses its epoch."""
    stop_seconds: float = 4.0
    """Seconds for which a stop waits for open rounds."""
    drain_seconds: float = 30.0
    """Seconds for which a finished run waits for the learners that are present at its end, counted from the end or from
    their last Hello or Fetch. Those that do not confirm the final model are named; the exit code is still 0."""
    drain_most_seconds: float = 600.0
    """Most seconds of that wait in total. A learner gives up after the same time without a beat."""
    key: Path | None = None
    """Key file of role syncer, for a broker with keys."""
    tape: Path | None = None
    """Folder for an event tape; None = no tape."""
    stop_redis: bool = False
    """Have Redis save and shut down once the run is finished and saved."""

    def __post_init__(self) -> None:
        if self.stop_redis and self.redis is None:
            raise SettingError("--stop-redis needs --redis URL: without it there is no Redis to stop")


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """Configuration of a learner process, or of one join() in a user's script."""

    broker: str
    name: str
    run: str = ""
    """Name of the run to join. Without it: the only run on the broker."""
    join_timeout_seconds: float = 60.0
    """Most seconds for joining; then it fails (exit code 3). Meanwhile the log says what the learner waits for."""
    orphan_timeout_seconds: float = 600.0
    """Seconds without a beat of the syncer after which the learner saves its parameters and stops (exit code 5)."""
    directory: Path | None = None
    """Folder in which the learner saves its parameters when it loses its run. Without it: the working directory."""
    key: Path | None = None
    """Key file, created by `diloco keys new`, for a broker with keys. It also names the run."""
    tape: Path | None = None
    """Folder for an event tape of this learner, for `diloco replay`. Without it: no tape."""

    def __post_init__(self) -> None:
        check_name("--name", self.name)
        if self.run:
            check_name("--run", self.run)
        _positive(self, "join_timeout_seconds", "orphan_timeout_seconds")
