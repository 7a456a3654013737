"""CIFAR-10 comes once to each machine, from a local web server that may be slow or fail, and is never half-used."""

import hashlib
import json
import pickle
import shutil
import socket
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.transforms as T
from helpers import accuracy, error_lines, run, run_machines
from torchvision.datasets import CIFAR10

import eval
from eval import UserError, build_model, fetch_data, load_data


def write_cifar10(folder: Path) -> dict:
    """Write random images in CIFAR-10's layout, 10 a file, as a folder and as an archive of it.

    Returns the attributes that let torchvision's CIFAR10 take them for the real files.
    """
    rng = np.random.default_rng(0)
    base, archive, meta = folder / CIFAR10.base_folder, folder / CIFAR10.filename, CIFAR10.meta["filename"]
    names = [name for name, _ in CIFAR10.train_list + CIFAR10.test_list]
    base.mkdir()
    (base / meta).write_bytes(pickle.dumps({"label_names": [f"class {index}" for index in range(10)]}))
    for name in names:
        content = {"data": rng.integers(256, size=(10, 3072), dtype=np.uint8), "labels": rng.permutation(10).tolist()}
        (base / name).write_bytes(pickle.dumps(content))
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(base, CIFAR10.base_folder)
    md5 = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in (archive, *base.iterdir())}
    *train_list, test_batch = ([name, md5[name]] for name in names)
    meta_entry = {**CIFAR10.meta, "md5": md5[meta]}
    return {"tgz_md5": md5[archive.name], "train_list": train_list, "test_list": [test_batch], "meta": meta_entry}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server, is_download = self.server, self.headers.get("Method") != "HEAD"  # torchvision's search for redirects
        server.downloads += is_download
        if server.failure == "silent":
            server.closing.wait(20)
        self.send_response(404 if server.failure == "404" else 200)
        self.send_header("Content-Length", str(len(server.archive)))
        self.end_headers()
        if is_download:
            half = len(server.archive) // 2
            self.wfile.write(server.archive[:half])
            server.closing.wait(20 if server.failure == "stop" else server.seconds)
            if not server.failure:
                self.wfile.write(server.archive[half:])

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server(tmp_path_factory):
    """Serves the archive of a folder with both, and counts how often.

    seconds: how long it takes over it
    failure: None, "404", "cut" (closes the connection in the middle of the archive), "stop" (sends nothing more from
        there on, for 20 s), or "silent" (sends nothing at all, for 20 s)
    attributes: of CIFAR10, so that it is downloaded from here
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.folder = tmp_path_factory.mktemp("served")
        server.url = f"http://127.0.0.1:{server.server_port}/{CIFAR10.filename}"
        server.attributes = {"url": server.url, **write_cifar10(server.folder)}
        server.archive = (server.folder / CIFAR10.filename).read_bytes()
        server.seconds, server.failure, server.downloads = 0.0, None, 0
        server.closing = threading.Event()
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.closing.set()
        server.shutdown()


@pytest.fixture
def data(server, tmp_path, monkeypatch):
    """The folder for $DATA, which is not there yet, and to which this process gets CIFAR10 from the server."""
    for name, value in server.attributes.items():
        monkeypatch.setattr(CIFAR10, name, value)
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    yield tmp_path / "data"
    socket.setdefaulttimeout(None)


def assert_usable(data: Path) -> None:
    """load_data returns what torchvision reads there, which verifies each file's checksum first."""
    for is_train, count in ((True, 50), (False, 10)):
        images, labels = load_data(is_train, synthetic=False)
        assert len(images) == len(labels) == count and images.is_contiguous() and labels.dtype == torch.int64
        stock = CIFAR10(data, train=is_train, transform=T.PILToTensor())
        for image, label, (stock_image, stock_label) in zip(images, labels, stock):
            assert torch.equal(image, stock_image) and label == stock_label


def failure() -> str:
    """The line with which the data is given up."""
    with pytest.raises(UserError) as caught:
        fetch_data()
    [line] = str(caught.value).splitlines()
    return line


def test_archive_or_data_in_place_needs_no_request(server, data):
    data.mkdir()
    shutil.copy(server.folder / CIFAR10.filename, data)
    fetch_data()
    assert_usable(data)
    (data / CIFAR10.filename).unlink()
    fetch_data()
    assert server.downloads == 0


