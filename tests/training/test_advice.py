"""What a run says of its data before it starts and of its result at its end, and what a plan
recommends."""

import dataclasses
import json
import math
import re

import pytest

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.training.config.load import load_config
from thinker.training.reports.after_training import after_training, describe_result
from thinker.training.reports.epochs import format_epochs, too_many_epochs
from thinker.training.reports.estimates import describe_estimates
from thinker.training.reports.fit import assess_fit, describe_fit
from thinker.training.reports.plan_table import recommendation
from thinker.training.run import build_trainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def make_trainer(tmp_path):
    """Builds the trainer of a tiny model on a text of this many lines, or on the rows of a jsonl
    file."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "data: {tokenizer: byte, seq_len: 16}\nmodel: {d_model: 32, n_layers: 1, n_heads: 2}\n"
        "train: {batch_size: 8, precision: fp32, compile: false, device: cpu, log_every: 1}\n"
    )

    def make(text, *overrides, name="text.txt"):
        path = tmp_path / name
        path.write_text(text)
        given = [f"data.path={path}", f"data.cache_dir={tmp_path}", f"run.dir={tmp_path / 'run'}"]
        return build_trainer(load_config(config, [*given, *overrides]))

    return make


def close(trainer):
    for part in (trainer.batches, trainer.checkpoints):
        part.close()
    trainer.run.unlock()


def val(step, loss, **more):
    return {"step": step, "val_loss": loss, "val_bits_per_byte": loss, **more}


def losses(first, last, n=20):
    return [{"step": i + 1, "train_loss": first + (last - first) * i / (n - 1)} for i in range(n)]


def test_a_short_text_is_overfitted_and_the_run_says_so(make_trainer, capsys):
    text = "".join(f"{math.sin(i):.15f}\n" for i in range(40))
    trainer = make_trainer(
        text, "data.source=text", "train.max_steps=150", "train.eval_every=15", "optimizer.lr=0.1"
    )
    started = capsys.readouterr().err
    n_train, n_val = trainer.corpus.train.n_tokens, trainer.corpus.val.n_tokens
    sequences = len(trainer.batches.loader.dataset)
    epochs = 150 * 8 / sequences
    assert (
        f"{n_train:,} tokens in 1 document for training, {n_val} tokens in 1 document for validation"
        in started
    )
    assert f"; {epochs:.0f} epochs in 150 steps" in started
    assert f"advice: the validation split has only {n_val} tokens" in started
    assert f"advice: the model will see the data {epochs:.0f} times" in started
    kernels = (
        "fused kernels"
        if trainer.step.kernels.is_native
        else f"no fused kernels ({trainer.step.kernel_problem})"
    )
    assert f"precision fp32, {kernels}, micro-batches of 8 sequences" in started
    assert f"(to {math.ceil(4 * sequences / 8)} for 4 epochs)" in started
    assert trainer.train() == 0
    evaluated = [line for line in trainer.run.read_metrics() if "val_loss" in line]
    best = min(evaluated, key=lambda line: line["val_loss"])
    printed = capsys.readouterr()
    assert (
        f"advice: overfitting: since step {best['step']} the validation loss has risen from"
        in printed.out
    )
    assert f"below the validation loss, after {format_epochs(epochs)}: overfitted" in printed.out
    assert "estimate" not in printed.out  # the loss is worse than a uniform guess
    assert f"epoch {epochs:.2f}" in printed.err  # in the bar
    assert (
        len({line["step"] for line in evaluated}) == len(evaluated) == 10
    )  # the last evaluation is made once


def test_validation_on_one_conversation(make_trainer, tmp_path, capsys):
    tokenizer = make_tokenizer("byte", [])
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.with_chat_template(template).save(tmp_path)
    rows = [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes " * i}]
        for i in range(9)
    ]
    text = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    given = [
        "data.source=jsonl",
        f"data.tokenizer={tmp_path}",
        "data.packing=documents",
        "data.val_fraction=0.2",
    ]
    trainer = make_trainer(text, *given, "train.max_steps=2", name="talks.jsonl")
    n = trainer.corpus.val.n_documents
    assert 1 <= n < 5
    started = capsys.readouterr().err
    assert f"tokens in {9 - n} conversations for training" in started
    assert f"advice: the validation split has only {n} conversation" in started
    n_lost = 0
    n_all = -1  # the first BOS token is no target
    for shard in trainer.corpus.train.shards:
        offsets = shard.offsets[:]
        lengths = offsets[1:] - offsets[:-1]
        n_lost += int((lengths - 16).clip(min=0).sum())
        n_all += shard.n_tokens
    assert (
        f"advice: conversations are cut at data.seq_len=16: {n_lost} of {n_all} targets "
        f"({n_lost / n_all:.1%}) are lost; raise data.seq_len" in started
    )
    close(trainer)


def test_targets_in_a_bidirectional_prefix_are_named(make_trainer, tmp_path, capsys):
    tokenizer = make_tokenizer("byte", [])
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer.with_chat_template(template).save(tmp_path)
    answer = {"role": "assistant", "content": "yes yes"}
    rows = [[{"role": "user", "content": str(i)}, answer] for i in range(10, 60)]
    text = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    given = [
        "data.source=jsonl",
        f"data.tokenizer={tmp_path}",
        "data.packing=documents",
        "data.assistant_only_loss=true",
        "data.val_fraction=0.2",
        "model.attention=prefix(6)",
    ]
    trainer = make_trainer(text, *given, "train.max_steps=2", name="talks.jsonl")
    n = trainer.corpus.train.n_documents
    # Of each window, whose only conversation is <bos>12<eos>yes yes<eos>, the first 5 targets.
    assert (
        f"advice: {2 * n} of {8 * n} targets (25.0%) are lost in the bidirectional prefix of 6 "
        "tokens" in capsys.readouterr().err
    )
    close(trainer)


def test_char_explains_its_number_of_tokens(make_trainer, capsys):
    trainer = make_trainer(
        "Schöne Grüße\n" * 200, "data.source=text", "data.tokenizer=char", "train.max_steps=1"
    )
    started = capsys.readouterr().err
    assert "char: 260 tokens (256 bytes to encode any text" in started
    assert "3 non-ASCII characters" in started
    assert "ln 260 = 5.56" in started
    close(trainer)


def test_a_warmup_that_the_run_does_not_outlast(make_trainer, capsys):
    for n_steps, is_advised in ((7, True), (8, False)):
        close(
            make_trainer(
                "some words\n" * 300,
                "data.source=text",
                f"train.max_steps={n_steps}",
                "train.warmup_steps=7",
            )
        )
        said = "advice: train.warmup_steps=7 lasts until the end of the run; lower it"
        assert (said in capsys.readouterr().err) == is_advised


@pytest.fixture
def ended(make_trainer):
    """The state of a run that has ended, by its time and its config."""
    trainer = make_trainer(
        "some words\n" * 300, "data.source=text", "train.max_steps=100", "train.max_minutes=3"
    )
    close(trainer)

    def state(step, minutes):
        return trainer.state.model_copy(update={"step": step, "elapsed_s": 60.0 * minutes})

    return state


def test_results_that_need_advice(ended):
    uniform = math.log(257)
    (line,) = after_training([*losses(5, 4), val(20, uniform + 0.1)], ended(100, 1), 1.0)
    assert "the validation loss 5.65 is above ln 257 = 5.55" in line
    for loss in (uniform - 0.1, uniform + 0.003):  # shown as 5.55, as ln 257 is
        assert after_training([*losses(5, 4), val(20, loss)], ended(100, 1), 1.0) == []
    (line,) = after_training([*losses(5, 1), val(10, 3.0), val(20, 3.5)], ended(100, 1), 3.0)
    assert (
        "overfitting: since step 10 the validation loss has risen from 3.000 to 3.500 while" in line
    )
    (line,) = after_training([*losses(1, 5), val(10, 3.0), val(20, 3.5)], ended(100, 1), 3.0)
    assert "the validation loss was lowest at step 10 (3.000)" in line
    assert line.endswith("use the weights of that step (thinker generate --checkpoint best)")
    (line,) = after_training([*losses(5, 1), val(20, 3.5)], ended(100, 1), 8.0)
    assert line == "against overfitting, try a smaller model, more text or a higher model.dropout"
    assert after_training([*losses(5, 3), val(10, 3.1), val(20, 3.12)], ended(100, 1), 3.0) == []
    # Since then another part of the validation set is measured, and the weights of step 20 are the
    # best.
    state = ended(100, 1).model_copy(update={"best_val_loss": 3.5})
    assert after_training([*losses(1, 5), val(10, 3.0), val(20, 3.5)], state, 3.0) == []


def test_more_minutes_are_advised_where_time_ended_the_run_far_from_the_floor(ended):
    far, near = ([*losses(2, 1), val(20, loss, entropy_floor=1.0)] for loss in (1.13, 1.04))
    (line,) = after_training(far, ended(60, 3), 0.5)
    assert "train.max_minutes=3 ended the run after 60 of 100 steps" in line
    assert line.endswith("run train.max_minutes=6")
    ranks = ended(60, 3).model_copy(update={"machine": {"ranks": "2 (ddp)"}})
    (line,) = after_training(far, ranks, 0.5)
    assert line.endswith("continue it with the same command and train.max_minutes=6")
    assert after_training(near, ended(60, 3), 0.5) == []
    assert after_training(far, ended(100, 1), 0.5) == []  # its steps ended it
    falling, risen = (
        [*losses(2, 1), val(10, 2.5), val(20, loss)] for loss in (2.4, 2.51)
    )  # a text of unknown entropy
    (line,) = after_training(falling, ended(60, 3), 0.5)
    assert line.endswith("run train.max_minutes=6")
    assert after_training(risen, ended(60, 3), 0.5) == []
    (line,) = after_training([*losses(2, 1), val(20, 2.4)], ended(60, 3), 0.5)
    assert line.endswith("run train.max_minutes=6")


@pytest.mark.parametrize(
    ("train", "vals", "epochs", "verdict"),
    [
        ((5, 3), [val(10, 3.9), val(20, 3.4)], 0.5, "underfitted"),
        (
            (5, 3),
            [val(20, 3.6)],
            0.5,
            "underfitted",
        ),  # the mean of the last ten training losses is 3.47
        ((5, 3), [val(20, 3.6)], 9.0, "underfitted"),
        ((5, 3), [val(20, 3.6)], 9.1, "well fitted"),  # more than 10 epochs would not help
        ((5, 3), [val(20, 3.6)], 960.0, "well fitted"),
        ((5, 3), [val(20, 3.7)], 0.5, "well fitted"),
        ((5, 3), [val(10, 3.38), val(20, 3.4)], 0.5, "well fitted"),  # no longer falling
        ((5, 3), [val(20, 3.4, entropy_floor=3.0)], 0.5, "underfitted"),
        ((5, 3), [val(20, 3.4, entropy_floor=3.3)], 0.5, "well fitted"),
        ((5, 1), [val(10, 3.0), val(20, 3.5)], 3.0, "overfitted"),
        ((5, 1), [val(20, 3.5)], 8.0, "overfitted"),
        ((5, 1), [val(20, 3.5)], 3.0, "well fitted"),
        ((1, 5), [val(10, 3.0), val(20, 3.5)], 3.0, "no longer improving"),
    ],
)
def test_verdicts(ended, train, vals, epochs, verdict):
    lines = [*losses(*train), *vals]
    fit = assess_fit(lines, ended(100, 1), epochs)
    assert fit.verdict == verdict
    assert describe_fit(fit).endswith(f"{format_epochs(epochs)}: {verdict}")
    advised = after_training(lines, ended(100, 1), epochs)
    assert bool(advised) == (
        verdict in ("overfitted", "no longer improving")
    )  # each has its remedy


def test_a_model_that_is_worse_than_5_grams_is_not_well_fitted(ended):
    lines = [*losses(5, 3), val(20, 3.7)]
    for ngram, verdict in ((3.69, "underfitted"), (3.71, "well fitted")):
        assert assess_fit(lines, ended(100, 1), 0.5, {"5-gram": ngram}).verdict == verdict
    lines = [*losses(5, 1), val(20, 3.5)]
    assert assess_fit(lines, ended(100, 1), 8.0, {"5-gram": 3.0}).verdict == "overfitted"


def test_a_run_without_training_losses_has_no_verdict(ended):
    assert assess_fit([val(20, 3.5)], ended(100, 1), 1.0) is None


def test_the_gap_is_signed_in_words(ended):
    """With dropout, the training loss may be above the validation loss."""
    for loss, words in ((3.5, "0.0263 below"), (3.4, "0.0737 above")):
        fit = assess_fit([*losses(5, 3), val(20, loss)], ended(100, 1), 0.5)
        assert (
            f"training loss 3.4737, {words} the validation loss, after 0.5 epochs"
            in describe_fit(fit)
        )


def test_the_advice_to_train_longer_is_given_once(ended):
    lines, better = [*losses(4, 3), val(20, 3.4)], {"5-gram": 3.3}
    (line,) = after_training(lines, ended(100, 1), 0.5, better)
    assert line.endswith("train longer: raise train.max_steps")
    (line,) = after_training(lines, ended(60, 3), 0.5, better)  # ended by its time
    assert line.startswith("train.max_minutes=3 ended the run")
    (line,) = after_training([*losses(5, 1), val(20, 3.5)], ended(100, 1), 8.0, better)
    assert line.startswith("against overfitting")
    assert after_training(lines, ended(100, 1), 0.5, {"5-gram": 3.5}) == []
    state = ended(50, 1)
    train = state.settings.train.model_copy(update={"patience": 2})
    settings = state.settings.model_copy(update={"train": train})
    state = state.model_copy(update={"settings": settings, "evaluations_since_lowest": 2})
    (line,) = after_training(lines, state, 0.5, better)
    assert line.endswith("train longer: raise train.patience")


def test_levers_are_ordered_and_left_out_where_the_law_does_not_apply(ended):
    trained = ended(100, 1).model_copy(update={"tokens": 10**5})

    def levers(train, loss, epochs, state=trained, **more):
        lines = [*losses(*train), val(20, loss, **more)]
        return describe_estimates(lines[-1], assess_fit(lines, state, epochs), state)

    text = levers((5, 3), 3.6, 2.0)
    changes = [float(number) for number in re.findall(r"about (\d\.\d\d)", text)]
    assert changes == sorted(changes, reverse=True)
    assert all(f"twice the {name} " in text for name in ("minutes", "text", "parameters"))
    assert levers((5, 1), 3.5, 8.0).startswith(
        "estimate: twice the text would lower the loss by about"
    )
    assert levers((5, 1), 3.5, 8.0).count("twice") == 1  # overfitted
    assert "twice the text by less than 0.01" in levers(
        (5, 3), 3.4, 0.5
    )  # as most of the text was not read
    assert levers((5, 3), 3.4, 0.5, entropy_floor=3.0) is None
    assert levers((7, 6), 6.0, 0.5) is None  # worse than a uniform guess
    assert levers((1, 0.5), 0.5, 0.5) is None  # below the irreducible loss
    run = trained.settings.run.model_copy(update={"init_from": "runs/a"})
    tuned = trained.model_copy(
        update={"settings": trained.settings.model_copy(update={"run": run})}
    )
    assert levers((5, 3), 3.4, 0.5, tuned) is None


def test_losses_of_twice_the_floor_and_more_are_factors(ended):
    for loss, words in (
        (0.956, "4.1% above the floor"),
        (1.9, "90.0% above the floor"),
        (3.1, "3.1 times the floor"),
    ):
        entropy_floor = 0.918 if loss < 1 else 1.0
        lines = describe_result(val(20, loss, entropy_floor=entropy_floor), ended(20, 1))
        assert words in lines[-1]


def plan(**values):
    return {
        "peak_bytes": 10**9,
        "usable_bytes": 10**10,
        "steps": 1000,
        "tokens": 10**6,
        "optimal_tokens": 10**7,
        "dropout": 0.0,
    } | values


def test_a_plan_ends_in_a_recommendation():
    assert recommendation(plan(epochs=2)) == ["the run fits; no changes needed"]
    assert recommendation({"peak_bytes": 1, "usable_bytes": 2, "optimal_tokens": 9})[0].startswith(
        "the run fits;"
    )
    fits, line = recommendation(plan(epochs=100.0))
    assert fits == "the run fits"
    assert "the model will see the data 100 times" in line
    assert "(to 40 for 4 epochs)" in line
    (line,) = recommendation(plan(peak_bytes=2 * 10**10))
    assert line.startswith(
        "the run does not fit: it needs 20 GB, but only 10 GB is usable; set train.micro_batch_size=auto or train"
    )
    assert "use about 50,000 parameters" in recommendation(plan(optimal_tokens=10**9))[1]
    assert (
        "about 50,000 parameters would learn more" in recommendation(plan(optimal_tokens=10**5))[1]
    )


def test_the_size_of_a_model_that_is_given_is_not_advised(ended):
    """Of a plan and of a run with run.init_from, whose model has the size that it has."""
    given = plan(tokens=1, optimal_tokens=None)
    assert recommendation(given) == ["the run fits; no changes needed"]
    (line,) = recommendation(given | {"peak_bytes": 2 * 10**10})
    assert line.endswith("train.checkpoint_every_n_blocks=1, or lower data.seq_len")
    state = ended(100, 1)
    lines = [*losses(5, 1), val(10, 3.0), val(20, 3.5)]
    assert "a smaller model" in after_training(lines, state, 3.0)[0]
    run = state.settings.run.model_copy(update={"init_from": "runs/a"})
    state = state.model_copy(update={"settings": state.settings.model_copy(update={"run": run})})
    (line,) = after_training(lines, state, 3.0)
    assert line.endswith("or train with fewer steps, more text or a higher model.dropout")


@pytest.mark.parametrize(
    ("epochs", "text"),
    [
        (0.372, "0.37 epochs"),
        (1.0, "1 epoch"),
        (0.999, "1 epoch"),
        (1.43, "1.4 epochs"),
        (120.4, "120 epochs"),
    ],
)
def test_epochs_in_words(epochs, text):
    assert format_epochs(epochs) == text


def test_a_text_for_a_few_steps_needs_more_text_and_not_fewer_steps():
    assert "add text: 4 epochs are only 1 step" in too_many_epochs(640, 0.19)
    assert "(to 40 for 4 epochs)" in too_many_epochs(15, 10)


def test_a_plan_says_which_step_its_minutes_reach():
    plan = {
        "peak_bytes": 1,
        "usable_bytes": 2,
        "optimal_tokens": None,
        "tokens": 9,
        "steps": 328,
        "max_steps": 700,
    }
    fits, ended = recommendation(plan)
    assert fits == "the run fits"
    assert "after about 328 of 700 steps" in ended
    assert recommendation(plan | {"steps": 700}) == ["the run fits; no changes needed"]


def with_dropout(state, dropout):
    model = dataclasses.replace(state.settings.model, dropout=dropout)
    settings = state.settings.model_copy(update={"model": model})
    return state.model_copy(update={"settings": settings})


@pytest.mark.parametrize(("dropout", "most"), [(0.0, 10), (0.1, 24)])
def test_nothing_advises_more_epochs_than_a_run_is_warned_of(ended, dropout, most):
    """too_many_epochs() warns of more, and model.size=auto ends a run there."""
    lines = [*losses(5, 3), val(20, 3.4)]
    worse = {"5-gram": 3.3}
    state = with_dropout(ended(100, 1), dropout)
    by_time = with_dropout(ended(60, 3), dropout).model_copy(update={"tokens": 10**5})
    for epochs in (0.5, most / 2, most - 0.5, most + 0.1, 40 * most):
        text = "\n".join(after_training(lines, state, epochs, worse))
        assert ("train longer" in text) == (epochs <= 0.9 * most)
        assert "a 5-gram model predicts the text better" in text
        fit = assess_fit(lines, by_time, epochs)
        assert (fit.verdict == "underfitted") == (epochs <= 0.9 * most)
        estimate = describe_estimates(lines[-1], fit, by_time)
        assert ("twice the minutes" in estimate) == (2 * epochs <= most)
        assert "twice the text" in estimate
        advised = "\n".join(after_training(lines, by_time, epochs))
        minutes = re.search(r"train.max_minutes=(\d+)$", advised)
        if minutes is None:
            assert epochs > most / 1.5
        else:  # rounded up to whole minutes
            assert (int(minutes[1]) - 1) / 3 * epochs < most


def test_a_worse_model_after_many_epochs_needs_something_else(ended):
    (line,) = after_training([*losses(4, 3), val(20, 3.4)], ended(100, 1), 30.0, {"5-gram": 3.3})
    assert line == (
        "a 5-gram model predicts the text better than this model, which has seen the data "
        "30 times; try a larger model, a higher optimizer.lr or more text"
    )


def test_a_plan_of_few_tokens_names_no_size(ended):
    """A model of 100 parameters would learn nothing."""
    short = plan(steps=5, tokens=2000, epochs=0.1)
    (_, line) = recommendation(short)
    assert line == "5 steps are too few to learn from; train longer (raise train.max_steps)"
    (_, line) = recommendation(short | {"max_steps": None})
    assert line == "5 steps are too few to learn from; train longer (raise train.max_minutes)"
    (_, line) = recommendation(plan(tokens=50_000, optimal_tokens=10**9, epochs=0.1))
    assert line == "the model is large for 50,000 tokens; train longer"
    (_, line) = recommendation(plan(tokens=50_000, optimal_tokens=10**9, epochs=8.0))
    assert line == "the model is large for 50,000 tokens; add text"  # not more than 10 epochs
    (_, line) = recommendation(plan(optimal_tokens=10**9, epochs=0.1))
    assert "use about 50,000 parameters" in line
    assert line.endswith("or train longer")
    (_, many, line) = recommendation(plan(optimal_tokens=10**9, epochs=30.0))
    assert "memorize" in many
    assert line.endswith("or add text")


def test_a_plan_does_not_doubt_a_size_that_was_chosen():
    for optimal in (10**9, 10**5):
        given = plan(optimal_tokens=optimal, epochs=2.0)
        assert len(recommendation(given)) == 2
        fits, *rest = recommendation(given | {"size_is_chosen": True})
        assert fits == "the run fits; no changes needed"
        assert rest == []
