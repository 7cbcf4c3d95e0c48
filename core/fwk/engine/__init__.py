"""The engine: scheduler, block accounting and the loop. One per data-parallel replica."""
