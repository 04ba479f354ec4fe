"""The hosts' own serving benchmarks as clients, on prefixes that evict each other."""

import json
import os
import site
import subprocess
import sys

PREFIXES, PROMPTS = 8, 24

# vLLM's CPU build lacks the `vllm` command, but has the modules behind it.
_VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

_SGLANG = (
    "--dataset-name generated-shared-prefix --backend sglang --output-details "
    f"--gsp-num-groups {PREFIXES} --gsp-prompts-per-group {PROMPTS // PREFIXES} "
    "--gsp-system-prompt-len 256 --gsp-question-len 8 --gsp-output-len 8"
).split()
_VLLM = (
    "--dataset-name prefix_repetition --ignore-eos --save-result --save-detailed --temperature 0 "
    f"--num-prompts {PROMPTS} --prefix-repetition-num-prefixes {PREFIXES} "
    "--prefix-repetition-prefix-len 256 --prefix-repetition-suffix-len 8 "
    "--prefix-repetition-output-len 8"
).split()


def texts_of(host, url, model, served_name, environment, folder, timeout=300):
    """Texts of the greedy answers of the host's own client, in the order of its prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    out, log = folder / "out.json", folder / "client.log"
    common = ["--base-url", url, "--model", str(model), "--tokenizer", str(model), "--seed", "42"]
    common += ["--served-model-name", served_name]
    command = [sys.executable, "-m", "sglang.bench_serving", *common, *_SGLANG]
    command += ["--output-file", str(out)]
    if host == "vllm":
        command = [sys.executable, "-c", _VLLM_BENCH, *common, *_VLLM]
        command += ["--result-dir", str(folder), "--result-filename", out.name]
    wanted = ("LD_LIBRARY_PATH", "SGLANG_USE_CPU_ENGINE")  # what importing the host needs
    libraries = {name: value for name, value in environment.items() if name in wanted}
    # In the user's home, only the sizes name the client's cache of prompts.
    libraries |= {"HOME": str(folder.parent / "home"), "PYTHONUSERBASE": site.getuserbase()}
    libraries |= {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    with log.open("w") as output:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **libraries},
            timeout=timeout,
            check=False,
        )
    assert out.is_file(), log.read_text(errors="replace")[-4000:]
    found = json.loads(out.read_text().splitlines()[-1])
    assert found["completed"] == PROMPTS, log.read_text(errors="replace")[-4000:]
    assert all(found["generated_texts"])
    return found["generated_texts"]
