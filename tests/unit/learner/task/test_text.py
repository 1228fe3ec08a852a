from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.learner.task.text import Corpus, baselines, batches, load_corpus

LENGTH = 16


@pytest.fixture(scope="module")
def library() -> Corpus:
    return load_corpus(None, 128)


def written(path: Path, text: bytes) -> Path:
    path.write_bytes(text)
    return path


def draw(corpus: Corpus, count: int, *, name: str = "a", incarnation: int = 1, seed: int = 0) -> list[bytes]:
    stream = batches(corpus.train, 4, LENGTH, seed=seed, name=name, incarnation=incarnation)
    return [inputs.numpy().tobytes() for inputs, _ in islice(stream, count)]


def test_the_standard_library_is_a_text_of_megabytes_with_two_held_out_parts(library: Corpus) -> None:
    assert library.tokens > 5_000_000
    for part in (library.held_out_a, library.held_out_b):
        assert 0.01 < len(part) / library.tokens < 0.15
    assert library.holds_out


def test_the_same_text_has_the_same_hash_and_another_text_another(library: Corpus, tmp_path: Path) -> None:
    assert load_corpus(None, 64).sha256 == library.sha256
    one = written(tmp_path / "one", bytes(range(256)) * 10)
    two = written(tmp_path / "two", bytes(range(256)) * 9 + b"?" * 256)
    assert load_corpus(one, LENGTH).sha256 != load_corpus(two, LENGTH).sha256


def test_no_test_and_no_file_of_this_machine_is_in_the_standard_librarys_text(library: Corpus) -> None:
    text = b"".join(part_bytes(library, name) for name in ("train", "a", "b"))
    assert b"build_time_vars = {" not in text
    assert b"charmap_decode(input,self.errors,decoding_table)" not in text


def test_everything_of_one_package_lies_in_one_part(library: Corpus) -> None:
    markers = [b"class JSONDecoder(", b"class JSONEncoder("]
    homes = [[name for name in ("train", "a", "b") if marker in part_bytes(library, name)] for marker in markers]
    assert homes[0] == homes[1]
    assert len(homes[0]) == 1


def part_bytes(corpus: Corpus, name: str) -> bytes:
    return {"train": corpus.train, "a": corpus.held_out_a, "b": corpus.held_out_b}[name].tobytes()


def test_a_file_of_ones_own_is_held_out_at_its_end(tmp_path: Path) -> None:
    text = np.random.default_rng(0).integers(0, 256, size=10_000, dtype=np.uint8).tobytes()
    corpus = load_corpus(written(tmp_path / "book.txt", text), LENGTH)
    assert corpus.train.tobytes() == text[:9000]
    assert corpus.held_out_a.tobytes() == text[9000:9500]
    assert corpus.held_out_b.tobytes() == text[9500:]


def test_a_folder_of_files_is_read_in_the_order_of_their_names_and_hidden_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    written(tmp_path / "b" / "deep.txt", b"2" * 1000)
    written(tmp_path / "a.txt", b"1" * 1000)
    written(tmp_path / "c.txt", b"3" * 1000)
    written(tmp_path / ".hidden", b"4" * 1000)
    corpus = load_corpus(tmp_path, LENGTH)
    assert corpus.train.tobytes() == b"1" * 900 + b"2" * 900 + b"3" * 900
    assert corpus.held_out_a.tobytes() == b"1" * 50 + b"2" * 50 + b"3" * 50


@pytest.mark.parametrize("size", [0, 1, LENGTH - 1, LENGTH])
def test_a_text_shorter_than_one_sequence_is_refused_with_both_sizes(tmp_path: Path, size: int) -> None:
    path = written(tmp_path / "short.txt", b"x" * size)
    with pytest.raises(SettingError, match=rf"short\.txt holds {size} tokens .* needs {LENGTH + 1};"):
        load_corpus(path, LENGTH)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="holds 0 tokens"):
        load_corpus(tmp_path, LENGTH)


def test_a_folder_called_tests_in_ones_own_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    written(tmp_path / "tests" / "a.txt", b"1" * 1000)
    assert load_corpus(tmp_path, LENGTH).tokens == 1000


def test_what_is_neither_file_nor_folder_is_refused_before_it_is_read() -> None:
    with pytest.raises(SettingError, match="/dev/zero is neither a file nor a folder"):
        load_corpus(Path("/dev/zero"), LENGTH)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"cannot read .*nowhere\.txt: No such file"):
        load_corpus(tmp_path / "nowhere.txt", LENGTH)


def test_a_text_of_exactly_one_sequence_and_its_last_target_works_and_is_judged_on_itself(tmp_path: Path) -> None:
    text = bytes(range(LENGTH + 1))
    corpus = load_corpus(written(tmp_path / "exact.txt", text), LENGTH)
    assert not corpus.holds_out
    assert corpus.tokens == LENGTH + 1
    inputs, targets = next(batches(corpus.train, 3, LENGTH, seed=0, name="a", incarnation=1))
    assert inputs.tolist() == [list(text[:-1])] * 3
    assert targets.tolist() == [list(text[1:])] * 3


def test_more_sequences_than_the_text_has_windows_still_make_a_batch(tmp_path: Path) -> None:
    corpus = load_corpus(written(tmp_path / "small.txt", bytes(range(LENGTH + 3))), LENGTH)
    inputs, _ = next(batches(corpus.train, 64, LENGTH, seed=0, name="a", incarnation=1))
    assert set(inputs[:, 0].tolist()) == {0, 1, 2}


def test_each_target_is_the_byte_after_its_input(library: Corpus) -> None:
    inputs, targets = next(batches(library.train, 4, LENGTH, seed=3, name="b", incarnation=9))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (4, LENGTH)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_stream_depends_on_seed_name_and_incarnation_and_on_nothing_else(library: Corpus) -> None:
    first = draw(library, 3)
    assert draw(library, 3) == first
    assert draw(library, 3, name="b") != first
    assert draw(library, 3, incarnation=2) != first
    assert draw(library, 3, seed=1) != first


def test_the_baselines_are_in_their_order_and_a_constant_text_costs_nothing(library: Corpus, tmp_path: Path) -> None:
    marks = baselines(library, "A")
    assert marks["uniform"] == pytest.approx(np.log(256))
    assert marks["bigram"] < marks["unigram"] < marks["uniform"]
    constant = load_corpus(written(tmp_path / "constant", b"a" * 100_000), LENGTH)
    assert baselines(constant, "B")["bigram"] < 0.01


def test_a_path_that_is_not_utf8_can_be_read_and_shown(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff \xf0\x9f\x98\x80.txt"))
    with pytest.raises(SettingError) as refused:
        load_corpus(written(path, b"x"), LENGTH)
    assert "\\xff" in str(refused.value)
    source = load_corpus(written(path, b"x" * 1000), LENGTH).source
    assert source.endswith("/\\xff \U0001f600.txt")
    source.encode()
