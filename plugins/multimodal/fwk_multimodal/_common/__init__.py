"""What several processors are made of."""
