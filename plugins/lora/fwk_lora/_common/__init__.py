"""What plugins of this family share."""
