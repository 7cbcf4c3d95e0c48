from tests.helpers.servers import begin, fake, python_path, shared_fake, shared_tiny, spawn, tiny, tiny_model

__all__ = ["begin", "fake", "python_path", "shared_fake", "shared_tiny", "spawn", "tiny", "tiny_model"]
