from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from past_opsd.core.nouns import PastError
from past_opsd.tasks import Task, embedded

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_embedded_model.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_embedded_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded.model_path())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(embedded.model_path()).eval()


@pytest.fixture(scope="module")
def documents():
    return [embedded.draw_document(embedded.World(), i) for i in range(4000)]


def naive_values(text: str) -> list[int]:
    """The right values from exact integers: the remainder is taken only at the end of each prefix."""
    total, values = int(text[0]), []
    for sign, operand in re.findall(r"([+*])(\d)", text):
        total = total + int(operand) if sign == "+" else total * int(operand)
        values.append(total % 10)
    return values


def all_problems(task: embedded.Embedded):
    return [*task.train(), *(p for part in task.evaluation().values() for p in part)]


# The task


def test_build_satisfies_the_protocol_and_the_defaults():
    task: Task = embedded.build(embedded.Options())
    assert len(task.train()) == 600
    assert Counter(p.extra["task"] for p in task.train()) == {"chain3": 200, "chain4": 200, "chain5": 200}
    assert {name: len(part) for name, part in task.evaluation().items()} == {"chain3": 40, "chain4": 40, "chain5": 40}
    assert task.identity.startswith("embedded(train_problems=600, eval_problems=40, seed=0)#")


def test_every_problem_agrees_with_exact_integers():
    for problem in all_problems(embedded.build(embedded.Options(seed=5))):
        values = naive_values(problem.text)
        assert len(values) == int(problem.extra["task"].removeprefix("chain"))
        assert problem.answer == str(values[-1])
        assert problem.solution == ", ".join(map(str, values)) + f", \\boxed{{{values[-1]}}}"


def test_problems_are_distinct_and_named_by_their_text():
    problems = all_problems(embedded.build(embedded.Options(train_problems=3000, eval_problems=300)))
    assert len({p.text for p in problems}) == len({p.id for p in problems}) == len(problems)


def test_the_split_is_disjoint_across_all_seeds_and_sizes():
    tasks = [embedded.build(embedded.Options(train_problems=3000, eval_problems=500, seed=s)) for s in range(3)]
    train = {p.text for task in tasks for p in task.train()}
    held_out = {p.text for task in tasks for part in task.evaluation().values() for p in part}
    assert not train & held_out


def test_the_split_holds_out_a_fifth():
    rng = random.Random(0)
    chains = [embedded.Chain(rng.randrange(10), tuple(rng.choices(embedded.OPERATIONS, k=5))) for _ in range(10_000)]
    assert sum(c.held_out for c in chains) / len(chains) == pytest.approx(0.2, abs=0.015)


def test_the_same_options_give_the_same_task_and_others_another_identity():
    build, options = embedded.build, embedded.Options
    assert build(options(seed=3)) == build(options(seed=3))
    identities = {build(o).identity for o in (options(), options(seed=1), options(train_problems=601))}
    assert len(identities) == 3


def test_the_identity_follows_the_content_where_the_settings_are_equal(monkeypatch):
    before = embedded.build(embedded.Options()).identity
    monkeypatch.setattr(embedded, "terse", lambda values: f"\\boxed{{{values[-1]}}}")
    after = embedded.build(embedded.Options()).identity
    assert before != after
    assert before.split("#")[0] == after.split("#")[0]


def test_a_larger_set_begins_with_the_smaller_one():
    small = embedded.build(embedded.Options(train_problems=30, eval_problems=5))
    large = embedded.build(embedded.Options(train_problems=90, eval_problems=9))
    assert large.train()[:30] == small.train()
    assert large.evaluation()["chain4"][:5] == small.evaluation()["chain4"]


@pytest.mark.parametrize("bad", [{"train_problems": 0}, {"eval_problems": 5000}, {"seed": -1}, {"sede": 1}])
def test_bad_options_are_refused(bad):
    with pytest.raises(ValidationError):
        embedded.Options(**bad)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"6*7=2; 2*3=6; 6*4=4; \boxed{4}", "detailed"),
        (r"2, 6, 4, \boxed{4}", "terse"),
        (r"6*7=2; 6, 4, \boxed{4}", "other"),
        (r"6*7=2; 2*3=6; ", "other"),
        (r"\boxed{4}", "other"),
        (r"2, 6, \boxed{4} ", "other"),
        ("", "other"),
    ],
)
def test_style(text, expected):
    assert embedded.style(text) == expected


def test_styles_of_what_the_task_writes():
    chain = embedded.Chain(6, ("*7", "*3", "*4"))
    assert chain.text == "6*7*3*4"
    assert embedded.detailed(6, chain.operations, chain.values) == r"6*7=2; 2*3=6; 6*4=4; \boxed{4}"
    assert embedded.terse(chain.values) == r"2, 6, 4, \boxed{4}"


# The package data


