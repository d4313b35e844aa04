"""Policies, pacing, grants and accounts: the pure parts of the Buffer."""

from __future__ import annotations

import actor_driver as drive
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.buffer.accounts import Accounts, SettledGroups
from penstock.actors.buffer.books import recorded
from penstock.actors.buffer.grants import Grants
from penstock.actors.buffer.pacing import AutoTarget, PacingSettings, bound, num_grantable
from penstock.actors.buffer.policies import BUILTIN, BufferState, RankedGroup, builtin_policy, ranked, refusal
from penstock.messages.errors import UserFault
from penstock.messages.flow import GrantSpan
from penstock.messages.operator import PolicyChanged
from penstock.messages.samples import SampleEnd, SampleKey, TerminalState
from penstock.messages.training import OnStale, UpdateMode


def pacing(
    *,
    groups_per_batch: int = 4,
    num_steps: int = 100,
    target: int | None = None,
    capacity: int = 100,
    max_concurrent: int | None = None,
    over_sampling: float = 1.0,
) -> PacingSettings:
    return PacingSettings(
        num_steps=num_steps,
        groups_per_batch=groups_per_batch,
        target_outstanding=target,
        engine_capacity_groups=capacity,
        max_concurrent=max_concurrent,
        over_sampling=over_sampling,
    )


def ready(*deadlines: int) -> list[RankedGroup]:
    return [RankedGroup(group_id=i, deadline_version=d, num_tokens=1) for i, d in enumerate(deadlines)]


# --- policies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sync", "one_step_off"])
def test_sync_and_one_step_off_prefer_issue_order(name: str) -> None:
    eta = BUILTIN[name].max_staleness
    policy = builtin_policy(name, max_staleness=eta, update_mode=UpdateMode.DRAIN, on_stale=OnStale.WAIT)
    assert [g.group_id for g in ranked(policy, ready(5, 3, 4))] == [0, 1, 2]


def test_fully_async_prefers_the_earliest_deadline_then_issue_order() -> None:
    policy = builtin_policy("fully_async", max_staleness=4, update_mode=UpdateMode.IN_FLIGHT, on_stale=OnStale.WAIT)
    assert [g.group_id for g in ranked(policy, ready(5, 3, 4, 3))] == [1, 3, 2, 0]


@pytest.mark.parametrize(("name", "eta"), [("sync", 1), ("one_step_off", 0), ("one_step_off", 2)])
def test_a_policy_that_is_its_staleness_cannot_be_told_another(name: str, eta: int) -> None:
    with pytest.raises(UserFault, match=f"{name} has a max_staleness of .*, got {eta}"):
        builtin_policy(name, max_staleness=eta, update_mode=UpdateMode.DRAIN, on_stale=OnStale.WAIT)


def test_an_unknown_policy_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(UserFault, match="'sink'; there are sync, one_step_off, fully_async"):
        builtin_policy("sink", max_staleness=0, update_mode=UpdateMode.DRAIN, on_stale=OnStale.WAIT)


def test_the_target_of_the_built_in_policies_is_what_the_scenario_or_auto_says() -> None:
    state = BufferState(
        version=3, announced_version=2, groups_per_batch=4, outstanding=7, ready=2, target_outstanding=11
    )
    for name, defaults in BUILTIN.items():
        policy = builtin_policy(
            name,
            max_staleness=defaults.max_staleness,
            update_mode=defaults.update_mode,
            on_stale=OnStale.WAIT,
        )
        assert policy.target(state) == 11


@pytest.mark.parametrize(
    ("policy", "eta", "mode", "publish_every", "reason"),
    [
        ("fully_async", 3, UpdateMode.IN_FLIGHT, 4, ""),
        ("sync", 0, UpdateMode.DRAIN, 1, ""),
        ("sink", 0, UpdateMode.DRAIN, 1, "no policy is called 'sink'"),
        ("sync", 2, UpdateMode.DRAIN, 1, "sync has a max_staleness of 0, got 2"),
        ("sync", 0, UpdateMode.DRAIN, 2, "publish_every is 2, that needs a max_staleness of at least 1"),
        ("fully_async", 3, UpdateMode.IN_FLIGHT, 5, "publish_every is 5, that needs a max_staleness of at least 4"),
        ("sync", 0, UpdateMode.IN_FLIGHT, 1, "sync cannot update engines by in_flight, only by drain"),
    ],
)
def test_a_running_job_refuses_a_policy_that_it_could_not_have_started_with(
    policy: str, eta: int, mode: UpdateMode, publish_every: int, reason: str
) -> None:
    event = PolicyChanged(policy=policy, max_staleness=eta, update_mode=mode)
    assert refusal(event, publish_every=publish_every) == reason


