"""Scenarios: what is refused, how it is said, and what is filled in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from penstock.backends.engines.options import group_of, num_engines, num_slots, options_of
from penstock.backends.protocol import Capability
from penstock.messages.errors import UserFault
from penstock.messages.training import UpdateMode
from penstock.runtime.scenario import Scenario, broken_rule, dump_scenario, load_scenario
from penstock.runtime.scenario.capabilities import lacking
from penstock.runtime.scenario.resolve import resolve

SHIPPED = sorted((Path(__file__).parents[2] / "scenarios").glob("*.yaml"))
MINIMAL = """\
run:
  name: example
data:
  path: lines:100
model:
  make: xs
"""


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    file = tmp_path / "example.yaml"
    file.write_text(MINIMAL)
    return file


def refusal(file: Path, text: str | None = None, *overrides: str) -> str:
    """The message with which a scenario is refused."""
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserFault) as caught:
        load_scenario(file, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_scenarios_load_and_their_dump_loads_to_the_same(file: Path, tmp_path: Path) -> None:
    scenario = load_scenario(file)
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump_scenario(scenario))
    assert load_scenario(dumped) == scenario


@pytest.mark.parametrize("text", ["1e5", "1E-5", "09", "+1", "null", "true", "1e400", "# x"])
def test_a_text_that_looks_like_something_else_stays_one_when_it_is_written(text: str, scenario_file: Path) -> None:
    scenario = load_scenario(scenario_file, (f"sampling.stop=['{text}']", f"data.metadata={{level: '{text}'}}"))
    for is_short in (False, True):
        scenario_file.write_text(dump_scenario(scenario, is_short=is_short))
        assert load_scenario(scenario_file) == scenario
    toml = scenario_file.with_suffix(".toml")
    toml.write_text(
        f'run = {{name = "x"}}\ndata = {{path = "lines:9", metadata = {{level = "{text}"}}}}\nmodel = {{make = "xs"}}\n'
    )
    assert load_scenario(toml).data.metadata == {"level": text}


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_scenarios_are_short_enough_to_read(file: Path) -> None:
    assert len(file.read_text().splitlines()) < 40


@pytest.mark.parametrize("other", ["one_step_off", "fully_async"])
def test_the_regimes_differ_in_the_staleness_block_only(other: str) -> None:
    texts = {file.stem: file.read_text() for file in SHIPPED}

    def without_staleness(text: str) -> str:
        head, _, rest = text.partition("\nstaleness:\n")
        return head + rest[rest.index("\n\n") :]

    assert without_staleness(texts["sync"]) == without_staleness(texts[other])
    assert texts["sync"] != texts[other]


@pytest.mark.parametrize(
    ("extra", "line", "said"),
    [
        ("stalenes: {}\n", 7, "stalenes: no such key; did you mean 'staleness'?"),
        ("staleness:\n  max_stalenes: 1\n", 8, "staleness.max_stalenes: no such key; did you mean 'max_staleness'?"),
        (
            "learner:\n  objective: {zeta: 1, clip_lo: 0.2}\n",
            8,
            "learner.objective.zeta: no such key; the keys of learner.objective are name, clip_low",
        ),
        ("sampling:\n  groups_per_batch: 8\n", 8, "no such key here; did you mean learner.groups_per_batch?"),
        ("engines:\n  simulated:\n    token: 1\n", 9, "engines.simulated.token: no such key; did you mean 'token_s'?"),
    ],
)
def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_key(
    scenario_file: Path, extra: str, line: int, said: str
) -> None:
    message = refusal(scenario_file, MINIMAL + extra)
    assert message.startswith(f"{scenario_file}:{line}: ")
    assert said in message


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("staleness: {max_staleness: 2000}", "must be a whole number from 0 to 1024, or null; found 2000"),
        ("staleness: {target_outstanding: lots}", "must be auto, or a whole number, at least 1; found 'lots'"),
        ("staleness: {update_mode: instant}", "must be drain, interrupt or in_flight, or null; found 'instant'"),
        ("sampling: {temperature: hot}", "must be a number from 0 to 10; found 'hot'"),
        ("sampling: {top_p: 0}", "must be a number, above 0 and at most 1; found 0"),
        ("sampling: {stop: end}", "must be a list, each item a string; found 'end'"),
        ("sampling: {stop_token_ids: [1, x]}", "sampling.stop_token_ids[1]: must be a whole number; found 'x'"),
        ("learner: {betas: [0.9]}", "must be a list of 2 items, each a number from 0 to 1; found [0.9]"),
        ("learner: {warm_start: yes}", "must be a block of keys, or null; found 'yes'"),
        ("learner: {warm_start: {num_steps: 5}}", "learner.warm_start.path: missing; it has no default"),
        ("runtime: {encrypt: on}", "must be true or false; found 'on'"),
        ("engines: {count: 2.0}", "must be a whole number from 1 to 65536; found 2.0"),
        ("engines: 2", "engines: must be a block of keys; found 2"),
        ("observability: {metrics_host: my-host}", "metrics_host: must be an address of this machine"),
        ("observability: {metrics_host: 0.0.0.0}", "metrics_host: has no effect without observability.metrics_port"),
        ("observability: {metrics_port: 70000}", "must be a whole number from 0 to 65535, or null; found 70000"),
    ],
)
def test_a_wrong_type_or_bound_says_what_was_found_and_what_is_allowed(
    scenario_file: Path, extra: str, said: str
) -> None:
    message = refusal(scenario_file, MINIMAL + extra)
    assert message.startswith(f"{scenario_file}:7: {extra.partition(':')[0]}")
    assert said in message


def test_a_missing_block_names_the_key_that_has_no_default(scenario_file: Path) -> None:
    assert refusal(scenario_file, "run: {name: x}\n") == f"{scenario_file}:1: data: missing; it has no default"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: {name: x\n", "not valid YAML"),
        ("run:\n\tname: x\n", ":2: not valid YAML"),
        ("- a\n- b\n", ":1: a scenario is a mapping of blocks"),
        ("", ":1: a scenario is a mapping of blocks (run:, data:, …), found null"),
        ("run: {name: x}\nrun: {name: y}\n", ":2: run: this key was given before"),
        ("run: &r {name: x}\ndata: *r\n", "anchors and aliases are not used in scenarios: write the keys out"),
        ("run: {name: x}\ndata:\n  <<: {path: x}\n", ":3: anchors and aliases are not used"),
        ("run: {name: x}\n---\nrun: {name: y}\n", "a file holds one scenario"),
        (
            "include: base.yaml\nrun: {name: x}\n",
            ":1: include: no such key, and none is needed: a scenario is one file",
        ),
        ("defaults: [base]\nrun: {name: x}\n", ":1: defaults: no such key, and none is needed: a scenario is one file"),
        ("run: {name: !!python/name:os.system x}\n", "YAML tags such as"),
        ("run: {name: !!binary eA==}\n", "YAML tags such as"),
        ("run: {seed: 1e999}\n", "1e999 is too large a number"),
        ("run: {[a]: 1}\n", "a key must be a word"),
        ("a: " + "[" * 40 + "]" * 40, "nested more than 16 deep"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested more than 16 deep"),
        ("{a: " * 5000, "nested more than 16 deep"),
        ("run: {name: \x00}\n", "not valid YAML"),
    ],
)
def test_what_is_no_scenario_at_all_is_refused_in_one_line(scenario_file: Path, text: str, said: str) -> None:
    assert said in refusal(scenario_file, text)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent.yaml")
    assert "is a directory" in refusal(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xe9}\n")
    assert "not UTF-8" in refusal(tmp_path / "latin.yaml")


def test_scalars_follow_the_yaml_1_2_core_schema(scenario_file: Path) -> None:
    scenario_file.write_text(
        MINIMAL + "learner: {learning_rate: 1e-3}\nsampling: {stop: [no, 2026-01-02, '1:30', 0o7, '12']}\n"
    )
    scenario = load_scenario(scenario_file)
    assert scenario.learner.learning_rate == 0.001
    assert scenario.sampling.stop == ("no", "2026-01-02", "1:30", "0o7", "12")


def test_overrides_are_typed_by_yaml_and_beat_the_file(scenario_file: Path) -> None:
    scenario = load_scenario(
        scenario_file,
        [
            "staleness.max_staleness=4",
            "run.name=other",
            "learner.learning_rate=2e-5",
            "sampling.stop=[a, 'b=c']",
            "learner.warm_start.path=lines:10",
            "learner.warm_start.num_steps=30",
            "data.label_key=",
        ],
    )
    assert scenario.staleness.max_staleness == 4
    assert scenario.run.name == "other"
    assert scenario.learner.learning_rate == 2e-5
    assert scenario.sampling.stop == ("a", "b=c")
    assert scenario.learner.warm_start is not None
    assert (scenario.learner.warm_start.path, scenario.learner.warm_start.num_steps) == ("lines:10", 30)
    assert scenario.data.label_key is None


def test_an_override_opens_a_block_that_the_file_left_null(scenario_file: Path) -> None:
    scenario_file.write_text(MINIMAL + "learner:\n  warm_start: null\n")
    warm_start = load_scenario(scenario_file, ["learner.warm_start.path=lines:7"]).learner.warm_start
    assert warm_start is not None
    assert warm_start.path == "lines:7"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("staleness.max_stalenes=4", "staleness.max_stalenes: no such key; did you mean 'max_staleness'?"),
        ("staleness.max_staleness=few", "must be a whole number from 0 to 1024, or null; found 'few'"),
        ("run.seed", "expected KEY=VALUE"),
        ("=4", "expected KEY=VALUE"),
        ("run..seed=4", "expected KEY=VALUE"),
        ("run.name.first=x", "run.name is no block, it is 'example'"),
        ("sampling.stop=[a", "not valid YAML"),
        ("weights.publish_every=9", "weights.publish_every: a publish every 9 batches needs"),
    ],
)
def test_an_error_in_an_override_names_the_override(scenario_file: Path, override: str, said: str) -> None:
    message = refusal(scenario_file, None, override)
    assert message.startswith(f"override '{override}': ")
    assert said in message


def test_an_error_beneath_an_override_still_names_the_file_where_that_was_wrong(scenario_file: Path) -> None:
    text = MINIMAL + "sampling:\n  top_p: 7\n"
    assert refusal(scenario_file, text, "sampling.top_k=3").startswith(f"{scenario_file}:8: sampling.top_p")


def test_paths_start_from_the_folder_of_whoever_wrote_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    file = tmp_path / "example.yaml"
    file.write_text("run: {name: x}\ndata: {path: 'rows.jsonl@[0:9]'}\nmodel: {path: model}\n")
    scenario = load_scenario(file, ["reward.function=mine.py:score", "model.path=~/model"])
    assert scenario.data.path == str(tmp_path / "rows.jsonl@[0:9]")
    assert scenario.reward.function == str(elsewhere / "mine.py:score")
    assert scenario.model.path == str(Path.home() / "model")
    assert load_scenario(file, ["data.path=lines:5"]).data.path == "lines:5"


@pytest.mark.parametrize(
    ("policy", "staleness", "mode"),
    [
        ("sync", 0, UpdateMode.DRAIN),
        ("one_step_off", 1, UpdateMode.DRAIN),
        ("fully_async", 2, UpdateMode.IN_FLIGHT),
    ],
)
def test_a_policy_fills_in_what_the_block_leaves_open(
    scenario_file: Path, policy: str, staleness: int, mode: UpdateMode
) -> None:
    resolved = load_scenario(scenario_file, [f"staleness.policy={policy}"])
    assert (resolved.staleness.max_staleness, resolved.staleness.update_mode) == (staleness, mode)
    assert resolve(resolved) == resolved


def test_what_the_block_says_beats_the_policy_s_default(scenario_file: Path) -> None:
    resolved = load_scenario(scenario_file, ["staleness.max_staleness=8", "staleness.update_mode=interrupt"])
    assert (resolved.staleness.max_staleness, resolved.staleness.update_mode) == (8, UpdateMode.INTERRUPT)


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ((), 1e-3),
        (("model.dtype=bfloat16",), 0.1),
        (("engines.backend=sglang",), 0.1),
        (("engines.more=[{backend: sglang}]",), 0.1),
        (("weights.canary_tolerance=0.01",), 0.01),
    ],
)
def test_the_canary_is_held_to_what_the_type_of_number_allows(
    scenario_file: Path, overrides: tuple[str, ...], share: float
) -> None:
    assert load_scenario(scenario_file, overrides).weights.canary_tolerance == share


COLOCATED = ("engines.placement=colocate", "staleness.policy=sync")


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["staleness.policy=sync", "staleness.max_staleness=1"], "staleness.max_staleness", "means 0, found 1"),
        (["staleness.policy=sync", "staleness.update_mode=in_flight"], "staleness.update_mode", "can have drain"),
        (["staleness.policy=fuly_async"], "staleness.policy", "did you mean 'fully_async'?"),
        (["staleness.policy=mine.py:Eager"], "staleness.max_staleness", "a policy of your own has no default"),
        (["weights.publish_every=4"], "weights.publish_every", "set it to 3 or less"),
        (["staleness.target_outstanding=31"], "staleness.target_outstanding", "set it to 32 or more"),
        (["model.path=x"], "model.path", "exactly one of model.path and model.make"),
        (["model.make=null"], "model", "a model is needed"),
        (["engines.backend=simulated"], "engines.backend", "set both or neither"),
        (["sampling.max_response_tokens=512"], "sampling.max_response_tokens", "leave no room for a prompt"),
        (["data.max_prompt_tokens=512"], "data.max_prompt_tokens", "leave no room for a response"),
        (["filter.min_response_tokens=300"], "filter.min_response_tokens", "256 are the most"),
        (
            ["filter.min_response_tokens=30", "filter.max_response_tokens=20"],
            "filter.min_response_tokens",
            "20 are the most",
        ),
        (["model.max_context=600"], "model.max_context", "room for 512; found 600"),
        (["sampling.samples_per_group=1"], "sampling.samples_per_group", "at least 2 samples per group"),
        (["filter.min_group_size=9"], "filter.min_group_size", "samples_per_group is 8"),
        (["sampling.temperature=0"], "sampling.temperature", "nothing to learn from"),
        (["runtime.heartbeat_timeout_s=1.5"], "runtime.heartbeat_timeout_s", "less than two heartbeats"),
        (["observability.tracing=false", "observability.otlp_endpoint=x"], "observability.otlp_endpoint", "no effect"),
        (["run.name=a/b"], "run.name", "names a folder"),
        (["engines.device=gpu"], "engines.device", "must be auto, cpu, cuda or cuda:N; found 'gpu'"),
        (["data.path='rows.jsonl@[5:5]'"], "data.path", "the slice [5:5] is empty"),
        (["learner.warm_start.path='rows.jsonl@[-1]'"], "learner.warm_start.path", "expected a slice like @[0:1000]"),
        (["reward.function=maths"], "reward.function", "did you mean 'math'?"),
        (["filter.function=keep"], "filter.function", "must be file.py:function"),
        (["engines.placement=colocate"], "engines.placement", "take turns on their devices"),
        (
            ["engines.placement=colocate", "staleness.policy=one_step_off", "staleness.update_mode=in_flight"],
            "engines.placement",
            "one batch ahead",
        ),
        ([*COLOCATED, "engines.device=cpu", "learner.device=cuda"], "engines.placement", "so they share nothing"),
        (
            [
                *COLOCATED,
                "engines.backend=sglang",
                "engines.device=cuda",
                "learner.device=cuda",
                "weights.transport=distributed",
            ],
            "weights.transport",
            "takes each GPU once",
        ),
        (
            [*COLOCATED, "engines.backend=sglang", "engines.addresses=[http://127.0.0.1:30000]"],
            "engines.placement",
            "remove engines.addresses",
        ),
        (
            [*COLOCATED, "engines.backend=sglang", "engines.sglang.enable_memory_saver=false"],
            "engines.sglang.enable_memory_saver",
            "has to give its memory up",
        ),
        (["engines.backend=sglang", "engines.sglang.tp_size=0"], "engines.sglang", "tp_size: must be a whole number"),
    ],
)
def test_blocks_that_do_not_fit_together_are_refused_with_the_mending(
    scenario_file: Path, overrides: list[str], key: str, said: str
) -> None:
    message = refusal(scenario_file, None, *overrides)
    assert f": {key}: " in message
    assert said in message


def test_a_simulated_scenario_needs_no_model(scenario_file: Path) -> None:
    overrides = ["model.make=null", "engines.backend=simulated", "learner.backend=simulated"]
    assert load_scenario(scenario_file, overrides).model.make is None


def test_a_policy_of_one_s_own_is_taken_when_the_block_says_everything(scenario_file: Path) -> None:
    block = ["staleness.policy=mine.py:Eager", "staleness.max_staleness=3", "staleness.update_mode=drain"]
    staleness = load_scenario(scenario_file, block).staleness
    assert staleness.policy.endswith("/mine.py:Eager")


def test_what_an_engine_cannot_do_is_refused_with_what_it_can(scenario_file: Path) -> None:
    scenario = load_scenario(scenario_file)
    assert not list(lacking(scenario, ("engines",), "torch", frozenset(Capability)))
    found = dict(lacking(scenario, ("engines",), "torch", frozenset({Capability.INTERRUPT, Capability.HOLDS_WEIGHTS})))
    assert found["staleness", "update_mode"] == "torch engines cannot do in_flight; they can do drain, interrupt"
    assert "cannot return log-probs" in found["weights", "canary"]
    draining = load_scenario(scenario_file, ["staleness.update_mode=drain", "weights.canary=false"])
    seeded = load_scenario(scenario_file, ["engines.seeded_sampling=true"])
    broken = dict(lacking(seeded, ("engines",), "torch", frozenset(Capability) - {Capability.SEEDED_SAMPLING}))
    assert broken == {
        ("engines", "backend"): "engines.seeded_sampling is true, and torch engines ignore the seed of a sample"
    }
    assert not list(lacking(draining, ("engines",), "torch", frozenset()))


def test_scenarios_made_in_python_meet_the_same_rules() -> None:
    data = {"run": {"name": "x"}, "data": {"path": "lines:9"}, "model": {"make": "xs"}, "staleness": {"policy": "no"}}
    with pytest.raises(UserFault, match=r"^staleness\.policy: no policy is called 'no'"):
        resolve(msgspec.convert(data, Scenario))
    scenario = resolve(msgspec.convert(data | {"staleness": {}, "weights": {"publish_every": 9}}, Scenario))
    broken = broken_rule(scenario)
    assert broken is not None
    assert broken[0] == ("weights", "publish_every")


def test_reading_a_scenario_imports_nothing_heavy() -> None:
    code = (
        "import sys\nimport penstock.runtime.scenario, penstock.runtime.preflight.machine, penstock.runtime.cli\n"
        "heavy = {'torch', 'ray', 'transformers', 'zmq', 'aiohttp', 'jinja2', 'pyarrow'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_engines_of_several_kinds_are_numbered_through(scenario_file: Path) -> None:
    more = '[{"backend": "sglang", "count": 2, "slots": 8, "sglang": {"tp_size": 2}}]'
    options = load_scenario(scenario_file, ["engines.count=3", f"engines.more={more}"]).engines
    assert (num_engines(options), num_slots(options)) == (5, 3 * 64 + 2 * 8)
    own = options_of(options, 3)
    assert (own.backend, own.slots, own.sglang, own.more) == ("sglang", 8, {"tp_size": 2}, ())
    assert group_of(options, 4) == (options.more[0], 1)


@pytest.mark.parametrize(
    ("override", "key", "text"),
    [
        ("engines.sglang={tp_size: 2}", "engines.sglang", "has no effect with torch engines"),
        (
            'engines.more=[{"backend": "sglang", "router": "http://a:1"}]',
            "engines.more[0].router",
            "are needed as well",
        ),
        (
            'engines.more=[{"backend": "sglang", "addresses": ["http://a:1"], "count": 2}]',
            "engines.more[0].count",
            "set it to 1",
        ),
        ('engines.more=[{"backend": "simulated"}]', "engines.backend", "set both or neither"),
    ],
)
def test_kinds_of_engines_that_do_not_fit_are_refused(scenario_file: Path, override: str, key: str, text: str) -> None:
    with pytest.raises(UserFault) as refused:
        load_scenario(scenario_file, [override])
    assert key in str(refused.value)
    assert text in str(refused.value)
