"""Names that people bring along: shipped scenarios, and what other systems call a key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.messages.errors import UserFault
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.keys import block_paths, shape_at
from penstock.runtime.scenario.shipped import find_scenario, shipped_scenarios
from penstock.runtime.scenario.terms import TERMS

SCENARIOS = Path(__file__).parents[2] / "scenarios"
SHARED = {"batch_size"}
"""Terms that are also keys of ours, of blocks where nobody begins."""


@pytest.mark.parametrize("key", sorted({key for key, _ in TERMS.values()}))
def test_a_term_leads_to_a_key_that_there_is(key: str) -> None:
    shape_at(tuple(key.split(".")))


def test_no_term_hides_a_key_of_ours() -> None:
    ours = {field for _, struct in block_paths() for field in struct.__struct_fields__}
    assert ours & TERMS.keys() == SHARED
    assert all(term == term.lower() for term in TERMS)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lr=1e-5", "what others call lr is learner.learning_rate here"),
        ("learner.batch_size=8", "is learner.groups_per_batch here (prompts a step"),
        ("learner.objective.beta=0.1", "is learner.objective.kl_coef here (for dpo it is learner.objective.dpo_beta)"),
        ("optim=adamw", "is learner.optimizer here"),
        ("sampling.Num-Generations=8", "is sampling.samples_per_group here"),
        ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n: no such key; what others call n is sampling."),
        ("+critic.optim.lr=1", "what others call critic.optim.lr is learner.objective.critic_learning_rate here"),
        ("actor_rollout_ref.rollout.top_p=1", "did you mean sampling.top_p?"),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3",
            "what others have in engine_kwargs.sglang is in engines.sglang here",
        ),
        ("trainer.critic_warmup=0", "no such key, and none is needed: the policy is trained from the first batch on"),
        ("actor.model.path=a", "actor.model.path: no such key here; did you mean model.path?"),
        ("use_vllm=true", "what others call use_vllm is engines.backend here (torch or sglang)"),
        ("trainer.project_name=sums", "is observability.trackers here (among the options of wandb)"),
        ("trainer.logger=wandb", "is observability.trackers here (a list of blocks)"),
        ("learner.deepspeed=zero3.json", "is learner.parallel here (fsdp or ddp)"),
        ("push_to_hub=true", "no such key, and none is needed: a checkpoint is a folder"),
    ],
)
def test_a_term_of_other_systems_is_understood(override: str, said: str) -> None:
    with pytest.raises(UserFault, match="no such key") as caught:
        load_scenario(SCENARIOS / "sync.yaml", [override])
    assert said in str(caught.value)


OTHERS = {
    "areal.yaml": """
experiment_name: gsm8k-grpo
tokenizer_path: ${actor.path}
allocation_mode: sglang:d4p1t1+d4p1t1
rollout: {max_concurrent_rollouts: 256, max_head_offpolicyness: 2}
gconfig: {n_samples: 4, max_new_tokens: 1024}
actor:
  path: Qwen/Qwen2.5-1.5B-Instruct
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer: {type: adam, lr: 1.70e-5, warmup_steps_proportion: 0.001}
  eps_clip: 0.4
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: true
  behav_imp_weight_cap: 5.0
train_dataset: {batch_size: 256, path: openai/gsm8k, max_length: 1024}
saver: {freq_steps: 10}
""",
    "prime_rl.toml": """
