"""The tables of the benchmark pages, made from recorded results.

A function with `@table` makes one. On a page, its name has hyphens: `native-decode`.
"""

import statistics
from collections.abc import Callable

from thinker.benchmarks.pages.recorded import (
    Record,
    Results,
    Table,
    rows_table,
    signed_percent,
    with_interval,
)

TABLES: dict[str, Callable[[Results], Table]] = {}
PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "int8": "8 bits", "int4": "4 bits"}
LIBRARIES = {"thinker": "Thinker", "transformers": "transformers", "plain": "plain GPT"}
GPU_CURVES = "../images/gpu-time-to-loss.png"  # from a benchmark page
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}


def table(function: Callable[[Results], Table]) -> Callable[[Results], Table]:
    """Register a function that makes a table."""
    TABLES[function.__name__.replace("_", "-")] = function
    return function


# Losses


@table
def quickstart(results: Results) -> Table:
    """Runs of the quickstart."""
    days = ("2026-11-29-avx512", "2026-11-29", "2026-11-24")
    runs = [run for day in days for run in results[f"quickstart-{day}"]]
    rows = [run | {"day": run["environment"]["date"], "above": run["ratio"] - 1} for run in runs]
    columns = {
        "date": "{day}",
        "processor with": "{environment[features]}",
        "seconds": "{seconds:.0f}",
        "tokens": "{tokens:,}",
        "loss": "{val_loss:.4f}",
        "floor": "{entropy_floor:.4f}",
        "above the floor": "{above:.1%}",
    }
    return rows_table(runs, rows, columns)


@table
def bigram(results: Results) -> Table:
    """A minute of training, and a bigram model."""
    [run] = results["bigram"]
    rows = [
        {"model": "`pysource.yaml` after one minute", "loss": run["loss"]},
        {"model": "a bigram model of the same tokens", "loss": run["bigram_loss"]},
    ]
    tokens = f"{run['tokens']:,}"
    return rows_table([run], rows, {"model": "{model}", "tokens": tokens, "loss": "{loss:.3f}"})


@table
def short_context(results: Results) -> Table:
    """The lowest loss with 16 tokens of context."""
    [result] = results["short_context"]
    [run] = result["runs"]
    rows = []
    for name, loss in (("the lowest possible", run["bound"]), ("the quickstart", run["loss"])):
        rows.append({"name": name, "loss": loss, "times": loss / run["entropy"]})
    columns = {"16 tokens": "{name}", "loss": "{loss:.3f}", "times the floor": "{times:.3f}"}
    return rows_table([result], rows, columns)


@table
def five_minutes(results: Results) -> Table:
    """Bits per byte after five minutes."""
    runs = results["five_minutes"]
    columns = {
        "processor": "{environment[processor]}",
        "precision": "{pysource[precision]}",
        "`pysource`": "{pysource[text]}",
        "`tales`": "{tales[text]}",
    }
    return rows_table(runs, runs, columns)


@table
def sweep(results: Results) -> Table:
    """Losses with changed learning rates at three sizes."""
    [run] = results["sweep"]
    losses = {(row["shape"], row["key"], row["value"]): row["loss"] for row in run["rows"]}
    headings = ("lr ÷ 2, × 2", "embedding_lr ÷ 3, × 3", "head_lr ÷ 3, × 3")
    made = Table(("width × layers", "loss with the defaults", *headings), [run])
    for shape in ("64x4x2", "192x5x6", "384x6x6"):
        default = losses[shape, "", ""]
        cells = []
        for key, values in (
            ("optimizer.lr", ("x0.5", "x2")),
            ("optimizer.embedding_lr", ("x0.33", "x3")),
            ("optimizer.head_lr", ("x0.33", "x3")),
        ):
            lower, higher = (losses[shape, key, value] / default - 1 for value in values)
            cells.append(f"{signed_percent(lower)}, {signed_percent(higher)}")
        width, layers, _ = shape.split("x")
        made.add(f"{width} × {layers}", f"{default:.3f}", *cells)
    return made


@table
def coordinates(results: Results) -> Table:
    """How activations and their changes grow with width and depth."""
    run = results["coordinates"][-1]
    rows = []
    for row in run["slopes"]:
        rows.append({**row, "sizes": f"{row['smallest']} to {row['largest']} {row['by']}"})
    columns = {
        "sizes": "{sizes}",
        "activation": "{activation}",
        "value, largest / smallest": "{rms_ratio:.2f}",
        "change, largest / smallest": "{change_ratio:.2f}",
        "slope of the change": "{change_slope:.2f}",
    }
    return rows_table([run], rows, columns)


@table
def rates(results: Results) -> Table:
    """Losses by multiple of the default rates, width and batch size."""
    run = results["rates"][-1]
    multiples = sorted({row["multiple"] for row in run["rows"]})
    headings = [f"default × {multiple:g}" for multiple in multiples]
    made = Table(("width", "sequences", *headings), [run])
    cases = dict.fromkeys((row["width"], row["batch"]) for row in run["rows"])
    for width, batch in cases:
        line = [row for row in run["rows"] if (row["width"], row["batch"]) == (width, batch)]
        losses = {row["multiple"]: row["loss"] for row in line}
        made.add(str(width), str(batch), *(f"{losses[multiple]:.3f}" for multiple in multiples))
    return made


@table
def ladder(results: Results) -> Table:
    """Losses predicted from smaller models, and trained."""
    runs = [run for run in results["ladder"] if run["loss"] is not None]
    rows = []
    for run in runs:
        largest = max(row["flops"] for row in run["rows"])
        sizes = f"{run['rows'][0]['size']} to {run['rows'][-1]['size']}"
        shown = {"sizes": sizes, "gap": run["target"]["flops"] / largest}
        shown["runs"] = len(run["rows"])
        shown["error"] = signed_percent(run["error"])
        shown["interval"] = f"{run['low']:.3f} to {run['high']:.3f}"
        rows.append({**run, **shown})
    columns = {
        "config": "`{config}`",
        "model": "{target[size]}",
        "FLOPs": "{target[flops]:.1e}",
        "from": "{sizes}",
        "runs": "{runs}",
        "times the largest of these": "{gap:.1f}",
        "predicted": "{predicted:.3f}",
        "95% interval": "{interval}",
        "trained": "{loss:.3f}",
        "off by": "{error}",
    }
    return rows_table(runs, rows, columns)


