"""From raw columns to ids and normalized numbers, and the statistics that this needs."""
