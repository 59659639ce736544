"""Configs: validation, overrides, and one-line messages that name the wrong key and what would be
right."""

import ast
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from installed import KNOWN, NAMES, missing_feature

from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import SINGLE_PROCESS
from thinker.scripts.make_reference import config_markdown, config_schema
from thinker.training.config.config import config_sections
from thinker.training.config.load import load_config, validate_config
from thinker.training.config.sections import ModelConfig
from thinker.training.settings.resolve import check_batch_split, resolve_settings
from thinker.training.settings.settings import Settings

ROOT = Path(__file__).parents[2]


def installed_configs(folder):
    """The configs of a folder, without those that need a feature that has been deleted."""
    paths = sorted((ROOT / folder).glob("*.yaml"))
    return [path for path in paths if not missing_feature(str(path))]


OF_FEATURES = sorted(ROOT.glob("features/*/*.yaml"))
CONFIGS = [*installed_configs("configs"), *OF_FEATURES]
NEEDS_A_FEATURE = {"dpo.yaml", "grpo.yaml", "mixture.yaml"}  # in configs/
LOAD_WITHOUT_FEATURES = """
import sys

import thinker.features

thinker.features.FEATURES = []
from thinker.runtime.registry import features
from thinker.training.config.load import load_config

assert features() == ()
for path in sys.argv[1:]:
    print(path)
    load_config(path, [])
"""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_is_valid_and_names_hardware_and_loss(path):
    config = load_config(path, [])
    check_batch_split(config, SINGLE_PROCESS)
    assert config.run.dir == f"runs/{path.stem}"
    head = path.read_text().split("\n\n")[0]
    assert head.startswith("#")
    assert "hardware" in head.lower()
    assert "loss" in head.lower()


def test_a_config_outside_of_features_needs_no_feature():
    """Whoever starts with one reads numbers in it, which no feature chooses."""
    paths = [path for path in (ROOT / "configs").glob("*.yaml") if path.name not in NEEDS_A_FEATURE]
    assert {"quickstart.yaml", "small-text.yaml", "gpu-124m.yaml"} <= {path.name for path in paths}
    program = [sys.executable, "-c", LOAD_WITHOUT_FEATURES, *map(str, paths)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_key_is_read_somewhere():
    """Nothing is accepted and ignored: each key's name is used in the code outside the config."""
    root_files = [
        p for room in ("training", "model", "data", "features") for p in (ROOT / room).rglob("*.py")
    ]
    of_config = set((ROOT / "training" / "config").glob("*.py"))
    of_config |= set((ROOT / "features").glob("*/keys.py"))
    code = "".join(path.read_text() for path in root_files if path not in of_config)
    for name, section in config_sections().items():
        for key in section.model_fields:
            assert f".{key}" in code or f'"{key}"' in code, f"{name}.{key}"


def test_paths_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "r.yaml").write_text("train: {max_steps: 5}\n")
    names = [
        "run.dir",
        "run.init_from",
        "data.tokenizer",
        "data.chat_template",
        "data.val_tokens",
        "data.cache_dir",
    ]
    config = load_config(tmp_path / "r.yaml", [f"{name}=~/x" for name in names])
    for section, _, key in (name.partition(".") for name in names):
        assert getattr(getattr(config, section), key) == str(tmp_path / "x"), key
    for text in ("runs/a/", "./runs/a"):
        assert load_config(tmp_path / "r.yaml", [f"run.init_from={text}"]).run.init_from == str(
            Path("runs/a")
        )


def test_descriptions_refer_to_pages_that_know_the_key():
    """A page that is named, from the root of the repository, says something about the key."""
    for name, section in config_sections().items():
        for key, field in section.model_fields.items():
            for page in re.findall(r"[\w/-]+\.md", field.description):
                assert f"`{name}.{key}" in (ROOT / page).read_text(encoding="utf-8"), (
                    f"{name}.{key}: {page}"
                )


