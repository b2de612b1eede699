"""The file as a notebook, in a real kernel: as jupytext makes it, in one cell, twice, and under %run."""

import os
import signal
import threading
import time

import jupytext
import nbclient
import nbformat
import pytest
from conftest import SCRIPT, clean_environment

PARSE = "settings = parse_settings(sys.argv)"
SMALL = "settings = Settings(max_steps=6, num_samples=256, log_every=2)"  # as a user would edit the cell


@pytest.fixture(autouse=True)
def no_process_group(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert clean_environment()


def source():
    text = SCRIPT.read_text()
    assert text.count(PARSE) == 1
    return text.replace(PARSE, SMALL)


def execute(notebook, folder):
    """Run all cells in a kernel in `folder`; return what they printed."""
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def check(printed, folder, times=1):
    assert printed.count("| step 6/6 |") == 2 * times and printed.count("written to") == times
    assert (folder / "runs/gpt2/model/model.safetensors").is_file()
    assert (folder / "runs/gpt2/loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_notebook_of_jupytext(checkout):
    notebook = jupytext.reads(source(), fmt="py:percent")
    install = notebook.cells[1]
    assert install.cell_type == "code" and "\n%pip install" in install.source  # live in the notebook only
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds[0] == "markdown" and kinds.count("markdown") > 12 and kinds.count("code") > 25
    check(execute(notebook, checkout), checkout)


def test_all_cells_twice_in_one_kernel(checkout):
    """First under ZeRO-3, of which nothing may stay in memory."""
    first, second = (jupytext.reads(source().replace(SMALL, settings), fmt="py:percent").cells[2:]
                     for settings in (SMALL.replace(")", ", zero_stage=3)"), SMALL))
    count = 'print("models:", sum(type(each).__name__ == "GPT2LMHeadModel" for each in gc.get_objects()))'
    notebook = nbformat.v4.new_notebook(cells=[*first, *second, nbformat.v4.new_code_cell(count)])
    printed = execute(notebook, checkout)
    check(printed, checkout, times=2)
    assert "ZeRO-3, " in printed and "ZeRO-1, " in printed and "models: 1\n" in printed


def test_pasted_into_one_cell(checkout):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source())])
    check(execute(notebook, checkout), checkout)


def test_under_run(checkout):
    code = "%run train_gpt2_deepspeed.py --max_steps 6 --num_samples 256 --log_every 2"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    check(execute(notebook, checkout), checkout)


def test_interrupting_the_training_cell_saves(checkout):
    """What the stop button of a notebook sends: the update is finished and saved, and the kernel lives on."""
    long = source().replace(SMALL, "settings = Settings(max_steps=5000, num_samples=256, log_every=1)")
    notebook = jupytext.reads(long, fmt="py:percent")
    notebook.cells = notebook.cells[2:]
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(checkout)}})

    def interrupt():
        training = next(cell for cell in notebook.cells if "stop = train(" in cell.source)
        while not any("step    3/5000" in str(output) for output in training.get("outputs", [])):
            time.sleep(0.1)
        os.kill(client.km.provisioner.pid, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="SystemExit") as stop:
        client.execute()
    assert stop.value.evalue == "130"
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "stopped by SIGINT and saved; --resume auto continues" in printed
    assert (checkout / "runs/gpt2/checkpoints/latest").is_file() and "written to" not in printed


def test_an_error_stops_the_notebook_with_its_line(checkout):
    (checkout / "ds_config.json").unlink()
    notebook = jupytext.reads(source(), fmt="py:percent")
    notebook.cells = notebook.cells[2:]
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="UserError"):
        execute(notebook, checkout)
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "ds_config.json" in printed and "No such file" in printed and "held out" not in printed
