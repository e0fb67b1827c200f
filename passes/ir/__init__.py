"""What a graph says: the two marker ops, their names, the plan, and questions about nodes."""
