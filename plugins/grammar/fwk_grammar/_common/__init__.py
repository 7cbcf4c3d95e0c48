"""What the grammar backends share: reading a request's source, and quoting text."""
