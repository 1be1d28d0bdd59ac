"""`shardwright reader`: read batches for trainers, and create the keys that authenticate both sides."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

reader = typer.Typer(help="Read batches for trainers, here or on other hosts.", no_args_is_help=True)


@reader.command("serve")
def reader_serve(
    recipe: Annotated[str, typer.Argument(help="The recipe that the trainers use: a name or a .toml file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe to set, the same as on the trainers."),
    ] = None,
    bind: Annotated[str, typer.Option(help="Address to listen on; port 0: any free port.")] = "tcp://127.0.0.1:5700",
    keys: Annotated[str, typer.Option(help="The readers' key file; required if trainers are on other hosts.")] = "",
) -> None:
    """Read a recipe's batches for its trainers, in data.workers processes, until interrupted.

    \b
    shardwright reader serve criteo-dlrm data=train.tsv.gz data.workers=4
    shardwright train criteo-dlrm data=train.tsv.gz data.readers='["tcp://127.0.0.1:5700"]'
    \b
    on other hosts, with key files from `shardwright reader keys DIR`:
    shardwright reader serve criteo-dlrm data=train.tsv.gz --bind tcp://*:5700 --keys DIR/reader.keys
    shardwright train ... data.readers='["tcp://host1:5700", "tcp://host2:5700"]' data.reader_keys=DIR/trainer.keys
    """
    import signal
    from contextlib import closing

    from shardwright import config
    from shardwright.comm.transport.keys import load_keys
    from shardwright.data.readers.service import ReaderService
    from shardwright.data.sources.source import make_order, with_deal
    from shardwright.runtime.run.recipe import make_source

    settings = config.load(recipe, overrides or ())
    source = make_source(settings)
    order = make_order(source, settings.train.batch_size, settings.seed, settings.data.shuffle)
    if settings.data.deal == "length":
        order = with_deal(source, order, settings.data.deal_cost)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    curve_keys = load_keys(keys, "reader")
    with closing(ReaderService(source, order, bind=bind, workers=settings.data.workers, keys=curve_keys)) as service:
        print(f"serving {service.address}", flush=True)
        try:
            service.run(lambda line: print(line, flush=True))
        except KeyboardInterrupt:
            print("ended", flush=True)


@reader.command("keys")
def reader_keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write reader.keys and trainer.keys.")],
) -> None:
    """Create the keys that readers and trainers on several hosts need: one file for each side."""
    from shardwright.comm.transport import keys

    for path in keys.create_key_files(directory):
        Console().print(f"keys  {path}", highlight=False, soft_wrap=True)
