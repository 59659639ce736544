"""Compare the numbers of this tree with those of an older commit, by their commands alone.

python tests/stress/unchanged/compare.py --quick
python tests/stress/unchanged/compare.py --only distill gates
"""

import argparse
import shutil
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path

import equal_numbers
from equal_numbers import compare_output
from two_trees import TwoTrees
from unchanged_cases import (
    FIRST,
    RUNS,
    STEPS,
    STOP,
    TEXTS,
    TRAININGS,
    Run,
    Text,
    Training,
    words,
    write_inputs,
)

from thinker.benchmarks.checkout import ROOT, has_commit

COMMIT = "1071b80"  # the last one before the rooms were rebuilt
RESUME = "resume after a kill"
KINDS = {Training: "training", Text: "text", Run: "old run", str: "old run"}


class Skipped(Exception):
    """The case needs a feature that the tree in use does not have."""


class Comparison:
    """Runs cases in a folder. Each returns what was equal, in words, or raises AssertionError."""

    def __init__(self, folder, commit=COMMIT, threads=1):
        self.folder = folder
        self.trees = TwoTrees(commit, folder / "trees", threads)
        self.trained = {}

    def close(self):
        """End the processes that it has started."""
        self.trees.close()

    def compare(self, case):
        """Compare what the two trees make of a case."""
        if case == RESUME:
            return self.resume_after_kill()
        if case.feature is not None and not (ROOT / "features" / case.feature).exists():
            raise Skipped(f"features/{case.feature} is not in this tree")
        if isinstance(case, Training):
            return self.compare_training(case)
        if isinstance(case, Text):
            return self.compare_text(case)
        return self.compare_run(case)

    # -------------------------------------------------------------- trainings

    def compare_training(self, case):
        """Train in both trees."""
        old, new = self.trees.both(lambda tree: self.train(tree, case))
        return equal_numbers.compare_runs(old, new)

    def train(self, tree, case):
        """Train a case in a folder of its own, once. Returns the run."""
        if (tree.name, case.name) not in self.trained:
            folder = self.new_folder(case.name, tree.name)
            command = ["train.py", "small.yaml", *case.overrides]
            if tree is self.trees.new:
                # which the old tree does not have
                command.append("train.fit_bigrams=off")
                if "optimizer.name=adamw" not in case.overrides:
                    command.append("optimizer.momentum_warmup_steps=0")
            if case.n_ranks == 1:
                done = tree.run(*command, cwd=folder)
            else:
                done = tree.run_ranks(case.n_ranks, *command, cwd=folder)
            assert done.status == 0, f"{tree.name}: status {done.status}\n{done.stderr}"
            self.trained[tree.name, case.name] = folder / "runs" / "small"
        return self.trained[tree.name, case.name]

    def new_folder(self, *names):
        """A folder to run commands in, with what the cases read."""
        folder = self.folder.joinpath(*names)
        write_inputs(folder)
        return folder

    @cached_property
    def first(self):
        """A complete run of the old tree."""
        return self.train(self.trees.old, FIRST)

    # -------------------------------------------------------------- texts

    def compare_text(self, case):
        """Sample from a run of the old tree in both."""
        arguments = ["runs/small", "--device", "cpu", *case.arguments]
        if "--score" not in arguments:
            arguments += ["--seed", "3"]
            if "--max-new-tokens" not in arguments:
                arguments += ["--max-new-tokens", "48"]
        if case.is_json:
            arguments.append("--json")
        folder = self.first.parents[1]

        def generate(tree):
            return tree.run("generate.py", *arguments, cwd=folder, input=case.input)

        old, new = self.trees.both(generate)
        compare_output(old, new, case.name)
        if not case.is_json:
            return f"{len(old.stdout)} characters"
        values = equal_numbers.as_json(old.stdout)
        n_tokens = sum(len(value.get("token_ids", ())) for value in values)
        if n_tokens == 0:
            return "score, nats, tokens"
        return f"{n_tokens} tokens, their log-probabilities, text"

    # -------------------------------------------------------------- runs of the old tree

    def compare_run(self, case):
        """Stop a run of the old tree; open copies of it with both trees, and resume them."""
        start = self.new_folder(case.name, "start")
        if case.starts_from:
            shutil.copytree(self.first, start / "runs" / "first")
        command = ["train.py", "small.yaml", *case.overrides]
        checkpoint = f"step-{STOP:08d}"
        done = self.trees.old.run(*command, cwd=start, stop_at=checkpoint)
        assert done.status == 143, f"old: status {done.status}\n{done.stderr}"
        assert checkpoint in equal_numbers.checkpoints(start / "runs" / "small")
        for tree in (self.trees.old, self.trees.new):
            shutil.copytree(start, self.folder / case.name / tree.name)
        for opening in self.openings(case):
            self.both_print(case, *opening)
        if case.can_export:
            self.both_print(case, "scripts/export_hf.py", "runs/small", "exported")
            old, new = (self.folder / case.name / name / "exported" for name in ("old", "new"))
            equal_numbers.compare_files(old, new, except_for=["README.md"])
        resumed = self.trees.both(lambda tree: self.resume(tree, case, command))
        n_commands = len(self.openings(case)) + case.can_export
        return f"{n_commands} commands; resumed: {equal_numbers.compare_runs(*resumed)}"

    def openings(self, case):
        """Commands that open a run: sampling, evaluation, inspection."""
        sampling = words("generate.py runs/small --device cpu --json --seed 5 --max-new-tokens 32")
        evaluation = words("scripts/eval.py runs/small --device cpu --json")
        inspection = words("scripts/inspect_model.py heads runs/small --device cpu --json -")
        return [sampling + case.text, evaluation + case.evaluation, inspection]

    def both_print(self, case, *command):
        """Check that a command prints the same about both copies of a run."""

        def run(tree):
            return tree.run(*command, cwd=self.folder / case.name / tree.name)

        compare_output(*self.trees.both(run), where=" ".join(command))

    def resume(self, tree, case, command):
        """Let a tree resume its copy of a run, by the same command. Returns the run."""
        folder = self.folder / case.name / tree.name
        done = tree.run(*command, cwd=folder)
        assert done.status == 0, f"{tree.name}: status {done.status}\n{done.stderr}"
        assert f"resuming from step {STOP}" in done.stderr
        run = folder / "runs" / "small"
        assert f"step-{STEPS:08d}" in equal_numbers.checkpoints(run)
        return run

    def stopped_copy(self, name):
        """A copy of the folder of self.first, with a run that looks killed after 25 steps."""
        folder = self.folder / name
        shutil.copytree(self.first.parents[1], folder)
        equal_numbers.cut(folder / "runs" / "small", STOP)
        return folder

    def resume_stored(self, folder):
        """Let the new tree resume the run in a folder by its stored config."""
        return self.trees.new.run("train.py", "runs/small/config.yaml", cwd=folder)

    def resume_after_kill(self):
        """Let the new tree resume a run of the old one, and compare it with the whole run."""
        folder = self.stopped_copy("killed")
        done = self.resume_stored(folder)
        assert done.status == 0, done.stderr
        assert f"resuming from step {STOP}" in done.stderr
        return equal_numbers.compare_runs(self.first, folder / "runs" / "small")


