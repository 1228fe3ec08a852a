"""All settings: frozen, keyword-only, checked when made, printed once. Names carry their unit.

The syncer's `RunSettings` and `TaskSettings` are the only ones of a run: they travel in every Beat, so that a learner
needs one address and cannot drift. The `...Config` classes below belong to one process on one machine.
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
"""Payload bytes of one bulk message, at most."""
MESSAGE_BYTES = CHUNK_BYTES + 2**16
"""The largest message any socket takes: a chunk and its header."""
MAX_FRAGMENTS = 16_384
"""An Alive has 35 bytes for each, and is one message."""
MAX_TENSORS = 100_000
"""Of one model."""
BEAT_SECONDS = 1.0
MOMENTUM_ROUNDS = 200
"""Rounds a fragment in the longest runs that compare outer momentum with none. Neither in these nor in shorter ones is
momentum shown to end better; longer ones were not measured (docs/results.md)."""
MAX_LAG = 2
"""Versions that a delta's anchor may lag behind: staleness is cheap, discarding is dear."""
SILENT_BEATS = 3
"""A peer not heard for so many beats is lost."""
FLAGS = {
    "directory": "--dir",
    "join_timeout_seconds": "--join-timeout",
    "orphan_timeout_seconds": "--orphan-timeout",
    "as_json": "--json",
    "exit_when_idle_seconds": "--exit-when-idle",
}
"""Settings whose option is not simply their name with dashes."""

CodecName = Literal["f32", "bf16", "int8", "int4"]
CODECS: tuple[CodecName, ...] = ("f32", "bf16", "int8", "int4")
AdoptName = Literal["overwrite", "rebase", "mix"]
ADOPTS: tuple[AdoptName, ...] = ("overwrite", "rebase", "mix")
PresetName = Literal["decoupled", "streaming", "diloco"]
ALL_LEARNERS = -1
"""Of a preset's quorum: as many as the run has."""
PRESETS: Mapping[PresetName, Mapping[str, Any]] = {
    "decoupled": {},
    "streaming": {"quorum": ALL_LEARNERS, "grace_seconds": 0.0, "codec_down": "bf16"},
    "diloco": {
        "quorum": ALL_LEARNERS, "grace_seconds": 0.0, "fragments": 1, "overlap": 1,
        "codec_up": "f32", "codec_down": "f32",
    },
}  # fmt: skip
"""What differs from the defaults (which are Decoupled DiLoCo's) in its ancestors: Streaming DiLoCo sends fragments and
waits for everybody, DiLoCo sends the whole model at once. Their outer step and adoption are not the published ones, but
Decoupled DiLoCo's: learning rate 1, no momentum, overwrite. No other was shown to end better (docs/results.md).
"""


def check_name(what: str, name: str) -> str:
    """`name` itself if it may name a run or a learner; SettingError otherwise."""
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
    """How a setting is written on the command line: `sync_every` -> `--sync-every`."""
    return FLAGS.get(name, "--" + name.replace("_", "-"))


def preset(name: PresetName, learners: int | None) -> dict[str, Any]:
    """Fields of RunSettings that this preset changes, for a run of so many learners (None: that is not known)."""
    changes = dict(PRESETS[name])
    if changes.get("quorum") == ALL_LEARNERS:
        if learners is None:
            raise SettingError(f"--preset {name} waits for all learners: say by --quorum how many there are")
        changes["quorum"] = learners
    return changes