@table
def time_to_loss(results: Results) -> Table:
    """The tokens and seconds until the defaults reach a baseline's final loss."""
    runs = results["time_to_loss"][:3]
    adamw = "AdamW, cosine, lr 0.008 (tuned), 600 steps"
    gpt2 = "transformers' GPT-2, AdamW 0.001, cosine, 2000 steps"
    names = (("`pysource`", adamw), ("`tales`", adamw), ("characters", gpt2))
    rows = []
    for run, (data, baseline) in zip(runs, names):
        losses = {row["name"]: row["val_loss"] for row in run["rows"]}
        ends = {"slow_loss": losses[run["slow"]], "fast_loss": losses[run["fast"]]}
        rows.append({"data": data, "baseline": baseline, **ends, **run["ratios"]})
    columns = {
        "data": "{data}",
        "baseline": "{baseline}",
        "its loss": "{slow_loss:.3f}",
        "of its tokens": "{tokens:.1%}",
        "of its seconds": "{elapsed_s:.1%}",
        "the defaults end at": "{fast_loss:.3f}",
    }
    return rows_table(runs, rows, columns)


@table
def time_to_loss_again(results: Results) -> Table:
    """The same comparisons three days later."""
    runs = results["time_to_loss"][3:]
    names = ("`pysource`", "`tales`", "characters")
    rows = [{"data": name, **run["ratios"]} for name, run in zip(names, runs)]
    columns = {
        "data": "{data}",
        "of its tokens": "{tokens:.1%}",
        "of its seconds": "{elapsed_s:.1%}",
    }
    return rows_table(runs, rows, columns)


@table
def tuned_adamw(results: Results) -> Table:
    """Losses of the baseline by learning rate."""
    runs = results["time_to_loss"][:2]
    rates = ("0.002", "0.004", "0.008", "0.012", "0.016")
    made = Table(("lr of AdamW", *rates), runs)
    for run, data in zip(runs, ("`pysource`", "`tales`")):
        losses = {row["name"].split("=")[-1]: row["val_loss"] for row in run["rows"]}
        made.add(data, *(f"{losses[rate]:.3f}" for rate in rates))
    return made


# Small texts


@table
def regularization(results: Results) -> Table:
    """Options for repeated text: the loss without options, and differences from it."""
    [run] = results["regularization"]
    columns = {"option": "{option}"}
    for text, name in (("kjv", "English prose"), ("py", "`pysource`"), ("tales", "`tales`")):
        for epochs in (1, 4, 16):
            columns[f"{name}, {epochs}"] = f"{{{text}-{epochs}}}"
    options: dict[str, Record] = {}
    for row in run["rows"]:
        name = row["option"]
        if name == "none":
            cell = f"{row['nats_per_byte']:.3f}"
        else:
            cell = f"{row['difference']:+.3f}"
        options.setdefault(name, {"option": name})[f"{row['text']}-{row['epochs']}"] = cell
    return rows_table([run], options.values(), columns)


@table
def size_rule(results: Results) -> Table:
    """Bits per byte with automatic and with fixed sizes."""
    shapes = ("auto", "64x2x2", "96x4x3", "128x4x4", "192x4x6", "256x6x8")
    runs = [run for run in results["size_rule"] if "--shapes" not in run["environment"]["command"]]
    sizes = {100_000: "100 KB", 1_000_000: "1 MB", 10_000_000: "10 MB"}
    cases: dict[str, Record] = {}
    for run in runs:
        for row in run["rows"]:
            name = f"{sizes[row['characters']]}, {row['minutes']:.0f}"
            cases.setdefault(name, {"name": name})[row["shape"]] = row["bits_per_byte"]
    mean: Record = {"name": "mean"}
    for shape in shapes:
        mean[shape] = statistics.fmean(case[shape] for case in cases.values())
    columns = {"text, minutes": "{name}"}
    for shape in shapes:
        columns[shape.replace("x", " × ")] = f"{{{shape}:.3f}}"
    return rows_table(runs, [*cases.values(), mean], columns)


# Training


@table
def train(results: Results) -> Table:
    """Whole steps of 12M parameters in the precision that is best for the machine."""
    return train_table(results["train-bf16"] + results["train"][:1])


@table
def step_limit(results: Results) -> Table:
    """Whole steps beside their matrix products, each with torch.mm; medians of the runs of a machine
    and a version of the code."""
    runs = results["step_limit"]
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for run in runs:
        for name, step in run["steps"].items():
            times = {"ms": 1e3 * step["step_s"], "products_ms": 1e3 * run["products_s"]}
            key = (run["environment"]["features"], run.get("code", "now"), name)
            groups.setdefault(key, []).append(step | times)
    rows = []
    for (machine, code, name), steps in groups.items():
        row = {"machine": machine, "code": code, "name": name, "n_runs": len(steps)}
        for field in steps[0]:
            row[field] = statistics.median(step[field] for step in steps)
        rows.append(row)
    columns = {
        "processor with": "{machine}",
        "code": "{code}",
        "step": "{name}",
        "runs": "{n_runs}",
        "ms": "{ms:.0f}",
        "tokens/s": "{tokens_per_second:,.0f}",
        "products, ms": "{products_ms:.0f}",
        "times the products": "{to_products:.2f}",
        "times the speed of transformers compiled": "{speed_to_baseline:.2f}",
    }
    return rows_table(runs, rows, columns)


@table
def train_emulated(results: Results) -> Table:
    """The same in bf16 on a processor without bf16 units."""
    return train_table(results["train"][1:])


def train_table(runs: list[Record]) -> Table:
    """Speed, MFU and peak memory, eager and compiled."""
    rows = []
    for run in runs:
        for name in ("thinker {}, adamw", "thinker {}, muon", "transformers {}, adamw"):
            library, optimizer = name.split(" {}, ")
            row = {
                "precision": run["precision"],
                "machine": run["environment"]["features"],
                "name": f"{LIBRARIES[library]}, {OPTIMIZERS[optimizer]}",
            }
            for form in ("eager", "compiled"):
                key = name.format(form)
                for measure in ("tokens_per_second", "mfu", "peak_memory_bytes"):
                    if key in run.get(measure, {}):
                        row[f"{form}_{measure}"] = run[measure][key]
                if f"{form}_peak_memory_bytes" in row:
                    row[f"{form}_gb"] = row[f"{form}_peak_memory_bytes"] / 1e9
            rows.append(row)
    columns = {
        "precision": "{precision}",
        "processor with": "{machine}",
        "": "{name}",
        "tokens/s, eager": "{eager_tokens_per_second:,.0f}",
        "tokens/s, compiled": "{compiled_tokens_per_second:,.0f}",
        "MFU, eager": "{eager_mfu:.2f}",
        "MFU, compiled": "{compiled_mfu:.2f}",
        "peak GB, eager": "{eager_gb:.2f}",
        "peak GB, compiled": "{compiled_gb:.2f}",
    }
    return rows_table(runs, rows, columns)


