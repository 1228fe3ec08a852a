"""The thread that owns a learner's four sockets: it moves messages between them and the conversation, and keeps time.

It is a daemon: it never keeps a program alive. What it fails with, the session's next call raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import zmq

from ..common.auth_keys import held_key
from ..common.config import LearnerConfig
from ..common.errors import DilocoError
from ..common.fragments import Plan
from ..common.log import get_logger
from ..common.sockets import (
    CONTROL_MESSAGES,
    Address,
    BrokerConnection,
    PublishSocket,
    SubscribeSocket,
    Waker,
    check_sockets,
    refusal_of,
    unresolved_of,
)
from ..common.system_limits import limit_of
from ..common.wire import Plane, beat_topic, prefix
from .core import LearnerCore
from .identity import Identity
from .join_protocol import SeedSender, SeedSource
from .mailbox import Mailbox
from .status_messages import ByteCounts

log = get_logger("learner")

UP_MESSAGES = 32
"""Chunks that may wait in the bulk uplink; more wait, unencoded by the socket, in the conversation."""
DOWN_MESSAGES = 256
"""Chunks that may wait in the bulk downlink while the link's thread decodes: 16 fetched, the rest updates."""
TURN_MS = 100
"""The loop's longest sleep, and how exact its timers are."""
BUSY_MS = 5
"""The same while bulk messages wait for room in the socket, for which there is no event."""
BATCH = 64
"""Messages read from one plane before the other has its turn."""
SEND_BATCH = 16