def test_overrides(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("train: {max_steps: 5}\nmodel:\n")
    config = load_config(path, ["optimizer.lr=3e-4", "train.max_minutes=1", "data.path=~/a=b.txt", "model.n_heads=2",
                                "train.max_steps=null", "tracking.name='7'"])  # fmt: skip
    assert config.optimizer.lr == 3e-4
    assert config.train.max_minutes == 1
    assert config.train.max_steps is None
    assert config.data.path == "~/a=b.txt"
    assert config.tracking.name == "7"
    assert (
        load_config(path, []).model_dump()
        == validate_config(load_config(path, []).model_dump()).model_dump()
    )


@pytest.mark.parametrize("text", ["runs/a #2", "2026-11-24", "a\nb", "*a", "[a", "@a", "{a}b"])
def test_a_text_on_the_command_line_is_taken_as_it_is(tmp_path, text):
    path = tmp_path / "r.yaml"
    path.write_text("train: {max_steps: 5}\n")
    assert load_config(path, [f"tracking.name={text}"]).tracking.name == text


@pytest.mark.parametrize("text", ["1:30", "1:30.5"])
def test_numbers_of_base_60_are_refused(tmp_path, text):
    path = tmp_path / "r.yaml"
    path.write_text(f"train:\n  max_minutes: {text}\n")
    with pytest.raises(UserError, match=rf"line 2: invalid YAML: {text} is not a decimal number"):
        load_config(path, [])
    path.write_text("train: {max_steps: 5}\n")
    with pytest.raises(UserError, match=f"train.max_minutes is '{text}'; it must be a number"):
        load_config(path, [f"train.max_minutes={text}"])


def test_a_leading_zero_is_no_octal_number(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("train: {max_steps: 010}\n")
    with pytest.raises(UserError, match="010 is not a decimal number"):
        load_config(path, [])
    path.write_text("train: {max_steps: 5}\n")
    assert load_config(path, ["train.max_steps=010"]).train.max_steps == 10


def test_an_exponent_without_a_dot_is_a_number(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "train: {max_steps: 5}\noptimizer: {lr: 3e-4, eps: 1e-8}\n"
    )  # PyYAML reads strings
    assert load_config(path, []).optimizer.lr == 3e-4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.dir=", "'run.dir=' is not an override; write section.key=value"),
        ("extensions=[mine]", "cannot stand here; set extensions in the YAML file"),
        ("train.max_step=5", "unknown config key train.max_step; did you mean train.max_steps"),
        ("trian.max_steps=5", "unknown config key trian; did you mean train"),
        ("train.max_steps=soon", "train.max_steps is 'soon'"),
        ("train.max_steps=0", "train.max_steps is 0"),
        ("train.max_steps=true", "train.max_steps is true "),
        ("train.max_steps=2.5", "train.max_steps is 2.5"),
        ("train.max_steps=null", "the run has no end; set train.max_steps or train.max_minutes"),
        ("train.compile=perhaps", "train.compile is 'perhaps'; it must be true, false or auto$"),
        ("train.micro_batch_size=some", "it must be an integer or auto$"),
        ("train.precision=fp8", "it must be auto, fp32, bf16 or fp16$"),
        ("optimizer.lr=-1", "optimizer.lr is -1"),
        ("optimizer.lr=.nan", "optimizer.lr is nan"),
        ("optimizer.betas=[0.9]", r"optimizer.betas is \[0.9\]; it must be a list of two numbers"),
        ("optimizer.betas=[0.9, 2]", r"optimizer.betas\[1\] is 2; it must be less than 1$"),
        ("model.n_kv_heads=3", "use 1, 2, 4"),
        ("model.max_seq_len=1", r"data.seq_len \(256\) is longer than model.max_seq_len \(1\)"),
        ("data.val_fraction=1.5", "data.val_fraction is 1.5"),
        (
            "tracking.wandb=on",
            "tracking.wandb is true .YAML reads on and yes as true, off.*must be disabled or offline or online",
        ),
        ("tracking.wandb=maybe", "it must be disabled, offline or online$"),
        ("model.d_model=abc", "model.d_model is 'abc'; it must be an integer"),
        ("model.dropout=abc", "it must be a number"),
        ("optimizer.betas=0.9", "a list of two numbers"),
        ("tracking.trackers=csv", r"is 'csv'; it must be a list, such as \[csv\]$"),
        ("train.compile=maybe", "true, false or auto$"),
        ("modle.d_model=3", r"did you mean model\?"),
        ("model.d_modle=3", "did you mean model.d_model"),
        ("max_steps=5", "write section.key=value"),
        ("train.max_steps", "write section.key=value"),
        ("data.path=7", "data.path is 7"),
        ('run.dir="a\\0b"', r"dir is 'a\\x00b'; it must be UTF-8 text without NUL"),
        ("data.cache_dir=caf\udce9", r"cache_dir is 'caf\\udce9'; it must be UTF-8"),
        (
            "train.max_steps=1" + "0" * 30,
            "max_steps is 10+; it must be less than 9007199254740992$",
        ),
        ("model.n_layers=20000", "model.n_layers is 20000; it must be at most 10000$"),
        ("train.max_minutes=1.0e+200", "it must be at most 1000000000$"),
    ],
)
def test_wrong_values_and_keys(tmp_path, override, message):
    path = tmp_path / "r.yaml"
    path.write_text("train: {max_steps: 5}\n")
    with pytest.raises(UserError, match=message) as error:
        load_config(path, [override])
    assert "\n" not in str(error.value)


