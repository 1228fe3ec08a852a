"""No figure that a script, a clock or a machine made costs a learner the message that it stands in."""

from __future__ import annotations

import math
import socket
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from decoupled_diloco.common.fragments import Layout
from decoupled_diloco.common.wire import MAX_COUNT, MAX_LOSS, Alive, Goodbye, Hello, decode, encode
from decoupled_diloco.learner.alive_and_goodbye import ByteCounts, alive, goodbye
from decoupled_diloco.learner.counters import Counts
from decoupled_diloco.learner.identity import Identity, identify, layout_to_send
from decoupled_diloco.learner.mailbox import TrainingStatus
from decoupled_diloco.learner.model_layout import inventory
from decoupled_diloco.learner.public_model import PublicFragment
from decoupled_diloco.learner.training_checks import LossWatch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

ME = Identity(run="r", name="me", incarnation=7, layout=Layout(()))
ANY_FLOAT = st.floats() | st.sampled_from([-0.0, 5e-324, 1e16, -1e16, 1.7e308])
ANY_COUNT = st.integers(-5, 2**70)
LOSSES: list[Any] = [
    1e16, -1e16, 1.7e308, -0.0, 5e-324, -3, 10**300, True, Fraction(1, 3),
    np.float16(2.5), np.float64(1e300), np.int64(3), np.array(1.5),
    torch.tensor(65504.0, dtype=torch.float16), torch.tensor(1e38, dtype=torch.bfloat16),
    torch.tensor(1e300, dtype=torch.float64), torch.tensor([7]),
]  # fmt: skip


def figures(**more: Any) -> TrainingStatus:
    rows: dict[str, Any] = {"counts": Counts(3, 30), "versions": (4,)}
    return TrainingStatus(**(rows | more))


def told(counters: TrainingStatus | None, traffic: ByteCounts = ByteCounts(), now: float = 10.0) -> Alive:  # noqa: B008 it is frozen
    """An alive as the syncer reads it: it decodes, or the test fails."""
    held = [PublicFragment(4, torch.zeros(128), "ab" * 32, ())]
    message = decode(encode(alive(ME, 1, counters, held, traffic=traffic, now=now)))
    assert isinstance(message, Alive)
    return message


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(ANY_COUNT, min_size=6, max_size=6),
    seconds=st.lists(ANY_FLOAT, min_size=6, max_size=6),
    loss=ANY_FLOAT | st.none(),
)
@example(counts=[0] * 6, seconds=[math.nan] * 6, loss=1e16)
def test_an_alive_and_a_goodbye_of_any_figures_decode(
    counts: list[int], seconds: list[float], loss: float | None
) -> None:
    counters = figures(
        counts=Counts(counts[0], counts[1]), step_seconds=seconds[0], last_step_at=seconds[1], inner_seconds=seconds[2],
        session_seconds=seconds[3], started_at=seconds[4], loss=loss,
    )  # fmt: skip
    told(counters, ByteCounts(bytes_up=counts[2], bytes_down=counts[3], gaps=counts[4]), now=seconds[5])
    assert isinstance(decode(encode(goodbye(ME, "left", counters, ""))), Goodbye)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_a_loss_of_any_type_and_size_leaves_the_learner_visible(loss: Any) -> None:
    watch = LossWatch()
    assert watch.take(loss), "it is finite"
    assert told(figures(loss=watch.value)).loss == pytest.approx(max(-MAX_LOSS, min(MAX_LOSS, float(loss))))


@pytest.mark.parametrize("loss", [10**400, np.float16("inf"), torch.tensor(math.inf, dtype=torch.float16)], ids=ascii)
def test_a_loss_beyond_all_floats_is_not_finite_and_is_left_out(loss: Any) -> None:
    watch = LossWatch()
    assert not watch.take(loss)
    assert told(figures(loss=watch.value)).loss is None


def test_figures_within_range_arrive_as_they_are_and_others_as_the_nearest() -> None:
    said = told(figures(loss=1e16, step_seconds=0.25, session_seconds=-1.0), ByteCounts(bytes_up=2**60))
    assert (said.loss, said.step_seconds, said.session_seconds, said.bytes_up) == (MAX_LOSS, 0.25, 0.0, MAX_COUNT)
    assert (said.local_steps, said.tokens) == (3, 30)
    assert told(figures(loss=-2.5)).loss == -2.5
    assert told(figures(last_step_at=12.0), now=10.0).last_step_age_seconds == 0.0, "a clock that went back"


@pytest.mark.parametrize("reason", ["", "done", "interrupted\n", "failed"])
def test_a_goodbye_for_any_reason_decodes(reason: str) -> None:
    said = decode(encode(goodbye(ME, reason, None, "")))
    assert isinstance(said, Goodbye)
    assert said.reason == (reason if reason == "failed" else "stopped")


@pytest.mark.parametrize(
    "host", ["", "x" * 300, "büro-42", "a\nb", "\x1b[31mred", "h\udcff", "\u202eflipped", "名前"], ids=ascii
)
def test_a_hello_from_a_host_of_any_name_decodes(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    model = nn.Linear(2, 2)
    entries = inventory(model, torch.optim.SGD(model.parameters(), lr=0.1), None, None)
    me = identify("r", "me", entries, layout_to_send(entries))
    said = decode(encode(me.hello()))
    assert isinstance(said, Hello)
    assert len(said.host) == min(255, len(host))
