"""What attention plugins share: rows of the KV cache."""
