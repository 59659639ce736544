"""Tokens per second of preparing a corpus or streaming it, compared with tiktoken alone and the
library datasets."""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from thinker.data.text.tables.rows import read_tables
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer

# Each side runs in a separate process and prints tokens, seconds and the peak memory in bytes of
# its largest process.
SIDES = {
    "thinker": """
from thinker.data.corpus.corpus import prepare_corpus
start = time.perf_counter()
corpus = prepare_corpus(source="jsonl", path=file, tokenizer=tokenizer, cache_dir=folder, progress=False)
seconds, tokens = time.perf_counter() - start, corpus.train.n_tokens + corpus.val.n_tokens
""",
    "stream": """
from functools import partial
from pathlib import Path
import numpy as np
from thinker.data.batches.windows import PackedDataset
from thinker.data.text.sources import open_source
from thinker.features.streams.stream_writer import StreamText
from thinker.features.streams.token_stream import TokenStream
ours = load_tokenizer(tokenizer)
text = StreamText(open_source("jsonl", path=file), ours, 0.05)
pack = partial(PackedDataset, seq_len=1024, packing="contiguous")
stream, window = TokenStream(Path(folder), lambda: text, ours, 1 << 24, pack, 1, progress=False), 0
start = time.perf_counter()
stream.start(0)
while stream.epochs(window)[0] < 1:  # every window once
    for sample in stream.samples(window, 64):
        stream.window(sample)
    window += 64
seconds, tokens = time.perf_counter() - start, window * 1024
stream.close()
""",
    "tiktoken": """
texts = [json.loads(line)["text"] for line in open(file)]  # not timed
encoding, tokens, start = load_tokenizer(tokenizer)._encoding, 0, time.perf_counter()
for i in range(0, len(texts), 512):
    tokens += sum(map(len, encoding.encode_ordinary_batch(texts[i : i + 512], num_threads=os.cpu_count())))
seconds = time.perf_counter() - start
""",
    "datasets-arrays": """
def encode(rows):
    return {"ids": [encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16) for text in rows["text"]]}

map_and_write(encode, batched=True)
""",
    "datasets-lists": """
def encode(row):  # one row at a time, as nanoGPT's data/openwebtext/prepare.py
    return {"ids": encoding.encode_ordinary(row["text"])}

map_and_write(encode)
""",
}
MAP = """
import datasets
import numpy as np
datasets.disable_progress_bars()
encoding = load_tokenizer(tokenizer)._encoding

def map_and_write(encode, **options):
    global seconds, tokens
    start, at = time.perf_counter(), 0
    rows = datasets.load_dataset("json", data_files=file, split="train", cache_dir=folder)
    rows = rows.map(encode, num_proc=os.cpu_count(), remove_columns=["text"], **options)
    tokens = sum(len(ids) for batch in rows.with_format("numpy").iter(1000) for ids in batch["ids"])
    ids = np.memmap(f"{folder}/train.bin", np.uint16, "w+", shape=(tokens,))
    for batch in rows.with_format("numpy").iter(1000):
        joined = np.concatenate(batch["ids"])
        ids[at : at + len(joined)] = joined
        at += len(joined)
    ids.flush()
    seconds = time.perf_counter() - start
"""
START = """
import json, os, resource, sys, time
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
file, tokenizer, folder = sys.argv[1:]
"""
END = """
peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024
print(json.dumps({"tokens": tokens, "seconds": seconds, "peak_bytes": peak}))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("file", metavar="FILE", help="JSON lines with a column text")
    parser.add_argument(
        "--tokenizer", default="bpe:32768", help="BPE to train on the file, or a saved tokenizer"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timing rounds; medians are reported"
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        metavar="SIDE",
        choices=list(SIDES),
        default=list(SIDES),
        help="what to time",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the sides in turns, each in a process of its own, and print a table."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.sides}
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        tokenizer = _tokenizer(arguments, Path(scratch))
        for _ in range(arguments.repeats):
            for name in arguments.sides:
                folder = Path(scratch) / "side"
                folder.mkdir()
                code = START + (MAP if name.startswith("datasets") else "") + SIDES[name] + END
                command = [sys.executable, "-c", code, arguments.file, tokenizer, folder]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                results[name].append(json.loads(done.stdout.splitlines()[-1]))
                shutil.rmtree(folder)
    rows = []
    for name, rounds in results.items():
        rate = statistics.median(each["tokens"] / each["seconds"] for each in rounds)
        peak = max(each["peak_bytes"] for each in rounds)
        rows.append(
            {
                "side": name,
                "tokens_per_second": rate,
                "peak_bytes": peak,
                "tokens": rounds[0]["tokens"],
            }
        )
        print(
            f"{name:20} {rate:13,.0f} tokens/s  {rate / rows[0]['tokens_per_second']:5.2f}  {peak / 1e9:5.2f} GB"
        )
    return {
        "file": Path(arguments.file).name,
        "bytes": Path(arguments.file).stat().st_size,
        "rows": rows,
    }


def _tokenizer(arguments: argparse.Namespace, scratch: Path) -> str:
    """The path of the tokenizer, which is trained first if it is not saved."""
    if not arguments.tokenizer.startswith("bpe:"):
        load_tokenizer(arguments.tokenizer)
        return str(Path(arguments.tokenizer).resolve())
    texts = (document.text for document in read_tables("jsonl", [arguments.file], "text"))
    return str(make_tokenizer(arguments.tokenizer, texts).save(scratch).resolve())
