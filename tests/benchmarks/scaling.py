"""Several processes against one: curve, speed, memory and bytes of each ZeRO stage and of a pipeline.

    python tests/benchmarks/scaling.py --processes 2 --models 124M:100 774M:20 --dtype bf16    two GPUs
    python tests/benchmarks/scaling.py --models nano:20 --dtype fp32                            two CPU processes

Each row is a run of the script by the `deepspeed` launcher, MODEL:UPDATES updates long, with the samples per update of
the first, which is one process at ZeRO-1; further options of the script hold for all rows. Columns: tokens/s of all
processes, the median from the third update on; `each`: per process, over that of one process; the largest distance of
a loss from the curve of one process, and the last loss; the peak on the device of rank 0, planned and measured; and
what a process sends in an update. A pipeline of S stages idles for (S - 1) / (m + S - 1) of the time with m
micro-batches: rows with other `grad_accum` show that, and have no curve to compare.

At the end: a run on all processes that is stopped, goes on on one, and again on all, against one that was not
stopped, at ZeRO-3 in fp32, with the samples that it generates; and Ctrl-C, sent to the launcher and all processes.
The table and all numbers go to --out.
"""

import argparse
import importlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
ROWS = ("zero_stage=0", "zero_stage=1", "zero_stage=2", "zero_stage=3", "zero_stage=3 compress_gradients=true",
        "pipeline_stages=2", "pipeline_stages=2 grad_accum=2", "pipeline_stages=2 grad_accum=32")