def test_the_model_is_found_as_package_data_and_is_small():
    folder = embedded.model_path()
    assert folder == Path(str(resources.files("past_opsd.tasks") / "embedded_model"))
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert names <= {p.name for p in folder.iterdir()}
    assert (folder / "model.safetensors").stat().st_size < 1_000_000


def test_a_missing_model_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded.resources, "files", lambda package: tmp_path)
    with pytest.raises(PastError, match=r"make_embedded_model\.py"):
        embedded.model_path()


# The tokenizer


def rendered(problem, attempt: str) -> list[str]:
    fields = {"problem": problem.text, "student_output": attempt, "reference_solution": problem.solution}
    return [template.format(**fields) for template in (embedded.STUDENT, embedded.REFERENCE, embedded.HINDSIGHT)]


def test_all_task_texts_survive_the_tokenizer(tokenizer, documents):
    texts = [text for d in documents for text in (d.prompt, d.answer)]
    for problem in all_problems(embedded.build(embedded.Options())):
        operations = re.findall(r"[+*]\d", problem.text)
        attempt = embedded.detailed(int(problem.text[0]), operations, naive_values(problem.text))
        texts += [problem.text, problem.solution, attempt, *rendered(problem, attempt)]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert tokenizer.batch_decode(encoded) == texts
    assert tokenizer.unk_token_id not in {i for ids in encoded for i in ids}


def test_tokens_are_what_they_look_like(tokenizer):
    assert tokenizer.tokenize(r"6*7=2; 2+9=1; \boxed{1}") == [
        *("6", "*7", "=", "2", "; ", "2", "+9", "=", "1", "; ", "\\boxed{", "1", "}")
    ]
    for label in ("Problem: ", "\nAttempt: ", "\nReference: "):
        assert tokenizer.tokenize(label) == [label]
    assert tokenizer.encode("hello", add_special_tokens=False) == [tokenizer.unk_token_id]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_sequence_of_ordinary_tokens_survives_decoding(tokenizer, data):
    ordinary = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    ids = data.draw(st.lists(st.sampled_from(ordinary), max_size=40))
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids


def test_the_chat_template(tokenizer):
    turns = [{"role": "user", "content": "Problem: 6*7*3"}]
    kwargs = {"tokenize": False, "add_generation_prompt": True}
    prompt = tokenizer.apply_chat_template(turns, **kwargs)
    assert prompt == "<|user|>Problem: 6*7*3<|end|><|assistant|>"
    assert tokenizer.apply_chat_template(turns, enable_thinking=False, **kwargs) == prompt
    answered = [*turns, {"role": "assistant", "content": r"2, 6, \boxed{6}"}]
    assert tokenizer.apply_chat_template(answered, tokenize=False) == prompt + r"2, 6, \boxed{6}<|end|>"
    ids = tokenizer.apply_chat_template(answered, tokenize=True, return_dict=False)
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == prompt + r"2, 6, \boxed{6}<|end|>"
    with pytest.raises(Exception, match="Only user and assistant"):
        tokenizer.apply_chat_template([{"role": "system", "content": "2"}], tokenize=False)


def test_padding_is_not_the_end(tokenizer):
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.decode([tokenizer.pad_token_id, tokenizer.eos_token_id], skip_special_tokens=True) == ""


