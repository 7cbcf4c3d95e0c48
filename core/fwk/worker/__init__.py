"""The worker: owns one device, turns a ``Batch`` into tokens."""
