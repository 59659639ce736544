"""Extensions: modules of the user that a config names, and that every command imports again with
the run."""

import json
import subprocess
import sys

import numpy as np
import pytest
import yaml
from conftest import ROOT

from thinker import UserError, load, save, train
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime import extensions
from thinker.training.callback import Callback
from thinker.training.callbacks.registry import CALLBACKS
from thinker.training.config.load import load_config, validate_config
from thinker.training.objective import next_token_loss

TREE = {"train": {"max_steps": 1}}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Forget imported modules, and folders on the Python path, after each test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(extensions, "_imported", {})
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


def write_module(folder, name="my_names", text="VALUE = 1\n"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(text)


def write_config(folder, **tree):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**TREE, **tree}))
    return path


def test_a_module_beside_the_config_is_imported_and_recorded_with_its_folder(tmp_path):
    write_module(tmp_path / "project")
    config = load_config(write_config(tmp_path / "project", extensions=["my_names"]), [])
    assert config.extensions == [f"my_names @ {tmp_path / 'project'}"]
    assert sys.modules["my_names"].VALUE == 1
    assert validate_config(config.model_dump()) == config  # twice is as good as once


def test_a_module_in_the_current_folder_or_on_the_python_path_is_found(tmp_path, monkeypatch):
    write_module(tmp_path / "here", "my_first")
    write_module(tmp_path / "installed" / "my_package", "__init__")
    write_module(tmp_path / "installed" / "my_package", "second")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    path = write_config(tmp_path / "project", extensions=["my_first", "my_package.second"])
    recorded = load_config(path, []).extensions
    assert recorded == [f"my_first @ {tmp_path / 'here'}", "my_package.second"]


def test_a_module_of_the_user_may_import_its_neighbours_also_later(tmp_path):
    write_module(tmp_path, "my_helper")
    write_module(
        tmp_path, "my_names", "def use():\n    import my_helper\n    return my_helper.VALUE\n"
    )
    load_config(write_config(tmp_path, extensions=["my_names"]), [])
    assert sys.modules["my_names"].use() == 1


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["my_missing"], "there is no extension my_missing in .*, nor on the Python path; add"),
        (["my_package.missing"], "there is no extension my_package.missing in "),
        (["my names"], "extensions has 'my names'; write the name of a module"),
        (["thinker.model"], "extensions has thinker.model, a module of Thinker itself"),
        (["json"], r"the extension json in .* has the name of another module \(.*\); rename it"),
        ("my_names", "extensions is 'my_names'; it must be a list"),
        ([1], r"extensions\[0\] is 1; it must be text"),
    ],
)
def test_what_is_no_extension_is_refused_in_one_line(tmp_path, entries, message):
    write_module(tmp_path, "json")
    with pytest.raises(UserError, match=message) as error:
        load_config(write_config(tmp_path, extensions=entries), [])
    assert "\n" not in str(error.value)


def test_a_run_finds_its_module_where_it_was_or_in_the_current_folder(tmp_path, monkeypatch):
    run, project = tmp_path / "run", tmp_path / "project"
    write_module(project)
    (run / "checkpoints").mkdir(parents=True)
    recorded = [f"my_names @ {project}"]
    path = run / "config.yaml"
    path.write_text(yaml.safe_dump({**TREE, "extensions": recorded}))
    assert load_config(path, []).extensions == recorded

    project.rename(tmp_path / "moved")
    del sys.modules["my_names"]
    message = f"no extension my_names in {project} or "
    with pytest.raises(UserError, match=message):
        load_config(path, [])
    monkeypatch.chdir(tmp_path / "moved")
    assert load_config(path, []).extensions == [f"my_names @ {tmp_path / 'moved'}"]


