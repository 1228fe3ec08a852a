"""What a learner did in all its lives, added up."""

from __future__ import annotations

import json
from typing import Any

from decoupled_diloco.common.wire import Alive
from decoupled_diloco.syncer.membership import SUMMED, LifetimeCounters


def alive(incarnation: int, steps: int, name: str = "a") -> Alive:
    counters: dict[str, Any] = dict.fromkeys(SUMMED, steps)
    return Alive(
        run="run", name=name, incarnation=incarnation, epoch=1, tokens=0, step_seconds=0, last_step_age_seconds=0,
        **counters,
    )  # fmt: skip


def test_a_second_report_of_one_life_replaces_the_first_and_another_life_is_added() -> None:
    lives = LifetimeCounters()
    for incarnation, steps in ((1, 5), (1, 7), (2, 1), (2, 4), (3, 0)):
        lives.report(alive(incarnation, steps))
    assert lives.of("a") == dict.fromkeys(SUMMED, 11)
    lives.report(alive(1, 100, name="b"))
    assert lives.total() == dict.fromkeys(SUMMED, 111)
    assert lives.of("nobody") == dict.fromkeys(SUMMED, 0)


def test_an_answer_tells_of_steps_before_the_next_report_does_and_an_older_report_takes_none_back() -> None:
    lives = LifetimeCounters()
    lives.reached(("a", 1), 9)
    assert lives.of("a")["local_steps"] == 0, "nobody of that name has reported"
    lives.report(alive(1, 5))
    lives.reached(("a", 1), 9)
    lives.reached(("a", 2), 100)
    assert lives.of("a") == dict.fromkeys(SUMMED, 5) | {"local_steps": 9}
    lives.report(alive(1, 6))
    assert lives.of("a") == dict.fromkeys(SUMMED, 6) | {"local_steps": 9}
    lives.report(alive(2, 1))
    assert lives.of("a") == dict.fromkeys(SUMMED, 7) | {"local_steps": 10}


def test_lives_survive_a_checkpoint_and_continue_after_it() -> None:
    lives = LifetimeCounters()
    for incarnation, steps in ((1, 5), (2, 3)):
        lives.report(alive(incarnation, steps))
    again = LifetimeCounters()
    again.load_json(json.loads(json.dumps(lives.to_json())))
    again.report(alive(2, 4))  # the same life goes on
    assert again.of("a") == dict.fromkeys(SUMMED, 9)
    again.report(alive(3, 1))
    assert again.of("a") == dict.fromkeys(SUMMED, 10)


def test_memory_does_not_grow_with_the_number_of_lives() -> None:
    lives = LifetimeCounters()
    for incarnation in range(1, 1001):
        lives.report(alive(incarnation, 1))
    assert len(json.dumps(lives.to_json())) < 1000
    assert lives.of("a") == dict.fromkeys(SUMMED, 1000)
