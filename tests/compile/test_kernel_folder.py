"""A folder of compiled kernels: written, moved, read back; refused if it is not what it says."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from triton.runtime.cache import get_cache_manager

from deft_backend.compile import kernel_folder
from drawings import check_asked
from made_kernels import made_kernel

HERE = kernel_folder.Origin.of("sm_90")


def test_kernels_go_through_a_folder_that_is_moved(tmp_path, triton_cache):
    made = tmp_path / "made"
    assert kernel_folder.fill(made, HERE, [made_kernel(tmp_path / "k", n) for n in range(3)]) == 3
    moved = tmp_path / "image" / "kernels"
    moved.parent.mkdir()
    made.rename(moved)
    shutil.rmtree(tmp_path / "k")  # nothing points back to where the kernels were compiled
    assert kernel_folder.is_filled(moved)
    assert not kernel_folder.is_filled(made)
    assert kernel_folder.take(moved, HERE) == kernel_folder.Taken(copied=3, held=0, damaged=0)
    assert kernel_folder.take(moved, HERE) == kernel_folder.Taken(copied=0, held=3, damaged=0)
    group = get_cache_manager(f"{1:064x}").get_group("k1.json")
    assert {name: Path(path).read_text() for name, path in group.items()} == {
        "k1.json": "json 1",
        "k1.cubin": "cubin 1",
    }
    assert all(Path(path).is_relative_to(triton_cache) for path in group.values())


def test_a_second_model_is_added_and_other_versions_are_replaced(tmp_path):
    folder = tmp_path / "folder"
    assert kernel_folder.fill(folder, HERE, [made_kernel(tmp_path / "k", 1)]) == 1
    assert kernel_folder.fill(folder, HERE, [made_kernel(tmp_path / "k", 2)]) == 2
    shutil.rmtree(folder / f"{2:064x}")  # by somebody else
    assert (
        kernel_folder.fill(folder, replace(HERE, triton="9.9.0"), [made_kernel(tmp_path / "k", 3)])
        == 1
    )
    assert {path.name for path in folder.iterdir()} == {"manifest.json", f"{3:064x}"}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("gpu", "sm_80", "GPU sm_80, this is sm_90"),
        ("triton", "9.9.0", "triton 9.9.0, this is "),
        ("torch", "1.0", "torch 1.0, this is "),
        ("package", "0.0.1", "deft-backend 0.0.1, this is "),
        ("sources", "0" * 16, "other kernel sources"),
    ],
)
def test_kernels_of_another_origin_are_refused(field, value, said, tmp_path, triton_cache):
    kernel_folder.fill(
        tmp_path / "folder", replace(HERE, **{field: value}), [made_kernel(tmp_path / "k", 1)]
    )
    with pytest.raises(kernel_folder.KernelFolderError, match=said):
        kernel_folder.take(tmp_path / "folder", HERE)
    assert not triton_cache.exists()


def test_every_folder_of_sources_decides_their_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_folder, "PACKAGE", tmp_path)
    for folder in ("kernels", "planner/on_device", "policies"):
        (tmp_path / folder).mkdir(parents=True)
    digests = set()
    for name in (
        "shapes.py",
        "kernels/a.py",
        "planner/on_device/a.py",
        "policies/a.py",
        "other.py",
    ):
        for text in ("1", "2"):
            (tmp_path / name).write_text(text)
            digests.add(kernel_folder.Origin.of("sm_90").sources)
    assert len(digests) == 8


def test_damaged_kernels_are_left_out(tmp_path, triton_cache):
    folder = tmp_path / "folder"
    kernel_folder.fill(folder, HERE, [made_kernel(tmp_path / "k", n) for n in range(3)])
    (folder / f"{0:064x}" / "k0.cubin").write_bytes(b"cubin 7")
    (folder / f"{2:064x}" / "k2.cubin").unlink()
    assert kernel_folder.take(folder, HERE) == kernel_folder.Taken(copied=1, held=0, damaged=2)
    assert get_cache_manager(f"{0:064x}").get_group("k0.json") is None


def test_what_no_command_filled_is_refused(tmp_path, triton_cache):
    """A line asks for no manifest, for its text, or for its kernels' files and SHA-256s."""
    manifest = tmp_path / "manifest.json"
    (tmp_path / "a folder has something").touch()
    names = {"KEY": "c" * 64, "A": "a" * 64, "B": "b" * 64, "SHORT": "a" * 63}

    def answer(asked=None):
        if asked is not None:
            content = eval(asked, names)
            if isinstance(content, dict):
                content = json.dumps({**asdict(HERE), "kernels": content})
            manifest.write_text(content)
            manifest.chmod(0o600)
        assert kernel_folder.is_filled(tmp_path) is (asked is not None)
        said = set()
        for read in (kernel_folder.check_fillable, lambda folder: kernel_folder.take(folder, HERE)):
            with pytest.raises(kernel_folder.KernelFolderError) as refused:
                read(tmp_path)
            said.add(str(refused.value))
        return sorted(said)

    check_asked(Path(__file__).with_name("manifests.txt"), answer)
    assert kernel_folder.check_fillable(tmp_path / "missing") is None
    assert not triton_cache.exists()
