"""What observers share."""
