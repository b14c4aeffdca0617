"""Models, tokenizers, texts and arguments that nothing can be recorded from, as `record` is given them."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import tiny
import torch
import transformers
from malformed import Case
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

ARTICLE = " ".join(f"The {word} lamp stands by the old {word} gate, and nobody asks why." for word in
                   "red blue green white black brown grey pink gold silver amber violet".split())  # fmt: skip
NEEDLE = "The pass number of the island school is 388328, and Doctor Quist knows it. "  # of seed 0
PROBLEM = {"problem": "What is 1 + 1?", "solution": "It is 2.", "answer": "2"}
NIAH = ("--regime", "niah", "--text", "greedy", "--length", "700", "--filler", "article.txt", "--steps", "3")
COT = ("--regime", "cot", "--text", "greedy", "--steps", "3")


@functools.cache
def model() -> Path:
    """A folder with a tiny random llama and a tokenizer of single bytes, with a chat template."""
    folder = Path(tempfile.mkdtemp()) / "model"
    tiny.model("llama", vocab_size=256, max_position_embeddings=2000).save_pretrained(folder)
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(BPE(alphabet, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:\n"
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template).save_pretrained(folder)
    return folder


def place(folder: Path) -> Path:
    """A copy of the model, and an article, in the folder of a case."""
    (folder / "article.txt").write_text(ARTICLE)
    return shutil.copytree(model(), folder / "model")


def changed(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: change(place(folder))


def config(**values: object) -> Callable[[Path], object]:
    """The model with another configuration."""

    def to(path: Path) -> None:
        stated = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(stated | values))

    return changed(to)


def other(made: transformers.PretrainedConfig) -> Callable[[Path], object]:
    """A model of another kind in its place."""

    def to(path: Path) -> None:
        (path / "model.safetensors").unlink()
        transformers.AutoModelForCausalLM.from_config(made).eval().save_pretrained(path)

    return changed(to)


def template(text: str) -> Callable[[Path], object]:
    return changed(lambda path: (path / "chat_template.jinja").write_text(text))


def half(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def pickled(path: Path) -> None:
    """Weights as pickles only."""
    (path / "model.safetensors").unlink()
    torch.save({}, path / "pytorch_model.bin")


def not_a_number(path: Path) -> None:
    made = tiny.model("llama", vocab_size=256, max_position_embeddings=2000)
    made.lm_head.weight.data[3] = float("nan")
    made.save_pretrained(path)


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    """The model, and a text of its own beside it."""

    def to(folder: Path) -> None:
        place(folder)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return to


def rows(*problems: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in problems)


def begun(folder: Path) -> None:
    """A recording that was stopped, begun with other arguments."""
    place(folder)
    (folder / "out.part").mkdir()
    (folder / "out.part" / "start.json").write_text('{"k": 7}')


def unfinished(folder: Path) -> None:
    place(folder)
    (folder / "out.part").mkdir()


def damaged(folder: Path) -> None:
    unfinished(folder)
    (folder / "out.part" / "start.json").write_text("{")


def taken(folder: Path) -> None:
    place(folder)
    (folder / "out").mkdir()
    (folder / "out" / "mine.txt").write_text("mine")


def in_the_way(folder: Path) -> None:
    place(folder)
    (folder / "file").write_text("x")


def cases() -> Iterator[Case]:
    base = ("record", "--model", "model", "--out", "out")
    for what, make, names, way in MODELS:
        yield Case("record", what, names, way, (*base, *COT), make=make)
    for what, more, names, way in ARGUMENTS:
        yield Case("record", what, names, way, (*base, *more), make=place)
    for what, make, more, names, way in FILES:
        yield Case("record", what, names, way, (*base, *more), make=make)


NO_DECODER, SAVE = "cannot load model", "save a decoder and its tokenizer there"
MAMBA = transformers.MambaConfig(vocab_size=256, hidden_size=32, state_size=4, num_hidden_layers=2)
BLOOM = transformers.BloomConfig(vocab_size=256, hidden_size=32, n_layer=2, n_head=4)
BERT = transformers.BertConfig(
    vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
)
SMALL = transformers.LlamaConfig(**{**tiny.SIZE, "vocab_size": 20})
QUANTISED = {"quantization_config": {"quant_method": "gptq", "bits": 4}}

MODELS = [
    (
        "a folder without a configuration",
        changed(lambda p: (p / "config.json").unlink()),
        "model holds no model",
        "known",
    ),
    ("a configuration that is no JSON", changed(lambda p: (p / "config.json").write_text("{")), NO_DECODER, SAVE),
    ("a configuration of an unknown kind", config(model_type="novel"), NO_DECODER, SAVE),
    (
        "a configuration that asks for code of its own",
        config(model_type="novel", auto_map={"AutoConfig": "a.B"}),
        NO_DECODER,
        SAVE,
    ),
    (
        "a configuration with a layer more than weights",
        config(num_hidden_layers=4),
        "model lacks weights, model.layers.3",
        "save_pretrained",
    ),
    ("a configuration with heads in unequal groups", config(num_key_value_heads=3), NO_DECODER, SAVE),
    ("a configuration with no heads", config(num_attention_heads=0), NO_DECODER, SAVE),
    ("a vocabulary smaller than its tokenizer's", other(SMALL), "token ids that model does not know", "this tokenizer"),
    ("a configuration of quantised weights", config(**QUANTISED), "model holds quantised weights", "dequantise them"),
    (
        "a folder without weights",
        changed(lambda p: (p / "model.safetensors").unlink()),
        "model holds no *.safetensors",
        "save",
    ),
    ("weights as pickles only", changed(pickled), "model holds no *.safetensors", "save_pretrained"),
    ("weights cut in half", changed(half), NO_DECODER, SAVE),
    ("weights that are text", changed(lambda p: (p / "model.safetensors").write_text("hello" * 99)), NO_DECODER, SAVE),
    ("weights that give no numbers", changed(not_a_number), "the logits of step 0 are not numbers", "float32"),
    ("a folder without a tokenizer", changed(lambda p: [f.unlink() for f in p.glob("*token*")]), NO_DECODER, SAVE),
    ("a tokenizer that is no JSON", changed(lambda p: (p / "tokenizer.json").write_text("{")), NO_DECODER, SAVE),
    ("a model without attention", other(MAMBA), NO_DECODER, SAVE),
    ("a model with an attention of its own", other(BLOOM), NO_DECODER, SAVE),
    ("an encoder", other(BERT), "this model reads what comes later", "only a decoder"),
    ("a chat template that is not closed", template("{% for m in messages %}"), "chat template fails", "use another"),
    (
        "a chat template that refuses the turns",
        template("{{ raise_exception('no turns') }}"),
        "(no turns)",
        "use another",
    ),
    (
        "a chat template that reaches for the interpreter",
        template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        "chat template fails",
        "use another",
    ),
    ("a chat template that drops what is said", template("hello"), "stands 0 times", "change it"),
]

ARGUMENTS = [
    ("a regime that is not known", ("--regime", "naih"), "unknown regime 'naih'", "did you mean niah"),
    ("a model that is not known", (*COT, "--model", "smollm3"), "unknown model 'smollm3'", "did you mean smollm2-135m"),
    (
        "a model's folder that is not there",
        (*COT, "--model", "no/model"),
        "no/model holds no model",
        "the known ones are",
    ),
    (
        "a file in place of a model",
        (*COT, "--model", "./article.txt"),
        "article.txt holds no model",
        "the known ones are",
    ),
    ("a type that is not known", (*COT, "--dtype", "float12"), "unknown dtype 'float12'", "did you mean"),
    ("a device that is not there", (*COT, "--device", "cuda:99"), "device 'cuda:99'", "use cpu or auto"),
    ("a device that is none", (*COT, "--device", "toaster"), "device 'toaster'", "use cpu or auto"),
    ("no steps", (*COT, "--steps", "0"), "steps=0", "count from 1"),
    ("a negative number of steps", (*COT, "--steps", "-3"), "steps=-3", "count from 1"),
    ("steps in words", (*COT, "--steps", "few"), "--steps: invalid int value: 'few'", "see"),
    (
        "more steps than the context holds",
        (*COT, "--steps", "2000"),
        "2000 steps exceed the 2000 positions",
        "fewer steps",
    ),
    ("no weights a step", (*COT, "--k", "0"), "k=0", "count from 1"),
    ("more weights than any row has", (*COT, "--k", "1" + "0" * 18), "not 1" + "0" * 18, "at most 1000000"),
    ("a seed that no sampler takes", (*COT, "--text", "sampled", "--seed", "9" * 20), "9" * 20, "are at most"),
    ("a negative seed", (*COT, "--seed", "-1"), "seed -1", "from 0 up"),
    ("a text that is none of the three", (*COT, "--text", "loud"), "'loud'", "choose from"),
    ("a length of nothing", (*NIAH, "--length", "0"), "length 0", "at least 1"),
    ("a negative length", (*NIAH, "--length", "-5"), "length -5", "at least 1"),
    ("a length too short for the question", (*NIAH, "--length", "60"), "article.txt", "larger length"),
    ("a length beyond the context", (*NIAH, "--length", "9000"), "length 9000", "ask for less"),
    ("a length beyond the text", (*NIAH, "--length", "1900"), "article.txt", "give a longer text"),
    ("a length for problems", (*COT, "--length", "100"), "length 100", "cot has none, leave it out"),
    ("a depth beyond the end", (*NIAH, "--depth", "1.5"), "depth 1.5", "from 0 to 1"),
    ("a depth that is not a number", (*NIAH, "--depth", "nan"), "depth nan", "from 0 to 1"),
    ("a depth for problems", (*COT, "--depth", "0.5"), "depth 0.5", "cot has none, leave it out"),
    (
        "problems for an article",
        (*NIAH, "--problems", "article.txt"),
        "problems article.txt",
        "niah has none, leave it out",
    ),
    ("an article for problems", (*COT, "--filler", "article.txt"), "filler article.txt", "cot has none, leave it out"),
    ("a text that is not there", (*NIAH, "--filler", "no.txt"), "filler no.txt", "cannot be read"),
    ("a folder in place of a text", (*NIAH, "--filler", "model"), "filler model", "cannot be read"),
    ("problems that are not there", (*COT, "--problems", "no.jsonl"), "problems no.jsonl", "cannot be read"),
    ("a log with no name", (*COT, "--out"), "--out: expected one argument", "see"),
]

FILES = [
    ("an empty text", text("t", ""), (*NIAH, "--filler", "t"), "filler t is empty", "give a text"),
    ("a text of white space", text("t", " \n\n "), (*NIAH, "--filler", "t"), "filler t is empty", "give a text"),
    ("a text that is not UTF-8", text("t", b"\xff\xfe\x00"), (*NIAH, "--filler", "t"), "filler t", "UTF-8"),
    (
        "a text that holds the needle already",
        text("t", NEEDLE * 20),
        (*NIAH, "--filler", "t"),
        "times in the text, not once",
        "change it",
    ),
    ("no problems", text("p", ""), (*COT, "--problems", "p"), "problems p is empty", "one JSON object per line"),
    (
        "problems that are no JSON",
        text("p", rows(PROBLEM) + "{\n"),
        (*COT, "--problems", "p"),
        "p, line 2",
        "is needed",
    ),
    ("a problem that is a list", text("p", rows([1])), (*COT, "--problems", "p"), "p, line 1", "is needed"),
    (
        "a problem without a solution",
        text("p", rows({"problem": "x", "answer": "y"})),
        (*COT, "--problems", "p"),
        "p, line 1",
        "is needed",
    ),
    (
        "a problem with a number for an answer",
        text("p", rows(PROBLEM | {"answer": 2})),
        (*COT, "--problems", "p"),
        "p, line 1",
        "is needed",
    ),
    (
        "a problem with nothing in it",
        text("p", rows(PROBLEM | {"problem": " "})),
        (*COT, "--problems", "p"),
        "p, line 1",
        "is needed",
    ),
    (
        "a problem stated twice",
        text("p", rows(PROBLEM, PROBLEM)),
        ("--regime", "cot", "--problems", "p"),
        "stands 2 times",
        "change it",
    ),
    ("problems nested 100,000 deep", text("p", "[" * 100_000), (*COT, "--problems", "p"), "p, line 1", "is needed"),
    ("a place that is taken", taken, COT, "out exists already", "choose another name"),
    (
        "a place below a file",
        in_the_way,
        (*COT, "--out", "file/out"),
        "file/out cannot be written",
        "choose another place",
    ),
    ("an unfinished recording", unfinished, COT, "out.part holds an unfinished recording", "resume it"),
    (
        "an unfinished recording of something else",
        begun,
        (*COT, "--resume"),
        "out.part was begun with another",
        "remove it",
    ),
    (
        "an unfinished recording whose start is damaged",
        damaged,
        (*COT, "--resume"),
        "start.json is damaged",
        "begin anew",
    ),
    (
        "a folder that is no log, to go on with",
        taken,
        (*COT, "--resume"),
        "out: manifest.json is missing",
        "record it again",
    ),
]