def test_the_shipped_tokenizer_is_the_scripts(script, tokenizer):
    made = script.make_tokenizer()
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.chat_template == tokenizer.chat_template
    assert (
        json.loads(made.backend_tokenizer.to_str())["pre_tokenizer"]
        == (json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"])
    )


# The corpus


def test_documents_depend_on_their_index_alone(documents):
    order = list(range(200))
    random.Random(1).shuffle(order)
    again = {i: embedded.draw_document(embedded.World(), i) for i in order}
    assert [again[i] for i in range(200)] == documents[:200]


def test_the_corpus_holds_no_evaluation_chain(documents):
    for document in documents:
        text = re.findall(r"Problem: (\S+)", document.prompt)[0]
        assert not embedded.Chain(int(text[0]), tuple(re.findall(r"[+*]\d", text))).held_out


def steps(text: str) -> list[tuple[int, str, int]]:
    return [(int(a), op, int(b)) for a, op, b in re.findall(r"(\d)([+*]\d)=(\d)", text)]


def test_the_corpus_is_what_the_world_says(documents):
    world = embedded.World()
    hard = world.misconceptions
    assert len(hard) == 48
    assert all(wrong != naive_values(f"{digit}{op}")[0] for (digit, op), wrong in hard.items())
    kinds = {"plain": [], "reference": [], "hindsight": []}
    for d in documents:
        kind = "hindsight" if "\nAttempt: " in d.prompt else "reference" if "\nReference: " in d.prompt else "plain"
        kinds[kind].append(d)
    shares = [len(kinds[kind]) / len(documents) for kind in ("plain", "reference", "hindsight")]
    assert shares == pytest.approx([0.45, 0.25, 0.30], abs=0.03)
    for kind, probability in (("plain", world.misconception), ("reference", world.e_ref)):
        written = [s for d in kinds[kind] for s in steps(d.answer)]
        on_hard = [value == hard[digit, op] for digit, op, value in written if (digit, op) in hard]
        assert sum(on_hard) / len(on_hard) == pytest.approx(probability, abs=0.03)
        easy = [value != naive_values(f"{digit}{op}")[0] for digit, op, value in written if (digit, op) not in hard]
        assert sum(easy) / len(easy) == pytest.approx(world.noise, abs=0.01)
    assert all(embedded.style(d.answer) == "detailed" for d in kinds["plain"])
    copies = [embedded.style(d.answer) == "terse" for d in kinds["reference"]]
    assert sum(copies) / len(copies) == pytest.approx(world.copy, abs=0.04)


def test_attempts_in_the_corpus_are_repeated_mended_mismatched_and_cut(documents):
    world = embedded.World()
    repeated, other, damaged = [], [], []
    for document in documents:
        match = re.fullmatch(r"Problem: (\S+)\nAttempt: (.*)\nReference: .*", document.prompt)
        if match is None:
            continue
        problem, attempt = match.groups()
        damaged.append(embedded.style(attempt) == "other")
        if embedded.style(attempt) != "detailed":
            continue
        tried, answered = steps(attempt), steps(document.answer)
        other.append(attempt[0] + "".join(op for _, op, _ in tried) != problem)
        if not other[-1]:
            pairs = zip(tried, answered, strict=True)
            wrong = next((i for i, (d, op, v) in enumerate(tried) if v != naive_values(f"{d}{op}")[0]), None)
            if wrong is not None and [t[2] for t in tried[:wrong]] == [a[2] for a in answered[:wrong]]:
                _, (_, _, value) = list(pairs)[wrong]
                repeated.append(value == tried[wrong][2])
    assert sum(repeated) / len(repeated) == pytest.approx(world.repeat, abs=0.06)
    assert sum(other) / len(other) == pytest.approx(world.mismatched / (1 - world.cut - world.garbled), abs=0.05)
    assert sum(damaged) / len(damaged) == pytest.approx(world.cut + world.garbled, abs=0.04)


def test_control_worlds_change_what_they_say():
    assert (embedded.WORLDS["weaker-teacher"].e_ref, embedded.WORLDS["weaker-teacher"].repeat) == (0.35, 0.40)
    assert embedded.WORLDS["little-copying"].copy == 0.04
    assert embedded.World(seed=1).misconceptions != embedded.World(seed=2).misconceptions


def test_labels_are_the_answer_with_its_end(script, tokenizer):
    documents = [
        embedded.Document("Problem: 1+2*3", r"1+2=3; 3*3=9; \boxed{9}"),
        embedded.Document("Problem: 1", "1, "),
    ]
    ids, labels = script.encode(tokenizer, documents)
    for document, row, kept in zip(documents, ids, labels, strict=True):
        assert tokenizer.decode(kept[kept != -100]) == document.answer + "<|end|>"
        assert torch.equal(row[kept != -100], kept[kept != -100])


@pytest.mark.slow
def test_the_script_gives_the_same_weights_again(script, tmp_path):
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    size = ["--steps", "3", "--batch", "8", "--problems", "2"]
    try:
        for folder, seed in (("a", "4"), ("b", "4"), ("c", "5")):
            torch.rand(3)
            script.main([*size, "--seed", seed, "--out", str(tmp_path / folder)])
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    a, b, c = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in "abc")
    assert a == b
    assert a != c
    assert "--seed 4" in (tmp_path / "a" / "README.md").read_text()


# The shipped model


def test_the_architecture(model, tokenizer):
    config = model.config
    assert config.model_type == "qwen3"
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (64, 3, 192)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.vocab_size == len(tokenizer)
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.slow
def test_the_model_does_what_its_card_says(script, model, tokenizer):
    card = (embedded.model_path() / "README.md").read_text()
    stated = {m[1]: float(m[2]) for m in re.finditer(r"^\| ([^|]+?) \| ([\d.]+) \|", card, re.MULTILINE)}
    assert f"{model.num_parameters():,} parameters" in card
    rows = {row.prompt: row for row in script.measure(model, tokenizer, problems=130, seed=1)}
    assert rows.keys() == stated.keys()
    # Other problems than the card's: three standard errors of 390 single samples are about eight points.
    for prompt, row in rows.items():
        assert row.success == pytest.approx(stated[prompt], abs=8), prompt
    student, reference, hindsight = (rows[name].success for name in ("student", "reference", "hindsight"))
    assert 33 < student < 49
    assert reference > student + 15
    assert hindsight > student + 15
    assert rows["hindsight, correct attempts"].success > rows["hindsight, failed attempts"].success + 15
    assert rows["student"].detailed > 97
    assert 6 < rows["reference"].terse < 20
