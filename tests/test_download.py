"""CIFAR-10 comes once to each machine, from a local web server that may be slow or fail, and is never half-used."""

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torchvision.datasets import CIFAR10

from eval import UserError, build_model, fetch_data, load_data
from helpers import accuracy, error_lines, launch, launch_machines, run_eval, write_cifar10

TRAIN = ("--batch_size", 5, "--num_epochs", 1, "--interval", 0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> SimpleNamespace:
    """An archive in CIFAR-10's format, and the attributes of torchvision's CIFAR10 that fit it."""
    folder = tmp_path_factory.mktemp("tiny")
    attributes = write_cifar10(folder)
    return SimpleNamespace(folder=folder, archive=(folder / CIFAR10.filename).read_bytes(), attributes=attributes)


class Server(ThreadingHTTPServer):
    """Serves one archive, and counts how often.

    seconds: how long it takes over it
    failure: None, "404", or "cut", which closes the connection in the middle of the archive
    """

    daemon_threads = True

    def __init__(self, archive: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.archive, self.seconds, self.failure, self.downloads = archive, 0.0, None, 0
        self.url = f"http://127.0.0.1:{self.server_port}/{CIFAR10.filename}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        if self.headers.get("Method") != "HEAD":  # torchvision asks so for redirects, before it downloads
            server.downloads += 1
            if server.failure == "404":
                return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(server.archive)))
        self.end_headers()
        if self.headers.get("Method") == "HEAD":
            return None
        half = len(server.archive) // 2
        self.wfile.write(server.archive[:half])
        time.sleep(server.seconds)
        if server.failure != "cut":
            self.wfile.write(server.archive[half:])
        return None

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server(tiny):
    with Server(tiny.archive) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def here(server, tiny, tmp_path, monkeypatch) -> Path:
    """For tests in this process: CIFAR10 comes from the server to the folder that this returns."""
    for name, value in {"url": server.url, **tiny.attributes}.items():
        monkeypatch.setattr(CIFAR10, name, value)
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def scripts(server, tiny, tmp_path):
    """For tests with the real scripts: the environment in which CIFAR10 comes from the server to a folder.

    more: further lines of Python that run at the start of each process
    """

    def env(data: str = "data", more: str = "") -> dict:
        start = tmp_path / "start"
        start.mkdir(exist_ok=True)
        lines = ["from torchvision.datasets import CIFAR10"]
        lines += [f"CIFAR10.{name} = {value!r}" for name, value in {"url": server.url, **tiny.attributes}.items()]
        (start / "sitecustomize.py").write_text("\n".join([*lines, more]))
        return {"PYTHONPATH": start, "DATA": tmp_path / data}

    return env


def assert_usable(data: Path) -> None:
    """What is in $DATA is whole: torchvision verifies each file's checksum before it reads them."""
    for is_train, count in ((True, 50), (False, 10)):
        images, labels = load_data(is_train, synthetic=False)
        assert len(images) == len(labels) == count
    assert (data / CIFAR10.base_folder).is_dir()


@contextmanager
def refused(*words: str):
    with pytest.raises(UserError) as caught:
        yield
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line


# ---------------------------------------------------------------------------------------------------- in this process


def test_data_in_place_needs_no_request(server, here):
    fetch_data()
    assert_usable(here)
    assert server.downloads == 1
    fetch_data()
    assert server.downloads == 1


def test_archive_in_place_needs_no_request(server, here, tiny):
    here.mkdir()
    (here / CIFAR10.filename).write_bytes(tiny.archive)
    fetch_data()
    assert_usable(here)
    assert server.downloads == 0


def test_processes_that_share_a_folder_take_turns(server, here):
    server.seconds = 1
    threads = [threading.Thread(target=fetch_data) for _ in range(4)]  # a lock of its own in each, as in a process
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_usable(here)
    assert server.downloads == 1


def test_missing_on_the_server(server, here):
    server.failure = "404"
    with refused(f"no CIFAR-10 in {here}", server.url, "404", "$DATA", "--synthetic"):
        fetch_data()
    server.failure = None
    fetch_data()
    assert_usable(here)


