"""What sets of operators share."""
