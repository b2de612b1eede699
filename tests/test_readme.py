"""The README's commands, run as they stand there: every line of its ```bash blocks but pytest's own."""

import re
import subprocess

import pytest
from conftest import LINE, ROOT, Result, clean_environment
from test_runs import scalars

BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
LINES = [line for block in BLOCKS for line in block.splitlines() if "pytest" not in line]


def shell(line, folder):
    """Run a line as a user would, in a shell."""
    return Result(subprocess.run(["bash", "-c", line], cwd=folder, env=clean_environment(), text=True,
                                 capture_output=True, timeout=900)).ok()


def test_the_first_command_trains_to_the_floor(checkout):
    """The main job: two epochs, down to within 10 % of the entropy floor, and everything that it leaves."""
    assert LINES[0] == "pip install -r requirements.txt && deepspeed train_gpt2_deepspeed.py"
    result = shell(LINES[0], checkout)
    above = float(re.search(r"held out, after: loss \S+ (\S+)% above the entropy floor", result.out)[1])
    assert 0 <= above < 10
    runs = checkout / "runs/gpt2"
    steps = [step for step, _ in scalars(runs / "tensorboard")["Train/Samples/train_loss"]]
    assert len(steps) == len(result.lines) and steps[-1] == 4608 * 2
    assert len(list((runs / "checkpoints").glob("global_step*"))) == 2
    assert (runs / "model/model.safetensors").is_file() and (runs / "loss.png").stat().st_size > 5000


@pytest.mark.parametrize("number", range(1, len(LINES)), ids=lambda number: LINES[number][:60])
def test_the_other_commands(checkout, prose, number):
    (checkout / "text.txt").write_text(prose)
    result = shell(LINES[number], checkout)
    ends = [end for option, end in (("--plan", "plan: a checkpoint"), ("--compare", "| setting |"),
                                    ("train_gpt2", "written to runs/gpt2")) if option in LINES[number]]
    assert not ends or ends[0] in result.out


def test_every_setting_is_in_the_table(gpt2):
    table = (ROOT / "README.md").read_text().split("## Settings")[1].split("\n## ")[0]
    for field in gpt2.dataclasses.fields(gpt2.Settings):
        assert f"`{field.name}`" in table, field.name


def test_the_log_line_is_as_documented():
    assert LINE.findall((ROOT / "README.md").read_text())
