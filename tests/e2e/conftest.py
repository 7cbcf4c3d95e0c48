from tests.helpers.servers import fake, python_path, spawn, tiny, tiny_model

__all__ = ["fake", "python_path", "spawn", "tiny", "tiny_model"]
