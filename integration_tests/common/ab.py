"""`deft ab` as a user runs it."""

import json
import os
import subprocess
import sys

from integration_tests.common.plugins import QUICK_INTERPRETER, ROOT, plugin_settings


def deft_ab(folder, *arguments, plugins=(), settings=None):
    """Run it into a folder and check its results; returns the results and its output.

    Parameters
    ----------
    folder : Path
        The folder of ``results.json`` and ``report.html``.
    arguments : str
        Of the command; those of the host last, after ``--``.
    plugins : sequence of str
        Further functions that every process of the servers calls, each ``module:function``.
    settings : mapping, optional
        Further environment variables.
    """
    program = "from deft_backend.cli.app import app; app()"
    command = [sys.executable, "-c", program, "ab", "--out", folder, *arguments]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name[:5] != "DEFT_" or name == "DEFT_UNTESTED_HOST"
    }
    # Send even a lone request through the slow kernels. Otherwise a fast machine ends each of these
    # short requests before the next one arrives, and no two requests share a step.
    environment |= {
        "DEFT_MIN_BATCH": "1",
        **plugin_settings(folder / "plugins", QUICK_INTERPRETER, *plugins),
        **(settings or {}),
    }
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((folder / "results.json").read_text())
    assert data["same"]
    for workload in data["workloads"]:
        # The amount depends on the steps in which requests meet, and so on the machine.
        host, deft = workload["counters"]
        assert 0.0 < workload["kv_bytes_a_step"][1]["saved"] < 1.0
        assert deft["steps_tree"] > 0
        assert host is None  # a server without the plugin counts nothing
        assert workload["agreement"]["largest_gap"] is not None  # every token has a probability
    return data, done.stdout
