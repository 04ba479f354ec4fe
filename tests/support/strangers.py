"""Run `deft` as another user, with a home that nobody opens. Only root can become another user."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]

UID = 12345  # without an entry in the system's list of users

_SETUP = """
exec setpriv --reuid="$2" --regid="$2" --clear-groups env -i -C "$1" "${@:3}"
"""


def missing():
    """Why nobody can be a stranger here, or None."""
    if os.geteuid() != 0:
        return "only root can become another user"
    return None if shutil.which("setpriv") else "setpriv is not installed"


def interpreter(folder):
    """Python where everybody may run it: a copy, if it is in somebody's home."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    if all(place.stat().st_mode & 0o005 == 0o005 for place in (base, *base.parents)):
        return base / "bin" / version
    opened(folder)
    unneeded = shutil.ignore_patterns("site-packages", "test", "__pycache__", "idlelib", "*.a")
    shutil.copytree(base / "lib" / version, folder / "lib" / version, ignore=unneeded)
    for library in (base / "lib").glob("libpython*.so*"):
        shutil.copy2(library, folder / "lib" / library.name)
    (folder / "bin").mkdir()
    return Path(shutil.copy2(base / "bin" / version, folder / "bin" / version))


def opened(folder):
    """Let others enter a folder of the tests."""
    for place in (folder, *folder.parents):
        if place.stat().st_uid == os.getuid() and place != Path("/"):
            place.chmod(place.stat().st_mode | 0o055)


def as_stranger(python, folder, *words, **environment):
    """Exit code and output of `deft`, run by another user.

    - `python`: the interpreter.
    - `folder`: gets `closed` (root's alone). The stranger may enter it.
    - `environment`: all the variables that the command has, besides those of Python.
    """
    (folder / "closed").mkdir(mode=0o700, exist_ok=True)
    opened(folder)
    paths = [ROOT, ROOT / "patches", sysconfig.get_paths()["purelib"]]
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "COLUMNS": "300",
        **environment,
    }
    done = subprocess.run(
        [
            *("bash", "-c", _SETUP, "_", folder, str(UID)),
            *(f"{name}={value}" for name, value in variables.items()),
            *(python, "-m", "deft_backend", *words),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