class FromMap:
    """Settings that travel as a plain map and are checked on arrival like at the command line."""

    def to_map(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_map(cls, rows: Mapping[str, object]) -> Self:
        """Malformed if a key is missing, unknown, or has a value of another type or out of its range."""
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
        except SettingError as wrong:
            raise Malformed("settings", str(wrong)) from wrong


@dataclass(frozen=True, kw_only=True)
class RunSettings(FromMap):
    """The algorithm's settings (paper sections 1-4); everybody in a run has the same, from the syncer."""

    run: str = "run"
    """Name of the run: topics, Redis keys and the run's folder begin with it."""
    seed: int = 0
    """Model init = f(seed); data stream = f(seed, name, incarnation); validation windows = f(seed)."""
    steps: int = 432
    """T, in global steps. A global step lasts as long as a typical learner's inner step."""
    quorum: int = 1
    """K, in learners: below so many answers nothing is merged. Never lowered by itself."""
    grace_seconds: float = 10.0
    """Upper limit, in seconds, of the adaptive grace window once the quorum is in. 0 = close at the quorum."""
    gamma: float = 0.8
    """Share of the slack that the grace window may use (equation 3), below 1."""
    sync_every: int = 24
    """H, in global steps: each fragment is merged once in so many."""
    fragments: int = 0
    """P, the number of parts that the model is cut into. 0 = as many as sync_every, but at most one a tensor."""
    overlap: int = 2
    """tau, in calls that may be open at the same time: fewer than there are fragments, 1 if there is just one."""
    codec_up: CodecName = "int4"
    """How learners send their progress. int4 takes half a byte a parameter, f32 four."""
    codec_down: CodecName = "int4"
    """How merged fragments are sent. int4 takes half a byte a parameter, f32 four."""
    outer_lr: float = 1.0
    """Learning rate of the outer step. 1 = the global model moves to the merged one."""
    outer_momentum: float = 0.0
    """Nesterov momentum of the outer step. 0 = none; nothing above it was shown to end better in up to 200 rounds."""
    adopt: AdoptName = "overwrite"
    """overwrite: theta <- Theta. rebase: a contributor keeps what it did since its capture. mix: Streaming's blend."""
    mix_alpha: float = 0.5
    """Share of its own parameters that a learner keeps with adopt = mix."""
    checkpoint_every: int = 100
    """Global steps between two checkpoints of the syncer. 0 = at the end only."""

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
        """Sentences about settings that are allowed and rarely wanted."""
        rounds = self.steps // self.sync_every
        if self.outer_momentum > 0 and rounds <= MOMENTUM_ROUNDS:
            sentence = (
                f"--outer-momentum {self.outer_momentum} with {rounds} rounds a fragment will probably not end better "
                f"than none: in comparisons of up to {MOMENTUM_ROUNDS} rounds no momentum did, and 0.9 ended worse at "
                "the same --inner-lr; leave it at 0, or compare both"
            )
            return [sentence]
        return []

    def resolved_overlap(self, fragments: int) -> int:
        """tau for a plan of `fragments` parts: 1 where a plan has one fragment."""
        return 1 if fragments == 1 else min(self.overlap, fragments - 1)


def check_schedule(sync_every: int, fragments: int, overlap: int) -> None:
    """SettingError unless every fragment can be called equally often: tau < P <= H, or P = 1 with tau = 1."""
    if fragments > sync_every:
        raise SettingError(
            f"--fragments {fragments} is more than --sync-every {sync_every}: "
            "some fragment would never be synchronised; lower --fragments or raise --sync-every"
        )
    if fragments == 1 and overlap != 1:
        raise SettingError(f"--fragments 1 goes with --overlap 1, not {overlap}")
    if fragments > 1 and overlap >= fragments:
        raise SettingError(f"--overlap {overlap} must be smaller than --fragments {fragments}")


@dataclass(frozen=True, kw_only=True)
class TaskSettings(FromMap):
    """What the built-in learner trains: a byte-level decoder-only transformer on text."""

    layers: int = 4
    """Transformer blocks."""
    width: int = 128
    """Channels of the residual stream; a multiple of 32 (heads have 32 channels)."""
    sequence_length: int = 128
    """Bytes that one sequence predicts."""
    batch_sequences: int = 16
    """Sequences in one inner step of one learner."""
    inner_lr: float = 1.5e-3
    """Peak learning rate of the inner AdamW (embeddings, head and gains: 5 times that). It rises over a learner's first
    20 steps and falls to zero with the run's global steps."""

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
    """One broker process: four consecutive ports on one interface."""

    host: str = "127.0.0.1"
    """Interface to listen on. Beyond loopback only with `keys`, or `insecure`."""
    port: int = DEFAULT_PORT
    """The first of four consecutive ports: control in, control out, bulk in, bulk out."""
    queue_mib: int = 256
    """Upper limit, in MiB, of what the broker keeps for one receiver that does not read."""
    keys: Path | None = None
    """The broker's folder of keys, made by `diloco keys new`. Without it nobody has to prove who he is."""
    insecure: bool = False
    """Listen beyond loopback although nobody proves who he is."""
    exit_when_idle_seconds: float = 0.0
    """End once somebody was there and nobody has been subscribed for so many seconds. 0 = never."""

    def __post_init__(self) -> None:
        _positive(self, "queue_mib")
        _within(self, "port", 1, 65_532)
        _within(self, "exit_when_idle_seconds", 0, 1e9)
        if self.keys is None and not self.insecure and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise SettingError(
                f"--host {self.host} is reachable from other machines and nobody has to prove who he is; "
                "give --keys (see diloco keys new), listen on 127.0.0.1, or say --insecure on a network that you trust"
            )


@dataclass(frozen=True, kw_only=True)
class SyncerConfig:
    """One syncer process."""

    settings: RunSettings
    task: TaskSettings | None
    """None where learners bring their own model (the API)."""
    broker: str
    """tcp://HOST:PORT"""
    directory: Path
    """The folder `global` of the run's folder, for version 0 and checkpoints. model.safetensors and summary.json are
    written into the run's folder, its parent."""
    redis: str | None = None
    """URL of Redis or Valkey; None = no registry."""
    init: Path | None = None
    """A safetensors file that version 0 comes from, instead of from the first learner."""
    data_hash: str = ""
    """sha256 of the run's text; compared with what each learner says."""
    listen_seconds: float = 3.0
    """How long it hears the wire for other syncers and higher versions before it takes an epoch."""
    stop_seconds: float = 4.0
    """How long a stop waits for open rounds."""
    drain_seconds: float = 30.0
    """How long a finished run waits for the learners that were there at its end, counted from the end or from their
    last Hello or Fetch. Those that never confirm the final model are named, and the syncer ends well."""
    drain_most_seconds: float = 600.0
    """How long that wait may last in all, however often they ask; learners give up after as long without a beat."""
    key: Path | None = None
    """The key file, of role syncer, that a broker with keys asks for."""
    tape: Path | None = None
    """Folder for the event tape; None = none is written."""
    stop_redis: bool = False
    """Once the run is finished and saved, tell Redis to save and end too."""

    def __post_init__(self) -> None:
        if self.stop_redis and self.redis is None:
            raise SettingError("--stop-redis needs --redis URL: there is nothing to stop without it")


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """One learner process, or one join() from a user's script."""

    broker: str
    name: str
    run: str = ""
    """Name of the run to join. Without it: the one run that is heard on the broker."""
    join_timeout_seconds: float = 60.0
    """Seconds that a join may take before PeerLost; the learner says every few seconds what it waits for."""
    orphan_timeout_seconds: float = 600.0
    """Without any beat for so many seconds, the learner saves its parameters and stops (exit code 5)."""
    directory: Path | None = None
    """Where an orphan saves its parameters. Without it: the working directory."""
    key: Path | None = None
    """The key file, made by `diloco keys new`, that a broker with keys asks for. It says which run, too."""
    tape: Path | None = None
    """Folder into which an event tape of this learner is written, for `diloco replay`. Without it: none."""

    def __post_init__(self) -> None:
        check_name("--name", self.name)
        if self.run:
            check_name("--run", self.run)
        _positive(self, "join_timeout_seconds", "orphan_timeout_seconds")
