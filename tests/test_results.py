"""results.py's table and picture, from logs as train.py prints them."""

from pathlib import Path

import pytest
import results


def write_log(path: Path, accuracies: dict[int, float], num_epochs: int = 4, first: int = 1) -> results.Run:
    """Append one start of a run: epochs from `first` on at 2 seconds each, some with an accuracy in %."""
    lines = ["torch_ddp (fp32), 1 process(es) on CPU, batch 1 x 100 = 100, 50,000 images per epoch, seed 1"]
    for epoch in range(first, max(accuracies) + 1):
        line = f"Epoch [{epoch}/{num_epochs}] loss {1 / epoch:.4f}, learning rate 0.001, 25,000 images/s"
        lines.append(line + (f", test accuracy {accuracies[epoch]:.2f}%" if epoch in accuracies else ""))
    with path.open("a") as log:
        log.write("\n".join(lines) + "\n")
    return results.read_log(path)


def test_table_has_mean_range_and_seconds_of_finished_runs(tmp_path):
    finished = [write_log(tmp_path / f"{seed}.log", {2: 60, 4: 80 + seed}) for seed in (1, 2)]
    unfinished = write_log(tmp_path / "killed.log", {2: 99})
    *_, row, note = results.table({"torch_ddp": [*finished, unfinished]})
    assert row == "| torch_ddp | 2 | 81.50 % | 81.00 % | 82.00 % | 2.00 | 4 |"
    assert note == f"torch_ddp: {tmp_path}/killed.log is left out, it ends at epoch 2 of 4"


def test_last_start_of_a_run_counts(tmp_path):
    write_log(tmp_path / "1.log", {2: 60, 4: 70})
    assert write_log(tmp_path / "1.log", {4: 80}, first=3).accuracy == {2: 60, 4: 80}
    assert not write_log(tmp_path / "1.log", {2: 50}).is_finished, "started afresh, and got to epoch 2"


def test_curves_name_their_axes(tmp_path):
    pytest.importorskip("matplotlib")
    runs = {"torch_ddp": [write_log(tmp_path / f"{seed}.log", {2: 60, 4: 80 + seed}) for seed in (1, 2)]}
    results.draw(tmp_path / "curves.svg", runs)
    for text in ("epoch", "training loss", "test accuracy (%)", "torch_ddp (n = 2)"):
        assert f">{text}</text>" in (tmp_path / "curves.svg").read_text()
