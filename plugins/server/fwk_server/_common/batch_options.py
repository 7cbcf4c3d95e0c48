"""Options of the dialects that keep something for clients."""

from fwk import Options, option


class KeepingOptions(Options):
    """Where what clients left with the server is kept: of each dialect."""

    files_dir: str | None = option(
        None,
        "Folder for uploaded files, batches and stored replies, where the next server finds them and goes on with "
        "what was under way (default: files in the system's temporary folder, replies in memory, until the server "
        "ends).",
        aliases=["file-storage-path", "file-storage-pth"],
    )


class BatchOptions(KeepingOptions):
    """How much is kept, and how many requests of batches run at a time: of each dialect."""

    max_files_bytes: int = option(
        2**30,
        "Bytes of uploaded files and results of batches that are kept, of each API; more are refused.",
        ge=0,
        le=2**50,
    )
    batch_concurrency: int = option(
        16, "Requests of all batches of an API that run at a time, alongside those of clients.", ge=1, le=65_536
    )
