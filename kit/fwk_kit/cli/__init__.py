"""What runs the kit's commands."""
