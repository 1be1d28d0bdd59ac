"""`shardwright export` and `shardwright serve`: export a trained model; serve the export over HTTP."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardwright.errors import MAX_VALUE_LENGTH, shorten


def export(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run, to export its best or else last checkpoint, or one of its checkpoints."
        ),
    ],
    output: Annotated[Path, typer.Argument(help="The folder to create.")],
    tables: Annotated[str, typer.Option(help="float16, or int8 with a scale per row. Default: as trained.")] = "",
) -> None:
    """Export a run for serving: the dense model as a torch.export program, the tables, and the transforms of values.
    Serving needs neither the model's code nor its data.

    \b
    shardwright export runs/mine served
    shardwright export runs/mine served-int8 --tables int8
    shardwright export runs/mine/checkpoint/step-00000400 served-400
    """
    from shardwright.serving.export import export_run

    console = Console()
    with console.status(f"exporting {run}"):
        info = export_run(run, output, tables)
    dtype = f"in {info.stored}, errors up to {max(info.errors.values()):.2g}" if info.stored else "as trained"
    console.print(
        f"step {info.step}: {len(info.tables)} tables {dtype}, {info.table_bytes / 1e6:,.1f} MB", highlight=False
    )
    console.print(f"export  {output}", highlight=False, soft_wrap=True)


def serve(
    folder: Annotated[Path, typer.Argument(metavar="EXPORT", help="A folder that `shardwright export` created.")],
    follow: Annotated[str, typer.Option(help="A run whose publications to apply while serving.")] = "",
    host: Annotated[str, typer.Option(help="The address to listen on. Requests are not authenticated.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0: any free port.")] = 8000,
    verify: Annotated[bool, typer.Option("--verify", help="Compare all tables with their digests first.")] = False,
) -> None:
    """Serve an exported model over HTTP until interrupted: POST /predict, GET /health, GET /metrics.

    \b
    shardwright serve served
    shardwright serve served --follow runs/mine     apply updates of a run
    curl -d '{"samples": [{"site": "news"}]}' http://127.0.0.1:8000/predict
    """
    status = f"loading {shorten(str(folder), MAX_VALUE_LENGTH)}{', comparing every block with its digest' * verify}"
    print(status, file=sys.stderr, flush=True)
    import signal
    from contextlib import ExitStack, closing, suppress

    from shardwright.serving.endpoint import Endpoint
    from shardwright.serving.predictor import Predictor

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        predictor = stack.enter_context(closing(Predictor(folder, follow or None, verify=verify)))
        num_rows = sum(table.rows for table in predictor.served.tables)
        print(f"loaded: {len(predictor.served.tables)} tables, {num_rows:,} rows", file=sys.stderr, flush=True)
        endpoint = stack.enter_context(closing(Endpoint(predictor, host, port)))
        print(f"serving {endpoint.address}, step {predictor.step}", flush=True)
        if host not in ("127.0.0.1", "::1", "localhost"):
            print(f"warning: anyone who can reach {host} can send requests: they are not authenticated", flush=True)
        with suppress(KeyboardInterrupt):
            endpoint.run()
        print("ended", flush=True)
