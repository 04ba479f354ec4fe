"""Run `deft` as another user, with a home that nobody opens and a file system of its own.

Only root can become another user, in a mount namespace of its own.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]

UID = 12345  # without an entry in the system's list of users

_SETUP = """
set -e
mount --bind "$1" "$2/python"
mount -t tmpfs -o noexec,mode=755 tmpfs "$2/noexec"
mkdir -m 700 "$2/noexec/own" && chown "$3" "$2/noexec/own"
exec setpriv --reuid="$3" --regid="$3" --clear-groups env -i -C "$2" "${@:4}"
"""


def missing():
    """Why nobody can be a stranger here, or None."""
    if os.geteuid() != 0:
        return "only root can become another user"
    programs = [name for name in ("unshare", "setpriv", "mount") if shutil.which(name) is None]
    if programs:
        return f"{programs[0]} is not installed"
    tried = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "no mount namespaces here"


def as_stranger(folder, *words, **environment):
    """Exit code and output of `deft`, run by another user.

    - `folder`: gets `closed` (root's alone), `noexec/own` (the stranger's, on a file system that is
      mounted with noexec) and the interpreter. The stranger may enter it.
    - `environment`: all the variables that the command has, besides those of Python.
    """
    for name, mode in (("python", 0o755), ("noexec", 0o755), ("closed", 0o700)):
        (folder / name).mkdir(mode=mode, exist_ok=True)
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid() and str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    paths = [ROOT, ROOT / "patches", sysconfig.get_paths()["purelib"]]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "COLUMNS": "300",
        **environment,
    }
    done = subprocess.run(
        [
            *("unshare", "-m", "bash", "-c", _SETUP, "_", sys.base_prefix, folder, str(UID)),
            *(f"{name}={value}" for name, value in variables.items()),
            *(folder / "python" / "bin" / version, "-m", "deft_backend", *words),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