@table
def linear_cross_entropy(results: Results) -> Table:
    """Memory and time of the LM head and the loss."""
    [fp32] = results["linear_cross_entropy"]
    name = "linear-cross-entropy-bf16"
    [bf16] = [record for record in results["recorded"] if record["name"] == name]
    headings = ("precision", "in chunks, MiB", "plain, MiB", "time, relative to plain")
    made = Table(headings, [fp32, bf16])
    chunks, plain = fp32["peak_bytes"]["chunks"], fp32["peak_bytes"]["plain"]
    sizes = (f"{chunks / 2**20:.0f}", f"{plain / 2**20:.0f}")
    made.add("fp32", *sizes, f"{fp32['ratios']['time']:.2f}")
    made.add(*bf16["rows"][0].values())
    return made


@table
def checkpoint_overhead(results: Results) -> Table:
    """What resuming and saving cost."""
    runs = results["checkpoint_overhead"]
    made = Table(("", "quickstart, 2.1M parameters", "12.2M, one sequence per step"), runs)

    def add(name: str, template: str) -> None:
        """Add a row with the same measure of both runs, times in ms."""
        cells = []
        for run in runs:
            times = {key: 1000 * value for key, value in run.items() if key.endswith("_s")}
            cells.append(template.format(**times, bookkeeping=run["bookkeeping"]))
        made.add(name, *cells)

    add("a step with the work for resuming, relative to one without", "{bookkeeping:.3f}")
    add("a step", "{step_s:.0f} ms")
    add("a save in the foreground", "{foreground_save_s:.0f} ms")
    add("copying the state", "{copy_s:.1f} ms")
    add("delay of a step by a save in the background", "{delay_s:.1f} ± {delay_error_s:.1f} ms")
    return made


@table
def comm_volume(results: Results) -> Table:
    """The bytes that a rank sends per step."""
    bf16, fp32 = results["comm_volume"]
    modes = {"ddp": "DDP", "fsdp": "FSDP2"}
    rows = []
    for row, other in zip(bf16["forms"], fp32["forms"]):
        mode = f"{modes[row['parallel']]}, {OPTIMIZERS[row['optimizer']]}"
        sizes = {"mb": row["bytes"] / 1e6, "sum_mb": row["sum"] / 1e6}
        sizes |= {"fp32_mb": other["bytes"] / 1e6, "fp32_ratio": other["ratio"]}
        rows.append(row | sizes | {"mode": mode})
    columns = {
        "ranks": "{ranks}",
        "mode": "{mode}",
        "bf16: MB": "{mb:.2f}",
        "computed": "{sum_mb:.2f}",
        "ratio": "{ratio:.3f}",
        "fp32: MB": "{fp32_mb:.2f}",
        "fp32: ratio": "{fp32_ratio:.3f}",
        "time of a step, bf16": "{of_one:.2f}",
    }
    return rows_table([bf16, fp32], rows, columns)


@table
def tricks(results: Results) -> Table:
    """Losses of tricks, and their differences from the defaults at equal time and at equal
    tokens."""
    runs = results["tricks"]
    rows = []
    columns = {
        "parameters": "{size}",
        "precision": "{precision}",
        "text": "`{text}`",
        "trick": "{trick}",
        "seeds": "{seeds}",
        "loss": "{loss:.3f}",
    }
    for run in runs:
        for row in run["rows"]:
            cells = row | {"size": run["size"].upper(), "seeds": run["seeds"]}
            cells["precision"] = run["precision"]
            for budget in ("time", "tokens"):
                if budget not in row:
                    continue
                measured = row[budget]
                cells["loss"] = statistics.fmean(measured["losses"])
                if row["trick"] != "defaults":
                    difference = with_interval(measured["difference"], measured["interval"], 3)
                    cells[f"equal_{budget}"] = difference
                    columns[f"at equal {budget}"] = f"{{equal_{budget}}}"
            rows.append(cells)
    columns["time of a step"] = "{step_time:.2f}"
    return rows_table(runs, rows, columns)


@table
def accumulation(results: Results) -> Table:
    """Errors of loss and gradients for every division of a batch."""
    [run] = results["accumulation"]
    wrong = ("mean of micro-batches", "mean of ranks", "padding counted")
    rows = []
    for row in run["rows"]:
        names = {"targets": f"{row['fewest']} to {row['most']}"}
        mistakes = {name.replace(" ", "_"): signed_percent(row["wrong"][name]) for name in wrong}
        rows.append(row | names | mistakes)
    columns = {
        "text, packing": "{case}",
        "targets per sequence": "{targets}",
        "steps": "{n_compared}",
        "loss": "{loss_error:.0e}",
        "gradients, one process": "{one:.0e}",
        "DDP": "{ddp:.0e}",
        "FSDP2": "{fsdp:.0e}",
    }
    columns |= {f"*{name}*": f"{{{name.replace(' ', '_')}}}" for name in wrong}
    return rows_table([run], rows, columns)


@table
def accumulation_updates(results: Results) -> Table:
    """Errors of the updates of three steps."""
    [run] = results["accumulation"]
    known = {
        "adamw": "torch's AdamW in fp64, from the plain gradients",
        "muon": "one process with one micro-batch",
    }
    rows = []
    for optimizer, error in run["updates"].items():
        names = {"optimizer": OPTIMIZERS[optimizer], "known": known[optimizer]}
        rows.append(names | {"error": error})
    columns = {
        "optimizer": "{optimizer}",
        "updates of three steps compared with those of": "{known}",
        "largest error": "{error:.0e}",
    }
    return rows_table([run], rows, columns)


# GPU


def gpu_stage(results: Results, stage: str) -> list[Record]:
    """The results of one stage of the GPU benchmark."""
    found = [record for record in results["gpu"] if record["stage"] == stage]
    return [record for record in found if record["name"] != "end"]