def test_processes_that_share_a_folder_take_turns(server, data):
    server.seconds = 1
    with ThreadPoolExecutor(4) as threads:  # a lock of its own in each, as in a process
        list(threads.map(lambda _: fetch_data(), range(4)))
    assert_usable(data)
    assert server.downloads == 1


@pytest.mark.parametrize("kind, reason, half", [
    ("404", "404", False), ("cut", "", True), ("stop", "timed out", True), ("silent", "timed out", False),
])  # fmt: skip
def test_download_that_fails(server, data, monkeypatch, capsys, kind, reason, half):
    monkeypatch.setattr(eval, "DOWNLOAD_TIMEOUT", 0.5)
    server.failure, archive, missing = kind, data / CIFAR10.filename, f"there is no {CIFAR10.base_folder} in {data}"
    problem = f"{archive} is incomplete or damaged" if half else missing
    for _ in range(2):  # the second time, what is left of the first is in the way
        line = failure()
        for words in (problem, f"getting {server.url} failed", reason, "$DATA", "--synthetic"):
            assert words in line
        assert capsys.readouterr().out.splitlines()[0] == f"{missing}: downloading {server.url} to {archive}"
        assert data.exists() == half and not (data / CIFAR10.base_folder).exists()
    server.failure = None
    fetch_data()
    assert_usable(data)
    assert "100%" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["missing", "checksum"])
def test_damaged_file(server, data, damage):
    fetch_data()
    batch = data / CIFAR10.base_folder / "data_batch_3"
    content = batch.read_bytes()
    spoil = Path.unlink if damage == "missing" else lambda path: path.write_bytes(content[:-1] + b"?")
    spoil(batch)
    fetch_data()
    assert batch.read_bytes() == content and server.downloads == 1, "unpacked again"
    spoil(batch)
    (data / CIFAR10.filename).unlink()
    server.failure = "404"
    line = failure()
    assert str(batch) in line and damage in line


def test_data_is_the_folder_itself(server, data, monkeypatch):
    monkeypatch.setenv("DATA", str(server.folder / CIFAR10.base_folder))
    assert f"$DATA must be the folder that holds {CIFAR10.base_folder}: DATA={server.folder}" in failure()
    assert server.downloads == 0


def test_eval_downloads_to_the_home_folder(data, tmp_path, monkeypatch, capsys):
    torch.save(build_model().state_dict(), tmp_path / "model_1.pth")
    monkeypatch.setattr(sys, "argv", ["eval.py", "-c", str(tmp_path), "-e", "latest"])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DATA", "~/cifar")
    monkeypatch.chdir(tmp_path)
    eval.main()
    assert accuracy(capsys.readouterr().out) % 10 == 0  # of ten images
    assert_usable(tmp_path / "home" / "cifar")
    assert not Path("~").exists()


TRAIN = ("--batch_size", 5, "--num_epochs", 1, "--interval", 0)


@pytest.fixture
def planted(server, tmp_path) -> list[str]:
    """Lets train.py download from the server, and no collective take eight seconds."""
    (tmp_path / "attributes").write_text(json.dumps(server.attributes))
    return [f"cifar10={tmp_path / 'attributes'}", "collective_timeout=8"]


def test_other_processes_wait_longer_than_a_collective_may_take(server, planted, tmp_path):
    server.seconds = 11
    result = run(2, *TRAIN, planted=planted, env={"DATA": tmp_path / "data"}, cwd=tmp_path)
    assert result.returncodes == [0, 0], result.output
    assert server.downloads == 1


def test_each_machine_downloads_once(server, planted, tmp_path):
    envs = [{"DATA": tmp_path / name} for name in ("data_0", "data_1")]
    results = run_machines([TRAIN, TRAIN], envs, launcher="fork", planted=planted, cwd=tmp_path)
    assert [result.returncode for result in results] == [0, 0], results
    assert server.downloads == 2


def test_failed_download_ends_other_machines_with_the_same_line(server, planted, tmp_path):
    server.failure = "cut"
    envs = [{"DATA": server.folder}, {"DATA": tmp_path / "data"}]
    results = run_machines([TRAIN, TRAIN], envs, launcher="fork", planted=planted, cwd=tmp_path)
    assert [result.returncode for result in results] == [2, 2], results
    for result in results:
        [line] = error_lines(result.output)
        assert f"{tmp_path / 'data' / CIFAR10.filename} is incomplete or damaged" in line and server.url in line
        assert "Traceback" not in result.output