max_steps = 200
seq_len = 8192
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[ckpt]
interval = 100
[model]
name = "PrimeIntellect/Qwen3-1.7B"
[trainer.optim]
type = "muon"
lr = 1e-6
[orchestrator]
batch_size = 512
group_size = 16
max_off_policy_steps = 8
[[orchestrator.train.env]]
name = "wordle"
[orchestrator.train.sampling]
max_completion_tokens = 1024
""",
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_system_is_answered_key_by_key(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(OTHERS[name])
    with pytest.raises(UserFault) as caught:
        load_scenario(file)
    lines = str(caught.value).splitlines()
    assert len(lines) > 10
    assert [line for line in lines if not re.search(r"what others call .* here|did you mean", line)] == []


def test_a_scenario_may_be_toml(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[run]\nname = "mine"\n[model]\nmake = "xs"\n[data]\npath = "lines:8"\n[learner]\nlearning_rate = 1e-3\n'
    )
    scenario = load_scenario(file, ["run.num_steps=3"])
    assert (scenario.run.name, scenario.run.num_steps, scenario.learner.learning_rate) == ("mine", 3, 1e-3)
    for text, said in (
        ("[run]\nname = mine\n", "not valid TOML: Invalid value (at line 2"),
        ("[run]\nseed = nan", "found"),
    ):
        file.write_text(text)
        with pytest.raises(UserFault) as caught:
            load_scenario(file)
        assert said in str(caught.value)


def test_shipped_scenarios_are_found_by_name_and_files_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {*SCENARIOS.resolve().glob("*.yaml"), *SCENARIOS.resolve().glob("examples/*.yaml")}
    assert set(shipped_scenarios().values()) == files
    assert find_scenario(Path("quickstart")) == SCENARIOS.resolve() / "quickstart.yaml"
    assert find_scenario(Path("examples/retool")) == find_scenario(Path("retool"))
    (tmp_path / "sync").mkdir()  # a folder of that name is in nobody's way
    assert find_scenario(Path("sync")).name == "sync.yaml"
    (tmp_path / "quickstart").write_text("run: {name: mine}")
    assert find_scenario(Path("quickstart")) == Path("quickstart")
    (tmp_path / "mine.yaml").write_text("run: {name: mine}")
    with pytest.raises(UserFault, match=r"mine: no such file, .*; did you mean mine\.yaml\?"):
        find_scenario(Path("mine"))


PAGES = ("from_trl", "from_verl", "hyperparameters")


def lines_of(page: str) -> list[str]:
    return (SCENARIOS.parent / "docs" / f"{page}.md").read_text().splitlines()


@pytest.mark.parametrize("page", PAGES)
def test_every_key_that_a_page_names_is_there(page: str) -> None:
    ours = {path[0] for path, _ in block_paths() if path}
    rows = [line.rpartition(" | ")[2] if page == "from_verl" else line for line in lines_of(page)]
    named = {found for row in rows for found in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)", row)}
    keys = {key for key in named if key.split(".")[0] in ours and not key.endswith((".py", ".jsonl", ".md"))}
    assert len(keys) > 10
    for key in sorted(keys):
        shape_at(tuple(key.split(".")))


@pytest.mark.parametrize("page", ["from_trl", "from_verl"])
def test_a_page_says_of_a_term_what_the_message_says(page: str) -> None:
    num_compared = 0
    for theirs, *ours in (line.split(" | ") for line in lines_of(page) if line.startswith("| `")):
        for term in re.findall(r"`(?:[\w.]+\.)?(\w+)`", theirs):
            if term in TERMS:
                assert TERMS[term][0].removeprefix("learner.objective.") in ours[0], term
                num_compared += 1
    assert num_compared > 10


SAID_OTHERWISE = {"resume_from_checkpoint", "log_completions", "model"}
"""Of the pages: what is no key here, or a block."""


@pytest.mark.parametrize("page", ["from_trl", "from_verl"])
def test_each_name_of_a_page_is_answered_with_a_key(page: str) -> None:
    theirs = [
        name for line in lines_of(page) if line.startswith("| `") for name in line.split(" | ")[0].split("`")[1::2]
    ]
    names = {name.partition("=")[0] for name in theirs if re.fullmatch(r"[a-z][a-z_.]+(=\S*)?", name)} - SAID_OTHERWISE
    assert len(names) > 20
    for name in sorted(names):
        with pytest.raises(UserFault) as caught:
            load_scenario(SCENARIOS / "sync.yaml", [f"{name}=1"])
        assert re.search(r"what others call .* here|did you mean [\w.]+\.", str(caught.value)), str(caught.value)


def test_all_unknown_keys_are_told_at_once() -> None:
    with pytest.raises(UserFault) as caught:
        load_scenario(
            SCENARIOS / "sync.yaml",
            ["run.sed=1", "trainer.nnodes=2", "trainer.x=1", *(f"a{n}.b=1" for n in range(220))],
        )
    first, second, third, *_, last = str(caught.value).splitlines()
    assert first == "override 'run.sed=1': run.sed: no such key; did you mean 'seed'?"
    assert second.startswith("override 'trainer.nnodes=2': trainer.nnodes: no such key; what others call nnodes is ")
    assert third == "override 'trainer.x=1': trainer.x: no such key, and none is known by this name"
    assert last == "… and 23 more"