# --- pacing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", range(9))
def test_the_bound_is_announced_plus_eta_plus_one_minus_trained_batches(eta: int) -> None:
    def at(version: int) -> int:
        return bound(announced=5, taken_at=version, num_leased=0, max_staleness=eta, settings=pacing())

    assert at(5) == (eta + 1) * 4
    assert at(6) == eta * 4
    assert at(6 + eta) == at(9 + eta) == 0


@pytest.mark.parametrize("eta", range(9))
def test_the_batch_that_is_out_counts_as_outstanding(eta: int) -> None:
    """(s + η + 1 − v)·B, of which B are in the batch taken at v = 5."""
    bounded = bound(announced=5, taken_at=6, num_leased=4, max_staleness=eta, settings=pacing())
    assert bounded == (eta + 1) * 4


def test_over_sampling_multiplies_what_is_in_no_batch_yet() -> None:
    settings = pacing(groups_per_batch=3, over_sampling=1.5)
    assert bound(announced=0, taken_at=0, num_leased=0, max_staleness=1, settings=settings) == 9
    assert bound(announced=0, taken_at=1, num_leased=3, max_staleness=1, settings=settings) == 3 + 5


def grantable(
    settings: PacingSettings,
    *,
    limit: int = 1000,
    outstanding: int = 0,
    in_generation: int = 0,
    trained: int = 0,
    num_left: int | None = None,
) -> int:
    return num_grantable(
        limit=limit,
        outstanding=outstanding,
        in_generation=in_generation,
        trained=trained,
        num_left=num_left,
        settings=settings,
    )


def test_each_limit_on_grants_binds_by_itself() -> None:
    assert grantable(pacing(), limit=10, outstanding=3) == 7
    assert grantable(pacing(max_concurrent=5), outstanding=9, in_generation=3) == 2
    assert grantable(pacing(), num_left=6) == 6
    assert grantable(pacing(num_steps=10), trained=36, outstanding=1) == 3
    assert grantable(pacing(num_steps=10, over_sampling=1.5), trained=36, outstanding=1) == 5
    assert grantable(pacing(), limit=3, outstanding=8) == 0


def test_the_auto_target_starts_at_two_batches_and_rises_by_half_a_batch_when_the_learner_waited() -> None:
    target = AutoTarget.of(pacing(groups_per_batch=4, capacity=10))
    assert target.value == 8
    target.learner_waited(bound=100)
    assert target.value == 10


def test_the_auto_target_rises_neither_above_the_bound_nor_above_what_the_engines_can_use() -> None:
    target = AutoTarget.of(pacing(groups_per_batch=4, capacity=3))
    target.learner_waited(bound=8)
    assert target.value == 8
    for _ in range(9):
        target.learner_waited(bound=100)
    assert target.value == 3 + 2 * 4


def test_the_auto_target_falls_while_whole_batches_lie_ready_and_never_below_two_batches() -> None:
    target = AutoTarget.of(pacing(groups_per_batch=4))
    for _ in range(3):
        target.learner_waited(bound=100)
    target.batch_taken(num_ready=3)
    assert target.value == 14
    target.batch_taken(num_ready=4)
    assert target.value == 13
    for _ in range(20):
        target.batch_taken(num_ready=9)
    assert target.value == 8


# --- grants -------------------------------------------------------------------------------------------------------


def granted(grants: Grants, number: int, *, min_version: int, deadline_version: int) -> list[GrantSpan]:
    """What is granted next, taken."""
    spans = grants.next_spans(number, min_version=min_version, deadline_version=deadline_version)
    for span in spans:
        grants.take(span)
    return spans


def requeued(grants: Grants, ordinal: int) -> bool:
    """Whether this prompt was granted anew."""
    may = grants.may_requeue(ordinal)
    if may:
        grants.requeue(ordinal)
    return may


def test_grants_alike_are_one_span() -> None:
    grants = Grants(num_prompts=None, max_requeues=1)
    assert granted(grants, 3, min_version=0, deadline_version=2) == [GrantSpan(0, 3, 0, 0, 2)]
    assert granted(grants, 2, min_version=0, deadline_version=2) == [GrantSpan(3, 2, 3, 0, 2)]
    assert granted(grants, 1, min_version=1, deadline_version=3) == [GrantSpan(5, 1, 5, 1, 3)]
    assert grants.snapshot(0) == (GrantSpan(0, 5, 0, 0, 2), GrantSpan(5, 1, 5, 1, 3))


def test_the_snapshot_keeps_every_span_that_reaches_above_the_floor() -> None:
    grants = Grants(num_prompts=None, max_requeues=1)
    for version in range(4):
        granted(grants, 2, min_version=version, deadline_version=version)
    assert [span.first_group for span in grants.snapshot(3)] == [2, 4, 6]
    assert [span.first_group for span in grants.snapshot(8)] == []


