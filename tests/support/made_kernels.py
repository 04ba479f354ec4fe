"""In place of compiled kernels: their files, and their launches."""

from types import SimpleNamespace

from deft_backend.compile.triton_kernel import Kernel, addresses_of


def made_kernel(folder, number=1):
    """What Triton returns for a compiled kernel, as far as it is looked at."""
    folder.mkdir(parents=True, exist_ok=True)
    group = {}
    for ending in ("json", "cubin", "ptx"):
        path = folder / f"k{number}.{ending}"
        path.write_bytes(f"{ending} {number}".encode())
        group[path.name] = str(path)
    return SimpleNamespace(hash=f"{number:064x}", metadata_group=group)


def noted_launches(monkeypatch, module, unknown=()):
    """Lists of full launches and of repeated ones: kernel, grid and arguments, with addresses for
    tensors. Nothing runs. `module` repeats launches, but none of the kernels in `unknown`.
    """
    launched, repeated = [], []

    def launch(kernel, programs, arguments, constants, **options):
        given = addresses_of((*arguments, *constants.values()))
        launched.append((kernel._name, programs, given))

    def runner(kernel, programs, *, variant):
        def run(*arguments, stream):
            assert stream == 7
            repeated.append((kernel._name, programs, arguments))

        return None if kernel._name in unknown else run

    active = SimpleNamespace(get_current_stream=lambda device: 7, get_current_device=lambda: 0)
    monkeypatch.setattr(Kernel, "launch", launch)
    monkeypatch.setattr(Kernel, "runner", runner)
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    return launched, repeated
