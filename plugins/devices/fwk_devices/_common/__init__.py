"""What devices that torch drives have in common."""
