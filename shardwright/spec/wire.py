"""Sizes of the messages of a step: the planner predicts their time from them, the runtime packs messages with them."""

# The header of a lookup request, from every rank to every rank: number of samples, words of the message, weight of the
# samples, `max_replica_values`, number of ids with weights and without, stop signal of the sending rank (0: none).
REQUEST_HEADER_NUMBERS = 7
REQUEST_HEADER_BYTES = 8 * REQUEST_HEADER_NUMBERS
ID_BYTES = 4  # of an id in a request
LENGTH_BYTES = 4  # of the length of a bag in a request
ROW_ID_BYTES = 8  # of a row id that replicas exchange
GRADIENT_BUCKET_BYTES = 1 << 20  # size of the buckets in which dense gradients are all-reduced
