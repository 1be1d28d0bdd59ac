"""`shardwright export` and `shardwright serve`: a trained model as files, and answers from them."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardwright.errors import MAX_VALUE_LENGTH, shorten


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or one of its checkpoints: its last is meant.")],
    output: Annotated[Path, typer.Argument(help="The folder to make.")],
    tables: Annotated[str, typer.Option(help="float16, or int8 with a scale for each row. Default: as trained.")] = "",
) -> None:
    """Make a folder to serve from: the dense part as a program of torch.export, tables to be mapped into memory, and
    how values became rows. Neither the model's code nor its data is needed where it is served.

    \b
    shardwright export runs/mine served
    shardwright export runs/mine served-int8 --tables int8
    shardwright export runs/mine/checkpoint/step-00000400 served-400
    """
    from shardwright.serving.export import export_run

    console = Console()
    with console.status(f"exporting {run}"):
        made = export_run(run, output, tables)
    kept = f"in {made.stored}, errors up to {max(made.errors.values()):.2g}" if made.stored else "as trained"
    console.print(
        f"step {made.step}: {len(made.tables)} tables {kept}, {made.table_bytes / 1e6:,.1f} MB", highlight=False
    )
    console.print(f"export  {output}", highlight=False, soft_wrap=True)


def serve(
    folder: Annotated[Path, typer.Argument(metavar="EXPORT", help="A folder that `shardwright export` made.")],
    follow: Annotated[str, typer.Option(help="A run whose publications are taken as they come.")] = "",
    host: Annotated[str, typer.Option(help="Where to listen; beyond this host nobody asks who asks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    verify: Annotated[bool, typer.Option("--verify", help="Read all tables first, and compare their digests.")] = False,
) -> None:
    """Answer requests over HTTP until interrupted: POST /predict, GET /health, GET /metrics.

    \b
    shardwright serve served
    shardwright serve served --follow runs/mine     keep up with a run
    curl -d '{"samples": [{"site": "news"}]}' http://127.0.0.1:8000/predict
    """
    what = f"loading {shorten(str(folder), MAX_VALUE_LENGTH)}{', comparing every block with its digest' * verify}"
    print(what, file=sys.stderr, flush=True)
    import signal
    from contextlib import ExitStack, closing, suppress

    from shardwright.serving.endpoint import Endpoint
    from shardwright.serving.predictor import Predictor

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        predictor = stack.enter_context(closing(Predictor(folder, follow or None, verify=verify)))
        tables = sum(table.rows for table in predictor.served.tables)
        print(f"loaded: {len(predictor.served.tables)} tables, {tables:,} rows", file=sys.stderr, flush=True)
        endpoint = stack.enter_context(closing(Endpoint(predictor, host, port)))
        print(f"serving {endpoint.address}, step {predictor.step}", flush=True)
        if host not in ("127.0.0.1", "::1", "localhost"):
            print(f"anybody who reaches {host} may ask: there are no keys", flush=True)
        with suppress(KeyboardInterrupt):
            endpoint.run()
        print("ended", flush=True)
