"""generate.py as a user meets it. Every test starts the real command."""

import bz2
import gzip
import io
import json
import lzma
import math
import os
import select
import signal
import subprocess
import sys
import time
import zipfile

import pytest
from conftest import ROOT, run_script
from generate_flags import check_refused
from installed import if_installed

from thinker.interop import load
from thinker.interop.find import find_checkpoint
from thinker.runtime.errors import UserError

GENERATE = ROOT / "generate.py"


def test_text_goes_to_stdout_and_logs_to_stderr(tiny_run):
    completed = run_script(GENERATE, tiny_run, "--prompt", "Line 7", "--max-new-tokens", "12")
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("Line 7")
    assert len(completed.stdout) > len("Line 7\n")
    assert completed.stderr.startswith("seed ")


def test_the_seed_determines_the_text_with_and_without_cache(tiny_run):
    texts = [
        run_script(
            GENERATE, tiny_run, "--prompt", "Line", "--seed", "5", "--max-new-tokens", "20", *more
        ).stdout
        for more in ([], ["--no-cache"], ["--precision", "fp32", "--device", "cpu"])
    ]
    assert texts[0] == texts[1] == texts[2]
    other = run_script(
        GENERATE, tiny_run, "--prompt", "Line", "--seed", "6", "--max-new-tokens", "20"
    ).stdout
    assert other != texts[0]


def test_json_has_one_object_per_sample(tiny_run):
    common = [GENERATE, tiny_run, "--prompt", "Line", "--max-new-tokens", "9", "--json"]
    completed = run_script(*common, "--num-samples", "3", "--seed", "4")
    rows = [json.loads(line) for line in completed.stdout.splitlines()]
    assert [row["seed"] for row in rows] == [4, 5, 6]
    for row in rows:
        assert row.keys() >= {"prompt", "text", "token_ids", "logprobs", "finish_reason", "seed"}
        assert len(row["token_ids"]) == len(row["logprobs"]) <= 9
        assert all(-math.inf < value <= 0 for value in row["logprobs"])
    alone = json.loads(run_script(*common, "--seed", "6").stdout)
    assert alone["token_ids"] == rows[2]["token_ids"]


def test_several_samples_with_a_stop_string(tiny_run):
    command = [
        GENERATE,
        tiny_run,
        "--prompt",
        "Line",
        "--num-samples",
        "2",
        "--max-new-tokens",
        "40",
    ]
    completed = run_script(*command, "--stop", "t", "--greedy")
    assert completed.returncode == 2  # greedy has one answer
    assert "t" in run_script(*command, "--seed", "1").stdout
    completed = run_script(*command, "--stop", "t", "--seed", "1")
    first, second = completed.stdout.split("\n\n---\n\n")
    assert first.startswith("Line")
    assert second.startswith("Line")
    assert "t" not in completed.stdout


def test_greedy_equals_temperature_zero(tiny_run):
    common = [GENERATE, tiny_run, "--prompt", "Line", "--max-new-tokens", "15"]
    assert (
        run_script(*common, "--greedy").stdout
        == run_script(*common, "--temperature", "0", "--seed", "9").stdout
    )


def test_the_best_checkpoint_and_a_checkpoint_by_path_or_step(tiny_run):
    best = next((tiny_run / "checkpoints").glob("best-*"))
    assert find_checkpoint(tiny_run, "40") == find_checkpoint(tiny_run, "step-00000040")
    with pytest.raises(
        UserError, match="has no checkpoint step-00000041 .available: step-00000038, step-00000040"
    ):
        find_checkpoint(tiny_run, "41")
    common = ["--prompt", "Line", "--greedy", "--max-new-tokens", "15"]
    by_name = run_script(GENERATE, tiny_run, "--checkpoint", "best", *common)
    by_path = run_script(GENERATE, best, *common)
    assert by_name.returncode == by_path.returncode == 0
    assert by_name.stdout == by_path.stdout


