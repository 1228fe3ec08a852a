"""How much network a run takes: the published closed forms, and what our own messages weigh."""

from __future__ import annotations

import pytest
from decoupled_diloco.common.codec import encoded_bytes
from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.simulator.bandwidth import METHODS, agrees, published, table_13, this_system, traffic
from decoupled_diloco.simulator.settings import LinkModel


@pytest.mark.parametrize(
    "cell", table_13(), ids=lambda c: f"{c['step_seconds']}s-{c['sites']}-{c['bits']}-{c['gbit']:.3f}"
)
def test_the_closed_forms_reproduce_the_published_cell(cell: dict[str, float]) -> None:
    assert agrees(cell["gbit"], cell["paper_gbit"]), cell


def test_a_figure_that_is_off_by_more_than_its_digits_does_not_agree() -> None:
    assert agrees(0.0845, 0.08)
    assert agrees(104.9, 100)
    assert not agrees(0.086, 0.08)
    assert not agrees(106, 100)


def test_methods_that_talk_less_need_less() -> None:
    needs = [published(LinkModel(), method, 4) for method in METHODS]
    assert needs == sorted(needs, reverse=True)
    assert published(LinkModel(utilization=0.99), "streaming", 4) > published(
        LinkModel(utilization=0.5), "streaming", 4
    )


def test_a_round_weighs_its_payloads_and_a_little_more() -> None:
    lengths = [128 * 300, 128 * 10]
    weights = traffic(RunSettings(codec_up="int4", codec_down="bf16"), lengths, learners=3)
    up = sum(encoded_bytes("int4", n) for n in lengths) / 2
    down = sum(encoded_bytes("bf16", n) for n in lengths) / 2
    assert up < weights.up_a_round < up + 500
    assert down < weights.down_a_round < down + 1500
    assert weights.keyframes > 4 * sum(lengths)
    assert weights.down_a_second > 2 * len("the whole of the settings")


def test_a_fragment_of_many_chunks_pays_for_each_header() -> None:
    large = 2**24
    one = traffic(RunSettings(), [large], learners=1).up_a_round - encoded_bytes("int4", large)
    assert one > 8 * 100


def test_the_syncer_s_links_carry_what_all_learners_send_and_one_broadcast() -> None:
    needs = this_system(LinkModel(sites=8))
    assert needs["syncer_down"] == pytest.approx(8 * needs["learner_up"])
    assert needs["syncer_up"] == pytest.approx(needs["learner_down"])
    assert needs["broker_out"] == pytest.approx(needs["syncer_down"] + 8 * needs["learner_down"])


def test_the_whole_model_in_int4_each_24_steps_is_half_a_byte_a_parameter_and_its_scales() -> None:
    params = 24 * 128 * 10_000
    needs = this_system(LinkModel(params=params))
    for direction in ("up", "down"):
        assert needs[f"bytes_a_cycle_{direction}"] == pytest.approx(params * (0.5 + 2 / 128), rel=0.01)


@pytest.mark.parametrize(
    ("option", "value"),
    [("params", 0.0), ("step_seconds", 0.0), ("sites", 0), ("sync_every", 0), ("fragments", -1), ("overlap", 0),
     ("utilization", 0.0), ("utilization", 1.0), ("utilization", 1.5)],
)  # fmt: skip
def test_a_link_that_cannot_be_is_refused_by_the_name_of_its_option(option: str, value: float) -> None:
    with pytest.raises(SettingError, match=f"--{option.replace('_', '-')}"):
        LinkModel(**{option: value})  # type: ignore[arg-type]


def test_more_fragments_than_parameters_are_refused() -> None:
    with pytest.raises(SettingError, match="--fragments"):
        LinkModel(params=10, fragments=24)
