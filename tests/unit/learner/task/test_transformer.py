from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from decoupled_diloco.common.config import TaskSettings
from decoupled_diloco.common.fragments import balanced_plan, default_fragments
from decoupled_diloco.learner.model_layout import layout_of
from decoupled_diloco.learner.task.evaluator import evaluate, validation_windows
from decoupled_diloco.learner.task.loop import RAMP_STEPS, inner_step, make_optimizer, schedule
from decoupled_diloco.learner.task.text import batches, load_corpus
from decoupled_diloco.learner.task.transformer import Transformer, loss_of, sample

SMALL = TaskSettings(layers=2, width=32, sequence_length=16, batch_sequences=8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are many times slower with several threads on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def randomised(model: Transformer) -> Transformer:
    """The model as if after training: no branch is silent any more."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_the_parameters_are_a_function_of_the_seed_whatever_was_drawn_before() -> None:
    one = Transformer(SMALL, seed=5)
    torch.rand(7)
    two, other = Transformer(SMALL, seed=5), Transformer(SMALL, seed=6)
    pairs = list(zip(one.parameters(), two.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_the_first_guess_is_uniform() -> None:
    model = Transformer(SMALL, seed=0)
    tokens = torch.randint(0, 256, (4, 16))
    assert loss_of(model, tokens, tokens).item() == pytest.approx(5.545177, abs=1e-5)


def test_the_default_model_has_about_a_million_parameters_in_24_fragments_of_like_size() -> None:
    task = TaskSettings()
    layout = layout_of(Transformer(task, seed=0))
    assert 0.7e6 < layout.parameters < 1.3e6
    assert layout.static_bytes == 0
    assert default_fragments(layout, 24) == 24
    plan = balanced_plan(layout, 24)
    assert max(f.parameters for f in plan.fragments) < 2 * plan.parameters / 24


def test_the_embeddings_are_merged_by_the_mean_and_all_else_by_direction() -> None:
    kinds = {t.name: t.merge for t in layout_of(Transformer(SMALL, seed=0)).tensors}
    averaged = {name for name, merge in kinds.items() if merge == "mean"}
    assert averaged == {name for name in kinds if name.startswith("embeddings.")}


def test_no_position_sees_a_later_byte() -> None:
    model = randomised(Transformer(SMALL, seed=0))
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9:], after[0, 9:])


def test_every_parameter_gets_a_gradient_and_is_stepped() -> None:
    model = randomised(Transformer(SMALL, seed=0))
    optimizer = make_optimizer(model)
    before = [p.detach().clone() for p in model.parameters()]
    tokens = torch.randint(0, 256, (4, 16))
    inner_step(model, optimizer, tokens, tokens, 1e-2)
    unmoved = [n for (n, p), old in zip(model.named_parameters(), before, strict=True) if torch.equal(p, old)]
    assert unmoved == []


def test_a_few_steps_on_a_simple_text_bring_the_loss_far_below_uniform(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    corpus = load_corpus(tmp_path / "text", SMALL.sequence_length)
    model = Transformer(SMALL, seed=0)
    optimizer = make_optimizer(model)
    stream = batches(corpus.train, 8, SMALL.sequence_length, seed=0, name="a", incarnation=1)
    judged = validation_windows(corpus, "B", "small", sequence_length=SMALL.sequence_length, seed=0)
    for _ in range(60):
        inputs, targets = next(stream)
        inner_step(model, optimizer, inputs, targets, 1e-2)
    assert evaluate(model, judged) < 1.5
    assert sample(model, b"the quick brown ", 10, temperature=0) == b"fox jumps "


def test_an_evaluation_is_the_mean_over_the_fixed_windows_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(torch.randint(0, 256, (20_000,)).tolist()))
    corpus = load_corpus(tmp_path / "text", SMALL.sequence_length)
    model = randomised(Transformer(SMALL, seed=0))
    before = [p.detach().clone() for p in model.parameters()]
    judged = validation_windows(corpus, "A", "small", sequence_length=SMALL.sequence_length, seed=3)
    again = validation_windows(corpus, "A", "small", sequence_length=SMALL.sequence_length, seed=3)
    assert torch.equal(judged.inputs, again.inputs)
    with torch.no_grad():
        whole = float(loss_of(model, judged.inputs, judged.targets))
    assert evaluate(model, judged) == pytest.approx(whole, abs=1e-5)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_validation_windows_differ_between_seeds_and_parts(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(torch.randint(0, 256, (40_000,)).tolist()))
    corpus = load_corpus(tmp_path / "text", SMALL.sequence_length)
    one, two, other = (
        validation_windows(corpus, part, "small", sequence_length=SMALL.sequence_length, seed=seed).inputs
        for part, seed in (("A", 0), ("A", 1), ("B", 0))
    )
    assert not torch.equal(one, two)
    assert not torch.equal(one, other)


def test_what_the_model_writes_is_a_function_of_the_seed() -> None:
    model = randomised(Transformer(SMALL, seed=0))
    one = sample(model, b"def ", 40, seed=1)
    assert len(one) == 40
    assert sample(model, b"def ", 40, seed=1) == one
    assert sample(model, b"def ", 40, seed=2) != one
    assert sample(model, b"", 3, temperature=0) == sample(model, b"", 3, temperature=0, seed=9)


def test_the_learning_rate_rises_over_a_learners_first_steps_and_falls_with_the_run() -> None:
    assert 0 < schedule(0.0, 0) < schedule(0.0, RAMP_STEPS // 2) < schedule(0.0, RAMP_STEPS) == 1
    assert schedule(0.5, 0) < schedule(0.5, RAMP_STEPS) == 0.5
    assert schedule(1.0, 1000) == 0
