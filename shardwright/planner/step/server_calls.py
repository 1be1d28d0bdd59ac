"""Seconds of a rank's calls to table servers, which all ranks make at the same time.

The bytes of a call and of its reply pass the link one after the other; the server works on the message of one rank
while those of others are on the link. A server has the link of a rank, or of a host if its ranks share one.

Shape legend: R ranks.
"""

import numpy as np

from shardwright.planner.price import overheads
from shardwright.planner.problem import Problem
from shardwright.spec.cluster import Cluster, Level

# Of a cluster of one rank, which has no link: what processes of the preset "two-cores" have.
LOOPBACK = Level("loopback", 1, latency_seconds=1e-3, bytes_per_second=1.5e9)
SERVER_PASSES = 6.0  # over the bytes of a message in memory, at a server: receive, checksum, journal, gather or write
CALLS = 60  # small torch calls for each call of a rank, at the rank and at the server; estimated from the code
CURVE_SECONDS_PER_BYTE = 2e-9  # measured, one core; on each side


def server_link(cluster: Cluster) -> Level:
    """The link between a rank and a table server: that of the outermost level."""
    return cluster.levels[-1] if cluster.levels else LOOPBACK


def call_seconds(problem: Problem, sent_R: np.ndarray, received_R: np.ndarray, work_seconds: float = 0.0) -> np.ndarray:
    """Seconds by rank of a call to each server, with these bytes there and back; `work_seconds`: of all servers
    together, beyond passes over the bytes. 0 for a rank without bytes."""
    assert problem.servers is not None
    device, num = problem.cluster.device, problem.servers.num
    total = float(sent_R.sum() + received_R.sum())
    passes = SERVER_PASSES * total / device.tiers[0].read_bytes_per_second
    calls = CALLS * overheads.op_overhead_seconds(device)
    at_servers = (passes + work_seconds + calls * problem.cluster.num_ranks) / num
    on_links_R = link_seconds(problem, sent_R) + link_seconds(problem, received_R)
    # While a server works on the message of a rank, those of others are on the link.
    longer_R, shorter_R = np.maximum(at_servers, on_links_R), np.minimum(at_servers, on_links_R)
    seconds_R = longer_R + shorter_R / problem.cluster.num_ranks + latency_seconds(problem) + calls * num
    if problem.servers.encrypted:
        seconds_R = seconds_R + CURVE_SECONDS_PER_BYTE * (sent_R + received_R + total / num)
    return np.where(sent_R + received_R > 0, seconds_R, 0.0)


def latency_seconds(problem: Problem) -> float:
    """Seconds of a call and its reply without bytes."""
    return 2 * server_link(problem.cluster).latency_seconds


def link_seconds(problem: Problem, bytes_R: np.ndarray) -> np.ndarray:
    """Seconds by rank of bytes of all ranks on their links and on those of the servers, in one direction."""
    assert problem.servers is not None
    cluster, link = problem.cluster, server_link(problem.cluster)
    rate = link.group_bytes_per_second or link.bytes_per_second
    seconds_R = np.maximum(bytes_R / link.bytes_per_second, bytes_R.sum() / problem.servers.num / rate)
    if link.group_bytes_per_second is not None:
        size = cluster.group_size(len(cluster.levels) - 1)
        seconds_R = np.maximum(seconds_R, bytes_R.reshape(-1, size).sum(1).repeat(size) / rate)
    return seconds_R