def test_a_requeued_prompt_is_granted_anew_under_a_new_group_before_any_other() -> None:
    grants = Grants(num_prompts=10, max_requeues=1)
    granted(grants, 3, min_version=0, deadline_version=0)
    assert requeued(grants, 1)
    assert grants.num_left == 8
    assert granted(grants, 2, min_version=1, deadline_version=1) == [GrantSpan(3, 1, 1, 1, 1), GrantSpan(4, 1, 3, 1, 1)]
    assert grants.num_left == 6


def test_a_prompt_is_requeued_at_most_so_many_times() -> None:
    grants = Grants(num_prompts=None, max_requeues=2)
    assert [requeued(grants, 7) for _ in range(3)] == [True, True, False]
    assert Grants(num_prompts=None, max_requeues=0).may_requeue(7) is False


def test_the_requeues_of_a_prompt_are_forgotten_when_it_has_ended() -> None:
    grants = Grants(num_prompts=None, max_requeues=1)
    assert requeued(grants, 3)
    assert requeued(grants, 4)
    assert grants.num_requeued == 2
    grants.ended(3)
    assert requeued(grants, 4) is False
    grants.ended(4)
    assert grants.num_requeued == 0


# --- accounts -----------------------------------------------------------------------------------------------------


@given(st.permutations(range(12)))
def test_the_floor_is_the_first_group_that_is_not_settled_whatever_the_order(order: list[int]) -> None:
    settled = SettledGroups()
    done: set[int] = set()
    for sequence, group_id in enumerate(order, 1):
        settled.add(group_id)
        settled.validate()
        done.add(group_id)
        state = settled.snapshot()
        floor = next(i for i in range(13) if i not in done)
        assert (state.sequence, state.floor, state.above) == (
            sequence,
            floor,
            tuple(sorted(d for d in done if d > floor)),
        )


def end(index: int, state: TerminalState = TerminalState.FAILED, num_tokens: int = 0) -> SampleEnd:
    return SampleEnd(key=SampleKey(0, index), state=state, cause="why", num_tokens=num_tokens)


def test_every_sample_of_a_granted_group_is_in_the_system_until_the_group_ends() -> None:
    accounts = Accounts(samples_per_group=2)
    accounts.granted(3)
    assert (accounts.balance().issued, accounts.balance().in_system) == (6, 6)
    accounts.admitted(recorded(drive.group(0), 1))
    assert (accounts.balance().generated_tokens, accounts.balance().in_system_tokens) == (8, 8)
    accounts.trained(recorded(drive.group(0), 1))
    balance = accounts.balance()
    assert balance.is_balanced
    assert (balance.issued, balance.in_system) == (6, 4)
    assert [(c.state, c.num_samples, c.num_tokens) for c in balance.ended] == [("trained", 2, 8)]


def test_replacements_of_failed_samples_are_issued_samples_too() -> None:
    accounts = Accounts(samples_per_group=2)
    accounts.granted(1)
    samples = drive.sample(0, 1, reward=1.0), drive.sample(0, 2, reward=1.0)
    group = msgspec.structs.replace(drive.group(0), samples=samples, ended=(end(0, num_tokens=3),))
    accounts.admitted(recorded(group, 1))
    accounts.trained(recorded(group, 1))
    balance = accounts.balance()
    assert balance.is_balanced
    assert (balance.issued, balance.in_system) == (3, 0)


def test_a_sample_that_got_lost_shows_as_an_imbalance() -> None:
    accounts = Accounts(samples_per_group=2)
    accounts.granted(1)
    accounts.closed([end(0)])
    assert not accounts.balance().is_balanced


def test_a_token_that_got_lost_or_was_counted_twice_shows_as_an_imbalance() -> None:
    for ends in ([end(0, num_tokens=4), end(1, num_tokens=3)], [end(0, num_tokens=4), end(1, num_tokens=5)]):
        accounts = Accounts(samples_per_group=2)
        accounts.granted(1)
        accounts.admitted(recorded(drive.group(0), 1))
        accounts.closed(ends, recorded(drive.group(0), 1))
        balance = accounts.balance()
        assert balance.issued == balance.in_system + sum(count.num_samples for count in balance.ended)
        assert not balance.is_balanced


def test_tokens_that_the_model_did_not_make_are_not_generated() -> None:
    accounts = Accounts(samples_per_group=2)
    accounts.granted(1)
    ends = [msgspec.structs.replace(end(index, num_tokens=5), num_given_tokens=2) for index in range(2)]
    accounts.closed(ends)
    balance = accounts.balance()
    assert balance.is_balanced
    assert (balance.generated_tokens, balance.ended[0].num_tokens, balance.ended[0].num_made_tokens) == (6, 10, 6)