class Run:
    """The script under the real launcher on so many processes, with its output line by line in `lines`."""

    def __init__(self, gpt2, processes, flags, folder):
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", processes, "--master_port",
                   gpt2.get_free_port(), ROOT / "train_gpt2_deepspeed.py", *flags, "--output_dir", folder, "--log_every", 1]
        print(" ".join(map(str, command[5:])), flush=True)
        self.pattern, self.lines = gpt2.LOG_LINE, []
        self.process = subprocess.Popen([str(part) for part in command], text=True, start_new_session=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def updates(self):
        """Yield `(update, loss, tokens/s, peak GiB)` as they are logged."""
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if logged := self.pattern.search(line):
                yield int(logged[1]), float(logged[2]), float(logged[3].replace(",", "")), float(logged[4])
        self.process.wait()

    def find(self, pattern):
        return next(filter(None, (re.search(pattern, line) for line in self.lines)), None)

    def result(self):
        """The run as numbers, once it has ended."""
        logged = list(self.updates())
        if self.process.returncode or not logged:
            return {"error": next((line for line in self.lines if "rror:" in line), self.lines[-1])[:200]}
        sent = self.find(r"an update sends, in MiB per process: (.*)")
        return {"losses": {update: loss for update, loss, _, _ in logged}, "peak": max(peak for *_, peak in logged),
                "tokens_per_second": statistics.median([speed for _, _, speed, _ in logged][2:] or [0]),
                "planned": float(planned[1]) if (planned := self.find(r"plan: (\S+) .*GiB of device")) else None,
                "sent": sent[1] if sent else "", "sample": self.find("sample after: (.*)")[1],
                "samples": int(self.find(r"= (\d+) samples = ")[1])}


def distance(losses, reference):
    """The largest difference of two curves, which must have the same updates; None if they have not."""
    if losses.keys() != reference.keys():
        return None
    return max(abs(loss - reference[update]) for update, loss in losses.items())


def scale(gpt2, processes, model, updates, options, rows, out):
    """Results by row, of which the first is one process."""
    base = ["--model", model, "--max_steps", updates, *options]
    first = [*base, "--zero_stage", 1]
    results = {"one process": Run(gpt2, 1, first, out / "run").result()}
    one = results["one process"]
    if "error" in one:
        return results
    settings = gpt2.parse_settings(["", *map(str, base)])
    micro_batch = settings.micro_batch or json.loads((ROOT / "ds_config.json").read_text())[
        "train_micro_batch_size_per_gpu"]
    for row in rows:
        given = dict(change.split("=") for change in row.split())
        share = one["samples"] // micro_batch // (processes // int(given.get("pipeline_stages", 1)))
        given = {"zero_stage": 1, "grad_accum": share} | given
        flags = [part for name, value in given.items() for part in (f"--{name}", value)]
        result = results[row] = Run(gpt2, processes, [*base, *flags], out / "run").result()
        if "error" not in result:
            result["each"] = result["tokens_per_second"] / processes / one["tokens_per_second"]
            same = result["samples"] == one["samples"]
            result["distance"] = distance(result["losses"], one["losses"]) if same else None
    return results


def resume(gpt2, processes, model, options, out):
    """From all processes to one and back: the distance of the curve from that of a run that was not stopped."""
    flags = ["--model", model, *options, "--dtype", "fp32", "--zero_stage", 3, "--max_steps", 9]
    whole = Run(gpt2, processes, flags, out / "whole").result()
    parts = [Run(gpt2, count, [*flags, "--resume", "auto", "--stop_after", 3], out / "parts").result()
             for count in (processes, 1, processes)]
    if errors := [result["error"] for result in (whole, *parts) if "error" in result]:
        return {"error": errors[0]}
    losses = {update: loss for part in parts for update, loss in part["losses"].items()}
    return {"distance": distance(losses, whole["losses"]), "sample": whole["sample"],
            "sample of the resumed run": parts[-1]["sample"]}


def interrupt(gpt2, processes, model, options, out):
    """Ctrl-C after some updates: seconds until all has ended, the exit status, and whether it was saved."""
    run = Run(gpt2, processes, ["--model", model, *options, "--max_steps", 10000], out / "interrupted")
    for update, *_ in run.updates():
        if update == 5:
            os.killpg(run.process.pid, signal.SIGINT)
            began = time.perf_counter()
    if not run.find("saved .*global_step"):
        return {"error": next((line for line in run.lines if "rror:" in line), run.lines[-1])[:200]}
    return {"seconds": time.perf_counter() - began, "status": run.process.returncode,
            "saved": run.find(r"saved \S*(global_step\d+)")[1]}


COLUMNS = {"tokens/s": ("tokens_per_second", ",.0f"), "each": ("each", ".1%"), "distance": ("distance", ".1e"),
           "last loss": ("last", ".4f"), "peak GiB": ("peak", ".2f"), "planned": ("planned", ".2f"),
           "MiB sent": ("sent", ""), "": ("error", "")}


def report(results, out):
    """Write scaling.json and scaling.md into `out`. Returns the table."""
    (out / "scaling.json").write_text(json.dumps(results, indent=1))
    lines = [f"| row | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for model, rows in results["models"].items():
        for name, row in rows.items():
            row = row | {"last": list(row["losses"].values())[-1]} if "losses" in row else row
            cells = ["" if row.get(key) is None else format(row[key], form) for key, form in COLUMNS.values()]
            lines.append(f"| {model} {name} | {' | '.join(cells)} |")
    lines += ["", *(f"{name}: {json.dumps(value)}" for name, value in results.items() if name != "models")]
    (out / "scaling.md").write_text("\n".join(lines) + "\n")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["nano:20"], help="MODEL:UPDATES")
    parser.add_argument("--rows", nargs="+", default=ROWS, help="'NAME=VALUE NAME=VALUE'")
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"), help="folder of the results")
    args, options = parser.parse_known_args()
    gpt2 = importlib.import_module("train_gpt2_deepspeed")
    args.out.mkdir(parents=True, exist_ok=True)
    results = {"processes": args.processes, "options": " ".join(options), "models": {}}
    for model in args.models:
        name, _, updates = model.partition(":")
        results["models"][name] = scale(gpt2, args.processes, name, int(updates or 20), options, args.rows, args.out)
        report(results, args.out)
    name = args.models[0].partition(":")[0]
    results["resumed on one process and again on all"] = resume(gpt2, args.processes, name, options, args.out)
    results["Ctrl-C"] = interrupt(gpt2, args.processes, name, options, args.out)
    print("\n" + report(results, args.out), flush=True)


if __name__ == "__main__":
    main()
