"""`shardwright reader`: read batches for trainers, and make the keys by which both know each other."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

reader = typer.Typer(help="Read batches for trainers, here or on other hosts.", no_args_is_help=True)


@reader.command("serve")
def reader_serve(
    recipe: Annotated[str, typer.Argument(help="What the trainers train: a recipe's name or a .toml file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe to set, as the trainers do."),
    ] = None,
    bind: Annotated[str, typer.Option(help="Where to listen; port 0: any that is free.")] = "tcp://127.0.0.1:5700",
    keys: Annotated[str, typer.Option(help="The readers' file of keys; beyond this host there must be one.")] = "",
) -> None:
    """Read a recipe's batches for its trainers, until interrupted; data.workers processes do it.

    \b
    shardwright reader serve criteo-dlrm data=train.tsv.gz data.workers=4
    shardwright train criteo-dlrm data=train.tsv.gz data.readers='["tcp://127.0.0.1:5700"]'
    \b
    on other hosts, with the files of `shardwright reader keys DIR`:
    shardwright reader serve criteo-dlrm data=train.tsv.gz --bind tcp://*:5700 --keys DIR/reader.keys
    shardwright train ... data.readers='["tcp://host1:5700", "tcp://host2:5700"]' data.reader_keys=DIR/trainer.keys
    """
    import signal
    from contextlib import closing

    from shardwright import config
    from shardwright.data.readers.keys import load_keys
    from shardwright.data.readers.service import ReaderService
    from shardwright.data.sources.source import make_order
    from shardwright.runtime.run.recipe import make_source

    settings = config.load(recipe, overrides or ())
    source = make_source(settings)
    order = make_order(source, settings.train.batch_size, settings.seed, settings.data.shuffle)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given = load_keys(keys, "reader")
    with closing(ReaderService(source, order, bind=bind, workers=settings.data.workers, keys=given)) as service:
        print(f"serving {service.address}", flush=True)
        try:
            service.run(lambda line: print(line, flush=True))
        except KeyboardInterrupt:
            print("ended", flush=True)


@reader.command("keys")
def reader_keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write reader.keys and trainer.keys.")],
) -> None:
    """Make the keys that readers and trainers of a job on several hosts need: one file for each side."""
    from shardwright.data.readers import keys

    for path in keys.create_key_files(directory):
        Console().print(f"keys  {path}", highlight=False, soft_wrap=True)
