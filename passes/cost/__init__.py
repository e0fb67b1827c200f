"""What a graph costs, without running it: seconds, bytes, and why a collective is exposed."""
