"""Our all-to-all against torch's all_to_all_single on Gloo, interleaved in one job, on an emulated cluster.

    python -m benchmarks.exchange [--uplink RATE ...] [--write NAME]

Run as root. For each uplink rate a lab of 2 hosts x 2 ranks with 0.4 of a core each; 7 rounds in which each side runs
for 0.3 s. A JSON line per case: median milliseconds of each side, and median and range of the ratio over rounds.
`ideal_ms`: the bytes that cross an uplink divided by its rate, if it has one.
"""

import argparse
import json
import os
import sys
from statistics import median

from benchmarks import results_file
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape, parse_bits_per_second

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
ROUNDS, WINDOW_SECONDS = 7, 0.3
TCP_SHARE = 0.957  # of a link's rate that TCP delivers as payload


def worker(uplink: str, sizes: tuple[int, ...], rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from shardwright.comm import collective
    from shardwright.measure.machine import measurement_mesh
    from shardwright.measure.timing import Clock

    with measurement_mesh() as mesh:
        clock = Clock(mesh.group(), mesh.device, WINDOW_SECONDS)
        for axes in (("local",), ("host",), ("host", "local")):
            group = mesh.group(axes)
            for bytes_ in sizes:
                x = torch.zeros(bytes_ // 4)
                even = [len(x) // group.size] * group.size

                def ours(x=x, even=even, group=group) -> None:
                    collective.all_to_all(x, even, even, group).wait()

                def theirs(x=x, group=group) -> None:
                    dist.all_to_all_single(torch.empty_like(x), x, group=group.process_group)

                times = {"ours": [], "torch": []}
                for _ in range(rounds):
                    for name, call in (("ours", ours), ("torch", theirs)):
                        times[name].append(1e3 * clock.sample((1,), call, slowest=True).seconds)
                if mesh.rank == 0:
                    print(json.dumps(result_line(uplink, axes, bytes_, times)), flush=True)


def result_line(uplink: str, axes: tuple[str, ...], bytes_: int, times_by_side: dict[str, list[float]]) -> dict:
    ratios = [theirs / ours for ours, theirs in zip(times_by_side["ours"], times_by_side["torch"], strict=True)]
    line = {"benchmark": "exchange", "uplink": uplink or "unshaped", "over": " x ".join(axes), "bytes": bytes_}
    if uplink and "host" in axes:  # each of a host's two ranks sends half of its bytes over it
        line["ideal_ms"] = round(1e3 * bytes_ / (parse_bits_per_second(uplink) / 8 * TCP_SHARE), 2)
    line |= {f"{name}_ms": round(median(times), 2) for name, times in times_by_side.items()}
    return line | {"torch_over_ours": [round(ratio, 2) for ratio in (median(ratios), min(ratios), max(ratios))]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uplink", nargs="*", default=["200mbit", "1gbit", ""], help='rates, "" for unshaped')
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    sizes, rounds = SIZES, ROUNDS
    if args.smoke:
        args.uplink, sizes, rounds = [""], SIZES[:1], 1
    lines: list[str] = []

    def on_line(_: int, line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    for uplink in args.uplink:
        with Lab(Shape((Host(ranks=2, uplink=uplink, cpu=0.4),) * 2), "exchange"[:8]) as lab:
            command = [
                sys.executable,
                "-c",
                f"from benchmarks.exchange import worker; worker({uplink!r}, {sizes}, {rounds})",
            ]
            result = lab.run(command, on_line=on_line)
            if result.rank is not None:
                return 1
    if args.write:
        results_file.write(args.write, "exchange", map(json.loads, lines))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
