"""What a server says of the kernels that `deft warm` left for it."""

import os
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from deft_backend.compile.kernel_folder import Origin, fill
from deft_backend.files import folders
from deft_backend.hosts.common import warm_up
from deft_backend.settings.config import Settings
from failure_lines import raising
from made_kernels import made_kernel

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def h100(monkeypatch, triton_cache):
    shared = {"shared_memory_per_multiprocessor": 233472, "shared_memory_per_block_optin": 232448}
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, **shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def filled(folder, gpu="sm_90"):
    fill(folder, Origin.of(gpu), [made_kernel(folder.parent / "k")])
    return folder


def lines(caplog, settings):
    caplog.set_level("INFO", "deft_backend")
    warm_up.take_compiled_kernels(settings, GPU)
    return caplog.messages


def test_a_filled_folder_is_taken(tmp_path, caplog):
    """A folder that a setting names, and the one in the cache."""
    folder = filled(tmp_path / "image" / "kernels")
    (line,) = lines(caplog, Settings(kernel_cache=folder))
    assert line.startswith(f"deft: 1 kernels of {folder} copied into Triton's cache")
    assert line.endswith("which held 0 more of them")
    filled(tmp_path / "cache" / "kernels")
    _, line = lines(caplog, Settings(cache_dir=tmp_path / "cache"))
    assert "deft: 0 kernels of" in line
    assert line.endswith("which held 1 more of them")


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        (None, "`deft warm` did not fill it"),
        ("sm_80", "its kernels are for GPU sm_80, this is sm_90; the server compiles its kernels"),
    ],
)
def test_a_folder_that_does_not_fit_is_one_line_in_the_log(gpu, said, tmp_path, caplog):
    """A folder that a setting names must be filled."""
    folder = tmp_path / "image" / "kernels"
    if gpu is not None:
        filled(folder, gpu)
    (line,) = lines(caplog, Settings(kernel_cache=folder))
    assert f"deft: the kernels in {folder} are not used: " in line
    assert said in line
    assert not (tmp_path / "triton").exists()


def test_without_a_folder_or_a_gpu_there_is_nothing_to_say(tmp_path, caplog):
    assert lines(caplog, Settings(cache_dir=tmp_path)) == []
    settings = Settings(kernel_cache=filled(tmp_path / "image" / "kernels"))
    with warm_up.ranks_cache(settings, torch.device("cpu")) as shared:
        assert shared is None
    assert caplog.messages == []


def test_a_damaged_kernel_is_told_apart(tmp_path, caplog):
    folder = filled(tmp_path / "image" / "kernels")
    (folder / f"{1:064x}" / "k1.cubin").write_text("other")
    first, second = lines(caplog, Settings(kernel_cache=folder))
    assert "1 kernels in" in first
    assert "are damaged" in first
    assert "0 kernels of" in second


def test_ranks_compile_into_one_folder(tmp_path, caplog, monkeypatch):
    """The user's, if the process began with one; not the one that PyTorch's compiler names."""
    monkeypatch.setattr(folders, "_USERS_TRITON_CACHE", None)
    monkeypatch.setenv(folders.TRITON_CACHE, str(tmp_path / "of GPU 3"))
    settings = Settings(cache_dir=tmp_path / "cache")
    filled(tmp_path / "cache" / "kernels")
    with warm_up.ranks_cache(settings, GPU) as shared:
        assert shared is not None
        assert knobs.cache.dir == str(tmp_path / "cache" / "triton")
    assert list((tmp_path / "cache" / "triton").glob("*/k1.cubin")), "the kernels of `deft warm`"
    monkeypatch.setattr(folders, "_USERS_TRITON_CACHE", str(tmp_path / "user's"))
    with warm_up.ranks_cache(settings, GPU):
        assert knobs.cache.dir == str(tmp_path / "user's")
    assert os.environ[folders.TRITON_CACHE] == str(tmp_path / "of GPU 3")


def test_a_cache_that_nobody_can_write_is_one_line_in_the_log(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(warm_up, "SharedCache", raising(OSError("read-only")))
    with warm_up.ranks_cache(Settings(cache_dir=tmp_path), GPU) as shared:
        assert shared is None
    (line,) = caplog.messages
    assert line.startswith(f"deft: {tmp_path}/triton cannot be written (read-only); each rank")
