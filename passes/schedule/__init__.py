"""What a step launches, and in which order: buckets, what backward gathers again, the plan of a joint graph."""