@table
def gpu_training(results: Results) -> Table:
    """Training steps of 124M parameters."""
    return gpu_training_table(gpu_stage(results, "training, 124m"))


@table
def gpu_training_350m(results: Results) -> Table:
    """Training steps of 350M parameters."""
    return gpu_training_table(gpu_stage(results, "training, 350m"))


def gpu_training_table(steps: list[Record]) -> Table:
    """Contenders in the order of their speed."""
    rows = []
    for step in sorted(steps, key=lambda step: -step["tokens_per_second"]):
        library, settings = step["name"].split(" compiled, ")
        for name, label in OPTIMIZERS.items():
            settings = settings.replace(name, label)
        times = {"ms": 1000 * step["step_s"], "gb": step["peak_memory_bytes"] / 1e9}
        rows.append(step | times | {"label": f"{LIBRARIES[library]}, {settings}"})
    columns = {
        "": "{label}",
        "tokens/s": "{tokens_per_second:,.0f}",
        "ms per step": "{ms:.1f}",
        "MFU": "{mfu:.2f}",
        "peak GB": "{gb:.1f}",
    }
    return rows_table(steps[:1], rows, columns)


@table
def gpu_split(results: Results) -> Table:
    """Steps of 124M before and after the joined products became separate ones."""
    before, after = {}, {}
    steps = gpu_stage(results, "training step, variants")
    for step in steps:
        if "with one product per matrix" in step["note"]:
            after[step["name"]] = step
        else:
            before[step["name"]] = step
    names = {
        "plain": "plain GPT, AdamW",
        "base": "Thinker, AdamW, 12 heads without QK-norm",
        "Q base": "Thinker, Muon, as in `gpu-124m.yaml`: 6 heads, QK-norm, micro-batch 64",
    }
    rows = []
    for name, label in names.items():
        times = {"old_ms": 1000 * before[name]["step_s"], "new_ms": 1000 * after[name]["step_s"]}
        rows.append(after[name] | times | {"label": label})
    columns = {
        "": "{label}",
        "ms before": "{old_ms:.1f}",
        "ms after": "{new_ms:.1f}",
        "tokens/s after": "{tokens_per_second:,.0f}",
        "MFU after": "{mfu:.3f}",
    }
    return rows_table(steps[:1], rows, columns)


@table
def gpu_profile(results: Results) -> Table:
    """The parts of a step of 124M."""
    [profile] = gpu_stage(results, "profile")
    step = profile["step_s"]
    seconds = profile["seconds"] | {"idle": profile["idle_share"] * step}
    rows = []
    for name, value in seconds.items():
        rows.append({"name": name, "ms": 1000 * value, "share": value / step})
    columns = {"part of a step": "{name}", "ms": "{ms:.1f}", "share": "{share:.1%}"}
    return rows_table([profile], rows, columns)


@table
def gpu_time_to_loss(results: Results) -> Table:
    """Seconds until gpu-124m.yaml reaches the loss of a plain GPT."""
    from thinker.benchmarks.gpu.gpu_time_to_loss import comparisons  # imports torch

    records = results.get("gpu_time_to_loss", [])
    rows = []
    for compared in comparisons(records):
        row = compared | {"plain": OPTIMIZERS[compared["plain"]]}
        for key in ("reached_s", "certain_s"):
            row[key] = "not reached" if row[key] is None else f"{row[key]:.0f}"
        rows.append(row)
    if not rows:
        return Table((), [], notes=["No card has completed it yet."])
    machines = [record for record in records if record["name"] == "environment"]
    columns = {
        "plain GPT with": "{plain}",
        "seconds (epochs)": "{plain_s:.0f} ({plain_epochs:.1f})",
        "its loss": "{plain_loss:.4f}",
        "Thinker reaches it after": "{reached_s}",
        "for certain after": "{certain_s}",
        "Thinker's seconds (epochs)": "{thinker_s:.0f} ({thinker_epochs:.1f})",
        "its loss ": "{thinker_loss:.4f}",
        "difference": "{difference:+.4f} [{low:+.4f}, {high:+.4f}]",
    }
    made = rows_table(machines, rows, columns)
    made.notes.append(f"![Validation loss by seconds of training]({GPU_CURVES})")
    return made


@table
def gpu_facts(results: Results) -> Table:
    """How fast the GPU copies and multiplies."""
    facts = gpu_stage(results, "facts")
    made = Table(("measured", "result"), facts[-1:])
    for fact in facts:
        if fact["name"] == "copy bandwidth":
            made.add("copies", f"{fact['bytes_per_second'] / 1e12:.2f} TB/s")
        elif fact["name"].startswith("product"):
            sizes = " × ".join(map(str, fact["size"]))
            made.add(f"{fact['name']} ({sizes})", f"{fact['flops_per_second'] / 1e12:.0f} TFLOP/s")
    return made


@table
def gpu_decoding(results: Results) -> Table:
    """Tokens per second by batch."""
    names = {
        "bf16-compiled": "Thinker, `--compile`",
        "int8-compiled": "Thinker, 8 bits, `--compile`",
        "bf16-inductor": "Thinker, torch.compile alone",
        "int8-inductor": "Thinker, 8 bits, torch.compile alone",
        "transformers-bf16-compiled": "transformers, compiled",
        "bf16": "Thinker",
        "int8": "Thinker, 8 bits",
        "transformers-bf16": "transformers",
    }
    rows = []
    for size in ("124M", "1.1B"):
        for name, label in names.items():
            row = {"size": size, "label": label}
            for record in gpu_stage(results, f"decoding, {size.lower()}"):
                if record["name"].split("@")[0] == name:
                    row[f"batch_{record['batch']:.0f}"] = record["tokens_per_second"]
            if "batch_1" in row:
                rows.append(row)
    columns = {"model": "{size}", "": "{label}"}
    for batch in (1, 32, 256):
        columns[f"batch {batch}"] = f"{{batch_{batch}:,.0f}}"
    return rows_table(gpu_stage(results, "decoding, 124m")[:1], rows, columns)


@table
def gpu_run(results: Results) -> Table:
    """A real run that was stopped and resumed."""
    [run] = gpu_stage(results, "real training")
    columns = {
        "step": "{step}",
        "seconds": "{elapsed_s:.1f}",
        "train loss": "{train_loss:.3f}",
        "tokens/s": "{tokens_per_second:,.0f}",
        "MFU": "{mfu:.2f}",
        "waiting for data": "{data_wait:.2%}",
        "bits per byte": "{val_bits_per_byte:.3f}",
    }
    return rows_table([run], run["lines"], columns)


