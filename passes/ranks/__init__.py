"""What ranks tell one another through the store before a graph runs."""
