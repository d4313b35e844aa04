"""Keys that name files and functions: their types say so, and whoever has to know of them reads the types."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock.backends.rewards.functions import NAMES
from penstock.messages.base import Options
from penstock.messages.errors import UserFault

# msgspec reads the annotation:
from penstock.messages.option_keys import Names, RowsKey, TrainingHookKey
from penstock.runtime.contracts.kinds import KINDS
from penstock.runtime.preflight import functions
from penstock.runtime.preflight.functions import check_functions_load, check_user_code
from penstock.runtime.scenario import Scenario, load_scenario
from penstock.runtime.scenario.function_rules import function_rules
from penstock.runtime.scenario.keys import allowed, block_paths, field_docs, shape_of
from penstock.runtime.scenario.named import Named, absolute, named_values, names_of, with_values
from penstock.runtime.scenario.schema import scenario_schema

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.preflight.function_trial import NamedFunction
    from penstock.runtime.scenario.source import KeyPath

NO_PATHS = {
    ("run", "folder"),  # where the command is given
    ("engines", "notice_file"),  # on the machines of engines
    ("evaluation", "defaults", "max_prompts"),  # a number, which speaks of paths
    ("evaluation", "datasets[]", "max_prompts"),
}
SAYS_SO = re.compile(
    r"file\.py|\bfunction of yours\b|^[Aa] (file|folder|copy)\b|^Folder\b|^Rows with\b|data\.path, with"
)


def marked() -> list[tuple[KeyPath, Names]]:
    return [
        ((*path, field.encode_name), names)
        for path, struct in block_paths()
        for field in shape_of(struct).fields
        if (names := names_of(field.type))
    ]


def ids(cases: list[tuple[KeyPath, Names]]) -> list[str]:
    return [".".join(map(str, path)) for path, _ in cases]


FUNCTIONS = [(path, names) for path, names in marked() if names.is_function]


def scenario_with(path: KeyPath, value: str) -> tuple[Scenario, str]:
    """A scenario with this value at a key of :func:`block_paths`, and the key as a person writes it."""
    data: dict[str, Any] = {"run": {"name": "a"}, "data": {"path": "lines:9"}}
    at = data
    for part in map(str, path[:-1]):
        name = part.removesuffix("[]")
        inner = at.setdefault(name, {})
        if part.endswith("[]"):
            at[name] = [inner]
        at = inner
        needed = {"functions": ("name", "function", "generate"), "components": ("name", "function")}
        needed |= {"datasets": ("name", "path"), "sources": ("path",), "warm_start": ("path",)}
        for each in needed.get(name, ()):
            if not (path[0] == "episode" and each == "function") and not (path[0] != "episode" and each == "generate"):
                at[each] = "lines:4" if each == "path" else "a"
    last = str(path[-1])
    at[last] = [value] if path == ("episode", "tools") else value
    key = ".".join(map(str, path)).replace("[]", "[0]") + ("[0]" if path == ("episode", "tools") else "")
    return msgspec.convert(data, Scenario), key.replace("learner.objective.name", "learner.objective")


def test_every_key_that_says_that_it_names_a_file_or_a_function_is_typed_so() -> None:
    known = {path for path, _ in marked()}
    said = {
        (*path, field.encode_name)
        for path, struct in block_paths()
        for field in shape_of(struct).fields
        if "a string" in allowed(field.type) or names_of(field.type)
        if SAYS_SO.search(field_docs(struct)[field.name]) or re.search(r"(^|_)(path|function)$", field.name)
    }
    assert said - NO_PATHS <= known, "type them with a key of penstock.messages.option_keys"
    assert len(said & known) > 30


@pytest.mark.parametrize(("path", "names"), marked(), ids=ids(marked()))
def test_whatever_a_key_names_is_found_where_it_stands(tmp_path: Path, path: KeyPath, names: Names) -> None:
    value = "here.py:mine" if names.is_function else "here"
    scenario, key = scenario_with(path, value)
    found = [each for each in named_values(scenario) if each.value == value]
    assert [(each.key, each.names) for each in found] == [(key, names)]
    changed = with_values(scenario, lambda each: absolute(each.names, each.value, tmp_path))
    assert f"{tmp_path}/{value}" in [each.value for each in named_values(changed)]


@pytest.mark.parametrize(("path", "names"), FUNCTIONS, ids=ids(FUNCTIONS))
def test_every_function_is_looked_for_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: KeyPath, names: Names
) -> None:
    scenario, key = scenario_with(path, f"{tmp_path}/nowhere.py:mine")
    with pytest.raises(UserFault, match=rf"^{re.escape(key)}: .*there is no file"):
        check_user_code(scenario)
    loaded: list[NamedFunction] = []
    monkeypatch.setattr(functions, "check_loads", loaded.extend)
    check_functions_load(scenario)
    has_own_check = names in (Names.EPISODE, Names.EPISODE_PART)
    is_asked = "defaults" not in path  # no dataset takes them
    assert (key in {each.key for each in loaded}) == (not has_own_check and is_asked)


@pytest.mark.parametrize(("path", "names"), FUNCTIONS, ids=ids(FUNCTIONS))
def test_a_word_is_refused_where_it_names_no_function(path: KeyPath, names: Names) -> None:
    scenario, _ = scenario_with(path, "keep")
    (first, *_) = [*(text for _, text in function_rules(scenario)), ""]
    assert ("must be file.py:function; found 'keep'" in first) == names.is_only_function
    assert ("no reward function is called 'keep'" in first) == (names is Names.REWARD)


def test_the_schema_tells_an_editor_what_a_function_looks_like() -> None:
    definitions = scenario_schema()["$defs"]
    for path, struct in block_paths():
        for field in shape_of(struct).fields:
            if names := names_of(field.type):
                text = json.dumps(definitions[struct.__name__]["properties"][field.encode_name])
                assert (r"\\.py:" in text.partition('"description"')[0]) == names.is_only_function, (path, field.name)


def test_every_kind_of_function_has_a_contract_or_belongs_to_an_episode() -> None:
    contracts = {kind.key for kind in KINDS.values()}
    kinds = {names for path, names in FUNCTIONS if ".".join(map(str, path)) in contracts}
    assert kinds | {Names.EPISODE} == {names for _, names in FUNCTIONS}
    hooks = {".".join(map(str, path)) for path, names in FUNCTIONS if names is Names.TRAINING_HOOK}
    assert hooks <= contracts
    judged = {Names.REWARD, Names.FILTER, Names.SAMPLE_FILTER, Names.SAMPLES_HOOK, Names.PRIORITY}
    assert {each.value for each in judged} <= NAMES.keys()


class Inner(Options, frozen=True, kw_only=True):
    rows: tuple[RowsKey, ...] = ()


class Block(Options, frozen=True, kw_only=True):
    hook: TrainingHookKey | None = None
    inner: tuple[Inner, ...] = ()
    word: str = "a.py:b"


def test_a_new_key_is_found_by_its_type_alone() -> None:
    block = Block(hook="a.py:b", inner=(Inner(), Inner(rows=("x", "y"))))
    assert list(named_values(block)) == [
        Named(("hook",), "a.py:b", Names.TRAINING_HOOK),
        Named(("inner", 1, "rows", 0), "x", Names.ROWS),
        Named(("inner", 1, "rows", 1), "y", Names.ROWS),
    ]


def test_tools_and_components_of_an_evaluation_start_from_the_scenarios_folder(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        """
        run: {name: a}
        data: {path: 'lines:9', chat_template: true}
        model: {make: xs}
        episode: {kind: function, generate: multi_turn, tools: [calculator, mine.py:Tool]}
        evaluation:
          datasets:
            - name: b
              path: 'lines:4'
              reward: {components: [{name: c, function: mine.py:score}]}
        """
    )
    scenario = load_scenario(tmp_path / "a.yaml")
    assert scenario.episode.tools == ("calculator", f"{tmp_path}/mine.py:Tool")
    reward = scenario.evaluation.datasets[0].reward
    assert reward is not None
    assert reward.components[0].function == f"{tmp_path}/mine.py:score"