# Decoding


PEERS = {
    "transformers-fp32": "llama.cpp-f32",
    "fp32-eager": "llama.cpp-f32",
    "fp32": "llama.cpp-f32",
    "bf16": "llama.cpp-f16",
    "int8": "llama.cpp-q8_0",
    "int4": "llama.cpp-q4_0",
}


def native_run(results: Results, shape: str, prompt: int, new: int) -> Record:
    """The recorded run of `decode` with these sizes."""
    wanted = {"shape": shape, "prompt": prompt, "new": new}
    [run] = [run for run in results["native_decode"] if wanted.items() <= run.items()]
    return run


def variant_name(name: str) -> str:
    """A variant of `decode` in words."""
    if name == "fp32-eager":
        return "torch, fp32 (`--no-compile`)"
    library, _, form = name.rpartition("-")
    if library:
        return f"{library}, {form}"
    return f"**{PRECISIONS[name]}**"


def decode_table(run: Record) -> Table:
    """Tokens per second, and the ratio to llama.cpp with the same number of bits."""
    speeds = {row["name"]: row["decode_tokens_per_second"] for row in run["rows"]}
    rows = []
    for row in run["rows"]:
        name = row["name"]
        cells = {"label": variant_name(name), "speed": speeds[name], "mb": row["step_bytes"] / 1e6}
        if name in PEERS:
            cells["ratio"] = speeds[name] / speeds[PEERS[name]]
        rows.append(cells)
    columns = {
        "": "{label}",
        "decoding, tokens/s": "{speed:,.1f}",
        "MB per step": "{mb:.1f}",
        "relative to llama.cpp": "{ratio:.2f}",
    }
    return rows_table([run], rows, columns)


@table
def native_decode(results: Results) -> Table:
    """Decoding a model of 110M parameters."""
    return decode_table(native_run(results, "110m", prompt=32, new=96))


@table
def native_decode_small(results: Results) -> Table:
    """Decoding a model of the quickstart's shape."""
    return decode_table(native_run(results, "2m", prompt=16, new=128))


@table
def native_prefill(results: Results) -> Table:
    """Reading a prompt of 512 tokens."""
    run = native_run(results, "110m", prompt=512, new=16)
    by_name = {row["name"]: row for row in run["rows"]}
    headings = ("", "prefill, tokens/s", "llama.cpp", "ratio")
    made = Table((*headings, "decoding, tokens/s", "llama.cpp", "ratio"), [run])
    for name in ("bf16", "int8", "int4"):
        cells = []
        for measure in ("prefill_tokens_per_second", "decode_tokens_per_second"):
            speed, other = by_name[name][measure], by_name[PEERS[name]][measure]
            cells += [f"{speed:,.1f}", f"{other:,.1f}", f"{speed / other:.2f}"]
        made.add(PRECISIONS[name], *cells)
    return made


@table
def native_rows(results: Results) -> Table:
    """One row and eight."""
    run = native_run(results, "110m", prompt=32, new=64)
    rows: dict[str, Record] = {}
    for row in run["rows"]:
        cells = rows.setdefault(row["name"], {"label": variant_name(row["name"])})
        cells[f"rows_{row['batch']}"] = row["decode_tokens_per_second"]
    for cells in rows.values():
        if "rows_1" in cells:
            cells["ratio"] = cells["rows_8"] / cells["rows_1"]
    columns = {
        "": "{label}",
        "1 row, tokens/s": "{rows_1:.1f}",
        "8 rows, tokens/s": "{rows_8:,.1f}",
        "8 rows relative to 1": "{ratio:.2f}",
    }
    return rows_table([run], rows.values(), columns)


@table
def decode_start(results: Results) -> Table:
    """Seconds until the first token."""
    [run] = [run for run in results["native_decode"] if run["benchmark"] == "decode_start"]
    rows = [row | {"label": row["options"] or "generate.py"} for row in run["rows"]]
    columns = {
        "": "`{label}`",
        "seconds": "{seconds:.2f}",
        "relative to `import torch`": "{of_import:.2f}",
    }
    return rows_table([run], rows, columns)


@table
def decode(results: Results) -> Table:
    """Decoding by torch, before the kernels in C."""
    [run] = results["decode"]
    rows = [row | {"mb": row["step_bytes"] / 1e6} for row in run["rows"]]
    columns = {
        "": "{name}",
        "batch": "{batch}",
        "first token, ms": "{first_token_ms:,.0f}",
        "prefill, tokens/s": "{prefill_tokens_per_second:,.0f}",
        "decoding, tokens/s": "{decode_tokens_per_second:.1f}",
        "MB per step": "{mb:.0f}",
        "share of bandwidth": "{share_of_bandwidth:.2f}",
    }
    return rows_table([run], rows, columns)


@table
def decode_lengths(results: Results) -> Table:
    """Milliseconds per token by cached tokens."""
    [run] = results["decode_lengths"]
    columns = {
        "cached": "{length}",
        "full cache, ms": "{full_ms:.1f}",
        "window, ms": "{window_ms:.1f}",
        "time to read the cache, ms": "{bytes_ms:.1f}",
        "ratio": "{ratio:.2f}",
    }
    return rows_table([run], run["lengths"], columns)


@table
def structured(results: Results) -> Table:
    """What a constraint adds to sampling: medians over four constraints."""
    [run] = results["structured"]
    rows = []
    for sampling, suffix in (("plain", ""), ("top-p", ", top-p 0.9")):
        for precision, name in PRECISIONS.items():
            found = [row for row in run["rows"] if row["precision"] == precision]
            step = statistics.median(row["step_s"] for row in found)
            found = [row for row in found if row["sampling"] == sampling]
            free = statistics.median(row["free_s"] for row in found)
            constrained = statistics.median(row["constrained_s"] for row in found)
            times = {"step": 1000 * step, "free": 1000 * free, "constrained": 1000 * constrained}
            shares = {"share": constrained / step, "added": (constrained - free) / step}
            rows.append({"label": f"{name}{suffix}", **times, **shares})
    columns = {
        "": "{label}",
        "step, ms": "{step:.1f}",
        "free, ms": "{free:.2f}",
        "constrained, ms": "{constrained:.2f}",
        "share of a step": "{share:.0%}",
        "added": "{added:.0%}",
    }
    return rows_table([run], rows, columns)


