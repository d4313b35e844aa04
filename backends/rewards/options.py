"""The ``reward:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.backends.rewards.service_options import JudgeOptions, ModelScoreOptions, RemoteOptions
from penstock.messages.base import Options
from penstock.messages.option_keys import RewardKey

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class LengthPenaltyOptions(Options, frozen=True, kw_only=True):
    """The reward ``length_penalty``: 0 for a short response, falling to -penalty at the length limit."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """From this length on it is -penalty; null: sampling.max_response_tokens."""
    cache_tokens: Annotated[int, Meta(ge=0)] | None = None
    """Over the last so many tokens before max_tokens it falls in a straight line; null: a fifth of max_tokens."""
    penalty: Annotated[float, Meta(gt=0)] = 1.0
    """What the longest responses lose."""


class CodeOptions(Options, frozen=True, kw_only=True):
    """The reward ``code``: a Python program of the model's is tried on the cases of its row, in a sandbox."""

    partial: bool = False
    """The reward is the share of the cases that the program passes. false: 1 if it passes all of them, else 0."""
    max_cases: Annotated[int, Meta(ge=1)] | None = None
    """Only the first so many of a row's cases are tried; null: all."""
    cpu_s: Annotated[int, Meta(ge=1)] = 5
    """CPU time of one case."""
    wall_s: Annotated[float, Meta(ge=0.1)] = 15.0
    """Time of one case, which on a busy machine is more than its CPU time."""
    total_s: Annotated[float, Meta(gt=0)] = 120.0
    """Time of all cases of one response; those that it has not come to by then are not passed."""
    memory_bytes: Annotated[int, Meta(ge=64 << 20)] = 512 << 20
    """Address space of the program."""
    packages: bool = False
    """The program can import what is installed beside Penstock."""


class FunctionOptions(Options, frozen=True, kw_only=True):
    """One reward function."""

    function: RewardKey
    """As reward.function."""
    key: str | None = None
    """As reward.key."""
    per_group: bool | None = None
    """As reward.per_group."""
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """null: reward.timeout_s."""
    num_workers: Annotated[int, Meta(ge=1)] | None = None
    """null: reward.num_workers."""
    length_penalty: LengthPenaltyOptions | None = None
    """null: reward.length_penalty."""
    remote: RemoteOptions | None = None
    """null: reward.remote."""
    judge: JudgeOptions | None = None
    """null: reward.judge."""
    reward_model: ModelScoreOptions | None = None
    """null: reward.reward_model."""
    code: CodeOptions | None = None
    """null: reward.code."""


class ComponentOptions(FunctionOptions, frozen=True, kw_only=True):
    """One term of the reward."""

    name: Name
    """Under which its value is reported."""
    weight: float = 1.0
    """What its value is multiplied by; below 0 it takes off."""


class NamedFunctionOptions(FunctionOptions, frozen=True, kw_only=True):
    """A function that rows can name."""

    name: Name
    """As it stands in the rows."""


class RewardAlarmOptions(Options, frozen=True, kw_only=True):
    """When something seems wrong with a reward function. An alarm is a warning in the terminal and the report."""

    constant_groups: Annotated[int, Meta(ge=0)] = 50
    """So many groups after one another within which all rewards are equal (groups of one: with the same reward in all
    of them). 0: no such alarm."""
    failed_share: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """The share of samples without a reward, among the last failed_window, from which on there is an alarm."""
    failed_window: Annotated[int, Meta(ge=0)] = 200
    """0: no such alarm."""
    stop_after: Annotated[int, Meta(ge=0)] = 16
    """When so many samples have failed for one kind of reason, more than for all others, or four times as many for any,
    and not one of the run has been scored, the run stops with the most frequent one. Samples whose generation fails
    count too. Once as many calls of reward functions have failed, none is tried again until one gives a reward. 0: none
    of this."""


class SimulatedRewardOptions(Options, frozen=True, kw_only=True):
    """The model of rewards beside simulated engines: 0 or 1, after a log-normal time."""

    latency_s: Annotated[float, Meta(ge=0)] = 0.01
    """Half of the rewards take longer."""
    latency_sigma: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """Of the logarithm of that time."""
    success_rate: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of samples with the reward 1."""
    constant_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of groups whose samples all get the same reward."""
    num_workers: Annotated[int, Meta(ge=1)] | None = None
    """Rewards that are worked out side by side; further ones wait. null: all."""


class RewardOptions(Options, frozen=True, kw_only=True):
    """How responses are scored."""

    function: RewardKey = "math"
    """``math``, ``deepscaler``, ``dapo``, ``gpqa``, ``f1``, ``ifbench``, ``reasoning_gym``, ``length_penalty``,
    ``remote``, ``judge``, ``reward_model``, ``code``, ``lines``, ``random``, or ``file.py:function``. ``boxed_math``,
    ``boxed_gpqa``, ``boxed_f1``, ``boxed_ifbench`` and ``boxed_reasoning_gym`` see the last box of the response alone.
    The page docs/rewards.md has the rules of each."""
    key: str | None = None
    """Of a function that returns a dictionary: which entry is the reward. null: ``reward`` or ``score``."""
    per_group: bool | None = None
    """The function is called once for all samples of a group, when they have all ended. null: if it asks for
    ``responses``."""
    timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """Of one call of a function; one that has not answered by then has failed, and its process is ended. ``code``,
    ``remote``, ``judge`` and ``reward_model`` have deadlines of their own."""
    num_retries: Annotated[int, Meta(ge=0)] = 1
    """How often a call that failed is tried again before the sample counts as failed."""
    num_workers: Annotated[int, Meta(ge=1)] = 1
    """Processes that run reward functions."""
    simulated: SimulatedRewardOptions = SimulatedRewardOptions()
    """Rewards under `penstock simulate`."""
    components: tuple[ComponentOptions, ...] = ()
    """The reward is the sum of these, each times its weight, instead of one function. Each is reported under its name.
    ``function: chosen`` stands for what function_key chooses."""
    function_key: str | None = None
    """A column (of data.metadata_keys), or a field of a source's metadata, that names the function of each row among
    ``functions``; rows without it take ``function``."""
    functions: tuple[NamedFunctionOptions, ...] = ()
    """The functions that rows can name."""
    length_penalty: LengthPenaltyOptions = LengthPenaltyOptions()
    """Of the function `length_penalty`."""
    remote: RemoteOptions = RemoteOptions()
    """Of the function `remote`."""
    judge: JudgeOptions = JudgeOptions()
    """Of the function `judge`."""
    reward_model: ModelScoreOptions = ModelScoreOptions()
    """Of the function `reward_model`."""
    code: CodeOptions = CodeOptions()
    """Of the function `code`."""
    alarms: RewardAlarmOptions = RewardAlarmOptions()
    """When a reward that seems wrong is reported, and when it stops the run."""
