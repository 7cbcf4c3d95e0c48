"""What samplers share: the uniform numbers."""