@table
def speculative(results: Results) -> Table:
    """Speed with drafts of 2, 4 and 8 tokens, relative to plain decoding."""
    runs = results["speculative"]
    # A setting is in two runs if the first left too few texts; the run with more texts counts.
    settings: dict[tuple[str, float], list[Record]] = {}
    for run in sorted(runs, key=lambda run: run["speculation"][0]["texts"]):
        of_run: dict[tuple[str, float], list[Record]] = {}
        for row in run["speculation"]:
            of_run.setdefault((row["precision"], row["temperature"]), []).append(row)
        settings |= of_run
    order = ("fp32", "int8", "bf16")
    rows = []
    for _, drafts in sorted(settings.items(), key=lambda item: (order.index(item[0][0]), item[0])):
        row = dict(drafts[0])
        accepted = [draft["accepted"] for draft in drafts]
        row["accepted"] = f"{min(accepted):.2f} to {max(accepted):.2f}"
        row["same"] = {1.0: "all", 0.0: "none"}[row["same_tokens"]]
        for draft in drafts:
            row[f"draft_{draft['draft']}"] = draft["times_plain"]
        rows.append(row)
    columns = {"precision": "{precision}", "temperature": "{temperature:g}", "texts": "{texts}"}
    for size in (2, 4, 8):
        columns[f"draft {size}"] = f"{{draft_{size}:.2f}}"
    columns |= {"drafts accepted": "{accepted}", "same tokens as plain": "{same}"}
    return rows_table(runs, rows, columns)


@table
def monitoring(results: Results) -> Table:
    """Tokens per second with and without a monitor."""
    runs = results["monitoring"]
    sizes = {"2m": "2M", "110m": "134M"}
    rows = []
    for run in runs:
        for row in run["rows"]:
            name = PRECISIONS[row["precision"]]
            rows.append(row | {"size": sizes[run["shape"]], "weights": name})
    columns = {
        "parameters": "{size}",
        "weights": "{weights}",
        "tokens/s": "{tokens_per_second:,.0f}",
        "with a monitor": "{watched_tokens_per_second:,.0f}",
        "cost": "{cost:.2%}",
    }
    return rows_table(runs, rows, columns)


@table
def rollouts(results: Results) -> Table:
    """Tokens per second of answers with rewards, and of the engine alone."""
    runs = results["rollouts"]
    columns = {
        "processor with": "{environment[features]}",
        "verifier": "`{verifier}`",
        "answers": "{answers}",
        "tokens per answer": "{answer_tokens:.1f}",
        "the engine, tokens/s": "{engine_tokens_per_second:,.0f}",
        "rollouts, tokens/s": "{rollout_tokens_per_second:,.0f}",
        "share": "{ratio:.2f}",
    }
    return rows_table(runs, runs, columns)


@table
def exact_rewards(results: Results) -> Table:
    """What train.exact costs and brings."""
    runs = results["exact_rewards"]
    columns = {
        "processor with": "{environment[features]}",
        "verifier": "`{verifier}`",
        "answers": "{answers}",
        "tokens per answer": "{answer_tokens:.1f}",
        "ordinary, tokens/s": "{ordinary_tokens_per_second:,.0f}",
        "`train.exact`, tokens/s": "{exact_tokens_per_second:,.0f}",
        "ratio": "{ratio:.2f}",
        "largest mismatch": "{ordinary_mismatch:.1e}",
        "with `train.exact`": "{exact_mismatch:.0f}",
    }
    return rows_table(runs, runs, columns)


@table
def serving(results: Results) -> Table:
    """Tokens per second of the server, the engine and transformers serve."""
    runs = results["serving"]
    rows = []
    for run in runs:
        for row in run["rows"]:
            server = row["server_tokens_per_second"]
            cells = row | {"precision": PRECISIONS[run["precision"]]}
            cells["of_engine"] = server / row["engine_tokens_per_second"]
            if "transformers_tokens_per_second" in row:
                cells["gain"] = server / row["transformers_tokens_per_second"]
            rows.append(cells)
    columns = {
        "": "{precision}",
        "clients": "{clients}",
        "engine": "{engine_tokens_per_second:.0f}",
        "server": "{server_tokens_per_second:.0f}",
        "server / engine": "{of_engine:.2f}",
        "transformers serve": "{transformers_tokens_per_second:.0f}",
        "server / transformers": "{gain:.1f}",
    }
    return rows_table(runs, rows, columns)


@table
def serving_first_token(results: Results) -> Table:
    """The first token of a short prompt, beside a long one."""
    runs = results["serving"]
    rows = [run["first_token"] | {"precision": PRECISIONS[run["precision"]]} for run in runs]
    columns = {
        "": "{precision}",
        "idle server, ms": "{alone_ms:.0f}",
        "beside a long prompt, ms": "{beside_ms:.0f}",
        "a step of that, ms": "{step_ms:.0f}",
        "later, in steps": "{steps:.1f}",
    }
    return rows_table(runs, rows, columns)


@table
def latency(results: Results) -> Table:
    """Milliseconds per token for one client on one connection."""
    runs = results["latency"]
    rows = []
    for run in runs:
        by_side = {row["side"]: row for row in run["rows"]}
        cells = {"precision": PRECISIONS[run["precision"]]}
        for side, row in by_side.items():
            cells[f"{side}_ms"] = row["per_token_ms"]
            cells[f"{side}_ratio"] = row["ratio"]
        rows.append(cells)
    columns = {
        "": "{precision}",
        "engine, ms per token": "{engine_ms:.2f}",
        "whole answer": "{whole_ms:.2f}",
        "of the engine's time": "{whole_ratio:.2f}",
        "stream": "{stream_ms:.2f}",
        "of the engine's": "{stream_ratio:.2f}",
    }
    return rows_table(runs, rows, columns)


# Attention and long texts


