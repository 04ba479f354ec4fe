"""Files in place of a compiled kernel."""

from types import SimpleNamespace


def made_kernel(folder, number=1):
    """What Triton returns for a compiled kernel, as far as it is looked at."""
    folder.mkdir(parents=True, exist_ok=True)
    group = {}
    for ending in ("json", "cubin", "ptx"):
        path = folder / f"k{number}.{ending}"
        path.write_bytes(f"{ending} {number}".encode())
        group[path.name] = str(path)
    return SimpleNamespace(hash=f"{number:064x}", metadata_group=group)
