"""Text that is tokenized while it is trained on: every rank's share, and where a resumed run goes on."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SCRIPT, Result, clean_environment


@pytest.fixture
def corpus(tmp_path, prose):
    """Documents in so many files, of which each line has its own text."""

    def write(files):
        folder = tmp_path / f"corpus{files}"
        folder.mkdir()
        documents = [f"{number} {text}" for number, text in enumerate(prose.split("\n\n"))]
        for number in range(files):
            lines = (json.dumps({"text": text}) for text in documents[number::files])
            (folder / f"{number}.jsonl").write_text("\n".join(lines))
        return str(folder / "*.jsonl")

    return write


@pytest.mark.parametrize("files", [1, 4])
def test_ranks_share_the_blocks_and_begin_again_at_the_end(gpt2, corpus, files):
    """Nothing twice, nothing missing but the rest of a batch of documents, in every pass."""
    source = [corpus(files)], gpt2.load_tokenizer("byte"), 128
    expected = sorted(tuple(block["input_ids"].tolist()) for block in gpt2.load_text_dataset(*source, stream=True))
    assert len(expected) > 1000
    shares = []
    for rank in range(2):
        stream = gpt2.TextStream(*source, rank, 2)
        stream.start = {}  # nothing is held out
        ids = [tuple(sample["input_ids"].tolist()) for sample in itertools.islice(iter(stream), 2 * len(expected))]
        period = ids.index(ids[0], 1)
        assert ids[period:2 * period] == ids[:period]
        shares += ids[:period]
    assert len(shares) == pytest.approx(len(expected), abs=files) and len(set(shares)) > len(shares) - 5
    assert files > 1 or sorted(shares) == expected  # of several files, the ranks pack different ones together


@pytest.mark.parametrize("files", [1, 2, 3, 4])
def test_later_passes_begin_after_what_is_held_out(gpt2, corpus, files):
    """On every rank of two, whether its share is files or every other block; and ranks never see the same."""
    source, seen = ([corpus(files)], gpt2.load_tokenizer("byte"), 512), []
    for rank in range(2):
        whole = [block["input_ids"].tolist() for block in gpt2.TextStream(*source, rank, 2).blocks]
        stream = gpt2.TextStream(*source, rank, 2)
        held_out = list(itertools.islice(stream, 128))
        stream.position = stream.start = held_out[-1]["position"]
        ids = [sample["input_ids"].tolist() for sample in itertools.islice(stream, 2 * (len(whole) - 128))]
        assert [sample["input_ids"].tolist() for sample in held_out] == whole[:128] and ids == 2 * whole[128:]
        seen.append(set(map(tuple, whole)))
    assert not seen[0] & seen[1]


@pytest.mark.parametrize("files", [1, 4])
def test_a_position_goes_on_after_its_sample(gpt2, corpus, files, tmp_path):
    """Also at the last sample of a pass, and through the file of a checkpoint."""
    source = [corpus(files)], gpt2.load_tokenizer("byte"), 512, 0, 2
    length = sum(1 for _ in gpt2.TextStream(*source).blocks)
    stream = gpt2.TextStream(*source)
    stream.start = {}  # nothing is held out
    samples = list(itertools.islice(stream, length + 20))
    for number in (0, 7, length // 2, length - 2, length - 1, length, length + 5):
        gpt2.torch.save(samples[number]["position"], tmp_path / "stream.pt")
        stream.position = gpt2.torch.load(tmp_path / "stream.pt")
        following = next(iter(stream))["input_ids"]
        assert following.tolist() == samples[number + 1]["input_ids"].tolist(), number


def test_what_is_held_out_is_never_trained_on(gpt2, corpus):
    """Nor in later passes, and not after a resumption at the end of the text."""
    settings = gpt2.Settings(data=[corpus(1)], stream=True, max_steps=1, eval_fraction=None)
    stream, held_out = gpt2.build_datasets(settings, 512, 384, gpt2.load_tokenizer("byte"))
    held_out = {tuple(sample["input_ids"].tolist()) for sample in held_out}
    length = sum(1 for _ in stream.blocks) - 256
    samples = list(itertools.islice(stream, 2 * length + 5))
    ids = [tuple(sample["input_ids"].tolist()) for sample in samples]
    assert len(held_out) == 256 and not held_out & set(ids) and ids[length:2 * length] == ids[:length]
    stream.position = samples[length - 1]["position"]
    assert tuple(next(iter(stream))["input_ids"].tolist()) == ids[0]


@pytest.mark.parametrize("files", [1, 2])
def test_the_curve_goes_on(train, corpus, files):
    """On two ranks, into the second pass over the text; what is held out is the same."""
    options = {"ranks": 2, "data": corpus(files), "tokenizer": "byte", "dtype": "fp32", "seq_len": 64, "num_samples": None,
               "max_steps": 12, "micro_batch": 32}
    whole = train("--stream", output_dir="whole", **options).ok()
    parts = [train("--stream", "--resume", "auto", output_dir="parts", **options | extra).ok()
             for extra in ({"stop_after": 5}, {})]
    assert parts[0].losses | parts[1].losses == whole.losses and list(parts[1].losses) == list(range(6, 13))
    before = [next(line for line in run.out.splitlines() if line.startswith("held out, before")) for run in (whole, parts[0])]
    assert before[0] == before[1] and "a stream of training samples, 256 held out" in whole.out
    options.pop("ranks")
    for flags, says in ((["--stream"], "number of streams (0 without --stream) there is 2, that of this run 1"),
                        ([], "number of samples there is [0, 256]")):
        alone = train(*flags, "--resume", "auto", output_dir="parts", **options)
        assert alone.rc == 2 and says in alone.errors[0]


def test_a_stream_resumes_past_a_damaged_position(train, tmp_path, corpus, gpt2):
    """From the checkpoint before; and not at all on an edited or on other text of the same name."""
    options = {"data": corpus(1), "tokenizer": "byte", "num_samples": None, "max_steps": 8, "save_every": 2, "seq_len": 64}
    train("--stream", stop_after=4, **options).ok()
    position = tmp_path / "runs/gpt2/checkpoints/global_step4/stream0.pt"
    whole = position.read_bytes()
    directory = whole.index(b"PK\1\2")
    settings = gpt2.Settings(resume="auto", output_dir=str(tmp_path / "runs/gpt2"))
    for place in (29, 200, directory + 9, directory + 10):  # a header, what is pickled, and what zipfile does not check
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        position.write_bytes(damaged)
        assert Path(gpt2.find_checkpoint(settings)[0]).name == "global_step2", place
    resumed = train("--stream", "--resume", "auto", stop_after=0, **options).ok()
    assert "global_step4 is not whole" in resumed.out and "continuing after update 2" in resumed.out
    with open(tmp_path / "corpus1/0.jsonl", "a") as file:
        file.write(" ")
    edited = train("--stream", "--resume", "auto", **options)
    assert edited.rc == 2 and "size of the files there is" in edited.errors[0]
    size = (tmp_path / "corpus1/0.jsonl").stat().st_size - 1
    (tmp_path / "corpus1/0.jsonl").write_text(json.dumps({"text": ("other" * size)[:size - len(json.dumps({"text": ""}))]}))
    other = train("--stream", "--resume", "auto", **options)
    assert other.rc == 2 and "checksum of held-out samples there is" in other.errors[0]


@pytest.mark.parametrize("bad, says", [('{"text": null}', "a row has the text None, after '"),
                                       ('{"other": 1}', "a row has the text None, after '"), ('{"text": "\xff"}', "")])
def test_text_that_goes_bad_on_the_way(train, tmp_path, prose, bad, says):
    """One line that names the data and the cause, from the loader's process too; the checkpoint before stays."""
    lines = [json.dumps({"text": prose[start:start + 99]}) for start in range(0, 300_000, 99)]
    (tmp_path / "text.jsonl").write_text("\n".join([*lines, bad]), encoding="latin-1")
    result = train("--stream", data="text.jsonl", tokenizer="byte", max_steps=500, num_samples=None, save_every=5)
    assert result.rc == 2 and len(result.errors) == 1 and "--data text.jsonl: neither readable" in result.errors[0]
    assert says in result.errors[0] and "Traceback" not in result.err and (tmp_path / "runs/gpt2/checkpoints/latest").exists()


