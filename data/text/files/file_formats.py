"""Names for the formats of files, by their first bytes, for errors about files that are no text."""

BEGIN_BYTES = 512  # enough to know a format

UNPACK = "; unpack it"
_FORMATS = [  # the first bytes, and what such a file is
    (b"\x1f\x8b", f"compressed with gzip{UNPACK}"),
    (b"\xfd7zXZ\0", f"compressed with xz{UNPACK}"),
    (b"\x04\x22\x4d\x18", f"compressed with LZ4{UNPACK}"),
    (b"\xff\x06\0\0sNaPpY", f"compressed with Snappy{UNPACK}"),
    (b"\x1f\x9d", f"compressed with compress{UNPACK}"),
    (b"PK\x03\x04", f"a zip archive{UNPACK}"),
    (b"7z\xbc\xaf\x27\x1c", f"a 7z archive{UNPACK}"),
    (b"Rar!\x1a\x07", f"a RAR archive{UNPACK}"),
    (b"PAR1\x15", "a Parquet file; set data.source=parquet"),
    (b"ARROW1\0\0", "an Arrow file; convert it to Parquet"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"%PDF-", "a PDF document; convert it to text"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF87a", "a GIF image"),
    (b"GIF89a", "a GIF image"),
    (b"\x7fELF", "a program"),
    (b"GGUF\x03\0\0\0", "a GGUF model"),
]


def describe_format(begin: bytes) -> str:
    """What a file is that begins like this, such as "a NumPy array"; "" if it may be text."""
    if is_bzip2(begin):
        return f"compressed with bzip2{UNPACK}"
    if begin[257:262] == b"ustar":
        return f"a tar archive{UNPACK}"
    if is_zstd(begin):
        return f"compressed with Zstandard{UNPACK}"
    for first_bytes, name in _FORMATS:
        if begin.startswith(first_bytes):
            return name
    return ""


def is_bzip2(begin: bytes) -> bool:
    """Whether a file that begins like this is compressed with bzip2."""
    # After the block size follows the number of a block, or of the end.
    return begin[:3] == b"BZh" and begin[4:10] in (b"1AY&SY", b"\x17rE8P\x90")


def is_zstd(begin: bytes) -> bool:
    """Whether a file that begins like this is compressed with Zstandard."""
    # pzstd begins with a frame that decompressors skip.
    is_skippable = begin[1:4] == b"\x2a\x4d\x18" and 0x50 <= begin[0] <= 0x5F
    return begin[:4] == b"\x28\xb5\x2f\xfd" or is_skippable
