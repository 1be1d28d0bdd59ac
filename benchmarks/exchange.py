"""Our all-to-all against torch's all_to_all_single on Gloo, interleaved in one job, on an emulated cluster.

    python -m benchmarks.exchange [--uplink RATE ...] [--write NAME]

As root. A lab of 2 hosts x 2 ranks with 0.4 of a core each for each uplink; 7 rounds of totals over 0.3 s of each
side. A JSON line per case: median milliseconds of each, and the median and range over rounds of the ratio.
`ideal_ms`: the bytes that cross an uplink over its rate, where it has one.
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
DELIVERED = 0.957  # what TCP has of a link's rate


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

                found = {"ours": [], "torch": []}
                for _ in range(rounds):
                    for name, call in (("ours", ours), ("torch", theirs)):
                        found[name].append(1e3 * clock.sample((1,), call, slowest=True).seconds)
                if mesh.rank == 0:
                    print(json.dumps(told(uplink, axes, bytes_, found)), flush=True)


def told(uplink: str, axes: tuple[str, ...], bytes_: int, found: dict[str, list[float]]) -> dict:
    ratios = [theirs / ours for ours, theirs in zip(found["ours"], found["torch"], strict=True)]
    line = {"benchmark": "exchange", "uplink": uplink or "unshaped", "over": " x ".join(axes), "bytes": bytes_}
    if uplink and "host" in axes:  # half of what each of a host's two ranks sends
        line["ideal_ms"] = round(1e3 * bytes_ / (parse_bits_per_second(uplink) / 8 * DELIVERED), 2)
    line |= {f"{name}_ms": round(median(times), 2) for name, times in found.items()}
    return line | {"torch_over_ours": [round(one, 2) for one in (median(ratios), min(ratios), max(ratios))]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uplink", nargs="*", default=["200mbit", "1gbit", ""], help='rates, "" for unshaped')
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    asked = parser.parse_args()
    sizes, rounds = SIZES, ROUNDS
    if asked.smoke:
        asked.uplink, sizes, rounds = [""], SIZES[:1], 1
    lines: list[str] = []

    def say(_: int, line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    for uplink in asked.uplink:
        with Lab(Shape((Host(ranks=2, uplink=uplink, cpu=0.4),) * 2), "exchange"[:8]) as lab:
            command = [
                sys.executable,
                "-c",
                f"from benchmarks.exchange import worker; worker({uplink!r}, {sizes}, {rounds})",
            ]
            ended = lab.run(command, on_line=say)
            if ended.rank is not None:
                return 1
    if asked.write:
        results_file.write(asked.write, "exchange", map(json.loads, lines))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