@pytest.mark.parametrize("text, flags, says", [
    (None, ["--max_steps", 3], "give --data and --max_steps"), ("x" * 9999, [], "give --data and --max_steps"),
    ("short", ["--max_steps", 3], "too little text"), ("a few words\n" * 1500, ["--max_steps", 3], "too little text"),
    (b"\xff" * 999, ["--max_steps", 3], "UnicodeDecodeError"),
    ("x" * 99999, ["--max_steps", 3, "--num_samples", 9], "takes neither --num_samples nor --eval_fraction")])
def test_what_cannot_be_streamed(train, tmp_path, text, flags, says):
    if text:
        (tmp_path / "text.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
        flags = [*flags, "--data", "text.txt", "--tokenizer", "byte"]
    result = train("--stream", *flags, max_steps=None, num_samples=None)
    assert result.rc == 2 and len(result.errors) == 1 and says in result.errors[0]


@pytest.mark.parametrize("fails, status", [("pass", 2), ("raise RuntimeError('in the update')", 1)])
def test_an_error_beside_the_process_of_a_loader(tmp_path, prose, fails, status):
    """As on a GPU, where a process makes the batches: what it finds ends the run with one line, and nothing hangs."""
    lines = [json.dumps({"text": prose[start:start + 99]}) for start in range(0, 200_000, 99)]
    (tmp_path / "text.jsonl").write_text("\n".join([*lines, json.dumps({"text": None})]))
    (tmp_path / "run.py").write_text(f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import train_gpt2_deepspeed as gpt2
gpt2.init_distributed()
settings = gpt2.Settings(data=["text.jsonl"], stream=True, max_steps=100)
make = gpt2.DataLoader
gpt2.DataLoader = lambda *args, **options: make(*args, **options | {{"num_workers": 1, "prefetch_factor": 2}})
training, _ = gpt2.build_datasets(settings, 128, 384, gpt2.load_tokenizer("byte"))
for _ in gpt2.updates(gpt2.build_dataloader(training, 8, 4, 1, 0, 0), 4, 0, 100):
    print("update")
    {fails}
""")
    result = Result(subprocess.run([sys.executable, "run.py"], cwd=tmp_path, env=clean_environment(), text=True,
                                   capture_output=True, timeout=60))
    assert result.rc == status and "update" in result.out and "Exception ignored" not in result.err
    if status == 2:
        assert len(result.errors) == 1 and "--data text.jsonl: neither readable" in result.errors[0]
        assert result.out.count("update") > 20 and "Traceback" not in result.err
