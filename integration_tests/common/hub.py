"""A cache of the Hugging Face hub with the tiny model, like after a download."""

NAME = "made-up/tiny-llama"
REVISION = "v2"
_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_OLDER = "fedcba9876543210fedcba9876543210fedcba98"


def write_hub_cache(home, model):
    """Write it under `home`; returns the variables that make `huggingface_hub` read it alone.

    :data:`REVISION` holds the files of the folder `model`; the main branch holds none.
    """
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    for branch, commit in (("main", _OLDER), (REVISION, _COMMIT)):
        reference = repository / "refs" / branch
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
    for path in model.iterdir():
        if path.is_file():
            (repository / "snapshots" / _COMMIT / path.name).symlink_to(path)
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
