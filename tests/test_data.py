"""The data: a source whose entropy is known, real text, and every rank's share of every epoch."""

import gc
import json
import math
import os
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler


@pytest.mark.parametrize("structure, zipf", [(0.9, 1.0), (0.5, 0.0), (0.0, 1.2), (1.0, 1.0)])
def test_floor_is_the_entropy_of_the_source(gpt2, structure, zipf):
    """Against the definition, with a transition matrix and a distribution that is stepped along."""
    data = gpt2.SyntheticTextDataset(1, 20, 50, structure=structure, zipf=zipf, seed=3)
    fresh = np.empty(50)
    fresh[data.cycle] = data.fresh  # by token
    successor = {int(data.cycle[i]): int(data.cycle[(i + 1) % 50]) for i in range(50)}
    matrix = (1 - structure) * np.tile(fresh, (50, 1))
    for token, follower in successor.items():
        matrix[token, follower] += structure
    logs = np.log(np.where(matrix > 0, matrix, 1))
    at, expected = fresh, []
    for _ in range(19):
        expected.append(-(at[:, None] * matrix * logs).sum())
        at = at @ matrix
    assert data.entropy_floor() == pytest.approx(np.mean(expected), abs=1e-9)


def test_samples_have_the_entropy_of_the_source(gpt2):
    """The mean surprise of the drawn tokens, under the true probabilities, is the floor."""
    data = gpt2.SyntheticTextDataset(400, 128, 64, seed=5)
    surprise = []
    for sample in (data[i]["input_ids"].numpy() for i in range(len(data))):
        last, following = data.place[sample[:-1]], data.place[sample[1:]]
        p = (1 - data.structure) * data.fresh[following] + data.structure * ((following - last) % 64 == 1)
        surprise.append(-np.log(p).mean())
    assert np.mean(surprise) == pytest.approx(data.entropy_floor(), rel=0.02)


def test_uniform_noise_has_the_floor_of_its_vocabulary(gpt2):
    data = gpt2.SyntheticTextDataset(64, 256, 100, structure=0, zipf=0)
    assert data.entropy_floor() == pytest.approx(math.log(100))
    counts = np.bincount(torch.cat([data[i]["input_ids"] for i in range(64)]), minlength=100)
    assert counts.min() > 100 and counts.max() < 230  # 163.84 expected, sigma 12.7


def test_samples_depend_on_seed_and_index_only(gpt2):
    make = lambda **kwargs: gpt2.SyntheticTextDataset(8, 32, 100, **kwargs)  # noqa: E731
    ids = lambda data, i: data[i]["input_ids"].tolist()  # noqa: E731
    assert ids(make(seed=1), 5) == ids(make(seed=1), 5)
    assert ids(make(seed=1), 5) != ids(make(seed=2), 5)
    assert ids(make(seed=1, first=5), 0) == ids(make(seed=1), 5)  # held out = later indices
    assert len({tuple(ids(make(), i)) for i in range(8)}) == 8


def test_frequencies_follow_zipf(gpt2):
    data = gpt2.SyntheticTextDataset(1, 8, 1000, zipf=1.0)
    ranked = np.sort(data.fresh)[::-1]
    assert ranked[0] / ranked[9] == pytest.approx(10) and ranked.sum() == pytest.approx(1)


def text_files(folder, *texts):
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return [str(folder / "*.txt")]


@pytest.fixture
def byte(gpt2):
    return gpt2.load_tokenizer("byte")


def stream(blocks):
    return [i for block in blocks for i in block["input_ids"].tolist()]