@table
def attention(results: Results) -> Table:
    """Cost of each pattern by length."""
    [run] = results["attention"]
    longest = [row for row in run["rows"] if row["length"] == 8192]
    rows = []
    for row, fit in zip(longest, run["fits"]):
        assert (row["form"], row["kernel"]) == (fit["form"], fit["kernel"])
        cells = row | fit
        if "decode_exponent" in fit:
            cells["decode_exponent"] = round(fit["decode_exponent"], 2) + 0.0  # not -0.0
        cells["gflop"] = row["forward_flops"] / 1e9
        cells["mb"] = row["memory_bytes"] / 1e6
        cells["forward_ms"] = 1000 * row["forward_s"]
        cells["train_ms"] = 1000 * row["train_s"]
        if "decode_s" in row:
            cells["decode_us"] = 1e6 * row["decode_s"]
        rows.append(cells)
    columns = {
        "pattern": "`{form}`",
        "kernel": "{kernel}",
        "training": "T^{train_exponent:.2f}",
        "decoding": "T^{decode_exponent:.2f}",
        "GFLOP forward": "{gflop:.1f}",
        "ms forward": "{forward_ms:,.0f}",
        "ms training": "{train_ms:,.0f}",
        "MB": "{mb:,.0f}",
        "µs per token": "{decode_us:,.0f}",
    }
    return rows_table([run], rows, columns)


@table
def ablation(results: Results) -> Table:
    """Loss and speed of each variant on two corpora."""
    [run] = results["ablation"]
    names = {
        "soft-cap 20": "logit soft-cap 20",
        "sink logits": "attention sinks",
        "isolated documents": "document masking",
    }
    variants: dict[str, list[Record]] = {}
    for row in run["rows"]:
        variants.setdefault(row["form"], []).append(row)
    headings = ("loss", "minus full", "speed")
    both = [f"{corpus}: {heading}" for corpus in ("tales", "pysource") for heading in headings]
    made = Table(("variant", *both), [run])
    for form, corpora in variants.items():
        cells = []
        for row in corpora:  # tales, pysource
            difference = with_interval(row["against_full"], row["spread"], 3)
            cells += [f"{row['mean']:.3f}", difference, f"{row['of_full']:.2f}"]
        name = names.get(form, form)
        if "(" in form or form == "full":
            name = f"`{form}`"  # a pattern
        made.add(name, *cells)
    return made


@table
def extrapolation(results: Results) -> Table:
    """Losses at and beyond the trained length."""
    [run] = results["extrapolation"]
    made = Table(("positions", "at 1 × 256", "at 2 × 256", "at 4 × 256"), [run])
    for row in run["rows"]:
        cells = []
        for times in ("1", "2", "4"):
            cells.append(f"{row['means'][times]:.3f} ± {row['spread'][times]:.3f}")
        made.add(row["name"].replace(" x", " ×"), *cells)
    return made


@table
def retrieval(results: Results) -> Table:
    """Milliseconds per token with a window, with retrieval and with a full cache."""
    [run] = [run for run in results["retrieval"] if run["block"] == 64]
    lengths: dict[int, Record] = {}
    for row in run["rows"]:
        cells = lengths.setdefault(row["length"], {"length": row["length"]})
        cells[f"{row['kind']}_ms"] = row["ms"]
        cells[f"{row['kind']}_mb"] = row["bytes"] / 1e6
    columns = {
        "cached tokens": "{length:,}",
        "window alone, ms": "{window_ms:.2f}",
        "retrieval, ms": "{retrieval_ms:.2f}",
        "full cache, ms": "{full_ms:.2f}",
        "MB: window, retrieval, full": "{window_mb:.1f}, {retrieval_mb:.1f}, {full_mb:.1f}",
    }
    return rows_table([run], lengths.values(), columns)


# Smaller models


def equal_time(results: Results, folder: str) -> Record:
    """The comparison that wrote its runs to this folder."""
    option = f"--folder {folder} "
    [run] = [run for run in results["compression"] if option in run["environment"]["command"]]
    return run


def student_table(runs: dict[str, Record]) -> Table:
    """Students alone and with a teacher."""
    rows = []
    for minutes, run in runs.items():
        for row in run["rows"]:
            cells = {"minutes": minutes, "name": row["name"], "loss": row["loss"]}
            if row["name"].startswith("teacher"):
                cells["name"] = f"with a {row['name']}"
            cells["losses"] = ", ".join(f"{loss:.4f}" for loss in row["losses"])
            cells["millions"] = row["tokens"] / 1e6
            if row["name"] != "alone":
                cells["difference"] = with_interval(row["difference"], row["interval"], 4)
            rows.append(cells)
    columns = {
        "minutes": "{minutes}",
        "student": "{name}",
        "losses of three seeds": "{losses}",
        "mean": "{loss:.4f}",
        "difference": "{difference}",
        "tokens": "{millions:.1f} M",
    }
    return rows_table(list(runs.values()), rows, columns)


@table
def distillation(results: Results) -> Table:
    """Students of the quickstart."""
    runs = {
        "2, 8,000 documents": equal_time(results, "eq2"),
        "3.5, 25,000 documents": equal_time(results, "eq4"),
    }
    return student_table(runs)


@table
def distillation_pysource(results: Results) -> Table:
    """Students on text that is read several times."""
    return student_table({"3": equal_time(results, "f")})


def healing_table(runs: dict[str, Record], before: float) -> Table:
    """Pruned models after training on, compared with their loss before."""
    rows = []
    for steps, run in runs.items():
        for row in run["rows"]:
            name = row["name"].replace(", no teacher", ", trained on without a teacher")
            cells = {"steps": steps, "name": name, "loss": row["loss"]}
            cells["above"] = row["loss"] / before - 1
            if row["name"] != "activation":
                cells["difference"] = with_interval(row["difference"], row["interval"], 4)
            rows.append(cells)
    columns = {
        "steps": "{steps}",
        "parts chosen by": "{name}",
        "loss": "{loss:.4f}",
        f"relative to {before} before": "{above:+.1%}",
        "minus activation": "{difference}",
    }
    return rows_table(list(runs.values()), rows, columns)


@table
def healing(results: Results) -> Table:
    """The quickstart, pruned and trained on."""
    runs = {"150": equal_time(results, "heal2"), "131": equal_time(results, "heal131")}
    return healing_table(runs, before=0.9331)


@table
def healing_pysource(results: Results) -> Table:
    """A model of pysource, pruned and trained on."""
    return healing_table({"50": equal_time(results, "heal-p")}, before=3.5583)


