"""What is kept from forward to backward within a memory budget."""
