"""What transports share: signed connections, and reading another process's memory while one is held."""