def test_documents_are_joined_by_end_of_text_and_packed(gpt2, byte, tmp_path):
    blocks = gpt2.load_text_dataset(text_files(tmp_path, "abc\ndef", "é"), byte, 4)
    expected = byte("abc\ndef", add_special_tokens=False)["input_ids"] + [byte.eos_token_id] \
        + byte("é", add_special_tokens=False)["input_ids"] + [byte.eos_token_id]
    assert stream(blocks) == expected[:len(expected) // 4 * 4]
    assert blocks[0]["input_ids"].dtype == torch.int64 and blocks[0]["input_ids"].shape == (4,)


def test_a_large_file_is_one_document(gpt2, byte, tmp_path, prose):
    """Read in pieces, but no byte is lost between them, and there is one end-of-text at the end."""
    blocks = gpt2.load_text_dataset(text_files(tmp_path, prose), byte, 64)
    ids = stream(blocks)
    assert byte.decode(ids) == prose[:len(byte.decode(ids))] and len(prose.encode()) - len(ids) < 64
    assert byte.eos_token_id not in ids


def test_json_lines_hold_a_document_each(gpt2, byte, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("ab", "c")))
    ids = stream(gpt2.load_text_dataset([str(tmp_path / "a.jsonl")], byte, 5))
    assert byte.decode(ids) == "ab</s>c</s>"


def test_an_edited_file_is_read_anew(gpt2, byte, tmp_path):
    names = text_files(tmp_path, "a" * 40)
    assert byte.decode(gpt2.load_text_dataset(names, byte, 8)[0]["input_ids"]) == "a" * 8
    text_files(tmp_path, "b" * 41)
    assert byte.decode(gpt2.load_text_dataset(names, byte, 8)[0]["input_ids"]) == "b" * 8


def test_tokenizing_happens_once(gpt2, byte, tmp_path, prose):
    names = text_files(tmp_path, prose[:50_000])
    first, second = (gpt2.load_text_dataset(names, byte, 32) for _ in range(2))
    assert first.cache_files == second.cache_files and first.cache_files  # and memory-mapped from there
    assert first._fingerprint == second._fingerprint


def test_held_out_blocks_are_not_trained_on(gpt2, byte, tmp_path, prose):
    settings = gpt2.Settings(data=text_files(tmp_path, prose), tokenizer="byte", eval_fraction=0.1)
    training, held_out = gpt2.build_datasets(settings, 128, 384, byte)
    text = byte.decode(stream(training)) + byte.decode(stream(held_out))
    assert text == prose[:len(text)]  # one after the other: nothing twice, nothing lost
    assert len(held_out) == math.ceil(0.1 * (len(training) + len(held_out)))


def test_no_more_of_a_large_text_is_held_out_than_serves(gpt2, byte, tmp_path, prose):
    data = text_files(tmp_path, prose[:400_000])
    sizes = [len(gpt2.build_datasets(gpt2.Settings(data=data, eval_fraction=fraction), 16, 384, byte)[1])
             for fraction in (None, 0.05)]
    assert sizes[0] == 1024 and sizes[1] >= 1250


def test_num_samples_limits_a_text_but_not_what_is_held_out(gpt2, byte, tmp_path, prose):
    data = text_files(tmp_path, prose[:100_000])
    _, all_held_out = gpt2.build_datasets(gpt2.Settings(data=data), 64, 384, byte)
    training, held_out = gpt2.build_datasets(gpt2.Settings(data=data, num_samples=10), 64, 384, byte)
    assert len(training) == 10 and stream(held_out) == stream(all_held_out)


def test_bytes_per_token(gpt2, byte, tmp_path):
    held_out = gpt2.load_text_dataset(text_files(tmp_path, "añb" * 100), byte, 20)
    assert gpt2.count_bytes_per_token(held_out, byte) == pytest.approx(1)


