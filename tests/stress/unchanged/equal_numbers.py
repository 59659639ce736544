"""The numbers that runs and commands leave behind, and whether two of them are equal to the bit."""

import hashlib
import json
import re
from pathlib import Path

# They differ from run to run. All other numbers of metrics.jsonl are compared.
TIMINGS = (
    "elapsed_s",
    "tokens_per_second",
    "trained_tokens_per_second",
    "flops_per_second",
    "mfu",
    "peak_memory_bytes",
    "data_wait",
)
STATE = ("step", "tokens", "best_val_loss", "tokenizer", "corpus")  # the last two are hashes


def assert_includes(old, new, where):
    """All that JSON `old` says is in `new`, to the bit: JSON has all digits of a float.

    A key with null may be absent, and `new` may have more keys.
    """
    if isinstance(old, dict):
        assert isinstance(new, dict), f"{where}: {old} -> {new}"
        for key, value in old.items():
            assert key in new or value is None, f"{where}.{key}: {value} -> missing"
            assert_includes(value, new.get(key), f"{where}.{key}")
    elif isinstance(old, list):
        assert isinstance(new, list), f"{where}: {old} -> {new}"
        assert len(old) == len(new), f"{where}: {len(old)} values -> {len(new)}"
        for index, (ours, theirs) in enumerate(zip(old, new)):
            assert_includes(ours, theirs, f"{where}[{index}]")
    else:
        assert old == new, f"{where}: {old!r} -> {new!r}"


# ------------------------------------------------------------------ runs


def metrics(run):
    """The lines of metrics.jsonl without timings."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in line if key not in TIMINGS} for line in lines]


def checkpoints(run):
    """The folders of a run's checkpoints by name, such as step-00000050."""
    folders = (run / "checkpoints").iterdir()
    return {folder.name: folder for folder in sorted(folders)}


def step_of(name):
    """The step of a checkpoint, by its name."""
    return int(re.fullmatch(r"\w+-(\d+)", name)[1])


def tensors(folder):
    """By (file, tensor) of a folder's safetensors files: type, shape and sha256 of the bytes."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            digest = hashlib.sha256(content[start + begin : start + end]).hexdigest()
            found[path.name, name] = (entry["dtype"], tuple(entry["shape"]), digest)
    return found


def compare_tensors(old, new):
    """Check that two folders hold the same tensors. Returns how many."""
    ours, theirs = tensors(old), tensors(new)
    assert ours.keys() == theirs.keys(), f"{old}: other tensors: {ours.keys() ^ theirs.keys()}"
    unequal = [key for key in ours if ours[key] != theirs[key]]
    assert not unequal, f"{old}: {len(unequal)} of {len(ours)} tensors differ, such as {unequal[0]}"
    return len(ours)


def compare_runs(old, new):
    """Check that two runs have the same metrics and checkpoints. Returns what they have."""
    ours, theirs = metrics(old), metrics(new)
    for index, (our, their) in enumerate(zip(ours, theirs)):
        assert_includes(our, their, f"metrics.jsonl, line {index + 1}")
    assert len(ours) == len(theirs), f"metrics.jsonl: {len(ours)} lines -> {len(theirs)}"
    folders, others = checkpoints(old), checkpoints(new)
    assert folders.keys() == others.keys(), f"checkpoints: {[*folders]} -> {[*others]}"
    n_tensors = sum(compare_tensors(folders[name], others[name]) for name in folders)
    for name in folders:
        state = json.loads((folders[name] / "state.json").read_text())
        wanted = {key: value for key, value in state.items() if key in STATE}
        assert_includes(wanted, json.loads((others[name] / "state.json").read_text()), name)
    n_losses = sum("train_loss" in line for line in ours)
    n_evaluations = sum("val_loss" in line for line in ours)
    assert min(n_losses, n_evaluations, n_tensors) > 0, f"{old} has nothing to compare"
    return f"{n_losses} losses, {n_evaluations} evaluations, {n_tensors} tensors"


def cut(run, step):
    """Let a run have no checkpoint after this step, as if it had been killed then."""
    for name, folder in checkpoints(run).items():
        if step_of(name) > step:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    assert any(name.startswith("step-") for name in checkpoints(run)), f"no checkpoint at {step}"


def add_key(run, section, key, value):
    """Put a key into a run's config.yaml and into the settings in its checkpoints."""
    config = run / "config.yaml"
    text = config.read_text()
    assert f"\n{section}:\n" in text
    line = f"  {key}: {json.dumps(value)}\n"
    config.write_text(text.replace(f"\n{section}:\n", f"\n{section}:\n{line}"))
    for folder in checkpoints(run).values():
        state = json.loads((folder / "state.json").read_text())
        if "settings" in state:
            state["settings"][section][key] = value
            write_listed(folder, "state.json", state)


def write_listed(folder, name, content):
    """Write a JSON file of a checkpoint, and its size and sha256 in the manifest."""
    data = to_json(content)
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
    (folder / "manifest.json").write_bytes(to_json(manifest))


def to_json(content):
    """JSON as checkpoints store it."""
    return (json.dumps(content, indent=1) + "\n").encode()


# ------------------------------------------------------------------ output


def compare_output(old, new, where):
    """Check that two commands have succeeded, and printed the same: see assert_includes()."""
    assert old.status == new.status, f"{where}: status {old.status} -> {new.status}\n{new.stderr}"
    assert old.status == 0, f"{where}: status {old.status}\n{old.stderr}"
    ours, theirs = as_json(old.stdout), as_json(new.stdout)
    if ours is None or theirs is None:
        assert old.stdout == new.stdout, f"{where}: {old.stdout!r} -> {new.stdout!r}"
    else:
        assert_includes(ours, theirs, where)
    assert old.stdout.strip(), f"{where}: no output"


def as_json(text):
    """The values of lines of JSON; None if the text is anything else."""
    try:
        return [json.loads(line) for line in text.splitlines()]
    except json.JSONDecodeError:
        return None


def compare_files(old, new, except_for=()):
    """Check that two folders hold the same files with the same bytes. Returns how many."""
    ours, theirs = ({path.name for path in Path(folder).iterdir()} for folder in (old, new))
    assert ours == theirs, f"{old}: other files: {ours ^ theirs}"
    compared = sorted(ours - set(except_for))
    for name in compared:
        assert content_of(old / name) == content_of(new / name), f"{name} differs"
    return len(compared)


# Exports have had a pad token that also ended texts.
PAD_KEYS = ("pad_token", "pad_token_id")


def content_of(path):
    """The bytes of a file, or the values of a JSON object without those of PAD_KEYS."""
    content = path.read_bytes()
    if path.suffix != ".json":
        return content
    values = json.loads(content)
    return {key: value for key, value in values.items() if key not in PAD_KEYS}
