"""Sizes of what ranks send each other in a step: the planner prices messages by them, the runtime packs messages so."""

REQUEST_HEADER_NUMBERS = 7  # of 8 bytes each, from every rank to each: what a lookup request contains (exchange.py)
REQUEST_HEADER_BYTES = 8 * REQUEST_HEADER_NUMBERS
ID_BYTES = 4  # of an id in a request
LENGTH_BYTES = 4  # of the length of a bag in a request
ROW_ID_BYTES = 8  # of a row id that replicas exchange
GRADIENT_BUCKET_BYTES = 1 << 20  # dense gradients are all-reduced in buckets of at least this size
