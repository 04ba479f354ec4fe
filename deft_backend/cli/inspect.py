"""`deft inspect`: a page that draws the forest that a server decodes, live."""

from typing import Annotated

from rich.console import Console
from typer import Option

from deft_backend.cli.errors import checked_settings, fail, reported, say
from deft_backend.files.folders import state_directory


def inspect(
    server: Annotated[int | None, Option(help="The server's port; default: the only one.")] = None,
    port: Annotated[int, Option(min=0, max=65535, help="The page's port; 0: a free one.")] = 8765,
) -> None:
    """Show on a page which requests share what, live. It only reads, and shows no text."""
    from deft_backend.telemetry.state_reader import StateError, only_server
    from deft_backend.tools.watch.engines import find_engines
    from deft_backend.tools.watch.page_server import PageServer
    from deft_backend.tools.watch.snapshot import Inspector

    folder = state_directory(checked_settings())
    with reported(StateError):
        if server is None:
            server = int(only_server(folder).name.split("-")[0])
        elif not find_engines(folder, server):
            raise StateError(
                f"there is no state file of a server on port {server} in {folder}; is a server "
                "with the plugin running on that port, under the same DEFT_STATE_DIR?"
            )
    inspector = Inspector(folder, server)
    try:
        page = PageServer(port, inspector.state)
    except OSError as error:
        raise fail(
            f"cannot listen on port {port}: {error}; choose another --port, or 0 for a free one"
        ) from None
    console = Console()
    say(console, f"the forest of the server on port {server}: {page.url}")
    say(console, "Ctrl-C ends the page; the server goes on")
    try:
        page.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        inspector.close()
        page.server_close()