def shares(gpt2, size, per_update, ranks, epoch, start=0):
    """The indices of each rank in an epoch, from the update `start` on."""
    result = []
    for rank in range(ranks):
        sampler = gpt2.UpdateSampler(size, per_update // 2, 2, ranks, rank, seed=7)
        sampler.begin, sampler.end = epoch * sampler.updates + start, (epoch + 1) * sampler.updates
        result.append([index for micro_batch in sampler for index in micro_batch])
    return result


def test_ranks_share_an_epoch_without_overlap(gpt2):
    first, second = (shares(gpt2, 50, 6, 4, epoch) for epoch in (0, 1))
    for epoch in (first, second):
        seen = [i for share in epoch for i in share]
        assert len(set(seen)) == len(seen) == 48 and all(len(share) == 12 for share in epoch)
    assert first != second


def test_an_update_sees_the_same_samples_on_any_number_of_ranks(gpt2):
    one, two, four = (shares(gpt2, 50, 24 // ranks, ranks, 1) for ranks in (1, 2, 4))
    for update in range(2):
        sets = [{i for share in parts for i in share[update * n:(update + 1) * n]}
                for parts, n in ((one, 24), (two, 12), (four, 6))]
        assert sets[0] == sets[1] == sets[2] and len(sets[0]) == 24


def test_resuming_skips_exactly_what_was_seen(gpt2):
    whole = shares(gpt2, 50, 6, 2, 3)
    rest = shares(gpt2, 50, 6, 2, 3, start=1)
    assert [share[6:] for share in whole] == rest


def test_the_order_is_that_of_torch_without_its_list(gpt2):
    """A list of Python's ints would take 36 bytes per sample and rank."""
    sampler = gpt2.UpdateSampler(300_001, 4, 2, 3, 1, seed=7)
    sampler.begin, sampler.end = 2 * sampler.updates, 3 * sampler.updates
    tracemalloc.start()
    first = next(iter(sampler))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    torchs = DistributedSampler(range(300_001), 3, 1, seed=7, drop_last=True)
    torchs.set_epoch(2)
    expected, micro_batches = list(torchs), list(sampler)
    assert micro_batches[0] == first == expected[:4] and len(micro_batches) == 2 * sampler.updates
    assert sum(micro_batches, []) == expected[:8 * sampler.updates] and type(first[0]) is int
    assert peak < 100_000


def test_updates_close_at_the_end_of_an_epoch(gpt2):
    """10 samples, 2 x 2 an update: two are left over in each epoch, other ones each time."""
    data = gpt2.SyntheticTextDataset(10, 8, 64)
    loader = gpt2.build_dataloader(data, 2, 2, 1, 0, seed=1)
    seen = [(epoch, [len(batch["input_ids"]) for batch in batches])
            for epoch, batches in gpt2.updates(loader, 2, 0, 6)]
    assert seen == [(0, [2, 2])] * 2 + [(1, [2, 2])] * 2 + [(2, [2, 2])] * 2
    ids = lambda begin, end: [batch["input_ids"].tolist()  # noqa: E731
                              for _, batches in gpt2.updates(loader, 2, begin, end) for batch in batches]
    assert ids(0, 6)[6:] == ids(3, 6)  # from the middle of an epoch on


def test_less_data_than_an_update_is_refused(gpt2, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpt2.build_dataloader(gpt2.SyntheticTextDataset(7, 8, 64), 2, 4, 1, 0, seed=1)
    assert "2 (micro-batch) x 4 (accumulation) x 1 (processes)" in capsys.readouterr().err


def test_a_folder_is_a_dataset_like_one_of_the_hub(gpt2, byte, tmp_path):
    """What `datasets` finds in it by itself: here the split "train" of a folder of JSON lines."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("ab", "cd")))
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": "no"}) + "\n")
    assert byte.decode(stream(gpt2.load_text_dataset([str(tmp_path)], byte, 3))) == "ab</s>cd</s>"


def test_a_loading_process_collects_no_garbage_of_its_parent(gpt2, tmp_path):
    """CUDA objects of an earlier engine would abort the fork that destroys them: it must leave them alone."""

    class Engine:  # in a cycle, as engines are: only the collector ends it
        def __init__(self):
            self.me = self

        def __del__(self):
            (tmp_path / f"ended in {os.getpid()}").touch()

    gc.collect()
    gc.disable()
    try:
        Engine()
        loader = DataLoader([0], num_workers=1, multiprocessing_context="fork", worker_init_fn=lambda worker: (
            gpt2.init_worker(worker), gc.collect()))
        assert list(loader) and not list(tmp_path.iterdir())
    finally:
        gc.enable()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [f"ended in {os.getpid()}"]
