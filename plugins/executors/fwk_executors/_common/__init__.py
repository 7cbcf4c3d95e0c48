"""What several executors share."""
