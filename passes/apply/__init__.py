"""The passes: each changes a graph as the plan says, and returns how much it changed."""