def test_connection_cut_in_the_middle(server, here):
    server.failure = "cut"
    for _ in range(2):  # the second time, what is left of the first is in the way
        with refused(f"{here / CIFAR10.filename} is incomplete or damaged", server.url):
            fetch_data()
        assert not (here / CIFAR10.base_folder).exists()
    server.failure = None
    fetch_data()
    assert_usable(here)
    assert server.downloads == 3


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_half_unpacked_archive_is_unpacked_again(server, here, damage):
    fetch_data()
    batch = here / CIFAR10.base_folder / "data_batch_3"
    content = batch.read_bytes()
    batch.unlink()
    if damage == "cut":
        batch.write_bytes(content[: len(content) // 2])
    fetch_data()
    assert batch.read_bytes() == content
    assert_usable(here)
    assert server.downloads == 1


# --------------------------------------------------------------------------------------------------- the real scripts


SHORT_TIMEOUT = """
import datetime
import torch.distributed as dist
dist.distributed_c10d.default_pg_timeout = datetime.timedelta(seconds={seconds})
"""
IMPATIENT = """
new_group = dist.new_group
dist.new_group = lambda *args, timeout=None, **options: new_group(*args, **options)
"""


def test_other_processes_wait_longer_than_a_collective_may_take(server, scripts, tmp_path):
    server.seconds = 12
    result = launch(2, *TRAIN, env=scripts(more=SHORT_TIMEOUT.format(seconds=8)), cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    accuracy(result.stdout)
    assert server.downloads == 1

    model = build_model()
    (tmp_path / "checkpoint").mkdir()
    torch.save(model.state_dict(), tmp_path / "checkpoint" / "model_1.pth")
    result = run_eval("-e", 1, env=scripts(), cwd=tmp_path)  # the data is there now
    assert result.returncode == 0, result.stdout
    assert server.downloads == 1


def test_that_timeout_would_end_a_wait_in_the_default_way(server, scripts, tmp_path):
    server.seconds = 12
    result = launch(2, *TRAIN, env=scripts(more=SHORT_TIMEOUT.format(seconds=8) + IMPATIENT), cwd=tmp_path)
    assert result.returncode != 0
    assert "exitcode  : 2" in result.stdout  # the one that waited gave up
    assert "another machine failed while CIFAR-10 was fetched" in result.stdout  # as if that had been another machine's
    assert "Accuracy of the model" not in result.stdout


def test_each_machine_downloads_once(server, scripts, tmp_path):
    """Two launchers stand for two machines, each with its own $DATA."""
    envs = [{**scripts(), "DATA": tmp_path / f"data_{rank}"} for rank in range(2)]
    results = launch_machines([TRAIN, TRAIN], envs, cwd=tmp_path)
    assert [result.returncode for result in results] == [0, 0], results
    assert server.downloads == 2
    for rank in range(2):
        assert (tmp_path / f"data_{rank}" / CIFAR10.base_folder / "test_batch").is_file()
    accuracy(results[0].stdout)


def test_failed_download_ends_all_processes(server, scripts, tmp_path):
    server.failure = "cut"
    start = time.time()
    result = launch(2, *TRAIN, env=scripts(), cwd=tmp_path)
    assert result.returncode != 0
    assert len(error_lines(result.stdout)) == 1 and server.url in error_lines(result.stdout)[0]
    assert 'train.py", line' not in result.stdout  # no traceback but torchrun's own
    assert time.time() - start < 60  # most of it is importing
    assert server.downloads == 1


def test_eval_downloads_too(server, scripts, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    torch.save(build_model().state_dict(), tmp_path / "checkpoint" / "model_1.pth")
    server.failure = "cut"
    result = run_eval("-e", "latest", env=scripts("elsewhere"), cwd=tmp_path)
    assert result.returncode == 2
    [line] = error_lines(result.stdout, "eval.py")
    assert str(tmp_path / "elsewhere" / CIFAR10.filename) in line
    server.failure = None
    result = run_eval("-e", "latest", env=scripts("elsewhere"), cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert accuracy(result.stdout) % 10 == 0  # of ten images
    assert server.downloads == 2
    assert not (tmp_path / "data").exists()