class Link:
    """Connects, and keeps the public model and the syncer's calls flowing to the mailbox until it is told to leave."""

    def __init__(
        self,
        config: LearnerConfig,
        me: Identity,
        mailbox: Mailbox,
        source: Callable[[Plan], SeedSource] | None = None,
    ) -> None:
        """LimitReached if this process may not open its sockets or start its threads."""
        check_sockets(f"{me.role} {me.name}", 4, threads=2)
        self.config, self.me, self.mailbox = config, me, mailbox
        self._key = held_key(config.key)
        self.address = Address.parse(config.broker)
        self.core = LearnerCore(config, me, mailbox, SeedSender(me, source))
        self._waker = Waker()
        self._wants_keyframes = False
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name=f"diloco-link-{me.name}", daemon=True)

    # --- for the training thread -------------------------------------------------------------------------------------
    def start(self) -> None:
        self.mailbox.progress_at = time.monotonic()
        self._thread.start()

    def wake(self) -> None:
        """Something lies on the mailbox."""
        self._waker.wake()

    def leave(self, reason: str) -> None:
        """Say goodbye and end; `finished` waits for it. The first reason counts."""
        self.mailbox.leaving = self.mailbox.leaving or reason
        self._waker.wake()

    def abandon(self) -> None:
        """End at once, without a goodbye."""
        self._abandoned = True
        self._waker.wake()

    def join_thread(self, seconds: float) -> bool:
        """Wait for the thread's end; False if it is still there."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    # --- the thread --------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        """Serve until the end. However this thread ends, the training thread hears of it."""
        try:
            one_thread_for_torch()
            torch.set_flush_denormal(False)  # a thread inherits it, and the same bits are wanted everywhere
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
            try:
                self._serve(context)
            finally:
                context.destroy()
        except DilocoError as failure:
            self.mailbox.fail(failure)
        except BaseException as failure:
            reason = limit_of(failure)
            told = DilocoError(
                f"the link of {self.me.name} to {self.address} failed: {type(failure).__name__}: {failure}"
                + (f" ({reason})" if reason else "")
            )
            told.__cause__ = failure
            self.mailbox.fail(told)
            log.exception("link_failed")
        finally:
            if not (self.core.over or self._abandoned):  # the first failure counts
                self.mailbox.fail(DilocoError(f"the thread of {self.me.name} that talks to {self.address} has ended"))
            self._waker.close()

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Open the sockets (they belong to this thread), go round, close them; what was sent goes out for a while."""
        talk = self.core
        down = {
            Plane.CONTROL: SubscribeSocket(
                context, self.address.control_out, hwm_messages=CONTROL_MESSAGES, key=self._key,
                on_malformed=lambda _, wrong: talk.malformed(wrong),
            ),
            Plane.BULK: SubscribeSocket(
                context, self.address.bulk_out, hwm_messages=DOWN_MESSAGES, key=self._key,
                on_malformed=lambda _, wrong: talk.malformed(wrong),
            ),
        }  # fmt: skip
        up = {
            Plane.CONTROL: PublishSocket(
                context, self.address.control_in, hwm_messages=CONTROL_MESSAGES, key=self._key
            ),
            Plane.BULK: PublishSocket(context, self.address.bulk_in, hwm_messages=UP_MESSAGES, key=self._key),
        }
        poller = zmq.Poller()
        for socket in [*(d.socket for d in down.values()), *(u.socket for u in up.values()), self._waker.socket]:
            poller.register(socket, zmq.POLLIN)
        self._subscribe(down)
        try:
            while not talk.over and not self._abandoned:
                poller.poll(BUSY_MS if talk.busy else TURN_MS)
                self._waker.clear()
                self._look([*down.values(), *up.values()])
                self._hear(down)
                self._say(up, down)
        finally:
            for downlink in down.values():
                downlink.close()
            for uplink in up.values():
                uplink.close()

    def _look(self, lines: list[BrokerConnection]) -> None:
        """Note whether the broker refuses this learner or cannot be found, and say so when that changes."""
        for line in lines:
            line.look()
        refusal = refusal_of(lines, self.config.broker, self.config.key)
        hindrance = refusal or unresolved_of(lines)
        if hindrance and hindrance != self.mailbox.refusal:
            log.warning("broker_refuses" if refusal else "host_unresolved", learner=self.me.name, sentence=hindrance)
        self.mailbox.refusal = hindrance

    def _subscribe(self, down: dict[Plane, SubscribeSocket]) -> None:
        run = self.config.run
        down[Plane.CONTROL].subscribe(beat_topic(run))
        down[Plane.CONTROL].subscribe(prefix(run, "call"))
        down[Plane.CONTROL].subscribe(prefix(run, "welcome", self.core.me.name))
        down[Plane.BULK].subscribe(beat_topic(run))
        down[Plane.BULK].subscribe(prefix(run, "fragment"))

    def _hear(self, down: dict[Plane, SubscribeSocket]) -> None:
        for plane, downlink in down.items():
            for _ in range(BATCH):
                message = downlink.receive()
                if message is None:
                    break
                self.core.heard(message, plane, time.monotonic())
        follower = self.core.follower
        wants = follower is not None and follower.wants_keyframes  # others' are heard, and paid for, by who subscribes
        if wants != self._wants_keyframes:
            self._wants_keyframes = wants
            change = down[Plane.BULK].subscribe if wants else down[Plane.BULK].unsubscribe
            change(prefix(self.config.run, "keyframe"))

    def _say(self, up: dict[Plane, PublishSocket], down: dict[Plane, SubscribeSocket]) -> None:
        talk, now = self.core, time.monotonic()
        for uplink in up.values():
            uplink.read_subscriptions()
        traffic = ByteCounts(
            bytes_up=sum(u.bytes_sent for u in up.values()),
            bytes_down=sum(d.bytes_received for d in down.values()),
            gaps=sum(d.gaps for d in down.values()),
        )
        proven = {"control_proven": up[Plane.CONTROL].proven, "bulk_proven": up[Plane.BULK].proven}
        for message in talk.tick(now, **proven, traffic=traffic):
            if up[Plane.CONTROL].send(message):
                talk.sent(message, now)
        for _ in range(SEND_BATCH):
            bulk = talk.next_bulk()
            if bulk is None:
                break
            if not up[Plane.BULK].send(bulk):
                talk.unsent(bulk)
                break
            talk.sent(bulk, time.monotonic())


def one_thread_for_torch() -> None:
    """The calling thread's torch operations run on it alone, so that they do not compete with the training thread.

    OpenMP keeps this number per thread, but torch also notes it for threads that start later; so a thread that ends at
    once notes the old number again.
    """
    others = torch.get_num_threads()
    torch.set_num_threads(1)
    restore = threading.Thread(target=torch.set_num_threads, args=(others,), daemon=True)
    restore.start()
    restore.join()
