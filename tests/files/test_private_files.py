"""What SECURITY.md promises of files: who may read and write them, and what is read back."""

import ast
import errno
import fcntl
import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

from cost_keys import KEY
from deft_backend.compile.kernel_folder import Origin, fill
from deft_backend.costs.cost_model import default_cost_model
from deft_backend.costs.table_lookup import save_table
from deft_backend.files import private_files
from deft_backend.telemetry.state import StateWriter
from deft_backend.tools.watch.page_server import PageServer
from failure_lines import raising
from made_kernels import made_kernel
from sglang_fakes import make_state

PACKAGE = Path(__file__).parents[2] / "deft_backend"


@pytest.fixture(params=[0o000, 0o022])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_whatever_we_write_is_this_users_alone(tmp_path):
    there, made = tmp_path / "there", tmp_path / "there" / "made"
    there.mkdir(mode=0o755)
    StateWriter(make_state(), made / "servers").look()
    save_table(default_cost_model(), KEY, made / "tables" / KEY.file_name)
    fill(made / "kernels", Origin.of("sm_90"), [made_kernel(tmp_path / "triton")])
    for line in (b"a longer line", b"line"):
        if (made / "server.log").exists():
            (made / "server.log").chmod(0o666)
        with private_files.open_private(made / "server.log") as log:
            log.write(line)
    assert (made / "server.log").read_bytes() == b"line"
    files = [path for path in made.rglob("*") if path.is_file()]
    assert len(files) == 6
    assert {mode(path) for path in files} == {0o600}
    assert {mode(path) for path in (made, *made.rglob("*")) if path.is_dir()} == {0o700}
    assert mode(there) == 0o755


def test_a_link_in_a_files_place_is_replaced_and_never_followed(tmp_path):
    target, path = tmp_path / "target", tmp_path / "file"
    target.write_text("mine")
    path.symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        private_files.read_private(path)
    with pytest.raises(OSError):  # noqa: PT011  # the system's own message
        private_files.open_private(path)
    terminal, device = os.openpty()
    held = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="not a regular file"):
        private_files.open_private(Path(os.ttyname(device)))
    assert os.listdir("/proc/self/fd") == held
    os.close(terminal)
    os.close(device)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="not a regular file"):
        private_files.open_private(tmp_path / "pipe")  # and nothing waits
    os.close(reader)
    with pytest.raises(OSError):  # noqa: PT011  # the system's own message
        private_files.open_private(tmp_path / "pipe")
    private_files.write_private(path, "new")
    assert (target.read_text(), path.read_text(), path.is_symlink()) == ("mine", "new", False)


def test_files_that_others_could_have_written_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "file"
    private_files.write_private(path, "{}")
    assert private_files.read_private_json(path) == {}
    assert private_files.is_private(path)
    assert not private_files.is_private(tmp_path / "none")
    for bits in (0o620, 0o602):
        path.chmod(bits)
        assert not private_files.is_private(path)
        with pytest.raises(OSError, match=f"mode 0{bits:o}.*chmod go-w"):
            private_files.read_private(path)
    path.chmod(0o644)  # others may read it: no harm
    assert private_files.read_private(path) == b"{}"
    if os.getuid() == 0:
        os.chown(path, 4321, 4321)
    else:
        other = os.getuid() + 1
        monkeypatch.setattr(private_files.os, "getuid", lambda: other)
    with pytest.raises(OSError, match="belongs to user"):
        private_files.read_private(path)


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    private_files.write_private(path, "old")
    full = raising(OSError(28, "No space left on device"))
    monkeypatch.setattr(private_files.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        private_files.write_private(path, "new")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_file_beyond_256_mib_is_refused(tmp_path):
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 1 << 28)  # takes no room on the disk
    assert len(private_files.read_private(path)) == 1 << 28
    os.truncate(path, (1 << 28) + 1)
    with pytest.raises(OSError, match="more than 268435456 bytes"):
        private_files.read_private(path)


@pytest.mark.parametrize(("held", "waits"), [(0, 0), (2, 2), (9, 5)])
def test_a_lock_is_waited_for_and_no_longer_than_asked(held, waits, tmp_path, monkeypatch):
    """Another holds the lock for so many looks; the end of the time comes after five."""
    looks, slept, opened = [], [], len(os.listdir("/proc/self/fd"))

    def flock(handle, how):
        looks.append(how)
        if len(looks) <= held:
            raise BlockingIOError

    monkeypatch.setattr(private_files.fcntl, "flock", flock)
    monkeypatch.setattr(private_files.time, "sleep", slept.append)
    monkeypatch.setattr(private_files.time, "monotonic", lambda: 100.0 + sum(slept))
    with private_files.locked(tmp_path / "lock", 5 * private_files.POLL_SECONDS) as mine:
        assert mine == (held < 5)
    assert slept == [private_files.POLL_SECONDS] * waits
    assert set(looks) == {fcntl.LOCK_EX | fcntl.LOCK_NB}
    with private_files.locked(tmp_path / "no folder" / "lock", 0.0) as mine:
        assert mine  # the lock saves work only
    monkeypatch.setattr(private_files.fcntl, "flock", raising(OSError(errno.ENOLCK, "no locks")))
    with private_files.locked(tmp_path / "lock", 0.0) as mine:
        assert mine
    assert len(os.listdir("/proc/self/fd")) == opened


def test_nothing_is_unpickled_imported_or_evaluated():
    """Only `compile/triton_kernel.py` makes modules, from the package's own sources."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
            names = {alias.name for alias in imported}
            assert not names & {"pickle", "marshal", "shelve", "dill", "runpy"}, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {
                    *["eval", "exec", "torch.load", "np.load", "yaml.load", "__import__"]
                }, f"{path}:{node.lineno}"
                if called.endswith("spec_from_file_location"):
                    assert path.name == "triton_kernel.py"


def test_nothing_listens_beyond_loopback():
    """One module opens a port that stays open."""
    servers = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(
            word in path.read_text() for word in ("HTTPServer", "socket.socket(", "start_server(")
        )
    ]
    assert set(servers) <= {"tools/watch/page_server.py", "tools/servers/command.py"}
    with closing(PageServer(0, lambda engine: {}).socket) as opened:
        assert opened.getsockname()[0] == "127.0.0.1"