def test_the_default_sequence_length_follows_a_shorter_context():
    for max_seq_len, given, seq_len in (
        (8, {}, 8),
        (512, {}, 256),
        (None, {}, 256),
        (512, {"seq_len": 300}, 300),
    ):
        tree = {"train": {"max_steps": 1}, "model": {"max_seq_len": max_seq_len}, "data": given}
        assert validate_config(tree).data.seq_len == seq_len
    with pytest.raises(
        UserError, match=r"data.seq_len \(64\) is longer than model.max_seq_len \(8\)"
    ):
        validate_config(
            {"train": {"max_steps": 1}, "model": {"max_seq_len": 8}, "data": {"seq_len": 64}}
        )


def test_every_number_has_an_upper_bound():
    """In the section `model`, numbers that are no sizes are bounded by ThinkerConfig."""
    for name, section in config_sections().items():
        for key, schema in section.model_json_schema()["properties"].items():
            for kind in schema.get("anyOf", [schema]):
                is_checked_elsewhere = name == "model" and kind.get("type") == "number"
                if kind.get("type") in ("integer", "number") and not is_checked_elsewhere:
                    assert {"maximum", "exclusiveMaximum"} & kind.keys(), f"{name}.{key}"
    for key in ("rope_theta", "norm_eps", "dropout", "head_init_std", "attn_logit_softcap"):
        with pytest.raises(UserError, match=key):
            validate_config({"train": {"max_steps": 1}, "model": {key: 1e30}})


def test_keys_that_another_key_disables_are_refused():
    for tree, message in (
        (
            {"optimizer": {"name": "adamw", "momentum": 0.9}},
            "has no effect without optimizer.name=muon",
        ),
        (
            {"train": {"schedule": "cosine", "decay_fraction": 0.2, "max_steps": 1}},
            "has no effect without train.schedule=wsd",
        ),
        (
            {"train": {"keep_every": 2, "save_every": None, "max_steps": 1}},
            "without train.save_every; remove it",
        ),
    ):
        with pytest.raises(UserError, match=message):
            validate_config({"train": {"max_steps": 1}, **tree})
    load_config(
        ROOT / "configs" / "quickstart.yaml", ["train.sample_every=null"]
    )  # off, though a prompt is given


def test_duplicate_keys_are_refused(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("train:\n  max_steps: 3\n  max_steps: 4\n")
    with pytest.raises(UserError, match="line 3: invalid YAML: duplicate key max_steps"):
        load_config(path, [])


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "just words", "train: [", "train: 5\n", "\x00", "[a]: 1\n"]
)
def test_files_that_are_not_configs(tmp_path, text):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(UserError):
        load_config(path, ["train.max_steps=5"] if "5" in text else [])


def test_vocabulary_smaller_than_the_tokenizers():
    config = validate_config({"train": {"max_steps": 1}, "model": {"vocab_size": 100}})
    with pytest.raises(
        UserError, match=r"model.vocab_size \(100\) is smaller than the tokenizer's \(300\)"
    ):
        config.thinker_config(300)
    assert config.thinker_config(90).vocab_size == 100


def test_config_survives_yaml():
    config = validate_config({"train": {"max_steps": 1}})
    again = yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))
    assert validate_config(again) == config


def test_the_generated_page_and_schema_are_up_to_date():
    hint = "run python scripts/make_reference.py"
    assert (ROOT / "docs" / "reference" / "config.md").read_text(
        encoding="utf-8"
    ) == config_markdown(), hint
    assert (ROOT / "configs" / "schema.json").read_text(encoding="utf-8") == config_schema(), hint


def test_model_keys_are_those_of_thinker_config():
    """Same names, order and defaults, but for vocab_size and max_seq_len, which follow from
    tokenizer and data."""
    fields = {field.name: field.default for field in dataclasses.fields(ThinkerConfig)}
    keys = {name: field.default for name, field in ModelConfig.model_fields.items()}
    keys.pop("size", None)  # of a feature; chosen before there is a ThinkerConfig
    assert list(fields) == list(keys)
    assert {name for name in keys if keys[name] != fields[name]} == {"vocab_size", "max_seq_len"}


