from tests.helpers.servers import fake, python_path, shared_fake, shared_tiny, spawn, tiny, tiny_model

__all__ = ["fake", "python_path", "shared_fake", "shared_tiny", "spawn", "tiny", "tiny_model"]
