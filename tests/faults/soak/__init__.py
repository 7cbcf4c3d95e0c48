"""Half an hour of mixed load with a fault each minute: ``python -m tests.faults.soak --minutes 30 --report FILE``."""