def two_corpora(results: Results, folders: tuple[str, str], first: str, names: Record) -> Table:
    """Variants on pysource and the quickstart's corpus, with differences from the first variant."""
    runs = [equal_time(results, folder) for folder in folders]
    difference = f"difference from {next(iter(names.values()))}"
    headings = (first, "pysource", difference, "quickstart's corpus", difference)
    made = Table(headings, runs)
    for rows in zip(*(run["rows"] for run in runs)):
        cells = []
        for row in rows:
            cells.append(f"{row['loss']:.4f}")
            if row["difference"] == row["interval"] == 0:
                cells.append("")
            else:
                cells.append(with_interval(row["difference"], row["interval"], 3))
        made.add(names[rows[0]["name"]], *cells)
    return made


@table
def pruning_training(results: Results) -> Table:
    """Pruning while a model trains."""
    names = {
        "dense": "dense",
        "half the weights": "half of the weights, by magnitude",
        "half the weights, random": "half of the weights, random",
        "half the neurons": "half of the neurons, by magnitude",
        "half the neurons, random": "half of the neurons, random",
        "heads": "a third of the heads, by gradient",
        "heads, random": "a third of the heads, random",
        "heads by gates": "a third of the heads, by gates",
    }
    return two_corpora(results, ("prune-p", "prune-q"), "pruned", names)


@table
def attention_temperature(results: Results) -> Table:
    """Attention temperatures."""
    names = {"1": "1", "0.7": "0.7", "1.4": "1.4"}
    return two_corpora(results, ("temp-p", "temp-q"), "temperature", names)


@table
def cache_bits(results: Results) -> Table:
    """Milliseconds per step with caches in few bits."""
    [run] = results["cache"]
    settings: dict[tuple[str, int, int], Record] = {}
    for row in run["speeds"]:
        cells = settings.setdefault((row["precision"], row["rows"], row["length"]), dict(row))
        form = row["bits"] or "plain"
        cells[f"ms_{form}"] = 1000 * row["seconds"]
        cells[f"gain_{form}"] = row["ratio"]
        cells[f"mb_{form}"] = row["bytes"] / 1e6
    rows = []
    for precision in ("fp32", "bf16"):
        for texts in (1, 8):
            for length in (1024, 4096):
                rows.append(settings[precision, texts, length])
    columns = {
        "model": "{precision}",
        "texts": "{rows}",
        "cached tokens": "{length:,}",
        "plain, ms": "{ms_plain:.1f}",
        "8 bits, ms": "{ms_8:.1f} ({gain_8:.2f})",
        "4 bits, ms": "{ms_4:.1f} ({gain_4:.2f})",
        "MB: plain, 8, 4 bits": "{mb_plain:,.0f}, {mb_8:.0f}, {mb_4:.0f}",
    }
    return rows_table([run], rows, columns)


# Data


def tokenizing_table(run: Record, names: dict[str, str]) -> Table:
    """Speed and memory of each side."""
    rows = []
    for row in run["rows"]:
        speed, memory = row["tokens_per_second"] / 1e6, row["peak_bytes"] / 1e9
        rows.append({"name": names[row["side"]], "speed": speed, "memory": memory})
    columns = {"": "{name}", "million tokens/s": "{speed:.2f}", "peak memory, GB": "{memory:.2f}"}
    return rows_table([run], rows, columns)


@table
def tokenizing(results: Results) -> Table:
    """Preparing 1 GB of text."""
    names = {
        "thinker": "Thinker: read, split, tokenize, write and verify shards",
        "tiktoken alone": "tiktoken's `encode_ordinary_batch` alone, the text in memory",
        "datasets.map, arrays": "`datasets.map(num_proc=2)` in batches, to arrays, and a file",
        "datasets.map, lists": "`datasets.map(num_proc=2)` row by row, as nanoGPT does",
    }
    return tokenizing_table(results["tokenizing"][0], names)


@table
def streaming(results: Results) -> Table:
    """A stream beside tokenizing the whole file."""
    names = {"thinker": "tokenize the whole file", "stream": "stream with a buffer of 16.8M tokens"}
    return tokenizing_table(results["tokenizing"][1], names)


@table
def loading(results: Results) -> Table:
    """Million tokens per second by packing."""
    [run] = results["loading"]
    cases: dict[tuple[str, int], Record] = {}
    for row in run["rows"]:
        cells = cases.setdefault((row["sources"], row["seq_len"]), dict(row))
        cells[row["packing"]] = row["tokens_per_second"] / 1e6
    columns = {"from": "{sources}", "tokens per sequence": "{seq_len:,}"}
    for name in ("contiguous", "documents", "best_fit"):
        columns[name] = f"{{{name}:.0f}}"
    rows = sorted(cases.values(), key=lambda row: row["sources"] == "mixture")
    return rows_table([run], rows, columns)


@table
def packing(results: Results) -> Table:
    """Padding, cuts and loss of each packing."""
    [run] = results["packing"]
    columns = {
        "corpus": "{corpus}",
        "packing": "{packing}",
        "padding": "{padding:.1%}",
        "documents that are cut": "{cut:.1%}",
        "steps": "{steps}",
        "loss": "{loss:.3f} ± {spread:.3f}",
    }
    return rows_table([run], run["rows"], columns)


# The page of a model's attention


@table
def html_report(results: Results) -> Table:
    """Size and speed of the page."""
    [run] = results["html_report"]
    columns = {
        "attention weights of a": "{weights}",
        "size of the file": "{megabytes:.0f} MB",
        "time to open": "{open_s:.2f} s",
        "from a click to the map of a head": "{click_s:.2f} s",
        "sliding through layers, per frame": "{slide_ms:.1f} ms",
    }
    return rows_table([run], run["pages"], columns)


# A commit and an older one


@table
def before_after(results: Results) -> Table:
    """Times of the same work in an older commit and in this one."""
    runs = results["before_after"]
    rows = []
    for run in runs:
        for measured in run["rows"]:
            ratios = measured["ratios"]
            old, new = 1000 * measured["old_s"], 1000 * measured["new_s"]
            row = {"old": old, "new": new, "low": min(ratios), "high": max(ratios)}
            rows.append(measured | row | {"pairs": run["pairs"]})
    columns = {
        "measured": "{measure}",
        "before": "{old:.1f} ms",
        "after": "{new:.1f} ms",
        "speed, median of the pairs": "{ratio:.3f}",
        "lowest and highest": "{low:.3f} to {high:.3f}",
        "pairs": "{pairs}",
    }
    return rows_table(runs, rows, columns)
