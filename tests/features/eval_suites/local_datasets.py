"""Tiny data sets in folders named like those of the Hugging Face hub.

`datasets` reads a folder of the working directory before it asks the hub, so that lm-eval's own
tasks run on them unchanged.
"""

import json

# By data set and config (or ""): the rows of each split, from their number.
NOUNS = ["cat", "dog", "fox", "hen", "pig", "owl", "bee", "cow", "ant", "elk", "emu", "yak"]


def choices(number):
    noun = NOUNS[number % 12]
    texts = [f"a {noun} sat", f"the {noun} ran off", "it rained", f"no {noun} was there"]
    return {"text": texts, "label": list("ABCD")}


def hellaswag(number):
    noun = NOUNS[number % 12]
    return {
        "ind": number,
        "activity_label": "Walking",
        "ctx_a": f"A {noun} walks home.",
        "ctx_b": "then it",
        "endings": ["sits down.", "flies to the moon [title] now.", "eats.", "sings a long song."],
        "label": str(number % 4),
    }


def arc(number):
    question = f"What did the {NOUNS[number % 12]} do?"
    return {"question": question, "choices": choices(number), "answerKey": "ABCD"[number % 4]}


def copa(number):
    return {
        "premise": f"The {NOUNS[number % 12]} was hungry.",
        "question": ("cause", "effect")[number % 2],
        "choice1": "It ate.",
        "choice2": "The sun was green.",
        "label": number % 2,
    }


def boolq(number):
    noun = NOUNS[number % 12]
    return {
        "passage": f"The {noun} sat on the mat.",
        "question": f"did the {noun} sit",
        "label": number % 2,
    }


def commonsense(number):
    row = arc(number)
    found = {"text": [*row["choices"]["text"], "nothing"], "label": list("ABCDE")}
    return {**row, "choices": found, "answerKey": "ABCDE"[number % 5]}


def piqa(number):
    noun = NOUNS[number % 12]
    return {
        "goal": f"Feed a {noun}.",
        "sol1": "Give it food.",
        "sol2": "Paint it with a brush.",
        "label": number % 2,
    }


def openbook(number):
    row = arc(number)
    return {"question_stem": row.pop("question"), **row}


def lambada(number):
    noun = NOUNS[number % 12]
    return {"text": f"I saw the {noun}, and the {noun} saw me, and I fed the {noun}"}


def winograd(number):
    text = f"The {NOUNS[number % 12]} did not see the cart because it was small."
    return {
        "text": text,
        "pronoun": "it",
        "pronoun_loc": text.index(" it ") + 1,
        "quote": "it was small",
        "quote_loc": text.index("it was"),
        "options": [f"The {NOUNS[number % 12]}", "The cart"],
        "label": number % 2,
        "source": "ours",
    }


def winogrande(number):
    sentence = f"The {NOUNS[number % 12]} did not fit into the box because the _ was big."
    return {
        "sentence": sentence,
        "option1": NOUNS[number % 12],
        "option2": "box",
        "answer": "12"[number % 2],
    }


def language(number):
    names = ["Abc", "Bcd", "Cde", "Def"]
    return {
        "idx": number,
        "inputs": f"Which language is {NOUNS[number % 12]}?",
        "targets": [names[number % 4]],
        "multiple_choice_targets": names,
        "multiple_choice_scores": [int(i == number % 4) for i in range(4)],
    }


def blimp(number):
    noun = NOUNS[number % 12]
    return {
        "sentence_good": f"The {noun}s run {number}.",
        "sentence_bad": f"The {noun}s runs {number}.",
    }


TRAIN_AND_TEST = ("train", "validation", "test")
CORE = {
    ("Rowan/hellaswag", ""): (hellaswag, ("train", "validation")),
    ("allenai/ai2_arc", "ARC-Easy"): (arc, TRAIN_AND_TEST),
    ("allenai/ai2_arc", "ARC-Challenge"): (arc, TRAIN_AND_TEST),
    ("aps/super_glue", "copa"): (copa, ("train", "validation")),
    ("aps/super_glue", "boolq"): (boolq, ("train", "validation")),
    ("tau/commonsense_qa", ""): (commonsense, ("train", "validation")),
    ("baber/piqa", ""): (piqa, ("train", "validation")),
    ("allenai/openbookqa", "main"): (openbook, TRAIN_AND_TEST),
    ("EleutherAI/lambada_openai", "default"): (lambada, ("test",)),
    ("lighteval/winograd_wsc", "wsc273"): (winograd, ("test",)),
    ("allenai/winogrande", "winogrande_xl"): (winogrande, ("train", "validation")),
    ("hails/bigbench", "language_identification_zero_shot"): (language, ("default",)),
}


def write_datasets(folder, sets, n_rows=12):
    """Write data sets with n_rows per split. `sets`: as CORE."""
    configs = {}
    for (path, config), (make, splits) in sets.items():
        files = []
        for number, split in enumerate(splits):
            name = f"{config or 'all'}-{split}.jsonl"
            rows = [json.dumps(make(number + i)) for i in range(n_rows)]
            (folder / path).mkdir(parents=True, exist_ok=True)
            (folder / path / name).write_text("\n".join(rows) + "\n")
            files.append({"split": split, "path": name})
        configs.setdefault(path, []).append(
            {"config_name": config or "default", "data_files": files}
        )
    for path, known in configs.items():
        # YAML reads JSON.
        header = f"---\nconfigs: {json.dumps(known)}\n---\n"
        (folder / path / "README.md").write_text(header)