def test_a_run_does_not_bring_modules_of_its_own(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for folder in (run, run / "checkpoints"):
        write_module(folder, "my_code", "raise AssertionError('imported')\n")
    monkeypatch.chdir(run)
    for entry in ("my_code", f"my_code @ {run}", "my_code @ .", f"my_code @ {run}/checkpoints"):
        path = run / "config.yaml"
        path.write_text(yaml.safe_dump({**TREE, "extensions": [entry]}))
        with pytest.raises(UserError, match="there is no extension my_code"):
            load_config(path, [])


def test_a_saved_model_opens_and_imports_its_extensions(tmp_path, monkeypatch):
    write_module(tmp_path / "project")
    load_config(write_config(tmp_path / "project", extensions=["my_names"]), [])
    model = Thinker(ThinkerConfig(vocab_size=257, d_model=32, n_layers=1, n_heads=2))
    save(model, None, tmp_path / "saved" / "model")
    del sys.modules["my_names"]
    again, tokenizer = load(tmp_path / "saved" / "model")
    assert tokenizer is None
    assert "my_names" in sys.modules
    for name, tensor in model.state_dict().items():
        assert tensor.equal(again.state_dict()[name])
    save(again, None, tmp_path / "saved" / "model")  # replaces it
    with pytest.raises(UserError, match="is not empty; save the model in a new folder"):
        save(model, None, tmp_path / "project")


def test_a_run_records_its_extensions_and_commands_import_them(train_args, tmp_path):
    project, run = tmp_path / "project", tmp_path / "run"
    write_module(project, text="import sys\nprint('my_names is here', file=sys.stderr)\n")
    _, config, *overrides = map(str, train_args)
    tree = yaml.safe_load((ROOT / config).read_text()) | {"extensions": ["my_names"]}
    path = write_config(project, **tree)
    overrides += [f"run.dir={run}", "train.max_steps=2"]

    def start(*words):
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("my_names is here") == 1
        return done

    start(ROOT / "train.py", path, *overrides)
    recorded = [f"my_names @ {project}"]
    assert yaml.safe_load((run / "config.yaml").read_text())["extensions"] == recorded
    state = json.loads((run / "checkpoints" / "step-00000002" / "state.json").read_text())
    assert state["settings"]["extensions"] == recorded
    start(ROOT / "train.py", run / "config.yaml", "train.max_steps=4")
    start(ROOT / "generate.py", run, "--max-new-tokens", "3")


COUNTER = """
from thinker import CALLBACKS, Callback


class Counter(Callback):
    def __init__(self, settings):
        self.n_steps = 0
        self.n_last = settings.train.max_steps

    def after_step(self, info):
        self.n_steps += 1
        if info.step == self.n_last:
            print("counted", self.n_steps)

    def state_dict(self):
        return {"counted": self.n_steps}

    def load_state_dict(self, state):
        self.n_steps = state["counted"]


CALLBACKS.register("counter", Counter)
CALLBACKS.register("wrong", lambda settings: settings)
"""


def test_a_config_names_a_callback_of_its_module(train_args, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(CALLBACKS, "_values", {})
    write_module(tmp_path, "my_counter", COUNTER)
    tree = tree_of(train_args, tmp_path / "run", max_steps=2)
    tree["extensions"] = [f"my_counter @ {tmp_path}"]
    tree["train"]["callbacks"] = ["counter"]
    train(tree)
    tree["train"]["max_steps"] = 4
    train(tree)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "counted" in line] == ["counted 2", "counted 4"]
    with pytest.raises(UserError, match="it must be counter or wrong or a name that"):
        train(tree | {"train": tree["train"] | {"callbacks": ["rong"]}})
    with pytest.raises(UserError, match="the callback wrong is a Settings; derive it from"):
        train(tree | {"train": tree["train"] | {"callbacks": ["wrong"]}})


class TwiceTheLoss:
    """An objective."""

    def __call__(self, model, batch):
        loss = next_token_loss(model, batch)
        return loss._replace(sum=2 * loss.sum, cross_entropy=loss.sum.detach())


class Counter(Callback):
    """A callback with a state."""

    def __init__(self):
        self.n_steps = 0

    def after_step(self, info):
        self.n_steps += 1

    def state_dict(self):
        return {"counted": self.n_steps}

    def load_state_dict(self, state):
        self.n_steps = state["counted"]


def tree_of(train_args, run, **train):
    """The config of train_args as a dictionary."""
    _, config, *overrides = map(str, train_args)
    overrides += [f"run.dir={run}", *(f"train.{key}={value}" for key, value in train.items())]
    return load_config(config, overrides).model_dump()


def test_a_run_trains_from_python_with_callbacks_and_an_objective(train_args, tmp_path):
    run = tmp_path / "run"
    tree = tree_of(train_args, run, max_steps=3)
    counter = Counter()
    assert train(tree, callbacks=[counter], objective=TwiceTheLoss()) == run
    assert counter.n_steps == 3
    tree["train"]["max_steps"] = 5
    resumed = Counter()
    train(tree, callbacks=[resumed], objective=TwiceTheLoss())
    assert resumed.n_steps == 5
    model, tokenizer = load(run)
    assert tokenizer.vocab_size <= model.config.vocab_size


def test_mistakes_of_the_call_are_one_line():
    with pytest.raises(UserError, match="run.dir is missing"):
        train({"train": {"max_steps": 1}})
    with pytest.raises(UserError, match="overrides are for a config in a file"):
        train({"train": {"max_steps": 1}}, ["train.max_steps=2"])


class Ones:
    """A dataset."""

    def __len__(self):
        return 8

    def window(self, index):
        tokens = np.full(32, index, np.int64)
        return tokens, tokens


class Endless:
    """An iterable dataset: the same windows each time."""

    def __iter__(self):
        return (Ones().window(index % 7) for index in range(100))


@pytest.mark.parametrize("dataset", [Ones(), Endless(), list(Endless())])
def test_a_run_trains_on_a_dataset_of_the_user_and_resumes_exactly(train_args, tmp_path, dataset):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = {"decay_fraction": 0.0}  # the learning rate does not depend on max_steps
    train(tree_of(train_args, whole, max_steps=4, **options), dataset=dataset)
    for n in (2, 4):
        train(tree_of(train_args, parts, max_steps=n, **options), dataset=dataset)
    assert load(parts)[0].lm_head.weight.equal(load(whole)[0].lm_head.weight)


def test_what_is_no_dataset_is_refused(train_args, tmp_path):
    with pytest.raises(UserError, match="the dataset is a int, but a dataset needs"):
        train(tree_of(train_args, tmp_path / "run", max_steps=1), dataset=3)
