"""What only a GPU can show: CUDA graphs, and exact resume of all plugins on the real libraries. Skipped without one."""

import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from exact_resume import PLUGINS, Resumed, map_jobs, parse_args, read, resume_and_compare, train
from helpers import accuracy, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_each_plugin = pytest.mark.parametrize("plugin", PLUGINS)


def run_all(function, root: Path, *words: str) -> dict[str, object]:
    """What `function` returns for each plugin, all at once on the same GPUs."""
    args = parse_args(["--synthetic", "--timeout", "400", *words])
    return dict(zip(PLUGINS, map_jobs(function, [(args, plugin, 1, root) for plugin in PLUGINS], parallel=True)))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> dict[str, Resumed]:
    nproc = str(min(4, max(2, torch.cuda.device_count())))  # two even on one GPU, so that they do communicate
    return run_all(resume_and_compare, tmp_path_factory.mktemp("resumed"), "--nproc", nproc)


def with_and_without_graph(args: Namespace, plugin: str, seed: int, root: Path) -> list[tuple[str, torch.Tensor]]:
    """What an epoch prints, and its weights, with a CUDA graph and without."""
    results = []
    for name, planted in [("graph", ()), ("eager", ("error=torch.cuda.make_graphed_callables,ENOTSUP",))]:
        folder = root / f"{plugin}_{name}"
        output = train(args, plugin, folder, "-n", 1, "--seed", seed, planted=planted)
        state = read(folder / "model_1.pth")
        results.append((output, torch.cat([tensor.double().flatten() for tensor in state.values()])))
    return results


@pytest.fixture(scope="module")
def graph_and_eager(tmp_path_factory) -> dict[str, list]:
    """Of four steps."""
    return run_all(with_and_without_graph, tmp_path_factory.mktemp("graph"), "--batch_size", "1000")


@on_each_plugin
def test_a_resumed_run_is_the_uninterrupted_run(resumed, plugin):
    result = resumed[plugin]
    assert not result.different
    assert plugin == "torch_ddp" or result.scales[-1] != result.scales[-2], "the loss scale did not change on the way"


@on_each_plugin
def test_eval_prints_the_accuracy_that_training_printed(resumed, plugin):
    arguments = ["-c", resumed[plugin].folder, "-e", 3, "--synthetic"]
    evaluated = run(1, *arguments, script="eval.py", launcher="python", gpus=True)
    assert accuracy(evaluated.output) == accuracy(resumed[plugin].output)


@on_each_plugin
def test_a_cuda_graph_computes_what_eager_passes_compute(graph_and_eager, plugin):
    """A gradient that is all rounding may have either sign, and Adam's step with it: a few weights differ by more."""
    (graph_output, graph_weights), (eager_output, eager_weights) = graph_and_eager[plugin]
    assert "No CUDA graph" not in graph_output and "No CUDA graph" in eager_output
    assert (graph_weights - eager_weights).abs().mean() < 1e-4
    losses = [float(re.search(r"loss (\d+\.\d+)", output)[1]) for output in (graph_output, eager_output)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