CASES = [*TRAININGS, *TEXTS, RESUME, *RUNS]


def name_of(case):
    """What a case is called in the table and in the names of tests."""
    return case if isinstance(case, str) else case.name


def is_quick(case):
    """Whether a case is one of the few that always run."""
    return case == RESUME or getattr(case, "is_quick", False)


def chosen_cases(arguments):
    """The cases that the arguments ask for."""
    cases = [case for case in CASES if is_quick(case) or not arguments.quick]
    if arguments.only:
        cases = [case for case in cases if any(word in name_of(case) for word in arguments.only)]
    return cases


def main():
    """Compare, and print a table. Returns the exit status: 1 if any number differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few cases, in half a minute")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases with a WORD in the name")
    parser.add_argument("--commit", default=COMMIT, help=f"the older commit (default: {COMMIT})")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep all runs in FOLDER")
    arguments = parser.parse_args()
    if not has_commit(arguments.commit):
        print(f"error: the history has no commit {arguments.commit}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.keep or Path(name)
        comparison = Comparison(folder, arguments.commit, arguments.threads)
        try:
            return compare_all(comparison, chosen_cases(arguments))
        finally:
            comparison.close()


def compare_all(comparison, cases):
    """Print a line for each case. Returns the exit status."""
    results = {"equal": 0, "UNEQUAL": 0, "skipped": 0}
    for case in cases:
        start = time.monotonic()
        try:
            result, what = "equal", comparison.compare(case)
        except Skipped as reason:
            result, what = "skipped", str(reason)
        except AssertionError as error:
            result, what = "UNEQUAL", str(error)
        results[result] += 1
        seconds = time.monotonic() - start
        title = f"{KINDS[type(case)]}: {name_of(case)}"
        print(f"{title:42} {result:8} {seconds:5.1f} s  {what}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in results.items()))
    return 1 if results["UNEQUAL"] else 0


if __name__ == "__main__":
    sys.exit(main())
