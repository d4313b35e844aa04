"""Mistakes of users in what a scenario names: rows, functions, models, earlier runs, and what the machine has not. All
of it is looked at before anything starts."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest
from mistakes import PRINTS, ROWS, SCENARIO, Files, Mistake, Place, check

if TYPE_CHECKING:
    from pathlib import Path


def rows(*lines: object) -> Files:
    """Of the dataset; a text is a line as it is."""
    return {"rows.jsonl": "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)}


def reward(text: str) -> Files:
    """The file of the reward function."""
    return {"rewards.py": text}


VERL = "def reward(data_source, solution_str, ground_truth, extra_info=None): return 1\n"
GOOD = {"prompt": "1+1=", "label": "2"}
EVALUATION = SCENARIO + "evaluation: {datasets: [{name: held, path: held.jsonl}]}\n"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHATS = "RUN data.chat_template=true"
WHOLE = struct.pack("<Q", 62) + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}' + b" " * 8 + b"\0" * 8

ROWS_TABLE = (
    Mistake(
        "rows that are not there", "RUN data.path=row.jsonl", ("data.path: there is no file", "beside it: rows.jsonl")
    ),
    Mistake(
        "rows of a kind that is not read",
        "RUN data.path=rows.csv",
        ("data.path", "cannot tell what kind of file", "rows.csv"),
        {"rows.csv": "a,b\n"},
    ),
    Mistake("no rows", "RUN", ("data.path: ", "rows.jsonl has no rows"), {"rows.jsonl": ""}),
    Mistake(
        "a row that is no JSON",
        "RUN",
        ("data.path: ", "rows.jsonl:2:2: malformed JSON", "data.skip_bad_rows"),
        rows(GOOD, "{prompt: 1}"),
    ),
    Mistake("one JSON list", "RUN", ("rows.jsonl:1: ", "one JSON object a line"), rows([GOOD])),
    Mistake(
        "another column for the prompt",
        "RUN",
        ("rows.jsonl:1: 'prompt' is missing", "question", "data.prompt_key"),
        rows({"question": "1+1=", "label": "2"}),
    ),
    Mistake(
        "another column for the label",
        "RUN",
        ("rows.jsonl:1: 'label' is missing", "answer", "data.label_key"),
        rows({"prompt": "1+1=", "answer": "2"}),
    ),
    Mistake(
        "a label key that is misspelt", "RUN data.label_key=lable", ("'lable' is missing", "did you mean 'label'?")
    ),
    Mistake("a label that is null", "RUN", ("rows.jsonl:1: 'label' is null",), rows({**GOOD, "label": None})),
    Mistake("an empty prompt", "RUN", ("rows.jsonl:2: 'prompt' is empty",), rows(GOOD, {**GOOD, "prompt": ""})),
    Mistake(
        "messages without a template",
        "RUN",
        ("rows.jsonl:1: ", "data.chat_template"),
        rows({**GOOD, "prompt": [{"role": "user", "content": "a"}]}),
    ),
    Mistake(
        "messages without roles",
        CHATS,
        ("rows.jsonl:1: message 0 of 'prompt'", "'role' and 'content'"),
        {"model/chat_template.jinja": TEMPLATE, **rows({**GOOD, "prompt": [{"from": "human", "value": "a"}]})},
    ),
    Mistake(
        "a prompt that is too long",
        "RUN",
        ("data.path: ", "rows.jsonl:2: the prompt has 200 tokens; at most 127 fit", "model.max_context"),
        rows(GOOD, {**GOOD, "prompt": "1" * 200}),
    ),
    Mistake(
        "a prompt far behind that is too long",
        "RUN",
        ("rows.jsonl:3001: the prompt has 200 tokens",),
        rows(*[GOOD] * 3000, {**GOOD, "prompt": "1" * 200}),
    ),
    Mistake(
        "prompts above a limit of one's own",
        "RUN data.max_prompt_tokens=3",
        ("rows.jsonl:1: the prompt has 4 tokens; at most 3 fit (data.max_prompt_tokens)",),
    ),
    Mistake(
        "characters that the tokenizer lacks",
        "RUN",
        ("rows.jsonl:1: the tokenizer refuses the text",),
        rows({**GOOD, "prompt": "你好"}),
    ),
    Mistake(
        "such characters in a stream",
        "RUN data.stream=true",
        ("rows.jsonl:1: the tokenizer refuses the text",),
        rows({**GOOD, "prompt": "你好"}),
    ),
    Mistake("rows that are not text", "RUN", ("rows.jsonl:1:1: not UTF-8",), {"rows.jsonl": b"\xff\xfe{\0}\0\n"}),
    Mistake(
        "Parquet that is none", "RUN data.path=rows.parquet", ("data.path: ", "rows.parquet"), {"rows.parquet": "PAR1"}
    ),
    Mistake(
        "gzip that is none", "RUN data.path=rows.jsonl.gz", ("data.path: ", "rows.jsonl.gz"), {"rows.jsonl.gz": ROWS}
    ),
    Mistake(
        "a slice of no rows",
        "RUN data.path=rows.jsonl@[100:200]",
        ("data.path: ", "rows.jsonl@[100:200] selects no row: there are 8"),
    ),
    Mistake("a slice that is none", "RUN data.path=rows.jsonl@[a:b]", ("data.path", "rows.jsonl@[a:b]")),
    Mistake("a task that is none", "RUN data.path=lines:many", ("data.path", "lines:many")),
    Mistake(
        "evaluation rows that are not there",
        "RUN",
        ("evaluation.datasets[0].path: there is no file", "held.jsonl"),
        {"s.yaml": EVALUATION},
    ),
    Mistake(
        "an evaluation row without a label",
        "RUN",
        ("evaluation.datasets[0].path: ", "held.jsonl:1: 'label' is missing"),
        {"s.yaml": EVALUATION, "held.jsonl": '{"prompt": "1"}\n'},
    ),
    Mistake(
        "an evaluation row that is too long",
        "RUN",
        ("evaluation.datasets[0].path: ", "held.jsonl:1: the prompt has 200 tokens"),
        {"s.yaml": EVALUATION, "held.jsonl": json.dumps({**GOOD, "prompt": "1" * 200}) + "\n"},
    ),
    Mistake(
        "no evaluation rows",
        "RUN",
        ("evaluation.datasets[0].path: ", "held.jsonl has no rows"),
        {"s.yaml": EVALUATION, "held.jsonl": ""},
    ),
    Mistake(
        "demonstrations without responses",
        "RUN learner.warm_start.path=rows.jsonl",
        ("learner.warm_start.path: ", "rows.jsonl:1: 'response' is missing"),
    ),
)
FUNCTIONS = (
    Mistake(
        "a reward file that is not there",
        "RUN reward.function=reward.py:reward",
        ("reward.function: ", "there is no file", "rewards.py"),
    ),
    Mistake(
        "a reward that is not in its file",
        "RUN reward.function=rewards.py:score",
        ("reward.function: ", "rewards.py: defines no 'score'; it has reward"),
    ),
    Mistake(
        "a syntax error in a reward",
        "RUN",
        ("reward.function: ", "rewards.py:1: not valid Python"),
        reward("def reward(response, label)\n    return 1\n"),
    ),
    Mistake(
        "a tab too many in a reward",
        "RUN",
        ("rewards.py:3: not valid Python",),
        reward("def reward(response):\n    x = 1\n\t\treturn x\n"),
    ),
    Mistake(
        "an import that is not installed",
        "RUN",
        (
            "reward.function: ",
            "ModuleNotFoundError: No module named 'math_verifier'",
            "(rewards.py:1)",
            "Install 'math_verifier'",
        ),
        reward("import math_verifier\ndef reward(response): return 1\n"),
    ),
    Mistake(
        "a name that a library lacks",
        "RUN",
        ("reward.function: ", "ImportError", "(rewards.py:1)"),
        reward("from json import parse\ndef reward(response): return 1\n"),
    ),
    Mistake(
        "a reward that asks for what there is not",
        "RUN",
        (
            "reward.function: ",
            "rewards.py:reward asks for 'completion'; a reward function may ask for prompt, response",
            "What others call completion is response here",
        ),
        reward("def reward(completion, label): return 1\n"),
    ),
    Mistake(
        "TRL's arguments of a reward",
        "RUN",
        ("asks for 'prompts'", "What others call prompts is prompt here"),
        reward("def reward(prompts, completions): return [1]\n"),
    ),
    Mistake(
        "verl's arguments of a reward",
        "RUN",
        ("asks for 'data_source'", "What others call data_source is metadata here"),
        reward(VERL),
    ),
    Mistake(
        "arguments by position",
        "RUN",
        ("asks for 'response' by position, and arguments are given by name",),
        reward("def reward(response, /): return 1\n"),
    ),
    Mistake(
        "a reward of groups for one sample",
        "RUN reward.per_group=false",
        ("asks for 'responses'", "set reward.per_group: true"),
        reward("def reward(responses): return []\n"),
    ),
    Mistake(
        "a file that ends the process",
        "RUN",
        ("reward.function: ", "rewards.py:reward: the process that loads it ended with exit code 3"),
        reward("import os\nos._exit(3)\ndef reward(response): return 1\n"),
    ),
    Mistake(
        "a file that calls exit",
        "RUN",
        ("reward.function: ", "SystemExit", "(rewards.py:1)"),
        reward("raise SystemExit('bye')\ndef reward(response): return 1\n"),
    ),
    Mistake(
        "a file that raises and prints much",
        "RUN",
        ("reward.function: ", "ZeroDivisionError: division by zero (rewards.py:3)"),
        reward(PRINTS + "x = 1 / 0\ndef reward(response): return 1\n"),
    ),
    Mistake(
        "a reward that is no function",
        "RUN",
        ("reward.function: ", "'reward' is int, which cannot be called"),
        reward("reward = 3\n"),
    ),
    Mistake(
        "a class that cannot be made",
        "RUN",
        ("reward.function: ", "TypeError", "missing 1 required positional argument: 'path'"),
        reward("class reward:\n    def __init__(self, path): ...\n    def __call__(self, response): return 1\n"),
    ),
    Mistake(
        "a filter with arguments of its own",
        "RUN filter.function=f.py:keep",
        ("filter.function: ", "asks for 'samples'; a filter function may ask for group, rewards"),
        {"f.py": "def keep(samples): return True\n"},
    ),
    Mistake(
        "a filter without its import",
        "RUN filter.sample_function=f.py:keep",
        ("filter.sample_function: ", "No module named 'absent'"),
        {"f.py": "import absent\ndef keep(sample): return True\n"},
    ),
    Mistake(
        "a curriculum with arguments of its own",
        "RUN prompt_source.priority=f.py:p",
        ("prompt_source.priority: ", "asks for 'difficulty'"),
        {"f.py": "def p(difficulty): return 1\n"},
    ),
    Mistake(
        "a hook that is async",
        "RUN learner.objective.advantage_function=f.py:a",
        ("learner.objective.advantage_function: ", "expected a plain function, found one with async"),
        {"f.py": "async def a(given, options): ...\n"},
    ),
    Mistake(
        "a loss without its import",
        "RUN learner.objective=f.py:loss",
        ("learner.objective", "No module named 'absent'"),
        {"f.py": "import absent\ndef loss(tokens, options): ...\n"},
    ),
    Mistake(
        "a policy that is no class",
        "RUN staleness.policy=f.py:Mine staleness.max_staleness=1 staleness.update_mode=drain",
        ("staleness.policy: ", "expected a class or a function"),
        {"f.py": "Mine = 3\n"},
    ),
    Mistake(
        "an episode without its import",
        "RUN episode.kind=function episode.generate=f.py:play",
        ("episode.generate: ", "No module named 'absent'"),
        {"f.py": "import absent\nasync def play(episode): ...\n"},
    ),
    Mistake(
        "an evaluation's reward with arguments of its own",
        "RUN",
        ("evaluation.datasets[0].reward.function: ", "asks for 'answer'"),
        {
            "s.yaml": SCENARIO
            + "evaluation: {datasets: [{name: held, path: rows.jsonl, reward: {function: other.py:score}}]}\n",
            "other.py": "def score(response, answer): return 1\n",
        },
    ),
)
MODELS = (
    Mistake("a model that is not there", "RUN model.path=modle", ("model.path: ", "modle: no such folder")),
    Mistake(
        "a file as model", "RUN model.path=model/config.json", ("model.path: ", "config.json: a file, not a folder")
    ),
    Mistake("no config", "RUN", ("model.path: ", "missing config.json"), {"model/config.json": None}),
    Mistake(
        "a config that is no JSON",
        "RUN",
        ("model.path: ", "config.json: not the JSON that belongs there: Input data was truncated", "copy it anew"),
        {"model/config.json": "{"},
    ),
    Mistake(
        "a config without sizes",
        "RUN",
        ("model.path: ", "config.json: lacks vocab_size, hidden_size, num_hidden_layers"),
        {"model/config.json": "{}"},
    ),
    Mistake(
        "an architecture that is not known",
        "RUN",
        ("model.path: ", "the torch engine serves LlamaForCausalLM", "found GPT2LMHeadModel"),
        {"model/config.json": {"architectures": ["GPT2LMHeadModel"]}},
    ),
    Mistake(
        "a context that is too long",
        "RUN model.max_context=4096",
        ("model.max_context: 4096 tokens are more than", "max_position_embeddings is 512"),
    ),
    Mistake("no weights", "RUN", ("model.path: ", "missing model.safetensors"), {"model/model.safetensors": None}),
    Mistake(
        "weights of pickles only",
        "RUN",
        ("model.path: ", "its weights are pickles (pytorch_model.bin)", "save_pretrained"),
        {"model/model.safetensors": None, "model/pytorch_model.bin": "x"},
    ),
    Mistake(
        "weights that were cut short",
        "RUN",
        (
            "model.path: ",
            "model.safetensors was cut short or changed: its header describes 78 bytes, found 70",
            "download it again",
        ),
        {"model/model.safetensors": WHOLE[:70]},
    ),
    Mistake(
        "weights that end in their header",
        "RUN",
        ("model.path: ", "is no safetensors file, or it was cut short (20 bytes)"),
        {"model/model.safetensors": WHOLE[:20]},
    ),
    Mistake(
        "a pointer for weights",
        "RUN",
        ("model.path: ", "model.safetensors is a pointer of Git LFS", "git lfs pull"),
        {"model/model.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"},
    ),
    Mistake(
        "an index of weights that are not there",
        "RUN",
        ("model.path: ", "missing two.safetensors"),
        {"model/model.safetensors.index.json": '{"weight_map": {"a": "two.safetensors"}}'},
    ),
    Mistake(
        "an index that is no JSON",
        "RUN",
        ("model.path: ", "model.safetensors.index.json: not the JSON that belongs there"),
        {"model/model.safetensors.index.json": "["},
    ),
    Mistake("no tokenizer", "RUN", ("model.path: ", "missing tokenizer.json"), {"model/tokenizer.json": None}),
    Mistake(
        "a tokenizer that is no JSON",
        "RUN",
        ("model.path: ", "tokenizer.json cannot be read"),
        {"model/tokenizer.json": "{"},
    ),
    Mistake(
        "a tokenizer without an end",
        "RUN",
        ("model.path: ", "names no end-of-sequence token", "eos_token"),
        {
            "model/tokenizer_config.json": "{}",
            "model/generation_config.json": None,
            "model/config.json": {"eos_token_id": None},
        },
    ),
    Mistake(
        "an end that the model has not",
        "RUN",
        ("model.path: ", "end-of-sequence token is number 99999", "vocab_size of config.json is 79"),
        {"model/tokenizer_config.json": "{}", "model/generation_config.json": {"eos_token_id": 99999}},
    ),
    Mistake(
        "a padding that the model has not",
        "RUN",
        ("model.path: ", "the padding token is number 500", "vocab_size"),
        {
            "model/tokenizer_config.json": '{"eos_token": "<eos>"}',
            "model/generation_config.json": {"pad_token_id": 500},
        },
    ),
    Mistake(
        "an end that the tokenizer has not",
        "RUN",
        ("model.path: ", "tokenizer.json has no token '<|im_end|>'", "eos_token"),
        {"model/tokenizer_config.json": '{"eos_token": "<|im_end|>"}'},
    ),
    Mistake("no chat template", CHATS, ("model.path: ", "has no chat template", "set data.chat_template: false")),
    Mistake(
        "a chat template that is broken",
        CHATS,
        ("model.path: ", "the chat template is broken at its line 2", "chat_template.jinja"),
        {"model/chat_template.jinja": "a\n{% for message in messages %}{{ message.content }"},
    ),
    Mistake(
        "a chat template that refuses roles",
        CHATS,
        ("rows.jsonl:1: the chat template refuses the messages: no", "data.skip_bad_rows"),
        {"model/chat_template.jinja": "{% if messages[0].content == '0+1=' %}{{ raise_exception('no') }}{% endif %}a"},
    ),
    Mistake(
        "a prompt that a template makes too long",
        CHATS,
        ("rows.jsonl:1: the prompt has 2", "at most 127 fit"),
        {"model/chat_template.jinja": TEMPLATE + "1" * 200},
    ),
    Mistake(
        "rows that a made model cannot read",
        "RUN model.path=null model.make=xs",
        ("rows.jsonl:1: the tokenizer refuses the text",),
        rows({**GOOD, "prompt": "é"}),
    ),
    Mistake(
        "a teacher that is not there",
        "RUN teacher.model.path=absent learner.objective.opd_kl_coef=0.1",
        ("teacher.model.path: ", "absent: no such folder"),
    ),
)
RUN = {
    "runs/mine-1/run.lock": "",
    "runs/mine-1/scenario.yaml": SCENARIO.replace("path: ", "path: ../../").replace("rewards.py:", "../../rewards.py:"),
    "runs/mine-1/run.json": json.dumps(
        {
            "name": "mine",
            "pid": 2**22 + 1,
            "start_ticks": 0,
            "boot_id": "",
            "started_at": 1.0,
            "state": "completed",
            "exit_code": 0,
            "ended_at": 2.0,
        }
    ),
}
RUNS = (
    Mistake("resume of a run that is done", "resume", ("completed; to train more, raise run.num_steps",), RUN, code=0),
    Mistake(
        "resume with other rows",
        "resume runs/mine-1 data.path=rows.jsonl",
        (
            "override 'data.path=rows.jsonl': cannot change in a run that goes on",
            "its groups were drawn from this dataset",
            "for another run: penstock run",
        ),
        RUN,
    ),
    Mistake(
        "resume with another rate",
        "resume runs/mine-1 learner.learning_rate=1",
        ("cannot change in a run that goes on", "would come out otherwise", "given was 1"),
        RUN,
    ),
    Mistake(
        "resume with a key that is misspelt",
        "resume runs/mine-1 engines.cuont=2",
        ("engines.cuont: no such key; did you mean 'count'?",),
        RUN,
    ),
    Mistake(
        "resume with a number in words",
        "resume runs/mine-1 run.num_steps=more",
        ("run.num_steps: must be a whole number", "found 'more'"),
        RUN,
    ),
    Mistake(
        "resume by a key alone",
        "resume runs/mine-1 engines.count",
        ("override 'engines.count': expected KEY=VALUE",),
        RUN,
    ),
    Mistake(
        "resume of a damaged run",
        "resume runs/mine-1",
        ("mine-1/run.json: cannot read it",),
        {**RUN, "runs/mine-1/run.json": "{"},
    ),
    Mistake(
        "resume without its scenario",
        "resume runs/mine-1",
        ("mine-1/scenario.yaml: cannot read this scenario",),
        {**RUN, "runs/mine-1/scenario.yaml": None},
    ),
    Mistake(
        "evaluate before any checkpoint",
        "evaluate runs/mine-1 --data rows.jsonl",
        ("runs/mine-1: the run has written no checkpoint yet",),
        RUN,
    ),
    Mistake(
        "convert of a version that was not kept",
        "convert runs/mine-1 out --version 7",
        ("has no checkpoint of version 7; there are 26",),
        {**RUN, "runs/mine-1/checkpoints/version-0000026/config.json": "{}"},
    ),
    Mistake("SQL that is none", "ledger runs/mine-1 --sql SELEC", ("runs/mine-1",), RUN),
)
MACHINE = (
    Mistake(
        "a GPU that is not there",
        "RUN engines.device=cuda:99",
        ("engines.device: cuda:99 is not there", "set it to cpu or auto"),
    ),
    Mistake(
        "a learner's GPU that is not there", "RUN learner.device=cuda:99", ("learner.device: cuda:99 is not there",)
    ),
    Mistake("a device that is none", "RUN engines.device=gpu", ("engines.device", "found 'gpu'")),
    Mistake("runs in a file", "RUN run.folder=rows.jsonl", ("rows.jsonl", "cannot")),
    Mistake(
        "a port that is none", "RUN observability.metrics_port=99999", ("observability.metrics_port", "found 99999")
    ),
    Mistake(
        "no SGLang",
        "RUN engines.backend=sglang",
        ("engines.backend: sglang: no environment of SGLang", "penstock env sglang"),
    ),
)
TABLE = (*ROWS_TABLE, *FUNCTIONS, *MODELS, *RUNS, *MACHINE)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("right"))


@pytest.fixture(autouse=True)
def no_environments(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ENVS", str(tmp_path_factory.getbasetemp() / "no_environments"))


@pytest.mark.parametrize("mistake", TABLE, ids=[each.name for each in TABLE])
def test_a_mistake_is_one_message(
    mistake: Mistake, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(mistake, place.copied(tmp_path, mistake.files), monkeypatch, capsys)
