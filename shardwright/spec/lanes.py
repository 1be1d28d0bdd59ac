"""The lanes of a step, on which its stages run. A lane with collectives has its own communicator on every rank."""

READ, MAIN, HOST = "read", "main", "host"  # the loader; the rank's thread or device; copies between memory tiers
IDS, WIRE, DENSE = "ids", "wire", "dense"  # collectives: ids and announcements; vectors; dense gradients
GATHER, SCATTER = "gather", "scatter"  # collectives of sharded blocks: all-gathers of weights, reduce-scatters
PIPE, PIPE_BACKWARD = "pipe", "pipe.backward"  # messages of a pipeline: activations, and their gradients
EXPERTS, COPIES = "experts", "copies"  # rows of experts; weights of copied experts, and their gradients
LANES = (READ, MAIN, IDS, HOST, WIRE, DENSE)  # of every plan
SHARD_LANES = (GATHER, SCATTER)  # of plans with sharded blocks, also
PIPELINE_LANES = (PIPE, PIPE_BACKWARD)  # of plans with a pipeline, also
EXPERT_LANES = (EXPERTS, COPIES)  # of plans with expert parallelism, also