def test_text_is_streamed_and_a_closed_pipe_is_not_a_traceback(tiny_run):
    process = subprocess.Popen(
        [
            sys.executable,
            GENERATE,
            tiny_run,
            "--prompt",
            "Line 1",
            "--num-samples",
            "200",
            "--max-new-tokens",
            "25",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.read(7).startswith(b"Line 1")  # while 199 samples are still to come
    process.stdout.close()
    stderr = process.stderr.read().decode()
    assert process.wait(timeout=600) == 1
    assert "Traceback" not in stderr
    assert "Exception" not in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0; use 0"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--top-k", "0"], "top_k is 0"),
        (["--min-p", "2"], "min_p is 2.0"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--num-samples", "0"], "--num-samples is 0"),
        (["--stop", ""], "non-empty strings"),
        (["--presence-penalty", "nan"], "presence_penalty is nan"),
        (["--frequency-penalty", "inf"], "frequency_penalty is inf"),
        (["--logit-bias", "5"], "--logit-bias 5 is not ID=X, a token id and a number"),
        (["--logit-bias", "5=1", "--logit-bias", "5=-inf"], "distinct token ids"),
        (["--logit-bias", "9999=1"], "logit_bias has the token id 9999; use ids from 0 to"),
        (["--logprobs", "-1"], "logprobs is -1"),
        (["--seed", "-1"], "seed is -1"),
        (["--window", "0"], "window is 0"),
        (["--window", "31", "--sinks", "2"], "the trained context (32 tokens)"),
        (["--sinks", "2"], "only with a window"),
        (["--score", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--prompt-file", "a\0b"], "embedded null byte"),
        (["--score", "x", "--top-k", "5"], "--top-k has no effect with --score"),
        (["--score", "x", "--greedy"], "--greedy has no effect with --score"),
        (["--score", "x", "--prompt", "y"], "--prompt has no effect with --score"),
        (["--interactive", "--score", "x"], "not allowed with argument --interactive"),
        (["--greedy", "--temperature", "1"], "not allowed with argument --greedy"),
        (["--interactive", "--prompt-file", "-"], "both read standard input"),
        (["--interactive", "--json"], "--json has no effect with --interactive"),
        (["--prompt", "a", "--prompt-file", "b"], "not allowed with argument --prompt"),
        (["--prompt-file", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--prompt", b"\xff\xfe"], "--prompt is not valid UTF-8"),
        (["--chat", "--system", b"\xff\xfe"], "--system is not valid UTF-8"),
        (["--stop", b"caf\xe9"], "stop contains a lone surrogate"),
        (["--max-new-tokens", "many"], "invalid int value"),
        (["--device", "gpu"], "device 'gpu' is not available (available:"),
        (["--checkpoint", "newest"], "has no checkpoint newest (available: step-"),
        (
            ["--prompt", "word " * 100],
            "the model's context is 32; shorten it to at most 32 tokens, or use --window N",
        ),
        (["--temprature", "1"], "unrecognized arguments"),
        (["--precision", "fp8"], "invalid choice"),
    ],
)
def test_invalid_arguments_raise(tiny_run, monkeypatch, capsys, arguments, message):
    """In this process, for speed; the tests below start the command."""
    check_refused(tiny_run, monkeypatch, capsys, arguments, message)


@pytest.mark.parametrize(
    "arguments", [["--top-p", "7"], ["--temprature", "1"], ["--prompt", "\udcff"]]
)
def test_user_errors_are_one_line_and_status_2(tiny_run, arguments):
    completed = run_script(GENERATE, tiny_run, *arguments)
    assert (completed.returncode, completed.stdout, len(completed.stderr.splitlines())) == (
        2,
        "",
        1,
    )
    assert completed.stderr.startswith("error: ")


TWO_FILES = io.BytesIO()
with zipfile.ZipFile(TWO_FILES, "w") as archive:
    archive.writestr("a.txt", "a")
    archive.writestr("b.txt", "b")
NO_TEXTS = {  # the content of a file, and what it is
    "latin": (b"caf\xe9", "{} is not UTF-8 text (byte 0xe9 at 3); save it as UTF-8"),
    "utf-16": ("café".encode("utf-16"), "{} is UTF-16 text; save it as UTF-8"),
    "latin in gzip": (
        gzip.compress(b"caf\xe9"),
        "{} is not UTF-8 text (byte 0xe9 at 3); save it as UTF-8",
    ),
    "cut": (gzip.compress(b"a" * 99)[:-9], "cannot read {}: Compressed file ended before"),
    "two files": (
        TWO_FILES.getvalue(),
        "cannot read {}: the file is a zip archive of 2 files; unpack it",
    ),
    "LZ4": (b"\x04\x22\x4d\x18", "cannot read {}: the file is compressed with LZ4; unpack it"),
    "Parquet": (b"PAR1\x15", "cannot read {}: the file is a Parquet file\n"),
}


@pytest.mark.parametrize("kind", NO_TEXTS)
def test_a_prompt_file_that_is_no_text(tiny_run, tmp_path, kind):
    content, message = NO_TEXTS[kind]
    file = tmp_path / "prompt"
    file.write_bytes(content)
    for flag in ("--prompt-file", "--score"):
        completed = run_script(GENERATE, tiny_run, flag, file)
        assert (completed.returncode, completed.stdout) == (2, "")
        assert completed.stderr.startswith(f"error: {message.format(file)}")
        assert completed.stderr.count("\n") == 1


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_a_prompt_file_may_be_compressed(tiny_run, tmp_path, compress):
    (tmp_path / "plain").write_text("Line 7")
    (tmp_path / "compressed").write_bytes(compress(b"Line 7"))
    for flag in ("--prompt-file", "--score"):
        given = ["--greedy", "--max-new-tokens", "8"] if flag == "--prompt-file" else []
        plain, read = (
            run_script(GENERATE, tiny_run, flag, tmp_path / name, *given)
            for name in ("plain", "compressed")
        )
        assert (read.returncode, read.stdout) == (0, plain.stdout)


def test_prompts_from_file_pipe_and_none(tiny_run, tmp_path):
    (tmp_path / "prompt.txt").write_text("Line 7")
    common = ["--greedy", "--max-new-tokens", "8"]
    given = run_script(GENERATE, tiny_run, "--prompt", "Line 7", *common)
    assert (
        run_script(GENERATE, tiny_run, "--prompt-file", tmp_path / "prompt.txt", *common).stdout
        == given.stdout
    )
    piped = run_script(GENERATE, tiny_run, "--prompt-file", "-", *common, input="Line 7")
    assert piped.stdout == given.stdout
    empty = run_script(GENERATE, tiny_run, "--prompt", "", *common)
    assert (empty.returncode, empty.stdout) == (0, run_script(GENERATE, tiny_run, *common).stdout)


def test_fast_decoding_options_give_the_same_text(tiny_run):
    common = [
        GENERATE,
        tiny_run,
        "--prompt",
        "Line 3: the cat",
        "--max-new-tokens",
        "20",
        "--seed",
        "2",
    ]
    plain = run_script(*common)
    assert "seed 2, fp32 on cpu" in plain.stderr
    int8 = run_script(*common, "--int8")
    assert (int8.returncode, int8.stderr.splitlines()[0]) == (
        0,
        "seed 2, 8-bit weights, fp32 on cpu",
    )


def test_window_goes_beyond_the_context_and_reports_evictions(tiny_run):
    completed = run_script(
        GENERATE, tiny_run, "--prompt", "Line 1: the cat " * 20, "--window", "12", "--sinks", "2", "--max-new-tokens",
        "50", "--logit-bias", f"{load(tiny_run)[1].eos_id}=-inf", "--json",
    )  # fmt: skip
    row = json.loads(completed.stdout)
    assert (len(row["token_ids"]), row["finish_reason"]) == (50, "length")
    assert row["n_evicted"] == row["prompt_tokens"] + 50 - 1 - 14 > 100
    completed = run_script(
        GENERATE,
        tiny_run,
        "--window",
        "12",
        "--sinks",
        "2",
        "--max-new-tokens",
        "40",
        "--seed",
        "1",
    )
    if len(completed.stdout) > 100:
        assert "evicted tokens 3 to" in completed.stderr


def test_score_and_logprobs(tiny_run, tmp_path):
    row = json.loads(
        run_script(GENERATE, tiny_run, "--greedy", "--max-new-tokens", "9", "--json").stdout
    )
    (tmp_path / "text.txt").write_text(row["text"])
    score = json.loads(
        run_script(GENERATE, tiny_run, "--score", tmp_path / "text.txt", "--json").stdout
    )
    if score["token_ids"] == row["token_ids"]:
        assert score["logprobs"] == pytest.approx(row["logprobs"], abs=1e-4)
    assert score["nats"] == pytest.approx(-sum(score["logprobs"]))
    assert score["bits_per_byte"] == pytest.approx(score["nats"] / math.log(2) / score["bytes"])
    output = run_script(
        GENERATE, tiny_run, "--score", tmp_path / "text.txt", "--logprobs", "2", "--int8"
    )
    assert "longer than the context" not in output.stderr
    (tmp_path / "long.txt").write_text("Line 1: the cat number 1 sat. " * 9)
    long = run_script(GENERATE, tiny_run, "--score", tmp_path / "long.txt")
    assert "in windows of 32 tokens, each overlapping the last by half" in long.stderr
    *tokens, summary, cost = output.stdout.splitlines()
    assert len(tokens) == len(score["token_ids"])
    assert f"{len(tokens)} tokens, {score['bytes']} bytes" in summary
    assert cost.startswith(
        f"in fp32: {score['bits_per_byte']:.4f} bits per byte; with 8-bit weights: "
    )
    table = run_script(
        GENERATE, tiny_run, "--greedy", "--max-new-tokens", "9", "--logprobs", "1"
    ).stderr.splitlines()
    assert [float(line.split()[0]) for line in table[1:-1]] == pytest.approx(
        row["logprobs"], abs=1e-4
    )


def test_interactive_by_pipe(tiny_run):
    lines = [
        "Line 1: the",
        "",
        "/set temperature 0",
        "/undo",
        "/show",
        "/set top-p 3",
        "/set temperature [[[[",
        "/set temperature " + "[" * 100_000,
        "/set seed []",
        "/set logit-bias [[1]]",
        "/set stop",
        "/set logprobs 3",
        "/set min_p .5",
        "/set temperature 100000000000000000000",
        "/",
        "/undu",
        "//x",
        "/quit",
        "never",
    ]
    arguments = ["--interactive", "--max-new-tokens", "6", "--seed", "3"]
    completed = run_script(GENERATE, tiny_run, *arguments, input="\n".join(lines))
    assert completed.returncode == 0, completed.stderr
    stderr = completed.stderr.splitlines()
    assert stderr[1:] == [
        "temperature = 0.0",
        "removed the last turn",
        "error: top_p is 3; use a number in (0, 1]",
        "error: temperature is '[[[['; use a number or none",
        f"error: temperature is '{'[' * 40}'; use a number or none",
        "error: seed is []; use an integer of at least 0",
        "error: logit_bias is [[1]]; use distinct token ids, each with a number up to ±1e100 or -inf",
        "error: unknown command /set stop; /help lists commands; did you mean /set?",
        "error: logprobs cannot be set in a session; use thinker generate --logprobs N without --interactive",
        "min_p = 0.5",
        "temperature = 1e+20",
        "error: unknown command /; /help lists commands",
        "error: unknown command /undu; /help lists commands; did you mean /undo?",
    ]
    assert "\nLine 1: the" in completed.stdout  # what /show shows


def test_interactive_slides_as_one_text_does(tiny_run):
    """Turns of a greedy text are the text in one go; --no-slide ends it."""
    common = [GENERATE, tiny_run, "--greedy", "--logit-bias", f"{load(tiny_run)[1].eos_id}=-inf"]
    whole = run_script(*common, "--prompt", "Line 1: the", "--max-new-tokens", "80")
    lines = "Line 1: the\n\n\n\n/show\n/undo\n/undo\n\n\n/show\n/set max-new-tokens 40\n/undo\n/undo\n\n/show\n"
    for options in ([], *if_installed("speculation", ["--speculate", "3"])):
        turns = run_script(
            *common, "--interactive", "--max-new-tokens", "20", *options, input=lines
        )
        assert turns.returncode == 0, turns.stderr
        assert turns.stdout.count(whole.stdout) == 3  # what each /show shows
        said = [line for line in turns.stderr.splitlines() if "context" in line]
        assert said == whole.stderr.splitlines()[-1:]
        assert said == [
            "the context of 32 tokens is full: the text continues from its newest 16 (see --no-slide)"
        ]
    turns = run_script(
        *common,
        "--interactive",
        "--no-slide",
        "--max-new-tokens",
        "60",
        input="Line 1: the\n\n/undo\n",
    )
    ended, refused, removed = turns.stderr.splitlines()[1:]
    assert (turns.returncode, removed) == (0, "removed the last turn")
    assert ended.startswith("stopped at the end of the context (32 tokens); use --window N")
    assert refused.startswith("error: the prompt has 33 tokens, but the model's context is 32")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_interactive_at_a_terminal_survives_an_interruption(tiny_run):
    import pty

    here, there = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, GENERATE, tiny_run, "--interactive", "--window", "20", "--max-new-tokens", "100000",
         "--logit-bias", f"{load(tiny_run)[1].eos_id}=-inf"],
        stdin=there, stdout=there, stderr=there, start_new_session=True,
    )  # fmt: skip
    os.close(there)
    output = b""

    def wait_for(text):
        nonlocal output
        deadline = time.monotonic() + 600
        while text not in output:
            assert select.select([here], [], [], deadline - time.monotonic())[0], output
            output += os.read(here, 4096)
        output = output.split(text, 1)[1]

    wait_for(b"> ")
    os.write(here, b"Line 5: the\n")
    wait_for(b"Line 5: the\r\n")
    output += os.read(here, 1)  # it is talking

    def repeat(action, text):
        """A signal may fall on any instant; Python's readline sees one that comes before it waits
        for keys too late."""
        nonlocal output
        while text not in output:
            action()
            if select.select([here], [], [], 1)[0]:
                output += os.read(here, 4096)
        output = output.split(text, 1)[1]

    def press():
        """As an impatient person does."""
        for _ in range(300):
            process.send_signal(signal.SIGINT)
            time.sleep(0.0001)

    repeat(press, b"(interrupted)")
    repeat(press, b"(press Ctrl-D or type /quit to quit)")
    repeat(lambda: os.write(here, b"/undo\n"), b"removed")
    repeat(press, b"(press Ctrl-D or type /quit to quit)")
    repeat(lambda: os.write(here, b"/show\n"), b"/show\r\n")
    os.write(here, b"/quit\n")
    assert process.wait(timeout=600) == 0
    os.close(here)


def test_a_line_break_in_a_stop_string(tiny_run):
    options = [tiny_run, "--prompt", "Line", "--max-new-tokens", "40", "--seed", "1", "--json"]
    plain, escaped, whole = (
        run_script(GENERATE, *options, *stop) for stop in (["--stop", "\n"], ["--stop", r"\n"], [])
    )
    assert plain.stdout == escaped.stdout
    assert "\n" in json.loads(whole.stdout)["text"]
    assert "\n" not in json.loads(escaped.stdout)["text"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_notes_that_cannot_be_written_cost_no_result(tiny_run):
    command = [
        sys.executable,
        GENERATE,
        tiny_run,
        "--greedy",
        "--max-new-tokens",
        "3",
        "--prompt",
        "Line",
    ]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("Line")


@pytest.mark.parametrize("kind", ["nowhere", "empty folder", "file"])
def test_a_path_that_is_not_a_model(tmp_path, kind):
    path = tmp_path / "thing"
    if kind == "empty folder":
        path.mkdir()
    if kind == "file":
        path.write_text("hello")
    completed = run_script(GENERATE, path)
    assert completed.returncode == 2
    assert completed.stderr.startswith(f"error: {path} ")
    assert len(completed.stderr.splitlines()) == 1


def test_json_is_whole_on_a_stream_that_is_not_utf8(tiny_run):
    text = "“naïve” 漢字 🙂"
    options = [GENERATE, tiny_run, "--prompt", text, "--max-new-tokens", "3", "--json"]
    environment = {
        **os.environ,
        "PYTHONIOENCODING": "latin-1",
        "PYTHONUTF8": "1",
    }  # of a new interpreter alone
    done = subprocess.run(
        [sys.executable, *options], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"] == text
