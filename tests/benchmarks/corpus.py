"""A large corpus: how fast it is tokenized, how soon a run starts on it, and what memory it costs each rank.

    python tests/benchmarks/corpus.py                                2 GB of text: 15 minutes, 7 GB of disk
    python tests/benchmarks/corpus.py --bytes 2e7 --zero_stage 2     any setting of the script may follow

The text is the prose that every Python brings along, its lines in a new order at each pass, with a BPE of 8,192
tokens trained on it. Few words repeat often there, which a tokenizer likes: other text may be slower. The script
trains the small model on two ranks three times: on 2 MB, on the large corpus with an empty cache, and again from
the cache. Its lines, as they appear, tell seconds from the start of the launcher: `data` when the samples are
counted, `update` at the end of the first. /proc tells, of each rank, seconds of CPU until the samples were counted
(a rank that waits uses few), and the peak resident MiB before and after the first update: its own, and with the
pages of files, which ranks share and the kernel takes back. `growth`: its own, after, over that on 2 MB.
The table and all numbers go to --out.
"""

import argparse
import json
import os
import pydoc_data.topics
import random
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
PROSE = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore").decode()  # cut at any byte
RANKS = range(2)


def write_corpus(folder, size, files):
    """Text files in `folder`, of `size` bytes together, no two of them alike."""
    folder.mkdir()
    lines = PROSE.splitlines(keepends=True)
    for number in range(files):
        order, left = random.Random(f"{folder.name} {number}"), size // files
        with open(folder / f"{number}.txt", "wb") as file:
            while left:
                order.shuffle(lines)
                left -= file.write("".join(lines).encode()[:left])


def write_tokenizer(folder):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator([PROSE], trainers.BpeTrainer(
        vocab_size=8192, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>").save_pretrained(folder)


def watch(launcher):
    """(time, rank, CPU seconds, own MiB, resident MiB) of each rank, over and over, until the end."""
    samples = []
    while launcher.poll() is None:
        for process in psutil.Process(launcher.pid).children():
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
                own, resident = (int(re.search(rf"{key}:\s+(\d+)", status)[1]) / 1024 for key in ("RssAnon", "VmRSS"))
                samples.append((time.monotonic(), int(process.environ()["RANK"]), sum(process.cpu_times()[:2]),
                                own, resident))
            except (psutil.Error, OSError, LookupError, TypeError):  # it starts, or ends
                continue
        time.sleep(0.05)
    return samples


def train(name, scratch, args, settings):
    """Run the script on a corpus; return what its lines and /proc told."""
    command = ["torchrun", "--standalone", "--nproc_per_node", len(RANKS), ROOT / "train_gpt2_deepspeed.py", "--data",
               scratch / name.split()[0] / "*.txt", "--tokenizer", scratch / "tokenizer", "--model", "nano", "--seq_len",
               128, "--dtype", "fp32", "--max_steps", 10, "--output_dir", scratch / "run", *settings]
    begin, seen = time.monotonic(), []
    with open(args.out / f"{name}.log", "w") as log, ThreadPoolExecutor(1) as pool, subprocess.Popen(
            list(map(str, command)), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | {"HF_HOME": str(scratch / "cache"), "HF_HUB_OFFLINE": "1"}) as launcher:
        watching = pool.submit(watch, launcher)
        for line in launcher.stdout:
            print(f"{time.monotonic() - begin:8.2f} {line}", end="", file=log, flush=True)
            if re.search(r"tokens per sample|training samples|step +1/", line):
                seen.append((time.monotonic(), line))
        samples = watching.result()
    if launcher.returncode:
        sys.exit(f"error: {name} failed, see {log.name}")
    (config, _), (data, line), (first, _) = seen

    def peak(column, since, until):
        return [max(s[column] for s in samples if s[1] == rank and since <= s[0] < until) for rank in RANKS]

    end = samples[-1][0] + 1
    return {"corpus": name, "samples": int(line.split()[0].replace(",", "")), "data": data - begin,
            "update": first - begin, "reading": data - config,
            "CPU": [b - a for a, b in zip(peak(2, begin, config), peak(2, begin, data))],
            "own before": peak(3, begin, first), "resident before": peak(4, begin, first),
            "own after": peak(3, first, end), "resident after": peak(4, first, end),
            "cache": {str(file): file.stat().st_size for file in Path(scratch, "cache").rglob("*.arrow")}}


def report(rows, args):
    small, cold, warm = rows
    for row in rows:
        row["growth"] = [own - base for own, base in zip(row["own after"], small["own after"])]
    speed = args.bytes / 1e6 / (cold["reading"] - warm["reading"])
    per_core = args.bytes / 1e6 / (sum(cold["CPU"]) - sum(warm["CPU"]))
    new = {name: size for name, size in cold["cache"].items() if name not in small["cache"]}
    lines = [f"{args.bytes:,.0f} bytes, {len(os.sched_getaffinity(0))} cores: {speed:.2f} MB/s, {per_core:.2f} per second"
             f" of CPU; {len(new)} new files in the cache, {sum(new.values()):,} bytes, and"
             f" {len(warm['cache']) - len(cold['cache'])} by the second run", ""]
    keys = [key for key in small if key not in ("reading", "cache")]
    text = {list: lambda numbers: " / ".join(f"{number:,.0f}" for number in numbers), float: "{:.1f}".format}
    lines += [f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
    lines += [f"| {' | '.join(text.get(type(row[key]), str)(row[key]) for key in keys)} |" for row in rows]
    (args.out / "corpus.json").write_text(json.dumps(
        {"bytes": args.bytes, "mb_per_s": speed, "mb_per_cpu_s": per_core, "rows": rows}, indent=1))
    (args.out / "corpus.md").write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, default=2e9)
    parser.add_argument("--out", type=Path, default=Path("runs/corpus"), help="folder of the results, and scratch")
    args, settings = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.absolute()) as folder:
        write_tokenizer(Path(folder, "tokenizer"))
        write_corpus(Path(folder, "small"), 2_000_000, 1)
        write_corpus(Path(folder, "large"), int(args.bytes), 8)
        report([train(name, Path(folder), args, settings) for name in ("small", "large", "large again")], args)
