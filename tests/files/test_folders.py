"""The package's folders: one module decides their paths, and creates them for one user."""

import os
import tempfile
from pathlib import Path

import pytest

from deft_backend.files import folders
from deft_backend.settings.config import Settings, SettingsError


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in ("DEFT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_every_folder_follows_the_cache_folder(monkeypatch):
    for env, cache in (
        ({"DEFT_CACHE_DIR": "/d", "XDG_CACHE_HOME": "/c"}, Path("/d")),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/deft-backend")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache" / "deft-backend"),
        ({}, Path.home() / ".cache" / "deft-backend"),
    ):
        with monkeypatch.context() as context:
            for name, value in env.items():
                context.setenv(name, value)
            assert folders.cache_directory() == cache
            assert folders.state_directory(Settings.from_env(env)) == cache / "servers"
            assert folders.tables_directory() == cache / "tables"
            assert folders.driver_stub_directory() == cache / "driver-stub" / "1"
            context.setattr(folders, "_USERS_TRITON_CACHE", None)
            assert folders.compiled_directory(Settings.from_env(env)) == cache / "triton"
            assert folders.kernels_directory(Settings.from_env(env)) == cache / "kernels"
            context.setattr(folders, "_USERS_TRITON_CACHE", "/t")
            assert folders.compiled_directory(Settings.from_env(env)) == Path("/t")
    assert folders.kernels_directory(Settings(kernel_cache=Path("/k"))) == Path("/k")


def test_a_cache_folder_that_is_a_file_is_named(tmp_path, monkeypatch):
    # Another setting that is wrong is not read.
    monkeypatch.setenv("DEFT_POLICY", "best")
    assert folders.tables_directory().is_absolute()
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("DEFT_CACHE_DIR", str(file))
    with pytest.raises(SettingsError, match=f"DEFT_CACHE_DIR is '{file}'; expected a directory"):
        folders.cache_directory()


def test_another_process_may_create_the_folder_first(tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        looks = iter([False, True])
        context.setattr(Path, "is_dir", lambda path: next(looks) if path == tmp_path else True)
        folders.create_private(tmp_path)
    assert folders.write_fails(tmp_path / "new" / "one") is None
    assert folders.write_fails(Path("/proc/self")) is not None  # it is there, and takes no file
    (tmp_path / "file").write_text("")
    assert folders.write_fails(tmp_path / "file" / "one") == "File exists"


@pytest.mark.parametrize("kind", ["file", "link", "another user's"])
def test_without_a_home_only_a_folder_of_this_users_own_is_taken(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    user = os.getuid() + (kind == "another user's")
    monkeypatch.setattr(os, "getuid", lambda: user)
    folder = tmp_path / f"deft-backend-{user}"
    assert folders.cache_directory() == folder
    folder.mkdir()
    assert kind == "another user's" or folders.cache_directory() == folder
    folder.rmdir()
    if kind == "file":
        folder.write_text("")
    elif kind == "link":
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir()
    with pytest.raises(SettingsError, match=r"no home folder, .* another user's; set DEFT_CACHE"):
        folders.cache_directory()
