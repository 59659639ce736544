"""What trackers have stored of a run, read with a reader of their own."""

import csv
import json

BLOCK_BYTES = 32768  # wandb writes its offline file in blocks


def read_records(path):
    """The protobuf records of an offline file of wandb: a LevelDB log in blocks, whose records may
    be split into parts."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, record = 7, b""
    while position + 7 <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < 7:  # too few bytes for a header: padding
            position += left_in_block
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a complete record, or the last part of one
            yield record
            record = b""


def read_offline(folder):
    """The run's id, and its history as {step: {key: value}}."""
    from wandb.proto import wandb_internal_pb2

    history, run_id = {}, None
    for data in read_records(next(folder.glob("*.wandb"))):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            run_id = record.run.run_id
        if record.WhichOneof("record_type") == "history":
            line = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            history.setdefault(line.pop("_step", record.history.step.num), {}).update(line)
    return run_id, history


def read_wandb_summary(folder):
    """The last values of a run's summary in an offline folder."""
    from wandb.proto import wandb_internal_pb2

    values = {}
    for data in read_records(next(folder.glob("*.wandb"))):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "summary":
            for item in record.summary.update:
                values[item.key or item.nested_key[0]] = json.loads(item.value_json)
    return values


def read_runs(run):
    """What read_offline() gives for each of the run's trainings, oldest first."""
    return [read_offline(folder) for folder in sorted((run / "wandb").glob("offline-run-*"))]


def read_wandb(run):
    """[(step, {key: value})] of all trainings of a run, as wandb has written them."""
    return [pair for _, history in read_runs(run) for pair in history.items()]


def read_trackio(run):
    """[(step, {key: value})] of trackio's database, in the order in which rows were added."""
    from trackio.sqlite_storage import SQLiteStorage

    name = json.loads((run / "trackio.json").read_text())["name"]
    rows = SQLiteStorage.get_logs("thinker", name)
    return [(row.pop("step"), row) for row in rows if row.pop("timestamp")]


def read_csv(run, name="metrics.csv"):
    """The rows of a file of the CSV tracker."""
    with (run / name).open(newline="") as file:
        return list(csv.DictReader(file))


def read_metrics_csv(run):
    """[(step, {key: value})], without empty cells."""
    pairs = []
    for row in read_csv(run):
        step = int(row.pop("step"))
        pairs.append((step, {key: float(value) for key, value in row.items() if value}))
    return pairs


def read_tensorboard(run):
    """TensorBoard's own reader, which keeps everything."""
    from tensorboard.backend.event_processing import event_accumulator

    kinds = (event_accumulator.SCALARS, event_accumulator.IMAGES, event_accumulator.TENSORS)
    reader = event_accumulator.EventAccumulator(str(run / "tensorboard"), dict.fromkeys(kinds, 0))
    return reader.Reload()


def read_scalars(run):
    """[(step, {key: value})] of TensorBoard; a step occurs as often as a key of it does."""
    reader = read_tensorboard(run)
    pairs = []
    for tag in reader.Tags()["scalars"]:
        n_before = {}
        for event in reader.Scalars(tag):
            index = n_before.get(event.step, 0)
            n_before[event.step] = index + 1
            pairs.append((event.step, index, tag, event.value))
    steps = {}
    for step, index, tag, value in pairs:
        steps.setdefault((step, index), {})[tag] = value
    return [(step, values) for (step, _), values in sorted(steps.items())]


def read_texts(run, tag):
    """[(step, text)] of TensorBoard, from the reader of its page: the other one purges no texts."""
    from tensorboard.backend.event_processing import plugin_event_accumulator

    keep_all = {plugin_event_accumulator.TENSORS: 0}
    folder = str(run / "tensorboard")
    reader = plugin_event_accumulator.EventAccumulator(
        folder, tensor_size_guidance={f"{tag}/text_summary": 0}, size_guidance=keep_all
    )
    texts = []
    for event in reader.Reload().Tensors(f"{tag}/text_summary"):
        lines = event.tensor_proto.string_val[0].decode().splitlines(True)
        assert all(line.startswith("    ") for line in lines)  # Markdown shows them as they are
        texts.append((event.step, "".join(line[4:] for line in lines)))
    return texts
