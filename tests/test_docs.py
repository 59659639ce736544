"""What the documentation promises: its commands and its Python run, its links lead somewhere, the
site builds."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import chromium
import pytest
from conftest import ROOT, TINY_OVERRIDES, run_script
from installed import KNOWN, NAMES, missing_feature

from thinker.benchmarks import command
from thinker.benchmarks.pages import pages
from thinker.benchmarks.pages.page_tables import TABLES
from thinker.benchmarks.pages.recorded import load_results
from thinker.commands.table import all_commands
from thinker.runtime.process.invocation import script_path
from thinker.runtime.registry import features
from thinker.scripts.make_reference import parser_of, reference_pages
from thinker.training.config.shipped import shipped_configs

browser = chromium.browser  # a fixture
DOCS = ROOT / "docs"
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "features").glob("*/guide.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")), *GUIDES]
BENCHMARK = ("thinker benchmark ", "python scripts/benchmark.py ")
DEFAULT_ADDRESS = "http://127.0.0.1:8000"  # of a server
BLOCK = re.compile(r"(?ms)^```(\w+)\n(.*?)^```$")
TALES = ["data.max_documents=3000", "model.d_model=48"]
# Smaller, and without what this machine may lack; everything else is as on the page.
SMALLER = {
    "train.py": [
        "train.max_steps=2",
        "train.max_minutes=10",
        "train.device=cpu",
        "train.compile=false",
        "train.eval_sequences=8",
    ],
    "configs/quickstart.yaml": TALES,
    "configs/gpu-": [
        *TINY_OVERRIDES,
        "data.source=pysource",
        "data.path=null",
        "data.config=null",
        "data.max_documents=20",
        "data.val_fraction=0.2",
        "model.vocab_size=null",
        "train.micro_batch_size=null",
    ],
    "configs/mixture.yaml": [
        "data.sources.0.max_documents=300",
        "data.sources.1.max_documents=60",
        "data.sources.1.val_fraction=0.1",
    ],
    "finetune.yaml": ["train.batch_size=2"],
    "data.source=tales": ["data.max_documents=3000"],
    "plan.py": ["--no-steps"],
    "wandb": ["tracking.wandb=offline"],
    "eval.py": ["--max-tokens", "300"],
    "generate.py": ["--max-new-tokens", "3"],
    "prune.py": ["--texts", "4"],
    "early_exit.py": ["--texts", "4"],
    "sensitivity.py": [
        "--texts",
        "4",
        "--budget",
        "7",
    ],  # a width of 48 leaves groups of 32 half empty
}
NOT_HERE = {
    "make ": "installs and runs what other tests run",
    "-m pytest": "runs other tests",
    "git clone": "a download",
    "pip install": "a download",
    "source .venv": "an interactive shell",
    "--tasks": "a download",
    "tensorboard --logdir": "a server",
    "torchrun --nproc-per-node gpu": "needs a GPU",
    "torchrun --standalone --nproc-per-node gpu": "needs a GPU",
    "torchrun --nnodes": "needs several machines",
    "--nproc-per-node 4": "the same with two ranks runs",
    "benchmark.py gpu --part": "needs a GPU",
    "tune.py": "trains for minutes",
    "SmolLM2": "a download",
    "--over-training": "needs a run of hundreds of steps",
    "inspect_model.py patch": "needs a model that has learned to recall",
    "fineweb_val": "a download",
    'runs/gpu-124m --prompt "Once upon a time" --compile': "compiles for a minute",
}


def blocks(path, *languages):
    """The fenced blocks of a page in these languages, as pairs of language and code."""
    return [
        block for block in BLOCK.findall(path.read_text(encoding="utf-8")) if block[0] in languages
    ]


def lines_of(code):
    """The command lines of a block, without comments; a backslash continues a line."""
    lines = (
        re.sub(r"(^|\s+)#.*", "", line).strip() for line in code.replace("\\\n", " ").splitlines()
    )
    return [line for line in lines if line]


def test_the_readme_is_short():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 155
    assert len(" ".join(lines).split()) <= 1400


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_fit_and_code_has_a_language(path):
    text = path.read_text(encoding="utf-8")
    if path.parent.name != "reference":
        assert [
            line for line in text.splitlines() if line.startswith("|") and len(line) > 200
        ] == []
    fences = re.findall(r"(?m)^ *```(.*)$", text)
    assert set(fences[::2]) <= {"bash", "python", "text", "yaml", "json"}
    assert set(fences[1::2]) <= {""}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A small run of the quickstart, and what the commands read: a text, conversations, the
    configs."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("configs", "features", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    done = run_script(
        ROOT / "train.py", "configs/quickstart.yaml", *TALES, *SMALLER["train.py"], cwd=folder
    )
    assert done.returncode == 0, done.stderr
    (folder / "my.txt").write_text("Some words, and a few more of them.\n" * 500)
    (folder / "story.txt").write_text("Once upon a time")
    row = '{"messages": [{"role": "user", "content": "Who is %d?"}, {"role": "assistant", "content": "A girl."}]}\n'
    pair = '{"good": "The dogs run.", "bad": "The dogs runs.", "phenomenon": "agreement"}'
    (folder / "pairs.jsonl").write_text(f"{pair}\n")
    (folder / "talks.jsonl").write_text("".join(row % number for number in range(200)))
    return folder


@pytest.fixture
def folder(quickstart, tmp_path):
    """A copy of these files for one page."""
    shutil.copytree(quickstart, tmp_path / "page", symlinks=True)
    return tmp_path / "page"


def expand(line, variables):
    """The words of a command, expanded by the shell."""
    script = variables + f"\nprintf '%s\\0' {line}"
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]


def as_script(line):
    """A line `thinker COMMAND ...`, as the line that runs the command's script with the config's
    file; other lines as they are."""
    before, is_thinker, after = line.partition("thinker ")
    is_command = is_thinker and re.fullmatch(r"(\w+=\S* )*", before)  # environment variables
    if not is_command or after.startswith("serve"):
        return line
    words = ["thinker", *after.split(" ")]
    for length in (3, 2):
        name = " ".join(words[1:length])
        script = script_path(name)
        if name in all_commands() and (ROOT / script).is_file():
            rest = words[length:]
            if rest and rest[0] in shipped_configs():
                rest[0] = str(shipped_configs()[rest[0]].relative_to(ROOT))
            return before + " ".join(["python", script, *rest])
    return f"{before}python -m thinker {after}"


def run_line(line, variables, folder):
    """Run a command of a page, smaller; returns its status and standard error."""
    if line.split()[0] not in ("python", "torchrun") and "=" not in line.split()[0]:
        return subprocess.run(
            ["bash", "-c", f"{variables}\n{line}"], cwd=folder, capture_output=True, text=True
        )
    words = expand(line, variables)
    environment = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    program, *words = words
    words += [word for name, more in SMALLER.items() if name in line for word in more]
    if "--score" in words:
        words = words[: -len(SMALLER["generate.py"])]
    if {"--suite", "--pairs", "--verifier"} & set(words):  # no text
        words = [*words[: -len(SMALLER["eval.py"])], "--limit", "2"]
    if program == "torchrun":
        words[words.index("train.py")] = str(ROOT / "train.py")
        torchrun = [sys.executable, "-m", "torch.distributed.run", *words]
        return subprocess.run(
            torchrun, cwd=folder, env=os.environ | environment, capture_output=True, text=True
        )
    if words[0] == "-m":  # a command without a script
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if (folder / words[0]).exists():  # a file of the page
        words[0] = str(folder / words[0])
    else:
        words[0] = str(ROOT / words[0])
    return run_script(*words, cwd=folder, input="Hello\n", **environment)


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if blocks(path, "bash", "python")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_commands_and_python_run(path, folder, monkeypatch, start_server):
    """In the order of the page, in one folder; the Python of a page is one program.

    A block whose first line names a file, such as `# my_parts.py`, is that file.
    """
    monkeypatch.chdir(folder)
    variables, names, address = "", {"__name__": "page"}, DEFAULT_ADDRESS
    for language, code in blocks(path, "bash", "python", "yaml"):
        named = re.match(r"# (\w+\.(?:py|yaml))\n", code)
        if named:
            (folder / named[1]).write_text(code)
            continue
        if language == "yaml":
            continue
        if language == "python":
            exec(compile(code.replace(DEFAULT_ADDRESS, address), str(path), "exec"), names)
            continue
        for line in lines_of(code):
            line = as_script(line.replace(DEFAULT_ADDRESS, address))
            if missing_feature(line):
                pytest.skip(
                    f"{line} needs {missing_feature(line)}; what follows may need its result"
                )
            if line.startswith(("thinker-serve", "thinker serve")):
                words = expand(
                    line.replace("thinker serve", "thinker-serve").rstrip("& "), variables
                )
                address = start_server(*words[1:], cwd=folder).url
            elif re.fullmatch(r"\w+=(\".*\"|'.*'|\S*)", line):
                variables += f"{line}\n"
            elif not any(name in line for name in NOT_HERE):
                done = run_line(line, variables, folder)
                assert done.returncode == 0, f"{line}\n{done.stderr}"


def test_benchmark_commands_are_accepted():
    """Those that take too long to run: their flags exist."""
    commands = [
        line for path in PAGES for _, code in blocks(path, "text") for line in lines_of(code)
    ]
    commands = [line for line in commands if line.startswith(BENCHMARK) and "BENCHMARK" not in line]
    assert len(commands) > 15
    parser = parser_of("benchmark")
    (offered,) = parser._subparsers._group_actions
    every = {path.partition(".")[2] for path in command.BENCHMARKS}
    of_deleted_features = every - offered.choices.keys()
    for line in commands:
        arguments = shlex.split(line)[2:]  # after either form of the command
        if arguments[0] not in of_deleted_features:
            parser.parse_args(arguments)


def test_reference_pages_are_current():
    hint = "run python scripts/make_reference.py"
    folder = ROOT / "docs" / "reference"
    for name, page in reference_pages().items():
        assert (folder / name).read_text(encoding="utf-8") == page, f"{name}: {hint}"


@pytest.fixture(scope="module")
def results():
    return load_results(pages.RESULTS)


@pytest.mark.parametrize(
    "path", pages.benchmark_pages(), ids=lambda path: str(path.relative_to(DOCS))
)
def test_benchmark_pages_are_current(path, results):
    text = path.read_text(encoding="utf-8")
    assert text.count("<!-- table: ") == text.count("<!-- end -->") == len(pages.table_names(text))
    assert pages.with_tables(text, results) == text, "run python scripts/benchmark.py pages"


def test_every_table_and_every_recorded_figure_is_on_a_page(results):
    shown = set()
    for path in pages.benchmark_pages():
        shown |= set(pages.table_names(path.read_text(encoding="utf-8")))
    recorded = {record["name"] for record in results["recorded"]}
    assert shown == (TABLES.keys() | recorded) - {"linear-cross-entropy-bf16"}  # in another table
    assert not TABLES.keys() & recorded


def test_tables_name_the_results_that_they_come_from(results):
    """Each file is used, and a table follows its numbers."""
    used = set()
    for make in TABLES.values():
        used |= {source["file_name"] for source in make(results).sources}
    assert used == {path.name for path in pages.RESULTS.iterdir()}
    (run,) = results["packing"]
    changed = results | {"packing": [run | {"rows": [run["rows"][0] | {"loss": 9.8765}]}]}
    assert "| 9.877 ± 0.001 |" in TABLES["packing"](changed).markdown()


def test_every_result_has_a_machine_and_a_date(results):
    for record in itertools.chain.from_iterable(results.values()):
        if record["file_name"] == "gpu.jsonl" and record["name"] == "worker":
            continue  # precedes the line with the environment
        environment = record["environment"]
        assert environment["processor"]
        date = environment.get("date") or environment["recorded"]
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", date)


def test_the_page_of_main_figures_is_short():
    lines = (DOCS / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 200


def test_every_feature_has_a_guide_and_its_list_names_each():
    assert {path.parent.name for path in GUIDES} == NAMES
    listed = (DOCS / "reference" / "features.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(../../features/(\w+)/guide.md\)", listed)) == NAMES
    for feature in features():
        for name in feature.pages:
            assert f"]({name})" in listed


def test_the_index_and_the_navigation_list_every_page():
    """But no page of a feature, as features can be deleted: the site and a list add those."""
    every = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    every -= {f"reference/{name}" for feature in features() for name in feature.pages}
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w/-]+\.md)\)", index)) == every - {"index.md"}
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert sorted(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)) == sorted(every)


@pytest.mark.parametrize(
    ("path", "end"),
    [
        (README, "\n## Install"),
        (DOCS / "index.md", "\n## Reference"),
        (DOCS / "getting-started.md", "\n```"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_start_pages_do_not_open_with_jargon(path, end):
    text = path.read_text(encoding="utf-8")
    assert end in text
    opening = text.partition(end)[0]
    jargon = r"AVX|AMX|VNNI|EPYC|Xeon|bf16|fp32|decoder-only|SDPA|MFU|GFLOP|Inductor"
    assert re.findall(jargon, opening, re.IGNORECASE) == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The documentation as a site. Strict: each page is in the navigation, each link and anchor
    exists."""
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: mkdocs would drop the warnings before --strict counts them.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_builds(site):
    index = (site / "index.html").read_text(encoding="utf-8")
    for name in NAMES:
        assert (site / "guides" / f"{name}.html").is_file()
        assert f'href="guides/{name}.html"' in index
    for feature in features():
        for name in feature.pages:
            assert f'href="reference/{name.removesuffix(".md")}.html"' in index
    assert not (site / "site_hooks.py").exists()


def test_search_works_without_a_network(site, browser):
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        page = browser.new_page()
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}/index.html")
        search = page.locator("input.md-search__input")
        search.click()
        search.press_sequentially("tokens")
        page.locator(".md-search-result__item").first.wait_for()
        page.close()
        server.shutdown()
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


@pytest.mark.parametrize(
    "path", [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda path: path.name
)
def test_links_outside_the_site_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        feature = re.fullmatch(r"features/(\w+)/guide.md", name)
        if feature and feature[1] in KNOWN - NAMES:
            continue  # it has been deleted
        assert (ROOT / name).is_file(), target
        headings = (
            re.findall(r"(?m)^#+ (.*)$", (ROOT / name).read_text(encoding="utf-8"))
            if anchor
            else []
        )
        assert not anchor or anchor in [
            re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings
        ]