def test_every_key_has_a_description():
    for name, section in config_sections().items():
        for key, field in section.model_fields.items():
            assert field.description, f"{name}.{key}"


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda path: path.name
)
def test_the_documentation_names_keys_configs_and_pages_that_exist(path):
    """Keys with a value, those in the tables for people who come from nanoGPT, configs, and pages
    that are linked."""
    text = path.read_text(encoding="utf-8")
    end = r"\b" if path.name == "coming-from-nanogpt.md" else "="
    for section, key in re.findall(
        rf"(?<![\w./-])({'|'.join(config_sections())})\.([a-z_]+){end}", text
    ):
        is_file = f"{section}.{key}" in ("train.py", "data.py")
        name = f"{section}.{key}"
        if is_file or missing_feature(name):
            continue
        assert key in config_sections()[section].model_fields, name
    for config in re.findall(r"(?<![\w/])(?:configs|features/\w+)/\w[\w-]*\.yaml", text):
        assert missing_feature(config) or (ROOT / config).is_file(), config
    for link in re.findall(r"\]\(([\w./-]+\.\w+)", text):
        feature = re.search(r"features/(\w+)/guide\.md$", link)
        if feature and feature[1] in KNOWN - NAMES:
            continue
        assert (path.parent / link).is_file(), link


@pytest.mark.parametrize("path", [*CONFIGS, *installed_configs("benchmarks/configs")], ids=str)
def test_every_config_names_the_schema_and_has_only_its_keys(path):
    first_line = path.read_text(encoding="utf-8").splitlines()[0]
    reference = first_line.removeprefix("# yaml-language-server: $schema=")
    schema = json.loads((path.parent / reference).read_text(encoding="utf-8"))
    for name, section in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        properties = schema["$defs"][schema["properties"][name]["$ref"].split("/")[-1]][
            "properties"
        ]
        assert section.keys() <= properties.keys()


def test_a_stored_config_may_have_keys_of_features_that_are_missing(tmp_path):
    """If they are off. In a config that a user writes, they are mistakes."""
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "config.yaml"
    tree = validate_config({"train": {"max_steps": 1}}).model_dump(mode="json")
    tree["train"] |= {"magic": None, "log_magic": False}
    path.write_text(yaml.safe_dump(tree))
    assert load_config(path, []).train.max_steps == 1
    with pytest.raises(UserError, match="unknown config key train.magic; use one of"):
        load_config(path, ["train.magic=null"])
    tree["train"]["magic"] = {"depth": 3}
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match="the run has train.magic, a key of a feature that is not"):
        load_config(path, [])
    path.rename(tmp_path / "mine.yaml")
    with pytest.raises(UserError, match=r"unknown config key train.(log_)?magic; use one of"):
        load_config(tmp_path / "mine.yaml", [])


def test_stored_settings_may_have_keys_of_features_that_are_missing():
    config = validate_config({"train": {"max_steps": 1, "precision": "fp32"}})
    model = ThinkerConfig(vocab_size=100, d_model=64, n_layers=1, n_heads=2)
    stored = resolve_settings(config, model, torch.device("cpu")).model_dump(mode="json")
    with_more = {name: dict(section) for name, section in stored.items() if name != "extensions"}
    for name in ("data", "train", "optimizer"):
        with_more[name]["magic"] = None
    assert Settings.model_validate(with_more).model_dump(mode="json") == stored
    with_more["data"]["magic"] = 3
    with pytest.raises(UserError, match=r"the run has data.magic, a key of a feature"):
        Settings.model_validate(with_more)


def test_features_add_keys_to_a_section_without_torch():
    """Importing the keys of all features loads neither torch nor an implementation."""
    program = (
        "import sys; from thinker.training.config import sections, data_section; "
        "print([name for name in sys.modules if name.startswith(('torch', 'thinker.features.'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = ast.literal_eval(done.stdout)
    assert [name for name in loaded if name.count(".") == 3 and not name.endswith(".keys")] == []
    assert not [name for name in loaded if name.startswith("torch")]


def test_off_is_a_word_where_it_is_a_choice(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("train: {kernels: off, max_steps: 5}\n")
    assert load_config(path, []).train.kernels == "off"
    assert load_config(path, ["train.kernels=off"]).train.kernels == "off"
    with pytest.raises(UserError, match="it must be auto or off"):
        load_config(path, ["train.kernels=on"])
