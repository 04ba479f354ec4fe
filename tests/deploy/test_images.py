"""The images: the steps of each Dockerfile run in a fresh environment."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from deft_backend.hosts.windows import TESTED

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
IN_THE_IMAGE = "/opt/deft"
BUILD_ARGUMENTS = {"HEADS": "32/8", "TARGETS": "sm_90"}
"""As `docker build --build-arg`: one shape and one GPU, to keep the test short."""


def steps(text):
    """The words and values of a Dockerfile: no comments, and continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def build(dockerfile, root, environment):
    """Run a Dockerfile's steps, with `root` in place of the folder in the image.

    Returns
    -------
    dict
        The environment of the image's processes.
    """
    environment = dict(environment)
    for word, value in steps(dockerfile.read_text(encoding="utf-8")):
        value = value.replace(IN_THE_IMAGE, str(root))
        if word in ("ARG", "ENV"):
            name, given = value.split("=", 1)
            chosen = BUILD_ARGUMENTS.get(name, given) if word == "ARG" else given
            environment[name] = chosen.strip('"')
        elif word == "COPY":
            pattern, into = value.split()
            Path(into).mkdir(parents=True, exist_ok=True)
            for path in ROOT.glob(pattern):
                shutil.copy(path, into)
        elif word == "RUN":
            done = subprocess.run(
                ["sh", "-ec", value],
                env=environment,
                cwd=root,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"RUN {value}\n{done.stdout}\n{done.stderr}"
        else:
            assert word in ("FROM", "EXPOSE", "ENTRYPOINT"), f"the test does not know {word}"
    return environment


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """The variables of a new environment that sees this one's packages, as a host's image has."""
    if not list(ROOT.glob("dist/*.whl")):
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--outdir", str(ROOT / "dist"), str(ROOT)],
            check=True,
            capture_output=True,
        )
    folder = tmp_path_factory.mktemp("image") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = subprocess.check_output([folder / "bin/python", "-c", asked], text=True).strip()
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    return {**kept, "PATH": f"{folder / 'bin'}:/usr/bin:/bin"}


@pytest.mark.parametrize("host", ["sglang", pytest.param("vllm", marks=pytest.mark.rare)])
def test_the_steps_run_without_a_gpu(host, fresh, tmp_path):
    image = build(FOLDER / f"{host}.Dockerfile", tmp_path, fresh)
    manifests = list(Path(image["DEFT_KERNEL_CACHE"]).rglob("*.json"))
    assert manifests, "`deft warm` filled no folder"
    assert all(path.stat().st_mode & 0o004 for path in manifests), "another user cannot read it"
    found = subprocess.check_output(
        [shutil.which("deft", path=image["PATH"]), "--version"], env=image, text=True
    )
    assert re.fullmatch(r"deft-backend \d+\.\d+\.\d+\n", found)


@pytest.mark.parametrize("host", ["sglang", "vllm"])
def test_the_base_is_the_newest_supported_version(host):
    found = steps((FOLDER / f"{host}.Dockerfile").read_text(encoding="utf-8"))
    image = {"sglang": "lmsysorg/sglang", "vllm": "vllm/vllm-openai"}[host]
    assert re.fullmatch(rf"{image}:v{re.escape(TESTED[host].newest)}(\.\d+)?", found[0][1])
    entry = json.loads(dict(found)["ENTRYPOINT"])
    assert entry[entry.index("--attention-backend") + 1] == {"sglang": "deft", "vllm": "DEFT"}[host]
