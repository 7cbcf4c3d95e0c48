"""What several model plugins are made of."""
