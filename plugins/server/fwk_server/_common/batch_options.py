"""Options of the dialects that run batches."""

from fwk import Options, option


class BatchOptions(Options):
    """Where files are kept, and how many requests of batches run at a time: of each dialect."""

    files_dir: str | None = option(
        None,
        "Folder for uploaded files and results of batches; they go when the server ends (default: the system's "
        "temporary folder).",
        aliases=["file-storage-path", "file-storage-pth"],
    )
    max_files_bytes: int = option(
        2**30,
        "Bytes of uploaded files and results of batches that are kept, of each API; more are refused.",
        ge=0,
        le=2**50,
    )
    batch_concurrency: int = option(
        16, "Requests of all batches of an API that run at a time, alongside those of clients.", ge=1, le=65_536
    )
