"""What only a GPU can show: CUDA graphs, and exact resume of all plugins on the real libraries. Skipped without one."""

import exact_resume
import pytest
import torch
from helpers import accuracy, run_eval

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_each_plugin = pytest.mark.parametrize("plugin", exact_resume.PLUGINS)


def run_all(function, root, *words: str) -> dict[str, object]:
    """What `function` of exact_resume returns for each plugin, all at once on the same GPUs."""
    args = exact_resume.parse_args(["--synthetic", "--timeout", "400", *words])
    jobs = [(args, plugin, 1, root) for plugin in exact_resume.PLUGINS]
    return dict(zip(exact_resume.PLUGINS, exact_resume.map_jobs(function, jobs, parallel=True)))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> dict[str, exact_resume.Result]:
    nproc = str(min(4, max(2, torch.cuda.device_count())))  # two even on one GPU, so that they do communicate
    return run_all(exact_resume.resume_and_compare, tmp_path_factory.mktemp("resumed"), "--nproc", nproc)


@pytest.fixture(scope="module")
def graph_and_eager(tmp_path_factory) -> dict[str, tuple]:
    """An epoch of four steps, with and without a CUDA graph."""
    return run_all(exact_resume.compare_graph, tmp_path_factory.mktemp("graph"), "--batch_size", "1000")


@on_each_plugin
def test_a_resumed_run_is_the_uninterrupted_run(resumed, plugin):
    result = resumed[plugin]
    assert exact_resume.is_exact(result), result
    if plugin == "torch_ddp":
        assert result.scales == []
    else:
        assert result.counted > 0 and result.scales[-1] != result.scales[-2], "the loss scale did not change on the way"


@on_each_plugin
def test_eval_prints_the_accuracy_that_training_printed(resumed, plugin):
    evaluated = run_eval("-c", resumed[plugin].folder, "-e", 3, "--synthetic")
    assert evaluated.returncode == 0, evaluated.stdout
    assert accuracy(evaluated.stdout) == accuracy(resumed[plugin].output)


@on_each_plugin
def test_a_cuda_graph_computes_what_eager_passes_compute(graph_and_eager, plugin):
    """A gradient that is all rounding may have either sign, and Adam's step with it: a few weights differ by more."""
    _, mean, with_graph, without = graph_and_eager[plugin]
    assert "No CUDA graph" not in with_graph
    assert "No CUDA graph" in without
    assert mean < 1e-4
